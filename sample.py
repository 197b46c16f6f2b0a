"""Generate text from a checkpoint: the memory is carried on for as long as the text grows.

A prompt of any length is read in segments, then every token costs one query over the cached memory. The prompt and
what follows it go to standard output, everything else to standard error.
"""

import codecs
import json
import os
import sys
from dataclasses import dataclass, replace

import jax
import numpy as np

import plan
import scoring
import train
from data import checkpoint, flags, tokenizer
from generate import How, stream
from stop import start

EXAMPLES = (
    'python sample.py --prompt "def main(" --n_tokens 300               # go on from a prompt',
    "python sample.py --prompt_file prompts.txt --lines --json          # a prompt a line, a JSON object each",
    "python sample.py --score my.txt --html surprise.html               # how well the model predicts a text",
)


@dataclass(frozen=True)
class Sample:
    # model and prompt
    run: str = ""  # run folder or checkpoint; none: the newest run
    prompt: tuple[str, ...] = ()  # text to go on from, again for another; none: a newline, or else the first symbol
    prompt_file: str = ""  # file to take the prompt from instead, its bytes as they are
    lines: bool = False  # each line of prompt_file is a prompt
    reset_on: str = ""  # id, or text of one token, that starts a document: nothing sees across it; none: as trained
    # sampling
    n_tokens: int = 500  # tokens to generate for each sample
    n_samples: int = 1  # samples of each prompt
    temperature: float = 0.8  # divides the logits; 0: always the most likely token
    top_k: int = 0  # draw from this many most likely tokens; 0: from all
    top_p: float = 1.0  # draw from the fewest most likely tokens that have this much probability together
    min_p: float = 0.0  # draw from the tokens that are at least this share as likely as the most likely one
    seed: int = 1  # of the draws: the same seed gives the same text
    stop: tuple[str, ...] = ()  # text that ends a sample, again for another
    devices: int = 0  # devices to spread the samples over; 0: all local ones, as far as there are samples
    # scoring
    score: tuple[str, ...] = ()  # print how well the model predicts this file instead, again for another
    per_token: str = ""  # with score: file to write token, log-probability and rank to, a JSON line each
    html: str = ""  # with score: page to write, each character coloured by its surprise
    # output
    json: bool = False  # print one JSON object for each sample: prompt, text, ids, stopped; or for each score

    def __post_init__(self):
        for f, least in (
            ("n_tokens", 1),
            ("n_samples", 1),
            ("temperature", 0),
            ("top_k", 0),
            ("seed", 0),
            ("devices", 0),
        ):
            if not getattr(self, f) >= least:
                raise ValueError(f"{f}={getattr(self, f)} is out of range: give {least} or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} is out of range: give more than 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} is out of range: give 0 to 1")
        if self.seed >= 2**31:
            raise ValueError(f"seed={self.seed} is out of range: give less than 2**31")
        if self.prompt and self.prompt_file:
            raise ValueError("prompt and prompt_file are both given: leave one out")
        if self.lines and not self.prompt_file:
            raise ValueError("lines is for prompt_file: give --prompt_file FILE, or leave it out")
        if "" in self.stop:
            raise ValueError("stop is empty: give a text, or leave the flag out")
        if not self.score and (self.per_token or self.html):
            raise ValueError("per_token and html are for --score FILE: give it, or leave them out")
        if self.score and (self.prompt or self.prompt_file or self.stop):
            raise ValueError("score is given with a prompt or a stop text: score reads files, leave one out")


def prompt_texts(opts):
    """The prompts as bytes."""
    if not opts.prompt_file:
        return [os.fsencode(text) for text in opts.prompt] or [b""]
    try:
        with open(opts.prompt_file, "rb") as f:
            text = f.read()
    except OSError as e:
        raise ValueError(f"prompt_file {opts.prompt_file}: {e.strerror}: give a text file") from None
    if not text:
        raise ValueError(f"prompt_file {opts.prompt_file} is empty: give a text, or leave the flag out")
    return [line.rstrip(b"\r\n") for line in text.removesuffix(b"\n").split(b"\n")] if opts.lines else [text]


def prompt_ids(text, vocab, cfg):
    """ids [P >= 1] of a prompt, of the vocabulary's default where it is empty."""
    ids = tokenizer.encode(vocab, text or tokenizer.default_prompt(vocab), what="prompt").astype(np.int32)
    if not len(ids):
        raise ValueError("prompt holds no word: give one, or leave the flag out")
    if ids.max() >= cfg.n_token:
        raise ValueError(f"prompt holds id {ids.max()}, the model knows {cfg.n_token}: give another prompt")
    return ids


def grow(row, ids, vocab, stops):
    """Adds ids to a row, up to the end of one of the texts `stops`; returns the bytes that this adds to its text."""
    at = len(row["text"])
    for part in [[i] for i in ids] if stops else [ids]:
        if row["stopped"] or not len(part):
            break
        made, before = tokenizer.decode(vocab, part), row["text"] or row["prompt"]
        apart = vocab["kind"] == "word" and before and not before[-1:].isspace() and not made[:1].isspace()
        begin, row["text"] = len(row["text"]), row["text"] + b" " * bool(apart) + made
        row["ids"] += [int(i) for i in part]
        ends = [row["text"].find(stop, max(begin - len(stop) + 1, 0)) + len(stop) for stop in stops]
        ends = [end for end, stop in zip(ends, stops) if end >= len(stop)]
        if ends:
            row["text"], row["stopped"] = row["text"][: min(ends)], True
    return row["text"][at:]


def print_samples(blocks, prompts, vocab, opts):
    """Writes samples as they come: a single one as a stream, several when all are done."""
    rows = [
        {"prompt": text, "text": b"", "ids": [], "stopped": False} for text in prompts for _ in range(opts.n_samples)
    ]
    stops, live = [os.fsencode(stop) for stop in opts.stop], len(rows) == 1 and not opts.json
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may end in the next block
    if live:
        train.write(decoder.decode(prompts[0]).encode())
    for new in blocks:
        for row, ids in zip(rows, new):
            made = grow(row, ids, vocab, stops)
            if live:
                train.write(decoder.decode(made).encode())
        if all(row["stopped"] for row in rows):
            break
    if live:
        return train.write((decoder.decode(b"", True) + "\n").encode())
    as_text = lambda data: data.decode("utf-8", "replace")
    for row in rows:
        entry = row | {"prompt": as_text(row["prompt"]), "text": as_text(row["text"])}
        whole = json.dumps(entry) if opts.json else as_text(row["prompt"] + row["text"]) + "\n"
        train.write(whole.encode() + b"\n")


def main(argv=None):
    given = flags.parse(argv, "sample.py", __doc__.splitlines()[0], (Sample,), EXAMPLES)
    try:
        opts = Sample(**given)
        model = train.load(opts.run or checkpoint.newest_run())
        model = model._replace(cfg=replace(model.cfg, attention="auto"))  # what was trained on a GPU is read anywhere
        cfg, params, vocab, run = model
        if opts.reset_on:
            cfg = replace(cfg, reset_on=tokenizer.one_id(vocab, opts.reset_on, "reset_on"))
            model = model._replace(cfg=cfg)
        if opts.devices > jax.local_device_count():
            raise ValueError(f"devices={opts.devices}, but there are {jax.local_device_count()}: give that or fewer")
        texts = prompt_texts(opts)
        prompts = [prompt_ids(text, vocab, cfg) for text in texts]
        scores = scoring.report(opts, model) if opts.score else None
        train.say(f"{run['path']}, step {run['step']}; jax {jax.__version__}, {jax.default_backend()}")
        if scores:
            for line in scores:
                train.write(os.fsencode(line) + b"\n")
            return
        how = How(opts.temperature, opts.top_k, opts.top_p, opts.min_p, tokenizer.size(vocab))
        n_devices, segment = opts.devices or jax.local_device_count(), run["flags"]["tgt_len"]
        sizes = (opts.n_samples, opts.n_tokens, how, opts.seed)
        print_samples(stream(params, prompts, *sizes, cfg, segment, n_devices), texts, vocab, opts)
    except jax.errors.JaxRuntimeError as e:
        if not plan.ran_out(e):
            raise
        sys.exit("sample.py: out of memory: give fewer --n_samples, or train with a shorter --mem_len")
    except (ValueError, OSError) as e:
        if isinstance(e, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader has gone: so may we
            sys.exit(1)
        sys.exit(f"sample.py: {e}")


if __name__ == "__main__":
    start(main)
