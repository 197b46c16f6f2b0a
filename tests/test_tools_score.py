"""Scoring: the numbers of the training forward, fresh memory, what is printed and written, the page."""

import json
import math
import re
import sys
from functools import partial
from html.parser import HTMLParser
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import make_ids, make_params
from runs import BYTE, CHAR, COMPILED, WORD, call, random_model, refused, save_model

import txl
from data import checkpoint
from tools import score

SIZES = dict(n_layer=2, n_head=2, d_model=16, d_head=6, d_inner=20, mem_len=11)
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


def scored(run, *paths, json=True, **outputs):
    """The Outcome of scoring files."""
    opts = dict(score=tuple(map(str, paths)), per_token="", html="", json=json)
    opts = SimpleNamespace(**opts | {name: str(path) for name, path in outputs.items()})

    def main(_):
        try:
            for line in score.report(opts, checkpoint.load(run)):
                print(line)
        except (ValueError, OSError) as e:
            sys.exit(f"sample.py: {e}")

    return call(main)


def tokens(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# the numbers


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
    found = {n: score.score(params, make_ids(cfg, n), 4, cfg, 8) for n in (1, 2, 37, 0)}
    assert len(COMPILED) == compiled
    assert [len(a) for a in found.pop(0)] == [0, 0]
    for n, (logprobs, ranks) in found.items():
        want, order = expected(params, make_ids(cfg, n), 4, cfg, 8)
        np.testing.assert_allclose(logprobs, want, atol=1e-4)  # rounding of two float32 paths
        assert (ranks == order).all() and logprobs.dtype == np.float32 and (logprobs <= 0).all()


def test_the_end_of_a_hundred_thousand_tokens_is_scored_as_the_training_forward_does():
    params, ids = jax.device_put(make_params(PLAIN)), make_ids(PLAIN, 100_000)
    logprobs, ranks = score.score(params, ids, 4, PLAIN, 64)
    want, order = expected(params, ids[-85:], ids[-86], PLAIN, 8)  # with same_length the segment does not matter
    seen = 60  # 2 layers of 11 tokens before it: the last 60 know nothing of what is more than 85 back
    np.testing.assert_allclose(logprobs[-seen:], want[-seen:], atol=1e-4)
    assert (ranks[-seen:] == order[-seen:]).all() and (logprobs <= 0).all() and (ranks > 0).all()


def test_tokens_as_likely_as_each_other_share_the_better_rank():
    params = jax.tree.map(np.zeros_like, make_params(PLAIN))
    params["out_bias_0"][:3] = 1, 2, 1
    logprobs, ranks = score.score(params, np.array([2, 1, 0, 200, 3]), 4, PLAIN, 8)
    assert ranks.tolist() == [2, 1, 2, 4, 4]
    total = 2 * math.e + math.e**2 + 253
    np.testing.assert_allclose(np.exp(logprobs) * total, [math.e, math.e**2, math.e, 1, 1], rtol=1e-5)


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
    run = model(tmp_path / "run", WORD)
    outcome = scored(run, *paths, per_token=tmp_path / "t")
    lines, (*entries, total) = tokens(tmp_path / "t"), outcome.entries()
    assert [line["token"] for line in lines] == ["the", "cat", "sat", "<eos>", "<unk>", "<eos>", "<eos>", "the"]
    assert [line["id"] for line in lines] == [1, 2, 4, 0, 3, 0, 0, 1]
    assert all(line.keys() == {"token", "id", "logprob", "rank"} and 1 <= line["rank"] <= 5 for line in lines)
    for entry, part in zip([*entries, total], (lines[:4], lines[4:5], lines[5:], lines)):
        nats = -sum(line["logprob"] for line in part)
        assert entry["tokens"] == len(part)
        assert entry["loss_nats"] == pytest.approx(nats / len(part), rel=1e-7)  # float32 digits
        assert entry["bpb"] == pytest.approx(nats / math.log(2) / entry["bytes"])
        assert entry["ppl"] == pytest.approx(math.exp(nats / len(part)))
    assert [entry["bytes"] for entry in (*entries, total)] == [13, 3, 5, 21]
    assert [entry["file"] for entry in entries] == [str(path) for path in paths] and total["files"] == 3
    plain = scored(run, *paths, json=False).out.splitlines()
    assert [line.partition(": ")[0] for line in plain] == [*map(str, paths), "total"]
    assert f"{total['loss_nats']:.4f} nats per token, {total['bpb']:.4f} bits per byte" in plain[-1]
    assert f"perplexity {total['ppl']:.4g}, 8 tokens, 21 bytes" in plain[-1] and "1 token, 3 bytes" in plain[1]


def test_a_certain_text_has_no_minus_zero(tmp_path):
    def sure(params):
        for leaf in (params["out_bias_0"], params["embed_0"], params["out_0"]):
            leaf[:] = 0
        params["out_bias_0"][ord("a")] = 1e4

    run, page, lines = model(tmp_path / "run", change=sure, tie_weight=False), tmp_path / "p.html", tmp_path / "t"
    outcomes = [scored(run, *files(tmp_path, b"aaa"), json=j, html=page, per_token=lines) for j in (True, False)]
    for text in (*[outcome.out for outcome in outcomes], lines.read_text(), page.read_text().partition("<h2>")[2]):
        assert "-0" not in text and re.search(r"\b0\.0", text)


# the page


class Page(HTMLParser):
    """What a page shows: `shown` in its texts, of which `pieces` are [(attributes, text)], and the `rest`."""

    def __init__(self, path):
        super().__init__()
        self.open, self.shown, self.rest, self.pieces = [], "", "", []
        self.source = path.read_bytes().decode()
        self.feed(self.source)
        self.close()
        assert not self.open and "http" not in self.source

    def handle_starttag(self, tag, attrs):
        self.attrs = dict(attrs)
        assert not {"src", "href"} & self.attrs.keys()
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "pre" not in self.open:
            self.rest += data
            return
        self.shown += data
        if self.open[-1] == "i":
            self.pieces.append((self.attrs, data))


def bits(piece):
    return float(piece[0]["data-s"].split()[0])


def test_the_page_holds_every_character_once_in_order_with_the_bits_of_its_bytes(byte, tmp_path):
    (path,) = files(tmp_path, TEXT + b"line <i>\n" * 700)
    entry, _ = scored(byte, path, html=tmp_path / "p.html", per_token=tmp_path / "t").entries()
    page, lines = Page(tmp_path / "p.html"), tokens(tmp_path / "t")
    # of control characters the page shows pictures, and of bytes that are no text escapes
    shown = "a <b>&amp;\t\"é\"</b> \U0001f600\u240d\n\u2400'x'\n\\xc3(\\xff\n" + "line <i>\n" * 700
    assert page.shown == shown == "".join(text for _, text in page.pieces) and page.source.count("<pre>") == 3
    nats, at = [-line["logprob"] for line in lines], TEXT.index("\U0001f600".encode())
    assert [line["token"] for line in lines[at + 3 : at + 7]] == ["\\x80", "\r", "\n", "\0"]
    (face,) = [piece for piece in page.pieces if piece[1] == "\U0001f600"]
    assert bits(face) == pytest.approx(sum(nats[at : at + 4]) / math.log(2), abs=0.006)  # printed with two digits
    ranks = ", ".join(str(line["rank"]) for line in lines[at : at + 4])
    assert face[0]["data-s"].endswith(f" · rank {ranks}") and face[0]["class"] == "b12"
    assert page.pieces[0][0]["class"] == f"b{min(int(nats[0] / math.log(2)), 12)}"
    assert sum(map(bits, page.pieces)) == pytest.approx(sum(nats) / math.log(2), abs=0.005 * len(nats))
    for word in (str(path), f"{entry['loss_nats']:.4f} nats", f"{entry['bpb']:.4f} bits", "best.npz, step 5", "12+"):
        assert word in page.rest


def test_the_page_of_words_keeps_white_space_and_a_page_of_characters_its_characters(tmp_path):
    text = b" the  <cat>\t\nsat the \r\n"
    scored(model(tmp_path / "w", WORD), *files(tmp_path, text), html=tmp_path / "p.html")
    page = Page(tmp_path / "p.html")
    assert page.shown == text.decode().replace("\r", "\u240d")
    assert [piece for _, piece in page.pieces] == ["the", "<cat>", "\n", "sat", "the", "\n"]
    assert "24+" in page.rest
    text = "abcé\U0001f600ba".encode()
    scored(model(tmp_path / "c", CHAR), *files(tmp_path, text, b"cab"), html=tmp_path / "p.html")
    page = Page(tmp_path / "p.html")
    assert [piece for _, piece in page.pieces] == list(text.decode() + "cab")
    assert "total" in page.rest and "10 tokens · 14 bytes" in page.rest


# what goes wrong


def test_a_bad_file_or_path_is_one_line_and_nothing_is_scored_or_written(byte, tmp_path):
    good, empty, spaces = files(tmp_path, b"abc", b"", b" \t ")
    char, word = model(tmp_path / "c", CHAR), model(tmp_path / "w", WORD)
    before = sorted(tmp_path.iterdir())
    for run, bad, words in (
        (byte, tmp_path / "none.txt", ["none.txt", "No such file"]),
        (byte, tmp_path, ["Is a directory"]),
        (byte, empty, ["holds no token"]),
        (word, spaces, ["holds no token"]),
        (char, spaces, ["'", "character index 0", "--tokenizer byte"]),
    ):
        outcome = scored(run, good, bad, per_token=tmp_path / "t", html=tmp_path / "h")
        refused(outcome, bad, *words)
        assert not outcome.out
    for name in ("per_token", "html"):
        refused(scored(byte, good, **{name: tmp_path / "none" / "t"}), name, "none/t", "folder does not exist")
        refused(scored(byte, good, **{name: tmp_path}), name, "is no file")
        refused(scored(byte, empty, good, **{name: good}), name, "would overwrite")
    refused(scored(byte, good, per_token=tmp_path / "t", html=tmp_path / "t"), "per_token and html would overwrite")
    assert sorted(tmp_path.iterdir()) == before and good.read_bytes() == b"abc"


def test_an_id_outside_of_the_model_is_named(tmp_path):
    small = txl.Config(**SIZES, n_token=100)
    run = save_model(tmp_path / "small", small, make_params(small), BYTE)
    refused(scored(run, *files(tmp_path, b"abz")), "largest id 122")


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path):
    def parts():
        yield "new"
        raise OSError("full")

    (tmp_path / "p").write_text("old")
    (tmp_path / "link").symlink_to("p")
    with pytest.raises(OSError, match="full"):
        score.write_whole(tmp_path / "link", parts())
    assert (tmp_path / "p").read_text() == "old" and len(list(tmp_path.iterdir())) == 2
    score.write_whole(tmp_path / "link", ["new", "\n"])
    assert (tmp_path / "p").read_bytes() == b"new\n" and (tmp_path / "link").is_symlink()


def test_broken_weights_end_scoring_in_one_line_and_print_no_nan(tmp_path):
    def spoil(params):
        params["layers"]["b_1"][1, 3] = np.nan

    run, paths = model(tmp_path / "run", change=spoil), files(tmp_path, b"ab", b"cd")
    outcome = scored(run, *paths, per_token=tmp_path / "t", html=tmp_path / "h")
    refused(outcome, "logits are not finite at token 1: use another checkpoint")
    assert not outcome.out and not (tmp_path / "t").exists() and not (tmp_path / "h").exists()
