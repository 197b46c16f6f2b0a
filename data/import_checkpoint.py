"""Transformer-XL weights from elsewhere -> our config and parameters."""

import re
from collections import Counter

import numpy as np

import txl

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
