"""Transformer-XL (Dai et al. 2019, arXiv:1901.02860): parameters are a dict of arrays, the model is functions of them.

The path of the data, which is the order of this file (embed and nats are in embedding.py, a layer's parts in layer.py):

    ids [B, T] -> embed -> x [B, T, D] -> L layers, each over (memory [B, M, D], x) -> hidden [B, T, D] -> nats [B, T]

A layer attends over S = M + T keys, memory first; the newest M of its inputs are the next segment's memory.

    b B  rows, each one stream of text         h H  attention heads        d D  channels of the model
    t T  positions of the segment (queries)    k K  channels of a head     e E  channels of an embedding table
    s S  key positions                         c C  H and K joined         f F  channels between feed-forward products
    x X  rows of the position table            l L  layers                 v V  vocabulary
    M    memory length                         n N  rows joined with positions [B * T], in reading with heads [B * H]
"""

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from attention import HIDDEN, softmax_parts
from embedding import clusters, embed, logits, nats, out_proj_name, width
from layer import (
    attended,
    attention_block,
    attention_layer,
    attention_of,
    dropout,
    feed_forward,
    first_visible,
    keys,
    norm,
    queries,
    sinusoids,
)

DTYPES = ("float32", "bfloat16", "float64")
REMAT = ("none", "dots", "full")
ATTENTION = ("auto", "dense", "chunked", "pallas")
DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
# What makes whole weights out of shards: made again going backward, where all else is kept.
MOVES = ("all_gather", "slice", "reshape", "transpose", "squeeze", "convert_element_type")


@dataclass(frozen=True)
class Config:
    # model
    n_token: int = 256  # vocabulary size; taken from the text in training
    n_layer: int = 4  # layers
    n_head: int = 4  # attention heads
    d_model: int = 192  # width of the model
    d_head: int = 48  # width of a head
    d_inner: int = 768  # width of the feed-forward layer
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
    remat: str = "none"  # recomputed in the backward pass: none, dots (all but weight products), full (whole layers)
    attention: str = "auto"  # dense, chunked, pallas (GPU, TPU); auto: chunked on a CPU and from 4 blocks of queries
    attn_block: int = 128  # queries at a time in chunked attention
    layer_rows: int = 0  # rows at a time in what is rebuilt (chunked attention, remat=full); 0: few on a CPU, else all
    loss_chunk: int = 0  # tokens whose logits exist at a time; 0: all
    dtype: str = "float32"  # what layers compute in and memory holds: float32, bfloat16, float64

    def __post_init__(self):
        for f in fields(self):
            value, kind = getattr(self, f.name), type(f.default)
            if kind is tuple and isinstance(value, list):
                object.__setattr__(self, f.name, tuple(value))  # as JSON has it
            elif kind is float and type(value) is int:
                object.__setattr__(self, f.name, float(value))
            elif type(value) is not kind:
                raise ValueError(f"{f.name}={value!r} is a {type(value).__name__}: give a {kind.__name__}")
            low = 0 if f.name in ("mem_len", "d_embed", "loss_chunk", "layer_rows", "reset_on") else 1
            off = f.name in ("clamp_len", "reset_on")  # -1
            if kind is int and value < low and not (off and value == -1):
                raise ValueError(f"{f.name}={value} is out of range: give {'-1, ' * off}{low} or more")
            if kind is int and value >= 2**31:
                raise ValueError(f"{f.name}={value} is out of range: give less than 2**31")
        for name in ("dropout", "dropatt"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is out of range: give 0 <= {name} < 1")
        for name, known in (("dtype", DTYPES), ("remat", REMAT), ("attention", ATTENTION)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown: give one of {', '.join(known)}")
        if self.reset_on >= self.n_token:
            raise ValueError(f"reset_on={self.reset_on} is no id: give -1 to {self.n_token - 1}")
        if self.attention == "pallas" and (self.dropatt or self.dtype == "float64"):
            found = f"dropatt={self.dropatt}, dtype={self.dtype}"
            raise ValueError(f"attention=pallas knows no dropatt and no float64, here {found}: give chunked or dense")
        if self.d_model % 2:
            raise ValueError(f"d_model={self.d_model} is odd: sines and cosines need an even width")
        edges = (0, *self.cutoffs, self.n_token)
        if not all(type(c) is int for c in self.cutoffs) or any(a >= b for a, b in zip(edges, edges[1:])):
            raise ValueError(f"cutoffs={self.cutoffs}: give ids of 1 to n_token - 1 = {self.n_token - 1}, ascending")
        if self.tie_projs and (len(self.tie_projs) != len(edges) - 1 or any(t not in (0, 1) for t in self.tie_projs)):
            raise ValueError(f"tie_projs={self.tie_projs}: give 0 or 1 for each of {len(edges) - 1} clusters")
        if width(self, len(self.cutoffs)) < 1:
            raise ValueError(f"div_val={self.div_val} leaves the last cluster no width: give a smaller one")


def param_shapes(cfg):
    """The parameter table: {name: float32 ShapeDtypeStruct}, the layers' stacked under "layers" on a leading L."""
    L, H, D, K, F = cfg.n_layer, cfg.n_head, cfg.d_model, cfg.d_head, cfg.d_inner
    shapes = {"u": (L, H, K) if cfg.untie_r else (H, K), "v": (L, H, K) if cfg.untie_r else (H, K)}
    parts = clusters(cfg)
    for i in {part.table for part in parts}:
        rows, E = sum(part.stop - part.start for part in parts if part.table == i), width(cfg, i)
        shapes |= {f"embed_{i}": (rows, E), f"out_bias_{i}": (rows,)}
        shapes |= {} if cfg.tie_weight else {f"out_{i}": (rows, E)}
        shapes |= {f"embed_proj_{i}": (E, D)} if out_proj_name(cfg, 0) else {}
    for i, part in enumerate(parts):
        name = out_proj_name(cfg, i)
        shapes |= {name: (width(cfg, part.table), D)} if name else {}
    if cfg.cutoffs:
        shapes |= {"cluster": (len(cfg.cutoffs), width(cfg, 0)), "cluster_bias": (len(cfg.cutoffs),)}
    layer = {"w_q": (D, H, K), "w_k": (D, H, K), "w_v": (D, H, K), "w_r": (D, H, K), "w_o": (H, K, D)}
    layer |= {"w_1": (D, F), "b_1": (F,), "w_2": (F, D), "b_2": (D,)}
    layer |= {"ln1_scale": (D,), "ln1_bias": (D,), "ln2_scale": (D,), "ln2_bias": (D,)}
    shapes["layers"] = {name: (L, *shape) for name, shape in layer.items()}
    leaf = lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.tree.map(leaf, shapes, is_leaf=lambda x: isinstance(x, tuple))


def count_params(cfg):
    """How many numbers a model's parameters are."""
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


def _few(T, cfg):
    """Rows whose scores [T, S] of one head are at most 2**16 together: a CPU's cache holds what is made of them."""
    return max(2**16 // (T * (cfg.mem_len + T)), 1)


def _in_rows(f, xs, few, cfg):
    """f(*xs) -> [B, ...], `layer_rows` of the batch at a time, or `few` of them on a CPU; rebuilt going backward."""
    B = len(xs[0])
    auto = few if jax.default_backend() == "cpu" else B
    rows = max(n for n in range(1, min(cfg.layer_rows or auto, B) + 1) if B % n == 0)
    if rows == B:
        return f(*xs) if cfg.remat == "full" else jax.checkpoint(f, prevent_cse=False)(*xs)
    if rows == 1:
        one = lambda part: f(*jax.tree.map(lambda a: a[None], part))[0]
        return lax.map(jax.checkpoint(one, prevent_cse=False), xs)
    split = jax.tree.map(lambda a: a.reshape(B // rows, rows, *a.shape[1:]), xs)
    out = lax.map(jax.checkpoint(lambda part: f(*part), prevent_cse=False), split)
    return out.reshape(B, *out.shape[2:])


def stacked_layers(params, cfg):
    """All layers' parameters, each with a leading L, u and v among them."""
    bias = {name: jnp.broadcast_to(params[name], (cfg.n_layer, cfg.n_head, cfg.d_head)) for name in ("u", "v")}
    return params["layers"] | bias


def _layers(one, x, weights, h, cfg):
    """one(x, a layer's weights, its memory, its number) over all layers: x [B, T, D] -> output, inputs [L, B, T, D].

    With remat=full only these inputs are kept for the backward pass. They are the new memory too, so that gradients
    are written out here: left to autodiff, the stack would exist twice.
    """
    numbers = jnp.arange(cfg.n_layer)
    kept = jax.checkpoint(one, prevent_cse=False, policy=DOTS) if cfg.remat == "dots" else one

    def plain(x, weights):
        return lax.scan(lambda x, args: (kept(x, *args), x), x, (weights, h, numbers))

    def backward(saved, cotangents):
        def body(dx, args):
            x, weights, mem, number = args
            return jax.vjp(lambda x, weights: one(x, weights, mem, number), x, weights)[1](dx)

        inputs, weights = saved
        return lax.scan(body, cotangents[0], (inputs, weights, h, numbers), reverse=True)

    def forward(x, weights):
        out, inputs = plain(x, weights)
        return (out, inputs), (inputs, weights)

    if cfg.remat != "full":
        return plain(x, weights)
    run = jax.custom_vjp(plain)
    run.defvjp(forward, backward)
    return run(x, weights)


def forward(params, ids, mems, cfg, *, key=None, whole=None):
    """ids [B, T], memory -> hidden [B, T, D], new memory. key [B]: one a row, for dropout; None: evaluation.

    whole: a function from a layer's slice of params["layers"] to its weights, where they are kept in another form.
    T is any length >= 1. Raises ValueError where memory doesn't fit ids or cfg.
    """
    (B, T), want = ids.shape, (cfg.n_layer, ids.shape[0], cfg.mem_len, cfg.d_model)
    if mems.h.shape != want or mems.fill.shape != (B,):
        raise ValueError(f"memory is {mems.h.shape}, fill {mems.fill.shape}: ids {ids.shape} and config want {want}")
    M, h = cfg.mem_len, lax.stop_gradient(mems.h)
    positions = sinusoids(jnp.arange(M + T - 1, -1, -1), cfg)
    lo, fill = first_visible(ids, mems.fill, cfg)
    written = (jnp.arange(M) >= M - mems.fill[:, None])[..., None]  # [B, M, 1]

    def one(x, weights, mem, number):
        p = jax.tree.map(lambda a: a.astype(cfg.dtype), whole(weights) if whole else weights)

        def attend(x, mem, written, lo, key):
            mem = jnp.where(written, mem, 0)  # whatever stands there, NaN too, must not reach a product
            return attention_layer(p, x, mem, lo, positions, cfg, number=number, key=key)

        def layer(x, mem, written, lo, key):
            return feed_forward(p, attend(x, mem, written, lo, key), cfg, number=number, key=key)

        xs = (x, mem, written, lo, key)
        if cfg.remat == "full":
            return _in_rows(layer, xs, max(256 // T, 1), cfg)
        if attention_block(cfg, T) is None:
            return layer(*xs)
        return feed_forward(p, _in_rows(attend, xs, _few(T, cfg), cfg), cfg, number=number, key=key)

    if whole and cfg.remat == "none":  # keep all for the backward pass but whole weights
        keep = DOTS if attention_block(cfg, T) else lambda prim, *_, **__: prim.name not in MOVES
        one = jax.checkpoint(one, prevent_cse=False, policy=keep)
    x = dropout(embed(params, ids, cfg), key, cfg.n_layer, 0, cfg)
    x, inputs = _layers(one, x, stacked_layers(params, cfg), h, cfg)
    inputs = lax.stop_gradient(inputs)
    h = inputs[:, :, T - M :] if T >= M else jnp.concatenate([h[:, :, T:], inputs], 2)
    return dropout(x, key, cfg.n_layer, 1, cfg), Mems(h, fill)


def token_losses(params, ids, targets, mems, cfg, *, key=None, whole=None):
    """Nats [B, T] of targets [B, T], and new memory."""
    hidden, mems = forward(params, ids, mems, cfg, key=key, whole=whole)
    return nats(params, hidden, targets, cfg), mems


def loss_fn(params, ids, targets, mems, cfg, *, key=None, whole=None):
    """Mean nats per target, and new memory."""
    losses, mems = token_losses(params, ids, targets, mems, cfg, key=key, whole=whole)
    return losses.mean(), mems


# reading and generating: with fixed weights, memory's keys and values are kept instead of its hidden states


class Cache(NamedTuple):
    k: tuple  # L x [B * H, M + 1, K] in cfg.dtype: a ring of the newest keys
    v: tuple  # the same of values
    r: tuple  # L x [H, M + 1, K]: projected positions of distances M, M - 1, ..., 0
    slot: jax.Array  # int32: where the next token's key goes; before it, going round, stand the tokens before it
    fill: jax.Array  # [B] int32: how many of M are real


def unstack(params, cfg):
    """Parameters for `read`, their layers apart and in cfg.dtype, so that no call has to slice or cast them again."""
    if isinstance(params["layers"], tuple):
        return params
    stacked = jax.tree.map(lambda a: a.astype(cfg.dtype), stacked_layers(params, cfg))
    flat = {name: stacked[name].reshape(cfg.n_layer, cfg.d_model, -1) for name in ("w_q", "w_k", "w_v")}
    stacked |= flat
    return params | {"layers": tuple(jax.tree.map(lambda a: a[i], stacked) for i in range(cfg.n_layer))}


def _positions(p, distances, cfg):
    return jnp.einsum("xd,dhk->hxk", sinusoids(distances, cfg), p["w_r"])


def init_cache(params, cfg, batch):
    """An empty cache for `batch` rows under fixed weights, which may be `unstack`ed."""
    # Rows and heads are one axis: with two, XLA on a CPU copies the rings of one row at every token.
    shape = (batch * cfg.n_head, cfg.mem_len + 1, cfg.d_head)
    ring = lambda: tuple(jnp.zeros(shape, cfg.dtype) for _ in range(cfg.n_layer))
    r = tuple(_positions(p, jnp.arange(cfg.mem_len, -1, -1), cfg) for p in unstack(params, cfg)["layers"])
    return Cache(ring(), ring(), r, jnp.int32(0), jnp.zeros(batch, jnp.int32))


def _read_one(q_u, q_v, k, v, r, slot, reach):
    """Attention of one query per row [B, H, 1, K] over the rings k, v [B * H, S, K], its own key at `slot`.

    reach [B]: how many tokens back it sees.
    """
    (B, H, _, K), S = q_u.shape, k.shape[1]
    acc = jnp.promote_types(k.dtype, jnp.float32)
    content = jnp.einsum("nk,nsk->ns", q_u.reshape(-1, K), k, preferred_element_type=acc)
    position = jnp.einsum("bhtk,hxk->bhtx", q_v, r, preferred_element_type=acc).reshape(B * H, S)
    # Ring entry s is (slot - s) mod S tokens back: turn the logits round, never the ring.
    position = lax.dynamic_slice_in_dim(jnp.concatenate([position, position], 1), S - 1 - slot, S, 1)
    visible = jnp.repeat((slot - jnp.arange(S)) % S <= reach[:, None], H, 0)
    weights, total = softmax_parts(jnp.where(visible, content + position, HIDDEN))
    out = jnp.einsum("ns,nsk->nk", weights.astype(v.dtype), v, preferred_element_type=acc)
    return (out / total).astype(v.dtype).reshape(B, H, 1, K)


def _read_many(p, q_u, q_v, k, v, past, new_k, new_v, lo, slot, cfg):
    """Attention of T queries over the rings k, v and their own new keys -> out, rings in order, the oldest at 0."""
    (B, H, T, K), M = q_u.shape, cfg.mem_len
    # Without same_length, later queries of a segment see further than M.
    far = jnp.zeros((H, T - 1, K), past.dtype) if cfg.same_length else _positions(p, M + jnp.arange(T - 1, 0, -1), cfg)
    r = lax.dynamic_update_slice_in_dim(jnp.pad(far, ((0, 0), (0, M + 2), (0, 0))), past, T - 1, 1)
    how = dict(block=attention_block(cfg, T), window=M + 1 if cfg.same_length else None)

    def joined(ring, new):  # [B, H, S, K]
        turned = lambda a: lax.dynamic_slice_in_dim(jnp.concatenate([a, a], 1), (slot + 1) % (M + 1), M, 1)
        join = lambda order: lambda a, new: jnp.concatenate([order(a).reshape(B, H, M, K), new], 2)
        return lax.cond(slot == 0, join(lambda a: a[:, 1:]), join(turned), ring, new)  # 0: another segment was before

    k, v = joined(k, new_k), joined(v, new_v)
    attend = lambda q_u, q_v, k, v, lo: attention_of(cfg)(q_u, q_v, k, v, r, lo, **how)
    out = _in_rows(attend, (q_u, q_v, k, v, lo), _few(T, cfg), cfg)
    return out, *(a[:, :, T - 1 :].reshape(B * H, M + 1, K) for a in (k, v))


def read(params, ids, cache, cfg):
    """ids [B, T] -> hidden [B, T, D], new cache: what `forward` gives for the same cut of the text."""
    (B, T), rings = ids.shape, []
    found, want = cache.k[0].shape, (B * cfg.n_head, cfg.mem_len + 1, cfg.d_head)
    if (len(cache.k), found, cache.fill.shape) != (cfg.n_layer, want, (B,)):
        found = f"{len(cache.k)} layers of [B * n_head, mem_len + 1, d_head] {found}, fill {cache.fill.shape}"
        raise ValueError(f"cache is {found}: ids {ids.shape} and config want {cfg.n_layer} of {want}, fill {(B,)}")
    x, (lo, fill) = embed(params, ids, cfg), first_visible(ids, cache.fill, cfg)
    for p, ring_k, ring_v, r in zip(unstack(params, cfg)["layers"], cache.k, cache.v, cache.r):
        h = norm(p, x, 1) if cfg.pre_norm else x
        q_u, q_v = queries(p, h, cfg)
        new_k, new_v = keys(p, h, cfg)
        if T == 1:
            put = lambda ring, new: lax.dynamic_update_slice_in_dim(ring, new.reshape(-1, 1, cfg.d_head), cache.slot, 1)
            ring_k, ring_v = put(ring_k, new_k), put(ring_v, new_v)
            out = _read_one(q_u, q_v, ring_k, ring_v, r, cache.slot, cfg.mem_len - lo[:, 0])
        else:
            out, ring_k, ring_v = _read_many(p, q_u, q_v, ring_k, ring_v, r, new_k, new_v, lo, cache.slot, cfg)
        x = feed_forward(p, attended(p, x, out, cfg), cfg)
        rings.append((ring_k, ring_v))
    slot = (cache.slot + 1) % (cfg.mem_len + 1) if T == 1 else jnp.int32(0)
    k, v = zip(*rings)
    return x, Cache(k, v, cache.r, slot, fill)


def extend(params, ids, cache, cfg):
    """ids [B, T] -> the logits of `read` [B, T, V] float32, new cache."""
    hidden, cache = read(params, ids, cache, cfg)
    return logits(params, hidden, cfg).astype(jnp.float32), cache


def stack_caches(caches):
    """One cache of the rows of several, which may have read different numbers of tokens."""
    S = caches[0].k[0].shape[1]
    turn = lambda cache, ring: jnp.roll(ring, S - 1 - cache.slot, 1)
    join = lambda name: tuple(
        jnp.concatenate([turn(c, getattr(c, name)[i]) for c in caches]) for i in range(len(caches[0].k))
    )
    r, fill = jax.tree.map(jnp.copy, caches[0].r), jnp.concatenate([c.fill for c in caches])
    return Cache(join("k"), join("v"), r, jnp.int32(S - 1), fill)
