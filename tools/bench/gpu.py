"""What one accelerator does; gpu.sh runs all parts but the last in a process each, within 8 minutes in all.

check: pass or fail, then every attention against dense in float32, output and gradients, and whether 20 repeats give
the same bits. memory: what one attention takes besides inputs and outputs, as compiled for the device that is there.
times: forward and value_and_grad of one attention, in turn. step: enwik8 base in bfloat16, at batch 22 and at the
largest that fits. decode: generated tokens per second. compile: what the fused kernels compile to for an H200 (--target
a100, ada or tpu: others) on a machine without one (7 minutes on 2 cores), in an environment of its own:
    pip install jax==0.12.0.1 && pip install --no-deps jax-cuda13-plugin==0.12.0.1 jax-cuda13-pjrt==0.12.0.1
with ptxas of CUDA 13 on the PATH; for --target tpu with libtpu in place of the plugins.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import sample
import txl
from tools import plan
from tools.bench import harness
from tools.bench.memory import BASE, RUN, SMALL

LIMITS = {"bfloat16": 2e-2, "float32": 1e-4}  # relative errors of check that pass; a unit in the last place: 8e-3, 1e-7
LENGTHS = [(T, K) for K in (64, 128) for T in (2048, 4096, 1024, 512)]  # T = M


def with_gradients(attend, *args):
    """(out, gradients) of attend(q_u, q_v, k, v, r, kv_start)."""
    *args, kv_start = args
    out, pull = jax.vjp(lambda *args: attend(*args, kv_start), *args)
    return out, *pull(out)


def attentions(tiny):
    """{name: attention}: the same signature for all."""
    import kernels

    fused = partial(kernels.attention, block=16, device="gpu", interpret=True) if tiny else kernels.attention
    chunked = partial(txl.attention, block=16 if tiny else 128)
    return {"dense": partial(txl.attention, block=None), "chunked": chunked, "pallas": fused}


def inputs(B, H, T, M, K, dtype):
    """q_u, q_v, k, v, r, queries scaled, and kv_start of full memory."""
    rng, S = np.random.default_rng(0), M + T
    shapes = [(B, H, T, K)] * 2 + [(B, H, S, K)] * 2 + [(H, S, K)]
    scales = [K**-0.5, K**-0.5, 1, 1, 1]
    arrays = [jnp.asarray(scale * rng.standard_normal(shape), dtype) for scale, shape in zip(scales, shapes)]
    return *arrays, jnp.zeros((B, T), jnp.int32)


def check(tiny, peak_tflops):
    """The verdict, then what it stands on: lines of `compared`."""
    lines = list(compared(tiny))
    bad = [line for line in lines if not passed(line)]
    failed = sorted({f"{line['attention']} {line['dtype']}" for line in bad})
    yield {"verdict": "fail" if bad else "pass", "failed": failed, "limits": LIMITS}
    yield from lines


def passed(line):
    """Whether all errors are those of rounding (one that is NaN is not) and the fused kernels repeat their bits."""
    small = all(line[key] < LIMITS[line["dtype"]] for key in line if key.endswith("_error"))
    return small and (line["repeats_identical"] or line["attention"] != "pallas")


def compared(tiny):
    """Yields relative errors (norms) against dense attention in float32 with full products, and repeatability."""

    def error(a, b):
        return float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b))

    attends = attentions(tiny)
    sizes = [(1, 1, 20, 9, 5)] if tiny else [(2, 8, 300, 211, 64), (2, 3, 300, 0, 41), (1, 4, 700, 500, 128)]
    for size, dtype in ((size, dtype) for size in sizes for dtype in ("bfloat16", "float32")[: 1 if tiny else 2]):
        args = inputs(*size, dtype)
        with jax.default_matmul_precision("highest"):
            wide = [a.astype(jnp.float32) for a in args[:5]]
            want = jax.jit(partial(with_gradients, attends["dense"]))(*wide, args[5])
        for name, attend in attends.items():
            with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
                run = jax.jit(partial(with_gradients, attend))
                got, *again = [run(*args) for _ in range(20)]
            same = all(np.array_equal(a, b) for other in again for a, b in zip(other, got))
            errors = {f"{of}_error": error(a, b) for of, a, b in zip(("out", "q_u", "q_v", "k", "v", "r"), got, want)}
            yield {"attention": name, "dtype": dtype, **dict(zip("BHTMK", size)), **errors, "repeats_identical": same}


def memory(tiny, peak_tflops):
    """Yields the temporaries of value_and_grad of each attention at growing lengths."""
    for T, K in [(20, 5)] if tiny else [(512, 64), (1024, 64), (2048, 64), (2048, 128)]:
        B, H = (1, 1) if tiny else (4, 512 // K)
        shapes = jax.eval_shape(lambda: inputs(B, H, T, T, K, "bfloat16"))
        for name, attend in attentions(tiny).items():
            compiled = jax.jit(partial(with_gradients, attend)).lower(*shapes).compile()
            mib = compiled.memory_analysis().temp_size_in_bytes / harness.MIB
            yield {"attention": name, "dtype": "bfloat16", "B": B, "H": H, "T": T, "M": T, "K": K, "temp_mib": mib}


def times(tiny, peak_tflops):
    """Yields the milliseconds of each attention at growing lengths; null where it does not fit."""
    for T, K in [(20, 5)] if tiny else LENGTHS:
        B, H = (1, 1) if tiny else (4, 512 // K)
        args = inputs(B, H, T, T, K, "bfloat16")
        runs, found = {}, {}
        for name, attend in attentions(tiny).items():
            for what, function in (("forward", attend), ("value_and_grad", partial(with_gradients, attend))):
                key = f"{name}_{what}_ms"
                call = jax.jit(function)
                found[key] = None
                try:
                    jax.block_until_ready(call(*args))
                except jax.errors.JaxRuntimeError:  # dense attention of a long segment on a small device
                    continue
                runs[key] = partial(repeat, call, args), 1
        seconds, *_ = harness.alternate(runs, 2 if tiny else 20)
        found |= {key: 1e3 * statistics.median(s) for key, s in seconds.items()}
        yield {"dtype": "bfloat16", "B": B, "H": H, "T": T, "M": T, "K": K, **found}


def repeat(call, args, n):
    for _ in range(n):
        jax.block_until_ready(call(*args))


def steps(tiny, peak_tflops):
    """Yields training steps of the base model: auto and pallas at its own batch, then auto at the largest that fits."""
    cfg, run = (SMALL, replace(RUN, batch=2, tgt_len=8)) if tiny else (replace(BASE, dtype="bfloat16"), RUN)
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    yield timed_step(cfg, run, peak_tflops)
    if not tiny:
        yield timed_step(replace(cfg, attention="pallas"), run, peak_tflops)
    if limit:  # what a step needs is linear in its rows
        once, twice = (harness.total_mib(harness.compile_step(cfg, replace(run, batch=n * run.batch))) for n in (1, 2))
        most = run.batch * (1 + (0.9 * limit / harness.MIB - once) / (twice - once))
        yield timed_step(cfg, replace(run, batch=int(most) // 8 * 8), peak_tflops)


def timed_step(cfg, run, peak_tflops):
    """The line of one compiled step: the median of eight."""
    compiled = harness.compile_step(cfg, run)
    seconds, replies, _ = harness.alternate({"step": (harness.make_stepper(compiled, cfg, run), 1)}, 8)
    step_s = statistics.median(seconds["step"])
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    *of_layer, loss = plan.forward_products(cfg, run.tgt_len)
    rate = 6 * (cfg.n_layer * sum(of_layer) + loss) * run.batch / step_s / 1e12  # each once, there and back
    line = {"attention": cfg.attention, "dtype": cfg.dtype, "batch": run.batch, "tgt_len": run.tgt_len}
    line |= {"step_ms": 1e3 * step_s, "tok_per_s": run.batch * run.tgt_len / step_s, "model_tflops": rate}
    line |= {"plan_mib": harness.total_mib(compiled), "peak_mib": peak and peak / harness.MIB}
    return {**line, "of_peak": rate / peak_tflops if peak_tflops else None, **replies["step"]}


def decode(tiny, peak_tflops):
    """Yields tokens per second of all rows together, over a full cache."""
    cfg = SMALL if tiny else replace(BASE, dtype="bfloat16")
    sampling = sample.SamplingParams(0.8, top_k=0, top_p=1, min_p=0, n_known=cfg.n_token)
    params = harness.init_params(cfg)
    prompts = [np.zeros(cfg.mem_len + 1, np.int32)]
    for rows in (1,) if tiny else (1, 16, 256):
        n_tokens = (4 if tiny else 20) * sample.BLOCK
        blocks = sample.generate(params, prompts, rows, n_tokens, sampling, 1, cfg, cfg.mem_len, 1)
        marks = [time.perf_counter() for _ in blocks]
        seconds = statistics.median(b - a for a, b in zip(marks[1:], marks[2:]))  # the first was compiled
        yield {"dtype": cfg.dtype, "rows": rows, "mem_len": cfg.mem_len, "tok_per_s": rows * sample.BLOCK / seconds}


# what the kernels compile to, without a device

CASE = dict(attention="pallas", dtype="bfloat16", B=4, H=8, K=64, T=2048)  # T = M
ENWIK8 = {**CASE, "B": 22, "T": 512}
WIKITEXT = {**CASE, "B": 60, "H": 10, "K": 41, "T": 150}
SIZES = [CASE, {**CASE, "K": 128}, ENWIK8, WIKITEXT]
BOTH = [{**case, "dtype": dtype} for case in SIZES for dtype in ("bfloat16", "float32")]
OLDER = [{**case, "block": 32} for case in BOTH[:3]]  # as kernels.best_block has it on these cards
CASES = {
    "gpu": [*BOTH, {**CASE, "T": 4096}, {**CASE, "attention": "chunked"}, {**CASE, "attention": "dense"}],
    "a100": OLDER,
    "ada": OLDER,
    "tpu": [CASE, {**CASE, "dtype": "float32"}, {**CASE, "K": 41, "T": 1000}, {**CASE, "attention": "chunked"}],
}
LIMIT_MIB = 100  # temporaries of value_and_grad of CASE
# Cards: l2 and multiprocessors are of the whole card, all else of a multiprocessor.
H200 = dict(name="NVIDIA H200", major=9, minor=0, cores=132, fpus=128, threads=2048, shared=233472, l2=62914560)
A100 = dict(name="NVIDIA A100", major=8, minor=0, cores=108, fpus=64, threads=2048, shared=167936, l2=41943040)
ADA = dict(name="NVIDIA GeForce RTX 4090", major=8, minor=9, cores=128, fpus=128, threads=1536, shared=102400)
CARDS = {"gpu": H200, "a100": A100, "ada": {**ADA, "l2": 75497472}}
CONFIG = """
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }} core_count: {cores} fpus_per_core: {fpus}
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: {threads}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {optin} shared_memory_per_core: {shared}
  l2_cache_size: {l2} memory_bandwidth: 1000000000000 device_memory_size: 20000000000 clock_rate_ghz: 1.5
}}
platform_name: "CUDA" device_description_str: "{name}"
dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 13 }}
"""


def compile_case(device, case):
    """{device, MiB of temporaries and of what comes in and goes out} of value_and_grad of one attention."""
    from jax.experimental import topologies
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

    import kernels

    plain = partial(txl.attention, block=128 if case["attention"] == "chunked" else None)
    backend, platform, cores = ("tpu", "tpu", 1) if device == "tpu" else ("gpu", "cuda", CARDS[device]["cores"])
    attend = (
        partial(kernels.attention, device=backend, block=case.get("block")) if case["attention"] == "pallas" else plain
    )
    if device == "tpu":
        described = topologies.get_topology_desc("v5e:2x2", "tpu")
    else:
        config = CONFIG.format(**CARDS[device], optin=CARDS[device]["shared"] - 1024)
        described = topologies.get_topology_desc("", "cuda", topology="1 x 1 x 1", target_config=config)
    target = described.devices[0]
    sharding = NamedSharding(Mesh(np.array([target]), ("x",)), PartitionSpec())
    shapes = jax.eval_shape(lambda: inputs(case["B"], case["H"], case["T"], case["T"], case["K"], case["dtype"]))
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in shapes]
    abstract = AbstractDevice(target.device_kind, cores, platform=backend)
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=abstract)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(partial(with_gradients, attend)).trace(*shapes)
        compiled = traced.lower(lowering_platforms=(platform,)).compile()
    sizes = compiled.memory_analysis()
    given = (sizes.argument_size_in_bytes + sizes.output_size_in_bytes) / harness.MIB
    return {"device": target.device_kind, "temp_mib": sizes.temp_size_in_bytes / harness.MIB, "given_mib": given}


def compile_lines(device, case):
    """Yields the lines of one case, compiled by a process that logs what ptxas says and dumps what XLA makes."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "TPU_SKIP_MDS_QUERY": "1"}
        if device != "tpu":
            dump = f"--xla_dump_to={folder} --xla_dump_emitter_re=.* --xla_gpu_dump_llvmir=true"
            env |= {"XLA_FLAGS": f"{dump} --xla_gpu_ptx_compiler_extra_flags=-v"}
            env |= {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "subprocess_compilation=5"}
        command = [sys.executable, "-m", "tools.bench.gpu", "--target", device, "--case", json.dumps(case)]
        done = subprocess.run(command, cwd=harness.ROOT, env=env, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr[-3000:])
        yield {"what": "temporaries", **case, **json.loads(done.stdout.splitlines()[-1])}
        found = r"entry function '_(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers"
        for kernel, stores, loads, registers in re.findall(found, done.stderr, re.S):
            [module] = Path(folder).glob(f"*._{kernel}.triton-to-llvm.txt")
            shared = re.findall(r"ttg.shared = (\d+)", module.read_text())[-1]
            [ptx] = [p.read_text() for p in Path(folder).glob("*.ptx") if f".entry _{kernel}(" in p.read_text()]
            line = {"registers": int(registers), "spill_bytes": int(stores) + int(loads), "shared_bytes": int(shared)}
            line |= {"warps": int(re.search(r"\.reqntid (\d+)", ptx)[1]) // 32, "wgmma": ptx.count("wgmma.mma_async")}
            yield {"what": "kernel", "kernel": kernel, **case, **line, "fetched_ahead": ptx.count("cp.async")}


def limit_mib(case, line):
    """What temporaries may take: a tenth of all scores in float32, and as much again as comes in and goes out."""
    return case["B"] * case["H"] * case["T"] * 2 * case["T"] * 4 / 10 / harness.MIB + line.get("given_mib", 0)


def compile_all(device):
    """Yields all lines; exits with 1 where a kernel fetches scratch ahead, or for an H200 spills or takes too much.

    In float32 heads of 128 may spill.
    """
    bad = []
    for case in CASES[device]:
        for line in compile_lines(device, case):
            yield line
            spills = line.get("spill_bytes", 0) and (case["K"] <= 64 or case["dtype"] == "bfloat16")
            grows = line.get("temp_mib", 0) > (LIMIT_MIB if case == CASE else limit_mib(case, line))
            fused = case["attention"] == "pallas" and device == "gpu"
            if line.get("fetched_ahead") or (fused and (spills or grows)):
                bad.append(line.get("kernel", "temporaries"))
    if bad:
        sys.exit(f"tools.bench.gpu: not as it should be: {', '.join(bad)}")


PARTS = {"check": check, "memory": memory, "times": times, "step": steps, "decode": decode}


def main(argv=None):
    parser = harness.make_parser("gpu", __doc__, [*PARTS, "compile"], PARTS)
    parser.add_argument("--peak_tflops", type=float, default=0, help="the device's, dense products of bfloat16")
    parser.add_argument("--target", choices=CASES, default="gpu", help="what compile compiles for")
    parser.add_argument("--case", type=json.loads, help="one attention, for compile: it starts a process for each")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore", ResourceWarning)
    if args.case:
        return print(json.dumps(compile_case(args.target, args.case)))
    failed = False
    for part in args.parts:
        if part == "compile":
            for line in compile_all(args.target):
                harness.emit(line)
            continue
        for line in PARTS[part](args.tiny, args.peak_tflops):
            harness.emit({"what": part, "device": jax.devices()[0].device_kind, **line})
            failed |= line.get("verdict") == "fail"
    if failed:
        sys.exit("tools.bench.gpu: an attention is wrong, see the verdict's line")


if __name__ == "__main__":
    main()
