"""Vocabularies: text (bytes) to ids and back. A vocabulary is plain JSON-able data and travels inside checkpoints:

    {"kind": "byte"}                                    256 ids, any file; nothing can be unknown
    {"kind": "char", "symbols": ["\\n", " ", ...]}       code points of the training part, sorted; the text is UTF-8;
                                                        at the end "<unk>", if another part has one that training lacks
    {"kind": "word", "symbols": ["<eos>", "the", ...]}  words between whitespace, most frequent first (so that an
                                                        adaptive softmax can cut the list); the text is UTF-8
    {"kind": "subword", "json": "...", "size": 32000}   what a tokenizer.json of Hugging Face's tokenizers says, whole
    {"kind": "ids", "size": 390}                        ids of something else, which have no text

No byte is changed, CRLF and byte order marks included, in training and in prompts alike. Words: every newline is one
"<eos>", other whitespace is dropped, an unknown word is "<unk>". An unknown character is "<unk>", or an error if the
vocabulary has none.
"""

import os
from collections import Counter
from functools import cache

import numpy as np

KINDS = ("byte", "char", "word")  # that are built from a text
EOS, UNK = "<eos>", "<unk>"
BLOCK = 1 << 22  # bytes of text, or ids, handled at once: bounds host memory whatever the size of the corpus


class EncodeError(ValueError):
    """The text is not UTF-8, or has a character that the vocabulary lacks."""


def build(kind, text, *, min_count=0, max_size=0, what="text", others=()):
    """The vocabulary of `text`: bytes, or an iterable of its successive blocks, cut anywhere.
    For words: at least `min_count` occurrences, at most `max_size` symbols in all (0: no limit).
    For characters: with <unk> if one of `others`, pairs (what, text), has a character that `text` lacks.
    kind: one of KINDS, or a file tokenizer.json, which the text does not change.
    ValueError, naming the text as `what`, for text that is not UTF-8 (char, word) and for options that do not apply.
    """
    if kind not in KINDS and not os.path.isfile(kind):
        raise ValueError(f"tokenizer {kind!r} is unknown: use one of {', '.join(KINDS)}, or a file tokenizer.json")
    if kind != "word" and (min_count or max_size):
        raise ValueError(f"min_count={min_count}, max_size={max_size} with tokenizer {kind}: they apply to word only")
    if min_count < 0 or max_size < 0 or max_size in (1, 2):
        raise ValueError(f"min_count={min_count}, max_size={max_size}: use 0 (off) or more, and 3 or more for max_size")
    if kind == "byte":
        return {"kind": kind}
    if kind not in KINDS:
        return _read_subwords(kind)
    counts = Counter()
    for chunk in _texts(kind, _blocks(text), what):
        counts.update(set(chunk) if kind == "char" else _words(chunk))
    if not counts:
        raise ValueError(f"{what}: found no symbols, want at least one: give a text that is not empty")
    if kind == "word":
        return {"kind": kind, "symbols": _ranked(counts, min_count, max_size)}
    chunks = (chunk for name, other in others for chunk in _texts(kind, _blocks(other), name))
    lacks = any(not counts.keys() >= set(chunk) for chunk in chunks)
    return {"kind": kind, "symbols": [*sorted(counts), UNK] if lacks else sorted(counts)}


def _ranked(counts, min_count, max_size):
    """<eos>, then the words kept and <unk>, by falling count; equal counts by first appearance, as in the original."""
    words = sorted((word for word in counts if word not in (EOS, UNK)), key=counts.get, reverse=True)
    symbols = [word for word in words if counts[word] >= min_count][: max_size - 2 if max_size else None]
    n_unk = counts[UNK] + sum(counts[word] for word in words[len(symbols) :])
    symbols.insert(sum(counts[word] > n_unk for word in symbols), UNK)
    return [EOS, *symbols]


def size(vocab):
    """V, the number of ids."""
    if vocab["kind"] in ("ids", "subword"):
        return vocab["size"]
    return 256 if vocab["kind"] == "byte" else len(vocab["symbols"])


def unk_id(vocab):
    """The id of <unk>; -1 where there is none."""
    symbols = vocab.get("symbols", ())
    return symbols.index(UNK) if UNK in symbols else -1


def dtype(vocab):
    """The smallest of uint8, uint16, uint32 that holds every id."""
    n = size(vocab)
    return np.dtype(np.uint8 if n <= 1 << 8 else np.uint16 if n <= 1 << 16 else np.uint32)


def encode(vocab, text, *, what="text"):
    """ids [n] of `text`, bytes or str, in `dtype(vocab)`.
    EncodeError, naming the text as `what`, for a character outside the vocabulary, for text that is not UTF-8, and for
    any text where the vocabulary is of ids.
    """
    text = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    return np.concatenate([np.empty(0, dtype(vocab)), *encode_blocks(vocab, _blocks(text), what=what)])


def encode_blocks(vocab, blocks, *, what="text"):
    """Yields the ids of `encode` piece by piece for a text that comes as successive blocks of bytes, cut anywhere."""
    if vocab["kind"] == "byte":
        yield from (np.frombuffer(block, np.uint8) for block in blocks)
    elif vocab["kind"] == "char":
        yield from _encode_chars(vocab, blocks, what)
    elif vocab["kind"] == "ids":
        raise EncodeError(f"{what}: text, but the model's tokens are ids without one: give ids, in files .npy")
    elif vocab["kind"] == "subword":
        for text in _texts("subword", blocks, what):
            ids = np.array(_subwords(vocab["json"]).encode(text, add_special_tokens=False).ids, np.int64)
            yield check_ids(ids, size(vocab), what).astype(dtype(vocab))
    else:
        ids = {word: i for i, word in enumerate(vocab["symbols"])}
        unk = ids[UNK]
        for text in _texts("word", blocks, what):
            yield np.array([ids.get(word, unk) for word in _words(text)], dtype(vocab))


def _encode_chars(vocab, blocks, what):
    unknown, unk = len(vocab["symbols"]), unk_id(vocab)
    ids_of = np.full(0x110000, unk if unk >= 0 else unknown, np.uint32)  # by code point
    known = [i for i in range(unknown) if i != unk]
    ids_of[_code_points("".join(vocab["symbols"][i] for i in known))] = known
    n_chars = n_lines = 0
    for text in _texts("char", blocks, what):
        ids = ids_of[_code_points(text)]
        bad = ids == unknown
        if bad.any():
            at = int(bad.argmax())
            line = n_lines + text.count("\n", 0, at) + 1
            found = f"character {text[at]!r} (U+{ord(text[at]):04X}) at character index {n_chars + at}, line {line}"
            known = f"is not among the {unknown} symbols of the training part"
            raise EncodeError(f"{what}: {found}, {known}: remove it, or train a new model with --tokenizer byte")
        n_chars += len(text)
        n_lines += text.count("\n")
        yield ids.astype(dtype(vocab))


def _read_subwords(path):
    """The vocabulary of a file tokenizer.json."""
    try:
        with open(path, encoding="utf-8") as f:
            text = f.read()
        ids = _subwords(text).get_vocab(with_added_tokens=True).values()
    except (OSError, ValueError) as e:
        raise ValueError(f"tokenizer {path}: {e}") from None
    return check({"kind": "subword", "json": text, "size": max(ids, default=-1) + 1})


@cache
def _subwords(text):
    """The tokenizer of the library `tokenizers` that a tokenizer.json's `text` describes."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError("a tokenizer.json needs the library tokenizers: pip install tokenizers") from None
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as e:  # the library raises nothing narrower
        raise ValueError(f"cannot be used ({' '.join(str(e).split())[:200]}): give a tokenizer.json") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def subword_pieces(vocab, text):
    """Yields (string, number of tokens that it is made of) over a text; what the tokenizer drops is of none."""
    for chunk in _texts("subword", _blocks(text), "text"):
        begin = end = n = 0
        for start, stop in _subwords(vocab["json"]).encode(chunk, add_special_tokens=False).offsets:
            if n and start >= end:  # several tokens may share a character
                yield chunk[begin:end], n
                begin, n = end, 0
            if not n and start > begin:
                yield chunk[begin:start], 0
                begin = start
            end, n = max(end, stop), n + 1
        if n:
            yield chunk[begin:end], n
        if end < len(chunk):
            yield chunk[end:], 0


def one_id(vocab, text, what):
    """The id that a flag's `text` means: a whole number is an id, any other text must be one token."""
    if text.lstrip("-").isdecimal():
        return int(text)
    known = vocab["kind"] != "word" or text == "\n" or text in vocab["symbols"]
    ids = encode(vocab, text, what=what) if known else ()
    if len(ids) != 1:
        found = f"{len(ids)} tokens" if known else "not in the vocabulary"
        raise ValueError(f"{what}={text!r} is {found}: give an id, or a text that is one token")
    return int(ids[0])


def decode(vocab, ids):
    """The bytes that `ids` [n] stand for. Words are joined by single spaces, <eos> is a newline; ids are numbers."""
    ids = np.asarray(ids, dtype=None if np.size(ids) else np.uint8)  # [] would be float
    check_ids(ids, size(vocab), "decode")
    if vocab["kind"] == "byte":
        return ids.astype(np.uint8).tobytes()
    if vocab["kind"] == "ids":
        return " ".join(map(str, ids.tolist())).encode()
    if vocab["kind"] == "subword":
        return _subwords(vocab["json"]).decode(ids.tolist(), skip_special_tokens=False).encode()
    symbols = [vocab["symbols"][i] for i in ids.tolist()]
    if vocab["kind"] == "char":
        return "".join(symbols).encode("utf-8")
    text = " ".join(["\n" if symbol == EOS else symbol for symbol in symbols])
    return text.replace(" \n", "\n").replace("\n ", "\n").encode("utf-8")


def decode_next(vocab, before, ids):
    """The bytes that subword `ids` add to a text that ends in the ids `before`, but for a character cut by the end."""
    before = [int(i) for i in before[-8:]]  # a token's text depends on few others
    old, new = (decode(vocab, part).decode().rstrip("\ufffd") for part in (before, [*before, *map(int, ids)]))
    return new[len(old) :].encode()


def decode_text(vocab, ids):
    """`decode` as str; bytes that are no UTF-8 become U+FFFD."""
    return decode(vocab, ids).decode("utf-8", "replace")


def decode_blocks(vocab, ids):
    """Yields the bytes of `decode` piece by piece."""
    for at in range(0, len(ids), BLOCK):
        block = ids[at : at + BLOCK]
        if vocab["kind"] == "subword":
            yield decode_next(vocab, ids[max(at - 8, 0) : at], block)
            continue
        if at and vocab["kind"] == "word" and vocab["symbols"].index(EOS) not in (ids[at - 1], block[0]):
            yield b" "
        yield decode(vocab, block)


def start_id(vocab):
    """The id that stands in for an empty prompt: a newline's, else the first character's; 0 where there is none."""
    if vocab["kind"] == "ids":
        return 0
    start = "\n"
    if vocab["kind"] == "char" and start not in vocab["symbols"]:
        start = next(symbol for symbol in vocab["symbols"] if symbol != UNK)
    ids = encode(vocab, start)
    return int(ids[0]) if len(ids) else 0  # subwords may leave white space out


def check(vocab):
    """`vocab`, which came from a file, if it is a vocabulary; else ValueError."""
    kind = vocab.get("kind") if isinstance(vocab, dict) else vocab
    kinds = (*KINDS, "subword", "ids")
    if kind not in kinds:
        raise ValueError(f"vocabulary of kind {str(kind)[:40]!r}, want {', '.join(kinds)}: make the file again")
    if kind in ("ids", "subword") and not (type(vocab.get("size")) is int and 0 < vocab["size"] < 2**31):
        raise ValueError(f"{kind} vocabulary with size {vocab.get('size')!a}, want 1 or more: make the file again")
    if kind == "subword" and not isinstance(vocab.get("json"), str):
        raise ValueError("subword vocabulary without the text of a tokenizer.json: make the file again")
    if kind in ("byte", "ids", "subword"):
        return vocab
    symbols = vocab.get("symbols")
    if not isinstance(symbols, list) or not symbols or symbols == [UNK]:
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
    """`ids`, an integer array of any shape, if all are in 0..size-1; else ValueError.

    A device raises nothing for an id outside of a table: this is the only place that can find one.
    """
    if ids.dtype.kind not in "iu":
        raise ValueError(f"{what}: ids of type {ids.dtype}, want integers: prepare the tokens again")
    low, high = (int(ids.min()), int(ids.max())) if ids.size else (0, 0)
    if low < 0 or high >= size:
        found = f"smallest id {low}, largest id {high} with a vocabulary of {size}, want 0 to {size - 1}"
        raise ValueError(f"{what}: {found}: prepare the tokens again with this vocabulary")
    return ids


def char_start(text, at):
    """The first place >= `at` in `text` (UTF-8 bytes) where a character begins, or the end."""
    while at < len(text) and text[at] & 0xC0 == 0x80:
        at += 1
    return at


def _texts(kind, blocks, what):
    """Yields the text of successive blocks of bytes as strings that begin and end between symbols."""
    done, rest = 0, b""
    for block in blocks:
        rest += block
        # A block may end within a symbol: a character of at most 4 bytes, or a word, which ends at a space or newline.
        if kind == "subword":
            end = _subword_end(rest)
        elif kind == "char":
            end = char_start(rest, max(len(rest) - 4, 0))
        else:
            end = 1 + max(rest.rfind(b" "), rest.rfind(b"\n"))
        yield _utf8(rest[:end], done, what)
        done, rest = done + end, rest[end:]
    yield _utf8(rest, done, what)


def _subword_end(text):
    """Where a text (bytes) may end so that subwords are what they are without a cut: before a space between words."""
    end = len(text) - 1
    while (end := text.rfind(b" ", 1, end)) > 0:
        if not text[end - 1 : end].isspace() and not text[end + 1 : end + 2].isspace():
            return end
    return 1 + text.rfind(b"\n")


def _utf8(text, offset, what):
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as e:
        found = f"byte 0x{text[e.start]:02x} at byte offset {offset + e.start} is not UTF-8"
        way = "convert the text to UTF-8, or train a new model with --tokenizer byte"
        raise EncodeError(f"{what}: {found}: {way}") from None


def _blocks(text):
    return (text[i : i + BLOCK] for i in range(0, len(text), BLOCK)) if isinstance(text, bytes) else text


def _words(text):
    # Unlike the original: a last line without a newline gets no <eos>, so that a prompt can end in mid-line.
    return text.replace("\n", f" {EOS} ").split()


def _code_points(text):
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def _is_char(symbol):
    if symbol == UNK:
        return True
    return isinstance(symbol, str) and len(symbol) == 1 and not "\ud800" <= symbol <= "\udfff"  # no lone surrogates


def _is_word(symbol):
    return isinstance(symbol, str) and symbol.split() == [symbol]
