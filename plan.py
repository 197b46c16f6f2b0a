"""How much memory a training step needs, known from shapes alone before anything is allocated.

Settings that change no result beyond rounding are compiled one after the other, from cheap in arithmetic to thrifty,
and XLA's own figures for each are told: temporaries + arguments + outputs - what is updated in place.
"""

import json
import math
import os
import re
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp

import evaluation
import step
from layer import attention_block

MIB = 2**20
THRIFTY = dict(remat="full", attention="chunked", layer_rows=1)  # the least memory, but for loss_chunk
KNOBS = ("remat", "attention", "layer_rows", "loss_chunk", "dtype")  # the config's part of a setting


def candidates(cfg, run, rows):
    """[(cfg, run)]: what the flags ask for, then at most 11 more, from cheap to thrifty; rows: those of a device."""
    chunk = cfg.loss_chunk or 1024
    fast, lean = ("pallas", "pallas") if cfg.attention == "pallas" else ("dense", "chunked")
    thrifty = THRIFTY | dict(attention=lean, loss_chunk=chunk)
    steps = [dict(remat="none", attention=fast), dict(remat="none", attention=lean, loss_chunk=chunk)]
    steps += [dict(remat="dots", attention=lean, loss_chunk=chunk)]
    if jax.default_backend() != "cpu":  # there few rows are taken at a time anyway
        steps += [dict(thrifty, layer_rows=cfg.layer_rows)]
    parts = [p for p in range(2, rows + 1) if rows % p == 0]
    parts = sorted({parts[0], parts[len(parts) // 2], parts[-1]}) if parts else []
    settings = [(replace(cfg, **step), run) for step in [*steps, thrifty]]
    settings += [(replace(cfg, **thrifty), replace(run, batch_chunk=p)) for p in parts]
    if cfg.dtype == "float32":
        half = replace(cfg, dtype="bfloat16", **thrifty)
        settings += [(half, run)] + [(half, replace(run, batch_chunk=p)) for p in parts[-1:]]
    found = dict.fromkeys([(cfg, run), *settings])
    return list(found)[:12]


def products(cfg, T):
    """Multiply-adds of matrix products for one row going forward: a layer's scores, projections, rest; the loss."""
    S, H, D, K, F = cfg.mem_len + T, cfg.n_head, cfg.d_model, cfg.d_head, cfg.d_inner
    return 3 * H * T * S * K, 2 * T * D * H * K + 2 * S * D * H * K, 2 * T * D * F, T * D * cfg.n_token


def recompute(cfg, run):
    """Arithmetic of a step as a multiple of that without any recomputation: matrix products only, counted by shapes."""
    (scores, project, feed, loss), block = products(cfg, run.tgt_len), attention_block(cfg, run.tgt_len)
    once = cfg.n_layer * (scores + project + feed) + loss
    remat = "dots" if (cfg.remat, run.shard) == ("none", "params") and block is not None else cfg.remat  # see forward
    again = {"none": 0, "dots": scores, "full": scores + project + feed}[remat]
    if block is not None and remat == "none":
        again = scores + project
    if block is not None and block < run.tgt_len:
        again += scores
    if cfg.attention == "pallas":
        again += 4 * scores  # its gradients: 18 products of T x S x K where 6 would do
    return 1 + (cfg.n_layer * again + (loss if 0 < cfg.loss_chunk else 0)) / (3 * once)


def nbytes(tree):
    """Bytes of a pytree of arrays or shapes."""
    return sum(math.prod(a.shape) * jnp.dtype(a.dtype).itemsize for a in jax.tree.leaves(tree))


def device_stats():
    """What the first device tells of its memory; {} where the backend tells nothing."""
    try:
        return jax.local_devices()[0].memory_stats() or {}
    except (RuntimeError, NotImplementedError):  # some backends raise instead of giving None
        return {}


def memory_mib():
    """(MiB, whose): the devices' peak where the backend tells, else this process's peak resident memory, else None."""
    if peak := device_stats().get("peak_bytes_in_use"):
        return peak / MIB, "device peak"
    try:
        import resource
    except ImportError:
        return None, "unknown"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (MIB if sys.platform == "darwin" else 2**10), "process peak"


def largest_arrays():
    """The five largest arrays on the devices, as text."""
    arrays = sorted(jax.live_arrays(), key=lambda a: -a.nbytes)[:5]
    return ", ".join(f"{a.dtype}{list(a.shape)} {a.nbytes / MIB:,.0f} MiB" for a in arrays) or "none"


def ran_out(error):
    """Whether a JaxRuntimeError says that memory ran out."""
    return "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error)


def total(compiled):
    """XLA's own figure for a compiled program in bytes, or None where the backend tells nothing."""
    m = compiled.memory_analysis()
    if m is None:
        return None
    return m.temp_size_in_bytes + m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes


def entry(cfg, run, n_devices, compiled, compiled_eval=None):
    """One line of the plan: MiB on each device by kind, None where the backend tells nothing."""
    state = step.state_shapes(cfg, run, n_devices)
    # With --shard opt gradients are whole until their sum over devices is taken.
    kinds = {"parameters": nbytes(state.params), "gradients": nbytes(state.params), "optimizer": nbytes(state.opt)}
    kinds["memories"] = nbytes(state.mems)
    whole = total(compiled)
    kinds["workspace"] = None if whole is None else max(whole - sum(kinds.values()), 0)
    kinds["total"] = whole
    if compiled_eval is not None:
        whole = total(compiled_eval)
        rest = ("optimizer", "memories") + ("parameters",) * (run.shard == "params")  # whole ones beside their shards
        kinds["evaluation"] = None if whole is None else whole + sum(kinds[name] for name in rest)
    setting = {name: getattr(cfg, name) for name in KNOBS} | {"batch_chunk": run.batch_chunk}
    sizes = {f"{name}_mib": None if n is None else round(n / MIB, 2) for name, n in kinds.items()}
    return {"setting": setting, **sizes, "recompute": round(recompute(cfg, run), 2)}


def measure(cfg, run, n_devices):
    """The plan's line for one setting: its step and its evaluation compiled from shapes."""
    compiled = step.compile_step(cfg, run, n_devices)
    shapes = evaluation.eval_shapes(cfg, run, n_devices)
    return entry(cfg, run, n_devices, compiled, step.compile_shapes(evaluation.make_eval(cfg), *shapes))


def choose(cfg, run, n_devices, budget):
    """(cfg, run, line) of the first setting, from cheap to thrifty, whose need is within `budget` bytes.

    ValueError with the smallest need where none is.
    """
    lines = []
    cheap = lambda setting: (setting[0].dtype != cfg.dtype, recompute(*setting))
    for c, r in sorted(candidates(cfg, run, run.batch // n_devices), key=cheap):
        lines.append(measure(c, r, n_devices))
        need = need_mib(lines[-1])
        if need is None:
            raise ValueError(f"memory_budget={run.memory_budget}: this backend tells no memory figures: leave it out")
        if need * MIB <= budget:
            return c, r, lines[-1]
    least = min(lines, key=need_mib)
    words, need = " ".join(f"--{k} {v}" for k, v in least["setting"].items()), need_mib(least)
    shown = f"{math.ceil(need):,}" if need > 99 else f"{need:g}"  # never less than what is needed
    found = f"memory_budget={run.memory_budget} is too little: {shown} MiB is the least, with {words}"
    flags = "--eval_batch, --batch" if (least["evaluation_mib"] or 0) > least["total_mib"] else "--batch"
    raise ValueError(f"{found}; lower {flags}, --tgt_len or the model, or use more devices")


def need_mib(entry):
    """What a run of this setting needs: its step or its evaluation, whichever is more; None where unknown."""
    known = [entry[name] for name in ("total_mib", "evaluation_mib") if entry.get(name) is not None]
    return max(known) if known else None


def table(entries, mark="what the flags ask for"):
    """The plan as text, its first setting marked; mark: what that one is."""
    kinds = ("parameters", "gradients", "optimizer", "memories", "workspace", "total", "evaluation")
    show = lambda x: "unknown" if x is None else f"{x:,.0f}"
    lines = [f"{'MiB on each device':<86}" + " ".join(f"{kind:>11}" for kind in kinds) + "   arithmetic"]
    for i, e in enumerate(entries):
        words = ("  " if i else "* ") + " ".join(f"{k}={v}" for k, v in e["setting"].items())
        cells = " ".join(f"{show(e[f'{kind}_mib']):>11}" for kind in kinds)
        lines.append(f"{words:<86}{cells}   x {e['recompute']:.2f}")
    return "\n".join([*lines, f"* {mark}"])


def show(cfg, run, n_devices):
    """Prints the plan: as JSON lines, or as a table when all is known."""
    lines = []
    for c, r in candidates(cfg, run, run.batch // n_devices):
        lines.append(measure(c, r, n_devices))
        if run.json:
            print(json.dumps(lines[-1] | {"asked": len(lines) == 1}), flush=True)
    if not run.json:
        print(table(lines))


def budget(text):
    """(amount, unit) of 6GiB, 500MiB, 6GB or 80%. ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *(%|[KMG]i?B)", text)
    if not match or not float(match[1]) or (match[2] == "%" and float(match[1]) > 100):
        raise ValueError(f"memory_budget={text!r} is no amount: give one such as 6GiB, 500MiB or 80%")
    return float(match[1]), match[2]


def budget_bytes(text):
    """Bytes of a memory budget; percent are of the device's memory, on a CPU of the machine's."""
    amount, unit = budget(text)
    if unit != "%":
        return amount * {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 1e3, "MB": 1e6, "GB": 1e9}[unit]
    limit = device_stats().get("bytes_limit")
    if limit is None and jax.default_backend() == "cpu":
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if limit is None:
        raise ValueError(f"memory_budget={text!r}: the device does not tell its size: give an amount such as 6GiB")
    return amount / 100 * limit
