"""Files whole or not at all; the folder of a run, where one process at a time writes and none leaves half a line."""

import contextlib
import io
import os

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


@contextlib.contextmanager
def together(*paths, mode="wb", **options):
    """Files to write that stand at `paths` once all of them are whole on the disk; until then all is as it was.

    Of several, the old last one is removed first and the new one put there last: where it is, all belong together.
    """
    temporaries = [path.with_name(path.name + ".tmp") for path in paths]
    try:
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(temporary, mode, **options)) for temporary in temporaries]
            yield files
            for file in files:
                file.flush()
                os.fsync(file.fileno())
        for old in paths[1:][-1:]:
            old.unlink(missing_ok=True)
        for temporary, path in zip(temporaries, paths):
            os.replace(temporary, path)
    finally:
        for temporary in temporaries:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def whole(path, mode="wb", **options):
    """As `together`, for one file."""
    with together(path, mode=mode, **options) as (file,):
        yield file


@contextlib.contextmanager
def locked(folder, say=print):
    """Holds the folder of a run, and first removes what a process that was killed left half-written there.

    The lock is gone when its process is, however that ends. BlockingIOError names the process that holds it.
    """
    path = folder / "lock"
    with open(path, "a+", encoding="ascii", errors="replace") as file:
        if not _take(file, path, say):
            file.seek(0)
            holder = file.read(20).strip() or "unknown"
            raise BlockingIOError(f"{folder} is in use by process {holder}: end that run first, or give another --out")
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        for left in folder.glob("*.npz.tmp"):
            left.unlink(missing_ok=True)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # Windows removes no open file
                path.unlink()


def open_log(path):
    """The log of a run, open for more lines; ends the line that a process that was killed left half-written there."""
    file = open(path, "a+b")
    if file.tell():
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return io.TextIOWrapper(file, encoding="utf-8", newline="\n")


def _take(file, path, say):
    try:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            import msvcrt

            file.seek(1 << 20)  # a byte far from the text, which others may then read
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as e:  # some network file systems know no locks
        say(f"{path} cannot be locked ({e.strerror}): no other run may write there")
        return True
    # Whoever held it may have removed it since it was opened here, and the next process would lock a new one.
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), os.stat(path))
