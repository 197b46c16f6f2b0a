"""The README's commands work: each is run in its order, made small by flags put after its own."""

import json
import pickle
import re
import shlex
import string
from importlib.metadata import metadata
from pathlib import Path

import pytest
from conftest import make_params
from runs import TEXT, call, stand_in
from test_import import CONFIG, foreign, safetensors

import sample
import train
import txl
from bench import recipes
from data import import_checkpoint, prepare
from data.corpora import CORPORA, FOLDER

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = [block.replace("\\\n", " ").splitlines() for block in re.findall(r"^```.*?\n(.*?)^```$", README, re.M | re.S)]
LINES = [line for block in BLOCKS for line in block]
COMMANDS = [part for line in LINES if re.match("python |pip ", line) for part in line.split(" && ")]
MAINS = {"python train.py": train.main, "python sample.py": sample.main, "python -m data.prepare": prepare.main}
MAINS |= {"python -m data.import_checkpoint": import_checkpoint.main}
SIZES = dict(n_layer=1, n_head=2, d_model=8, d_head=3, d_inner=12, mem_len=5, tgt_len=16, batch=2, devices=1)


def small(words):
    """Flags that make a command quick and leave what it does."""
    if words[1] == "sample.py":
        return dict(n_tokens=5)
    if words[1] != "train.py":
        return {}
    quick = dict(eval_batch=256, schedule="constant")  # the built-in corpus is evaluated whole; runs share a program
    quick = {name: value for name, value in quick.items() if f"--{name}" not in words}
    if "--eval_only" in words:  # the model's sizes are the checkpoint's
        return quick | dict(devices=1, mem_len=7, tgt_len=16) | (dict(clamp_len=3) if "--clamp_len" in words else {})
    quick |= dict(batch=1, dtype="bfloat16") if "--plan" in words else {}  # fewer settings to compile
    quick |= dict(d_model=64, cutoffs="3,5,7") if "--cutoffs" in words else {}  # wide enough for div_val 4
    quick |= dict(json=True) if len(words) > 2 else {}  # no sample to compile
    return SIZES | quick | dict(steps=4 if "--resume" in words else 2, eval_tokens=500)


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


def test_every_command_runs_in_the_order_of_the_readme(tmp_path, monkeypatch, quick_compiles):
    monkeypatch.chdir(tmp_path)
    published(tmp_path / "transfo-xl-wt103")
    ran = []
    for command in COMMANDS:
        words = shlex.split(command, comments=True)
        main = next((main for start, main in MAINS.items() if f"{command} ".startswith(f"{start} ")), None)
        if main is None:
            module = re.fullmatch(r"python -m (bench\.\w+).*", command)  # measures for minutes: not run here
            known = words[0] == "pip" or command == "python -m pytest"
            assert known or (module and (ROOT / f"{module[1].replace('.', '/')}.py").is_file()), command
            continue
        for name in words:
            if name.endswith(".txt") and not Path(name).exists():
                Path(name).write_bytes(string.printable.encode() + TEXT)
        if words[3:] and words[3] in CORPORA:
            have(words[3], monkeypatch)
        outcome = call(main, *words[3 if words[1] == "-m" else 2 :], **small(words))
        assert outcome.code is None and outcome.out, (command, outcome)
        ran.append(main)
    assert len(ran) > 6 and set(ran) == set(MAINS.values())


def test_the_table_of_recipes_says_what_their_commands_were_planned_to_need():
    section, commands = README.split("## Reproduce\n")[1].split("\n## ")[0], recipes.commands(README)
    lines = [json.loads(line) for line in (ROOT / "bench/results/recipes.jsonl").read_text("utf-8").splitlines()]
    planned = {(line["recipe"], line["asked"]): line for line in lines}
    assert len(planned) == len(lines) and {name for name, _ in planned} == {*commands, *recipes.MORE}
    mib = {name: [f"{planned[name, asked]['total_mib']:,.0f}" for asked in (True, False)] for name, _ in planned}
    rows = dict(re.findall(r"^\| `([\w-]+)`, (.*) \|$", section, re.M))
    assert list(rows) == list(commands)
    for name, words in commands.items():
        line = planned[name, True]
        assert line["command"] == planned[name, False]["command"] == shlex.join(words)
        whole = sum(line[f"{kind}_mib"] for kind in ("parameters", "gradients", "optimizer"))
        size = f"{recipes.settings(words)[0].n_layer} layers | {line['n_params'] / 1e6:.1f} M"
        assert rows[name].split(" | ")[:2] == size.split(" | ")
        assert rows[name].split(" | ")[4:] == [*mib[name], f"{whole:,.0f}"]
    for name in recipes.MORE:
        assert " needs {} MiB as asked, {} at its".format(*mib[name]) in section.replace("\n", " ")
    assert {line["jax"] for line in lines} == set(re.findall(r"by jax ([\d.]+\d)", section))


INSTALLS = re.findall(r"pip install ([^`\n&]+)", README)


@pytest.mark.parametrize("what", dict.fromkeys(INSTALLS))
def test_pip_is_asked_for_what_there_is(what):
    for word in shlex.split(what):
        name, extra = re.fullmatch(r"([\w.-]+)(?:\[([\w-]+)\])?", word).groups()
        assert name in ("-r", "requirements.txt", "-U", "jax", "matplotlib", "torch", "safetensors")
        assert extra is None or extra in metadata(name).get_all("Provides-Extra")
        assert not name.endswith(".txt") or (ROOT / name).is_file()


def test_every_flag_that_the_readme_names_is_one():
    text = "".join(call(main, "--help").out for main in MAINS.values())
    text += "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("bench/*.py"))
    known = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))
    assert {"--n_layer", "--no-same_length", "--top_k", "--min_count"} < known
    assert set(re.findall(r"(?<![\w-])--(?!xla_)[a-z][\w-]*", README)) <= known
