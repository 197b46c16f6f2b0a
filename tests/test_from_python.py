"""The README's section "From Python" runs as it stands there."""

import re
from pathlib import Path

import jax
import numpy as np
from runs import random_model

import txl

README = Path(__file__).parents[1] / "README.md"
CFG = txl.Config(n_layer=2, n_head=2, d_model=16, d_head=6, d_inner=20, mem_len=9)


def test_a_run_is_loaded_scores_a_string_generates_in_a_loop_and_shows_the_states_of_every_layer(tmp_path, monkeypatch):
    random_model(CFG, tmp_path / "runs" / "my-1")
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.M | re.S)
    found = {}
    exec(code, found)
    ids, states, weights = (found[name] for name in ("ids", "states", "weights"))
    assert states.shape == (3, 1, 19, 16) and len(found["text"]) == 100 and isinstance(weights["u"], np.ndarray)
    assert (states[0] == txl.embed(weights, ids, CFG)).all() and (found["mems"].h == states[:-1, :, -9:]).all()
    want = txl.cross_entropy(weights, states[-1, :, :-1], ids[:, 1:], CFG)[0]
    np.testing.assert_allclose(found["nats"], want, atol=1e-5)  # rounding of two float32 paths
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(found["params"]))
