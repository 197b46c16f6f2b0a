"""Faults and random input, tried on purpose. Whole: 45 minutes on 2 cores; --tiny: two.

save: a process that saves checkpoints in a loop is killed at random moments. signals: a training run is told to stop,
at random moments. processes: of two that train together one is killed, then both go on. long: memory and compiled
programs over 5,000 steps and 200,000 generated tokens.
data, prompt, vocabulary, log, checkpoint: random input of this kind, seeded: a case is right if the script works or
ends in one line: no traceback, no hang, nothing written outside of the case's folder, nothing run.
"""

import contextlib
import copy
import gc
import io
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

import sample
import train
from data import checkpoint, prepare, tokenizer
from tools.bench import harness

SIZES = dict(n_layer=2, n_head=2, d_model=16, d_head=6, d_inner=20, mem_len=9)
FLAGS = SIZES | dict(batch=4, tgt_len=8, eval_tokens=50, eval_batch=2, devices=1)
WORDS = ["alpha ", "be ", "gamma\n", "d, ", "epsilon. ", "\u00e9\U0001f600 "]


def argv(**flags):
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def quietly(main, words):
    """Calls a script's main without its output."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main([str(word) for word in words])


def write_text(path, n=40_000):
    words = np.array(WORDS[:5])  # the ASCII ones
    path.write_text("".join(words[np.random.default_rng(0).integers(0, len(words), n // 5)]))


# deaths

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


def save(trials, seed=0):
    """Yields the counts of `trials` processes killed while they save: the newest whole checkpoint must load."""
    draw = random.Random(seed)
    at = Path(tempfile.mkdtemp())
    done = 0
    like = {f"params/{i}": np.empty((i + 1, 300_001), np.float32) for i in range(2)}
    counts = dict(what="kill -9 while saving", trials=trials, loaded=0, wrong=0, lost=0, half_written=0, left_over=0)
    for _ in range(trials):
        command = [sys.executable, "-c", SAVES, str(at), str(done + 1)]
        child = subprocess.Popen(command, cwd=harness.ROOT, stdout=subprocess.PIPE, text=True)
        first = child.stdout.readline()
        time.sleep(draw.uniform(0, 0.06))
        child.send_signal(signal.SIGKILL)
        saved = [first, *child.stdout.read().splitlines()]
        child.wait()
        meta, arrays = checkpoint.read(checkpoint.latest_checkpoint(at), lambda meta: like)
        done = meta["run"]["step"]
        counts["loaded"] += 1
        counts["wrong"] += not all((a == done).all() for a in arrays.values())
        counts["lost"] += done < int(saved[-1])
        counts["half_written"] += any(at.glob("*.tmp"))
        with checkpoint.lock_folder(at):
            counts["left_over"] += any(at.glob("*.tmp"))
    shutil.rmtree(at)
    yield counts


def is_damaged(path):
    try:
        checkpoint.verify(path)
    except checkpoint.CorruptCheckpoint:
        return True
    return False


def signals(trials, seed=0):
    """Yields counts of training runs that get SIGINT, SIGTERM or two SIGINT at random moments."""
    draw = random.Random(seed)
    cases = {"SIGINT": [signal.SIGINT], "SIGTERM": [signal.SIGTERM], "two SIGINT": [signal.SIGINT] * 2}
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": tempfile.mkdtemp()}  # so that not all of them compile
    env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    for name, sent in cases.items():
        counts = dict(what=name, trials=trials, exit_code=0, no_traceback=0, told_how_to_go_on=0, before_any_step=0)
        counts |= dict(newest_loads=0, damaged=0)
        for _ in range(trials):
            at = Path(tempfile.mkdtemp())
            write_text(at / "text.txt")
            flags = FLAGS | dict(data=at / "text.txt", out=at / "run", eval_tokens=2000, eval_every=20, steps=10**6)
            pipes = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            child = subprocess.Popen([sys.executable, "train.py", *argv(**flags)], cwd=harness.ROOT, env=env, **pipes)
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
            counts["damaged"] += sum(map(is_damaged, files))
            newest = checkpoint.load(checkpoint.latest_checkpoint(at / "run")) if files else None
            counts["newest_loads"] += newest is not None
        yield counts


def processes(trials, seed=0):
    """Yields counts of pairs of processes that train together until one is killed: the other ends, both then go on."""
    draw = random.Random(seed)
    # No cache of programs: jax saves those of process 0 alone, which then waits for the other to compile, on CPUs for
    # 30 seconds at most.
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    counts = dict(what="kill -9 of one of two processes", trials=trials, trained=0, other_ended=0, told_how_to_go_on=0)
    at = Path(tempfile.mkdtemp())
    write_text(at / "text.txt")
    flags = FLAGS | dict(data=at / "text.txt", eval_every=20, steps=10**6, n_processes=2, shard="params", shard_group=2)
    del flags["devices"]
    newest = lambda: checkpoint.load(checkpoint.latest_checkpoint(at / "run")).run["step"]
    start, before = "out", 0
    for _ in range(trials):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            words = argv(**flags, **{start: at / "run"}, coordinator=f"127.0.0.1:{s.getsockname()[1]}")
        pipes = dict(cwd=harness.ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        pair = [subprocess.Popen([sys.executable, "train.py", *words, "--process_id", i], **pipes) for i in "01"]
        while all(child.poll() is None for child in pair):
            time.sleep(0.1)
            if (at / "run" / "best.npz").exists() and newest() > before:
                break
        time.sleep(draw.uniform(0, 2))
        dies = draw.randrange(2)
        pair[dies].send_signal(signal.SIGKILL)
        err = pair[1 - dies].communicate()[1]
        counts["trained"] += newest() > before
        counts["other_ended"] += pair[1 - dies].returncode != 0
        counts["told_how_to_go_on"] += f"--resume {at / 'run'}" in err
        start, before = "resume", newest()
    shutil.rmtree(at)
    yield counts


def long(trials):
    """Yields memory and programs at step 200 and at the end, of training and then of generating; trials: thousands."""
    at = Path(tempfile.mkdtemp())
    seen, points = [], []
    save_checkpoint = train.save_checkpoint
    event = "/jax/core/compile/backend_compile_duration"
    jax.monitoring.register_event_duration_secs_listener(lambda name, s, **_: name == event and seen.append(s))

    def point(step):
        gc.collect()
        arrays = len(jax.live_arrays())
        return {"at": step, "resident_mib": harness.status_mib("VmRSS"), "arrays": arrays, "programs": len(seen)}

    def watched(ctx, state, names, **progress):
        save_checkpoint(ctx, state, names, **progress)
        points.append(point(progress["step"]))

    def compared(what, first, last):
        growth = round(last["resident_mib"] / first["resident_mib"] - 1, 4)
        return {"what": what, "first": first, "last": last, "resident_growth": growth}

    write_text(at / "text.txt")
    flags = FLAGS | dict(data=at / "text.txt", out=at / "run", steps=1000 * trials, eval_every=200)
    train.save_checkpoint = watched
    try:
        quietly(train.main, argv(**flags))
    finally:
        train.save_checkpoint = save_checkpoint
    yield compared(f"{flags['steps']} steps, an evaluation and a checkpoint every 200", points[0], points[-1])
    cfg, params, *_ = checkpoint.load(at / "run")
    points, n, n_tokens = [], 0, 40_000 * trials
    prompts = [np.arange(30, dtype=np.int32)]
    sampling = sample.SamplingParams(0.8, top_k=0, top_p=1, min_p=0, n_known=256)
    for new in sample.generate(params, prompts, 1, n_tokens, sampling, 1, replace(cfg, mem_len=64), 8, 1):
        n += len(new[0])
        if n >= 200 and not points or n == n_tokens:
            points.append(point(n))
    yield compared(f"{n_tokens} tokens generated", points[0], points[-1])


# random input: each kind returns a script's main and its words

VALUES = [10**30, 10**9, 2**63, 2**31, -1, 0, 1, 3, 1e308, float("nan"), float("inf"), -0.5, 0.5, "", "x" * 5000, None]
VALUES += ["../../etc/passwd", "\ud800", "a\nb", "auto", "bfloat16", "object", True, [], {}, [[[0]]], {"a": 1}]
BYTES = [b"\0", b" ", b"\n", b"a", b"\xff", b"\xed\xa0\x80", b"\r\n", b"<eos> ", "\u00e9".encode()]


def junk(draw, n):
    """Up to n bytes: noise, text, text with errors in it, or one thing again and again."""
    n = draw.choice([0, 1, 2, 40, draw.randrange(n), n])
    text = "".join(draw.choices(WORDS, k=n // 5 + 1)).encode()[:n]
    return draw.choice([draw.randbytes(n), draw.choice(BYTES) * n, edited(draw, text), text])


def edited(draw, data):
    """Bytes with a few of them replaced, cut out, doubled, or cut off at the end."""
    data = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 8])):
        at, n = draw.randrange(len(data) + 1), draw.choice([1, 1, 4, 100])
        new = draw.choice([draw.randbytes(n), b"", bytes(data[at : at + n]) * 2, b"\xff" * n, b"\0" * n])
        data[at : at + (n if draw.random() < 0.8 else len(data))] = new
    return bytes(data)


def edited_json(draw, value):
    """A copy of a JSON value in which something is replaced, left out or added."""
    value = copy.deepcopy(value)
    for _ in range(draw.choice([1, 1, 1, 3])):
        inside = value
        keys = list(inside)
        while keys:
            key = draw.choice(keys)
            if not (isinstance(inside[key], (dict, list)) and inside[key] and draw.random() < 0.8):
                break
            inside = inside[key]
            keys = list(inside) if isinstance(inside, dict) else range(len(inside))
        how = draw.random()
        if keys and how < 0.15:
            del inside[key]
        elif how < 0.25 and isinstance(inside, dict):
            inside[draw.choice(["a", "\n", "batch", "n_layer", "../x", "__class__"])] = draw.choice(VALUES)
        elif keys:
            inside[key] = copy.deepcopy(draw.choice(VALUES))
    return value


def data_case(draw, at, case):
    """A corpus of noise, as a file or a folder."""
    path = case / "in.txt"
    if draw.random() < 0.3:
        path = case / "in"
        path.mkdir()
        for split in prepare.SPLITS:
            (path / f"{split}.txt").write_bytes(junk(draw, 3000))
    else:
        path.write_bytes(junk(draw, 8000))
    kind = draw.choice(tokenizer.KINDS)
    return train.main, argv(**FLAGS, data=path, out=case / "run", tokenizer=kind, steps=1) + ["--json"]


def prompt_case(draw, at, case):
    prompt = junk(draw, 300).replace(b"\0", b"")
    flags = dict(run=at / draw.choice(tokenizer.KINDS), n_tokens=5)
    if draw.random() < 0.5:
        (case / "prompt").write_bytes(prompt)
        return sample.main, argv(prompt_file=case / "prompt", **flags)
    words = [f"--prompt={os.fsdecode(prompt)}", *argv(**flags)]
    words += ["--json"] if draw.random() < 0.5 else []
    return sample.main, words + (["--stop", os.fsdecode(prompt[:3])] if draw.random() < 0.3 else [])


def vocabulary_case(draw, at, case):
    shutil.copytree(at / "tokens", case / "tokens")
    meta, ids = case / "tokens" / "meta.json", case / "tokens" / "train.bin"
    if draw.random() < 0.7:
        meta.write_text(json.dumps(edited_json(draw, json.loads(meta.read_text()))))
    else:
        meta.write_bytes(draw.choice([junk(draw, 500), edited(draw, meta.read_bytes())]))
    if draw.random() < 0.2:
        ids.write_bytes(edited(draw, ids.read_bytes()))
    return train.main, argv(**FLAGS, data=case / "tokens", out=case / "run", steps=1) + ["--json"]


def log_case(draw, at, case):
    shutil.copytree(at / "byte", case / "run")
    log = case / "run" / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    text = "".join(json.dumps(edited_json(draw, line)) + "\n" for line in lines).encode()
    texts = [junk(draw, 3000), edited(draw, log.read_bytes()), text, text[:-9], b"[" * 5000 + b"\n"]
    log.write_bytes(draw.choice(texts))
    return train.main, argv(resume=case / "run", data=at / "text.txt", steps=2, devices=1) + ["--json"]


def checkpoint_case(draw, at, case):
    (case / "run").mkdir()
    path = case / "run" / "last.npz"
    whole = (at / "byte" / "last.npz").read_bytes()
    if draw.random() < 0.4:
        path.write_bytes(draw.choice([junk(draw, 3000), edited(draw, whole), edited(draw, whole)]))
    else:
        with zipfile.ZipFile(at / "byte" / "last.npz") as z:
            members = {name: z.read(name) for name in z.namelist()}
        meta = json.loads(np.load(io.BytesIO(members["meta.npy"])).tobytes())
        out = io.BytesIO()
        texts = [json.dumps(edited_json(draw, meta)).encode()] * 9 + [b"[" * 10**5, b"9" * 10**5, junk(draw, 300)]
        np.save(out, np.frombuffer(draw.choice(texts), np.uint8))
        members["meta.npy"] = out.getvalue()
        packing = zipfile.ZIP_STORED
        if draw.random() < 0.4:  # an array that is another, is no array, or grows when it is read
            name = draw.choice([*members, "../../evil.npy", "/tmp/evil.npy", "a\nb.npy", "params/extra.npy"])
            packing = draw.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
            members[name] = draw.choice([edited(draw, members["meta.npy"]), junk(draw, 300), bytes(20_000_000)])
        with zipfile.ZipFile(path, "w", packing) as z:
            for name, data in members.items():
                z.writestr(name, data)
    if draw.random() < 0.5:
        return sample.main, argv(run=case / "run", n_tokens=2)
    return train.main, argv(resume=case / "run", data=at / "text.txt", steps=2, devices=1) + ["--json"]


def prepare_cases(at):
    """What the cases start from: a text, tokens of it, runs of one step with each kind of vocabulary."""
    (at / "text.txt").write_bytes("".join(random.Random(0).choices(WORDS, k=900)).encode())
    prepare.prepare([at / "text.txt"], at / "tokens", tokenizer="char")
    for kind in tokenizer.KINDS:
        flags = FLAGS | dict(optimizer="adamw", data=at / "text.txt", tokenizer=kind, steps=1)
        quietly(train.main, argv(**flags, out=at / kind) + ["--json"])


OUTSIDE, ALLOWED = [], []  # what was written outside of the folders allowed here, or run
WRITES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod")
RUNS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "pickle.find_class", "os.fork")


def watch(event, args):
    """An audit hook: notes what is written outside of ALLOWED, and what is run."""
    if not ALLOWED or event not in ("open", *WRITES, *RUNS):
        return
    if event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        return
    if event in RUNS or not isinstance(args[0], int):  # an int: a file that is open already
        path = event if event in RUNS else os.path.abspath(os.fsdecode(args[0]))
        if not path.startswith((*ALLOWED, "/dev/null", "/proc")):
            OUTSIDE.append((event, path))


def outcome(main, words):
    """What a script's main does with a command line: "worked", "refused", or what it must not do, in words."""

    def late(*_):
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.alarm(100)
    try:
        quietly(main, words)
        return "worked"
    except SystemExit as e:
        return "refused" if isinstance(e.code, str) and "\n" not in e.code else f"exit {e.code!r}"
    except TimeoutError:
        return "hung"
    except BaseException as e:
        return f"traceback: {type(e).__name__}: {str(e)[:300]}"
    finally:
        signal.alarm(0)


def start_fuzzing():
    """Watches this process, and lets all its runs share what they compile; returns the folder for that."""
    sys.dont_write_bytecode = True
    cache = tempfile.mkdtemp()
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    sys.addaudithook(watch)
    return cache


def fuzz(kind, cache, trials, first):
    """The counts of cases first to first + trials - 1 of a kind."""
    at = Path(tempfile.mkdtemp())
    prepare_cases(at)
    counts = dict(what=f"fuzz {kind}", first=first, trials=trials, worked=0, refused=0, wrong=0, outside=0)
    for number in range(first, first + trials):
        case = at / "case"
        case.mkdir()
        main, words = CASES[kind](random.Random(number), at, case)
        ALLOWED[:] = [str(case), cache]
        found = outcome(main, words)
        ALLOWED.clear()
        counts["outside"] += len(OUTSIDE)
        counts[found if found in ("worked", "refused") else "wrong"] += 1
        if found not in ("worked", "refused") or OUTSIDE:
            print(number, found, OUTSIDE, words, file=sys.stderr)
        OUTSIDE.clear()
        shutil.rmtree(case)
        if number % 20 == 19:  # each run loads its programs anew: see few_maps in tests/conftest.py
            jax.clear_caches()
            gc.collect()
    shutil.rmtree(at)
    return counts


CASES = dict(data=data_case, prompt=prompt_case, vocabulary=vocabulary_case, log=log_case, checkpoint=checkpoint_case)
PARTS = dict(save=save, signals=signals, processes=processes, long=long, **CASES)
TRIALS = dict(save=200, signals=12, processes=6, long=5, **dict.fromkeys(CASES, 500))


def main(args=None):
    parser = harness.make_parser("faults", __doc__, PARTS)
    parser.add_argument("--trials", type=int, help="of each part; long: thousands of steps")
    parser.add_argument("--first", type=int, default=0, help="number of the first case of random input")
    args = parser.parse_args(args)
    cache = start_fuzzing() if CASES.keys() & set(args.parts) else ""
    for part in args.parts:
        trials = args.trials or (min(TRIALS[part] // 4, 3) if args.tiny else TRIALS[part])
        lines = [fuzz(part, cache, trials, args.first)] if part in CASES else PARTS[part](trials)
        for line in lines:
            harness.emit(line)


if __name__ == "__main__":
    main()
