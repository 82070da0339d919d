"""The history as it grows: every row once, in the order of transactions, whoever commits late.

::

    feed = Feed(Place(url="postgresql://reader@db/app"), name="warehouse")
    start = feed.begin()
    end = feed.next(start, max_rows=100_000)
    for part in feed.plan(start, end):
        for batch in feed.read(part, selection, arrow_schema(selection)):  # in any process
            print(batch.num_rows)
    feed.move(end)  # when what was read is safe

A feed by the largest id, or by time, loses the rows of transactions that commit after later ones. This one goes by
``(xid, message_id)`` and stops at the horizon: the oldest transaction that is open. Below it nothing is added any more,
and rows of history never change, so that what lies between two offsets is the same whenever it is read. The price: a
transaction that stays open, and has written anything, anywhere on the server, holds the feed up; nothing is lost.
(PgQ, of Skytools, has gone by transaction snapshots since 2007.)

With a name, retention keeps what the feed hasn't read. Without one, rows may be dropped before they are read; that is
noticed by what is written to the table ``dropped``, and an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from fairqueue._checks import check_name
from fairqueue.errors import FairqueueError, InvalidValue

from .place import Place, row_of
from .reading import Selection, fetch, horizon, literal

if TYPE_CHECKING:
    import psycopg
    import pyarrow as pa

__all__ = ["Feed", "Offset", "Range"]

#: Below so many rows, another part costs more than it saves; above, one more is worth it.
_SMALL_ROWS, _PART_ROWS = 10_000, 500_000

_LEAST = -(2**63)

# By the index, in its order, whatever the statistics of a table say that has just begun or is about to be dropped.
_BY_INDEX = tuple(
    f"SET LOCAL {setting} = off" for setting in ("enable_seqscan", "enable_bitmapscan", "enable_sort", "jit")
)


@dataclass(frozen=True, order=True)
class Offset:
    """All rows before ``(xid, message_id)`` have been read.

    :param server: of which server, database and schema it is, as it means nothing elsewhere; see feed_horizon.
    :param dropped: the last lot of rows that had been dropped when the feed began.
    """

    xid: int
    message_id: int
    server: str
    dropped: int

    @classmethod
    def of(cls, document: dict[str, Any]) -> Offset:
        """From JSON."""
        try:
            return cls(
                int(document["xid"]), int(document["message_id"]), str(document["server"]), int(document["dropped"])
            )
        except (KeyError, TypeError, ValueError):
            raise InvalidValue(f"an offset has xid, message_id, server and dropped, not {document!r}") from None

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    def at(self, xid: int, message_id: int) -> Offset:
        """Another one of the same feed."""
        return Offset(xid, message_id, self.server, self.dropped)

    def sql(self) -> str:
        """To compare with (xid, message_id)."""
        return f"('{self.xid}'::xid8, '{self.message_id}'::bigint)"


@dataclass(frozen=True)
class Range:
    """What one process reads: from ``start`` to before ``end``, and how many rows that must be."""

    start: Offset
    end: Offset
    rows: int

    def condition(self) -> str:
        return f"(xid, message_id) >= {self.start.sql()} AND (xid, message_id) < {self.end.sql()}"


class Feed:
    """A reader of the history.

    :param name: of its cursor in the database, by which retention keeps what it hasn't read; None: it has none.
    :param fail_on_loss: whether rows that were dropped before they were read are an error.
    :raises InvalidValue: if that can't be the name.
    """

    def __init__(self, place: Place, name: str | None = None, *, fail_on_loss: bool = True) -> None:
        if name is not None:
            check_name("feed", name)
        self._place = place
        self._name = name
        self._fail_on_loss = fail_on_loss
        self._history = place.name("history")

    def begin(self, *, latest: bool = False) -> Offset:
        """Where to begin: before the first row that there is, or after all that can be read by now.

        A feed with a name is registered with this: :meth:`move` it here, and retention keeps what follows.
        """
        end = self.horizon()
        if latest:
            return end
        with self._connection() as connection:
            query = f"SELECT h.xid::text, h.message_id FROM {self._history} h ORDER BY h.xid, h.message_id LIMIT 1"
            first = _key(connection, query)
        return end if first is None else min(end, end.at(*first))

    def cursor(self) -> tuple[int, int] | None:
        """How far the feed is, by the database, as ``(xid, message_id)``; None: there is none of this name."""
        with self._connection() as connection:
            query = f"SELECT xid::text, message_id FROM {self._place.name('feed')} WHERE name = %s"
            return _key(connection, query, self._name)

    def register(self, start: Offset) -> None:
        """Have retention keep what follows.

        :raises FairqueueError: if it hasn't, as a feed of this name has read on; or if one hasn't read all before it.
        """
        cursor = None if self._name is None else self.cursor()
        before = start if cursor is None else start.at(*cursor)
        if before > start:
            fault = "has read on from there, so that history may be dropped before it is read again"
            way_out = "begin with the latest"
        elif before < start and self.next(before, horizon=start) != before:
            fault = "hasn't read all up to there, which nothing would keep for it any more"
            way_out = "go on with its checkpoint"
        else:
            self.move(start)
            return
        raise FairqueueError(
            f"feed {self._name!r} {fault}: name another feed, {way_out}, or first, as an operator,"
            f" SELECT {self._place.name('feed_forget')}({literal(str(self._name))})"
        )

    def move(self, end: Offset) -> None:
        """What comes before ``end`` is safe elsewhere, and retention may drop it. Nothing to do without a name."""
        if self._name is not None:
            statement = f"SELECT {self._place.name('feed_move')}(%s, %s::text::xid8, %s)"
            self._place.row(statement, self._name, str(end.xid), end.message_id)

    def horizon(self) -> Offset:
        """Up to where the history is complete."""
        with self._place.connect() as connection:
            xid = horizon(connection, self._place)
            query = (
                f"SELECT h.server, (SELECT coalesce(max(d.id), 0) FROM {self._place.name('dropped')} d)"
                f" FROM {self._place.name('feed_horizon')}() h"
            )
            return Offset(xid, _LEAST, *row_of(connection, query))

    def next(self, start: Offset, *, max_rows: int | None = None, horizon: Offset | None = None) -> Offset:
        """Up to where to read from ``start`` on; ``start`` if there are no rows.

        :param max_rows: at most so many; but rows with the same message and transaction are never divided.
        :param horizon: an earlier one; None: as it is now.
        """
        if horizon is None:
            horizon = self.horizon()
        elif start.xid > horizon.xid:
            # It began later than that, or the server has been restored.
            self.check(start, self.horizon())
            return start
        self.check(start, horizon)
        query = f"SELECT h.xid::text, h.message_id FROM {self._history} h WHERE {Range(start, horizon, 0).condition()}"
        with self._connection() as connection:
            first = _key(connection, f"{query} ORDER BY h.xid, h.message_id LIMIT 1")
            if first is None:
                return start
            beyond = None
            if max_rows is not None:
                beyond = _key(connection, f"{query} ORDER BY h.xid, h.message_id OFFSET {max_rows} LIMIT 1")
            if beyond is not None and beyond > first:
                return start.at(*beyond)
            # All that there is; or a message that ended so often in one transaction.
            last = first if beyond else _key(connection, f"{query} ORDER BY h.xid DESC, h.message_id DESC LIMIT 1")
        xid, message_id = last or first
        return start.at(xid, message_id + 1)

    def plan(self, start: Offset, end: Offset, *, parts: int | None = None) -> list[Range]:
        """The parts of what lies between two offsets, of about the same size; none if there is nothing.

        :param parts: how many at most; None: one for 500,000 rows, and one a core of this machine if they are worth it.
        """
        self.check(start, self.horizon())
        whole = Range(start, end, 0).condition()
        with self._connection() as connection:
            (rows,) = row_of(connection, f"SELECT count(*) FROM {self._history} WHERE {whole}")
            if rows == 0:
                return []
            if parts is None:
                parts = max(min(os.cpu_count() or 1, -(-rows // _SMALL_ROWS)), -(-rows // _PART_ROWS))
            length = -(-rows // parts)
            # The rank of a row is how many are before it; those that are equal have the same, and stay together.
            query = f"""
                SELECT DISTINCT r.xid, r.message_id, r.rank - 1 FROM (
                    SELECT xid, message_id, rank() OVER (ORDER BY xid, message_id) FROM {self._history} WHERE {whole}) r
                WHERE r.rank > 1 AND (r.rank - 1) % {length} = 0
                ORDER BY 3"""
            inner = connection.execute(query.encode()).fetchall() if parts > 1 else []
        bounds = [(start, 0), *((start.at(int(xid), id_), before) for xid, id_, before in inner), (end, rows)]
        return [Range(first, last, after - before) for (first, before), (last, after) in pairwise(bounds)]

    def read(self, part: Range, selection: Selection, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The rows of a part, in any order."""
        query = selection.query(self._history, part.condition())
        rows = 0
        with self._place.arrow() as connection, connection.cursor() as cursor:
            for statement in _BY_INDEX:
                cursor.execute(statement)
            for batch in fetch(cursor, query, schema):
                rows += batch.num_rows
                yield batch
        if rows != part.rows and self._fail_on_loss:
            raise FairqueueError(
                f"{part.rows - rows} of {part.rows} rows of history were dropped while they were to be read: give the"
                " feed a name, so that retention keeps what it hasn't read"
            )

    def check(self, start: Offset, horizon: Offset) -> None:
        """Raise if what follows an offset can't be read: it is another database's, or it was dropped."""
        if start.server != horizon.server:
            raise FairqueueError(
                f"the offset is of the server, database and schema {start.server}, these are {horizon.server}, where"
                " it means nothing; begin anew"
            )
        if start.xid > horizon.xid:
            raise FairqueueError(
                f"the offset ({start.xid}) is ahead of the server ({horizon.xid}), which has been restored as of an"
                " earlier time; begin anew"
            )
        if not self._fail_on_loss:
            return
        found = self._place.row(f"""
            SELECT dropped_at FROM {self._place.name("dropped")}
            WHERE (xid, message_id) >= {start.sql()} AND id > {start.dropped} LIMIT 1""")
        if found is not None:
            raise FairqueueError(
                f"history was dropped unread on {found[0].isoformat(timespec='seconds')}: begin anew,"
                " or go on with fail_on_data_loss=false; with a name, retention keeps what a feed hasn't read"
            )

    @contextmanager
    def _connection(self) -> Iterator[psycopg.Connection[Any]]:
        with self._place.connect() as connection:
            for statement in _BY_INDEX:
                connection.execute(statement.encode())
            yield connection


def _key(connection: psycopg.Connection[Any], query: str, *parameters: object) -> tuple[int, int] | None:
    found = row_of(connection, query, *parameters)
    return None if found is None else (int(found[0]), found[1])
