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

The roll goes through a scratch slice of the program's own on a GPU (in global memory, but it stays in cache): a fixed
number of programs walks over all tiles, so that scratch grows with nothing. It is one instruction on a TPU. Letters as
in txl.py, but N is a tile's size, i and j are tiles of queries and of keys, and n and m count them: tiles of queries,
tiles of keys before those of query 0.

Who changes attention in txl.py changes `_scores` and `_rebuilt` here too (for a term with weights of its own also the
sums in `_dq`, `_dkv` and `_dr`), or deletes this file: --attention pallas computes what stands here.
tests/test_kernels.py compares both, through the model as well, and fails until they agree.
"""

import math
import warnings
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu
from jax.extend.core import Primitive
from jax.interpreters import mlir

MASK_VALUE = -1e30  # the score of a key that is not visible, as in txl.py: this file imports nothing but jax
# Programs on a GPU: two for each of an H200's 132 multiprocessors, but one. It is prime, so that no number of tiles
# deals a program tiles of one kind only, say those that see the most keys.
PROGRAMS = 263


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


class Part(NamedTuple):
    """What a program sees of an array: tiles of N rows."""

    ref: Any
    first: Any  # where tile 0 lies, in tiles; None: the ref is the program's own tile alone

    def at(self, tile, N):
        return ... if self.first is None else (pl.ds(pl.multiple_of((self.first + tile) * N, N), N), slice(None))


def _load(part, tile, N):
    return part.ref[part.at(tile, N)]


def _write(left, right, slot, scratch, tiles):
    """Writes [N, N] arrays side by side where all threads of a program on a GPU can read them.

    slot, 0 or 1: not that of the call before, so that one barrier will do.
    """
    [ref], N = scratch, tiles.N
    ref[pl.ds(slot * N, N), pl.ds(0, N)] = left
    ref[pl.ds(slot * N, N), pl.ds(N, N)] = right
    if not tiles.interpret:
        plgpu.debug_barrier()


def _reread(half, scratch, tiles):
    """The half, 0 or 1, of slot 1 as it was written.

    Triton computes a product once for each half of the warps if another product takes what it gave from registers.
    """
    [ref], N = scratch, tiles.N
    return ref[pl.ds(N, N), pl.ds(half * N, N)]


def _roll(x, slot, scratch, tiles, left=False):
    """x [N, N] with row a rolled by a + 1; slot: see `_write`."""
    N = tiles.N
    a, b = (lax.broadcasted_iota(jnp.int32, (N, N), axis) for axis in (0, 1))
    if tiles.device == "tpu" and not left:
        return pltpu.roll(x, 1, 1, stride=1, stride_axis=0)
    if tiles.device == "tpu":  # where the stride can't be negative: by the bits of a + 1
        for step in (1 << bit for bit in range(N.bit_length() - 1)):
            x = jnp.where((a + 1) & step != 0, pltpu.roll(x, N - step, 1), x)
        return x
    _write(x, x, slot, scratch, tiles)  # twice, so that reading needs no modulo and its addresses no registers
    [ref] = scratch
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


def _zeros(K, N):
    return jnp.zeros((N, K), jnp.float32), jnp.zeros((N, K), jnp.float32)


def _forward(i, arrays, scratch, tiles):
    """Output and log-sum-exps of a tile of queries."""
    *queries, k, v, r = arrays
    N = tiles.N
    q_u, q_v, kv_start = (_load(a, i, N) for a in queries)
    first, own = jnp.maximum(i + tiles.m - tiles.reach, 0), i + tiles.m

    def body(j, carry):
        acc, top, total, low = carry
        high = _dot(q_v, _load(r, j - i + tiles.n, N), (1, 1))  # the next tile's low
        scores = _scores(q_u, _load(k, j, N), low, high, kv_start, i, j, j & 1, scratch, tiles)
        new = jnp.maximum(top, scores.max(1, keepdims=True))
        weights, old = jnp.exp(scores - new), jnp.exp(top - new)
        values = _load(v, j, N)
        acc = acc * old + _dot(weights.astype(values.dtype), values)
        return acc, new, total * old + weights.sum(1, keepdims=True), high

    column = lambda value: jnp.full((N, 1), value, jnp.float32)
    low = _dot(q_v, _load(r, first - i + tiles.n - 1, N), (1, 1))
    # A first top of MASK_VALUE / 2, not MASK_VALUE, so that a hidden key weighs 0 in a row that sees none.
    start = jnp.zeros(q_u.shape, jnp.float32), column(MASK_VALUE / 2), column(0), low
    acc, top, total, _ = lax.fori_loop(first, own + 1, body, start)
    total = jnp.where(total == 0, 1, total)
    return acc / total, top + jnp.log(total)


def _rebuilt(i, j, queries, k, v, band, scratch, tiles):
    """Weights of tile i, j and gradients of its scores; uses slot 0.

    queries: the arrays of `_dq`, tile i; band: blocks g, g + 1 of r.
    """
    q_u, q_v, kv_start, do, lse, delta = queries
    low, high = (_dot(q_v, r, (1, 1)) for r in band)
    weights = jnp.exp(_scores(q_u, k, low, high, kv_start, i, j, 0, scratch, tiles) - lse)
    return weights, weights * (_dot(do, v, (1, 1)) - delta)


def _dq(i, arrays, scratch, tiles):
    """Gradients of q_u and q_v of a tile of queries."""
    *queries, k, v, r = arrays
    N, own = tiles.N, i + tiles.m
    queries = [_load(a, i, N) for a in queries]

    def body(j, carry):
        sum_u, sum_v, before = carry
        keys, g = _load(k, j, N), j - i + tiles.n - 1
        band = _load(r, g, N), _load(r, g + 1, N)
        _, ds = _rebuilt(i, j, queries, keys, _load(v, j, N), band, scratch, tiles)
        turned = _roll(ds, 1, scratch, tiles, left=True)
        if tiles.device == "gpu":
            ds = _reread(0, scratch, tiles)
        # All of block g: this tile's part, and what the tile before has left, whose g + 1 it was.
        block = jnp.where(_in_low(N), turned, before).astype(keys.dtype)
        return sum_u + _dot(ds.astype(keys.dtype), keys), sum_v + _dot(block, band[0]), turned

    start = *_zeros(k.ref.shape[-1], N), jnp.zeros((N, N), jnp.float32)
    sum_u, sum_v, _ = lax.fori_loop(jnp.maximum(own - tiles.reach, 0), own + 1, body, start)
    return sum_u, sum_v


def _dkv(j, arrays, scratch, tiles):
    """Gradients of a tile of keys and of their values."""
    *of_queries, k, v, r = arrays
    N = tiles.N
    k, v = _load(k, j, N), _load(v, j, N)

    def body(i, carry):
        sum_k, sum_v = carry
        queries, g = [_load(a, i, N) for a in of_queries], j - i + tiles.n - 1
        weights, ds = _rebuilt(i, j, queries, k, v, (_load(r, g, N), _load(r, g + 1, N)), scratch, tiles)
        if tiles.device == "gpu":
            _write(weights, ds, 1, scratch, tiles)
            weights, ds = _reread(0, scratch, tiles), _reread(1, scratch, tiles)
        sum_k += _dot(ds.astype(k.dtype), queries[0], (0, 0))
        return sum_k, sum_v + _dot(weights.astype(v.dtype), queries[3], (0, 0))

    first, stop = jnp.maximum(j - tiles.m, 0), jnp.minimum(j - tiles.m + tiles.reach + 1, tiles.n)
    return lax.fori_loop(first, stop, body, _zeros(k.shape[1], N))


def _dr(p, arrays, scratch, tiles, sums=None):
    """What the tiles on a diagonal give to the gradients of blocks g and g + 1 of r, added to sums."""
    *of_queries, k, v, r = arrays
    N, d = tiles.N, tiles.reach - p  # tiles that j lies back
    g = tiles.n + tiles.m - 1 - d
    band = _load(r, g, N), _load(r, g + 1, N)

    def body(i, sums):
        j, queries = i + tiles.m - d, [_load(a, i, N) for a in of_queries]
        _, ds = _rebuilt(i, j, queries, _load(k, j, N), _load(v, j, N), band, scratch, tiles)
        turned = _roll(ds, 1, scratch, tiles, left=True)
        parts = jnp.where(_in_low(N), turned, 0), jnp.where(_in_low(N), 0, turned)
        return tuple(total + _dot(part.astype(band[0].dtype), queries[1], (0, 0)) for total, part in zip(sums, parts))

    return lax.fori_loop(jnp.maximum(d - tiles.m, 0), tiles.n, body, sums or _zeros(r.ref.shape[-1], N))


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


def _single(kernel, cut, tiles):
    """The body of a program for one tile of one head and row. cut: which arrays it sees only its tile of."""

    def program(*refs):
        arrays = [Part(ref, None if a_cut else 0) for ref, a_cut in zip(refs, cut)]
        for ref, value in zip(refs[len(cut) :], kernel(pl.program_id(0), arrays, (), tiles)):
            ref[...] = value.astype(ref.dtype)

    return program


def _walking(kernel, count, ins, outs, n_programs, tiles):
    """The body of a program that takes every n_programs-th of all tiles, heads and rows. ins, outs: arrays' shapes.

    A row of outputs belongs to one row of inputs, but for _dr to every n-th, n rows of outputs in all: their sum.
    """
    (B, H, *_), n_rows, N = ins[0], outs[0][0], tiles.N

    def program(*refs):
        *refs, scratch = refs
        start = pl.program_id(0)

        def parts(refs, shapes, row, h):
            first = lambda rows, heads: (row if rows > 1 else 0) * heads + (h if heads > 1 else 0)
            return [Part(ref, first(*shape[:2]) * (shape[2] // N)) for ref, shape in zip(refs, shapes)]

        def item(step, _):
            place = start + step * n_programs
            i, h, row = lax.rem(place, count), lax.rem(lax.div(place, count), H), lax.div(place, count * H)
            if not tiles.interpret:
                plgpu.debug_barrier()  # the item before may end in the slot of scratch that this one begins with
            compute = lambda row, *sums: kernel(i, parts(refs, ins, row, h), [scratch], tiles, *sums)
            if kernel is _dr:
                add = lambda x, sums: compute(row + x * n_rows, sums)
                values = lax.fori_loop(0, lax.div(B - row + n_rows - 1, n_rows), add, _zeros(outs[0][3], N))
            else:
                values = compute(row)
            for out, value in zip(parts(refs[len(ins) :], outs, row, h), values):
                out.ref[out.at(i, N)] = value.astype(out.ref.dtype)

        lax.fori_loop(0, lax.div(count * H * n_rows - start + n_programs - 1, n_programs), item, None)

    return program


def _run(kernel, count, arrays, cut, out, tiles):
    """Outputs of `count` tiles for each head and row; cut: which arrays a tile needs only its own part of."""
    (B, H, *_), N = arrays[0].shape, tiles.N
    if tiles.device == "gpu":
        n_programs = min(PROGRAMS, count * H * out[0].shape[0])
        body = _walking(kernel, count, [a.shape for a in arrays], [a.shape for a in out], n_programs, tiles)
        flat = lambda a: (math.prod(a.shape[:3]), a.shape[3])
        made = [jax.ShapeDtypeStruct(flat(a), a.dtype) for a in out]
        made += [jax.ShapeDtypeStruct((n_programs * 2 * N, 2 * N), jnp.float32)]
        grid, in_specs = (n_programs,), [pl.BlockSpec()] * len(arrays)
        out_specs = [pl.BlockSpec()] * len(out) + [pl.BlockSpec((2 * N, 2 * N), lambda program: (program, 0))]
        # More stages would fetch the next tile's scratch before it is written: Triton minds no barrier there.
        params = plgpu.CompilerParams(num_warps=4 if kernel is _forward and N == 64 else 8, num_stages=1)
        arrays = [a.reshape(flat(a)) for a in arrays]
    else:

        def spec(a, cut=True):
            index = lambda i, h, b: (b if a.shape[0] > 1 else 0, h if a.shape[1] > 1 else 0, i if cut else 0, 0)
            return pl.BlockSpec((None, None, a.shape[2] // (count if cut else 1), a.shape[3]), index)

        body, made, grid = _single(kernel, cut, tiles), out, (count, H, B)
        in_specs, out_specs = [spec(a, a_cut) for a, a_cut in zip(arrays, cut)], [spec(a) for a in out]
        params = pltpu.CompilerParams(vmem_limit_bytes=2**26)
    body.__name__ = kernel.__name__  # what profiles show
    call = pl.pallas_call(
        body,
        made,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        compiler_params=params,
        interpret=tiles.interpret,
    )
    got = jax.jit(lambda *arrays: _program.bind(*arrays, call=call))(*arrays)
    return [a.reshape(like.shape) for a, like in zip(got, out)]


def _pad(a, rows, channels=None):
    """a [B, H, rows, channels] with zeros before its rows and after its channels."""
    return jnp.pad(a, ((0, 0), (0, 0), (rows - a.shape[2], 0), (0, (channels or a.shape[3]) - a.shape[3])))


def _map_rows(function, at_once, *arrays):
    """function of arrays [B, ...], for at_once rows at a time: padded copies are of these rows alone."""
    if at_once == len(arrays[0]):
        return function(*arrays)
    out = lax.map(lambda some: function(*some), [a.reshape(-1, at_once, *a.shape[1:]) for a in arrays])
    return [a.reshape(-1, *a.shape[2:]) for a in out]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(tiles, at_once, q_u, q_v, k, v, r, kv_start):
    """Attention of rows at_once at a time: r [1, H, S + N, K] has a tile of zeros at the end, kv_start is [B, 1, T, 1].

    Both are whole tiles already, and r has as many channels as the kernels need.
    """
    return _attention_forward(tiles, at_once, q_u, q_v, k, v, r, kv_start)[0]


def _attention_forward(tiles, at_once, q_u, q_v, k, v, r, kv_start):
    T, K = q_u.shape[2:]
    n_queries, n_keys, channels = tiles.n * tiles.N, (tiles.n + tiles.m) * tiles.N, r.shape[3]

    def some_rows(q_u, q_v, k, v, kv_start):
        q_u, q_v = (_pad(a, n_queries, channels) for a in (q_u, q_v))
        k, v = (_pad(a, n_keys, channels) for a in (k, v))
        row = jax.ShapeDtypeStruct((*q_u.shape[:3], 1), jnp.float32)
        out, lse = _run(_forward, tiles.n, (q_u, q_v, kv_start, k, v, r), [1, 1, 1, 0, 0, 0], [_like(q_u), row], tiles)
        return out[:, :, -T:, :K], lse

    # The name that txl.py keeps these by: else remat=dots would run this again for them.
    out, lse = (checkpoint_name(a, "attended") for a in _map_rows(some_rows, at_once, q_u, q_v, k, v, kv_start))
    return out, (q_u, q_v, k, v, r, kv_start, out, lse)


def _attention_backward(tiles, at_once, kept, do):
    q_u, q_v, k, v, r, kv_start, out, lse = kept
    T, K, H = *q_u.shape[2:], k.shape[1]
    n_queries, n_keys, channels = tiles.n * tiles.N, (tiles.n + tiles.m) * tiles.N, r.shape[3]
    delta = (out.astype(jnp.float32) * do.astype(jnp.float32)).sum(-1, keepdims=True)
    count = tiles.reach + 1
    # Sums over rows where the diagonals of all heads occupy the device without them.
    n_rows = max(min(PROGRAMS // (H * count), at_once), 1) if tiles.device == "gpu" else at_once
    part = jax.ShapeDtypeStruct((n_rows, H, count * tiles.N, channels), jnp.float32)

    def some_rows(q_u, q_v, kv_start, do, lse, delta, k, v):
        q_u, q_v, do = (_pad(a, n_queries, channels) for a in (q_u, q_v, do))
        k, v = (_pad(a, n_keys, channels) for a in (k, v))
        arrays = q_u, q_v, kv_start, do, lse, _pad(delta, n_queries), k, v, r
        of_queries = _run(_dq, tiles.n, arrays, [1] * 6 + [0] * 3, [_like(q_u), _like(q_v)], tiles)
        of_keys = _run(_dkv, tiles.n + tiles.m, arrays, [0] * 6 + [1, 1, 0], [_like(k), _like(v)], tiles)
        of_r = _run(_dr, count, arrays, [0] * 9, [part, part], tiles)
        return *(a[:, :, -T:, :K] for a in of_queries), *(a[:, :, -k_len:, :K] for a in of_keys), *of_r

    k_len = k.shape[2]
    *gradients, low, high = _map_rows(some_rows, at_once, q_u, q_v, kv_start, do, lse, delta, k, v)
    # A block of r has been g of one diagonal and g + 1 of the next. Diagonals end at the last block but the zeros.
    before = (tiles.n + tiles.m - count) * tiles.N
    pad = lambda a, before, after: jnp.pad(a.sum(0), ((0, 0), (before, after), (0, 0)))
    dr = (pad(low, before, tiles.N) + pad(high, before + tiles.N, 0))[None]
    return *gradients, dr.astype(r.dtype), None


_attention.defvjp(_attention_forward, _attention_backward)


def check(device):
    """ValueError where a backend, by its name, can't run the kernels."""
    if device not in ("gpu", "tpu"):
        raise ValueError(f"attention=pallas runs on a gpu or a tpu, this is a {device}: give auto, chunked or dense")


def best_block(device, dtype):
    """Queries and keys of a tile. On a GPU larger ones spill registers; none of them was timed."""
    if device == "tpu":
        return 128
    capability = str(getattr(jax.local_devices()[0], "compute_capability", ""))  # none where a GPU is compiled for only
    has_wgmma = capability.partition(".")[0] not in ("7", "8")  # products from shared memory, from Hopper on
    return 64 if dtype == jnp.bfloat16 and has_wgmma else 32


def attention(q_u, q_v, k, v, r, kv_start, *, block=None, window=None, drop=None, device=None, interpret=False):
    """`attention` of txl.py, with its arguments and result, for float32 and bfloat16; drop must be None.

    block: queries and keys of a tile, a power of two and at least 16; None: `best_block`.
    device: gpu or tpu, None: the one that is there; interpret: run that one's program on any device, for tests.
    """
    device = device or jax.default_backend()
    check(device)
    if drop is not None or q_u.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"attention=pallas knows no dropatt and no {q_u.dtype}: give chunked or dense")
    T, K, S = *q_u.shape[2:], k.shape[2]
    N = block or best_block(device, q_u.dtype)
    n, n_keys, channels = -(-T // N), -(-S // N), max(16, 1 << (K - 1).bit_length())
    reach = min(-(-((window or S) - 1) // N), n_keys - 1)
    tiles = Tiles(N, n, n_keys - n, reach, device, interpret)
    kv_start = jnp.pad(jnp.maximum(kv_start, 0) + n_keys * N - S, ((0, 0), (n * N - T, 0)))
    r = jnp.pad(_pad(r[None, :, :S], n_keys * N, channels), ((0, 0), (0, 0), (0, N), (0, 0)))
    at_once, (B, H) = len(q_u), q_u.shape[:2]
    if device == "gpu" and (n * N, n_keys * N, channels) != (T, S, K):  # as few rows as occupy all programs twice
        enough = [rows for rows in range(1, B + 1) if B % rows == 0 and rows * H * n >= 2 * PROGRAMS]
        at_once = min(enough, default=B)
    return _attention(tiles, at_once, q_u, q_v, k, v, r, kv_start[:, None, :, None])
