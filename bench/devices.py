"""What sharding over 4 devices saves and costs: python -m bench.devices [memory|time] prints JSON lines.

memory: what a device holds and needs for enwik8 base, 24 rows, from shapes alone. time: steps of the default model in
turn, on 4 devices that this machine's cores stand in for, medians of paired blocks.
"""

import json
import statistics
import sys
from dataclasses import replace

import jax

import plan
import step
import train
import txl
from bench.memory import BASE, RUN, THRIFTY, in_turn, stepper, total_mib
from bench.peers import machine

N = 4
SHARDED = [dict(shard=kind) for kind in ("none", "opt", "params")]
GROUPS = [dict(shard=kind, shard_group=2) for kind in ("opt", "params")]


def memory():
    """Yields MiB that a device holds of the state, and that a step needs by XLA's own figures."""
    cfg, run = replace(BASE, **THRIFTY | dict(loss_chunk=1024)), replace(RUN, batch=24)
    for flags in SHARDED + [flags | dict(optimizer="muon") for flags in SHARDED] + GROUPS:
        sharded = replace(run, **flags)
        found = plan.entry(cfg, sharded, N, step.compile_step(cfg, sharded, N))
        kept = {name: found[name] for name in ("parameters_mib", "optimizer_mib", "total_mib")}
        yield {"what": "memory", "optimizer": sharded.optimizer, **flags, **kept}
    yield {"what": "memory", "optimizer": "adam", "devices": 1, "total_mib": total_mib(cfg, run)}


def paired(blocks=7):
    """Yields the time of a step by optimizer and sharding, over that without sharding."""
    for optimizer in ("muon", "adam"):
        runs = [train.Run(optimizer=optimizer, **flags) for flags in SHARDED]
        times = in_turn({run.shard: stepper(txl.Config(), run, N) for run in runs}, blocks)
        for kind, seconds in times.items():
            ratio = statistics.median(a / b for a, b in zip(seconds, times["none"]))
            ms = round(1e3 * statistics.median(seconds), 1)
            yield {"what": "time", "optimizer": optimizer, "shard": kind, "step_ms": ms, "ratio": round(ratio, 3)}


def main():
    jax.config.update("jax_num_cpu_devices", N)
    parts = {"memory": memory, "time": paired}
    for name in sys.argv[1:] or parts:
        for entry in parts[name]():
            print(json.dumps(entry | {"jax": jax.__version__} | machine()), flush=True)


if __name__ == "__main__":
    main()
