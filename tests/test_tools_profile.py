"""--profile's part: a trace, a memory profile, and the time of each part of the model."""

import gzip
import json

import pytest
from runs import TINY, stopped

from tools import profile

pytestmark = [
    pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning"),  # jaxlib's own, on Python 3.12
    pytest.mark.usefixtures("shared_steps"),
]


def test_a_run_leaves_a_trace_without_python_frames_a_memory_profile_and_the_time_of_each_part(
    text, tmp_path, monkeypatch
):
    folder, rows, table = tmp_path / "new" / "folder", [], profile.table

    def seen(found, n):
        rows.extend(found)
        return table(found, n)

    monkeypatch.setattr(profile, "table", seen)
    outcome = stopped(5, data=text, out=tmp_path / "run", profile=folder, **TINY, json=True)
    assert outcome.code == 130, outcome
    (path,) = folder.rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert any("hlo_op" in event.get("args", {}) for event in events)
    assert not any(event.get("name", "").startswith("$") for event in events)
    assert b"space" in gzip.decompress((folder / "memory.prof").read_bytes())  # a pprof's table of strings
    total = sum(ms for _, ms, _ in rows)
    assert [part for part, *_ in rows] == ["attention", "feed_forward", "loss", "optimizer", "other"]
    assert all(ms > 0 and share == pytest.approx(ms / total) for _, ms, share in rows)
    assert f"sum{total / 3:21.2f} ms a step" in outcome.err  # of three steps
