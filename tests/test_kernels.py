"""The fused attention: interpreted, against dense attention; lowered for devices that aren't here; refused."""

import dataclasses
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_ids, make_mems, make_params, worst
from jax.extend.core import jaxprs_in_params
from runs import BYTE, TINY, call, refused, save_model

import kernels
import sample
import train
import txl

BF16 = jnp.bfloat16


def inputs(B, H, T, M, K, dtype=np.float32, seed=0):
    """q_u, q_v, k, v, r and a cotangent of the output, standard normal."""
    rng, S = np.random.default_rng(seed), M + T
    shapes = [(B, H, T, K)] * 2 + [(B, H, S, K)] * 2 + [(H, S, K), (B, H, T, K)]
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def with_gradients(attend, args, cotangent):
    """Output and all gradients of an attention whose queries are still to be scaled."""

    def scaled(q_u, q_v, *others):
        scale = q_u.shape[-1] ** -0.5
        return attend((q_u * scale).astype(q_u.dtype), (q_v * scale).astype(q_v.dtype), *others)

    def run(*args):
        out, pull = jax.vjp(scaled, *args)
        return out, *pull(cotangent)

    return jax.jit(run)(*args)


def first(T, M, *fills, window=None):
    """kv_start [B, T] of memory filled to `fills`, and of a window."""
    kv_start = np.maximum(M - np.array(fills)[:, None], 0)
    return np.maximum(kv_start, np.arange(T) + M + 1 - (window or M + T)).astype(np.int32)


def scattered(T, M):
    """First visible keys as of documents, with queries that see nothing among them, a whole block of 16 of them too."""
    kv_start = np.random.default_rng(3).integers(0, T + M, (2, T)).astype(np.int32)
    kv_start[1, 20:44] = T + M
    return kv_start


CASES = {  # B, H, T, M, K, kv_start, window, block
    "lengths that are no multiples of a block longer than T": (2, 3, 37, 54, 41, first(37, 54, 54, 11), None, 64),
    "one query, no memory, a head of 64": (2, 3, 1, 0, 64, first(1, 0, 0, 0), None, 16),
    "a window shorter than memory, one row": (1, 2, 37, 54, 5, first(37, 54, 54, window=21), 21, 16),
    "same_length": (2, 1, 70, 33, 5, first(70, 33, 33, 7, window=34), 34, 16),
    "documents and queries that see nothing": (2, 3, 70, 31, 5, scattered(70, 31), None, 16),
}


def compare(name, dtype=jnp.float32, device="gpu", clamp=None):
    """(fused, dense in float32): output and all gradients of a case."""
    B, H, T, M, K, kv_start, window, block = CASES[name]
    *args, cotangent = inputs(B, H, T, M, K, dtype)
    if clamp:
        args[4] = args[4][:, -1 - np.minimum(np.arange(M + T), clamp)[::-1]]
    fused = partial(kernels.attention, kv_start=kv_start, block=block, window=window, device=device, interpret=True)
    got = with_gradients(fused, args, cotangent)
    assert all(g.dtype == dtype and g.shape == a.shape for g, a in zip(got, (cotangent, *args)))
    wide = lambda a: a.astype(jnp.float32)
    attend = partial(txl.attention, kv_start=kv_start, block=None)
    want = with_gradients(attend, [wide(a) for a in args], wide(cotangent))
    return [np.asarray(wide(g)) for g in got], [np.asarray(w) for w in want]


TOLERANCE = 5e-6  # sums of up to 91 float32 products of order 1, in another order


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_dense_attention(name, monkeypatch):
    if "documents" in name:  # programs that walk over many tiles: 5 of queries, 3 heads, 2 rows share no divisor with 7
        monkeypatch.setattr(kernels, "PROGRAMS", 7)
    got, want = compare(name)
    assert worst(got, want) < TOLERANCE
    B, H, T, M, K, kv_start, *_ = CASES[name]
    blind = np.broadcast_to((kv_start > np.arange(T) + M)[:, None, :, None], got[0].shape)
    assert (got[0][blind] == 0).all() and (got[1][blind] == 0).all() and (got[2][blind] == 0).all()
    assert blind.any() == ("see nothing" in name)


def test_the_program_for_a_tpu_gives_the_same_with_clamped_distances():
    assert worst(*compare("a window shorter than memory, one row", device="tpu", clamp=9)) < TOLERANCE


def test_bfloat16_is_as_near_to_float32_as_its_rounding():
    for got, want in zip(*compare("same_length", BF16)):
        assert np.linalg.norm(got - want) < 5e-3 * np.linalg.norm(want)  # a unit in the last place is 8e-3


def arguments(T, dtype=jnp.float32, M=None, B=2, H=2):
    K, M = 41, T if M is None else M
    *args, _ = jax.eval_shape(lambda: inputs(B, H, T, M, K, dtype))
    return *args, jax.ShapeDtypeStruct((B, T), jnp.int32)


def gradients(*args, **options):
    *args, kv_start = args
    out, pull = jax.vjp(lambda *args: kernels.attention(*args, kv_start, **options), *args)
    return out, pull(out)


def equations(jaxpr):
    """All equations of a program, those of its inner programs too, but not of its kernels."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


def test_what_is_kept_and_computed_on_the_way_grows_like_the_inputs():
    B, H, T = 2, 2, 8192
    jaxpr = jax.make_jaxpr(partial(gradients, device="gpu"))(*arguments(T, B=B, H=H)).jaxpr
    made = [v.aval for eqn in equations(jaxpr) for v in eqn.outvars if hasattr(v.aval, "size")]
    assert max(a.size for a in made) <= B * H * 2 * T * 64  # k, its head padded; scores would be 128 times as large


def test_products_of_float32_are_not_rounded_on_the_way():
    a = jnp.ones((16, 16))
    assert "HIGHEST" in str(jax.make_jaxpr(kernels._dot)(a, a))  # a CPU would not show it: Triton's default is TF32


LOWER = f"""
import sys, jax, jax.numpy as jnp
sys.path[:0] = [{str(Path(__file__).parents[1])!r}, {str(Path(__file__).parent)!r}]
import test_kernels as t
from jax.sharding import AbstractMesh, AxisType
for device, platform, kind in (("gpu", "cuda", "NVIDIA H200"), ("tpu", "tpu", "TPU v5 lite")):
    abstract = jax.sharding.AbstractDevice(device_kind=kind, num_cores=132 if device == "gpu" else 1, platform=device)
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=abstract)
    for dtype in (jnp.float32, jnp.bfloat16):
        with jax.sharding.use_abstract_mesh(mesh):
            traced = jax.jit(t.partial(t.gradients, device=device, window=92)).trace(*t.arguments(150, dtype, M=91))
            print(device, traced.lower(lowering_platforms=(platform,)).as_text().count("stablehlo.custom_call"))
"""


def test_a_fresh_process_lowers_for_gpu_and_tpu_without_a_warning():
    command = [sys.executable, "-W", "error::DeprecationWarning", "-c", LOWER]
    found = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=120)
    assert found.stdout.splitlines() == ["gpu 4", "gpu 4", "tpu 4", "tpu 4"], found.stdout + found.stderr
    assert "deprecated" not in found.stderr


def test_the_model_computes_the_same_with_it(monkeypatch):
    """Who changes attention in txl.py and not here sees this fail."""
    dense = txl.Config(n_token=5, n_layer=2, n_head=3, d_model=10, d_head=4, d_inner=14, mem_len=6, attention="dense")
    dense = dataclasses.replace(dense, same_length=True, clamp_len=3, reset_on=2)
    monkeypatch.setattr(kernels, "check", lambda device: None)  # no such device here: as it would compute
    monkeypatch.setattr(kernels, "attention", partial(kernels.attention, device="gpu", interpret=True))
    args = make_params(dense), make_ids(dense, 2, 8), make_mems(dense, 2, fill=[0, 3])

    @partial(jax.jit, static_argnums=0)
    def run(cfg, params, ids, mems):
        loss = lambda params: txl.loss_fn(params, ids[:, :-1], ids[:, 1:], mems, cfg)
        cached, _ = txl.forward_cached(params, ids, txl.init_cache(params, cfg, 2), cfg)
        return jax.value_and_grad(loss, has_aux=True)(params), cached

    fused = dataclasses.replace(dense, attention="pallas")
    assert worst(run(fused, *args), run(dense, *args)) < 2e-5
    programs = [str(jax.make_jaxpr(run, static_argnums=0)(cfg, *args)) for cfg in (fused, dense)]
    assert [program.count("relative_attention") > 0 for program in programs] == [True, False]


def test_what_it_cannot_do_is_refused_in_one_line(text, tmp_path):
    for options in (dict(dropatt=0.1), dict(dtype="float64")):
        with pytest.raises(ValueError, match="^attention=pallas .*(dropatt=0.1|dtype=float64).*dense"):
            txl.Config(attention="pallas", **options)
    outcome = call(train.main, data=text, out=tmp_path / "run", **TINY | dict(attention="pallas"))
    refused(outcome, "attention=pallas", "gpu", "tpu", "cpu", "chunked")
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_that_was_trained_with_it_is_read_on_a_cpu(tmp_path):
    cfg = txl.Config(n_layer=1, n_head=2, d_model=8, d_head=4, d_inner=8, mem_len=5, attention="pallas")
    run = save_model(tmp_path, cfg, make_params(cfg), BYTE)
    assert call(sample.main, run=run, prompt="more than one segment of text", n_tokens=2).code is None
