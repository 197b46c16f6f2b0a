"""What one accelerator does, as JSON lines: python -m bench.gpu [check times step decode] [--peak_tflops N] [--tiny]

check: every attention against dense in float32, output and gradients, and whether 20 repeats give the same bits.
times: forward and value_and_grad of one attention, milliseconds, medians of turns taken by all of them.
step: the enwik8 base model (12 layers, d_model 512) in bfloat16, at batch 22 and at the largest that fits.
decode: generated tokens per second. bench/gpu.sh runs each part in a process of its own, within 8 minutes in all.
--tiny: everything small and the fused kernels interpreted, so that a CPU can run it; its times mean nothing.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import attention
import generate
import plan
import step
import txl
from bench.memory import BASE, RUN

SMALL = replace(BASE, n_layer=1, n_head=2, d_model=16, d_head=4, d_inner=16, mem_len=8)
LENGTHS = [(T, K) for K in (64, 128) for T in (2048, 4096, 1024, 512)]  # T = M


def attentions(tiny):
    """{name: attention}: the same signature for all."""
    import kernels

    fused = partial(kernels.attention, block=16, device="gpu", interpret=True) if tiny else kernels.attention
    blocks = {"dense": None, "chunked": 16 if tiny else 128}
    return {name: partial(attention.attention, block=block) for name, block in blocks.items()} | {"pallas": fused}


def inputs(B, H, T, M, K, dtype):
    """q_u, q_v, k, v, r, queries scaled, and lo of full memory."""
    rng, S = np.random.default_rng(0), M + T
    shapes = [(B, H, T, K)] * 2 + [(B, H, S, K)] * 2 + [(H, S, K)]
    scales = [K**-0.5, K**-0.5, 1, 1, 1]
    arrays = [jnp.asarray(scale * rng.standard_normal(shape), dtype) for scale, shape in zip(scales, shapes)]
    return *arrays, jnp.zeros((B, T), jnp.int32)


def with_gradients(attend, *args):
    *args, lo = args
    out, pull = jax.vjp(lambda *args: attend(*args, lo), *args)
    return out, *pull(out)


def check(tiny):
    """Relative errors (norms) against dense attention in float32 with full products, and repeatability."""
    attends = attentions(tiny)
    sizes = [(1, 1, 20, 9, 5)] if tiny else [(2, 8, 300, 211, 64), (2, 3, 300, 0, 41), (1, 4, 700, 500, 128)]
    error = lambda a, b: float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b))
    for size, dtype in ((size, dtype) for size in sizes for dtype in ("bfloat16", "float32")[: 1 if tiny else 2]):
        args = inputs(*size, dtype)
        with jax.default_matmul_precision("highest"):
            wide = [a.astype(jnp.float32) for a in args[:5]]
            want = jax.jit(partial(with_gradients, attends["dense"]))(*wide, args[5])
        for name, attend in attends.items():
            with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
                run = jax.jit(partial(with_gradients, attend))
                got, *again = [run(*args) for _ in range(20)]
            same = all(np.array_equal(a, b) for other in again for a, b in zip(other, got))
            errors = {f"{of}_error": error(a, b) for of, a, b in zip(("out", "q_u", "q_v", "k", "v", "r"), got, want)}
            sized = dict(zip("BHTMK", size))
            yield {"attention": name, "dtype": dtype, **sized, **errors, "repeats_identical": same}


def times(tiny):
    """Each attention at growing lengths; null where it does not fit."""
    attends = attentions(tiny)
    for T, K in [(20, 5)] if tiny else LENGTHS:
        B, H = (1, 1) if tiny else (4, 512 // K)
        args, calls = inputs(B, H, T, T, K, "bfloat16"), {}
        for name, attend in attends.items():
            for what, run in (("forward", attend), ("value_and_grad", partial(with_gradients, attend))):
                call = partial(jax.jit(run), *args)
                try:
                    jax.block_until_ready(call())
                except jax.errors.JaxRuntimeError:  # dense attention of a long segment on a small device
                    call = None
                calls[f"{name}_{what}_ms"] = call
        took = {name: [] for name in calls}
        for _ in range(2 if tiny else 20):
            for name, call in calls.items():
                start = time.perf_counter()
                jax.block_until_ready(call and call())
                took[name].append(1e3 * (time.perf_counter() - start))
        found = {name: call and round(statistics.median(took[name]), 3) for name, call in calls.items()}
        yield {"dtype": "bfloat16", "B": B, "H": H, "T": T, "M": T, "K": K, **found}


def steps(tiny, peak_tflops):
    """Training steps of the base model: auto and pallas at its own batch, then auto at the largest that fits."""
    cfg, run = (SMALL, replace(RUN, batch=2, tgt_len=8)) if tiny else (replace(BASE, dtype="bfloat16"), RUN)
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    compiled = step.compile_step(cfg, run, 1)
    yield timed_step(cfg, run, compiled, peak_tflops)
    if not tiny:
        fused = replace(cfg, attention="pallas")
        yield timed_step(fused, run, step.compile_step(fused, run, 1), peak_tflops)
    if limit:  # what a step needs is linear in its rows
        twice = plan.total(step.compile_step(cfg, replace(run, batch=2 * run.batch), 1))
        a_row = (twice - plan.total(compiled)) / run.batch
        most = run.batch + (0.9 * limit - plan.total(compiled)) / a_row
        large = replace(run, batch=int(most) // 8 * 8)
        yield timed_step(cfg, large, step.compile_step(cfg, large, 1), peak_tflops)


def timed_step(cfg, run, compiled, peak_tflops):
    """The line of one compiled step: the median of eight, after two that do not count."""
    host = jax.tree.map(np.asarray, step.init_state(cfg, run, None, run.batch))
    state, took = step.to_devices(host, 1, run), []
    ids = np.random.default_rng(0).integers(0, cfg.n_token, (1, run.batch, run.tgt_len), np.int32)
    for i in range(10):
        start = time.perf_counter()
        state, told = compiled(state, ids, ids, np.int32(i))
        jax.block_until_ready((state, told))
        took.append(time.perf_counter() - start)
    seconds = statistics.median(took[2:])
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    *of_layer, loss = plan.products(cfg, run.tgt_len)
    rate = 6 * (cfg.n_layer * sum(of_layer) + loss) * run.batch / seconds / 1e12  # each once, there and back
    line = {"attention": cfg.attention, "dtype": cfg.dtype, "batch": run.batch, "tgt_len": run.tgt_len}
    line |= {"step_ms": round(1e3 * seconds, 2), "tok_per_s": round(run.batch * run.tgt_len / seconds)}
    line |= {"plan_mib": round(plan.total(compiled) / plan.MIB, 1), "peak_mib": peak and round(peak / plan.MIB, 1)}
    line |= {"model_tflops": round(rate, 4), "of_peak": round(rate / peak_tflops, 4) if peak_tflops else None}
    return line | {"loss_nats": float(np.ravel(told)[0])}


def decode(tiny):
    """Tokens per second of all rows together, over a full cache."""
    cfg, how = (
        SMALL if tiny else replace(BASE, dtype="bfloat16"),
        generate.How(0.8, top_k=0, top_p=1, min_p=0, n_known=256),
    )
    params = jax.jit(txl.init_params, static_argnums=1)(jax.random.key(0), cfg)
    prompts, n_tokens = [np.zeros(cfg.mem_len + 1, np.int32)], (4 if tiny else 20) * generate.BLOCK
    for rows in (1,) if tiny else (1, 16, 256):
        blocks = generate.stream(params, prompts, rows, n_tokens, how, 1, cfg, cfg.mem_len, 1)
        marks = [time.perf_counter() for _ in blocks]
        seconds = statistics.median(b - a for a, b in zip(marks[1:], marks[2:]))  # the first was compiled
        speed = round(rows * generate.BLOCK / seconds)
        yield {"dtype": cfg.dtype, "rows": rows, "mem_len": cfg.mem_len, "tok_per_s": speed}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help="check, times, step, decode; none: all")
    parser.add_argument("--peak_tflops", type=float, default=0, help="the device's, dense products of bfloat16")
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    opts = parser.parse_args(argv)
    parts = {"check": check, "times": times, "step": partial(steps, peak_tflops=opts.peak_tflops), "decode": decode}
    where = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    for name in opts.parts or parts:
        for line in parts[name](tiny=opts.tiny):
            print(json.dumps({"what": name, **line, **where}), flush=True)


if __name__ == "__main__":
    main()
