"""Each diff of tools/hacks fits this tree and leaves a model that trains and reads."""

import importlib.util
import sys

import conftest
import jax
import numpy as np
import pytest

from tools.bench import hacks


def load(folder, name, monkeypatch):
    """Module `name` of a copy, in place of this tree's."""
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", hacks.read_diffs())
def test_a_diff_applies_the_cache_still_computes_what_training_does_and_lion_is_finite(name, tmp_path, monkeypatch):
    folder = hacks.copy_tree(tmp_path / "tree", hacks.read_diffs()[name])
    txl, train = (load(folder, module, monkeypatch) for module in ("txl", "train"))
    monkeypatch.setattr(conftest, "txl", txl)
    cfg, T = txl.Config(n_token=11, n_layer=1, n_head=2, d_model=8, d_head=6, d_inner=12, mem_len=10), 4
    params, ids = conftest.make_params(cfg), conftest.make_ids(cfg, 3, 5 * T + 1)
    losses = jax.jit(txl.token_losses, static_argnames="cfg")

    @jax.jit
    def cached_losses(params, ids, targets, cache):
        hidden, cache = txl.forward_cached(params, ids, cache, cfg)
        return txl.cross_entropy(params, hidden, targets, cfg), cache

    mems, cache = txl.init_mems(cfg, 3), txl.init_cache(params, cfg, 3)
    for at in range(0, 5 * T, T):
        segment, targets, before = ids[:, at : at + T], ids[:, at + 1 : at + 1 + T], cache
        want, mems = losses(params, segment, targets, mems, cfg=cfg)
        found, cache = cached_losses(params, segment, targets, cache)
        assert conftest.worst(found, want) < 1e-5  # float32, in another order
    alone, _ = cached_losses(params, segment[:, :1], targets[:, :1], before)  # as text is written
    assert conftest.worst(alone, want[:, :1]) < 1e-5

    for_muon = train.muon_dimension_numbers(params)["layers"]
    assert {key for key, found in for_muon.items() if found} == {key for key in for_muon if key.startswith("w_")}
    if name == "lion":
        tx = train.make_optimizer(train.TrainConfig(optimizer="adamw"), train.Layout(1))
        updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
        assert all(np.isfinite(a).all() for a in jax.tree.leaves(updates))
