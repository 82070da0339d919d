"""What the scenarios ask of a queue. One file here is one system, or several that differ in little.

To add one, write a file beside this one with a subclass of :class:`System` (of :class:`SQLSystem`, where it is SQL and
psycopg), and name it in `systems/__init__.py`. If it needs a package that may be missing, say so in `missing()`; it is
then left out, and the report says why. `connect()` may return whatever the other methods take: a client object, a
process that is spoken to.
"""

from __future__ import annotations

import contextlib
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import psycopg

#: Seconds that a lease lasts, unless a test says otherwise: nothing runs out while it is measured.
LEASE = 3600.0


class Lease(NamedTuple):
    """What a dequeue returns of a message."""

    id: Any
    attempt: int
    channel: str
    payload: Any
    #: Unix time by the server's clock, at which it was leased; None where it wasn't asked for, or can't be known.
    at: float | None = None


@dataclass(frozen=True)
class Fill:
    """A backlog to be made at once: message number i goes to channel number i modulo ``channels``."""

    messages: int
    channels: int
    payload: str
    prefix: str = "c"
    #: They are not to be served before so many milliseconds have passed.
    delay_ms: int = 0
    #: The number of the first message.
    start: int = 0

    def more(self, messages: int) -> Self:
        """What goes on where this one ends, so that the channels which have had most served get new messages."""
        return replace(self, messages=messages, start=self.start + self.messages)

    @property
    def numbers(self) -> range:
        return range(self.start, self.start + self.messages)


class System(ABC):
    """A queue."""

    #: As --systems, the files and the tables call it.
    name: ClassVar[str]
    #: One line: what it is and where it was published.
    about: ClassVar[str]
    #: Its home page.
    url: ClassVar[str | None] = None
    #: Whether it means to be fair to channels.
    fair: ClassVar[bool] = False
    #: Whether one call takes and completes many; if not, a batch of n is n calls.
    batches: ClassVar[bool] = True
    #: Whether anything is kept of a message that is done, as history, a log or its own row.
    keeps: ClassVar[bool] = True
    #: Whether messages can be enqueued for later.
    schedules: ClassVar[bool] = True

    def missing(self) -> str | None:
        """Why it can't take part here; None: it can."""
        return None

    @abstractmethod
    def install(self, dsn: str) -> None:
        """Make its tables in an empty database."""

    @abstractmethod
    def connect(self, dsn: str) -> Any:
        """A consumer's or producer's own connection, closed by its close()."""

    @contextlib.contextmanager
    def connected(self, dsn: str) -> Iterator[Any]:
        """Such a connection, closed after the block."""
        connection = self.connect(dsn)
        try:
            yield connection
        finally:
            connection.close()

    @abstractmethod
    def enqueue(self, connection: Any, rows: Sequence[tuple[str, str]]) -> None:
        """Enqueue (channel, payload as JSON text) in this order, as its publishers do, one transaction in all.

        Where the connection is in a transaction already, it is part of that.
        """

    def fill(self, connection: Any, fill: Fill) -> None:
        """Make a backlog, in the quickest way that leaves the same messages as if they had been enqueued one by one."""
        rows = [(f"{fill.prefix}{i % fill.channels}", fill.payload) for i in fill.numbers]
        self.enqueue(connection, rows)

    def fill_up(self, connection: Any, last: Fill, backlog: int) -> Fill:
        """Have so many messages again, the missing ones where the last fill ended; returns the fill that did it."""
        missing = backlog - self.backlog(connection)
        if missing <= 0:
            return last
        fill = last.more(missing)
        self.fill(connection, fill)
        return fill

    def settle(self, connection: Any) -> None:  # noqa: B027
        """Take in what a fill left to be done once."""

    @abstractmethod
    def dequeue(self, connection: Any, n: int, *, lease: float = LEASE, timed: bool = False) -> list[Lease]:
        """Lease up to n messages, in the order in which they are served; commits."""

    @abstractmethod
    def complete(self, connection: Any, leases: Sequence[Lease]) -> int:
        """End leases; says how many were still good. Commits."""

    @abstractmethod
    def backlog(self, connection: Any) -> int:
        """How many messages are not completed yet."""


class SQLSystem(System):
    """One whose every act is a prepared statement, by psycopg: the same code path for all of them."""

    #: The script that makes the tables and functions.
    tables: ClassVar[str]
    #: One message: %(channel)s, %(payload)s.
    enqueue_sql: ClassVar[str]
    #: A Fill: %(messages)s, %(channels)s, %(prefix)s, %(payload)s, %(delay_ms)s, and %(start)s, the first number.
    fill_sql: ClassVar[str]
    #: id, attempt, channel, payload, and `{at}` where the time can be added: %(n)s, or `{n}` in the text; %(lease)s.
    dequeue_sql: ClassVar[str]
    #: A row for each lease that was still good: %(ids)s, %(attempts)s; of one without batches %(id)s, %(attempt)s.
    complete_sql: ClassVar[str]
    #: The number of those that are not completed.
    backlog_sql: ClassVar[str]
    #: Rows that one statement of a fill makes.
    chunk: ClassVar[int] = 100_000

    def install(self, dsn: str) -> None:
        with psycopg.connect(dsn) as connection:
            connection.execute(self.tables.encode())

    def connect(self, dsn: str) -> psycopg.Connection[Any]:
        return psycopg.connect(dsn, autocommit=True)

    def enqueue(self, connection: psycopg.Connection[Any], rows: Sequence[tuple[str, str]]) -> None:
        with connection.transaction(), connection.cursor() as cursor:
            cursor.executemany(
                self.enqueue_sql.encode(), [{"channel": channel, "payload": payload} for channel, payload in rows]
            )

    def fill(self, connection: psycopg.Connection[Any], fill: Fill) -> None:
        for start in fill.numbers[:: self.chunk]:
            values = {**vars(fill), "start": start, "messages": min(self.chunk, fill.numbers.stop - start)}
            connection.execute(self.fill_sql.encode(), values)

    def dequeue(
        self, connection: psycopg.Connection[Any], n: int, *, lease: float = LEASE, timed: bool = False
    ) -> list[Lease]:
        at = ", extract(epoch FROM clock_timestamp())::double precision" if timed else ""
        statement = self.dequeue_sql.replace("{at}", at).replace("{n}", str(n)).encode()
        if self.batches:
            rows = connection.execute(statement, {"n": n, "lease": lease}, prepare=True).fetchall()
            return [Lease(*row) for row in rows]
        leases: list[Lease] = []
        for _ in range(n):
            row = connection.execute(statement, {"lease": lease}, prepare=True).fetchone()
            if row is None:
                break
            leases.append(Lease(*row))
        return leases

    def complete(self, connection: psycopg.Connection[Any], leases: Sequence[Lease]) -> int:
        statement = self.complete_sql.encode()
        if self.batches:
            values: dict[str, Any] = {
                "ids": [lease.id for lease in leases],
                "attempts": [lease.attempt for lease in leases],
            }
            return len(connection.execute(statement, values, prepare=True).fetchall())
        done = 0
        for lease in leases:
            values = {"id": lease.id, "attempt": lease.attempt}
            done += len(connection.execute(statement, values, prepare=True).fetchall())
        return done

    def backlog(self, connection: psycopg.Connection[Any]) -> int:
        return int(value_of(connection, self.backlog_sql))


def value_of(connection: psycopg.Connection[Any], query: str) -> Any:
    """The one value that a query returns."""
    row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


def payload_of(size: int) -> str:
    """A JSON document of so many bytes that doesn't compress well; always the same one."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+/"
    pad = "".join(random.Random(720720).choices(letters, k=size - len(json.dumps({"pad": ""}))))  # noqa: S311
    return json.dumps({"pad": pad})
