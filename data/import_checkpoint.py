"""Transformer-XL weights from elsewhere -> our config, parameters, checkpoint.

    python -m data.import_checkpoint SOURCE --vocab FILE [--out DIR] [--layout pytorch|hf --n_head N --mem_len N ...]

SOURCE: a Hugging Face folder, whose config.json has the options, or a file of named arrays: a state_dict of torch.save,
a .safetensors, an .npz. The run folder is for sample.py, train.py --init and train.py --eval_only. Nothing that a file
holds is called or imported.
"""

if __name__ == "__main__":
    from data import flags

    flags.exit_on_interrupt()  # while modules load

import argparse
import io
import json
import pickletools
import platform
import re
import zipfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np

import txl
from data import checkpoint, flags, tokenizer

# Source's name -> our name, {i} the number in it. Then layers are stacked and linear maps transposed.
TABLE = {
    r"word_emb\.emb_layers\.(\d+)\.weight": "embed_{i}",
    r"word_emb\.emb_projs\.(\d+)": "embed_proj_{i}",
    r"r_w_bias": "u",
    r"r_r_bias": "v",
    r"layers\.(\d+)\.dec_attn\.r_w_bias": "u",
    r"layers\.(\d+)\.dec_attn\.r_r_bias": "v",
    r"layers\.(\d+)\.dec_attn\.qkv_net\.weight": "w_qkv",
    r"layers\.(\d+)\.dec_attn\.r_net\.weight": "w_r",
    r"layers\.(\d+)\.dec_attn\.o_net\.weight": "w_o",
    r"layers\.(\d+)\.dec_attn\.layer_norm\.weight": "ln1_scale",
    r"layers\.(\d+)\.dec_attn\.layer_norm\.bias": "ln1_bias",
    r"layers\.(\d+)\.pos_ff\.CoreNet\.0\.weight": "w_1",
    r"layers\.(\d+)\.pos_ff\.CoreNet\.0\.bias": "b_1",
    r"layers\.(\d+)\.pos_ff\.CoreNet\.3\.weight": "w_2",
    r"layers\.(\d+)\.pos_ff\.CoreNet\.3\.bias": "b_2",
    r"layers\.(\d+)\.pos_ff\.layer_norm\.weight": "ln2_scale",
    r"layers\.(\d+)\.pos_ff\.layer_norm\.bias": "ln2_bias",
    r"crit\.cluster_weight": "cluster",
    r"crit\.cluster_bias": "cluster_bias",
    r"crit\.out_layers\.(\d+)\.weight": "out_{i}",
    r"crit\.out_layers\.(\d+)\.bias": "out_bias_{i}",
    r"crit\.out_projs\.(\d+)": "out_proj_{i}",
    r"pos_emb\.inv_freq": None,  # a constant
}
LAYER = ("w_qkv", "w_r", "w_o", "ln1_scale", "ln1_bias", "w_1", "b_1", "w_2", "b_2", "ln2_scale", "ln2_bias")


def _bare(name):
    """A source's name without what modules around the model, torch.compile and DataParallel put before it."""
    return re.sub(r"^((module|model|transformer|_orig_mod)\.)+", "", name)


def _rename(state):
    """{source's name: array} -> {our name: {layer, or None if the name has no layer: array}}."""
    found, broken = {}, []
    for old, array in state.items():
        bare = _bare(old)
        match, new = next(((m, new) for pattern, new in TABLE.items() if (m := re.fullmatch(pattern, bare))), (None, 0))
        if match is None:
            raise ValueError(f"unknown array {old!r} {np.shape(array)}: not a name of a Transformer-XL language model")
        if new is None:
            continue
        number = int(match[1]) if match.groups() else None
        if number is not None and number >= len(state):
            raise ValueError(f"array {old!r} has a number beyond all {len(state)} arrays: the source is incomplete")
        name, layer = new.format(i=number), number if bare.startswith("layers.") else None
        dims, shape = 1 if re.search("bias|scale|^b_", name) else 2, np.shape(array)
        if len(shape) != dims:
            raise ValueError(f"array {old!r} is {shape}, wanted {dims} dimensions: the source is damaged")
        array = np.asarray(array)
        if array.dtype.kind != "f":
            raise ValueError(f"array {old!r} is of {array.dtype}, wanted floats: give weights that are not quantized")
        with np.errstate(over="ignore"):  # float64
            if not np.isfinite(array.astype(np.float32, copy=False)).all():
                broken.append(repr(old))
        if layer in found.setdefault(name, {}):
            raise ValueError(f"array {name!r} is set twice, the second time by {old!r}: remove one of them")
        found[name][layer] = array
    if broken:
        names = ", ".join(sorted(broken)[:5]) + (f" and {len(broken) - 5} more" if len(broken) > 5 else "")
        what = "holds NaN or infinite numbers, or larger ones than float32 can"
        raise ValueError(f"array {names} {what}: the source is damaged, give another copy")
    return found


def _stack(found):
    """{our name: array}, the arrays of layers 0, 1, ... stacked on a leading L; they must be of one shape."""
    n_layer = 1 + max((i for layers in found.values() for i in layers if i is not None), default=-1)
    stacked = {name: layers[None] for name, layers in found.items() if None in layers}
    for name, array in stacked.items():  # Hugging Face's port has u and v of all layers in each layer, too
        other = sorted(i for i in found[name] if i is not None and not np.array_equal(found[name][i], array))
        if other:
            raise ValueError(f"array {name!r} is set for all layers and differs in layers {other}: remove one of them")
    for name in (*LAYER, *(found.keys() & {"u", "v"} - stacked.keys())):
        layers = found.get(name, {})
        missing = [i for i in range(n_layer) if i not in layers]
        if missing or not layers:
            raise ValueError(f"missing array {name!r} of layers {missing or 'all'}: the source is incomplete")
        shapes = {i: layers[i].shape for i in sorted(layers)}
        want = Counter(shapes.values()).most_common(1)[0][0]
        wrong = [f"{shape} in layer {i}" for i, shape in shapes.items() if shape != want]
        if wrong:
            raise ValueError(f"array {name!r} is {', '.join(wrong)}, wanted {want} as elsewhere: the source is damaged")
        stacked[name] = np.stack([layers[i] for i in shapes])
    return stacked


def _split_heads(name, linear, n_head):
    """Linear maps [L, H*K, D] -> [L, D, H, K]."""
    L, HK, D = linear.shape
    if n_head < 1 or HK % n_head:
        raise ValueError(f"n_head={n_head} does not divide {HK} channels of {name!r}: give the source's n_head")
    return linear.reshape(L, n_head, HK // n_head, D).transpose(0, 3, 1, 2)


def _layers(found, n_head):
    """The "layers" part of the parameters."""
    rows = found["w_qkv"].shape[1]
    if rows % 3:
        raise ValueError(f"array 'w_qkv' has {rows} rows, wanted 3 x n_head x d_head: the source is damaged")
    layers = {name: found[name] for name in LAYER if name not in ("w_qkv", "w_r", "w_o", "w_1", "w_2")}
    for name, part in zip(("w_q", "w_k", "w_v"), np.split(found["w_qkv"], 3, axis=1)):
        layers[name] = _split_heads("w_qkv", part, n_head)
    layers["w_r"] = _split_heads("w_r", found["w_r"], n_head)
    layers["w_o"] = _split_heads("w_o", found["w_o"].transpose(0, 2, 1), n_head).transpose(0, 2, 3, 1)
    for name in ("w_1", "w_2"):
        layers[name] = found[name].transpose(0, 2, 1)
    return layers


def _tie(params, tables, n_cluster, div_val):
    """Removes output tables and projections that equal the embedding's from `params`; returns tie_weight, tie_projs.

    Hugging Face's safetensors leave tied arrays out: tables and projections count as tied if all of them are missing.
    """
    outs = [params.pop(f"out_{i}", None) for i in range(len(tables))]
    projs = [params.pop(f"out_proj_{i}", None) for i in range(n_cluster)]
    no_outs, no_projs = (all(array is None for array in arrays) for arrays in (outs, projs))
    tie_weight = no_outs or all(np.array_equal(out, params[table]) for out, table in zip(outs, tables))
    tie_projs = []
    for i, proj in enumerate(projs):
        ours = params.get(f"embed_proj_{i if div_val > 1 else 0}")
        tie_projs.append(no_outs or no_projs if proj is None else np.array_equal(proj, ours))
    params |= {f"out_{i}": out for i, out in enumerate(outs) if out is not None and not tie_weight}
    params |= {f"out_proj_{i}": proj for i, proj in enumerate(projs) if proj is not None and not tie_projs[i]}
    return tie_weight, tuple(tie_projs)


def convert(state, *, layout, n_head, mem_len, clamp_len=-1, same_length=False, pre_norm=False, cutoffs=(), div_val=1):
    """{name: array} of another implementation -> our config and parameters, numpy arrays of the source's dtype.

    layout: "pytorch" (the original, whose head has its cluster logits in reverse order) or "hf". Lengths are in our
    terms: with same_length a query sees mem_len tokens before itself. The rest is inferred from names, shapes and
    the equality of tied arrays. ValueError names arrays that are unknown, missing, set twice or of another shape.
    """
    if layout not in ("pytorch", "hf"):
        raise ValueError(f"layout={layout!r} is unknown: give 'pytorch' or 'hf'")
    found = _stack(_rename(state))
    tables = [f"embed_{i}" for i in range(len(cutoffs) + 1 if div_val > 1 else 1)]
    missing = [repr(name) for name in ("u", "v", *tables) if name not in found]
    if missing:
        why = f"the source is incomplete, or cutoffs={cutoffs} with div_val={div_val} are not its own"
        raise ValueError(f"missing array {', '.join(missing)}: {why}")
    params = {"layers": _layers(found, n_head), "u": found["u"], "v": found["v"]}
    for name, array in found.items():
        if re.match(r"embed|out|cluster", name):
            params[name] = array.T if "proj" in name else array
        if layout == "pytorch" and name.startswith("cluster"):
            params[name] = array[::-1]
    tie_weight, tie_projs = _tie(params, tables, len(cutoffs) + 1, div_val)
    L, D, H, K = params["layers"]["w_q"].shape
    F, E = params["layers"]["w_1"].shape[2], params["embed_0"].shape[1]
    n_token = sum(len(a) for name, a in params.items() if re.fullmatch(r"embed_\d+", name))
    sizes = dict(n_token=n_token, n_layer=L, n_head=H, d_model=D, d_head=K, d_inner=F, d_embed=E)
    inferred = dict(tie_weight=tie_weight, tie_projs=tie_projs, untie_r=params["u"].ndim == 3)
    lengths = dict(mem_len=mem_len, clamp_len=clamp_len, same_length=same_length)
    cfg = txl.Config(**sizes, **inferred, **lengths, pre_norm=pre_norm, cutoffs=tuple(cutoffs), div_val=div_val)
    shapes = [{k: (a.shape,) for k, a in checkpoint.flatten(tree).items()} for tree in (params, txl.param_shapes(cfg))]
    if wrong := checkpoint.mismatches(*shapes):
        why = "the source is damaged, or n_head, cutoffs or div_val are not its own"
        raise ValueError(f"arrays do not fit the config: {wrong}: {why}")
    return cfg, params


# sources: weights and options


WEIGHTS = ("model.safetensors", "pytorch_model.bin")
# Types of what config.json must hold, and values of which this model has no other.
HF_CONFIG = dict(n_head=int, mem_len=int, clamp_len=int, same_length=bool, pre_lnorm=bool, cutoffs=list, div_val=int)
HF_FIXED = dict(attn_type=0, layer_norm_epsilon=1e-5)
SAFETENSORS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
STATE_DICT = "torch.save(torch.load('model.pt', weights_only=False).state_dict(), 'state.pt')"


def read_source(path, options):
    """(state, options of `convert`) of a Hugging Face folder, or of a file and the `options` given for it."""
    path = Path(path)
    if not path.is_dir():
        missing = [f"--{name}" for name in ("layout", "n_head", "mem_len") if name not in options]
        if missing:
            raise ValueError(f"{path} does not say {', '.join(missing)}: give them (--help has them all)")
        return read_arrays(path), _to_our_lengths(options)
    if options:
        raise ValueError(f"{path}/config.json says --{', --'.join(options)}: leave it out")
    files = _weight_files(path)
    config = _read_config(path / "config.json")
    options = {name: config[name] for name in HF_CONFIG} | {"layout": "hf", "cutoffs": tuple(config["cutoffs"])}
    options["pre_norm"] = options.pop("pre_lnorm")
    state = {name: array for file in files for name, array in read_arrays(file).items()}
    return _fill_tied(state, config), _to_our_lengths(options)


def _weight_files(folder):
    """The files of a Hugging Face folder's weights: one, or all parts that an index lists."""
    for name in WEIGHTS:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name]
        if index.is_file():
            try:
                parts = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
                if not all(isinstance(part, str) and part == Path(part).name for part in parts):
                    raise ValueError(f"{parts!a} are no names of files beside it")
            except Exception as e:  # of json, and of what is no dict of dicts
                raise ValueError(f"{index}: no index of files ({e}): give another copy") from None
            return [folder / part for part in parts]
    raise ValueError(f"{folder}: no {' or '.join(WEIGHTS)} there: give a Hugging Face folder, or a file of weights")


def _to_our_lengths(options):
    # With same_length, the sources' mem_len counts the query itself, ours only the tokens before it.
    least = int(options.get("same_length", False))
    if options["mem_len"] < least:
        why = ", since with same_length it counts the query itself" if least else ""
        raise ValueError(f"mem_len={options['mem_len']} is out of range{why}: give {least} or more")
    clamp_len = options.get("clamp_len", -1)
    return options | {"mem_len": options["mem_len"] - least, "clamp_len": clamp_len if clamp_len > 0 else -1}


def _read_config(path):
    try:
        config = json.loads(path.read_bytes())
        wrong = [name for name, kind in HF_CONFIG.items() if type(config.get(name)) is not kind]
        if not isinstance(config.get("tie_projs", []), list):
            wrong.append("tie_projs")
        wrong += [name for name, value in HF_FIXED.items() if config.get(name, value) != value]
    except (OSError, ValueError, AttributeError, RecursionError) as e:
        raise ValueError(f"{path}: no usable config ({e}): give the folder that save_pretrained made") from None
    if wrong:
        found = ", ".join(f"{name} {config.get(name, 'missing')!r}" for name in wrong)
        raise ValueError(f"{path}: {found}: not a Transformer-XL as published, which is all that can be imported")
    return config


def _fill_tied(state, config):
    """`state` with the output projections that the file leaves out because config.json ties them to the embedding's."""
    tied = config.get("tie_projs", [False] + [True] * len(config["cutoffs"]))
    bare, filled = {_bare(name): array for name, array in state.items()}, dict(state)
    for i, is_tied in enumerate(tied):
        embed_proj = f"word_emb.emb_projs.{i if config['div_val'] > 1 else 0}"
        if is_tied and embed_proj in bare and f"crit.out_projs.{i}" not in bare:
            filled[f"crit.out_projs.{i}"] = bare[embed_proj]
    return filled


def read_arrays(path):
    """{name: array} of an .npz, a .safetensors or, by any other name, a file of torch.save.

    ValueError if it is damaged or holds other things, and if torch is needed and missing.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file: give a file of weights, or a Hugging Face folder")
    readers = {".npz": checkpoint.load_npz, ".safetensors": _read_safetensors}
    return readers.get(path.suffix.lower(), _read_torch)(path)


def _read_safetensors(path):
    """Eight bytes that hold a length, a JSON header of that length, then the bytes of the arrays."""
    try:
        with open(path, "rb") as f:
            n = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(min(n, path.stat().st_size)))
            data, arrays, n_read = np.fromfile(f, np.uint8), {}, 0
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            array = data[start:stop].view(SAFETENSORS[entry["dtype"]]).reshape(entry["shape"])
            n_read += array.nbytes
            if n_read > len(data):
                raise ValueError("arrays that overlap")
            if entry["dtype"] == "BF16":  # the upper half of a float32
                array = (array.astype(np.uint32) << 16).view(np.float32)
            arrays[name] = array
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ValueError(f"{path} is damaged or holds other than floats ({e!r}): give another copy") from None
    return arrays


def _read_torch(path):
    with open(path, "rb") as f:
        head = f.read(2)
    if head != b"PK" and head[:1] != b"\x80":  # a zip, or formerly a pickle
        way = "give the model's .safetensors, .npz or state_dict of torch.save, or its Hugging Face folder"
        raise ValueError(f"{path} is none of the files that can be read: {way}")
    try:
        import torch
    except ImportError:
        raise ValueError(f"{path}: torch, which reads it, is not installed: pip install torch") from None
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:  # many types, some with pages of text
        why = f"{type(e).__name__}: {str(e).partition('.')[0].partition(chr(10))[0][:80]}"
        way = f"if it is the original's whole module, run {STATE_DICT} beside the original's code and give state.pt"
        raise ValueError(f"{path}: no plain state_dict ({why}): {way}") from None
    if not isinstance(found, dict) or not all(isinstance(a, torch.Tensor) for a in found.values()):
        names = f" {', '.join(map(repr, list(found)[:5]))}" if isinstance(found, dict) else ""
        raise ValueError(
            f"{path} holds a {type(found).__name__}{names}, want tensors by name: save the model's state_dict() alone"
        )
    # numpy has no bfloat16; what is no float stays what it is, for `convert` to refuse
    return {name: (a.float() if a.is_floating_point() else a).detach().numpy() for name, a in found.items()}


# vocabularies

MOST = 2**28  # bytes of a vocabulary file
IN_ORDER = "give a text file with one symbol a line, in the order of the ids"
DICTS = ("collections OrderedDict", "collections Counter")  # the only classes that a pickle may name: read as dicts
PLAIN = r"(SHORT_)?(BIN)?(INT|LONG|FLOAT|STRING|UNICODE)\d*"  # a pickle's opcodes for numbers and texts
# How many entries of the stack an opcode takes: none if it is not here, and all down to the mark if it is in TO_MARK.
TAKES = {"APPEND": 1, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "SETITEM": 2, "STACK_GLOBAL": 2, "REDUCE": 2}
TO_MARK = ("APPENDS", "LIST", "TUPLE", "SETITEMS", "DICT")


def read_vocabulary(path):
    """The vocabulary in a file: our JSON or meta.json, or JSON of {symbol: id}; a text of one symbol a line, in the
    order of the ids; a pickle or torch.save of a dict with idx2sym or sym2idx, as Hugging Face's vocab.pkl and
    vocab.bin. "byte": the byte one. ValueError for anything else.
    """
    if path == "byte":
        return {"kind": "byte"}
    path = Path(path)
    if (size := path.stat().st_size) > MOST:
        raise ValueError(f"{path} has {size:,} bytes, more than {MOST:,}: it is no vocabulary, {IN_ORDER}")
    data = path.read_bytes()
    if path.suffix.lower() == ".json":
        vocab = _json_vocabulary(path, data)
    elif data[:1] == b"\x80" or data[:2] == b"PK":
        vocab = _of_symbols(_pickled_symbols(path, data))
    else:
        vocab = _of_symbols(_lines(path, data))
    try:
        return tokenizer.check(vocab)
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None


def _of_symbols(symbols):
    return {"kind": "char" if all(len(symbol) == 1 for symbol in symbols) else "word", "symbols": symbols}


def _json_vocabulary(path, data):
    """What may be a vocabulary: the whole of a file, its "vocab", or the symbols of a dict of ids."""
    try:
        vocab = json.loads(data)
        if isinstance(vocab, dict) and vocab and all(type(i) is int for i in vocab.values()):
            return _of_symbols(_in_order(vocab))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path} is no JSON of a vocabulary ({e}): give its own, or ids by symbol") from None
    return vocab.get("vocab", vocab) if isinstance(vocab, dict) else vocab


def _lines(path, data):
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path}: byte {e.start} is not UTF-8: {IN_ORDER}") from None
    text = text if "\n" in text else text.replace("\r", "\n")
    return text.removesuffix("\n").split("\n")


def _pickled_symbols(path, data):
    """The list of symbols in a pickle or a file of torch.save: a zip with a pickle, formerly several in a row."""
    try:
        if data[:2] == b"PK":
            with zipfile.ZipFile(io.BytesIO(data)) as z:
                member = next((info for info in z.infolist() if info.filename.endswith("data.pkl")), None)
                if not member or member.compress_type != zipfile.ZIP_STORED:  # torch.save compresses nothing
                    raise ValueError("a zip without a stored data.pkl")
                data = z.read(member)
        file, found = io.BytesIO(data), {}
        while not (isinstance(found, dict) and found.keys() & {"idx2sym", "sym2idx"}):
            found = _parse_pickle(file)
        ids = found.get("sym2idx", {})
        symbols = list(found.get("idx2sym") or _in_order(ids))
        if not all(isinstance(symbol, str) for symbol in symbols):
            raise ValueError("a symbol that is no text")
        if ids and [ids[symbol] for symbol in symbols] != list(range(len(symbols))):
            raise ValueError("idx2sym and sym2idx do not agree on ids 0, 1, 2, ...")
    except Exception as e:  # of zipfile and pickletools, and of what a damaged pickle does to the stack
        raise ValueError(f"{path} is no pickle of plain containers with idx2sym or sym2idx ({e}): {IN_ORDER}") from None
    try:  # the published wt103 vocabulary is UTF-8 that was read as Latin-1
        return [symbol.encode("latin-1").decode("utf-8") for symbol in symbols]
    except UnicodeError:
        return symbols


def _in_order(ids):
    """The symbols of {symbol: id}, in the order of the ids."""
    if not all(type(i) is int for i in ids.values()) or sorted(ids.values()) != list(range(len(ids))):
        raise ValueError("the ids are not 0, 1, 2, ...")
    return sorted(ids, key=ids.get)


def _parse_pickle(file):
    """The next pickle of a file (BytesIO), read without unpickling: tuples become lists, and what is no container,
    text or number is a ValueError. Takes no more memory than about 100 times the file.
    """
    stack, marks, memo, n_copied = [], [], {}, 0
    for op, arg, _ in pickletools.genops(file):
        at = marks.pop() if op.name in TO_MARK else len(stack) - TAKES.get(op.name, 0)
        items, stack[at:] = stack[at:], []
        match op.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack.pop()
            case "MARK":
                marks.append(len(stack))
            case "PUT" | "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                memo[len(memo) if arg is None else int(arg)] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(memo[int(arg)])
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[op.name])
            # A tuple, too, is a list: as a key of a dict it would be hashed, however deep it is.
            case "EMPTY_LIST" | "LIST" | "EMPTY_TUPLE" | "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(items)
            case "EMPTY_DICT" | "DICT":
                stack.append(dict(zip(items[::2], items[1::2], strict=True)))
            case "APPEND" | "APPENDS":
                stack[-1].extend(items)
            case "SETITEM" | "SETITEMS":
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
            case "GLOBAL" | "STACK_GLOBAL":
                if (named := arg or " ".join(items)) not in DICTS:
                    raise ValueError(f"it names {named.replace(' ', '.')[:80]}")
                stack.append(dict)
            case "REDUCE" if items[0] is dict:
                n_copied += sum(map(len, items[1]))
                if n_copied > len(file.getbuffer()):
                    raise ValueError("it makes more than it holds")
                stack.append(dict(*items[1]))
            case name if re.fullmatch(PLAIN, name):
                stack.append(arg)
            case name:
                raise ValueError(f"it has the opcode {name}")


# the command


def save(folder, cfg, params, vocab, source):
    """Writes weights and vocabulary as a run's best checkpoint. It has nothing to resume from."""
    known = {"optimizer": "adam", "tgt_len": 64}  # evaluation reads segments of tgt_len
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    run = {"step": 0, "cursor": 0, "flags": known, "corpus": "", "best": None, "versions": versions, "source": source}
    arrays = {name: np.asarray(a, np.float32) for name, a in checkpoint.flatten({"params": params}).items()}
    checkpoint.save(folder / "best.npz", arrays, {"config": asdict(cfg), "vocab": vocab, "run": run})


def _arguments(argv):
    prog = "data.import_checkpoint"
    parser = argparse.ArgumentParser(f"python -m {prog}", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.error = lambda message: flags.fail(prog, f"{message} (see --help)")
    parser.add_argument("source", metavar="SOURCE", help="Hugging Face folder, or a file of named arrays")
    text = "the source's vocabulary: our JSON, one symbol a line, or a pickle with idx2sym; byte: ids are bytes"
    parser.add_argument("--vocab", metavar="FILE", help=text)
    parser.add_argument("--out", default="", metavar="DIR", help="run folder; default: the first free runs/NAME-N")
    group = parser.add_argument_group("options that a file does not hold", argument_default=argparse.SUPPRESS)
    text = "order of its adaptive softmax's clusters: pytorch for the original, hf for Hugging Face's port"
    group.add_argument("--layout", choices=("pytorch", "hf"), help=text)
    ours = {name: text for name, (_, text) in flags.field_comments(txl.Config).items()}
    group.add_argument("--n_head", type=int, help=ours["n_head"])
    text = "tokens it remembers; with --same_length its queries see mem_len keys, themselves one of them"
    group.add_argument("--mem_len", type=int, help=text)
    group.add_argument("--clamp_len", type=int, help=ours["clamp_len"])
    group.add_argument("--same_length", action="store_true", help="it was evaluated with same_length")
    group.add_argument("--pre_norm", action="store_true", help=ours["pre_norm"])
    group.add_argument("--cutoffs", type=flags.to_ints, help=ours["cutoffs"])
    group.add_argument("--div_val", type=int, help=ours["div_val"])
    return vars(parser.parse_args(argv))


def main(argv=None):
    options = _arguments(argv)
    source, file, out = (options.pop(name) for name in ("source", "vocab", "out"))
    try:
        state, options = read_source(source, options)
        cfg, params = convert(state, **options)
        if not file:
            raise ValueError(f"vocab: the source has {cfg.n_token} ids and no symbols: give its --vocab FILE, or byte")
        vocab = read_vocabulary(file)
        if tokenizer.size(vocab) != cfg.n_token:
            raise ValueError(f"vocab: {file} has {tokenizer.size(vocab)} symbols, {source} {cfg.n_token}: give its own")
        folder = checkpoint.new_run_folder(out, Path(source).resolve().stem)
        save(folder, cfg, params, vocab, source)
    except (OSError, ValueError) as e:
        flags.fail("data.import_checkpoint", e)
    flags.print_result(json.dumps({"out": str(folder), "n_params": txl.count_params(cfg), "config": asdict(cfg)}))


if __name__ == "__main__":
    flags.run_script(main)
