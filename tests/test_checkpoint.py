"""Checkpoint files and run folders: what is saved comes back, and damaged, hostile or foreign files do no harm."""

import pickle
import zipfile
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from conftest import make_params
from runs import fails, raw, save_model, write_raw

import txl
from data import checkpoint

ROOT = Path(__file__).parents[1]
CFG = txl.Config(n_layer=2, n_head=2, d_model=16, d_head=6, d_inner=20, mem_len=9)
ARRAYS = {
    "params/w": np.arange(6000, dtype=np.float32).reshape(120, 50),
    "params/layers/b": np.arange(7, dtype=np.float32),
    "mems/h": np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16),
    "opt/count": np.int32(4).reshape(()),
}
want = lambda meta: ARRAYS


def two(folder):
    """A folder with good checkpoints of step 1, best.npz, and of step 2, last.npz; the bytes of the latter."""
    for name, step in (("best.npz", 1), ("last.npz", 2)):
        checkpoint.save(folder / name, ARRAYS, {"run": {"step": step}})
    return (folder / "last.npz").read_bytes()


def model(folder):
    """The path of a checkpoint that `load` takes."""
    return save_model(folder, CFG, make_params(CFG), {"kind": "byte"}) / "best.npz"


def same(found):
    return found.keys() == ARRAYS.keys() and all(found[name].tobytes() == ARRAYS[name].tobytes() for name in ARRAYS)


def test_arrays_and_metadata_come_back_bit_for_bit_bfloat16_and_scalars_too(tmp_path):
    checkpoint.save(tmp_path / "c.npz", ARRAYS, {"run": {"step": 3}})
    meta, found = checkpoint.read(tmp_path / "c.npz", want)
    assert meta["run"] == {"step": 3} and same(found)
    for name, array in ARRAYS.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape) and found[name].flags.writeable
    assert [p.name for p in tmp_path.iterdir()] == ["c.npz"]  # no temporary file


def test_the_latest_good_checkpoint_is_used_and_the_damaged_one_named_wherever_it_is_cut_or_flipped(tmp_path):
    data, used = two(tmp_path), []
    last, best = tmp_path / "last.npz", tmp_path / "best.npz"
    flipped = [data[:at] + bytes([data[at] ^ 0x15]) + data[at + 1 :] for at in range(0, len(data), 197)]
    for content in [data[: len(data) * i // 50] for i in range(50)] + flipped:
        last.write_bytes(content)
        warnings = []
        used.append(checkpoint.latest_checkpoint(tmp_path, warnings.append))
        assert same(checkpoint.read(used[-1], want)[1])
        if used[-1] == best:
            (line,) = warnings
            assert f"{last} is damaged" in line and f"from {best}, step 1" in line
            fails(lambda: checkpoint.read(last, want), last, f": give {best}")
    assert used[:50] == [best] * 50 and used.count(last) < len(flipped) / 5  # bytes that nothing depends on


def npy(shape, dtype="<f4"):
    """The bytes of an .npy file of 4 bytes whose header claims more."""
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + b"1234"


CLAIMS = {
    "terabyte": (npy("(250000000000,)"), zipfile.ZIP_STORED, "250000000000"),
    "object": (npy("()", "|O"), zipfile.ZIP_STORED, "object"),
    "deflated": (bytes(10**7), zipfile.ZIP_DEFLATED, "compressed"),
}


@pytest.mark.parametrize("member, method, word", CLAIMS.values(), ids=CLAIMS.keys())
def test_a_member_that_claims_more_than_it_holds_is_refused(member, method, word, tmp_path):
    two(tmp_path)
    with zipfile.ZipFile(tmp_path / "last.npz", "a", method) as z:
        z.writestr("params/x.npy", member)
    for read in (checkpoint.read, checkpoint.load_npz):
        fails(partial(read, tmp_path / "last.npz"), "last.npz is damaged", word)


def test_every_missing_unexpected_and_misshaped_array_is_named(tmp_path):
    path = model(tmp_path)
    meta, arrays = raw(path)
    del arrays["params/u"], arrays["params/layers/b_1"]
    arrays |= {"params/extra": np.zeros(3, np.float32), "params/v": arrays["params/v"].T, "opt/other": np.zeros(2)}
    write_raw(path, meta, arrays)
    wrong = ["params/extra unexpected", "params/layers/b_1 missing", "params/u missing"]
    wrong = "; ".join([*wrong, "params/v is (6, 2), wanted (2, 6)"])
    fails(lambda: checkpoint.load(tmp_path), f"{path} does not fit: {wrong}")


BAD = {
    "config": {"n_layer": 10**30, "cutoffs": [[]], "more\n": 1},
    "run": {"flags": [1], "step": -1, "best": "low"},
    "flags": {"tgt_len": True, "optimizer": 3},
    "": {"dtypes": 3, "vocab": "\n"},
}


@pytest.mark.parametrize("part", BAD)
def test_what_a_checkpoint_says_of_itself_is_checked_in_one_line(part, tmp_path):
    path = model(tmp_path)
    for name, value in BAD[part].items():
        meta, arrays = raw(path)
        inside = {"flags": meta["run"]["flags"], "": meta}.get(part) or meta[part]
        inside[name] = value
        write_raw(tmp_path / "bad.npz", meta, arrays)
        word = "its meta" if name == "dtypes" else name.strip()
        fails(lambda: checkpoint.load(tmp_path / "bad.npz"), "bad.npz", word, f"give {path}")  # and not the same one


class Bomb:
    def __reduce__(self):
        return (open, ("exploded", "w"))


def test_pickles_are_neither_written_nor_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = model(tmp_path)
    meta, arrays = raw(path)  # read with allow_pickle=False: all of it is plain
    bomb = np.array([[Bomb()]])
    write_raw(path, meta, arrays | {"params/u": bomb})
    for read in (checkpoint.load, checkpoint.load_npz):
        fails(partial(read, path), path, "params/u")
    assert not (tmp_path / "exploded").exists()
    pickle.loads(bomb.dumps())
    assert (tmp_path / "exploded").exists()  # the bomb was a real one


def test_best_is_taken_before_last_a_file_for_itself_and_to_go_on_the_highest_step_whatever_its_name(tmp_path):
    fails(lambda: checkpoint.resolve_checkpoint(tmp_path), tmp_path, "best.npz or last.npz")
    last, best = tmp_path / "last.npz", tmp_path / "best.npz"
    for path, step, latest in ((last, 9, last), (best, 10, best), (tmp_path / "a.npz", 2, best), (last, 10, last)):
        checkpoint.save(path, ARRAYS, {"run": {"step": step}})
        assert checkpoint.resolve_checkpoint(tmp_path) == (best if best.exists() else last)
        assert checkpoint.resolve_checkpoint(last) == last and checkpoint.latest_checkpoint(tmp_path) == latest


def test_a_new_run_takes_the_first_free_name_and_no_folder_that_holds_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    new = checkpoint.new_run_folder
    fails(checkpoint.latest_run, "no run found", tmp_path / "runs", "--run DIR")
    for file in ("runs/x-2/log.jsonl", "my text/last.npz"):
        Path(file).parent.mkdir(parents=True)
        Path(file).touch()
    for name in ("x-1", "x-3"):
        folder = new("", "x")
        assert folder == Path("runs", name) and folder.is_dir()
        (folder / "last.npz").touch()
        assert checkpoint.latest_run() == folder
    for folder, *words in (
        ("runs/x-1", "runs/x-1 holds a run", "train.py --resume runs/x-1"),
        ("my text", "--resume 'my text'"),
        ("runs/x-2", "ended before its first", "train.py --resume auto --out runs/x-2"),
        ("runs/x-1/last.npz", "is a file: give a folder"),
    ):
        fails(partial(new, folder, "x"), *words)
    assert new("runs/x-2", "x", restart=True) == Path("runs/x-2")
