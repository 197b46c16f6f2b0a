"""Weights from elsewhere: what the importer infers, and one clear line for all that can be wrong with a source."""

import dataclasses

import jax
import numpy as np
import pytest
from conftest import REFERENCE, load_reference, make_params, part, worst

import txl
from data.import_checkpoint import convert

CFG = txl.Config(
    n_token=29, n_layer=2, n_head=3, d_model=10, d_head=5, d_inner=14, d_embed=8, mem_len=4, cutoffs=(6, 17), div_val=2,
    tie_weight=False, tie_projs=(True, False, True), untie_r=True,
)  # fmt: skip
OPTIONS = dict(layout="hf", n_head=3, mem_len=4, cutoffs=(6, 17), div_val=2)
LAYERS = "transformer.layers.{i}."


def without(*names):
    return lambda state: {old: array for old, array in state.items() if not any(name in old for name in names)}


def plus(**arrays):
    return lambda state: state | {name.replace("__", "."): array for name, array in arrays.items()}


def in_layers(old, array):
    return lambda state: state | {LAYERS.format(i=i) + old: array for i in range(2)}


def variant(**options):
    return dataclasses.replace(CFG, **options)


def foreign(params, cfg):
    """Our parameters under Hugging Face's names and shapes: the converter's opposite, written from their source."""
    state = {}
    for i in range(len(cfg.cutoffs) + 1):
        state[f"transformer.word_emb.emb_layers.{i}.weight"] = params[f"embed_{i}"]
        state[f"transformer.word_emb.emb_projs.{i}"] = params[f"embed_proj_{i}"].T
        state[f"crit.out_layers.{i}.weight"] = params.get(f"out_{i}", params[f"embed_{i}"])
        state[f"crit.out_layers.{i}.bias"] = params[f"out_bias_{i}"]
        state[f"crit.out_projs.{i}"] = params.get(f"out_proj_{i}", params[f"embed_proj_{i}"]).T
    state |= {"crit.cluster_weight": params["cluster"], "crit.cluster_bias": params["cluster_bias"]}
    for i in range(cfg.n_layer):
        p, name = {k: a[i] for k, a in params["layers"].items()}, LAYERS.format(i=i)
        rows = lambda w: np.concatenate([w[:, h].T for h in range(cfg.n_head)])  # [D, H, K] -> [H*K, D]
        state[f"{name}dec_attn.qkv_net.weight"] = np.concatenate([rows(p[w]) for w in ("w_q", "w_k", "w_v")])
        state[f"{name}dec_attn.r_net.weight"] = rows(p["w_r"])
        state[f"{name}dec_attn.o_net.weight"] = np.concatenate([p["w_o"][h].T for h in range(cfg.n_head)], axis=1)
        for ours, theirs in (("u", "r_w_bias"), ("v", "r_r_bias")):  # those of all layers stand in each of them, too
            state[f"{name}dec_attn.{theirs}"] = params[ours][i] if cfg.untie_r else params[ours]
            state |= {} if cfg.untie_r else {f"transformer.{theirs}": params[ours]}
        for sublayer, n in (("dec_attn", 1), ("pos_ff", 2)):
            state[f"{name}{sublayer}.layer_norm.weight"] = p[f"ln{n}_scale"]
            state[f"{name}{sublayer}.layer_norm.bias"] = p[f"ln{n}_bias"]
        for n, ours in ((0, 1), (3, 2)):
            state[f"{name}pos_ff.CoreNet.{n}.weight"] = p[f"w_{ours}"].T
            state[f"{name}pos_ff.CoreNet.{n}.bias"] = p[f"b_{ours}"]
    return state | {"transformer.pos_emb.inv_freq": np.ones(5)}


def test_hugging_face_names_with_biases_of_each_layer_become_the_same_config_and_parameters():
    params = make_params(CFG)
    cfg, got = convert(foreign(params, CFG), **OPTIONS)
    assert cfg == CFG
    assert got.keys() == params.keys() and got["layers"].keys() == params["layers"].keys()
    for name, array in (params | params["layers"]).items():
        if name != "layers":
            np.testing.assert_array_equal((got | got["layers"])[name], array, err_msg=name)


@pytest.mark.parametrize("missing", [(), ("dec_attn.r_w_bias", "layers.1.dec_attn.r_r_bias")], ids=["all", "some"])
def test_biases_that_all_layers_share_may_stand_in_each_layer_too(missing):
    want = variant(untie_r=False)
    params = make_params(want)
    cfg, got = convert(without(*missing)(foreign(params, want)), **OPTIONS)
    assert cfg == want and got["u"].shape == got["v"].shape == (3, 5)
    assert worst(got, params) == 0


@pytest.mark.parametrize(
    "options, missing",
    [
        (dict(tie_weight=True), ("out_layers.0.w", "out_layers.1.w", "out_layers.2.w", "out_projs.0", "out_projs.2")),
        (dict(tie_weight=True, tie_projs=(True, True, True)), ("out_layers.0.w", "out_layers.1.w", "out_layers.2.w")),
        (dict(tie_projs=(True, True, True)), ("out_projs",)),
    ],
    ids=["tables and their projections", "tables", "projections"],
)
def test_tied_copies_may_all_be_missing_as_safetensors_leave_them_out(options, missing):
    want = variant(**options)
    params = make_params(want)
    whole = foreign(params, want)
    state = without(*missing)(whole)
    assert len(whole) - len(state) in (3, 5)
    cfg, got = convert(state, **OPTIONS)
    assert cfg == want and jax.tree.structure(got) == jax.tree.structure(params) and worst(got, params) == 0


@pytest.mark.parametrize("i", range(3))
def test_one_of_the_tied_copies_may_not_be_missing(i):
    tied = variant(tie_weight=True, tie_projs=(True, True, True))
    state = foreign(make_params(tied), tied)
    for old, ours in ((f"out_layers.{i}.weight", f"out_{i}"), (f"out_projs.{i}", f"out_proj_{i}")):
        with pytest.raises(ValueError, match=f"{ours} missing"):
            convert(without(old)(state), **OPTIONS)


@pytest.mark.parametrize("tie_weight", [True, False])
def test_an_output_table_too_many_is_refused(tie_weight):
    cfg = variant(tie_weight=tie_weight)
    state = foreign(make_params(cfg), cfg) | {"crit.out_layers.3.weight": np.ones((1, 1))}
    with pytest.raises(ValueError, match="out_3 unexpected"):
        convert(state, **OPTIONS)


def test_all_that_does_not_fit_is_told_in_one_sorted_line_layers_included():
    state = without("out_layers.1.bias", "cluster_bias")(foreign(make_params(CFG), CFG))
    state |= {"crit.cluster_weight": np.ones((2, 9)), "transformer.word_emb.emb_layers.3.weight": np.ones((1, 1))}
    state = in_layers("pos_ff.CoreNet.0.bias", np.ones(15))(state)
    with pytest.raises(ValueError) as e:
        convert(state, **OPTIONS | {"cutoffs": (6, 18)})
    wrong = ["cluster is (2, 9), wanted (2, 8)", "cluster_bias missing", "embed_1 is (11, 4), wanted (12, 4)"]
    wrong += ["embed_3 unexpected", "layers/b_1 is (2, 15), wanted (2, 14)", "out_1 is (11, 4), wanted (12, 4)"]
    assert f"arrays do not fit the config: {'; '.join([*wrong, 'out_bias_1 missing'])}: " in str(e.value)


def test_lengths_and_norm_options_are_passed_on():
    cfg, _ = convert(foreign(make_params(CFG), CFG), clamp_len=7, same_length=True, pre_norm=True, **OPTIONS)
    assert (cfg.mem_len, cfg.clamp_len, cfg.same_length, cfg.pre_norm) == (4, 7, True, True)


@pytest.mark.parametrize("layout, step", [("hf", 1), ("pytorch", -1)])
def test_the_original_numbers_its_tail_clusters_in_reverse_and_hugging_face_in_order(layout, step):
    params = make_params(CFG)
    _, got = convert(foreign(params, CFG), **OPTIONS | {"layout": layout})
    np.testing.assert_array_equal(got["cluster"], params["cluster"][::step])
    np.testing.assert_array_equal(got["cluster_bias"], params["cluster_bias"][::step])


@pytest.mark.parametrize("name", sorted(path.stem for path in REFERENCE.glob("*.npz")))
def test_the_config_of_every_reference_is_inferred(name):
    want, arrays = load_reference(name)
    state = {f"module.{old}": array for old, array in part(arrays, "param/").items()}  # as DataParallel saves it
    options = dict(mem_len=want["mem_len"], n_head=want["n_head"], cutoffs=want["cutoffs"], div_val=want["div_val"])
    cfg, params = convert(state, layout="pytorch", **options)
    for field in ("n_token", "n_layer", "n_head", "d_model", "d_head", "d_inner", "d_embed", "tie_weight"):
        assert getattr(cfg, field) == want[field], field
    if want["cutoffs"]:
        assert cfg.tie_projs == tuple(want["tie_projs"])
    assert not cfg.untie_r and params["embed_0"].dtype == np.float64


BROKEN = {
    "unknown": (plus(transformer__h__0__attn=np.ones((2, 3))), "unknown array 'transformer.h.0.attn' (2, 3)"),
    "missing in one layer": (without("layers.1.pos_ff.CoreNet.3.bias"), "missing array 'b_2' of layers [1]"),
    "missing in all layers": (without("r_net"), "missing array 'w_r' of layers [0, 1]"),
    "missing layer": (without("layers.0."), "missing array 'w_qkv' of layers [0]"),
    "no layers": (without("layers."), "missing array 'w_qkv' of layers all"),
    "no embedding": (without("emb_layers.0"), "missing array 'embed_0'"),
    "no tail projection": (without("emb_projs.2", "out_projs.2"), "embed_proj_2 missing"),
    "no tail output table": (without("out_layers.1.weight"), "out_1 missing"),
    "no bias u": (without("r_w_bias"), "missing array 'u'"),
    "no bias v": (without("r_r_bias"), "missing array 'v'"),
    "no output bias": (without("out_layers.1.bias"), "out_bias_1 missing"),
    "no cluster": (without("cluster_weight"), "cluster missing"),
    "set twice": (plus(module__layers__1__dec_attn__r_net__weight=np.ones((15, 10))), "array 'w_r' is set twice"),
    "once for all and otherwise per layer": (
        plus(transformer__r_w_bias=np.ones((3, 5))),
        "array 'u' is set for all layers and differs in layers [0, 1]",
    ),
    "shape": (plus(crit__cluster_weight=np.ones((2, 9))), "cluster is (2, 9), wanted (2, 8)"),
    "shape in the layers": (
        in_layers("pos_ff.CoreNet.0.bias", np.ones(15)),
        "layers/b_1 is (2, 15), wanted (2, 14)",
    ),
    "shape of the position weights": (
        in_layers("dec_attn.r_net.weight", np.ones((12, 10))),
        "layers/w_r is (2, 10, 3, 4), wanted (2, 10, 3, 5)",
    ),
    "shape in one layer": (
        plus(transformer__layers__1__pos_ff__CoreNet__0__bias=np.ones(15)),
        "array 'b_1' is (15,) in layer 1, wanted (14,)",
    ),
    "shape of u in one layer": (
        plus(transformer__layers__1__dec_attn__r_w_bias=np.ones((3, 6))),
        "array 'u' is (3, 6) in layer 1, wanted (3, 5)",
    ),
    "rows that are not three parts": (
        in_layers("dec_attn.qkv_net.weight", np.ones((44, 10))),
        "array 'w_qkv' has 44 rows, wanted 3 x",
    ),
    "channels that are not heads": (
        in_layers("dec_attn.r_net.weight", np.ones((14, 10))),
        "n_head=3 does not divide 14 channels of 'w_r'",
    ),
    "a flat matrix": (
        plus(transformer__layers__0__dec_attn__r_net__weight=np.ones(150)),
        "array 'transformer.layers.0.dec_attn.r_net.weight' is (150,), wanted 2 dimensions",
    ),
    "a flat table": (plus(transformer__word_emb__emb_layers__0__weight=np.ones(48)), "emb_layers.0.weight' is (48,)"),
    "a bias with two axes": (
        plus(crit__out_layers__0__bias=np.ones((6, 1))),
        "array 'crit.out_layers.0.bias' is (6, 1), wanted 1 dimensions",
    ),
    "no tail table": (without("emb_layers.2"), "missing array 'embed_2': "),
    "no first and no tail table": (without("emb_layers.0", "emb_layers.1"), "missing array 'embed_0', 'embed_1': "),
    "missing in the last layer": (without("layers.1.dec_attn.qkv_net"), "missing array 'w_qkv' of layers [1]"),
    "a layer of which little is there": (
        plus(transformer__layers__2__pos_ff__CoreNet__3__bias=np.ones(10)),
        "missing array 'w_qkv' of layers [2]",
    ),
    "no bias u in one layer": (without("layers.0.dec_attn.r_w_bias"), "missing array 'u' of layers [0]"),
    "one projection missing": (without("crit.out_projs.1"), "out_proj_1 missing"),
    "all tables but one missing": (without("out_layers.0.w", "out_layers.2.w"), "out_0 missing; out_2 missing"),
    "a projection too many": (plus(crit__out_projs__3=np.ones((1, 1))), "out_proj_3 unexpected"),
}


@pytest.mark.parametrize("change, message", BROKEN.values(), ids=BROKEN.keys())
def test_a_source_that_does_not_fit_is_refused_in_one_line(change, message):
    state = change(foreign(make_params(CFG), CFG))
    with pytest.raises(ValueError) as e:
        convert(state, **OPTIONS)
    assert message in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize(
    "option, message",
    [
        (dict(n_head=4), "n_head=4 does not divide 15 channels of 'w_qkv'"),
        (dict(n_head=0), "n_head=0 does not divide 15 channels of 'w_qkv'"),
        (dict(n_head=-3), "n_head=-3 does not divide 15 channels of 'w_qkv'"),
        (dict(n_head=5), "u is (2, 3, 5), wanted (2, 5, 3)"),
        (dict(layout="tf"), "layout='tf' is unknown"),
        (dict(cutoffs=(6,)), "unexpected"),
        (dict(cutoffs=(6, 18)), "embed_1 is (11, 4), wanted (12, 4)"),
        (dict(div_val=1), "wanted"),
        (dict(mem_len=-1), "mem_len=-1"),
    ],
)
def test_an_option_that_does_not_fit_the_source_is_refused_in_one_line(option, message):
    with pytest.raises(ValueError) as e:
        convert(foreign(make_params(CFG), CFG), **OPTIONS | option)
    assert message in str(e.value) and "\n" not in str(e.value)
