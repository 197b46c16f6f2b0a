"""Ours against what people would otherwise train with, both alive on this CPU and measured in alternating blocks.

    python -m bench.peers --setting small --torch_python ENV/bin/python                          # speed
    python -m bench.peers --setting long --torch_python ENV/bin/python --ours '{"remat": "full"}'  # memory
    python -m bench.peers --setting clock --torch_python ENV/bin/python    # step times of the GPT clock and of ours
    python -m bench.peers --setting quality --torch_python ENV/bin/python --data FILE     # the clock's losses

ENV is a virtual environment of its own: pip install torch==2.13.0 transformers==4.30.2 "numpy<2".
One process per worker (hf, ours, matmul, clock; hf_reader for bench.reading). It reads `steps N` or `evaluate` from
standard input and answers with a JSON line; between two commands it sleeps. Results are JSON lines on standard output.
Linux only.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
INSTALL = 'pip install torch==2.13.0 transformers==4.30.2 "numpy<2" into an environment of its own, see --torch_python'
PARTNERS = {"small": ("hf", "matmul"), "long": ("hf", "matmul"), "clock": ("clock",), "quality": ("clock",)}
BLOCK_STEPS = {"small": 3, "long": 3, "clock": 50, "quality": 250}
PRODUCTS = 100  # matrix products in one block of the matmul worker

WIDE = dict(n_token=256, d_model=256, n_head=8, d_head=32, d_inner=1024)
SHAPES = {  # names of txl.Config, and the two that are a run's: batch and tgt_len
    "small": WIDE | dict(n_layer=6, tgt_len=128, mem_len=128, batch=16),
    "long": WIDE | dict(n_layer=4, tgt_len=256, mem_len=1024, batch=4),
    "clock": dict(
        n_token=65, n_layer=4, d_model=128, n_head=4, d_head=32, d_inner=512, tgt_len=64, mem_len=64, batch=12
    ),
    "quality": {},
}
ADAM = dict(optimizer="adam", lr=2.5e-4, schedule="constant", warmup=0, beta2=0.999, clip=0.25)  # the port's, below
GPT = dict(n_token=65, n_layer=4, n_head=4, d_model=128, context=64, batch=12, steps=2000, warmup=100, lr=1e-3,
           min_lr=1e-4, betas=(0.9, 0.99), weight_decay=0.1, clip=1.0)  # nanoGPT's laptop setting # fmt: skip


def status_mib(field):
    """A memory figure of this process in MiB: VmRSS is resident now, VmHWM its high-water mark."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"/proc/self/status has no {field}: this bench needs Linux")


def settle_level():
    """The level that growth counts from; returns it and the high-water mark so far, and starts that mark anew.

    What compilation freed is handed back to the system first: kept by malloc, it would hide later growth.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = status_mib("VmHWM")
    Path("/proc/self/clear_refs").write_text("5")
    return {"level_mib": status_mib("VmRSS"), "peak_before_level_mib": before}


def batches(shape):
    """Endless ids, targets [batch, tgt_len] of a skewed random stream that a model can learn something from."""
    rng = np.random.default_rng(0)
    last = rng.integers(shape["n_token"], size=(shape["batch"], 1))
    while True:
        steps = np.minimum(rng.geometric(0.2, (shape["batch"], shape["tgt_len"])), shape["n_token"] - 1)
        stream = np.concatenate([last, (last + steps.cumsum(1)) % shape["n_token"]], axis=1)
        last = stream[:, -1:]
        yield stream[:, :-1], stream[:, 1:]


def import_torch():
    try:
        import torch
    except ImportError as error:
        raise SystemExit(f"{sys.executable}: {error}; {INSTALL}") from error
    torch.set_num_threads(os.cpu_count())
    torch.manual_seed(0)
    return torch


def import_hf():
    """torch, and the versions of it and of transformers."""
    torch = import_torch()
    try:
        from transformers import __version__
    except ImportError as error:
        raise SystemExit(f"{sys.executable}: {error}; {INSTALL}") from error
    return torch, f"torch {torch.__version__} transformers {__version__}"


def hf_model(shape):
    """Hugging Face's TransfoXLLMHeadModel of these sizes, nothing that ours has not."""
    from transformers import TransfoXLConfig, TransfoXLLMHeadModel

    sizes = {k: shape[k] for k in ("n_layer", "d_model", "n_head", "d_head", "d_inner", "mem_len")}
    plain = dict(div_val=1, cutoffs=[], clamp_len=-1, same_length=False, untie_r=False, dropout=0.0, dropatt=0.0)
    return TransfoXLLMHeadModel(TransfoXLConfig(shape["n_token"], d_embed=shape["d_model"], **sizes, **plain))


# Workers: generators. The first value is what the worker says when ready; then each command sent gives one reply.


def hf_worker(shape):
    """Hugging Face's TransfoXLLMHeadModel: the same sizes and objective, memory carried, Adam, clipping."""
    torch, versions = import_hf()
    ready = {"after_imports_mib": status_mib("VmRSS"), "versions": versions}

    def build(shape):
        model = hf_model(shape).train()
        return model, torch.optim.Adam(model.parameters(), lr=2.5e-4)

    def step(model, optimizer, batch, mems):
        ids, targets = (torch.from_numpy(x) for x in batch)
        optimizer.zero_grad()
        # Without labels: given labels, the port drops the last target of each segment.
        out = model(ids, mems=mems)
        loss = torch.nn.functional.nll_loss(out.prediction_scores.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        return loss.item(), out.mems

    # In place of a first compile, one step of a tiny model starts the libraries' threads and loads their code.
    tiny = shape | dict(n_layer=1, d_model=16, d_inner=16, tgt_len=4, mem_len=4, batch=1)
    step(*build(tiny), next(batches(tiny)), None)
    _, count = yield ready | settle_level()
    model, optimizer = build(shape)
    stream, mems = batches(shape), None
    n_params = sum(p.numel() for p in model.parameters())
    while True:
        for _ in range(count):
            loss, mems = step(model, optimizer, next(stream), mems)
        _, count = yield {"loss_nats": loss, "n_params": n_params}


def hf_reader_worker(shape):
    """Hugging Face's model generating: one row, its memory full, a token a step drawn from what it predicts."""
    torch, versions = import_hf()
    ready = {"after_imports_mib": status_mib("VmRSS"), "versions": versions}
    model = hf_model(shape).eval()
    with torch.no_grad():
        mems = model(torch.randint(shape["n_token"], (1, shape["mem_len"]))).mems
        last = torch.zeros(1, 1, dtype=torch.long)
        _, count = yield ready | settle_level()
        while True:
            for _ in range(count):
                out = model(last, mems=mems)
                last, mems = torch.multinomial(out.prediction_scores[:, -1].exp(), 1), out.mems
            _, count = yield {"remembered": len(mems[0])}


def ours_worker(shape):
    """txl's loss under jit with donation, memory carried, Adam, clipping; compiled from shapes before any state."""
    import jax
    import optax

    import plan
    import txl
    from step import optimizer as recipe
    from train import Run

    jax.devices()  # starts the backend, which is part of importing it
    ready = {"after_imports_mib": status_mib("VmRSS"), "versions": f"jax {jax.__version__} optax {optax.__version__}"}
    cfg = txl.Config(**{"dropout": 0.0} | {k: v for k, v in shape.items() if k not in ("batch", "tgt_len", "run")})
    optimizer = recipe(Run(**ADAM | shape.get("run", {})))

    def init(key):
        params = txl.init_params(key, cfg)
        return params, optimizer.init(params), txl.init_mems(cfg, shape["batch"])

    def step(params, opt_state, mems, ids, targets):
        loss_of = jax.value_and_grad(txl.loss_fn, has_aux=True)
        (loss, mems), grads = loss_of(params, ids, targets, mems, cfg)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, mems), loss

    key = jax.random.key(0)
    tokens = jax.ShapeDtypeStruct((shape["batch"], shape["tgt_len"]), np.int32)
    make_state = jax.jit(init).lower(key).compile()
    start = time.perf_counter()
    train = jax.jit(step, donate_argnums=(0, 1, 2)).lower(*jax.eval_shape(init, key), tokens, tokens).compile()
    ready |= {"compile_s": time.perf_counter() - start, "xla_mib": plan.total(train) / plan.MIB}
    _, count = yield ready | settle_level()
    state, stream = make_state(key), batches(shape)
    n_params = sum(x.size for x in jax.tree.leaves(state[0]))
    while True:
        for _ in range(count):
            ids, targets = (x.astype(np.int32) for x in next(stream))
            state, loss = train(*state, ids, targets)
        jax.block_until_ready(state)
        _, count = yield {"loss_nats": float(loss), "n_params": n_params}


def matmul_worker(shape):
    """The yardstick of arithmetic: float32 products [2048, 256] x [256, 1024], one after the other."""
    import jax

    rng = np.random.default_rng(0)
    x, w = (jax.device_put(rng.standard_normal(s, np.float32)) for s in ((2048, 256), (256, 1024)))
    ready = {"after_imports_mib": status_mib("VmRSS"), "versions": f"jax {jax.__version__}"}
    product = jax.jit(lambda x, w: x @ w).lower(x, w).compile()
    _, count = yield ready | settle_level()
    while True:
        for _ in range(count):
            product(x, w).block_until_ready()
        _, count = yield {}


def clock_worker(shape, data=None):
    """The clock of time to quality, a plain GPT in nanoGPT's laptop setting; the one worker that knows `evaluate`."""
    torch = import_torch()
    ready = {"after_imports_mib": status_mib("VmRSS"), "versions": f"torch {torch.__version__}"}
    train, valid, n_token = gpt_data(data)
    train, valid, gpt = torch.from_numpy(train), torch.from_numpy(valid), GPT | dict(n_token=n_token)
    params = gpt_params(torch, gpt)
    groups = [
        {"params": [p for p in params.values() if p.dim() == 2], "weight_decay": gpt["weight_decay"]},
        {"params": [p for p in params.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=gpt["lr"], betas=gpt["betas"])
    done, window = 0, torch.arange(gpt["context"] + 1)
    command, count = yield ready | settle_level()
    while True:
        if command == "evaluate":
            reply = {"step": done, "valid_nats": gpt_valid_nats(torch, params, valid, gpt), "targets": len(valid) - 1}
        else:
            for _ in range(count):
                done += 1
                rows = train[torch.randint(len(train) - gpt["context"], (gpt["batch"], 1)) + window]
                for group in optimizer.param_groups:
                    group["lr"] = gpt_lr(done, gpt)
                optimizer.zero_grad()
                loss = gpt_nats(torch, params, rows[:, :-1], rows[:, 1:], gpt).mean()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(params.values(), gpt["clip"])
                optimizer.step()
            reply = {"loss_nats": loss.item(), "n_params": sum(p.numel() for p in params.values())}
        command, count = yield reply


def gpt_data(path):
    """Characters of a text file as ids, split 90/10, and how many kinds there are; without a file, random ids."""
    if path is None:
        ids, n_token = np.random.default_rng(0).integers(GPT["n_token"], size=100_000), GPT["n_token"]
    else:
        text = np.frombuffer(Path(path).read_text(encoding="utf-8").encode("utf-32-le"), np.uint32)
        kinds, ids = np.unique(text, return_inverse=True)
        n_token = len(kinds)
    cut = int(0.9 * len(ids))
    return ids[:cut].astype(np.int64), ids[cut:].astype(np.int64), n_token


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
    """The learning rate of step 1, 2, ...: linear warm-up, cosine to min_lr at the last step."""
    if step <= gpt["warmup"]:
        return gpt["lr"] * step / gpt["warmup"]
    part = min(1.0, (step - gpt["warmup"]) / (gpt["steps"] - gpt["warmup"]))
    return gpt["min_lr"] + 0.5 * (1 + math.cos(math.pi * part)) * (gpt["lr"] - gpt["min_lr"])


def gpt_valid_nats(torch, params, valid, gpt):
    """Mean nats over the whole valid part, every target once, in windows of the context that do not overlap."""
    context, rows = gpt["context"], 128
    total = 0.0
    with torch.no_grad():
        span = context * rows
        for start in range(0, len(valid) - 1, span):
            block = valid[start : start + span + 1]
            whole = (len(block) - 1) // context * context
            for a, b in ((0, whole), (whole, len(block) - 1)):  # full windows, and the one cut short at the end
                if a < b:
                    width = min(context, b - a)
                    ids, targets = block[a:b].view(-1, width), block[a + 1 : b + 1].view(-1, width)
                    total += gpt_nats(torch, params, ids, targets, gpt).double().sum().item()
    return total / (len(valid) - 1)


def serve(worker):
    """One worker's whole life: says when it is ready, then answers commands until standard input ends."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not look like a reply
    ready = next(worker)
    print(json.dumps(ready), file=out)
    for line in sys.stdin:
        command, count = [*line.split(), "0"][:2]
        start = time.perf_counter()
        reply = worker.send((command, int(count)))
        reply |= {"seconds": time.perf_counter() - start, "rss_mib": status_mib("VmRSS")}
        high = status_mib("VmHWM")
        reply |= {"peak_mib": max(high, ready["peak_before_level_mib"]), "growth_mib": high - ready["level_mib"]}
        print(json.dumps(reply), file=out)


# The parent: starts workers, gives them turns, prints what they did.


def start_worker(stack, name, python, shape, data=None):
    """A live worker: its process, and what it said when ready. It ends with the stack, or with this process."""
    command = [python, "-m", "bench.peers", "--worker", name, "--shape", json.dumps(shape)]
    command += ["--data", str(Path(data).resolve())] if data else []
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stack.callback(process.wait)
    stack.callback(process.stdin.close)
    return process, read_reply(process, name)


def read_reply(process, name):
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"worker {name} ended with {process.wait()} ({process.args[0]}): its error stands above")
    return json.loads(line)


def ask(workers, name, command):
    process, _ = workers[name]
    print(command, file=process.stdin, flush=True)
    return read_reply(process, name)


def alternate(workers, blocks, steps):
    """Seconds per step of each worker, one figure a block; its first and its last reply; cores that others kept busy.

    The order turns round from block to block, so that a machine that drifts does not favour one of them.
    """
    counts = {name: PRODUCTS if name == "matmul" else steps for name in workers}
    first = {name: ask(workers, name, "steps 1") for name in workers}
    seconds, last = {name: [] for name in workers}, {}
    start, (machine_start, own_start) = time.perf_counter(), cpu_seconds(workers)
    for block in range(blocks):
        for name in list(workers)[:: 1 if block % 2 == 0 else -1]:
            last[name] = ask(workers, name, f"steps {counts[name]}")
            seconds[name].append(last[name]["seconds"] / counts[name])
    machine_end, own_end = cpu_seconds(workers)
    others = (machine_end - machine_start - own_end + own_start) / (time.perf_counter() - start)
    return seconds, first, last, others


def cpu_seconds(workers):
    """CPU time so far: of the whole machine, and of these workers."""
    tick = os.sysconf("SC_CLK_TCK")
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    fields = [Path(f"/proc/{p.pid}/stat").read_text().rpartition(")")[2].split() for p, _ in workers.values()]
    own = sum(int(x[11]) + int(x[12]) for x in fields)  # utime and stime, fields 14 and 15 counted from the process id
    return (user + nice + system + irq + softirq + steal) / tick, own / tick


def memory_mib(ready, first, last):
    return {
        "after_imports": ready["after_imports_mib"],
        "after_first_compile": ready["level_mib"],
        "after_first_step": first["rss_mib"],
        "peak": last["peak_mib"],
        "growth": last["growth_mib"],
    } | ({"xla": ready["xla_mib"]} if "xla_mib" in ready else {})


def model_gflop(shape):
    """Arithmetic of one training step, once: the forward's matrix products, and twice as much for the backward."""
    b, t, d, v = (shape[k] for k in ("batch", "tgt_len", "d_model", "n_token"))
    s, hk = t + shape["mem_len"], shape["n_head"] * shape["d_head"]
    layer = (2 * b * t + 2 * b * s + s) * d * hk  # queries and output; keys and values; positions
    layer += 3 * b * t * s * hk + 2 * b * t * d * shape["d_inner"]  # content, position and value terms; feed-forward
    return 3 * 2 * (shape["n_layer"] * layer + b * t * d * v) / 1e9


def paired(seconds, name, other):
    """How many times faster `name` was than `other`: lowest, median and highest of the blocks' ratios."""
    ratios = sorted(b / a for a, b in zip(seconds[name], seconds[other], strict=True))
    return ratios[0], statistics.median(ratios), ratios[-1]


def against_hf(name, shape, seconds, memory):
    """One result line: speed of ours against the port and the matmul rate, growth of memory against the port's."""
    tokens, gflop = shape["batch"] * shape["tgt_len"], model_gflop(shape)
    product_gflop = 2 * 2048 * 256 * 1024 / 1e9
    low, ratio, high = paired(seconds, name, "hf")
    shares = [gflop / s / (product_gflop / m) for s, m in zip(seconds[name], seconds["matmul"], strict=True)]
    return {
        "ours_tok_per_s": tokens / statistics.median(seconds[name]),
        "hf_tok_per_s": tokens / statistics.median(seconds["hf"]),
        "ratio": ratio,
        "ratio_range": [low, high],
        "matmul_gflops": product_gflop / statistics.median(seconds["matmul"]),
        "model_gflop_per_step": gflop,
        "share_of_matmul_rate": statistics.median(shares),
        "hf_share_of_matmul_rate": statistics.median(shares) / ratio,
        "ours_mem_mib": memory[name],
        "hf_mem_mib": memory["hf"],
        "growth_ratio": memory[name]["growth"] / memory["hf"]["growth"],
    }


def against_clock(name, shape, seconds, memory):
    """One result line: step times of ours and of the clock, and the steps of ours that its 2,000 have time for."""
    _, ratio, _ = paired(seconds, name, "clock")
    return {
        "ours_step_ms": 1e3 * statistics.median(seconds[name]),
        "clock_step_ms": 1e3 * statistics.median(seconds["clock"]),
        "clock_full_s": GPT["steps"] * statistics.median(seconds["clock"]),
        "ours_steps_in_clock_full": GPT["steps"] * ratio,
        "ours_tokens_per_clock_token": ratio * shape["batch"] * shape["tgt_len"] / (GPT["batch"] * GPT["context"]),
        "ours_mem_mib": memory[name],
        "clock_mem_mib": memory["clock"],
    }


def machine():
    """Where a figure was measured, and of which commit."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    about = {"cpu": cpu[0] if cpu else platform.machine(), "cores": os.cpu_count(), "load_1min": os.getloadavg()[0]}
    return about | {"commit": commit.strip()}


def emit(line):
    def short(x):
        if isinstance(x, dict):
            return {k: short(v) for k, v in x.items()}
        if isinstance(x, list):
            return [short(v) for v in x]
        return float(f"{x:.4g}") if isinstance(x, float) else x

    print(json.dumps(short(line)), flush=True)


def compare(args):
    """The workers of a setting and one `ours` for each set of options, alternately; one line for each set."""
    options = [json.loads(text) for text in args.ours or ["{}"]]
    shapes = {f"ours{i}": SHAPES[args.setting] | option for i, option in enumerate(options)}
    with contextlib.ExitStack() as stack:
        workers = {}
        for name in PARTNERS[args.setting]:
            python = sys.executable if name == "matmul" else args.torch_python
            workers[name] = start_worker(stack, name, python, SHAPES[args.setting], args.data)
        for name, shape in shapes.items():
            workers[name] = start_worker(stack, "ours", sys.executable, shape)
        seconds, first, last, others = alternate(workers, args.blocks, args.steps or BLOCK_STEPS[args.setting])
    memory = {name: memory_mib(ready, first[name], last[name]) for name, (_, ready) in workers.items()}
    partner = PARTNERS[args.setting][0]
    for (name, shape), option in zip(shapes.items(), options, strict=True):
        pair = {"ours": name, partner: partner}
        emit(
            {"setting": args.setting, "ours": option}
            | (against_clock if partner == "clock" else against_hf)(name, shape, seconds, memory)
            | {f"{side}_loss_nats": [first[w]["loss_nats"], last[w]["loss_nats"]] for side, w in pair.items()}
            | {f"{side}_params": last[w]["n_params"] for side, w in pair.items()}
            | {"ours_compile_s": workers[name][1]["compile_s"], "blocks": args.blocks, "cores_busy_with_others": others}
            | {"versions": " ".join(workers[w][1]["versions"] for w in pair.values())}
            | machine()
        )


def clock_quality(args):
    """Trains the clock for its 2,000 steps; a line with the valid loss after every block."""
    with contextlib.ExitStack() as stack:
        workers = {"clock": start_worker(stack, "clock", args.torch_python, {}, args.data)}
        steps, seconds = args.steps or BLOCK_STEPS["quality"], 0.0
        for _ in range(math.ceil(GPT["steps"] / steps)):
            trained = ask(workers, "clock", f"steps {steps}")
            seconds += trained["seconds"]
            found = ask(workers, "clock", "evaluate")
            line = {"setting": "quality", "step": found["step"], "valid_nats": found["valid_nats"]}
            line |= {"targets": found["targets"], "train_s": seconds, "step_ms": 1e3 * trained["seconds"] / steps}
            emit(line | {"params": trained["n_params"], "versions": workers["clock"][1]["versions"]} | machine())


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=SHAPES, help="what to compare")
    parser.add_argument("--ours", action="append", metavar="JSON", help="options of ours, again for another set")
    parser.add_argument("--blocks", type=int, default=5, help="turns of each worker")
    parser.add_argument("--steps", type=int, help="steps in a block: 3, for clock 50, for quality 250")
    parser.add_argument("--torch_python", default=sys.executable, help=INSTALL.replace("%", "%%"))
    parser.add_argument("--data", help="text file for the clock; without it, random ids")
    parser.add_argument("--worker", choices=("hf", "hf_reader", "ours", "matmul", "clock"), help=argparse.SUPPRESS)
    parser.add_argument("--shape", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        serve({
            "hf": lambda: hf_worker(args.shape),
            "hf_reader": lambda: hf_reader_worker(args.shape),
            "ours": lambda: ours_worker(args.shape),
            "matmul": lambda: matmul_worker(args.shape),
            "clock": lambda: clock_worker(args.shape, args.data),
        }[args.worker]())  # fmt: skip
    elif args.setting is None:
        parser.error("--setting is missing: one of " + ", ".join(SHAPES))
    elif args.setting == "quality" and args.data is None:
        parser.error("--setting quality trains on a text: give it --data FILE")
    else:
        (clock_quality if args.setting == "quality" else compare)(args)


if __name__ == "__main__":
    main()
