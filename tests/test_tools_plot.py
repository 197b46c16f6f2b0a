"""Pictures of runs: what is read from a log, what is drawn where matplotlib is there, and that no run ends by it."""

import importlib.util

import numpy as np
import pytest
from conftest import make_params
from runs import BYTE, TEXT, TINY, call, save_model

import train
import txl
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


def test_the_looks_of_broken_weights_are_an_error_and_no_nan_is_printed(tmp_path, capsys):
    cfg = txl.Config(n_layer=2, n_head=2, d_model=16, d_head=6, d_inner=20, mem_len=9)
    params = make_params(cfg)
    params["layers"]["w_q"][0, 1, 1, 2] = np.nan
    save_model(tmp_path / "run", cfg, params, BYTE)
    (tmp_path / "text.txt").write_bytes(TEXT)
    with pytest.raises(ValueError, match="attention is not finite: the weights are broken"):
        plot.looks(tmp_path / "run", tmp_path / "text.txt", tmp_path / "looks.png")
    assert not capsys.readouterr().out
