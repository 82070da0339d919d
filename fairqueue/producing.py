"""Producing: messages that commit, roll back and savepoint with the caller's own rows.

::

    import fairqueue as fq

    session.add(fq.Message(channel="acme", payload={"doc": 1}))           # the same, in the ORM's words
    fq.enqueue(session, "acme", {"doc": 1}, delay=60)
    fq.enqueue_many(session, [{"channel": "acme", "payload": {"doc": i}} for i in range(1_000)])
    fq.enqueue_copy(session, ({"channel": "acme", "payload": {"doc": i}} for i in range(10_000)))
    session.commit()

The functions take a Session or an AsyncSession; those that talk to the database return an awaitable for the latter::

    ids = await fq.enqueue_many(async_session, rows)

Enqueueing appends rows and takes no lock that anybody waits for, in any isolation level, however long the transaction
stays open.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Required, TypedDict, TypeVar, overload

from sqlalchemy import ARRAY, BigInteger, Double, LargeBinary, Text, bindparam, cast, func, insert, select
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.sql.dml import ReturningInsert
from sqlalchemy.util import await_only

from ._functions import SchemaFunction
from .errors import FairqueueError, InvalidValue
from .models import Message, check_cost, check_name
from .payloads import check_body, json_text
from .schedule import Delay, dequeue_at
from .schema import DEFAULT_SCHEMA, quote

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, scoped_session

    SyncSession = Session | scoped_session[Any]
    AnyAsyncSession = AsyncSession | async_scoped_session[Any]

__all__ = ["MessageRow", "enqueue", "enqueue_copy", "enqueue_many", "insert_many"]

T = TypeVar("T")


class MessageRow(TypedDict, total=False):
    """One message as :func:`enqueue_many` takes it. The fields mean what they mean for :class:`fairqueue.Message`."""

    channel: Required[str]
    payload: Any
    queue: str
    delay: float | timedelta | None
    at: datetime | None
    priority: int | None
    dequeue_at: int | None
    cost: float
    body: bytes | None


def enqueue(
    session: SyncSession | AnyAsyncSession,
    channel: str,
    payload: Any = None,
    *,
    queue: str = "default",
    delay: float | timedelta | None = None,
    at: datetime | None = None,
    priority: int | None = None,
    cost: float = 1,
    body: bytes | None = None,
) -> Message:
    """Add a message to the session and return it; it is sent with the session's next flush.

    Does no I/O, so it is the same for Session and AsyncSession. Parameters and errors: :class:`fairqueue.Message`.
    """
    message = Message(channel, payload, queue=queue, delay=delay, at=at, priority=priority, cost=cost, body=body)
    session.add(message)
    return message


@overload
def enqueue_many(session: SyncSession, rows: Iterable[MessageRow]) -> list[int]: ...
@overload
def enqueue_many(session: AnyAsyncSession, rows: Iterable[MessageRow]) -> Awaitable[list[int]]: ...
def enqueue_many(
    session: SyncSession | AnyAsyncSession, rows: Iterable[MessageRow]
) -> list[int] | Awaitable[list[int]]:
    """Enqueue any number of messages with one statement; returns their ids in the order of ``rows``.

    :raises InvalidValue: naming row and field; nothing has been sent then.
    """
    statement = insert_many(rows)

    def run(session: Session) -> list[int]:
        return list(session.scalars(statement))

    return _run(session, run)


@overload
def enqueue_copy(session: SyncSession, rows: Iterable[MessageRow]) -> int: ...
@overload
def enqueue_copy(session: AnyAsyncSession, rows: Iterable[MessageRow]) -> Awaitable[int]: ...
def enqueue_copy(session: SyncSession | AnyAsyncSession, rows: Iterable[MessageRow]) -> int | Awaitable[int]:
    """Enqueue messages by COPY on the session's own connection, in its transaction; returns how many.

    The fastest way for bulk. ``rows`` may be a generator: they are sent as they come, and not kept. A bad row ends the
    COPY with :class:`InvalidValue`, and the transaction has to be rolled back. Needs psycopg.
    """

    def run(session: Session) -> int:
        session.flush()
        connection = session.connection()
        driver = connection.connection.driver_connection
        if not type(driver).__module__.startswith("psycopg"):
            raise FairqueueError(
                f"enqueue_copy needs psycopg, and this connection is of {type(driver).__module__}: use enqueue_many"
            )
        now: Any = connection.scalar(select(SchemaFunction("unix_ms", func.clock_timestamp(), type_=BigInteger)))
        copy = f"COPY {_message_table(session)} ({', '.join(_COLUMNS)}) FROM STDIN"
        records = _copy_records(rows, now)
        if connection.dialect.is_async:
            return await_only(_copy_async(driver, copy, records))
        return _copy(driver, copy, records)

    return _run(session, run)


def insert_many(rows: Iterable[MessageRow]) -> ReturningInsert[int]:
    """The statement behind :func:`enqueue_many`: inserts all rows and returns their ids."""
    records = list(_records(rows))
    types = (Text, Text, Text, LargeBinary, BigInteger, Double, Double)
    lists = [[record[place] for record in records] for place in range(len(types))]
    row = (
        func.unnest(*(cast(bindparam(None, values), ARRAY(type_)) for values, type_ in zip(lists, types, strict=True)))
        .table_valued(*_COLUMNS, "delay", with_ordinality="place", name="row")
        .render_derived()
    )
    delayed = func.clock_timestamp() + func.make_interval(0, 0, 0, 0, 0, 0, func.coalesce(row.c.delay, 0))
    return (
        insert(Message)
        .from_select(
            list(_COLUMNS),
            select(
                row.c.queue,
                row.c.channel,
                cast(row.c.payload, JSONB),
                row.c.body,
                func.coalesce(row.c.dequeue_at, SchemaFunction("unix_ms", delayed, type_=BigInteger)),
                row.c.cost,
            ).order_by(row.c.place),
        )
        .returning(Message.id)
    )


# queue, channel, payload as JSON text, body, dequeue_at, cost, delay in seconds
Record = tuple[str, str, str | None, bytes | None, int | None, float, float | None]

_COLUMNS = ("queue", "channel", "payload", "body", "dequeue_at", "cost")
_FIELDS = frozenset(MessageRow.__annotations__)


def _records(rows: Iterable[MessageRow]) -> Iterator[Record]:
    """The rows, checked, in the order of the columns."""
    for number, row in enumerate(rows):
        try:
            yield _record(row)
        except InvalidValue as error:
            raise InvalidValue(f"row {number}: {error}") from error


def _record(row: MessageRow) -> Record:
    if not isinstance(row, Mapping):
        raise InvalidValue(f"a message is a dict of its fields, not {row!r}")
    if not row.keys() <= _FIELDS:
        unknown = ", ".join(sorted(row.keys() - _FIELDS))
        raise InvalidValue(f"unknown field {unknown}: a message has {', '.join(sorted(_FIELDS))}")
    if "channel" not in row:
        raise InvalidValue("channel is missing")
    payload, body = row.get("payload"), row.get("body")
    when = dequeue_at(
        delay=row.get("delay"),
        at=row.get("at"),
        priority=row.get("priority"),
        dequeue_at=row.get("dequeue_at"),
    )
    return (
        check_name("queue", row.get("queue", "default")),
        check_name("channel", row["channel"]),
        None if payload is None else json_text(payload, "payload"),
        check_body(body),
        None if isinstance(when, Delay) else when,
        check_cost(row.get("cost", 1)),
        float(when) if isinstance(when, Delay) else None,
    )


def _run(session: Any, function: Callable[[Session], T]) -> T | Awaitable[T]:
    """Call ``function`` with the session; for an AsyncSession, return an awaitable that does."""
    if hasattr(session, "registry"):
        session = session()  # the one that a scoped_session or async_scoped_session stands for
    if hasattr(session, "run_sync"):
        awaitable: Awaitable[T] = session.run_sync(function)
        return awaitable
    return function(session)


def _message_table(session: Session) -> str:
    """The name of the message table in the schema that the session's statements go to."""
    options = {**session.connection().get_execution_options(), **getattr(session, "execution_options", {})}
    schema = options.get("schema_translate_map", {}).get(DEFAULT_SCHEMA, DEFAULT_SCHEMA)
    return f"{quote(schema)}.message"


def _copy_records(rows: Iterable[MessageRow], now: int) -> Iterator[tuple[Any, ...]]:
    """The rows as COPY takes them, which can't add up a time by itself: ``now`` is that of the database."""
    for *record, when, cost, delay in _records(rows):
        yield *record, when if when is not None else now + math.ceil((delay or 0) * 1000), cost


def _copy(driver: Any, copy: str, records: Iterable[tuple[Any, ...]]) -> int:
    count = 0
    with driver.cursor() as cursor, cursor.copy(copy) as sink:
        for record in records:
            sink.write_row(record)
            count += 1
    return count


async def _copy_async(driver: Any, copy: str, records: Iterable[tuple[Any, ...]]) -> int:
    count = 0
    async with driver.cursor() as cursor, cursor.copy(copy) as sink:
        for record in records:
            await sink.write_row(record)
            count += 1
    return count
