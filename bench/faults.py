"""Faults and long runs, tried on purpose: python -m bench.faults [save|disk|damage|signals|long|fuzz KIND] prints JSON.

save: a process that saves checkpoints in a loop is killed at random moments. disk: it fills up or is read-only.
damage: files cut short and bytes flipped. signals: a training run is told to stop, at random moments.
long: memory and compiled programs over 5,000 steps and 200,000 generated tokens. fuzz: see bench/hostile.py.
"""

import contextlib
import gc
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

import generate
import train
from bench import hostile
from bench.peers import machine
from data import checkpoint, folder

ROOT = Path(__file__).parents[1]
SAVES = """
import itertools, pathlib, sys
import numpy as np
from data import checkpoint
at, first = pathlib.Path(sys.argv[1]), int(sys.argv[2])
for step in itertools.count(first):
    arrays = {f"params/{i}": np.full((i + 1, 300_001), step, np.float32) for i in range(2)}
    checkpoint.save(at / ("best.npz" if step % 3 == 0 else "last.npz"), arrays, {"run": {"step": step}})
    print(step, flush=True)
"""


def arrays_of(path):
    """(step, all arrays) of a checkpoint whose arrays hold nothing but its step."""
    like = {f"params/{i}": np.empty((i + 1, 300_001), np.float32) for i in range(2)}
    meta, arrays = checkpoint.read(path, lambda meta: like)
    return meta["run"]["step"], arrays


def save(trials=200, seed=0):
    """Yields the counts of `trials` processes killed while they save: the newest whole checkpoint must load."""
    draw, at, done = random.Random(seed), Path(tempfile.mkdtemp()), 0
    counts = dict(what="kill -9 while saving", trials=trials, loaded=0, wrong=0, lost=0, half_written=0, left_over=0)
    for _ in range(trials):
        command = [sys.executable, "-c", SAVES, str(at), str(done + 1)]
        child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        first = child.stdout.readline()
        time.sleep(draw.uniform(0, 0.06))
        child.send_signal(signal.SIGKILL)
        told = [first, *child.stdout.read().splitlines()]
        child.wait()
        step, arrays = arrays_of(checkpoint.newest(at))
        counts["loaded"] += 1
        counts["wrong"] += not all((a == step).all() for a in arrays.values())
        counts["lost"] += step < int(told[-1])
        counts["half_written"] += any(at.glob("*.tmp"))
        with folder.locked(at):
            counts["left_over"] += any(at.glob("*.tmp"))
        done = step
    yield counts


def save_in(at, setup):
    """What a process that has run the code `setup` says when it saves one checkpoint in folder `at`."""
    code = "import os, resource\n" + SAVES.replace("itertools.count(first)", "[first]")
    code = code.replace("for step in [first]", f"{setup}\nfor step in [first]")  # after the imports
    code = f"try:\n    exec({code!r})\nexcept OSError as e:\n    print(e)"
    return subprocess.run([sys.executable, "-c", code, str(at), "2"], cwd=ROOT, capture_output=True, text=True)


def disk():
    """Yields counts of saves onto a full disk (by a limit, by a small tmpfs) and into a read-only folder."""
    at = Path(tempfile.mkdtemp())
    save_in(at, "first = 1")
    size = (at / "last.npz").stat().st_size
    limits = [f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size * i // 50},) * 2)" for i in range(50)]
    yield {"what": "file size limit", **failing(at, limits)}
    os.chmod(at, 0o555)
    os.chmod(at.parent, 0o755)
    yield {"what": "read-only folder", **failing(at, ["os.setuid(65534)"] if os.getuid() == 0 else [""])}
    os.chmod(at, 0o755)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size * 3 // 2}", "none", at], capture_output=True)
    if mounted.returncode:
        yield {"what": "small tmpfs", "not_run": mounted.stderr.decode().strip()}
        return
    try:
        save_in(at, "first = 1")
        yield {"what": "small tmpfs", **failing(at, [""] * 5)}
        subprocess.run(["mount", "-o", "remount,ro", at], check=True)
        yield {"what": "read-only file system", **failing(at, [""])}
    finally:
        subprocess.run(["umount", at])


def failing(at, setups):
    """Counts of saves that cannot work, over a checkpoint of step 1."""
    counts = dict(trials=len(setups), told_in_one_line=0, loaded=0, wrong=0, left_over=0)
    for setup in setups:
        found = save_in(at, setup)
        counts["told_in_one_line"] += found.stdout.count("\n") == 1 and "not saved" in found.stdout and not found.stderr
        step, arrays = arrays_of(checkpoint.newest(at))
        counts["loaded"] += step == 1
        counts["wrong"] += not all((a == step).all() for a in arrays.values())
        counts["left_over"] += any(at.glob("*.tmp"))
    return counts


def damage(seed=0):
    """Yields counts of damaged newest checkpoints beside an older whole one."""
    at, draw = Path(tempfile.mkdtemp()), random.Random(seed)
    rng = np.random.default_rng(seed)
    arrays = {f"params/{i}": rng.standard_normal((7, i + 5), np.float32) for i in range(20)}
    for name, step in (("best.npz", 1), ("last.npz", 2)):
        checkpoint.save(at / name, arrays, {"run": {"step": step}})
    data = (at / "last.npz").read_bytes()
    cut = [data[: len(data) * i // 50] for i in range(50)]
    places = [draw.randrange(len(data)) for _ in range(200)]
    flipped = [data[:p] + bytes([data[p] ^ draw.randint(1, 255)]) + data[p + 1 :] for p in places]
    for what, contents in (("cut at every 1/50", cut), ("a byte flipped", flipped)):
        counts = dict(what=what, trials=len(contents), older_used_and_said=0, harmless=0, refused_by_name=0, wrong=0)
        for content in contents:
            (at / "last.npz").write_bytes(content)
            said = []
            used = checkpoint.newest(at, said.append)
            found = checkpoint.read(used, lambda meta: arrays)[1]
            right = all(found[name].tobytes() == arrays[name].tobytes() for name in arrays)
            counts["wrong"] += not right
            counts["harmless"] += right and used.endswith("last.npz")
            told = used.endswith("best.npz") and "last.npz" in said[0] and "best.npz" in said[0]
            counts["older_used_and_said"] += bool(told)
            with contextlib.suppress(ValueError):
                checkpoint.read(at / "last.npz", lambda meta: arrays)
                counts["refused_by_name"] -= 1
            counts["refused_by_name"] += 1
        yield counts


def tiny_flags(at, **more):
    """Flags of a training run of a few seconds."""
    flags = hostile.SIZES | dict(tgt_len=8, batch=4, devices=1, data=at / "text.txt", out=at / "run")
    flags |= dict(eval_tokens=2000, eval_batch=2, eval_every=20, log_every=100)
    return hostile.words(**flags | more)


def tiny_text(at, n=40_000):
    words = np.array(hostile.WORDS[:5])  # the ASCII ones
    text = "".join(words[np.random.default_rng(0).integers(0, len(words), n // 5)])
    (at / "text.txt").write_text(text)


def signals(trials=12, seed=0):
    """Yields counts of training runs that get SIGINT, SIGTERM or two SIGINT at random moments."""
    draw, cases = random.Random(seed), {"SIGINT": [signal.SIGINT], "SIGTERM": [signal.SIGTERM]}
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": tempfile.mkdtemp()}  # so that not all of them compile
    env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    for name, sent in (cases | {"two SIGINT": [signal.SIGINT] * 2}).items():
        counts = dict(what=name, trials=trials, exit_code=0, no_traceback=0, told_how_to_go_on=0, before_any_step=0)
        counts |= dict(newest_loads=0, damaged=0)
        for _ in range(trials):
            at = Path(tempfile.mkdtemp())
            tiny_text(at)
            command = [sys.executable, "train.py", *tiny_flags(at, steps=10**6)]
            pipes = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            child = subprocess.Popen(command, cwd=ROOT, env=env, **pipes)
            child.stderr.readline()
            time.sleep(draw.uniform(0, 5))
            for number in sent:
                child.send_signal(number)
                time.sleep(draw.uniform(0, 0.1))
            err, code = child.stderr.read(), child.wait()
            counts["exit_code"] += code == 128 + sent[0]
            counts["no_traceback"] += "Traceback" not in err
            counts["told_how_to_go_on"] += f"--resume {at / 'run'}" in err
            files = list((at / "run").glob("*.npz"))
            counts["before_any_step"] += not files
            counts["damaged"] += sum(bool(checkpoint.damage(path)) for path in files)
            counts["newest_loads"] += bool(files) and bool(train.load(checkpoint.newest(at / "run")))
        yield counts


def resident_mib():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def held(seen, at):
    return {"at": at, "resident_mib": round(resident_mib(), 1), "arrays": len(jax.live_arrays()), "programs": len(seen)}


def compiles():
    """A list that grows by one with every program that XLA compiles from now on."""
    seen = []
    name = "/jax/core/compile/backend_compile_duration"
    jax.monitoring.register_event_duration_secs_listener(lambda event, s, **_: event == name and seen.append(s))
    return seen


def compared(what, points):
    first, last = points[0], points[-1]
    growth = round(last["resident_mib"] / first["resident_mib"] - 1, 4)
    return {"what": what, "first": first, "last": last, "resident_growth": growth}


def long(steps=5000, n_tokens=200_000):
    """Yields memory and programs at step 200 and at the end, of training and then of generating."""
    at, seen, points, keep = Path(tempfile.mkdtemp()), compiles(), [], train.keep
    tiny_text(at)

    def watched(job, state, names, **known):
        keep(job, state, names, **known)
        points.append(held(seen, known["step"]))

    train.keep = watched
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            train.main(tiny_flags(at, steps=steps, eval_every=200))
    finally:
        train.keep = keep
    yield compared(f"{steps} steps, an evaluation and a checkpoint every 200", points)
    cfg, params, *_ = train.load(at / "run")
    cfg = replace(cfg, mem_len=64)
    points, n = [], 0
    prompts, how = [np.arange(30, dtype=np.int32)], generate.How(0.8, top_k=0, top_p=1, min_p=0, n_known=256)
    for new in generate.stream(params, prompts, 1, n_tokens, how, 1, cfg, 8, 1):
        n += len(new[0])
        if n >= 200 and not points or n == n_tokens:
            points.append(held(seen, n))
    yield compared(f"{n_tokens} tokens generated", points)


def main():
    parts = dict(save=save, disk=disk, damage=damage, signals=signals, long=long, fuzz=hostile.fuzz)
    name, *more = sys.argv[1:] or ["save"]
    if name not in parts:
        sys.exit(f"bench.faults: {name!r} is unknown: give one of {', '.join(parts)}")
    for line in parts[name](*(int(word) if word.isdecimal() else word for word in more)):
        print(json.dumps(line | {"jax": jax.__version__} | machine()), flush=True)


if __name__ == "__main__":
    main()
