"""One step of training or evaluation on all devices: the optimizer, the state, the compiled functions.

Every step runs under `pmap`. What belongs to rows (ids, targets, memory) has a leading axis, one entry a device;
parameters and optimizer state are whole on each device and have none, so that XLA can update them in place.
"""

import re
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax import lax

import txl
from embedding import wide


def schedule(run):
    """Learning rate as a function of the steps done."""

    def lr(step):
        step = jnp.asarray(step, jnp.float32)
        left = jnp.clip((step - run.warmup) / max(run.steps - run.warmup, 1), 0, 1)
        shape = {
            "cosine": run.lr_min + (1 - run.lr_min) * 0.5 * (1 + jnp.cos(jnp.pi * left)),
            "inv_sqrt": jnp.sqrt(max(run.warmup, 1) / jnp.maximum(step + 1, max(run.warmup, 1))),
            "constant": jnp.float32(1),
        }[run.schedule]
        return run.lr * shape * jnp.minimum(1, (step + 1) / max(run.warmup, 1))

    return lr


def optimizer(run):
    """Clipping by global norm, then adam, adamw (decay of the matrices alone) or muon (Adam for all but matrices)."""
    lr, clip = schedule(run), optax.clip_by_global_norm(run.clip)
    if run.optimizer == "muon":
        # consistent_rms: updates of a matrix are as large as Adam's, so that one learning rate serves both
        decay = dict(weight_decay=run.weight_decay, consistent_rms=0.2, adam_b2=run.beta2)
        return optax.chain(clip, optax.contrib.muon(lr, **decay, muon_weight_dimension_numbers=matrices))
    decay = optax.identity()
    if run.optimizer == "adamw":
        decay = optax.add_decayed_weights(run.weight_decay, is_weight)
    return optax.chain(clip, optax.scale_by_adam(0.9, run.beta2), decay, optax.scale_by_learning_rate(lr))


def is_weight(params):
    """Which parameters are products' weights or embeddings, and not biases or scales."""
    return jax.tree.map_with_path(lambda path, _: not re.search("bias|scale|b_", path[-1].key), params)


def matrices(params):
    """For Muon: which axes of a layer's weights [L, ...] are a matrix's inputs and outputs; None: not for Muon."""
    axes = {"w_q": (1, (2, 3)), "w_k": (1, (2, 3)), "w_v": (1, (2, 3)), "w_r": (1, (2, 3)), "w_o": ((1, 2), 3)}
    axes |= {"w_1": (1, 2), "w_2": (1, 2)}
    numbers = lambda path, _: optax.contrib.MuonDimensionNumbers(*axes[path[-1].key]) if path[-1].key in axes else None
    return jax.tree.map_with_path(numbers, params)


class State(NamedTuple):
    params: dict
    opt: tuple
    mems: txl.Mems


AXES = State(None, None, 0)  # which axis counts devices, for pmap


def init_state(cfg, run, params, rows):
    """A fresh state for `rows` rows; params None: random ones from the seed."""
    params = txl.init_params(jax.random.key(run.seed), cfg) if params is None else params
    return State(params, optimizer(run).init(params), txl.init_mems(cfg, rows))


def row_keys(run, step, rows):
    """Dropout keys of global rows [B] at a step."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(run.seed), 1), step)
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)


def make_step(cfg, run, n_devices):
    """step(state, ids, targets [device, B, T], number) -> state, [3]: loss in nats, gradient norm, lr."""
    tx, rows, parts = optimizer(run), run.batch // n_devices, run.batch_chunk

    def grads_of(params, ids, targets, mems, keys):
        keys = keys if cfg.dropout or cfg.dropatt else None
        return jax.value_and_grad(txl.loss_fn, has_aux=True)(params, ids, targets, mems, cfg, key=keys)

    def in_parts(params, ids, targets, mems, keys):
        split = lambda a: a.reshape(parts, rows // parts, *a.shape[1:])
        h = jnp.moveaxis(mems.h.reshape(len(mems.h), parts, rows // parts, *mems.h.shape[2:]), 1, 0)
        zero = jax.tree.map(jnp.zeros_like, params)

        def add(total, part):
            (loss, mems), grads = grads_of(params, *part)
            return jax.tree.map(lambda a, b: a + b / parts, total, (loss, grads)), mems

        xs = (split(ids), split(targets), txl.Mems(h, split(mems.fill)), split(keys))
        (loss, grads), mems = lax.scan(add, (jnp.zeros((), wide(cfg)), zero), xs)
        h = jnp.moveaxis(mems.h, 0, 1).reshape(cfg.n_layer, rows, *mems.h.shape[3:])
        return (loss, txl.Mems(h, mems.fill.reshape(rows))), grads

    def step(state, ids, targets, number):
        keys = row_keys(run, number, lax.axis_index("device") * rows + jnp.arange(rows))
        compute = grads_of if parts == 1 else in_parts
        (loss, mems), grads = compute(state.params, ids, targets, state.mems, keys)
        loss, grads = lax.pmean((loss, grads), "device")
        with jax.named_scope("optimizer"):
            updates, opt = tx.update(grads, state.opt, state.params)
            params = optax.apply_updates(state.params, updates)
        norm = optax.tree.norm(grads)
        told = jnp.stack([loss.astype(jnp.float32), norm, schedule(run)(number)])
        # Memory of a step that isn't finite is dropped. On the way this tells XLA that the old memory is done with
        # once the gradients are there; it would copy all of it otherwise.
        good = jnp.isfinite(loss) & jnp.isfinite(norm)
        mems = txl.Mems(jnp.where(good, mems.h, 0), jnp.where(good, mems.fill, 0))
        return State(params, opt, mems), told

    return jax.pmap(step, "device", in_axes=(AXES, 0, 0, None), out_axes=(AXES, None), donate_argnums=0)


def compile_step(cfg, run, n_devices):
    """`make_step`'s function, compiled from shapes before any state exists; donation that goes unused is an error."""
    compiled = make_step(cfg, run, n_devices).lower(*shapes(cfg, run, n_devices)).compile()
    state = jax.tree.leaves(jax.eval_shape(lambda: init_state(cfg, run, None, run.batch // n_devices)))
    needed, told = sum(a.size * a.dtype.itemsize for a in state), compiled.memory_analysis()
    donates = not jax.config.jax_debug_nans  # which keeps the old state to look at
    if donates and told is not None and told.alias_size_in_bytes < needed:
        raise RuntimeError(f"only {told.alias_size_in_bytes} of {needed} bytes of state are updated in place: our bug")
    return compiled


def spread(tree, n_devices, axis=0):
    """Host arrays split over devices along `axis`, device first: [N*b, ...] -> [N, b, ...]."""
    split = lambda a: np.stack(np.split(np.asarray(a), n_devices, axis=min(axis, np.ndim(a) - 1)))
    return jax.tree.map(split, tree)


@partial(jax.pmap, axis_name="device", in_axes=(AXES,), out_axes=AXES)
def put(state):
    """Host arrays onto the devices, placed as steps leave their results: so a step compiles once."""
    return state


def to_devices(state, n_devices):
    """A host state of all rows -> the devices' state."""
    return put(state._replace(mems=spread(state.mems, n_devices, axis=1)))


def to_host(state):
    """The devices' state -> host arrays of all rows."""
    params, opt = jax.tree.map(np.asarray, (state.params, state.opt))
    h, fill = np.asarray(state.mems.h), np.asarray(state.mems.fill)  # [N, L, b, M, D]
    h = np.moveaxis(h, 0, 1).reshape(h.shape[1], fill.size, *h.shape[3:])
    return State(params, opt, txl.Mems(h, fill.reshape(-1)))


CACHE_AXES = txl.Cache(0, 0, None, None, 0)  # which axis of a cache counts devices
copies = jax.pmap(
    lambda tree, _: tree, "device", in_axes=(None, 0), out_axes=None
)  # a tree, whole on each of the devices


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


def stacked(tree, n_devices):
    """Shapes of one device's arrays -> of all devices', device first."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct((n_devices, *a.shape), a.dtype), tree)


def shapes(cfg, run, n_devices):
    """Shapes of what `make_step`'s function takes: state, ids, targets, number."""
    rows = run.batch // n_devices
    state = jax.eval_shape(lambda: init_state(cfg, run, None, rows))
    ids = stacked(jax.ShapeDtypeStruct((rows, run.tgt_len), jnp.int32), n_devices)
    return state._replace(mems=stacked(state.mems, n_devices)), ids, ids, jax.ShapeDtypeStruct((), jnp.int32)


def eval_shapes(cfg, run, n_devices):
    """Shapes of what `make_eval`'s function takes: params, ids, targets, weights, cache."""
    rows = -(-run.eval_batch // n_devices)
    like = lambda dtype: jax.ShapeDtypeStruct((rows, run.tgt_len), dtype)
    params = txl.param_shapes(cfg)
    cache = jax.eval_shape(lambda params: txl.init_cache(params, cfg, rows), params)
    per_device = cache._replace(r=(), slot=())
    ids, targets, weights, split = stacked((like(jnp.int32), like(jnp.int32), like(jnp.bool_), per_device), n_devices)
    return params, ids, targets, weights, split._replace(r=cache.r, slot=cache.slot)
