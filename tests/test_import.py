"""Weights from elsewhere: what the importer infers, and one clear line for all that can be wrong with a source."""

import dataclasses
import io
import json
import pickle
import sys
import types
import zipfile
from collections import Counter, OrderedDict

import jax
import numpy as np
import pytest
from conftest import REFERENCE, load_reference, make_params, part, worst
from runs import call, refused

import sample
import train
import txl
from data import foreign as foreign_files
from data import import_checkpoint, tokenizer
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


# the command

WORDS = ["<eos>", "the", "<unk>", *(f"w{i}" for i in range(26))]
FILE = dict(layout="hf", n_head=3, mem_len=4, cutoffs="6,17", div_val=2)
CONFIG = dict(
    model_type="transfo-xl", n_head=3, mem_len=5, clamp_len=1000, same_length=True, pre_lnorm=False, div_val=2
)
CONFIG |= dict(cutoffs=[6, 17], tie_projs=[True, False, True], layer_norm_epsilon=1e-5, attn_type=0)
STATE = foreign(make_params(CFG), CFG)


def safetensors(state, **about):
    """The bytes of a .safetensors file."""
    head, data = {"__metadata__": {"format": "pt"}}, b""
    for name, array in state.items():
        kind = {"float32": "F32", "float64": "F64", "float16": "F16", "uint16": "BF16"}[array.dtype.name]
        span = {"data_offsets": [len(data), len(data) + array.nbytes]}
        head[name] = {"dtype": kind, "shape": array.shape} | span | about
        data += array.tobytes()
    head = json.dumps(head).encode()
    return len(head).to_bytes(8, "little") + head + data


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current folder with a vocabulary, and what may be imported from: a file and a Hugging Face folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    np.savez("model.npz", **STATE)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "hf" / "model.safetensors").write_bytes(safetensors(STATE))
    return tmp_path


def imported(source, **flags):
    outcome = call(import_checkpoint.main, source, **dict(vocab="vocab.txt", out="run") | flags)
    assert outcome.code is None, outcome
    assert json.loads(outcome.out)["out"] == flags.get("out", "run")
    return train.load("run")


def not_imported(source, *words, **flags):
    flags = {name: value for name, value in (dict(vocab="vocab.txt", out="run") | flags).items() if value}
    refused(call(import_checkpoint.main, source, **flags), "data.import_checkpoint: ", *words)


def test_an_import_is_sampled_evaluated_and_fine_tuned_and_never_resumed(here, quick_compiles):
    found = imported("model.npz", **FILE)
    assert found.cfg == CFG and found.vocab == {"kind": "word", "symbols": WORDS}
    assert worst(found.params, make_params(CFG)) == 0
    (here / "text.txt").write_text("the w1 w2 w25\n w7 w8 w3 other w9\n" * 30)
    written = call(sample.main, run="run", prompt="the w1 unheard\n", n_tokens=6, json=True)
    assert len(written.entries()[0]["ids"]) == 6
    same = dict(data="text.txt", tgt_len=3, eval_batch=3, json=True, devices=1)
    judged = call(train.main, eval_only=True, run="run", split="train", **same)
    assert judged.entries()[0]["step"] == 0 and np.isfinite(judged.entries()[0]["loss_nats"])
    flags = same | dict(steps=1, batch=2)
    refused(call(train.main, resume="run", **flags), "was trained on other data", "--init run")
    refused(call(train.main, init="run", n_layer=3, **flags), "n_layer: checkpoint 2, asked 3")
    tuned = call(train.main, init="run", out="tuned", lr=1e-9, **flags)
    assert tuned.code is None and tuned.entries()[0]["step"] == 1
    assert worst(train.load("tuned").params, found.params) < 1e-6


def test_a_hugging_face_folder_says_all_but_its_vocabulary(here):
    found = imported("hf")
    assert found.cfg == variant(same_length=True, clamp_len=1000)  # it sees mem_len keys, the query's own among them
    assert worst(found.params, make_params(CFG)) == 0


def test_safetensors_may_leave_out_tied_projections_that_the_config_names_and_no_others(here):
    (here / "hf" / "model.safetensors").write_bytes(safetensors(without("out_projs.0", "out_projs.2")(STATE)))
    assert worst(imported("hf").params, make_params(CFG)) == 0
    (here / "hf" / "config.json").write_text(json.dumps(CONFIG | {"tie_projs": [True, False, False]}))
    not_imported("hf", "out_proj_2 missing", out="other")


def test_weights_of_other_precisions_become_float32(here):
    halves = {name: (a.view(np.uint32) >> 16).astype(np.uint16) for name, a in STATE.items() if a.dtype == np.float32}
    cut = {name: (a.astype(np.uint32) << 16).view(np.float32) for name, a in halves.items()}
    want = convert(STATE | cut, **OPTIONS)[1]
    (here / "hf" / "model.safetensors").write_bytes(safetensors(STATE | halves))
    found = imported("hf").params
    assert worst(found, want) == 0 and {a.dtype.name for a in jax.tree.leaves(found)} == {"float32"}
    np.savez("model.npz", **{name: a.astype(np.float64) for name, a in STATE.items()})
    found = imported("model.npz", out="again", **FILE) and train.load("again").params
    assert worst(found, make_params(CFG)) == 0 and {a.dtype.name for a in jax.tree.leaves(found)} == {"float32"}


SPOILT = {
    "no such file": (lambda p: (p / "model.npz").unlink(), "model.npz", FILE, ["model.npz: no such file"]),
    "no layout": (None, "model.npz", dict(n_head=3), ["model.npz does not say --layout, --mem_len"]),
    "an unknown layout": (None, "model.npz", FILE | dict(layout="tf"), ["--layout", "'tf'"]),
    "a flag for a folder": (None, "hf", dict(n_head=3), ["config.json says --n_head: leave it out"]),
    "no weights": (lambda p: (p / "hf/model.safetensors").unlink(), "hf", {}, ["no model.safetensors or pytorch_m"]),
    "no config": (lambda p: (p / "hf/config.json").unlink(), "hf", {}, ["config.json: no usable config"]),
    "a broken config": (lambda p: (p / "hf/config.json").write_text("{"), "hf", {}, ["config.json: no usable config"]),
    "a config of another kind": (
        lambda p: (p / "hf/config.json").write_text(json.dumps({"n_head": "3", "tie_projs": 1, "attn_type": 2})),
        "hf", {}, ["n_head '3', mem_len 'missing'", "tie_projs 1, attn_type 2: not a Transformer-XL"],
    ),
    "a damaged .npz": (lambda p: (p / "model.npz").write_bytes(b"PK5"), "model.npz", FILE, ["model.npz is damaged"]),
    "a cut .safetensors": (
        lambda p: (p / "hf/model.safetensors").write_bytes(safetensors(STATE)[:-4]), "hf", {}, ["rs is damaged"]
    ),
    "a .safetensors that is none": (
        lambda p: (p / "hf/model.safetensors").write_bytes(b"\xff" * 99), "hf", {}, ["safetensors is damaged"]
    ),
    "a .safetensors of integers": (
        lambda p: (p / "hf/model.safetensors").write_bytes(safetensors(STATE, dtype="I32")), "hf", {}, ["than floats"]
    ),
    "not the source's sizes": (None, "model.npz", FILE | dict(n_head=5), ["u is (2, 3, 5), wanted (2, 5, 3)"]),
    "no vocabulary": (None, "model.npz", FILE | dict(vocab=""), ["29 ids", "--vocab FILE"]),
    "another vocabulary": (
        lambda p: (p / "vocab.txt").write_text("\n".join(WORDS[:28])), "hf", {}, ["vocab.txt has 28 symbols, hf 29"]
    ),
    "bytes": (None, "hf", dict(vocab="byte"), ["byte has 256 symbols, hf 29"]),
    "a vocabulary that is not there": (None, "hf", dict(vocab="none.txt"), ["none.txt"]),
    "a folder of a run": (lambda p: (p / "best.npz").touch(), "hf", dict(out="."), ["holds a run"]),
}  # fmt: skip


@pytest.mark.parametrize("spoil, source, flags, words", SPOILT.values(), ids=SPOILT.keys())
def test_what_cannot_be_imported_is_refused_in_one_line_and_leaves_nothing(spoil, source, flags, words, here):
    if spoil:
        spoil(here)
    not_imported(source, *words, **flags)
    assert not (here / "run").exists()


class Bomb:
    def __reduce__(self):
        return (open, ("exploded", "w"))


def test_a_pickle_for_weights_is_never_run_and_a_whole_module_is_told_what_to_save(here, monkeypatch):
    np.savez("model.npz", **STATE | {"crit.cluster_bias": np.array([Bomb()], object)})
    not_imported("model.npz", "model.npz is damaged, or no .npz of plain arrays", **FILE)
    (here / "model.pt").write_bytes(pickle.dumps(Bomb()))
    monkeypatch.setitem(sys.modules, "torch", None)
    not_imported("model.pt", "pip install torch", **FILE)

    def load(path, map_location, weights_only):
        assert weights_only is True
        raise RuntimeError("Weights only load failed.\nDo this\nor that")

    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(load=load))
    not_imported("model.pt", "(RuntimeError: Weights only load failed)", "state_dict(), 'state.pt')", **FILE)
    assert not (here / "exploded").exists()


# vocabularies

SYMBOLS = ["<eos>", "ä", "<unk>", "naïve", "–"]
OURS = {"kind": "word", "symbols": SYMBOLS}
HELD = {"counter": Counter(SYMBOLS), "special": ["<eos>"], "min_freq": 0, "max_size": None, "lower_case": True}
HELD |= {"delimiter": None, "x": (1, 2.5, ("a", -70000, 2**40), ()), "idx2sym": SYMBOLS}
HELD |= {"sym2idx": OrderedDict((s, i) for i, s in enumerate(SYMBOLS)), "unk_idx": 2}


def zipped(data):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as z:
        z.writestr("vocab/data.pkl", data)
    return file.getvalue()


VOCABS = {
    "a text": ("v.txt", "\n".join(SYMBOLS).encode()),
    "a text with CRLF": ("v", ("\r\n".join(SYMBOLS) + "\r\n").encode()),
    "our JSON": ("v.json", json.dumps(OURS).encode()),
    "our meta.json": ("meta.json", json.dumps({"vocab": OURS, "dtype": "uint8"}).encode()),
    **{f"a pickle, protocol {n}": ("vocab.pkl", pickle.dumps(HELD, n)) for n in (2, 3, 4, 5)},
    "torch.save": ("vocab.bin", zipped(pickle.dumps(HELD, 2))),
    "torch.save of old": ("vocab.bin", b"".join(pickle.dumps(x, 2) for x in (2**77 + 1, 1001, {"x": 2}, HELD, []))),
    "ids alone": ("vocab.pkl", pickle.dumps({"sym2idx": dict(list(HELD["sym2idx"].items())[::-1]), "idx2sym": []})),
    "UTF-8 read as Latin-1": ("vocab.pkl", pickle.dumps({"idx2sym": [s.encode().decode("latin-1") for s in SYMBOLS]})),
}  # fmt: skip


@pytest.mark.parametrize("name, data", VOCABS.values(), ids=VOCABS.keys())
def test_a_vocabulary_is_read_in_the_order_of_its_ids_from(name, data, tmp_path):
    (tmp_path / name).write_bytes(data)
    assert foreign_files.vocabulary(tmp_path / name) == OURS


def test_single_characters_are_a_char_vocabulary_and_bytes_are_asked_for_by_name(tmp_path):
    (tmp_path / "v.txt").write_text("b\na\n \n")
    assert foreign_files.vocabulary(tmp_path / "v.txt") == {"kind": "char", "symbols": ["b", "a", " "]}
    assert tokenizer.size(foreign_files.vocabulary("byte")) == 256


MEAN = {
    "a bomb": ("v.pkl", pickle.dumps(HELD | {"x": Bomb()}), "io.open"),
    "a bomb in the oldest kind of pickle": ("v.pkl", b"\x80\x02" + pickle.dumps(Bomb(), 0), "io.open"),
    "a bomb in what torch saved": ("v.bin", zipped(pickle.dumps({"idx2sym": Bomb()}, 2)), "io.open"),
    "a class by its old opcode": ("v.pkl", b"\x80\x02(S'x'\nios\nsystem\n.", "it has the opcode INST"),
    "an object of its own": ("v.pkl", pickle.dumps({"idx2sym": np.ones(2)}), "it names numpy."),
    "numbers": ("v.pkl", pickle.dumps([1, 2]), "v.pkl is no pickle of plain containers with idx2sym or sym2idx"),
    "a cut pickle": ("v.pkl", pickle.dumps(HELD)[:-9], "v.pkl is no pickle"),
    "a call of what is no class": ("v.pkl", b"\x80\x02K\x01)R.", "it names 1.()"),
    "an empty stack": ("v.pkl", b"\x80\x02\x85.", "v.pkl is no pickle"),
    "another zip": ("v.bin", zipped(b"")[:-30], "v.bin is no pickle"),
    "ids that do not agree": ("v.pkl", pickle.dumps(HELD | {"idx2sym": SYMBOLS[::-1]}), "do not agree on ids"),
    "no text": ("v.txt", b"\xff\xfe", "byte 0 is not UTF-8"),
    "no JSON": ("v.json", b"{", "v.json is no JSON"),
    "JSON of another kind": ("v.json", b'{"vocab": [1]}', "v.json: vocabulary of kind '[1]'"),
    "words without <unk>": ("v.txt", b"<eos>\nthe", "word vocabulary of 2 without <eos> and <unk>"),
    "counts beside words": ("v.txt", b"<eos> 12\n<unk> 7", "v.txt: word vocabulary with the symbol '<eos> 12'"),
}


@pytest.mark.parametrize("name, data, message", MEAN.values(), ids=MEAN.keys())
def test_what_is_no_plain_vocabulary_is_refused_in_one_line_and_nothing_in_it_run(name, data, message, here):
    (here / name).write_bytes(data)
    not_imported("hf", message, vocab=name)
    assert not (here / "exploded").exists() and not (here / "run").exists()
