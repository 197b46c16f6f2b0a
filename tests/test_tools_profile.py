"""--profile's part: a trace, a memory profile, and the time of each part of the model."""

import gzip
import json

import jax
import pytest
from runs import TINY, call

import train
from tools import profile

pytestmark = pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning")  # jaxlib's own, on Python 3.12
HLO = """HloModule jit_step, is_scheduled=true

%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %add.9 = f32[4]{0} add(%p, %p), metadata={op_name="jit(step)/transpose(jvp(loss))/add" stack_frame_id=1}
}

%body (q: (s32[], f32[4])) -> (s32[], f32[4]) {
  %q = (s32[], f32[4]{0}) parameter(0)
  %dot.1 = f32[4]{0} dot(%q, %q), metadata={op_name="jit(step)/while/body/transpose(jvp(attention))/dot_general"}
  ROOT %fusion.2 = (s32[], /*index=1*/f32[4]{0}) fusion(%dot.1), kind=kLoop, calls=%fused
}, execution_thread="main"

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0), metadata={op_name="x"}
  %while.3 = (s32[], f32[4]{0}) while(%x), condition=%c, body=%body, metadata={op_name="jit(step)/optimizer/while"}
  ROOT %copy.4 = f32[4]{0} copy(%while.3)
}
"""
KNOWN = {"dot.1": (False, "attention"), "fusion.2": (False, "loss")}
KNOWN |= {"while.3": (True, "optimizer"), "copy.4": (False, "other")}


def plane(name, *events):
    """An XPlane as text: events are (name, start in ns, duration in ns, stats)."""
    keys = ("hlo_op", "hlo_module", "_p", "_c", "name")
    text = "".join(f'stat_metadata {{key: {i} value {{id: {i} name: "{k}"}}}} ' for i, k in enumerate(keys, 1))
    line = 'id: 1 name: "thread" timestamp_ns: 0 '
    for number, (event, start, duration, stats) in enumerate(events, 1):
        text += f'event_metadata {{key: {number} value {{id: {number} name: "{event}"}}}} '
        line += f"events {{metadata_id: {number} offset_ps: {start * 1000} duration_ps: {duration * 1000} "
        for key, value in stats.items():
            value = f"int64_value: {value}" if isinstance(value, int) else f'str_value: "{value}"'
            line += f"stats {{metadata_id: {keys.index(key) + 1} {value}}} "
        line += "} "
    return f'planes {{name: "{name}" {text} lines {{{line}}}}} '


def events_of(path, *planes):
    path.write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace("".join(planes)))
    return profile.read_events(path, KNOWN, "jit_step")


def test_a_run_leaves_a_trace_without_python_frames_a_memory_profile_and_the_time_of_each_part(
    text, tmp_path, monkeypatch
):
    folder, rows, table = tmp_path / "new" / "folder", [], profile.table

    def seen(found, n):
        rows.extend(found)
        return table(found, n)

    monkeypatch.setattr(profile, "table", seen)
    flags = TINY | dict(steps=5, eval_every=5, devices=2, json=True)
    outcome = call(train.main, data=text, out=tmp_path / "run", profile=folder, **flags)
    assert outcome.code is None, outcome
    (path,) = folder.rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert any("hlo_op" in event.get("args", {}) for event in events)
    assert not any(event.get("name", "").startswith("$") for event in events)
    assert b"space" in gzip.decompress((folder / "memory.prof").read_bytes())  # a pprof's table of strings
    total = sum(ms for _, ms, _ in rows)
    assert [part for part, *_ in rows] == ["attention", "feed_forward", "loss", "optimizer", "other"]
    assert all(ms > 0 and share == pytest.approx(ms / total) for _, ms, share in rows)
    assert f"sum{total / 3:21.2f} ms a step" in outcome.err  # of three steps


def test_an_instruction_belongs_to_its_innermost_scope_and_a_nameless_fusion_to_its_roots():
    known, module = profile.parts_of(HLO)
    assert module == "jit_step"
    assert {name: known[name] for name in KNOWN} == KNOWN
    assert profile.part_of("jit(step)/jvp(loss)/while/transpose(jvp(feed_forward))/add") == "feed_forward"
    assert profile.part_of("jit(step)/attention_block/noloss/lossless/add") == "other"


def test_an_operation_lasts_until_its_end_event_and_on_a_device_its_own_events_count_and_no_launches(tmp_path):
    dot = ("dot.1", 10, 5, {"hlo_op": "dot.1", "hlo_module": "jit_step", "_p": 7})
    other = ("fusion.2", 40, 2, {"hlo_op": "fusion.2", "hlo_module": "jit_other", "_p": 8})  # of another program
    wrapper = ("ThunkExecutor::Execute", 0, 99, {})
    host = plane("/host:CPU", wrapper, dot, other), plane("/host:CPU2", ("end: dot.1", 30, 1, {"_c": 7}))
    assert events_of(tmp_path / "x.pb", *host) == [(10, 30, KNOWN["dot.1"]), (40, 42, (False, "other"))]
    launch = plane("/host:CPU", ("dot.1", 0, 90, {"hlo_op": "dot.1"}))
    kernel = ("gemm_kernel", 10, 20, {"hlo_op": "dot.1", "hlo_module": "jit_step"})
    graph = ("loop_fusion", 50, 5, {"hlo_op": "command_buffer", "name": "jit(step)/jvp(feed_forward)/add"})
    events = events_of(tmp_path / "x.pb", launch, plane("/device:GPU:0", kernel, graph))
    assert events == [(10, 30, KNOWN["dot.1"]), (50, 55, (False, "feed_forward"))]


def test_each_instant_is_divided_among_what_runs_and_loops_get_only_what_is_left():
    loop, attention, loss = (True, "other"), (False, "attention"), (False, "loss")
    events = [(0, 100, loop), (10, 30, attention), (20, 60, loss), (20, 30, loss), (200, 205, attention)]
    spent = profile.divide(events)
    assert spent == pytest.approx({"attention": 10 + 10 / 3 + 5, "loss": 20 / 3 + 30, "other": 10 + 40})


def test_what_is_in_the_way_and_a_trace_of_nothing_are_clear_errors_before_anything_runs(tmp_path):
    for name, way in (("a", "a"), ("b", "b/plugins/profile")):
        file = tmp_path / way
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
        with pytest.raises(ValueError, match=rf"profile=.*{name} can't be written \(.*give a new folder"):
            profile.record(tmp_path / name, HLO, lambda: pytest.fail("ran"))
        assert file.read_text() == "mine"
    with pytest.raises(ValueError, match="profile=/dev/null/profile can't be written"):
        profile.prepare("/dev/null/profile")
    with pytest.raises(ValueError, match="holds no operation of jit_step"):
        profile.record(tmp_path / "empty", HLO, lambda: None)
