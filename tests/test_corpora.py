"""Standard corpora, from a server on this machine: what it gives, what goes wrong on the way, what is left then."""

import io
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from runs import call, refused, stand_in

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
    http.files, http.cuts, http.ranges, http.asked = {}, [], True, []
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
        with zipfile.ZipFile(io.BytesIO(texts[source.files[0].name])) as z:
            texts = {text.name: z.read(text.name) for text in source.texts}
    splits = {s: texts[name][a:b] for s, (name, a, b) in source.splits.items()}
    return SimpleNamespace(source=source, texts=texts, splits=splits)


def is_prepared(name, *words, **flags):
    outcome = call(prepare.main, name, *words, **flags)
    assert outcome.code is None and len(outcome.out.splitlines()) == 1, outcome
    return outcome.err


def left(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def not_prepared(name, flags, *words):
    """Asserts that a corpus is refused, and that nothing that stands there is taken for it."""
    refused(call(prepare.main, name, **flags), *words)
    assert not list(Path("corpora", name).glob("*.tmp"))
    with pytest.raises(ValueError, match=f"corpora/{name}/meta.json: run python -m data.prepare {name}$"):
        prepare.load(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_downloaded_prepared_and_then_found_by_it(server, monkeypatch, name):
    made = serve(server, monkeypatch, name)
    told = is_prepared(name)
    assert all(f"{file.name}: {file.size:,} of {file.size:,} bytes, 100%" in told for file in made.source.files)
    corpus = prepare.load(name)
    assert (corpus.name, corpus.vocab["kind"]) == (name, made.source.tokenizer)
    assert corpus.n_bytes == {s: len(text) for s, text in made.splits.items()}
    for s, text in made.splits.items():
        assert np.array_equal(getattr(corpus, s), tok.encode(corpus.vocab, text))
        if made.source.tokenizer == "word":  # the published counts are of words and of ends of lines
            assert len(getattr(corpus, s)) == len(text.split()) + text.count(b"\n")
    assert [asked for asked, _ in server.asked] == [file.name for file in made.source.files]
    is_prepared(name, tokenizer="byte")  # what is there is not asked for again
    assert prepare.load(name).vocab == {"kind": "byte"} and len(server.asked) == len(made.source.files)


BROKEN_OFF = {  # of the server's answers: where each ends, what is asked for from the second time on
    "it goes on": ("ptb", [700, "503"], True, ["bytes=700-", "bytes=700-", None, None]),
    "of a server that cannot": ("shakespeare", [700], False, ["bytes=700-"]),
}


@pytest.mark.parametrize("name, cuts, ranges, starts", BROKEN_OFF.values(), ids=BROKEN_OFF.keys())
def test_a_broken_download_goes_on_where_it_ended_or_begins_again(server, monkeypatch, name, cuts, ranges, starts):
    made = serve(server, monkeypatch, name)
    file = made.source.files[0].name
    server.cuts, server.ranges = cuts.copy(), ranges
    told = is_prepared(name)
    assert f"{file}: 700 of" in told and all(cut in told for cut in cuts[1:])
    assert [start for _, start in server.asked] == [None, *starts]
    assert Path("corpora", name, file).read_bytes() == made.texts[file]


def test_what_a_server_has_no_longer_is_refused_and_left_out(server, monkeypatch):
    serve(server, monkeypatch, "ptb")
    del server.files["ptb.valid.txt"]
    not_prepared("ptb", {}, "--from", "/ptb.valid.txt", "404")
    assert left("corpora/ptb") == ["ptb.train.txt"]
    file = serve(server, monkeypatch, "text8").source.files[0]
    server.files[file.name] = server.files[file.name][:-1] + b"!"
    not_prepared("text8", {}, "--from", "found sha256", f"want {file.sha256}")
    assert left("corpora/text8") == []


@pytest.mark.parametrize("name", ["enwik8", "ptb"])
def test_a_copy_is_taken_instead_whether_it_is_the_download_its_folder_or_the_texts(server, monkeypatch, name):
    made = serve(server, monkeypatch, name)
    files, server.files = server.files, {}
    for held, folder in ((files, "have"), (made.texts, "texts")):
        for file, data in held.items():
            path = Path(folder, file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    for place in ("have", "texts", *[f"have/{file}" for file in files if file.endswith(".zip")]):
        is_prepared(name, "--from", place, out=f"{place}-out")
        assert prepare.load(f"{place}-out").n_bytes == {s: len(text) for s, text in made.splits.items()}
    assert not server.asked


def test_a_copy_that_is_not_the_original_or_lacks_a_text_is_refused(server, monkeypatch):
    text, sha256 = serve(server, monkeypatch, "enwik8").texts["enwik8"], CORPORA["enwik8"].texts[0].sha256
    Path("short").write_bytes(text[:-1])
    Path("other").write_bytes(text[:-1] + b"!")
    not_prepared("enwik8", {"from": "short"}, f"found {len(text) - 1:,} bytes, want {len(text):,}")
    not_prepared("enwik8", {"from": "other"}, "found sha256", sha256)
    not_prepared("enwik8", {"from": "nowhere"}, "nowhere: no enwik8.zip or enwik8 there", "--from")
    assert not server.asked
