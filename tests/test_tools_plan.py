"""The plan, the memory budget, allocator flags, running out of memory, and what XLA itself says of the step."""

import dataclasses
import math
import os
import re
import subprocess
import sys

import jax
import pytest
from runs import TINY, argv, call, refused

import train
import txl
from tools import plan

pytestmark = pytest.mark.usefixtures("shared_steps")
SMALL = txl.Config(n_token=97, n_layer=2, n_head=2, d_model=64, d_head=24, d_inner=80, mem_len=32, dropout=0.1)
KINDS = dict.fromkeys(("parameters_mib", "gradients_mib", "optimizer_mib", "memories_mib", "workspace_mib"), 5.0)
RUN = train.TrainConfig(batch=4, tgt_len=48, steps=10, optimizer="adam")
FULL = dict(remat="full", attention="chunked", attn_block=16, loss_chunk=32, layer_rows=1)


def compiled(cfg, run=RUN):
    return train.compile_train_step(cfg, run, train.Layout(1))


def test_the_plan_is_printed_as_json_and_makes_no_state_and_no_folder(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan, "candidates", lambda cfg, run, rows: [(cfg, run)] * 2)
    before = len(jax.live_arrays())
    outcome = call(train.main, "--plan", "--json", data=text, **TINY)
    assert outcome.code is None and len(jax.live_arrays()) == before
    lines = outcome.entries()
    assert [line["asked"] for line in lines] == [True, False]
    for line in lines:
        assert {"remat", "attention", "batch_chunk", "dtype"} <= line["setting"].keys()
        parts = ("parameters", "gradients", "optimizer", "memories", "workspace")
        assert sum(line[f"{part}_mib"] for part in parts) == pytest.approx(line["total_mib"], abs=0.3)
        assert line["evaluation_mib"] > line["parameters_mib"] + line["optimizer_mib"] and line["recompute"] >= 1
    assert not list(tmp_path.iterdir())


def test_candidates_start_with_the_flags_go_on_to_thrifty_ones_and_are_at_most_12():
    for rows in (1, 4, 7, 22):
        found = plan.candidates(SMALL, RUN, rows)
        assert found[0] == (SMALL, RUN) and len(found) == len(set(found)) <= 12
        assert all(rows % run.batch_chunk == 0 for _, run in found)
        assert any(cfg.dtype == "bfloat16" for cfg, _ in found)
    assert any(run.batch_chunk == 22 for _, run in found)


def test_a_budget_takes_the_first_setting_that_fits_or_names_the_least_need(text, tmp_path, monkeypatch):
    thrifty = lambda cfg, run, rows: [(cfg, run), (dataclasses.replace(cfg, **FULL), run)]
    monkeypatch.setattr(plan, "candidates", thrifty)
    needs, taken = {"none": 9, "full": 5}, []
    measure = lambda cfg, run: {**KINDS, "total_mib": needs[cfg.remat], "evaluation_mib": 1}
    monkeypatch.setattr(train, "measure_memory", lambda layout: measure)
    monkeypatch.setattr(train, "train", lambda cfg, *_: taken.append(cfg.remat))
    outcome = call(train.main, data=text, out=tmp_path / "run", memory_budget="6MiB", **TINY)
    assert outcome.code is None and "* remat=full" in outcome.err and taken == ["full"]
    refused(call(train.main, data=text, memory_budget="4MiB", **TINY), "5 MiB is the least", "--remat full")
    asked, run = dataclasses.replace(SMALL, remat="full"), dataclasses.replace(RUN, memory_budget="6MiB")
    assert plan.fit_budget(asked, run, 4, measure)[0] == asked  # what was asked for stays if it fits


def test_a_budget_is_an_amount_or_a_share_of_the_device():
    assert plan.budget_bytes("6GiB") == 6 * 2**30 and plan.budget_bytes("1.5MB") == 1.5e6
    assert plan.budget_bytes("50%") == pytest.approx(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2)
    for bad in ("6", "-1GiB", "101%"):
        with pytest.raises(ValueError, match="memory_budget"):
            plan.budget_bytes(bad)


def test_allocator_flags_are_set_as_jax_reads_them_before_any_backend_starts(text):
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    code = f"""
import os, sys, train
try:
    train.main(sys.argv[1:])
except SystemExit:  # no such platform: whatever first asks for a device ends it
    print(*map(os.environ.get, {names}))
"""
    command = [sys.executable, "-c", code, *argv(data=text, mem_fraction=0.4, preallocate=False, **TINY)]
    env = os.environ | {"JAX_PLATFORMS": "none_such", "PYTHONPATH": os.path.dirname(train.__file__)}
    env |= {names[2]: "0.3"}  # jaxlib refuses both names of the share at once
    found = subprocess.run(command, env=env, capture_output=True, text=True)
    assert found.stdout == "0.4 false None\n", found


def test_running_out_of_memory_ends_with_the_plan_the_largest_arrays_and_the_flags_to_turn(text, tmp_path, monkeypatch):
    compile_train_step = train.compile_train_step

    def full(*_):
        monkeypatch.setattr(train, "compile_train_step", compile_train_step)
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.\nmore")

    monkeypatch.setattr(train, "compile_train_step", full)
    monkeypatch.setattr(plan, "candidates", lambda cfg, run, rows: [(cfg, run)])
    outcome = call(train.main, data=text, out=tmp_path / "run", **TINY)
    assert outcome.code.startswith("train.py: out of memory") and "\n" not in outcome.code
    assert re.search("full, --attention .*--loss_chunk .*--layer_rows .*--dtype bf.*--batch.*--eval_b", outcome.code)
    assert "allocate 9 bytes" in outcome.err and "largest arrays" in outcome.err and "MiB on each device" in outcome.out


def test_the_thrifty_step_keeps_one_layer_input_per_layer_and_grows_linearly_with_segment_and_memory():
    def temporaries(n, n_layer):
        cfg = dataclasses.replace(SMALL, n_layer=n_layer, mem_len=n, dropout=0.0, **FULL)
        return compiled(cfg, dataclasses.replace(RUN, tgt_len=n)).memory_analysis().temp_size_in_bytes

    small = temporaries(256, 2)
    layer_input = 4 * RUN.batch * 256 * SMALL.d_model
    gradients = 4 * sum(math.prod(a.shape[1:]) for a in txl.param_shapes(SMALL)["layers"].values())
    assert gradients + layer_input <= (temporaries(256, 12) - small) / 10 < gradients + 1.1 * layer_input
    assert temporaries(512, 2) < 2.2 * small  # four times, if anything were as large as the scores


def test_evaluation_has_one_copy_of_the_parameters():
    cfg = dataclasses.replace(SMALL, n_token=20_011, d_inner=16_384)  # a quarter is the table's
    params, *rest = train.eval_shapes(cfg, dataclasses.replace(RUN, eval_batch=1, tgt_len=8), 1)
    apart = jax.eval_shape(lambda params: txl.unstack(params, cfg), params)  # as an evaluation alone has them
    total, size = train.xla_total(train.make_eval_step(cfg).lower(apart, *rest).compile()), train.nbytes(params)
    assert size < total < 1.15 * size  # 1.06, of which logits 0.06
