"""What the files promise about themselves: what they import, no pickles, nothing done on import, tools/ can go."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from runs import TEXT, TINY, argv

ROOT = Path(__file__).parents[1]
FILES = sorted(
    path.relative_to(ROOT).as_posix() for folder in ("", "data/", "tools/") for path in ROOT.glob(f"{folder}*.py")
)
BENCH = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("tools/bench/*.py"))
PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}

# What each file imports beside the standard library.
MAY = {
    "txl.py": {"jax", "kernels"},
    "kernels.py": {"jax"},
    "train.py": {"jax", "numpy", "optax", "txl", "data"},
    "sample.py": {"jax", "numpy", "txl", "data"},
    "data/checkpoint.py": {"jax", "numpy", "txl", "data"},
    "data/import_checkpoint.py": {"numpy", "txl", "data", "torch"},
    "data/": {"numpy", "data", "tokenizers"},  # preparing a text must not wake a device
    "tools/": {"jax", "numpy", "optax", "txl", "data", "matplotlib"},
}


def parse(name):
    return ast.parse((ROOT / name).read_text(encoding="utf-8"))


def packages(tree):
    """Names of the packages that a file imports anywhere."""
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        yield from (name.split(".")[0] for name in names)


def module(name):
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@pytest.mark.parametrize("name", FILES)
def test_a_file_imports_only_what_it_may(name):
    assert {*packages(parse(name))} - sys.stdlib_module_names <= (MAY.get(name) or MAY[f"{name.split('/')[0]}/"])


@pytest.mark.parametrize("name", [*FILES, *BENCH])
def test_nothing_pickles(name):
    tree = parse(name)
    assert not {*packages(tree)} & PICKLES
    allowed = [node.value for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "allow_pickle"]
    assert all(isinstance(value, ast.Constant) and value.value is False for value in allowed)


def test_every_file_imports_without_touching_a_device_the_disk_or_the_command_line(tmp_path):
    texts = [module(name) for name in FILES if name.startswith("data/") and "jax" not in MAY.get(name, ())]
    texts.remove("data.import_checkpoint")
    everything = [module(name) for name in (*FILES, *BENCH)]
    code = f"""
import importlib, sys
for name in {texts}:
    importlib.import_module(name)
assert "jax" not in sys.modules
for name in {everything}:
    importlib.import_module(name)
import jax
try:
    jax.devices()
except RuntimeError:  # so no import has asked for a device: it would have failed like this
    print("imported")
"""
    # No such platform: whatever asks for a device raises.
    env = os.environ | {"JAX_PLATFORMS": "none_such", "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", code, "--none_such"]
    found = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert found.stdout == "imported\n", found.stdout + found.stderr
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def without_tools(tmp_path_factory):
    """A copy of the tree without tools/."""
    copy = tmp_path_factory.mktemp("bare") / "txl"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns("tools", "runs", ".*", "__pycache__", "*.npz", "corpora"))
    (copy / "text.txt").write_bytes(TEXT)
    return copy


WITHOUT = """
import sys
import sample, train

train.main(sys.argv[1:])
sample.main(["--run", "runs/text-1", "--prompt", "alpha", "--n_tokens", "9"])
text = ["--data", "text.txt"]
for main, flag, words in [
    (train.main, "plan", text), (train.main, "memory_budget=1GiB", text), (train.main, "shard=opt", text),
    (train.main, "coordinator=localhost:1", text), (train.main, "profile=trace", text),
    (sample.main, "score=text.txt", ["--run", "runs/text-1"]),
]:
    try:
        main([f"--{flag}", *words])
    except SystemExit as e:
        print("refused", flag, e.code)
"""


def test_without_tools_a_run_and_its_samples_work_and_flags_that_need_it_name_the_missing_file(without_tools):
    flags = argv(**TINY | dict(steps=2, eval_every=2, data="text.txt"))
    command = [sys.executable, "-c", WITHOUT, *flags]
    pipes = dict(encoding="utf-8", errors="replace", capture_output=True, timeout=300)
    found = subprocess.run(command, cwd=without_tools, **pipes)
    assert found.returncode == 0, found.stderr
    assert (without_tools / "runs" / "text-1" / "best.npz").exists() and "alpha" in found.stdout
    refusals = re.findall(r"^refused (\w+).*--(\w+) needs tools/(\w+)\.py, which is missing", found.stdout, re.M)
    files = ("plan", "plan", "shard", "shard", "profile", "score")
    assert refusals == [(flag, flag, file) for (_, flag, _), file in zip(refusals, files)] and len(refusals) == 6


def test_without_tools_the_tests_of_the_core_are_found_and_run(without_tools):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "smallest_type"]
    found = subprocess.run(command, cwd=without_tools, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0 and " passed" in found.stdout, found.stdout[-2000:]
