"""Every flag of both scripts refuses what it cannot be, in one line, before anything is compiled or written."""

import re
from dataclasses import fields

import pytest
from conftest import make_params
from runs import COMPILED, TEXT, argv, call, refused, save_model

import sample
import train
import txl
from data import flags

CFG = txl.Config(n_layer=1, n_head=2, d_model=16, d_head=6, d_inner=20, mem_len=9)
FLAGS = [("train", f) for cls in (txl.Config, train.Run) for f in fields(cls)]
FLAGS += [("sample", f) for f in fields(sample.Sample)]

# By the kind of the default: a new flag is covered by itself.
BAD = {
    int: ("x", "1.5", "nan", "inf", "-7", "", "1e3"),
    float: ("x", "nan", "inf", "-inf", "-1.5", "", "1e999"),
    bool: ("=5", "=x"),
    tuple: ("x", "1.5", "nan", "inf", "-3,-3"),
    str: ("no/such/thing", "no\\such thing"),
    tuple[str, ...]: ("no/such/thing", "text.txt/sub"),
    int | str: ("no/such/thing", "two words", "-7", "256", ""),
    int | tuple: ("x", "1.5", "nan", "-7", "", "1e3", "-3,4", "3,4"),
}
MORE = {  # bounds of their own
    "dropout": ("1", "1.5"),
    "dropatt": ("1", "1.5"),
    "clamp_len": ("-2", "0"),
    "d_model": ("15",),
    "n_token": ("0", "255"),
    "cutoffs": ("256", "9,5", "0"),
    "beta2": ("1", "0"),
    "lr": ("0",),
    "lr_min": ("1.5",),
    "clip": ("0",),
    "seed": (str(2**31),),
    "devices": ("5",),
    "batch_chunk": ("3",),
    "n_samples": ("0",),
    "n_tokens": ("0",),
    "top_p": ("0", "1.5"),
    "min_p": ("1.5",),
}
METAVAR = {int: "NUMBER", float: "NUMBER", str: "TEXT", tuple: "1,2,...", tuple[str, ...]: "TEXT"}
METAVAR |= {int | tuple: "1,2,...", int | str: "TEXT"}
FILES = ("text.txt", "text.txt/sub")  # where no folder can be made
INSTEAD = {"out": FILES, "profile": FILES}  # of kind str, but folders to make
INSTEAD |= {"prompt": (), "stop": ("",), "reset_on": ("two words", "-7", "256")}  # any text will do, or all but none
BESIDE = {"run": ["--eval_only"], "split": ["--eval_only"]}  # without which the flag means nothing


SMALL = argv(batch=8, tgt_len=8, steps=1, n_layer=1, n_head=2, d_model=16, d_head=6, d_inner=20, mem_len=9)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flags")
    (folder / "text.txt").write_bytes(TEXT)
    save_model(folder / "model", CFG, make_params(CFG), {"kind": "byte"})
    return folder


@pytest.mark.parametrize("script, f", FLAGS, ids=[f"{script}-{f.name}" for script, f in FLAGS])
def test_a_flag_refuses_every_value_that_it_cannot_be_before_compiling_or_writing(script, f, place, monkeypatch):
    monkeypatch.chdir(place)
    main, rest = (train.main, ["--data", "text.txt"]) if script == "train" else (sample.main, ["--run", "model"])
    rest = rest if f.name != rest[0][2:] else []
    rest = [*rest, *SMALL] if script == "train" else rest  # or a value that is taken would cost minutes
    rest = rest if script == "sample" else rest + BESIDE.get(f.name, [])
    before = sorted(place.rglob("*"))
    for value in INSTEAD.get(f.name, BAD[f.type]) + MORE.get(f.name, ()):
        words = [f"--{f.name}{value}"] if type(f.default) is bool else [f"--{f.name}={value}"]
        compiled = len(COMPILED)
        outcome = call(main, *rest, *words)
        assert isinstance(outcome.code, str), f"{words} was taken: {outcome}"
        assert "\n" not in outcome.code and outcome.code.startswith(f"{script}.py: ")
        assert f.name in outcome.code or value in outcome.code, f"{words}: not named in: {outcome.code}"
        assert len(COMPILED) == compiled and outcome.out == outcome.err == "", words
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize("main", [train.main, sample.main])
@pytest.mark.parametrize("words", [["batch=8"], ["--seeed", "8"], ["--see", "8"]])
def test_a_word_that_is_no_flag_is_named_and_abbreviations_are_not_taken(main, words):
    refused(call(main, *words, "--seed=-1"), words[0], "--help")


@pytest.mark.parametrize(
    "main, words, named",
    [
        (train.main, ["--resume", "model", "--init", "model"], ("resume", "init")),
        (train.main, ["--run", "model"], ("run", "--eval_only")),
        (train.main, ["--split", "test"], ("split", "--eval_only")),
        (train.main, ["--resume", "auto"], ("--out",)),
        (train.main, ["--cutoffs", "9", "--tie_projs", "1"], ("tie_projs", "2 clusters")),
        (train.main, ["--cutoffs", "9", "--div_val", "99"], ("div_val",)),
        (sample.main, ["--run", "model", "--prompt", "a", "--prompt_file", "text.txt"], ("prompt", "prompt_file")),
        (sample.main, [], ("no run found", "--run")),
    ],
)
def test_flags_that_contradict_each_other_are_named_together(main, words, named, place, monkeypatch):
    monkeypatch.chdir(place)
    rest = ["--data", "text.txt", *SMALL] if main is train.main else []
    refused(call(main, *rest, *words), *named)


def test_whole_numbers_are_taken_for_floats_and_scientific_notation_too():
    groups = (txl.Config, train.Run)
    given = flags.parse(["--dropout", "0", "--lr", "1e-3", "--weight_decay=0"], "train.py", "", groups, ())
    assert given == {"dropout": 0.0, "lr": 0.001, "weight_decay": 0.0}
    assert {type(value) for value in given.values()} == {float}
    assert txl.Config(dropout=0).dropout == 0.0 and type(txl.Config(dropout=0).dropout) is float


def test_a_switch_is_turned_off_by_no_and_a_flag_left_out_is_left_out():
    groups = (txl.Config,)
    given = flags.parse(["--no-same_length", "--pre_norm", "--cutoffs", "3,5,"], "train.py", "", groups, ())
    assert given == {"same_length": False, "pre_norm": True, "cutoffs": (3, 5)}


@pytest.mark.parametrize("main, groups", [(train.main, 7), (sample.main, 4)])
def test_help_groups_the_flags_and_ends_with_three_examples_of_flags_that_exist(main, groups):
    text = call(main, "--help").out
    heads = re.findall(r"^(\S.*):$", text, re.M)
    assert len(heads) == groups + 2 and heads[0] == "options" and heads[-1] == "examples"
    examples = text.partition("examples:")[2].strip().splitlines()
    known = set(re.findall(r"^  (--\w+)", text.partition("examples:")[0], re.M))
    assert len(examples) == 3 and all(set(re.findall(r"--\w+", line)) <= known for line in examples)


@pytest.mark.parametrize("script", ["train", "sample"])
def test_help_shows_every_flag_with_its_default_and_meaning(script):
    outcome = call({"train": train.main, "sample": sample.main}[script], "--help")
    assert outcome.code == 0
    text = "".join(outcome.out.partition("options:")[2].split())  # lines are broken anywhere
    for f in [f for name, f in FLAGS if name == script]:
        default = f.default if f.default not in ("", ()) else "none"
        shown = f"--{f.name},--no-{f.name}" if type(f.default) is bool else f"--{f.name}{METAVAR[f.type]}"
        meaning, own, _ = text.partition(shown)[2].partition("(default:")
        assert own and len(meaning) > 3 and text.count(shown + meaning + f"(default:{default})") == 1, f.name
