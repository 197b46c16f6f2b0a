"""A training run through `train.main`: what it computes, logs, saves, refuses, and how it goes on."""

import contextlib
import importlib.util
import io
import json
import math
import os
import re
import signal
import warnings
import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from runs import COMPILED, TEXT, TINY, argv, call, interrupt, log, losses, raw, refused, write_raw

import evaluation
import figures
import plan
import sample
import train
import txl
from data import checkpoint, prepare
from step import make_step, spread
from step import optimizer as make_optimizer
from step import schedule as lr_schedule

pytestmark = pytest.mark.usefixtures("quick_compiles")
STEPS = 60
TRAIN = np.frombuffer(TEXT[: len(TEXT) * 9 // 10], np.uint8)
BASE = TINY | dict(steps=STEPS, eval_every=20, dropout=0.1, dropatt=0.1, json=True)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "text.txt"
    file.write_bytes(TEXT)
    return file


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
def base(tmp_path_factory, text, quick_compiles):
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
        spy(patch, "compile_step", counted("step"), seen["programs"])
        spy(patch, "make_eval", counted("eval"))
        outcome = call(train.main, data=text, out=folder, **BASE)
    assert outcome.code is None, outcome
    return type("Base", (), dict(folder=folder, outcome=outcome, warnings=caught, **seen))


def folder_of(tmp_path, **splits):
    for name, data in (dict(train=TEXT, valid=TEXT[:300], test=TEXT[300:500]) | splits).items():
        (tmp_path / f"{name}.txt").write_bytes(data)
    return tmp_path


# the stream


def test_row_b_of_a_step_goes_on_where_row_b_of_the_step_before_ended(base):
    assert len(base.batches) == STEPS
    for ids, targets in base.batches:
        assert ids.shape == targets.shape == (TINY["batch"], TINY["tgt_len"])
        assert (ids[:, 1:] == targets[:, :-1]).all()
    for (_, targets), (ids, _) in zip(base.batches, base.batches[1:]):
        assert (targets[:, -1] == ids[:, 0]).all()
    starts = np.arange(TINY["batch"]) * ((len(TRAIN) - 1) // TINY["batch"])
    rows = np.concatenate([ids for ids, _ in base.batches], 1)
    for row, start in zip(rows, starts):
        assert (row == TRAIN[start : start + len(row)]).all()


def test_streams_wrap_at_the_end_of_the_text_and_every_row_reads_all_of_it():
    tokens = np.arange(31)  # 30 targets, rows of 10
    read = [train.batch_at(tokens, 3, cursor, 4) for cursor in range(0, 32, 4)]
    for b in range(3):
        ids = np.concatenate([batch[0][b] for batch in read])
        assert (ids == (10 * b + np.arange(32)) % 30).all()
        assert (np.concatenate([batch[1][b] for batch in read]) == ids + 1).all()


@pytest.mark.parametrize("rows", [1, 2, 7, 30])
@pytest.mark.parametrize("T", [1, 4, 50])
def test_an_evaluation_reads_every_target_once_in_rows_of_nearly_equal_length(rows, T):
    tokens = np.arange(100, 131)  # 30 targets, each with an id of its own
    batches = list(evaluation.eval_batches(tokens, rows, T))
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


def test_a_run_raises_no_warning_so_every_donated_buffer_is_used(base):
    assert [str(w.message) for w in base.warnings] == []


def test_donated_state_is_gone_after_the_step(monkeypatch, tmp_path, text):
    alive = []

    def seen(function, args):
        out = function(*args)
        alive.extend(not a.is_deleted() for a in jax.tree.leaves(args[0]))
        return out

    spy(monkeypatch, "compile_step", seen)
    interrupt(monkeypatch, 2, signal.SIGINT)
    call(train.main, data=text, out=tmp_path / "run", **BASE)
    assert len(alive) > 40 and not any(alive)


def small_step(rows, parts, dropout=0.2, mem_len=9, steps=3, fresh=False):
    """(host state, losses) after `steps` steps of make_step itself; fresh: empty memory before each."""
    cfg = txl.Config(256, 2, 2, 16, 6, 20, mem_len=mem_len, dropout=dropout, dropatt=dropout)
    run = train.Run(
        batch=rows, tgt_len=8, batch_chunk=parts, steps=STEPS, warmup=3, lr=1e-3, optimizer="adamw", clip=0.25
    )
    host = jax.tree.map(np.asarray, train.init_state(cfg, run, None, rows))
    state, step, told = train.to_devices(host, 1, run), make_step(cfg, run, 1), []
    for number in range(steps):
        batch = train.batch_at(TRAIN, rows, 8 * number, 8)
        state = state._replace(mems=train.to_devices(host, 1, run).mems) if fresh else state
        state, out = step(state, *spread(batch, 1), number)
        told.append(float(out[0]))
    return train.to_host(state, cfg, run), told


def test_a_batch_of_8_in_2_parts_is_the_batch_of_8_with_dropout_on():
    (whole, whole_losses), (parts, part_losses) = small_step(8, 1), small_step(8, 2)
    np.testing.assert_allclose(part_losses, whole_losses, atol=1e-6)
    worst = jax.tree.map(lambda a, b: np.abs(a - b).max(), whole.params, parts.params)
    assert max(jax.tree.leaves(worst)) < 1e-6  # the same gradients, summed in another order
    np.testing.assert_allclose(parts.mems.h, whole.mems.h, atol=2e-6)
    np.testing.assert_array_equal(parts.mems.fill, whole.mems.fill)
    assert abs(small_step(8, 1, dropout=0.0, steps=1)[1][0] - whole_losses[0]) > 1e-3  # dropout was on


def test_mem_len_0_trains_evaluates_and_samples_and_equals_clearing_memory_before_every_step(tmp_path, text):
    flags = TINY | dict(steps=STEPS, lr=1e-3, mem_len=0, batch=8, eval_every=3)
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, 4, signal.SIGINT)
        assert call(train.main, data=text, out=tmp_path / "run", json=True, **flags).code == 130
    cleared = small_step(8, 1, dropout=0.0, fresh=True)[1]
    np.testing.assert_allclose(losses(tmp_path / "run")[:3], cleared, atol=3e-6)  # float32 sums of other lengths
    assert max(abs(a - b) for a, b in zip(cleared, small_step(8, 1, dropout=0.0)[1])) > 3e-5  # memory matters
    np.testing.assert_allclose(small_step(8, 2, dropout=0.0, mem_len=0)[1], cleared, atol=3e-6)
    assert log(tmp_path / "run")[2][0]["split"] == "valid"
    shown = call(sample.main, run=tmp_path / "run", prompt="alpha be", n_tokens=20)
    assert shown.code is None and shown.out.startswith("alpha be")


def test_a_loss_is_fetched_after_the_next_step_was_started(tmp_path, text, monkeypatch):
    events, fetch = [], train.fetch

    def seen(function, args):
        events.append(f"start {args[3] + 1}")
        return function(*args)

    spy(monkeypatch, "compile_step", seen)
    monkeypatch.setattr(train, "fetch", lambda tree: (events.append("fetch"), fetch(tree))[1])
    interrupt(monkeypatch, 4, signal.SIGINT)
    call(train.main, data=text, out=tmp_path / "run", **BASE)
    assert events[:7] == ["start 1", "start 2", "fetch", "start 3", "fetch", "start 4", "fetch"]


@pytest.mark.parametrize("devices", [2, 4])
def test_losses_do_not_depend_on_the_number_of_devices_with_dropout_on(base, devices, tmp_path, text, monkeypatch):
    interrupt(monkeypatch, 11, signal.SIGINT)
    call(train.main, data=text, out=tmp_path / "run", **BASE | {"devices": devices})
    head, steps, _ = log(tmp_path / "run")
    assert head["n_devices"] == devices and len(steps) == 10 + 1
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
    lr = lr_schedule(train.Run(schedule=schedule, lr_min=lr_min, lr=2e-3, warmup=4, steps=20))
    np.testing.assert_allclose([lr(s) for s in (0, 1, 3, 4, 10, 19, 20)], 2e-3 * np.array(want), rtol=1e-4, atol=1e-9)
    at_once = lr_schedule(train.Run(schedule=schedule, warmup=0, lr=1.0))
    assert float(at_once(0)) == 1  # no warm-up: the peak


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_adamw_decays_the_matrices_alone_and_adam_nothing(optimizer):
    cfg = txl.Config(n_token=11, n_layer=2, n_head=2, d_model=16, d_head=6, d_inner=20, cutoffs=(5,), div_val=2)
    run = train.Run(optimizer=optimizer, weight_decay=0.5, lr=0.1, warmup=1, schedule="constant")
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), txl.param_shapes(cfg))
    tx = make_optimizer(run)
    decay_alone = jax.jit(lambda params: tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)[0])
    updates = decay_alone(params)
    decayed = {name for name, leaf in train.named(updates).items() if np.asarray(leaf).any()}
    matrices = {"u", "v", "embed_0", "embed_1", "embed_proj_0", "embed_proj_1", "out_proj_0", "cluster"}
    matrices |= {f"layers/w_{name}" for name in "qkvro12"}
    assert decayed == (matrices & set(train.named(params)) if optimizer == "adamw" else set())
    assert all(
        (np.asarray(leaf) == np.float32(-0.05)).all() for n, leaf in train.named(updates).items() if n in decayed
    )


def test_debugging_nans_runs_3_steps_with_donation(tmp_path, text, monkeypatch):
    interrupt(monkeypatch, 3, signal.SIGINT)
    jax.config.update("jax_debug_nans", True)
    try:
        outcome = call(train.main, data=text, out=tmp_path / "run", **BASE)
    finally:
        jax.config.update("jax_debug_nans", False)
    assert outcome.code == 130 and len(losses(tmp_path / "run")) == 3


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
    lr = lr_schedule(train.Run(steps=STEPS, warmup=TINY["warmup"], lr=TINY["lr"]))
    assert [entry["lr"] for entry in steps] == pytest.approx([float(lr(s)) for s in range(STEPS)], rel=1e-6)
    assert steps[-1]["loss_nats"] < steps[0]["loss_nats"] - 1
    cut, valid, test = (
        TINY["eval_tokens"],
        len(TEXT) * 95 // 100 - len(TEXT) * 9 // 10,
        len(TEXT) - len(TEXT) * 95 // 100,
    )
    whole = [(STEPS, "valid", valid - 1), (STEPS, "test", test - 1)]
    assert [(e["step"], e["split"], e["targets"]) for e in evals] == [(s, "valid", cut) for s in (20, 40, 60)] + whole
    assert (
        base.outcome.entries()
        == log(base.folder)[1][:20] + evals[:1] + steps[20:40] + evals[1:2] + steps[40:] + evals[2:]
    )


def test_the_first_lines_tell_versions_backend_devices_corpus_and_hash(base):
    first, second = base.outcome.err.splitlines()[:2]
    for word in (f"jax {jax.__version__}", "cpu", "1 x", str(base.folder)):
        assert word in first
    for word in ("text.txt", log(base.folder)[0]["corpus"]["sha256"], "vocabulary 256"):
        assert word in second


def test_the_console_line_has_the_values_of_the_log():
    entry = dict(step=40, loss_nats=1.25, bpb=1.8034, grad_norm=0.5, lr=1e-3, tok_per_s=12345.6, step_ms=10.0)
    shown = train.line(entry | dict(mem_mib=1234.5, left_s=125), train.Run(steps=160))
    for word in ("40/160", "25%", "1.2500 nats", "1.8034 bpb", "grad 0.500", "1.00e-03", "12,346 tok/s", "1,234 MiB"):
        assert word in shown, shown
    assert "2m05s" in shown
    first = train.line(entry | dict(tok_per_s=None, step_ms=None, mem_mib=None, left_s=None), train.Run(steps=160))
    assert "compiled" in first and "mem n/a" in first
    judged = dict(step=40, split="test", loss_nats=1.25, bpb=1.8, targets=1234)
    for rows, words in ((1, "1,234 targets in 1 row: "), (2, "1,234 targets in 2 rows: ")):
        assert words in train.line(judged | dict(eval_batch=rows), train.Run())


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
    mib, whose = plan.memory_mib()
    assert (mib, whose) == (3, "device peak") if stats == {"peak_bytes_in_use": 3 << 20} else whose == "process peak"
    assert mib > 1
    assert plan.budget_bytes("50%") == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2  # a CPU's


def test_tokens_per_second_times_wall_are_the_tokens_without_the_first_step_and_evaluations(
    tmp_path, text, monkeypatch
):
    clock, fetch, evaluate = [0.0], train.fetch, train.evaluate

    def slow(function, seconds):
        def wait(*args):
            clock[0] += seconds(*args)
            return function(*args)

        return wait

    monkeypatch.setattr(train, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(train, "fetch", slow(fetch, lambda told: 0.01))  # a step is done when its loss can be fetched
    monkeypatch.setattr(train, "evaluate", slow(evaluate, lambda *args: 5))
    spy(monkeypatch, "compile_step", slow(lambda function, args: function(*args), lambda _, args: 100 * (args[3] == 0)))
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
    outcome = call(train.main, "--eval_only", run=base.folder, data=one_txt, json=True, devices=1, **flags)
    assert outcome.code is None, outcome
    return outcome.entries()[0]


def test_an_evaluation_counts_all_1002_targets_of_1003_bytes_at_any_batch_size(base, one_txt):
    found = {rows: evaluated(base, one_txt, eval_batch=rows) for rows in (1, 2, 7)}
    assert {e["targets"] for e in found.values()} == {1002} and {e["split"] for e in found.values()} == {"valid"}
    cfg, params, *_ = train.load(base.folder)
    tokens, nats, mems = np.frombuffer(TEXT[2000:3003], np.uint8).astype(np.int32), [], txl.init_mems(cfg, 1)
    losses_of = jax.jit(txl.token_losses, static_argnames="cfg")
    for at in range(0, 1002, 8):
        batch = [tokens[None, at : at + 8], tokens[None, at + 1 : at + 9]]
        losses, mems = losses_of(params, batch[0][:, : batch[1].shape[1]], batch[1], mems, cfg)
        nats.extend(np.asarray(losses[0], np.float64))
    assert len(nats) == 1002
    assert found[1]["loss_nats"] == pytest.approx(np.mean(nats), abs=1e-5)  # the sum of all over their number
    for rows in (2, 7):
        assert found[rows]["loss_nats"] == pytest.approx(np.mean(nats), abs=0.01 * rows)  # a cold start for each row
    assert found[7]["bpb"] == pytest.approx(found[7]["loss_nats"] / math.log(2))


def test_a_run_leaves_its_curves_as_a_picture_where_matplotlib_is_installed(base):
    assert (base.folder / "loss.png").exists() == (importlib.util.find_spec("matplotlib") is not None)
    steps, judged = figures.history(base.folder)
    assert [entry["step"] for entry in steps] == list(range(1, 61)) and {e["split"] for e in judged} == {
        "valid",
        "test",
    }


def test_memory_lengths_are_evaluated_one_after_the_other_and_drawn(base, one_txt):
    run = call(train.main, "--eval_only", run=base.folder, data=one_txt, json=True, devices=1, mem_len="0,9,30")
    assert run.code is None, run
    alone = [evaluated(base, one_txt, mem_len=n) for n in (0, 9, 30)]
    assert run.entries() == alone and [entry["mem_len"] for entry in alone] == [0, 9, 30]
    assert f"jax {jax.__version__}, cpu, 1 x" in run.err and f"{base.folder / 'best.npz'}, step 60" in run.err
    assert "1,003 valid tokens" in run.err
    bars, losses = [line.count("#") for line in run.err.splitlines()[3:6]], [entry["bpb"] for entry in alone]
    assert [bar for _, bar in sorted(zip(losses, bars))] == sorted(bars) and (min(bars), max(bars)) == (1, 51)
    refused(call(train.main, data=one_txt, mem_len="0,9"), "mem_len=(0, 9)", "--eval_only")


def test_documents_are_kept_apart_in_training_and_evaluation_by_the_token_that_starts_them(tmp_path, text):
    flags = dict(TINY, data=text, steps=2, reset_on="\n")
    assert call(train.main, **flags, out=tmp_path / "run").code is None
    assert train.load(tmp_path / "run").cfg.reset_on == 10
    only = lambda **more: call(train.main, "--eval_only", run=tmp_path / "run", data=text, json=True, devices=1, **more)
    apart, joined = only().entries()[0]["loss_nats"], only(reset_on=-1).entries()[0]["loss_nats"]
    assert apart != joined and abs(apart - joined) < 0.5


def test_a_score_is_the_same_alone_and_after_anything(base, one_txt):
    first = evaluated(base, one_txt)
    evaluated(base, one_txt, split="test")
    assert evaluated(base, one_txt) == first


def test_evaluation_pads_rows_over_devices_and_changes_nothing(base, one_txt):
    alone = evaluated(base, one_txt)
    flags = dict(run=base.folder, data=one_txt, json=True, devices=4, batch=5)  # a batch of training need not divide
    spread = call(train.main, "--eval_only", **flags).entries()[0]
    assert spread["targets"] == 1002 and spread["loss_nats"] == pytest.approx(alone["loss_nats"], abs=1e-6)


def test_an_evaluation_may_be_longer_than_mem_len_and_the_trained_length_together(base, one_txt):
    longer = evaluated(base, one_txt, tgt_len=50)
    assert longer["targets"] == 1002 and longer["loss_nats"] == pytest.approx(
        evaluated(base, one_txt)["loss_nats"], abs=0.2
    )
    assert evaluated(base, one_txt, tgt_len=50, mem_len=3)["targets"] == 1002
    whole = evaluated(base, one_txt, tgt_len=334)  # a row
    assert evaluated(base, one_txt, tgt_len=2**30)["loss_nats"] == whole["loss_nats"]


def test_an_evaluation_that_no_memory_has_room_for_ends_in_one_line(base, one_txt):
    judge = lambda **flags: call(train.main, "--eval_only", run=base.folder, data=one_txt, devices=1, **flags)
    refused(judge(mem_len=10**9, eval_batch=1002), "out of memory", "--eval_batch", "--mem_len", "--dtype bfloat16")
    refused(judge(mem_len=2**31 - 1), f"mem_len={2**31 - 1}", "tgt_len=8", "less than 2**31 together")


def test_evaluation_needs_a_run_and_a_split_with_a_target(base, tmp_path, monkeypatch):
    refused(
        call(train.main, "--eval_only", data=folder_of(tmp_path, test=b"x"), run=base.folder, split="test"),
        "test split",
        "1 tokens",
    )
    monkeypatch.chdir(tmp_path)
    refused(call(train.main, "--eval_only"), "no run found", "--run")
    refused(call(train.main, "--eval_only", run="nowhere"), "nowhere")


@pytest.mark.parametrize("name", ["resume", "init", "out", "plan", "profile", "memory_budget"])
def test_flags_of_training_are_refused_in_an_evaluation_and_never_passed_over(name, base, text):
    value = {"plan": True, "memory_budget": "6GiB"}.get(name, base.folder)
    refused(call(train.main, "--eval_only", data=text, **{name: value}), f"{name}={value}", "--eval_only", "--run")


# the main job


@pytest.fixture(scope="module")
def abc(tmp_path_factory):
    """A run on abcabc..., 200 steps, told in lines for people; characters, the next checkpoint in the folder runs."""
    place = tmp_path_factory.mktemp("abc")
    (place / "abc.txt").write_bytes(b"abc" * 2000)
    flags = TINY | dict(steps=200, lr=2e-2, clip=1, log_every=50, eval_every=100, tokenizer="char")
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


def test_each_step_empties_the_memory_of_a_share_of_the_rows():
    cfg, seen = txl.Config(n_layer=1, n_head=1, d_model=6, d_head=4, d_inner=5, mem_len=9), []
    ids = np.zeros((1, 64, 4), np.int32)
    for share in (0.25, 0.0):
        run = train.Run(batch=64, tgt_len=4, mem_reset=share, optimizer="adam")
        step = train.compile_step(cfg, run, 1)
        for number in (0, 1, 1):
            state = train.fresh_state(cfg, run, None, 1)
            full = state._replace(mems=state.mems._replace(fill=state.mems.fill + 9))
            seen.append(np.asarray(step(full, ids, ids, np.int32(number))[0].mems.fill)[0])
    assert {*np.concatenate(seen[:3])} == {4, 9} and all(6 < (fill == 4).sum() < 26 for fill in seen[:3])
    assert (seen[1] == seen[2]).all() and (seen[0] != seen[1]).any() and (np.array(seen[3:]) == 9).all()


def test_the_console_tells_each_logged_step_each_evaluation_and_at_the_end_a_sample_and_the_folder(abc):
    lines = abc[2].out.splitlines()
    assert [re.match(r"step (\d+)(/200)?", line)[1] for line in lines[:9]] == "1 50 100 100 150 200 200 200 200".split()
    at = lines.index("sample:")
    assert len(lines[at + 1]) == 200 and "abcabcabc" in lines[at + 1]
    assert lines[-1] == "checkpoints and log in runs/abc-1"


def test_the_sample_is_written_whatever_the_encoding_of_standard_output(tmp_path):
    (tmp_path / "e.txt").write_bytes("é—é—é\n".encode() * 40)
    flags = dict(TINY, data=tmp_path / "e.txt", out=tmp_path / "é", tokenizer="char", steps=1, n_layer=1, tgt_len=5)
    shown = io.BytesIO()
    with contextlib.redirect_stdout(io.TextIOWrapper(shown, encoding="ascii")):
        train.main(argv(**flags))
        text = shown.getvalue().decode().partition("sample:\n")[2]
    assert text.endswith(f"\ncheckpoints and log in {tmp_path / 'é'}\n") and text.count("é") > 10


def test_init_goes_on_from_weights_with_their_vocabulary_on_other_data(abc, tmp_path, monkeypatch):
    place, flags, _ = abc
    (tmp_path / "other.txt").write_bytes(b"bca" * 300 + b"b" * 30)  # the last part has one symbol only
    monkeypatch.chdir(place)
    del flags["tokenizer"]
    flags = {k: v for k, v in flags.items() if k in train.Run.__dataclass_fields__}
    interrupt(monkeypatch, 1, signal.SIGINT)
    outcome = call(train.main, data=tmp_path / "other.txt", init="runs/abc-1", out=tmp_path / "run", **flags)
    assert outcome.code == 130, outcome
    meta, arrays = raw(tmp_path / "run" / "last.npz")
    assert meta["vocab"] == {"kind": "char", "symbols": ["a", "b", "c"]} and meta["config"]["n_token"] == 3
    assert meta["run"]["step"] == 1 and arrays["opt/1/count"] == 1
    assert losses(tmp_path / "run")[0] < 0.3 < math.log(3)  # a cold start among what was learnt


def test_resume_and_init_refuse_another_tokenizer_than_the_checkpoint_s(abc, base, text, monkeypatch):
    monkeypatch.chdir(abc[0])
    refused(
        call(train.main, data="abc.txt", init="runs/abc-1", tokenizer="byte"), "tokenizer: checkpoint char, asked byte"
    )
    refused(call(train.main, resume=base.folder, tokenizer="char"), "tokenizer: checkpoint byte, asked char")


def test_a_character_that_the_checkpoint_does_not_know_is_named_before_fine_tuning(abc, tmp_path, monkeypatch):
    (tmp_path / "d.txt").write_bytes(b"abcd" * 300)
    monkeypatch.chdir(abc[0])
    refused(call(train.main, data=tmp_path / "d.txt", init="runs/abc-1"), "'d'", "train split", "character index 3")


# run folders


def test_runs_take_the_first_free_name_and_sampling_the_newest(tmp_path, text, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "text-2").mkdir(parents=True)
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            interrupt(patch, 1, signal.SIGINT)
            call(train.main, data=text, **BASE)
    assert sorted(p.parent.name for p in tmp_path.glob("runs/*/last.npz")) == ["text-1", "text-3"]
    assert checkpoint.newest_run() == (tmp_path / "runs" / "text-3").relative_to(tmp_path)
    assert "text-3" in call(sample.main, n_tokens=1).err


def test_a_folder_that_holds_a_run_is_refused_without_resume(base, text, tmp_path):
    before = (base.folder / "log.jsonl").read_bytes()
    refused(call(train.main, data=text, out=base.folder, **BASE), base.folder, "--resume")
    assert (base.folder / "log.jsonl").read_bytes() == before
    refused(call(train.main, data=text, out=text, **BASE), "out", "is a file")


def test_best_is_taken_before_last_and_a_file_for_itself(tmp_path):
    refused(call(sample.main, run=tmp_path), tmp_path, "best.npz or last.npz")
    (tmp_path / "last.npz").touch()
    assert checkpoint.find(tmp_path).name == "last.npz"
    (tmp_path / "best.npz").touch()
    assert checkpoint.find(tmp_path).name == "best.npz"
    assert checkpoint.find(tmp_path / "last.npz").name == "last.npz"


def test_best_stays_the_evaluation_with_the_lowest_loss_also_after_a_resume_and_last_is_the_last(tmp_path):
    noise = np.random.default_rng(4).integers(0, 256, 300, np.uint8).tobytes()  # the better trained, the worse
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, 45, signal.SIGINT)
        call(train.main, data=folder_of(tmp_path, valid=noise), out=tmp_path / "run", **BASE)
    assert call(train.main, resume=tmp_path / "run", devices=1, json=True).code is None
    entries = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    found = {e["step"]: e["loss_nats"] for e in entries if e.get("split") == "valid" and e["targets"] == 100}
    assert found[20] < found[40] < found[60]
    best, last = (raw(tmp_path / "run" / name)[0]["run"] for name in ("best.npz", "last.npz"))
    assert (best["step"], last["step"]) == (20, 60) and best["best"] == last["best"] == found[20]


# resume


@pytest.fixture(scope="module")
def halves(tmp_path_factory, text):
    """The run of `base`, interrupted in step 25 and resumed; (folder, first outcome, second outcome)."""
    folder = tmp_path_factory.mktemp("halves") / "run"
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, 25, signal.SIGINT)
        first = call(train.main, data=text, out=folder, **BASE)
    meta = raw(folder / "last.npz")[0]
    return folder, first, meta, call(train.main, resume=folder, devices=1, json=True)


def test_a_run_interrupted_at_step_25_and_resumed_is_the_whole_run_bit_for_bit_with_dropout_on(base, halves):
    folder, _, meta, second = halves
    assert meta["run"]["step"] == 25 and second.code is None, second
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    steps = [e for e in entries if "loss_nats" in e and "split" not in e]
    whole = log(base.folder)[1]
    for key in ("step", "loss_nats", "lr", "grad_norm"):
        assert [e[key] for e in steps] == [e[key] for e in whole], key
    assert log(folder)[0]["resumed_at"] == 25 and log(folder)[2] == log(base.folder)[2][1:]
    for name in ("last.npz", "best.npz"):
        (got_meta, got), (want_meta, want) = raw(folder / name), raw(base.folder / name)
        assert got.keys() == want.keys() and all(got[k].tobytes() == want[k].tobytes() for k in want)
        assert [got_meta["run"][k] for k in ("step", "cursor", "best")] == [
            want_meta["run"][k] for k in ("step", "cursor", "best")
        ]


def test_sigint_saves_says_how_to_go_on_and_exits_with_130(halves):
    folder, first, _, _ = halves
    assert (
        first.code == 130
        and first.err.splitlines()[-1] == f"stopped at step 25: go on with python train.py --resume {folder}"
    )


def test_sigterm_saves_and_exits_with_143_and_handlers_are_put_back(tmp_path, text, monkeypatch):
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    interrupt(monkeypatch, 3, signal.SIGTERM)
    assert call(train.main, data=text, out=tmp_path / "run", **BASE).code == 143
    assert raw(tmp_path / "run" / "last.npz")[0]["run"]["step"] == 3
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("at, step, judged, way", [(2, 3, 0, "--resume"), (13, 6, 2, "--eval_only --run")])
def test_a_signal_ends_an_evaluation_at_its_next_step_and_all_is_saved(
    at, step, judged, way, tmp_path, text, monkeypatch
):
    totals, held = [], []

    def seen(function, args):
        out = function(*args)
        totals.append(weakref.ref(out[0]))
        held.append(sum(total() is not None for total in totals))
        if len(totals) == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return out

    spy(monkeypatch, "make_eval", seen)
    outcome = call(train.main, data=text, out=tmp_path / "run", **BASE | dict(steps=6, eval_every=3))
    assert outcome.code == 143 and len(totals) == at and max(held) <= 2  # of a long text, too
    assert f"stopped at step {step}: go on with python train.py {way} {tmp_path / 'run'}" in outcome.err
    assert raw(tmp_path / "run" / "last.npz")[0]["run"]["step"] == step and len(log(tmp_path / "run")[2]) == judged


def test_resume_auto_starts_in_an_empty_folder_or_one_without_a_checkpoint_and_then_goes_on(
    tmp_path, text, monkeypatch
):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.jsonl").write_text('{"versions": {}}\n')  # of a run that was killed before it saved
    for flags in (dict(out=tmp_path / "run"), dict(resume=tmp_path / "run")):
        refused(call(train.main, data=text, **flags), "checkpoint", f"--resume auto --out {tmp_path / 'run'}")
    for step, first in ((2, 1), (3, 3)):
        with pytest.MonkeyPatch.context() as patch:
            interrupt(patch, step - first + 1, signal.SIGINT)
            assert call(train.main, resume="auto", data=text, out=tmp_path / "run", **BASE).code == 130
        assert raw(tmp_path / "run" / "last.npz")[0]["run"]["step"] == step
        assert log(tmp_path / "run")[1][0]["step"] == first
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, 1, signal.SIGINT)
        assert call(train.main, resume="auto", data=text, out=tmp_path / "empty", **BASE).code == 130


def resumed(base, tmp_path, monkeypatch, step, number, **flags):
    """Resumes a copy of base's run for some steps; its folder and the outcome."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("last.npz", "log.jsonl"):
        (folder / name).write_bytes((base.folder / name).read_bytes())
    interrupt(monkeypatch, number, signal.SIGINT)
    outcome = call(train.main, resume=folder, devices=1, steps=STEPS + step, json=True, **flags)
    return folder, outcome


def test_tgt_len_mem_len_and_batch_may_change_on_resume_and_the_log_says_that_memory_starts_empty(
    base, tmp_path, monkeypatch
):
    folder, outcome = resumed(base, tmp_path, monkeypatch, 9, 2, batch=6, mem_len=5, tgt_len=7)
    assert outcome.code == 130 and "memory starts empty" in outcome.err
    meta, arrays = raw(folder / "last.npz")
    assert arrays["mems/h"].shape == (2, 6, 5, 16) and meta["run"]["step"] == STEPS + 2
    assert meta["run"]["cursor"] == STEPS * 8 + 2 * 7
    assert losses(folder)[0] < losses(base.folder)[0] - 1  # trained weights


@pytest.mark.parametrize("change", [{"batch": 6}, {"mem_len": 5}, {"dtype": "bfloat16"}, {"tgt_len": 7}])
def test_memory_starts_empty_where_its_shape_or_type_changes_and_is_kept_where_not(change, base):
    source = train.load(base.folder / "last.npz")
    cfg = replace(source.cfg, **{k: v for k, v in change.items() if k in ("mem_len", "dtype")})
    run = train.Run(**{k: v for k, v in TINY.items() if k in ("batch", "tgt_len", "optimizer")} | {"steps": STEPS})
    run = replace(run, **{k: v for k, v in change.items() if k in ("batch", "tgt_len")})
    host, cursor = train.restore(source, cfg, run)
    assert host.mems.h.shape == (2, run.batch, cfg.mem_len, 16) and host.mems.h.dtype == cfg.dtype and cursor == 480
    assert (host.mems.fill == (9 if "tgt_len" in change else 0)).all() and host.mems.fill.shape == (run.batch,)
    assert host.mems.h.any() == ("tgt_len" in change)


def test_a_float32_run_goes_on_in_bfloat16_from_its_masters_and_back(base, tmp_path, monkeypatch):
    folder, outcome = resumed(base, tmp_path, monkeypatch, 30, 25, dtype="bfloat16")
    assert outcome.code == 130 and "memory starts empty" in outcome.err
    found = losses(folder)
    assert len(found) == 25 and all(map(math.isfinite, found)) and abs(found[0] - losses(base.folder)[-1]) < 0.7
    meta, arrays = raw(folder / "last.npz")
    assert arrays["mems/h"].dtype == np.uint16 and meta["dtypes"] == {"mems/h": "bfloat16"}
    kept = {
        k: a.dtype.name for k, a in arrays.items() if k not in ("mems/h", "mems/fill", "opt/1/count", "opt/3/count")
    }
    assert set(kept.values()) == {"float32"}
    want = train.named({"mems": jax.eval_shape(lambda: txl.init_mems(txl.Config(**meta["config"]), 4))})
    mems = checkpoint.read(folder / "last.npz", lambda meta: want)[1]
    assert mems["mems/h"].dtype == ml_dtypes.bfloat16 and np.isfinite(mems["mems/h"].astype(np.float32)).all()
    monkeypatch.undo()
    interrupt(monkeypatch, 1, signal.SIGINT)
    again = call(train.main, resume=folder, devices=1, json=True)
    assert again.code == 130 and "memory starts empty" not in again.err and abs(losses(folder)[0] - found[-1]) < 0.5


def test_a_resumed_run_may_be_evaluated_on_other_data_and_fine_tuned_runs_resumed(
    base, halves, one_txt, tmp_path, text
):
    assert evaluated(type("Base", (), {"folder": halves[0]}), one_txt)["targets"] == 1002
    for step in (1, 1):
        with pytest.MonkeyPatch.context() as patch:
            interrupt(patch, step, signal.SIGINT)
            start = (
                dict(resume=tmp_path / "run")
                if (tmp_path / "run").exists()
                else dict(init=base.folder, out=tmp_path / "run")
            )
            outcome = call(
                train.main, data=text, **start, **{k: BASE[k] for k in ("devices", "steps", "json", "batch", "tgt_len")}
            )
        assert outcome.code == 130, outcome
    assert raw(tmp_path / "run" / "last.npz")[0]["run"]["step"] == 2


def test_resume_refuses_another_size_naming_checkpoint_and_asked(base):
    refused(call(train.main, resume=base.folder, n_layer=3), "n_layer: checkpoint 2, asked 3")
    refused(call(train.main, init=base.folder, data="x", d_model=18), "x: no such file")
    refused(call(train.main, resume=base.folder, dtype="float64"), "dtype=float64", "JAX_ENABLE_X64=1", "float32")
    refused(call(train.main, resume=base.folder, n_token=300), "n_token: checkpoint 256, asked 300")


def test_resume_refuses_other_data_and_names_init(base, tmp_path):
    (tmp_path / "other.txt").write_bytes(TEXT[::-1])
    refused(call(train.main, resume=base.folder, data=tmp_path / "other.txt"), "other data", f"--init {base.folder}")


def test_resume_refuses_a_run_that_is_complete(base):
    refused(call(train.main, resume=base.folder), f"at step {STEPS} of {STEPS}", "--steps")


@pytest.mark.parametrize("flag", ["resume", "init", "run"])
def test_a_path_without_a_checkpoint_is_an_error_and_never_a_fresh_start(flag, tmp_path, text, monkeypatch):
    monkeypatch.chdir(tmp_path)
    only = ["--eval_only"] if flag == "run" else []
    for path in (tmp_path / "nowhere", tmp_path):
        refused(call(train.main, *only, data=text, **{flag: path}), path, "no checkpoint")
    assert not list(tmp_path.iterdir())


def test_the_newest_checkpoint_is_the_one_of_the_highest_step_whatever_its_name(base, tmp_path):
    meta, arrays = raw(base.folder / "last.npz")
    for name, step in (("last.npz", 9), ("best.npz", 10), ("a.npz", 2)):
        meta["run"]["step"] = step
        write_raw(tmp_path / name, meta, arrays)
    assert checkpoint.newest(tmp_path).endswith("best.npz")


# checkpoints


def test_every_missing_unexpected_and_misshaped_array_is_named(base, tmp_path):
    meta, arrays = raw(base.folder / "last.npz")
    del arrays["params/u"], arrays["params/layers/b_1"]
    arrays["params/extra"] = np.zeros(3, np.float32)
    arrays["params/v"] = arrays["params/v"].T
    write_raw(tmp_path / "last.npz", meta, arrays)
    wrong = (
        "params/u missing",
        "params/layers/b_1 missing",
        "params/extra unexpected",
        "params/v is (6, 2), wanted (2, 6)",
    )
    for main, flag in ((sample.main, "run"), (train.main, "resume"), (train.main, "init")):
        refused(call(main, **{flag: tmp_path}), tmp_path / "last.npz", *wrong)


def test_optimizer_state_and_memory_that_do_not_fit_are_named_on_resume(base, tmp_path):
    meta, arrays = raw(base.folder / "last.npz")
    meta["run"]["step"] = 7
    del arrays["opt/1/mu/v"]
    arrays["mems/h"] = arrays["mems/h"][:, :, 1:]
    write_raw(tmp_path / "last.npz", meta, arrays)
    refused(
        call(train.main, resume=tmp_path, devices=1),
        "opt/1/mu/v missing",
        "mems/h is (2, 4, 8, 16), wanted (2, 4, 9, 16)",
    )


def saved(path):
    """A small checkpoint: (its arrays, what to ask of it)."""
    rng = np.random.default_rng(3)
    arrays = {
        "params/w": rng.standard_normal((3, 5), np.float32),
        "params/layers/b": rng.standard_normal(7, np.float32),
    }
    arrays |= {"mems/h": rng.standard_normal((2, 3)).astype(ml_dtypes.bfloat16), "opt/count": np.int32(9).reshape(())}
    checkpoint.save(path, arrays, {"run": {"step": 3}})
    return arrays, lambda meta: arrays


def test_arrays_and_metadata_come_back_bit_for_bit_bfloat16_and_scalars_too(tmp_path):
    arrays, want = saved(tmp_path / "c.npz")
    meta, found = checkpoint.read(tmp_path / "c.npz", want)
    assert meta["run"] == {"step": 3} and found.keys() == arrays.keys()
    for name in arrays:
        assert found[name].dtype == arrays[name].dtype and found[name].shape == arrays[name].shape
        assert found[name].tobytes() == arrays[name].tobytes() and found[name].flags.writeable
    assert [p.name for p in tmp_path.iterdir()] == ["c.npz"]  # no temporary file


def test_a_truncated_or_flipped_file_is_refused_by_name_or_gives_the_right_arrays(tmp_path):
    arrays, want = saved(tmp_path / "c.npz")
    data, refusals = (tmp_path / "c.npz").read_bytes(), 0
    damaged = [data[: len(data) * i // 50] for i in range(50)]
    damaged += [
        data[:at] + bytes([data[at] ^ bits]) + data[at + 1 :] for at in range(0, len(data), 5) for bits in (1, 0xFF)
    ]
    for content in damaged:
        (tmp_path / "d.npz").write_bytes(content)
        try:
            _, found = checkpoint.read(tmp_path / "d.npz", want)
        except ValueError as e:
            assert str(tmp_path / "d.npz") in str(e) and "\n" not in str(e)
            refusals += 1
        else:  # a byte that nothing depends on
            assert all(found[name].tobytes() == arrays[name].tobytes() for name in arrays)
    assert refusals > 50 + 2 * len(arrays) + 100


def test_a_save_that_fails_leaves_the_old_checkpoint_and_no_temporary_file(tmp_path, monkeypatch):
    saved(tmp_path / "c.npz")
    before = (tmp_path / "c.npz").read_bytes()
    with pytest.raises(TypeError):
        checkpoint.save(tmp_path / "c.npz", {"a": np.zeros(3)}, {"run": object()})
    with pytest.raises(OSError):
        checkpoint.save(tmp_path / "no" / "c.npz", {"a": np.zeros(3)}, {})
    monkeypatch.setattr(os, "fsync", lambda number: os.write(-1, b""))  # as on a full disk
    with pytest.raises(OSError):
        checkpoint.save(tmp_path / "c.npz", {"a": np.zeros(3)}, {})
    assert (tmp_path / "c.npz").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


class Bomb:
    def __reduce__(self):
        return (open, ("exploded", "w"))


def test_pickles_are_neither_written_nor_run(tmp_path, base, monkeypatch):
    monkeypatch.chdir(tmp_path)
    meta, arrays = raw(base.folder / "last.npz")  # read with allow_pickle=False: all of it is plain
    bomb = np.empty((2, 6), object)
    bomb[:] = Bomb()
    write_raw(tmp_path / "last.npz", meta, arrays | {"params/u": bomb})
    refused(call(sample.main, run=tmp_path), "last.npz", "params/u")
    assert not (tmp_path / "exploded").exists()
    np.save(tmp_path / "x.npy", bomb, allow_pickle=True)
    np.load(tmp_path / "x.npy", allow_pickle=True)
    assert (tmp_path / "exploded").exists()  # the bomb was a real one
    files = [p for p in (prepare.Path(train.__file__).parent).glob("*.py")] + list(
        prepare.Path(prepare.__file__).parent.glob("*.py")
    )
    assert len(files) > 8 and not [
        p for p in files if re.search(r"import pickle\b|allow_pickle=True|np.load", p.read_text())
    ]


# numbers


@pytest.mark.parametrize("step", [5, 7])
def test_nan_stops_the_run_at_its_step_and_leaves_the_last_good_checkpoint(step, tmp_path, text, monkeypatch):
    """Parameters are broken before step 5, or by step 6, so that the evaluation after it is the first to see it."""
    for there in ("has no checkpoint yet", "keeps its last good checkpoint"):
        with pytest.raises(SystemExit, match=f"loss nan at step 5: stopped; {tmp_path} {there}.*--lr"):
            train.finite(5, tmp_path, loss=math.nan)
        (tmp_path / "last.npz").touch()
    count, good = [0], []
    broken = lambda state: state._replace(params=state.params | {"u": state.params["u"] * jnp.nan})

    def seen(function, args):
        count[0] += 1
        if count[0] == 5:
            good.append((tmp_path / "run" / "last.npz").read_bytes())
        state, told = function(broken(args[0]) if count[0] == step == 5 else args[0], *args[1:])
        return (broken(state) if count[0] == 6 and step == 7 else state), told

    spy(monkeypatch, "compile_step", seen)
    every = 2 if step == 7 else 4
    outcome = call(train.main, data=text, out=tmp_path / "run", **BASE | {"eval_every": every})
    refused(outcome, "nan", f"at step {5 if step == 5 else 6}", tmp_path / "run", "last good checkpoint", "--lr")
    assert (tmp_path / "run" / "last.npz").read_bytes() == good[0]
    assert raw(tmp_path / "run" / "last.npz")[0]["run"]["step"] == 4
    assert all(np.isfinite(a).all() for a in raw(tmp_path / "run" / "last.npz")[1].values())
    assert len(losses(tmp_path / "run")) == (4 if step == 5 else 6)


# data that cannot be used


def test_a_training_text_too_short_is_refused_with_what_it_needs_and_one_byte_more_works(tmp_path, monkeypatch):
    need = TINY["batch"] * TINY["tgt_len"] + 1
    short = folder_of(tmp_path, train=TEXT[: need - 1])
    refused(
        call(train.main, data=short, out=tmp_path / "a", **BASE),
        f"{need - 1} tokens",
        f"at least {need}",
        "batch=4",
        "tgt_len=8",
    )
    assert not (tmp_path / "a").exists()
    interrupt(monkeypatch, 1, signal.SIGINT)
    assert call(train.main, data=folder_of(tmp_path, train=TEXT[:need]), out=tmp_path / "a", **BASE).code == 130


def test_ten_bytes_and_a_split_without_a_target_are_refused(tmp_path):
    (tmp_path / "short.txt").write_bytes(b"0123456789")
    refused(call(train.main, data=tmp_path / "short.txt", **BASE), "9 tokens", "at least 33")
    for split in ("valid", "test"):
        data = folder_of(tmp_path, **{"valid": b"ab", "test": b"ab", split: b"a"})
        refused(call(train.main, data=data, **BASE), f"{split} split has 1 tokens", "at least 2")


@pytest.mark.parametrize(
    "content, words", [(None, "no such file"), (b"", "empty"), (b"\n\n \n", ""), ("folder", "train.txt")]
)
def test_data_that_is_missing_empty_blank_or_a_bare_folder_is_refused_in_one_line(content, words, tmp_path):
    path = tmp_path / "in.txt"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    refused(call(train.main, data=path, out=tmp_path / "run", **BASE), path, words)
    assert not (tmp_path / "run").exists()


def test_a_symbol_that_only_the_validation_part_has_is_refused_with_its_place(tmp_path):
    data = folder_of(tmp_path, valid=b"alpha be\nQ")
    refused(call(train.main, data=data, tokenizer="char", **BASE), "valid split", "'Q'", "line 2", "--tokenizer byte")


@pytest.mark.parametrize("bad", [3, 255])
def test_prepared_ids_outside_the_vocabulary_are_found_before_anything_compiles(bad, tmp_path):
    data = folder_of(tmp_path, train=b"abc" * 50, valid=b"abc", test=b"abc")
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


def test_the_group_of_devices_comes_with_the_sharding_that_a_run_was_trained_with(base, tmp_path, text):
    meta, arrays = raw(base.folder / "last.npz")
    meta["run"]["flags"] |= dict(shard="params", shard_group=2)
    write_raw(tmp_path / "last.npz", meta, arrays)
    settled = lambda **flags: train.settle(dict(data=str(text)) | flags)[1]
    shared = lambda run: (run.shard, run.shard_group)
    resume = dict(resume=str(tmp_path))
    assert shared(settled(**resume)) == ("params", 2) and shared(settled(**resume, shard_group=4)) == ("params", 4)
    assert shared(settled(**resume, shard="none")) == ("none", 0)
    assert shared(settled(eval_only=True, run=str(tmp_path), shard_group=3)) == ("params", 3)
    refused(call(train.main, steps=STEPS + 1, devices=3, batch=3, **resume), "shard_group=2 does not divide 3 devices")


def test_another_optimizer_on_resume_is_one_line(base, tmp_path):
    outcome = call(train.main, resume=base.folder, steps=STEPS + 1, optimizer="muon")
    refused(outcome, "optimizer: checkpoint adamw, asked muon")
