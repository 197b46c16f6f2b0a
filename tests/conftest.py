"""Set before jax is imported: a quick compiler, four CPU devices, a cache. And what many tests start from."""

import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
gc.disable()  # a fifth of the time: traces are many small objects, and jax does more whenever Python collects
FLAGS = "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=4"
if version("jax").startswith("0.10."):
    FLAGS += " --xla_cpu_use_fusion_emitters=false"  # compiles 3 times as fast; later versions have one emitter only
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # tolerances are those of full float32 products
CACHE = tempfile.TemporaryDirectory()  # a program that several tests or their processes need is compiled once
os.environ |= {"JAX_COMPILATION_CACHE_DIR": CACHE.name, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

import txl  # noqa: E402

SHARED = {}  # what `shared_steps` made
SECOND = ("import", "kernels", "model", "recall", "sample")
SECOND += ("tools_hacks", "tools_plan", "tools_score")
collect_ignore_glob = [] if (Path(__file__).parents[1] / "tools").exists() else ["test_tools_*.py", "test_readme.py"]
REFERENCE = Path(__file__).parent / "reference"


class SecondHalf(pytest.Item):
    """The tests of the files in SECOND, run meanwhile in a process of their own: the last test of this one."""

    def runtest(self):
        code = self.process.wait()
        self.output.seek(0)
        lines = self.output.read().decode().splitlines()
        if code:
            pytest.fail("\n".join(lines), pytrace=False)
        self.config.get_terminal_writer().line(f"\n{lines[-1]} in the second process")

    def reportinfo(self):
        return self.path, None, "the tests of the second process"


def pytest_collection_modifyitems(session, config, items):
    """The whole suite runs in two processes, for two cores: this one, and a pytest of the files in SECOND."""
    words = config.invocation_params.args
    files = {str(item.path) for item in items if item.path.stem.removeprefix("test_") in SECOND}
    if not files or any(word.split("=")[0] not in ("-q", "-x", "-v", "--durations") for word in words):
        return
    half = SecondHalf.from_parent(session, name="second_half")
    half.output = tempfile.TemporaryFile()
    command = [sys.executable, "-m", "pytest", "--color=no", *words, *sorted(files)]
    half.process = subprocess.Popen(command, cwd=config.rootpath, stdout=half.output, stderr=subprocess.STDOUT)
    config.add_cleanup(half.process.terminate)
    items[:] = [item for item in items if str(item.path) not in files] + [half]


@pytest.fixture(autouse=True)
def few_maps():
    """Forgets compiled programs before the process reaches Linux's limit of 65,530 memory maps, where XLA crashes."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 40_000:
        SHARED.clear()
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def x64():
    """float64 in this test alone."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A text file."""
    from runs import TEXT

    file = tmp_path_factory.mktemp("data") / "text.txt"
    file.write_bytes(TEXT)
    return file


@pytest.fixture(scope="module")
def shared_steps():
    """Runs that need the same step of training, of evaluation, or the same fresh state make it once."""
    import train

    no_part_of_it = {*train.ONE_CALL, "data", "tokenizer"}
    no_part_of_it |= {"eval_every", "eval_tokens", "eval_batch", "log_every"}
    originals = train.compile_train_step, train.make_eval_step, train.fresh_state

    def once(make, *key):
        if key not in SHARED:
            SHARED[key] = make()
        return SHARED[key]

    def decides(run):
        """The flags that a step of training depends on."""
        own = no_part_of_it | ({"steps"} if run.schedule in ("inv_sqrt", "constant") else set())
        return tuple(item for item in dataclasses.asdict(run).items() if item[0] not in own)

    def compile_once(cfg, run, layout):
        return once(lambda: originals[0](cfg, run, layout), "step", cfg, decides(run), layout)

    def make_eval_once(cfg):
        return once(lambda: originals[1](cfg), "evaluation", cfg)

    def fresh_once(cfg, run, layout, params):
        make = lambda: originals[2](cfg, run, layout, params)
        if params is not None or layout != train.Layout(layout.n_devices):
            return make()
        state = once(lambda: train.to_host(make(), layout), "state", cfg, decides(run), layout)
        return train.to_devices(state, layout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "compile_train_step", compile_once)
        patch.setattr(train, "make_eval_step", make_eval_once)
        patch.setattr(train, "fresh_state", fresh_once)
        yield


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
    differences = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max(initial=0), got, want)
    return np.max(jax.tree.leaves(differences))  # NaN if there is one
