"""Vocabularies: text (bytes) to ids and back. A vocabulary is plain JSON-able data and travels inside checkpoints:

    {"kind": "byte"}                                    256 ids, any file; nothing can be unknown
    {"kind": "char", "symbols": ["\\n", " ", ...]}       code points of the training part, sorted; the text is UTF-8
    {"kind": "word", "symbols": ["<eos>", "the", ...]}  words between whitespace, most frequent first (so that an
                                                        adaptive softmax can cut the list); the text is UTF-8

Bytes are taken as they are, CRLF and byte order marks included, in training and in prompts alike. Words: every newline
is one "<eos>", other whitespace is forgotten, an unknown word is "<unk>".
"""

from collections import Counter

import numpy as np

KINDS = ("byte", "char", "word")
EOS, UNK = "<eos>", "<unk>"
BLOCK = 1 << 22  # bytes of text handled at once: bounds host memory whatever the size of the corpus


def build(kind, text, *, min_count=0, max_size=0, what="text"):
    """The vocabulary of `text`: bytes, or an iterable of its successive blocks, cut anywhere.
    For words: at least `min_count` occurrences, at most `max_size` symbols in all (0: no limit).
    ValueError, naming the text as `what`, for text that is not UTF-8 (char, word) and for options that do not apply.
    """
    if kind not in KINDS:
        raise ValueError(f"tokenizer {kind!r} is unknown: use one of {', '.join(KINDS)}")
    if kind != "word" and (min_count or max_size):
        raise ValueError(f"min_count={min_count}, max_size={max_size} with tokenizer {kind}: they apply to word only")
    if min_count < 0 or max_size < 0 or max_size in (1, 2):
        raise ValueError(f"min_count={min_count}, max_size={max_size}: use 0 (off) or more, and 3 or more for max_size")
    if kind == "byte":
        return {"kind": kind}
    counts = Counter()
    for chunk in _texts(kind, _blocks(text), what):
        counts.update(set(chunk) if kind == "char" else _words(chunk))
    if not counts:
        raise ValueError(f"{what}: found no symbols, want at least one: give a text that is not empty")
    return {"kind": kind, "symbols": sorted(counts) if kind == "char" else _ranked(counts, min_count, max_size)}


def _ranked(counts, min_count, max_size):
    """<eos>, then the words kept and <unk>, by falling count; equal counts by first appearance, as in the original."""
    words = sorted((word for word in counts if word not in (EOS, UNK)), key=counts.get, reverse=True)
    symbols = [word for word in words if counts[word] >= min_count][: max_size - 2 if max_size else None]
    n_unk = counts[UNK] + sum(counts[word] for word in words[len(symbols) :])
    symbols.insert(sum(counts[word] > n_unk for word in symbols), UNK)
    return [EOS, *symbols]


def size(vocab):
    """V, the number of ids."""
    return 256 if vocab["kind"] == "byte" else len(vocab["symbols"])


def dtype(vocab):
    """The smallest of uint8, uint16, uint32 that holds every id."""
    n = size(vocab)
    return np.dtype(np.uint8 if n <= 1 << 8 else np.uint16 if n <= 1 << 16 else np.uint32)


def encode(vocab, text, *, what="text"):
    """ids [n] of `text` (bytes) in `dtype(vocab)`.
    ValueError, naming the text as `what`, for a character outside the vocabulary and for text that is not UTF-8.
    """
    return np.concatenate([np.empty(0, dtype(vocab)), *encode_blocks(vocab, _blocks(text), what=what)])


def encode_blocks(vocab, blocks, *, what="text"):
    """Yields the ids of `encode` piece by piece for a text that comes as successive blocks of bytes, cut anywhere."""
    if vocab["kind"] == "byte":
        yield from (np.frombuffer(block, np.uint8) for block in blocks)
    elif vocab["kind"] == "char":
        yield from _encode_chars(vocab, blocks, what)
    else:
        ids = {word: i for i, word in enumerate(vocab["symbols"])}
        unk = ids[UNK]
        for text in _texts("word", blocks, what):
            yield np.array([ids.get(word, unk) for word in _words(text)], dtype(vocab))


def _encode_chars(vocab, blocks, what):
    unknown = len(vocab["symbols"])
    ids_of = np.full(0x110000, unknown, np.uint32)  # by code point
    ids_of[_code_points("".join(vocab["symbols"]))] = np.arange(unknown)
    n_chars = n_lines = 0
    for text in _texts("char", blocks, what):
        ids = ids_of[_code_points(text)]
        bad = ids == unknown
        if bad.any():
            at = int(bad.argmax())
            raise ValueError(
                f"{what}: character {text[at]!r} (U+{ord(text[at]):04X}) at character index {n_chars + at}, "
                f"line {n_lines + text.count(chr(10), 0, at) + 1}, is not among the {unknown} symbols of the training "
                "part: remove it, or train with --tokenizer byte"
            )
        n_chars += len(text)
        n_lines += text.count("\n")
        yield ids.astype(dtype(vocab))


def one_id(vocab, text, what):
    """The id that `text` means: a whole number is one, any other text must be one token of the vocabulary."""
    if text.lstrip("-").isdecimal():
        return int(text)
    known = vocab["kind"] != "word" or text == "\n" or text in vocab["symbols"]
    ids = encode(vocab, text.encode("utf-8", "surrogateescape"), what=what) if known else ()
    if len(ids) != 1:
        found = f"{len(ids)} tokens" if known else "not in the vocabulary"
        raise ValueError(f"{what}={text!r} is {found}: give an id, or a text that is one token")
    return int(ids[0])


def decode(vocab, ids):
    """The bytes that `ids` [n] stand for. Words are joined by single spaces, <eos> is a newline."""
    ids = np.asarray(ids, dtype=None if np.size(ids) else np.uint8)  # [] would be float
    check_ids(ids, size(vocab), "decode")
    if vocab["kind"] == "byte":
        return ids.astype(np.uint8).tobytes()
    symbols = [vocab["symbols"][i] for i in ids.tolist()]
    if vocab["kind"] == "char":
        return "".join(symbols).encode("utf-8")
    text = " ".join(["\n" if symbol == EOS else symbol for symbol in symbols])
    return text.replace(" \n", "\n").replace("\n ", "\n").encode("utf-8")


def default_prompt(vocab):
    """The bytes that a generation from an empty prompt starts from, one id: a newline, else symbol 0."""
    if vocab["kind"] == "char" and "\n" not in vocab["symbols"]:
        return vocab["symbols"][0].encode("utf-8")
    return b"\n"


def check(vocab):
    """`vocab`, which came from a file, if it is a vocabulary; else ValueError."""
    kind = vocab.get("kind") if isinstance(vocab, dict) else vocab
    if kind not in KINDS:
        raise ValueError(f"vocabulary of kind {str(kind)[:40]!r}, want {', '.join(KINDS)}: make the file again")
    if kind == "byte":
        return vocab
    symbols = vocab.get("symbols")
    if not isinstance(symbols, list) or not symbols:
        raise ValueError(f"{kind} vocabulary without a list of symbols, want at least one: make the file again")
    legal = _is_char if kind == "char" else _is_word
    for symbol in symbols:
        if not legal(symbol):
            raise ValueError(f"{kind} vocabulary with the symbol {symbol!a}, want one {kind}: make the file again")
    if len(set(symbols)) < len(symbols):
        twice = Counter(symbols).most_common(1)[0][0]
        raise ValueError(f"{kind} vocabulary with {twice!a} more than once, want unique symbols: make the file again")
    if kind == "word" and not {EOS, UNK} <= set(symbols):
        raise ValueError(f"word vocabulary of {len(symbols)} without {EOS} and {UNK}: make the file again")
    return vocab


def check_ids(ids, size, what):
    """`ids`, an integer array of any shape, mapped files included, if all are in 0..size-1; else ValueError.
    On a device nothing is raised for an id outside of a table, so this is the only place where it can be found.
    """
    if ids.dtype.kind not in "iu":
        raise ValueError(f"{what}: ids of type {ids.dtype}, want integers: prepare the tokens again")
    flat = ids.reshape(-1)
    blocks = [flat[i : i + BLOCK] for i in range(0, flat.size, BLOCK)]
    low, high = min((int(b.min()) for b in blocks), default=0), max((int(b.max()) for b in blocks), default=0)
    if low < 0 or high >= size:
        raise ValueError(
            f"{what}: smallest id {low}, largest id {high} with a vocabulary of {size}, want 0 to {size - 1}: "
            "prepare the tokens again with this vocabulary"
        )
    return ids


def char_start(text, at):
    """The first place >= `at` in `text` (UTF-8 bytes) where a character begins, or the end."""
    while at < len(text) and text[at] & 0xC0 == 0x80:
        at += 1
    return at


def _texts(kind, blocks, what):
    """Yields the text of successive blocks of bytes as strings, cut where no symbol is cut."""
    done, rest = 0, b""
    for block in blocks:
        rest += block
        # Blocks end anywhere; a character is 4 bytes or fewer, a word ends at a space or a newline.
        end = (
            char_start(rest, max(len(rest) - 4, 0)) if kind == "char" else 1 + max(rest.rfind(b" "), rest.rfind(b"\n"))
        )
        yield _utf8(rest[:end], done, what)
        done, rest = done + end, rest[end:]
    yield _utf8(rest, done, what)


def _utf8(text, offset, what):
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(
            f"{what}: byte 0x{text[e.start]:02x} at byte offset {offset + e.start} is not UTF-8: "
            "use --tokenizer byte, or convert the text to UTF-8"
        ) from None


def _blocks(text):
    return (text[i : i + BLOCK] for i in range(0, len(text), BLOCK)) if isinstance(text, bytes) else text


def _words(text):
    # Unlike the original: a last line without a newline gets no <eos>, so that a prompt can end in mid-line.
    return text.replace("\n", f" {EOS} ").split()


def _code_points(text):
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def _is_char(symbol):
    return isinstance(symbol, str) and len(symbol) == 1 and not "\ud800" <= symbol <= "\udfff"  # no lone surrogates


def _is_word(symbol):
    return isinstance(symbol, str) and symbol.split() == [symbol]
