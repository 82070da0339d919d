"""Waiting: how a message ended, for who has enqueued it and needs to know.

::

    import fairqueue as fq

    message = fq.enqueue(session, "acme", {"doc": 1})
    session.commit()
    try:
        end = fq.wait_for(engine, message, timeout=0.1)  # an Ending
    except fq.WaitTimeout:
        end = None  # still ready, or leased
    session.execute(fq.ending([message])).all()  # a look by itself: a row for each that has ended

With an AsyncEngine::

    end = await fq.wait_for(async_engine, message, timeout=30)

It looks now and then, in short transactions between which the connection goes back to the pool: after 50 ms, then at
intervals that grow by half to 2 s and are spread at random, so that many who wait make no storm. All messages of a call
are asked for at once, those that are still live by their primary key.

Limitations: commit before you wait, as nobody can see, or serve, a message that isn't committed; it would be taken for
one that has ended. Without history (the queue's ``history_days`` is 0, or they are over) there is no telling completed
from cancelled: the outcome is None then.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, overload

from sqlalchemy import ARRAY, BigInteger, DateTime, Engine, Integer, Text, cast, column, select

from ._checks import check_seconds
from ._functions import SchemaFunction
from .errors import InvalidValue, WaitTimeout
from .leases import Messages, OneMessage, Outcome, message_ids

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from sqlalchemy.ext.asyncio import AsyncEngine
    from sqlalchemy.sql.selectable import TypedReturnsRows

    Endings = TypedReturnsRows[int, str | None, int | None, str | None, datetime | None]

__all__ = ["Ending", "ending", "wait_for"]


@dataclass(frozen=True, slots=True)
class Ending:
    """How a message ended, from its last row in history."""

    id: int
    #: Completed, dead, cancelled or dropped; None where no history is kept.
    outcome: Outcome | None
    attempt: int | None = None
    #: What the last failure said.
    error: str | None = None
    finished_at: datetime | None = None


def ending(messages: Messages) -> Endings:
    """The statement behind :func:`wait_for`: rows ``(id, outcome, attempt, error, finished_at)``.

    One for each message that is neither ready nor leased any more, in the order given.

    :param messages: as for :func:`wait_for`.
    :raises InvalidValue: for what is none, and for a message that isn't flushed.
    """
    row = SchemaFunction("message_ending", cast(message_ids(messages), ARRAY(BigInteger))).table_valued(
        column("id", BigInteger),
        column("outcome", Text),
        column("attempt", Integer),
        column("error", Text),
        column("finished_at", DateTime(timezone=True)),
        name="ended",
    )
    return select(row.c.id, row.c.outcome, row.c.attempt, row.c.error, row.c.finished_at)


@overload
def wait_for(engine: Engine, messages: OneMessage, *, timeout: float | timedelta | None) -> Ending: ...
@overload
def wait_for(engine: Engine, messages: Iterable[OneMessage], *, timeout: float | timedelta | None) -> list[Ending]: ...
@overload
def wait_for(
    engine: AsyncEngine, messages: OneMessage, *, timeout: float | timedelta | None
) -> Coroutine[Any, Any, Ending]: ...
@overload
def wait_for(
    engine: AsyncEngine, messages: Iterable[OneMessage], *, timeout: float | timedelta | None
) -> Coroutine[Any, Any, list[Ending]]: ...
def wait_for(engine: Engine | AsyncEngine, messages: Messages, *, timeout: float | timedelta | None) -> Any:
    """Wait until messages have ended: completed, dead, cancelled or dropped. A failure that is retried is no end.

    Commit first: for a message that isn't committed it returns at once, with the outcome None.

    :param engine: an Engine, or an AsyncEngine, for which an awaitable is returned.
    :param messages: one id, :class:`fairqueue.Message` or :class:`LeasedMessage`, or any number of these.
    :param timeout: for how many seconds (or a timedelta); 0 looks once, None waits for ever. It is minded between two
        looks, and doesn't cut one short: where the pool has no free connection that lasts up to its ``pool_timeout``
        (30 s unless given), and where the server doesn't answer as long as the driver's own limits let it.
    :returns: an :class:`Ending`; for several messages a list, in the order given.
    :raises WaitTimeout: when some of them haven't ended in time; its ``endings`` are those of the others. It is a
        TimeoutError, too.
    :raises sqlalchemy.exc.SQLAlchemyError: when a look fails; it isn't tried again, but the call may be. A lost
        connection is an OperationalError (with asyncpg also another DBAPIError, or an OSError), a pool that has none
        free a ``sqlalchemy.exc.TimeoutError``, which is not Python's.
    :raises InvalidValue: naming the parameter, and for a message that isn't flushed.
    """
    watch = _Watch(message_ids(messages), None if timeout is None else check_seconds("timeout", timeout))
    several = isinstance(messages, Iterable)
    if isinstance(engine, Engine):
        endings = _wait(engine, watch)
        return endings if several else endings[0]
    if hasattr(engine, "sync_engine") and hasattr(engine, "connect"):
        return _wait_async(engine, watch, several)
    raise InvalidValue(
        f"engine must be an Engine or an AsyncEngine, not {type(engine).__name__}: a transaction sees no end of others"
    )


# Each look is one statement: no need for a BEGIN, nor for a commit. This is an option of the connection and not of the
# engine, whose connect() would lose the connection if it were cancelled while it sets it.
_ALONE: Final[dict[str, Any]] = {"isolation_level": "AUTOCOMMIT", "stream_results": False}


def _wait(engine: Engine, watch: _Watch) -> list[Ending]:
    while watch.pending:
        with engine.connect() as connection:
            connection.execution_options(**_ALONE)
            rows = connection.execute(watch.look()).all()
        if watch.take(rows):
            time.sleep(watch.pause())
    return watch.endings()


async def _wait_async(engine: AsyncEngine, watch: _Watch, several: bool) -> Ending | list[Ending]:
    while watch.pending:
        async with engine.connect() as connection:
            await connection.execution_options(**_ALONE)
            rows = (await connection.execute(watch.look())).all()
        if watch.take(rows):
            await asyncio.sleep(watch.pause())
    endings = watch.endings()
    return endings if several else endings[0]


class _Watch:
    """What is still waited for, and how long to pause between two looks."""

    def __init__(self, ids: Sequence[int], timeout: float | None) -> None:
        self._ids = ids
        self._ended: dict[int, Ending] = {}
        self._timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._interval = 0.05
        self.pending = list(dict.fromkeys(ids))

    def look(self) -> Endings:
        return ending(self.pending)

    def take(self, rows: Iterable[Any]) -> list[int]:
        """Note what has ended; returns what has not."""
        for id_, outcome, *rest in rows:
            self._ended[id_] = Ending(id_, None if outcome is None else Outcome(outcome), *rest)
        self.pending = [id_ for id_ in self.pending if id_ not in self._ended]
        return self.pending

    def pause(self) -> float:
        """How many seconds to wait before the next look: half the interval at least, the last one at the deadline."""
        seconds = self._interval * random.uniform(0.5, 1)  # noqa: S311
        self._interval = min(self._interval * 1.5, 2)
        if self._deadline is None:
            return seconds
        left = self._deadline - time.monotonic()
        if left <= 0:
            some = ", ".join(map(str, self.pending[:10])) + (", ..." if len(self.pending) > 10 else "")
            raise WaitTimeout(
                f"{len(self.pending)} of {len(self._ids)} messages had not ended after {self._timeout:g} s: {some}",
                self.endings(),
            )
        return min(seconds, left)

    def endings(self) -> list[Ending]:
        """Those that there are, in the order in which they were asked for."""
        return [self._ended[id_] for id_ in self._ids if id_ in self._ended]
