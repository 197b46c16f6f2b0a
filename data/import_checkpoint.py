"""Transformer-XL weights from elsewhere -> our config, parameters, checkpoint.

    python -m data.import_checkpoint SOURCE --vocab FILE [--out DIR] [--layout pytorch|hf --n_head N --mem_len N ...]

SOURCE: a Hugging Face folder, whose config.json says the rest, or a file of named arrays: a state_dict that torch.save
wrote, a .safetensors, an .npz. The run folder it makes is for sample.py, train.py --init and train.py --eval_only.
"""

import argparse
import json
import platform
import re
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np

import txl
from data import checkpoint, flags, foreign, tokenizer

# Old name -> our name; {i} is the number in the old one. Layers' arrays are stacked, linear maps turned round.
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
    r"pos_emb\.inv_freq": None,  # a constant, computed here
}
LAYER = ("w_qkv", "w_r", "w_o", "ln1_scale", "ln1_bias", "w_1", "b_1", "w_2", "b_2", "ln2_scale", "ln2_bias")


def _rename(state):
    """{old name: array} -> {our name: {layer, None where the old name counts no layers: array}}."""
    found = {}
    for old, array in state.items():
        bare = old.removeprefix("module.").removeprefix("transformer.")
        match, new = next(((m, new) for pattern, new in TABLE.items() if (m := re.fullmatch(pattern, bare))), (None, 0))
        if match is None:
            raise ValueError(f"unknown array {old!r} {np.shape(array)}: not a name of a Transformer-XL language model")
        if new is None:
            continue
        number = int(match[1]) if match.groups() else None
        name, layer = new.format(i=number), number if bare.startswith("layers.") else None
        dims, shape = 1 if re.search("bias|scale|^b_", name) else 2, np.shape(array)
        if len(shape) != dims:
            raise ValueError(f"array {old!r} is {shape}, wanted {dims} dimensions: the source is damaged")
        if layer in found.setdefault(name, {}):
            raise ValueError(f"array {name!r} is set twice, the second time by {old!r}: remove one of them")
        found[name][layer] = np.asarray(array)
    return found


def _shared(name, slot):
    """The array that all layers share; Hugging Face's port registers it in each layer, too."""
    other = sorted(i for i, array in slot.items() if not np.array_equal(array, slot[None]))
    if other:
        raise ValueError(f"array {name!r} is set for all layers and differs in layers {other}: remove one of them")
    return slot[None]


def _stack(found):
    """Layers' arrays on a leading L, alike in each layer from 0 on; of arrays without a layer there is one."""
    n_layer = 1 + max((i for slot in found.values() for i in slot if i is not None), default=-1)
    stacked = {name: _shared(name, slot) for name, slot in found.items() if None in slot}
    for name in (*LAYER, *(found.keys() & {"u", "v"} - stacked.keys())):
        slot = found.get(name, {})
        missing = [i for i in range(n_layer) if i not in slot]
        if missing or not slot:
            raise ValueError(f"missing array {name!r} of layers {missing or 'all'}: the source is incomplete")
        shapes = {i: slot[i].shape for i in sorted(slot)}
        want = Counter(shapes.values()).most_common(1)[0][0]
        wrong = [f"{shape} in layer {i}" for i, shape in shapes.items() if shape != want]
        if wrong:
            raise ValueError(f"array {name!r} is {', '.join(wrong)}, wanted {want} as elsewhere: the source is damaged")
        stacked[name] = np.stack([slot[i] for i in shapes])
    return stacked


def _heads(name, linear, n_head):
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
    q, k, v = (_heads("w_qkv", a, n_head) for a in np.split(found["w_qkv"], 3, axis=1))
    r, o = (_heads(name, a, n_head) for name, a in (("w_r", found["w_r"]), ("w_o", found["w_o"].transpose(0, 2, 1))))
    layers = {"w_q": q, "w_k": k, "w_v": v, "w_r": r, "w_o": o.transpose(0, 2, 3, 1)}
    layers |= {"w_1": found["w_1"].transpose(0, 2, 1), "w_2": found["w_2"].transpose(0, 2, 1)}
    return layers | {name: found[name] for name in LAYER if "_b" in name or "scale" in name or name.startswith("b_")}


def _tie(params, tables, n_cluster, div_val):
    """Takes output tables and projections that are the embedding's out of `params`; returns tie_weight, tie_projs.

    Hugging Face's safetensors leave tied copies out: what is missing is one where all tables or all projections are.
    """
    take = lambda name, n: [params.pop(f"{name}_{i}", None) for i in range(n)]
    outs, projs = take("out", len(tables)), take("out_proj", n_cluster)
    no_outs, no_projs = (all(array is None for array in arrays) for arrays in (outs, projs))
    tied = no_outs or all(np.array_equal(out, params[table]) for out, table in zip(outs, tables))
    ours = [params.get(f"embed_proj_{i if div_val > 1 else 0}") for i in range(n_cluster)]
    same = [no_outs or no_projs if a is None else np.array_equal(a, b) for a, b in zip(projs, ours)]
    params |= {f"out_{i}": a for i, a in enumerate(outs) if a is not None and not tied}
    params |= {f"out_proj_{i}": a for i, a in enumerate(projs) if a is not None and not same[i]}
    return tied, tuple(same)


def convert(state, *, layout, n_head, mem_len, clamp_len=-1, same_length=False, pre_norm=False, cutoffs=(), div_val=1):
    """{name: array} of another implementation -> our config and parameters, numpy arrays of the source's dtype.

    layout "pytorch" (the original, which reads the head's cluster logits in reverse) or "hf". Lengths are in our
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
    params |= {k: a.T if "proj" in k else a for k, a in found.items() if re.match(r"embed|out|cluster", k)}
    if layout == "pytorch":
        params |= {k: a[::-1] for k, a in params.items() if k.startswith("cluster")}
    tie_weight, tie_projs = _tie(params, tables, len(cutoffs) + 1, div_val)
    L, D, H, K = params["layers"]["w_q"].shape
    F, E = params["layers"]["w_1"].shape[2], params["embed_0"].shape[1]
    n_token = sum(len(a) for name, a in params.items() if re.fullmatch(r"embed_\d+", name))
    sizes = dict(n_token=n_token, n_layer=L, n_head=H, d_model=D, d_head=K, d_inner=F, d_embed=E)
    sizes |= dict(tie_weight=tie_weight, tie_projs=tie_projs, untie_r=params["u"].ndim == 3)
    given = dict(mem_len=mem_len, clamp_len=clamp_len, same_length=same_length, pre_norm=pre_norm)
    cfg = txl.Config(**sizes, **given, cutoffs=tuple(cutoffs), div_val=div_val)
    check(params, txl.param_shapes(cfg))
    return cfg, params


def _flat(params):
    """{path: array} of parameters or of their shapes."""
    layers = {f"layers/{name}": a for name, a in params["layers"].items()}
    return {name: a for name, a in params.items() if name != "layers"} | layers


def check(params, want):
    """ValueError naming every array of `params` that is missing, unexpected or of another shape than in `want`."""
    params, want = _flat(params), _flat(want)
    wrong = [f"{name} missing" for name in want.keys() - params.keys()]
    wrong += [f"{name} unexpected" for name in params.keys() - want.keys()]
    both = [(name, params[name].shape, want[name].shape) for name in want.keys() & params.keys()]
    wrong += [f"{name} is {found}, wanted {shape}" for name, found, shape in both if found != shape]
    if wrong:
        why = "the source is damaged, or n_head, cutoffs or div_val are not its own"
        raise ValueError(f"arrays do not fit the config: {'; '.join(sorted(wrong))}: {why}")


WEIGHTS = ("model.safetensors", "pytorch_model.bin")
HF = {"n_head": int, "mem_len": int, "clamp_len": int, "same_length": bool, "pre_lnorm": bool, "cutoffs": list}
HF |= {"div_val": int}  # what config.json must say
FIXED = {"attn_type": 0, "layer_norm_epsilon": 1e-5}  # and what it may not say otherwise


def read_source(path, given):
    """(state, options for `convert`) of a Hugging Face folder, or of a file and the options `given`."""
    path = Path(path)
    if not path.is_dir():
        missing = [f"--{name}" for name in ("layout", "n_head", "mem_len") if name not in given]
        if missing:
            raise ValueError(f"{path} does not say {', '.join(missing)}: give them (--help has them all)")
        return foreign.arrays(path), _in_our_terms(given)
    if given:
        raise ValueError(f"{path}/config.json says --{', --'.join(given)}: leave it out")
    names = [name for name in WEIGHTS if (path / name).is_file()]
    if not names:
        raise ValueError(f"{path}: no {' or '.join(WEIGHTS)} there: give a Hugging Face folder, or a file of weights")
    config = _read_config(path / "config.json")
    given = {name: config[name] for name in HF} | {"layout": "hf", "cutoffs": tuple(config["cutoffs"])}
    given["pre_norm"] = given.pop("pre_lnorm")
    return _fill_tied(foreign.arrays(path / names[0]), config), _in_our_terms(given)


def _in_our_terms(given):
    """Options with the source's lengths -> with ours."""
    # Where the sources' same_length lets a query see mem_len keys, itself among them, ours counts those before it.
    given = given | {"mem_len": given["mem_len"] - bool(given.get("same_length"))}
    return given | {"clamp_len": n if (n := given.get("clamp_len", -1)) > 0 else -1}


def _read_config(path):
    try:
        config = json.loads(path.read_bytes())
        wrong = [name for name, kind in HF.items() if type(config.get(name)) is not kind]
        wrong += [] if isinstance(config.get("tie_projs", []), list) else ["tie_projs"]
        wrong += [name for name, value in FIXED.items() if config.get(name, value) != value]
    except (OSError, ValueError, AttributeError, RecursionError) as e:
        raise ValueError(f"{path}: no usable config ({e}): give the folder that save_pretrained made") from None
    if wrong:
        found = ", ".join(f"{name} {config.get(name, 'missing')!r}" for name in wrong)
        raise ValueError(f"{path}: {found}: not a Transformer-XL as published, which is all that can be imported")
    return config


def _fill_tied(state, config):
    """`state` with the projections that the file leaves out because config.json ties them to the embedding's."""
    tied = config.get("tie_projs", [False] + [True] * len(config["cutoffs"]))
    ours = {i: f"transformer.word_emb.emb_projs.{i if config['div_val'] > 1 else 0}" for i, t in enumerate(tied) if t}
    return {f"crit.out_projs.{i}": state[name] for i, name in ours.items() if name in state} | state


def save(folder, cfg, params, vocab, source):
    """Writes an import as a run's best checkpoint: weights and vocabulary, nothing that a resume could go on from."""
    known = {"optimizer": "adam", "tgt_len": 64}  # for what reads a run's: evaluation goes in segments of tgt_len
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    run = {"step": 0, "cursor": 0, "flags": known, "corpus": "", "best": None, "versions": versions, "source": source}
    state = {f"params/{name}": np.asarray(a, np.float32) for name, a in _flat(params).items()}
    checkpoint.save(folder / "best.npz", state, {"config": asdict(cfg), "vocab": vocab, "run": run})


def _arguments(argv):
    prog = "data.import_checkpoint"
    parser = argparse.ArgumentParser(f"python -m {prog}", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.error = lambda message: sys.exit(f"{prog}: {message} (see --help)")
    parser.add_argument("source", metavar="SOURCE", help="Hugging Face folder, or a file of named arrays")
    text = "the source's vocabulary: our JSON, one symbol a line, or a pickle with idx2sym; byte: ids are bytes"
    parser.add_argument("--vocab", metavar="FILE", help=text)
    parser.add_argument("--out", default="", metavar="DIR", help="run folder; default: the first free runs/NAME-N")
    group = parser.add_argument_group("what a file does not say", argument_default=argparse.SUPPRESS)
    text = "order of its adaptive softmax's clusters: pytorch for the original, hf for Hugging Face's port"
    group.add_argument("--layout", choices=("pytorch", "hf"), help=text)
    ours = {name: text for name, (_, text) in flags.comments(txl.Config).items()}
    group.add_argument("--n_head", type=int, help=ours["n_head"])
    text = "tokens it remembers; with --same_length its queries see mem_len keys, themselves one of them"
    group.add_argument("--mem_len", type=int, help=text)
    group.add_argument("--clamp_len", type=int, help=ours["clamp_len"])
    group.add_argument("--same_length", action="store_true", help="it was evaluated with same_length")
    group.add_argument("--pre_norm", action="store_true", help=ours["pre_norm"])
    group.add_argument("--cutoffs", type=flags.numbers, help=ours["cutoffs"])
    group.add_argument("--div_val", type=int, help=ours["div_val"])
    return vars(parser.parse_args(argv))


def main(argv=None):
    given = _arguments(argv)
    source, file, out = (given.pop(name) for name in ("source", "vocab", "out"))
    try:
        state, options = read_source(source, given)
        cfg, params = convert(state, **options)
        if not file:
            raise ValueError(f"vocab: the source has {cfg.n_token} ids and no symbols: give its --vocab FILE, or byte")
        vocab = foreign.vocabulary(file)
        if tokenizer.size(vocab) != cfg.n_token:
            raise ValueError(f"vocab: {file} has {tokenizer.size(vocab)} symbols, {source} {cfg.n_token}: give its own")
        folder = checkpoint.new_folder(out, Path(source).resolve().stem)
        save(folder, cfg, params, vocab, source)
    except (OSError, ValueError) as e:
        sys.exit(f"data.import_checkpoint: {e}")
    print(json.dumps({"out": str(folder), "n_params": txl.count_params(cfg), "config": asdict(cfg)}))


if __name__ == "__main__":
    main()
