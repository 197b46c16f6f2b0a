"""Transformer-XL (Dai et al. 2019, arXiv:1901.02860): parameters are a dict of arrays, the model is functions of them.

The path of the data, which is the order of this file:

    ids [B, T] -> embed -> x [B, T, D] -> L layers, each over (memory [B, M, D], x) -> hidden [B, T, D]
               -> cross_entropy [B, T] in training, logits [B, T, V] in generation

A layer attends over S = M + T keys, memory first; the newest M of its inputs are the next segment's memory.

    b B  rows, each one stream of text         h H  attention heads        d D  channels of the model
    t T  positions of the segment (queries)    k K  channels of a head     e E  channels of an embedding table
    s S  key positions                         c C  H and K joined         f F  channels inside the feed-forward layer
    x X  rows of the position table            l L  layers                 v V  vocabulary
    M    memory length                         n N  rows joined with positions [B * T], in decoding with heads [B * H]
    Q W  the queries and the keys of one block of chunked attention
"""

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

DTYPES = ("float32", "bfloat16", "float64")
REMAT = ("none", "dots", "full")
ATTENTION = ("auto", "dense", "chunked", "pallas")
MASK_VALUE = -1e30  # the score of a key that a query may not see: finite, so that no gradient is NaN


# config and parameters


def check_fields(config, zero=()):
    """Checks the types and ranges of a frozen dataclass and makes lists tuples, whole numbers floats, as fields want.

    A number's least value is 1 (whole) or above 0 (float), or its default if that is less; 0 for the fields in `zero`.
    ValueError names the field, what was found and what is wanted.
    """
    for f in fields(config):
        value, kind = getattr(config, f.name), type(f.default)
        if kind is tuple and isinstance(value, list):
            object.__setattr__(config, f.name, tuple(value))  # JSON has no tuples
        elif kind is float and type(value) is int:
            object.__setattr__(config, f.name, float(value))
        elif type(value) is not kind:
            raise ValueError(f"{f.name}={value!r} is a {type(value).__name__}: give a {kind.__name__}")
        if kind is float:
            above = f.default > 0 and f.name not in zero
            if not math.isfinite(value) or value < 0 or (above and value == 0):
                raise ValueError(f"{f.name}={value} is out of range: give {'more than 0' if above else '0 or more'}")
        if kind is int:
            least = 0 if f.name in zero else 1
            if value < least and value != f.default:
                default = f"{f.default}, " if f.default < least else ""
                raise ValueError(f"{f.name}={value} is out of range: give {default}{least} or more")
            if value >= 2**31:
                raise ValueError(f"{f.name}={value} is out of range: give less than 2**31")


@dataclass(frozen=True)
class Config:
    # model
    n_token: int = 256  # vocabulary size; taken from the text in training
    n_layer: int = 4  # layers
    n_head: int = 4  # attention heads
    d_model: int = 192  # width of the model
    d_head: int = 48  # width of a head
    d_inner: int = 768  # width inside the feed-forward layer
    d_embed: int = 0  # width of the (first) embedding table; 0: d_model
    mem_len: int | tuple = 128  # hidden states remembered per layer; with --eval_only several lengths: 0,64,128
    dropout: float = 0.0  # share of activations dropped in training
    dropatt: float = 0.0  # share of attention weights dropped in training
    clamp_len: int = -1  # distances beyond this count as this; -1: no clamp
    reset_on: int | str = -1  # id, or text of one token, that starts a document: nothing sees across it; -1: none
    same_length: bool = False  # every query sees itself and exactly mem_len tokens before it
    pre_norm: bool = False  # layer norm before each sublayer instead of after it
    tie_weight: bool = True  # the output table is the embedding table
    tie_projs: tuple = ()  # for each cluster: its output projection is the embedding's; (): all but the first
    untie_r: bool = False  # biases u and v of each layer's own instead of one pair for all
    cutoffs: tuple = ()  # adaptive softmax: first ids of the tail clusters, ascending; (): one softmax
    div_val: int = 1  # adaptive softmax: each tail cluster's embedding is this many times narrower
    # memory: none of these changes a result beyond rounding, but dtype
    remat: str = "dots"  # recomputed in the backward pass: none, dots (all but weight products), full (whole layers)
    attention: str = "auto"  # dense, chunked, pallas (GPU, TPU); auto: chunked on a CPU and from 4 blocks of queries
    attn_block: int = 128  # queries at a time in chunked attention
    layer_rows: int = 0  # rows at a time in what is recomputed (chunked, remat=full); 0: few on a CPU, else all
    loss_chunk: int = 0  # tokens whose logits exist at a time; 0: all
    dtype: str = "float32"  # what layers compute in and memory holds: float32, bfloat16, float64

    def __post_init__(self):
        check_fields(self, zero=("mem_len", "reset_on"))
        for name, known in (("dtype", DTYPES), ("remat", REMAT), ("attention", ATTENTION)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown: give one of {', '.join(known)}")
        for name in ("dropout", "dropatt"):
            if getattr(self, name) >= 1:
                raise ValueError(f"{name}={getattr(self, name)} is out of range: give 0 <= {name} < 1")
        if self.reset_on >= self.n_token:
            raise ValueError(f"reset_on={self.reset_on} is no id: give -1 to {self.n_token - 1}")
        if self.attention == "pallas" and (self.dropatt or self.dtype == "float64"):
            found = f"dropatt={self.dropatt}, dtype={self.dtype}"
            raise ValueError(f"attention=pallas has no dropatt and no float64, here {found}: give chunked or dense")
        if self.d_model % 2:
            raise ValueError(f"d_model={self.d_model} is odd: sines and cosines need an even width")
        edges = (0, *self.cutoffs, self.n_token)
        if not all(type(c) is int for c in self.cutoffs) or any(a >= b for a, b in zip(edges, edges[1:])):
            raise ValueError(f"cutoffs={self.cutoffs}: give ids of 1 to n_token - 1 = {self.n_token - 1}, ascending")
        if self.tie_projs and (len(self.tie_projs) != len(edges) - 1 or any(t not in (0, 1) for t in self.tie_projs)):
            raise ValueError(f"tie_projs={self.tie_projs}: give 0 or 1 for each of {len(edges) - 1} clusters")
        if embed_width(self, len(self.cutoffs)) < 1:
            raise ValueError(f"div_val={self.div_val} leaves the last cluster no width: give a smaller one")


def check_available(cfg):
    """ValueError where this process can't compute a config: float64 without x64, kernels without their device."""
    if cfg.dtype == "float64" and not jax.config.jax_enable_x64:
        raise ValueError("dtype=float64 needs JAX_ENABLE_X64=1: set it, or give float32")
    attention_fn(cfg)


def check_devices():
    """ValueError where jax finds no device, or would run each operation by itself."""
    if jax.config.jax_disable_jit:
        raise ValueError("JAX_DISABLE_JIT=1 runs every operation by itself, far too slowly for a model: unset it")
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as e:
        found = f"jax finds no device for JAX_PLATFORMS={jax.config.jax_platforms}"
        why = " ".join(str(e).split())[:200]
        raise ValueError(f"{found}{why and f' ({why})'}: unset it, or install jax for that device") from None


def acc_dtype(cfg):
    """The dtype of positions, softmax, layer norm statistics, logits and losses: float32 or wider."""
    return jnp.promote_types(cfg.dtype, jnp.float32)


class Cluster(NamedTuple):
    """A part of the vocabulary with a softmax of its own (Grave et al. 2016, arXiv:1609.04309)."""

    start: int  # first id
    stop: int  # first id after it
    table: int  # which embedding table holds its rows
    rows: slice  # and where


def embed_width(cfg, table):
    """Channels of embedding table number `table`."""
    return (cfg.d_embed or cfg.d_model) // cfg.div_val**table


def clusters(cfg):
    """The vocabulary's clusters, the most frequent ids first; a single one without `cutoffs`."""
    edges = (0, *cfg.cutoffs, cfg.n_token)
    spans = list(zip(edges, edges[1:]))
    if cfg.div_val == 1:  # one table for all
        return [Cluster(a, b, 0, slice(a, b)) for a, b in spans]
    return [Cluster(a, b, i, slice(0, b - a)) for i, (a, b) in enumerate(spans)]


def out_proj_name(cfg, i):
    """The parameter that projects hidden states to cluster i's width, or None where none is needed."""
    table = clusters(cfg)[i].table
    if cfg.div_val == 1 and embed_width(cfg, 0) == cfg.d_model:
        return None
    tied = cfg.tie_projs[i] if cfg.tie_projs else i > 0
    return f"embed_proj_{table}" if tied else f"out_proj_{i}"


def param_shapes(cfg):
    """The parameter table: {name: float32 ShapeDtypeStruct}, the layers' under "layers" with a leading L."""
    L, H, D, K, F = cfg.n_layer, cfg.n_head, cfg.d_model, cfg.d_head, cfg.d_inner
    shapes = {
        "u": (L, H, K) if cfg.untie_r else (H, K),  # u of the paper: added to queries against content
        "v": (L, H, K) if cfg.untie_r else (H, K),  # and v: against positions
        "layers": {
            "w_q": (L, D, H, K),
            "w_k": (L, D, H, K),  # W_k,E of the paper
            "w_v": (L, D, H, K),
            "w_r": (L, D, H, K),  # W_k,R
            "w_o": (L, H, K, D),
            "ln1_scale": (L, D),
            "ln1_bias": (L, D),
            "w_1": (L, D, F),
            "b_1": (L, F),
            "w_2": (L, F, D),
            "b_2": (L, D),
            "ln2_scale": (L, D),
            "ln2_bias": (L, D),
        },
    }
    parts = clusters(cfg)
    for i in {part.table for part in parts}:
        rows, E = sum(part.stop - part.start for part in parts if part.table == i), embed_width(cfg, i)
        shapes[f"embed_{i}"] = (rows, E)
        shapes[f"out_bias_{i}"] = (rows,)
        if not cfg.tie_weight:
            shapes[f"out_{i}"] = (rows, E)
        if out_proj_name(cfg, 0):
            shapes[f"embed_proj_{i}"] = (E, D)
    for i, part in enumerate(parts):
        if name := out_proj_name(cfg, i):
            shapes[name] = (embed_width(cfg, part.table), D)
    if cfg.cutoffs:
        shapes["cluster"] = (len(cfg.cutoffs), embed_width(cfg, 0))
        shapes["cluster_bias"] = (len(cfg.cutoffs),)
    struct = lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.tree.map(struct, shapes, is_leaf=lambda x: isinstance(x, tuple))


def count_params(cfg):
    """The number of parameters."""
    return sum(math.prod(a.shape) for a in jax.tree.leaves(param_shapes(cfg)))


def init_params(key, cfg):
    """Parameters for `param_shapes`: scales 1, biases 0, all else normal with the original's deviation 0.02."""
    leaves, tree = jax.tree.flatten_with_path(param_shapes(cfg))
    values = []
    for leaf_key, (path, leaf) in zip(jax.random.split(key, len(leaves)), leaves):
        name = path[-1].key
        if name.endswith("_scale"):
            values.append(jnp.ones(leaf.shape, leaf.dtype))
        elif "bias" in name or name.startswith("b_"):
            values.append(jnp.zeros(leaf.shape, leaf.dtype))
        else:
            values.append(0.02 * jax.random.normal(leaf_key, leaf.shape, leaf.dtype))
    return jax.tree.unflatten(tree, values)


class Mems(NamedTuple):
    h: jax.Array  # [L, B, M, D] in cfg.dtype: the layers' inputs, oldest first, the real ones last
    fill: jax.Array  # [B] int32: how many of M are real


def init_mems(cfg, batch):
    """Empty memory for `batch` rows."""
    shape = (cfg.n_layer, batch, cfg.mem_len, cfg.d_model)
    return Mems(jnp.zeros(shape, cfg.dtype), jnp.zeros(batch, jnp.int32))


# from ids to the first layer: embedding, positions, what each query may see, dropout


def embed(params, ids, cfg):
    """Scaled embeddings [B, T, D] in cfg.dtype of ids [B, T]."""
    x = 0
    ids = ids.astype(jnp.int32)  # in uint8, 256 would be 0
    for i, start in {part.table: part.start - part.rows.start for part in clusters(cfg)}.items():
        table = params[f"embed_{i}"]
        rows = table[jnp.clip(ids - start, 0, len(table) - 1)].astype(cfg.dtype)
        if f"embed_proj_{i}" in params:
            rows = jnp.einsum("bte,ed->btd", rows, params[f"embed_proj_{i}"].astype(cfg.dtype))
        inside = (ids >= start) & (ids < start + len(table))
        x = x + jnp.where(inside[..., None], rows, 0)
    return x * jnp.asarray(math.sqrt(cfg.d_model), cfg.dtype)


def sinusoidal_embedding(distances, cfg):
    """Position table [X, D] in cfg.dtype for distances [X]: sines, then cosines, computed wide and rounded once."""
    # Unlike the original: no dropout here, since masks belong to rows and all rows share this table.
    if cfg.clamp_len > 0:
        distances = jnp.minimum(distances, cfg.clamp_len)
    frequencies = 10000.0 ** (-jnp.arange(0, cfg.d_model, 2, acc_dtype(cfg)) / cfg.d_model)
    angles = jnp.outer(distances.astype(acc_dtype(cfg)), frequencies)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], 1).astype(cfg.dtype)


def attention_starts(ids, fill, cfg):
    """kv_start [B, T]: query t of ids [B, T] sees the keys kv_start <= s <= t + M; and memory's new fill [B].

    How much of memory is real, same_length and the starts of documents all become this one number per query.
    """
    (B, T), M = ids.shape, cfg.mem_len
    kv_start = jnp.broadcast_to((M - fill)[:, None], (B, T))
    new_fill = jnp.minimum(fill + T, M)
    if cfg.same_length:
        kv_start = jnp.maximum(kv_start, jnp.arange(T)[None])
    if cfg.reset_on >= 0:
        starts = jnp.where(ids == cfg.reset_on, M + jnp.arange(T)[None], 0)
        document = lax.cummax(starts, 1)  # start of the newest document
        kv_start = jnp.maximum(kv_start, document)
        last = document[:, -1]
        new_fill = jnp.where(last > 0, jnp.minimum(M + T - last, M), new_fill)
    return kv_start, new_fill


# Dropout is a counter hash: a mask depends on the row's key, the layer, the site and the entry's index, never on how
# rows, heads or blocks are split up. Sites of a layer: 0 attention weights, 1 attention's output, 2 inside the
# feed-forward layer, 3 its output. As layer n_layer: 0 the first layer's input, 1 the last layer's output.


def hash32(x):
    """A 32-bit mixer: two rounds of multiply and shift (constants: C. Wellons' search, lowbias32)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def dropout_seeds(key, layer_index, dropout_site):
    """[B, 2] uint32 from one key per row [B]."""
    bits = jax.vmap(lambda k: jax.random.bits(k, (2,), jnp.uint32))(key)
    return bits ^ hash32(jnp.uint32(layer_index) * 8 + dropout_site)


def hash_dropout(x, seeds, counter, rate):
    """x with a share `rate` of its entries 0 and the rest scaled up. counter, as x but 1 for B: indices, uint32."""
    seeds = seeds.reshape(-1, 2, *(1,) * (x.ndim - 1))
    bits = hash32(hash32(counter ^ seeds[:, 0]) ^ seeds[:, 1])
    return jnp.where(bits >= jnp.uint32(rate * 2**32), x * (1 / (1 - rate)), 0)


def dropout(x, key, layer_index, dropout_site, cfg):
    """Dropout of x [B, T, D]; key None or rate 0: x."""
    if key is None or not cfg.dropout:
        return x
    counter = lax.iota(jnp.uint32, x.shape[1] * x.shape[2]).reshape(1, *x.shape[1:])
    return hash_dropout(x, dropout_seeds(key, layer_index, dropout_site), counter, cfg.dropout)


# relative attention (equation 2 of the paper)


def attention_block(cfg, T):
    """Queries at a time in chunked attention of segments of T; None: dense or pallas."""
    kind = cfg.attention
    if kind in ("auto", "chunked") and cfg.remat == "full" and T <= cfg.attn_block:
        return None  # scores of one block are recomputed with their layer
    if kind == "auto":  # on a CPU, scores that stay in its cache are worth computing twice
        kind = "chunked" if jax.default_backend() == "cpu" or T >= 4 * cfg.attn_block else "dense"
    return cfg.attn_block if kind == "chunked" else None


def keeps_projections(cfg, T):
    """Whether queries, keys and values of a segment of T are kept for the backward pass, unless remat is full.

    Those of segments longer than a block of chunked attention are recomputed, a few rows at a time, with their scores.
    """
    return T <= (attention_block(cfg, T) or T)


def attention_fn(cfg):
    """The attention function of a config. ValueError where this machine's devices can't run it."""
    if cfg.attention != "pallas":
        return attention
    try:
        import kernels
    except ModuleNotFoundError as e:
        if e.name != "kernels":
            raise
        raise ValueError("attention=pallas needs kernels.py beside txl.py: restore it, or give chunked") from None
    kernels.check(jax.default_backend())
    return kernels.attention


def attention(q_u, q_v, k, v, r, kv_start, *, block, window=None, drop=None):
    """q_u, q_v [B, H, T, K], k, v [B, H, S, K], r [H, X, K], kv_start [B, T] -> [B, H, T, K].

    Queries come scaled, with the biases u and v added. Query t sees the keys kv_start <= s <= t + S - T. Row x of r is
    the position of distance S - 1 - x; rows from S on may hold anything (one of them saves a copy: X = S + 1).
    block: queries at a time, whose scores are computed again in the backward pass; None: dense, all scores are kept.
    window: keys that a query sees at most, itself included. drop: (seeds [B, 2], rate) or None.
    """
    (B, H, T, K), S = q_u.shape, k.shape[2]
    M, Q = S - T, min(block or T, T)
    pad = -T % Q
    blocks, W = (T + pad) // Q, min(S + pad, (window or S + pad) + Q - 1)
    seeds, dropatt = (drop[0], (drop[1], T, S)) if drop else (None, None)
    # Queries and keys that pad T to whole blocks come last, so r gets rows for greater distances first. Behind it come
    # rows that no query meets: dynamic_slice would move a start that is too far right.
    q_u, q_v, k, v = (jnp.pad(a, ((0, 0), (0, 0), (0, pad), (0, 0))) for a in (q_u, q_v, k, v))
    kv_start = jnp.pad(kv_start, ((0, 0), (0, pad)))
    behind = S + (1 if blocks == 1 else T + pad) - r.shape[1]
    r = jnp.pad(r, ((0, 0), (pad, max(behind, 0)), (0, 0)))
    attend = attend_block if block is None else attend_block_remat

    def one_block(args):
        q_u, q_v, kv_start, i = args
        start = jnp.clip(i * Q + M + Q - W, 0, S + pad - W)
        t, s = i * Q + M + jnp.arange(Q), start + jnp.arange(W)
        k_block, v_block = (lax.dynamic_slice_in_dim(a, start, W, 2) for a in (k, v))
        r_block = lax.dynamic_slice_in_dim(r, start + (blocks - 1 - i) * Q, W + 1, 1)
        return attend(q_u, q_v, k_block, v_block, r_block, kv_start, t, s, seeds, dropatt)[0]

    if blocks == 1:
        return one_block((q_u, q_v, kv_start, 0))
    split = lambda a: jnp.moveaxis(a.reshape(B, H, blocks, Q, K), 2, 0)
    args = (split(q_u), split(q_v), kv_start.reshape(B, blocks, Q).swapaxes(0, 1), jnp.arange(blocks))
    out = lax.map(jax.checkpoint(one_block, policy=KEEP_ATTENDED), args)
    return jnp.moveaxis(out, 0, 2).reshape(B, H, T + pad, K)[:, :, :T]


@jax.custom_vjp
def score_product(q, k):
    """q [..., T, K], k [..., S, K] -> [..., T, S], float32 or wider; its gradient is written out for `key_product`."""
    return jnp.einsum("...tk,...sk->...ts", q, k, preferred_element_type=jnp.promote_types(q.dtype, jnp.float32))


def key_product(dscores, q):
    """The gradient of keys: dscores [..., T, S], q [..., T, K] -> [..., S, K] in q's dtype."""
    # XLA on a CPU sums over the second last axis of both at a quarter of its speed, unless q is transposed before.
    q = lax.optimization_barrier(q.swapaxes(-1, -2))
    out = jnp.einsum("...kt,...ts->...ks", q, dscores, preferred_element_type=jnp.promote_types(q.dtype, jnp.float32))
    return lax.optimization_barrier(out).swapaxes(-1, -2).astype(q.dtype)


def score_product_backward(saved, dscores):
    q, k = saved
    dq = jnp.einsum("...ts,...sk->...tk", dscores, k, preferred_element_type=dscores.dtype).astype(q.dtype)
    return dq, key_product(dscores, q)


score_product.defvjp(lambda q, k: (score_product(q, k), (q, k)), score_product_backward)


def attention_scores(q_u, q_v, k, r, kv_start, t, s):
    """Scores [B, H, Q, W] of queries [B, H, Q, K] and keys [B, H, W, K]; t [Q], s [W]: their places among all keys.

    The last query meets key w at row w of r [H, W + 1, K]; the extra row is never visible.
    """
    (B, H, Q, K), W = q_u.shape, len(s)
    content = score_product(q_u, k)  # terms (a) and (c) of the paper
    # Terms (b) and (d). All rows meet the same positions: one product a head, which is twice as fast on a CPU.
    position = score_product(q_v.swapaxes(0, 1).reshape(H, B * Q, K), r)
    # The relative shift: row t moves left by Q - 1 - t, by reading the same numbers in rows that are one shorter.
    position = position.reshape(H, B, Q * (W + 1))[:, :, Q - 1 : Q - 1 + Q * W].reshape(H, B, Q, W).swapaxes(0, 1)
    visible = (kv_start[:, None, :, None] <= s) & (s <= t[:, None])  # [B, 1, Q, W]
    return jnp.where(visible, content + position, MASK_VALUE)


def drop_weights(weights, t, s, seeds, dropatt):
    """Attention dropout of weights [B, H, Q, W]; dropatt: (rate, T, S) with the sizes of all weights, or None."""
    if dropatt is None:
        return weights
    rate, T, S = dropatt
    H = weights.shape[1]
    query = lax.iota(jnp.uint32, H)[:, None, None] * T + (t - (S - T)).astype(jnp.uint32)[:, None]
    return hash_dropout(weights, seeds, (query * S + s.astype(jnp.uint32))[None], rate)


def attend_block(q_u, q_v, k, v, r, kv_start, t, s, seeds, dropatt):
    """Attention of a block of queries -> [B, H, Q, K], and the logsumexp of its scores [B, H, Q, 1]."""
    weights, total, top = unnormalized_softmax(attention_scores(q_u, q_v, k, r, kv_start, t, s))
    dropped = drop_weights(weights, t, s, seeds, dropatt).astype(v.dtype)
    out = jnp.einsum("bhts,bhsk->bhtk", dropped, v, preferred_element_type=total.dtype)
    return (out / total).astype(v.dtype), top + jnp.log(total)


# The same, keeping for the backward pass nothing of size Q x W: scores are computed again there, and softmax's gradient
# is written out (Dao et al. 2022, arXiv:2205.14135, appendix B). Autodiff under jax.checkpoint would also multiply by v
# again. A change to the scores needs no change here.
attend_block_remat = jax.custom_vjp(attend_block, nondiff_argnums=(9,))


def attend_block_forward(*args):
    out, lse = (checkpoint_name(a, "attended") for a in attend_block(*args))
    return (out, lse), (args[:-1], out, lse)


def attend_block_backward(dropatt, saved, cotangents):
    (q_u, q_v, k, v, r, kv_start, t, s, seeds), out, lse = saved
    dout, _ = cotangents  # lse goes nowhere else
    scores, scores_vjp = jax.vjp(lambda *args: attention_scores(*args, kv_start, t, s), q_u, q_v, k, r)
    weights = jnp.exp(scores - lse)
    dropped = drop_weights(weights, t, s, seeds, dropatt).astype(v.dtype)
    dv = key_product(dropped, dout)
    dweights = jnp.einsum("bhtk,bhsk->bhts", dout, v, preferred_element_type=scores.dtype)
    dweights = drop_weights(dweights, t, s, seeds, dropatt)
    mean = (dout.astype(scores.dtype) * out).sum(-1, keepdims=True)  # sum of weights * dweights
    dscores = lax.optimization_barrier(weights * (dweights - mean))  # without it XLA computes this for each of 3 uses
    dq_u, dq_v, dk, dr = scores_vjp(dscores)
    return dq_u, dq_v, dk, dv, dr, None, None, None, None


attend_block_remat.defvjp(attend_block_forward, attend_block_backward)


def unnormalized_softmax(scores):
    """Softmax over the last axis as weights, their sum, the maximum subtracted; all masked: weights 0, not NaN."""
    top = lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), MASK_VALUE / 2))
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    return weights, jnp.where(total == 0, 1, total), top


# one layer; p: its parameters in cfg.dtype


def layer_norm(x, scale, bias):
    """Layer norm over the last axis, statistics in float32 or wider."""
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    y = y - y.mean(-1, keepdims=True)
    y = y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-5)
    lead = (1,) * (y.ndim - 1)
    return (y * scale.reshape(*lead, -1) + bias.reshape(*lead, -1)).astype(x.dtype)


def project_heads(w, x, cfg):
    """x [B, T, D] by w [D, H, K], or by w [D, C] of `unstack`, -> [B, H, T, K]."""
    if w.ndim == 3:
        return jnp.einsum("btd,dhk->bhtk", x, w)
    # XLA on a CPU would transpose weights of the other form at every call.
    return jnp.einsum("btd,dc->btc", x, w).reshape(*x.shape[:2], cfg.n_head, cfg.d_head).swapaxes(1, 2)


def project_q(p, x, cfg):
    """Scaled queries of x [B, T, D] with u and with v added: two [B, H, T, K]."""
    return add_biases(p, project_heads(p["w_q"], x, cfg), cfg)


def add_biases(p, q, cfg):
    """Queries [B, H, T, K] scaled, with u added and with v added."""
    scale = jnp.asarray(cfg.d_head**-0.5, cfg.dtype)
    return tuple((q + p[bias][None, :, None]) * scale for bias in ("u", "v"))


def join_kv(w_k, w_v):
    """[..., D, 2 C]: one product for keys and values is faster than two."""
    return jnp.concatenate([w.reshape(*w.shape[:-2], -1) for w in (w_k, w_v)], -1)


def project_kv(p, x, cfg):
    """Keys and values [B, H, S, K] of x [B, S, D]."""
    w_kv = p["w_kv"] if "w_kv" in p else join_kv(p["w_k"], p["w_v"])
    kv = jnp.einsum("nd,dc->nc", x.reshape(-1, cfg.d_model), w_kv).reshape(*x.shape[:2], 2, cfg.n_head, cfg.d_head)
    return kv[:, :, 0].swapaxes(1, 2), kv[:, :, 1].swapaxes(1, 2)


def project_r(p, distances, cfg):
    """Projected positions [H, X, K] of distances [X]."""
    return jnp.einsum("xd,dhk->hxk", sinusoidal_embedding(distances, cfg), p["w_r"])


def output_projection(p, x, out, cfg, *, layer_index=0, key=None):
    """The end of the attention sublayer: its input x [B, T, D] and heads' outputs [B, H, T, K] -> [B, T, D]."""
    out = checkpoint_name(jnp.einsum("bhtk,hkd->btd", out, p["w_o"]), "product")
    x = x + dropout(out, key, layer_index, 1, cfg)
    return x if cfg.pre_norm else layer_norm(x, p["ln1_scale"], p["ln1_bias"])


def attention_sublayer(p, x, mem, kv_start, positions, cfg, *, layer_index=0, key=None):
    """x [B, T, D] attends over memory [B, M, D] and itself -> [B, T, D]. positions [S, D]: the sinusoids."""
    with jax.named_scope("attention"):
        cat = jnp.concatenate([mem, x], 1)
        if cfg.pre_norm:
            cat = layer_norm(cat, p["ln1_scale"], p["ln1_bias"])
        q = project_heads(p["w_q"], cat[:, cfg.mem_len :], cfg)
        k, v = project_kv(p, cat, cfg)
        r = jnp.einsum("xd,dhk->hxk", positions, p["w_r"])
        T, block = x.shape[1], attention_block(cfg, x.shape[1])
        if keeps_projections(cfg, T):
            q, k, v, r = (checkpoint_name(a, "product") for a in (q, k, v, r))
        seeds = dropout_seeds(key, layer_index, 0) if key is not None and cfg.dropatt else None
        window = cfg.mem_len + 1 if cfg.same_length else None

        def attend(q, k, v, kv_start, seeds):
            drop = None if seeds is None else (seeds, cfg.dropatt)
            q_u, q_v = add_biases(p, q, cfg)
            return attention_fn(cfg)(q_u, q_v, k, v, r, kv_start, block=block, window=window, drop=drop)

        xs = (q, k, v, kv_start, seeds)
        out = map_rows(attend, xs, cache_friendly_rows(T, cfg), cfg, KEEP_ATTENDED) if block else attend(*xs)
        return output_projection(p, x, out, cfg, layer_index=layer_index, key=key)


def feed_forward(p, x, cfg, *, layer_index=0, key=None):
    """The feed-forward sublayer: x [B, T, D] -> [B, T, D]."""
    with jax.named_scope("feed_forward"):
        y = layer_norm(x, p["ln2_scale"], p["ln2_bias"]) if cfg.pre_norm else x
        y = y.reshape(-1, cfg.d_model)  # XLA on a CPU wants matrices here
        y = checkpoint_name(jnp.einsum("nd,df->nf", y, p["w_1"]), "product")
        y = jax.nn.relu(y + p["b_1"][None])
        y = dropout(y.reshape(*x.shape[:2], cfg.d_inner), key, layer_index, 2, cfg).reshape(y.shape)
        y = checkpoint_name(jnp.einsum("nf,fd->nd", y, p["w_2"]), "product")
        y = (y + p["b_2"][None]).reshape(x.shape)
        x = x + dropout(y, key, layer_index, 3, cfg)
        return x if cfg.pre_norm else layer_norm(x, p["ln2_scale"], p["ln2_bias"])


# all layers, under scan and rematerialisation

# What a checkpointed function keeps for its backward pass, by the names given with checkpoint_name: what attention of
# one block returns; with it, of a layer, the products with weights.
KEEP_ATTENDED = jax.checkpoint_policies.save_only_these_names("attended")
KEEP_PRODUCTS = jax.checkpoint_policies.save_only_these_names("attended", "product")
# Ops that gather sharded weights; recomputed in the backward pass where all else is kept.
GATHER_OPS = ("all_gather", "slice", "reshape", "transpose", "squeeze", "convert_element_type")


def cache_friendly_rows(T, cfg):
    """Rows whose scores [T, S] of one head are at most 2**17 together, which stay in a CPU's cache."""
    return max(2**17 // (T * (cfg.mem_len + T)), 1)


def map_rows(f, xs, cpu_rows, cfg, policy=None):
    """f(*xs) -> [B, ...] for `layer_rows` rows at a time (0: `cpu_rows` on a CPU, else all), recomputed backward.

    policy: what of it is kept for the backward pass, as jax.checkpoint takes it.
    """
    B = len(xs[0])
    most = cfg.layer_rows or (cpu_rows if jax.default_backend() == "cpu" else B)
    rows = max(n for n in range(1, min(most, B) + 1) if B % n == 0)
    if rows == B:
        return f(*xs) if cfg.remat == "full" else jax.checkpoint(f, prevent_cse=False, policy=policy)(*xs)
    split = jax.tree.map(lambda a: a.reshape(B // rows, rows, *a.shape[1:]), xs)
    out = lax.map(jax.checkpoint(lambda part: f(*part), prevent_cse=False, policy=policy), split)
    return out.reshape(B, *out.shape[2:])


def layer_params(params, cfg):
    """All layers' parameters with a leading L, u and v among them."""
    shared = {name: jnp.broadcast_to(params[name], (cfg.n_layer, cfg.n_head, cfg.d_head)) for name in ("u", "v")}
    return {**params["layers"], **shared}


def scan_layers(layer_fn, x, weights, mem_h, cfg):
    """layer_fn(x, weights, memory, layer_index) over all layers: x [B, T, D] -> output, all inputs [L, B, T, D].

    With remat=full only these inputs are kept for the backward pass. They are the new memory too, so that the gradient
    is written out here: left to autodiff, the stack would exist twice.
    """
    layer_indices = jnp.arange(cfg.n_layer)
    kept = jax.checkpoint(layer_fn, prevent_cse=False, policy=KEEP_PRODUCTS) if cfg.remat == "dots" else layer_fn

    def run(x, weights):
        return lax.scan(lambda x, args: (kept(x, *args), x), x, (weights, mem_h, layer_indices))

    def run_forward(x, weights):
        out, inputs = run(x, weights)
        return (out, inputs), (inputs, weights)

    def run_backward(saved, cotangents):
        def body(dx, args):
            x, weights, mem, layer_index = args
            _, vjp = jax.vjp(lambda x, weights: layer_fn(x, weights, mem, layer_index), x, weights)
            return vjp(dx)

        inputs, weights = saved
        return lax.scan(body, cotangents[0], (inputs, weights, mem_h, layer_indices), reverse=True)

    if cfg.remat != "full":
        return run(x, weights)
    remat_run = jax.custom_vjp(run)
    remat_run.defvjp(run_forward, run_backward)
    return remat_run(x, weights)


def run_layers(params, ids, mems, cfg, key=None, gather_layer=None):
    """What `forward` says -> hidden [B, T, D], the layers' inputs [L, B, T, D] without gradients, new memory."""
    (B, T), M = ids.shape, cfg.mem_len
    want = (cfg.n_layer, B, M, cfg.d_model)
    if mems.h.shape != want or mems.fill.shape != (B,):
        raise ValueError(f"memory is {mems.h.shape}, fill {mems.fill.shape}: ids {ids.shape} and config want {want}")
    entries = cfg.n_head * T * (M + T) if cfg.dropatt else T * max(cfg.d_model, cfg.d_inner) if cfg.dropout else 0
    if key is not None and entries > 2**32:
        raise ValueError(f"dropout counts {entries:,} entries of a row in 32 bits: give a shorter tgt_len or mem_len")
    mem_h = lax.stop_gradient(mems.h)
    positions = sinusoidal_embedding(jnp.arange(M + T - 1, -1, -1), cfg)
    kv_start, fill = attention_starts(ids, mems.fill, cfg)
    real = (jnp.arange(M)[None] >= M - mems.fill[:, None])[..., None]  # [B, M, 1]

    def layer_fn(x, weights, mem, layer_index):
        weights = gather_layer(weights) if gather_layer else weights
        p = jax.tree.map(lambda a: a.astype(cfg.dtype), weights)
        rest = dict(layer_index=layer_index)

        def attend(x, mem, real, kv_start, key):
            mem = jnp.where(real, mem, 0)  # whatever stands there, NaN too, must not reach a product
            return attention_sublayer(p, x, mem, kv_start, positions, cfg, key=key, **rest)

        def whole_layer(x, mem, real, kv_start, key):
            return feed_forward(p, attend(x, mem, real, kv_start, key), cfg, key=key, **rest)

        xs = (x, mem, real, kv_start, key)
        if cfg.remat == "full":
            return map_rows(whole_layer, xs, max(256 // T, 1), cfg)
        if keeps_projections(cfg, T):
            return whole_layer(*xs)
        out = map_rows(attend, xs, cache_friendly_rows(T, cfg), cfg, KEEP_ATTENDED)
        return feed_forward(p, out, cfg, key=key, **rest)

    if gather_layer and cfg.remat == "none":  # keep all for the backward pass but gathered weights
        keep = KEEP_PRODUCTS if attention_block(cfg, T) else lambda op, *_, **__: op.name not in GATHER_OPS
        layer_fn = jax.checkpoint(layer_fn, prevent_cse=False, policy=keep)
    x = dropout(embed(params, ids, cfg), key, cfg.n_layer, 0, cfg)
    x, inputs = scan_layers(layer_fn, x, layer_params(params, cfg), mem_h, cfg)
    inputs = lax.stop_gradient(inputs)
    h = inputs[:, :, T - M :] if T >= M else jnp.concatenate([mem_h[:, :, T:], inputs], 2)
    return dropout(x, key, cfg.n_layer, 1, cfg), inputs, Mems(h, fill)


def forward(params, ids, mems, cfg, *, key=None, gather_layer=None):
    """ids [B, T], memory -> hidden [B, T, D], new memory. key [B]: one per row, for dropout; None: evaluation.

    gather_layer: a function from a layer's slice of params["layers"] to its weights, where they are kept sharded.
    T is any length >= 1. ValueError where memory doesn't fit ids or cfg, or dropout's counter is too small.
    """
    hidden, _, mems = run_layers(params, ids, mems, cfg, key, gather_layer)
    return hidden, mems


def hidden_states(params, ids, mems, cfg):
    """ids [B, T], memory -> [L + 1, B, T, D]: each layer's input, then the last one's output; new memory."""
    hidden, inputs, mems = run_layers(params, ids, mems, cfg)
    return jnp.concatenate([inputs, hidden[None]]), mems


# from hidden states to logits and losses: softmax, plain or adaptive. The first cluster's softmax also holds one entry
# for each tail cluster, whose own softmax says which of its ids it is.


def cluster_logits(params, hidden, i, cfg):
    """Logits [N, cluster size] of cluster i for hidden [N, D]; the first one's end with one for each tail cluster."""
    part, proj = clusters(cfg)[i], out_proj_name(cfg, i)
    if proj:
        hidden = jnp.einsum("nd,ed->ne", hidden, params[proj].astype(cfg.dtype))
    table = params[f"embed_{part.table}" if cfg.tie_weight else f"out_{part.table}"][part.rows]
    bias = params[f"out_bias_{part.table}"][part.rows]
    if i == 0 and cfg.cutoffs:
        table = jnp.concatenate([table, params["cluster"]])
        bias = jnp.concatenate([bias, params["cluster_bias"]])
    out = jnp.einsum("ne,ve->nv", hidden, table.astype(cfg.dtype), preferred_element_type=acc_dtype(cfg))
    return out + bias[None]


def logits(params, hidden, cfg):
    """Logits [B, T, V], float32 or wider, of hidden [B, T, D]; with `cutoffs` they are log-probabilities."""
    flat = hidden.reshape(-1, cfg.d_model)
    out = cluster_logits(params, flat, 0, cfg)
    if cfg.cutoffs:
        head, parts = jax.nn.log_softmax(out), clusters(cfg)
        tails = [jax.nn.log_softmax(cluster_logits(params, flat, i, cfg)) for i in range(1, len(parts))]
        first = parts[0].stop
        tails = [tail + head[:, first + i, None] for i, tail in enumerate(tails)]
        out = jnp.concatenate([head[:, :first], *tails], 1)
    return out.reshape(*hidden.shape[:-1], cfg.n_token)


def select_nats(logits, index):
    """Nats [N] of column index [N] of logits [N, V]. A comparison, since a gather's gradient is a slow scatter."""
    chosen = jnp.where(lax.iota(index.dtype, logits.shape[1])[None] == index[:, None], logits, 0).sum(1)
    return jax.nn.logsumexp(logits, 1) - chosen


def chunk_cross_entropy(params, hidden, targets, cfg):
    """Nats [N] of targets [N] given hidden [N, D]."""
    parts = clusters(cfg)
    tails = range(1, len(parts))
    cluster = sum(((targets >= parts[i].start).astype(targets.dtype) for i in tails), jnp.zeros_like(targets))
    column = jnp.where(cluster == 0, targets, parts[0].stop - 1 + cluster)
    total = select_nats(cluster_logits(params, hidden, 0, cfg), column)
    for i in tails:
        tail = select_nats(cluster_logits(params, hidden, i, cfg), targets - parts[i].start)
        total = total + jnp.where(cluster == i, tail, 0)
    return total


def cross_entropy(params, hidden, targets, cfg):
    """Nats [B, T], float32 or wider, of targets [B, T]; `loss_chunk` tokens at a time, recomputed backward."""
    with jax.named_scope("loss"):
        N, chunk = targets.size, cfg.loss_chunk
        hidden, flat = hidden.reshape(N, cfg.d_model), targets.reshape(N)
        if not 0 < chunk < N:
            return chunk_cross_entropy(params, hidden, flat, cfg).reshape(targets.shape)
        hidden = jnp.pad(hidden, ((0, -N % chunk), (0, 0))).reshape(-1, chunk, cfg.d_model)
        flat = jnp.pad(flat, (0, -N % chunk)).reshape(-1, chunk)
        body = jax.checkpoint(lambda args: chunk_cross_entropy(params, *args, cfg), prevent_cse=False)
        return lax.map(body, (hidden, flat)).reshape(-1)[:N].reshape(targets.shape)


def token_losses(params, ids, targets, mems, cfg, *, key=None, gather_layer=None):
    """Nats [B, T] of targets [B, T], and new memory."""
    hidden, mems = forward(params, ids, mems, cfg, key=key, gather_layer=gather_layer)
    return cross_entropy(params, hidden, targets, cfg), mems


def loss_fn(params, ids, targets, mems, cfg, *, key=None, gather_layer=None):
    """Mean nats per target, and new memory."""
    losses, mems = token_losses(params, ids, targets, mems, cfg, key=key, gather_layer=gather_layer)
    return losses.mean(), mems


# reading and generating with fixed weights: memory's keys and values are cached instead of its hidden states


class KVCache(NamedTuple):
    k: tuple  # L x [B * H, M + 1, K] in cfg.dtype: a ring buffer of the newest keys
    v: tuple  # the same of values
    r: tuple  # L x [H, M + 1, K]: projected positions of distances M, M - 1, ..., 0
    pos: jax.Array  # int32: where the next token's key goes; before it, going round, stand the tokens before it
    length: jax.Array  # [B] int32: how many of M are real


def unstack(params, cfg):
    """Parameters for `forward_cached`: layers apart and in cfg.dtype, so that no call has to slice or cast them."""
    if isinstance(params["layers"], tuple):
        return params
    stacked = jax.tree.map(lambda a: a.astype(cfg.dtype), layer_params(params, cfg))
    stacked["w_q"] = stacked["w_q"].reshape(cfg.n_layer, cfg.d_model, -1)
    stacked["w_kv"] = join_kv(stacked.pop("w_k"), stacked.pop("w_v"))
    layers = tuple(jax.tree.map(lambda a: a[i], stacked) for i in range(cfg.n_layer))
    return {**params, "layers": layers}


def init_cache(params, cfg, batch):
    """An empty cache for `batch` rows under fixed weights, which may be `unstack`ed."""
    # Rows and heads are one axis: with two, XLA on a CPU copies the rings of one row at every token.
    shape = (batch * cfg.n_head, cfg.mem_len + 1, cfg.d_head)
    k, v = (tuple(jnp.zeros(shape, cfg.dtype) for _ in range(cfg.n_layer)) for _ in range(2))
    r = tuple(project_r(p, jnp.arange(cfg.mem_len, -1, -1), cfg) for p in unstack(params, cfg)["layers"])
    return KVCache(k, v, r, jnp.int32(0), jnp.zeros(batch, jnp.int32))


def attend_ring(q_u, q_v, k, v, r, pos, reach):
    """Attention of one query per row [B, H, 1, K] over the rings k, v [B * H, S, K], its own key at `pos`.

    reach [B]: how many tokens back it sees.
    """
    (B, H, _, K), S = q_u.shape, k.shape[1]
    acc = jnp.promote_types(k.dtype, jnp.float32)
    content = jnp.einsum("nk,nsk->ns", q_u.reshape(-1, K), k, preferred_element_type=acc)
    position = jnp.einsum("bhtk,hxk->bhtx", q_v, r, preferred_element_type=acc).reshape(B * H, S)
    # Ring entry s is (pos - s) mod S tokens back: rotate the logits, never the ring.
    position = lax.dynamic_slice_in_dim(jnp.concatenate([position, position], 1), S - 1 - pos, S, 1)
    visible = jnp.repeat((pos - jnp.arange(S))[None] % S <= reach[:, None], H, 0)
    weights, total, _ = unnormalized_softmax(jnp.where(visible, content + position, MASK_VALUE))
    out = jnp.einsum("ns,nsk->nk", weights.astype(v.dtype), v, preferred_element_type=acc)
    return (out / total).astype(v.dtype).reshape(B, H, 1, K)


def attend_segment(p, q_u, q_v, k, v, r, new_k, new_v, kv_start, pos, cfg):
    """Attention of T queries over the rings k, v and their own new keys -> out, the new rings, oldest at 0."""
    (B, H, T, K), M = q_u.shape, cfg.mem_len
    # Without same_length, later queries of a segment see further than M.
    far = jnp.zeros((H, T - 1, K), r.dtype) if cfg.same_length else project_r(p, M + jnp.arange(T - 1, 0, -1), cfg)
    r = lax.dynamic_update_slice_in_dim(jnp.pad(far, ((0, 0), (0, M + 2), (0, 0))), r, T - 1, 1)

    def in_order(ring, new):
        return join(ring[:, 1:], new)

    def rotated(ring, new):
        return join(lax.dynamic_slice_in_dim(jnp.concatenate([ring, ring], 1), (pos + 1) % (M + 1), M, 1), new)

    def join(ring, new):  # -> [B, H, S, K]
        return jnp.concatenate([ring.reshape(B, H, M, K), new], 2)

    # pos is 0 after another segment: nothing to rotate then.
    k, v = (lax.cond(pos == 0, in_order, rotated, ring, new) for ring, new in ((k, new_k), (v, new_v)))
    window = M + 1 if cfg.same_length else None

    def attend(q_u, q_v, k, v, kv_start):
        return attention_fn(cfg)(q_u, q_v, k, v, r, kv_start, block=attention_block(cfg, T), window=window)

    out = map_rows(attend, (q_u, q_v, k, v, kv_start), cache_friendly_rows(T, cfg), cfg)
    return out, *(a[:, :, T - 1 :].reshape(B * H, M + 1, K) for a in (k, v))


def forward_cached(params, ids, cache, cfg):
    """ids [B, T] -> hidden [B, T, D], new cache: what `forward` computes for the same cut of the text.

    ValueError where the cache doesn't fit ids or cfg.
    """
    B, T = ids.shape
    found, want = cache.k[0].shape, (B * cfg.n_head, cfg.mem_len + 1, cfg.d_head)
    if (len(cache.k), found, cache.length.shape) != (cfg.n_layer, want, (B,)):
        found = f"{len(cache.k)} layers of [B * n_head, mem_len + 1, d_head] {found}, length {cache.length.shape}"
        raise ValueError(f"cache is {found}: ids {ids.shape} and config want {cfg.n_layer} of {want}, length {(B,)}")
    x = embed(params, ids, cfg)
    kv_start, length = attention_starts(ids, cache.length, cfg)
    rings = []
    for p, ring_k, ring_v, r in zip(unstack(params, cfg)["layers"], cache.k, cache.v, cache.r):
        h = layer_norm(x, p["ln1_scale"], p["ln1_bias"]) if cfg.pre_norm else x
        q_u, q_v = project_q(p, h, cfg)
        k, v = project_kv(p, h, cfg)
        if T == 1:
            write = lambda ring, new: lax.dynamic_update_slice_in_dim(
                ring, new.reshape(-1, 1, cfg.d_head), cache.pos, 1
            )
            ring_k, ring_v = write(ring_k, k), write(ring_v, v)
            out = attend_ring(q_u, q_v, ring_k, ring_v, r, cache.pos, cfg.mem_len - kv_start[:, 0])
        else:
            out, ring_k, ring_v = attend_segment(p, q_u, q_v, ring_k, ring_v, r, k, v, kv_start, cache.pos, cfg)
        x = feed_forward(p, output_projection(p, x, out, cfg), cfg)
        rings.append((ring_k, ring_v))
    pos = (cache.pos + 1) % (cfg.mem_len + 1) if T == 1 else jnp.int32(0)
    k, v = zip(*rings)
    return x, KVCache(k, v, cache.r, pos, length)


def decode(params, ids, cache, cfg):
    """ids [B, T] -> logits [B, T, V] float32 of `forward_cached`, new cache."""
    hidden, cache = forward_cached(params, ids, cache, cfg)
    return logits(params, hidden, cfg).astype(jnp.float32), cache
