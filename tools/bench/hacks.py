"""What each diff of tools/hacks does to loss and speed of train.py's defaults, on copies of this tree.

python -m tools.bench.hacks               # everything: about 20 minutes on 2 cores
python -m tools.bench.hacks plain lion    # these alone: a run of 200 steps each, then speeds, taken in turn
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.bench import harness

HACKS = harness.ROOT / "tools" / "hacks"
PLAIN = ("plain", "seed_2", "adamw")  # beside the diffs: the tree as it is
FLAGS = {"seed_2": {"seed": 2}, "adamw": {"optimizer": "adamw", "lr": 2e-3}, "lion": {"optimizer": "adamw", "lr": 1e-3}}
TINY = dict(n_layer=1, n_head=2, d_model=16, d_head=8, d_inner=32, mem_len=16)


def read_diffs():
    """{name: diff} of tools/hacks."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(HACKS.glob("*.diff"))}


def changed_lines(diff):
    return len(re.findall(r"^(?:\+(?!\+\+ b/)|-(?!-- a/))", diff, re.M))


def copy_tree(folder, diff=""):
    """A copy of the code with a diff applied; ValueError where it does not fit."""
    skip = shutil.ignore_patterns("__pycache__", "results", "*.bin")
    folder.mkdir(parents=True)
    for path in harness.ROOT.glob("*.py"):
        shutil.copy(path, folder)
    for name in ("data", "tools"):
        shutil.copytree(harness.ROOT / name, folder / name, ignore=skip)
    if diff:
        env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}  # no repository: like patch
        done = subprocess.run(["git", "apply", "-"], cwd=folder, env=env, input=diff, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"the diff does not fit: {done.stderr.strip()}")
    return folder


def train(name, folder, steps, sizes):
    """The result line of a run of `train.py` in a copy."""
    out = folder / "run"
    flags = {**FLAGS.get(name, {}), **sizes}
    words = [f"--{flag}={value}" for flag, value in flags.items()]
    command = [sys.executable, "train.py", "--json", f"--out={out}", f"--steps={steps}", f"--eval_every={steps}"]
    subprocess.run([*command, *words], cwd=folder, stdout=subprocess.DEVNULL, check=True)
    head, *entries = (json.loads(line) for line in (out / "log.jsonl").read_text().splitlines())
    line = {"change": name, "steps": steps, "flags": flags, "n_params": head["n_params"]}
    line |= {name: head[name] for name in ("versions", "backend", "device", "n_devices")}
    line["sha256"] = head["corpus"]["sha256"]
    for split in ("valid", "test"):
        last = [entry for entry in entries if entry.get("split") == split][-1]
        line |= {f"{split}_{what}": last[what] for what in ("loss_nats", "bpb", "targets")}
    return line


def compare_speeds(folders, sizes, blocks=6, block_steps=4):
    """The result line of the copies' speeds, as ratios to the plain one's, from blocks of steps taken in turn."""
    with contextlib.ExitStack() as stack:
        workers = {}
        for name, folder in folders.items():
            shape = {**sizes, "run": FLAGS.get(name, {})}
            workers[name] = harness.start_worker(stack, "ours", shape, folder=folder)
        runs = {name: harness.steps_of(worker, block_steps) for name, worker in workers.items()}
        seconds, _, others = harness.alternate(runs, blocks, workers.values())
    ratios = {name: harness.speedup(seconds, name, "plain")[1] for name in folders}
    ms = 1e3 * statistics.median(seconds["plain"])
    return {"speed_over_plain": ratios, "plain_step_ms": ms, "cores_busy_with_others": others}


def main(argv=None):
    diffs = {**dict.fromkeys(PLAIN, ""), **read_diffs()}
    parser = argparse.ArgumentParser("python -m tools.bench.hacks", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(diffs)}; none: all")
    parser.add_argument("--steps", type=int, default=200, help="of each run; 0: speeds alone")
    parser.add_argument("--tiny", action="store_true", help="a model that takes seconds: only to see that it works")
    args = parser.parse_args(argv)
    sizes = TINY if args.tiny else {}
    if unknown := set(args.names) - set(diffs):
        parser.error(f"{', '.join(unknown)}: give some of {', '.join(diffs)}")
    names = dict.fromkeys(["plain", *(args.names or diffs)])
    with tempfile.TemporaryDirectory() as base:
        folders = {name: copy_tree(Path(base) / name, diffs[name]) for name in names}
        for name, folder in folders.items() if args.steps else ():
            harness.emit({**train(name, folder, args.steps, sizes), "changed_lines": changed_lines(diffs[name])})
        harness.emit(compare_speeds(folders, sizes))


if __name__ == "__main__":
    main()
