"""Corpora: the built-in one, any text file, a folder of three texts, a folder of tokens that this script prepared, or
token ids of one's own: a .npy file, or a folder like a prepared one.

    python -m data.prepare FILE... --out DIR [--tokenizer byte|char|word|FILE] [--min_count N] [--max_size N]
    python -m data.prepare NAME [--from FILE_OR_DIR_OR_URL] [--out DIR] [--tokenizer ...]

writes {train,valid,test}.bin (ids, little-endian, in the dtype that meta.json names) and meta.json, from files joined
in the order given and split 90/5/5, from a folder of train.txt, valid.txt, test.txt, or from a standard corpus. Texts
are read in blocks, never whole.
"""

if __name__ == "__main__":
    from data import flags

    flags.exit_on_interrupt()  # while modules load

import argparse
import codecs
import contextlib
import glob
import hashlib
import io
import itertools
import json
import os
import platform
import re
import shlex
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data import corpora, flags
from data import tokenizer as tok
from data.corpora import CORPORA, SPLITS
from data.tokenizer import check_ids

DTYPES = ("uint8", "uint16", "uint32")
# What is not plain library code, or differs between installations of one version.
SKIP_DIRS = frozenset(
    "test tests idlelib idle_test lib2to3 tkinter turtledemo encodings pydoc_data ensurepip distutils msilib venv "
    "site-packages dist-packages __pycache__".split()
)

UNPACK = "unpack it and give the text inside"
CONTAINERS = (  # pattern of a file's first bytes, what such a file is, what to do about it
    (rb"\x93NUMPY", "a numpy array", "give a text, or to train.py --data token ids"),
    (rb"\x1f\x8b\x08", "compressed by gzip", UNPACK),
    (rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", "compressed by bzip2", UNPACK),
    (rb"\xfd7zXZ\0", "compressed by xz", UNPACK),
    (rb"\x28\xb5\x2f\xfd", "compressed by zstd", UNPACK),
    (rb"7z\xbc\xaf'\x1c", "a 7z archive", UNPACK),
    (rb"PK(\x03\x04|\x05\x06|\x07\x08)", "a zip archive (.docx and .npz are, too)", "unpack it or save it as text"),
    (rb".{257}ustar", "a tar archive", UNPACK),
    (rb"%PDF-", "a PDF", "save it as plain text"),
    (rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|GIF8[79]a.{0,6}\0", "an image", "give a text"),
    (rb"PAR1\x15|ARROW1\x00\x00", "a Parquet or Arrow table", "write its text column as plain text"),
)
PIECE = 4096  # bytes that are looked at in each of 16 places to tell what a file is


class Corpus(NamedTuple):
    name: str
    train: np.ndarray  # ids [n], possibly mapped from a file
    valid: np.ndarray
    test: np.ndarray
    vocab: dict
    sha256: str  # of the text train + valid + test; of the ids where only tokens are known
    tokens_sha256: str  # of the ids, and of the tokens and bytes of each split: equal only if a run may go on with it
    n_bytes: dict  # split -> bytes of text in it, for bits per byte; 0 where ids have no text
    n_unk: dict  # split -> ids of it that are <unk>
    source: str  # one line for people


def load(path=None, tokenizer=None, vocab=None):
    """The Corpus at `path`: a text file or a .npy of token ids (split 90/5/5 in order), a folder of train.txt,
    valid.txt, test.txt, a folder made by this script, the name of a standard corpus (./NAME is a file or folder of
    that name) or None, the built-in corpus. The splits do not depend on the tokenizer.

    vocab: encodes the text, as a checkpoint's must. None: one built from the training split by `tokenizer`, for which
    None is byte, or of prepared tokens their own.
    """
    if path is None:
        files = builtin_files()
        source = f"standard library of Python {platform.python_version()}, {len(files)} files"
        return _load_text("stdlib", split([builtin_text()]), source, tokenizer, vocab)
    if str(path) in CORPORA:
        name, path = path, corpora.FOLDER / path
        if not os.path.exists(path / "meta.json"):
            raise ValueError(f"{name}: no {path / 'meta.json'}: run python -m data.prepare {name}")
    path = Path(path)
    if os.path.exists(path / "meta.json"):  # unlike Path.exists, False where a folder may not be entered
        corpus = _load_prepared(path, tokenizer if vocab is None else None)
        return corpus if vocab in (None, corpus.vocab) else retokenize(corpus, vocab)
    if is_npy(path):
        return _load_ids(path, tokenizer, vocab)
    return _load_text(Path(os.path.abspath(path)).stem, find_splits([path]), str(path), tokenizer, vocab)


def retokenize(corpus, vocab):
    """A prepared corpus, with its text encoded by another vocabulary.

    ValueError where its tokens do not say what that gives: words leave white space out, and <unk> is anything.
    """
    if "ids" in (corpus.vocab["kind"], vocab["kind"]):
        if corpus.vocab["kind"] != vocab["kind"] or tok.size(corpus.vocab) > tok.size(vocab):
            found, want = (f"{tok.size(v)} of kind {v['kind']}" for v in (corpus.vocab, vocab))
            raise ValueError(f"{corpus.source}: a vocabulary of {found}, the model's is of {want}: give other data")
        return corpus._replace(vocab=vocab)
    n_unk = sum(corpus.n_unk.values())
    lost = n_unk and corpus.vocab["kind"] == "char"
    text = {s: list(tok.decode_blocks(corpus.vocab, getattr(corpus, s))) for s in SPLITS}
    n_bytes = {s: sum(map(len, text[s])) for s in SPLITS}
    if corpus.vocab["kind"] in ("word", "subword"):
        n_bytes, digest = corpus.n_bytes, hashlib.sha256()  # of the text that the words were made from
        for block in itertools.chain(*text.values()):
            digest.update(block)
        words = corpus.vocab["kind"] == vocab["kind"] == "word" and not n_unk
        lost = not words and digest.hexdigest() != corpus.sha256
    if lost:
        found = "the text cannot be told from its tokens (<unk>, white space), and the model has another vocabulary"
        raise ValueError(f"{corpus.source}: {found}: give the text itself")
    encoded = {s: tok.encode_blocks(vocab, text[s], what=f"{s} split") for s in SPLITS}
    ids = {s: np.concatenate([np.empty(0, tok.dtype(vocab)), *encoded[s]]) for s in SPLITS}
    _, tokens_sha256, _, n_unk = _count_tokens(vocab, {s: [ids[s]] for s in SPLITS}, n_bytes)
    return corpus._replace(**ids, vocab=vocab, n_bytes=n_bytes, n_unk=n_unk, tokens_sha256=tokens_sha256)


def _load_text(name, splits, source, kind, vocab):
    if vocab is None:
        vocab = _build(kind or "byte", splits)
    digest, n_bytes = hashlib.sha256(), _split_bytes(splits)
    ids = {s: np.concatenate([np.empty(0, tok.dtype(vocab)), *_encoded(vocab, splits, s, digest)]) for s in SPLITS}
    _, tokens_sha256, _, n_unk = _count_tokens(vocab, {s: [ids[s]] for s in SPLITS}, n_bytes)
    about = dict(sha256=digest.hexdigest(), tokens_sha256=tokens_sha256, n_bytes=n_bytes, n_unk=n_unk, source=source)
    return Corpus(name, **ids, vocab=vocab, **about)


def _build(kind, splits, **options):
    """The vocabulary of the training split."""
    others = [(f"{s} split", _blocks(splits[s])) for s in SPLITS[1:]]
    return tok.build(kind, _blocks(splits["train"]), what="train split", others=others, **options)


def _count_tokens(vocab, blocks, n_bytes):
    """(sha256 of the ids, tokens_sha256 of a Corpus, {split: tokens}, {split: <unk>}) of {split: blocks of ids}."""
    digest, unk = hashlib.sha256(), tok.unk_id(vocab)
    n_tokens, n_unk = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
    for s in SPLITS:
        for ids in blocks[s]:
            digest.update(ids)
            n_tokens[s] += len(ids)
            n_unk[s] += int((ids == unk).sum())
    counts = [n[s] for n in (n_tokens, n_bytes) for s in SPLITS]
    tokens_sha256 = hashlib.sha256(f"{digest.hexdigest()} {counts}".encode()).hexdigest()
    return digest.hexdigest(), tokens_sha256, n_tokens, n_unk


def unknown_characters(vocab, n_unk):
    """A line that counts the characters that became <unk>; "" where none did."""
    if vocab["kind"] != "char" or not any(n_unk.values()):
        return ""
    counts = ", ".join(f"{n_unk[s]:,} of {s}" for s in SPLITS)
    return f"characters that the vocabulary lacks, now {tok.UNK}: {counts}"


def is_npy(path):
    """Whether a path is a file that begins as numpy.save's do."""
    with contextlib.suppress(OSError):
        if os.path.isfile(path):  # opening a pipe would wait
            with open(path, "rb") as f:
                return f.read(6) == b"\x93NUMPY"
    return False


def open_ids(path):
    """The token ids [n] in a .npy file, mapped. ValueError if it holds anything else."""
    want = "one dimension of whole numbers, as numpy.save writes"
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False) if is_npy(path) else None
    except (OSError, ValueError) as e:
        raise ValueError(f"{path}: cannot be read ({e}), want {want}: save it again") from None
    if ids is None or ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
        found = "no .npy file" if ids is None else f"{ids.dtype} of shape {ids.shape}"
        raise ValueError(f"{path}: found {found}, want {want}: save it so")
    return ids


def _load_ids(path, tokenizer, vocab):
    """The Corpus of a .npy file of token ids. Without a vocabulary the largest id says how many there are."""
    kind = vocab["kind"] if vocab else tokenizer or "ids"
    if kind != "ids":
        raise ValueError(f"{path}: token ids, which have no text for the tokenizer {kind}: give a text")
    ids = open_ids(path)
    cuts = [len(ids) * percent // 100 for percent in (0, 90, 95, 100)]
    blocks = lambda start, stop: _read_blocks(path, ids.dtype, ids.offset + start * ids.itemsize, stop - start)
    ends = [(int(block.min()), int(block.max())) for block in blocks(0, len(ids))]
    low, high = min(low for low, _ in ends), max(high for _, high in ends)
    most = tok.size(vocab) - 1 if vocab else 2**31 - 2
    if low < 0 or high > most:
        raise ValueError(f"{path}: ids from {low} to {high}, want 0 to {most}: number the tokens so")
    vocab = vocab or {"kind": "ids", "size": high + 1}
    splits, parts = {}, {}
    for s, start, stop in zip(SPLITS, cuts, cuts[1:]):
        splits[s] = ids[start:stop]
        parts[s] = (block.astype(tok.dtype(vocab)) for block in blocks(start, stop))
    n_bytes = dict.fromkeys(SPLITS, 0)
    sha256, tokens_sha256, _, n_unk = _count_tokens(vocab, parts, n_bytes)
    about = dict(sha256=sha256, tokens_sha256=tokens_sha256, n_bytes=n_bytes, n_unk=n_unk, source=f"{path}, token ids")
    return Corpus(Path(os.path.abspath(path)).stem, **splits, vocab=vocab, **about)


def _load_prepared(folder, tokenizer):
    meta = _read_meta(folder / "meta.json")
    vocab = meta["vocab"]
    if tokenizer not in (None, vocab["kind"]):
        found = f"{folder}: prepared with tokenizer {vocab['kind']}, asked {tokenizer}"
        raise ValueError(f"{found}: use --tokenizer {vocab['kind']}, or prepare it again")
    files = {s: folder / f"{s}.bin" for s in SPLITS}
    ids = {s: _memmap(files[s], np.dtype(meta["dtype"]), meta["n_tokens"][s]) for s in SPLITS}
    n_bytes = {s: meta["n_bytes"][s] for s in SPLITS}
    checked = lambda s, blocks: (check_ids(block, tok.size(vocab), files[s]) for block in blocks)
    blocks = {s: checked(s, _read_blocks(files[s], ids[s].dtype, 0, len(ids[s]))) for s in SPLITS}
    ids_sha256, tokens_sha256, _, n_unk = _count_tokens(vocab, blocks, n_bytes)
    sha256 = meta.get("sha256") or ids_sha256  # without one: tokens that somebody else made
    source = f"{folder}, prepared tokens ({vocab['kind']})"
    about = dict(sha256=sha256, tokens_sha256=tokens_sha256, n_bytes=n_bytes, n_unk=n_unk, source=source)
    return Corpus(Path(os.path.abspath(folder)).name, **ids, vocab=vocab, **about)


def _read_meta(file):
    try:
        meta = json.loads(file.read_bytes())
        if tok.check(meta["vocab"])["kind"] == "ids":
            meta["n_bytes"] = dict.fromkeys(SPLITS, 0)  # of a text, and there is none
        counts = [meta[key][s] for key in ("n_tokens", "n_bytes") for s in SPLITS]
        if meta["dtype"] not in DTYPES:
            raise ValueError(f"dtype {meta['dtype']!r}, want one of {', '.join(DTYPES)}")
        if not all(type(n) is int and 0 <= n < 2**63 for n in counts):
            raise ValueError(f"n_tokens, n_bytes {counts}, want counts")
        text = meta["vocab"]["kind"] != "ids"
        if text and any(meta["n_tokens"][s] and not meta["n_bytes"][s] for s in SPLITS):
            raise ValueError(f"n_bytes {meta['n_bytes']}, want some where there are tokens")
        if not isinstance(meta.get("sha256", ""), str):
            raise ValueError(f"sha256 {meta['sha256']!r}, want a text")
    except KeyError as e:
        raise ValueError(f"{file}: no {e}: prepare the corpus again") from None
    except (OSError, TypeError, ValueError, RecursionError) as e:
        raise ValueError(f"{file}: cannot be used ({e}): prepare the corpus again") from None
    return meta


def _memmap(file, dtype, n):
    found, want = file.stat().st_size if file.is_file() else "no file", n * dtype.itemsize
    if found != want:
        raise ValueError(f"{file}: found {found}, want {want} bytes as meta.json says: prepare the corpus again")
    try:
        return np.memmap(file, dtype, mode="r") if n else np.empty(0, dtype)  # an empty file cannot be mapped
    except OSError as e:
        raise ValueError(f"{file}: cannot be read ({e.strerror}): allow reading it") from None


def _read_blocks(file, dtype, offset, n):
    """Yields n ids of a file in blocks. Read, since a map's pages count as the process's."""
    with open(file, "rb") as f:
        f.seek(offset)
        while n and len(ids := np.fromfile(f, dtype, min(tok.BLOCK, n))):
            yield ids
            n -= len(ids)


def builtin_files(root=None):
    """Paths of the built-in corpus: the standard library of this Python, without what differs between installations."""
    root = Path(root or sysconfig.get_path("stdlib"))
    found = {}
    for folder, dirs, names in os.walk(root):
        dirs[:] = [d for d in dirs if d not in SKIP_DIRS and not d.startswith("config-")]
        for name in names:
            file = Path(folder, name)
            skipped = name == "turtle.py" or name.startswith("_sysconfigdata")
            if name.endswith(".py") and not skipped and file.is_file():  # not a broken link
                # in the order of a hash, so that each split holds something of every package
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

    A span is (file, zip member or bytes; start; stop). ValueError for a file that is missing, empty or blank.
    """
    if len(paths) == 1 and os.path.isdir(paths[0]):
        folder = Path(paths[0])
        files = {s: folder / f"{s}.txt" for s in SPLITS}
        missing = [file.name for file in files.values() if not os.path.exists(file)]
        if missing and os.path.exists(folder / "meta.json"):
            raise ValueError(f"{folder}: a folder of prepared tokens: give it to train.py --data, or a text here")
        if missing:
            want = "train.txt, valid.txt and test.txt, or meta.json and train.bin, valid.bin, test.bin"
            found = f"no {', '.join(missing)} in this folder, want {want}"
            way = f"join its texts first: python -m data.prepare {shlex.quote(str(folder))}/*.txt --out DIR"
            raise ValueError(f"{folder}: {found}: give a text file, or {way}")
        return {s: [(check_text(file), 0, file.stat().st_size)] for s, file in files.items()}
    return split([check_text(Path(path)) for path in paths])


def check_plain(f, path):
    """ValueError if the open file `f` of a path is no text and no other plain bytes, but a container of something.

    That is a file whose first bytes say so, one of prepared tokens, or one with NULs at a regular distance throughout:
    numbers of several bytes, or UTF-16. Any other binary file is taken by its bytes.
    """
    path, size, pieces = Path(path), f.seek(0, os.SEEK_END), []
    if path.name in [f"{s}.bin" for s in SPLITS] and os.path.exists(path.with_name("meta.json")):
        raise ValueError(f"{path}: a file of prepared tokens: give its folder, {path.parent}")
    for i in range(16):
        f.seek(i * max(size - PIECE, 0) // 15)
        pieces.append(f.read(PIECE))
    for pattern, found, way in CONTAINERS:
        if re.match(pattern, pieces[0], re.DOTALL):
            raise ValueError(f"{path}: {found}: {way}")
    boms = {"utf-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), "utf-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)}
    for encoding, starts in boms.items():
        if pieces[0].startswith(starts):
            with contextlib.suppress(UnicodeDecodeError):
                codecs.getincrementaldecoder(encoding)().decode(pieces[0])
                raise ValueError(f"{path}: text in {encoding.upper()}: convert it to UTF-8")
    if size >= 1024 and all(_has_nul_column(piece) for piece in pieces):
        raise ValueError(f"{path}: NUL bytes throughout, as of numbers or UTF-16: convert it to UTF-8 text")


def _has_nul_column(piece):
    """Whether most of every eighth byte, counted from one of the first 8, are NUL."""
    return max(piece[i::8].count(0) / len(piece[i::8]) for i in range(8)) > 0.6


def check_text(file):
    """`file`, if it is a regular file of text or plain bytes that holds more than whitespace; else ValueError."""
    try:
        if not file.stat().st_size and file.is_file():
            raise ValueError(f"{file}: an empty file, want text: give another file")
        if not file.is_file():
            found = "a folder" if file.is_dir() else "no regular file"
            raise ValueError(f"{file}: {found}, want a text file: give a file")
        with open(file, "rb") as f:
            check_plain(f, file)
        if all(block.isspace() for block in _blocks([(file, 0, file.stat().st_size)])):
            raise ValueError(f"{file}: only newlines and spaces, want text: give another file")
    except FileNotFoundError:
        way = "check the path" if file.suffix or file.parent != Path() else f"check it, or give {', '.join(CORPORA)}"
        raise ValueError(f"{file}: no such file or folder: {way}") from None
    except OSError as e:
        raise ValueError(f"{file}: cannot be read ({e.strerror}): allow reading it, or give another file") from None
    return file


def split(sources):
    """{split: spans} of texts (files or bytes) joined in order: 90/5/5 percent, and no UTF-8 character cut in two."""
    n = sum(map(_n_bytes, sources))
    cuts = [0, n * 90 // 100, n * 95 // 100, n]
    for i in (1, 2):
        cuts[i] += tok.char_start(b"".join(_blocks(_spans(sources, cuts[i], cuts[i] + 3))), 0)
    return {s: _spans(sources, start, stop) for s, start, stop in zip(SPLITS, cuts, cuts[1:])}


def _spans(sources, start, stop):
    """The spans of bytes start..stop of texts joined in order."""
    spans = []
    for source in sources:
        n = _n_bytes(source)
        if max(start, 0) < min(stop, n):
            spans.append((source, max(start, 0), min(stop, n)))
        start, stop = start - n, stop - n
    return spans


def _n_bytes(source):
    return len(source) if isinstance(source, bytes) else source.stat().st_size


def _blocks(spans):
    """Yields the bytes of spans in blocks."""
    for source, start, stop in spans:
        with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as f:
            f.seek(start)
            while start < stop:
                block = f.read(min(tok.BLOCK, stop - start))
                if not block:
                    raise ValueError(f"{source}: ended at {start} bytes, want {stop}: change no file while it is read")
                start += len(block)
                yield block


def _encoded(vocab, splits, s, digest):
    """Yields the ids of split `s` in blocks; updates `digest` with its text, so that the file is read only once."""

    def hashed():
        for block in _blocks(splits[s]):
            digest.update(block)
            yield block

    return tok.encode_blocks(vocab, hashed(), what=f"{s} split")


def _split_bytes(splits):
    return {s: sum(stop - start for _, start, stop in splits[s]) for s in SPLITS}


def prepare(paths, out, *, tokenizer="byte", min_count=0, max_size=0):
    """Writes the texts `paths` as a folder of tokens for `load`; returns what meta.json holds."""
    return write_tokens(find_splits(paths), out, tokenizer, min_count=min_count, max_size=max_size)


def prepare_named(name, out=None, *, place="", tokenizer="", min_count=0, max_size=0):
    """As `prepare`, for a standard corpus, downloaded or at `place`: see corpora.find_splits."""
    source, out = CORPORA[name], Path(out or corpora.FOLDER / name)
    out.mkdir(parents=True, exist_ok=True)
    splits = corpora.find_splits(source, out, place)
    return write_tokens(splits, out, tokenizer or source.tokenizer, min_count=min_count, max_size=max_size)


def _written(file, blocks):
    """Yields blocks of ids once they are written to a file."""
    for ids in blocks:
        file.write(ids)
        yield ids


def write_tokens(splits, out, tokenizer, *, min_count=0, max_size=0):
    """Writes {split: spans} as tokens and meta.json; returns what meta.json holds.

    A folder with a meta.json is complete: it is written last. An error leaves an older corpus there as it was.
    """
    vocab = _build(tokenizer, splits, min_count=min_count, max_size=max_size)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with atomic_write_many(*(out / f"{s}.bin" for s in SPLITS), out / "meta.json") as (*bins, meta_file):
        blocks = {s: _written(file, _encoded(vocab, splits, s, digest)) for s, file in zip(SPLITS, bins)}
        n_bytes = _split_bytes(splits)
        *_, n_tokens, n_unk = _count_tokens(vocab, blocks, n_bytes)
        meta = {
            "vocab": vocab,
            "dtype": tok.dtype(vocab).name,
            "n_tokens": n_tokens,
            "n_bytes": n_bytes,
            "n_unk": n_unk,
            "sha256": digest.hexdigest(),
        }
        meta_file.write(json.dumps(meta).encode())
    return meta


# files that appear whole or not at all


@contextlib.contextmanager
def atomic_write_many(*paths, mode="wb", **options):
    """Opens files that replace `paths` once all are on the disk. An error leaves `paths` as they were.

    The last of several is removed before any is replaced, and replaced last: if it exists, the files belong together.
    """
    for path in paths:
        remove_leftovers(path.parent, glob.escape(path.name))
    temporaries = [path.with_name(f"{path.name}.{os.getpid()}.tmp") for path in paths]
    try:
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(temporary, mode, **options)) for temporary in temporaries]
            yield files
            for file in files:
                file.flush()
                os.fsync(file.fileno())
        if len(paths) > 1:
            paths[-1].unlink(missing_ok=True)
        for temporary, path in zip(temporaries, paths):
            os.replace(temporary, path)
    finally:
        for temporary in temporaries:
            temporary.unlink(missing_ok=True)


def remove_leftovers(folder, pattern):
    """Removes what killed processes left of files of such names that they were writing to a folder."""
    for file in Path(folder).glob(f"{pattern}.*.tmp"):
        pid = file.name.split(".")[-2]
        if pid.isdecimal() and not _is_running(int(pid)):
            with contextlib.suppress(OSError):
                file.unlink()


def _is_running(pid):
    if os.name == "nt":  # where this would be Ctrl-C for the other process, and no open file can be removed
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


@contextlib.contextmanager
def atomic_write(path, mode="wb", **options):
    """As `atomic_write_many`, for one file."""
    with atomic_write_many(path, mode=mode, **options) as (file,):
        yield file


def main(argv=None):
    parser = argparse.ArgumentParser("python -m data.prepare", description="Text to tokens.", allow_abbrev=False)
    names = ", ".join(CORPORA)
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help=f"joined in order and split 90/5/5; or a folder of train.txt, valid.txt, test.txt; or one of {names}",
    )
    parser.add_argument("--out", metavar="DIR", help="folder to write, for train.py --data; of a NAME: corpora/NAME")
    parser.add_argument("--from", dest="place", metavar="FILE_OR_DIR_OR_URL", help="of a NAME: a copy to use instead")
    kinds = f"{', '.join(tok.KINDS)} or a file tokenizer.json"
    parser.add_argument("--tokenizer", help=f"{kinds}; default: byte; of a NAME: what published numbers need")
    parser.add_argument("--min_count", type=int, default=0, help="word: rarer ones become <unk>; default: 0, none")
    parser.add_argument("--max_size", type=int, default=0, help="word: largest vocabulary; default: 0, no limit")

    def fail(message):
        flags.fail("data.prepare", f"{message} (see python -m data.prepare --help)")

    parser.error = fail
    args = parser.parse_args(argv)
    named = len(args.files) == 1 and args.files[0] in CORPORA
    out = args.out or (str(corpora.FOLDER / args.files[0]) if named else None)
    options = dict(min_count=args.min_count, max_size=args.max_size)
    try:
        if named:
            meta = prepare_named(args.files[0], out, place=args.place, tokenizer=args.tokenizer, **options)
        elif args.place:
            raise ValueError(f"{' '.join(args.files)}: --from {args.place} is for {names}: leave it out")
        elif not out:
            raise ValueError(f"{' '.join(args.files)}: no --out, want the folder to write: give --out DIR")
        else:
            meta = prepare(args.files, out, tokenizer=args.tokenizer or "byte", **options)
    except OSError as e:
        flags.fail("data.prepare", f"{e.filename or out}: {e.strerror or e}: free space, or give another --out DIR")
    except ValueError as e:
        flags.fail("data.prepare", e)
    vocab = meta.pop("vocab")
    if line := unknown_characters(vocab, meta["n_unk"]):
        flags.print_status(line)
    n_vocab = tok.size(vocab)
    flags.print_result(json.dumps({"out": out, "n_vocab": n_vocab, **meta}))


if __name__ == "__main__":
    flags.run_script(main)
