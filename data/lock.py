"""One run at a time in a folder: a lock that is gone when the process that holds it is, however that ends."""

import contextlib
import os

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


@contextlib.contextmanager
def locked(folder, say=print):
    """Holds the folder of a run, and first removes what a process that was killed left half-written there.

    ValueError names the process that holds it, or says why nobody can write there.
    """
    path = folder / "lock"
    try:
        file = open(path, "a+", encoding="ascii", errors="replace")
    except OSError as e:
        raise ValueError(f"{folder} cannot be written ({e.strerror}): allow it, or give another --out") from None
    with file:
        if not _take(file, path, say):
            file.seek(0)
            holder = file.read(20).strip() or "unknown"
            raise ValueError(f"{folder} is in use by process {holder}: end that run first, or give another --out")
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
