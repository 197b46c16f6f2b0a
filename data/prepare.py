"""Corpora: the built-in one, any text file, a folder of three texts, or a folder of tokens that this script prepared.

    python -m data.prepare FILE... --out DIR [--tokenizer byte|char|word] [--min_count N] [--max_size N]
    python -m data.prepare NAME [--from FILE_OR_DIR_OR_URL] [--out DIR] [--tokenizer ...]

writes {train,valid,test}.bin (ids, little-endian, in the dtype that meta.json names) and meta.json, from files joined
in the order given and split 90/5/5, from one folder that holds train.txt, valid.txt, test.txt, or from a standard
corpus, downloaded or given. It streams.
"""

import argparse
import hashlib
import io
import json
import os
import platform
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data import corpora
from data import tokenizer as tok
from data.corpora import CORPORA, SPLITS
from data.folder import together
from data.tokenizer import check_ids

DTYPES = ("uint8", "uint16", "uint32")
# What is not plain library code, or differs between installations of one version.
SKIP_DIRS = frozenset(
    "test tests idlelib idle_test lib2to3 tkinter turtledemo encodings pydoc_data ensurepip distutils msilib venv "
    "site-packages dist-packages __pycache__".split()
)


class Corpus(NamedTuple):
    name: str
    train: np.ndarray  # ids [n], possibly mapped from a file
    valid: np.ndarray
    test: np.ndarray
    vocab: dict
    sha256: str  # of the text train + valid + test; of the ids where only tokens are known
    n_bytes: dict  # split -> bytes of text in it, for bits per byte
    source: str  # one line for people


def load(path=None, tokenizer=None):
    """The Corpus at `path`: a text file (split 90/5/5 in order), a folder of train.txt, valid.txt, test.txt, a folder
    made by this script, the name of a standard corpus (./NAME is a file or folder of that name), or, for None, the
    built-in corpus. The vocabulary is that of the training part.
    `tokenizer` None is byte for text and, for prepared tokens, the one they were prepared with.
    The same bytes fall into the same split whatever the tokenizer. ValueError, one line, for what cannot be used.
    """
    if path is None:
        files = builtin_files()
        source = f"standard library of Python {platform.python_version()}, {len(files)} files"
        return _load_text("stdlib", split([builtin_text()]), tokenizer or "byte", source)
    if str(path) in CORPORA:
        name, path = path, corpora.FOLDER / path
        if not os.path.exists(path / "meta.json"):
            raise ValueError(f"{name}: no {path / 'meta.json'}: run python -m data.prepare {name}")
    path = Path(path)
    if os.path.exists(path / "meta.json"):  # unlike Path.exists, False where a folder may not be entered
        return _load_prepared(path, tokenizer)
    return _load_text(path.resolve().stem, find_splits([path]), tokenizer or "byte", str(path))


def recode(corpus, vocab):
    """The corpus in another vocabulary."""
    text = {s: tok.decode(corpus.vocab, getattr(corpus, s)) for s in SPLITS}
    return corpus._replace(**{s: tok.encode(vocab, text[s], what=f"{s} split") for s in SPLITS})


def _load_text(name, splits, kind, source):
    vocab = tok.build(kind, _blocks(splits["train"]), what="train split")
    digest = hashlib.sha256()
    ids = {s: np.concatenate([np.empty(0, tok.dtype(vocab)), *_encoded(vocab, splits, s, digest)]) for s in SPLITS}
    return Corpus(name, **ids, vocab=vocab, sha256=digest.hexdigest(), n_bytes=_n_bytes(splits), source=source)


def _load_prepared(folder, tokenizer):
    meta = _read_meta(folder / "meta.json")
    vocab = meta["vocab"]
    if tokenizer not in (None, vocab["kind"]):
        raise ValueError(
            f"{folder}: prepared with tokenizer {vocab['kind']}, asked {tokenizer}: "
            f"use --tokenizer {vocab['kind']}, or prepare it again"
        )
    files = {s: folder / f"{s}.bin" for s in SPLITS}
    ids = {s: _map_ids(files[s], np.dtype(meta["dtype"]), meta["n_tokens"][s]) for s in SPLITS}
    for s in SPLITS:
        check_ids(ids[s], tok.size(vocab), files[s])
    digest = hashlib.sha256()
    if "sha256" not in meta:  # tokens that somebody else made
        for s in SPLITS:
            digest.update(ids[s])
    sha256 = meta.get("sha256") or digest.hexdigest()
    source = f"{folder}, prepared tokens ({vocab['kind']})"
    return Corpus(folder.resolve().name, **ids, vocab=vocab, sha256=sha256, n_bytes=meta["n_bytes"], source=source)


def _read_meta(file):
    try:
        meta = json.loads(file.read_bytes())
        tok.check(meta["vocab"])
        counts = [meta[key][s] for key in ("n_tokens", "n_bytes") for s in SPLITS]
        if meta["dtype"] not in DTYPES:
            raise ValueError(f"dtype {meta['dtype']!r}, want one of {', '.join(DTYPES)}")
        if not all(type(n) is int and 0 <= n < 2**63 for n in counts):
            raise ValueError(f"n_tokens, n_bytes {counts}, want counts")
        if any(meta["n_tokens"][s] and not meta["n_bytes"][s] for s in SPLITS):
            raise ValueError(f"n_bytes {meta['n_bytes']}, want some where there are tokens")
        if not isinstance(meta.get("sha256", ""), str):
            raise ValueError(f"sha256 {meta['sha256']!r}, want a text")
    except KeyError as e:
        raise ValueError(f"{file}: no {e}: prepare the corpus again") from None
    except (OSError, TypeError, ValueError, RecursionError) as e:
        raise ValueError(f"{file}: cannot be used ({e}): prepare the corpus again") from None
    return meta


def _map_ids(file, dtype, n):
    found = file.stat().st_size if file.is_file() else "no file"
    if found != n * dtype.itemsize:
        raise ValueError(
            f"{file}: found {found}, want {n * dtype.itemsize} bytes as meta.json says: prepare the corpus again"
        )
    try:
        return np.memmap(file, dtype, mode="r") if n else np.empty(0, dtype)  # an empty file cannot be mapped
    except OSError as e:
        raise ValueError(f"{file}: cannot be read ({e.strerror}): allow reading it") from None


def builtin_files(root=None):
    """Paths of the built-in corpus: the library that runs this script, whatever its installation adds left out."""
    root = Path(root or sysconfig.get_path("stdlib"))
    found = {}
    for folder, dirs, names in os.walk(root):
        dirs[:] = [d for d in dirs if d not in SKIP_DIRS and not d.startswith("config-")]
        for name in names:
            file = Path(folder, name)
            skipped = name == "turtle.py" or name.startswith("_sysconfigdata")
            if name.endswith(".py") and not skipped and file.is_file():  # not a broken link
                # Order by a hash, so that each split holds a bit of every package.
                found[hashlib.sha256(file.relative_to(root).as_posix().encode()).hexdigest()] = file
    return [found[key] for key in sorted(found)]


def builtin_text(root=None):
    """The built-in corpus as one text with LF line ends. ValueError where there is less than 1 MB of it."""
    text = b"".join(file.read_bytes() for file in builtin_files(root)).replace(b"\r\n", b"\n")
    if len(text) < 10**6:
        where = root or sysconfig.get_path("stdlib")
        raise ValueError(f"built-in corpus: found {len(text)} bytes of *.py in {where}, want 1 MB: use --data FILE")
    return text


def find_splits(paths):
    """{split: spans} for text files, joined in order, or for one folder of train.txt, valid.txt, test.txt.
    A span is (file, member of a zip or bytes, start, stop). ValueError, one line, for what is no text to learn from.
    """
    if len(paths) == 1 and os.path.isdir(paths[0]):
        folder = Path(paths[0])
        files = {s: folder / f"{s}.txt" for s in SPLITS}
        missing = [file.name for file in files.values() if not os.path.exists(file)]
        if missing:
            raise ValueError(
                f"{folder}: a folder without {', '.join(missing)}, want train.txt, valid.txt and test.txt, "
                "or meta.json and train.bin, valid.bin, test.bin: give a text file, or run python -m data.prepare"
            )
        return {s: [(check_text(file), 0, file.stat().st_size)] for s, file in files.items()}
    return split([check_text(Path(path)) for path in paths])


def check_text(file):
    """`file`, if it is a regular file that can be read and holds more than whitespace; else ValueError."""
    try:
        if not file.stat().st_size and file.is_file():
            raise ValueError(f"{file}: an empty file, want text: give another file")
        if not file.is_file():
            found = "a folder" if file.is_dir() else "no regular file"
            raise ValueError(f"{file}: {found}, want a text file: give a file")
        if all(block.isspace() for block in _blocks([(file, 0, file.stat().st_size)])):
            raise ValueError(f"{file}: only newlines and spaces, want text: give another file")
    except FileNotFoundError:
        raise ValueError(f"{file}: no such file or folder: check the path") from None
    except OSError as e:
        raise ValueError(f"{file}: cannot be read ({e.strerror}): allow reading it, or give another file") from None
    return file


def split(sources):
    """{split: spans} of texts (files or bytes) joined in order: 90/5/5 percent, and no UTF-8 character cut in two."""
    n = sum(_len(source) for source in sources)
    cuts = [0]
    for percent in (90, 95):
        at = n * percent // 100
        cuts.append(at + tok.char_start(b"".join(_blocks(_spans(sources, at, at + 3))), 0))
    cuts.append(n)
    return {s: _spans(sources, cuts[i], cuts[i + 1]) for i, s in enumerate(SPLITS)}


def _spans(sources, start, stop):
    spans, begin = [], 0
    for source in sources:
        low, high = max(start - begin, 0), min(stop - begin, _len(source))
        if low < high:
            spans.append((source, low, high))
        begin += _len(source)
    return spans


def _len(source):
    return len(source) if isinstance(source, bytes) else source.stat().st_size


def _blocks(spans):
    """Yields the bytes of spans in blocks."""
    for source, start, stop in spans:
        with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as f:
            f.seek(start)
            while start < stop:
                block = f.read(min(tok.BLOCK, stop - start))
                if not block:
                    raise ValueError(
                        f"{source}: ended at {start} bytes, want {stop}: do not change it while it is read"
                    )
                start += len(block)
                yield block


def _encoded(vocab, splits, s, digest):
    """Yields the ids of split `s` and adds its text to `digest` on the way, so that a file is read once for both."""

    def hashed():
        for block in _blocks(splits[s]):
            digest.update(block)
            yield block

    return tok.encode_blocks(vocab, hashed(), what=f"{s} split")


def _n_bytes(splits):
    return {s: sum(stop - start for _, start, stop in splits[s]) for s in SPLITS}


def prepare(paths, out, *, tokenizer="byte", min_count=0, max_size=0):
    """Writes the texts `paths` as a folder of tokens that `load` reads; returns what meta.json holds."""
    return write_tokens(find_splits(paths), out, tokenizer, min_count=min_count, max_size=max_size)


def prepare_named(name, out=None, *, place="", tokenizer="", min_count=0, max_size=0):
    """As `prepare`, for a standard corpus: from the network, or from `place`; see corpora.spans."""
    source, out = CORPORA[name], Path(out or corpora.FOLDER / name)
    out.mkdir(parents=True, exist_ok=True)
    splits = corpora.spans(source, out, place)
    return write_tokens(splits, out, tokenizer or source.tokenizer, min_count=min_count, max_size=max_size)


def write_tokens(splits, out, tokenizer, *, min_count=0, max_size=0):
    """Writes {split: spans} as tokens and meta.json, and returns what this holds. A folder that has it is complete;
    where this fails, an older corpus there stays as it was.
    """
    vocab = tok.build(tokenizer, _blocks(splits["train"]), min_count=min_count, max_size=max_size, what="train split")
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    dtype, digest = tok.dtype(vocab), hashlib.sha256()
    with together(*(out / f"{s}.bin" for s in SPLITS), out / "meta.json") as (*bins, meta_file):
        n_written = {s: sum(map(file.write, _encoded(vocab, splits, s, digest))) for s, file in zip(SPLITS, bins)}
        meta = {
            "vocab": vocab,
            "dtype": dtype.name,
            "n_tokens": {s: n_written[s] // dtype.itemsize for s in SPLITS},
            "n_bytes": _n_bytes(splits),
            "sha256": digest.hexdigest(),
        }
        meta_file.write(json.dumps(meta).encode())
    return meta


def main(argv=None):
    parser = argparse.ArgumentParser("python -m data.prepare", description="Text to tokens.", allow_abbrev=False)
    names = ", ".join(CORPORA)
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help=f"joined in order and split 90/5/5; or one folder of texts; or one of {names}",
    )
    parser.add_argument("--out", metavar="DIR", help="folder to write, for train.py --data; of a NAME: corpora/NAME")
    parser.add_argument("--from", dest="place", metavar="FILE_OR_DIR_OR_URL", help="of a NAME: a copy to take instead")
    parser.add_argument("--tokenizer", choices=tok.KINDS, help="default: byte; of a NAME: what published numbers need")
    parser.add_argument("--min_count", type=int, default=0, help="word: rarer ones become <unk>; default: 0, none")
    parser.add_argument("--max_size", type=int, default=0, help="word: largest vocabulary; default: 0, no limit")
    args = parser.parse_args(argv)
    named = len(args.files) == 1 and args.files[0] in CORPORA
    out = args.out or (str(corpora.FOLDER / args.files[0]) if named else None)
    options = dict(min_count=args.min_count, max_size=args.max_size)
    try:
        if named:
            meta = prepare_named(args.files[0], out, place=args.place, tokenizer=args.tokenizer, **options)
        elif args.place or not out:
            wrong = f"--from {args.place} is for {names}" if args.place else "no --out, want the folder to write"
            raise ValueError(f"{' '.join(args.files)}: {wrong}: give --out DIR alone")
        else:
            meta = prepare(args.files, out, tokenizer=args.tokenizer or "byte", **options)
    except OSError as e:
        sys.exit(f"data.prepare: {e.filename or out}: {e.strerror or e}: free space, or give another --out DIR")
    except ValueError as e:
        sys.exit(f"data.prepare: {e}")
    n_vocab = tok.size(meta.pop("vocab"))
    print(json.dumps({"out": out, "n_vocab": n_vocab, **meta}))


if __name__ == "__main__":
    main()
