"""Train a Transformer-XL: one run, from the command line to its checkpoints.

Top to bottom: flags, batches, the optimizer, the state on the devices, the step, evaluation, the log, checkpoints, the
loop. What is optional comes from tools/ where it is asked for: sharding, the memory plan, profiles, pictures.
"""

if __name__ == "__main__":
    from data import flags

    flags.exit_on_interrupt()  # while modules load

import contextlib
import json
import math
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax import lax

import txl
from data import checkpoint, flags, prepare, tokenizer

# What --resume may change of the model: all else decides shapes or meaning.
MAY_CHANGE = ("mem_len", "dropout", "dropatt", "clamp_len", "same_length", "reset_on", "remat", "attention")
MAY_CHANGE += ("attn_block", "layer_rows", "loss_chunk", "dtype")
# What belongs to one call, so that --resume does not take it from the checkpoint.
ONE_CALL = ("out", "devices", "resume", "init", "eval_only", "run", "split", "json", "plan", "memory_budget")
ONE_CALL += ("mem_fraction", "preallocate", "profile", "coordinator", "process_id", "n_processes")
CHOICES = {
    "optimizer": ("adam", "adamw", "muon"),
    "schedule": ("linear", "cosine", "inv_sqrt", "constant"),
    "shard": ("none", "opt", "params"),
    "split": prepare.SPLITS,
}
EXAMPLES = (
    "python train.py --data my.txt --steps 3000                 # train on a text of your own",
    "python train.py --plan --batch 64 --tgt_len 256            # what that needs in memory, and what would need less",
    "python train.py --eval_only --split test --eval_batch 1    # the newest run's loss on the test split",
)
MIB = 2**20


# flags


@dataclass(frozen=True)
class TrainConfig:
    # data and checkpoints
    data: str = ""  # text, .npy of ids, folder of train.txt valid.txt test.txt, prepared one, NAME; none: Python's code
    tokenizer: str = ""  # byte, char, word or a file tokenizer.json; none: byte, or what the data was prepared with
    resume: str = ""  # run folder to go on with; auto: --out if it holds a checkpoint
    init: str = ""  # run folder or checkpoint to take weights and vocabulary from
    # training
    steps: int = 1500  # optimizer steps
    batch: int = 32  # rows of the whole step, over all devices
    tgt_len: int = 64  # tokens of a row in one step
    optimizer: str = "muon"  # adam, adamw or muon (matrices by Muon, the rest by Adam)
    lr: float = 5e-3  # peak learning rate; adam and adamw want less than muon: about 2e-3
    lr_min: float = 0.0  # linear, cosine: where the learning rate ends, as a share of the peak
    warmup: int = 50  # steps from 0 to the peak
    schedule: str = "linear"  # after the warm-up: linear or cosine (to lr_min), inv_sqrt or constant
    momentum: float = 0.95  # muon: decay of the mean of the gradients; 0.8 to 0.9 is better in runs of few steps
    beta2: float = 0.99  # Adam's second decay rate
    weight_decay: float = 0.01  # adamw, muon: decay of the weights, times the learning rate
    clip: float = 1.0  # largest global norm of the gradient
    mem_reset: float = 0.01  # share of rows whose memory is emptied at each step: a text begins with none
    skip_nonfinite: int = 0  # steps in a row that are skipped where the loss or gradient is NaN or infinite; 0: stop
    seed: int = 1  # of the initial weights and of dropout
    # evaluation
    eval_every: int = 250  # steps between evaluations, each followed by a checkpoint
    eval_tokens: int = 50_000  # targets of the valid split read in these
    eval_batch: int = 8  # rows that an evaluation splits its text into; 1 for published numbers
    eval_only: bool = False  # evaluate --run on --split and stop
    run: str = ""  # with --eval_only: run folder or checkpoint; none: the newest run
    split: str = "valid"  # with --eval_only: train, valid or test
    # memory: none of these changes a result beyond rounding, but dtype
    batch_chunk: int = 1  # parts that a device's rows are computed in, one after the other
    plan: bool = False  # print what this and thriftier settings need in memory, and stop
    memory_budget: str = ""  # take the first setting, from cheap to thrifty, that needs no more: 6GiB, 500MiB, 80%
    mem_fraction: float = 0.0  # share of a GPU's memory; 0: XLA_CLIENT_MEM_FRACTION or XLA_PYTHON_CLIENT_MEM_FRACTION
    preallocate: bool = True  # take that share at once, or as needed; neither given: XLA_PYTHON_CLIENT_PREALLOCATE says
    # devices
    devices: int = 0  # devices to use; 0: all
    shard: str = "none"  # split over the devices: none, opt (optimizer state: ZeRO) or params (parameters, too: FSDP)
    shard_group: int = 0  # devices that share one set of shards; every such group has all of them. 0: all devices
    coordinator: str = ""  # several machines: HOST:PORT of process 0, or auto: what a cluster (Slurm, MPI, TPU) tells
    process_id: int = 0  # with --coordinator: number of this process
    n_processes: int = 0  # with --coordinator: processes in all
    # output
    out: str = ""  # run folder; none: the first free runs/NAME-N
    log_every: int = 50  # steps between log lines
    json: bool = False  # print the log's JSON lines instead of text
    profile: str = ""  # folder to leave a trace of a few steps and a memory profile in

    def __post_init__(self):
        txl.check_fields(self, zero=("seed", "momentum", "weight_decay", "warmup", "mem_reset"))
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown: give one of {', '.join(known)}")
        for name in ("momentum", "beta2"):
            if getattr(self, name) >= 1:
                raise ValueError(f"{name}={getattr(self, name)} is out of range: give less than 1")
        for name in ("lr_min", "mem_fraction", "mem_reset"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name}={getattr(self, name)} is out of range: give at most 1")
        if self.resume and self.init:
            raise ValueError("resume and init are both given: --resume goes on with a run, --init starts a new one")
        if self.run and not self.eval_only:
            raise ValueError(f"run={self.run} is for --eval_only: give --resume or --init to train from it")
        if (self.n_processes or self.process_id) and not self.coordinator:
            raise ValueError("n_processes and process_id are for --coordinator: give it, or leave them out")


def pick(cls, overrides):
    """{field of a dataclass: value} of the flags that were given."""
    return {f.name: overrides[f.name] for f in fields(cls) if f.name in overrides}


def check_overrides(overrides):
    """ValueError for a flag that means nothing beside the others that were given."""
    if "split" in overrides and not overrides.get("eval_only"):
        raise ValueError(f"split={overrides['split']} is for --eval_only: give it, or leave --split out")
    if overrides.get("eval_only"):
        for name in ("resume", "init", "out", "plan", "profile", "memory_budget"):
            if value := overrides.get(name):
                raise ValueError(f"{name}={value} is for training: --eval_only reads --run, so leave --{name} out")


def inherit_flags(run, overrides, source):
    """`run` with the checkpoint's flags where none were given, but for those of one call."""
    saved = source.run["flags"]
    inherited = {name: value for name, value in saved.items() if name not in overrides and name not in ONE_CALL}
    if "data" in inherited:  # a path, as this process's locale writes it
        inherited["data"] = os.fsdecode(inherited["data"].encode("utf-8", "surrogateescape"))
    run = replace(run, **inherited, out=run.resume)
    if run.resume and run.optimizer != saved["optimizer"]:
        raise ValueError(f"optimizer: checkpoint {saved['optimizer']}, asked {run.optimizer}: leave it out")
    if run.shard == "none" and "shard_group" not in overrides:
        return replace(run, shard_group=0)
    return run


def resolve_model(overrides, run, vocab, source):
    """The model's Config from the flags given, the rest from a checkpoint where there is one."""
    asked = pick(txl.Config, overrides)
    if isinstance(asked.get("mem_len"), tuple):
        if not run.eval_only:
            raise ValueError(f"mem_len={asked['mem_len']}: several lengths are for --eval_only, give one")
        asked["mem_len"] = max(asked["mem_len"])
    if "reset_on" in asked:
        asked["reset_on"] = tokenizer.one_id(vocab, asked["reset_on"], "reset_on")
    if source:
        for name in asked.keys() - set(MAY_CHANGE):
            if asked[name] != getattr(source.cfg, name):
                raise ValueError(f"{name}: checkpoint {getattr(source.cfg, name)}, asked {asked[name]}: leave it out")
        cfg = replace(source.cfg, **asked)
    else:
        cfg = txl.Config(n_token=tokenizer.size(vocab), **asked)
    if cfg.n_token < tokenizer.size(vocab):
        raise ValueError(f"n_token={cfg.n_token} is less than the vocabulary's {tokenizer.size(vocab)}: leave it out")
    if cfg.mem_len + run.tgt_len >= 2**31:
        found = f"mem_len={cfg.mem_len} and tgt_len={run.tgt_len} are out of range"
        raise ValueError(f"{found}: give less than 2**31 together")
    return cfg


def trained_on(source, corpus):
    """Whether a Checkpoint is of a run on this corpus: by hash of the tokens, or in older checkpoints of the text."""
    return source.run["corpus"] in (corpus.tokens_sha256, corpus.sha256)


def resolve_config(overrides):
    """Flags given -> (cfg, run, corpus, Checkpoint or None): all decided and checked before anything compiles."""
    run, source = TrainConfig(**pick(TrainConfig, overrides)), None
    check_overrides(overrides)
    if run.resume == "auto":
        if not run.out:
            raise ValueError("--resume auto needs --out DIR, the folder to go on with or to start in")
        run = replace(run, resume=run.out if any(Path(run.out).glob("*.npz")) else "")
    if run.eval_only:
        source = checkpoint.load(run.run or checkpoint.latest_run())
    elif run.resume:
        source = checkpoint.load(checkpoint.latest_checkpoint(run.resume, print_main))
    elif run.init:
        source = checkpoint.load(run.init)
    if run.resume or run.eval_only:
        checkpoint.check_flags(source, TrainConfig)
        run = inherit_flags(run, overrides, source)
    if run.shard_group and run.shard == "none":
        raise ValueError(f"shard_group={run.shard_group} is for --shard opt or params: give it, or leave it out")
    vocab, kind = source and source.vocab, overrides.get("tokenizer")
    if source and kind and kind != vocab["kind"]:
        raise ValueError(f"tokenizer: checkpoint {vocab['kind']}, asked {kind}: leave it out")
    if run.data and "data" not in overrides and run.data not in prepare.CORPORA and not os.path.exists(run.data):
        raise ValueError(f"{run.data}, which {source.run['path']} was trained on, is not there: give --data PATH")
    try:
        corpus = prepare.load(run.data or None, run.tokenizer or None, vocab)
    except tokenizer.EncodeError as e:
        if not run.resume:
            raise
        raise ValueError(f"{run.resume} was trained on other data, which its vocabulary could encode: {e}") from None
    cfg = resolve_model(overrides, run, corpus.vocab, source)
    if run.resume and not trained_on(source, corpus):
        way = f"start a new run from it with --init {shlex.quote(run.resume)}"
        raise ValueError(f"{run.resume} was trained on other data: {way}")
    return cfg, run, corpus, source


def need_tokens(run, corpus):
    """ValueError where a split is too short for the run."""
    for split, least in (("train", run.batch * run.tgt_len + 1), ("valid", 2), ("test", 2)):
        found = len(getattr(corpus, split))
        if found < least:
            way = f"batch={run.batch} x tgt_len={run.tgt_len} + 1; lower them or " if split == "train" else ""
            raise ValueError(f"{split} split has {found} tokens, need at least {least}: {way}give a longer text")


def nearest(n, valid):
    """'a or b': the valid numbers next to n."""
    below, above = [v for v in valid if v < n], [v for v in valid if v > n]
    return " or ".join(str(v) for v in [*below[-1:], *above[:1]])


def count_devices(run):
    """Devices to use, over all processes. ValueError where they are not there or the run does not divide over them."""
    txl.check_devices()
    there, processes = jax.device_count(), jax.process_count()
    n = run.devices or there
    if n > there:
        raise ValueError(f"devices={n}, but there are {there}: give that or fewer")
    if processes > 1 and (n < there or there != processes * jax.local_device_count()):
        found = f"{jax.local_device_count()} of {there} devices are on process {jax.process_index()} of {processes}"
        raise ValueError(f"{found}: all must have as many, and --devices must be {there} or left out")
    if run.eval_only:
        return n
    size = run.shard_group or n
    if n % size:
        valid = [g for g in range(1, n + 1) if n % g == 0]
        raise ValueError(f"shard_group={size} does not divide {n} devices: use {nearest(size, valid)}")
    if run.batch % n:
        way = f"use {nearest(run.batch, range(n, run.batch + n + 1, n))}"
        if processes == 1:
            way += f", or --devices {max(d for d in range(1, n) if run.batch % d == 0)}"
        raise ValueError(f"batch={run.batch} does not divide over {n} devices: {way}")
    rows = run.batch // n
    if rows % run.batch_chunk:
        valid = [c for c in range(1, rows + 1) if rows % c == 0]
        found = f"batch_chunk={run.batch_chunk} does not divide {rows} rows of a device"
        raise ValueError(f"{found}: use {nearest(run.batch_chunk, valid)}")
    return n


# batches: row b reads the training text from its own start on, and goes on where row b + 1 began


def get_batch(tokens, rows, cursor, T, only=slice(None)):
    """ids and targets [B, T] int32, `cursor` tokens into each of the rows that start evenly over the text."""
    start = np.arange(rows)[only] * ((len(tokens) - 1) // rows) + cursor
    index = (start[:, None] + np.arange(T)) % (len(tokens) - 1)
    return tokens[index].astype(np.int32), tokens[index + 1].astype(np.int32)


def process_slice(n):
    """Which of n devices, or of n rows over all of them, are this process's: a slice; all of them with one process."""
    n = n // jax.process_count()
    return slice(jax.process_index() * n, (jax.process_index() + 1) * n)


def split_rows(tree, n, axis=0):
    """Host arrays split into n along `axis`, which comes first: [n*b, ...] -> [n, b, ...]."""

    def split(a):
        rows = min(axis, np.ndim(a) - 1)  # axis 1 of Mems.h, the only one of Mems.fill
        return np.stack(np.split(np.asarray(a), n, axis=rows))

    return jax.tree.map(split, tree)


def spread(tree, n_devices, axis=0):
    """Host arrays of all rows -> those of this process's devices, device first."""
    return jax.tree.map(lambda a: a[process_slice(n_devices)], split_rows(tree, n_devices, axis))


# the optimizer


def make_schedule(run):
    """The learning rate as a function of the steps done."""

    def lr(step):
        step = jnp.asarray(step, jnp.float32)
        done = jnp.clip((step - run.warmup) / max(run.steps - run.warmup, 1), 0, 1)
        shape = {
            "linear": run.lr_min + (1 - run.lr_min) * (1 - done),
            "cosine": run.lr_min + (1 - run.lr_min) * 0.5 * (1 + jnp.cos(jnp.pi * done)),
            "inv_sqrt": jnp.sqrt(max(run.warmup, 1) / jnp.maximum(step + 1, max(run.warmup, 1))),
            "constant": jnp.float32(1),
        }[run.schedule]
        return run.lr * shape * jnp.minimum(1, (step + 1) / max(run.warmup, 1))

    return lr


NS_COEFFS = np.float32([3.4445, -4.7750, 2.0315])  # of Muon's iteration; float32 also under x64, since it is saved


def muon_dimension_numbers(params):
    """Which axes of a layer's weights [L, ...] are a matrix's inputs and outputs; None: not for Muon."""
    matrices = {
        "w_q": (1, (2, 3)),
        "w_k": (1, (2, 3)),
        "w_v": (1, (2, 3)),
        "w_r": (1, (2, 3)),
        "w_o": ((1, 2), 3),
        "w_1": (1, 2),
        "w_2": (1, 2),
    }

    def numbers(path, _):
        axes = matrices.get(path[-1].key)
        return axes and optax.contrib.MuonDimensionNumbers(*axes)

    return jax.tree.map_with_path(numbers, params)


def decay_mask(params):
    """Which parameters decay: the layers' weight matrices, whatever the optimizer; no embeddings, biases, scales."""
    return jax.tree.map_with_path(lambda path, _: path[-1].key.startswith("w_"), params)


def make_optimizer(run, layout):
    """Clipping by the global norm, then adam, adamw (matrices decay) or muon (matrices decay; the rest by Adam)."""
    lr, clip = make_schedule(run), layout.clip_by_global_norm(run.clip)
    if run.optimizer == "muon":
        # consistent_rms: updates of a matrix are as large as Adam's, so that one learning rate serves both.
        options = dict(
            beta=run.momentum, adam_b2=run.beta2, weight_decay=run.weight_decay, consistent_rms=0.2, ns_coeffs=NS_COEFFS
        )
        muon = layout.muon(lr, **options, muon_weight_dimension_numbers=muon_dimension_numbers)
        return optax.chain(clip, muon)
    decay = optax.identity()
    if run.optimizer == "adamw":
        decay = optax.add_decayed_weights(run.weight_decay, decay_mask)
    return optax.chain(clip, optax.scale_by_adam(0.9, run.beta2), decay, optax.scale_by_learning_rate(lr))


# the train state on the devices. What belongs to rows has a leading axis, one entry per device; what is replicated has
# none, so that XLA can update it in place.


class TrainState(NamedTuple):
    params: dict
    opt_state: tuple
    mems: txl.Mems


def apply_gradients(tx, grads, params, opt_state):
    """The mean gradient over devices, then optax -> params, opt_state, norm of the gradient. Under pmap."""
    grads = lax.pmean(grads, "device")
    with jax.named_scope("optimizer"):
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    return params, opt_state, optax.tree.norm(grads)


class Layout(NamedTuple):
    """How the train state lies on the devices, and what a step does about it.

    These defaults are plain data parallelism: parameters and optimizer state whole on every device. tools/shard.py has
    others, for ZeRO, FSDP and several processes. The first group of functions is called under pmap.
    """

    n_devices: int
    axes: TrainState = TrainState(None, None, 0)  # pmap's axes: None: replicated, 0: one entry per device
    forward_params: Callable = lambda params: (params, None)  # -> (params, gather_layer) for txl.loss_fn
    apply_gradients: Callable = apply_gradients
    clip_by_global_norm: Callable = optax.clip_by_global_norm
    muon: Callable = optax.contrib.muon
    shard_state: Callable = lambda state: state  # whole -> what this device holds
    # and on the host:
    shard_shapes: Callable = lambda state: state  # shapes of a whole state -> of what a device holds
    split_state: Callable = lambda state: state  # whole host params and opt_state -> as `axes` says
    device_get: Callable = lambda state: jax.tree.map(np.asarray, state)  # and back; mems device first
    full_params: Callable = lambda params: params  # the devices' params -> whole on each device
    any_process_stopped: Callable = lambda signal, pending: (signal, pending)


def make_layout(cfg, run, n_devices):
    """The Layout of a run."""
    layout = Layout(n_devices)
    if run.shard == "none" and not run.coordinator:
        return layout
    whole = jax.eval_shape(lambda: create_train_state(cfg, run, layout, None, 1))
    shard = flags.import_tool("shard", "coordinator" if run.coordinator else "shard")
    return shard.make_layout(layout, run.shard, run.shard_group or n_devices, whole)


def create_train_state(cfg, run, layout, params, rows):
    """A fresh whole state for `rows` rows; params None: random ones from the seed."""
    params = txl.init_params(jax.random.key(run.seed), cfg) if params is None else params
    return TrainState(params, make_optimizer(run, layout).init(params), txl.init_mems(cfg, rows))


def fresh_state(cfg, run, layout, params):
    """The devices' fresh state, made where it stays, so that nothing exists twice; params as `create_train_state`."""
    n = layout.n_devices

    def make(params, _):
        return layout.shard_state(create_train_state(cfg, run, Layout(n), params, run.batch // n))

    made = jax.pmap(make, "device", in_axes=(None, 0), out_axes=layout.axes)
    return made(params, spread(np.zeros(n), n))


def to_devices(state, layout):
    """A host state of all rows -> the devices' state."""
    params, opt_state, mems = layout.split_state(state)
    state = TrainState(params, opt_state, spread(mems, layout.n_devices, axis=1))
    # Placed as steps leave their results: so a step compiles once.
    return jax.pmap(lambda state: state, "device", in_axes=(layout.axes,), out_axes=layout.axes)(state)


def to_host(state, layout):
    """The devices' state -> host arrays of all rows, whole."""
    params, opt_state, (h, fill) = layout.device_get(state)  # h [device, L, B, M, D]
    h = np.moveaxis(h, 0, 1).reshape(h.shape[1], fill.size, *h.shape[3:])
    return TrainState(params, opt_state, txl.Mems(h, fill.reshape(-1)))


# the step


def row_keys(run, step, rows, purpose):
    """Keys of global rows [B] at a step; purpose: 1 dropout, 2 emptying memory."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(run.seed), purpose), step)
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)


def reset_mems(mems, run, step, rows):
    """Memory of global rows [B], emptied for a share `run.mem_reset` of them: a text begins with none."""
    if not run.mem_reset:
        return mems
    chosen = jax.vmap(lambda key: jax.random.bernoulli(key, run.mem_reset))(row_keys(run, step, rows, 2))
    return mems._replace(fill=jnp.where(chosen, 0, mems.fill))


def accumulate_gradients(grad_fn, cfg, parts):
    """grad_fn(params, ids, targets, mems, keys) computed for `parts` parts of the rows, one after the other."""

    def accumulated(params, ids, targets, mems, keys):
        rows = len(ids) // parts
        split = lambda a: a.reshape(parts, rows, *a.shape[1:])
        h = jnp.moveaxis(mems.h.reshape(len(mems.h), parts, rows, *mems.h.shape[2:]), 1, 0)

        def add(total, part):
            (loss, mems), grads = grad_fn(params, *part)
            return jax.tree.map(lambda a, b: a + b / parts, total, (loss, grads)), mems

        zeros = jnp.zeros((), txl.acc_dtype(cfg)), jax.tree.map(jnp.zeros_like, params)
        xs = split(ids), split(targets), txl.Mems(h, split(mems.fill)), split(keys)
        (loss, grads), mems = lax.scan(add, zeros, xs)
        h = jnp.moveaxis(mems.h, 0, 1).reshape(cfg.n_layer, len(ids), *mems.h.shape[3:])
        return (loss, txl.Mems(h, mems.fill.reshape(len(ids)))), grads

    return accumulated


def make_train_step(cfg, run, layout):
    """train_step(state, ids, targets [device, B, T], step) -> state, metrics [3]: loss in nats, gradient norm, lr."""
    tx, B = make_optimizer(run, layout), run.batch // layout.n_devices

    def compute_loss(params, ids, targets, mems, keys):
        params, gather_layer = layout.forward_params(params)
        keys = keys if cfg.dropout or cfg.dropatt else None
        return txl.loss_fn(params, ids, targets, mems, cfg, key=keys, gather_layer=gather_layer)

    grad_fn = jax.value_and_grad(compute_loss, has_aux=True)
    if run.batch_chunk > 1:
        grad_fn = accumulate_gradients(grad_fn, cfg, run.batch_chunk)

    def train_step(state, ids, targets, step):
        rows = lax.axis_index("device") * B + jnp.arange(B)
        mems = reset_mems(state.mems, run, step, rows)
        (loss, mems), grads = grad_fn(state.params, ids, targets, mems, row_keys(run, step, rows, 1))
        loss = lax.pmean(loss, "device")
        params, opt_state, grad_norm = layout.apply_gradients(tx, grads, state.params, state.opt_state)
        metrics = jnp.stack([loss.astype(jnp.float32), grad_norm, make_schedule(run)(step)])
        # Memory of a step that isn't finite is dropped. On the way this tells XLA that the old memory is done with
        # once the gradients are there; it would copy all of it otherwise.
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        mems = txl.Mems(jnp.where(finite, mems.h, 0), jnp.where(finite, mems.fill, 0))
        if run.skip_nonfinite:
            # The optimizer's counts go on, so that the schedule's step is the run's.
            keep = lambda new, old: new if new.dtype == jnp.int32 else jnp.where(finite, new, old)
            params, opt_state = jax.tree.map(keep, (params, opt_state), (state.params, state.opt_state))
        return TrainState(params, opt_state, mems), metrics

    axes = layout.axes
    return jax.pmap(train_step, "device", in_axes=(axes, 0, 0, None), out_axes=(axes, None), donate_argnums=0)


def state_shapes(cfg, run, layout):
    """Shapes of what one device holds of the state."""
    rows = run.batch // layout.n_devices
    return layout.shard_shapes(jax.eval_shape(lambda: create_train_state(cfg, run, Layout(1), None, rows)))


def stack_shapes(tree, n_devices):
    """Shapes of one device's arrays -> of all devices', device first."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct((n_devices, *a.shape), a.dtype), tree)


def step_shapes(cfg, run, layout):
    """Shapes of what `make_train_step`'s function takes: state, ids, targets, step."""
    n = layout.n_devices
    ids = stack_shapes(jax.ShapeDtypeStruct((run.batch // n, run.tgt_len), jnp.int32), n)
    parts = zip(state_shapes(cfg, run, layout), layout.axes)
    state = TrainState(*(tree if axis is None else stack_shapes(tree, n) for tree, axis in parts))
    return state, ids, ids, jax.ShapeDtypeStruct((), jnp.int32)


def compile_shapes(function, *shapes):
    """A pmapped function compiled for arrays of all devices."""
    if jax.process_count() > 1:  # where pmap would take a bare shape for an array of this process and read it
        shapes = jax.tree.map(jax.typeof, shapes)
    return function.lower(*shapes).compile()


def nbytes(tree):
    """Bytes of a pytree of arrays or shapes."""
    return sum(math.prod(a.shape) * jnp.dtype(a.dtype).itemsize for a in jax.tree.leaves(tree))


def not_aliased(compiled, state):
    """Names of the leaves of a train state of shapes, a program's first argument, that it does not update in place."""
    text = compiled.as_text()
    aliases = re.findall(r"\((\d+), \{\}, (?:may|must)-alias\)", text.partition("\n")[0])
    number = dict(re.findall(r"flat_args_(\d+)_\S* = .* parameter\((\d+)\)", text))  # of an unused leaf there is none
    parts = {"params": state.params}, {"opt": state.opt_state}, {"mems": state.mems}  # in the order of the arguments
    names = [name for part in parts for name in checkpoint.flatten(part)]
    return [name for i, name in enumerate(names) if number.get(str(i)) not in aliases]


def compile_train_step(cfg, run, layout):
    """The step compiled from shapes, before any state exists. Warns of state that is not updated in place."""
    step, shapes = make_train_step(cfg, run, layout), step_shapes(cfg, run, layout)
    compiled = compile_shapes(step, *shapes)
    needed, found = nbytes(state_shapes(cfg, run, layout)), compiled.memory_analysis()
    donates = not jax.config.jax_debug_nans  # which keeps the old state to look at
    if donates and found is not None and found.alias_size_in_bytes < needed:
        size = f"{(needed - found.alias_size_in_bytes) / MIB:,.2f} MiB of state are not updated in place"
        names = not_aliased(compiled, shapes[0])
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        print_main(f"{size}, and exist twice in a step: {', '.join(names[:5])}{more}")
    if jax.process_count() == 1:
        return compiled
    # Only the function itself makes one array of what several processes hold.
    step.memory_analysis, step.as_text = compiled.memory_analysis, compiled.as_text
    return step


# evaluation: every target once, memory read from the cache instead of projected again and again

CACHE_AXES = txl.KVCache(0, 0, None, None, 0)  # pmap's axes of a cache
# A tree, whole on each of the devices that the second argument has an entry for.
replicate = jax.pmap(lambda tree, _: tree, "device", in_axes=(None, 0), out_axes=None)


@cache
def make_cache(cfg, rows):
    """make(params, array with an entry for each device) -> an empty cache of `rows` rows on each device."""
    make = lambda params, _: txl.init_cache(params, cfg, rows)
    return jax.pmap(make, "device", in_axes=(None, 0), out_axes=CACHE_AXES)


def make_eval_step(cfg):
    """eval_step(params, ids, targets, weights [device, B, T], cache) -> summed nats, cache."""

    def eval_step(params, ids, targets, weights, cache):
        hidden, cache = txl.forward_cached(params, ids, cache, cfg)
        losses = txl.cross_entropy(params, hidden, targets, cfg)
        return lax.psum(jnp.where(weights, losses, 0).sum(), "device"), cache

    axes = (None, 0, 0, 0, CACHE_AXES)
    return jax.pmap(eval_step, "device", in_axes=axes, out_axes=(None, CACHE_AXES), donate_argnums=4)


def eval_shapes(cfg, run, n_devices):
    """Shapes of what `make_eval_step`'s function takes: params, ids, targets, weights, cache."""
    rows = -(-run.eval_batch // n_devices)
    params = txl.param_shapes(cfg)
    cache = jax.eval_shape(lambda params: txl.init_cache(params, cfg, rows), params)
    ids, weights = (jax.ShapeDtypeStruct((rows, run.tgt_len), dtype) for dtype in (jnp.int32, jnp.bool_))
    per_device = cache._replace(r=(), pos=())
    ids, weights, per_device = stack_shapes((ids, weights, per_device), n_devices)
    return params, ids, ids, weights, per_device._replace(r=cache.r, pos=cache.pos)


def eval_batches(tokens, rows, T):
    """Yields ids, targets, weights [B, T]: every target once, in rows that differ in length by one at most."""
    n = len(tokens) - 1
    lengths = n // rows + (np.arange(rows) < n % rows)
    starts = np.cumsum(lengths) - lengths
    for first in range(0, max(lengths), T):
        column = first + np.arange(T)
        index = np.minimum(starts[:, None] + column, n - 1)
        yield tokens[index].astype(np.int32), tokens[index + 1].astype(np.int32), column < lengths[:, None]


def evaluate(eval_step, params, tokens, cfg, run, layout, stop=None):
    """(mean nats, number of targets) of all targets in tokens, on the devices' whole params, from empty memory.

    None where `stop` asks this or another process to end: then stop.signal says so in all of them.
    """
    n_devices = layout.n_devices
    rows = min(run.eval_batch, len(tokens) - 1)
    padding = -rows % n_devices  # empty rows, so that every device has as many
    cache = make_cache(cfg, (rows + padding) // n_devices)(params, spread(np.zeros(n_devices), n_devices))
    nats, previous, pending = 0.0, None, 0
    for batch in eval_batches(tokens, rows, run.tgt_len):
        batch = [np.pad(a, ((0, padding), (0, 0))) for a in batch]
        total, cache = eval_step(params, *spread(batch, n_devices), cache)
        nats += 0.0 if previous is None else float(previous)  # a step late, so that the device has work meanwhile
        previous = total
        if stop:
            asked, pending = layout.any_process_stopped(stop.signal, pending)
            if asked:
                stop.signal = asked
                return None
    return (nats + float(previous)) / (len(tokens) - 1), len(tokens) - 1


def bits_per_byte(loss_nats, corpus, split):
    """Nats per token -> bits per byte of the split's text; None where ids have no text."""
    if corpus.vocab["kind"] == "ids":
        return None
    return loss_nats / math.log(2) * len(getattr(corpus, split)) / corpus.n_bytes[split]


def eval_metrics(loss, n, step, split, corpus, run):
    """The log entry of an evaluation: mean nats `loss` over n targets."""
    return {
        "step": step,
        "split": split,
        "loss_nats": loss,
        "bpb": bits_per_byte(loss, corpus, split),
        "ppl": math.exp(min(loss, 700)),
        "targets": n,
        "eval_batch": min(run.eval_batch, n),
    }


def eval_only(cfg, run, corpus, source, mem_lens, layout):
    """Yields the log entry of a checkpoint's evaluation on a split, for each memory length in `mem_lens`."""
    tokens, n_devices = getattr(corpus, run.split), layout.n_devices
    if len(tokens) < 2:
        raise ValueError(f"{run.split} split has {len(tokens)} tokens, need at least 2: give a longer text")
    configs = [replace(cfg, mem_len=n) for n in mem_lens]
    longest = -(-(len(tokens) - 1) // min(run.eval_batch, len(tokens) - 1))
    run = replace(run, tgt_len=min(run.tgt_len, longest))  # more would be padding, of any size
    params = replicate(txl.unstack(source.params, cfg), spread(np.zeros(n_devices), n_devices))
    for n, sized in zip(mem_lens, configs):
        loss, count = evaluate(make_eval_step(sized), params, tokens, sized, run, layout)
        if not math.isfinite(loss):
            found = f"{run.split} loss is {loss} with mem_len {n}"
            raise ValueError(f"{found}: the weights are broken, use another checkpoint")
        yield {**eval_metrics(loss, count, source.run["step"], run.split, corpus, run), "mem_len": n}


# memory figures


def device_stats():
    """What the first device tells of its memory; {} where the backend tells nothing."""
    try:
        return jax.local_devices()[0].memory_stats() or {}
    except (RuntimeError, NotImplementedError):  # some backends raise instead of giving None
        return {}


def memory_mib():
    """(MiB, whose): the devices' peak where the backend tells, else this process's peak resident memory, else None."""
    if peak := device_stats().get("peak_bytes_in_use"):
        return peak / MIB, "device peak"
    try:
        import resource
    except ImportError:
        return None, "unknown"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (MIB if sys.platform == "darwin" else 2**10), "process peak"


def xla_total(compiled):
    """XLA's own figure for a compiled program in bytes, or None: temporaries + arguments + outputs - aliased."""
    m = compiled.memory_analysis()
    if m is None:
        return None
    return m.temp_size_in_bytes + m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes


def memory_plan(cfg, run, layout, compiled, compiled_eval=None):
    """{kind_mib: MiB on each device} of a compiled step, and of an evaluation; None where the backend tells nothing."""
    state, total = state_shapes(cfg, run, layout), xla_total(compiled)
    held = {
        "parameters": nbytes(state.params),
        "gradients": nbytes(state.params),  # with --shard opt whole until their sum over devices is taken
        "optimizer": nbytes(state.opt_state),
        "memories": nbytes(state.mems),
    }
    kinds = {**held, "workspace": None if total is None else max(total - sum(held.values()), 0), "total": total}
    if compiled_eval is not None:
        total = xla_total(compiled_eval)
        beside = held["optimizer"] + held["memories"]
        if run.shard == "params":
            beside += held["parameters"]  # the shards, beside whole ones
        kinds["evaluation"] = None if total is None else total + beside
    return {f"{name}_mib": None if n is None else round(n / MIB, 2) for name, n in kinds.items()}


# the log


def print_main(*words):
    """A line for people about what goes on: standard error of process 0."""
    if jax.process_index() == 0:
        flags.print_status(*words)


def versions():
    """Versions of what computes."""
    return {"python": sys.version.split()[0], "jax": jax.__version__, "numpy": np.__version__}


def log_header(cfg, run, corpus, layout, plan):
    """The log's first line: everything that decides the run."""
    device, block = jax.local_devices()[0], txl.attention_block(cfg, run.tgt_len)
    attention = "pallas" if cfg.attention == "pallas" else "dense"
    return {
        "versions": versions(),
        "backend": device.platform,
        "device": device.device_kind,
        "n_devices": layout.n_devices,
        "config": asdict(cfg),
        "run": asdict(run),
        "mem_mib_is": memory_mib()[1],
        "attention": f"chunked, blocks of {block}" if block else attention,
        "corpus": {"name": corpus.name, "source": corpus.source, "sha256": corpus.sha256, "bytes": corpus.n_bytes},
        "n_params": txl.count_params(cfg),
        "plan": plan,
    }


def print_header(cfg, corpus, split, n_devices, place):
    """Says what computes, which model, from or to which place, and on which text."""
    device, size = jax.local_devices()[0], f"{txl.count_params(cfg):,} parameters"
    print_main(f"jax {jax.__version__}, {device.platform}, {n_devices} x {device.device_kind}; {size}; {place}")
    tokens = f"{len(getattr(corpus, split)):,} {'training' if split == 'train' else split} tokens"
    print_main(f"{corpus.source}; sha256 {corpus.sha256}; {tokens}, vocabulary {cfg.n_token}")
    if line := prepare.unknown_characters(corpus.vocab, corpus.n_unk):
        print_main(line)


def format_entry(entry, run):
    """One log entry as text for the console."""
    if "skipped" in entry:
        return f"step {entry['step']}  loss or gradient is not finite: skipped, {entry['skipped']} in a row"
    nats, bpb = abs(entry["loss_nats"]), entry["bpb"]  # no -0.0000
    loss = f"{nats:.4f} nats  " + (f"ppl {math.exp(min(nats, 700)):.4g}" if bpb is None else f"{abs(bpb):.4f} bpb")
    if "split" in entry:
        rows = f"{entry['eval_batch']} row" if entry["eval_batch"] == 1 else f"{entry['eval_batch']} rows"
        what = f"{entry['split']} loss of {entry['targets']:,} targets in {rows}"
        if "mem_len" in entry:
            what += f", mem_len {entry['mem_len']}"
        return f"step {entry['step']}  {what}: {loss}"
    memory = "n/a" if entry["mem_mib"] is None else f"{entry['mem_mib']:,.0f} MiB"
    speed = "compiled" if entry["tok_per_s"] is None else f"{entry['tok_per_s']:,.0f} tok/s"
    head = f"step {entry['step']}/{run.steps} {entry['step'] / run.steps:.0%}  loss {loss}"
    head += f"  grad {entry['grad_norm']:.3f}  lr {entry['lr']:.2e}  {speed}  mem {memory}"
    if entry["left_s"] is None:
        return head
    return f"{head}  left {entry['left_s'] // 60:.0f}m{entry['left_s'] % 60:02.0f}s"


def write_log(file, entry, run):
    """Appends an entry to the log and prints it."""
    file.write(json.dumps(entry) + "\n")
    file.flush()
    flags.print_result(json.dumps(entry) if run.json else format_entry(entry, run))


# the loop


class Context(NamedTuple):
    """What stays the same over a run."""

    cfg: txl.Config
    run: TrainConfig
    corpus: prepare.Corpus
    layout: Layout
    folder: Path
    log: object  # the open log.jsonl


class Clock(NamedTuple):
    """What a log line is told against."""

    first: int  # the step before this call's first
    time: float | None  # when the last line was written; None: nothing to measure against yet
    step: int  # and at which step
    skipped: int  # steps skipped in a row until now


class Stop:
    """Which signal asked this run to end, or 0."""

    signal = 0


@contextlib.contextmanager
def catch_signals():
    """SIGINT, SIGTERM, SIGHUP set the signal of the Stop that this gives; a second SIGINT ends the process at once."""
    stop, old = Stop(), {}

    def handler(number, frame):
        if stop.signal and number == signal.SIGINT:
            signal.default_int_handler(number, frame)
        stop.signal = number

    with contextlib.suppress(ValueError):  # not the main thread
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number and signal.getsignal(number) != signal.SIG_IGN:  # which nohup asks for
                old[number] = signal.signal(number, handler)
    try:
        yield stop
    finally:
        for number, action in old.items():
            signal.signal(number, action)


def exit_on_signal(ctx, step, asked):
    """Ends a run that signal `asked` stopped at `step`, all of it saved, and says how to go on."""
    way, path = ("--resume", ctx.folder) if step < ctx.run.steps else ("--eval_only --run", ctx.folder / "last.npz")
    print_main(f"stopped at step {step}: go on with python train.py {way} {shlex.quote(str(path))}")
    sys.exit(128 + asked)


def check_finite(step, folder, skipped=0, **values):
    """Ends the run where one of the values of `step` is not finite. skipped: steps in a row that may be skipped."""
    if not all(map(math.isfinite, values.values())):
        what = ", ".join(f"{name} {value}" for name, value in values.items())
        kept = "keeps its last good checkpoint" if any(folder.glob("*.npz")) else "has no checkpoint yet"
        way = f"Lower --lr, raise --warmup, or skip such steps: --skip_nonfinite {2 * skipped or 3}"
        flags.fail("train.py", f"{what} at step {step}: stopped; {folder} {kept}. {way}")


def device_get(metrics):
    """A step's metrics as floats: waits for the step."""
    return [float(x) for x in np.asarray(metrics)]


def log_step(ctx, step, metrics, clock):
    """Checks the metrics of a step and logs them where that is due -> the Clock from now on."""
    run = ctx.run
    loss, grad_norm, lr = device_get(metrics)
    skipped = 0 if math.isfinite(loss) and math.isfinite(grad_norm) else clock.skipped + 1
    if skipped > run.skip_nonfinite:
        check_finite(step, ctx.folder, run.skip_nonfinite, loss=loss, grad_norm=grad_norm)
    clock = clock._replace(skipped=skipped)
    if skipped:
        write_log(ctx.log, {"step": step, "skipped": skipped}, run)
        return clock
    if step % run.log_every and step not in (clock.first + 1, run.steps):
        return clock
    now = time.perf_counter()
    ms = clock.time and (now - clock.time) * 1e3 / (step - clock.step)
    entry = {
        "step": step,
        "loss_nats": loss,
        "bpb": bits_per_byte(loss, ctx.corpus, "train"),
        "grad_norm": grad_norm,
        "lr": lr,
        "tok_per_s": ms and run.batch * run.tgt_len / ms * 1e3,
        "step_ms": ms,
        "mem_mib": memory_mib()[0],
        "left_s": ms and (run.steps - step) * ms / 1e3,
    }
    write_log(ctx.log, entry, run)
    return clock._replace(time=now, step=step)


def evaluate_and_log(ctx, eval_step, params, step, split, stop, limit=None):
    """Mean nats of a split, or of its first `limit` targets; logged. None where `stop` ends it before."""
    tokens = getattr(ctx.corpus, split)[: limit and limit + 1]
    found = evaluate(eval_step, ctx.layout.full_params(params), tokens, ctx.cfg, ctx.run, ctx.layout, stop)
    if found is None:
        return None
    entry = eval_metrics(*found, step, split, ctx.corpus, ctx.run)
    check_finite(step, ctx.folder, ctx.run.skip_nonfinite, **{f"{split}_loss": entry["loss_nats"]})
    write_log(ctx.log, entry, ctx.run)
    return entry["loss_nats"]


def named_arrays(state):
    """{name in a checkpoint file: array or shape} of a train state."""
    return checkpoint.flatten({"params": state.params, "opt": state.opt_state, "mems": state.mems})


def save_checkpoint(ctx, state, names, **progress):
    """Saves the devices' state under `names`; progress: step, cursor and best loss."""
    run = {"flags": asdict(ctx.run), "corpus": ctx.corpus.tokens_sha256, "versions": versions(), **progress}
    meta = {"config": asdict(ctx.cfg), "vocab": ctx.corpus.vocab, "run": run}
    arrays = named_arrays(to_host(state, ctx.layout))
    if jax.process_index() == 0:
        for name in names:
            checkpoint.save(ctx.folder / name, arrays, meta)


def restore_checkpoint(source, cfg, run):
    """(host state, cursor) of a checkpoint to resume; memory starts empty where its shape has changed."""
    like = jax.eval_shape(lambda: create_train_state(cfg, run, Layout(1), None, run.batch))
    wanted = named_arrays(like)
    saved = [source.run["flags"].get("batch"), source.cfg.mem_len, source.cfg.dtype]
    fresh_mems = saved != [run.batch, cfg.mem_len, cfg.dtype]
    read = {name: leaf for name, leaf in wanted.items() if not (fresh_mems and name.startswith("mems/"))}
    meta, arrays = checkpoint.read(source.run["path"], lambda meta: read)
    if meta["run"]["step"] != source.run["step"]:
        raise ValueError(f"{source.run['path']} was written to while it was read: start again")
    if fresh_mems:
        print_main("memory starts empty: batch, mem_len or dtype differ from the checkpoint's")
        empty = checkpoint.flatten({"mems": txl.init_mems(cfg, run.batch)})
        arrays |= {name: np.asarray(leaf) for name, leaf in empty.items()}
    if meta["run"]["versions"].get("jax") != jax.__version__:
        was = meta["run"]["versions"].get("jax")
        print_main(f"the checkpoint was written under jax {was!r}, this is {jax.__version__}")
    parts = {"params": like.params, "opt": like.opt_state, "mems": like.mems}
    parts = jax.tree.unflatten(jax.tree.structure(parts), [arrays[name] for name in wanted])
    return TrainState(parts["params"], parts["opt"], parts["mems"]), meta["run"]["cursor"]


def init_or_restore(cfg, run, source, layout):
    """(devices' state, steps done, tokens read of each row, best loss) at the start of a run."""
    if not run.resume:
        return fresh_state(cfg, run, layout, source and source.params), 0, 0, math.inf
    try:
        state, cursor = restore_checkpoint(source, cfg, run)
    except ValueError as e:
        flags.fail("train.py", e)
    return to_devices(state, layout), source.run["step"], cursor, source.run["best"]


def train_loop(ctx, train_step, eval_step, state, first, cursor, best, stop):
    """Steps, a log line now and then, evaluations, checkpoints; at the end all of valid and test -> state."""
    run, layout = ctx.run, ctx.layout
    clock, previous, pending = Clock(first, None, first, 0), None, 0
    for step in range(first + 1, run.steps + 1):
        batch = get_batch(ctx.corpus.train, run.batch, cursor, run.tgt_len, process_slice(run.batch))
        batch = split_rows(batch, layout.n_devices // jax.process_count())
        state, metrics = train_step(state, *batch, np.int32(step - 1))
        cursor += run.tgt_len
        asked, pending = layout.any_process_stopped(stop.signal, pending)
        if previous:
            clock = log_step(ctx, *previous, clock)  # a step late, so that the device has work meanwhile
        previous = step, metrics
        if run.profile and step == min(first + 4, run.steps):
            print_main(flags.import_tool("profile", "profile").steps(train_step, state, batch, run.profile))
            clock = clock._replace(time=None)
        if step % run.eval_every and step != run.steps and not asked:
            continue
        clock = log_step(ctx, step, metrics, clock)
        paused, previous, loss = time.perf_counter(), None, None
        if not asked:
            loss = evaluate_and_log(ctx, eval_step, state.params, step, "valid", stop, run.eval_tokens)
        if loss is None:
            save_checkpoint(ctx, state, ["last.npz"], step=step, cursor=cursor, best=best)
            exit_on_signal(ctx, step, asked or stop.signal)
        # The best first: whatever ends this process between the two, the newest file says of a best loss that is there.
        names = ["best.npz", "last.npz"] if loss < best else ["last.npz"]
        best = min(loss, best)
        save_checkpoint(ctx, state, names, step=step, cursor=cursor, best=best)
        if clock.time:
            clock = clock._replace(time=clock.time + time.perf_counter() - paused)
    for split in ("valid", "test"):
        if split == "valid" and len(ctx.corpus.valid) - 1 <= run.eval_tokens:
            continue  # read whole after the last step
        if evaluate_and_log(ctx, eval_step, state.params, run.steps, split, stop) is None:
            exit_on_signal(ctx, run.steps, stop.signal)
    return state


def short_sample(params, vocab, cfg, n=200, temperature=0.8):
    """Text (or ids) that the model writes from an empty prompt: a look at what it has learnt."""
    first = jnp.asarray([tokenizer.start_id(vocab)], jnp.int32)

    @jax.jit
    def write(params, key):
        def body(carry, key):
            ids, cache = carry
            scores, cache = txl.decode(params, ids[:, None], cache, cfg)
            scores = scores[:, 0, : tokenizer.size(vocab)]
            ids = jax.random.categorical(key, scores / temperature).astype(jnp.int32)
            return (ids, cache), ids[0]

        return lax.scan(body, (first, txl.init_cache(params, cfg, 1)), jax.random.split(key, n))[1]

    return tokenizer.decode_text(vocab, write(params, jax.random.key(0)))


def draw(function, *args):
    """What a function of tools/plot.py says of its picture. Whatever it raises must not end a run."""
    try:
        return getattr(flags.import_tool("plot", "plot"), function)(*args)
    except Exception as e:
        return f"no picture: {' '.join(str(e).split())}"


def train(cfg, run, corpus, source, layout, folder, stop):
    """One run: the step compiled, the state made, the loop, what it has come to."""
    train_step = compile_train_step(cfg, run, layout)  # before there is any state
    state, first, cursor, best = init_or_restore(cfg, run, source, layout)
    plan = memory_plan(cfg, run, layout, train_step)
    header = log_header(cfg, run, corpus, layout, plan)
    with checkpoint.open_log(folder / "log.jsonl" if jax.process_index() == 0 else os.devnull) as log:
        log.write(json.dumps({"resumed_at": first, **header} if first else header) + "\n")
        ctx = Context(cfg, run, corpus, layout, folder, log)
        state = train_loop(ctx, train_step, make_eval_step(cfg), state, first, cursor, best, stop)
    params = jax.tree.map(np.asarray, layout.full_params(state.params))
    if jax.process_index() == 0:
        print_main(draw("plot_runs", [folder], folder / "loss.png"))
        best_step = checkpoint.read(folder / "best.npz")[0]["run"]["step"]
        print_main(f"losses above are of the last weights, last.npz; sample.py reads best.npz, of step {best_step}")
    reached, whose = memory_mib()
    if whose == "process peak":
        whose += ", imports and compiling included"
    show = lambda mib: "unknown" if mib is None else f"{mib:,.0f} MiB"
    print_main(f"memory: the step's plan {show(plan['total_mib'])} a device; reached {show(reached)} ({whose})")
    if not run.json:
        text = short_sample(params, corpus.vocab, cfg)
        flags.print_result(f"sample:\n{flags.printable(text)}\ncheckpoints and log in {folder}")


def print_evaluations(cfg, run, corpus, source, mem_len, layout):
    """Evaluates a checkpoint, with each of several memory lengths where `mem_len` is a tuple; then draws them."""
    entries = []
    if source.run["corpus"] and not trained_on(source, corpus):  # imported weights tell no corpus
        print_main(f"{corpus.source} is another text than the one that this run was trained on")
    try:
        lengths = mem_len if isinstance(mem_len, tuple) else (cfg.mem_len,)
        for entry in eval_only(cfg, run, corpus, source, lengths, layout):
            entries.append(entry)
            flags.print_result(json.dumps(entry) if run.json else format_entry(entry, run))
    except jax.errors.JaxRuntimeError as e:
        if not flags.is_out_of_memory(e):
            raise
        less = "a smaller --eval_batch, --mem_len or --tgt_len, --attention chunked, --dtype bfloat16"
        flags.fail("train.py", f"out of memory: give {less}, or more --devices")
    if isinstance(mem_len, tuple) and jax.process_index() == 0:
        print_main(draw("mem_len_bars", entries))
        print_main(draw("plot_mem_lens", entries, Path(source.run["path"]).parent / f"mem_len_{run.split}.png"))


# main


def set_allocator(overrides):
    """Sets what jax reads when it first touches a device: before that, or it changes nothing."""
    if overrides.get("mem_fraction"):
        os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)  # jaxlib refuses both names at once
        os.environ["XLA_CLIENT_MEM_FRACTION"] = str(overrides["mem_fraction"])
    if "preallocate" in overrides:
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = str(overrides["preallocate"]).lower()


def measure_memory(layout):
    """measure(cfg, run) -> `memory_plan` of its step and its evaluation, compiled from shapes."""

    def measure(cfg, run):
        compiled = compile_train_step(cfg, run, layout)
        shapes = eval_shapes(cfg, run, layout.n_devices)
        return memory_plan(cfg, run, layout, compiled, compile_shapes(make_eval_step(cfg), *shapes))

    return measure


def main(argv=None):
    classes, hidden = (TrainConfig, txl.Config), ("n_token", "tie_projs")
    choices = {**CHOICES, "remat": txl.REMAT, "attention": txl.ATTENTION, "dtype": txl.DTYPES}
    about = "Train a Transformer-XL."
    overrides = flags.parse(argv, "train.py", about, classes, EXAMPLES, hidden=hidden, choices=choices)
    set_allocator(overrides)
    try:
        cfg, run, corpus, source = resolve_config(overrides)
        if run.coordinator:
            flags.import_tool("shard", "coordinator").connect(run)  # before anything touches a device
        txl.check_available(cfg)
        n_devices = count_devices(run)
        layout = make_layout(cfg, run, n_devices)
        if run.eval_only:
            print_header(cfg, corpus, run.split, n_devices, f"{source.run['path']}, step {source.run['step']}")
            return print_evaluations(cfg, run, corpus, source, overrides.get("mem_len"), layout)
        if run.plan:
            plan = flags.import_tool("plan", "plan")
            return plan.show(cfg, run, run.batch // n_devices, measure_memory(layout))
        need_tokens(run, corpus)
        if run.resume and source.run["step"] >= run.steps:
            raise ValueError(f"{run.resume} is at step {source.run['step']} of {run.steps}: give more --steps")
        if run.profile:
            flags.import_tool("profile", "profile").prepare(run.profile)
        if run.memory_budget:
            plan = flags.import_tool("plan", "memory_budget")
            cfg, run, taken = plan.fit_budget(cfg, run, run.batch // n_devices, measure_memory(layout))
            print_main(taken)
        if jax.process_index():
            folder = Path(run.resume or run.out)  # which process 0 makes
        else:
            anew = overrides.get("resume") == "auto"
            folder = Path(run.resume or checkpoint.new_run_folder(run.out, corpus.name, anew))
    except (ValueError, OSError) as e:
        flags.fail("train.py", e)
    print_header(cfg, corpus, "train", n_devices, folder)
    if jax.process_count() > 1:
        flags.import_tool("shard", "coordinator").announce(folder)
    lock = checkpoint.lock_folder(folder, print_main) if jax.process_index() == 0 else contextlib.nullcontext()
    try:
        with lock, catch_signals() as stop:
            train(cfg, run, corpus, source, layout, folder, stop)
        if stop.signal:  # after the last checkpoint
            sys.exit(128 + stop.signal)
    except OSError as e:  # a full disk, or another run in the folder
        flags.fail("train.py", e)
    except jax.errors.JaxRuntimeError as e:
        if not flags.is_out_of_memory(e):
            raise
        print_main(str(e).splitlines()[0])
        with contextlib.suppress(ValueError, jax.errors.JaxRuntimeError):  # no plan without tools/
            plan = flags.import_tool("plan", "plan")
            plan.show_out_of_memory(cfg, run, run.batch // n_devices, measure_memory(layout))
        less = "--remat full, --attention chunked, --loss_chunk 1024, --layer_rows 1, --dtype bfloat16"
        less += ", then a smaller --batch, --tgt_len, --mem_len or model (--n_layer, --d_model, --d_inner)"
        less += ", or --eval_batch in an evaluation"
        flags.fail("train.py", f"out of memory: see the plan above, and try in this order {less}")


if __name__ == "__main__":
    flags.use_huge_pages()
    flags.run_script(main)
