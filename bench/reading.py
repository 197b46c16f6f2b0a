"""Reading and generating, measured on this machine: what a cache of memory gives, printed as JSON lines.

    python -m bench.reading decode --torch_python ENV/bin/python   # tokens per second beside recomputing and the port
    python -m bench.reading flat         # the same speed and bytes after 100, 20,000 and 100,000 tokens
    python -m bench.reading evaluation   # reading a text with the cache beside the training forward

ENV as for bench.peers; without it the port is left out. All that a line compares took turns in one run; its "says"
tells in words what it compares. Figures are medians of blocks, ratios medians of the blocks' own ratios.
"""

import argparse
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
from bench import peers
from evaluation import CACHE_AXES, copies, make_cache, make_eval
from generate import BLOCK, How, draw, make_generate

HOW = How(1.0, 0, 1.0, 0.0, peers.WIDE["n_token"])  # drawn from all that the model predicts
TURNS = dict(reuse=6 * BLOCK, many=3 * BLOCK, hidden=BLOCK, recompute=5, port=BLOCK, sum=2)  # steps of a turn
FULL = {
    "model": peers.WIDE | dict(n_layer=6),
    "mem_lens": (512, 2048),
    "rows": 16,
    "sum_bytes": 2**30,
    "counts": (100, 20_004, 99_892),  # tokens behind the caches that `flat` keeps
    "timed": 7,  # blocks of tokens that it times from each
    "evaluation": dict(n_layer=16, n_head=10, d_model=410, d_head=41, d_inner=2100, mem_len=640, clamp_len=400),
    "segment": (4, 64),  # rows and tokens of evaluation
}
TINY = {
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
SAYS = {
    ("reuse", "port"): "one row, mem_len {mem_len}: keys and values of memory kept, against Hugging Face's port, which"
    " keeps hidden states and projects all of them again for every token; its memory full, too",
    ("many", "port"): "{rows} rows together, mem_len {mem_len}, tokens of all rows, against the port's one row",
    ("reuse", "hidden"): "one row, mem_len {mem_len}: keys and values of memory kept, against hidden states kept and"
    " projected again, as the original does, in our own code: a baseline with memory, too",
    ("reuse", "recompute"): "one row, mem_len {mem_len}: memory reused, against none, where every token reads its last"
    " {window} tokens anew: what the paper's table 9 compares; not a speed-up over a model that keeps anything",
    ("hidden", "recompute"): "one row, mem_len {mem_len}: hidden states kept, as in the paper, against reading the last"
    " {window} tokens anew for every token",
}


def init(cfg):
    return jax.jit(txl.init_params, static_argnums=1)(jax.random.key(0), cfg)


def for_reading(params, cfg):
    """Parameters as the cache wants them, on one device."""
    return copies(txl.unstack(params, cfg), np.zeros(1))


def random_ids(cfg, *shape):
    return np.random.default_rng(0).integers(cfg.n_token, size=shape, dtype=np.int32)


reader = cache(make_eval)  # one a config, so that it is compiled once


def read(params, ids, cache, cfg):
    """The cache after a segment ids [1, B, T], by the step of evaluation."""
    return reader(cfg)(params, ids, ids, np.ones(ids.shape, bool), cache)[1]


def decode(params, last, cache, cfg, blocks):
    """(last [1, B], cache) after that many blocks of tokens, each fetched as sample.py does."""
    given, zeros = np.full((*last.shape, BLOCK), -1, np.int32), np.zeros(last.shape, np.int32)
    for _ in range(blocks):
        ids, last, cache = make_generate(cfg, HOW)(params, given, cache, last, zeros, zeros, np.int32(0))
        np.asarray(ids)
    return last, cache


@partial(jax.pmap, axis_name="device", in_axes=((0, CACHE_AXES),), out_axes=(0, CACHE_AXES))
def placed(held):
    """(last, cache) on a device as `decode` leaves them: it would be compiled a second time otherwise."""
    return held


def empty(params, cfg, rows):
    """(last [1, B], cache) of rows that have read nothing."""
    return placed((np.zeros((1, rows), np.int32), make_cache(cfg, rows)(params, np.zeros(1))))


def n_bytes(*trees):
    return sum(a.nbytes for a in jax.tree.leaves(trees))


# What takes turns: each returns a function that does n steps and waits for them, and the bytes that a step reads.


def reuse(params, cfg, rows):
    """Generating with the cache, its memory full."""
    weights = for_reading(params, cfg)
    last, cache = empty(weights, cfg, rows)
    held = [last, read(weights, random_ids(cfg, 1, rows, cfg.mem_len), cache, cfg)]
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
            last = draw(txl.logits(params, x, cfg)[0, 0], key, HOW).astype(jnp.int32)
            return (last, mems), last

        return lax.scan(body, (last, mems), jax.random.split(key, BLOCK))

    fill = jax.jit(lambda params, ids, mems: txl.forward(params, ids, mems, cfg)[1])
    mems = fill(params, random_ids(cfg, 1, cfg.mem_len), txl.init_mems(cfg, 1))
    held, size = [jnp.int32(0), mems], n_bytes(params, mems)

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
        new = draw(txl.logits(params, x[:, -1:], bare)[0, 0], key, HOW)
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


def turns(runs, blocks, workers):
    """Seconds per step of each of runs {name: (function of n, n)}, one figure a block; cores that others kept busy.

    As peers.alternate, but for functions. One that takes its own time returns its seconds per step.
    """
    seconds = {name: [] for name in runs}
    for run, n in runs.values():
        run(n)
    begin, start = time.perf_counter(), others_cpu_seconds(workers)
    for block in range(blocks):
        for name in list(runs)[:: 1 if block % 2 == 0 else -1]:
            run, n = runs[name]
            before = time.perf_counter()
            own = run(n)
            seconds[name].append((time.perf_counter() - before) / n if own is None else own)
    others = (others_cpu_seconds(workers) - start) / (time.perf_counter() - begin)
    return seconds, {"blocks": blocks, "cores_busy_with_others": others}


def others_cpu_seconds(workers):
    """CPU time so far of all but this process and its workers."""
    machine, theirs = peers.cpu_seconds(workers)
    return machine - theirs - time.process_time()


def decoding(sizes, blocks, torch_python):
    """Yields what generating costs: with the cache, with hidden states, without memory, and by the port."""
    rows, (short, long) = sizes["rows"], sizes["mem_lens"]
    cfg = txl.Config(**sizes["model"], mem_len=short)
    params, longer = init(cfg), replace(cfg, mem_len=long)
    ours = {("reuse", 1, short): reuse(params, cfg, 1), ("reuse", 1, long): reuse(params, longer, 1)}
    ours |= {("many", rows, short): reuse(params, cfg, rows), ("hidden", 1, short): hidden(params, cfg)}
    ours |= {("recompute", 1, short): recompute(params, cfg), SUM: bandwidth(sizes["sum_bytes"])}
    runs, workers = {key: (run, TURNS[key[0]]) for key, (run, _) in ours.items()}, {}
    with contextlib.ExitStack() as stack:
        for n in (short, long) if torch_python else ():
            key, shape = ("port", 1, n), sizes["model"] | dict(mem_len=n)
            workers[key] = peers.start_worker(stack, "hf_reader", torch_python, shape)
            runs[key] = partial(tell, workers, key), TURNS["port"]
        seconds, told = turns(runs, blocks, workers)
    told |= {"versions": " ".join([f"jax {jax.__version__}", *{ready["versions"] for _, ready in workers.values()}])}
    for key in [key for key in seconds if key != SUM]:
        yield costs(key, seconds, ours) | told
    tokens = {key: [s / key[1] for s in found] for key, found in seconds.items()}  # seconds per token
    for (name, other), says in SAYS.items():
        for key in [key for key in tokens if key[0] == name and (other, 1, key[2]) in tokens]:
            yield compared(key, (other, 1, key[2]), tokens, says) | told


def tell(workers, key, n):
    """n steps of a worker."""
    peers.ask(workers, key, f"steps {n}")


def costs(key, seconds, ours):
    """One line: the speed of one way of generating and, of ours, its time in times that of reading its bytes."""
    (name, rows, mem_len), step_s = key, statistics.median(seconds[key])
    line = {"part": "decode", "what": name, "rows": rows, "mem_len": mem_len, "step_ms": 1e3 * step_s}
    line |= {"tok_per_s": rows / step_s, "says": "the port's speed, for the lines that compare with it"}
    if key not in ours:
        return line
    size, total = ours[key][1], ours[SUM][1]
    times = [a / (size * b / total) for a, b in zip(seconds[key], seconds[SUM], strict=True)]
    line |= {"read_mib": size / 2**20, "sum_gib_per_s": total / 2**30 / statistics.median(seconds[SUM])}
    kept = {"hidden": " and memory", "recompute": ""}.get(name, ", cache and positions")
    says = f"a step against the time that reading parameters{kept} once takes at the speed of jnp.sum"
    return line | {"times_reading": statistics.median(times), "says": says}


def compared(key, other, tokens, says):
    """One line: the ratio of tokens per second of two ways of generating."""
    (name, rows, mem_len), (low, ratio, high) = key, peers.paired(tokens, key, other)
    rates = {f"{side}_tok_per_s": 1 / statistics.median(tokens[k]) for side, k in (("ours", key), ("other", other))}
    line = {"part": "decode", "what": f"{name} / {other[0]}", "rows": rows, "mem_len": mem_len, **rates}
    says = says.format(rows=rows, mem_len=mem_len, window=mem_len + 1)
    return line | {"ratio": ratio, "ratio_range": [low, high], "says": says}


def copied(tree):
    return jax.tree.map(lambda a: np.array(jnp.copy(a)), tree)


def live_bytes():
    gc.collect()
    return n_bytes(jax.live_arrays())


def walk(params, cfg, counts):
    """Yields at each count of tokens: it, a host copy of (last, cache), live bytes, ms per token of the blocks so far.

    All are decoded but the first few, which make no whole block and are read.
    """
    decode(params, *empty(params, cfg, 1), cfg, 1)  # compiles
    (last, cache), done, steps = empty(params, cfg, 1), counts[0] % BLOCK, []
    held = jax.block_until_ready((last, read(params, random_ids(cfg, 1, 1, done), cache, cfg)))
    for count in counts:
        for _ in range((count - done) // BLOCK):
            start = time.perf_counter()
            held = decode(params, *held, cfg, 1)
            steps.append(1e3 * (time.perf_counter() - start) / BLOCK)
        done = count
        yield count, copied(held), live_bytes(), list(steps)


def flat(sizes, blocks, _):
    """Yields what a token costs after few tokens and after many: time and live bytes."""
    cfg = txl.Config(**sizes["model"], mem_len=sizes["mem_lens"][0])
    params, counts, n = for_reading(init(cfg), cfg), sizes["counts"], sizes["timed"]
    told, kept, live = {"mem_len": cfg.mem_len, "versions": f"jax {jax.__version__}"}, {}, {}
    for count, kept[count], live[count], steps in walk(params, cfg, counts):
        if count in counts[1:]:
            yield decoded(counts[0], n, steps) | told
    seconds, more = turns(
        {count: (partial(from_cache, params, kept[count], cfg, n), 1) for count in counts}, blocks, {}
    )
    for count in counts:
        _, ratio, _ = peers.paired(seconds, counts[0], count)
        step_s = statistics.median(seconds[count])
        line = {"part": "flat", "what": "kept", "tokens": count, "ms_per_token": 1e3 * step_s, "ratio": ratio}
        line |= {"live_bytes": live[count], "live_bytes_ratio": live[count] / live[counts[0]]}
        says = (
            f"time of {n * BLOCK} tokens from a cache kept after {count} against that from one kept after {counts[0]},"
        )
        yield line | {"says": f"{says} live bytes then and there"} | told | more


def from_cache(params, kept, cfg, blocks, _):
    """Seconds per token of some blocks decoded from a kept cache."""
    held = jax.block_until_ready(placed(kept))
    start = time.perf_counter()
    decode(params, *held, cfg, blocks)
    return (time.perf_counter() - start) / (blocks * BLOCK)


def decoded(early, n, steps):
    """One line: a text of blocks decoded one after the other, medians of blocks in spans that double."""
    first, skip = early % BLOCK, early // BLOCK
    edges = [0, *(2**i for i in range(len(steps).bit_length()) if 2**i < len(steps)), len(steps)]
    spans = list(zip(edges, edges[1:]))
    ratio = statistics.median(steps[-n:]) / statistics.median(steps[skip : skip + n])
    line = {"part": "flat", "what": "decoded", "tokens": [first + BLOCK * (a + b) / 2 for a, b in spans]}
    line |= {"ms_per_token": [statistics.median(steps[a:b]) for a, b in spans], "ratio": ratio}
    says = f"one text, token by token: the last {n * BLOCK} of {first + BLOCK * len(steps)} tokens against the"
    return line | {"says": f"{says} {n * BLOCK} after the first {early}"}


def evaluation(sizes, blocks, _):
    """Yields tokens per second of reading a text with the cache and with the training forward."""
    rows, T = sizes["segment"]
    cfg = txl.Config(n_token=sizes["model"]["n_token"], same_length=True, **sizes["evaluation"])
    ids, params = random_ids(cfg, rows, T), init(cfg)
    weights, memory = for_reading(params, cfg), jax.jit(partial(txl.token_losses, cfg=cfg), donate_argnums=3)
    held = {"training": txl.init_mems(cfg, rows)}
    held["cache"] = make_cache(cfg, rows)(weights, np.zeros(1))
    eval_step, whole = make_eval(cfg), np.ones((1, rows, T), bool)

    def training(n):
        for _ in range(n):
            losses, held["training"] = memory(params, ids, ids, held["training"])
            losses.block_until_ready()

    def cached(n):
        for _ in range(n):
            total, held["cache"] = eval_step(weights, ids[None], ids[None], whole, held["cache"])
            total.block_until_ready()

    for run in (training, cached):
        run(cfg.mem_len // T)  # until memory is full
    seconds, told = turns({"cache": (cached, 2), "training": (training, 2)}, blocks, {})
    low, ratio, high = peers.paired(seconds, "cache", "training")
    line = {
        "part": "evaluation",
        "what": "cache / training forward",
        "rows": rows,
        "tgt_len": T,
        "mem_len": cfg.mem_len,
    }
    line |= {f"{name}_tok_per_s": rows * T / statistics.median(s) for name, s in seconds.items()}
    says = (
        f"segments of {T} tokens over {cfg.mem_len} remembered: evaluation with keys and values of memory kept, against"
    )
    says += " the training forward, which projects memory again for every segment"
    yield line | {"ratio": ratio, "ratio_range": [low, high], "says": says, "versions": f"jax {jax.__version__}"} | told


PARTS = {"decode": decoding, "flat": flat, "evaluation": evaluation}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="decode, flat, evaluation; without: all three")
    parser.add_argument("--torch_python", help=peers.INSTALL.replace("%", "%%"))
    parser.add_argument("--blocks", type=int, default=7, help="turns of each")
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that all runs")
    args = parser.parse_args(argv)
    if unknown := [part for part in args.parts if part not in PARTS]:
        parser.error(f"{unknown[0]} is no part: give {', '.join(PARTS)}")
    for part in args.parts or PARTS:
        if part == "decode" and not args.torch_python:
            print(f"the port is left out: {peers.INSTALL}", file=sys.stderr)
        for line in PARTS[part](TINY if args.tiny else FULL, args.blocks, args.torch_python):
            peers.emit(line | peers.machine())


if __name__ == "__main__":
    main()
