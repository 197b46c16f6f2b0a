"""Nothing is lost: damaged files, full disks, stops, two runs in a folder, steps that are not finite, hostile files."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import make_params
from runs import TEXT, TINY, call, log, raw, refused, save_model, write_raw

import figures
import sample
import train
import txl
from data import checkpoint, folder
from step import compile_step
from stop import start

pytestmark = pytest.mark.usefixtures("quick_compiles")
ROOT = Path(__file__).parents[1]
BASE = TINY | dict(steps=12, eval_every=2, dropout=0.1, json=True, skip_nonfinite=2)
ARRAYS = {"params/w": np.arange(6000, dtype=np.float32).reshape(120, 50), "opt/count": np.int32(4).reshape(())}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "text.txt"
    file.write_bytes(TEXT)
    return file


def two(place):
    """A folder with whole checkpoints of step 1, best, and of step 2, last; the bytes of the latter."""
    for name, step in (("best.npz", 1), ("last.npz", 2)):
        checkpoint.save(place / name, ARRAYS, {"run": {"step": step}})
    return (place / "last.npz").read_bytes()


# damaged files


def test_the_newest_whole_checkpoint_is_taken_and_the_damaged_one_named_wherever_it_is_cut_or_flipped(tmp_path):
    data, said, used = two(tmp_path), [], []
    places = range(0, len(data), 197)
    flipped = [data[:at] + bytes([data[at] ^ 0x15]) + data[at + 1 :] for at in places]
    for content in [data[: len(data) * i // 50] for i in range(50)] + flipped:
        (tmp_path / "last.npz").write_bytes(content)
        said.clear()
        used.append(Path(checkpoint.newest(tmp_path, said.append)).name)
        meta, found = checkpoint.read(tmp_path / used[-1], lambda meta: ARRAYS)
        assert all(found[name].tobytes() == ARRAYS[name].tobytes() for name in ARRAYS)
        if used[-1] == "best.npz":
            (line,) = said
            assert str(tmp_path / "last.npz") in line and str(tmp_path / "best.npz") in line and "step 1" in line
    assert used[:50] == ["best.npz"] * 50 and used.count("last.npz") < len(flipped) / 5  # bytes that nothing hangs on


def test_a_damaged_file_is_refused_with_the_whole_one_beside_it_and_without_one_all_are_named(tmp_path):
    data = two(tmp_path)
    (tmp_path / "best.npz").write_bytes(data[:-30])
    for main, flag in ((sample.main, "run"), (train.main, "init")):
        refused(call(main, **{flag: tmp_path}), tmp_path / "best.npz", "damaged", f"give {tmp_path / 'last.npz'}")
    (tmp_path / "last.npz").write_bytes(data[:-30])
    refused(call(train.main, resume=tmp_path), tmp_path / "best.npz", tmp_path / "last.npz", "no whole checkpoint")


def npy(header, data):
    """The bytes of an .npy that says `header` of itself."""
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


def of_shape(shape):
    return npy(f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}", b"1234")


@pytest.mark.parametrize(
    "member, method, word",
    [
        (of_shape("(250000000000,)"), zipfile.ZIP_STORED, "250000000000"),
        (of_shape("(-1, -1)"), zipfile.ZIP_STORED, "-1"),
        (of_shape("(" * 300), zipfile.ZIP_STORED, "damaged"),
        (of_shape("-" * 5000 + "1"), zipfile.ZIP_STORED, "damaged"),
        (npy("{'descr': '|O', 'fortran_order': False, 'shape': (), }", b"12345678"), zipfile.ZIP_STORED, "object"),
        (bytes(10**7), zipfile.ZIP_DEFLATED, "compressed"),
        (bytes(10**7), zipfile.ZIP_LZMA, "compressed"),
    ],
    ids=["terabyte", "negative", "nested", "signs", "object", "deflated", "lzma"],
)
def test_a_member_that_claims_more_than_it_holds_is_refused_before_memory_is_taken(member, method, word, tmp_path):
    two(tmp_path)
    with zipfile.ZipFile(tmp_path / "last.npz", "a", method) as z:
        z.writestr("params/x.npy", member)
    tracemalloc.start()
    try:
        with pytest.raises(checkpoint.Damaged, match="last.npz is damaged") as e:
            checkpoint.read(tmp_path / "last.npz")
        assert word in str(e.value) and "\n" not in str(e.value) and tracemalloc.get_traced_memory()[1] < 3 << 20
    finally:
        tracemalloc.stop()


def test_reading_takes_no_more_memory_than_the_file_has_bytes(tmp_path):
    arrays = {"params/w": np.ones(5_000_001, np.float32), "params/b": np.ones((3, 4), ml_dtypes.bfloat16)}
    checkpoint.save(tmp_path / "c.npz", arrays, {"run": {}})
    tracemalloc.start()
    try:
        found = checkpoint.read(tmp_path / "c.npz", lambda meta: arrays)[1]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found["params/w"].all() and found["params/b"].dtype == ml_dtypes.bfloat16
    assert peak < 20e6 + 3 * checkpoint.BLOCK  # the arrays, and one block on its way


def test_an_array_of_another_dtype_is_refused_and_one_of_the_other_byte_order_read_as_it_was(tmp_path):
    meta = {"run": {"step": 1}, "dtypes": {"params/w": "int32"}}
    write_raw(tmp_path / "a.npz", meta, ARRAYS | {"params/w": ARRAYS["params/w"].astype(">f4")})
    found = checkpoint.read(tmp_path / "a.npz", lambda meta: ARRAYS)[1]
    assert found["params/w"].dtype == np.float32 and (found["params/w"] == ARRAYS["params/w"]).all()
    write_raw(tmp_path / "a.npz", meta, ARRAYS | {"params/w": ARRAYS["params/w"].view(np.int32)})
    with pytest.raises(ValueError, match="params/w is int32, wanted float32"):
        checkpoint.read(tmp_path / "a.npz", lambda meta: ARRAYS)


@pytest.mark.parametrize(
    "part, name, value, word",
    [
        ("config", "n_layer", 10**30, "n_layer"),
        ("config", "mem_len", 10**9, "mem_len=1000000000"),
        ("config", "cutoffs", [[]], "cutoffs"),
        ("config", "more\n", 1, "more"),
        ("run", "flags", [1], "flags"),
        ("run", "step", -1, "step"),
        ("run", "cursor", 10**30, "cursor"),
        ("flags", "batch", "8", "batch"),
        ("flags", "tgt_len", 0, "tgt_len=0"),
        ("flags", "more", 1, "more"),
        (None, "dtypes", 3, "meta"),
        (None, "vocab", "\n", "vocabulary"),
    ],
)
def test_what_a_checkpoint_says_of_itself_is_checked_in_one_line(part, name, value, word, tmp_path):
    cfg = txl.Config(
        n_token=256, **{k: TINY[k] for k in ("n_layer", "n_head", "d_model", "d_head", "d_inner", "mem_len")}
    )
    path = save_model(tmp_path, cfg, make_params(cfg), {"kind": "byte"}) / "best.npz"
    meta, arrays = raw(path)
    inside = {"flags": meta["run"]["flags"], None: meta}.get(part) or meta[part]
    inside[name] = value
    write_raw(path, meta, arrays)
    refused(call(sample.main, run=tmp_path), path, word)


# the folder


def test_of_two_runs_in_one_folder_the_second_is_refused_while_the_first_lives_and_not_after_kill_9(tmp_path, text):
    (tmp_path / "last.npz.tmp").write_bytes(b"half")
    code = "import sys, pathlib, data.folder as f\nwith f.locked(pathlib.Path(sys.argv[1])): print(1, flush=1), input()"
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    first = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, **pipes)
    try:
        assert first.stdout.readline() == b"1\n" and not (tmp_path / "last.npz.tmp").exists()
        refused(call(train.main, data=text, out=tmp_path, **BASE), f"{tmp_path} is in use by process {first.pid}: ")
    finally:
        first.kill()
        first.communicate()
    assert [p.name for p in tmp_path.iterdir()] == ["lock"]
    with folder.locked(tmp_path):
        refused(call(train.main, data=text, out=tmp_path, **BASE), f"process {os.getpid()}: ")
    assert not list(tmp_path.iterdir())


def test_a_line_that_was_left_half_written_in_the_log_is_ended_and_passed_over(tmp_path):
    good = {"step": 3, "bpb": 1.5, "lr": 0.1, "tok_per_s": None}
    half = b'{"step": 4, "bp'
    (tmp_path / "log.jsonl").write_bytes(b"\xff[\n" + b"[" * 9000 + b'\n{"step": [], "bpb": 1}\n7\n' + half)
    with folder.open_log(tmp_path / "log.jsonl") as file:
        file.write(json.dumps(good) + "\n")
    with folder.open_log(tmp_path / "log.jsonl"):
        pass
    assert (tmp_path / "log.jsonl").read_bytes().endswith(half + b"\n" + json.dumps(good).encode() + b"\n")
    assert figures.history(tmp_path) == ([good], [])


def syncs(monkeypatch, seen):
    """Calls seen(n) at the n-th time that a file is about to be whole on the disk."""
    count, fsync = [0], os.fsync

    def watched(number):
        count[0] += 1
        seen(count[0])
        fsync(number)

    monkeypatch.setattr(os, "fsync", watched)


def test_a_full_disk_ends_the_run_in_one_line_and_leaves_the_checkpoint_before(tmp_path, text, monkeypatch):
    def full(n):
        if n > 2:  # last.npz and best.npz of step 2
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    syncs(monkeypatch, full)
    outcome = call(train.main, data=text, out=tmp_path / "run", **BASE)
    refused(outcome, tmp_path / "run" / "last.npz", "not saved", os.strerror(errno.ENOSPC))
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["best.npz", "last.npz", "log.jsonl"]
    assert train.load(tmp_path / "run" / "last.npz").run["step"] == 2


# stops


def test_a_stop_while_the_step_compiles_ends_the_run_after_its_first_step_with_a_checkpoint(
    tmp_path, text, monkeypatch
):
    def stopped(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return compile_step(*args)

    monkeypatch.setattr(train, "compile_step", stopped)
    outcome = call(train.main, data=text, out=tmp_path / "run", **BASE)
    assert outcome.code == 143 and f"go on with python train.py --resume {tmp_path / 'run'}" in outcome.err
    assert raw(tmp_path / "run" / "last.npz")[0]["run"]["step"] == 1


def test_a_second_sigint_in_the_middle_of_saving_stops_at_once_and_harms_nothing(tmp_path, text, monkeypatch, capfd):
    before = []

    def twice(n):
        if n == 3:
            before.append((tmp_path / "run" / "last.npz").read_bytes())
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    syncs(monkeypatch, twice)
    monkeypatch.setattr(os, "_exit", sys.exit)
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as e:
            start(lambda: call(train.main, data=text, out=tmp_path / "run", **BASE))
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # the exit itself is not to be interrupted
    finally:
        signal.signal(signal.SIGINT, handler)
    assert e.value.code == 130 and capfd.readouterr().err.endswith("stopped at once\n")
    assert (tmp_path / "run" / "last.npz").read_bytes() == before[0]
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["best.npz", "last.npz", "log.jsonl"]


# numbers


def with_nan(monkeypatch, numbers, states):
    """Puts NaN into the memory that these steps see; states: gets a copy of what each step leaves."""

    def make(*args):
        compiled = compile_step(*args)

        def step(state, ids, targets, number):
            if number + 1 in numbers:
                state = state._replace(mems=txl.Mems(state.mems.h * jnp.nan, state.mems.fill * 0 + 9))
            state, told = compiled(state, ids, targets, number)
            states.append(jax.tree.map(np.asarray, (state.params, state.opt, state.mems)))
            return state, told

        step.memory_analysis = compiled.memory_analysis
        return step

    monkeypatch.setattr(train, "compile_step", make)


@pytest.mark.parametrize("sharding", [{}, dict(devices=2, shard="params")])
def test_steps_that_are_not_finite_are_skipped_up_to_n_in_a_row_and_change_only_counts_of_steps(
    sharding, tmp_path, text, monkeypatch
):
    states = []
    with_nan(monkeypatch, {4, 5, 8, 9}, states)
    outcome = call(train.main, data=text, out=tmp_path / "run", **BASE | sharding)
    assert outcome.code is None, outcome
    for kept, skipped in ((3, 5), (7, 9)):
        a, b = (jax.tree.leaves(states[number - 1][:2]) for number in (kept, skipped))
        assert len(a) > 40 and all(x.tobytes() == y.tobytes() for x, y in zip(a, b) if x.dtype != np.int32)
        assert not states[skipped - 1][2].h.any() and not states[skipped - 1][2].fill.any()
    steps = log(tmp_path / "run")[1]
    assert [(e["step"], e["skipped"]) for e in steps if "skipped" in e] == [(4, 1), (5, 2), (8, 1), (9, 2)]
    assert [e["step"] for e in steps if "loss_nats" in e] == [1, 2, 3, 6, 7, 10, 11, 12]
    counts = [a for name, a in raw(tmp_path / "run" / "last.npz")[1].items() if name.endswith("count")]
    assert counts and all(count == 12 for count in counts)  # so that the logged rate is the one that was used
    assert "2 in a row" in train.line(steps[4], train.Run())


def test_one_more_step_in_a_row_that_is_not_finite_stops_the_run_there(tmp_path, text, monkeypatch):
    with_nan(monkeypatch, {5, 6, 7}, [])
    outcome = call(train.main, data=text, out=tmp_path / "run", **BASE)
    refused(outcome, "loss nan", "at step 7", tmp_path / "run", "last good checkpoint", "--lr", "--skip_nonfinite")
    meta, arrays = raw(tmp_path / "run" / "last.npz")
    assert meta["run"]["step"] == 6 and all(np.isfinite(a).all() for a in arrays.values())
    assert all(math.isfinite(entry.get("loss_nats", 0)) for entry in log(tmp_path / "run")[1])
