"""The README's worked changes fit this tree, stay small, and leave a model that trains and reads."""

import json

import conftest
import jax
import numpy as np
import pytest

from bench import hacks
from train import Run

CHANGES = hacks.changes()
KNOWN = {*hacks.PLAIN, *CHANGES}


def test_there_are_five_changes_of_at_most_20_lines():
    assert len(CHANGES) == 5
    assert all(0 < hacks.changed_lines(diff) <= 20 for diff in CHANGES.values())


def patched(name, tmp_path, monkeypatch):
    """Module `step` of a copy with the change, whose parameters `make_params` now makes."""
    step = hacks.load(hacks.copy(tmp_path / "tree", CHANGES[name]), "step")
    assert step.txl is not conftest.txl
    monkeypatch.setattr(conftest, "txl", step.txl)
    cfg = step.txl.Config(n_token=11, n_layer=1, n_head=2, d_model=8, d_head=6, d_inner=12, mem_len=10)
    return step, cfg, conftest.make_params(cfg)


@pytest.mark.parametrize("name", [name for name, diff in CHANGES.items() if "+++ b/txl.py" in diff])
def test_a_changed_model_gives_the_same_losses_in_training_and_by_the_cache(name, tmp_path, monkeypatch):
    step, cfg, params = patched(name, tmp_path, monkeypatch)
    txl, T = step.txl, 4
    ids = conftest.make_ids(cfg, 3, 5 * T + 1)

    @jax.jit
    def train(params, ids, targets, mems):
        return txl.token_losses(params, ids, targets, mems, cfg)

    @jax.jit
    def read(params, ids, targets, cache):
        hidden, cache = txl.read(params, ids, cache, cfg)
        return txl.nats(params, hidden, targets, cfg), cache

    mems, cache = txl.init_mems(cfg, 3), txl.init_cache(params, cfg, 3)
    for at in range(0, 5 * T, T):
        batch, before = (ids[:, at : at + T], ids[:, at + 1 : at + 1 + T]), cache
        losses, mems = train(params, *batch, mems)
        found, cache = read(params, *batch, before)
        assert conftest.worst(losses, found) < 1e-5  # float32, in another order
    alone, _ = read(params, batch[0][:, :1], batch[1][:, :1], before)  # as text is written
    assert conftest.worst(losses[:, :1], alone) < 1e-5


@pytest.mark.parametrize("name", [name for name, diff in CHANGES.items() if "+++ b/step.py" in diff])
def test_a_changed_optimizer_makes_finite_updates(name, tmp_path, monkeypatch):
    step, _, params = patched(name, tmp_path, monkeypatch)
    assert {key for key, found in step.matrices(params)["layers"].items() if found} == {
        key for key in params["layers"] if key.startswith("w_")
    }
    tx = step.optimizer(Run(optimizer="adamw"))
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(updates))


def test_a_diff_of_other_lines_is_refused(tmp_path):
    with pytest.raises(ValueError, match="want .6, 6. lines that stand there once, found 0"):
        hacks.copy(tmp_path / "tree", CHANGES["Lion"].replace("scale_by_adam", "scale_by_nothing"))


def test_the_table_holds_what_was_measured():
    path = hacks.ROOT / "bench" / "results" / "hacks.jsonl"
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    runs = {entry["change"]: entry["flags"] for entry in entries if entry.get("change") in KNOWN}
    assert runs == {name: hacks.FLAGS.get(name, {}) for name in KNOWN}
    for row in hacks.table(entries):
        assert row in (hacks.ROOT / "README.md").read_text(encoding="utf-8")
