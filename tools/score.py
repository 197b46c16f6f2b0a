"""How well a model predicts given texts: nats per token, bits per byte, perplexity, and the surprise of every token.

Every file is read with fresh memory. Its first token is predicted from what an empty prompt starts from (a newline, or
the vocabulary's first symbol), so that every token has a score, also in a file of one token.
"""

import io
import json
import math
import re
from functools import partial
from html import escape
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import txl
from data import flags, tokenizer
from data.prepare import atomic_write, check_plain, open_ids
from txl import acc_dtype


class Scored(NamedTuple):
    path: str
    text: bytes  # of ids, which have none, their numbers
    n_bytes: int  # of the text; 0 of ids
    ids: np.ndarray  # [n]
    logprobs: np.ndarray  # [n] nats, 0 or less
    ranks: np.ndarray  # [n] 1: no token was more likely


@partial(jax.jit, static_argnames="cfg", donate_argnums=2)
def score_segment(params, ids, cache, cfg):
    """log-probabilities and ranks [T] of ids[1] after reading ids[0], both [T]; the new cache."""
    hidden, cache = txl.forward_cached(params, ids[:1], cache, cfg)
    logits = txl.logits(params, hidden, cfg)[0]
    chosen = jnp.take_along_axis(logits, ids[1][:, None], 1)
    return chosen[:, 0] - jax.nn.logsumexp(logits, 1), 1 + (logits > chosen).sum(1), cache


def score(params, ids, start, cfg, segment):
    """log-probabilities [n] (nats, float32 or wider) and ranks [n] (1 + how many are more likely) of ids [n >= 0].

    ids[0] is predicted from the id `start` and empty memory. `segment` tokens are read at a time, as in evaluation;
    with same_length their number does not matter. ValueError where logits are not finite.
    """
    logprobs, ranks = np.empty(len(ids), acc_dtype(cfg)), np.empty(len(ids), np.int32)
    cache = jax.jit(txl.init_cache, static_argnums=(1, 2))(params, cfg, 1)
    for at in range(0, len(ids), segment):
        targets = ids[at : at + segment]
        n, block = len(targets), np.zeros((2, segment), np.int32)  # what follows the text changes nothing before it
        block[0, :n], block[1, :n] = [ids[at - 1] if at else start, *targets[:-1]], targets
        found, rank, cache = score_segment(params, block, cache, cfg)
        logprobs[at : at + n] = np.minimum(np.asarray(found)[:n], 0)  # rounding may leave a little above
        ranks[at : at + n] = np.asarray(rank)[:n]
        bad = ~np.isfinite(logprobs[at : at + n])
        if bad.any():
            raise ValueError(f"logits are not finite at token {at + bad.argmax() + 1}: use another checkpoint")
    return logprobs, ranks


def summary(files):
    """The figures of Scored files together: sums over all their tokens and bytes."""
    tokens, size = sum(len(f.ids) for f in files), sum(f.n_bytes for f in files)
    nats = abs(sum(float(f.logprobs.sum(dtype=np.float64)) for f in files))  # a minus sign would print -0.0000
    mean = nats / tokens
    return {
        "loss_nats": mean,
        "bpb": nats / math.log(2) / size if size else None,
        "ppl": math.exp(min(mean, 700)),
        "tokens": tokens,
        "bytes": size,
    }


def in_words(files, sep=", "):
    """The summary of files for a person."""
    nats, bits, ppl, tokens, size = summary(files).values()
    words = [f"{nats:.4f} nats per token", f"perplexity {ppl:.4g}", f"{tokens:,} token{'s' if tokens > 1 else ''}"]
    if bits is None:
        return sep.join(words)
    words.insert(1, f"{bits:.4f} bits per byte")
    return sep.join([*words, f"{size:,} byte{'s' if size > 1 else ''}"])


# each token as a JSON line


def shown(vocab, number):
    """A token as text: the vocabulary's symbol; of bytes that are no whole character the escape \\x.."""
    if vocab["kind"] in ("ids", "subword"):
        return tokenizer.decode_text(vocab, [number])
    if vocab["kind"] != "byte":
        return vocab["symbols"][number]
    return bytes([number]).decode("utf-8", "backslashreplace")


def token_lines(vocab, files):
    """Yields a JSON line for each token of the files, one file after the other."""
    for f in files:
        for i, logprob, rank in zip(f.ids, f.logprobs, f.ranks):  # str: the shortest number that is this float
            entry = {"token": shown(vocab, i), "id": int(i), "logprob": float(str(logprob)), "rank": int(rank)}
            yield json.dumps(entry) + "\n"


# a page to look at

# Colours of no surprise up to the most, between which the shades are interpolated.
LIGHT = ((255, 255, 255), (255, 240, 170), (254, 178, 76), (235, 60, 40), (105, 0, 65))
DARK = ((24, 24, 28), (66, 24, 92), (165, 44, 96), (242, 113, 38), (252, 240, 150))
SHADES = 13
STYLE = """
:root{color-scheme:light dark}
body{margin:0 auto;max-width:60rem;padding:0 1.5rem 5rem;background:Canvas;color:CanvasText}
body{font:15px/1.5 system-ui,sans-serif}
header{position:sticky;top:0;z-index:1;padding:1rem 0 .6rem;background:Canvas;border-bottom:1px solid #8886}
h1{margin:0;font-size:1.15rem}h2{margin:1.6rem 0 0;font-size:1rem;overflow-wrap:anywhere}
p{margin:.2rem 0 .8rem;opacity:.75}header p{margin:.2rem 0}
i{font-style:normal}
.scale{display:flex;align-items:center;gap:.6rem;margin-top:.5rem;font-size:.8rem}
.scale i{display:inline-block;min-width:2.3em;text-align:center}
pre{font:15px/1.6 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere;tab-size:8}
pre{content-visibility:auto;contain-intrinsic-size:auto 60rem}
pre i{padding:.12em 0}pre i:hover{outline:2px solid #3b82f6;outline-offset:-1px}
output{position:fixed;left:50%;bottom:1.2rem;translate:-50%;padding:.4rem .9rem;border-radius:.5rem;
background:CanvasText;color:Canvas;white-space:pre;pointer-events:none}output:empty{display:none}
.n::before{content:"\\21b5";opacity:.45}.t::before{content:"\\2192";position:absolute;opacity:.45}
"""
SCRIPT = "onmouseover=e=>document.querySelector('output').textContent=e.target.dataset.s||''"
PART = 3000  # tokens that a browser lays out at a time: a million together take it minutes


def shades(anchors):
    """The CSS of the classes b0, b1, ...: a background and a text colour that stands out from it."""
    at, rules = np.linspace(0, len(anchors) - 1, SHADES), []
    for i, rgb in enumerate(np.stack([np.interp(at, range(len(anchors)), channel) for channel in zip(*anchors)], 1)):
        text = "#000" if rgb @ (0.3, 0.59, 0.11) > 125 else "#fff"
        rules.append(f".b{i}{{background:rgb({','.join(f'{c:.0f}' for c in rgb)});color:{text}}}")
    return "".join(rules)


def pieces(vocab, text):
    """Yields (string, number of tokens that it is made of) over a scored text; white space between words is of none.

    Bytes are put together to characters; one that belongs to none comes alone, as the escape \\x.., and a word that the
    vocabulary lacks as it is, though it was scored as <unk>.
    """
    if vocab["kind"] == "byte":
        for c in text.decode("utf-8", "surrogateescape"):
            lone = "\udc80" <= c <= "\udcff"
            yield (f"\\x{ord(c) - 0xDC00:02x}", 1) if lone else (c, len(c.encode()))
    elif vocab["kind"] == "char":
        yield from ((c, 1) for c in text.decode())
    elif vocab["kind"] == "subword":
        yield from tokenizer.subword_pieces(vocab, text)
    else:
        for found in re.finditer(r"\n|\S+|[^\S\n]+", text.decode()):
            yield found[0], int(found[0] == "\n" or not found[0].isspace())


def step_bits(vocab):
    """Bits between two colours: a word is worth more than a character."""
    return 2 if vocab["kind"] in ("word", "subword") else 1


def coloured(vocab, f):
    """Yields the HTML of a Scored file's text: bits, probability and rank of a piece stand in data-s."""
    at = since = 0
    for piece, n in pieces(vocab, f.text):
        # Control characters may not stand in HTML: their pictures do, or escapes where there are none.
        pictures = {ord(c): 0x2400 + ord(c) for c in piece if c < " " and c not in "\n\t"} | {0x7F: 0x2421}
        string = escape(flags.printable(piece.translate(pictures)))
        if not n:
            yield string
            continue
        bits, ranks = abs(float(f.logprobs[at : at + n].sum())) / math.log(2), f.ranks[at : at + n].tolist()
        about = f"{bits:.2f} bits · probability {0.5**bits:.2g} · rank {', '.join(map(str, ranks))}"
        kind = {"\n": " n", "\t": " t"}.get(piece, "")
        yield f'<i class="b{min(int(bits / step_bits(vocab)), SHADES - 1)}{kind}" data-s="{about}">{string}</i>'
        at += n
        if piece == "\n" and at - since >= PART:
            yield "</pre>\n<pre>"
            since = at


def page(vocab, files, about):
    """Yields the parts of a self-contained HTML page: the texts, each character coloured by its surprise."""
    names = {"word": "word", "subword": "token", "ids": "token"}
    title, step = f"Surprise of each {names.get(vocab['kind'], 'character')}", step_bits(vocab)
    yield '<!doctype html>\n<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    yield f"<title>{escape(files[0].path)}: {title.lower()}</title><style>{STYLE}{shades(LIGHT)}"
    yield f"@media (prefers-color-scheme:dark){{{shades(DARK)}}}</style>\n"
    yield f"<header><h1>{title}</h1><p>{escape(about)}</p>"
    labels = [f"{i * step}{'+' if i == SHADES - 1 else ''}" for i in range(SHADES)]
    scale = "".join(f'<i class="b{i}">{label}</i>' for i, label in enumerate(labels))
    yield f'<div class="scale"><span>{scale}</span> bits; each halves the probability</div></header>\n'
    for f in files:
        yield f"<section><h2>{escape(f.path)}</h2><p>{in_words([f], ' · ')}</p>\n<pre>"
        yield from coloured(vocab, f)
        yield "</pre></section>\n"
    if len(files) > 1:
        yield f"<footer><h2>total</h2><p>{in_words(files, ' · ')}</p></footer>\n"
    yield f"<output></output><script>{SCRIPT}</script></html>\n"


# files in and out


def read(path, vocab, cfg):
    """(bytes, how many of them are text, ids) of a file to score: a text, or a .npy where the vocabulary is of ids."""
    if vocab["kind"] == "ids":
        ids = tokenizer.check_ids(open_ids(path), tokenizer.size(vocab), path)
        return tokenizer.decode(vocab, ids), 0, ids
    try:
        text = Path(path).read_bytes()
    except OSError as e:
        raise ValueError(f"score {path}: {e.strerror}: give a text file") from None
    check_plain(io.BytesIO(text), path)
    ids = tokenizer.encode(vocab, text, what=str(path))
    if not len(ids):
        raise ValueError(f"score {path} holds no token: give a text that is not empty")
    return text, len(text), tokenizer.check_ids(ids, cfg.n_token, path)


def check_outputs(opts):
    """ValueError where a file that is asked for cannot be written, or is one of the others."""
    names = {name: getattr(opts, name) for name in ("per_token", "html") if getattr(opts, name)}
    for name, path in names.items():
        if not Path(path).resolve().parent.is_dir():
            raise ValueError(f"{name} {path}: its folder does not exist: make it, or give another path")
        if Path(path).exists() and not Path(path).is_file():
            raise ValueError(f"{name} {path} is no file: give a path to write to")
    made, given = ([Path(path).resolve() for path in paths] for paths in (names.values(), opts.score))
    if len(set(made) - set(given)) < len(made):
        raise ValueError(f"{' and '.join(names)} would overwrite another file of this call: give a path of its own")


def write_whole(path, parts):
    """Writes strings to a file, whole or not at all."""
    path = Path(path).resolve()  # what a link points to, so that the link stays
    with atomic_write(path, "w", encoding="utf-8", errors="replace", newline="") as f:
        f.writelines(parts)


def report(opts, model):
    """Yields the lines to print: one for each file of opts.score, in the end one for all; JSON with opts.json.

    model: what data.checkpoint.load returns. Writes opts.per_token and opts.html before the last line. ValueError,
    before anything is scored, for a text or a path that is no good.
    """
    check_outputs(opts)
    return _report(opts, model, [read(path, model.vocab, model.cfg) for path in opts.score])


def _report(opts, model, texts):
    cfg, params, vocab, run = model
    params, files = jax.tree.map(jnp.asarray, params), []
    start = tokenizer.start_id(vocab)
    tokenizer.check_ids(np.array([start]), cfg.n_token, "the vocabulary")
    for path, (text, n_bytes, ids) in zip(opts.score, texts):
        files.append(Scored(path, text, n_bytes, ids, *score(params, ids, start, cfg, run["flags"]["tgt_len"])))
        yield json.dumps({"file": path} | summary(files[-1:])) if opts.json else f"{path}: {in_words(files[-1:])}"
    if opts.per_token:
        write_whole(opts.per_token, token_lines(vocab, files))
    if opts.html:
        write_whole(opts.html, page(vocab, files, f"{run['path']}, step {run['step']}"))
    yield json.dumps({"files": len(files)} | summary(files)) if opts.json else f"total: {in_words(files)}"
