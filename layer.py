"""One layer, in the parts that training and reading share: positions, dropout, attention sublayer, feed-forward.

Axis letters as in txl.py.
"""

import jax
import jax.numpy as jnp
from jax import lax

from attention import attention, drop_entries, mix
from embedding import wide

# Places of dropout in a layer: 0 attention weights, 1 what attention adds, 2 inside the feed-forward layer, 3 what this
# adds. As number n_layer: 0 what goes into the layers, 1 what comes out.


def _seeds(key, number, place):
    """[B, 2] uint32 from the row keys [B], the layer's number and the place in it."""
    bits = jax.vmap(lambda k: jax.random.bits(k, (2,), jnp.uint32))(key)
    return bits ^ mix(jnp.uint32(number) * 8 + place)


def dropout(x, key, number, place, cfg):
    """Dropout of x [B, T, D] by row, position and channel; key None or rate 0: x."""
    if key is None or not cfg.dropout:
        return x
    counter = lax.iota(jnp.uint32, x.shape[1] * x.shape[2]).reshape(x.shape[1:])
    return drop_entries(x, _seeds(key, number, place), counter, cfg.dropout)


def sinusoids(distances, cfg):
    """Position table [X, D] in cfg.dtype for distances [X]: sines, then cosines, computed wide and rounded once."""
    # Unlike the original: the table is never dropped out, since masks belong to rows and rows share the table.
    if cfg.clamp_len > 0:
        distances = jnp.minimum(distances, cfg.clamp_len)
    frequencies = 10000.0 ** (-jnp.arange(0, cfg.d_model, 2, wide(cfg)) / cfg.d_model)
    angles = distances.astype(wide(cfg))[:, None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], 1).astype(cfg.dtype)


def first_visible(ids, fill, cfg):
    """lo [B, T]: query t of ids [B, T] sees the keys lo <= s <= t + M; and how much of memory is filled afterwards [B].

    Memory's fill, same_length and the starts of documents all become this one number.
    """
    (B, T), M = ids.shape, cfg.mem_len
    lo, filled = jnp.broadcast_to((M - fill)[:, None], (B, T)), jnp.minimum(fill + T, M)
    if cfg.same_length:
        lo = jnp.maximum(lo, jnp.arange(T))
    if cfg.reset_on >= 0:
        start = lax.cummax(jnp.where(ids == cfg.reset_on, M + jnp.arange(T), 0), 1)  # of the newest document
        lo, last = jnp.maximum(lo, start), start[:, -1]
        filled = jnp.where(last > 0, jnp.minimum(M + T - last, M), filled)
    return lo, filled


def layer_norm(x, scale, bias):
    """Layer norm over the last axis, statistics in float32 or wider."""
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    y = y - y.mean(-1, keepdims=True)
    y = y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-5)
    return (y * scale + bias).astype(x.dtype)


def attention_block(cfg, T):
    """How many queries at a time chunked attention takes for segments of T; None: dense or pallas."""
    # On a CPU, scores that stay in its cache are worth computing twice.
    auto = "chunked" if jax.default_backend() == "cpu" or T >= 4 * cfg.attn_block else "dense"
    return cfg.attn_block if (auto if cfg.attention == "auto" else cfg.attention) == "chunked" else None


def attention_of(cfg):
    """The attention function of a config. ValueError where this machine's devices can't run it."""
    if cfg.attention != "pallas":
        return attention
    import kernels

    kernels.check(jax.default_backend())
    return kernels.attention


# the parts; p: one layer's parameters in cfg.dtype


def norm(p, x, sublayer):
    return layer_norm(x, p[f"ln{sublayer}_scale"], p[f"ln{sublayer}_bias"])


def _heads(w, x, cfg):
    """x [B, T, D] by w [D, H, K], or by [D, H * K] in reading, -> [B, H, T, K]."""
    if w.ndim == 3:
        return jnp.einsum("btd,dhk->bhtk", x, w)
    # XLA on a CPU would turn the weights of the other form round at every call.
    return jnp.einsum("btd,dc->btc", x, w).reshape(*x.shape[:2], cfg.n_head, cfg.d_head).swapaxes(1, 2)


def queries(p, x, cfg):
    """Scaled queries of x [B, T, D] with u and with v added: two [B, H, T, K]."""
    q = _heads(p["w_q"], x, cfg)
    scale = jnp.asarray(cfg.d_head**-0.5, cfg.dtype)
    return ((q + p[bias][:, None]) * scale for bias in ("u", "v"))


def keys(p, x, cfg):
    """Keys and values [B, H, S, K] of x [B, S, D]."""
    return _heads(p["w_k"], x, cfg), _heads(p["w_v"], x, cfg)


def attended(p, x, out, cfg, *, number=0, key=None):
    """The end of the attention sublayer: x [B, T, D] its input, out [B, H, T, K] -> [B, T, D]."""
    out = jnp.einsum("bhtk,hkd->btd", out, p["w_o"])
    x = x + dropout(out, key, number, 1, cfg)
    return x if cfg.pre_norm else norm(p, x, 1)


def attention_layer(p, x, mem, lo, positions, cfg, *, number=0, key=None):
    """The attention sublayer: x [B, T, D] over memory [B, M, D] and itself -> [B, T, D]. positions [S, D]."""
    with jax.named_scope("attention"):
        cat = jnp.concatenate([mem, x], 1)
        cat = norm(p, cat, 1) if cfg.pre_norm else cat
        q_u, q_v = queries(p, cat[:, cfg.mem_len :], cfg)
        r = jnp.einsum("xd,dhk->hxk", positions, p["w_r"])
        drop = (_seeds(key, number, 0), cfg.dropatt) if key is not None and cfg.dropatt else None
        window = cfg.mem_len + 1 if cfg.same_length else None
        block = attention_block(cfg, x.shape[1])
        out = attention_of(cfg)(q_u, q_v, *keys(p, cat, cfg), r, lo, block=block, window=window, drop=drop)
        return attended(p, x, out, cfg, number=number, key=key)


def feed_forward(p, x, cfg, *, number=0, key=None):
    """The feed-forward sublayer: x [B, T, D] -> [B, T, D]."""
    with jax.named_scope("feed_forward"):
        y = (norm(p, x, 2) if cfg.pre_norm else x).reshape(-1, cfg.d_model)  # XLA on a CPU wants matrices here
        y = jax.nn.relu(jnp.einsum("nd,df->nf", y, p["w_1"]) + p["b_1"])
        y = dropout(y.reshape(*x.shape[:2], cfg.d_inner), key, number, 2, cfg).reshape(y.shape)
        y = (jnp.einsum("nf,fd->nd", y, p["w_2"]) + p["b_2"]).reshape(x.shape)
        x = x + dropout(y, key, number, 3, cfg)
        return x if cfg.pre_norm else norm(p, x, 2)
