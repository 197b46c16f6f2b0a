"""Checkpoints and the folders of runs that hold them.

A checkpoint is one .npz: {key path: array} and "meta", JSON as bytes. No pickle; bfloat16 stands there as uint16.
"""

import contextlib
import io
import json
import math
import os
import zipfile
from dataclasses import fields
from pathlib import Path

import numpy as np

from data.folder import whole


def save(path, state, meta):
    """Writes {key path: numpy array} and JSON-able `meta`, whole or not at all: then OSError names `path`."""
    arrays, dtypes = {}, {}
    for name, leaf in state.items():
        if leaf.dtype.name == "bfloat16":
            leaf, dtypes[name] = leaf.view(np.uint16), "bfloat16"
        arrays[name] = leaf
    arrays["meta"] = np.frombuffer(json.dumps(meta | {"dtypes": dtypes}).encode(), np.uint8)
    try:
        with whole(path) as f:
            np.savez(f, **arrays)
    except OSError as e:
        raise OSError(e.errno, f"not saved: {e.strerror or e}", str(path)) from None


BLOCK = 1 << 24  # bytes read at once


class Damaged(ValueError):
    """A file that is no whole checkpoint."""


@contextlib.contextmanager
def _reading(path, what="is damaged, not ours or not to be read"):
    """Whatever the bytes of a file make the readers of zip, headers and JSON raise is Damaged, in one line."""
    try:
        yield
    except Exception as e:
        raise Damaged(f"{path} {what} ({' '.join(str(e).split())[:200] or type(e).__name__})") from None


def plain(path):
    """{name: array} of an .npz of anybody's, without unpickling anything; Damaged names what cannot be used."""
    try:
        with _reading(path, "is damaged, or no .npz of plain arrays"), zipfile.ZipFile(path) as z:
            return {name: _array(z, info) for name, info in _members(z, path).items()}
    except Damaged as e:
        raise Damaged(f"{e}: give another copy") from None


def read(path, want=lambda meta: {}):
    """(meta, arrays) of the checkpoint file `path`: those that `want(meta)` names, {key path: shape and dtype}.

    ValueError for a damaged file, which names a whole one beside it, and for every array that is missing or of another
    shape or dtype: none is read before all fit, and nothing is unpickled. Takes no more memory than the file has bytes.
    """
    try:
        return _read(Path(path), want)
    except Damaged as e:
        others = [str(p) for p in sorted(Path(path).parent.glob("*.npz")) if p != Path(path) and not damage(p)]
        raise Damaged(f"{e}: give {others[-1] if others else 'another checkpoint'}") from None


def _read(path, want):
    with _reading(path):
        z = zipfile.ZipFile(path)
    with z:
        with _reading(path):
            members = _members(z, path)
            meta = json.loads(_array(z, members["meta"]).tobytes())
            if not (isinstance(meta, dict) and isinstance(meta["dtypes"], dict) and isinstance(meta["run"], dict)):
                raise ValueError("its meta is none of ours")
            found = {name: _kind(z, info, meta["dtypes"].get(name)) for name, info in members.items()}
        wanted = {name: (leaf.shape, leaf.dtype.name) for name, leaf in want(meta).items()}
        _check_fit(path, wanted, found)
        with _reading(path):
            return meta, {name: _as(_array(z, members[name]), dtype) for name, (_, dtype) in wanted.items()}


def _as(array, dtype):
    """A stored array in its own dtype: bfloat16 is seen in its stand-in, and bytes may come in the other order."""
    return array.view(dtype) if dtype == "bfloat16" else array.astype(dtype, copy=False)


def _check_fit(path, wanted, found):
    """ValueError that names every difference between two {key path: (shape, dtype)}."""
    wrong = [f"{name} missing" for name in wanted if name not in found]
    for name in found.keys() & wanted.keys():
        have, ask = next((pair for pair in zip(found[name], wanted[name]) if pair[0] != pair[1]), (None, None))
        wrong += [f"{name} is {have}, wanted {ask}"] if have != ask else []
    parts = {name.split("/")[0] for name in wanted}
    wrong += [f"{name} unexpected" for name in found if name.split("/")[0] in parts and name not in wanted]
    if wrong:
        raise ValueError(f"{path} does not fit: " + "; ".join(sorted(wrong)))


def damage(path):
    """What is wrong with a checkpoint file, all of which is read; "" for a whole one."""
    try:
        _read(path, lambda meta: {})
        with _reading(path), zipfile.ZipFile(path) as z:
            broken = z.testzip()  # by checksums, without keeping the bytes
            return f"{path} is damaged ({broken})" if broken else ""
    except Damaged as e:
        return str(e)


def _members(z, path):
    """{name of an array: its place in the zip}. As they are stored uncompressed, no file can grow when it is read."""
    members = {info.filename.removesuffix(".npy"): info for info in z.infolist()}
    if any(info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size for info in z.infolist()):
        raise ValueError("compressed: save it again with numpy.savez")
    if len(members) < len(z.infolist()) or sum(info.file_size for info in members.values()) > os.path.getsize(path):
        raise ValueError("it lists more than it holds")
    return members


def _header(z, info):
    """(shape, Fortran order, dtype, bytes of the header) of a zipped array, whose size must be what the header says."""
    with z.open(info) as f:
        head = io.BytesIO(f.read(1 << 14))
    np.lib.format.read_magic(head)
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(head)
    if dtype.kind not in "biuf" or min(shape, default=1) < 0:
        raise ValueError(f"{info.filename} is {shape} of {dtype}")
    if head.tell() + math.prod(shape) * dtype.itemsize != info.file_size:
        raise ValueError(f"{info.filename} has {info.file_size} bytes for {shape} of {dtype}")
    return shape, fortran, dtype, head.tell()


def _kind(z, info, was=None):
    """(shape, name of the dtype) of a zipped array; `was`: its dtype before it was saved under a stand-in."""
    shape, _, dtype, _ = _header(z, info)
    return shape, "bfloat16" if was == "bfloat16" and dtype == np.uint16 else dtype.name


def _array(z, info):
    shape, fortran, stored, skip = _header(z, info)
    array = np.empty(math.prod(shape), stored)
    with z.open(info) as f:
        f.read(skip)
        for block in np.split(array.view(np.uint8), range(BLOCK, array.nbytes, BLOCK)):
            block[:] = np.frombuffer(f.read(len(block)), np.uint8)  # the last one compares checksums
    return array.reshape(shape, order="F" if fortran else "C")


def check_run(run, flags):
    """`run`, a checkpoint's "run", if one can go on from it; ValueError names what stands in the way.

    flags: the dataclass whose fields may stand under "flags".
    """
    kinds, given, none = {f.name: type(f.default) for f in fields(flags)}, run.get("flags"), type(None)
    wanted = {"step": (int,), "cursor": (int,), "corpus": (str,), "best": (int, float, none), "versions": (dict,)}
    wrong = [name for name, types in (wanted | {"flags": (dict,)}).items() if type(run.get(name)) not in types]
    if wrong or not 0 <= run["step"] < 2**31 or not 0 <= run["cursor"] < 2**62:
        raise ValueError(f"{', '.join(wrong) or 'step or cursor'} of another kind")
    fits = lambda value, kind: type(value) is kind or (kind is float and type(value) is int)
    wrong = [name for name, value in given.items() if name not in kinds or not fits(value, kinds[name])]
    wrong += [name for name in ("tgt_len", "optimizer") if name not in given]
    if wrong:
        raise ValueError(f"unknown or missing flags {', '.join(map(ascii, wrong))}")
    return run


def check_memory(cfg, path):
    """ValueError where one row's memory, of which a file without memory says only a number, is out of proportion."""
    row, most = 4 * cfg.n_layer * cfg.mem_len * cfg.d_model, max(path.stat().st_size, 2**28)
    if row > most:
        raise ValueError(f"mem_len={cfg.mem_len} is {row:,} bytes a row, more than the {most:,} of a file like this")


def has_run(folder):
    """Whether a folder holds a run."""
    return any((folder / name).exists() for name in ("log.jsonl", "last.npz", "best.npz"))


def new_folder(out, name, again=False):
    """Makes and returns the folder of a new run: `out`, or the first free runs/NAME-N. Refuses one that holds a run.

    again: not one that ended before its first checkpoint.
    """
    folder = Path(out) if out else next(p for n in range(1, 10**9) if not (p := Path("runs") / f"{name}-{n}").exists())
    if has_run(folder) and not again:
        known = any(folder.glob("*.npz"))
        found = "a run" if known else "the log of a run that ended before its first checkpoint"
        way = f"--resume {folder} to go on with it" if known else f"--resume auto --out {folder} to start it anew"
        raise ValueError(f"{folder} holds {found}: give {way}, or another --out")
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


def newest(folder, say=print):
    """The whole checkpoint of the highest step in a run folder; says which others are damaged. ValueError: none is."""
    found, damaged = [], []
    for path in sorted(Path(folder).glob("*.npz")):
        try:
            found.append((_step(path), str(path)))
        except Damaged as e:
            damaged.append(str(e))
    for step, path in sorted(found, reverse=True):
        if not (wrong := damage(path)):
            for other in damaged:
                say(f"{other}: going on from {path}, step {step}")
            return path
        damaged.append(wrong)
    if damaged:
        raise ValueError(f"{folder}: no whole checkpoint: {'; '.join(damaged)}: give another folder")
    anew = f", or --resume auto --out {folder} to start this one anew" if has_run(Path(folder)) else ""
    raise ValueError(f"{folder}: no checkpoint to resume from: give the folder of a run that has saved one{anew}")


def _step(path):
    step = _read(path, lambda meta: {})[0]["run"].get("step")
    if type(step) is not int:
        raise Damaged(f"{path} is no checkpoint of ours (step {step!a})")
    return step
