"""One step of training on all devices: the optimizer, the state, the compiled function.

Every step runs under `pmap`. What belongs to rows (ids, targets, memory) and shards (see shard.py) have a leading axis,
one entry a device. What is whole on each device has none, so that XLA can update it in place.
"""

import math
import re
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax import lax

import shard
import txl
from embedding import wide


def schedule(run):
    """Learning rate as a function of the steps done."""

    def lr(step):
        step = jnp.asarray(step, jnp.float32)
        done = jnp.clip((step - run.warmup) / max(run.steps - run.warmup, 1), 0, 1)
        shape = {
            "cosine": run.lr_min + (1 - run.lr_min) * 0.5 * (1 + jnp.cos(jnp.pi * done)),
            "inv_sqrt": jnp.sqrt(max(run.warmup, 1) / jnp.maximum(step + 1, max(run.warmup, 1))),
            "constant": jnp.float32(1),
        }[run.schedule]
        return run.lr * shape * jnp.minimum(1, (step + 1) / max(run.warmup, 1))

    return lr


def clipped(grads, norm, most):
    """Gradients of a global norm of at most `most`."""
    return jax.tree.map(lambda g: jnp.where(norm < most, g, g / norm * most), grads)


def is_weight(params):
    """Which parameters are products' weights or embeddings, and not biases or scales."""
    return jax.tree.map_with_path(lambda path, _: not re.search("bias|scale|b_", path[-1].key), params)


def matrices(params):
    """For Muon: which axes of a layer's weights [L, ...] are a matrix's inputs and outputs; None: not for Muon."""
    axes = {"w_q": (1, (2, 3)), "w_k": (1, (2, 3)), "w_v": (1, (2, 3)), "w_r": (1, (2, 3)), "w_o": ((1, 2), 3)}
    axes |= {"w_1": (1, 2), "w_2": (1, 2)}
    numbers = lambda path, _: optax.contrib.MuonDimensionNumbers(*axes[path[-1].key]) if path[-1].key in axes else None
    return jax.tree.map_with_path(numbers, params)


RMS = 0.2  # updates of a matrix are as large as Adam's, so that one learning rate serves both


def muon(run):
    options = dict(weight_decay=run.weight_decay, consistent_rms=RMS, adam_b2=run.beta2)
    return optax.contrib.muon(schedule(run), **options, muon_weight_dimension_numbers=matrices)


def momentum(beta=0.95):
    """Nesterov's momentum as in optax.contrib.scale_by_muon, in its state."""

    def update(updates, state, params=None):
        mu, count = optax.tree.update_moment(updates, state.mu, beta, 1), optax.safe_increment(state.count)
        ahead = optax.tree.bias_correction(mu, beta, count + 1)
        now = optax.tree.bias_correction(updates, beta, count)
        updates = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, now)
        return updates, state._replace(count=count, mu=mu)

    return optax.GradientTransformation(optax.contrib.scale_by_muon().init, update)


def muon_of_shards(run, like, group):
    """`muon` in its parts, in the same state: only what makes the momentum of a layer orthogonal wants it whole."""

    def direction(path, x):
        shape = like["layers"][path[-1].key].shape[1:]
        numbers = matrices({path[-1].key: x})[path[-1].key]
        one = optax.contrib.scale_by_muon(beta=0.0, nesterov=False, weight_dimension_numbers=numbers)
        sides = [math.prod(shape[a - 1] for a in np.atleast_1d(axes)) for axes in numbers]
        scale = RMS * math.sqrt(max(sides))
        layer = lambda matrix: scale * one.update(matrix[None], one.init(matrix[None]))[0][0]
        return shard.in_turns(layer, x, shape, group)

    directions = optax.stateless(lambda updates, _: jax.tree.map_with_path(direction, updates))
    decay, rate = optax.add_decayed_weights(run.weight_decay), optax.scale_by_learning_rate(schedule(run))
    adam = optax.adamw(schedule(run), 0.9, run.beta2, weight_decay=0.0, nesterov=True)
    kind = lambda numbers: "adam" if numbers is None else "muon"
    label = lambda params: jax.tree.map(kind, matrices(params), is_leaf=lambda x: not isinstance(x, dict))
    return optax.partition({"muon": optax.chain(momentum(), directions, decay, rate), "adam": adam}, label)


def optimizer(run, like=None, group=None):
    """Clipping by global norm, then adam, adamw (decay of the matrices alone) or muon (Adam for all but matrices).

    group: gradients, parameters and state are shards (see shard.py) of leaves like those of `like`; None: whole.
    """
    lr, clip = schedule(run), optax.clip_by_global_norm(run.clip)
    if group:
        clip = optax.stateless(lambda grads, _: clipped(grads, shard.norm(grads, group), run.clip))
    if run.optimizer == "muon":
        return optax.chain(clip, muon_of_shards(run, like, group) if group else muon(run))
    decay = optax.identity()
    if run.optimizer == "adamw":
        decay = optax.add_decayed_weights(run.weight_decay, is_weight)
    return optax.chain(clip, optax.scale_by_adam(0.9, run.beta2), decay, optax.scale_by_learning_rate(lr))


class State(NamedTuple):
    params: dict
    opt: tuple
    mems: txl.Mems


AXES = State(None, None, 0)  # which axis counts devices, for pmap


def axes_of(run):
    """The same for a state that is sharded as the run says."""
    return {"none": AXES, "opt": State(None, 0, 0), "params": State(0, 0, 0)}[run.shard]


def init_state(cfg, run, params, rows):
    """A fresh state for `rows` rows; params None: random ones from the seed."""
    params = txl.init_params(jax.random.key(run.seed), cfg) if params is None else params
    return State(params, optimizer(run).init(params), txl.init_mems(cfg, rows))


def pieces(tree, n, axis=0):
    """Host arrays split into n along `axis`, which come first: [n*b, ...] -> [n, b, ...]."""
    axis_of = lambda a: min(axis, np.ndim(a) - 1)  # rows are axis 1 of Mems.h and the only one of Mems.fill
    split = lambda a: np.stack(np.split(np.asarray(a), n, axis=axis_of(a)))
    return jax.tree.map(split, tree)


def spread(tree, n_devices, axis=0):
    """Host arrays split over all devices, device first; of several processes each gets what its own devices take."""
    return jax.tree.map(lambda a: a[shard.own(n_devices)], pieces(tree, n_devices, axis))


def fresh_state(cfg, run, params, n_devices):
    """The devices' fresh state, made where it stays, so that nothing of it exists twice; params as in `init_state`."""
    group = shard.group_of(run, n_devices)

    def make(params, _):
        state = init_state(cfg, run, params, run.batch // n_devices)
        params = shard.cut(state.params, group) if run.shard == "params" else state.params
        return State(params, shard.cut(state.opt, group) if group else state.opt, state.mems)

    made = jax.pmap(make, "device", in_axes=(None, 0), out_axes=axes_of(run))
    return made(params, spread(np.zeros(n_devices), n_devices))


def state_shapes(cfg, run, n_devices):
    """Shapes of what one of n devices holds of the state."""
    state = jax.eval_shape(lambda: init_state(cfg, run, None, run.batch // n_devices))
    if run.shard == "none":
        return state
    size = shard.group_of(run, n_devices).size
    params = shard.shard_shapes(state.params, size) if run.shard == "params" else state.params
    return State(params, shard.shard_shapes(state.opt, size), state.mems)


def mean_grads(grads, run, group):
    """The mean over devices of gradients: whole, or with --shard shards of it."""
    if run.shard == "none":
        return lax.pmean(grads, "device")
    # Gradients of shards are summed over their group already: what gathering them does in reverse.
    return shard.mean_shards(grads, group) if run.shard == "opt" else shard.mean_over_groups(grads, group)


def row_keys(run, step, rows, purpose):
    """Keys of global rows [B] at a step; purpose: 1 dropout, 2 emptying memory."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(run.seed), purpose), step)
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)


def reset(mems, run, step, rows):
    """Memory of global rows [B], emptied for a share `run.mem_reset` of them: a text begins with none."""
    if not run.mem_reset:
        return mems
    chosen = jax.vmap(lambda key: jax.random.bernoulli(key, run.mem_reset))(row_keys(run, step, rows, 2))
    return mems._replace(fill=jnp.where(chosen, 0, mems.fill))


def in_parts(grads_of, cfg, parts):
    """grads_of(params, ids, targets, mems, keys) computed for `parts` parts of the rows, one after the other."""

    def compute(params, ids, targets, mems, keys):
        split = lambda a: a.reshape(parts, len(ids) // parts, *a.shape[1:])
        h = jnp.moveaxis(mems.h.reshape(len(mems.h), parts, len(ids) // parts, *mems.h.shape[2:]), 1, 0)
        zero = jax.tree.map(jnp.zeros_like, params)

        def add(total, part):
            (loss, mems), grads = grads_of(params, *part)
            return jax.tree.map(lambda a, b: a + b / parts, total, (loss, grads)), mems

        xs = (split(ids), split(targets), txl.Mems(h, split(mems.fill)), split(keys))
        (loss, grads), mems = lax.scan(add, (jnp.zeros((), wide(cfg)), zero), xs)
        h = jnp.moveaxis(mems.h, 0, 1).reshape(cfg.n_layer, len(ids), *mems.h.shape[3:])
        return (loss, txl.Mems(h, mems.fill.reshape(len(ids)))), grads

    return compute


def make_step(cfg, run, n_devices):
    """step(state, ids, targets [device, B, T], number) -> state, [3]: loss in nats, gradient norm, lr."""
    rows, like = run.batch // n_devices, txl.param_shapes(cfg)
    group = shard.group_of(run, n_devices)
    tx, norm_of = optimizer(run, like, group), partial(shard.norm, group=group) if group else optax.tree.norm

    def loss_of(params, ids, targets, mems, keys):
        keys = keys if cfg.dropout or cfg.dropatt else None
        params, whole = shard.for_layers(params, like, group) if run.shard == "params" else (params, None)
        return txl.loss_fn(params, ids, targets, mems, cfg, key=keys, whole=whole)

    grads_of = jax.value_and_grad(loss_of, has_aux=True)
    grads_of = grads_of if run.batch_chunk == 1 else in_parts(grads_of, cfg, run.batch_chunk)

    def step(state, ids, targets, number):
        own = lax.axis_index("device") * rows + jnp.arange(rows)
        mems, keys = reset(state.mems, run, number, own), row_keys(run, number, own, 1)
        (loss, mems), grads = grads_of(state.params, ids, targets, mems, keys)
        loss, grads = lax.pmean(loss, "device"), mean_grads(grads, run, group)
        with jax.named_scope("optimizer"):
            params = shard.cut(state.params, group) if run.shard == "opt" else state.params
            updates, opt = tx.update(grads, state.opt, params)
            params = optax.apply_updates(params, updates)
            params = shard.gather(params, like, group) if run.shard == "opt" else params
        norm = norm_of(grads)
        told = jnp.stack([loss.astype(jnp.float32), norm, schedule(run)(number)])
        # Memory of a step that isn't finite is dropped. On the way this tells XLA that the old memory is done with
        # once the gradients are there; it would copy all of it otherwise.
        good = jnp.isfinite(loss) & jnp.isfinite(norm)
        mems = txl.Mems(jnp.where(good, mems.h, 0), jnp.where(good, mems.fill, 0))
        if run.skip_nonfinite:
            kept = lambda new, old: new if new.dtype == jnp.int32 else jnp.where(good, new, old)
            # The optimizer's counts go on, so that the schedule's step is the run's.
            params, opt = jax.tree.map(kept, (params, opt), (state.params, state.opt))
        return State(params, opt, mems), told

    axes = axes_of(run)
    return jax.pmap(step, "device", in_axes=(axes, 0, 0, None), out_axes=(axes, None), donate_argnums=0)


def stacked(tree, n_devices):
    """Shapes of one device's arrays -> of all devices', device first."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct((n_devices, *a.shape), a.dtype), tree)


def shapes(cfg, run, n_devices):
    """Shapes of what `make_step`'s function takes: state, ids, targets, number."""
    ids = stacked(jax.ShapeDtypeStruct((run.batch // n_devices, run.tgt_len), jnp.int32), n_devices)
    each = zip(state_shapes(cfg, run, n_devices), axes_of(run))
    state = State(*(tree if axis is None else stacked(tree, n_devices) for tree, axis in each))
    return state, ids, ids, jax.ShapeDtypeStruct((), jnp.int32)


def compile_shapes(function, *shapes):
    """A pmapped function compiled for arrays of all devices."""
    if jax.process_count() > 1:  # where pmap would take a bare shape for an array of this process and read it
        shapes = jax.tree.map(jax.typeof, shapes)
    return function.lower(*shapes).compile()


def compile_step(cfg, run, n_devices):
    """`make_step`'s function, compiled from shapes before any state exists; donation that goes unused is an error."""
    step = make_step(cfg, run, n_devices)
    compiled = compile_shapes(step, *shapes(cfg, run, n_devices))
    needed = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(state_shapes(cfg, run, n_devices)))
    told = compiled.memory_analysis()
    donates = not jax.config.jax_debug_nans  # which keeps the old state to look at
    if donates and told is not None and told.alias_size_in_bytes < needed:
        raise RuntimeError(f"only {told.alias_size_in_bytes} of {needed} bytes of state are updated in place: our bug")
    if jax.process_count() == 1:
        return compiled
    # Only the function itself makes one array of what several processes hold.
    step.memory_analysis, step.as_text = compiled.memory_analysis, compiled.as_text
    return step


def to_devices(state, n_devices, run):
    """A host state of all rows -> the devices' state, sharded as the run says."""
    group, (params, opt, mems) = shard.group_of(run, n_devices), state
    params = shard.to_shards(params, group) if run.shard == "params" else params
    state = State(params, shard.to_shards(opt, group) if group else opt, spread(mems, n_devices, axis=1))
    # Placed as steps leave their results: so a step compiles once.
    return jax.pmap(lambda state: state, "device", in_axes=(axes_of(run),), out_axes=axes_of(run))(state)


def to_host(state, cfg, run):
    """The devices' state, sharded as the run says -> host arrays of all rows, whole."""
    params, opt, (h, fill) = state.params, state.opt, shard.fetched(state.mems)  # h [device, L, B, M, D]
    if run.shard != "none":
        like, group = jax.eval_shape(lambda: init_state(cfg, run, None, 1)), shard.group_of(run, len(h))
        opt = shard.from_shards(opt, like.opt, group)
        params = shard.from_shards(params, like.params, group) if run.shard == "params" else params
    params, opt = jax.tree.map(np.asarray, (params, opt))
    h = np.moveaxis(h, 0, 1).reshape(h.shape[1], fill.size, *h.shape[3:])
    return State(params, opt, txl.Mems(h, fill.reshape(-1)))


def make_whole(cfg, run, n_devices):
    """A function from the devices' parameters, sharded as the run says, to whole ones on each device."""
    if run.shard != "params":
        return lambda params: params
    like, group = txl.param_shapes(cfg), shard.group_of(run, n_devices)
    return jax.pmap(lambda params: shard.gather(params, like, group), "device", out_axes=None)
