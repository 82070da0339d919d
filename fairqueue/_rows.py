"""Messages as the bulk functions take them: dicts, checked, and the statements that send them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from functools import cache
from typing import Any, NamedTuple, Required, TypedDict
from typing import cast as cast_type

from sqlalchemy import (
    ARRAY,
    BigInteger,
    ColumnElement,
    Double,
    Executable,
    Integer,
    LargeBinary,
    Table,
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

__all__ = [
    "COPY_COLUMNS",
    "MessageRow",
    "copy_records",
    "create_many",
    "create_one",
    "insert_many",
    "record_of",
    "records",
]


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
#: In the order of the record.
_TYPES: dict[str, Any] = {
    "queue": Text,
    "channel": Text,
    "key": Text,
    "payload": Text,
    "body": LargeBinary,
    "dequeue_at": BigInteger,
    "cost": Double,
    "max_attempts": Integer,
    "backoff": Double,
    "delay": Double,
}
_RARE = {"max_attempts", "backoff"}
#: A statement, which is the same for all that it sends, and its parameters.
Sending = tuple[Executable, dict[str, Any]]

COPY_COLUMNS = Record._fields[:-1]


def records(rows: Iterable[MessageRow]) -> Iterator[Record]:
    """The rows, checked."""
    for number, row in enumerate(rows):
        try:
            yield record_of(row)
        except InvalidValue as error:
            raise InvalidValue(f"row {number}: {error}") from error


def insert_many(batch: list[Record]) -> Sending:
    """What inserts records without keys and returns their ids, in the order of the records."""
    # A backoff of 0 is one, too.
    rare = frozenset(name for name in _RARE if any(getattr(record, name) is not None for record in batch))
    return _insertion(rare), _lists(batch)


def create_many(batch: list[Record], on_conflict: str) -> Sending:
    """What enqueues records with keys and returns their ids, in the order of the records."""
    return _creation(), {**_lists(batch), "conflict": on_conflict}


def create_one(record: Record, on_conflict: str) -> Sending:
    """What enqueues one record with a key and returns the id of the live one."""
    return _creation_of_one(), {**record._asdict(), "conflict": on_conflict}


def copy_records(rows: Iterable[MessageRow], now: int) -> Iterator[tuple[Any, ...]]:
    """The rows as COPY takes them, which can't add up a time by itself: ``now`` is that of the database."""
    for record in records(rows):
        when = record.dequeue_at
        if when is None:
            when = now + math.ceil((record.delay or 0) * 1000)
        yield record._replace(dequeue_at=when)[:-1]


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
    if when is None and row.get("priority") is not None:
        when = Delay(0)  # a time, too, though it is now: what is replaced gives up the place that another one gave it
    return Record(
        queue=check_name("queue", row.get("queue", "default")),
        channel=check_name("channel", row["channel"]),
        key=check_key("key", row.get("key")),
        payload=None if payload is None else json_text(payload, "payload"),
        body=check_body(body),
        dequeue_at=None if isinstance(when, Delay) else when,
        cost=check_cost("cost", row.get("cost", 1)),
        max_attempts=check_max_attempts("max_attempts", row.get("max_attempts")),
        backoff=check_backoff("backoff", row.get("backoff")),
        delay=float(when) if isinstance(when, Delay) else None,
    )


# The statements, made once: making one takes longer than all that the server does for a message.


@cache
def _insertion(rare: frozenset[str]) -> Executable:
    """Of the fields that are rare, these."""
    used = [name for name in Record._fields if name in rare or name not in {"key", *_RARE}]
    arrays = _arrays()
    row = (
        func.unnest(*(arrays[name] for name in used))
        .table_valued(*used, with_ordinality="place", name="row")
        .render_derived()
    )
    delayed = clock() + func.make_interval(0, 0, 0, 0, 0, 0, func.coalesce(row.c.delay, 0))
    values: dict[str, ColumnElement[Any]] = {name: row.c[name] for name in used if name != "delay"}
    values["payload"] = cast(row.c.payload, JSONB)
    values["dequeue_at"] = func.coalesce(row.c.dequeue_at, SchemaFunction("unix_ms", delayed, type_=BigInteger))
    # Not into the model: with parameters, SQLAlchemy would take each for a column's.
    message = cast_type(Table, Message.__table__)
    return (
        insert(message)
        .from_select(list(values), select(*values.values()).order_by(row.c.place))
        .returning(message.c.id)
    )


@cache
def _creation() -> Executable:
    arrays = _arrays()
    made = SchemaFunction(
        "message_create_many",
        *(arrays[name] for name in ("queue", "channel", "key")),
        cast(arrays["payload"], ARRAY(JSONB)),
        *(arrays[name] for name in ("body", "dequeue_at", "delay", "cost", "max_attempts", "backoff")),
        cast(bindparam("conflict"), Text),
    ).table_valued(column("place", BigInteger), column("id", BigInteger), name="made")
    return select(made.c.id).order_by(made.c.place)


@cache
def _creation_of_one() -> Executable:
    field = {name: cast(bindparam(name), type_) for name, type_ in _TYPES.items()}
    return select(
        SchemaFunction(
            "message_create",
            field["channel"],
            cast(field["payload"], JSONB),
            *(field[name] for name in ("queue", "delay", "dequeue_at")),
            cast(None, BigInteger),
            *(field[name] for name in ("cost", "body", "key")),
            cast(bindparam("conflict"), Text),
            *(field[name] for name in ("max_attempts", "backoff")),
            type_=BigInteger,
        )
    )


def _arrays() -> dict[str, ColumnElement[Any]]:
    """For each field one array, that of all records."""
    return {name: cast(bindparam(f"all_{name}"), ARRAY(type_)) for name, type_ in _TYPES.items()}


def _lists(batch: list[Record]) -> dict[str, list[Any]]:
    """What goes into these arrays."""
    lists = [list(values) for values in zip(*batch, strict=True)] or [[] for _ in _TYPES]
    return {f"all_{name}": values for name, values in zip(_TYPES, lists, strict=True)}
