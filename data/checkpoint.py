"""Checkpoints, and the run folders that hold them.

A checkpoint is one .npz: {key path: array} and "meta", JSON as bytes. Nothing is pickled; bfloat16 is kept as uint16.
"""

import contextlib
import io
import itertools
import json
import math
import os
import shlex
import zipfile
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

import txl
from data import tokenizer
from data.prepare import atomic_write, remove_leftovers

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


class Checkpoint(NamedTuple):
    cfg: txl.Config
    params: dict  # numpy arrays; if loaded for reading, jax's, as txl.unstack returns them
    vocab: dict
    run: dict  # what a resume needs: step, cursor, flags, corpus, best loss, versions, and the file's path


class CorruptCheckpoint(ValueError):
    """The file is damaged or not a checkpoint."""


def flatten(tree):
    """{key path: leaf} of a pytree, as {"params/layers/w_q": ...}."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in jax.tree.leaves_with_path(tree)
    }


def save(path, arrays, meta):
    """Writes {key path: numpy array} and a JSON-able `meta` atomically. OSError names `path`, whose old file stays."""
    stored, dtypes = {}, {}
    for name, array in arrays.items():
        if array.dtype.name == "bfloat16":
            array, dtypes[name] = array.view(np.uint16), "bfloat16"
        stored[name] = array
    stored["meta"] = np.frombuffer(json.dumps(meta | {"dtypes": dtypes}).encode(), np.uint8)
    try:
        with atomic_write(path) as f:
            np.savez(f, **stored)
    except OSError as e:
        raise OSError(e.errno, f"not saved: {e.strerror or e}", str(path)) from None


def load(path, for_reading=False):
    """The Checkpoint in a file or run folder (best.npz, else last.npz). ValueError says what is wrong with it.

    for_reading: params on the device, as txl.forward_cached and txl.decode are fastest with; attention as it can here.
    """
    path = resolve_checkpoint(path)

    def want(meta):
        cfg = txl.Config(**meta["config"])
        tokenizer.check(meta["vocab"])
        _check_run(meta["run"])
        _check_memory(cfg, path)
        return flatten({"params": txl.param_shapes(cfg)})

    meta, arrays = read(path, want)
    cfg = txl.Config(**meta["config"])
    params = jax.tree.unflatten(jax.tree.structure(txl.param_shapes(cfg)), arrays.values())
    if for_reading:
        cfg = replace(cfg, attention="auto")
        txl.check_devices()
        txl.check_available(cfg)
        params = jax.device_put(txl.unstack(params, cfg))
    return Checkpoint(cfg, params, meta["vocab"], meta["run"] | {"path": str(path)})


def _check_run(run):
    """ValueError if an entry of a checkpoint's "run" is missing, of the wrong type or out of range."""
    types = {"step": int, "cursor": int, "corpus": str, "best": int | float | None, "versions": dict, "flags": dict}
    wrong = [name for name, kind in types.items() if not isinstance(run.get(name), kind)]
    if wrong or not isinstance(run["flags"].get("optimizer"), str):
        raise ValueError(f"{', '.join(wrong) or 'optimizer'} missing or of the wrong type")
    for name, entries, low, high in (("step", run, 0, 31), ("cursor", run, 0, 62), ("tgt_len", run["flags"], 1, 31)):
        value = entries.get(name)
        if type(value) is not int or not low <= value < 2**high:
            raise ValueError(f"{name}={value!a} is out of range")


def _check_memory(cfg, path):
    """ValueError if one row of memory, for which the file holds only a length, is far larger than the file."""
    row = jax.numpy.dtype(cfg.dtype).itemsize * cfg.n_layer * cfg.mem_len * cfg.d_model
    most = max(path.stat().st_size, 2**28)
    if row > most:
        raise ValueError(f"mem_len={cfg.mem_len} is {row:,} bytes a row, more than the {most:,} of a file like this")


def check_flags(source, cls):
    """ValueError if the flags in a Checkpoint are not all fields of the dataclass `cls`, with values of their types."""
    types = {f.name: type(f.default) for f in fields(cls)}
    fits = lambda value, kind: type(value) is kind or (kind is float and type(value) is int)
    wrong = [ascii(name) for name, value in source.run["flags"].items() if not fits(value, types.get(name))]
    if wrong:
        found = f"unknown flags, or values of the wrong type: {', '.join(wrong)}"
        raise ValueError(f"{source.run['path']} holds {found}: give another checkpoint")


# reading a file that may be damaged or hostile


def read(path, want=lambda meta: {}):
    """(meta, arrays) of a checkpoint file: the arrays that `want(meta)`, {key path: shape and dtype}, asks for.

    CorruptCheckpoint, naming a good file beside it, if the file is damaged or `want` raises; ValueError naming every
    array that is missing or of another shape or dtype, before one is read. Nothing is unpickled, and no more memory
    is taken than the file has bytes.
    """
    path = Path(path)
    try:
        return _read(path, want)
    except CorruptCheckpoint as e:
        steps, _ = _verify_all(path.parent)
        steps.pop(path, None)
        other = _highest(steps) if steps else "another checkpoint"
        raise CorruptCheckpoint(f"{e}: give {other}") from None


def load_npz(path):
    """{name: array} of any .npz file, without unpickling. CorruptCheckpoint if it is damaged or holds other things."""
    with _one_line(path, "is damaged, or no .npz of plain arrays: give another copy"), zipfile.ZipFile(path) as z:
        return {name: _read_array(z, info) for name, info in _members(z, path).items()}


def verify(path):
    """Reads all of a checkpoint file and returns its step. CorruptCheckpoint if anything is damaged."""
    step = _read(path)[0]["run"].get("step")
    with _one_line(path), zipfile.ZipFile(path) as z:
        if broken := z.testzip():
            raise ValueError(f"checksum of {broken}")
        if type(step) is not int:
            raise ValueError(f"step {step!a}")
    return step


def _verify_all(folder):
    """({path: step} of the good checkpoints in a folder, [what is wrong with each of the others])."""
    steps, problems = {}, []
    for path in sorted(Path(folder).glob("*.npz")):
        try:
            steps[path] = verify(path)
        except CorruptCheckpoint as e:
            problems.append(str(e))
    return steps, problems


def _highest(steps):
    return max(steps, key=lambda path: (steps[path], path))  # of equal steps last.npz


@contextlib.contextmanager
def _one_line(path, what="is damaged, unreadable or not a checkpoint"):
    """Turns whatever zipfile, numpy, json and the checks of a file's content raise into a CorruptCheckpoint."""
    try:
        yield
    except Exception as e:
        reason = " ".join(str(e).split())[:200] or type(e).__name__
        raise CorruptCheckpoint(f"{path} {what} ({reason})") from None


def _read(path, want=lambda meta: {}):
    with _one_line(path), zipfile.ZipFile(path) as z:
        members = _members(z, path)
        meta = json.loads(_read_array(z, members["meta"]).tobytes())
        if not (isinstance(meta, dict) and isinstance(meta["dtypes"], dict) and isinstance(meta["run"], dict)):
            raise ValueError("its meta is not ours")
        wanted = {name: (leaf.shape, leaf.dtype.name) for name, leaf in want(meta).items()}
        parts = {name.split("/")[0] for name in wanted}
        found = {name: _header(z, info, meta["dtypes"].get(name)) for name, info in members.items()}
        wrong = mismatches({name: kind for name, kind in found.items() if name.split("/")[0] in parts}, wanted)
        arrays = {} if wrong else {name: _read_array(z, members[name], dtype) for name, (_, dtype) in wanted.items()}
    if wrong:
        raise ValueError(f"{path} does not fit: {wrong}")
    return meta, arrays


def mismatches(found, wanted):
    """Every difference between two {name: (shape, dtype)} or {name: (shape,)} as one text, "" if there is none."""
    wrong = [f"{name} missing" for name in wanted.keys() - found.keys()]
    wrong += [f"{name} unexpected" for name in found.keys() - wanted.keys()]
    for name in found.keys() & wanted.keys():
        wrong += [f"{name} is {have}, wanted {ask}" for have, ask in zip(found[name], wanted[name]) if have != ask]
    return "; ".join(sorted(wrong))


def _members(z, path):
    """{array name: its entry in the zip}. Only uncompressed entries, so that nothing grows when it is read."""
    members = {info.filename.removesuffix(".npy"): info for info in z.infolist()}
    if any(info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size for info in z.infolist()):
        raise ValueError("compressed: save it again with numpy.savez")
    if len(members) < len(z.infolist()) or sum(info.file_size for info in members.values()) > os.path.getsize(path):
        raise ValueError("it lists more than it holds")
    return members


def _header(z, info, saved_as=None):
    """(shape, dtype's name) of a zipped array. ValueError unless its entry has exactly the bytes that they need."""
    with z.open(info) as f:
        if np.lib.format.read_magic(f) != (1, 0):
            raise ValueError(f"{info.filename} is of another .npy version than 1.0")
        shape, _, dtype = np.lib.format.read_array_header_1_0(f)
        n_bytes = info.file_size - f.tell()
    if dtype.kind not in "biuf" or min(shape, default=1) < 0 or math.prod(shape) * dtype.itemsize != n_bytes:
        raise ValueError(f"{info.filename} has {n_bytes} bytes for {shape} of {dtype}")
    return shape, "bfloat16" if saved_as == "bfloat16" and dtype == np.uint16 else dtype.name


def _read_array(z, info, dtype=None):
    """A zipped array; as `dtype`, if it was stored in another byte order or, for bfloat16, as uint16."""
    _header(z, info)
    with z.open(info) as f:
        array = np.lib.format.read_array(f, allow_pickle=False)
    return array.view(dtype) if dtype == "bfloat16" else array.astype(dtype or array.dtype, copy=False)


# run folders


def new_run_folder(out, name, restart=False):
    """Makes and returns a new run's folder: `out`, or the first free runs/NAME-N. ValueError if it can't be one.

    restart: a run that ended before its first checkpoint may be there.
    """
    try:
        if not out:
            return _first_free(Path("runs"), name)
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ValueError(f"out={out} is a file: give a folder") from None
    except OSError as e:
        raise ValueError(f"out={out or 'runs'}: the folder cannot be made ({e.strerror}): give another one") from None
    if _has_run(folder) and not restart:
        if any(folder.glob("*.npz")):
            way = f"give another --out, or go on with it: train.py --resume {shlex.quote(out)}"
            raise ValueError(f"{folder} holds a run: {way}")
        way = f"give another --out, or start it anew: train.py --resume auto --out {shlex.quote(out)}"
        raise ValueError(f"{folder} holds the log of a run that ended before its first checkpoint: {way}")
    if not _has_run(folder) and (folder / "loss.png").exists():
        raise ValueError(f"{folder} holds a loss.png, which a run would overwrite: give another --out")
    return folder


def _first_free(root, name):
    """Makes root/NAME-N of the lowest N that is free; of several processes each makes one of its own."""
    root.mkdir(parents=True, exist_ok=True)
    for n in itertools.count(1):
        with contextlib.suppress(FileExistsError):
            (root / f"{name}-{n}").mkdir()
            return root / f"{name}-{n}"


def _has_run(folder):
    return any((folder / name).exists() for name in ("log.jsonl", "last.npz", "best.npz"))


def latest_run(root="runs"):
    """The folder under `root` whose checkpoint was written last."""
    found = [(p.stat().st_mtime, p.parent) for name in ("last.npz", "best.npz") for p in Path(root).glob(f"*/{name}")]
    if not found:
        raise ValueError(f"no run found in {Path(root).resolve()}: train one with train.py, or give --run DIR")
    return max(found)[1]


def resolve_checkpoint(path):
    """The file that `path` stands for: itself, or best.npz, else last.npz, in a run folder."""
    path = Path(path)
    for file in (path, path / "best.npz", path / "last.npz"):
        if file.is_file():
            return file
    raise ValueError(f"{path}: no checkpoint there: give a run folder with best.npz or last.npz, or such a file")


def latest_checkpoint(folder, warn=print):
    """The good checkpoint of the highest step in a run folder; warns of damaged ones. ValueError if there is none."""
    steps, problems = _verify_all(folder)
    if steps:
        path = _highest(steps)
        for problem in problems:
            warn(f"{problem}: going on from {path}, step {steps[path]}")
        return path
    if problems:
        raise ValueError(f"{folder}: every checkpoint is damaged: {'; '.join(problems)}: give another folder")
    anew = (
        f", or --resume auto --out {shlex.quote(str(folder))} to start this one anew" if _has_run(Path(folder)) else ""
    )
    raise ValueError(f"{folder}: no checkpoint to resume from: give the folder of a run that has saved one{anew}")


@contextlib.contextmanager
def lock_folder(folder, warn=print):
    """Keeps other processes from writing to a run folder, and removes temporary files that a killed one left there.

    The system releases the lock when the process ends, however it ends. BlockingIOError names the process that has it.
    """
    path = folder / "lock"
    with open(path, "a+", encoding="ascii", errors="replace") as file:
        if not _acquire(file, path, warn):
            file.seek(0)
            holder = file.read(20).strip() or "unknown"
            raise BlockingIOError(f"{folder} is in use by process {holder}: end that run first, or give another --out")
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        remove_leftovers(folder, "*.npz")
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # Windows removes no open file
                path.unlink()


def _acquire(file, path, warn):
    try:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            import msvcrt

            file.seek(1 << 20)  # a byte far behind the text, which others can then read
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as e:  # some network file systems have no locks
        warn(f"{path} cannot be locked ({e.strerror}): let no other run write there")
        return True
    # The holder may have removed the file after it was opened here: the lock is then on a file without a name.
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), os.stat(path))


def open_log(path):
    """Opens a run's log to append lines. A last line that a killed process left unfinished gets its newline."""
    file = open(path, "a+b")
    if file.tell():
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return io.TextIOWrapper(file, encoding="utf-8", newline="\n")
