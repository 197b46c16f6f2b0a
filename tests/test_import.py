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
from conftest import make_params, worst
from runs import call, fails, refused

import train
import txl
from data import checkpoint, flags, import_checkpoint
from data.import_checkpoint import convert

CFG = txl.Config(
    n_token=29, n_layer=2, n_head=3, d_model=10, d_head=5, d_inner=14, d_embed=8, mem_len=4, cutoffs=(6, 17), div_val=2,
    tie_weight=False, tie_projs=(True, False, True), untie_r=True,
)  # fmt: skip
OPTIONS = dict(layout="hf", n_head=3, mem_len=4, cutoffs=(6, 17), div_val=2)
LAYERS = "transformer.layers.{i}."


def without(*names):
    return lambda state: {old: array for old, array in state.items() if not any(name in old for name in names)}


def ones(old, *shape, layers=()):
    """Sets an array of ones, or those of such a name in `layers`."""
    names = [LAYERS.format(i=i) + old for i in layers] or [old]
    return lambda state: state | dict.fromkeys(names, np.ones(shape))


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


@pytest.mark.parametrize(
    "options, missing",
    [
        ({}, ()),
        (dict(untie_r=False), ("dec_attn.r_w_bias", "layers.1.dec_attn.r_r_bias")),
        (dict(tie_weight=True), ("out_layers.0.w", "out_layers.1.w", "out_layers.2.w", "out_projs.0", "out_projs.2")),
        (dict(tie_projs=(True, True, True)), ("out_projs",)),
    ],
    ids=["biases of each layer", "shared biases", "tied tables and projections", "projections"],
)
def test_hugging_face_names_become_our_config_and_parameters_and_shared_and_tied_copies_may_be_missing(
    options, missing
):
    lengths = dict(clamp_len=7, same_length=True, pre_norm=True)  # passed on
    want = variant(**options, **lengths)
    params = make_params(want)
    cfg, got = convert(without(*missing)(foreign(params, want)), **OPTIONS, **lengths)
    assert cfg == want and jax.tree.structure(got) == jax.tree.structure(params) and worst(got, params) == 0


BROKEN = [  # what is changed in the source or in the options, words of the one line
    (ones("transformer.h.0.attn", 2, 3), {}, "unknown array 'transformer.h.0.attn' (2, 3)"),
    (without("layers.1.pos_ff.CoreNet.3.bias"), {}, "missing array 'b_2' of layers [1]"),
    (ones("transformer.r_w_bias", 3, 5), {}, "array 'u' is set for all layers and differs in layers [0, 1]"),
    (ones("pos_ff.CoreNet.0.bias", 15, layers=[0, 1]), {}, "layers/b_1 is (2, 15), wanted (2, 14)"),
    (dict, dict(n_head=4), "n_head=4 does not divide 15 channels of 'w_qkv'"),
]


@pytest.mark.parametrize("change, options, message", BROKEN, ids=[message for *_, message in BROKEN])
def test_a_source_or_an_option_that_does_not_fit_is_refused_in_one_line(change, options, message):
    fails(lambda: convert(change(foreign(make_params(CFG), CFG)), **OPTIONS | options), message)


WORDS = ["<eos>", "the", "<unk>", *(f"w{i}" for i in range(26))]
WEIGHTS = "hf/model.safetensors"
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
        span = {"data_offsets": [len(data), len(data) + array.nbytes]}
        head[name] = {"dtype": f"F{8 * array.itemsize}", "shape": array.shape} | span | about
        data += array.tobytes()
    head = json.dumps(head).encode()
    return len(head).to_bytes(8, "little") + head + data


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current folder with a vocabulary, and what may be imported from: a file and a Hugging Face folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hf").mkdir()
    np.savez("model.npz", **STATE)
    put("vocab.txt", "\n".join([*WORDS, ""]).encode())(tmp_path)
    put("hf/config.json", CONFIG)(tmp_path)
    put(WEIGHTS, safetensors(STATE))(tmp_path)
    return tmp_path


def put(name, data):
    """Writes a file of bytes, or of JSON."""
    data = data if isinstance(data, bytes) else json.dumps(data).encode()
    return lambda here: (here / name).write_bytes(data)


def gone(name):
    return lambda here: (here / name).unlink()


def index(data):
    return lambda here: (gone(WEIGHTS)(here), put(f"{WEIGHTS}.index.json", data)(here))


def imported(source, **flags):
    outcome = call(import_checkpoint.main, source, **dict(vocab="vocab.txt", out="run") | flags)
    assert outcome.code is None, outcome
    assert json.loads(outcome.out)["out"] == flags.get("out", "run")
    return checkpoint.load(flags.get("out", "run"))


def not_imported(source, *words, **flags_given):
    options = {name: value for name, value in (dict(vocab="vocab.txt", out="run") | flags_given).items() if value}
    outcome = call(import_checkpoint.main, source, **options)
    refused(outcome, "data.import_checkpoint: ", *words)
    assert not flags.CONTROL.search(outcome.code + outcome.out + outcome.err)


def test_a_file_becomes_a_run_in_its_vocabulary_that_is_never_resumed(here):
    np.savez("model.npz", **{name: a.astype(np.float64) for name, a in STATE.items()})
    found = imported("model.npz", **FILE)
    assert {a.dtype.name for a in jax.tree.leaves(found.params)} == {"float32"}
    assert found.cfg == CFG and found.vocab == {"kind": "word", "symbols": WORDS}
    assert worst(found.params, make_params(CFG)) == 0
    put("text.txt", b"the w1 w2 w25\n w7 w8 w3 other w9\n" * 30)(here)
    outcome = call(train.main, resume="run", data="text.txt", tgt_len=3, batch=2, steps=1, devices=1)
    refused(outcome, "was trained on other data", "--init run")


def test_a_hugging_face_folder_says_all_but_its_vocabulary_and_may_leave_out_the_projections_that_it_says_are_tied(
    here,
):
    found = imported("hf")
    assert found.cfg == variant(same_length=True, clamp_len=1000)  # it sees mem_len keys, the query's own among them
    assert worst(found.params, make_params(CFG)) == 0
    wrapped = {f"_orig_mod.module.{old}": array for old, array in STATE.items()}  # by torch.compile and DataParallel
    put(WEIGHTS, safetensors(without("out_projs.0", "out_projs.2")(wrapped)))(here)
    assert worst(imported("hf", out="run/2").params, make_params(CFG)) == 0
    put("hf/config.json", CONFIG | {"tie_projs": [True, False, False]})(here)
    not_imported("hf", "out_proj_2 missing", out="other")


def test_weights_in_several_files_are_read_by_their_index(here):
    parts = {"model-1-of-2.safetensors": list(STATE)[::2], "model-2-of-2.safetensors": list(STATE)[1::2]}
    index({"metadata": {"total_size": 1}, "weight_map": {old: name for name in parts for old in parts[name]}})(here)
    for name, held in parts.items():
        put(f"hf/{name}", safetensors({old: STATE[old] for old in held}))(here)
    assert worst(imported("hf").params, make_params(CFG)) == 0
    gone("hf/model-2-of-2.safetensors")(here)
    not_imported("hf", "model-2-of-2.safetensors: no such file", out="other")


NASTY = "\x1b]0;t\x07\x9b2J\u202e\ntrain.py: done"  # what a stranger's file may say on one's terminal
ESCAPED = ("1b]0;t", "x9b2J", "u202e")


def spoilt_npz(name, array):
    return lambda here: np.savez("model.npz", **STATE | {name: array})


SPOILT = {  # what is done to the files, source, flags, words
    "a flag for a folder": (None, "hf", dict(n_head=3), ["config.json says --n_head: leave it out"]),
    "no weights": (gone(WEIGHTS), "hf", {}, ["no model.safetensors or pytorch_m"]),
    "another model": (put("hf/config.json", CONFIG | {"attn_type": 2}), "hf", {}, ["attn_type 2: not a Transf"]),
    "a cut .safetensors": (put(WEIGHTS, safetensors(STATE)[:-4]), "hf", {}, ["safetensors is damaged"]),
    "arrays that share bytes": (
        put(WEIGHTS, safetensors(STATE, data_offsets=[0, 4000], shape=[1000])), "hf", {}, ["arrays that overlap"]),
    "a short vocabulary": (put("vocab.txt", "\n".join(WORDS[:28]).encode()), "hf", {}, ["vocab.txt has 28", "hf 29"]),
    "a folder of a run": (put("best.npz", b""), "hf", dict(out="."), ["holds a run"]),
    "an index that leaves its folder": (index(b'{"weight_map": {"a": "../model.npz"}}'), "hf", {}, ["no index of"]),
    "a nasty array": (spoilt_npz(NASTY, np.ones(3)), "model.npz", FILE, ESCAPED),
    "NaN": (spoilt_npz("crit.cluster_bias", np.array([1, np.nan])), "model.npz", FILE, ["'crit.cluster_bias'", "NaN"]),
}  # fmt: skip


@pytest.mark.parametrize("spoil, source, flags, words", SPOILT.values(), ids=SPOILT.keys())
def test_what_cannot_be_imported_is_refused_in_one_escaped_line_and_leaves_nothing(spoil, source, flags, words, here):
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
    put("model.pt", pickle.dumps(Bomb()))(here)
    monkeypatch.setitem(sys.modules, "torch", None)
    not_imported("model.pt", "pip install torch", **FILE)

    def load(path, map_location, weights_only):
        assert weights_only is True
        raise RuntimeError("Weights only load failed.\nDo this\nor that")

    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(load=load))
    not_imported("model.pt", "(RuntimeError: Weights only load failed)", "state_dict(), 'state.pt')", **FILE)
    assert not (here / "exploded").exists()


SYMBOLS = ["<eos>", "ä", "<unk>", "naïve", "–"]
OURS = {"kind": "word", "symbols": SYMBOLS}
HELD = {"counter": Counter(SYMBOLS), "special": ["<eos>"], "min_freq": 0, "max_size": None, "lower_case": True}
HELD |= {"delimiter": None, "x": (1, 2.5, ("a", -70000, 2**40), ()), "idx2sym": SYMBOLS}
HELD |= {"sym2idx": OrderedDict((s, i) for i, s in enumerate(SYMBOLS)), "unk_idx": 2}


def zipped(data, method=zipfile.ZIP_STORED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as z:
        z.writestr("vocab/data.pkl", data)
    return file.getvalue()


VOCABS = {
    "a text with CRLF": ("v", ("\r\n".join(SYMBOLS) + "\r\n").encode()),
    "our JSON": ("v.json", json.dumps(OURS).encode()),
    "JSON of ids by symbol": ("vocab.json", json.dumps({s: i for i, s in list(enumerate(SYMBOLS))[::-1]}).encode()),
    "a pickle, protocol 5": ("vocab.pkl", pickle.dumps(HELD, 5)),
    "torch.save": ("vocab.bin", zipped(pickle.dumps(HELD, 2))),
}  # fmt: skip


@pytest.mark.parametrize("name, data", VOCABS.values(), ids=VOCABS.keys())
def test_a_vocabulary_is_read_in_the_order_of_its_ids_from(name, data, tmp_path):
    (tmp_path / name).write_bytes(data)
    assert import_checkpoint.read_vocabulary(tmp_path / name) == OURS


MEAN = {
    "a bomb": ("v.pkl", pickle.dumps(HELD | {"x": Bomb()}), "io.open"),
    "a bomb in what torch saved": ("v.bin", zipped(pickle.dumps({"idx2sym": Bomb()}, 2)), "io.open"),
    "a class by its old opcode": ("v.pkl", b"\x80\x02(S'x'\nios\nsystem\n.", "it has the opcode INST"),
    "a zip bomb": ("v.bin", zipped(pickle.dumps(HELD), zipfile.ZIP_DEFLATED), "a zip without a stored data.pkl"),
    "ids that do not agree": ("v.pkl", pickle.dumps(HELD | {"idx2sym": SYMBOLS[::-1]}), "do not agree on ids"),
}


@pytest.mark.parametrize("name, data, message", MEAN.values(), ids=MEAN.keys())
def test_what_is_no_plain_vocabulary_is_refused_in_one_line_and_nothing_in_it_run(name, data, message, here):
    (here / name).write_bytes(data)
    not_imported("hf", message, vocab=name)
    assert not (here / "exploded").exists() and not (here / "run").exists()


class Tensor(np.ndarray):  # what the importer asks of torch's
    is_floating_point = lambda self: self.dtype.kind == "f"
    detach = lambda self: self
    float = lambda self: self.astype(np.float32)
    numpy = lambda self: self.view(np.ndarray)


def test_what_torch_loads_is_imported_and_whole_numbers_are_no_weights(here, monkeypatch):
    tensors = {name: array.view(Tensor) for name, array in STATE.items()}
    torch = types.SimpleNamespace(load=lambda *_, **__: tensors, Tensor=Tensor)
    monkeypatch.setitem(sys.modules, "torch", torch)
    put("model.pt", b"PK")(here)
    assert worst(imported("model.pt", **FILE).params, make_params(CFG)) == 0
    tensors["crit.cluster_bias"] = np.array([3, -4]).view(Tensor)
    not_imported("model.pt", "array 'crit.cluster_bias' is of int64, wanted floats", out="other", **FILE)
