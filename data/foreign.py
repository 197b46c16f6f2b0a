"""Files that others wrote: arrays and vocabularies. Nothing that stands in a file is ever called or imported."""

import io
import json
import pickletools
import zipfile
from pathlib import Path

import numpy as np

from data import checkpoint
from data import tokenizer as tok

SAFETENSORS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
STATE_DICT = "torch.save(torch.load('model.pt', weights_only=False).state_dict(), 'state.pt')"
IN_ORDER = "give a text file with one symbol a line, in the order of the ids"
# A pickle's opcodes for plain values, and how many entries of the stack the others take (None: down to the mark).
VALUES = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING"}
VALUES |= {"SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
TAKES = {"APPEND": 1, "APPENDS": None, "LIST": None, "TUPLE": None, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
TAKES |= {"SETITEM": 2, "SETITEMS": None, "DICT": None, "GLOBAL": 0, "STACK_GLOBAL": 2, "REDUCE": 2}
DICTS = ("collections OrderedDict", "collections Counter")  # all that a pickle may name: read as dicts


def arrays(path):
    """{name: array} of an .npz, a .safetensors file or, for any other name, what torch.save wrote.

    ValueError, one line, for a file that is damaged or holds other things, and where torch is needed and missing.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file: give a file of weights, or a Hugging Face folder")
    readers = {".npz": checkpoint.plain, ".safetensors": _safetensors}
    return readers.get(path.suffix, _torch)(path)


def _safetensors(path):
    """Eight bytes of length, a JSON header of that length, then the arrays' bytes."""
    try:
        with open(path, "rb") as f:
            n = int.from_bytes(f.read(8), "little")
            head = json.loads(f.read(n)) if n < path.stat().st_size else None
            data, found = np.fromfile(f, np.uint8), {}
        for name, about in head.items():
            if name != "__metadata__":
                start, stop = about["data_offsets"]
                array = data[start:stop].view(SAFETENSORS[about["dtype"]]).reshape(about["shape"])
                wide = about["dtype"] == "BF16"  # the upper half of a float32
                found[name] = (array.astype(np.uint32) << 16).view(np.float32) if wide else array
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ValueError(f"{path} is damaged or holds other than floats ({e!r}): give another copy") from None
    return found


def _torch(path):
    try:
        import torch
    except ImportError:
        raise ValueError(f"{path}: torch, which reads it, is not installed: pip install torch") from None
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:  # it has many, whose text may be pages long
        why = f"{type(e).__name__}: {str(e).partition('.')[0].partition(chr(10))[0][:80]}"
        way = f"if it is the original's whole module, run {STATE_DICT} beside the original's code and give state.pt"
        raise ValueError(f"{path}: no plain state_dict ({why}): {way}") from None
    if not isinstance(found, dict) or not all(isinstance(a, torch.Tensor) for a in found.values()):
        names = f" {', '.join(map(repr, list(found)[:5]))}" if isinstance(found, dict) else ""
        raise ValueError(
            f"{path} holds a {type(found).__name__}{names}, want tensors by name: save the model's state_dict() alone"
        )
    return {name: a.detach().float().numpy() for name, a in found.items()}  # numpy knows no bfloat16


def vocabulary(path):
    """The vocabulary in a file: our JSON or meta.json; a text of one symbol a line, in the order of the ids; a pickle
    or torch.save of a dict with idx2sym or sym2idx, as Hugging Face's vocab.pkl and vocab.bin. "byte": the byte one.
    ValueError for anything else.
    """
    if path == "byte":
        return {"kind": "byte"}
    path = Path(path)
    data = path.read_bytes()
    if path.suffix == ".json":
        found = _from_json(path, data)
    else:
        symbols = _from_pickle(path, data) if data[:1] == b"\x80" or data[:2] == b"PK" else _from_lines(path, data)
        chars = all(isinstance(symbol, str) and len(symbol) == 1 for symbol in symbols)
        found = {"kind": "char" if chars else "word", "symbols": symbols}
    try:
        return tok.check(found)
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None


def _from_lines(path, data):
    try:
        return data.decode("utf-8").replace("\r\n", "\n").removesuffix("\n").split("\n")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path}: byte {e.start} is not UTF-8: {IN_ORDER}") from None


def _from_json(path, data):
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path} is no JSON ({e}): give the vocabulary's own, or a meta.json") from None
    return found.get("vocab", found) if isinstance(found, dict) else found


def _from_pickle(path, data):
    """The list of symbols in a pickle, or in what torch.save wrote: a zipped pickle, of old several in a row."""
    try:
        if data[:2] == b"PK":
            with zipfile.ZipFile(io.BytesIO(data)) as z:
                data = z.read(next((name for name in z.namelist() if name.endswith("data.pkl")), "data.pkl"))
        file, found = io.BytesIO(data), {}
        while not (isinstance(found, dict) and found.keys() & {"idx2sym", "sym2idx"}):
            found = _unpickled(file)
        symbols = list(found.get("idx2sym") or sorted(found["sym2idx"], key=found["sym2idx"].get))
        if found.get("sym2idx", {}).keys() and [found["sym2idx"][s] for s in symbols] != list(range(len(symbols))):
            raise ValueError("idx2sym and sym2idx do not agree on ids 0, 1, 2, ...")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, zipfile.BadZipFile, RecursionError) as e:
        raise ValueError(f"{path} is no pickle of plain containers with idx2sym or sym2idx ({e}): {IN_ORDER}") from None
    return _mended(symbols)


def _mended(symbols):
    """Symbols whose UTF-8 was read as Latin-1, as in the published wt103 vocabulary, read anew (transformers #271)."""
    try:
        return [symbol.encode("latin-1").decode("utf-8") for symbol in symbols]
    except (UnicodeError, AttributeError):  # not all are such bytes: they were never read so
        return symbols


def _unpickled(file):
    """The next pickle of a file, if it is made of dicts, lists, tuples, strings and numbers alone; else ValueError."""
    stack, marks, memo = [], [], {}
    for op, arg, _ in pickletools.genops(file):
        name = op.name
        if name in VALUES:
            stack.append(arg)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name in EMPTY:
            stack.append(EMPTY[name]())
        elif name == "MARK":
            marks.append(len(stack))
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if arg is None else int(arg)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[int(arg)])
        elif name in TAKES:
            at = marks.pop() if TAKES[name] is None else len(stack) - TAKES[name]
            items, stack[at:] = stack[at:], []
            _gather(name, arg, items, stack)
        elif name == "STOP":
            return stack.pop()
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"it has the opcode {name}")


def _gather(name, arg, items, stack):
    """Carries out opcode `name` on the `items` that it took from the stack."""
    if name.startswith("APPEND"):
        stack[-1].extend(items)
    elif name.startswith("SETITEM"):
        stack[-1].update(zip(items[::2], items[1::2], strict=True))
    elif name == "DICT":
        stack.append(dict(zip(items[::2], items[1::2], strict=True)))
    elif name == "LIST" or name.startswith("TUPLE"):
        stack.append(items if name == "LIST" else tuple(items))
    elif name == "REDUCE" and items[0] is dict:
        stack.append(dict(*items[1]))
    elif (named := arg or " ".join(map(str, items))) in DICTS:
        stack.append(dict)
    else:
        raise ValueError(f"it names {named.replace(' ', '.')[:80]}")
