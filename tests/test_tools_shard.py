"""Many devices and machines: the same losses however rows and state lie, the memory that sharding saves, refusals."""

import functools
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import jax
import numpy as np
import pytest
from conftest import make_ids, make_params, worst
from runs import TINY, argv, call, losses, refused, stopped

import train
import txl
from data import checkpoint

pytestmark = pytest.mark.usefixtures("shared_steps")
# 7 tokens: the bias of the output has 7 elements, which nothing but 1 and 7 divides.
SIZES = dict(n_token=7, n_layer=5, n_head=2, d_model=30, d_head=11, d_inner=94, mem_len=6)
CFG = txl.Config(**SIZES, dropout=0.2, dropatt=0.1, attention="dense")
FULL = replace(CFG, remat="full", layer_rows=1)
SIZES = dict(batch=8, tgt_len=9, steps=10, warmup=2, clip=0.25, mem_reset=0.1)
ADAMW = train.TrainConfig(**SIZES, optimizer="adamw", lr=2e-3)
MUON = train.TrainConfig(**SIZES, optimizer="muon", lr=1e-2, momentum=0.8)
SHARDED = {kind: replace(ADAMW, shard=kind) for kind in ("none", "opt", "params")}
IN_PAIRS = replace(MUON, shard="params", shard_group=2, batch_chunk=2)


@functools.cache
def ten_steps(run, cfg, n):
    """(what 10 steps on n devices told, the host state after them, bytes on each device by kind, the step)."""
    layout = train.make_layout(cfg, run, n)
    host = train.create_train_state(cfg, run, layout, make_params(cfg, scale=0.1), run.batch)
    state, told = train.to_devices(jax.tree.map(np.asarray, host), layout), []
    compiled = train.compile_train_step(cfg, run, layout)
    for number in range(10):
        batch = train.spread([make_ids(cfg, 8, 9, seed=(number, i)) for i in range(2)], n)
        state, out = compiled(state, *batch, np.int32(number))
        told.append(np.asarray(out))
    host = train.to_host(state, layout)
    assert worst(layout.full_params(state.params), host.params) == 0  # as an evaluation takes them
    return np.array(told), host, [held(tree) for tree in state], compiled


def held(tree):
    """{device: bytes of a tree's arrays there}."""
    found = {}
    for part in (part for leaf in jax.tree.leaves(tree) for part in leaf.addressable_shards):
        found[part.device] = found.get(part.device, 0) + part.data.nbytes
    return found


CASES = {
    "opt": (SHARDED["opt"], CFG, (ADAMW, CFG, 4)),
    "params": (SHARDED["params"], CFG, (ADAMW, CFG, 4)),
    "params, in pairs, by muon, against one device": (IN_PAIRS, FULL, (MUON, CFG, 1)),
}


@pytest.mark.parametrize("run, cfg, alone", CASES.values(), ids=CASES.keys())
def test_losses_and_gradient_norms_do_not_depend_on_devices_or_sharding(run, cfg, alone):
    # 1e-5: sums over rows in another order; the norms are above `clip`, so that clipping counts.
    want, got = ten_steps(*alone), ten_steps(run, cfg, 4)
    assert worst(got[0], want[0]) < 1e-5 and want[0][:, 1].min() > run.clip
    assert all(len(kind) == 4 for kind in got[2])
    got, want = checkpoint.flatten(got[1]), checkpoint.flatten(want[1])
    assert {name: a.shape for name, a in got.items()} == {name: a.shape for name, a in want.items()}
    for name in (name for name in want if name.startswith("opt/")):
        assert worst(got[name], want[name]) < 1e-6, name


@pytest.mark.parametrize("shard, parts", [("opt", (1, 4)), ("params", (4, 4))])
def test_each_of_4_devices_holds_a_quarter_of_what_is_sharded_and_still_after_steps(shard, parts):
    params, opt, mems = ten_steps(SHARDED[shard], CFG, 4)[2]
    whole = [next(iter(kind.values())) for kind in ten_steps(ADAMW, CFG, 4)[2]]
    pad = 4 * 3 * CFG.n_layer * len(jax.tree.leaves(txl.param_shapes(CFG)))  # at most 3 numbers of a leaf's layer
    for kind, size, part in ((params, whole[0], parts[0]), (opt, whole[1], parts[1])):
        assert size / part <= min(kind.values()) and max(kind.values()) <= size / part + (2 * pad if part > 1 else 0)
    assert set(mems.values()) == {train.nbytes(jax.eval_shape(lambda: txl.init_mems(CFG, 8))) / 4}


def test_sharding_saves_what_it_shards_by_xlas_own_figures_and_holds_no_matrix_of_all_layers():
    none, opt, params = (ten_steps(run, CFG, 4)[3] for run in SHARDED.values())
    each = train.nbytes(txl.param_shapes(CFG))
    assert train.xla_total(none) - train.xla_total(opt) > 0.9 * 3 / 4 * 2 * each  # two moments
    assert train.xla_total(opt) - train.xla_total(params) > 0.9 * 3 / 4 * 2 * each  # parameters and gradients

    def largest(compiled):
        found = re.findall(r"f32\[([\d,]+)\]", compiled.as_text())
        return max(math.prod(map(int, shape.split(","))) for shape in found)

    matrix = CFG.n_layer * CFG.d_model * CFG.d_inner
    assert largest(opt) >= matrix > max(largest(params), largest(ten_steps(IN_PAIRS, FULL, 4)[3]))


@pytest.mark.parametrize(
    "flags, words",
    [
        (dict(batch=6, devices=4), ("batch=6", "4 devices", "use 4 or 8", "--devices 3")),
        (dict(batch=12, batch_chunk=2), ("batch_chunk=2", "3 rows", "use 1 or 3")),
        (dict(shard="opt", shard_group=3), ("shard_group=3", "4 devices", "use 2 or 4")),
        (dict(coordinator="somewhere"), ("coordinator='somewhere'", "HOST:PORT")),
        (dict(coordinator="host:1", n_processes=2, process_id=2), ("process_id=2", "n_processes=2")),
    ],
)
def test_what_the_devices_cannot_do_is_refused_with_the_nearest_values(text, flags, words):
    refused(call(train.main, data=text, **{k: v for k, v in TINY.items() if k != "devices"} | flags), *words)


PIPES = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
FLAGS = TINY | dict(n_layer=1, batch=8, steps=10**6, eval_every=10**6, json=True)


def test_two_processes_save_on_a_signal_to_one_and_one_device_goes_on(text, tmp_path):
    folder, whole = tmp_path / "two", tmp_path / "one"
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    count = "--xla_force_host_platform_device_count"
    env = os.environ | {"XLA_FLAGS": os.environ["XLA_FLAGS"].replace(f"{count}=4", f"{count}=2")}
    flags = FLAGS | dict(data=text, coordinator=f"127.0.0.1:{port}", n_processes=2, shard="params", shard_group=2)
    del flags["devices"]
    command = [sys.executable, train.__file__, *argv(**flags, out=folder)]
    processes = [subprocess.Popen([*command, "--process_id", str(i)], env=env, text=True, **PIPES) for i in range(2)]
    try:
        while not (folder / "log.jsonl").exists() or (folder / "log.jsonl").read_text().count("\n") < 7:
            ended = [p for p in processes if p.poll() is not None]
            assert not ended, ended[0].stderr.read()
            time.sleep(0.1)
        processes[1].send_signal(signal.SIGTERM)
        told = [p.communicate(timeout=600)[1] for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert [p.returncode for p in processes] == [128 + signal.SIGTERM] * 2
    assert all(f"--resume {folder}" in words for words in told)
    two = losses(folder)
    assert stopped(len(two) + 2, data=text, out=whole, **FLAGS).code == 130
    assert worst(two[:10], losses(whole)[: len(two)][:10]) < 1e-5
    assert stopped(2, data=text, resume=folder, devices=1, shard="none", json=True).code == 130
    assert worst(losses(folder), losses(whole)[-2:]) < 1e-4
