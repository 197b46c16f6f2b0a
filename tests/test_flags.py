"""Every flag of both scripts refuses what it cannot be, in one line, before anything is compiled or written."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import jax
import pytest
from conftest import make_params
from runs import COMPILED, TEXT, argv, call, refused, save_model

import sample
import train
import txl

ROOT = Path(__file__).parents[1]
CFG = txl.Config(n_layer=1, n_head=2, d_model=16, d_head=6, d_inner=20, mem_len=9)
HIDDEN = ("n_token", "tie_projs")  # of the model, no flags
FLAGS = [("train", f) for cls in (txl.Config, train.TrainConfig) for f in fields(cls) if f.name not in HIDDEN]
FLAGS += [("sample", f) for f in fields(sample.SampleConfig)]

# By the kind of the default: a new flag is covered by itself.
BAD = {
    int: ("x", "1.5", "nan", "inf", "-7", "", "1e3"),
    float: ("x", "nan", "inf", "-inf", "-1.5", "", "1e999"),
    bool: ("=5", "=x"),
    tuple: ("x", "1.5", "nan", "inf", "-3,-3"),
    str: ("no/such/thing", "no\\such thing"),
    tuple[str, ...]: ("no/such/thing", "text.txt/sub"),
    int | str: ("no/such/thing", "two words", "-7", "256", ""),
    int | tuple: ("x", "1.5", "nan", "-7", "", "1e3", "-3,4", "3,4", ",", ",,"),
}
MORE = dict(dropout=("1",), clamp_len=("0",), d_model=("15",), cutoffs=("256", "9,5"), lr=("0",), lr_min=("1.5",))
MORE |= dict(seed=(str(2**31),), devices=("5",), batch_chunk=("3",), n_samples=("0",), top_p=("0", "1.5"))
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


TRAINING = (
    ("--resume model --init model", "resume", "init"),
    ("--run model", "run", "--eval_only"),
    ("--resume auto", "--out"),
    ("--batch_size 8", "write --batch "),
    ("my.txt", "write --data my.txt "),
    ("--data a.txt b.txt", "python -m data.prepare FILE FILE --out DIR"),
    ("--pre_norm --no-pre_norm", "--pre_norm is given 2 times"),
)
SAMPLING = (
    ("--run model --prompt a --prompt_file text.txt", "prompt", "prompt_file"),
    ("", "no run found", "--run"),
    ("hello", "write --prompt hello "),
    (f"--n_tokens {2**31}", "less than 2**31"),
)
BOTH = (("batch=8", "batch=8", "--help"), ("--see 8", "--see", "--help"))
CASES = [("train", *case) for case in BOTH + TRAINING] + [("sample", *case) for case in BOTH + SAMPLING]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(case[:2]))
def test_flags_that_contradict_each_other_are_named_and_what_was_meant_is_suggested(case, place, monkeypatch):
    monkeypatch.chdir(place)
    script, words, *named = case
    main, rest = (train.main, SMALL) if script == "train" else (sample.main, [])
    refused(call(main, *rest, *words.split()), *named)


@pytest.mark.parametrize("script, main", [("train", train.main), ("sample", sample.main)])
def test_help_tells_every_flag_with_default_and_meaning_and_ends_with_examples_of_flags_that_exist(script, main):
    code, out, _ = call(main, "--help")
    known, _, examples = out.partition("examples:")
    told = dict(re.findall(r"^  --(\w+)(.*?)(?=^  --|^\S|\Z)", known, re.M | re.S))
    assert code == 0 and {word[2:] for word in re.findall(r"--\w+", examples)} <= told.keys()
    for f in [f for name, f in FLAGS if name == script]:
        default = f.default if f.default not in ("", ()) else "none"
        meaning, own, rest = "".join(told[f.name].split()).partition("(default:")  # lines are broken anywhere
        assert len(meaning) > 10 and rest == "".join(f"{default})".split()), f.name


SWALLOWED = """
import contextlib, signal
from data import flags
def main():
    with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
flags.run_script(main)
"""


def test_ctrl_c_ends_a_script_with_one_line_and_exit_130_whatever_swallows_it():
    ended = subprocess.run([sys.executable, "-c", SWALLOWED], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (130, "stopped at once\n")


def test_no_device_is_one_line(place, monkeypatch):
    monkeypatch.chdir(place)

    def none():
        raise AssertionError

    monkeypatch.setattr(jax, "devices", none)
    for main, words in ((train.main, ["--data", "text.txt", *SMALL]), (sample.main, ["--run", "model"])):
        refused(call(main, *words), "no device", "JAX_PLATFORMS")
