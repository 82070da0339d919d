"""The worker's own statements, on an Engine or an AsyncEngine: the one place that knows which of them it is.

What the worker has to say is written as plain functions of a Session. With an Engine they run in a thread, with an
AsyncEngine under its greenlet. Whatever fails for the sake of the connection or the server is tried again, after a
pause that grows and has jitter, so that a server which comes back isn't met by all workers at once.

The isolation level is READ COMMITTED, as dequeueing needs it, whatever the engine has for its handlers. Where there is
one statement only, there is no BEGIN and no COMMIT around it (AUTOCOMMIT): one round trip instead of three, and a
worker that is stopped in the middle can't keep the queue's turn.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
from sqlalchemy import URL, Engine, func, text
from sqlalchemy.exc import (
    ArgumentError,
    CompileError,
    DataError,
    DBAPIError,
    InterfaceError,
    OperationalError,
    SQLAlchemyError,
    StatementError,
)
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from fairqueue import _backoff
from fairqueue.consuming import error_text
from fairqueue.errors import FairqueueError, sqlstate
from fairqueue.schema import verify

from .logs import log
from .threads import Threads

__all__ = ["CLOSING", "LONGEST", "Database", "backoff", "impatient", "in_a_line", "not_durable", "place"]

T = TypeVar("T")


#: Seconds that giving back a connection may take.
CLOSING = 2.0
#: Seconds between two tries: doubled with each failure; and at most, unless told otherwise.
_FIRST, LONGEST = 0.1, 10.0

_LOOK = text("SELECT current_setting('default_transaction_isolation') AS level, clock_timestamp()")

#: Classes of SQLSTATE that say nothing against the statement: connection, the transaction's state, a login or a
#: database that is refused, serialization and deadlock, resources, locks, an operator's intervention, the system.
#: Drivers sort them under different exceptions.
_CIRCUMSTANCES = {"08", "25", "28", "3D", "40", "53", "55", "57", "58"}
#: Nothing may be written: the server's disk is full, say, or it is no longer the primary.
_READ_ONLY = "25006"


class NotConnected(OperationalError):
    """No connection was to be had. Whatever the reason, it says nothing against what was to be sent."""


class Database:
    """The connections of a worker."""

    def __init__(self, engine: Engine | AsyncEngine, threads: Threads) -> None:
        self.engine = engine
        self.threads = threads
        self._alone = "READ COMMITTED"

    def look(self, session: Session) -> None:
        """See what the server does without a BEGIN, that the driver can read a time, and that the schema is there.

        In a DateStyle that psycopg doesn't know, messages would be leased and not read, until they are dead.
        """
        if session.execute(_LOOK).one().level == "read committed":
            self._alone = "AUTOCOMMIT"
        verify(session.connection())

    async def run(self, function: Callable[[Session], T], *, alone: bool = False) -> T:
        """Call ``function`` with a session, commit, and return what it returned.

        :param alone: it executes one statement.
        """

        def transact(session: Session) -> T:
            _connect(session, level)
            try:
                result = function(session)
                session.commit()
            except DBAPIError as error:
                if sqlstate(error.orig) == _READ_ONLY:
                    session.invalidate()  # a new connection may lead to the server that is the primary now
                raise
            except (FairqueueError, SQLAlchemyError, OSError):
                raise
            except Exception as error:
                # A driver that can't read a value raises whatever it comes to, such as asyncpg an OverflowError.
                raise DataError(None, None, error) from error
            return result

        level = self._alone if alone else "READ COMMITTED"
        engine = self.engine
        if isinstance(engine, AsyncEngine):
            session = AsyncSession(engine)
            try:
                return await session.run_sync(transact)
            finally:  # also when cancelled, and before the event loop ends; but not for as long as a server may hang
                with anyio.move_on_after(CLOSING, shield=True):
                    await session.close()

        def call() -> T:
            with Session(engine) as session:
                return transact(session)

        return await self.threads.run(call)

    async def insist(
        self,
        what: str,
        function: Callable[[Session], T],
        *,
        alone: bool = False,
        patience: float = float("inf"),
        until: anyio.Event | None = None,
        longest: float = LONGEST,
        lost: Callable[[], object] = lambda: None,
        before: Callable[[], Awaitable[object]] | None = None,
    ) -> T | None:
        """As :meth:`run`, but tried again until it works.

        :param what: what can't be done, for the log.
        :param patience: raise when the database has refused it so often, for other reasons than the connection's.
        :param until: return None when it fails and this has come.
        :param longest: seconds between two tries at most.
        :param lost: called each time that it fails for the connection's sake.
        :param before: awaited before each try, as a part of it.
        """
        failures = refusals = 0
        while True:
            try:
                if before is not None:
                    await before()
                result = await self.run(function, alone=alone)
            except (SQLAlchemyError, OSError) as error:
                failures += 1
                refusals += not _lost(error)
                if refusals >= patience:
                    raise
                if _lost(error):
                    lost()
                pause = backoff(failures, longest)
                log.warning("can't %s, trying again in %.1f s: %s", what, pause, in_a_line(error))
                with anyio.move_on_after(pause):
                    await (until.wait() if until else anyio.sleep_forever())
                if until and until.is_set():
                    return None
            else:
                if failures > refusals:
                    log.info("the database is back")
                elif failures:
                    log.info("can %s again", what)
                return result


def not_durable(statement: Any) -> Any:
    """The statement, in a transaction that doesn't wait for the disk: a crash of the server may undo it.

    Not for what became of messages. A lease that is lost with the server is a redelivery, no more.
    """
    return _with(statement, "synchronous_commit", "off")


def impatient(statement: Any, seconds: float) -> Any:
    """The statement, in a transaction that waits no longer than that for what somebody else has locked.

    :raises sqlalchemy.exc.DBAPIError: lock_not_available, when it is sent.
    """
    return _with(statement, "lock_timeout", f"{round(seconds * 1000)}ms")


def _with(statement: Any, setting: str, value: str) -> Any:
    # A row beside the thousand that a function is taken to return: so it is what the plan begins with.
    local = func.set_config(setting, value, True).table_valued("value", joins_implicitly=True)
    return statement.select_from(local)


def backoff(failures: int, longest: float = LONGEST) -> float:
    """Seconds before the next try."""
    return _backoff.backoff(failures, _FIRST, longest)


def in_a_line(error: BaseException) -> str:
    """The error without the statement and its parameters."""
    cause: Any = error.orig if isinstance(error, DBAPIError) and error.orig else error
    return " ".join(error_text("error", cause).split())


def place(url: URL) -> str:
    """Where it leads to, for the log; without more of it, as a password may be anywhere else."""
    parts = {"host": url.host, "port": url.port, "dbname": url.database, "user": url.username}
    if "@" in f"{url.host} {url.database}":
        return "its URL has an @ in the password, or behind it: write %40"  # and don't show what follows
    said = {name: value or url.query.get(name) for name, value in parts.items()}
    return ", ".join(f"{name} {value}" for name, value in said.items() if value) or "where its driver looks by default"


def _connect(session: Session, level: str) -> None:
    try:
        # Of the connection: what an engine made for it had would be overruled by what the given engine has.
        # stream_results would DECLARE a cursor, for which there has to be a transaction.
        session.connection(execution_options={"isolation_level": level, "stream_results": False})
    except DBAPIError as error:
        raise NotConnected(None, None, error.orig or error) from error
    except SQLAlchemyError:
        raise
    except Exception as error:
        # From what the application does in order to connect, such as asking for a token; and before 2.1 SQLAlchemy
        # leaves as it is what asyncpg raises.
        raise NotConnected(None, None, error) from error


def _lost(error: BaseException) -> bool:
    """It is the connection, or the server, or there was none to be had: not what we asked for."""
    if isinstance(error, NotConnected):
        return True
    if not isinstance(error, DBAPIError):  # an error of the pool's, or of a statement that can't be sent
        return not isinstance(error, StatementError | CompileError | ArgumentError)
    # What the server says goes first: to psycopg a message that is beyond a limit of PostgreSQL's (class 54) is an
    # OperationalError, too, and a report of that would be tried again for ever, ahead of all others.
    if state := sqlstate(error.orig):
        return state[:2] in _CIRCUMSTANCES
    return isinstance(error, OperationalError | InterfaceError)
