"""Standard corpora, from a server on this machine: what it gives, what goes wrong on the way, what is left then."""

import contextlib
import json
import resource
import threading
import tracemalloc
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from runs import LINES, call, refused, stand_in

from data import corpora, prepare
from data import tokenizer as tok
from data.corpora import CORPORA

NAMES = list(CORPORA)


class Handler(BaseHTTPRequestHandler):
    """Serves server.files; the n-th answer ends after server.cuts[n] bytes, or is the error server.cuts[n] names."""

    def do_GET(self):
        server = self.server
        name, start = self.path.lstrip("/"), self.headers.get("Range")
        server.asked.append((name, start))
        server.agents.append(self.headers["User-Agent"])
        cut = server.cuts.pop(0) if server.cuts else None
        if name not in server.files or isinstance(cut, str):
            return self.send_error(int(cut or 404))
        data, ranged = server.files[name], bool(start and server.ranges)
        if ranged:
            data = data[int(start.removeprefix("bytes=").removesuffix("-")) :]
        self.send_response(206 if ranged else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:cut])

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server whose files, cuts and ranges a test sets, in an empty working folder, without waits between tries."""
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.files, http.cuts, http.ranges, http.asked, http.agents = {}, [], True, [], []
    http.url = f"http://127.0.0.1:{http.server_port}"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(corpora, "WAITS", (0, 0, 0))
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield http
    http.shutdown()
    thread.join()
    http.server_close()


def serve(server, monkeypatch, name):
    """Puts a stand-in for a corpus on the server and into the table; its Source and texts by split."""
    source, server.files = stand_in(name, server.url)
    monkeypatch.setitem(CORPORA, name, source)
    texts = dict(server.files)
    if source.files != source.texts:
        packed = Path("packed.zip")
        packed.write_bytes(server.files[source.files[0].name])
        with zipfile.ZipFile(packed) as z:
            texts = {text.name: z.read(text.name) for text in source.texts}
        packed.unlink()
    return SimpleNamespace(
        source=source, texts=texts, splits={s: texts[name][a:b] for s, (name, a, b) in source.splits.items()}
    )


def left(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def no_corpus(name):
    """Asserts that nothing that stands there is taken for a corpus."""
    assert not list(Path("corpora", name).glob("*.tmp"))
    with pytest.raises(ValueError, match=f"python -m data.prepare {name}$"):
        prepare.load(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_downloaded_prepared_and_then_found_by_it(server, monkeypatch, name):
    with pytest.raises(ValueError, match=f"corpora/{name}/meta.json: run python -m data.prepare {name}$"):
        prepare.load(name)
    made = serve(server, monkeypatch, name)
    outcome = call(prepare.main, name)
    assert outcome.code is None and len(outcome.out.splitlines()) == 1, outcome
    for file in made.source.files:
        assert f"{file.name}: {file.size:,} of {file.size:,} bytes, 100%" in outcome.err
    corpus = prepare.load(name)
    assert (corpus.name, corpus.vocab["kind"]) == (name, made.source.tokenizer)
    assert corpus.n_bytes == {s: len(text) for s, text in made.splits.items()}
    for s, text in made.splits.items():
        assert np.array_equal(getattr(corpus, s), tok.encode(corpus.vocab, text))
        if made.source.tokenizer == "word":  # the published counts are of words and of ends of lines
            assert len(getattr(corpus, s)) == len(text.split()) + text.count(b"\n")
    assert [asked for asked, _ in server.asked] == [file.name for file in made.source.files]
    assert "Python" not in "".join(server.agents)
    assert call(prepare.main, name, tokenizer="byte").code is None  # what is there is not asked for again
    assert prepare.load(name).vocab == {"kind": "byte"} and len(server.asked) == len(made.source.files)


def test_enwik8_keeps_every_byte_newlines_too(server, monkeypatch):
    made = serve(server, monkeypatch, "enwik8")
    call(prepare.main, "enwik8")
    corpus = prepare.load("enwik8")
    assert b"".join(getattr(corpus, s).tobytes() for s in prepare.SPLITS) == made.texts["enwik8"]
    assert (corpus.train == ord("\n")).sum() == made.splits["train"].count(b"\n") > 100


def test_words_are_numbered_by_their_count_in_training_with_eos_first(server, monkeypatch):
    serve(server, monkeypatch, "wikitext-103")
    call(prepare.main, "wikitext-103")
    symbols = prepare.load("wikitext-103").vocab["symbols"]
    assert symbols == ["<eos>", "<unk>", "=", "the", "A", "title", "cat", ",", "dogs", "."]  # 3, 3, 2, 2, 1... a round


def test_the_table_splits_what_there_is_and_knows_every_download():
    for source in CORPORA.values():
        sizes = {text.name: text.size for text in source.texts}
        assert all(file.size and len(bytes.fromhex(file.sha256)) == 32 for file in source.files)
        ends = [source.splits[s][1:] for s in prepare.SPLITS]
        if len(sizes) == 1:
            (n,) = sizes.values()
            assert ends[0][0] == 0 and ends[0][1] == ends[1][0] and ends[2][1] == n
            assert ends[2] == ends[1] or ends[2][0] == ends[1][1]
        else:
            assert ends == [(0, None)] * 3 and [source.splits[s][0] for s in prepare.SPLITS] == list(sizes)


def test_an_interrupted_download_goes_on_where_it_ended(server, monkeypatch):
    made = serve(server, monkeypatch, "ptb")
    server.cuts = [700, "503"]
    outcome = call(prepare.main, "ptb")
    assert outcome.code is None and "ptb.train.txt: 700 of" in outcome.err and "503" in outcome.err, outcome
    assert server.asked[:3] == [("ptb.train.txt", at) for at in (None, "bytes=700-", "bytes=700-")]
    assert Path("corpora/ptb/ptb.train.txt").read_bytes() == made.texts["ptb.train.txt"]


def test_a_server_that_cannot_go_on_starts_again(server, monkeypatch):
    made = serve(server, monkeypatch, "shakespeare")
    server.cuts, server.ranges = [700], False
    assert call(prepare.main, "shakespeare").code is None and len(server.asked) == 2
    assert Path("corpora/shakespeare/input.txt").read_bytes() == made.texts["input.txt"]


def test_after_three_tries_it_gives_up_and_the_next_run_goes_on(server, monkeypatch):
    made = serve(server, monkeypatch, "enwik8")
    server.cuts = [500, 0, 11]
    n = made.source.files[0].size
    refused(call(prepare.main, "enwik8"), f"511 of {n:,} bytes in 3 tries", "run this again", "--from")
    assert left("corpora/enwik8") == ["enwik8.zip.part"]
    no_corpus("enwik8")
    assert call(prepare.main, "enwik8").code is None and server.asked[3:] == [("enwik8.zip", "bytes=511-")]
    assert prepare.load("enwik8").train.tobytes() == made.splits["train"]


def test_without_a_server_it_says_so(server, monkeypatch):
    source, _ = stand_in("text8", "http://127.0.0.1:9")  # discard: nobody listens
    monkeypatch.setitem(CORPORA, "text8", source)
    refused(call(prepare.main, "text8"), "refused", "127.0.0.1:9/text8.zip", "--from")
    no_corpus("text8")


def test_a_file_that_is_not_there_is_asked_for_once(server, monkeypatch):
    serve(server, monkeypatch, "ptb")
    del server.files["ptb.valid.txt"]
    refused(call(prepare.main, "ptb"), f"{server.url}/ptb.valid.txt", "404", "--from")
    assert [name for name, _ in server.asked] == ["ptb.train.txt", "ptb.valid.txt"]
    assert left("corpora/ptb") == ["ptb.train.txt"]
    no_corpus("ptb")


def test_another_file_of_the_same_size_is_thrown_away_naming_both_checksums(server, monkeypatch):
    made = serve(server, monkeypatch, "wikitext-2")
    (name, data), want = *server.files.items(), made.source.files[0]
    server.files[name] = data[:-1] + bytes([data[-1] ^ 1])
    refused(call(prepare.main, "wikitext-2"), "wikitext-2-v1.zip", "found sha256", f"want {want.sha256}")
    assert left("corpora/wikitext-2") == []
    no_corpus("wikitext-2")


def test_a_file_of_another_size_is_not_even_begun(server, monkeypatch):
    serve(server, monkeypatch, "text8")
    n = len(server.files["text8.zip"])
    server.files["text8.zip"] += b"more"
    refused(call(prepare.main, "text8"), f"offers {n + 4:,} bytes, want {n:,}", "--from")
    assert left("corpora/text8") == []


def test_a_part_that_is_longer_than_what_the_server_has_is_begun_again(server, monkeypatch):
    serve(server, monkeypatch, "shakespeare")
    server.cuts = [700, "416"]
    assert call(prepare.main, "shakespeare").code is None
    assert server.asked[1:] == [("input.txt", "bytes=700-"), ("input.txt", None)]


@contextlib.contextmanager
def disk(n):
    """No file grows over n bytes: the system's own limit, which fails in write as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_fills_while_downloading_leaves_a_part_to_go_on_from(server, monkeypatch):
    made = serve(server, monkeypatch, "shakespeare")
    with disk(1000):
        refused(call(prepare.main, "shakespeare"), "corpora/shakespeare", "too large", "free space", "--out")
    assert left("corpora/shakespeare") == ["input.txt.part"] and len(server.asked) == 1
    no_corpus("shakespeare")
    assert call(prepare.main, "shakespeare").code is None
    assert server.asked[1:] == [("input.txt", "bytes=1000-")]
    assert prepare.load("shakespeare").test.shape == (len(made.splits["test"]),)


def test_a_disk_that_fills_while_preparing_leaves_the_old_corpus_as_it_was(server, monkeypatch):
    made = serve(server, monkeypatch, "enwik8")
    assert call(prepare.main, "enwik8").code is None
    n, before = len(made.splits["valid"]), {file: file.read_bytes() for file in Path("corpora/enwik8").iterdir()}
    with disk(n + 1):  # the zip is there already, train.bin is the first file too large
        refused(call(prepare.main, "enwik8"), "corpora/enwik8", "too large", "free space")
    assert {file: file.read_bytes() for file in Path("corpora/enwik8").iterdir()} == before


def copies(made, files):
    """Folders and files that hold a corpus, as people have them."""
    for name, data in {**files, **made.texts}.items():
        for file in (Path("have", name), Path("flat", Path(name).name)):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
    one = [Path("have", text.name) for text in made.source.texts] if len(made.texts) == 1 else []
    return [Path("have"), Path("flat"), *(Path("have", name) for name in files if name.endswith(".zip")), *one]


@pytest.mark.parametrize("name", ["enwik8", "wikitext-2", "ptb", "shakespeare"])
def test_a_copy_is_taken_instead_wherever_it_lies(server, monkeypatch, name):
    made = serve(server, monkeypatch, name)
    files, server.files = server.files, {}
    for i, place in enumerate(copies(made, files)):
        outcome = call(prepare.main, name, "--from", place, out=f"out{i}")
        assert outcome.code is None, (place, outcome)
        corpus = prepare.load(f"out{i}")
        assert corpus.n_bytes == {s: len(text) for s, text in made.splits.items()}
        assert left(f"out{i}") == ["meta.json", "test.bin", "train.bin", "valid.bin"]
    Path("flat", made.source.files[0].name).unlink()
    for text in made.source.texts:  # the texts alone, as unpacked into one folder
        Path("flat", Path(text.name).name).write_bytes(made.texts[text.name])
    assert call(prepare.main, name, "--from", "flat").code is None and not server.asked


def test_a_url_is_asked_instead_of_the_usual_one(server, monkeypatch):
    made = serve(server, monkeypatch, "enwik8")
    monkeypatch.setitem(CORPORA, "enwik8", made.source._replace(url="http://127.0.0.1:9"))
    server.files["mirror/any.zip"] = server.files["mirror/enwik8.zip"] = server.files.pop("enwik8.zip")
    assert call(prepare.main, "enwik8", "--from", f"{server.url}/mirror/", out="a").code is None
    assert call(prepare.main, "enwik8", "--from", f"{server.url}/mirror/any.zip", out="b").code is None
    assert [name for name, _ in server.asked] == ["mirror/enwik8.zip", "mirror/any.zip"]
    assert prepare.load("a").sha256 == prepare.load("b").sha256


def test_a_copy_that_is_not_the_original_is_refused(server, monkeypatch):
    made = serve(server, monkeypatch, "enwik8")
    Path("enwik8").write_bytes(made.texts["enwik8"][:-1])
    n = len(made.texts["enwik8"])
    refused(call(prepare.main, "enwik8", "--from", "enwik8"), f"found {n - 1:,} bytes, want {n:,}")
    Path("enwik8").write_bytes(made.texts["enwik8"][:-1] + b"!")
    refused(call(prepare.main, "enwik8", "--from", "enwik8"), "found sha256", made.source.texts[0].sha256)
    Path("x.zip").write_bytes(server.files["enwik8.zip"][:-9])
    refused(call(prepare.main, "enwik8", "--from", "x.zip"), "x.zip: found", "bytes, want")
    refused(call(prepare.main, "enwik8", "--from", "nowhere"), "nowhere: no enwik8.zip or enwik8 there", "--from")
    no_corpus("enwik8")
    assert not server.asked


def test_a_folder_that_lacks_one_of_the_texts_is_refused(server, monkeypatch):
    serve(server, monkeypatch, "ptb")
    Path("have").mkdir()
    for name in ("ptb.train.txt", "ptb.test.txt"):
        Path("have", name).write_bytes(server.files[name])
    refused(call(prepare.main, "ptb", "--from", "have"), "have: no ptb.valid.txt there")
    no_corpus("ptb")


def test_options_that_need_a_name_or_a_folder_say_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my.txt").write_bytes(LINES)
    refused(call(prepare.main, "my.txt"), "my.txt: no --out")
    refused(call(prepare.main, "my.txt", "--from", "x", out="out"), "--from x is for enwik8, text8")
    assert left(".") == ["my.txt"]


def test_a_member_of_a_zip_is_read_in_blocks(server, monkeypatch):
    monkeypatch.setattr(tok, "BLOCK", 1 << 16)
    text = b"0123456789abcde\n" * (1 << 16)  # 16 blocks
    with zipfile.ZipFile("big.zip", "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("big", text)
    n = Path("big.zip").stat().st_size
    files, texts = (corpora.File("big.zip", n),), (corpora.File("big", len(text)),)
    splits = {s: ("big", 0, None if s == "train" else 1 << 16) for s in prepare.SPLITS}  # zipfile seeks in 16 MiB steps
    monkeypatch.setitem(CORPORA, "big", corpora.Source(server.url, files, texts, splits, "byte"))
    tracemalloc.start()
    try:
        prepare.prepare_named("big", "out", place="big.zip")
        assert tracemalloc.get_traced_memory()[1] < 6 * tok.BLOCK  # block, ids, what zlib and the file hold
    finally:
        tracemalloc.stop()
    assert json.loads(Path("out/meta.json").read_bytes())["n_tokens"]["train"] == 1 << 20
