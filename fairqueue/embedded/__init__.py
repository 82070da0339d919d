"""A PostgreSQL server for demos, development and tests, started by the program that needs it.

::

    from sqlalchemy import create_engine, text
    from fairqueue import embedded

    with embedded.ephemeral() as server:
        with create_engine(server.url()).connect() as connection:
            print(connection.scalar(text("SELECT version()")))

:func:`ephemeral` is a throw-away server of this process, :func:`shared` a durable one that several processes use
together, :func:`database_url` is FAIRQUEUE_DSN where that is set and one of the two where it is not.

``python -m fairqueue.embedded [DATABASE]`` is the shared server as a program to develop with: it makes the database,
``app`` unless named, prints its address as a line for a shell, and stops the server at Ctrl-C or SIGTERM, unless others
use it. The data and the address stay the same from run to run. Other programs that use :func:`shared` have to handle
SIGTERM themselves, or it leaves the server running, as a kill does.

Not for production: nobody patches these programs for you. Linux and macOS. The rest of fairqueue never
imports this package.

Variables of the environment:

FAIRQUEUE_DSN
    a running server, for :func:`database_url`: nothing is started
FAIRQUEUE_PG_BIN
    the folder with ``postgres`` and ``initdb``
FAIRQUEUE_PG_HOME
    where :func:`shared` keeps its data, and root its copy of programs out of others' reach
FAIRQUEUE_PG_OSUSER
    the account that runs the server when root starts it: ``nobody`` unless set
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from fairqueue import _url
from fairqueue.embedded._files import (
    EmbeddedError,
    held,
    home_directory,
    locked,
    own_directory,
    traversable,
    trying,
)
from fairqueue.embedded._programs import usable_programs
from fairqueue.embedded._server import Server, ended

__all__ = [
    "EmbeddedError",
    "Server",
    "database_url",
    "ephemeral",
    "shared",
]

_MEMORY = Path("/dev/shm")  # noqa: S108 (what is made there is checked to be ours)
_ROOM_IN_MEMORY = 2 << 30
_SETTINGS = {"max_connections": "200"}
# Only a crash of the machine could lose data, and that takes the directory too. A crash of the server alone
# loses nothing: commits reach the operating system, so synchronous_commit stays as users have it.
_FAST = {
    "fsync": "off",
    "full_page_writes": "off",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "autovacuum_naptime": "10min",
    "dynamic_shared_memory_type": "mmap",  # in the data's directory: goes with it, and needs no big /dev/shm
}


def ephemeral(*, fast: bool = True, settings: Mapping[str, str] = {}, tcp: bool = False) -> Server:
    """Start a throw-away server; it goes with the ``with`` block, ``stop()``, or the program.

    It dies with this process even on SIGKILL (on Linux, where it is the thread calling this that counts: call
    it from the main one); on macOS it is the next call that ends it then. That also removes the directory that was left
    behind.

    :param fast: give up durability and, where there is room, keep the data in memory. False: PostgreSQL's own settings,
        on disk.
    :param settings: of PostgreSQL, by name.
    :param tcp: listen on 127.0.0.1, too, with a password.
    :raises EmbeddedError: if there are no programs of a server, or it can't be started here.
    """
    programs = usable_programs()
    base = _scratch(in_memory=fast)
    with locked(base / "mutex"):  # nobody sweeps a directory between its birth and its lock
        _sweep(base)
        directory = traversable(Path(tempfile.mkdtemp(prefix="server-", dir=base)))
        users = held(directory / "users", fcntl.LOCK_SH)
    settings = {**_SETTINGS, **(_FAST if fast else {}), **settings}
    return Server(programs, directory, users, settings, tcp=tcp, temporary=True)


def shared(home: Path | None = None, *, settings: Mapping[str, str] = {}, tcp: bool = False) -> Server:
    """Join the durable server under ``home``, starting it if need be; the last process to leave stops it.

    A process that is killed leaves the server running for the next one, which then stops it.

    :param home: a folder; None: FAIRQUEUE_PG_HOME, else one of this user.
    :param settings: of PostgreSQL, by name; they count where this call starts the server.
    :param tcp: listen on 127.0.0.1, too, with a password, where this call starts the server.
    :raises EmbeddedError: if there are no programs of a server, it can't be started here, it is of another major
        version than what is under ``home``, or it runs without the ``tcp`` that is asked for.
    """
    programs = usable_programs()
    directory = own_directory(own_directory((home or home_directory()).resolve()) / "server")
    with locked(directory / "mutex"):
        users = held(directory / "users", fcntl.LOCK_SH)
        return Server(programs, directory, users, {**_SETTINGS, **settings}, tcp=tcp, temporary=False)


@contextlib.contextmanager
def database_url(*, durable: bool = False) -> Iterator[str]:
    """An SQLAlchemy URL, good within the block: FAIRQUEUE_DSN, else an embedded server's.

    :param durable: of a :func:`shared` server. False: of an :func:`ephemeral` one.
    :raises EmbeddedError: if FAIRQUEUE_DSN can't be read, or the server can't be started.
    """
    if url := url_in("FAIRQUEUE_DSN"):
        yield url
        return
    with shared() if durable else ephemeral() as server:
        yield server.url()


def sqlalchemy_url(dsn: str) -> str:
    """``dsn`` in SQLAlchemy's spelling, for psycopg, whatever driver it names."""
    try:
        return _url.sqlalchemy_url(dsn)
    except ValueError as error:
        raise EmbeddedError(str(error)) from error


def url_in(variable: str) -> str | None:
    """The same of a variable of the environment; None where it isn't set, or is empty."""
    dsn = os.environ.get(variable)
    if not dsn:
        return None
    try:
        return sqlalchemy_url(dsn)
    except EmbeddedError as error:
        raise EmbeddedError(f"{variable}: {error}") from None


def _scratch(*, in_memory: bool) -> Path:
    """Our directory for servers that are thrown away."""
    name = f"fairqueue-{os.geteuid()}"
    if in_memory and os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free >= _ROOM_IN_MEMORY:
        with contextlib.suppress(EmbeddedError):  # everybody may write there, and somebody has taken the name
            return own_directory(_MEMORY / name)
    return own_directory(Path(tempfile.gettempdir()) / name)


def _sweep(base: Path) -> None:
    """Remove what is left of servers whose process was killed; the mutex of ``base`` is held."""
    for directory in base.glob("server-*"):
        # suppressed: its owner removes it at this moment
        with contextlib.suppress(FileNotFoundError), trying(directory / "users") as unused:
            if unused and ended(directory):
                shutil.rmtree(directory, ignore_errors=True)
