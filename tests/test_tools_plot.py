"""Pictures of runs: what is read from a log, what is drawn where matplotlib is there, and that no run ends by it."""

import importlib.util

import pytest
from runs import TINY, call

import train
from tools import plot

DRAWS = importlib.util.find_spec("matplotlib") is not None


@pytest.fixture(scope="module")
def run(tmp_path_factory, text):
    """(folder, Outcome) of a short run."""
    folder = tmp_path_factory.mktemp("plot") / "run"
    return folder, call(train.main, data=text, out=folder, **TINY | dict(steps=4, eval_every=2, json=True))


def test_a_run_leaves_its_curves_as_a_picture_where_matplotlib_is_installed(run):
    folder, outcome = run
    assert outcome.code is None and (folder / "loss.png").exists() == DRAWS
    assert (f"drawn in {folder / 'loss.png'}" if DRAWS else "no picture: pip install matplotlib") in outcome.err
    steps, evals = plot.read_history(folder)
    assert [entry["step"] for entry in steps] == [1, 2, 3, 4] and {e["split"] for e in evals} == {"valid", "test"}


def test_a_picture_that_cannot_be_drawn_ends_no_run(run, monkeypatch):
    def broken(*args):
        raise OSError("no\nbackend")

    monkeypatch.setattr(plot, "new_figure", broken)
    assert train.draw("plot_runs", [run[0]], run[0] / "loss.png") == "no picture: no backend"
