"""Relative attention in plain XLA (Dai et al. 2019, arXiv:1901.02860, equation 2), and the masks that dropout draws.

    attention(q_u, q_v [B, H, T, K], k, v [B, H, S, K], r [H, X, K], lo [B, T]) -> [B, H, T, K]

Queries come scaled, with the biases u and v added; keys with memory's first. Query t sees the keys
lo <= s <= t + S - T. Row x of r is the position of distance S - 1 - x, so that the last query meets key s at row s,
and query t meets it at row s + T - 1 - t; rows from S on may hold anything (one of them saves a copy: X = S + 1).
Axis letters as in txl.py; Q W: the queries t and the keys s of one block.
"""

import jax
import jax.numpy as jnp
from jax import lax

HIDDEN = -1e30  # the score of a key that is not visible: finite, so that no gradient is NaN


# dropout: a counter hash, so that a mask depends on what is dropped and never on how the work is cut up


def mix(x):
    """A 32-bit mixer: two rounds of multiply and shift (constants: C. Wellons' search, lowbias32)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def drop_entries(x, seeds, counter, rate):
    """x with a share `rate` of its entries 0 and the others scaled up; counter: their numbers, uint32, without b."""
    seeds = seeds.reshape(-1, 2, *(1,) * (x.ndim - 1))
    bits = mix(mix(counter ^ seeds[:, 0]) ^ seeds[:, 1])
    return jnp.where(bits >= jnp.uint32(rate * 2**32), x * (1 / (1 - rate)), 0)


def softmax_parts(scores):
    """Softmax over the last axis as (weights, their sum); a row that sees nothing gets weights 0, not NaN."""
    top = lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), HIDDEN / 2))
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    return weights, jnp.where(total == 0, 1, total)


def _block(q_u, q_v, k, v, r, lo, t, s, drop):
    """Attention of some queries of one row [H, Q, K] over keys [H, W, K]: t [Q], s [W] their numbers among the S keys.

    The last query meets key w at row w of r [H, W + 1, K]; what the extra row gives is never visible.
    """
    H, Q, W = len(q_u), len(t), len(s)
    acc = jnp.promote_types(q_u.dtype, jnp.float32)
    content = jnp.einsum("htk,hsk->hts", q_u, k, preferred_element_type=acc)  # terms (a) and (c) of the paper
    position = jnp.einsum("htk,hxk->htx", q_v, r, preferred_element_type=acc)  # terms (b) and (d)
    # Row t must move left by Q - 1 - t: read the same numbers in rows that are one shorter.
    position = position.reshape(H, Q * (W + 1))[:, Q - 1 : Q - 1 + Q * W].reshape(H, Q, W)
    visible = (lo[:, None] <= s) & (s <= t[:, None])  # [Q, W]
    weights, total = softmax_parts(jnp.where(visible, content + position, HIDDEN))
    if drop is not None:
        seeds, rate, T, S = drop
        number = lax.iota(jnp.uint32, H)[:, None, None] * T + (t - (S - T)).astype(jnp.uint32)[:, None]
        weights = drop_entries(weights, seeds, number * S + s.astype(jnp.uint32), rate)
    out = jnp.einsum("hts,hsk->htk", weights.astype(v.dtype), v, preferred_element_type=acc)
    return (out / total).astype(v.dtype)


def _attend(q_u, q_v, k, v, r, lo, block, window, drop):
    """`attention` of one row."""
    (H, T, K), S = q_u.shape, k.shape[1]
    M, Q = S - T, min(block or T, T)
    pad = -T % Q
    blocks, W = (T + pad) // Q, min(S + pad, (window or S + pad) + Q - 1)
    # Queries and keys that pad T to whole blocks come last, so r gets rows for greater distances first. Behind it come
    # rows that no query meets: dynamic_slice would move a start that is too far right.
    q_u, q_v, k, v = (jnp.pad(a, ((0, 0), (0, pad), (0, 0))) for a in (q_u, q_v, k, v))
    lo = jnp.pad(lo, (0, pad))
    behind = S + (1 if blocks == 1 else T + pad) - r.shape[1]
    r = jnp.pad(r, ((0, 0), (pad, max(behind, 0)), (0, 0)))

    def body(args):
        q_u, q_v, lo, i = args
        start = jnp.clip(i * Q + M + Q - W, 0, S + pad - W)
        cut = lambda a, start, size: lax.dynamic_slice_in_dim(a, start, size, 1)
        t, s = i * Q + M + jnp.arange(Q), start + jnp.arange(W)
        r_cut = cut(r, start + (blocks - 1 - i) * Q, W + 1)
        return _block(q_u, q_v, cut(k, start, W), cut(v, start, W), r_cut, lo, t, s, drop and (*drop, T, S))

    if blocks == 1:
        return body((q_u, q_v, lo, 0))
    split = lambda a: jnp.moveaxis(a.reshape(H, blocks, Q, K), 1, 0)
    out = lax.map(jax.checkpoint(body), (split(q_u), split(q_v), lo.reshape(blocks, Q), jnp.arange(blocks)))
    return jnp.moveaxis(out, 0, 1).reshape(H, T + pad, K)[:, :T]


def attention(q_u, q_v, k, v, r, lo, *, block, window=None, drop=None):
    """Attention in blocks of queries, each rebuilt in the backward pass; block None: dense, all scores at once.

    window: keys that a query sees at most, itself included; keys outside a block's windows are not computed.
    drop: (seeds [B, 2], rate) or None.
    """
    seeds, rate = drop or (None, 0)
    row = lambda r, q_u, q_v, k, v, lo, seeds: _attend(q_u, q_v, k, v, r, lo, block, window, drop and (seeds, rate))
    args = (q_u, q_v, k, v, lo, seeds)
    if len(q_u) == 1:  # an axis of 1 makes XLA on a CPU a third slower
        return row(r, *jax.tree.map(lambda a: a[0], args))[None]
    return jax.vmap(row, (None,) + (0,) * 6)(r, *args)
