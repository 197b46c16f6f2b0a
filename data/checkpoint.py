"""Checkpoints and the folders of runs that hold them.

A checkpoint is one .npz: {key path: array} and "meta", JSON as bytes. No pickle; bfloat16 stands there as uint16.
"""

import io
import json
import math
import os
import zipfile
import zlib
from pathlib import Path

import numpy as np


def save(path, state, meta):
    """Writes {key path: numpy array} and JSON-able `meta`, whole or not at all."""
    arrays, dtypes = {}, {}
    for name, leaf in state.items():
        if leaf.dtype.name == "bfloat16":
            leaf, dtypes[name] = leaf.view(np.uint16), "bfloat16"
        arrays[name] = leaf
    text = json.dumps(meta | {"dtypes": dtypes}).encode()
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as f:
            np.savez(f, meta=np.frombuffer(text, np.uint8), **arrays)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


DAMAGED = (zipfile.BadZipFile, KeyError, EOFError, json.JSONDecodeError, zlib.error, RuntimeError, OSError)


def plain(path):
    """{name: array} of an .npz of anybody's, without unpickling anything; ValueError for a damaged file."""
    try:
        with zipfile.ZipFile(path) as z:
            return {info.filename.removesuffix(".npy"): _array(z, info) for info in z.infolist()}
    except DAMAGED as e:
        raise ValueError(f"{path} is damaged, or no .npz of plain arrays ({e}): give another copy") from None


def read(path, want=lambda meta: {}):
    """(meta, arrays) of the checkpoint file `path`: those that `want(meta)` names, {key path: shape and dtype}.

    ValueError for a damaged file and for every array that is missing or of another shape: nothing is read before
    the shapes agree, and nothing is unpickled.
    """
    try:
        with zipfile.ZipFile(path) as z:
            sizes = {info.filename[:-4]: info for info in z.infolist() if info.filename.endswith(".npy")}
            meta = json.loads(_array(z, sizes["meta"]).tobytes())
            wanted = want(meta)
            shapes = {name: _header(z, info)[0] for name, info in sizes.items()}
            wrong = [f"{name} missing" for name in wanted if name not in shapes]
            both = [(name, shapes[name], leaf.shape) for name, leaf in wanted.items() if name in shapes]
            wrong += [f"{name} is {found}, wanted {shape}" for name, found, shape in both if found != shape]
            parts = {name.split("/")[0] for name in wanted}
            wrong += [f"{name} unexpected" for name in shapes if name.split("/")[0] in parts and name not in wanted]
            if wrong:
                raise ValueError(f"{path} does not fit: " + "; ".join(sorted(wrong)))
            arrays = {name: _array(z, sizes[name], meta["dtypes"].get(name)) for name in wanted}
    except DAMAGED as e:
        raise ValueError(f"{path} is damaged, not ours or not to be read ({e}): give another checkpoint") from None
    return meta, arrays


def _header(z, info):
    """(shape, Fortran order, dtype, bytes of the header) of a zipped array, whose size must be what the header says."""
    with z.open(info) as f:
        head = io.BytesIO(f.read(1 << 14))
    try:
        np.lib.format.read_magic(head)
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(head)
    except (ValueError, TypeError, SyntaxError):
        raise KeyError(f"{info.filename} has no readable header") from None
    if dtype.hasobject or head.tell() + math.prod(shape) * dtype.itemsize != info.file_size:
        raise KeyError(f"{info.filename} has {info.file_size} bytes for {shape} of {dtype}")
    return shape, fortran, dtype, head.tell()


def _array(z, info, dtype=None):
    """One array; `dtype`: what it was before it was saved under a stand-in."""
    shape, fortran, stored, skip = _header(z, info)
    with z.open(info) as f:
        f.read(skip)
        array = np.frombuffer(bytearray(f.read()), stored).reshape(shape, order="F" if fortran else "C")
    return array.view(np.dtype(dtype)) if dtype else array


def has_run(folder):
    """Whether a folder holds a run."""
    return any((folder / name).exists() for name in ("log.jsonl", "last.npz", "best.npz"))


def new_folder(out, name, again=False):
    """Makes and returns the folder of a new run: `out`, or the first free runs/NAME-N. Refuses one that holds a run.

    again: not one that ended before its first checkpoint.
    """
    folder = Path(out) if out else next(p for n in range(1, 10**9) if not (p := Path("runs") / f"{name}-{n}").exists())
    if has_run(folder) and not again:
        raise ValueError(f"{folder} holds a run: give --resume {folder} to go on with it, or another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ValueError(f"out={out} is a file: give a folder") from None
    except OSError as e:
        raise ValueError(f"out={out}: no folder can be made ({e.strerror}): give another one") from None
    return folder


def newest_run(root="runs"):
    """The folder under `root` whose checkpoint was written last."""
    found = [(p.stat().st_mtime, p.parent) for name in ("last.npz", "best.npz") for p in Path(root).glob(f"*/{name}")]
    if not found:
        raise ValueError(f"no run found in {Path(root).resolve()}: train one with train.py, or give --run DIR")
    return max(found)[1]


def find(path):
    """The file that `path` means: itself, or in a run folder best.npz and else last.npz."""
    path = Path(path)
    if path.is_file():
        return path
    found = [path / name for name in ("best.npz", "last.npz") if (path / name).is_file()]
    if not found:
        raise ValueError(f"{path}: no checkpoint there: give a run folder with best.npz or last.npz, or such a file")
    return found[0]


def newest(folder):
    """The checkpoint of the highest step in a run folder."""
    try:
        found = [(read(p)[0]["run"]["step"], str(p)) for p in Path(folder).glob("*.npz")]
    except (KeyError, TypeError):
        raise ValueError(f"{folder} holds an .npz that is no checkpoint of ours: take it out") from None
    if not found:
        raise ValueError(f"{folder}: no checkpoint to resume from: give the folder of a run that has saved one")
    return max(found)[1]
