"""Generating and evaluating with the cache of projected memory, beside doing without. 20 minutes on 2 cores.

    python -m tools.bench.generation decode --torch_python ENV/bin/python   # ENV as for peers.py; without: no port
    python -m tools.bench.generation flat         # speed and bytes after 100, 20,000 and 100,000 tokens
    python -m tools.bench.generation evaluation   # reading a text with the cache and with the training forward

What a line compares took turns in one run: medians of blocks, ratios are medians of the blocks' own ratios.
--draw: results/flat.png.
"""

import contextlib
import gc
import statistics
import sys
import time
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import txl
from sample import BLOCK, SamplingParams, make_generate_block, sample_next_token
from tools.bench import harness
from tools.bench.peers import INSTALL, WIDE
from train import CACHE_AXES, make_cache, make_eval_step, replicate

SAMPLING = SamplingParams(1.0, 0, 1.0, 0.0, WIDE["n_token"])  # drawn from all that the model predicts
TURNS = dict(reuse=6 * BLOCK, many=3 * BLOCK, hidden=BLOCK, recompute=5, port=BLOCK, sum=2)  # steps of a turn
FULL = {
    "model": WIDE | dict(n_layer=6),
    "mem_lens": (512, 2048),
    "rows": 16,
    "sum_bytes": 2**30,
    "counts": (100, 20_004, 99_892),  # tokens behind the caches that `flat` keeps
    "timed": 7,  # blocks of tokens that it times from each
    "evaluation": dict(n_layer=16, n_head=10, d_model=410, d_head=41, d_inner=2100, mem_len=640, clamp_len=400),
    "segment": (4, 64),  # rows and tokens of evaluation
}
SMALL = {
    "model": dict(n_token=29, n_layer=2, d_model=16, n_head=2, d_head=6, d_inner=20),
    "mem_lens": (16, 32),
    "rows": 3,
    "sum_bytes": 2**20,
    "counts": (20, 52, 308),
    "timed": 1,
    "evaluation": dict(n_layer=2, n_head=2, d_model=16, d_head=6, d_inner=20, mem_len=16, clamp_len=12),
    "segment": (3, 8),
}
SUM = "sum", 1, 0
SAYS = {  # what a ratio compares
    ("reuse", "port"): "one row, projected memory kept; Hugging Face's port projects it for every token, memory full",
    ("many", "port"): "rows decoded together, tokens of all rows; the port's one row",
    ("reuse", "hidden"): "one row, projected memory kept; hidden states kept and projected again, as in the original",
    ("reuse", "recompute"): "one row, memory kept; the last mem_len + 1 tokens read anew for every token (table 9)",
    ("hidden", "recompute"): "one row, hidden states kept; the last mem_len + 1 tokens read anew for every token",
}

# the cache, as sample.py and an evaluation use it


def unstacked(params, cfg):
    """Parameters as the cache wants them, on one device."""
    return replicate(txl.unstack(params, cfg), np.zeros(1))


@partial(jax.pmap, axis_name="device", in_axes=((0, CACHE_AXES),), out_axes=(0, CACHE_AXES))
def placed(held):
    """(last, cache) on a device as `decode` leaves them: it would be compiled a second time otherwise."""
    return held


def empty(params, cfg, rows):
    """(last [1, B], cache) of rows that have read nothing."""
    return placed((np.zeros((1, rows), np.int32), make_cache(cfg, rows)(params, np.zeros(1))))


make_reader = cache(make_eval_step)  # one a config, so that it is compiled once


def read(params, ids, cache, cfg):
    """(summed nats, cache) after a segment ids [1, B, T], by the step of evaluation."""
    return make_reader(cfg)(params, ids, ids, np.ones(ids.shape, bool), cache)


def decode(params, last, cache, cfg, blocks):
    """(last [1, B], cache) after that many blocks of tokens, each fetched as sample.py does."""
    given, zeros = np.full((*last.shape, BLOCK), -1, np.int32), np.zeros(last.shape, np.int32)
    seeds = np.zeros(last.shape, np.uint32)
    for _ in range(blocks):
        ids, last, cache = make_generate_block(cfg, SAMPLING)(params, given, cache, last, zeros, zeros, seeds)
        np.asarray(ids)
    return last, cache


def random_ids(cfg, *shape):
    return np.random.default_rng(0).integers(cfg.n_token, size=shape, dtype=np.int32)


def n_bytes(*trees):
    return sum(a.nbytes for a in jax.tree.leaves(trees))


# ways of generating: each returns a function that does n steps and waits for them, and the bytes that a step reads


def reuse(params, cfg, rows):
    """Generating with the cache, its memory full."""
    weights = unstacked(params, cfg)
    last, cache = empty(weights, cfg, rows)
    held = [last, read(weights, random_ids(cfg, 1, rows, cfg.mem_len), cache, cfg)[1]]
    unread = sum(layer["w_r"].nbytes for layer in weights["layers"])  # the cache holds what it gives
    size = n_bytes(weights, held[1]) - unread

    def run(n):
        held[:] = decode(weights, *held, cfg, n // BLOCK)

    return run, size


def hidden(params, cfg):
    """Generating with the training forward and its memory of hidden states, full; in blocks as the cache's."""

    @partial(jax.jit, donate_argnums=2)
    def block(params, last, mems, key):
        def body(carry, key):
            last, mems = carry
            x, mems = txl.forward(params, last[None, None], mems, cfg)
            last = sample_next_token(txl.logits(params, x, cfg)[0, 0], key, SAMPLING).astype(jnp.int32)
            return (last, mems), last

        return lax.scan(body, (last, mems), jax.random.split(key, BLOCK))

    fill = jax.jit(lambda params, ids, mems: txl.forward(params, ids, mems, cfg)[1])
    mems = fill(params, random_ids(cfg, 1, cfg.mem_len), txl.init_mems(cfg, 1))
    held = [jnp.int32(0), mems]
    size = n_bytes(params, mems)

    def run(n):
        for _ in range(n // BLOCK):
            held[:], ids = block(params, *held, jax.random.key(0))
            np.asarray(ids)

    return run, size


def recompute(params, cfg):
    """Generating without memory: the training forward over the last mem_len + 1 tokens for each new one."""
    bare = replace(cfg, mem_len=0)

    @jax.jit
    def token(params, window, key):
        x, _ = txl.forward(params, window, txl.init_mems(bare, 1), bare)
        new = sample_next_token(txl.logits(params, x[:, -1:], bare)[0, 0], key, SAMPLING)
        return jnp.concatenate([window[:, 1:], new[None, None].astype(jnp.int32)], 1)

    held = [random_ids(cfg, 1, cfg.mem_len + 1)]

    def run(n):
        for _ in range(n):
            held[0] = token(params, held[0], jax.random.key(0)).block_until_ready()

    return run, n_bytes(params)


def bandwidth(size):
    """The yardstick: the sum of an array of that many bytes."""
    array, total = jnp.ones(size // 4), jax.jit(jnp.sum)

    def run(n):
        for _ in range(n):
            total(array).block_until_ready()

    return run, size


def decoding(sizes, blocks, torch_python):
    """Yields the speed of each way of generating, and ratios of those that SAYS compares."""
    rows, (short, long) = sizes["rows"], sizes["mem_lens"]
    cfg = txl.Config(**sizes["model"], mem_len=short)
    params, longer = harness.init_params(cfg), replace(cfg, mem_len=long)
    ours = {("reuse", 1, short): reuse(params, cfg, 1), ("reuse", 1, long): reuse(params, longer, 1)}
    ours |= {("many", rows, short): reuse(params, cfg, rows), ("hidden", 1, short): hidden(params, cfg)}
    ours |= {("recompute", 1, short): recompute(params, cfg), SUM: bandwidth(sizes["sum_bytes"])}
    runs, workers = {key: (run, TURNS[key[0]]) for key, (run, _) in ours.items()}, []
    with contextlib.ExitStack() as stack:
        for n in (short, long) if torch_python else ():
            workers.append(harness.start_worker(stack, "hf_reader", sizes["model"] | dict(mem_len=n), torch_python))
            runs["port", 1, n] = harness.steps_of(workers[-1], TURNS["port"])
        seconds, _, others = harness.alternate(runs, blocks, workers)
    about = {"part": "decode", "blocks": blocks, "cores_busy_with_others": others}
    if workers:
        about["versions"] = workers[0][1]["versions"]
    for (what, n_rows, mem_len), found in seconds.items():
        key = what, n_rows, mem_len
        step_s = statistics.median(found)
        line = {"what": what, "rows": n_rows, "mem_len": mem_len, "step_ms": 1e3 * step_s, "tok_per_s": n_rows / step_s}
        if key == SUM:
            continue
        if key in ours:  # times the time that reading its parameters and memory once takes at the speed of jnp.sum
            size, total = ours[key][1], ours[SUM][1]
            times = [a / (size * b / total) for a, b in zip(found, seconds[SUM], strict=True)]
            line |= {"read_mib": size / 2**20, "sum_gib_per_s": total / 2**30 / statistics.median(seconds[SUM])}
            line["times_reading"] = statistics.median(times)
        yield {**about, **line}
    tokens = {key: [s / key[1] for s in found] for key, found in seconds.items()}  # seconds per token
    for (name, other), says in SAYS.items():
        for key in [key for key in tokens if key[0] == name and (other, 1, key[2]) in tokens]:
            low, ratio, high = harness.speedup(tokens, key, (other, 1, key[2]))
            line = {"what": f"{name} / {other}", "rows": key[1], "mem_len": key[2], "ratio": ratio}
            yield {**about, **line, "ratio_range": [low, high], "says": says}


def walk(params, cfg, counts):
    """Yields at each count of tokens: it, a host copy of (last, cache), live bytes, ms per token of the blocks so far.

    All are decoded but the first few, which make no whole block and are read.
    """
    decode(params, *empty(params, cfg, 1), cfg, 1)  # compiles
    (last, cache), done, steps = empty(params, cfg, 1), counts[0] % BLOCK, []
    held = jax.block_until_ready((last, read(params, random_ids(cfg, 1, 1, done), cache, cfg)[1]))
    for count in counts:
        for _ in range((count - done) // BLOCK):
            start = time.perf_counter()
            held = decode(params, *held, cfg, 1)
            steps.append(1e3 * (time.perf_counter() - start) / BLOCK)
        done = count
        kept = jax.tree.map(lambda a: np.array(jnp.copy(a)), held)
        gc.collect()
        yield count, kept, n_bytes(jax.live_arrays()), list(steps)


def flat(sizes, blocks, _):
    """Yields what a token costs after few tokens and after many: time and live bytes."""
    cfg = txl.Config(**sizes["model"], mem_len=sizes["mem_lens"][0])
    params = unstacked(harness.init_params(cfg), cfg)
    counts, n = sizes["counts"], sizes["timed"]
    runs, live = {}, {}
    for count, kept, live[count], steps in walk(params, cfg, counts):
        runs[count] = partial(from_cache, params, kept, cfg), n * BLOCK
        if count != counts[0]:
            yield {"part": "flat", "what": "decoded", "mem_len": cfg.mem_len, **spans(counts[0], n, steps)}
    seconds, _, others = harness.alternate(runs, blocks)
    for count in counts:
        line = {"part": "flat", "what": "kept", "tokens": count, "mem_len": cfg.mem_len, "blocks": blocks}
        line |= {"ms_per_token": 1e3 * statistics.median(seconds[count])}
        line |= {"ratio": harness.speedup(seconds, counts[0], count)[1], "cores_busy_with_others": others}
        line |= {"live_bytes": live[count], "live_bytes_ratio": live[count] / live[counts[0]]}
        yield {**line, "says": f"time of a token from a cache kept after so many; from one kept after {counts[0]}"}


def from_cache(params, kept, cfg, n):
    """Decodes n tokens from a kept cache; replies with the seconds that they took."""
    held = jax.block_until_ready(placed(kept))
    start = time.perf_counter()
    decode(params, *held, cfg, n // BLOCK)
    return {"seconds": time.perf_counter() - start}


def spans(early, n, steps):
    """One text, block after block: medians of spans that double; the last n blocks over the n after the first few."""
    first, skip = early % BLOCK, early // BLOCK
    edges = [0, *(2**i for i in range(len(steps).bit_length()) if 2**i < len(steps)), len(steps)]
    found = [(first + BLOCK * (a + b) / 2, statistics.median(steps[a:b])) for a, b in zip(edges, edges[1:])]
    ratio = statistics.median(steps[-n:]) / statistics.median(steps[skip : skip + n])
    return {"tokens": [at for at, _ in found], "ms_per_token": [ms for _, ms in found], "ratio": ratio}


def evaluation(sizes, blocks, _):
    """Yields tokens per second of reading a text with the cache and with the training forward."""
    rows, T = sizes["segment"]
    cfg = txl.Config(n_token=sizes["model"]["n_token"], same_length=True, **sizes["evaluation"])
    ids = random_ids(cfg, rows, T)
    params = harness.init_params(cfg)
    weights = unstacked(params, cfg)
    forward = jax.jit(partial(txl.token_losses, cfg=cfg), donate_argnums=3)
    held = {"training": txl.init_mems(cfg, rows), "cache": make_cache(cfg, rows)(weights, np.zeros(1))}

    def training(n):
        for _ in range(n):
            losses, held["training"] = forward(params, ids, ids, held["training"])
            losses.block_until_ready()

    def cached(n):
        for _ in range(n):
            total, held["cache"] = read(weights, ids[None], held["cache"], cfg)
            total.block_until_ready()

    for run in (training, cached):
        run(cfg.mem_len // T)  # until memory is full
    seconds, _, others = harness.alternate({"cache": (cached, 2), "training": (training, 2)}, blocks)
    low, ratio, high = harness.speedup(seconds, "cache", "training")
    line = {"part": "evaluation", "what": "cache / training", "rows": rows, "tgt_len": T, "mem_len": cfg.mem_len}
    line |= {f"{name}_tok_per_s": rows * T / statistics.median(s) for name, s in seconds.items()}
    says = "segments read with projected memory kept; the training forward projects it for every segment"
    line |= {"ratio": ratio, "ratio_range": [low, high], "blocks": blocks, "cores_busy_with_others": others}
    yield {**line, "says": says}


def draw_flat():
    """Time of a token against tokens generated so far, beside what a token costs otherwise."""
    _, run = harness.read_results("reading", what="decoded")
    kept = harness.read_results("reading", what="kept")
    figure = harness.new_figure(6, 3.6)
    axes = figure.add_subplot(xlabel=f"tokens so far, {run['mem_len']} remembered", ylabel="ms per token, 2 CPU cores")
    others = {"recompute": ("ours without memory: its window read anew", "C1")}
    others |= {"port": ("Hugging Face's port, memory full", "C3")}
    others |= {"hidden": ("ours with memory of hidden states, as in the original", "C2")}
    for name, (label, color) in others.items():
        (cost,) = harness.read_results("reading", what=name, mem_len=run["mem_len"])
        axes.axhline(cost["step_ms"], color=color, linestyle="--")
        axes.text(10, 1.08 * cost["step_ms"], label, color=color, fontsize=8)
    axes.plot(run["tokens"], run["ms_per_token"], ".-", label="the cache, one text decoded")
    ms = [line["ms_per_token"] for line in kept]
    axes.plot([line["tokens"] for line in kept], ms, "kD", label="the same from three kept caches")
    axes.set(xscale="log", yscale="log", ylim=(0.2, 100), yticks=[1, 10, 100], yticklabels=["1", "10", "100"])
    axes.legend(fontsize=8, loc="lower left")
    harness.save_picture(figure, "flat.png")


PARTS = {"decode": decoding, "flat": flat, "evaluation": evaluation}


def main(argv=None):
    parser = harness.make_parser("generation", __doc__, PARTS)
    parser.add_argument("--torch_python", help=INSTALL.replace("%", "%%"))
    parser.add_argument("--blocks", type=int, default=7, help="turns of each")
    parser.add_argument("--draw", action="store_true", help="draw the committed results")
    args = parser.parse_args(argv)
    if args.draw:
        draw_flat()
    if "decode" in args.parts and not args.torch_python:
        print(f"the port is left out: {INSTALL}", file=sys.stderr)
    for part in args.parts:
        for line in PARTS[part](SMALL if args.tiny else FULL, args.blocks, args.torch_python):
            harness.emit(line)


if __name__ == "__main__":
    main()
