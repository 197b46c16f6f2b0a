"""The border: tokenizers, corpora, prepared tokens, and one clear line for all that can be wrong with them."""

import gzip
import hashlib
import json
import os
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from runs import PROSE, call, fails, refused, subword_file

from data import prepare
from data import tokenizer as tok

ROOT = Path(__file__).parent.parent
UNI = "e\u0301\té — \U0001f600\n  two spaces\r\nlast".encode()
ABC = b"abc" * 2000
# 1, 2, 3 and 4 bytes a character, words, blank lines: enough for several blocks when a block is small
MIXED = UNI + b"\n\n" + "the cat — the dog\n".encode() * 30


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)
    return path


def write_splits(folder, *texts):
    for s, text in zip(prepare.SPLITS, texts):
        write(folder / f"{s}.txt", text)
    return folder


def write_ids(path, ids):
    np.save(path, ids)
    return path


def splits(corpus):
    return [getattr(corpus, s) for s in prepare.SPLITS]


def text_of(corpus):
    return b"".join(tok.decode(corpus.vocab, ids) for ids in splits(corpus))


def one_line(words, call, *args, **options):
    """Asserts that a call raises a ValueError of one line that has all `words`, a text or several things."""
    fails(lambda: call(*args, **options), *([words] if isinstance(words, str) else words))


def prepared(tmp_path, text=MIXED, **options):
    prepare.prepare([write(tmp_path / "mixed.txt", text)], tmp_path / "tokens", **options)
    return tmp_path / "tokens"


def edit_meta(folder, **changes):
    meta = json.loads((folder / "meta.json").read_bytes()) | changes
    (folder / "meta.json").write_text(json.dumps({k: v for k, v in meta.items() if v is not None}))


def test_every_byte_of_unicode_tabs_spaces_and_crlf_comes_back_and_char_symbols_are_the_sorted_code_points():
    for kind, n in (("byte", len(UNI)), ("char", len(UNI.decode()))):
        vocab = tok.build(kind, UNI)
        ids = tok.encode(vocab, UNI)
        assert ids.dtype == np.uint8 and len(ids) == n and tok.decode(vocab, ids) == UNI
    assert tok.build("char", "bé\na—b".encode()) == {"kind": "char", "symbols": ["\n", "a", "b", "é", "—"]}


def test_words_are_ranked_by_count_with_eos_first_and_decode_to_lines_and_a_prompt_gets_no_line_end():
    for text, options, want in (
        (b"a b a\nc b a d\n<unk> <unk> <unk> <unk>\n", {}, ["<unk>", "a", "b", "c", "d"]),
        (b"b a a\n", {}, ["a", "b", "<unk>"]),
        (b"a a a a b c b\n", dict(min_count=2), ["a", "b", "<unk>"]),
        (b"a a b b b c c\n", dict(max_size=3), ["<unk>", "b"]),
    ):
        assert tok.build("word", text, **options)["symbols"] == ["<eos>", *want]
    vocab = tok.build("word", b"a b\n\nc a\n")
    assert tok.decode(vocab, tok.encode(vocab, b"  a \t b\r\n\nc a\n a")) == b"a b\n\nc a\na"
    assert tok.encode(vocab, b"a zebra").tolist() == [vocab["symbols"].index("a"), vocab["symbols"].index("<unk>")]


def test_ids_take_the_smallest_type_that_holds_them():
    for n, dtype in ((256, np.uint8), (257, np.uint16), (1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)):
        symbols = [chr(c) for c in range(1 << 17) if not 0xD800 <= c < 0xE000][:n]
        vocab = {"kind": "char", "symbols": symbols}
        ids = tok.encode(vocab, "".join(symbols).encode())
        assert ids.dtype == dtype and ids.tolist() == list(range(n))


@pytest.mark.parametrize("kind", tok.KINDS)
def test_blocks_may_cut_the_text_anywhere(kind):
    vocab = tok.build(kind, MIXED)
    for size in (1, 3, 7, 64):
        blocks = [MIXED[i : i + size] for i in range(0, len(MIXED), size)]
        assert tok.build(kind, iter(blocks)) == vocab
        assert np.concatenate(list(tok.encode_blocks(vocab, blocks))).tolist() == tok.encode(vocab, MIXED).tolist()


def test_an_unknown_character_and_a_byte_that_is_not_utf8_are_named_with_their_place_and_the_remedy():
    vocab = tok.build("char", b"abc\n")
    want = ("'é'", "U+00E9", "index 5", "line 2", "4 symbols", "--tokenizer byte", "prompt:")
    one_line(want, tok.encode, vocab, "abc\naé".encode(), what="prompt")
    blocks = [b"ab", b"c\na\xc3", b"\xa9b"]  # the same, cut within the character
    one_line(want, lambda: list(tok.encode_blocks(vocab, blocks, what="prompt")))
    bad = ("é" * 5 + "abc").encode() + b"\xff!"
    one_line(("0xff", "offset 13", "--tokenizer byte"), tok.build, "word", [bad[:9], bad[9:]])
    one_line(("0xc3", "offset 2"), tok.build, "char", b"ab\xc3")
    assert tok.encode(tok.build("byte", bad), bad).tobytes() == bad


def test_a_vocabulary_survives_json_and_a_broken_one_or_options_that_cannot_apply_are_refused():
    for kind in tok.KINDS:
        vocab = tok.build(kind, UNI)
        assert tok.check(json.loads(json.dumps(vocab))) == vocab
    one_line("'bpe'", tok.check, {"kind": "bpe"})
    one_line("'b' more than once", tok.check, {"kind": "char", "symbols": ["b", "a", "b"]})
    one_line("'a b'", tok.check, {"kind": "word", "symbols": ["<eos>", "<unk>", "a b"]})
    one_line(("min_count=2", "word only"), tok.build, "char", b"a", min_count=2)


def test_the_built_in_corpus_is_the_standard_library_of_this_python():
    corpus, text = prepare.load(), prepare.builtin_text()
    assert text_of(corpus) == text and b"\r\n" not in text and len(text) > 5e6
    assert corpus.sha256 == hashlib.sha256(text).hexdigest() and sum(corpus.n_bytes.values()) == len(text)
    assert sys.version.split()[0] in corpus.source and corpus.name == "stdlib" and b"def namedtuple(" in text


def test_files_are_joined_in_order_and_split_90_5_5_and_bytes_are_kept(tmp_path):
    text = bytes([*range(128), *range(129, 256)]) * 4  # not UTF-8
    corpus = prepare.load(write(tmp_path / "one.txt", text))
    assert text_of(corpus) == text and corpus.vocab == {"kind": "byte"}
    assert corpus.name == "one" and [len(ids) for ids in splits(corpus)] == list(corpus.n_bytes.values())
    a, b = write(tmp_path / "a", "é—".encode() * 50), write(tmp_path / "b", ABC[:301])
    for kind in tok.KINDS:  # all tokenizers get the same splits
        prepare.prepare([b, a], tmp_path / "out", tokenizer=kind)
        corpus = prepare.load(tmp_path / "out")
        assert kind == "word" or text_of(corpus) == b.read_bytes() + a.read_bytes()
        assert corpus.n_bytes == {"train": 496, "valid": 27, "test": 28}  # 495.9, 523.45; byte 495 is within a —


def test_a_folder_of_three_texts_keeps_its_splits_and_a_word_that_training_never_saw_is_unk(tmp_path):
    texts = b"a b\n", b"zebra b\n", b"b\nzebra"
    folder = write_splits(tmp_path / "d", *texts)
    corpus = prepare.load(folder)
    assert [ids.tobytes() for ids in splits(corpus)] == list(texts) and corpus.n_bytes["valid"] == 8
    assert corpus.sha256 == hashlib.sha256(b"".join(texts)).hexdigest()
    words = prepare.load(folder, "word")
    assert [tok.decode(words.vocab, ids) for ids in splits(words)] == [b"a b\n", b"<unk> b\n", b"b\n<unk>"]


def test_characters_that_training_lacks_are_unk_and_counted_and_where_there_is_no_unk_an_error(tmp_path):
    folder = write_splits(tmp_path / "d", b"ab\nba", "aéb一\n".encode(), "😀aé".encode())
    made = call(prepare.main, folder, out=tmp_path / "out", tokenizer="char")
    want = {"train": 0, "valid": 2, "test": 2}
    assert made.entries()[0]["n_unk"] == want and "<unk>: 0 of train, 2 of valid, 2 of test" in made.err
    for path in (folder, tmp_path / "out"):
        corpus = prepare.load(path, "char")
        assert corpus.vocab["symbols"] == ["\n", "a", "b", "<unk>"] and corpus.n_unk == want
        assert text_of(corpus) == b"ab\nbaa<unk>b<unk>\n<unk>a<unk>" and tok.check(corpus.vocab)
    file = write(tmp_path / "abc.txt", ABC)
    vocab = prepare.load(file, "char").vocab
    assert vocab["symbols"] == ["a", "b", "c"]
    write(file, ABC[:5500] + b"\n!" + ABC[5502:])
    one_line(("valid split", "U+000A", "line 1"), prepare.load, file, vocab=vocab)


def test_paths_without_a_text_are_refused_in_one_line(tmp_path):
    folder = write(tmp_path / "d" / "train.txt", b"abc").parent
    for path, *words in (
        (tmp_path / "no.txt", "no such file"),
        (write(tmp_path / "e.txt", b""), "empty file"),
        (write(tmp_path / "n.txt", b"\n" * 999), "only newlines"),
        (folder, "valid.txt, test.txt", "meta.json"),
    ):
        one_line([path, *words], prepare.load, path)
    one_line(("valid.txt", "empty file"), prepare.load, write_splits(folder, b"abc", b"", b"abc"))


@pytest.mark.parametrize("kind", tok.KINDS)
def test_prepared_tokens_are_the_same_corpus_as_the_text(tmp_path, kind):
    tokens, file = prepared(tmp_path, tokenizer=kind), tmp_path / "mixed.txt"
    own, text = prepare.load(tokens), prepare.load(file, kind)
    assert isinstance(own.train, np.memmap) and own.train.dtype == tok.dtype(own.vocab)
    assert all(map(np.array_equal, splits(text), splits(own)))
    assert (text.vocab, text.sha256, text.n_bytes) == (own.vocab, own.sha256, own.n_bytes)
    assert {p.name for p in tokens.iterdir()} == {"meta.json", "test.bin", "train.bin", "valid.bin"}


def test_prepared_tokens_that_contradict_meta_json_are_refused(tmp_path):
    folder = prepared(tmp_path, tokenizer="char")
    meta = json.loads((folder / "meta.json").read_bytes())
    symbols, n = meta["vocab"]["symbols"], meta["n_tokens"]
    one_line(("char", "asked word", "--tokenizer char"), prepare.load, folder, "word")
    for changes, words in (
        (dict(vocab={"kind": "char", "symbols": symbols[:5]}), ("train.bin", f"largest id {len(symbols) - 1}", "of 5")),
        (dict(dtype="uint16"), ("train.bin", n["train"], 2 * n["train"])),
        (dict(n_bytes=None), ("meta.json", "n_bytes")),
    ):
        edit_meta(folder, **changes)
        one_line(words, prepare.load, folder)
        edit_meta(folder, **meta)
    (folder / "test.bin").unlink()
    one_line(("test.bin", "no file"), prepare.load, folder)


def test_a_run_that_fails_leaves_an_older_corpus_whole_and_else_nothing(tmp_path, monkeypatch):
    folder = prepared(tmp_path)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    for bad in (b"", b"\n \n", b"ab\xff" * 99):
        for out in (folder, tmp_path / "new"):
            one_line((), prepare.prepare, [write(tmp_path / "bad.txt", bad)], out, tokenizer="char")
    monkeypatch.setattr(os, "fsync", lambda number: os.write(-1, b""))  # as on a full disk
    with pytest.raises(OSError):
        prepare.prepare([tmp_path / "mixed.txt"], folder, tokenizer="word")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert not list((tmp_path / "new").glob("*")) and len(prepare.load(folder).train)


@pytest.mark.parametrize("kind", tok.KINDS)
def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(tok, "BLOCK", 1 << 15)
    peaks = []
    for n_blocks in (4, 24):
        file = write(tmp_path / "big.txt", "the cat — the dog\n".encode() * (n_blocks * tok.BLOCK // 20))
        tracemalloc.start()
        prepare.prepare([file], tmp_path / "out", tokenizer=kind)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]  # six times the text


@pytest.mark.parametrize("source", tok.KINDS)
def test_a_prepared_corpus_is_read_in_any_vocabulary_exactly_or_not_at_all(source, tmp_path, monkeypatch):
    text, tokens = "the cat — a dog\nthe end\n".encode() * 9, tmp_path / "tokens"
    folder = write_splits(tmp_path / "d", text, text[:52], text[:77])
    prepare.prepare([folder], tokens, tokenizer=source)
    monkeypatch.setattr(tok, "BLOCK", 7)
    for kind in tok.KINDS:
        vocab = tok.build(kind, text[::-1] if kind == "byte" else "the — a <unk> cat dogs end\t\n".encode())
        found, want = prepare.load(tokens, vocab=vocab), prepare.load(folder, vocab=vocab)
        assert all(map(np.array_equal, splits(found), splits(want))) and found.train.dtype == tok.dtype(vocab)
        assert found.tokens_sha256 == want.tokens_sha256
    prepare.prepare([folder], tokens, tokenizer="word", max_size=4)
    one_line((tokens, "<unk>", "give the text itself"), prepare.load, tokens, vocab=tok.build("byte", b""))


@pytest.mark.parametrize(
    "data, words",
    [
        (gzip.compress(MIXED), ["gzip", "unpack it"]),
        (b"PK\3\4\x14", ["zip archive", ".docx", "unpack it"]),
        (MIXED.decode().encode("utf-16"), ["UTF-16", "convert it to UTF-8"]),
        (MIXED.decode().encode("utf-16-le") * 50, ["NUL bytes throughout", "UTF-8"]),
        (b"PK is a name. " * 99 + ABC + b"\0" * 999 + b"\xff", None),  # which bytes of any file may be
    ],
)
def test_a_container_is_refused_with_what_it_is_and_what_to_do_and_any_other_file_is_taken_by_its_bytes(
    data, words, tmp_path
):
    file = write(tmp_path / "a.txt", data)
    if words:
        one_line([file, *words], prepare.load, file)
        refused(call(prepare.main, file, out=tmp_path / "out"), file, *words)
        assert not (tmp_path / "out").exists()
    else:
        assert text_of(prepare.load(file)) == data


def test_a_npy_of_ids_is_split_and_mapped_and_has_no_text(tmp_path, monkeypatch):
    monkeypatch.setattr(tok, "BLOCK", 64)
    ids = np.random.default_rng(0).integers(0, 390, 1011)
    ids[77] = 389
    found = [prepare.load(write_ids(tmp_path / f"ids{d}.npy", ids.astype(d))) for d in ("i8", "u2", ">i4")]
    for corpus in found:
        assert corpus.vocab == {"kind": "ids", "size": 390} and corpus.name[:3] == "ids"
        assert isinstance(corpus.train, np.memmap) and [len(part) for part in splits(corpus)] == [909, 51, 51]
        assert np.concatenate(splits(corpus)).tolist() == ids.tolist()
        assert corpus.n_bytes == corpus.n_unk == {"train": 0, "valid": 0, "test": 0}
    assert len({corpus.tokens_sha256 for corpus in found}) == 1
    more = prepare.load(tmp_path / "idsu2.npy", vocab={"kind": "ids", "size": 400})
    assert tok.size(more.vocab) == 400 and more.tokens_sha256 == found[0].tokens_sha256
    assert tok.decode(more.vocab, [3, 14, 15]) == b"3 14 15"


def test_ids_are_one_dimension_of_whole_numbers_and_not_mixed_up_with_text(tmp_path):
    for bad, words in ((np.zeros((3, 4), int), "shape (3, 4)"), (np.zeros(9), "float64"), (np.array([4, -1]), "-1")):
        file = write_ids(tmp_path / "ids.npy", bad)
        one_line((file, words, "want"), prepare.load, file)
    file, ids = write_ids(tmp_path / "ids.npy", np.arange(90)), {"kind": "ids", "size": 90}
    text = write(tmp_path / "abc.txt", ABC)
    one_line("ids from 0 to 89, want 0 to 88", prepare.load, file, vocab=ids | {"size": 89})
    one_line(("train split", "text", ".npy"), prepare.load, text, vocab=ids)


def test_a_tokenizer_json_gives_the_tokens_of_its_library_and_the_text_comes_back(tmp_path):
    file, text = subword_file(tmp_path), PROSE.encode() * 40
    vocab = tok.build(str(file), text)
    assert vocab["kind"] == "subword" and tok.check(json.loads(json.dumps(vocab))) == vocab
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(file))
    library.no_truncation()
    want = library.encode(text.decode()).ids
    assert tok.size(vocab) == library.get_vocab_size() > 257 and tok.encode(vocab, text).tolist() == want
    assert len(want) < len(text) and tok.decode(vocab, want) == text
    blocks = [text[i : i + 40] for i in range(0, len(text), 40)]
    assert np.concatenate(list(tok.encode_blocks(vocab, blocks))).tolist() == want
    assert b"".join(tok.decode_next(vocab, want[:i], [number]) for i, number in enumerate(want)) == text
    path = write(tmp_path / "prose.txt", text)
    assert call(prepare.main, path, out=tmp_path / "tokens", tokenizer=file).code is None
    assert prepare.load(tmp_path / "tokens").tokens_sha256 == prepare.load(path, str(file)).tokens_sha256


def test_a_broken_tokenizer_json_and_a_missing_library_are_one_line(tmp_path, monkeypatch):
    one_line(("'no.json'", "byte, char, word", "tokenizer.json"), tok.build, "no.json", b"a")
    file = write(tmp_path / "bad.json", b"[1]")
    one_line([file], tok.build, str(file), b"a")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    tok._subwords.cache_clear()
    one_line("pip install tokenizers", tok.build, str(file), b"a")
