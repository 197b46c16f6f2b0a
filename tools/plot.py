"""Pictures of runs (needs matplotlib): training curves, loss against memory length, how far back attention looks.

python -m tools.plot RUN RUN ...    # losses, learning rate and speed of runs in one picture; seconds
python -m tools.plot --looks RUN    # attended distance of each layer and head; a minute on 2 cores
"""

if __name__ == "__main__":
    from data import flags

    flags.exit_on_interrupt()  # while modules load

import argparse
import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import txl
from data import checkpoint, flags, prepare

MISSING = "no picture: pip install matplotlib"


def new_figure(*size):
    """A matplotlib figure that needs no display, or None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    return Figure(figsize=size, layout="constrained")


# curves of runs


def unit(entry):
    """(which entry of a log line is its loss, its unit for people): bits per byte, or of ids nats per token."""
    return ("bpb", "bits per byte") if entry.get("bpb") is not None else ("loss_nats", "nats per token")


def read_log(path):
    """Yields the entries of a log that have a loss; a process that was killed may have left other things there."""

    def is_number(x):
        return type(x) in (int, float) and abs(x) < 1e30  # not NaN

    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and is_number(entry.get("step")) and is_number(entry.get(unit(entry)[0])):
            if all(entry.get(k) is None or is_number(entry[k]) for k in ("lr", "tok_per_s", "targets")):
                yield entry


def read_history(folder):
    """(entries of steps, entries of evaluations) of a run folder's log; of what was computed twice the last."""
    entries = list(read_log(Path(folder) / "log.jsonl"))
    steps = {e["step"]: e for e in entries if e.keys() >= {"lr", "tok_per_s"}}
    evals = {(e["step"], str(e["split"]), e.get("targets")): e for e in entries if "split" in e}
    return sorted(steps.values(), key=lambda e: e["step"]), sorted(evals.values(), key=lambda e: e["step"])


def plot_runs(folders, path):
    """Losses, learning rate and speed of runs over their steps, as a picture at `path`; returns what to say of it."""
    figure = new_figure(7, 7)
    if figure is None:
        return MISSING
    loss, rate, speed = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1, 1))
    units, value = set(), lambda entry: entry[unit(entry)[0]]
    for i, folder in enumerate(folders):
        steps, evals = read_history(folder)
        name = f"{Path(folder).name} " if len(folders) > 1 else ""
        colour = f"C{i}"
        loss.plot([e["step"] for e in steps], [value(e) for e in steps], color=colour, alpha=0.35, label=f"{name}train")
        valid = [e for e in evals if e["split"] == "valid"]
        loss.plot([e["step"] for e in valid], [value(e) for e in valid], "o-", color=colour, label=f"{name}valid")
        rate.plot([e["step"] for e in steps], [e["lr"] for e in steps], color=colour)
        timed = [e for e in steps if e["tok_per_s"]]
        speed.plot([e["step"] for e in timed], [e["tok_per_s"] for e in timed], color=colour)
        units |= {unit(e)[1] for e in [*steps, *evals]}
    loss.set(ylabel=f"loss, {' and '.join(sorted(units))}")
    loss.legend()
    rate.set(ylabel="learning rate")
    speed.set(ylabel="tokens per second", xlabel="step")
    speed.set_ylim(0, 1.1 * speed.get_ylim()[1])
    figure.savefig(path, dpi=130)
    return f"drawn in {path}"


def mem_len_bars(entries):
    """Loss against memory length, from log entries, as bars of text."""
    key, words = unit(entries[0])
    most = max(entry[key] for entry in entries)
    lines = [f" mem_len {words}"]
    for entry in entries:
        bar = "#" * round(50 * entry[key] / most)  # from zero on, so that lengths compare as losses do
        lines.append(f"{entry['mem_len']:>8} {entry[key]:.4f} {bar}")
    return "\n".join(lines)


def plot_mem_lens(entries, path):
    """Loss against memory length, from log entries, as a picture at `path`; returns what to say of it."""
    figure = new_figure(6, 3.6)
    if figure is None:
        return MISSING
    key, words = unit(entries[0])
    axes = figure.add_subplot(xlabel="tokens remembered", ylabel=f"{entries[0]['split']} loss, {words}")
    axes.plot(*zip(*sorted((e["mem_len"], e[key]) for e in entries)), "o-")
    figure.savefig(path, dpi=130)
    return f"drawn in {path}"


# how far back attention looks


@partial(jax.jit, static_argnames="cfg")
def attended(params, ids, mems, cfg):
    """([L, H] mean attended distance in tokens, [L, H] share of attention on memory) of a segment, new memory.

    Attention's values are replaced by each key's place and by whether it is in memory: its output is their mean.
    """
    T, M = ids.shape[1], cfg.mem_len
    found = []
    kv_start, _ = txl.attention_starts(ids, mems.fill, cfg)
    _, new = txl.forward(params, ids, mems, cfg)
    x = txl.embed(params, ids, cfg)
    positions = txl.sinusoidal_embedding(jnp.arange(M + T - 1, -1, -1), cfg)
    place = jnp.stack([jnp.arange(M + T), jnp.arange(M + T) < M], 1).astype(x.dtype)  # [S, 2]
    weights = txl.layer_params(params, cfg)
    for i in range(cfg.n_layer):
        p = jax.tree.map(lambda a: a[i], weights)
        mem = jnp.where((jnp.arange(M) >= M - mems.fill[:, None])[..., None], mems.h[i], 0)
        cat = jnp.concatenate([mem, x], 1)
        cat = txl.layer_norm(cat, p["ln1_scale"], p["ln1_bias"]) if cfg.pre_norm else cat
        q_u, q_v = txl.project_q(p, cat[:, M:], cfg)
        k, _ = txl.project_kv(p, cat, cfg)
        r = jnp.einsum("xd,dhk->hxk", positions, p["w_r"])
        values = jnp.broadcast_to(place, (*k.shape[:2], *place.shape))
        mean = txl.attention(q_u, q_v, k, values, r, kv_start, block=None)  # [B, H, T, 2]
        found.append(((jnp.arange(T) + M - mean[..., 0]).mean((0, 2)), mean[..., 1].mean((0, 2))))
        x = txl.attention_sublayer(p, x, mem, kv_start, positions, cfg)
        x = txl.feed_forward(p, x, cfg)
    distance, share = (jnp.stack(part) for part in zip(*found))
    return distance, share, new


def mean_attended(cfg, params, tokens, T, segments=64, rows=4):
    """Means of `attended` over segments [rows, T] of a text, after those that fill memory. ValueError: too short."""
    length = len(tokens) // rows
    first = -(-cfg.mem_len // T)
    found = []
    if length // T <= first:
        raise ValueError(f"the valid split has {len(tokens)} tokens, too few to fill mem_len={cfg.mem_len}")
    text = np.asarray(tokens[: rows * length], np.int32).reshape(rows, length)
    mems = txl.init_mems(cfg, rows)
    for i in range(min(first + segments, length // T)):
        distance, share, mems = attended(params, text[:, i * T : (i + 1) * T], mems, cfg)
        found.append((np.asarray(distance), np.asarray(share)))
    return [np.mean(part, 0) for part in zip(*found[first:])]


def plot_looks(distance, share, path):
    """Two maps of [L, H], layers by heads, as a picture at `path`; returns what to say of it."""
    figure = new_figure(7, 0.5 * len(distance) + 1.6)
    if figure is None:
        return MISSING
    shown = (("mean attended distance, tokens", distance, "{:.0f}"), ("share of attention on memory", share, "{:.2f}"))
    for axes, (title, values, form) in zip(figure.subplots(1, 2), shown):
        picture = axes.imshow(values, aspect="auto", cmap="viridis", vmin=0)
        axes.set(title=title, xlabel="head", ylabel="layer", xticks=range(values.shape[1]), yticks=range(len(values)))
        for (y, x), value in np.ndenumerate(values):
            light = value > 0.6 * values.max()
            axes.text(x, y, form.format(value), ha="center", va="center", color="black" if light else "white")
        figure.colorbar(picture, ax=axes)
    figure.savefig(path, dpi=130)
    return f"drawn in {path}"


def looks(run, data, path):
    """Prints a JSON line for each layer of a run's model, reading the valid split of its own data or of `data`."""
    model = checkpoint.load(run)
    saved, cfg = model.run["flags"], model.cfg
    corpus = prepare.load(data or saved.get("data") or None, vocab=model.vocab)
    flags.print_status(f"reading the valid split of {corpus.source}")
    distance, share = mean_attended(cfg, model.params, corpus.valid, saved["tgt_len"])
    if not np.isfinite([distance, share]).all():
        raise ValueError(f"{run}: attention is not finite: the weights are broken, use another checkpoint")
    for i, (d, s) in enumerate(zip(distance, share)):
        entry = {
            "layer": i,
            "mean_distance_tokens": [round(float(x), 1) for x in d],
            "share_on_memory": [round(float(x), 3) for x in s],
            "mem_len": cfg.mem_len,
            "step": model.run["step"],
        }
        flags.print_result(json.dumps(entry))
    return plot_looks(distance, share, path)


def main(argv=None):
    parser = argparse.ArgumentParser("python -m tools.plot", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run folders to compare")
    parser.add_argument("--looks", metavar="RUN", help="a run folder or checkpoint, whose attention is measured")
    parser.add_argument("--data", default="", help="with --looks: a text to read (default: the run's own)")
    parser.add_argument("--out", help="picture to write (default: runs.png or looks.png)")
    args = parser.parse_args(argv)
    if bool(args.runs) == bool(args.looks):
        parser.error("give run folders to compare, or --looks RUN")
    path = args.out or ("looks.png" if args.looks else "runs.png")
    if new_figure(1, 1) is None:
        flags.fail("tools.plot", "matplotlib is missing: pip install matplotlib")
    try:
        words = looks(args.looks, args.data, path) if args.looks else plot_runs(args.runs, path)
    except OSError as e:
        flags.fail("tools.plot", f"{e.filename}: {e.strerror}: give the folder of a run")
    except ValueError as e:
        flags.fail("tools.plot", e)
    flags.print_status(words)


if __name__ == "__main__":
    flags.run_script(main)
