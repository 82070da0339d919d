"""The worker's own statements, on an Engine or an AsyncEngine: the one place that knows which of them it is.

What the worker has to say is written as plain functions of a Session. With an Engine they run in a thread, with an
AsyncEngine under its greenlet. Whatever fails for the sake of the connection or the server is tried again, after a
pause that grows and has jitter, so that a server which comes back isn't met by all workers at once.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any, TypeVar

import anyio
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from .threads import Threads

__all__ = ["Database", "backoff"]

T = TypeVar("T")

log = logging.getLogger("fairqueue.worker")

#: Not for what became of messages. A lease that is lost with the server is a redelivery, no more.
_NOT_DURABLE = text("SET LOCAL synchronous_commit = off")


class Database:
    """The connections of a worker."""

    def __init__(self, engine: Engine | AsyncEngine, threads: Threads) -> None:
        self.engine = engine
        self.threads = threads

    async def run(self, function: Callable[[Session], T], *, durable: bool = True) -> T:
        """Call ``function`` with a session, commit, and return what it returned.

        :param durable: False where a crash of the server may undo the transaction: it doesn't wait for the disk.
        """

        def transact(session: Session) -> T:
            if not durable:
                session.execute(_NOT_DURABLE)
            result = function(session)
            session.commit()
            return result

        if isinstance(self.engine, AsyncEngine):
            async with AsyncSession(self.engine) as session:
                return await session.run_sync(transact)
        engine = self.engine

        def call() -> T:
            with Session(engine) as session:
                return transact(session)

        return await self.threads.run(call)

    async def insist(
        self,
        what: str,
        function: Callable[[Session], T],
        *,
        durable: bool = True,
        patience: float = float("inf"),
        until: anyio.Event | None = None,
    ) -> T | None:
        """As :meth:`run`, but tried again until it works.

        :param what: what can't be done, for the log.
        :param patience: raise when the database has refused it so often, for other reasons than the connection's.
        :param until: return None when it fails and this has come.
        """
        failures = refusals = 0
        while True:
            try:
                result = await self.run(function, durable=durable)
            except (SQLAlchemyError, OSError) as error:
                failures += 1
                refusals += not _lost(error)
                if refusals >= patience:
                    raise
                pause = backoff(failures)
                log.warning("can't %s, trying again in %.1f s: %s", what, pause, in_a_line(error))
                with anyio.move_on_after(pause):
                    await (until.wait() if until else anyio.sleep_forever())
                if until and until.is_set():
                    return None
            else:
                if failures:
                    log.info("the database is back")
                return result


def backoff(failures: int) -> float:
    """Seconds before the next try: 0.1 doubled with each failure up to 10, half of it at random."""
    return min(0.1 * 2.0 ** min(failures, 10), 10.0) * random.uniform(0.5, 1)  # noqa: S311


def in_a_line(error: BaseException) -> str:
    """The error without the statement and its parameters."""
    cause: Any = error.orig if isinstance(error, DBAPIError) and error.orig else error
    return f"{type(cause).__name__}: {' '.join(str(cause).split())}"


def _lost(error: BaseException) -> bool:
    """It is the connection, or the server, or there was none to be had: not what we asked for."""
    return not isinstance(error, DBAPIError) or isinstance(error, OperationalError | InterfaceError)
