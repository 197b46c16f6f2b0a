"""Devices and machines: how many there are, what lies on each, and what they tell each other.

Devices form groups. A shard of an array is its numbers in a row, zeros after the last, cut into as many equal parts as
a group has devices; the groups hold the same. Of the layers' parameters each layer is cut, which makes [L, m] of a
device; of every other parameter [m]. So are an optimizer's moments of them; each device has its counters whole.
"""

import math
import os
import re
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils

SHARD = ("none", "opt", "params")


# which devices


def connect(run):
    """Joins the processes of a run on several machines, before anything touches a device; only process 0 prints.

    A process that hears nothing of another for 10 s ends, and so does one that waits for another at its end.
    """
    if not run.coordinator:
        return
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from us
    known = dict(coordinator_address=run.coordinator, num_processes=run.n_processes, process_id=run.process_id)
    limits = dict(heartbeat_timeout_seconds=10, shutdown_timeout_seconds=10)
    try:
        jax.distributed.initialize(**{} if run.coordinator == "auto" else known, **limits)
    except ValueError as e:
        way = "give HOST:PORT of process 0, --n_processes and --process_id"
        raise ValueError(f"coordinator={run.coordinator} is not to be had ({e}): {way}") from None
    if jax.process_index():
        sys.stdout = open(os.devnull, "w")


def announce(folder):
    """Each of several processes says what to do when another one ends: then jax ends it at once, and it can't."""
    if jax.process_count() > 1:
        who = f"process {jax.process_index()} of {jax.process_count()}"
        more = f"go on from the last checkpoint with --resume {folder} on all of them"
        print(f"{who}: if another ends before its time, so does this one; {more}", file=sys.stderr, flush=True)


def check_machines(run):
    """ValueError where what a run says of its processes contradicts itself."""
    if not run.coordinator:
        if run.n_processes or run.process_id:
            raise ValueError("n_processes and process_id are for --coordinator: give it, or leave them out")
        return
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


def nearest(n, valid):
    """'a or b': the valid numbers next to n."""
    below, above = [v for v in valid if v < n], [v for v in valid if v > n]
    return " or ".join(str(v) for v in [*below[-1:], *above[:1]])


def count_devices(run):
    """Devices to use, over all processes. ValueError where they are not there or the run does not divide over them."""
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
        wanted = nearest(run.batch, range(n, run.batch + n + 1, n))
        fewer = f", or --devices {max(d for d in range(1, n) if run.batch % d == 0)}" * (processes == 1)
        raise ValueError(f"batch={run.batch} does not divide over {n} devices: use {wanted}{fewer}")
    rows = run.batch // n
    if rows % run.batch_chunk:
        valid = [c for c in range(1, rows + 1) if rows % c == 0]
        found = f"batch_chunk={run.batch_chunk} does not divide {rows} rows of a device"
        raise ValueError(f"{found}: use {nearest(run.batch_chunk, valid)}")
    return n


largest = jax.pmap(lambda number: lax.pmax(number, "device"), "device", out_axes=None)


def agreed(number, waiting):
    """(number, waiting): the largest number that a process gave in its last call, and what to give to the next one.

    A call late, so that no device is waited for; with one process at once.
    """
    if jax.process_count() == 1:
        return number, waiting
    return int(waiting), largest(np.full(jax.local_device_count(), number, np.int32))


# how state lies on them


class Group(NamedTuple):
    n: int  # devices in all
    size: int  # devices of a group
    within: list | None  # axis_index_groups: each group's devices; None: all are one group
    between: list | None  # those that hold the same shards


def group_of(run, n):
    """The Group of a run on n devices; None: nothing is sharded."""
    if run.shard == "none":
        return None
    size = run.shard_group or n
    if size == n:
        return Group(n, n, None, None)
    within = [list(range(i, i + size)) for i in range(0, n, size)]
    return Group(n, size, within, [list(devices) for devices in zip(*within)])


def over_params(f, tree, *rest, other=lambda leaf, *_: leaf):
    """f(leaf, number of its axes not cut, ...) of parameters and moments of them, other(leaf, ...) of the rest."""

    def one(path, leaf, *more):
        if not isinstance(path[-1], jax.tree_util.DictKey):
            return other(leaf, *more)
        return f(leaf, int(any(getattr(key, "key", None) == "layers" for key in path)), *more)

    return jax.tree.map_with_path(one, tree, *rest)


def parts(leaf, first, size):
    """A whole leaf in parts [..., size, m], its `first` axes not cut."""
    xp = np if isinstance(leaf, np.ndarray) else jnp
    flat = leaf.reshape(*leaf.shape[:first], -1)
    flat = xp.pad(flat, [(0, 0)] * first + [(0, -flat.shape[-1] % size)])
    return flat.reshape(*flat.shape[:-1], size, -1)


def joined(parts, like):
    """The whole leaf, of like's shape, from its parts [..., size, m]."""
    first = parts.ndim - 2
    flat = parts.reshape(*parts.shape[:first], -1)
    return flat[..., : math.prod(like.shape[first:])].reshape(like.shape)


def shard_shapes(tree, size):
    """Shapes of a device's shards of a tree of shapes."""
    cut = lambda leaf, first: (*leaf.shape[:first], -(-math.prod(leaf.shape[first:]) // size))
    return over_params(lambda leaf, first: jax.ShapeDtypeStruct(cut(leaf, first), leaf.dtype), tree)


def to_shards(tree, group):
    """On the host: whole leaves -> those of this process's devices, device first."""

    def one(leaf, first):
        stack = np.moveaxis(parts(np.asarray(leaf), first, group.size), first, 0)
        return np.concatenate([stack] * (group.n // group.size))[own(group.n)]

    return over_params(one, tree, other=lambda leaf: np.stack([leaf] * (group.n // jax.process_count())))


def from_shards(tree, like, group):
    """All devices' shards, device first -> whole leaves on the host."""
    one = lambda leaf, first, like: joined(np.moveaxis(fetched(leaf)[: group.size], 0, first), like)
    return over_params(one, tree, like, other=lambda leaf, _: np.asarray(leaf)[0])


def own(n):
    """Which of n devices, or of n rows over all of them, are this process's: a slice."""
    n = n // jax.process_count()
    return slice(jax.process_index() * n, (jax.process_index() + 1) * n)


def fetched(tree):
    """Arrays with a device axis, from all processes' devices to the host."""
    return jax.tree.map(lambda a: multihost_utils.process_allgather(a, tiled=True), tree)


# on a device, under pmap


def gather(tree, like, group):
    """Shards -> whole leaves."""
    all_of = lambda a, first: lax.all_gather(a, "device", axis=first, axis_index_groups=group.within)
    return over_params(lambda a, first, like: joined(all_of(a, first), like), tree, like)


def cut(tree, group):
    """Whole leaves -> this device's shards."""
    number = lax.axis_index("device") % group.size
    pick = lambda a, first: lax.dynamic_index_in_dim(parts(a, first, group.size), number, first, keepdims=False)
    return over_params(pick, tree)


def mean_over_groups(tree, group):
    """Each group's sums -> the mean over all devices."""
    add = lambda a: a if group.between is None else lax.psum(a, "device", axis_index_groups=group.between)
    return jax.tree.map(lambda a: add(a) / group.n, tree)


def mean_shards(tree, group):
    """Whole gradients of each device -> this device's shards of their mean."""
    scatter = lambda a, first: lax.psum_scatter(
        parts(a, first, group.size), "device", scatter_dimension=first, axis_index_groups=group.within
    )
    return mean_over_groups(over_params(scatter, tree), group)


def norm(tree, group):
    """The global norm of a tree of shards."""
    squares = sum(jnp.sum(jnp.square(a)) for a in jax.tree.leaves(tree))
    return jnp.sqrt(lax.psum(squares, "device", axis_index_groups=group.within))


def for_layers(params, like, group):
    """Parameters with all leaves whole but the layers', and the function that gathers one layer's."""
    rest = {name: leaf for name, leaf in params.items() if name != "layers"}
    rest = gather(rest, {name: like[name] for name in rest}, group)
    layer = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), like["layers"])
    whole = lambda weights: weights | gather({name: weights[name] for name in layer}, layer, group)
    return rest | {"layers": params["layers"]}, whole


def in_turns(f, x, shape, group):
    """f on whole layers, given and returned as shards x [L, m]; in a turn each device of a group takes one layer."""
    like = jax.ShapeDtypeStruct(shape, x.dtype)
    swap = lambda a: lax.all_to_all(a, "device", 0, 0, axis_index_groups=group.within, tiled=True)
    turn = lambda a: swap(parts(f(joined(swap(a), like)), 0, group.size))
    turns = jnp.pad(x, ((0, -len(x) % group.size), (0, 0))).reshape(-1, group.size, x.shape[1])
    return lax.map(turn, turns).reshape(-1, x.shape[1])[: len(x)]
