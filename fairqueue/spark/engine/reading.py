"""Tables in parts that can be read at the same time, and together are one consistent set of rows.

::

    place = Place(url="postgresql://reader@db/app")
    selection = Selection("history", since=datetime(2026, 11, 1, tzinfo=UTC))
    for part in plan(place, selection):  # in the driver
        for batch in read(place, selection, part, arrow_schema(selection)):  # in any process
            print(batch.num_rows)

A part is some ranges of blocks (``ctid``), of any number of tables: the server reads no block twice, and no index. What
makes the parts one set, though each is read in a transaction of its own:

* a :func:`snapshot` that somebody holds, and that all of them are read under; or
* for history, a transaction id: rows are never changed, so those of transactions below the oldest one that was open
  when the parts were planned are the same for every reader. Only history_maintain moves some, from history_default to
  a partition that it makes; so history_default is not divided, and its part reads what was made meanwhile as well;
* for messages, nothing: without a snapshot they are one part.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

from fairqueue.errors import FairqueueError, InvalidValue
from fairqueue.spark.schemas import HISTORY, MESSAGES

from .place import Place, row_of

if TYPE_CHECKING:
    import psycopg
    import pyarrow as pa
    from adbc_driver_manager.dbapi import Cursor

__all__ = ["Part", "Selection", "Slice", "arrow_schema", "columns_of", "fetch", "literal", "plan", "read", "snapshot"]

TableName = Literal["history", "messages"]

_DDL: dict[TableName, str] = {"history": HISTORY, "messages": MESSAGES}
_TIMES: dict[TableName, str] = {"history": "finished_at", "messages": "created_at"}
# What is another type in Arrow than in Spark.
_CASTS = {"payload": "payload::text", "state": "state::text"}

_PART_BYTES = 64 << 20
#: Below this, another part costs more than it saves.
_SMALL_BYTES = 1 << 20
_MOST_PARTS = 1024

_DROPPED = (
    "a partition of history has been dropped since the read, or its snapshot, began; read again, or under a"
    " fairqueue.spark.snapshot, as long as which is held none is dropped"
)


@dataclass(frozen=True)
class Selection:
    """Which columns and rows.

    :param columns: in this order; empty: all.
    :param queue: only of this one.
    :param channels: only of these channels.
    :param since: of ``finished_at`` for history, of ``created_at`` for messages; from here on.
    :param until: up to here, exclusive.
    """

    table: TableName
    columns: tuple[str, ...] = ()
    queue: str | None = None
    channels: tuple[str, ...] | None = None
    since: datetime | None = None
    until: datetime | None = None

    def __post_init__(self) -> None:
        known = columns_of(self.table)
        for name in self.columns:
            if name not in known:
                raise InvalidValue(f"unknown column {name!r} of {self.table}: there are {', '.join(known)}")
        if len(set(self.columns)) < len(self.columns):
            raise InvalidValue(f"columns must differ: {', '.join(self.columns)}")
        if self.since is not None and self.until is not None and self.since >= self.until:
            raise InvalidValue(f"since ({self.since.isoformat()}) must be before until ({self.until.isoformat()})")
        if not self.columns:
            object.__setattr__(self, "columns", tuple(known))

    def query(self, source: str, *conditions: str) -> str:
        """The SELECT of these columns, of the rows that the conditions and this selection allow."""
        columns = ", ".join(f"{_CASTS[name]} AS {name}" if name in _CASTS else name for name in self.columns)
        where = " AND ".join([*conditions, *self._conditions()])
        return f"SELECT {columns} FROM {source}" + (f" WHERE {where}" if where else "")

    def _conditions(self) -> Iterator[str]:
        time = _TIMES[self.table]
        if self.queue is not None:
            yield f"queue = {literal(self.queue)}"
        if self.channels is not None:
            yield f"channel = ANY ({literal(list(self.channels))}::text[])"
        if self.since is not None:
            yield f"{time} >= {literal(self.since.isoformat())}::timestamptz"
        if self.until is not None:
            yield f"{time} < {literal(self.until.isoformat())}::timestamptz"

    def may_be_in(self, partition: str) -> bool:
        """Whether the rows may be in that partition of history, by its name."""
        try:
            day = datetime.strptime(partition, "history_%Y_%m_%d").replace(tzinfo=UTC)
        except ValueError:
            return True
        too_early = self.since is not None and day + timedelta(days=1) <= self.since
        return not too_early and not (self.until is not None and day >= self.until)


@dataclass(frozen=True)
class Slice:
    """Blocks of a table, from ``first`` to before ``end``; None: to wherever the table ends."""

    table: str
    first: int = 0
    end: int | None = None

    def conditions(self) -> Iterator[str]:
        if self.first > 0:
            yield f"ctid >= '({self.first},0)'"
        if self.end is not None:
            yield f"ctid < '({self.end},0)'"


@dataclass(frozen=True)
class Part:
    """What one process reads.

    :param slices: of tables, read as one.
    :param snapshot: that somebody holds.
    :param below: only rows of transactions before this one.
    :param known: all partitions of history when this was planned, where those that were made since are read as well.
    """

    slices: tuple[Slice, ...]
    snapshot: str | None = None
    below: int | None = None
    known: tuple[str, ...] | None = None


@contextmanager
def snapshot(url: str | None = None, *, schema: str = "fairqueue", passfile: str | None = None) -> Iterator[str]:
    """Hold the database as it is now, for reads in the block: the value of their option ``snapshot``.

    ::

        with fairqueue.spark.snapshot(url=url) as now:
            spark.read.format("fairqueue").options(url=url, table="messages", snapshot=now).load().count()

    While it is held, no day of history is dropped, no message is truncated, and VACUUM removes nothing that died since,
    anywhere in the database: be quick.

    :param schema: where fairqueue is installed.
    """
    place = Place(url=url, schema=schema, passfile=passfile)
    with place.connect() as connection:
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        # Before there is a snapshot. Who drops a day locks the whole history; who makes one need not wait for this. And
        # what is truncated is gone for old snapshots, too.
        for table in ("history", "message"):
            connection.execute(f"LOCK TABLE ONLY {place.name(table)} IN ACCESS SHARE MODE".encode())
        # Of those that end it, transaction_timeout has come with PostgreSQL 17.
        connection.execute(
            "SELECT set_config(name, '0', true) FROM pg_settings"
            " WHERE name IN ('idle_in_transaction_session_timeout', 'transaction_timeout')"
        )
        yield row_of(connection, "SELECT pg_export_snapshot()")[0]
        connection.rollback()


def columns_of(table: TableName) -> dict[str, str]:
    """The columns of a table with their types, as Spark calls them."""
    return dict(column.split() for column in _DDL[table].split(","))


def arrow_schema(selection: Selection) -> pa.Schema:
    """What :func:`read` gives for the selection: what Spark makes of its types."""
    import pyarrow as pa

    types: dict[str, Any] = {
        "bigint": pa.int64(),
        "int": pa.int32(),
        "double": pa.float64(),
        "string": pa.string(),
        "binary": pa.binary(),
        "timestamp_ltz": pa.timestamp("us", tz="UTC"),
    }
    known = columns_of(selection.table)
    return pa.schema([pa.field(name, types[known[name]]) for name in selection.columns])


def plan(place: Place, selection: Selection, *, parts: int | None = None, snapshot: str | None = None) -> list[Part]:
    """The parts of a selection, of about the same size.

    :param parts: how many; None: one for every 64 MB, and at least one a core of this machine if they get 1 MB each. It
        may be one more or fewer.
    :param snapshot: to read under.
    """
    with place.connect() as connection:
        _begin(lambda statement: connection.execute(statement.encode()), snapshot)
        if selection.table == "messages":
            if snapshot is None:
                return [Part((Slice("message"),))]
            (blocks,) = row_of(connection, f"SELECT {_blocks(literal(place.name('message')) + '::regclass')}")
            return [Part(slices, snapshot) for slices in divided({"message": blocks}, parts, _block_size(connection))]
        below = None
        if snapshot is None:
            below = horizon(connection, place)
            # What that allows is there by now, so that a table without a block needs no part.
            connection.rollback()
        leaves = dict(connection.execute(_leaves(place).encode()).fetchall())
        wanted = {name: blocks for name, blocks in leaves.items() if blocks != 0 and selection.may_be_in(name)}
        if None in wanted.values():
            raise FairqueueError(_DROPPED)
        if snapshot is not None:
            return [Part(slices, snapshot) for slices in divided(wanted, parts, _block_size(connection))]
        default = bool(wanted.pop("history_default", 0))
        planned = [Part(slices, below=below) for slices in divided(wanted, parts, _block_size(connection))]
        # In a part of its own if there is anything; else the last one looks whether there is by then.
        last = planned.pop() if planned and not default else Part((), below=below)
        return [*planned, replace(last, slices=(*last.slices, Slice("history_default")), known=tuple(leaves))]


def divided(sizes: Mapping[str, int], parts: int | None, block_size: int) -> list[tuple[Slice, ...]]:
    """Tables of so many blocks each, in about so many parts. The last slice of a table has no end, as it may grow."""
    total = sum(sizes.values())
    if parts is None:
        cores = min(os.cpu_count() or 1, -(-total * block_size // _SMALL_BYTES))
        parts = min(max(cores, -(-total * block_size // _PART_BYTES)), _MOST_PARTS)
    length = max(1, -(-total // max(parts, 1)))
    done: list[tuple[Slice, ...]] = []
    slices: list[Slice] = []
    room = length
    for table, blocks in sizes.items():
        first = 0
        while first < blocks:
            end = min(first + room, blocks)
            slices.append(Slice(table, first, end if end < blocks else None))
            room -= end - first
            first = end
            if not room:
                done.append(tuple(slices))
                slices, room = [], length
    return [*done, tuple(slices)] if slices else done


def read(place: Place, selection: Selection, part: Part, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a part.

    :param schema: of the batches: that of :func:`arrow_schema`, or one to which its types can be cast.
    """
    with place.arrow() as connection, connection.cursor() as cursor, _explained(place, selection):
        _begin(cursor.execute, part.snapshot)
        slices = part.slices
        if part.known is not None:
            cursor.execute(_leaves(place))
            slices += tuple(Slice(name) for name, _ in cursor.fetchall() if name not in part.known)
        below = () if part.below is None else (f"xid < '{part.below}'",)
        queries = [selection.query(place.name(each.table), *each.conditions(), *below) for each in slices]
        if queries:
            yield from fetch(cursor, " UNION ALL ".join(queries), schema)


def fetch(cursor: Cursor, query: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a query in batches of this schema."""
    import pyarrow as pa

    cursor.execute(query)
    for batch in cursor.fetch_record_batch():
        columns = [_as(field.type, column) for column, field in zip(batch.columns, schema, strict=True)]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _as(wanted: pa.DataType, column: pa.Array) -> pa.Array:
    import numpy as np
    import pyarrow as pa

    if column.type == wanted:
        return column
    if isinstance(column, pa.ExtensionArray):
        # xid8, of which Arrow knows nothing: 8 bytes in network order. To cast it in SQL would take the server longer.
        _, offsets, data = column.storage.buffers()
        first = np.frombuffer(offsets, np.int32)[column.offset] if len(column) else 0
        return pa.array(np.frombuffer(data or b"", ">i8", len(column), first).astype(np.int64)).cast(wanted)
    return column.cast(wanted)


def horizon(connection: psycopg.Connection[Any], place: Place) -> int:
    """The oldest transaction that is open: what those before it have written to history is there for good, and all."""
    history = place.name("history")
    query = f"""
        SELECT pg_snapshot_xmin(s)::text, coalesce(
            (SELECT h.xid >= pg_snapshot_xmax(s) FROM {history} h ORDER BY h.xid DESC, h.message_id DESC LIMIT 1),
            false)
        FROM pg_current_snapshot() s"""
    xid, foreign = row_of(connection, query)
    if foreign:
        raise FairqueueError(
            f"{history} has rows of transactions that this server hasn't come to, as it was restored from a dump; once,"
            f" run UPDATE {history} SET xid = pg_current_xact_id() WHERE xid > pg_current_xact_id()"
        )
    return int(xid)


def literal(value: str | list[str]) -> str:
    """As SQL has it. COPY takes no parameters."""
    from psycopg import sql

    return sql.Literal(value).as_string()


def _begin(execute: Callable[[str], object], snapshot: str | None) -> None:
    """Of a transaction that sees all of a read, by either driver."""
    execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
    if snapshot is None:
        return
    try:
        execute(f"SET TRANSACTION SNAPSHOT {literal(snapshot)}")
    except Exception as error:
        # There is none of this name: undefined_object, and up to PostgreSQL 16 invalid_parameter_value.
        if getattr(error, "sqlstate", None) not in {"42704", "22023"}:
            raise
        raise FairqueueError(
            f"nobody holds the snapshot {snapshot!r}; read inside of the block that holds it"
        ) from error


def _leaves(place: Place) -> str:
    """The partitions of history, and how many blocks they have; null: it has been dropped since the snapshot."""
    return (
        f"SELECT c.relname::text, {_blocks('c.oid')} FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid"
        f" WHERE i.inhparent = {literal(place.name('history'))}::regclass ORDER BY c.relname"
    )


def _blocks(table: str) -> str:
    return f"pg_relation_size({table}) / current_setting('block_size')::bigint"


def _block_size(connection: psycopg.Connection[Any]) -> int:
    return int(row_of(connection, "SHOW block_size")[0])


@contextmanager
def _explained(place: Place, selection: Selection) -> Iterator[None]:
    """What an error of the server means here."""
    from adbc_driver_manager import Error

    try:
        yield
    except Error as error:
        if error.sqlstate == "42P01" and selection.table == "messages":
            raise FairqueueError(
                f"schema {place.schema!r} has no fairqueue: run the migrations; is it in another schema? set the option"
                " schema"
            ) from error
        if error.sqlstate == "42P01":
            raise FairqueueError(_DROPPED) from error
        raise
