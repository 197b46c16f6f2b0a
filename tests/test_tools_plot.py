"""Pictures of runs: what is read from a log, what is drawn where matplotlib is there, and that no run ends by it."""

import importlib.util
import json

import pytest

import train
from tools import plot

DRAWS = importlib.util.find_spec("matplotlib") is not None


@pytest.fixture
def folder(tmp_path):
    """A folder with the log of a run of three steps."""
    log = [{"versions": {}}, *({"step": n, "bpb": 4 / n, "lr": 0.1, "tok_per_s": 9.0 * n} for n in (1, 2, 3))]
    log.append({"step": 3, "split": "valid", "bpb": 2.9})
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in log))
    return tmp_path


def test_a_log_becomes_curves_in_a_picture_where_matplotlib_is_installed(folder):
    said = train.draw("plot_runs", [folder], folder / "loss.png")
    assert (folder / "loss.png").exists() == DRAWS
    assert (f"drawn in {folder / 'loss.png'}" if DRAWS else "no picture: pip install matplotlib") in said
    steps, evals = plot.read_history(folder)
    assert [entry["step"] for entry in steps] == [1, 2, 3] and [e["split"] for e in evals] == ["valid"]


def test_a_picture_that_cannot_be_drawn_ends_no_run(folder, monkeypatch):
    def broken(*args):
        raise OSError("no\nbackend")

    monkeypatch.setattr(plot, "new_figure", broken)
    assert train.draw("plot_runs", [folder], folder / "loss.png") == "no picture: no backend"
