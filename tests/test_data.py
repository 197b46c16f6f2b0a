"""The border: tokenizers, corpora, prepared tokens, and one clear line for all that can be wrong with them."""

import hashlib
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

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


def one_line(call, *words):
    """The message of the ValueError that `call` raises: one line that has all `words`."""
    with pytest.raises(ValueError) as e:
        call()
    message = str(e.value)
    assert "\n" not in message
    for word in words:
        assert str(word) in message, f"no {word!r} in: {message}"


def prepared(tmp_path, text=MIXED, **options):
    file = write(tmp_path / "mixed.txt", text)
    prepare.prepare([file], tmp_path / "tokens", **options)
    return tmp_path / "tokens"


def edit_meta(folder, **changes):
    meta = json.loads((folder / "meta.json").read_bytes()) | changes
    (folder / "meta.json").write_text(json.dumps({k: v for k, v in meta.items() if v is not None}))


# Tokenizers


@pytest.mark.parametrize("kind", ["byte", "char"])
def test_every_byte_of_unicode_tabs_spaces_and_crlf_comes_back(kind):
    vocab = tok.build(kind, UNI)
    ids = tok.encode(vocab, UNI)
    assert ids.dtype == np.uint8 and len(ids) == (len(UNI) if kind == "byte" else len(UNI.decode()))
    assert tok.decode(vocab, ids) == UNI


def test_char_symbols_are_the_sorted_code_points():
    vocab = tok.build("char", "bé\na—b".encode())
    assert vocab == {"kind": "char", "symbols": ["\n", "a", "b", "é", "—"]}
    assert tok.encode(vocab, b"ba\n").tolist() == [2, 1, 0]


def test_words_are_ranked_by_count_with_eos_first_and_unk_where_its_count_puts_it():
    text = b"a b a\nc b a d\n<unk> <unk> <unk> <unk>\n"
    assert tok.build("word", text)["symbols"] == ["<eos>", "<unk>", "a", "b", "c", "d"]
    assert tok.build("word", b"b a a\n")["symbols"] == ["<eos>", "a", "b", "<unk>"]
    assert tok.build("word", b"a a a a b c b\n", min_count=2)["symbols"] == ["<eos>", "a", "b", "<unk>"]
    assert tok.build("word", b"a a b b b c c\n", max_size=3)["symbols"] == ["<eos>", "<unk>", "b"]


def test_words_decode_to_lines_and_a_prompt_gets_no_line_end():
    vocab = tok.build("word", b"a b\n\nc a\n", min_count=0)
    assert tok.decode(vocab, tok.encode(vocab, b"  a \t b\r\n\nc a\n a")) == b"a b\n\nc a\na"
    assert tok.encode(vocab, b"a zebra").tolist() == [vocab["symbols"].index("a"), vocab["symbols"].index("<unk>")]


def test_ids_take_the_smallest_type_that_holds_them():
    for n, dtype in ((256, np.uint8), (257, np.uint16), (1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)):
        symbols = [chr(c) for c in range(1 << 17) if not 0xD800 <= c < 0xE000][:n]
        vocab = {"kind": "char", "symbols": symbols}
        ids = tok.encode(vocab, "".join(symbols).encode())
        assert ids.dtype == dtype and ids.tolist() == list(range(n))


@pytest.mark.parametrize("kind", tok.KINDS)
@pytest.mark.parametrize("block", [1, 3, 7, 64])
def test_blocks_may_cut_the_text_anywhere(kind, block):
    blocks = [MIXED[i : i + block] for i in range(0, len(MIXED), block)]
    vocab = tok.build(kind, MIXED)
    assert tok.build(kind, iter(blocks)) == vocab
    assert np.concatenate(list(tok.encode_blocks(vocab, blocks))).tolist() == tok.encode(vocab, MIXED).tolist()


def test_an_unknown_character_is_named_with_its_place_and_the_remedy():
    vocab = tok.build("char", b"abc\n")
    want = ("'é'", "U+00E9", "index 5", "line 2", "4 symbols", "--tokenizer byte", "prompt:")
    one_line(lambda: tok.encode(vocab, "abc\naé".encode(), what="prompt"), *want)
    blocks = [b"ab", b"c\na\xc3", b"\xa9b"]  # the same, cut within the character
    one_line(lambda: list(tok.encode_blocks(vocab, blocks, what="prompt")), *want)


def test_text_that_is_not_utf8_is_refused_with_the_byte_offset():
    blocks = ["é" * 5, "abc"]
    bad = "".join(blocks).encode() + b"\xff!"
    for kind in ("char", "word"):
        one_line(lambda kind=kind: tok.build(kind, bad), "0xff", "offset 13", "--tokenizer byte")
        one_line(lambda kind=kind: tok.build(kind, [bad[:9], bad[9:]]), "0xff", "offset 13")
        one_line(lambda kind=kind: tok.build(kind, b"ab\xc3"), "0xc3", "offset 2")
    assert tok.encode(tok.build("byte", bad), bad).tobytes() == bad


def test_an_empty_prompt_starts_from_one_id_of_the_vocabulary():
    for vocab, want in (
        (tok.build("byte", b""), b"\n"),
        (tok.build("char", b"ab\n"), b"\n"),
        (tok.build("char", "—é".encode()), "é".encode()),
        (tok.build("word", b"a b"), b"\n"),
    ):
        assert tok.default_prompt(vocab) == want and len(tok.encode(vocab, want)) == 1


def test_a_vocabulary_survives_json_and_a_broken_one_is_refused():
    for kind in tok.KINDS:
        vocab = tok.build(kind, UNI)
        assert tok.check(json.loads(json.dumps(vocab))) == vocab
    for broken, words in (
        ([1], "vocabulary of kind"),
        ({"kind": "bpe"}, "'bpe'"),
        ({"kind": ["x"]}, "vocabulary of kind"),
        ({"kind": "char"}, "without a list"),
        ({"kind": "char", "symbols": []}, "without a list"),
        ({"kind": "char", "symbols": ["a", "bc"]}, "'bc'"),
        ({"kind": "char", "symbols": ["a", 7]}, "symbol 7"),
        ({"kind": "char", "symbols": ["\ud800"]}, "\\ud800"),
        ({"kind": "char", "symbols": ["b", "a", "b"]}, "'b' more than once"),
        ({"kind": "word", "symbols": ["<eos>", "<unk>", "a b"]}, "'a b'"),
        ({"kind": "word", "symbols": ["<eos>", "a"]}, "<unk>"),
    ):
        one_line(lambda broken=broken: tok.check(broken), words)


def test_options_that_cannot_apply_are_refused():
    one_line(lambda: tok.build("bpe", b"a"), "'bpe'", "byte, char, word")
    one_line(lambda: tok.build("char", b"a", min_count=2), "min_count=2", "word only")
    one_line(lambda: tok.build("word", b"a", min_count=-1), "min_count=-1")
    one_line(lambda: tok.build("word", b"a", max_size=2), "max_size=2")
    one_line(lambda: tok.build("char", b""), "no symbols")


def test_ids_outside_the_vocabulary_are_found_on_the_host():
    one_line(lambda: tok.check_ids(np.array([[0, 11], [3, 4]], np.uint16), 11, "x.bin"), "x.bin", "id 11", "of 11")
    one_line(lambda: tok.check_ids(np.array([0, -1, 3]), 11, "x"), "smallest id -1", "id 3", "of 11")
    one_line(lambda: tok.check_ids(np.array([0.5]), 11, "x"), "float64")
    last = np.zeros(tok.BLOCK + 1, np.uint8)
    last[-1] = 11  # in the second block
    one_line(lambda: tok.check_ids(last, 11, "x"), "id 11")
    assert tok.check_ids(last, 12, "x") is last and not tok.check_ids(last[:0], 1, "x").size
    one_line(lambda: tok.decode({"kind": "char", "symbols": ["a", "b"]}, [0, -1]), "id -1")
    assert tok.decode({"kind": "byte"}, []) == b""


# Corpora


def test_the_built_in_corpus_is_the_standard_library_of_this_python():
    corpus = prepare.load()
    text = prepare.builtin_text()
    assert corpus.train.tobytes() + corpus.valid.tobytes() + corpus.test.tobytes() == text
    assert corpus.sha256 == hashlib.sha256(text).hexdigest() and sum(corpus.n_bytes.values()) == len(text)
    assert sys.version.split()[0] in corpus.source and f"{len(prepare.builtin_files())} files" in corpus.source
    assert corpus.name == "stdlib" and b"\r\n" not in text and len(text) > 5e6
    assert b"def namedtuple(" in text and b"class TestProgram(" in text  # collections, unittest: not a "test" folder


def test_the_built_in_corpus_leaves_out_what_the_list_says_and_orders_files_by_hash(tmp_path):
    kept = ["os.py", "json/tool.py", "turtle/x.py", "unittest/case.py", "testing.py"]
    left = ["turtle.py", "_sysconfigdata_x.py", "README.txt", "config-3/x.py", "a/test/x.py", "idlelib/x.py"]
    for name in kept + left:
        write(tmp_path / name, name.encode() + b"\r\n" + b"x" * 300_000)
    (tmp_path / "broken.py").symlink_to(tmp_path / "nowhere")
    order = sorted(kept, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    assert order != sorted(kept)
    assert prepare.builtin_files(tmp_path) == [tmp_path / name for name in order]
    assert prepare.builtin_text(tmp_path) == b"".join(name.encode() + b"\n" + b"x" * 300_000 for name in order)


def test_too_little_standard_library_asks_for_data(tmp_path):
    write(tmp_path / "os.py", b"x = 1\n")
    one_line(lambda: prepare.builtin_text(tmp_path), "6 bytes", "--data FILE", tmp_path)


def test_a_file_is_split_90_5_5_in_order_and_bytes_are_kept(tmp_path):
    text = bytes(range(256)) * 4 + b"\r\n"  # 1,026 bytes, not UTF-8
    text = text.replace(b"\x80", b"a")[:1000]
    corpus = prepare.load(write(tmp_path / "one.txt", text))
    assert [len(corpus.train), len(corpus.valid), len(corpus.test)] == list(corpus.n_bytes.values())
    assert corpus.train.tobytes() + corpus.valid.tobytes() + corpus.test.tobytes() == text
    assert corpus.name == "one" and corpus.vocab == {"kind": "byte"} and 900 <= corpus.n_bytes["train"] <= 903
    abc = prepare.load(write(tmp_path / "abc.txt", ABC), "char")
    assert abc.n_bytes == {"train": 5400, "valid": 300, "test": 300} and abc.vocab["symbols"] == ["a", "b", "c"]


def test_no_split_cuts_a_character_and_every_tokenizer_gets_the_same_splits(tmp_path):
    for n in range(40, 60):
        file = write(tmp_path / "wide.txt", "\U0001f600".encode() * n)
        corpora = [prepare.load(file, kind) for kind in tok.KINDS]
        assert corpora[0].n_bytes == corpora[1].n_bytes == corpora[2].n_bytes
        assert len({c.sha256 for c in corpora}) == 1
        assert all(n_bytes % 4 == 0 for n_bytes in corpora[1].n_bytes.values())


def test_a_folder_of_three_texts_keeps_its_splits(tmp_path):
    texts = {"train": b"abcabc\n", "valid": b"cab", "test": b"b"}
    for s, text in texts.items():
        write(tmp_path / "d" / f"{s}.txt", text)
    corpus = prepare.load(tmp_path / "d", "char")
    assert {s: tok.decode(corpus.vocab, getattr(corpus, s)) for s in prepare.SPLITS} == texts
    assert corpus.sha256 == hashlib.sha256(b"abcabc\ncabb").hexdigest() and corpus.n_bytes["valid"] == 3


def test_a_symbol_that_training_never_saw_is_found_with_its_split(tmp_path):
    for where, text in (("valid split", ABC[:5500] + b"\n!" + ABC[5502:]), ("test split", ABC + b"!")):
        file = write(tmp_path / "x.txt", text)
        one_line(lambda file=file: prepare.load(file, "char"), where, "U+0021" if "test" in where else "U+000A", "byte")
        one_line(
            lambda file=file: prepare.prepare([file], tmp_path / "out", tokenizer="char"), where, "--tokenizer byte"
        )
        assert not (tmp_path / "out" / "meta.json").exists()
        assert len(prepare.load(file).train)  # bytes have no such case


def test_paths_without_a_text_are_refused_in_one_line(tmp_path):
    folder = write(tmp_path / "d" / "train.txt", b"abc").parent
    one_line(lambda: prepare.load(tmp_path / "no.txt"), "no.txt", "no such file")
    one_line(lambda: prepare.load(write(tmp_path / "e.txt", b"")), "e.txt", "empty file")
    one_line(lambda: prepare.load(write(tmp_path / "n.txt", b"\n" * 999)), "n.txt", "only newlines")
    one_line(lambda: prepare.load(folder), "valid.txt, test.txt", "meta.json")
    one_line(lambda: prepare.find_splits([folder / "train.txt", folder]), "a folder, want a text file")
    os.mkfifo(tmp_path / "pipe")
    one_line(lambda: prepare.load(tmp_path / "pipe"), "no regular file")
    write(folder / "valid.txt", b"")
    write(folder / "test.txt", b"abc")
    one_line(lambda: prepare.load(folder), "valid.txt", "empty file")


def test_a_file_that_may_not_be_read_is_refused_in_one_line(tmp_path):
    file = write(tmp_path / "secret.txt", ABC)
    file.chmod(0)
    uid = os.geteuid()
    if not uid:  # root may read everything
        os.seteuid(65534)
    try:
        one_line(lambda: prepare.load(file), "secret.txt", "Permission denied")
    finally:
        os.seteuid(uid)


# Prepared tokens


@pytest.mark.parametrize("kind", tok.KINDS)
def test_prepared_tokens_are_the_same_corpus_as_the_text(tmp_path, kind):
    text, tokens = (
        prepare.load(write(tmp_path / "mixed.txt", MIXED), kind),
        prepare.load(prepared(tmp_path, tokenizer=kind)),
    )
    assert isinstance(tokens.train, np.memmap) and tokens.train.dtype == tok.dtype(tokens.vocab)
    for s in prepare.SPLITS:
        assert np.array_equal(getattr(text, s), getattr(tokens, s))
    assert (text.vocab, text.sha256, text.n_bytes) == (tokens.vocab, tokens.sha256, tokens.n_bytes)
    assert sorted(p.name for p in (tmp_path / "tokens").iterdir()) == [
        "meta.json",
        "test.bin",
        "train.bin",
        "valid.bin",
    ]


def test_files_are_joined_in_the_order_given(tmp_path):
    a, b = write(tmp_path / "a", "é—".encode() * 50), write(tmp_path / "b", ABC[:301])
    out = tmp_path / "out"
    prepare.prepare([b, a], out)
    corpus = prepare.load(out)
    assert b"".join(getattr(corpus, s).tobytes() for s in prepare.SPLITS) == b.read_bytes() + a.read_bytes()
    assert corpus.n_bytes == {"train": 496, "valid": 27, "test": 28}  # 495.9 and 523.45 of 551; byte 495 is within a —


def test_prepared_tokens_that_contradict_meta_json_are_refused(tmp_path):
    folder = prepared(tmp_path, tokenizer="char")
    meta = json.loads((folder / "meta.json").read_bytes())
    vocab = meta["vocab"] | {"symbols": meta["vocab"]["symbols"][:5]}
    load = lambda: prepare.load(folder)  # noqa: E731
    one_line(lambda: prepare.load(folder, "word"), "char", "asked word", "--tokenizer char")
    for changes, words in (
        (dict(vocab=vocab), ("train.bin", f"largest id {len(meta['vocab']['symbols']) - 1}", "vocabulary of 5")),
        (dict(vocab={"kind": "bpe"}), ("meta.json", "'bpe'")),
        (dict(dtype="float32"), ("float32", "uint16")),
        (dict(dtype="uint16"), ("train.bin", meta["n_tokens"]["train"], 2 * meta["n_tokens"]["train"])),
        (dict(n_tokens=meta["n_tokens"] | {"valid": 3}), ("valid.bin", "want 3 bytes")),
        (dict(n_tokens=meta["n_tokens"] | {"valid": -3}), ("n_tokens", "-3")),
        (dict(n_bytes=None), ("meta.json", "n_bytes")),
        (dict(n_bytes=7), ("meta.json",)),
    ):
        edit_meta(folder, **changes)
        one_line(load, *words)
        edit_meta(folder, **meta)
    load()
    (folder / "test.bin").unlink()
    one_line(load, "test.bin", "no file")
    (folder / "meta.json").write_bytes(b"{")
    one_line(load, "meta.json", "prepare the corpus again")


def test_tokens_without_a_text_hash_are_known_by_their_ids_and_may_have_an_empty_split(tmp_path):
    folder = prepared(tmp_path)
    edit_meta(folder, sha256=None)
    assert prepare.load(folder).sha256 == hashlib.sha256(MIXED).hexdigest()  # for bytes, ids are the text
    (folder / "valid.bin").write_bytes(b"")
    edit_meta(folder, n_tokens=json.loads((folder / "meta.json").read_bytes())["n_tokens"] | {"valid": 0})
    assert prepare.load(folder).valid.shape == (0,)


def test_a_run_that_fails_leaves_an_older_corpus_whole_and_else_nothing(tmp_path):
    folder = prepared(tmp_path)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    for bad in (b"abc" * 400 + b"d", b"", b"\n \n", b"ab\xff" * 99):
        for out in (folder, tmp_path / "new"):
            bad_file = write(tmp_path / "bad.txt", bad)
            one_line(lambda out=out, file=bad_file: prepare.prepare([file], out, tokenizer="char"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda number: os.write(-1, b""))  # as on a full disk
        with pytest.raises(OSError):
            prepare.prepare([tmp_path / "mixed.txt"], folder, tokenizer="word")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert not list((tmp_path / "new").glob("*")) and len(prepare.load(folder).train)


def test_a_corpus_that_was_half_replaced_when_the_process_died_is_none(tmp_path, monkeypatch):
    folder, replace, left = prepared(tmp_path), os.replace, [0]

    def die(source, target):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        replace(source, target)

    monkeypatch.setattr(os, "replace", die)
    for left[0] in range(4):
        with pytest.raises(KeyboardInterrupt):
            prepare.prepare([write(tmp_path / "abc.txt", ABC)], folder)
        one_line(lambda: prepare.load(folder), "python -m data.prepare")
    left[0] = 4
    prepare.prepare([tmp_path / "abc.txt"], folder)
    assert prepare.load(folder).n_bytes["valid"] == 300


def test_memory_does_not_grow_with_the_file(tmp_path):
    file = write(tmp_path / "big.txt", b"0123456789abcde\n" * (40 * tok.BLOCK // 64))  # 10 blocks
    tracemalloc.start()
    try:
        prepare.prepare([file], tmp_path / "out")
        assert tracemalloc.get_traced_memory()[1] < 3 * tok.BLOCK
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["char", "word"])
def test_characters_and_words_are_read_in_blocks(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(tok, "BLOCK", 1 << 15)
    peaks = []
    for n_blocks in (4, 24):
        file = write(tmp_path / "big.txt", "the cat — the dog\n".encode() * (n_blocks * tok.BLOCK // 20))
        tracemalloc.start()
        try:
            prepare.prepare([file], tmp_path / "out", tokenizer=kind)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]  # six times the text


def test_a_word_that_training_never_saw_is_unk(tmp_path):
    for s, text in {"train": b"a b\n", "valid": b"zebra b\n", "test": b"b\nzebra"}.items():
        write(tmp_path / "d" / f"{s}.txt", text)
    corpus = prepare.load(tmp_path / "d", "word")
    assert [tok.decode(corpus.vocab, ids) for ids in (corpus.valid, corpus.test)] == [b"<unk> b\n", b"b\n<unk>"]


def test_the_locale_changes_nothing_and_the_command_prints_one_json_line(tmp_path):
    file, out = write(tmp_path / "uni.txt", UNI * 20), tmp_path / "out"
    command = [sys.executable, "-m", "data.prepare", str(file), "--out", str(out), "--tokenizer", "char"]
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True)
    assert run.returncode == 0 and json.loads(run.stdout)["n_tokens"]["train"], run.stderr
    here, there = prepare.load(file, "char"), prepare.load(out)
    assert here.vocab == there.vocab and np.array_equal(here.train, there.train) and here.sha256 == there.sha256


def test_the_command_says_what_is_wrong_in_one_line(tmp_path):
    with pytest.raises(SystemExit) as e:
        prepare.main([str(tmp_path / "no.txt"), "--out", str(tmp_path / "out")])
    assert "no such file" in str(e.value) and "\n" not in str(e.value)
    file = write(tmp_path / "abc.txt", ABC)
    with pytest.raises(SystemExit) as e:
        prepare.main([str(file), "--out", str(file)])
    assert "File exists" in str(e.value) and not (tmp_path / "out").exists()
