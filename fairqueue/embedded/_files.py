"""Locks and directories.

Two lock files in a server's directory replace every guess about who is alive, because the kernel drops a
`flock` with its last holder, however that one died: `users` is held by each process that uses the server,
`server` by the processes of PostgreSQL, which inherit it.
"""

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from fairqueue.errors import FairqueueError


class EmbeddedError(FairqueueError, RuntimeError):
    """The server cannot be had; the message says why and what to do."""


def held(path: Path, operation: int) -> int:
    """A descriptor of `path`, locked."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, operation)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold `path` alone, waiting for it; who inherits the descriptor holds it beyond the block."""
    descriptor = held(path, fcntl.LOCK_EX)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def trying(path: Path) -> Iterator[bool]:
    """Hold `path` alone if nobody has it, and say whether."""
    try:
        descriptor = held(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
        return
    try:
        yield True
    finally:
        os.close(descriptor)


def home_directory() -> Path:
    """Where things are kept from run to run."""
    if named := os.environ.get("FAIRQUEUE_PG_HOME"):
        return Path(named).expanduser().resolve()  # it may be a link of theirs
    if os.geteuid() == 0:  # root's own home is closed to the account that runs the server
        return Path("/var/lib/fairqueue-embedded")
    return (Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share") / "fairqueue-embedded").resolve()


def own_directory(path: Path) -> Path:
    """Create `path`, or make sure that it is ours and not one that somebody else put there."""
    try:
        path.mkdir(parents=True)
        traversable(path)
    except FileExistsError:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            message = f"{path} is not a directory of this user: remove it, or {ELSEWHERE}."
            raise EmbeddedError(message) from None
    except OSError as error:
        raise EmbeddedError(f"{path} cannot be made ({error.strerror}): {ELSEWHERE}.") from error
    return path


def traversable(path: Path) -> Path:
    """Let the account that runs the server for root pass through `path`, and see nothing else of it."""
    path.chmod(0o711 if os.geteuid() == 0 else 0o700)
    return path


ELSEWHERE = "set FAIRQUEUE_PG_HOME (a durable server) or TMPDIR (a throw-away one) to a folder of yours"
