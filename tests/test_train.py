"""A training run through `train.main`: what it computes, logs, saves, refuses, and how it goes on."""

import json
import math
import os
import re
import signal
import sys
import warnings
import weakref
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import make_params, worst
from runs import (
    COMPILED,
    PROSE,
    TEXT,
    TINY,
    call,
    log,
    losses,
    raw,
    refused,
    save_model,
    stopped,
    subword_file,
    write_raw,
)

import sample
import train
import txl
from data import checkpoint, prepare, tokenizer

pytestmark = pytest.mark.usefixtures("shared_steps")
STEPS = 60
TRAIN = np.frombuffer(TEXT[: len(TEXT) * 9 // 10], np.uint8)
BASE = TINY | dict(steps=STEPS, schedule="cosine", eval_every=20, dropout=0.1, dropatt=0.1, json=True)
OF_RUN = {name: value for name, value in BASE.items() if name in train.TrainConfig.__dataclass_fields__}


def spy(monkeypatch, name, seen, programs=None):
    """Calls seen(function, args) in place of every function that train.NAME makes; programs: how many each compiled."""
    make = getattr(train, name)

    def watched(*args):
        before = len(COMPILED)
        made = make(*args)
        if programs is not None:
            programs.append(len(COMPILED) - before)
        watch = partial(lambda made, *given: seen(made, given), made)
        watch.memory_analysis = getattr(made, "memory_analysis", None)  # partial objects take attributes
        return watch

    monkeypatch.setattr(train, name, watched)


@pytest.fixture(scope="module")
def base(tmp_path_factory, text, shared_steps):
    """A run of 60 steps with three evaluations, the last batch of each a partial one; what it did is in its fields."""
    folder = tmp_path_factory.mktemp("base") / "run"
    seen = {"programs": [], "step": [], "eval": [], "batches": [], "eval_shapes": set()}

    def counted(name):
        def watch(function, args):
            before = len(COMPILED)
            out = function(*args)
            seen[name].append(len(COMPILED) - before)
            if name == "step":
                seen["batches"].append([np.asarray(a).reshape(-1, a.shape[-1]) for a in args[1:3]])
            else:
                seen["eval_shapes"].add(args[1].shape)
            return out

        return watch

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        spy(patch, "compile_train_step", counted("step"), seen["programs"])
        spy(patch, "make_eval_step", counted("eval"))
        outcome = call(train.main, data=text, out=folder, **BASE)
    assert outcome.code is None, outcome
    return SimpleNamespace(folder=folder, outcome=outcome, warnings=caught, **seen)


def folder_of(path, **splits):
    path.mkdir(exist_ok=True)
    for name, data in (dict(train=TEXT, valid=TEXT[:300], test=TEXT[300:500]) | splits).items():
        (path / f"{name}.txt").write_bytes(data)
    return path


def progress(folder, name="last.npz"):
    """What the checkpoint of a run says of how far it came."""
    return raw(Path(folder) / name)[0]["run"]


# the stream


def test_row_b_of_a_step_goes_on_where_row_b_of_the_step_before_ended(base):
    assert len(base.batches) == STEPS
    starts = np.arange(TINY["batch"]) * ((len(TRAIN) - 1) // TINY["batch"])
    ids, targets = (np.concatenate(part, 1) for part in zip(*base.batches))
    for row, following, start in zip(ids, targets, starts):
        assert (row == TRAIN[start : start + len(row)]).all()
        assert (following == TRAIN[start + 1 : start + 1 + len(row)]).all()


def test_streams_wrap_at_the_end_of_the_text_and_every_row_reads_all_of_it():
    tokens = np.arange(31)  # 30 targets, rows of 10
    read = [train.get_batch(tokens, 3, cursor, 4) for cursor in range(0, 32, 4)]
    for b in range(3):
        ids = np.concatenate([batch[0][b] for batch in read])
        assert (ids == (10 * b + np.arange(32)) % 30).all()
        assert (np.concatenate([batch[1][b] for batch in read]) == ids + 1).all()


@pytest.mark.parametrize("rows", [1, 2, 7, 30])
@pytest.mark.parametrize("T", [1, 4, 50])
def test_an_evaluation_reads_every_target_once_in_rows_of_nearly_equal_length(rows, T):
    tokens = np.arange(100, 131)  # 30 targets, each with an id of its own
    batches = list(train.eval_batches(tokens, rows, T))
    ids, targets, weights = (np.concatenate(a, 1) for a in zip(*batches))
    assert {batch[0].shape for batch in batches} == {(rows, T)}
    assert sorted(targets[weights]) == list(range(101, 131)) and (ids + 1 == targets)[weights].all()
    assert np.ptp(weights.sum(1)) <= 1
    assert (np.diff(ids, axis=1)[weights[:, 1:]] == 1).all()  # a row is one piece of the text


# the step


def test_each_program_is_compiled_once_over_60_steps_with_evaluations_and_a_partial_tail(base):
    assert base.programs == [1] and base.step == [0] * STEPS  # compiled before the first
    assert base.eval == [1] + [0] * (len(base.eval) - 1) and len(base.eval) > 3 * 4
    targets = {entry["targets"] for entry in log(base.folder)[2]}
    assert len(base.eval_shapes) == 1 and any(n % (TINY["eval_batch"] * TINY["tgt_len"]) for n in targets)


def test_a_run_raises_no_warning_and_donated_state_is_gone_after_a_step(base, monkeypatch, tmp_path, text):
    assert [str(w.message) for w in base.warnings] == []
    alive = []

    def seen(function, args):
        out = function(*args)
        alive.extend(not a.is_deleted() for a in jax.tree.leaves(args[0]))
        return out

    spy(monkeypatch, "compile_train_step", seen)
    stopped(2, data=text, out=tmp_path / "run", **BASE)
    assert len(alive) > 40 and not any(alive)


@cache
def small_step(parts):
    cfg = txl.Config(256, 2, 2, 16, 6, 20, mem_len=9, dropout=0.2)
    run = train.TrainConfig(**OF_RUN | dict(batch=8, batch_chunk=parts, lr=1e-3, mem_reset=0))
    host = train.create_train_state(cfg, run, train.Layout(1), None, 8)
    return jax.tree.map(np.asarray, host), train.make_train_step(cfg, run, train.Layout(1))


@cache
def three_steps(parts=1, fresh=False):
    """(host state, losses) after 3 steps of make_train_step itself; fresh: empty memory before each."""
    (host, step), layout, told = small_step(parts), train.Layout(1), []
    state = train.to_devices(host, layout)
    for number in range(3):
        batch = train.get_batch(TRAIN, 8, 8 * number, 8)
        state = state._replace(mems=train.to_devices(host, layout).mems) if fresh else state
        state, out = step(state, *train.spread(batch, 1), number)
        told.append(float(out[0]))
    return train.to_host(state, layout), told


def test_a_batch_of_8_in_4_parts_is_the_batch_of_8_with_dropout_on():
    (whole, whole_losses), (parts, part_losses) = three_steps(), three_steps(4)
    np.testing.assert_allclose(part_losses, whole_losses, atol=1e-6)
    assert worst(whole.params, parts.params) < 1e-6  # the same gradients, summed in another order
    np.testing.assert_allclose(parts.mems.h, whole.mems.h, atol=2e-6)
    np.testing.assert_array_equal(parts.mems.fill, whole.mems.fill)


def test_mem_len_0_trains_evaluates_and_samples_and_equals_clearing_memory_before_every_step(tmp_path, text):
    flags = BASE | dict(lr=1e-3, mem_len=0, batch=8, eval_every=3, mem_reset=0, dropout=0.2, dropatt=0)
    assert stopped(4, data=text, out=tmp_path / "run", **flags).code == 130
    cleared = three_steps(fresh=True)[1]
    np.testing.assert_allclose(losses(tmp_path / "run")[:3], cleared, atol=3e-6)  # float32 sums of other lengths
    assert worst(cleared, three_steps()[1]) > 3e-5  # memory matters
    assert log(tmp_path / "run")[2][0]["split"] == "valid"
    shown = call(sample.main, run=tmp_path / "run", prompt="alpha be", n_tokens=20)
    assert shown.code is None and shown.out.startswith("alpha be")


def test_a_loss_is_fetched_after_the_next_step_was_started(tmp_path, text, monkeypatch):
    events, fetch = [], train.device_get

    def seen(function, args):
        events.append(f"start {args[3] + 1}")
        return function(*args)

    spy(monkeypatch, "compile_train_step", seen)
    monkeypatch.setattr(train, "device_get", lambda tree: (events.append("fetch"), fetch(tree))[1])
    stopped(4, data=text, out=tmp_path / "run", **BASE)
    assert events[:7] == ["start 1", "start 2", "fetch", "start 3", "fetch", "start 4", "fetch"]


@pytest.mark.invariant
def test_losses_do_not_depend_on_the_number_of_devices_with_dropout_on(base, tmp_path, text):
    stopped(11, data=text, out=tmp_path / "run", **BASE | {"devices": 4})
    head, steps, _ = log(tmp_path / "run")
    assert head["n_devices"] == 4 and len(steps) == 10 + 1
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(base.folder)[:11], atol=1e-5)  # other order of sums


@pytest.mark.parametrize(
    "schedule, lr_min, want",  # at 0, 1, 3, 4, 10, 19, 20 steps done, of 20 with 4 of warm-up
    [
        ("cosine", 0.0, [0.25, 0.5, 1, 1, 0.5 + 0.5 * math.cos(math.pi * 6 / 16), 0.009607, 0]),
        ("cosine", 0.1, [0.25, 0.5, 1, 1, 0.1 + 0.9 * (0.5 + 0.5 * math.cos(math.pi * 6 / 16)), 0.108646, 0.1]),
        ("inv_sqrt", 0.0, [0.25, 0.5, 1, math.sqrt(4 / 5), math.sqrt(4 / 11), math.sqrt(4 / 20), math.sqrt(4 / 21)]),
        ("constant", 0.0, [0.25, 0.5, 1, 1, 1, 1, 1]),
    ],
)
def test_a_schedule_warms_up_and_then_has_its_shape(schedule, lr_min, want):
    lr = train.make_schedule(train.TrainConfig(schedule=schedule, lr_min=lr_min, lr=2e-3, warmup=4, steps=20))
    np.testing.assert_allclose([lr(s) for s in (0, 1, 3, 4, 10, 19, 20)], 2e-3 * np.array(want), rtol=1e-4, atol=1e-9)
    at_once = train.make_schedule(train.TrainConfig(schedule=schedule, warmup=0, lr=1.0))
    assert float(at_once(0)) == 1  # no warm-up: the peak


def test_debugging_nans_runs_3_steps_with_donation(tmp_path, text):
    with jax.debug_nans(True):
        outcome = stopped(3, data=text, out=tmp_path / "run", **BASE)
    assert outcome.code == 130 and len(losses(tmp_path / "run")) == 3


def test_each_step_empties_the_memory_of_a_share_of_the_rows():
    cfg, seen = txl.Config(n_layer=1, n_head=1, d_model=6, d_head=4, d_inner=5, mem_len=9), []
    ids, run = np.zeros((1, 64, 4), np.int32), train.TrainConfig(batch=64, tgt_len=4, mem_reset=0.25, optimizer="adam")
    step = train.compile_train_step(cfg, run, train.Layout(1))
    for number in (0, 1, 1):
        state = train.fresh_state(cfg, run, train.Layout(1), None)
        full = state._replace(mems=state.mems._replace(fill=state.mems.fill + 9))
        seen.append(np.asarray(step(full, ids, ids, np.int32(number))[0].mems.fill)[0])
    assert {*np.concatenate(seen)} == {4, 9} and all(6 < (fill == 4).sum() < 26 for fill in seen)
    assert (seen[1] == seen[2]).all() and (seen[0] != seen[1]).any()
    mems = txl.init_mems(cfg, 64)
    assert train.reset_mems(mems, replace(run, mem_reset=0.0), 0, np.arange(64)) is mems


# the log


def test_the_log_has_a_header_then_steps_then_evaluations_as_documented(base):
    head, steps, evals = log(base.folder)
    assert {"versions", "backend", "device", "n_devices", "config", "run", "corpus", "n_params"} <= head.keys()
    assert head["versions"]["jax"] == jax.__version__ and head["backend"] == "cpu" and head["n_devices"] == 1
    assert head["config"]["d_inner"] == 20 and head["run"]["steps"] == STEPS
    assert head["config"]["attention"] == "auto" and head["attention"] == "chunked, blocks of 128"
    assert head["corpus"]["sha256"] == prepare.load(head["corpus"]["source"]).sha256
    assert head["n_params"] == sum(a.size for n, a in raw(base.folder / "last.npz")[1].items() if n[:7] == "params/")
    assert [entry["step"] for entry in steps] == list(range(1, STEPS + 1))
    for entry in steps:
        assert {"loss_nats", "bpb", "grad_norm", "lr", "tok_per_s", "step_ms", "mem_mib"} <= entry.keys()
        assert entry["bpb"] == pytest.approx(entry["loss_nats"] / math.log(2))  # a byte is a token here
        assert entry["grad_norm"] > 0 and entry["mem_mib"] > 10
    assert steps[0]["tok_per_s"] is steps[0]["step_ms"] is None and all(entry["tok_per_s"] > 0 for entry in steps[1:])
    lr = train.make_schedule(train.TrainConfig(steps=STEPS, warmup=TINY["warmup"], lr=TINY["lr"]))
    assert [entry["lr"] for entry in steps] == pytest.approx([float(lr(s)) for s in range(STEPS)], rel=1e-6)
    assert steps[-1]["loss_nats"] < steps[0]["loss_nats"] - 1
    corpus = prepare.load(head["corpus"]["source"])
    whole = [(STEPS, split, len(getattr(corpus, split)) - 1) for split in ("valid", "test")]
    some = [(step, "valid", TINY["eval_tokens"]) for step in (20, 40, 60)]
    assert [(e["step"], e["split"], e["targets"]) for e in evals] == some + whole
    want = steps[:20] + evals[:1] + steps[20:40] + evals[1:2] + steps[40:] + evals[2:]
    assert base.outcome.entries() == want
    first, second = base.outcome.err.splitlines()[:2]
    for word in (f"jax {jax.__version__}", "cpu", "1 x", str(base.folder)):
        assert word in first
    for word in ("text.txt", head["corpus"]["sha256"], "vocabulary 256"):
        assert word in second


def test_the_console_line_has_the_values_of_the_log():
    show, run = train.format_entry, train.TrainConfig(steps=160)
    entry = dict(step=40, loss_nats=1.25, bpb=1.8034, grad_norm=0.5, lr=1e-3, tok_per_s=12345.6, step_ms=10.0)
    shown = show(entry | dict(mem_mib=1234.5, left_s=125), run)
    words = "40/160", "25%", "1.2500 nats", "1.8034 bpb", "grad 0.500", "1.00e-03", "12,346 tok/s", "1,234 MiB", "2m05s"
    assert [word for word in words if word not in shown] == []
    first = show(entry | dict(tok_per_s=None, step_ms=None, mem_mib=None, left_s=None), run)
    assert "compiled" in first and "mem n/a" in first
    judged = dict(step=40, split="test", loss_nats=1.25, bpb=1.8, targets=1234)
    for rows, words in ((1, "1,234 targets in 1 row: "), (2, "1,234 targets in 2 rows: ")):
        assert words in show(judged | dict(eval_batch=rows), run)


@pytest.mark.parametrize(
    "stats", [None, {}, {"peak_bytes_in_use": 0}, RuntimeError("none here"), {"peak_bytes_in_use": 3 << 20}]
)
def test_memory_is_the_device_s_peak_or_the_process_s_and_never_0(stats, monkeypatch):
    class Device:
        def memory_stats(self):
            if isinstance(stats, Exception):
                raise stats
            return stats

    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    mib, whose = train.memory_mib()
    assert (mib, whose) == (3, "device peak") if stats == {"peak_bytes_in_use": 3 << 20} else whose == "process peak"
    assert mib > 1


def test_tokens_per_second_times_wall_are_the_tokens_without_the_first_step_and_evaluations(
    tmp_path, text, monkeypatch
):
    clock = [0.0]

    def slow(function, seconds):
        def wait(*args):
            clock[0] += seconds(*args)
            return function(*args)

        return wait

    monkeypatch.setattr(train, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(train, "device_get", slow(train.device_get, lambda _: 0.01))  # a step is done then
    monkeypatch.setattr(train, "evaluate", slow(train.evaluate, lambda *_: 5))
    step = slow(lambda function, args: function(*args), lambda _, args: 100 * (args[3] == 0))
    spy(monkeypatch, "compile_train_step", step)
    call(train.main, data=text, out=tmp_path / "run", **BASE | {"log_every": 7})
    _, steps, _ = log(tmp_path / "run")
    assert [entry["step"] for entry in steps] == [1, *range(7, STEPS, 7), STEPS] and steps[0]["tok_per_s"] is None
    for entry in steps[1:]:
        assert entry["step_ms"] == pytest.approx(10)
        assert entry["tok_per_s"] * 0.01 == pytest.approx(TINY["batch"] * TINY["tgt_len"])
        assert entry["left_s"] == pytest.approx((STEPS - entry["step"]) * 0.01)


# evaluation


def test_training_losses_are_the_same_bits_with_and_without_evaluations_in_between(base, tmp_path, text):
    call(train.main, data=text, out=tmp_path / "run", **BASE | {"eval_every": 10**6})
    assert losses(tmp_path / "run") == losses(base.folder)
    with_evals, without = (raw(folder / "last.npz")[1] for folder in (base.folder, tmp_path / "run"))
    assert all(with_evals[name].tobytes() == without[name].tobytes() for name in without)


@pytest.fixture(scope="module")
def one_txt(tmp_path_factory):
    """A prepared corpus whose valid split has 1,003 bytes."""
    folder = folder_of(tmp_path_factory.mktemp("one"), valid=TEXT[2000:3003])
    prepare.prepare([folder], folder / "tokens")
    return folder / "tokens"


def evaluated(base, one_txt, **flags):
    outcome = call(train.main, "--eval_only", json=True, **dict(run=base.folder, data=one_txt, devices=1) | flags)
    assert outcome.code is None, outcome
    return outcome.entries()[0]


def test_an_evaluation_counts_all_1002_targets_of_1003_bytes_at_any_batch_size(base, one_txt):
    found = {rows: evaluated(base, one_txt, eval_batch=rows) for rows in (1, 2, 7)}
    assert {e["targets"] for e in found.values()} == {1002} and {e["split"] for e in found.values()} == {"valid"}
    cfg, params, *_ = checkpoint.load(base.folder)
    tokens, nats, mems = np.frombuffer(TEXT[2000:3003], np.uint8).astype(np.int32), [], txl.init_mems(cfg, 1)
    losses_of = jax.jit(txl.token_losses, static_argnames="cfg")
    for at in range(0, 1002, 8):
        targets = tokens[None, at + 1 : at + 9]
        found_nats, mems = losses_of(params, tokens[None, at : at + targets.size], targets, mems, cfg)
        nats.extend(np.asarray(found_nats[0], np.float64))
    assert len(nats) == 1002
    assert found[1]["loss_nats"] == pytest.approx(np.mean(nats), abs=1e-5)  # the sum of all over their number
    for rows in (2, 7):
        assert found[rows]["loss_nats"] == pytest.approx(np.mean(nats), abs=0.01 * rows)  # a cold start for each row
    assert found[7]["bpb"] == pytest.approx(found[7]["loss_nats"] / math.log(2))


def test_memory_lengths_are_evaluated_one_after_the_other(base, one_txt):
    run = call(train.main, "--eval_only", run=base.folder, data=one_txt, json=True, devices=1, mem_len="0,9")
    assert run.code is None, run
    alone = [evaluated(base, one_txt, mem_len=n) for n in (0, 9)]
    assert run.entries() == alone and [entry["mem_len"] for entry in alone] == [0, 9]
    assert f"jax {jax.__version__}, cpu, 1 x" in run.err and f"{base.folder / 'best.npz'}, step 60" in run.err
    assert "1,003 valid tokens" in run.err
    refused(call(train.main, data=one_txt, mem_len="0,9"), "mem_len=(0, 9)", "--eval_only")


def test_documents_are_kept_apart_by_the_token_that_starts_them(base, one_txt, text):
    assert train.resolve_config(dict(data=str(text), reset_on="\n"))[0].reset_on == 10
    joined, apart = (evaluated(base, one_txt, **flags)["loss_nats"] for flags in ({}, dict(reset_on="\n")))
    assert apart != joined and abs(apart - joined) < 0.5


def test_an_evaluation_says_where_the_text_is_not_the_run_s_and_names_data_where_that_is_gone(base, one_txt, tmp_path):
    judge = lambda run, **flags: call(train.main, "--eval_only", run=run, devices=1, json=True, **flags)
    said = "another text than the one that this run was trained on"
    assert said in judge(base.folder, data=one_txt).err and said not in judge(base.folder).err
    meta, arrays = raw(base.folder / "last.npz")
    meta["run"]["flags"]["data"] = "gone.txt"
    write_raw(tmp_path / "last.npz", meta, arrays)
    refused(judge(tmp_path), f"gone.txt, which {tmp_path / 'last.npz'} was trained on", "--data PATH")
    refused(call(train.main, resume=tmp_path), "gone.txt", "--data PATH")
    meta["run"]["corpus"] = ""  # as of imported weights
    write_raw(tmp_path / "last.npz", meta, arrays)
    assert said not in judge(tmp_path, data=one_txt).err


def test_an_evaluation_pads_rows_over_devices_and_may_be_longer_than_mem_len_and_tgt_len_together(base, one_txt):
    alone = evaluated(base, one_txt)
    spread = evaluated(base, one_txt, devices=4, batch=5)  # a batch of training need not divide
    assert spread["targets"] == 1002 and spread["loss_nats"] == pytest.approx(alone["loss_nats"], abs=1e-6)
    longer = evaluated(base, one_txt, tgt_len=50)
    assert longer["targets"] == 1002 and longer["loss_nats"] == pytest.approx(alone["loss_nats"], abs=0.2)
    whole = evaluated(base, one_txt, tgt_len=334)  # a row
    assert evaluated(base, one_txt, tgt_len=2**30)["loss_nats"] == whole["loss_nats"]


def test_what_no_evaluation_can_do_ends_in_one_line(base, one_txt, text, tmp_path, monkeypatch):
    judge = lambda **flags: call(train.main, "--eval_only", **dict(run=base.folder, data=one_txt, devices=1) | flags)
    refused(judge(mem_len=10**9, eval_batch=1002), "out of memory", "--eval_batch", "--mem_len", "--dtype bfloat16")
    refused(judge(mem_len=2**31 - 1), f"mem_len={2**31 - 1}", "tgt_len=8", "less than 2**31 together")
    refused(judge(data=folder_of(tmp_path / "d", test=b"x"), split="test"), "test split", "1 tokens")
    for name in ("resume", "init", "out", "plan", "profile", "memory_budget"):  # flags of training
        value = {"plan": True, "memory_budget": "6GiB"}.get(name, base.folder)
        flags = dict(data=text, **{name: value})
        refused(call(train.main, "--eval_only", **flags), f"{name}={value}", "--eval_only", "--run")
    monkeypatch.chdir(tmp_path)
    refused(call(train.main, "--eval_only"), "no run found", "--run")
    refused(call(train.main, "--eval_only", run="nowhere"), "nowhere")


# the main job


@pytest.fixture(scope="module")
def abc(tmp_path_factory):
    """A run on abcabc..., 200 steps, told in lines for people; characters, the next checkpoint in the folder runs."""
    place = tmp_path_factory.mktemp("abc")
    (place / "abc.txt").write_bytes(b"abc" * 2000)
    flags = TINY | dict(steps=200, lr=2e-2, clip=1, schedule="cosine", log_every=50, eval_every=100, tokenizer="char")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        return place, flags, call(train.main, data="abc.txt", **flags)


def test_200_steps_on_abcabc_learn_that_b_follows_a_and_the_newest_run_says_so(abc, monkeypatch):
    place, _, outcome = abc
    monkeypatch.chdir(place)
    assert outcome.code is None
    _, steps, evals = log(place / "runs" / "abc-1")
    assert steps[-1]["loss_nats"] < 0.01 and all(e["loss_nats"] < 0.01 for e in evals[-2:])
    assert call(sample.main, prompt="abca", n_tokens=20, temperature=0).out == "abcabcabcabcabcabcabcabc\n"
    assert call(sample.main, prompt="a", n_tokens=5, temperature=0).out == "abcabc\n"  # from empty memory, too


def test_the_console_tells_each_logged_step_each_evaluation_and_at_the_end_a_sample_and_the_folder(abc):
    lines = abc[2].out.splitlines()
    assert [re.match(r"step (\d+)(/200)?", line)[1] for line in lines[:9]] == "1 50 100 100 150 200 200 200 200".split()
    at = lines.index("sample:")
    assert len(lines[at + 1]) == 200 and "abcabcabc" in lines[at + 1]
    assert lines[-1] == "checkpoints and log in runs/abc-1"


def test_init_goes_on_from_weights_with_their_vocabulary_on_other_data_that_it_knows(abc, tmp_path, monkeypatch):
    place, flags, _ = abc
    (tmp_path / "other.txt").write_bytes(b"bca" * 300 + b"b" * 30)  # the last part has one symbol only
    (tmp_path / "d.txt").write_bytes(b"abcd" * 300)
    monkeypatch.chdir(place)
    flags = {name: value for name, value in flags.items() if name in OF_RUN} | {"init": "runs/abc-1"}
    outcome = stopped(1, data=tmp_path / "other.txt", out=tmp_path / "run", **flags)
    assert outcome.code == 130, outcome
    meta, arrays = raw(tmp_path / "run" / "last.npz")
    assert meta["vocab"] == {"kind": "char", "symbols": ["a", "b", "c"]} and meta["config"]["n_token"] == 3
    assert meta["run"]["step"] == 1 and arrays["opt/1/count"] == 1
    assert losses(tmp_path / "run")[0] < 0.3 < math.log(3)  # a cold start among what was learnt
    wrong = call(train.main, data=tmp_path / "d.txt", init="runs/abc-1")
    refused(wrong, "'d'", "train split", "character index 3")
    asked = call(train.main, data="abc.txt", init="runs/abc-1", tokenizer="byte")
    refused(asked, "tokenizer: checkpoint char, asked byte")


# run folders


def test_runs_take_the_first_free_name_and_sampling_the_newest(tmp_path, text, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "text-2").mkdir(parents=True)
    for _ in range(2):
        stopped(1, data=text, **BASE)
    assert sorted(p.parent.name for p in tmp_path.glob("runs/*/last.npz")) == ["text-1", "text-3"]
    assert checkpoint.latest_run() == (tmp_path / "runs" / "text-3").relative_to(tmp_path)
    assert "text-3" in call(sample.main, n_tokens=1).err


def test_a_folder_that_holds_a_run_is_refused_without_resume(base, text):
    before = (base.folder / "log.jsonl").read_bytes()
    refused(call(train.main, data=text, out=base.folder, **BASE), base.folder, "--resume")
    assert (base.folder / "log.jsonl").read_bytes() == before
    refused(call(train.main, data=text, out=text, **BASE), "out", "is a file")


def test_best_stays_the_evaluation_with_the_lowest_loss_also_after_a_resume_and_last_is_the_last(tmp_path):
    noise = np.random.default_rng(4).integers(0, 256, 300, np.uint8).tobytes()  # the better trained, the worse
    stopped(45, data=folder_of(tmp_path / "data", valid=noise), out=tmp_path / "run", **BASE)
    assert call(train.main, resume=tmp_path / "run", devices=1, json=True).code is None
    entries = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    found = {e["step"]: e["loss_nats"] for e in entries if e.get("split") == "valid" and e["targets"] == 100}
    assert found[20] < found[40] < found[60]
    best, last = (progress(tmp_path / "run", name) for name in ("best.npz", "last.npz"))
    assert (best["step"], last["step"]) == (20, 60) and best["best"] == last["best"] == found[20]


# resume


@pytest.fixture(scope="module")
def halves(tmp_path_factory, text, shared_steps):
    """The run of `base`, interrupted in step 25 and resumed: (folder, first outcome, step saved, second outcome)."""
    folder = tmp_path_factory.mktemp("halves") / "run"
    first = stopped(25, data=text, out=folder, **BASE)
    return folder, first, progress(folder)["step"], call(train.main, resume=folder, devices=1, json=True)


@pytest.mark.invariant
def test_a_run_interrupted_at_step_25_and_resumed_is_the_whole_run_bit_for_bit_with_dropout_on(base, halves):
    folder, first, step, second = halves
    assert first.code == 130 and step == 25 and second.code is None, second
    assert first.err.splitlines()[-1] == f"stopped at step 25: go on with python train.py --resume {folder}"
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    steps = [e for e in entries if "loss_nats" in e and "split" not in e]
    for key in ("step", "loss_nats", "lr", "grad_norm"):
        assert [e[key] for e in steps] == [e[key] for e in log(base.folder)[1]], key
    assert log(folder)[0]["resumed_at"] == 25 and log(folder)[2] == log(base.folder)[2][1:]
    for name in ("last.npz", "best.npz"):
        (got_meta, got), (want_meta, want) = raw(folder / name), raw(base.folder / name)
        assert got.keys() == want.keys() and all(got[k].tobytes() == want[k].tobytes() for k in want)
        assert all(got_meta["run"][key] == want_meta["run"][key] for key in ("step", "cursor", "best"))


def test_sigterm_saves_and_exits_with_143_and_handlers_are_put_back(tmp_path, text):
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    assert stopped(3, data=text, out=tmp_path / "run", number=signal.SIGTERM, **BASE).code == 143
    assert progress(tmp_path / "run")["step"] == 3
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("at, every, step, n, way", [(2, 3, 3, 0, "--resume"), (13, 30, 60, 2, "--eval_only --run")])
def test_a_signal_ends_an_evaluation_at_its_next_step_and_all_is_saved(
    at, every, step, n, way, tmp_path, text, monkeypatch
):
    totals, held = [], []

    def seen(function, args):
        out = function(*args)
        totals.append(weakref.ref(out[0]))
        held.append(sum(total() is not None for total in totals))
        if len(totals) == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return out

    spy(monkeypatch, "make_eval_step", seen)
    outcome = call(train.main, data=text, out=tmp_path / "run", **BASE | dict(eval_every=every))
    assert outcome.code == 143 and len(totals) == at and max(held) <= 2  # of a long text, too
    assert f"stopped at step {step}: go on with python train.py {way} {tmp_path / 'run'}" in outcome.err
    assert progress(tmp_path / "run")["step"] == step and len(log(tmp_path / "run")[2]) == n


def test_a_signal_after_the_last_checkpoint_ends_a_run_with_its_code_too(text, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "draw", lambda *args: os.kill(os.getpid(), signal.SIGINT))
    outcome = call(train.main, data=text, out=tmp_path / "run", **BASE)
    assert outcome.code == 130 and progress(tmp_path / "run")["step"] == STEPS


def test_resume_auto_starts_in_an_empty_folder_or_one_without_a_checkpoint_and_then_goes_on(tmp_path, text):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.jsonl").write_text('{"versions": {}}\n')  # of a run that was killed before it saved
    for flags in (dict(out=tmp_path / "run"), dict(resume=tmp_path / "run")):
        refused(call(train.main, data=text, **flags), "checkpoint", f"--resume auto --out {tmp_path / 'run'}")
    for folder, steps, first, last in (("run", 2, 1, 2), ("run", 1, 3, 3), ("empty", 1, 1, 1)):
        outcome = stopped(steps, resume="auto", data=text, out=tmp_path / folder, **BASE)
        assert outcome.code == 130 and progress(tmp_path / folder)["step"] == last
        assert log(tmp_path / folder)[1][0]["step"] == first


@pytest.mark.parametrize("change", [{"batch": 6}, {"mem_len": 5}, {"dtype": "bfloat16"}, {"tgt_len": 7}])
def test_memory_starts_empty_where_its_shape_or_type_changes_and_is_kept_where_not(change, base):
    source = checkpoint.load(base.folder / "last.npz")
    cfg = replace(source.cfg, **{k: v for k, v in change.items() if k in ("mem_len", "dtype")})
    run = train.TrainConfig(**OF_RUN | {k: v for k, v in change.items() if k in OF_RUN})
    host, cursor = train.restore_checkpoint(source, cfg, run)
    assert host.mems.h.shape == (2, run.batch, cfg.mem_len, 16) and host.mems.h.dtype == cfg.dtype and cursor == 480
    assert (host.mems.fill == (9 if "tgt_len" in change else 0)).all() and host.mems.fill.shape == (run.batch,)
    assert host.mems.h.any() == ("tgt_len" in change)


def test_a_run_goes_on_in_bfloat16_from_its_masters_with_other_lengths_and_batch_and_an_empty_memory(base, tmp_path):
    for name in ("last.npz", "log.jsonl"):
        (tmp_path / name).write_bytes((base.folder / name).read_bytes())
    sizes = dict(batch=6, mem_len=5, tgt_len=7, dtype="bfloat16")
    outcome = stopped(25, resume=tmp_path, devices=1, steps=STEPS + 30, json=True, **sizes)
    assert outcome.code == 130 and "memory starts empty" in outcome.err
    found = losses(tmp_path)
    assert len(found) == 25 and all(map(math.isfinite, found)) and found[0] < losses(base.folder)[0] - 1  # as trained
    meta, arrays = raw(tmp_path / "last.npz")
    assert arrays["mems/h"].shape == (2, 6, 5, 16) and meta["run"]["step"] == STEPS + 25
    assert meta["run"]["cursor"] == STEPS * 8 + 25 * 7
    assert arrays["mems/h"].dtype == np.uint16 and meta["dtypes"] == {"mems/h": "bfloat16"}
    others = {k: a.dtype.name for k, a in arrays.items() if k[:5] != "mems/" and not k.endswith("count")}
    assert set(others.values()) == {"float32"}
    want = checkpoint.flatten({"mems": jax.eval_shape(lambda: txl.init_mems(txl.Config(**meta["config"]), 6))})
    mems = checkpoint.read(tmp_path / "last.npz", lambda meta: want)[1]
    assert mems["mems/h"].dtype == ml_dtypes.bfloat16 and np.isfinite(mems["mems/h"].astype(np.float32)).all()
    again = stopped(1, resume=tmp_path, devices=1, json=True)
    assert again.code == 130 and "memory starts empty" not in again.err and abs(losses(tmp_path)[0] - found[-1]) < 0.5


def test_a_resumed_run_may_be_evaluated_on_other_data_and_fine_tuned_runs_resumed(
    base, halves, one_txt, tmp_path, text
):
    assert evaluated(base, one_txt, run=halves[0])["targets"] == 1002
    for step, start in ((1, dict(init=base.folder, out=tmp_path / "run")), (2, dict(resume=tmp_path / "run"))):
        outcome = stopped(1, data=text, **start, **OF_RUN)
        assert outcome.code == 130 and progress(tmp_path / "run")["step"] == step, outcome


def test_what_a_checkpoint_cannot_go_on_with_is_refused_in_one_line(base, tmp_path):
    (tmp_path / "other.txt").write_bytes(TEXT[::-1])
    for flags, *words in (
        (dict(n_layer=3), "n_layer: checkpoint 2, asked 3"),
        (dict(dtype="float64"), "dtype=float64", "JAX_ENABLE_X64=1", "float32"),
        (dict(tokenizer="char"), "tokenizer: checkpoint byte, asked char"),
        (dict(data=tmp_path / "other.txt"), "other data", f"--init {base.folder}"),
        (dict(), f"at step {STEPS} of {STEPS}", "--steps"),
        (dict(steps=STEPS + 1, optimizer="muon"), "optimizer: checkpoint adamw, asked muon"),
    ):
        refused(call(train.main, resume=base.folder, **flags), *words)
    refused(call(train.main, init=base.folder, data="x", d_model=18), "x: no such file")


@pytest.mark.parametrize("flag", ["resume", "init", "run"])
def test_a_path_without_a_checkpoint_is_an_error_and_never_a_fresh_start(flag, tmp_path, text, monkeypatch):
    monkeypatch.chdir(tmp_path)
    only = ["--eval_only"] if flag == "run" else []
    for path in (tmp_path / "nowhere", tmp_path):
        refused(call(train.main, *only, data=text, **{flag: path}), path, "no checkpoint")
    assert not list(tmp_path.iterdir())


def test_optimizer_state_and_memory_that_do_not_fit_are_named_on_resume(base, tmp_path):
    meta, arrays = raw(base.folder / "last.npz")
    meta["run"]["step"] = 7
    del arrays["opt/1/mu/v"]
    arrays["mems/h"] = arrays["mems/h"][:, :, 1:]
    write_raw(tmp_path / "last.npz", meta, arrays)
    found = "mems/h is (2, 4, 8, 16), wanted (2, 4, 9, 16)"
    refused(call(train.main, resume=tmp_path, devices=1), "opt/1/mu/v missing", found)


def test_the_group_of_devices_comes_with_the_sharding_that_a_run_was_trained_with(base, tmp_path, text):
    meta, arrays = raw(base.folder / "last.npz")
    meta["run"]["flags"] |= dict(shard="params", shard_group=2)
    write_raw(tmp_path / "last.npz", meta, arrays)

    def shared(**flags):
        run = train.resolve_config(dict(data=str(text)) | flags)[1]
        return run.shard, run.shard_group

    resume = dict(resume=str(tmp_path))
    assert shared(**resume) == ("params", 2) and shared(**resume, shard_group=4) == ("params", 4)
    assert shared(**resume, shard="none") == ("none", 0)
    assert shared(eval_only=True, run=str(tmp_path), shard_group=3) == ("params", 3)
    refused(call(train.main, steps=STEPS + 1, devices=3, batch=3, **resume), "shard_group=2 does not divide 3 devices")


# numbers


@pytest.mark.parametrize("step", [5, 7])
def test_nan_stops_the_run_at_its_step_and_leaves_the_last_good_checkpoint(step, tmp_path, text, monkeypatch):
    """Parameters are broken before step 5, or by step 6, so that the evaluation after it is the first to see it."""
    count, good = [0], []
    broken = lambda state: state._replace(params=state.params | {"u": state.params["u"] * jnp.nan})

    def seen(function, args):
        count[0] += 1
        if count[0] == 5:
            good.append((tmp_path / "run" / "last.npz").read_bytes())
        state, told = function(broken(args[0]) if count[0] == step == 5 else args[0], *args[1:])
        return (broken(state) if count[0] == 6 and step == 7 else state), told

    spy(monkeypatch, "compile_train_step", seen)
    every = 2 if step == 7 else 4
    outcome = call(train.main, data=text, out=tmp_path / "run", **BASE | {"eval_every": every})
    refused(outcome, "nan", f"at step {5 if step == 5 else 6}", tmp_path / "run", "last good checkpoint", "--lr")
    assert (tmp_path / "run" / "last.npz").read_bytes() == good[0] and progress(tmp_path / "run")["step"] == 4
    assert all(np.isfinite(a).all() for a in raw(tmp_path / "run" / "last.npz")[1].values())
    assert len(losses(tmp_path / "run")) == (4 if step == 5 else 6)


def test_a_run_that_stopped_says_whether_a_checkpoint_is_there_and_to_skip_more_steps_than_it_was_allowed_to(tmp_path):
    for there, given, advised in (("has no checkpoint yet", 0, 3), ("keeps its last good checkpoint", 3, 6)):
        with pytest.raises(SystemExit, match=f"loss inf at step 5: .*{there}.*--lr.*--skip_nonfinite {advised}$"):
            train.check_finite(5, tmp_path, given, loss=math.inf)
        (tmp_path / "last.npz").touch()


# data that cannot be used


def test_a_training_text_too_short_is_refused_with_what_it_needs_and_one_byte_more_works(tmp_path):
    need = TINY["batch"] * TINY["tgt_len"] + 1
    data = folder_of(tmp_path / "data", train=TEXT[: need - 1])
    outcome = call(train.main, data=data, out=tmp_path / "a", **BASE)
    refused(outcome, f"{need - 1} tokens", f"at least {need}", "batch=4", "tgt_len=8")
    assert not (tmp_path / "a").exists()
    (data / "train.txt").write_bytes(TEXT[:need])
    assert stopped(1, data=data, out=tmp_path / "a", **BASE).code == 130


def test_data_that_cannot_be_used_is_refused_in_one_line(tmp_path):
    text = tmp_path / "in.txt"
    (tmp_path / "bare").mkdir()
    for content, *words in (
        (None, "no such file"),
        (b"", "empty"),
        (b"\n\n \n", "in.txt"),
        (b"0123456789", "9 tokens", "at least 33"),
    ):
        if content is not None:
            text.write_bytes(content)
        refused(call(train.main, data=text, out=tmp_path / "run", **BASE), *words)
    refused(call(train.main, data=tmp_path / "bare", out=tmp_path / "run", **BASE), "bare", "train.txt")
    for split in ("valid", "test"):
        data = folder_of(tmp_path / "data", **{"valid": b"ab", "test": b"ab", split: b"a"})
        refused(call(train.main, data=data, **BASE), f"{split} split has 1 tokens", "at least 2")
    assert not (tmp_path / "run").exists()


def test_characters_that_training_lacks_are_counted_and_prompts_may_hold_them(tmp_path):
    data = folder_of(tmp_path / "data", valid=b"alpha be\nQ", test="é—a".encode())
    outcome = stopped(1, data=data, out=tmp_path / "run", tokenizer="char", **BASE)
    assert outcome.code == 130 and "lacks, now <unk>: 0 of train, 1 of valid, 2 of test" in outcome.err
    shown = call(sample.main, run=tmp_path / "run", prompt="alé", n_tokens=3)
    assert shown.code is None and shown.out.startswith("alé")


def test_ids_without_text_are_trained_evaluated_and_sampled_in_nats_per_token(tmp_path):
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, 300, 4000) // 2 * 2)
    run, flags = tmp_path / "run", TINY | dict(steps=2, eval_every=2, data=tmp_path / "ids.npy", out=tmp_path / "run")
    outcome = call(train.main, **flags)
    assert outcome.code is None, outcome
    assert "bpb" not in outcome.out and "bits" not in outcome.out and " nats  ppl " in outcome.out
    assert len(outcome.out.partition("sample:\n")[2].partition("\n")[0].split()) == 200
    assert all(e["bpb"] is None for e in [*log(run)[1], *log(run)[2]])
    assert checkpoint.load(run).vocab == {"kind": "ids", "size": 299}
    judged = call(train.main, "--eval_only", run=run, devices=1, json=True).entries()[0]
    assert judged["bpb"] is None and judged["ppl"] == pytest.approx(math.exp(judged["loss_nats"]))

    draw = lambda **more: call(sample.main, run=run, n_tokens=3, **more)
    entry = draw(prompt_ids="7,8", json=True).entries()[0]
    assert entry["text"] is entry["prompt"] is None and len(entry["ids"]) == 3
    assert draw(prompt_ids="7,8").out == f"7 8 {' '.join(map(str, entry['ids']))}\n"
    assert draw(n_samples=2).out.split("\n\n")[0] == draw().out.strip() and len(draw().out.split()) == 3
    for bad in (dict(prompt="a"), dict(stop="a"), dict(prompt_file=tmp_path / "ids.npy")):
        refused(draw(**bad), "ids", "--prompt_ids 1,2,3")
    refused(draw(prompt_ids="299"), "prompt_ids", "0 to 298")
    refused(draw(prompt_ids="1", prompt="a"), "leave one out")


def test_subwords_are_trained_and_sampled_and_the_checkpoint_stands_alone(tmp_path, monkeypatch):
    file = subword_file(tmp_path)
    data = folder_of(tmp_path / "data", train=PROSE.encode() * 40, valid=PROSE.encode() * 3, test=PROSE.encode() * 2)
    run, flags = tmp_path / "run", TINY | dict(steps=2, eval_every=2)
    outcome = call(train.main, data=data, out=run, tokenizer=file, **flags)
    assert outcome.code is None, outcome
    file.unlink()
    entry = log(run)[2][-1]
    n_tokens, n_bytes = len(tokenizer.encode(checkpoint.load(run).vocab, PROSE * 2)), 2 * len(PROSE.encode())
    assert entry["split"] == "test" and entry["targets"] == n_tokens - 1
    assert entry["bpb"] == pytest.approx(entry["loss_nats"] / math.log(2) * n_tokens / n_bytes)
    judged = call(train.main, "--eval_only", run=run, split="test", devices=1, json=True)
    assert judged.entries()[0]["targets"] == entry["targets"]
    shown = call(sample.main, run=run, prompt="The cat", n_tokens=30)
    (same,) = call(sample.main, run=run, prompt="The cat", n_tokens=30, json=True).entries()
    assert shown.out == f"The cat{same['text']}\n" and len(same["ids"]) == 30
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    tokenizer._subwords.cache_clear()
    refused(call(sample.main, run=run, prompt="a"), "pip install tokenizers")


def test_prompt_ids_are_refused_where_tokens_have_text(base):
    refused(call(sample.main, run=base.folder, prompt_ids="1,2"), "prompt_ids", "kind byte", "--prompt")


@pytest.mark.parametrize("bad", [3, 255])
def test_prepared_ids_outside_the_vocabulary_are_found_before_anything_compiles(bad, tmp_path):
    data = folder_of(tmp_path / "data", train=b"abc" * 50, valid=b"abc", test=b"abc")
    prepare.prepare([data], tmp_path / "tokens", tokenizer="char")
    ids = np.fromfile(tmp_path / "tokens" / "train.bin", np.uint8)
    ids[77] = bad  # 255: what -1 becomes
    ids.tofile(tmp_path / "tokens" / "train.bin")
    compiled = len(COMPILED)
    refused(call(train.main, data=tmp_path / "tokens", **BASE), "train.bin", f"largest id {bad}", "vocabulary of 3")
    assert len(COMPILED) == compiled


def test_a_checkpoint_with_fewer_ids_than_its_vocabulary_is_refused_naming_both(base, tmp_path, text):
    meta, arrays = raw(base.folder / "last.npz")
    meta["config"]["n_token"] = 100
    arrays |= {name: arrays[name][:100] for name in ("params/embed_0", "params/out_bias_0")}
    write_raw(tmp_path / "last.npz", meta, arrays)
    refused(call(train.main, "--eval_only", run=tmp_path, data=text), "n_token=100", "256")
    refused(call(sample.main, run=tmp_path, prompt="az\u00e9"), "id 195", "100")


# the data of a checkpoint, read by its vocabulary

SENTENCE = b"the cat sat\n" * 30
RARE = SENTENCE + b"the dog sat\n"  # its last word but one stands in the test part alone


def checkpoint_of(folder, kind, data, **run):
    """A run folder whose checkpoint has the words or characters of RARE, and was trained on `data`."""
    vocab = tokenizer.build(kind, RARE)
    cfg = txl.Config(tokenizer.size(vocab), 1, 2, 16, 6, 20, mem_len=9)
    save_model(folder, cfg, make_params(cfg), vocab)
    meta, arrays = raw(folder / "best.npz")
    meta["run"] |= dict(corpus=prepare.load(data, vocab=vocab).tokens_sha256) | run
    write_raw(folder / "best.npz", meta, arrays)
    return folder, vocab


@pytest.fixture
def rare(tmp_path):
    """One text, and prepared in bytes and in the words of its training part, of which the test part has another."""
    folder_of(tmp_path / "text", train=SENTENCE, valid=b"the cat sat\n" * 4, test=b"the dog sat\n")
    for kind in ("byte", "word"):
        prepare.prepare([tmp_path / "text"], tmp_path / kind, tokenizer=kind)
    return tmp_path


@pytest.mark.parametrize("kind", ["char", "word"])
@pytest.mark.parametrize("data", ["text", "byte"])
@pytest.mark.parametrize("way", [dict(eval_only=True, run="run"), dict(init="run"), dict(resume="run")])
def test_with_a_checkpoint_a_text_or_its_bytes_are_encoded_by_its_vocabulary(kind, data, way, rare, monkeypatch):
    monkeypatch.chdir(rare)
    vocab = checkpoint_of(Path("run"), kind, "text")[1]
    for asked in ({}, {"tokenizer": ""}, {"tokenizer": kind}):
        corpus = train.resolve_config(way | asked | {"data": data})[2]
        assert corpus.vocab == vocab and tokenizer.decode(vocab, corpus.test) == b"the dog sat\n"
        assert corpus.n_bytes == {"train": 360, "valid": 48, "test": 12}
    other = "word" if kind == "char" else "char"
    refused(call(train.main, data=data, tokenizer=other, **way), f"tokenizer: checkpoint {kind}, asked {other}")


def test_a_run_goes_on_with_the_same_tokens_alone_however_they_were_made(rare):
    folder, vocab = checkpoint_of(rare / "run", "word", rare / "text")
    resume = lambda data: call(train.main, resume=folder, data=rare / data, steps=1, batch=4)
    done = f"{folder} is at step 5 of 1"  # the last check
    for data in ("text", "byte"):
        refused(resume(data), done)
    refused(resume("word"), "cannot be told from its tokens", rare / "word", "give the text itself")
    meta, arrays = raw(folder / "best.npz")
    # Older checkpoints have the hash of the text.
    for hashed, found in (("sha256", done), ("tokens_sha256", f"{folder} was trained on other data")):
        meta["run"]["corpus"] = getattr(prepare.load(rare / "word"), hashed)
        write_raw(folder / "best.npz", meta, arrays)
        refused(resume("text"), found)


def test_a_text_that_a_checkpoint_cannot_encode_is_other_data_and_no_flag_is_advised_that_does_not_help(rare):
    folder, _ = checkpoint_of(rare / "run", "char", rare / "text")
    for name, bad, word in (("new", b"the bird sat\n" * 20, "'b'"), ("odd", SENTENCE + b"\xff", "not UTF-8")):
        (rare / name).write_bytes(bad)
        refused(call(train.main, resume=folder, data=rare / name), "was trained on other data", word)
        refused(call(train.main, init=folder, data=rare / name), word, "train a new model with --tokenizer byte")
