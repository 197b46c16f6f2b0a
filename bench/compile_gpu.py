"""What the fused attention compiles to for an H200 or a TPU v5e, on a machine without either, as JSON lines.

    python -m venv ENV && ENV/bin/pip install jax==0.12.0.1
    ENV/bin/pip install --no-deps jax-cuda13-plugin==0.12.0.1 jax-cuda13-pjrt==0.12.0.1
    ENV/bin/python -m bench.compile_gpu > bench/results/compile_gpu.jsonl        # 4 minutes on 2 cores
    ENV/bin/pip install libtpu && ENV/bin/python -m bench.compile_gpu tpu        # an environment without the plugins

Also wanted: ptxas of CUDA 13 on the PATH (NVIDIA's package cuda-nvcc-13-0). One line for each kernel: registers of a
thread, bytes spilled, shared memory; and one for value_and_grad of an attention: its temporaries. Exits with 1 where
a kernel at head size 64 spills, where one fetches scratch ahead of its writing, or where temporaries pass 300 MiB.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
B, H = 4, 8
LIMIT_MIB = 300  # temporaries at head size 64, T = M = 2048
BASE = dict(attention="pallas", dtype="bfloat16", K=64, T=2048)
GPU = [BASE | dict(K=K, dtype=dtype) for K in (64, 128) for dtype in ("bfloat16", "float32")]
GPU += [BASE | dict(T=4096), BASE | dict(attention="chunked"), BASE | dict(attention="dense")]
TPU = [BASE, BASE | dict(dtype="float32"), BASE | dict(K=41, T=1000), BASE | dict(attention="chunked")]
H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 } core_count: 132 fpus_per_core: 128 threads_per_warp: 32
  threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  l2_cache_size: 62914560 memory_bandwidth: 4800000000000 device_memory_size: 150000000000 clock_rate_ghz: 1.98
}
platform_name: "CUDA" device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 10 } runtime_version { major: 13 }
"""


def compile_one(device, attention, dtype, K, T):
    """Temporaries in MiB of value_and_grad of one attention, T = M, compiled in this process."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

    import kernels
    from attention import attention as plain

    def run(q_u, q_v, k, v, r, lo):
        if attention == "pallas":
            attend = lambda *args: kernels.attention(*args, lo, device=device)
        else:
            attend = lambda *args: plain(*args, lo, block=128 if attention == "chunked" else None)
        out, pull = jax.vjp(attend, q_u, q_v, k, v, r)
        return out, pull(out)

    if device == "gpu":
        described = topologies.get_topology_desc("", "cuda", topology="1 x 1 x 1", target_config=H200)
    else:
        described = topologies.get_topology_desc("v5e:2x2", "tpu")
    target, platform = described.devices[0], "cuda" if device == "gpu" else "tpu"
    placed = NamedSharding(Mesh(np.array([target]), ("x",)), PartitionSpec())
    like = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=placed)
    q, k = like(B, H, T, K), like(B, H, 2 * T, K)
    abstract = AbstractDevice(target.device_kind, 132 if device == "gpu" else 1, platform=device)
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=abstract)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(run).trace(q, q, k, k, like(H, 2 * T, K), like(B, T, dtype="int32"))
        compiled = traced.lower(lowering_platforms=(platform,)).compile()
    told = {"device": target.device_kind, "jax": jax.__version__}
    return told | {"temp_mib": round(compiled.memory_analysis().temp_size_in_bytes / 2**20, 1)}


def measure(device, case):
    """Lines of one case, compiled by a process of its own that logs what ptxas says and dumps what XLA makes."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "TPU_SKIP_MDS_QUERY": "1"}
        if device == "gpu":
            dump = f"--xla_dump_to={folder} --xla_dump_emitter_re=.* --xla_gpu_dump_llvmir=true"
            env |= {"XLA_FLAGS": f"{dump} --xla_gpu_ptx_compiler_extra_flags=-v"}
            env |= {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "subprocess_compilation=5"}
        command = [sys.executable, "-m", "bench.compile_gpu", device, json.dumps(case)]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr[-3000:])
        yield {"what": "temporaries", **case, **json.loads(done.stdout.splitlines()[-1])}
        found = r"entry function '_(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers"
        for kernel, stores, loads, registers in re.findall(found, done.stderr, re.S):
            [module] = Path(folder).glob(f"*._{kernel}.triton-to-llvm.txt")
            shared = re.findall(r"ttg.shared = (\d+)", module.read_text())[-1]
            [ptx] = [p.read_text() for p in Path(folder).glob("*.ptx") if f".entry _{kernel}(" in p.read_text()]
            told = {"registers": int(registers), "spill_bytes": int(stores) + int(loads), "shared_bytes": int(shared)}
            told |= {"warps": int(re.search(r"\.reqntid (\d+)", ptx)[1]) // 32, "wgmma": ptx.count("wgmma.mma_async")}
            yield {"what": "kernel", "kernel": kernel, **case, **told, "fetched_ahead": ptx.count("cp.async")}


def main(device="gpu", one=""):
    warnings.simplefilter("ignore", ResourceWarning)
    if one:
        return print(json.dumps(compile_one(device, **json.loads(one))))
    bad = []
    for line in (line for case in (GPU if device == "gpu" else TPU) for line in measure(device, case)):
        print(json.dumps(line), flush=True)
        if line.get("fetched_ahead") or (line["K"] == 64 and line.get("spill_bytes")):
            bad.append(line["kernel"])
        if device == "gpu" and line["attention"] == "pallas" and line["T"] == 2048 and line["K"] == 64:
            bad += ["temporaries"] if line.get("temp_mib", 0) > LIMIT_MIB else []
    sys.exit(f"bench.compile_gpu: not as it should be: {', '.join(bad)}" if bad else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
