"""Messages as the bulk functions take them: dicts, checked, and the statements that send them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple, Required, TypedDict

from sqlalchemy import (
    ARRAY,
    BigInteger,
    ColumnElement,
    Double,
    Executable,
    Integer,
    LargeBinary,
    Text,
    bindparam,
    cast,
    column,
    func,
    insert,
    select,
)
from sqlalchemy.dialects.postgresql import JSONB

from ._checks import check_name
from ._functions import SchemaFunction
from .errors import InvalidValue
from .models import Message
from .models.messages import check_backoff, check_cost, check_key, check_max_attempts
from .payloads import check_body, json_text
from .schedule import Delay, clock, dequeue_at

__all__ = ["COPY_COLUMNS", "MessageRow", "Record", "copy_records", "create_many", "insert_many", "record_of", "records"]


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
    key: str | None
    max_attempts: int | None
    backoff: float | timedelta | None


class Record(NamedTuple):
    """A row that was checked. The payload is JSON text, backoff and delay are seconds."""

    queue: str
    channel: str
    key: str | None
    payload: str | None
    body: bytes | None
    dequeue_at: int | None
    cost: float
    max_attempts: int | None
    backoff: float | None
    delay: float | None


_FIELDS = frozenset(MessageRow.__annotations__)
_TYPES = (Text, Text, Text, Text, LargeBinary, BigInteger, Double, Integer, Double, Double)
_RARE = {"key", "max_attempts", "backoff"}

COPY_COLUMNS = Record._fields[:-1]


def records(rows: Iterable[MessageRow]) -> Iterator[Record]:
    """The rows, checked."""
    for number, row in enumerate(rows):
        try:
            yield record_of(row)
        except InvalidValue as error:
            raise InvalidValue(f"row {number}: {error}") from error


def insert_many(batch: list[Record]) -> Executable:
    """The statement that inserts all records and returns their ids, in the order of the records."""
    lists = dict(zip(Record._fields, _arrays(batch), strict=True))
    # A backoff of 0 is one, too.
    rare = {name for name in _RARE if all(getattr(record, name) is None for record in batch)}
    used = [name for name in Record._fields if name not in rare]
    row = (
        func.unnest(*(lists[name] for name in used))
        .table_valued(*used, with_ordinality="place", name="row")
        .render_derived()
    )
    delayed = clock() + func.make_interval(0, 0, 0, 0, 0, 0, func.coalesce(row.c.delay, 0))
    values: dict[str, ColumnElement[Any]] = {name: row.c[name] for name in used if name != "delay"}
    values["payload"] = cast(row.c.payload, JSONB)
    values["dequeue_at"] = func.coalesce(row.c.dequeue_at, SchemaFunction("unix_ms", delayed, type_=BigInteger))
    return (
        insert(Message).from_select(list(values), select(*values.values()).order_by(row.c.place)).returning(Message.id)
    )


def create_many(batch: list[Record], on_conflict: str) -> Executable:
    """The statement that enqueues records with keys and returns their ids, in the order of the records."""
    queues, channels, keys, payloads, bodies, dequeue_ats, costs, max_attempts, backoffs, delays = _arrays(batch)
    made = SchemaFunction(
        "message_create_many",
        *(queues, channels, keys, cast(payloads, ARRAY(JSONB)), bodies, dequeue_ats, delays, costs),
        *(max_attempts, backoffs, cast(on_conflict, Text)),
    ).table_valued(column("place", BigInteger), column("id", BigInteger), name="made")
    return select(made.c.id).order_by(made.c.place)


def copy_records(rows: Iterable[MessageRow], now: int) -> Iterator[tuple[Any, ...]]:
    """The rows as COPY takes them, which can't add up a time by itself: ``now`` is that of the database."""
    for record in records(rows):
        when = record.dequeue_at
        if when is None:
            when = now + math.ceil((record.delay or 0) * 1000)
        yield record._replace(dequeue_at=when)[:-1]


def _arrays(batch: list[Record]) -> list[ColumnElement[Any]]:
    """One array for each field."""
    lists = [list(values) for values in zip(*batch, strict=True)] or [[] for _ in _TYPES]
    return [cast(bindparam(None, values), ARRAY(type_)) for values, type_ in zip(lists, _TYPES, strict=True)]


def record_of(row: MessageRow) -> Record:
    """The row, checked."""
    if not isinstance(row, Mapping):
        raise InvalidValue(f"a message is a dict of its fields, not {row!r}")
    if not row.keys() <= _FIELDS:
        unknown = ", ".join(sorted(map(str, row.keys() - _FIELDS)))
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
    return Record(
        queue=check_name("queue", row.get("queue", "default")),
        channel=check_name("channel", row["channel"]),
        key=check_key(row.get("key")),
        payload=None if payload is None else json_text(payload, "payload"),
        body=check_body(body),
        dequeue_at=None if isinstance(when, Delay) else when,
        cost=check_cost(row.get("cost", 1)),
        max_attempts=check_max_attempts(row.get("max_attempts")),
        backoff=check_backoff(row.get("backoff")),
        delay=float(when) if isinstance(when, Delay) else None,
    )
