"""Quality in time beside nanoGPT's laptop setting, simple yardsticks, and what emptying memory does. Linux only.

    python -m tools.bench.quality run --data FILE --seeds 1 2 3 --torch_python ENV/bin/python     # 10 minutes a seed
    python -m tools.bench.quality pace --data FILE --torch_python ENV/bin/python    # steps that fit the clock's time
    python -m tools.bench.quality lr --data FILE --torch_python ENV/bin/python --models gpt_muon
    python -m tools.bench.quality yardsticks      # n-grams and xz on the built-in corpus, 2 minutes
    python -m tools.bench.quality mem_reset --seeds 1 2 3      # two default runs of train.py a seed
    python -m tools.bench.quality --draw          # results/quality.png, and the table of results/quality.jsonl

FILE is tinyshakespeare: `python -m data.prepare shakespeare` leaves it in corpora/shakespeare/input.txt. ENV is an
environment with torch, as for peers.py. Training by characters on the first 90%, losses of the whole last 10%:
cold: windows of 64 that do not overlap, nothing carried. overlap: windows of 64, 32 of them seen before, so that all
but the first have a context of 32 or more. carried: as train.py reads it, with memory, in 8 rows (ours alone).
"""

import contextlib
import json
import lzma
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tools.bench import harness
from tools.bench.peers import INSTALL, import_torch

WINDOW = 64  # nanoGPT's context
SIZES = dict(n_layer=3, n_head=4, d_model=128, d_head=32, d_inner=512, mem_len=32, layer_rows=32)
RUN = dict(tgt_len=32, batch=32, lr=0.012, momentum=0.8, warmup=20)
GPT = dict(n_layer=4, n_head=4, d_model=128, context=WINDOW, batch=12, warmup=100, optimizer="adamw", lr=1e-3,
           lr_min=0.1, betas=(0.9, 0.99), weight_decay=0.1, clip=1.0)  # nanoGPT's laptop setting # fmt: skip
# `steps`: no more than there is time for while the clock makes its 2,000, see `pace`. Ours: fields of txl.Config, under
# "run" those of train.TrainConfig. Without memory a segment is as long as a window, with as many tokens in a step.
MODELS = {
    "gpt": {"steps": 2000, **GPT},  # the clock
    "gpt_muon": {"steps": 1400, **GPT, "optimizer": "muon", "lr": 8e-3},
    "ours": {"steps": 900, **SIZES, "run": RUN},
    "ours_fifth": {"steps": 250, **SIZES, "n_layer": 2, "run": {**RUN, "lr": 0.02}},  # at most a fifth of that time
    "ours_no_memory": {"steps": 900, **SIZES, "mem_len": 0, "run": {**RUN, "tgt_len": 64, "batch": 16}},
    "ours_adamw": {"steps": 1000, **SIZES, "run": {**RUN, "optimizer": "adamw", "lr": 4e-3}},
}
CLOCK = "gpt"
LABELS = {
    "gpt": "nanoGPT's laptop setting, AdamW",
    "gpt_muon": "nanoGPT's model, Muon",
    "ours": "txl",
    "ours_fifth": "txl, 2 layers, a short run",
    "ours_no_memory": "txl, no memory",
    "ours_adamw": "txl, AdamW",
}
BLOCKS, POINTS = 10, 5  # turns of each model in `run`, and how many of them end in an evaluation
ORDERS = (3, 4, 5, 6, 7, 8)  # of the n-grams: bytes, the predicted one included
TINY = dict(n_layer=1, n_head=2, d_model=16, d_head=8, d_inner=16)


def shape_of(name, args, seed, **changes):
    """What the worker of a model is told, as JSON."""
    model = {**MODELS[name], **changes}
    if args.tiny:
        model |= {key: value for key, value in TINY.items() if key in model} | {"steps": 20, "characters": 20_000}
    return {**model, "seed": seed}


# the text, and the windows that it is read in


def read_text(path, characters=None):
    """ids of the training and the valid part, split 90/10, and how many symbols there are."""
    text = Path(path).read_text(encoding="utf-8")[:characters]
    symbols, ids = np.unique(np.frombuffer(text.encode("utf-32-le"), np.uint32), return_inverse=True)
    cut = int(0.9 * len(ids))
    return ids[:cut], ids[cut:], len(symbols)


def windows(n, stride, rows=128):
    """Yields indices [rows, WINDOW] of n targets in windows that start `stride` apart, and which of them count.

    Each target counts once: in the first window that has it. The last windows are filled up with what does not count.
    """
    starts = np.arange(0, max(n - WINDOW + stride, 1), stride)
    starts = np.concatenate([starts, np.full(-len(starts) % rows, n)])
    column = np.arange(WINDOW)
    for i in range(0, len(starts), rows):
        index = starts[i : i + rows, None] + column
        new = (starts[i : i + rows, None] == 0) | (column >= WINDOW - stride)
        yield np.minimum(index, n - 1), new & (index < n)


def window_nats(nats, tokens, stride):
    """Mean nats of all targets in tokens; nats: a function of ids, targets [rows, WINDOW] to each target's nats."""
    total, n = 0.0, len(tokens) - 1
    for index, counted in windows(n, stride):
        total += np.asarray(nats(tokens[index], tokens[index + 1]), np.float64)[counted].sum()
    return total / n


def valid_nats(nats, tokens, thorough):
    """Losses in windows; thorough: also in those that overlap, which take twice as long."""
    found = {"cold": window_nats(nats, tokens, WINDOW)}
    if thorough:
        found["overlap"] = window_nats(nats, tokens, WINDOW // 2)
    return found


# workers, see harness.serve: "steps N" trains, "evaluate 1" is thorough


def ours_worker(shape, data):
    """What `python train.py` does with these flags, without files."""
    from dataclasses import replace

    import jax

    import train
    import txl

    tokens, valid, n_token = read_text(data, shape.get("characters"))
    about = ("steps", "seed", "characters", "run")
    cfg = txl.Config(n_token=n_token, **{name: value for name, value in shape.items() if name not in about})
    run = train.TrainConfig(**shape["run"], steps=shape["steps"], seed=shape["seed"])
    layout = train.make_layout(cfg, run, 1)
    step, eval_step = train.compile_train_step(cfg, run, layout), train.make_eval_step(cfg)
    state, done = train.fresh_state(cfg, run, layout, None), 0
    cold = replace(cfg, mem_len=0, layer_rows=0)

    @jax.jit
    def nats(params, ids, targets):
        return txl.token_losses(params, ids, targets, txl.init_mems(cold, len(ids)), cold)[0]

    ready = {"versions": harness.package_versions("jax", "optax"), "n_params": txl.count_params(cfg)}
    command, count = yield {**ready, "tokens_per_step": run.batch * run.tgt_len, **harness.settle_level()}
    while True:
        if command == "evaluate":
            found = valid_nats(lambda *batch: nats(state.params, *batch), valid.astype(np.int32), count)
            if cfg.mem_len:
                found["carried"], _ = train.evaluate(eval_step, state.params, valid, cfg, run, layout)
            reply = {"nats": found}
        else:
            for _ in range(count):
                batch = train.get_batch(tokens, run.batch, done * run.tgt_len, run.tgt_len)
                state, metrics = step(state, *train.spread(batch, 1), np.int32(done))
                done += 1
            reply = {"train_nats": float(np.asarray(metrics)[0])}  # waits for the step
        command, count = yield reply


def gpt_worker(shape, data):
    """A plain GPT in nanoGPT's laptop setting; with Muon for the layers' matrices, if the shape says so."""
    torch, _ = import_torch()
    torch.manual_seed(shape["seed"])
    tokens, valid, n_token = read_text(data, shape.get("characters"))
    tokens, gpt = torch.from_numpy(tokens), {**shape, "n_token": n_token}
    params = gpt_params(torch, gpt)
    optimizers = gpt_optimizers(torch, params, gpt)
    window = torch.arange(WINDOW + 1)

    def nats(ids, targets):
        with torch.no_grad():
            return gpt_nats(torch, params, torch.from_numpy(ids), torch.from_numpy(targets), gpt).view(ids.shape)

    ready = {"versions": harness.package_versions("torch"), "n_params": sum(p.numel() for p in params.values())}
    command, count = yield {**ready, "tokens_per_step": gpt["batch"] * WINDOW, **harness.settle_level()}
    done = 0
    while True:
        if command == "evaluate":
            reply = {"nats": valid_nats(nats, valid, count)}
        else:
            for _ in range(count):
                done += 1
                rows = tokens[torch.randint(len(tokens) - WINDOW, (gpt["batch"], 1)) + window]
                for optimizer in optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] = gpt_lr(done, gpt)
                    optimizer.zero_grad()
                loss = gpt_nats(torch, params, rows[:, :-1], rows[:, 1:], gpt).mean()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(params.values(), gpt["clip"])
                for optimizer in optimizers:
                    optimizer.step()
            reply = {"train_nats": loss.item()}
        command, count = yield reply


def gpt_params(torch, gpt):
    """Weights N(0, 0.02), those that write to the residual stream smaller by sqrt(2 n_layer); norms 1; no biases."""
    d, small = gpt["d_model"], 0.02 / math.sqrt(2 * gpt["n_layer"])
    table = {"embed": (gpt["n_token"], d, 0.02), "position": (gpt["context"], d, 0.02)}
    for i in range(gpt["n_layer"]):
        table |= {f"qkv{i}": (3 * d, d, 0.02), f"out{i}": (d, d, small)}
        table |= {f"up{i}": (4 * d, d, 0.02), f"down{i}": (d, 4 * d, small)}
    norms = ["norm", *(f"norm_{part}{i}" for i in range(gpt["n_layer"]) for part in ("attn", "ff"))]
    params = {name: torch.randn(rows, columns) * std for name, (rows, columns, std) in table.items()}
    params |= {name: torch.ones(d) for name in norms}
    return {name: p.requires_grad_() for name, p in params.items()}


def gpt_optimizers(torch, params, gpt):
    """AdamW, where matrices decay; or Muon for the layers' matrices, scaled to AdamW's size, and AdamW for the rest."""
    muon = [p for name, p in params.items() if p.dim() == 2 and name not in ("embed", "position")]
    muon = muon if gpt["optimizer"] == "muon" else []
    rest = [p for p in params.values() if not any(p is m for m in muon)]
    decay = gpt["weight_decay"]
    groups = [
        {"params": [p for p in rest if p.dim() == 2], "weight_decay": decay},
        {"params": [p for p in rest if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizers = [torch.optim.AdamW(groups, lr=gpt["lr"], betas=gpt["betas"])]
    if muon:
        torch.Tensor.bfloat16 = torch.Tensor.clone  # torch's computes in bfloat16, which many CPUs only emulate
        optimizers.append(torch.optim.Muon(muon, gpt["lr"], weight_decay=decay, adjust_lr_fn="match_rms_adamw"))
    return optimizers


def gpt_nats(torch, params, ids, targets, gpt):
    """Nats of each target, flat [B * T]: pre-norm, causal attention, GELU of width 4x, head tied to the embedding."""
    f, (rows, length) = torch.nn.functional, ids.shape
    d, heads = gpt["d_model"], gpt["n_head"]
    x = params["embed"][ids] + params["position"][:length]  # [B, T, D]
    for i in range(gpt["n_layer"]):
        y = f.linear(f.layer_norm(x, (d,), params[f"norm_attn{i}"]), params[f"qkv{i}"])
        q, k, v = (z.view(rows, length, heads, d // heads).transpose(1, 2) for z in y.split(d, dim=2))
        y = f.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + f.linear(y.transpose(1, 2).reshape(rows, length, d), params[f"out{i}"])
        y = f.linear(f.layer_norm(x, (d,), params[f"norm_ff{i}"]), params[f"up{i}"])
        x = x + f.linear(f.gelu(y), params[f"down{i}"])
    logits = f.linear(f.layer_norm(x, (d,), params["norm"]), params["embed"])
    return f.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")


def gpt_lr(step, gpt):
    """The learning rate of step 1, 2, ...: linear warm-up, cosine to the share lr_min at the last step."""
    if step <= gpt["warmup"]:
        return gpt["lr"] * step / gpt["warmup"]
    part = min(1.0, (step - gpt["warmup"]) / max(gpt["steps"] - gpt["warmup"], 1))
    return gpt["lr"] * (gpt["lr_min"] + 0.5 * (1 + math.cos(math.pi * part)) * (1 - gpt["lr_min"]))


def start(stack, name, args, shape):
    python = args.torch_python if name.startswith("gpt") else sys.executable
    return harness.start_worker(stack, name, shape, python, args.data, module="quality")


# run, pace, lr


def run(args):
    """Yields the losses of all models on their way, trained in turn; seconds are steps times the median of a step."""
    for seed in args.seeds:
        shapes = {name: shape_of(name, args, seed) for name in args.models}
        seconds, points = {name: [] for name in shapes}, []
        with contextlib.ExitStack() as stack:
            workers = {name: start(stack, name, args, shape) for name, shape in shapes.items()}
            begin, busy = time.perf_counter(), harness.others_cpu_seconds(workers.values())
            for block in range(BLOCKS):
                for name in list(shapes)[:: 1 if block % 2 == 0 else -1]:
                    first, last = (shapes[name]["steps"] * i // BLOCKS for i in (block, block + 1))
                    reply = harness.ask(workers[name], f"steps {last - first}")
                    seconds[name].append(reply["seconds"] / (last - first))
                    if (block + 1) % (BLOCKS // POINTS) == 0:
                        found = harness.ask(workers[name], f"evaluate {int(block + 1 == BLOCKS)}")
                        points.append((name, last, {"train_nats": reply["train_nats"], "nats": found["nats"]}))
            others = (harness.others_cpu_seconds(workers.values()) - busy) / (time.perf_counter() - begin)
        for name, step, found in sorted(points, key=lambda point: list(shapes).index(point[0])):
            line = {"what": "run", "model": name, "seed": seed, "step": step, **found}
            yield {**line, **times(seconds, name, step, shapes), **told(name, workers, shapes), "busy": others}


def times(seconds, name, step, shapes):
    """What a step took, what all until `step` took, and that as a share of the clock's whole run."""
    took = {"step_ms": 1e3 * statistics.median(seconds[name]), "seconds": step * statistics.median(seconds[name])}
    if CLOCK in seconds:
        took["of_clock"] = took["seconds"] / (shapes[CLOCK]["steps"] * statistics.median(seconds[CLOCK]))
    return took


def told(name, workers, shapes):
    """What a line says of a model besides its losses; others on the machine: `busy`, in cores."""
    ready = workers[name][1]
    about = {key: ready[key] for key in ("n_params", "tokens_per_step", "versions")}
    return {**about, "steps": shapes[name]["steps"], "shape": shapes[name]}


def pace(args):
    """Yields how many steps each model has time for while the clock makes its own."""
    shapes = {name: shape_of(name, args, args.seeds[0]) for name in dict.fromkeys([CLOCK, *args.models])}
    with contextlib.ExitStack() as stack:
        workers = {name: start(stack, name, args, shape) for name, shape in shapes.items()}
        runs = {name: harness.steps_of(worker, 2 if args.tiny else 40) for name, worker in workers.items()}
        seconds, _, others = harness.alternate(runs, 2 if args.tiny else 5, workers.values())
    for name in shapes:
        low, ratio, high = harness.speedup(seconds, name, CLOCK)
        line = {"what": "pace", "model": name, "step_ms": 1e3 * statistics.median(seconds[name])}
        line |= {"steps_in_clock": shapes[CLOCK]["steps"] * ratio, "speed_over_clock": [low, ratio, high]}
        yield {**line, **told(name, workers, shapes), "busy": others}


def lr(args):
    """Yields the last losses of models with other learning rates, one whole run each."""
    for name in args.models:
        for value in args.lrs:
            run = {"run": {**MODELS[name]["run"], "lr": value}} if "run" in MODELS[name] else {"lr": value}
            shape = shape_of(name, args, args.seeds[0], **run, steps=args.steps or MODELS[name]["steps"])
            with contextlib.ExitStack() as stack:
                workers = {name: start(stack, name, args, shape)}
                trained = harness.ask(workers[name], f"steps {shape['steps']}")
                found = harness.ask(workers[name], "evaluate 1")
            line = {"what": "lr", "model": name, "lr": value, "seed": args.seeds[0], "nats": found["nats"]}
            line |= {"train_nats": trained["train_nats"], "step_ms": 1e3 * trained["seconds"] / shape["steps"]}
            yield {**line, **told(name, workers, {name: shape})}


# yardsticks on the built-in corpus


def codes(text, k):
    """Each k <= 8 bytes in a row of a uint8 array [n] as one number: [n - k + 1]."""
    out = np.zeros(len(text) - k + 1, np.uint64)
    for i in range(k):
        out = (out << np.uint64(8)) | text[i : len(out) + i]
    return out


def ngram_tables(text, order):
    """For k = 1 to order: the k-grams there are, sorted, and their Kneser-Ney counts.

    Those of the highest order are how often it stands there; of a lower one, after how many different bytes.
    """
    grams, counts = np.unique(codes(text, order), return_counts=True)
    tables = [(grams, counts)]
    for k in range(order - 1, 0, -1):
        tables.append(np.unique(tables[-1][0] & np.uint64(256**k - 1), return_counts=True))
    return tables[::-1]


def lookup(keys, values, wanted):
    """values of wanted keys, 0 for one that is not there; keys are sorted."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)


def ngram_probs(tables, text):
    """Probability of each byte of a text [n] after the order - 1 bytes before it: [n - order + 1].

    Interpolated Kneser-Ney with one discount an order, n1 / (n1 + 2 n2) of its counts of 1 and 2; below all, 1/256.
    """
    order, probs = len(tables), 1 / 256
    for k, (grams, counts) in enumerate(tables, 1):
        once, twice = (counts == 1).sum(), (counts == 2).sum()
        discount = once / (once + 2 * twice) if once else 0.5
        contexts, first, kinds = np.unique(grams >> np.uint64(8), return_index=True, return_counts=True)
        totals, own = np.add.reduceat(counts, first), codes(text[order - k :], k)
        total, kind = (lookup(contexts, values, own >> np.uint64(8)) for values in (totals, kinds))
        kept = np.maximum(lookup(grams, counts, own) - discount, 0)
        probs = np.where(total > 0, (kept + discount * kind * probs) / np.maximum(total, 1), probs)
    return probs


def xz_bytes(*texts):
    """Bytes of texts joined and compressed by xz at its most, with a dictionary that holds all of them."""
    text = b"".join(texts)
    size = 1 << max(16, len(text).bit_length())
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": size}]
    return len(lzma.compress(text, filters=filters))


def yardsticks(args):
    """Yields bits per byte of the built-in corpus' valid and test split by n-grams and xz, given the training one."""
    from data import prepare

    corpus = prepare.load()
    cut = 50_000 if args.tiny else None
    texts = {split: np.asarray(getattr(corpus, split))[:cut] for split in prepare.SPLITS}
    about = {"corpus": corpus.source, "sha256": corpus.sha256}
    for order in ORDERS:
        tables = ngram_tables(texts["train"], order)
        for split in ("valid", "test"):
            probs = ngram_probs(tables, np.concatenate([texts["train"][1 - order :], texts[split]]))
            line = {"what": "ngram", "order": order, "smoothing": "Kneser-Ney", "split": split}
            yield {**line, "bpb": float(-np.log2(probs).mean()), "bytes": len(probs), **about}
    raw = {split: text.tobytes() for split, text in texts.items()}
    before = xz_bytes(raw["train"])
    for split in ("valid", "test"):
        bits = 8 * (xz_bytes(raw["train"], raw[split]) - before)
        line = {"what": "xz", "split": split, "bpb": bits / len(raw[split])}
        yield {**line, "bytes": len(raw[split]), "train_bytes": len(raw["train"]), "train_xz_bytes": before, **about}


# mem_reset


def mem_reset(args):
    """Yields the valid loss of default runs of train.py, read without memory and with it."""
    steps = args.steps or (4 if args.tiny else 1500)
    sizes = {**TINY, "mem_len": 16, "tgt_len": 16, "batch": 4, "eval_tokens": 100} if args.tiny else {}
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    for seed in args.seeds:
        for share in args.mem_resets:
            with tempfile.TemporaryDirectory() as base:
                out = f"{base}/run"
                given = [f"--mem_reset={share}", f"--seed={seed}", f"--steps={steps}", f"--eval_every={steps}", *words]
                train_py(f"--out={out}", *given)
                mem_len = json.loads((Path(out) / "log.jsonl").open().readline())["config"]["mem_len"]
                found = train_py("--eval_only", f"--run={out}/last.npz", f"--mem_len=0,{mem_len}")
            line = {"what": "mem_reset", "mem_reset": share, "seed": seed, "steps": steps}
            for entry in found:
                kept = {key: entry[key] for key in ("mem_len", "split", "bpb", "loss_nats", "targets", "eval_batch")}
                yield {**line, **kept, "command": f"python train.py {shlex.join(given)}"}


def train_py(*words):
    """The JSON lines that train.py prints."""
    command = [sys.executable, "train.py", "--json", *words]
    done = subprocess.run(command, cwd=harness.ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{shlex.join(command)} ended with {done.returncode}: its error stands above")
    return [json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")]


# the picture and the table


def draw():
    """Cold valid loss over time, a line a seed, and the table of the last losses, in Markdown."""
    lines = harness.read_results("quality", what="run")
    figure = harness.new_figure(6, 3.8)
    axes = figure.add_subplot(
        xlabel="time, in times of nanoGPT's whole run", ylabel="cold valid loss, nats per character"
    )
    print("| model | steps | step, ms | time | cold | overlap | carried |\n|---|---|---|---|---|---|---|")
    for i, (name, label) in enumerate(LABELS.items()):
        own = [line for line in lines if line["model"] == name]
        if not own:
            continue
        for seed in sorted({line["seed"] for line in own}):
            points = [(line["of_clock"], line["nats"]["cold"]) for line in own if line["seed"] == seed]
            style = "o--" if name.startswith("gpt") else "o-"
            axes.plot(*zip(*points), style, markersize=3, color=f"C{i}", label=label)
            label = None
        last = [line for line in own if line["step"] == line["steps"]]
        ms, share = (statistics.median(line[key] for line in last) for key in ("step_ms", "of_clock"))
        losses = [" / ".join(f"{e['nats'][way]:.3f}" for e in last if way in e["nats"]) for way in WAYS]
        print(f"| {LABELS[name]} | {last[0]['steps']:,} | {ms:.1f} | {share:.2f} | {' | '.join(losses)} |")
    axes.set_ylim(1.5, 2.6)
    axes.legend(fontsize=8)
    harness.save_picture(figure, "quality.png")


WAYS = ("cold", "overlap", "carried")
PARTS = {"run": run, "pace": pace, "lr": lr, "yardsticks": yardsticks, "mem_reset": mem_reset}


def main(argv=None):
    parser = harness.make_parser("quality", __doc__, PARTS)
    parser.add_argument("--data", help="text file for run, pace and lr: tinyshakespeare")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1], help="of run and mem_reset; the others take the first"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="of run, pace and lr")
    parser.add_argument("--lrs", type=float, nargs="+", default=[4e-3, 8e-3, 1.6e-2], help="of lr")
    parser.add_argument("--mem_resets", type=float, nargs="+", default=[0.0, 0.01], help="of mem_reset")
    parser.add_argument("--steps", type=int, help="of mem_reset, 1500 if not given, and of lr")
    parser.add_argument("--torch_python", default=sys.executable, help=INSTALL.replace("%", "%%"))
    parser.add_argument("--draw", action="store_true", help="draw the committed results, print their table")
    parser.add_argument("--worker", help="start as a worker: --shape JSON")
    parser.add_argument("--shape", type=json.loads)
    args = parser.parse_args(argv)
    if args.worker:
        worker = gpt_worker if args.worker.startswith("gpt") else ours_worker
        return harness.serve(worker(args.shape, args.data))
    if args.draw:
        draw()
    for part in args.parts:
        if part in ("run", "pace", "lr") and not (args.data and os.path.isfile(args.data)):
            sys.exit(f"tools.bench.quality: {part} trains on a text, found {args.data}: give it --data FILE")
        for line in PARTS[part](args):
            harness.emit(line)


if __name__ == "__main__":
    main()
