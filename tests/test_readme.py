"""The README's commands and the recipes work: each is run in its order, made small by other values of flags."""

import importlib
import json
import pickle
import re
import shlex
import string
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import make_params
from runs import TEXT, call, random_model, stand_in
from test_import import CONFIG, foreign, safetensors

import sample
import train
import txl
from data import import_checkpoint, prepare
from data.corpora import CORPORA, FOLDER

pytestmark = pytest.mark.usefixtures("shared_steps")
ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = [block.replace("\\\n", " ").splitlines() for block in re.findall(r"^```.*?\n(.*?)^```$", README, re.M | re.S)]
LINES = [line for block in BLOCKS for line in block]
MAINS = {"python train.py": train.main, "python sample.py": sample.main, "python -m data.prepare": prepare.main}
MAINS |= {"python -m data.import_checkpoint": import_checkpoint.main}
RECIPES = sorted(ROOT.glob("tools/recipes/*.sh"))
KINDS = [ROOT / "tools" / "recipes" / f"{name}.sh" for name in ("enwik8-base", "wikitext-103-base")]  # bytes and words
SYMBOLS = string.printable + "".join(map(chr, range(200, 356)))  # 256, as many as there are bytes
SIZES = dict(n_layer=1, n_head=2, d_model=8, d_head=3, d_inner=12, mem_len=5, tgt_len=16, batch=2, devices=1)


def commands(lines):
    return [part for line in lines if re.match("python |pip ", line) for part in line.split(" && ")]


def small(words):
    """Flags that make a command quick and leave what it does."""
    if words[1] == "sample.py":
        return dict(n_tokens=5)
    if words[1] != "train.py":
        return {}
    quick = dict(eval_batch=64, remat="none", attention="dense")  # compile less
    # Runs share a program.
    same = dict(schedule="constant", lr=2e-3, warmup=0, beta2=0.9, clip=0.25, mem_reset=0, dropout=0, dropatt=0)
    quick = {name: value for name, value in quick.items() if f"--{name}" not in words}
    if "--eval_only" in words:  # the model's sizes are the checkpoint's
        return quick | dict(devices=1, mem_len=7, tgt_len=16) | (dict(clamp_len=3) if "--clamp_len" in words else {})
    quick |= dict(batch=1, dtype="bfloat16") if "--plan" in words else {}  # fewer settings to compile
    quick |= dict(d_model=64, cutoffs="3,5,7") if "--cutoffs" in words else {}  # wide enough for div_val 4
    quick |= dict(json=True) if len(words) > 2 else {}  # no sample to compile
    quick |= dict(optimizer="adam") if "--optimizer" not in words else {}  # compiles faster than muon
    return SIZES | quick | same | dict(steps=4 if "--resume" in words else 2, eval_tokens=500)


def have(name, monkeypatch):
    """Puts a small stand-in where a standard corpus is downloaded to, so that nothing is asked of the network."""
    source, files = stand_in(name)
    monkeypatch.setitem(CORPORA, name, source)
    for file, data in files.items():
        path = FOLDER / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def published(folder):
    """The published model's folder in the sizes of `small`, its weights in the format that needs no torch."""
    sizes = {name: n for name, n in SIZES.items() if name not in ("tgt_len", "batch", "devices")}
    cfg = txl.Config(n_token=23, cutoffs=(6, 17), div_val=2, tie_projs=(False, True, True), untie_r=True, **sizes)
    folder.mkdir()
    state = foreign(make_params(cfg, scale=0.1), cfg)
    (folder / "model.safetensors").write_bytes(safetensors(state))
    config = CONFIG | {"n_head": cfg.n_head, "mem_len": cfg.mem_len + 1, "tie_projs": cfg.tie_projs}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "vocab.bin").write_bytes(pickle.dumps({"idx2sym": ["<eos>", "<unk>", *string.ascii_letters[:21]]}))


def test_the_two_set_up_commands_stand_there_word_for_word_and_the_gate_runs_the_second():
    assert "pip install -r requirements.txt && python train.py" in LINES
    assert "pip install -r requirements.txt && python -m pytest" in LINES
    gate = re.search("^command=.*'(.*)' README.md", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.M)
    assert gate[1] in LINES and gate[1].endswith("python -m pytest")


def run(command, monkeypatch):
    """Runs a command small, in process; returns the main that it calls, or None for what is not run here."""
    words = shlex.split(command, comments=True)
    main = next((main for start, main in MAINS.items() if f"{command} ".startswith(f"{start} ")), None)
    if main is None:
        assert words[0] == "pip" or command == "python -m pytest", command
        return None
    for name in words:
        if name.endswith(".txt") and not Path(name).exists():
            Path(name).write_text(SYMBOLS + TEXT.decode(), encoding="utf-8", newline="")
    if words[3:] and words[3] in CORPORA:
        have(words[3], monkeypatch)
    flags = small(words)
    for name, value in flags.items():
        if f"--{name}" in words:  # a flag may be given only once
            at = words.index(f"--{name}")
            del words[at : at + (1 if isinstance(value, bool) else 2)]
    outcome = call(main, *words[3 if words[1] == "-m" else 2 :], **flags)
    assert outcome.code is None and outcome.out, (command, outcome)
    return main


def test_every_command_runs_in_the_order_of_the_readme(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare, "builtin_text", lambda: TEXT)  # which is evaluated whole
    published(tmp_path / "transfo-xl-wt103")
    ran = [run(command, monkeypatch) for command in commands(LINES)]
    assert len(ran) > 6 and set(ran) == {None, *MAINS.values()}


def test_its_python_loads_a_run_scores_a_string_generates_and_shows_the_states_of_every_layer(tmp_path, monkeypatch):
    cfg = txl.Config(n_layer=2, n_head=2, d_model=16, d_head=6, d_inner=20, mem_len=9)
    random_model(cfg, tmp_path / "runs" / "my-1")
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
    found = {}
    exec(code, found)
    ids, states, weights = (found[name] for name in ("ids", "states", "weights"))
    assert states.shape == (3, 1, 19, 16) and len(found["text"]) == 100 and isinstance(weights["u"], np.ndarray)
    assert (states[0] == txl.embed(weights, ids, cfg)).all() and (found["mems"].h == states[:-1, :, -9:]).all()
    want = txl.cross_entropy(weights, states[-1, :, :-1], ids[:, 1:], cfg)[0]
    np.testing.assert_allclose(found["nats"], want, atol=1e-5)  # rounding of two float32 paths
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(found["params"]))


@pytest.mark.parametrize("recipe", KINDS, ids=lambda path: path.stem)
def test_a_recipe_prepares_trains_and_evaluates(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = recipe.read_text(encoding="utf-8").replace("\\\n", " ")
    ran = [run(command, monkeypatch) for command in commands(text.splitlines())]
    assert ran == [prepare.main, train.main, train.main]


def test_every_flag_that_the_readme_the_recipes_and_the_results_name_is_one():
    tools = [path for path in ROOT.glob("tools/**/*.py") if "\ndef main(" in path.read_text(encoding="utf-8")]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in tools]
    mains = [*MAINS.values(), *(importlib.import_module(name).main for name in modules)]
    pattern = r"(?<![\w-])--(?!xla_)[a-z][\w-]*"
    known = set(re.findall(pattern, "".join(call(main, "--help").out for main in mains)))
    assert {"--n_layer", "--no-same_length", "--top_k", "--min_count", "--looks", "--peak_tflops"} < known
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tools" / "RESULTS.md", *RECIPES)]
    assert set(re.findall(pattern, README + "".join(texts))) <= known
