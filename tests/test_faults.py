"""Nothing is lost: damaged files, full disks, stops, two runs in a folder, steps that are not finite."""

import errno
import math
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import NOISY, call, log, raw, refused, saved_run, spy, stopped

import sample
import train
import txl
from data import checkpoint

pytestmark = pytest.mark.usefixtures("shared_steps")
BASE = NOISY | dict(steps=12, eval_every=2)


@pytest.fixture
def fit(tmp_path, text):
    """fit(): the Outcome of a training run in `fit.folder`."""

    def fit():
        return call(train.main, **fit.flags)

    fit.folder = tmp_path / "run"
    fit.flags = dict(data=text, out=fit.folder, **BASE)
    return fit


def test_a_damaged_file_ends_a_script_in_one_line_with_the_good_one_beside_it(tmp_path):
    for name in ("best.npz", "last.npz"):
        checkpoint.save(tmp_path / name, {}, {"run": {"step": 1}})
    (tmp_path / "best.npz").write_bytes((tmp_path / "best.npz").read_bytes()[:-30])
    for main, flag in ((sample.main, "run"), (train.main, "init")):
        refused(call(main, **{flag: tmp_path}), tmp_path / "best.npz", "damaged", f"give {tmp_path / 'last.npz'}")


def test_a_run_in_a_folder_that_another_one_writes_to_is_refused(fit):
    fit.folder.mkdir()
    with checkpoint.lock_folder(fit.folder):
        refused(fit(), f"{fit.folder} is in use by process {os.getpid()}: ")
    assert not list(fit.folder.iterdir())


def test_a_full_disk_ends_the_run_in_one_line_and_leaves_the_checkpoint_before(fit, monkeypatch):
    left, fsync = iter(range(2)), os.fsync  # last.npz and best.npz of step 2

    def full(number):
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(number)

    monkeypatch.setattr(os, "fsync", full)
    refused(fit(), fit.folder / "best.npz", "not saved", os.strerror(errno.ENOSPC))
    assert sorted(p.name for p in fit.folder.iterdir()) == ["best.npz", "last.npz", "log.jsonl"]
    assert saved_run(fit.folder)["step"] == 2


def test_a_stop_while_the_step_compiles_ends_the_run_after_its_first_step_with_a_checkpoint(fit, monkeypatch):
    compile_step = train.compile_train_step

    stop = lambda *args: os.kill(os.getpid(), signal.SIGTERM) or compile_step(*args)
    monkeypatch.setattr(train, "compile_train_step", stop)
    outcome = fit()
    assert outcome.code == 143 and f"go on with python train.py --resume {fit.folder}" in outcome.err
    assert saved_run(fit.folder)["step"] == 1


def with_nan(monkeypatch, numbers, states):
    """Puts NaN into the memory that these steps see; states: gets a copy of what each step leaves."""

    def step(compiled, args):
        state, *rest = args
        if rest[-1] + 1 in numbers:
            state = state._replace(mems=txl.Mems(state.mems.h * jnp.nan, state.mems.fill * 0 + 9))
        state, metrics = compiled(state, *rest)
        states.append(jax.tree.map(np.asarray, (state.params, state.opt_state, state.mems)))
        return state, metrics

    spy(monkeypatch, "compile_train_step", step)


def test_steps_that_are_not_finite_are_skipped_up_to_n_in_a_row_and_change_only_counts_of_steps(fit, monkeypatch):
    states = []
    with_nan(monkeypatch, {4, 5, 8}, states)
    outcome = fit()
    assert outcome.code is None, outcome
    for kept, skipped in ((3, 5), (7, 8)):
        a, b = (jax.tree.leaves(states[number - 1][:2]) for number in (kept, skipped))
        assert len(a) > 40 and all(x.tobytes() == y.tobytes() for x, y in zip(a, b) if x.dtype != np.int32)
        assert not states[skipped - 1][2].h.any() and not states[skipped - 1][2].fill.any()
    steps = log(fit.folder)[1]
    assert [(e["step"], e["skipped"]) for e in steps if "skipped" in e] == [(4, 1), (5, 2), (8, 1)]
    counts = [a for name, a in raw(fit.folder / "last.npz")[1].items() if name.endswith("count")]
    assert counts and all(count == 12 for count in counts)  # so that the logged rate is the one that was used


@pytest.mark.parametrize("allowed", [0, 2])
def test_one_more_step_in_a_row_that_is_not_finite_stops_the_run_there(allowed, fit, monkeypatch):
    with_nan(monkeypatch, {5, 6, 7}, [])
    fit.flags["skip_nonfinite"] = allowed
    refused(fit(), "loss nan", f"at step {5 + allowed}", fit.folder, "last good checkpoint", "--lr")
    assert saved_run(fit.folder)["step"] == 4 + allowed
    assert all(np.isfinite(a).all() for a in raw(fit.folder / "last.npz")[1].values())
    assert all(math.isfinite(entry.get("loss_nats", 0)) for entry in log(fit.folder)[1])


def test_an_evaluation_that_is_not_finite_stops_the_run_before_it_saves(fit, monkeypatch):
    evaluate = train.evaluate
    monkeypatch.setattr(train, "evaluate", lambda step, *args: (math.nan, evaluate(step, *args)[1]))
    refused(fit(), "valid_loss nan at step 2", fit.folder, "has no checkpoint yet")
    assert [path.name for path in fit.folder.iterdir()] == ["log.jsonl"]


class Death(BaseException):
    """Ends a process that can do nothing more about it."""


def die_after(patch, n):
    """The process dies before its (n + 1)-th operation on files of those that a save makes; nothing is tidied up."""
    left = iter(range(n))

    def dying(operation, *args, **options):
        if next(left, None) is None:
            raise Death
        return operation(*args, **options)

    for name in ("fsync", "replace", "unlink"):
        patch.setattr(os, name, partial(dying, getattr(os, name)))
    patch.setattr(Path, "unlink", lambda path, **options: os.unlink(path))


def test_no_moment_of_death_while_saving_loses_the_best_weights(fit, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "evaluate", lambda *args: (2.0, 100))
        assert stopped(4, **fit.flags).code == 130
    save = checkpoint.save
    for n in range(9):
        folder = tmp_path / str(n)
        shutil.copytree(fit.folder, folder)
        with pytest.MonkeyPatch.context() as patch:

            def dying(*args):
                patch.setattr(checkpoint, "save", save)
                die_after(patch, n)
                save(*args)

            patch.setattr(train, "evaluate", lambda *args: (1.0, 100))  # at step 6: the best
            patch.setattr(checkpoint, "save", dying)
            try:
                call(train.main, resume=folder, devices=1, json=True)
                break
            except Death:
                pass
        latest = checkpoint.load(checkpoint.latest_checkpoint(folder))
        best = checkpoint.load(folder / "best.npz")
        assert latest.run["best"] == best.run["best"] == {2: 2.0, 6: 1.0}[best.run["step"]], n
    assert n >= 4  # a save of two files: two times a file on the disk and a new name


def test_only_the_weight_matrices_of_layers_decay_by_adamw_and_by_muon():
    cfg = txl.Config(n_token=11, n_layer=1, n_head=2, d_model=16, d_head=6, d_inner=20, cutoffs=(5,), div_val=2)
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), txl.param_shapes(cfg))
    zeros = jax.tree.map(np.zeros_like, params)
    for optimizer, most in (("adam", 0), ("adamw", 7), ("muon", 7)):
        run = train.TrainConfig(optimizer=optimizer, weight_decay=0.5, lr=0.1, warmup=1, schedule="constant")
        tx = train.make_optimizer(run, train.Layout(1))
        updates = jax.jit(lambda params, tx=tx: tx.update(zeros, tx.init(params), params)[0])(params)
        decayed = {name for name, leaf in checkpoint.flatten(updates).items() if np.abs(leaf).max() > 1e-3}
        assert decayed == {f"layers/w_{name}" for name in "qkvro12"[:most]}, optimizer
