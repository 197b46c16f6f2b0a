"""Where the time of a training step goes: a trace, a memory profile, and milliseconds by part of the model.

A trace names XLA's instructions, the compiled program says which `jax.named_scope` each instruction came from: joined,
they give the time of each part. Events are read from the .xplane.pb beside the Perfetto file: the same events, but all
of them, and with the numbers that join an operation's start to its end.
"""

import re
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

PARTS = ("attention", "feed_forward", "loss", "optimizer", "other")
CONTROL = ("while", "conditional", "call", "async-start", "async-done")  # these run other instructions, or wait


def prepare(folder):
    """Makes the folder; ValueError where it can't be written. Cheap: call it before anything is compiled."""
    folder = Path(folder)
    try:
        (folder / "plugins" / "profile").mkdir(parents=True, exist_ok=True)  # the place that jax writes to
        open(folder / "memory.prof", "ab").close()
    except OSError as e:
        found = f"{e.strerror}: {e.filename}" if e.filename else e
        raise ValueError(f"profile={folder} can't be written ({found}): give a new folder or one of yours") from None
    return folder


def part_of(op_name):
    """The innermost of our scopes in a path such as jit(step)/transpose(jvp(attention))/dot_general."""
    return (["other"] + re.findall(rf"\b({'|'.join(PARTS[:-1])})\b", op_name))[-1]


def parts_of(compiled_text):
    """{instruction: (whether it only runs others, part)} of a compiled program, and the program's name.

    A fusion without an op_name of its own takes that of the computation it calls: its root's, the last line there.
    """
    known, last, computation = {}, {}, None
    for line in compiled_text.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            computation = header[1]
        elif instruction := re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (.*)", line):
            name, rest = instruction.groups()
            op_name = re.search(r'op_name="([^"]*)"', rest)
            called = re.search(r"calls=%?([\w.-]+)", rest)  # callees are printed before callers
            op_name = op_name[1] if op_name else last.get(called[1], "") if called else ""
            last[computation] = op_name or last.get(computation, "")
            opcode = re.search(r" ([a-z][a-z-]*)\(", rest)
            known[name] = opcode is not None and opcode[1] in CONTROL, part_of(op_name)
    return known, re.match(r"HloModule ([\w.-]+)", compiled_text)[1]


def read_events(path, known, module):
    """[(start, end, (whether it only runs others, part))] in ns, of the operations in an .xplane.pb file."""
    planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:")]  # there, the host's only start these
    for chosen in (devices, planes):
        events, ends = [], {}
        for event in (event for plane in chosen for line in plane.lines for event in line.events):
            stats = dict(event.stats)
            op = stats.get("hlo_op", event.name)
            if op in known or "hlo_op" in stats:
                foreign = op not in known or stats.get("hlo_module", module) != module
                kind = (False, part_of(stats.get("tf_op") or stats.get("name") or "")) if foreign else known[op]
                events.append((event.start_ns, event.start_ns + event.duration_ns, stats.get("_p"), kind))
            elif event.name.startswith("end: "):  # on a CPU, of an operation that went on after its call returned
                ends[stats.get("_c")] = event.start_ns
        if events:
            break
    return [(start, max(end, ends.get(pair, end)), kind) for start, end, pair, kind in events]


def divide(events):
    """Counter of ns by part: each instant goes in even shares to the operations that run then, on all threads.

    So the sum is the time in which anything ran. Loops get only the instants in which nothing inside them runs.
    """
    edges = sorted([(start, 1, kind) for start, _, kind in events] + [(end, -1, kind) for _, end, kind in events])
    running, spent, last = Counter(), Counter(), 0
    for at, change, kind in edges:
        if at > last:
            now = {k: n for k, n in running.items() if n and not k[0]} or {k: n for k, n in running.items() if n}
            for (_, part), n in now.items():
                spent[part] += (at - last) * n / sum(now.values())
        running[kind] += change
        last = at
    return spent


def record(folder, compiled_text, run_steps):
    """Runs run_steps() under the profiler -> [(part, ms, share of the sum)] over all of its steps.

    Steps should be compiled and done before, and run_steps should block until its last is done: what runs is what is
    recorded. Writes plugins/profile/TIME/perfetto_trace.json.gz and memory.prof (pprof; taken after the steps).
    On a GPU, kernels of a CUDA graph may carry no scope and count as other: it helps to run with
    XLA_FLAGS=--xla_gpu_enable_command_buffer= (nothing after the sign).
    Raises ValueError where the folder can't be written or no operation was recorded.
    """
    folder, (known, module) = prepare(folder), parts_of(compiled_text)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # its frames would be most of the file
    with jax.profiler.trace(str(folder), create_perfetto_trace=True, profiler_options=options):
        run_steps()
    jax.profiler.save_device_memory_profile(str(folder / "memory.prof"))
    path = max((folder / "plugins" / "profile").glob("*/*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    spent = divide(read_events(path, known, module))
    total = sum(spent.values())
    if not total:
        raise ValueError(f"{path} holds no operation of {module}: run at least one step to its end")
    return [(part, spent[part] / 1e6, spent[part] / total) for part in PARTS]


def table(rows, steps=1):
    """Rows of `record` as text, ms a step."""
    lines = [f"{part:<14}{ms / steps:>10.2f} ms{share:>8.1%}" for part, ms, share in rows]
    return "\n".join([*lines, f"{'sum':<14}{sum(ms for _, ms, _ in rows) / steps:>10.2f} ms a step"])


def steps(train_step, state, batch, folder, n=3):
    """The table of n training steps, on a copy of the state, so that the run goes on as if nothing had happened."""
    state = jax.tree.map(jnp.copy, state)

    def run_steps():
        nonlocal state
        for _ in range(n):
            state, metrics = train_step(state, *batch, np.int32(0))
        jax.block_until_ready(metrics)

    return table(record(folder, train_step.as_text(), run_steps), n)
