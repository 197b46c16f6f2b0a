"""The README's worked changes: what each does to loss and speed, on copies of this tree, with the defaults of train.py.

    python -m bench.hacks              # everything: about 20 minutes on 2 cores
    python -m bench.hacks plain Lion   # the losses of these
    python -m bench.hacks speed Lion   # their speeds, as ratios to the plain tree's

Results are JSON lines on standard output: one a run, then one of the speeds.
"""

import importlib
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.peers import machine

ROOT = Path(__file__).resolve().parents[1]
STEPS = 200
FLAGS = {"seed 2": {"seed": 2}, "AdamW": {"optimizer": "adamw", "lr": 2e-3}, "Lion": {"optimizer": "adamw", "lr": 1e-3}}
PLAIN = ("plain", "seed 2", "AdamW")  # beside the changes: the tree as it is
BLOCKS, BLOCK_STEPS = 6, 4


def changes():
    """{heading: diff} of the README's section, in its order."""
    section = re.search(r"^## Hack it\n(.*?)^## ", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)[1]
    return dict(re.findall(r"^### (.*?)\n.*?^```diff\n(.*?)^```", section, re.M | re.S))


def changed_lines(diff):
    return len(re.findall(r"^(?:\+(?!\+\+ b/)|-(?!-- a/))", diff, re.M))


def apply(diff, folder):
    """Changes the files in `folder`. ValueError where a hunk's old lines don't stand there exactly once."""
    for part in re.split(r"^--- a/.*\n", diff, flags=re.M)[1:]:
        name, *hunks = re.split(r"^(?=@@ )", part, flags=re.M)
        path = folder / name.removeprefix("+++ b/").strip()
        text = path.read_text(encoding="utf-8")
        for hunk in hunks:
            head, *lines = hunk.splitlines(keepends=True)
            lines = [(line[0], line[1:]) if line.strip() else (" ", "\n") for line in lines]
            old, new = ("".join(line for sign, line in lines if sign != other) for other in "+-")
            counts = [int(n) for n in re.findall(r",(\d+)", head.split("@@")[1])]
            if counts != [old.count("\n"), new.count("\n")] or text.count(old) != 1:
                raise ValueError(f"{path}: want {counts} lines that stand there once, found {text.count(old)}:\n{hunk}")
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")


def copy(folder, diff=""):
    """A copy of the files that train.py needs, with a diff applied."""
    folder.mkdir()
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    shutil.copytree(ROOT / "data", folder / "data", ignore=shutil.ignore_patterns("__pycache__"))
    apply(diff, folder)
    return folder


def load(folder, name):
    """Module `name` of the copy in `folder`, beside those of other copies and of this tree."""
    own = {path.stem for path in folder.glob("*.py")}
    kept = {name: sys.modules.pop(name) for name in own & sys.modules.keys()}
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
        for name in own & sys.modules.keys():
            del sys.modules[name]
        sys.modules.update(kept)


def loss(name, folder):
    """The entry of a run of `train.py` in a copy."""
    out, flags = folder / "run", FLAGS.get(name, {})
    words = [f"--{flag}={value}" for flag, value in flags.items()]
    command = [sys.executable, "train.py", "--json", f"--out={out}", f"--steps={STEPS}", f"--eval_every={STEPS}"]
    subprocess.run([*command, *words], cwd=folder, stdout=subprocess.DEVNULL, check=True)
    head, *entries = (json.loads(line) for line in (out / "log.jsonl").read_text().splitlines())
    entry = {"change": name, "steps": STEPS, "flags": flags, "n_params": head["n_params"]}
    entry |= {name: head[name] for name in ("versions", "backend", "device", "n_devices")}
    entry |= {"sha256": head["corpus"]["sha256"]}
    for split in ("valid", "test"):
        last = [e for e in entries if e.get("split") == split][-1]
        entry |= {f"{split}_{what}": last[what] for what in ("loss_nats", "bpb", "targets")}
    return entry


def stepper(name, folder):
    """A function that takes BLOCK_STEPS training steps in a copy and returns the seconds."""
    train = load(folder, "train")
    cfg, run, corpus, _ = train.settle(FLAGS.get(name, {}))
    compiled, state = train.compile_step(cfg, run, 1), [train.fresh_state(cfg, run, None, 1)]
    batch = train.pieces(train.batch_at(corpus.train, run.batch, 0, run.tgt_len), 1)

    def steps():
        start = time.perf_counter()
        for number in range(BLOCK_STEPS):
            state[0], told = compiled(state[0], *batch, train.np.int32(number))
        train.jax.block_until_ready(told)
        return time.perf_counter() - start

    return steps


def speed(folders):
    """The entry of the copies' speeds, as ratios to the plain one's, from blocks of steps taken in turn."""
    steppers = {name: stepper(name, folder) for name, folder in folders.items()}
    times = [{name: steps() for name, steps in steppers.items()} for _ in range(BLOCKS + 1)][1:]
    ratios = {name: statistics.median(t["plain"] / t[name] for t in times) for name in steppers}
    ms = statistics.median(t["plain"] for t in times) / BLOCK_STEPS * 1e3
    return {"speed_over_plain": ratios, "plain_step_ms": ms}


def table(entries):
    """The README's rows, from the entries of `loss` and `speed`."""
    runs = {entry["change"]: entry for entry in entries if "change" in entry}
    speeds = {name: ratio for entry in entries for name, ratio in entry.get("speed_over_plain", {}).items()}
    lines = dict.fromkeys(PLAIN, 0) | {name: changed_lines(diff) for name, diff in changes().items()}
    for name, n in lines.items():
        words = " ".join(f"--{flag} {value}" for flag, value in FLAGS.get(name, {}).items())
        what = ", ".join([name if n else "none", *([f"`{words}`"] if words else [])])
        found = f"{runs[name]['n_params']:,} | {runs[name]['valid_bpb']:.3f}" if name in runs else "not run | not run"
        yield f"| {what} | {n} | {found} | {f'{speeds[name]:.2f}' if name in speeds else 'not run'} |"


def main():
    diffs = dict.fromkeys(PLAIN, "") | changes()
    speeds, names = "speed" in sys.argv[1:], [word for word in sys.argv[1:] if word != "speed"]
    if set(names) - set(diffs):
        sys.exit(f"bench.hacks: {', '.join(names)}: give some of {', '.join(diffs)}")
    with tempfile.TemporaryDirectory() as base:
        chosen = dict.fromkeys(["plain", *names] if names else diffs)
        folders = {name: copy(Path(base) / str(i), diffs[name]) for i, name in enumerate(chosen)}
        for name in () if speeds else names or diffs:
            print(json.dumps(loss(name, folders[name]) | machine()), flush=True)
        if speeds or not names:
            print(json.dumps(speed(folders) | machine()))


if __name__ == "__main__":
    main()
