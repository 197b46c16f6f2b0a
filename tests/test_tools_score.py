"""Scoring: the numbers of the training forward, fresh memory, what is printed and written, the page."""

import json
import math
import re
from functools import partial
from html import unescape

import jax
import numpy as np
import pytest
from conftest import make_ids, make_params
from runs import CHAR, COMPILED, WORD, call, random_model, refused

import sample
import txl
from tools import score

SIZES = dict(n_layer=1, n_head=2, d_model=16, d_head=6, d_inner=20, mem_len=11)
PLAIN = txl.Config(**SIZES, same_length=True)
ADAPTIVE = txl.Config(**SIZES, n_token=37, cutoffs=(5, 18), div_val=2, clamp_len=7)  # later queries see further
TEXT = "a <b>&amp;\t\"é\"</b> \U0001f600\r\n\x00'x'\n".encode() + b"\xc3(\xff\n"
model = partial(random_model, PLAIN)


@pytest.fixture(scope="module")
def byte(tmp_path_factory):
    return model(tmp_path_factory.mktemp("byte") / "run")


def files(folder, *texts):
    """The paths of new files that hold texts."""
    paths = [folder / f"{i}.txt" for i in range(len(texts))]
    for path, text in zip(paths, texts):
        path.write_bytes(text)
    return paths


def scored(run, *paths, **flags):
    """The Outcome of scoring files, told in JSON where nothing else is asked for."""
    words = [word for path in paths for word in ("--score", path)]
    return call(sample.main, *words, run=run, **dict(json=True) | flags)


def tokens(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@partial(jax.jit, static_argnums=4)
def forward(params, ids, targets, mems, cfg):
    nats, _ = txl.token_losses(params, ids, targets, mems, cfg)
    hidden, mems = txl.forward(params, ids, mems, cfg)
    return nats[0], txl.logits(params, hidden, cfg)[0], mems


def expected(params, ids, start, cfg, segment):
    """(log-probabilities, ranks) by the training forward, memory carried from none; ranks by sorting."""
    n, mems, nats, ranks = len(ids), txl.init_mems(cfg, 1), [], []
    given, targets = (np.pad(a, (0, -n % segment)).reshape(-1, 1, segment) for a in (np.r_[start, ids[:-1]], ids))
    for x, y in zip(given, targets):
        found, logits, mems = forward(params, x, y, mems, cfg)
        order = np.argsort(-np.asarray(logits), 1)
        nats.append(found)
        ranks.append((order == y[0][:, None]).argmax(1) + 1)
    return -np.concatenate(nats)[:n], np.concatenate(ranks)[:n]


@pytest.mark.parametrize("cfg", [PLAIN, ADAPTIVE], ids=["plain", "adaptive"])
def test_scores_are_those_of_the_training_forward_from_empty_memory_and_lengths_compile_nothing(cfg):
    params = jax.device_put(make_params(cfg))
    score.score(params, make_ids(cfg, 3), 4, cfg, 8)
    compiled = len(COMPILED)
    found = {n: score.score(params, make_ids(cfg, n), 4, cfg, 8) for n in (1, 2, 37, 4001, 0)}
    assert len(COMPILED) == compiled
    assert [len(a) for a in found.pop(0)] == [0, 0]
    for n, (logprobs, ranks) in found.items():
        want, order = expected(params, make_ids(cfg, n), 4, cfg, 8)
        np.testing.assert_allclose(logprobs, want, atol=1e-4)  # rounding of two float32 paths
        assert (ranks == order).all() and logprobs.dtype == np.float32 and (logprobs <= 0).all()


def test_a_file_scores_the_same_alone_and_after_anything_and_the_first_token_follows_a_newline(byte, tmp_path):
    paths = files(tmp_path, b"q", b"xy", TEXT + b"more")
    alone = []
    for path in paths:
        entry, total = scored(byte, path, per_token=tmp_path / "t").entries()
        assert total == {"files": 1} | {name: entry[name] for name in entry if name != "file"}
        alone.append((entry, tokens(tmp_path / "t")))
    for order in ([2, 1, 0], [0, 2, 1, 2]):
        *entries, _ = scored(byte, *(paths[i] for i in order), per_token=tmp_path / "t").entries()
        assert entries == [alone[i][0] for i in order]
        assert tokens(tmp_path / "t") == [token for i in order for token in alone[i][1]]
    want, _ = expected(make_params(PLAIN), np.array([ord("q")]), ord("\n"), PLAIN, 8)
    assert alone[0][1][0]["logprob"] == pytest.approx(want[0], abs=1e-4)


def test_sums_are_over_tokens_and_bytes_of_all_files_and_those_of_the_token_lines(tmp_path):
    paths = files(tmp_path, b"the  cat\tsat\n", b"dog", b"\n\nthe")
    *entries, total = scored(model(tmp_path / "run", WORD), *paths, per_token=tmp_path / "t").entries()
    lines = tokens(tmp_path / "t")
    assert [line["token"] for line in lines] == ["the", "cat", "sat", "<eos>", "<unk>", "<eos>", "<eos>", "the"]
    for entry, part in zip([*entries, total], (lines[:4], lines[4:5], lines[5:], lines)):
        nats = -sum(line["logprob"] for line in part)
        assert entry["tokens"] == len(part)
        assert entry["loss_nats"] == pytest.approx(nats / len(part), rel=1e-7)  # float32 digits
        assert entry["bpb"] == pytest.approx(nats / math.log(2) / entry["bytes"])
        assert entry["ppl"] == pytest.approx(math.exp(nats / len(part)))
    assert [entry["bytes"] for entry in (*entries, total)] == [13, 3, 5, 21]


def test_the_page_holds_every_character_once_in_order_with_the_bits_of_its_bytes(byte, tmp_path):
    (path,) = files(tmp_path, TEXT + b"line <i>\n" * 700)
    entry, _ = scored(byte, path, html=tmp_path / "p.html", per_token=tmp_path / "t").entries()
    source = (tmp_path / "p.html").read_text(encoding="utf-8")
    texts = "".join(re.findall("<pre>(.*?)</pre>\n?", source, re.S))
    # of control characters the page shows pictures, and of bytes that are no text escapes
    want = "a <b>&amp;\t\"é\"</b> \U0001f600\u240d\n\u2400'x'\n\\xc3(\\xff\n" + "line <i>\n" * 700
    assert unescape(re.sub("<.*?>", "", texts)) == want
    shown = [float(bits) for bits in re.findall('data-s="([0-9.]+)', texts)]
    bits = [-line["logprob"] / math.log(2) for line in tokens(tmp_path / "t")]
    at = TEXT.index("\U0001f600".encode())
    assert shown[at - 1] == pytest.approx(sum(bits[at : at + 4]), abs=0.006)  # é is two bytes; printed with two digits
    assert sum(shown) == pytest.approx(sum(bits), abs=0.005 * len(bits))
    assert str(path) in source and f"{entry['bpb']:.4f} bits" in source


def test_a_bad_file_or_path_is_one_line_and_nothing_is_scored_or_written(byte, tmp_path):
    good, empty, spaces = files(tmp_path, b"abc", b"", b" \t ")
    char = model(tmp_path / "c", CHAR)
    before = sorted(tmp_path.iterdir())
    for run, bad, words in (
        (byte, tmp_path / "none.txt", ["none.txt", "No such file"]),
        (char, spaces, ["'", "character index 0", "--tokenizer byte"]),
    ):
        outcome = scored(run, good, bad, per_token=tmp_path / "t", html=tmp_path / "h")
        refused(outcome, bad, *words)
        assert not outcome.out
    refused(scored(byte, good, html=tmp_path / "none" / "t"), "html", "none/t", "folder does not exist")
    refused(scored(byte, empty, good, per_token=good), "per_token", "would overwrite")
    assert sorted(tmp_path.iterdir()) == before and good.read_bytes() == b"abc"
