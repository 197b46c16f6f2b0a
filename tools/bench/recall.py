"""How far back a trained model remembers: right answers against distance. Two minutes on 2 quiet cores.

A text of words: `c=5` states that c is 5, later `c?` asks for it and `c=5` answers; dots stand between. Each fact is
asked for once. One model is trained with memory and one with --mem_len 0, by train.py; both then answer in fresh texts
with facts up to 4,000 words back, the first with 2 and 4 times its memory, too. In --out it leaves the texts, the runs,
recall.png, and a prompt far longer than a segment for sample.py. --draw: results/recall.png.
"""

import argparse
import contextlib
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import train
import txl
from data import checkpoint, tokenizer
from tools.bench import harness

LETTERS, DIGITS = "abcdefgh", "01234567"
ALIVE = 3  # facts that are stated and not yet asked for
NEAREST, FARTHEST = 8, 4096  # words between a fact and the answer, in what is measured
EDGES = (8, 16, 32, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 3072, 4097)
MEMORY = 64
FLAGS = dict(n_layer=3, n_head=4, d_model=96, d_head=24, d_inner=192, tgt_len=128, batch=16, steps=450)
FLAGS |= dict(lr=1e-2, schedule="cosine")  # with which its figures were measured
TINY = dict(n_layer=2, n_head=2, d_model=16, d_head=8, d_inner=16, tgt_len=8, batch=2, steps=4)


def make_text(rng, n, farthest, *, power=1.0, nearer=0):
    """(n words, [(index of an answer, its distance from the fact in words)]).

    Distances are log-uniform from NEAREST to `farthest`, with `power` below 1 more of them far. Over the first `nearer`
    words the farthest grows from twice the nearest on, so that a model can begin with what is easy.
    """
    words, answers, facts, letters = [], [], [], list(rng.permutation(list(LETTERS)))
    while len(words) < n:
        due = [fact for fact in facts if fact[3] <= len(words)]
        if due:
            letter, digit, stated, _ = fact = due[0]
            words += [f"{letter}?", f"{letter}={digit}"]
            answers.append((len(words) - 1, len(words) - 1 - stated))
            facts.remove(fact)
            letters.append(letter)
        elif len(facts) < ALIVE:
            letter, digit = letters.pop(rng.integers(len(letters) // 2)), rng.choice(list(DIGITS))
            reach = np.log(farthest / NEAREST)
            if len(words) < nearer:
                reach = np.log(2) + (reach - np.log(2)) * len(words) / nearer
            distance = int(NEAREST * np.exp(reach * rng.random() ** power))
            facts.append((letter, digit, len(words), len(words) + distance - 1))
            words.append(f"{letter}={digit}")
        else:
            words.append(".")
    return words[:n], [answer for answer in answers if answer[0] < n]


def write_texts(folder, flags, memory, seed):
    """Writes train.txt, a stream of its own for each row of a batch, valid.txt and test.txt."""
    n, farthest = flags["steps"] * flags["tgt_len"], flags["n_layer"] * memory
    rngs = np.random.default_rng(seed).spawn(flags["batch"] + 2)
    streams = [make_text(rng, n, farthest, power=0.5, nearer=0.3 * n)[0] for rng in rngs[2:]]
    streams.append(["."])  # a target for the last word
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"train": sum(streams, [])}
    parts |= {split: make_text(rng, 20 * flags["tgt_len"], farthest)[0] for split, rng in zip(("valid", "test"), rngs)}
    for split, words in parts.items():
        (folder / f"{split}.txt").write_text(" ".join(words), encoding="utf-8")


def train_run(folder, data, flags, mem_len, seed):
    """Trains by train.py into a run folder; its Checkpoint, and seconds of the clock and of all cores."""
    # A query without memory sees its segment: with same_length and no memory it would see itself alone.
    given = {**flags, "data": data, "tokenizer": "word", "out": folder, "seed": seed, "mem_len": mem_len}
    given |= {"devices": 1, "eval_every": flags["steps"]}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    words += ["--same_length", "--clamp_len", str(mem_len)] if mem_len else []
    print(f"python train.py {shlex.join(words)}", file=sys.stderr)
    start, busy = time.perf_counter(), time.process_time()
    with contextlib.redirect_stdout(sys.stderr):  # standard output is for results
        train.main(words)
    took = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - busy}
    return checkpoint.load(folder / "last.npz"), took


def predict(model, mem_len, ids, T):
    """The most likely next ids [B, N] after each of ids [B, N], read in segments of T by the cache of `mem_len`."""
    cfg = replace(model.cfg, mem_len=mem_len)
    params = txl.unstack(model.params, cfg)

    @jax.jit
    def read(params, ids, cache):
        scores, cache = txl.decode(params, ids, cache, cfg)
        return scores.argmax(-1), cache

    cache, predicted = txl.init_cache(params, cfg, len(ids)), []
    for first in range(0, ids.shape[1], T):
        best, cache = read(params, jnp.asarray(ids[:, first : first + T]), cache)
        predicted.append(np.asarray(best))
    return np.concatenate(predicted, 1)


def accuracies(model, mem_len, texts, T):
    """Yields the share of right answers in fresh texts [(words, answers)] for each range of distances."""
    ids = np.stack([tokenizer.encode(model.vocab, " ".join(words).encode()) for words, _ in texts]).astype(np.int32)
    right = predict(model, mem_len, ids, T)[:, :-1] == ids[:, 1:]
    found = [(distance, right[row, at - 1]) for row, (_, answers) in enumerate(texts) for at, distance in answers]
    distances, right = map(np.array, zip(*found))
    for lo, hi in zip(EDGES, EDGES[1:]):
        inside = (distances >= lo) & (distances < hi)
        if inside.any():
            accuracy = float(right[inside].mean())
            yield {"from": lo, "below": hi, "accuracy": accuracy, "answers": int(inside.sum())}


def write_prompt(path, rng, flags, memory):
    """Writes a prompt that ends in a question for a fact of an earlier segment, as far back as `memory` reaches.

    Returns the answer, the words of the prompt and how far back the fact stands.
    """
    words, answers = make_text(rng, 16 * flags["tgt_len"], 2 * memory)
    at, distance = next(
        (at, k) for at, k in reversed(answers) if memory / 2 < k <= memory and at % flags["tgt_len"] < k
    )
    path.write_text(" ".join(words[:at]), encoding="utf-8")
    return words[at], at, distance


def draw(lines, path):
    """Accuracy against distance, a line for each memory length and seed; chance and what the layers reach."""
    figure = harness.new_figure(8, 4)
    axes = figure.add_subplot(xlabel="words back from the answer to the fact", ylabel="answers that are right")
    lengths = sorted({line["mem_len"] for line in lines})
    trained = min(n for n in lengths if n)
    for color, n in zip(("C7", "C0", "C1", "C2"), lengths):
        own = [line for line in lines if line["mem_len"] == n]
        reach, label = own[0]["tgt_len"], f"no memory; dotted: segment of {own[0]['tgt_len']}"
        if n:
            reach = own[0]["n_layer"] * n
            how = "as in training" if n == trained else "the same weights"
            label = f"memory {n}, {how}; dotted: {own[0]['n_layer']} layers x {n}"
        axes.axvline(reach, color=color, linestyle=":")
        for seed in sorted({line["seed"] for line in own}):
            points = [(np.sqrt(a["from"] * a["below"]), a["accuracy"]) for a in own if a["seed"] == seed]
            axes.plot(*zip(*points), ".-", color=color, label=label)
            label = None
    axes.axhline(1 / len(DIGITS), color="k", linestyle="--", linewidth=0.8)
    axes.text(NEAREST, 1 / len(DIGITS) + 0.02, " chance", fontsize=8)
    ticks = [2**i for i in range(3, 13)]
    axes.set(xscale="log", ylim=(0, 1.05))
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axes.minorticks_off()
    figure.legend(fontsize=8, loc="outside upper center", ncols=2)
    figure.savefig(path, dpi=130)
    print(f"drawn in {path}", file=sys.stderr)


def main(argv=None):
    parser = argparse.ArgumentParser("python -m tools.bench.recall", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--tiny", action="store_true", help="small sizes: only to see that it works")
    parser.add_argument("--seed", type=int, default=1, help="of the texts, the weights and dropout")
    parser.add_argument("--out", type=Path, default=Path("runs/recall"), help="folder to make and write to")
    parser.add_argument("--draw", action="store_true", help="draw the committed results, and nothing else")
    args = parser.parse_args(argv)
    if args.draw:
        return draw(harness.read_results("recall", what="recall"), harness.RESULTS / "recall.png")
    if args.out.exists():
        sys.exit(f"{args.out} is there already: give another --out, or remove it")
    flags, memory, rows, n = (TINY, 8, 2, 256) if args.tiny else (FLAGS, MEMORY, 16, 12_288)
    T = flags["tgt_len"]
    write_texts(args.out / "text", flags, memory, args.seed)
    rngs = np.random.default_rng((args.seed, 1)).spawn(rows + 1)
    texts = [make_text(rng, n, min(FARTHEST, n // 2)) for rng in rngs[1:]]
    lines = []
    for name, trained, lengths in (("none", 0, (0,)), ("memory", memory, (memory, 2 * memory, 4 * memory))):
        model, took = train_run(args.out / name, args.out / "text", flags, trained, args.seed)
        about = {"model": name, "seed": args.seed, "n_layer": flags["n_layer"], "tgt_len": T}
        harness.emit({"what": "trained", **about, "mem_len": trained, "steps": flags["steps"], **took})
        for mem_len in lengths:
            for line in accuracies(model, mem_len, texts, T):
                lines.append({"what": "recall", **about, "mem_len": mem_len, "chance": 1 / len(DIGITS), **line})
                harness.emit(lines[-1])
    draw(lines, args.out / "recall.png")
    answer, length, distance = write_prompt(args.out / "prompt.txt", rngs[0], flags, memory)
    print(f"prompt of {length} words; {answer} must follow, which stands {distance} words back:", file=sys.stderr)
    paths = ["--run", str(args.out / "memory"), "--prompt_file", str(args.out / "prompt.txt")]
    print(f"python sample.py {shlex.join(paths)} --n_tokens 1 --temperature 0", file=sys.stderr)


if __name__ == "__main__":
    main()
