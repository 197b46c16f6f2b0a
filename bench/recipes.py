"""Memory of the README's recipes by the plan, from shapes alone: python -m bench.recipes [NAME ...] prints JSON lines.

For each the training step as asked and at its thriftiest, and for what MORE makes of two of them.
"""

import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import plan
import train
import txl
from bench.peers import machine
from data import flags

README = Path(__file__).parents[1] / "README.md"
N_TOKEN = {"enwik8": 256, "text8": 27, "wikitext-103": 267_735, "ptb": 10_000}  # as data.prepare makes them
MORE = {"vocabulary": ("wikitext-103-base", "--batch 4 --tgt_len 64 --mem_len 64 --dropout 0")}  # and little else
MORE |= {"eighth": ("wikitext-103-large", "--batch 16")}  # the rows of one of 8 devices
THRIFTY = plan.THRIFTY | dict(loss_chunk=64)  # logits of 267,735 ids are large


def commands(text):
    """{recipe: words after `python train.py`} of the training commands in a README's "Reproduce"."""
    section = re.search(r"^## Reproduce\n(.*?)^## ", text, re.M | re.S)[1].replace("\\\n", " ")
    found = [shlex.split(words) for words in re.findall(r"^python train\.py (--data .*)$", section, re.M)]
    return {words[words.index("--out") + 1].removeprefix("runs/"): words for words in found}


def settings(words):
    """(cfg, run) that the command asks for on a corpus, known without having it."""
    given = flags.parse(words, "train.py", "", (txl.Config, train.Run), ())
    cfg = txl.Config(n_token=N_TOKEN[given["data"]], **train.chosen(txl.Config, given))
    return cfg, train.Run(**train.chosen(train.Run, given))


def lines(name, words):
    """Yields the plan's lines of a recipe on one device."""
    cfg, run = settings(words)
    for asked, c in ((True, cfg), (False, replace(cfg, **THRIFTY))):
        about = {"recipe": name, "command": shlex.join(words), "n_params": txl.count_params(cfg), "asked": asked}
        yield about | plan.measure(c, run, 1) | train.versions() | machine()


def main():
    recipes = commands(README.read_text(encoding="utf-8"))
    recipes |= {name: recipes[base] + shlex.split(words) for name, (base, words) in MORE.items()}
    for name in sys.argv[1:] or recipes:
        for line in lines(name, recipes[name]):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
