"""Memory of the training step, measured: python -m bench.memory [plan|slopes|time|resident] prints JSON lines.

plan: what --plan prints for enwik8 base. slopes: XLA's total of the thriftiest step against layers, segment and memory
length, from shapes alone.
time: steps of the thriftiest and of the fastest options in turn, medians of paired blocks.
resident: growth of this process's resident memory over the first steps beside the plan's figure.
"""

import json
import statistics
import sys
import threading
import time
from dataclasses import replace

import jax
import numpy as np

import plan
import step
import train
import txl
from bench.peers import machine, status_mib

BASE = txl.Config(n_token=205, n_layer=12, n_head=8, d_model=512, d_head=64, d_inner=2048, mem_len=512)
RUN = train.Run(batch=22, tgt_len=512, optimizer="adam")
THRIFTY = plan.THRIFTY | dict(loss_chunk=512)  # the tokens of a row


def total_mib(cfg, run):
    """XLA's own total of one compiled step on one device."""
    return round(plan.total(step.compile_step(cfg, run, 1)) / plan.MIB, 1)


def planned():
    """Yields the plan's lines, the setting that is asked for first."""
    for cfg, run in plan.candidates(BASE, RUN, RUN.batch):
        yield {"what": "plan"} | plan.measure(cfg, run, 1)


def slopes():
    """Yields how the thriftiest step grows with layers, and with the lengths of segment and memory together."""
    cfg = replace(BASE, **THRIFTY)
    for n in (2, 6, 12, 24):
        yield {"what": "layers", "n_layer": n, "total_mib": total_mib(replace(cfg, n_layer=n), RUN)}
    for n in (256, 512, 1024, 2048):
        for name, options in (("thrifty", THRIFTY), ("dense", dict(attention="dense"))):
            sized = replace(BASE, mem_len=n, **options)
            yield {"what": name, "tgt_len": n, "mem_len": n, "total_mib": total_mib(sized, replace(RUN, tgt_len=n))}


def stepper(cfg, run, n_devices=1):
    """A function that does one step and waits for it."""
    compiled = step.compile_step(cfg, run, n_devices)
    held = [step.fresh_state(cfg, run, None, n_devices)]
    ids = np.random.default_rng(0).integers(0, cfg.n_token, (run.batch, run.tgt_len), np.int32)
    ids = step.spread(ids, n_devices)

    def one():
        held[0], told = compiled(held[0], ids, ids, np.int32(0))
        jax.block_until_ready((held[0], told))

    return one


def in_turn(steps, blocks):
    """{name: seconds of each block} of functions called in turn, after one call of each."""
    times = {name: [] for name in steps}
    for one in steps.values():
        one()
    for _ in range(blocks):
        for name, one in steps.items():
            start = time.perf_counter()
            one()
            times[name].append(time.perf_counter() - start)
    return times


def paired(blocks=7):
    """Yields the time of the thriftiest options over that of the fastest: 3 layers, 2 rows, else enwik8 base."""
    cfg, run = replace(BASE, n_layer=3), replace(RUN, batch=2)
    fast = {"auto": {}, "dense": dict(attention="dense")}
    options = {**fast, "thrifty": THRIFTY}
    times = in_turn({name: stepper(replace(cfg, **more), run) for name, more in options.items()}, blocks)
    medians = {f"{name}_ms": round(1e3 * statistics.median(t), 1) for name, t in times.items()}
    best = min(fast, key=lambda name: statistics.median(times[name]))
    ratio = statistics.median(a / b for a, b in zip(times["thrifty"], times[best]))
    yield {"what": "time", **medians, "fastest": best, "ratio": round(ratio, 3), "blocks": blocks}


def resident():
    """Yields the largest growth of resident memory over three steps, compiled before, and the plan's total."""
    cfg, run = replace(BASE, n_layer=6, **THRIFTY), replace(RUN, batch=16)
    compiled = step.compile_step(cfg, run, 1)
    before, seen, done = status_mib("VmRSS"), [], threading.Event()

    def watch():
        while not done.wait(0.02):
            seen.append(status_mib("VmRSS"))

    thread = threading.Thread(target=watch)
    thread.start()
    state = step.to_devices(jax.tree.map(np.asarray, step.init_state(cfg, run, None, run.batch)), 1, run)
    ids = np.zeros((1, run.batch, run.tgt_len), np.int32)
    for _ in range(3):
        state, told = compiled(state, ids, ids, np.int32(0))
        jax.block_until_ready(told)
    done.set()
    thread.join()
    planned, grown = plan.total(compiled) / plan.MIB, max(seen) - before
    yield {
        "what": "resident",
        "plan_mib": round(planned),
        "grown_mib": round(grown),
        "ratio": round(grown / planned, 3),
    }


def main():
    parts = {"plan": planned, "slopes": slopes, "time": paired, "resident": resident}
    for name in sys.argv[1:] or parts:
        for entry in parts[name]():
            print(json.dumps(entry | {"jax": jax.__version__} | machine()), flush=True)


if __name__ == "__main__":
    main()
