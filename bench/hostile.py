"""Random input, seeded, to what reads files and prompts: python -m bench.faults fuzz KIND [FIRST] [N] prints counts.

Kinds: data, prompt, checkpoint, vocabulary, log. A case is right if the script works or ends with one line: no
traceback, no hang, nothing written outside of the case's folder, nothing run, and of a checkpoint no more memory
taken than a small multiple of its bytes.
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
import sys
import tempfile
import tracemalloc
import zipfile
from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np

import sample
import train
import txl
from data import checkpoint, prepare, tokenizer

SIZES = dict(n_layer=2, n_head=2, d_model=16, d_head=6, d_inner=20, mem_len=9)
FLAGS = SIZES | dict(batch=4, tgt_len=8, steps=1, eval_tokens=50, eval_batch=2, devices=1, optimizer="adamw")
WORDS = ["alpha ", "be ", "gamma\n", "d, ", "epsilon. ", "\u00e9\U0001f600 "]
VALUES = [10**30, 10**9, 2**63, 2**31, -1, 0, 1, 3, 1e308, float("nan"), float("inf"), -0.5, 0.5, "", "x" * 5000]
VALUES += ["../../etc/passwd", "\ud800", "a\nb", "auto", "bfloat16", "object"]
VALUES += [None, True, [], {}, [[[0]]], {"a": 1}]
OUTSIDE = []  # what was written outside of the folders allowed here
ALLOWED = []
WRITES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod")
RUNS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "pickle.find_class", "os.fork")


def watch(event, args):
    """An audit hook: notes what is written outside of ALLOWED, and what is run."""
    if event == "open":
        path, mode, flags = args
        wrote = isinstance(path, (str, bytes)) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    elif event in RUNS:
        path, wrote = event, True
    else:
        path, wrote = args[0] if args else "", event in WRITES
    if wrote and ALLOWED:
        path = os.path.abspath(os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else str(path))
        if not path.startswith((*ALLOWED, "/dev/null", "/proc")):
            OUTSIDE.append((event, path))


def junk(draw, n):
    """Up to n bytes: noise, text, text with errors in it, or one thing again and again."""
    n = draw.choice([0, 1, 2, 40, draw.randrange(n), n])
    text = "".join(draw.choices(WORDS, k=n // 5 + 1)).encode()[:n]
    kind = draw.randrange(6)
    if kind == 0:
        return draw.randbytes(n)
    if kind == 1:
        return (
            draw.choice([b"\0", b" ", b"\n", b"a", b"\xff", b"\xed\xa0\x80", b"\r\n", b"<eos> ", "\u00e9".encode()]) * n
        )
    if kind == 2:
        return "".join(
            chr(draw.choice([draw.randrange(0x20, 0x7F), draw.randrange(0xD800)])) for _ in range(n // 3)
        ).encode()
    return edited(draw, text) if kind < 5 else text


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
        while True:
            keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
            if not keys:
                break
            key = draw.choice(keys)
            if isinstance(inside[key], (dict, list)) and inside[key] and draw.random() < 0.8:
                inside = inside[key]
                continue
            how = draw.random()
            if how < 0.15:
                del inside[key]
            elif how < 0.25 and isinstance(inside, dict):
                inside[draw.choice(["a", "\n", "batch", "n_layer", "../x", "__class__"])] = draw.choice(VALUES)
            else:
                inside[key] = copy.deepcopy(draw.choice(VALUES))
            break
    return value


def outcome(main, words):
    """What a script's main does with a command line: "worked", "refused", or what it must not do, in words."""

    def late(*_):
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.alarm(100)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            main([str(word) for word in words])
        return "worked"
    except SystemExit as e:
        return "refused" if isinstance(e.code, str) and "\n" not in e.code else f"exit {e.code!r}"
    except TimeoutError:
        return "hung"
    except BaseException as e:
        return f"traceback: {type(e).__name__}: {str(e)[:300]}"
    finally:
        signal.alarm(0)


def words(**flags):
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def model(folder, vocab):
    """A run folder with untrained weights."""
    folder.mkdir()
    cfg = txl.Config(n_token=tokenizer.size(vocab), **SIZES)
    params = jax.tree.map(np.asarray, txl.init_params(jax.random.key(0), cfg))
    run = {"step": 5, "cursor": 0, "flags": asdict(train.Run(tgt_len=8)), "corpus": "", "best": 1.0, "versions": {}}
    checkpoint.save(
        folder / "best.npz", train.named({"params": params}), {"config": asdict(cfg), "vocab": vocab, "run": run}
    )
    return folder


def prepare_cases(at):
    """What the cases start from: a text, tokens of it, a run of one step, models of each kind of vocabulary."""
    text = "".join(random.Random(0).choices(WORDS, k=900)).encode()
    (at / "text.txt").write_bytes(text)
    prepare.prepare([at / "text.txt"], at / "tokens", tokenizer="char")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        train.main(words(data=at / "text.txt", out=at / "base", **FLAGS) + ["--json"])
    for kind in tokenizer.KINDS:
        model(at / kind, tokenizer.build(kind, text))


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
    return train.main, words(data=path, out=case / "run", tokenizer=kind, n_token=4096, **FLAGS) + ["--json"]


def prompt_case(draw, at, case):
    prompt = junk(draw, 300).replace(b"\0", b"")
    flags = dict(run=at / draw.choice(tokenizer.KINDS), n_tokens=5)
    if draw.random() < 0.5:
        (case / "prompt").write_bytes(prompt)
        return sample.main, words(prompt_file=case / "prompt", **flags)
    more = ["--json"] * (draw.random() < 0.5) + ["--stop", os.fsdecode(prompt[:3])] * (draw.random() < 0.3)
    return sample.main, [f"--prompt={os.fsdecode(prompt)}", *words(**flags), *more]


def vocabulary_case(draw, at, case):
    shutil.copytree(at / "tokens", case / "tokens")
    meta = case / "tokens" / "meta.json"
    if draw.random() < 0.7:
        meta.write_text(json.dumps(edited_json(draw, json.loads(meta.read_text()))))
    else:
        meta.write_bytes(draw.choice([junk(draw, 500), edited(draw, meta.read_bytes())]))
    if draw.random() < 0.2:
        file = case / "tokens" / "train.bin"
        file.write_bytes(edited(draw, file.read_bytes()))
    return train.main, words(data=case / "tokens", out=case / "run", n_token=4096, **FLAGS) + ["--json"]


def log_case(draw, at, case):
    shutil.copytree(at / "base", case / "run")
    log = case / "run" / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    text = "".join(json.dumps(edited_json(draw, line)) + "\n" for line in lines).encode()
    log.write_bytes(
        draw.choice([junk(draw, 3000), edited(draw, log.read_bytes()), text, text[:-9], b"[" * 5000 + b"\n"])
    )
    return train.main, words(resume=case / "run", data=at / "text.txt", steps=2, devices=1) + ["--json"]


def checkpoint_case(draw, at, case):
    (case / "run").mkdir()
    path, whole = case / "run" / "last.npz", (at / "base" / "last.npz").read_bytes()
    kind = draw.randrange(8)
    if kind < 3:
        path.write_bytes([junk(draw, 3000), edited(draw, whole), edited(draw, whole)][kind])
    else:
        with np.load(at / "base" / "last.npz") as z:
            arrays = dict(z)
        meta = json.loads(arrays.pop("meta").tobytes())
        text = json.dumps(edited_json(draw, meta) if kind < 6 else meta).encode()
        if draw.random() < 0.05:
            text = draw.choice([junk(draw, 300), b"[" * 10**5, b"9" * 10**5, b'{"run": {}, "dtypes": 3}'])
        members = {name: npy(array) for name, array in (arrays | {"meta": np.frombuffer(text, np.uint8)}).items()}
        pack(draw, path, bad_members(draw, members) if kind >= 6 else members)
    if draw.random() < 0.5:
        return sample.main, words(run=case / "run", n_tokens=2)
    return train.main, words(resume=case / "run", data=at / "text.txt", steps=2, devices=1) + ["--json"]


def npy(array, header=None):
    """The bytes of an .npy; header: another text in place of the array's own header."""
    out = io.BytesIO()
    np.lib.format.write_array(out, array, version=(1, 0))
    if header is None:
        return out.getvalue()
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + array.tobytes()


SHAPES = [
    "(250000000000,)",
    "(1000000, 1000000)",
    "(-1,)",
    "(-2, -6)",
    "(" * 300 + ")" * 300,
    "-" * 3000 + "1",
    "9" * 5000,
]
DTYPES = ["<f4", ">f4", "|O", "<U9", "|V0", "<f8", "<c8", "<M8[s]", "|S0"]
NAMES = ["../../evil", "/tmp/evil", "a\nb", "params/extra", "meta", "x" * 60000]
PACKED = [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]


def bad_members(draw, members):
    """The members of an .npz, one of them replaced by what no reader should believe."""
    shape, value = draw.choice([(2, 6), (6, 2), (), (0,), (3,)]), draw.choice([np.nan, 0, 1e38])
    other, said = np.full(shape, value, np.float32), draw.choice(SHAPES)
    header = f"{{'descr': '{draw.choice(DTYPES)}', 'fortran_order': {draw.choice(['False', 'True', '7'])}, "
    new = [npy(other, f"{header}'shape': {said}, }}"), npy(other, f"{header}'shape': {shape}, }}"), npy(other)]
    new += [new[0], draw.randbytes(100), b""]
    return members | {draw.choice(list(members) if draw.random() < 0.8 else NAMES): draw.choice(new)}


def pack(draw, path, members):
    """Writes an .npz; now and then one member is a bomb, or claims another size than it has."""
    how, name = draw.random(), draw.choice(list(members))
    with zipfile.ZipFile(path, "w") as z:
        for member, data in members.items():
            if how < 0.1 and member == name:
                z.writestr(f"{member}.npy", npy(np.zeros(5_000_000, np.float32)), compress_type=draw.choice(PACKED))
            else:
                z.writestr(f"{member}.npy", data)
        if 0.1 < how < 0.2:  # the directory at the end is written from these
            z.getinfo(f"{name}.npy").file_size = draw.choice([2**40, 2**31, 0, 10**6])
        if 0.15 < how < 0.25:
            z.getinfo(f"{name}.npy").compress_size = draw.choice([2**40, 2**31, 0, 10**6])


CASES = dict(data=data_case, prompt=prompt_case, checkpoint=checkpoint_case, vocabulary=vocabulary_case, log=log_case)


def loading(path):
    """Peak bytes that loading a checkpoint takes, beyond the first 4 MiB, over those of the file."""
    tracemalloc.start()
    with contextlib.suppress(ValueError):
        train.load(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return max(peak - 2**22, 0) / max(path.stat().st_size, 1)


def fuzz(kind, first=0, n=500):
    """Yields the counts of cases first to first + n - 1 of a kind."""
    at = Path(tempfile.mkdtemp())
    sys.dont_write_bytecode = True
    jax.config.update("jax_compilation_cache_dir", str(at / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    prepare_cases(at)
    sys.addaudithook(watch)
    counts = {"what": f"fuzz {kind}", "first": first, "trials": n, "worked": 0, "refused": 0, "wrong": 0, "outside": 0}
    counts |= {"peak_over_size": 0.0} if kind == "checkpoint" else {}
    for number in range(first, first + n):
        case = at / "case"
        case.mkdir()
        main, args = CASES[kind](random.Random(number), at, case)
        if kind == "checkpoint":
            counts["peak_over_size"] = max(counts["peak_over_size"], round(loading(case / "run" / "last.npz"), 2))
        ALLOWED[:] = [str(case), str(at / "cache")]
        found = outcome(main, args)
        ALLOWED.clear()
        counts["outside"] += len(OUTSIDE)
        counts[found if found in counts else "wrong"] += 1
        if found not in counts or OUTSIDE:
            print(number, found, OUTSIDE, args, file=sys.stderr)
        OUTSIDE.clear()
        shutil.rmtree(case)
        if number % 20 == 19:  # each run loads its programs anew: see few_maps in tests/conftest.py
            jax.clear_caches()
            gc.collect()
    shutil.rmtree(at)
    yield counts
