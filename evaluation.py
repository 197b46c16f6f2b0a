"""Evaluation: every target of a text once, memory read from the cache instead of projected again and again."""

import math
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import shard
import txl
from step import spread, stacked

CACHE_AXES = txl.Cache(0, 0, None, None, 0)  # which axis of a cache counts devices
# A tree, whole on each of the devices that the second argument has an entry for.
copies = jax.pmap(lambda tree, _: tree, "device", in_axes=(None, 0), out_axes=None)


@cache
def make_cache(cfg, rows):
    """An empty cache of `rows` rows on each device, from params and an array with an entry for each device."""
    empty = lambda params, _: txl.init_cache(params, cfg, rows)
    return jax.pmap(empty, "device", in_axes=(None, 0), out_axes=CACHE_AXES)


def make_eval(cfg):
    """The evaluation step: params, ids, targets, weights [device, B, T], cache -> summed nats, cache."""

    def step(params, ids, targets, weights, cache):
        hidden, cache = txl.read(params, ids, cache, cfg)
        losses = txl.nats(params, hidden, targets, cfg)
        return lax.psum(jnp.where(weights, losses, 0).sum(), "device"), cache

    axes = (None, 0, 0, 0, CACHE_AXES)
    return jax.pmap(step, "device", in_axes=axes, out_axes=(None, CACHE_AXES), donate_argnums=4)


def eval_shapes(cfg, run, n_devices):
    """Shapes of what `make_eval`'s function takes: params, ids, targets, weights, cache."""
    rows = -(-run.eval_batch // n_devices)
    like = lambda dtype: jax.ShapeDtypeStruct((rows, run.tgt_len), dtype)
    params = txl.param_shapes(cfg)
    cache = jax.eval_shape(lambda params: txl.init_cache(params, cfg, rows), params)
    per_device = cache._replace(r=(), slot=())
    ids, targets, weights, split = stacked((like(jnp.int32), like(jnp.int32), like(jnp.bool_), per_device), n_devices)
    return params, ids, targets, weights, split._replace(r=cache.r, slot=cache.slot)


def eval_batches(tokens, rows, T):
    """Yields ids, targets, weights [B, T]: every target once, in rows that differ in length by one at most."""
    n = len(tokens) - 1
    lengths = n // rows + (np.arange(rows) < n % rows)
    starts = np.cumsum(lengths) - lengths
    for first in range(0, max(lengths), T):
        column = first + np.arange(T)
        at = np.minimum(starts[:, None] + column, n - 1)
        yield tokens[at].astype(np.int32), tokens[at + 1].astype(np.int32), column < lengths[:, None]


def evaluate(eval_step, params, tokens, cfg, run, n_devices, stop=None):
    """(mean nats, number of targets) of all targets in tokens, on devices' params, from empty memory.

    None where `stop` (see stop.py) asks this or another process to end: then stop.number says so in all of them.
    """
    rows = min(run.eval_batch, len(tokens) - 1)
    more = -rows % n_devices  # empty rows, so that every device has as many
    cache = make_cache(cfg, (rows + more) // n_devices)(params, spread(np.zeros(n_devices), n_devices))
    nats, before, flag = 0.0, None, 0
    for batch in eval_batches(tokens, rows, run.tgt_len):
        batch = [np.pad(a, ((0, more), (0, 0))) for a in batch]
        total, cache = eval_step(params, *spread(batch, n_devices), cache)
        nats += 0.0 if before is None else float(before)  # a step late, so that the device has work meanwhile
        before = total
        if stop:
            asked, flag = shard.agreed(stop.number, flag)
            if asked:
                stop.number = asked
                return None
    return (nats + float(before)) / (len(tokens) - 1), len(tokens) - 1


def judged(loss, n, step, split, corpus, run):
    """The log entry of an evaluation: mean nats `loss` over n targets."""
    entry = {"step": step, "split": split, "loss_nats": loss, "bpb": bits_per_byte(loss, corpus, split)}
    return entry | {"ppl": math.exp(min(loss, 700)), "targets": n, "eval_batch": min(run.eval_batch, n)}


def bits_per_byte(loss_nats, corpus, split):
    """Nats per token -> bits per byte of the split's text."""
    return loss_nats / math.log(2) * len(getattr(corpus, split)) / corpus.n_bytes[split]


def eval_only(cfg, run, corpus, source, lengths, n_devices):
    """Yields the log entry of a checkpoint's evaluation on a split, for each memory length in `lengths`."""
    tokens = getattr(corpus, run.split)
    if len(tokens) < 2:
        raise ValueError(f"{run.split} split has {len(tokens)} tokens, need at least 2: give a longer text")
    configs = [replace(cfg, mem_len=n) for n in lengths]
    longest = -(-(len(tokens) - 1) // min(run.eval_batch, len(tokens) - 1))
    run = replace(run, tgt_len=min(run.tgt_len, longest))  # more would be padding, of any size
    params = copies(txl.unstack(source.params, cfg), spread(np.zeros(n_devices), n_devices))
    for n, sized in zip(lengths, configs):
        found = evaluate(make_eval(sized), params, tokens, sized, run, n_devices)
        yield judged(*found, source.run["step"], run.split, corpus, run) | {"mem_len": n}
