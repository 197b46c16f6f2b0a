"""Transformer-XL weights from elsewhere -> our config and parameters."""

import re

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
    """{old name: array} -> {our name: array, or {layer: array} where the old name counts layers}."""
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
        slot = found.setdefault(name, {})
        if layer in slot or (None in slot) != (layer is None and bool(slot)):
            raise ValueError(f"array {name!r} is set twice, the second time by {old!r}: remove one of them")
        slot[layer] = np.asarray(array)
    return found


def _stack(found):
    """Layers' arrays on a leading L; every layer from 0 must be there."""
    n_layer = 1 + max(found.get("w_qkv", {-1: 0}))
    for name in LAYER:
        missing = sorted(set(range(n_layer)) - set(found.get(name, {})))
        if missing or n_layer == 0:
            raise ValueError(f"missing array {name!r} of layers {missing or 'all'}: the source is incomplete")
    return {
        name: slot[None] if None in slot else np.stack([slot[i] for i in sorted(slot)]) for name, slot in found.items()
    }


def _heads(linear, n_head):
    """Linear maps [L, H*K, D] -> [L, D, H, K]."""
    L, HK, D = linear.shape
    if HK % n_head:
        raise ValueError(f"n_head={n_head} does not divide {HK} channels: give the source's number of heads")
    return linear.reshape(L, n_head, HK // n_head, D).transpose(0, 3, 1, 2)


def _layers(found, n_head):
    """The "layers" part of the parameters."""
    q, k, v = (_heads(a, n_head) for a in np.split(found["w_qkv"], 3, axis=1))
    r, o = _heads(found["w_r"], n_head), _heads(found["w_o"].transpose(0, 2, 1), n_head).transpose(0, 2, 3, 1)
    layers = {"w_q": q, "w_k": k, "w_v": v, "w_r": r, "w_o": o}
    layers |= {"w_1": found["w_1"].transpose(0, 2, 1), "w_2": found["w_2"].transpose(0, 2, 1)}
    return layers | {name: found[name] for name in LAYER if "_b" in name or "scale" in name or name.startswith("b_")}


def convert(state, *, layout, n_head, mem_len, clamp_len=-1, same_length=False, pre_norm=False, cutoffs=(), div_val=1):
    """{name: array} of another implementation -> our config and parameters, numpy arrays of the source's dtype.

    layout "pytorch" (the original, which reads the head's cluster logits in reverse) or "hf". Lengths are in our
    terms: with same_length a query sees mem_len tokens before itself. The rest is inferred from names, shapes and
    the equality of tied arrays. ValueError names arrays that are unknown, missing, set twice or of another shape.
    """
    if layout not in ("pytorch", "hf"):
        raise ValueError(f"layout={layout!r} is unknown: give 'pytorch' or 'hf'")
    found = _stack(_rename(state))
    params = {"layers": _layers(found, n_head)}
    params |= {k: a for k, a in found.items() if re.match(r"(embed|out|cluster)", k) and "proj" not in k}
    params |= {k: a.T for k, a in found.items() if "proj" in k}
    if layout == "pytorch":
        params |= {k: a[::-1] for k, a in params.items() if k.startswith("cluster")}
    for name in ("u", "v", "embed_0", "out_bias_0"):
        if name not in found:
            raise ValueError(f"missing array {name!r}: the source is incomplete")
    params |= {"u": found["u"], "v": found["v"]}
    L, D, H, K = params["layers"]["w_q"].shape
    tables = [name for name in params if re.fullmatch(r"embed_\d+", name)]
    outs = {name: params.pop(name) for name in list(params) if re.fullmatch(r"out_\d+", name)}
    tied = all(f"out_{t[6:]}" not in outs or np.array_equal(params[t], outs[f"out_{t[6:]}"]) for t in tables)
    params |= {} if tied else outs
    projs = [f"out_proj_{i}" for i in range(len(cutoffs) + 1)]
    embed_proj = lambda i: params.get(f"embed_proj_{i if div_val > 1 else 0}")
    same = [p not in params or np.array_equal(params[p], embed_proj(i)) for i, p in enumerate(projs)]
    for name, equal in zip(projs, same):
        if equal:
            params.pop(name, None)
    cfg = txl.Config(
        n_token=sum(len(params[t]) for t in tables),
        n_layer=L,
        n_head=H,
        d_model=D,
        d_head=K,
        d_inner=params["layers"]["w_1"].shape[2],
        d_embed=params["embed_0"].shape[1],
        mem_len=mem_len,
        clamp_len=clamp_len,
        same_length=same_length,
        pre_norm=pre_norm,
        tie_weight=tied,
        tie_projs=tuple(same),
        untie_r=found["u"].ndim == 3,
        cutoffs=tuple(cutoffs),
        div_val=div_val,
    )
    check(params, txl.param_shapes(cfg))
    return cfg, params


def check(params, want, where=""):
    """ValueError naming every array of `params` that is missing, unexpected or of another shape than in `want`."""
    wrong = [f"{where}{name} missing" for name in want if name not in params]
    wrong += [f"{where}{name} unexpected" for name in params if name not in want]
    for name in want.keys() & params.keys():
        if isinstance(want[name], dict):
            check(params[name], want[name], f"{name}/")
        elif params[name].shape != want[name].shape:
            wrong.append(f"{where}{name} is {params[name].shape}, wanted {want[name].shape}")
    if wrong:
        raise ValueError("arrays do not fit the config: " + "; ".join(wrong))
