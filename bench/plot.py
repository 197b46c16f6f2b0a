"""Pictures (needs matplotlib): python -m bench.plot draws committed results, with RUN RUN ... it compares runs.

Without runs it writes bench/results/*.png, with them runs.png where you are.
"""

import json
import sys
from pathlib import Path

import figures

RESULTS = Path(__file__).parent / "results"


def lines(name):
    """The JSON lines of a result file."""
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def quality(plt):
    """Valid loss over seconds of training, ours beside the clock's."""
    (clock,), trained = lines("peers_clock.jsonl"), lines("peers_quality.jsonl")
    ours = [entry for entry in lines("quality.jsonl") if entry.get("split") == "valid"]
    figure, axes = plt.subplots(figsize=(6, 3.6))
    seconds, nats = [e["step"] * clock["clock_step_ms"] / 1e3 for e in trained], [e["valid_nats"] for e in trained]
    axes.plot(seconds, nats, "o--", color="0.5", label="nanoGPT's laptop setting, PyTorch")
    axes.plot([e["step"] * clock["ours_step_ms"] / 1e3 for e in ours], [e["loss_nats"] for e in ours], label="txl")
    axes.set(xlabel="seconds of training, 2 CPU cores", ylabel="valid loss, nats per character", ylim=(1.55, 2.6))
    axes.legend()
    save(figure, "quality.png")


def setting(remat, attention, batch_chunk, dtype, **_):
    parts = f", {batch_chunk} parts" if batch_chunk > 1 else ""
    return f"remat {remat}, {attention}{parts}" + (f", {dtype}" if dtype != "float32" else "")


def memory(plt):
    """Bytes of one training step by kind for settings that give the same result."""
    entries = lines("plan_enwik8_base.jsonl")
    kinds = ("parameters", "gradients", "optimizer", "memories", "workspace")
    labels = [setting(**e["setting"]) for e in entries]
    figure, axes = plt.subplots(figsize=(8, 0.35 * len(entries) + 1.6))
    left = [0.0] * len(entries)
    for kind in kinds:
        sizes = [e[f"{kind}_mib"] / 1024 for e in entries]
        axes.barh(labels, sizes, left=left, label=kind)
        left = [a + b for a, b in zip(left, sizes)]
    for label, total in zip(labels, left):
        axes.text(total, label, f" {total:.1f}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="GiB of one training step, XLA's own figure (enwik8 base, batch 22)", xlim=(0, 1.1 * max(left)))
    axes.legend(fontsize=8)
    save(figure, "memory.png")


def lengths(plt):
    """The step's total against the length of segment and memory, thriftiest options beside dense ones."""
    figure, axes = plt.subplots(figsize=(6, 3.6))
    for name, label in (("dense", "dense attention, nothing rebuilt"), ("thrifty", "remat full, chunked")):
        found = [e for e in lines("memory.jsonl") if e["what"] == name]
        axes.plot([e["tgt_len"] for e in found], [e["total_mib"] / 1024 for e in found], "o-", label=label)
        for e in found:
            gib = e["total_mib"] / 1024
            axes.annotate(f"{gib:.{gib < 10:d}f}", (e["tgt_len"], gib), (0, 6), textcoords="offset points", ha="center")
    axes.set(xlabel="tokens of a segment, and remembered", ylabel="GiB of one training step")
    axes.set(xscale="log", yscale="log", ylim=(0.7, 300), yticks=[1, 10, 100], yticklabels=["1", "10", "100"])
    axes.set_xticks([e["tgt_len"] for e in found], [f"{e['tgt_len']:,}" for e in found])
    axes.minorticks_off()
    axes.legend(loc="upper left")
    save(figure, "lengths.png")


def flat(plt):
    """Time of a token against tokens generated so far, beside what a token costs otherwise."""
    found = lines("reading.jsonl")
    _, run = [e for e in found if e["what"] == "decoded"]
    kept = [e for e in found if e["what"] == "kept"]
    figure, axes = plt.subplots(figsize=(6, 3.6))
    others = {"recompute": "ours without memory: its window read anew", "port": "Hugging Face's port, memory full"}
    others |= {"hidden": "ours with memory of hidden states, as in the original"}
    for (name, label), color in zip(others.items(), ("C1", "C3", "C2")):
        (cost,) = [e for e in found if e["what"] == name and e["mem_len"] == run["mem_len"]]
        axes.axhline(cost["step_ms"], color=color, linestyle="--")
        axes.text(10, 1.08 * cost["step_ms"], label, color=color, fontsize=8)
    axes.plot(run["tokens"], run["ms_per_token"], ".-", label="the cache, one text decoded")
    axes.plot(
        [e["tokens"] for e in kept], [e["ms_per_token"] for e in kept], "kD", label="the same from three kept caches"
    )
    axes.set(xlabel=f"tokens so far, {run['mem_len']} remembered", ylabel="ms per token, 2 CPU cores")
    axes.set(xscale="log", yscale="log", ylim=(0.2, 100), yticks=[1, 10, 100], yticklabels=["1", "10", "100"])
    axes.legend(fontsize=8, loc="lower left")
    save(figure, "flat.png")


def save(figure, name):
    figure.tight_layout()
    figure.savefig(RESULTS / name, dpi=130)
    print(RESULTS / name)


def main():
    try:
        import matplotlib
    except ImportError:
        sys.exit("bench.plot: matplotlib is missing: pip install matplotlib")
    if sys.argv[1:]:
        try:
            figures.runs(sys.argv[1:], "runs.png")
        except (OSError, KeyError, json.JSONDecodeError) as e:
            sys.exit(f"bench.plot: no log of a run ({e}): give run folders")
        return print("runs.png")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    quality(plt)
    memory(plt)
    lengths(plt)
    flat(plt)


if __name__ == "__main__":
    main()
