"""Fused relative attention (Dai et al. 2019, arXiv:1901.02860, equation 2) in Pallas: no array of T x S, ever.

As in flash attention (Dao 2023, arXiv:2307.08691), a program takes a tile of N queries over N keys at a time and keeps
a running softmax; the backward pass rebuilds a tile's weights from its rows' log-sum-exps. New is the position term.
All is padded in front to whole tiles, so that query a and key b of a tile meet at row g N + (N - 1 - a + b) of r, with
the same g for all tiles on a diagonal. For N = 4: the products of q_v with block g of r, columns c = 0 .. 3, in small
letters, those with block g + 1 in capitals:

             wanted, b = 0 .. 3     put together      so: small letters where a + c >= N - 1, capitals elsewhere, and
    a = 0         d A B C             A B C d         row a rolled to the right by a + 1.
    a = 1         c d A B             A B c d
    a = 2         b c d A             A b c d         Gradients of scores, rolled to the left, belong to block g
    a = 3         a b c d             a b c d         where a + c >= N - 1 and to block g + 1 elsewhere.

The roll goes through a scratch slice of the program's own on a GPU (in global memory, but it stays in cache), and is
one instruction on a TPU. Letters as in txl.py, but N is a tile's size, i and j are tiles of queries and of keys, and n
and m count them: tiles of queries, tiles of keys before those of query 0.
"""

import warnings
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu
from jax.extend.core import Primitive
from jax.interpreters import mlir

MASK_VALUE = -1e30  # the score of a key that is not visible, as in txl.py: this file imports nothing but jax


class Tiles(NamedTuple):
    N: int  # queries and keys of a tile
    n: int  # tiles of queries
    m: int  # tiles of keys before those of the first tile of queries
    reach: int  # tiles of keys that a tile of queries may see before its own
    device: str  # gpu or tpu
    interpret: bool


def _dot(a, b, axes=(1, 0)):
    """Product of a and b over an axis of each, in float32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, (((axes[0],), (axes[1],)), ((), ())), precision, jnp.float32)


def _at(ref, tile, N):
    return ref[pl.ds(pl.multiple_of(tile * N, N), N), :]


def _roll(x, slot, scratch, tiles, left=False):
    """x [N, N] with row a rolled by a + 1. slot, 0 or 1: not that of the call before, so that one barrier will do."""
    N = tiles.N
    a, b = (lax.broadcasted_iota(jnp.int32, (N, N), axis) for axis in (0, 1))
    if tiles.device == "tpu" and not left:
        return pltpu.roll(x, 1, 1, stride=1, stride_axis=0)
    if tiles.device == "tpu":  # where the stride can't be negative: by the bits of a + 1
        for step in (1 << bit for bit in range(N.bit_length() - 1)):
            x = jnp.where((a + 1) & step != 0, pltpu.roll(x, N - step, 1), x)
        return x
    [ref] = scratch
    for half in (0, N):  # twice side by side, so that reading needs no modulo and its addresses no registers
        ref[pl.ds(slot * N, N), pl.ds(half, N)] = x
    if not tiles.interpret:
        plgpu.debug_barrier()
    return ref[slot * N + a, (a + 1 if left else N - 1 - a) + b]


def _in_low(N):
    """[N, N]: where a cell before the roll belongs to block g of r, and not to block g + 1."""
    return lax.broadcasted_iota(jnp.int32, (N, N), 0) + lax.broadcasted_iota(jnp.int32, (N, N), 1) >= N - 1


def _scores(q_u, k, low, high, kv_start, i, j, slot, scratch, tiles):
    """Scores of tile i, j [N, N], MASK_VALUE where not visible. low, high: q_v times blocks g, g + 1 of r.

    kv_start [N, 1].
    """
    N = tiles.N
    position = _roll(jnp.where(_in_low(N), low, high), slot, scratch, tiles)
    key = j * N + lax.broadcasted_iota(jnp.int32, (N, N), 1)
    last = (i + tiles.m) * N + lax.broadcasted_iota(jnp.int32, (N, N), 0)
    return jnp.where((kv_start <= key) & (key <= last), _dot(q_u, k, (1, 1)) + position, MASK_VALUE)


def _forward(q_u, q_v, kv_start, k, v, r, out, lse, *scratch, tiles):
    """Program i, a tile of queries: its output and log-sum-exps."""
    i, N = pl.program_id(0), tiles.N
    q_u, q_v, kv_start = q_u[...], q_v[...], kv_start[...]
    first, own = jnp.maximum(i + tiles.m - tiles.reach, 0), i + tiles.m

    def body(j, carry):
        acc, top, total, low = carry
        high = _dot(q_v, _at(r, j - i + tiles.n, N), (1, 1))  # the next tile's low
        scores = _scores(q_u, _at(k, j, N), low, high, kv_start, i, j, j & 1, scratch, tiles)
        new = jnp.maximum(top, scores.max(1, keepdims=True))
        weights, old = jnp.exp(scores - new), jnp.exp(top - new)
        acc = acc * old + _dot(weights.astype(v.dtype), _at(v, j, N))
        return acc, new, total * old + weights.sum(1, keepdims=True), high

    column = lambda value: jnp.full((N, 1), value, jnp.float32)
    low = _dot(q_v, _at(r, first - i + tiles.n - 1, N), (1, 1))
    # A first top of MASK_VALUE / 2, not MASK_VALUE, so that a hidden key weighs 0 in a row that sees none.
    start = jnp.zeros(q_u.shape, jnp.float32), column(MASK_VALUE / 2), column(0), low
    acc, top, total, _ = lax.fori_loop(first, own + 1, body, start)
    total = jnp.where(total == 0, 1, total)
    out[...] = (acc / total).astype(out.dtype)
    lse[...] = top + jnp.log(total)


def _rebuilt(i, j, queries, k, v, band, slot, scratch, tiles):
    """Weights of tile i, j and gradients of its scores. queries: the arrays of `_dq`, tile i; band: blocks g, g + 1."""
    q_u, q_v, kv_start, do, lse, delta = queries
    low, high = (_dot(q_v, r, (1, 1)) for r in band)
    weights = jnp.exp(_scores(q_u, k, low, high, kv_start, i, j, slot, scratch, tiles) - lse)
    return weights, weights * (_dot(do, v, (1, 1)) - delta)


def _dq(q_u, q_v, kv_start, do, lse, delta, k, v, r, dq_u, dq_v, *scratch, tiles):
    """Program i, a tile of queries: gradients of its q_u and q_v."""
    i, N, queries = pl.program_id(0), tiles.N, [ref[...] for ref in (q_u, q_v, kv_start, do, lse, delta)]
    own, zero = i + tiles.m, jnp.zeros(q_u.shape, jnp.float32)

    def body(j, carry):
        sum_u, sum_v, before = carry
        keys, g = _at(k, j, N), j - i + tiles.n - 1
        band = _at(r, g, N), _at(r, g + 1, N)
        _, ds = _rebuilt(i, j, queries, keys, _at(v, j, N), band, 0, scratch, tiles)
        turned = _roll(ds, 1, scratch, tiles, left=True)
        # All of block g: this tile's part, and what the tile before has left, whose g + 1 it was.
        block = jnp.where(_in_low(N), turned, before).astype(r.dtype)
        return sum_u + _dot(ds.astype(k.dtype), keys), sum_v + _dot(block, band[0]), turned

    start = zero, zero, jnp.zeros((N, N), jnp.float32)
    sum_u, sum_v, _ = lax.fori_loop(jnp.maximum(own - tiles.reach, 0), own + 1, body, start)
    dq_u[...], dq_v[...] = sum_u.astype(dq_u.dtype), sum_v.astype(dq_v.dtype)


def _dkv(q_u, q_v, kv_start, do, lse, delta, k, v, r, dk, dv, *scratch, tiles):
    """Program j, a tile of keys: their gradients and their values'."""
    j, N, arrays = pl.program_id(0), tiles.N, (q_u, q_v, kv_start, do, lse, delta)
    k, v, zero = k[...], v[...], jnp.zeros(k.shape, jnp.float32)

    def body(i, carry):
        sum_k, sum_v = carry
        queries, g = [_at(ref, i, N) for ref in arrays], j - i + tiles.n - 1
        weights, ds = _rebuilt(i, j, queries, k, v, (_at(r, g, N), _at(r, g + 1, N)), i & 1, scratch, tiles)
        sum_k += _dot(ds.astype(k.dtype), queries[0], (0, 0))
        return sum_k, sum_v + _dot(weights.astype(v.dtype), queries[3], (0, 0))

    first, stop = jnp.maximum(j - tiles.m, 0), jnp.minimum(j - tiles.m + tiles.reach + 1, tiles.n)
    sum_k, sum_v = lax.fori_loop(first, stop, body, (zero, zero))
    dk[...], dv[...] = sum_k.astype(dk.dtype), sum_v.astype(dv.dtype)


def _dr(q_u, q_v, kv_start, do, lse, delta, k, v, r, dr, *scratch, tiles):
    """Program p, the tiles on a diagonal: its part of the gradients of blocks g and g + 1, one below the other."""
    d, N, arrays = (
        tiles.reach - pl.program_id(0),
        tiles.N,
        (q_u, q_v, kv_start, do, lse, delta),
    )  # d: tiles that j lies back
    g = tiles.n + tiles.m - 1 - d
    band, zero = (_at(r, g, N), _at(r, g + 1, N)), jnp.zeros((N, r.shape[1]), jnp.float32)

    def body(i, carry):
        j, queries, in_low = i + tiles.m - d, [_at(ref, i, N) for ref in arrays], _in_low(N)
        _, ds = _rebuilt(i, j, queries, _at(k, j, N), _at(v, j, N), band, 0, scratch, tiles)
        turned = _roll(ds, 1, scratch, tiles, left=True)
        parts = jnp.where(in_low, turned, 0), jnp.where(in_low, 0, turned)
        return tuple(total + _dot(part.astype(r.dtype), queries[1], (0, 0)) for total, part in zip(carry, parts))

    low, high = lax.fori_loop(jnp.maximum(d - tiles.m, 0), tiles.n, body, (zero, zero))
    dr[pl.ds(0, N), :], dr[pl.ds(N, N), :] = low, high


def _like(a):
    return jax.ShapeDtypeStruct(a.shape, a.dtype)


def _aval(a):
    return jax.core.ShapedArray(a.shape, a.dtype)


# calling them: all arrays are [B, H, rows, channels], 1 for B or H where it has none; the grid is (tiles, H, B)

_program = Primitive("relative_attention")  # around pallas_call, whose lowering for GPUs warns of its deprecation
_program.multiple_results = True
_program.def_abstract_eval(lambda *ins, call: jax.tree.map(_aval, jax.eval_shape(call, *ins)))


@partial(mlir.register_lowering, _program)
def _lower(ctx, *ins, call):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        return mlir.lower_fun(call)(ctx, *ins)


def _run(kernel, count, arrays, cut, out, tiles):
    """Outputs of `count` programs for each head and row; cut: which arrays a program sees its share of, else whole."""
    B, H = arrays[0].shape[:2]

    def spec(a, cut=True):
        index = lambda i, h, b: (b if a.shape[0] > 1 else 0, h if a.shape[1] > 1 else 0, i if cut else 0, 0)
        return pl.BlockSpec((None, None, a.shape[2] // (count if cut else 1), a.shape[3]), index)

    params = pltpu.CompilerParams(vmem_limit_bytes=2**26)
    if tiles.device == "gpu":
        # More stages would fetch the next tile's scratch before it is written: Triton minds no barrier there.
        params = plgpu.CompilerParams(num_warps=4 if kernel is _forward and tiles.N == 64 else 8, num_stages=1)
        out = [*out, jax.ShapeDtypeStruct((B, H, count * 2 * tiles.N, 2 * tiles.N), jnp.float32)]
    call = pl.pallas_call(
        partial(kernel, tiles=tiles),
        out,
        grid=(count, H, B),
        in_specs=[spec(a, a_cut) for a, a_cut in zip(arrays, cut)],
        out_specs=[spec(a) for a in out],
        compiler_params=params,
        interpret=tiles.interpret,
    )
    return jax.jit(lambda *arrays: _program.bind(*arrays, call=call))(*arrays)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(tiles, q_u, q_v, k, v, r, kv_start):
    """Attention of whole tiles: r [1, H, S + N, K] has a tile of zeros at the end, kv_start is [B, 1, T, 1]."""
    return _attention_forward(tiles, q_u, q_v, k, v, r, kv_start)[0]


def _attention_forward(tiles, q_u, q_v, k, v, r, kv_start):
    row = jax.ShapeDtypeStruct((*q_u.shape[:3], 1), jnp.float32)
    out, lse = _run(_forward, tiles.n, (q_u, q_v, kv_start, k, v, r), [1, 1, 1, 0, 0, 0], [_like(q_u), row], tiles)[:2]
    return out, (q_u, q_v, k, v, r, kv_start, out, lse)


def _attention_backward(tiles, kept, do):
    q_u, q_v, k, v, r, kv_start, out, lse = kept
    delta = (out.astype(jnp.float32) * do.astype(jnp.float32)).sum(-1, keepdims=True)
    arrays, n_keys, count = (q_u, q_v, kv_start, do, lse, delta, k, v, r), tiles.n + tiles.m, tiles.reach + 1
    dq_u, dq_v = _run(_dq, tiles.n, arrays, [1] * 6 + [0] * 3, [_like(q_u), _like(q_v)], tiles)[:2]
    dk, dv = _run(_dkv, n_keys, arrays, [0] * 6 + [1, 1, 0], [_like(k), _like(v)], tiles)[:2]
    (B, H, _, K), N = k.shape, tiles.N
    halves = jax.ShapeDtypeStruct((B, H, count * 2 * N, K), jnp.float32)
    dr = _run(_dr, count, arrays, [0] * 9, [halves], tiles)[0].reshape(B, H, count, 2, N, K).sum(0)
    # A block of r has been g of one diagonal and g + 1 of the next. Diagonals end at the last block but the zeros.
    pad = lambda a, before, after: jnp.pad(a, ((0, 0), (before, after), (0, 0), (0, 0)))
    dr = pad(dr[:, :, 0], n_keys - count, 1) + pad(dr[:, :, 1], n_keys - count + 1, 0)
    return dq_u, dq_v, dk, dv, dr.reshape(r.shape).astype(r.dtype), None


_attention.defvjp(_attention_forward, _attention_backward)


def check(device):
    """ValueError where a backend, by its name, can't run the kernels."""
    if device not in ("gpu", "tpu"):
        raise ValueError(f"attention=pallas runs on a gpu or a tpu, this is a {device}: give auto, chunked or dense")


def attention(q_u, q_v, k, v, r, kv_start, *, block=None, window=None, drop=None, device=None, interpret=False):
    """`attention` of txl.py, with its arguments and result, for float32 and bfloat16; drop must be None.

    block: queries and keys of a tile, a power of two and at least 16; None: what the device runs best.
    device: gpu or tpu, None: the one that is there; interpret: run that one's program on any device, for tests.
    """
    device = device or jax.default_backend()
    check(device)
    if drop is not None or q_u.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"attention=pallas knows no dropatt and no {q_u.dtype}: give chunked or dense")
    T, K, S = *q_u.shape[2:], k.shape[2]
    N = block or (128 if device == "tpu" else 32 if q_u.dtype == jnp.float32 else 64)
    pad_t, pad_s, pad_k = -T % N, -S % N, max(16, 1 << (K - 1).bit_length()) - K
    pad = lambda a, before, after=0: jnp.pad(a, ((0, 0), (0, 0), (before, after), (0, pad_k)))
    kv_start = jnp.pad(jnp.maximum(kv_start, 0) + pad_s, ((0, 0), (pad_t, 0)))
    n, n_keys = (T + pad_t) // N, (S + pad_s) // N
    reach = min(-(-((window or S) - 1) // N), n_keys - 1)
    tiles = Tiles(N, n, n_keys - n, reach, device, interpret)
    arrays = pad(q_u, pad_t), pad(q_v, pad_t), pad(k, pad_s), pad(v, pad_s), pad(r[None, :, :S], pad_s, N)
    return _attention(tiles, *arrays, kv_start[:, None, :, None])[:, :, pad_t:, :K]
