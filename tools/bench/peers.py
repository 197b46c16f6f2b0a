"""Ours beside what people would otherwise train with, both alive and measured in alternating blocks. Linux only.

    python -m tools.bench.peers small --torch_python ENV/bin/python                             # speed, 4 minutes
    python -m tools.bench.peers long --torch_python ENV/bin/python --ours '{"remat": "full"}'   # memory, 6 minutes

ENV is a virtual environment of its own: --help names its packages. The others are Hugging Face's port (hf) and
x-transformers with memory and rotary positions (xt), each as it comes.
"""

import contextlib
import importlib
import json
import os
import statistics
import sys
import time

import numpy as np

from data import flags
from tools.bench import harness
from tools.bench.harness import package_versions, settle_level, status_mib

PACKAGES = 'torch==2.13.0 transformers==4.30.2 x-transformers==2.31.10 "numpy<2"'
INSTALL = f"pip install {PACKAGES} into an environment of its own: --torch_python"
PARTNERS = ("hf", "xt", "matmul")
BLOCK_STEPS = 3
PRODUCTS = 100  # matrix products in one block of the matmul worker

WIDE = dict(n_token=256, d_model=256, n_head=8, d_head=32, d_inner=1024)
SHAPES = {  # fields of txl.Config; those of train.TrainConfig under "run"
    "small": WIDE | dict(n_layer=6, mem_len=128, run=dict(tgt_len=128, batch=16)),
    "long": WIDE | dict(n_layer=4, mem_len=1024, run=dict(tgt_len=256, batch=4)),
}
TINY = dict(n_token=31, n_layer=1, d_model=16, n_head=2, d_head=8, d_inner=16, mem_len=8, run=dict(tgt_len=8, batch=2))
ADAM = dict(optimizer="adam", lr=2.5e-4, schedule="constant", warmup=0, beta2=0.999, clip=0.25, mem_reset=0)  # as hf


def merge(shape, options):
    """A shape with other options; those under "run" are merged, too."""
    return {**shape, **options, "run": {**shape.get("run", {}), **options.get("run", {})}}


def import_torch(name="transformers"):
    """torch and a library that needs it."""
    try:
        import torch

        library = importlib.import_module(name)
    except ImportError as error:
        sys.exit(f"{sys.executable}: {error}; {INSTALL}")
    torch.set_num_threads(os.cpu_count())
    torch.manual_seed(0)
    return torch, library


def hf_model(shape):
    """Hugging Face's TransfoXLLMHeadModel of these sizes, nothing that ours has not."""
    _, hf = import_torch()
    sizes = {name: shape[name] for name in ("n_layer", "d_model", "n_head", "d_head", "d_inner", "mem_len")}
    plain = dict(div_val=1, cutoffs=[], clamp_len=-1, same_length=False, untie_r=False, dropout=0.0, dropatt=0.0)
    return hf.TransfoXLLMHeadModel(hf.TransfoXLConfig(shape["n_token"], d_embed=shape["d_model"], **sizes, **plain))


# Workers, see harness.serve


def torch_worker(shape, library, build, forward):
    """A model in PyTorch training: the same sizes and objective, memory carried, Adam, clipping.

    build(shape) -> model; forward(model, ids, mems) -> log-probabilities or logits [B, T, V], mems.
    """
    torch, _ = import_torch(library)
    ready = {"after_imports_mib": status_mib("VmRSS"), "versions": package_versions("torch", library)}

    def with_optimizer(shape):
        model = build(shape).train()
        return model, torch.optim.Adam(model.parameters(), lr=2.5e-4)

    def step(model, optimizer, batch, mems):
        ids, targets = (torch.from_numpy(x).long() for x in batch)
        optimizer.zero_grad()
        out, mems = forward(model, ids, mems)
        loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        return loss.item(), mems

    # In place of a first compile, one step of a tiny model starts the libraries' threads and loads their code.
    step(*with_optimizer(TINY), next(harness.random_batches(TINY["n_token"], 2, 8)), None)
    _, count = yield {**ready, **settle_level()}
    model, optimizer = with_optimizer(shape)
    batches = harness.random_batches(shape["n_token"], shape["run"]["batch"], shape["run"]["tgt_len"])
    mems = None
    n_params = sum(p.numel() for p in model.parameters())
    while True:
        for _ in range(count):
            loss, mems = step(model, optimizer, next(batches), mems)
        _, count = yield {"loss_nats": loss, "n_params": n_params}


def hf_worker(shape):
    """Hugging Face's port training."""

    def forward(model, ids, mems):
        out = model(ids, mems=mems)  # given labels, the port would drop the last target of each segment
        return out.prediction_scores, out.mems

    return torch_worker(shape, "transformers", hf_model, forward)


def xt_worker(shape):
    """x-transformers training: a decoder whose layers keep their inputs as memory, with rotary positions."""

    def build(shape):
        _, xt = import_torch("x_transformers")
        sizes = {"dim": shape["d_model"], "depth": shape["n_layer"], "heads": shape["n_head"]}
        sizes |= {"attn_dim_head": shape["d_head"], "ff_mult": shape["d_inner"] / shape["d_model"]}
        return xt.TransformerWrapper(
            num_tokens=shape["n_token"],
            max_seq_len=shape["run"]["tgt_len"],
            max_mem_len=shape["mem_len"],
            tie_embedding=True,
            attn_layers=xt.Decoder(**sizes, rotary_pos_emb=True),
        )

    def forward(model, ids, mems):
        return model(ids, mems=mems, return_mems=True)

    return torch_worker(shape, "x_transformers", build, forward)


def hf_reader_worker(shape):
    """Hugging Face's port generating: one row, its memory full, a token a step drawn from what it predicts."""
    torch, _ = import_torch()
    ready = {"after_imports_mib": status_mib("VmRSS"), "versions": package_versions("torch", "transformers")}
    model = hf_model(shape).eval()
    with torch.no_grad():
        mems = model(torch.randint(shape["n_token"], (1, shape["mem_len"]))).mems
        last = torch.zeros(1, 1, dtype=torch.long)
        _, count = yield {**ready, **settle_level()}
        while True:
            for _ in range(count):
                out = model(last, mems=mems)
                last, mems = torch.multinomial(out.prediction_scores[:, -1].exp(), 1), out.mems
            _, count = yield {"remembered": len(mems[0])}


def ours_worker(shape):
    """The training step of train.py, compiled from shapes before any state exists."""
    import jax

    import train
    import txl

    jax.devices()  # starts the backend, which is part of importing it
    ready = {"after_imports_mib": status_mib("VmRSS"), "versions": package_versions("jax", "optax")}
    cfg = txl.Config(**{name: value for name, value in shape.items() if name != "run"})
    run = train.TrainConfig(**shape["run"])
    start = time.perf_counter()
    compiled = harness.compile_step(cfg, run)
    ready |= {"compile_s": time.perf_counter() - start, "xla_mib": harness.total_mib(compiled)}
    steps, n_params = harness.make_stepper(compiled, cfg, run), txl.count_params(cfg)
    _, count = yield {**ready, **settle_level(harness.state_mib(cfg, run))}  # making the state had to be compiled, too
    while True:
        _, count = yield {**steps(count), "n_params": n_params}


def matmul_worker(shape):
    """The yardstick of arithmetic: float32 products [2048, 256] x [256, 1024], one after the other."""
    import jax

    rng = np.random.default_rng(0)
    x, w = (jax.device_put(rng.standard_normal(s, np.float32)) for s in ((2048, 256), (256, 1024)))
    ready = {"after_imports_mib": status_mib("VmRSS"), "versions": package_versions("jax")}
    product = jax.jit(lambda x, w: x @ w).lower(x, w).compile()
    _, count = yield {**ready, **settle_level()}
    while True:
        for _ in range(count):
            product(x, w).block_until_ready()
        _, count = yield {}


# What the parent prints


def memory_mib(ready, first, last):
    found = {"after_imports": ready["after_imports_mib"], "after_first_compile": ready["level_mib"]}
    found |= {"after_first_step": first["rss_mib"], "peak": last["peak_mib"], "growth": last["growth_mib"]}
    if "xla_mib" in ready:
        found["xla"] = ready["xla_mib"]
    return found


def model_gflop(shape):
    """Arithmetic of one training step, once: the forward's matrix products, and twice as much for the backward."""
    b, t, d, v = shape["run"]["batch"], shape["run"]["tgt_len"], shape["d_model"], shape["n_token"]
    s, hk = t + shape["mem_len"], shape["n_head"] * shape["d_head"]
    layer = (2 * b * t + 2 * b * s + s) * d * hk  # queries and output; keys and values; positions
    layer += 3 * b * t * s * hk + 2 * b * t * d * shape["d_inner"]  # content, position and value terms; feed-forward
    return 3 * 2 * (shape["n_layer"] * layer + b * t * d * v) / 1e9


def against(partner, name, seconds, memory):
    """Speed of ours against a partner, growth of memory against the partner's."""
    low, ratio, high = harness.speedup(seconds, name, partner)
    growth = memory[name]["growth"] / memory[partner]["growth"]
    return {"ratio": ratio, "ratio_range": [low, high], "growth_ratio": growth}


def arithmetic(name, shape, seconds):
    """The products of a step, and the share of the rate of plain products at which ours computes them."""
    gflop, product_gflop = model_gflop(shape), 2 * 2048 * 256 * 1024 / 1e9
    shares = [gflop / s / (product_gflop / m) for s, m in zip(seconds[name], seconds["matmul"], strict=True)]
    rate = product_gflop / statistics.median(seconds["matmul"])
    return {"matmul_gflops": rate, "model_gflop_per_step": gflop, "share_of_matmul_rate": statistics.median(shares)}


def compare(setting, args):
    """Yields one line for each set of options of ours: it and its partners, in turn."""
    base = merge(TINY if args.tiny else SHAPES[setting], {"run": ADAM})
    options = [json.loads(text) for text in args.ours or ["{}"]]
    shapes = {f"ours{i}": merge({"dropout": 0.0, **base}, option) for i, option in enumerate(options)}
    steps = args.steps or (1 if args.tiny else BLOCK_STEPS)
    with contextlib.ExitStack() as stack:
        workers = {}
        for name in PARTNERS:
            python = sys.executable if name == "matmul" else args.torch_python
            workers[name] = harness.start_worker(stack, name, base, python)
        for name, shape in shapes.items():
            workers[name] = harness.start_worker(stack, "ours", shape)
        first = {name: harness.ask(worker, "steps 1") for name, worker in workers.items()}
        runs = {name: harness.steps_of(w, PRODUCTS if name == "matmul" else steps) for name, w in workers.items()}
        seconds, last, others = harness.alternate(runs, args.blocks, workers.values())
    memory = {name: memory_mib(ready, first[name], last[name]) for name, (_, ready) in workers.items()}
    for (name, shape), option in zip(shapes.items(), options, strict=True):
        tokens = shape["run"]["batch"] * shape["run"]["tgt_len"]
        line = {"setting": setting, "ours": option, **arithmetic(name, shape, seconds)}
        for side, worker in (("ours", name), ("hf", "hf"), ("xt", "xt")):
            line[side] = {
                "tok_per_s": tokens / statistics.median(seconds[worker]),
                "mem_mib": memory[worker],
                "loss_nats": [first[worker]["loss_nats"], last[worker]["loss_nats"]],
                "params": last[worker]["n_params"],
                "versions": workers[worker][1]["versions"],
            }
        line |= {f"against_{partner}": against(partner, name, seconds, memory) for partner in ("hf", "xt")}
        line |= {"ours_compile_s": workers[name][1]["compile_s"], "blocks": args.blocks}
        yield {**line, "cores_busy_with_others": others}


WORKERS = {"hf": hf_worker, "xt": xt_worker, "hf_reader": hf_reader_worker, "ours": ours_worker}
WORKERS["matmul"] = matmul_worker


def main(argv=None):
    parser = harness.make_parser("peers", __doc__, SHAPES)
    parser.add_argument(
        "--ours",
        action="append",
        metavar="JSON",
        help='fields of txl.Config, those of a run under "run"; may be given again',
    )
    parser.add_argument("--blocks", type=int, default=5, help="turns of each worker")
    parser.add_argument("--steps", type=int, help="steps in a block: 3")
    parser.add_argument("--torch_python", default=sys.executable, help=INSTALL.replace("%", "%%"))
    parser.add_argument("--worker", help="start as a worker, for the scripts here: --shape JSON")
    parser.add_argument("--shape", type=json.loads)
    args = parser.parse_args(argv)
    if args.worker:
        if args.worker in ("ours", "matmul"):
            flags.use_huge_pages()  # as train.py
        return harness.serve(WORKERS[args.worker](args.shape))
    for setting in args.parts:
        for line in compare(setting, args):
            harness.emit(line)


if __name__ == "__main__":
    main()
