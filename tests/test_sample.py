"""Sampling through `sample.main`: the draw at every edge, prompts of any length and kind, what is printed."""

import contextlib
import dataclasses
import gzip
import io
import json
import math
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import BYTE, CHAR, WORD, call, random_model, refused

import sample
import txl
from data import checkpoint

ROOT = Path(__file__).parent.parent
# same_length: logits do not depend on where a text is cut, so that any cut can be compared with any other
CFG = txl.Config(n_layer=1, n_head=2, d_model=16, d_head=6, d_inner=20, mem_len=32, same_length=True, tie_weight=False)
TEXT = np.random.default_rng(7).integers(97, 123, 600, dtype=np.uint8).tobytes()
model = partial(random_model, CFG)


@pytest.fixture(scope="module")
def byte(tmp_path_factory):
    return model(tmp_path_factory.mktemp("byte") / "run")


@pytest.fixture(scope="module")
def char(tmp_path_factory):
    return model(tmp_path_factory.mktemp("char") / "run", CHAR)


def ids_of(run, *words, **flags):
    """The ids of each sample."""
    outcome = call(sample.main, *words, run=run, json=True, **flags)
    assert outcome.code is None, outcome
    return [entry["ids"] for entry in outcome.entries()]


def how(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    return sample.SamplingParams(temperature, top_k, top_p, min_p, 256)


PLAIN = how()


@partial(jax.jit, static_argnames=("n", "how"))
def draws(logits, n=100, how=PLAIN):
    """n ids [n] that are drawn from logits [V]."""
    keys = jax.random.split(jax.random.key(3), n)
    return jax.vmap(lambda key: sample.sample_next_token(logits, key, how))(keys)


def drawn(p, **options):
    """The set of ids among 400 draws where ids have probabilities p."""
    with np.errstate(divide="ignore"):
        logits = np.log(np.asarray(p, np.float32))
    return set(np.asarray(draws(logits, 400, how(**options))).tolist())


FALLING, LAST = [0.5, 0.3, 0.15, 0.05], [0.3, 0.1, 0.1, 0.5]
RANKED = np.random.default_rng(1).permutation(11)
ELEVEN = np.linspace(2, 1, 11)[np.argsort(RANKED)] / 16.5  # from id RANKED[0] on the probabilities fall


@pytest.mark.parametrize(
    "p, options, want",
    [
        *[(ELEVEN, dict(top_k=k), {*RANKED[:k]}) for k in (1, 2, 11)],
        *[(ELEVEN, dict(top_k=k), {*range(11)}) for k in (0, 12, 500)],  # 0 and too many: all
        ([0.1, 0.2, 0.2, 0.2, 0.2, 0.1], dict(top_k=2), {1, 2}),  # ties never let more through
        (FALLING, dict(top_p=0.6), {0, 1}),  # while the mass before a token is less
        (FALLING, dict(top_p=0.85), {0, 1, 2}),
        (LAST, dict(top_p=0.8), {0, 3}),
        (LAST, dict(top_p=1e-8), {3}),
        ([0.4, 0.3, 0.2, 0.1], dict(top_k=3, top_p=0.5), {0, 1}),  # both must keep an id
        *[([0.5, 0.3, 0.12, 0.08], dict(min_p=p), {*range(n)}) for p, n in ((0.0, 4), (0.25, 2), (1.0, 1))],
    ],
)
def test_top_k_top_p_and_min_p_keep_the_likeliest_tokens_that_they_should(p, options, want):
    assert drawn(p, **options) == want


@pytest.mark.parametrize("temperature", [0.0, 1e-45])
def test_temperature_0_and_next_to_0_take_the_most_likely_token(temperature):
    assert set(np.asarray(draws(np.float32([1, -2, 3, 2.999, -np.inf, 0]), how=how(temperature))).tolist()) == {2}


def test_draws_have_the_probabilities_of_the_logits_and_the_temperature():
    logits, n = np.log(np.float32([0.5, 0.3, 0.15, 0.05])), 20_000
    for temperature in (1.0, 0.5):
        p = np.exp(logits / temperature)
        share = np.bincount(np.asarray(draws(logits, n, how(temperature))), minlength=4) / n
        np.testing.assert_allclose(share, p / p.sum(), atol=4 * 0.5 / n**0.5)  # four deviations of a share


def test_a_checkpoint_with_nan_stops_with_a_message_instead_of_a_text(tmp_path):
    def spoil(params):
        params["out_bias_0"][5] = np.nan

    run = model(tmp_path / "run", change=spoil)
    refused(call(sample.main, run=run, prompt="ab", n_tokens=3), "token 1", "not finite")


forward = jax.jit(lambda params, *args: txl.forward(params, *args), static_argnums=3)


def evaluated(folder, text):
    """Logits [n, V] after every id of `text`, by evaluation in segments of 8 with memory carried."""
    cfg, params, *_ = checkpoint.load(folder)
    ids, mems, found = np.frombuffer(text, np.uint8).astype(np.int32), txl.init_mems(cfg, 1), []
    for segment in np.pad(ids, (0, -len(ids) % 8)).reshape(-1, 1, 8):
        hidden, mems = forward(params, segment, mems, cfg)
        found.append(np.asarray(txl.logits(params, hidden, cfg)[0]))
    return np.concatenate(found)[: len(ids)]


@pytest.mark.parametrize("length", [1, 8, 9, 500])
def test_a_prompt_of_any_length_is_read_as_evaluation_reads_it_also_past_mem_len(byte, length):
    (ids,) = ids_of(byte, prompt=TEXT[:length].decode(), n_tokens=40, temperature=1)
    logits = evaluated(byte, TEXT[:length] + bytes(ids))[length - 1 : -1]
    row = jax.random.fold_in(jax.random.key(1), 0)
    keys = jax.vmap(lambda number: jax.random.fold_in(row, number))(jnp.arange(40))
    assert ids == jax.vmap(lambda *args: sample.sample_next_token(*args, how()))(logits, keys).tolist()
    (likely,) = ids_of(byte, prompt=TEXT[:length].decode(), n_tokens=1, temperature=0)
    assert likely == [logits[0].argmax()]


def test_a_text_belongs_to_prompt_and_seed_whatever_was_before_and_beside_it_and_drops_nothing(tmp_path, byte):
    (p,), (q,), (again,) = (ids_of(byte, prompt=text, n_tokens=30) for text in ("alpha", "be", "alpha"))
    assert p == again != q
    assert ids_of(byte, prompt="alpha", n_tokens=30, seed=2) != [p]
    assert ids_of(byte, prompt="alpha", n_tokens=17) == [p[:17]]  # blocks do not matter to the draws
    first, *others = ids_of(byte, prompt="alpha", n_tokens=30, n_samples=3)
    assert first == p and len({*map(tuple, [first, *others])}) == 3
    assert ids_of(model(tmp_path / "run", dropout=0.5, dropatt=0.5), prompt="alpha", n_tokens=30) == [p]
    run = model(tmp_path / "none", CHAR, n_token=300, mem_len=0, same_length=False, dtype="bfloat16")
    assert {*ids_of(run, prompt="ab", n_tokens=30)[0]} <= {*range(5)}  # the symbols that it has


def test_an_empty_prompt_starts_from_a_newline_or_the_first_symbol_and_shows_none_of_it(byte, char):
    for run, start in ((byte, "\n"), (char, "a")):
        assert ids_of(run, n_tokens=20) == ids_of(run, prompt="", n_tokens=20) == ids_of(run, prompt=start, n_tokens=20)
        shown, given = (call(sample.main, run=run, n_tokens=20, **prompt).out for prompt in ({}, {"prompt": start}))
        assert given == start + shown


def test_a_prompt_from_a_file_is_its_bytes_as_they_are_or_with_lines_each_line_and_what_is_unknown_is_named(
    byte, char, tmp_path
):
    text = "two  \t\r\n\nlines é 😀\n"
    (tmp_path / "p.txt").write_bytes(text.encode())
    flags = dict(run=byte, prompt_file=tmp_path / "p.txt", n_tokens=20, json=True)
    (entry,) = call(sample.main, **flags).entries()
    assert entry["prompt"] == text and [entry["ids"]] == ids_of(byte, prompt=text, n_tokens=20)
    entries = call(sample.main, lines=True, **flags).entries()
    assert [entry["prompt"] for entry in entries] == ["two  \t", "", "lines é 😀"]
    assert entries[1]["ids"] == ids_of(byte, n_tokens=20, seed=2)[0]
    refused(call(sample.main, run=char, prompt="abé😀x"), "prompt", "'x'", "character index 4", "line 1")
    (tmp_path / "z").write_bytes(gzip.compress(TEXT))
    for name, word in (("none.txt", "No such file"), ("z", "gzip")):
        refused(call(sample.main, run=byte, prompt_file=tmp_path / name), tmp_path / name, word)


def test_prompts_of_any_lengths_together_give_each_the_text_that_it_gives_alone(byte):
    texts = ["a", "a", TEXT[:77].decode(), TEXT[:8].decode()]
    flags = dict(n_tokens=37, n_samples=2)
    together = ids_of(byte, *[word for text in texts for word in ("--prompt", text)], **flags)
    assert together == [ids for p, text in enumerate(texts) for ids in ids_of(byte, prompt=text, seed=1 + p, **flags)]
    assert len({*map(tuple, together)}) == 8  # the same prompt has noise of its own


def test_samples_are_the_same_on_any_number_of_devices(byte):
    one, two = (ids_of(byte, prompt="alpha", n_tokens=20, n_samples=3, devices=n) for n in (1, 2))
    assert one == two
    refused(call(sample.main, run=byte, devices=9), "devices=9", "there are 4")


def test_stop_ends_a_sample_there_and_leaves_the_others_as_they_are(char):
    flags = dict(run=char, prompt="ab", n_tokens=60, n_samples=3, json=True)
    plain = call(sample.main, **flags).entries()
    stop = plain[0]["text"][20:24]
    stopped = call(sample.main, **flags, stop=stop).entries()
    for before, after in zip(plain, stopped):
        end = before["text"].find(stop)
        assert after["ids"] == (before["ids"][: end + 4] if end >= 0 else before["ids"])
        assert after["stopped"] == (end >= 0)
    assert stopped[0]["stopped"] and not all(entry["stopped"] for entry in stopped)


def test_the_compiled_loop_holds_no_copy_of_a_ring_and_updates_the_cache_in_place():
    rows = 4
    cfg = dataclasses.replace(CFG, n_layer=2, mem_len=600)
    params = jax.eval_shape(lambda p: txl.unstack(p, cfg), txl.param_shapes(cfg))
    cache = jax.eval_shape(lambda p: txl.init_cache(p, cfg, rows), params)
    lead = lambda a: jax.ShapeDtypeStruct((1, *a.shape), a.dtype)
    cache = cache._replace(k=tuple(map(lead, cache.k)), v=tuple(map(lead, cache.v)), length=lead(cache.length))
    ints = lambda *shape: jax.ShapeDtypeStruct(shape, np.int32)
    args = ints(1, rows, sample.BLOCK), cache, ints(1, rows), ints(1, rows), ints(1, rows), ints(1, rows)
    compiled = sample.make_generate_block(cfg, how()).lower(params, *args).compile()
    ring = cache.k[0].size * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * ring  # of the 4: none is there twice
    copies = re.findall(r"= f32\[([\d,]+)\]\S* copy\(", compiled.as_text())
    assert max((math.prod(map(int, dims.split(","))) for dims in copies), default=0) * 4 < ring


def test_what_follows_a_separator_does_not_depend_on_what_was_before(byte):
    for options, same in ((dict(reset_on="\n"), True), ({}, False)):
        a, b = (ids_of(byte, prompt=f"{text}\nbe", n_tokens=30, **options) for text in ("alpha", "no gamma, no"))
        assert (a == b) == same


def printed(blocks, prompt=b"", vocab=BYTE, **options):
    """What a stream of blocks of ids puts on standard output."""
    opts = sample.SampleConfig(**options)
    blocks = [[np.asarray(b)] * opts.n_samples for b in blocks]
    return call(lambda _: sample.print_samples(blocks, [prompt], vocab, opts)).out


FACE = list("😀".encode())
WORDS = dict(vocab=WORD, prompt=b"the")


@pytest.mark.parametrize(
    "blocks, options, want",
    [
        ([[65, *FACE[:1]], FACE[1:3], [FACE[3], 66]], {}, "A😀B\n"),  # a character cut by blocks
        ([[65, *FACE[:3]]], {}, "A\ufffd\n"),  # and by the end
        ([FACE[2:], [66]], dict(prompt=bytes(FACE[:2]), n_samples=2), "😀B\n\n" * 2),  # the prompt's is completed
        ([[1, 2], [4, 0], [1], [0, 2]], WORDS, "the the cat sat\nthe\ncat\n"),  # words stand apart where blocks meet
        ([[1, 2], [0, 4]], dict(stop=("<eos>",), **WORDS), "the the cat\n\n"),  # what ends a line may end a sample
        ([[65, 66], [67, 68]], dict(stop=("BC",)), "ABC\n"),  # across blocks
        ([[65, 66], [67, 68]], dict(stop=("CD", "B")), "AB\n"),  # the first of two
    ],
)
def test_characters_and_words_are_put_together_and_stop_texts_found_across_blocks(blocks, options, want):
    assert printed(blocks, **options) == want


def test_json_lines_hold_prompt_text_and_ids_and_all_else_goes_to_standard_error(byte):
    outcome = call(sample.main, run=byte, prompt="alpha\n", n_tokens=20, n_samples=2, json=True)
    for entry in outcome.entries():
        assert entry == {"prompt": "alpha\n", "text": entry["text"], "ids": entry["ids"], "stopped": False}
        assert bytes(entry["ids"]).decode("utf-8", "replace") == entry["text"] and len(entry["ids"]) == 20
    assert "best.npz, step 5" in outcome.err and len(outcome.err.splitlines()) == 1
    plain = call(sample.main, run=byte, prompt="alpha\n", n_tokens=20, n_samples=2)
    assert plain.out == "".join(f"alpha\n{entry['text']}\n\n" for entry in outcome.entries())


def test_standard_output_of_the_command_is_the_text_alone_whatever_the_locale(byte):
    command = [sys.executable, "sample.py", "--run", byte, "--prompt", "alpha é", "--n_tokens", "20", "--json"]
    env = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0"}
    found = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["ids"] == ids_of(byte, prompt="alpha é", n_tokens=20)[0]


@pytest.mark.parametrize("terminal", [False, True])
def test_bytes_go_to_a_file_as_they_are_and_a_terminal_is_shown_control_characters(terminal, monkeypatch):
    data = "é".encode("latin-1") + b"\x1b]0;title\x07\ta\n" + "\u202e\x9b".encode()
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    with contextlib.redirect_stdout(stream):
        sample.print_samples([[np.frombuffer(data, np.uint8)]], [b"p"], BYTE, sample.SampleConfig())
    as_text = "p\ufffd\\x1b]0;title\\x07\ta\n\\u202e\\x9b\n".encode()
    assert stream.buffer.getvalue() == (as_text if terminal else b"p" + data + b"\n")
