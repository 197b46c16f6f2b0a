"""Pictures of runs, where matplotlib is installed: nothing here is needed to train."""

import json
from pathlib import Path


def new_figure(*size):
    """A matplotlib figure that needs no display, or None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    return Figure(figsize=size, layout="constrained")


def lengths(entries, path):
    """Loss against memory length: as a picture at `path`, and as bars of text, which it returns."""
    bits = [entry["bpb"] for entry in entries]
    low, high = min(bits), max(bits)
    bar = lambda x: "#" * (1 + round(50 * (x - low) / (high - low or 1)))
    lines = [" mem_len bits per byte", *(f"{e['mem_len']:>8} {e['bpb']:.4f} {bar(e['bpb'])}" for e in entries)]
    figure = new_figure(6, 3.6)
    if figure is None:
        return "\n".join([*lines, "pip install matplotlib draws this as a picture, too"])
    axes = figure.add_subplot(xlabel="tokens remembered", ylabel=f"{entries[0]['split']} loss, bits per byte")
    axes.plot(*zip(*sorted((e["mem_len"], e["bpb"]) for e in entries)), "o-")
    figure.savefig(path, dpi=130)
    return "\n".join([*lines, f"drawn in {path}"])


def read_log(path):
    """Yields the entries of a log that have a loss; a process that was killed may have left other things there."""
    is_number = lambda x: type(x) in (int, float) and abs(x) < 1e30  # not NaN
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and is_number(entry.get("step")) and is_number(entry.get("bpb")):
            if all(entry.get(k) is None or is_number(entry[k]) for k in ("lr", "tok_per_s", "targets")):
                yield entry


def history(folder):
    """(entries of steps, entries of evaluations) of a run folder's log, each step once, as it was last computed."""
    entries = list(read_log(Path(folder) / "log.jsonl"))
    steps = {entry["step"]: entry for entry in entries if entry.keys() >= {"lr", "tok_per_s"}}
    judged = {
        (entry["step"], str(entry["split"]), entry.get("targets")): entry for entry in entries if "split" in entry
    }
    return sorted(steps.values(), key=lambda e: e["step"]), sorted(judged.values(), key=lambda e: e["step"])


def runs(folders, path):
    """Losses, learning rate and speed of runs over their steps, as a picture at `path`; nothing without matplotlib."""
    figure = new_figure(7, 7)
    if figure is None:
        return
    loss, rate, speed = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1, 1))
    for number, folder in enumerate(folders):
        (steps, judged), colour = history(folder), f"C{number}"
        name = f"{Path(folder).name} " if len(folders) > 1 else ""
        loss.plot([e["step"] for e in steps], [e["bpb"] for e in steps], color=colour, alpha=0.35, label=f"{name}train")
        valid = [e for e in judged if e["split"] == "valid"]
        loss.plot([e["step"] for e in valid], [e["bpb"] for e in valid], "o-", color=colour, label=f"{name}valid")
        rate.plot([e["step"] for e in steps], [e["lr"] for e in steps], color=colour)
        timed = [e for e in steps if e["tok_per_s"]]
        speed.plot([e["step"] for e in timed], [e["tok_per_s"] for e in timed], color=colour)
    loss.set(ylabel="loss, bits per byte")
    loss.legend()
    rate.set(ylabel="learning rate")
    speed.set(ylabel="tokens per second", xlabel="step")
    speed.set_ylim(0, 1.1 * speed.get_ylim()[1])
    figure.savefig(path, dpi=130)
