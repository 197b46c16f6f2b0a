"""Memory of a training step by XLA's own figures, from shapes alone; what it costs in time. 25 minutes on 2 cores.

plan: what train.py --plan prints for enwik8 base (12 layers, 22 rows). slopes: the thriftiest step against layers,
segment and memory length. time: thriftiest and fastest options in turn. resident: growth of this process beside the
plan's figure. sharding, sharding_time: the same over 4 devices (made of this machine's cores). recipes: the training
commands of tools/recipes/*.sh, as asked and at their thriftiest. --draw: results/{memory,lengths}.png.
"""

import re
import shlex
import statistics
import threading
from dataclasses import replace

import jax

import train
import txl
from data import flags
from tools import plan
from tools.bench import harness
from tools.bench.harness import compile_step, make_stepper, total_mib

BASE = txl.Config(n_token=205, n_layer=12, n_head=8, d_model=512, d_head=64, d_inner=2048, mem_len=512)
RUN = train.TrainConfig(batch=22, tgt_len=512, optimizer="adam")
SMALL = replace(BASE, n_layer=1, n_head=2, d_model=16, d_head=4, d_inner=16, mem_len=8)
THRIFTY = plan.MIN_MEMORY | dict(loss_chunk=512)  # the tokens of a row
DEVICES = 4
SHARDED = [dict(shard=kind) for kind in ("none", "opt", "params")]
GROUPS = [dict(shard=kind, shard_group=2) for kind in ("opt", "params")]
RECIPES = harness.ROOT / "tools" / "recipes"
N_TOKEN = {"enwik8": 256, "text8": 27, "wikitext-103": 267_735, "ptb": 10_000}  # as data.prepare makes them
MORE = {  # recipes with a change: little but the vocabulary; the rows of one of 8 devices
    "vocabulary": ("wikitext-103-base", dict(batch=4, tgt_len=64, mem_len=64, dropout=0.0)),
    "eighth": ("wikitext-103-large", dict(batch=16)),
}


def plan_line(cfg, run):
    """The plan's line of a setting on one device."""
    return plan.plan_entry(cfg, run, train.measure_memory(train.make_layout(cfg, run, 1)))


def planned(cfg, run, tiny):
    """Yields the plan's lines, the setting that is asked for first."""
    for c, r in plan.candidates(cfg, run, run.batch)[: 2 if tiny else None]:
        yield plan_line(c, r)


def slopes(cfg, run, tiny):
    """Yields how the thriftiest step grows with layers, and with the lengths of segment and memory together."""
    for n in (1, 2) if tiny else (2, 6, 12, 24):
        sized = replace(cfg, n_layer=n, **THRIFTY)
        yield {"what": "layers", "n_layer": n, "total_mib": total_mib(compile_step(sized, run))}
    for n in (8, 16) if tiny else (256, 512, 1024, 2048):
        for name, options in (("thrifty", THRIFTY), ("dense", dict(remat="none", attention="dense"))):
            compiled = compile_step(replace(cfg, mem_len=n, **options), replace(run, tgt_len=n))
            yield {"what": name, "tgt_len": n, "mem_len": n, "total_mib": total_mib(compiled)}


def compare_times(settings, n_devices, blocks):
    """Seconds per step of training steps {name: (cfg, run)} taken in turn."""
    steppers = {name: (make_stepper(compile_step(*s, n_devices), *s, n_devices), 1) for name, s in settings.items()}
    return harness.alternate(steppers, blocks)[0]


def time_of_thrift(cfg, run, tiny, blocks=7):
    """Yields the time of the thriftiest options over that of the fastest: 3 layers, 2 rows, else enwik8 base."""
    cfg, run = replace(cfg, n_layer=3), replace(run, batch=2)
    fast = {"auto": {}, "dense": dict(remat="none", attention="dense")}
    settings = {name: (replace(cfg, **more), run) for name, more in {**fast, "thrifty": THRIFTY}.items()}
    seconds = compare_times(settings, 1, blocks)
    medians = {f"{name}_ms": 1e3 * statistics.median(s) for name, s in seconds.items()}
    best = min(fast, key=lambda name: medians[f"{name}_ms"])
    yield {**medians, "fastest": best, "ratio": harness.speedup(seconds, best, "thrifty")[1], "blocks": blocks}


def resident(cfg, run, tiny):
    """Yields the largest growth of resident memory over three steps, compiled before, and the plan's total."""
    cfg, run = replace(cfg, n_layer=2 if tiny else 6, **THRIFTY), replace(run, batch=2 if tiny else 16)
    compiled = compile_step(cfg, run)
    steps = make_stepper(compiled, cfg, run)
    before = harness.settle_level(harness.state_mib(cfg, run))["level_mib"]
    seen = []
    done = threading.Event()

    def watch():
        while not done.wait(0.02):
            seen.append(harness.status_mib("VmRSS"))

    thread = threading.Thread(target=watch)
    thread.start()
    steps(3)
    done.set()
    thread.join()
    grown, promised = max(seen) - before, total_mib(compiled)
    yield {"plan_mib": promised, "grown_mib": grown, "ratio": grown / promised}


def sharding(cfg, run, tiny):
    """Yields MiB that each of 4 devices holds of the state, and that a step needs."""
    cfg, run = replace(cfg, **THRIFTY | dict(loss_chunk=1024)), replace(run, batch=24)
    for options in SHARDED + [{**kind, "optimizer": "muon"} for kind in SHARDED] + GROUPS:
        sharded = replace(run, **options)
        layout = train.make_layout(cfg, sharded, DEVICES)
        kinds = train.memory_plan(cfg, sharded, layout, train.compile_train_step(cfg, sharded, layout))
        found = {name: kinds[name] for name in ("parameters_mib", "optimizer_mib", "total_mib")}
        yield {"optimizer": sharded.optimizer, **options, **found}
    yield {"optimizer": "adam", "devices": 1, "total_mib": total_mib(compile_step(cfg, run))}


def sharding_time(cfg, run, tiny, blocks=7):
    """Yields the time of the default model's step by optimizer and sharding, over that without sharding."""
    cfg = replace(SMALL, n_token=256) if tiny else txl.Config()
    for optimizer in ("muon", "adam"):
        settings = {kind["shard"]: (cfg, train.TrainConfig(optimizer=optimizer, **kind)) for kind in SHARDED}
        seconds = compare_times(settings, DEVICES, blocks)
        for kind, found in seconds.items():
            ratio = harness.speedup(seconds, "none", kind)[1]
            yield {"optimizer": optimizer, "shard": kind, "step_ms": 1e3 * statistics.median(found), "ratio": ratio}


def read_recipes(folder):
    """{recipe: flags of its training command} of the .sh files in a folder."""
    recipes = {}
    for path in sorted(folder.glob("*.sh")):
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        words = next(shlex.split(command) for command in re.findall(r"^python train\.py (.*)$", text, re.M))
        recipes[path.stem] = flags.parse(words, "train.py", "", (txl.Config, train.TrainConfig), ())
    return recipes


def plan_recipes(cfg, run, tiny):
    """Yields the plan's lines of each recipe on one device."""
    recipes = read_recipes(RECIPES)
    recipes |= {name: recipes[base] | more for name, (base, more) in MORE.items()}
    thrifty = plan.MIN_MEMORY | dict(loss_chunk=64)  # logits of 267,735 ids are large
    for name, given in list(recipes.items())[: 1 if tiny else None]:
        cfg = txl.Config(n_token=N_TOKEN[given["data"]], **train.pick(txl.Config, given))
        run = train.TrainConfig(**train.pick(train.TrainConfig, given))
        for asked, c in ((True, cfg), (False, replace(cfg, **thrifty))):
            about = {"recipe": name, "flags": given, "n_params": txl.count_params(cfg), "asked": asked}
            yield {**about, **plan_line(c, run)}


def draw_plan():
    """Bytes of one training step by kind, for settings that give the same result."""
    lines = harness.read_results("plan_enwik8_base")
    labels = []
    for s in (line["setting"] for line in lines):
        parts = f", {s['batch_chunk']} parts" if s["batch_chunk"] > 1 else ""
        dtype = f", {s['dtype']}" if s["dtype"] != "float32" else ""
        labels.append(f"remat {s['remat']}, {s['attention']}{parts}{dtype}")
    figure = harness.new_figure(8, 0.35 * len(lines) + 1.6)
    axes = figure.add_subplot()
    left = [0.0] * len(lines)
    for kind in ("parameters", "gradients", "optimizer", "memories", "workspace"):
        sizes = [line[f"{kind}_mib"] / 1024 for line in lines]
        axes.barh(labels, sizes, left=left, label=kind)
        left = [a + b for a, b in zip(left, sizes)]
    for label, total in zip(labels, left):
        axes.text(total, label, f" {total:.1f}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="GiB of one training step, XLA's own figure (enwik8 base, batch 22)", xlim=(0, 1.1 * max(left)))
    axes.legend(fontsize=8)
    harness.save_picture(figure, "memory.png")


def draw_lengths():
    """The step's total against the length of segment and memory, thriftiest options beside dense ones."""
    figure = harness.new_figure(6, 3.6)
    axes = figure.add_subplot(xlabel="tokens of a segment, and remembered", ylabel="GiB of one training step")
    for name, label in (("dense", "dense attention, nothing rebuilt"), ("thrifty", "remat full, chunked")):
        lines = harness.read_results("memory", what=name)
        lengths, gib = [line["tgt_len"] for line in lines], [line["total_mib"] / 1024 for line in lines]
        axes.plot(lengths, gib, "o-", label=label)
        for x, y in zip(lengths, gib):
            axes.annotate(f"{y:.{int(y < 10)}f}", (x, y), (0, 6), textcoords="offset points", ha="center")
    axes.set(xscale="log", yscale="log", ylim=(0.7, 300), yticks=[1, 10, 100], yticklabels=["1", "10", "100"])
    axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
    axes.minorticks_off()
    axes.legend(loc="upper left")
    harness.save_picture(figure, "lengths.png")


PARTS = {"plan": planned, "slopes": slopes, "time": time_of_thrift, "resident": resident}
PARTS |= {"sharding": sharding, "sharding_time": sharding_time, "recipes": plan_recipes}


def main(argv=None):
    parser = harness.make_parser("memory", __doc__, PARTS)
    parser.add_argument("--draw", action="store_true", help="draw the committed results")
    args = parser.parse_args(argv)
    if args.draw:
        draw_plan()
        draw_lengths()
    if any(part.startswith("sharding") for part in args.parts):
        jax.config.update("jax_num_cpu_devices", DEVICES)
    cfg, run = (SMALL, replace(RUN, batch=2, tgt_len=8)) if args.tiny else (BASE, RUN)
    for part in args.parts:
        for line in PARTS[part](cfg, run, args.tiny):
            harness.emit({"what": part, **line})


if __name__ == "__main__":
    main()
