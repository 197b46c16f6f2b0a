"""What tests of the scripts share: calls in process, tiny sizes, checkpoints without training, a count of compiles."""

import contextlib
import hashlib
import io
import itertools
import json
import os
import signal
import zipfile
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
from conftest import make_params

import train
from data import checkpoint, tokenizer
from data.corpora import CORPORA, File

TINY = dict(n_layer=2, n_head=2, d_model=16, d_head=6, d_inner=20, mem_len=9, tgt_len=8, batch=4, warmup=3, devices=1)
TINY |= dict(optimizer="adamw", lr=2e-3, clip=0.25, schedule="inv_sqrt")  # the step does not depend on --steps
TINY |= dict(remat="none", attention="dense")  # which compiles faster than the defaults
TINY |= dict(eval_tokens=100, eval_batch=3, log_every=1)
NOISY = TINY | dict(dropout=0.1, dropatt=0.1, mem_reset=0.1, skip_nonfinite=2, json=True)
WORDS = np.array(["alpha ", "be ", "gamma\n", "d, ", "epsilon. ", "Z"])
TEXT = "".join(WORDS[np.random.default_rng(0).integers(0, len(WORDS), 1500)]).encode()
LINES = b" = A title = \n \n the <unk> cat , the <unk> <unk> dogs . \n" * 40
PROSE = "The cat's — café; don't (ever)  stop.\n\n\tone, two\r\n😀 naïve\n"
BYTE = {"kind": "byte"}
CHAR = {"kind": "char", "symbols": ["a", "b", "c", "é", "\U0001f600"]}
WORD = {"kind": "word", "symbols": ["<eos>", "the", "cat", "<unk>", "sat"]}
COMPILED = []  # grows by one with every program that XLA compiles; jax has no public way to take a listener out again


def heard(event, seconds, **_):
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(seconds)


jax.monitoring.register_event_duration_secs_listener(heard)


class Outcome(NamedTuple):
    code: object  # None: returned; else what the process would exit with, or say before exiting with 1
    out: str
    err: str

    def entries(self):
        return [json.loads(line) for line in self.out.splitlines()]


def argv(**flags):
    """Flags as words: True and False are --flag and --no-flag."""
    words = []
    for name, value in flags.items():
        words += [f"--{name}" if value else f"--no-{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
    return words


def call(main, *words, **flags):
    """The Outcome of a script's main on words and flags."""
    out, err, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(word) for word in words] + argv(**flags))
        except SystemExit as e:
            code = e.code
    return Outcome(code, out.getvalue(), err.getvalue())


def spy(monkeypatch, name, seen):
    """Calls seen(function, args) in place of every function that train.NAME makes."""
    make = getattr(train, name)

    def watched(*args):
        made = make(*args)
        watch = partial(lambda made, *given: seen(made, given), made)
        watch.memory_analysis = getattr(made, "memory_analysis", None)  # partial objects take attributes
        return watch

    monkeypatch.setattr(train, name, watched)


def stopped(step, *words, number=signal.SIGINT, **flags):
    """The Outcome of train.main that gets a signal while it prepares its step number `step`."""
    get_batch, numbers = train.get_batch, itertools.count(1)

    def watched(*args):
        if next(numbers) == step:
            os.kill(os.getpid(), number)
        return get_batch(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "get_batch", watched)
        return call(train.main, *words, **flags)


def refused(outcome, *words):
    """Asserts that a call ended with one line that has all `words`."""
    assert isinstance(outcome.code, str), outcome  # a text is printed, and the process exits with 1
    assert_one_line(outcome.code, words)


def fails(call, *words):
    """Asserts that `call` raises a ValueError of one line that has all words."""
    with pytest.raises(ValueError) as e:
        call()
    assert_one_line(str(e.value), words)


def assert_one_line(message, words):
    assert "\n" not in message
    for word in words:
        assert str(word) in message, f"no {word!r} in: {message}"


def log(folder):
    """(header, entries of steps, entries of evaluations) of a run folder; of the last start where there are several."""
    entries = [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]
    heads = [i for i, entry in enumerate(entries) if "versions" in entry]
    assert heads[0] == 0
    own = entries[heads[-1] + 1 :]
    return entries[heads[-1]], [e for e in own if "split" not in e], [e for e in own if "split" in e]


def losses(folder):
    return [entry["loss_nats"] for entry in log(folder)[1]]


def saved_run(folder, name="last.npz"):
    """What the checkpoint of a run says of how far it came."""
    return raw(Path(folder) / name)[0]["run"]


def raw(path):
    """(meta, {name: array}) of all that stands in a checkpoint file, read without our code."""
    with np.load(path, allow_pickle=False) as z:
        arrays = {name: z[name] for name in z.files}
    return json.loads(arrays.pop("meta").tobytes()), arrays


def write_raw(path, meta, arrays):
    np.savez(path, meta=np.frombuffer(json.dumps(meta).encode(), np.uint8), **arrays)


def save_model(folder, cfg, params, vocab, corpus=""):
    """A run folder with a checkpoint that can be sampled and evaluated, made without training on a corpus."""
    folder.mkdir(parents=True, exist_ok=True)
    run = {"step": 5, "cursor": 0, "flags": asdict(train.TrainConfig(tgt_len=8)), "corpus": corpus, "best": 1.0}
    meta = {"config": asdict(cfg), "vocab": vocab, "run": run | {"versions": {"jax": jax.__version__}}}
    checkpoint.save(folder / "best.npz", checkpoint.flatten({"params": params}), meta)
    return folder


def random_model(like, folder, vocab=BYTE, change=lambda params: None, **options):
    """As `save_model`: a config like another, for a vocabulary, and random parameters that `change` may alter."""
    cfg = replace(like, **{"n_token": tokenizer.size(vocab)} | options)
    params = make_params(cfg)
    change(params)
    return save_model(folder, cfg, params, vocab)


def stand_in(name, url=""):
    """(Source, {name of a file: bytes}): a small corpus in the form of the standard one."""
    source = CORPORA[name]
    known = lambda name, data: File(name, len(data), hashlib.sha256(data).hexdigest())
    line = LINES if source.tokenizer == "word" else TEXT if source.tokenizer == "char" else TEXT + b"\xff\r\n"
    texts = {text.name: line[7 * i :] for i, text in enumerate(source.texts)}
    files = texts
    if source.files != source.texts:
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as z:
            for text in texts.items():
                z.writestr(*text)
        files = {source.files[0].name: packed.getvalue()}
    sizes = {text.name: text.size for text in source.texts}
    scale = lambda name, at: at and at * len(texts[name]) // sizes[name]
    splits = {s: (text, scale(text, a), b and scale(text, b)) for s, (text, a, b) in source.splits.items()}
    known_files, known_texts = (tuple(known(*item) for item in part.items()) for part in (files, texts))
    return source._replace(url=url, files=known_files, texts=known_texts, splits=splits), files


def subword_file(folder):
    """A tokenizer.json of byte-level BPE, with a limit of length and a special token, trained on a few words."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.ByteLevelBPETokenizer()
    words = ["the cat and don't stop", "the cats ever"] * 5
    made.train_from_iterator(words, vocab_size=300, show_progress=False, special_tokens=["<|end|>"])
    made.enable_truncation(5)
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"
