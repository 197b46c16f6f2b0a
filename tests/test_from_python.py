"""A run read from Python, as README's section "From Python" shows it."""

import jax
import jax.numpy as jnp
import numpy as np
from runs import random_model

import txl
from data import checkpoint, tokenizer

CFG = txl.Config(n_layer=2, n_head=2, d_model=16, d_head=6, d_inner=20, mem_len=9)


def test_a_run_is_loaded_scores_a_string_generates_in_a_loop_and_shows_the_states_of_every_layer(tmp_path, monkeypatch):
    random_model(CFG, tmp_path / "runs" / "my-1")
    monkeypatch.chdir(tmp_path)

    cfg, params, vocab, run = checkpoint.load("runs/my-1", for_reading=True)  # weights on the device, ready to read
    decode = jax.jit(txl.decode, static_argnames="cfg", donate_argnums=2)
    ids = tokenizer.encode(vocab, "To be, or not to be")[None]  # [1, T]

    # score a string: nats of each token after the first
    hidden, _ = txl.forward_cached(params, ids[:, :-1], txl.init_cache(params, cfg, 1), cfg)
    nats = txl.cross_entropy(params, hidden, ids[:, 1:], cfg)[0]

    # generate in a loop: logits are [1, T, V], then [1, 1, V], and cost the same at every step
    (logits, cache), text = decode(params, ids, txl.init_cache(params, cfg, 1), cfg), []
    for key in jax.random.split(jax.random.key(0), 100):
        token = jax.random.categorical(key, logits[:, -1] / 0.8)
        text.append(int(token[0]))
        logits, cache = decode(params, token[:, None], cache, cfg)
    print(tokenizer.decode_text(vocab, text))

    # hidden states [L + 1, 1, T, D]: the embedding, then each layer's output; these weights are stacked over the layers
    weights = checkpoint.load("runs/my-1").params
    states, mems = txl.hidden_states(weights, ids, txl.init_mems(cfg, 1), cfg)

    # and what the section leaves out
    assert states.shape == (3, 1, 19, 16) and len(text) == 100 and isinstance(weights["u"], np.ndarray)
    assert (states[0] == txl.embed(weights, ids, cfg)).all() and (mems.h == states[:-1, :, -9:]).all()
    want = txl.cross_entropy(weights, states[-1, :, :-1], ids[:, 1:], cfg)[0]
    np.testing.assert_allclose(nats, want, atol=1e-5)  # rounding of two float32 paths
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params)) and len(params["layers"]) == 2
    assert jnp.isfinite(logits).all()
