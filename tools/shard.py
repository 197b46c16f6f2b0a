"""Train state sharded over devices (ZeRO with shard=opt, FSDP with shard=params), and runs of several processes.

Devices form groups. A shard of an array is one part of its flattened numbers, zeros after the last, cut into as many
equal parts as a group has devices; the groups hold the same. Of the layers' parameters each layer is cut, which makes
[L, m] of a device; of every other parameter [m]. So are an optimizer's moments of them; each device has its counters
whole.
"""

import math
import os
import re
import shlex
import sys
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax import lax
from jax.experimental import multihost_utils

# several processes


def connect(run):
    """Joins the processes of a run on several machines, before anything touches a device; only process 0 prints.

    A process that hears nothing of another for 10 s ends, and so does one that waits for another at its end.
    """
    check_processes(run)
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from us
    known = dict(coordinator_address=run.coordinator, num_processes=run.n_processes, process_id=run.process_id)
    known = {} if run.coordinator == "auto" else known
    try:
        jax.distributed.initialize(**known, heartbeat_timeout_seconds=10, shutdown_timeout_seconds=10)
    except ValueError as e:
        way = "give HOST:PORT of process 0, --n_processes and --process_id"
        raise ValueError(f"coordinator={run.coordinator} is not to be had ({e}): {way}") from None
    if jax.process_index():
        sys.stdout = open(os.devnull, "w")


def check_processes(run):
    """ValueError where what a run says of its processes contradicts itself."""
    if run.coordinator == "auto":
        if run.n_processes or run.process_id:
            raise ValueError("coordinator=auto finds n_processes and process_id by itself: leave them out")
    elif not re.fullmatch(r"[\w.\-\[\]:]+:\d{1,5}", run.coordinator):
        raise ValueError(f"coordinator={run.coordinator!r} is no address: give HOST:PORT of process 0, or auto")
    elif run.process_id >= run.n_processes:
        found = f"process_id={run.process_id} of n_processes={run.n_processes}"
        raise ValueError(f"{found}: give the number of processes, and to each its own of 0 to that - 1")
    if not (run.out or run.resume or run.eval_only or run.plan):
        raise ValueError("several processes need --out DIR, one folder that all of them see")


def announce(folder):
    """Each process says at its start what to do when another one ends: then jax ends it at once, and it can't."""
    who = f"process {jax.process_index()} of {jax.process_count()}"
    more = f"go on from the last checkpoint with --resume {shlex.quote(str(folder))} on all of them"
    print(f"{who}: if another ends before its time, so does this one; {more}", file=sys.stderr, flush=True)


largest = jax.pmap(lambda number: lax.pmax(number, "device"), "device", out_axes=None)


def any_process_stopped(signal, pending):
    """(signal, pending): the largest signal that a process gave in its last call, and what to give to the next one.

    A call late, so that no device is waited for; with one process at once.
    """
    if jax.process_count() == 1:
        return signal, pending
    return int(pending), largest(np.full(jax.local_device_count(), signal, np.int32))


# shards: what they are


class Group(NamedTuple):
    n: int  # devices in all
    size: int  # devices of a group
    within: list | None  # axis_index_groups: each group's devices; None: all are one group
    between: list | None  # those that hold the same shards


def make_group(n, size):
    """The Group of n devices in groups of `size`."""
    if size == n:
        return Group(n, n, None, None)
    within = [list(range(i, i + size)) for i in range(0, n, size)]
    return Group(n, size, within, [list(devices) for devices in zip(*within)])


def map_params(f, tree, *rest, other=lambda leaf, *_: leaf):
    """f(leaf, number of leading axes not cut, ...) of parameters and moments of them, other(leaf, ...) of the rest."""

    def apply(path, leaf, *more):
        if not isinstance(path[-1], jax.tree_util.DictKey):
            return other(leaf, *more)
        return f(leaf, int(any(getattr(key, "key", None) == "layers" for key in path)), *more)

    return jax.tree.map_with_path(apply, tree, *rest)


def flatten_pad(leaf, lead, size):
    """A whole leaf in parts [..., size, m]; its `lead` leading axes are not cut."""
    xp = np if isinstance(leaf, np.ndarray) else jnp
    flat = leaf.reshape(*leaf.shape[:lead], -1)
    flat = xp.pad(flat, [(0, 0)] * lead + [(0, -flat.shape[-1] % size)])
    return flat.reshape(*flat.shape[:-1], size, -1)


def unflatten(parts, like):
    """The whole leaf, of like's shape, from its parts [..., size, m]."""
    lead = parts.ndim - 2
    flat = parts.reshape(*parts.shape[:lead], -1)
    return flat[..., : math.prod(like.shape[lead:])].reshape(like.shape)


# on the host


def shard_shapes(tree, size):
    """Shapes of a device's shards of a tree of shapes."""

    def cut(leaf, lead):
        shape = (*leaf.shape[:lead], -(-math.prod(leaf.shape[lead:]) // size))
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    return map_params(cut, tree)


def split_host(tree, group):
    """Whole leaves -> the shards of this process's devices, device first."""
    each = group.n // jax.process_count()
    first = jax.process_index() * each

    def cut(leaf, lead):
        shards = np.moveaxis(flatten_pad(np.asarray(leaf), lead, group.size), lead, 0)
        return np.concatenate([shards] * (group.n // group.size))[first : first + each]

    return map_params(cut, tree, other=lambda leaf: np.stack([leaf] * each))


def join_host(tree, like, group):
    """All devices' shards, device first -> whole leaves."""

    def join(leaf, lead, like):
        return unflatten(np.moveaxis(process_allgather(leaf)[: group.size], 0, lead), like)

    return map_params(join, tree, like, other=lambda leaf, _: np.asarray(leaf)[0])


def process_allgather(tree):
    """Arrays with a device axis, from all processes' devices to the host."""
    return jax.tree.map(lambda a: multihost_utils.process_allgather(a, tiled=True), tree)


# on a device, under pmap


def all_gather(tree, like, group):
    """Shards -> whole leaves."""

    def gather(leaf, lead, like):
        return unflatten(lax.all_gather(leaf, "device", axis=lead, axis_index_groups=group.within), like)

    return map_params(gather, tree, like)


def shard(tree, group):
    """Whole leaves -> this device's shards."""
    index = lax.axis_index("device") % group.size

    def cut(leaf, lead):
        return lax.dynamic_index_in_dim(flatten_pad(leaf, lead, group.size), index, lead, keepdims=False)

    return map_params(cut, tree)


def mean_over_groups(tree, group):
    """Each group's sums -> the mean over all devices."""
    if group.between is None:
        return jax.tree.map(lambda a: a / group.n, tree)
    return jax.tree.map(lambda a: lax.psum(a, "device", axis_index_groups=group.between) / group.n, tree)


def reduce_scatter_mean(tree, group):
    """Whole gradients of each device -> this device's shards of their mean."""

    def scatter(leaf, lead):
        parts = flatten_pad(leaf, lead, group.size)
        return lax.psum_scatter(parts, "device", scatter_dimension=lead, axis_index_groups=group.within)

    return mean_over_groups(map_params(scatter, tree), group)


def global_norm(tree, group):
    """The global norm of a tree of shards."""
    squares = sum(jnp.sum(jnp.square(a)) for a in jax.tree.leaves(tree))
    return jnp.sqrt(lax.psum(squares, "device", axis_index_groups=group.within))


def forward_params(params, like, group):
    """(parameters with all leaves whole but the layers', gather_layer): what txl.loss_fn takes of sharded ones."""
    rest = {name: leaf for name, leaf in params.items() if name != "layers"}
    rest = all_gather(rest, {name: like[name] for name in rest}, group)
    layer = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), like["layers"])

    def gather_layer(weights):
        return {**weights, **all_gather({name: weights[name] for name in layer}, layer, group)}

    return {**rest, "layers": params["layers"]}, gather_layer


# optimizers of shards, in the same state as optax's own


def clip_by_global_norm(max_norm, group):
    """optax.clip_by_global_norm of shards."""

    def clip(grads, params):
        norm = global_norm(grads, group)
        return jax.tree.map(lambda g: jnp.where(norm < max_norm, g, g / norm * max_norm), grads)

    return optax.stateless(clip)


def map_layers(f, x, shape, group):
    """f on whole layers, given and returned as shards x [L, m]; in a turn each device of a group takes one layer."""
    like = jax.ShapeDtypeStruct(shape, x.dtype)
    swap = lambda a: lax.all_to_all(a, "device", 0, 0, axis_index_groups=group.within, tiled=True)
    turn = lambda a: swap(flatten_pad(f(unflatten(swap(a), like)), 0, group.size))
    turns = jnp.pad(x, ((0, -len(x) % group.size), (0, 0))).reshape(-1, group.size, x.shape[1])
    return lax.map(turn, turns).reshape(-1, x.shape[1])[: len(x)]


def nesterov_momentum(beta, ns_coeffs):
    """Nesterov's momentum as in optax.contrib.scale_by_muon, in its state."""

    def update(updates, state, params=None):
        mu, count = optax.tree.update_moment(updates, state.mu, beta, 1), optax.safe_increment(state.count)
        ahead = optax.tree.bias_correction(mu, beta, count + 1)
        now = optax.tree.bias_correction(updates, beta, count)
        updates = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, now)
        return updates, state._replace(count=count, mu=mu)

    return optax.GradientTransformation(optax.contrib.scale_by_muon(ns_coeffs).init, update)


def muon(lr, beta, weight_decay, consistent_rms, adam_b2, ns_coeffs, muon_weight_dimension_numbers, *, like, group):
    """optax.contrib.muon of shards of leaves like those of `like`: each step of it by itself.

    Only what makes the momentum of a layer orthogonal needs whole matrices: layers are dealt out to the devices.
    """

    def orthogonal(path, x):
        shape = like["layers"][path[-1].key].shape[1:]
        numbers = muon_weight_dimension_numbers({path[-1].key: x})[path[-1].key]
        options = dict(ns_coeffs=ns_coeffs, weight_dimension_numbers=numbers)
        step = optax.contrib.scale_by_muon(beta=0.0, nesterov=False, **options)
        sides = [math.prod(shape[a - 1] for a in np.atleast_1d(axes)) for axes in numbers]
        scale = consistent_rms * math.sqrt(max(sides))
        layer = lambda matrix: scale * step.update(matrix[None], step.init(matrix[None]))[0][0]
        return map_layers(layer, x, shape, group)

    def labels(params):
        numbers = muon_weight_dimension_numbers(params)
        return jax.tree.map(
            lambda x: "adam" if x is None else "muon", numbers, is_leaf=lambda x: not isinstance(x, dict)
        )

    directions = optax.stateless(lambda updates, _: jax.tree.map_with_path(orthogonal, updates))
    decay, rate = optax.add_decayed_weights(weight_decay), optax.scale_by_learning_rate(lr)
    adam = optax.adamw(lr, 0.9, adam_b2, weight_decay=0.0, nesterov=True)
    matrices = optax.chain(nesterov_momentum(beta, ns_coeffs), directions, decay, rate)
    return optax.partition({"muon": matrices, "adam": adam}, labels)


# train.py's Layout


def check_moments(whole):
    """ValueError where the optimizer keeps something per parameter that is not shaped like it."""
    shapes = {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(whole.params)}
    for path, leaf in jax.tree.leaves_with_path(whole.opt_state):
        names = path[next((i for i, key in enumerate(path) if isinstance(key, jax.tree_util.DictKey)), len(path)) :]
        want = shapes.get(jax.tree_util.keystr(names))
        if want is not None and leaf.shape != want:
            found = f"this optimizer keeps {leaf.shape} for {names[-1].key}, which is {want}"
            raise ValueError(f"{found}: --shard takes only moments shaped like their parameters, give --shard none")


def make_layout(layout, kind, group_size, whole):
    """train.py's plain Layout -> that of shard=`kind` in groups of `group_size` devices, and of several processes.

    opt (ZeRO): each device updates its part of the parameters with its part of the optimizer's state.
    params (FSDP): parameters live in shards, too; a layer is gathered when it is its turn, forward and backward.
    whole: shapes of a whole train state.
    """
    group = make_group(layout.n_devices, group_size)
    names = {"none": (), "opt": ("opt_state",), "params": ("params", "opt_state")}[kind]

    def map_sharded(f, state):
        return state._replace(**{name: f(getattr(state, name), getattr(whole, name)) for name in names})

    def apply_gradients(tx, grads, params, opt_state):
        # Gradients of shards are summed over their group already: what gathering them does in reverse.
        grads = (mean_over_groups if kind == "params" else reduce_scatter_mean)(grads, group)
        with jax.named_scope("optimizer"):
            shards = params if kind == "params" else shard(params, group)
            updates, opt_state = tx.update(grads, opt_state, shards)
            params = optax.apply_updates(shards, updates)
            if kind == "opt":
                params = all_gather(params, whole.params, group)
        return params, opt_state, global_norm(grads, group)

    def device_get(state):
        state = map_sharded(lambda tree, like: join_host(tree, like, group), state)
        return jax.tree.map(np.asarray, state._replace(mems=process_allgather(state.mems)))

    layout = layout._replace(device_get=device_get, any_process_stopped=any_process_stopped)
    if kind == "none":
        return layout
    check_moments(whole)
    layout = layout._replace(
        axes=layout.axes._replace(**dict.fromkeys(names, 0)),
        apply_gradients=apply_gradients,
        clip_by_global_norm=partial(clip_by_global_norm, group=group),
        muon=partial(muon, like=whole.params, group=group),
        shard_state=lambda state: map_sharded(lambda tree, _: shard(tree, group), state),
        shard_shapes=lambda state: map_sharded(lambda tree, _: shard_shapes(tree, group.size), state),
        split_state=lambda state: map_sharded(lambda tree, _: split_host(tree, group), state),
    )
    if kind == "opt":
        return layout
    gather = lambda params: all_gather(params, whole.params, group)
    return layout._replace(
        forward_params=lambda params: forward_params(params, whole.params, group),
        full_params=jax.pmap(gather, "device", out_axes=None),
    )
