"""How much memory a training step needs, known from shapes alone before anything is allocated.

Settings that change no result beyond rounding are compiled one after the other, from cheap in arithmetic to thrifty,
and XLA's own figures for each are shown: temporaries + arguments + outputs - what is updated in place. `measure` is
train.py's: measure(cfg, run) -> {kind_mib: MiB on each device} of a setting. `rows` are those of a device.
"""

import json
import math
import os
import re
from dataclasses import replace

import jax

from data import flags
from txl import attention_block, keeps_projections

MIB = 2**20
MIN_MEMORY = dict(remat="full", attention="chunked", layer_rows=1)  # the least memory, but for loss_chunk
KNOBS = ("remat", "attention", "layer_rows", "loss_chunk", "dtype")  # the config's part of a setting


def candidates(cfg, run, rows):
    """[(cfg, run)]: what the flags ask for, then at most 11 more, from cheap to thrifty."""
    chunk = cfg.loss_chunk or 1024
    fast, lean = ("pallas", "pallas") if cfg.attention == "pallas" else ("dense", "chunked")
    thrifty = {**MIN_MEMORY, "attention": lean, "loss_chunk": chunk}
    steps = [
        dict(remat="none", attention=fast),
        dict(remat="none", attention=lean, loss_chunk=chunk),
        dict(remat="dots", attention=lean, loss_chunk=chunk),
    ]
    if jax.default_backend() != "cpu":  # there few rows are taken at a time anyway
        steps.append({**thrifty, "layer_rows": cfg.layer_rows})
    parts = [p for p in range(2, rows + 1) if rows % p == 0]
    parts = sorted({parts[0], parts[len(parts) // 2], parts[-1]}) if parts else []
    settings = [(replace(cfg, **step), run) for step in [*steps, thrifty]]
    settings += [(replace(cfg, **thrifty), replace(run, batch_chunk=p)) for p in parts]
    if cfg.dtype == "float32":
        half = replace(cfg, dtype="bfloat16", **thrifty)
        settings += [(half, run)] + [(half, replace(run, batch_chunk=p)) for p in parts[-1:]]
    found = dict.fromkeys([(cfg, run), *settings])
    return list(found)[:12]


def forward_products(cfg, T):
    """Multiply-adds of matrix products for one row going forward: a layer's scores, projections, rest; the loss."""
    S, H, D, K, F = cfg.mem_len + T, cfg.n_head, cfg.d_model, cfg.d_head, cfg.d_inner
    return 3 * H * T * S * K, 2 * T * D * H * K + 2 * S * D * H * K, 2 * T * D * F, T * D * cfg.n_token


def recompute(cfg, run):
    """Arithmetic of a step as a multiple of that without any recomputation: matrix products only, counted by shapes."""
    scores, projections, feed_forward, loss = forward_products(cfg, run.tgt_len)
    block, layer = attention_block(cfg, run.tgt_len), scores + projections + feed_forward
    once = cfg.n_layer * layer + loss
    make_scores = 2 * scores // 3  # of a layer's three products of T x S x K
    chunked = 0 if block is None else make_scores + (0 if keeps_projections(cfg, run.tgt_len) else projections)
    if cfg.remat == "full":
        again = layer + (0 if keeps_projections(cfg, run.tgt_len) else make_scores)
    elif cfg.remat == "dots" and block is None and cfg.attention != "pallas":
        again = scores
    else:
        again = chunked
    if cfg.attention == "pallas":
        again += 4 * scores  # its gradients: 18 products of T x S x K where 6 would do
    return 1 + (cfg.n_layer * again + (loss if cfg.loss_chunk else 0)) / (3 * once)


def plan_entry(cfg, run, measure):
    """One line of the plan: the setting, MiB by kind, arithmetic."""
    setting = {**{name: getattr(cfg, name) for name in KNOBS}, "batch_chunk": run.batch_chunk}
    return {"setting": setting, **measure(cfg, run), "recompute": round(recompute(cfg, run), 2)}


def show(cfg, run, rows, measure):
    """Prints the plan: as JSON lines, or as a table when all is known."""
    entries = []
    for c, r in candidates(cfg, run, rows):
        entries.append(plan_entry(c, r, measure))
        if run.json:
            flags.print_result(json.dumps({**entries[-1], "asked": len(entries) == 1}))
    if not run.json:
        flags.print_result(table(entries))


def table(entries, mark="what the flags ask for"):
    """The plan as text, its first setting marked; mark: what that one is."""
    kinds = ("parameters", "gradients", "optimizer", "memories", "workspace", "total", "evaluation")
    lines = [f"{'MiB on each device':<86}" + " ".join(f"{kind:>11}" for kind in kinds) + "   arithmetic"]
    for i, entry in enumerate(entries):
        words = ("  " if i else "* ") + " ".join(f"{k}={v}" for k, v in entry["setting"].items())
        mib = [entry[f"{kind}_mib"] for kind in kinds]
        cells = " ".join(f"{'unknown' if x is None else f'{x:,.0f}':>11}" for x in mib)
        lines.append(f"{words:<86}{cells}   x {entry['recompute']:.2f}")
    return "\n".join([*lines, f"* {mark}"])


def show_out_of_memory(cfg, run, rows, measure):
    """Prints the largest arrays on the devices (to standard error) and the plan."""
    arrays = sorted(jax.live_arrays(), key=lambda a: -a.nbytes)[:5]
    largest = ", ".join(f"{a.dtype}{list(a.shape)} {a.nbytes / MIB:,.0f} MiB" for a in arrays)
    flags.print_status(f"largest arrays: {largest or 'none'}")
    show(cfg, replace(run, json=False), rows, measure)


# --memory_budget


def parse_budget(text):
    """(amount, unit) of 6GiB, 500MiB, 6GB or 80%. ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *(%|[KMG]i?B)", text)
    if not match or not float(match[1]) or (match[2] == "%" and float(match[1]) > 100):
        raise ValueError(f"memory_budget={text!r} is no amount: give one such as 6GiB, 500MiB or 80%")
    return float(match[1]), match[2]


def budget_bytes(text):
    """Bytes of a memory budget; percent are of the device's memory, on a CPU of the machine's."""
    amount, unit = parse_budget(text)
    if unit != "%":
        return amount * {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 1e3, "MB": 1e6, "GB": 1e9}[unit]
    if jax.default_backend() == "cpu":
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit is None:
        raise ValueError(f"memory_budget={text!r}: the device does not tell its size: give an amount such as 6GiB")
    return amount / 100 * limit


def need_mib(entry):
    """What a run of this setting needs: its step or its evaluation, whichever is more; None where unknown."""
    known = [entry[name] for name in ("total_mib", "evaluation_mib") if entry.get(name) is not None]
    return max(known) if known else None


def fit_budget(cfg, run, rows, measure):
    """(cfg, run, text) of what the flags ask for if it fits --memory_budget, else of the cheapest setting that does.

    ValueError with the smallest need where none does.
    """
    budget, entries = budget_bytes(run.memory_budget), []

    def cost(setting):
        return setting[0].dtype != cfg.dtype, recompute(*setting)

    asked, *others = candidates(cfg, run, rows)
    for c, r in [asked, *sorted(others, key=cost)]:
        entries.append(plan_entry(c, r, measure))
        need = need_mib(entries[-1])
        if need is None:
            raise ValueError(f"memory_budget={run.memory_budget}: this backend tells no memory figures: leave it out")
        if need * MIB <= budget:
            return c, r, f"memory_budget {run.memory_budget}:\n{table(entries[-1:], 'what is taken')}"
    least = min(entries, key=need_mib)
    words, need = " ".join(f"--{k} {v}" for k, v in least["setting"].items()), need_mib(least)
    shown = f"{math.ceil(need):,}" if need > 99 else f"{need:g}"  # never less than what is needed
    found = f"memory_budget={run.memory_budget} is too little: {shown} MiB is the least, with {words}"
    lower = "--eval_batch, --batch" if (least["evaluation_mib"] or 0) > least["total_mib"] else "--batch"
    raise ValueError(f"{found}; lower {lower}, --tgt_len, --mem_len or the model, or use more devices")
