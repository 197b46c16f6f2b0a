"""Set before jax is imported: a quick compiler and four CPU devices. And what many tests start from."""

import gc
import json
import os
import subprocess
import sys
import tempfile
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

SECOND = ("hacks", "import", "kernels", "model", "plan", "profiling", "reading", "sample", "scoring")  # half the work
REPORTS = "TXL_TEST_REPORTS"  # where the second half leaves its reports


def pytest_collection_modifyitems(session, config, items):
    """The whole suite runs in two processes, for two cores: this one, and a pytest of the files in SECOND."""
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if REPORTS in os.environ or not whole or config.option.keyword or config.option.collectonly:
        return
    second = [item for item in items if item.path.stem.removeprefix("test_") in SECOND]
    items[:] = [item for item in items if item not in second]
    path = Path(tempfile.mkdtemp()) / "reports"
    command = [sys.executable, "-m", "pytest", "-q", "--color=no", *{str(item.path) for item in second}]
    command += ["-x"] if config.option.maxfail == 1 else []
    process = subprocess.Popen(command, env=os.environ | {REPORTS: str(path)}, stdout=subprocess.DEVNULL)
    session.second = process, path, len(second)


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session):
    """After this half, repeats the reports of the second one as if its tests had run here."""
    process, path, n = getattr(session, "second", (None, None, 0))
    session.testscollected += n
    try:
        result = yield
    except BaseException:
        if process:
            process.terminate()
        raise
    if process and process.wait() not in (0, 1):
        pytest.exit(f"the second half of the tests ended with {process.returncode}", 3)
    for line in path.read_text().splitlines() if process else ():
        hook, data = session.config.hook, json.loads(line)
        report = hook.pytest_report_from_serializable(config=session.config, data=data)
        hook.pytest_runtest_logreport(report=report)
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report):
    if REPORTS in os.environ and report.when in ("setup", "call", "teardown"):
        data = CONFIG[0].hook.pytest_report_to_serializable(config=CONFIG[0], report=report)
        with open(os.environ[REPORTS], "a") as f:
            f.write(json.dumps(data) + "\n")


CONFIG = []


def pytest_configure(config):
    CONFIG[:] = [config]


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
