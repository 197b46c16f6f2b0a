"""What all measurements share: result lines, paired alternating timing, worker processes, a training step.

Nothing but numpy is imported at the top: workers also run in the Python of Hugging Face's port, which has no jax.
"""

import argparse
import ctypes
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
MIB = 2**20

# command line, result lines and pictures


def make_parser(name, doc, parts, default=()):
    """An argument parser for `python -m tools.bench.NAME PART ...`; default: the parts that run if none is given."""
    parser = argparse.ArgumentParser(f"python -m tools.bench.{name}", description=doc, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter

    def part(word):
        if word not in parts:
            raise argparse.ArgumentTypeError(f"{word!r} is unknown: give some of {', '.join(parts)}")
        return word

    what = f"of {', '.join(parts)}; none: {', '.join(default)}" if default else f"some of {', '.join(parts)}"
    parser.add_argument("parts", nargs="*", type=part, metavar="PART", default=list(default), help=what)
    parser.add_argument("--tiny", action="store_true", help="small sizes that take seconds: only to see that it works")
    return parser


def machine():
    """Where a figure was measured, by which jax, and of which commit."""
    cpu = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        commit = ""
    about = {"cpu": cpu[0] if cpu else platform.machine(), "cores": os.cpu_count(), "load_1min": os.getloadavg()[0]}
    return {"jax": version("jax"), **about, "commit": commit}


def emit(line):
    """Prints a result as one JSON line, floats with six digits, with what `machine` tells."""

    def short(x):
        if isinstance(x, dict):
            return {key: short(value) for key, value in x.items()}
        if isinstance(x, list):
            return [short(value) for value in x]
        return float(f"{x:.6g}") if isinstance(x, float) else x

    print(json.dumps(short({**line, **machine()})), flush=True)


def read_results(name, **want):
    """The lines of a committed result file that have these values."""
    lines = map(json.loads, (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines())
    return [line for line in lines if all(line.get(key) == value for key, value in want.items())]


def new_figure(*size):
    """A matplotlib figure; exits where matplotlib is missing."""
    from tools import plot

    return plot.new_figure(*size) or sys.exit("matplotlib is missing: pip install matplotlib")


def save_picture(figure, name):
    figure.savefig(RESULTS / name, dpi=130)
    print(f"drawn in {RESULTS / name}", file=sys.stderr)


# turns


def alternate(runs, blocks, workers=()):
    """Seconds per step of each of runs {name: (function of n, n)}, one a block; last replies; cores busy with others.

    One warm-up call each. The order turns round from block to block, so that a machine that drifts favours none.
    A function may return a dict, its reply; one that takes its own time says it there: {"seconds": of all n steps}.
    """
    for function, n in runs.values():
        function(n)
    seconds, replies = {name: [] for name in runs}, {}
    begin, busy = time.perf_counter(), others_cpu_seconds(workers)
    for block in range(blocks):
        for name in list(runs)[:: 1 if block % 2 == 0 else -1]:
            function, n = runs[name]
            start = time.perf_counter()
            replies[name] = function(n) or {}
            took = replies[name].get("seconds", time.perf_counter() - start)
            seconds[name].append(took / n)
    others = (others_cpu_seconds(workers) - busy) / (time.perf_counter() - begin)
    return seconds, replies, others


def speedup(seconds, name, other):
    """How many times faster `name` was than `other`: lowest, median and highest of the blocks' ratios."""
    ratios = sorted(b / a for a, b in zip(seconds[name], seconds[other], strict=True))
    return ratios[0], statistics.median(ratios), ratios[-1]


def others_cpu_seconds(workers):
    """CPU time of the machine so far, without this process and its workers."""
    tick = os.sysconf("SC_CLK_TCK")
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    total = (user + nice + system + irq + softirq + steal) / tick - time.process_time()
    for process, _ in workers:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        total -= (int(fields[11]) + int(fields[12])) / tick  # utime and stime
    return total


# workers: processes that take turns. Each reads "steps N" or "evaluate" and answers with a JSON line


def status_mib(field):
    """A memory figure of this process in MiB: VmRSS is resident now, VmHWM its high-water mark."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"/proc/self/status has no {field}: this needs Linux")


def settle_level(counted_mib=0):
    """The level that growth counts from; returns it and the high-water mark so far, and starts that mark anew.

    What compilation freed is handed back to the system first: kept by malloc, it would hide later growth.
    counted_mib: what is there already and counts as growth.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = status_mib("VmHWM")
    Path("/proc/self/clear_refs").write_text("5")
    return {"level_mib": status_mib("VmRSS") - counted_mib, "peak_before_level_mib": before}


def serve(worker):
    """A worker's whole life: a generator that first yields what it says when ready, then a reply to each command."""
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


def start_worker(stack, name, shape, python=sys.executable, data=None, folder=ROOT, module="peers"):
    """(process, what it said when ready) of a worker of a script; it ends with the stack, or with this process."""
    command = [python, "-m", f"tools.bench.{module}", "--worker", name, "--shape", json.dumps(shape)]
    if data:
        command += ["--data", str(Path(data).resolve())]
    process = subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stack.callback(process.wait)
    stack.callback(process.stdin.close)
    return process, read_reply(process)


def read_reply(process):
    line = process.stdout.readline()
    if not line:
        sys.exit(f"{' '.join(process.args[:5])} ended with {process.wait()}: its error stands above")
    return json.loads(line)


def ask(worker, command):
    """A worker's reply to a command."""
    print(command, file=worker[0].stdin, flush=True)
    return read_reply(worker[0])


def steps_of(worker, n):
    """What `alternate` takes: a worker's steps, and how many."""
    return lambda n: ask(worker, f"steps {n}"), n


def package_versions(*names):
    return " ".join(f"{name} {version(name)}" for name in names)


# a training step of ours: the one place that knows how train.py makes one


def compile_step(cfg, run, n_devices=1):
    """The training step, compiled from shapes."""
    import train

    return train.compile_train_step(cfg, run, train.make_layout(cfg, run, n_devices))


def total_mib(compiled):
    """XLA's own total of a compiled program in MiB."""
    import train

    return train.xla_total(compiled) / MIB


def state_mib(cfg, run):
    """Parameters, optimizer state and memories of one device in MiB."""
    import train

    return train.nbytes(train.state_shapes(cfg, run, train.make_layout(cfg, run, 1))) / MIB


def random_batches(n_token, rows, T, seed=0):
    """Endless ids, targets [rows, T] int32 of a skewed random stream that a model can learn something from."""
    rng = np.random.default_rng(seed)
    last = rng.integers(n_token, size=(rows, 1))
    while True:
        jumps = np.minimum(rng.geometric(0.2, (rows, T)), n_token - 1)
        stream = np.concatenate([last, (last + jumps.cumsum(1)) % n_token], axis=1)
        last = stream[:, -1:]
        yield stream[:, :-1].astype(np.int32), stream[:, 1:].astype(np.int32)


def make_stepper(compiled, cfg, run, n_devices=1):
    """A function of n that takes n training steps from a state made now, waits for them and replies with the loss."""
    import jax

    import train

    layout = train.make_layout(cfg, run, n_devices)
    held = {"state": train.fresh_state(cfg, run, layout, None), "step": 0}
    batches = random_batches(cfg.n_token, run.batch, run.tgt_len)

    def steps(n):
        for _ in range(n):
            batch = train.spread(next(batches), n_devices)
            held["state"], metrics = compiled(held["state"], *batch, np.int32(held["step"]))
            held["step"] += 1
        jax.block_until_ready((held["state"], metrics))
        return {"loss_nats": float(np.ravel(metrics)[0])}

    return steps


def init_params(cfg):
    """Random parameters on the default device."""
    import jax

    import txl

    return jax.jit(txl.init_params, static_argnums=1)(jax.random.key(0), cfg)
