"""``python -m fairqueue.embedded``: a server to develop with, until Ctrl-C."""

import argparse
import contextlib
import shlex
import signal
import sys

from fairqueue.embedded import EmbeddedError, Server, shared
from fairqueue.embedded._files import home_directory

_DESCRIPTION = """\
Run a PostgreSQL server to develop with, until Ctrl-C or SIGTERM, and print
how to reach it, for a shell. The address is the same each time."""

_KEPT = """\
All databases are kept, in

  {folder}

(FAIRQUEUE_PG_HOME names another place); to begin anew, remove that folder
while no server runs. Data of another major version of PostgreSQL is refused.
The server listens on a socket that only this user can reach. Of several
programs that use it at the same time, the last one to end stops it. After
kill -9 it goes on running, until this command is started and ended once more.
Not for production."""


def main() -> None:
    """Start the server, wait for a signal, stop the server."""
    kept = _KEPT.format(folder=str(home_directory() / "server").replace("%", "%%"))  # which argparse formats again
    parser = argparse.ArgumentParser(
        prog="python -m fairqueue.embedded",
        description=_DESCRIPTION,
        epilog=kept,
        formatter_class=argparse.RawDescriptionHelpFormatter,  # which breaks no path in two
    )
    parser.add_argument("database", nargs="?", default="app", help="made if it isn't there; default: %(default)s")
    database: str = parser.parse_args().database
    try:
        import psycopg
    except ImportError as error:  # the package is there, but the system has no libpq
        sys.exit(f"fairqueue: {str(error).splitlines()[0]}; pip install 'psycopg[binary]'")
    ends = {signal.SIGINT, signal.SIGTERM}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as it is under nohup
        ends.add(signal.SIGHUP)
    # From here on they wait until they are asked for: none interrupts a start or a stop.
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    try:
        with shared() as server:
            _make(server, database)
            # A line for a shell, where a URL with several settings has to be quoted.
            print(f"export DATABASE_URL={shlex.quote(server.url(database))}", flush=True)
            signal.sigwait(ends)
    except (EmbeddedError, psycopg.Error) as error:
        sys.exit(f"fairqueue: {error}")


def _make(server: Server, database: str) -> None:
    import psycopg
    from psycopg.sql import SQL, Identifier

    with (
        psycopg.connect(server.dsn, autocommit=True) as connection,
        # The second one where two are at it at the same time.
        contextlib.suppress(psycopg.errors.DuplicateDatabase, psycopg.errors.UniqueViolation),
    ):
        connection.execute(SQL("CREATE DATABASE {}").format(Identifier(database)))


if __name__ == "__main__":
    main()
