"""Set before jax is imported: a quick compiler and four CPU devices. And what many tests start from."""

import gc
import json
import os
from importlib.metadata import version
from pathlib import Path

FLAGS = "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=4"
if version("jax").startswith("0.10."):
    FLAGS += " --xla_cpu_use_fusion_emitters=false"  # compiles 3 times as fast; later versions have one emitter only
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # tolerances are those of full float32 products

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402

import txl  # noqa: E402

REFERENCE = Path(__file__).parent / "reference"


@pytest.fixture(autouse=True)
def few_maps():
    """Forgets compiled programs before the process reaches Linux's limit of 65,530 memory maps, where XLA crashes."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def x64():
    """float64 in this test alone."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def quick_compiles(tmp_path_factory):
    """Runs of one module that need the same program share it."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    old = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (str(tmp_path_factory.mktemp("compiled")), 0)):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in zip(names, old):
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def make_params(cfg, seed=0, scale=0.3):
    """Parameters by numpy, in the dtype of master weights; biases and layer norms are not at 0 and 1."""
    rng = np.random.default_rng(seed)
    dtype = np.float64 if cfg.dtype == "float64" else np.float32

    def leaf(path, shape):
        values = scale * rng.standard_normal(shape.shape)
        return (values + path[-1].key.endswith("_scale")).astype(dtype)

    return jax.tree.map_with_path(leaf, txl.param_shapes(cfg))


def make_mems(cfg, batch, unwritten=np.nan, fill=0, seed=1):
    """Memory whose last `fill` are random and whose others are `unwritten`; fill: a number or one a row."""
    shape = (cfg.n_layer, batch, cfg.mem_len, cfg.d_model)
    fill = np.broadcast_to(np.asarray(fill, np.int32), batch)
    real = np.arange(cfg.mem_len) >= cfg.mem_len - fill[:, None]
    values = np.random.default_rng(seed).standard_normal(shape)
    return txl.Mems(np.where(real[..., None], values, unwritten).astype(txl.jnp.dtype(cfg.dtype)), fill)


def make_ids(cfg, *shape, seed=2):
    return np.random.default_rng(seed).integers(0, cfg.n_token, shape, dtype=np.int32)


def load_reference(name):
    """A fixture of the original's numbers: (its config, all arrays by key)."""
    with np.load(REFERENCE / f"{name}.npz") as z:
        arrays = {key: z[key] for key in z.files}
    return json.loads(str(arrays.pop("config"))), arrays


def part(arrays, prefix):
    """{rest of the key: array} of the keys that begin with `prefix`."""
    return {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}


def worst(got, want):
    """The largest difference between two trees of equal structure."""
    difference = lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max(initial=0))
    return np.max(jax.tree.leaves(jax.tree.map(difference, got, want)))  # NaN if there is one
