"""Evaluation: every target of a text once, memory read from the cache instead of projected again and again."""

import math
from dataclasses import replace

import numpy as np

import txl
from step import copies, make_cache, make_eval, spread


def eval_batches(tokens, rows, T):
    """Yields ids, targets, weights [B, T]: every target once, in rows that differ in length by one at most."""
    n = len(tokens) - 1
    lengths = n // rows + (np.arange(rows) < n % rows)
    starts = np.cumsum(lengths) - lengths
    for first in range(0, max(lengths), T):
        column = first + np.arange(T)
        at = np.minimum(starts[:, None] + column, n - 1)
        yield tokens[at].astype(np.int32), tokens[at + 1].astype(np.int32), column < lengths[:, None]


def evaluate(eval_step, params, tokens, cfg, run, n_devices):
    """(mean nats, number of targets) of all targets in tokens, on devices' params, from empty memory."""
    rows = min(run.eval_batch, len(tokens) - 1)
    more = -rows % n_devices  # empty rows, so that every device has as many
    cache = make_cache(cfg, (rows + more) // n_devices)(params, spread(np.zeros(n_devices), n_devices))
    sums = []
    for batch in eval_batches(tokens, rows, run.tgt_len):
        batch = [np.pad(a, ((0, more), (0, 0))) for a in batch]
        total, cache = eval_step(params, *spread(batch, n_devices), cache)
        sums.append(total)
    return sum(float(total) for total in sums) / (len(tokens) - 1), len(tokens) - 1


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
    params = copies(txl.unstack(source.params, cfg), spread(np.zeros(n_devices), n_devices))
    for n, sized in zip(lengths, configs):
        found = evaluate(make_eval(sized), params, tokens, sized, run, n_devices)
        yield judged(*found, source.run["step"], run.split, corpus, run) | {"mem_len": n}
