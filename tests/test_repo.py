"""What the files promise about themselves: their size, what they import, no pickles, nothing done on import."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CEILINGS = {"txl.py": 450, "train.py": 600, "sample.py": 250, "kernels.py": 450}
FILES = sorted(path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.py"), *ROOT.glob("data/*.py")))
BENCH = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("bench/*.py"))
OURS = {name.split("/")[0].removesuffix(".py") for name in FILES}
LAYERS = (  # each imports only from those before it
    {"attention", "embedding", "figures", "kernels", "profiling", "shard", "stop"},
    {"layer"},
    {"txl"},
    {"step"},
    {"evaluation"},
    {"generate", "plan", "scoring"},
    {"train"},
    {"sample"},
)
ONLY = {"optax": {"step"}, "kernels": {"layer"}, "data": {"scoring", "train", "sample"}}  # who imports it
RUNNING = {"jax", "jaxlib", "optax", "numpy"}
OPTIONAL = {"matplotlib", "torch", "safetensors", "kernels"}  # inside the one function that needs them
NOT_FOR_IMPORT = {"sample", "bench", "tests"} | {path.stem for path in ROOT.glob("tests/*.py")}
PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def parse(name):
    return ast.parse((ROOT / name).read_text(encoding="utf-8"))


def imports(tree, inside=True):
    """Names of the modules that a file imports, whole; inside: in its functions, too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
        elif inside or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from imports(node, inside)


def packages(name, **options):
    return {module.split(".")[0] for module in imports(parse(name), **options)} - sys.stdlib_module_names


def module(name):
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def test_the_files_are_found():
    assert {"txl.py", "train.py", "sample.py", "data/prepare.py", "data/import_checkpoint.py"} < set(FILES)
    assert {"jax", "numpy", "txl", "data", "step"} < packages("train.py")


@pytest.mark.parametrize("name", [name for name in CEILINGS if name in FILES])
def test_a_file_stays_under_its_ceiling(name):
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= CEILINGS[name]


@pytest.mark.parametrize("name", [*FILES, *BENCH])
def test_no_function_is_longer_than_40_lines(name):
    functions = [node for node in ast.walk(parse(name)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    assert not [f.name for f in functions if f.end_lineno - f.lineno >= 40]


@pytest.mark.parametrize("name", FILES)
def test_only_what_the_readme_installs_is_imported_and_more_only_inside_a_function(name):
    known = OURS | RUNNING if not name.startswith("data/") else {"numpy", "data"}  # a text must not wake a GPU
    known = known | {"txl"} if name == "data/import_checkpoint.py" else known
    assert packages(name, inside=False) <= known
    assert packages(name) <= known | OPTIONAL


@pytest.mark.parametrize("name", [name for name in FILES if "/" not in name])
def test_a_file_imports_only_what_stands_below_it(name):
    [height] = [i for i, layer in enumerate(LAYERS) if module(name) in layer]
    assert packages(name) & set().union(*LAYERS[height:]) == set()
    assert not [package for package in packages(name) & ONLY.keys() if module(name) not in ONLY[package]]
    assert "kernels" not in packages(name, inside=False)  # only when they are asked for


def test_every_letter_of_an_einsum_is_in_the_glossary():
    glossary = {a for a, b in re.findall(r"\b([a-z]) ([A-Z])  ", ast.get_docstring(parse("txl.py"))) if a.upper() == b}
    calls = [node for name in (*FILES, *BENCH) for node in ast.walk(parse(name)) if isinstance(node, ast.Call)]
    letters = [c.args[0].value for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "einsum"]
    assert len(letters) > 12 and not [text for text in letters if set(text) - glossary - set(",->")]


@pytest.mark.parametrize("name", FILES)
def test_nothing_imports_sample_tests_or_bench(name):
    assert not packages(name) & NOT_FOR_IMPORT


def test_every_test_that_the_table_of_cases_names_is_there():
    named = re.findall(r"(test_\w+\.py)::(test_\w+)", (ROOT / "tests/CASES.md").read_text(encoding="utf-8"))
    there = {file: {getattr(node, "name", "") for node in parse(f"tests/{file}").body} for file in dict(named)}
    assert named and not [(file, test) for file, test in named if test not in there[file]]


@pytest.mark.parametrize("name", [*FILES, *BENCH])
def test_nothing_pickles(name):
    tree = parse(name)
    assert not {module.split(".")[0] for module in imports(tree)} & PICKLES
    allowed = [node.value for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "allow_pickle"]
    assert all(isinstance(value, ast.Constant) and value.value is False for value in allowed)


def test_every_file_imports_without_touching_a_device_the_disk_or_the_command_line(tmp_path):
    texts = [module(name) for name in FILES if name.startswith("data/") and name != "data/import_checkpoint.py"]
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
