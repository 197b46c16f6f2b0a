"""From ids to vectors and from hidden states to nats: embedding and softmax, plain or adaptive.

Adaptive (Grave et al. 2016, arXiv:1609.04309): the vocabulary is cut into clusters, frequent ids first. The first
cluster's softmax also holds one entry for each other cluster, whose own softmax says which of its ids it is.
Axis letters as in txl.py.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


def wide(cfg):
    """The dtype of positions, softmax, layer norm statistics, logits and losses."""
    return jnp.promote_types(cfg.dtype, jnp.float32)


class Cluster(NamedTuple):
    start: int  # first id
    stop: int  # first id after it
    table: int  # which embedding table holds its rows
    rows: slice  # and where


def width(cfg, table):
    """Channels of embedding table number `table`."""
    return (cfg.d_embed or cfg.d_model) // cfg.div_val**table


def clusters(cfg):
    """The vocabulary's parts, the most frequent first: one without `cutoffs`."""
    edges = (0, *cfg.cutoffs, cfg.n_token)
    spans = list(zip(edges, edges[1:]))
    if cfg.div_val == 1:  # one table for all
        return [Cluster(a, b, 0, slice(a, b)) for a, b in spans]
    return [Cluster(a, b, i, slice(0, b - a)) for i, (a, b) in enumerate(spans)]


def out_proj_name(cfg, i):
    """The parameter that takes hidden states to cluster i's width, or None where none is needed."""
    table = clusters(cfg)[i].table
    if cfg.div_val == 1 and width(cfg, 0) == cfg.d_model:
        return None
    tied = cfg.tie_projs[i] if cfg.tie_projs else i > 0
    return f"embed_proj_{table}" if tied else f"out_proj_{i}"


def embed(params, ids, cfg):
    """Scaled embeddings [B, T, D] in cfg.dtype of ids [B, T]."""
    x, ids = 0, ids.astype(jnp.int32)  # in uint8, 256 would be 0
    for i, start in {part.table: part.start - part.rows.start for part in clusters(cfg)}.items():
        table = params[f"embed_{i}"]
        rows = table[jnp.clip(ids - start, 0, len(table) - 1)].astype(cfg.dtype)
        if f"embed_proj_{i}" in params:
            rows = jnp.einsum("bte,ed->btd", rows, params[f"embed_proj_{i}"].astype(cfg.dtype))
        inside = (ids >= start) & (ids < start + len(table))
        x = x + jnp.where(inside[..., None], rows, 0)
    return x * jnp.asarray(math.sqrt(cfg.d_model), cfg.dtype)


def cluster_logits(params, hidden, i, cfg):
    """Logits [N, cluster size] of cluster i for hidden [N, D]; the first one's end with one for each tail cluster."""
    part, proj = clusters(cfg)[i], out_proj_name(cfg, i)
    if proj:
        hidden = jnp.einsum("nd,ed->ne", hidden, params[proj].astype(cfg.dtype))
    table = params[f"embed_{part.table}" if cfg.tie_weight else f"out_{part.table}"][part.rows]
    bias = params[f"out_bias_{part.table}"][part.rows]
    if i == 0 and cfg.cutoffs:
        table, bias = jnp.concatenate([table, params["cluster"]]), jnp.concatenate([bias, params["cluster_bias"]])
    logits = jnp.einsum("ne,ve->nv", hidden, table.astype(cfg.dtype), preferred_element_type=wide(cfg))
    return logits + bias


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


def _pick(logits, index):
    """Nats [N] of column index [N] under logits [N, V]. A comparison, since a gather's gradient is a slow scatter."""
    chosen = jnp.where(lax.iota(index.dtype, logits.shape[1]) == index[:, None], logits, 0).sum(1)
    return jax.nn.logsumexp(logits, 1) - chosen


def _chunk_nats(params, hidden, targets, cfg):
    """Nats [N] of targets [N] given hidden [N, D]."""
    parts = clusters(cfg)
    tails = range(1, len(parts))
    number = sum(((targets >= parts[i].start).astype(targets.dtype) for i in tails), jnp.zeros_like(targets))
    column = jnp.where(number == 0, targets, parts[0].stop - 1 + number)
    total = _pick(cluster_logits(params, hidden, 0, cfg), column)
    for i in tails:
        tail = _pick(cluster_logits(params, hidden, i, cfg), targets - parts[i].start)
        total = total + jnp.where(number == i, tail, 0)
    return total


def nats(params, hidden, targets, cfg):
    """Nats [B, T], float32 or wider, of targets [B, T]; `loss_chunk` tokens at a time, rebuilt in the backward pass."""
    with jax.named_scope("loss"):
        N, chunk = targets.size, cfg.loss_chunk
        hidden, flat = hidden.reshape(N, cfg.d_model), targets.reshape(N)
        if not 0 < chunk < N:
            return _chunk_nats(params, hidden, flat, cfg).reshape(targets.shape)
        hidden = jnp.pad(hidden, ((0, -N % chunk), (0, 0))).reshape(-1, chunk, cfg.d_model)
        flat = jnp.pad(flat, (0, -N % chunk)).reshape(-1, chunk)
        body = jax.checkpoint(lambda args: _chunk_nats(params, *args, cfg), prevent_cse=False)
        return lax.map(body, (hidden, flat)).reshape(-1)[:N].reshape(targets.shape)
