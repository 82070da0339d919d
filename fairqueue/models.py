"""The declarative models: what applications write, beside their own.

They live in a registry of their own, so a host's base class, naming conventions and mixins don't touch them, and a
host's models may still refer to them::

    import fairqueue as fq

    class Invoice(Base):
        __tablename__ = "invoice"
        id: Mapped[int] = mapped_column(primary_key=True)
        message_id: Mapped[int | None] = mapped_column(ForeignKey(fq.Message.id, ondelete="SET NULL"))
        message: Mapped[fq.Message | None] = relationship(fq.Message)

    session.add(fq.Message(channel="acme", payload={"invoice": 7}))
    session.merge(fq.Channel(name="globex", weight=2))

Adding many messages in one flush takes one INSERT a thousand, because :class:`Message` gives all of them the same set
of attributes. Two things break a batch up: a ``delay``, which the database has to add up, and mixing scheduled
messages with others. :func:`fairqueue.enqueue_many` takes any mixture in one statement.

The tables are called ``fairqueue.<name>``. For an installation in another schema run the statements with
:func:`in_schema`.

Limitations: a message is read by its worker as a :class:`fairqueue.LeasedMessage`, a value, not as one of these
entities: an entity that is refreshed after its lease ran out would show, and let you complete, another worker's lease.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Generic

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    Double,
    Identity,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    event,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.dialects.postgresql.base import ischema_names
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, validates
from sqlalchemy.types import UserDefinedType
from typing_extensions import TypeVar

from .errors import FairqueueError, InvalidValue
from .payloads import BytesPayload, JSONPayload, payload_column_type
from .schedule import Delay
from .schedule import dequeue_at as _dequeue_at
from .schema import DEFAULT_SCHEMA

__all__ = ["Channel", "History", "Message", "Queue", "TypedMessage", "in_schema"]

P = TypeVar("P", default=Any)

_NOW = text("clock_timestamp()")


class XID8(UserDefinedType[int]):
    """PostgreSQL's 64-bit transaction id."""

    cache_ok = True

    def get_col_spec(self, **kw: Any) -> str:
        return "xid8"


# So that inspecting a database that has the column, as Alembic does, doesn't warn.
ischema_names.setdefault("xid8", XID8)


class Base(DeclarativeBase):
    """The base of fairqueue's own models. Its tables are created by :func:`fairqueue.attach` or Alembic."""

    metadata = MetaData(schema=DEFAULT_SCHEMA)


class Queue(Base):
    """Policy of a queue, a namespace of channels. A row is optional."""

    __tablename__ = "queue"
    __table_args__ = (
        PrimaryKeyConstraint("name", name="queue_pkey"),
        CheckConstraint("char_length(name) BETWEEN 1 AND 255", name="queue_name_length"),
    )

    name: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=_NOW)

    @validates("name")
    def _check_name(self, field: str, value: str) -> str:
        return check_name(field, value)


class Channel(Base):
    """Policy of a channel. A row is optional: without one the defaults apply.

    :param name: the channel, usually a tenant's name or key.
    :param queue: the queue that the channel is in.
    :param weight: its share against the other channels of the queue, 0.01 to 1000.
    """

    __tablename__ = "channel"
    __table_args__ = (
        PrimaryKeyConstraint("queue", "name", name="channel_pkey"),
        CheckConstraint("char_length(queue) BETWEEN 1 AND 255", name="channel_queue_length"),
        CheckConstraint("char_length(name) BETWEEN 1 AND 255", name="channel_name_length"),
        CheckConstraint("weight >= 0.01 AND weight <= 1000", name="channel_weight_range"),
    )

    queue: Mapped[str] = mapped_column(Text, server_default="default")
    name: Mapped[str] = mapped_column(Text)
    weight: Mapped[float] = mapped_column(Double, server_default=text("1"))
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=_NOW)

    def __init__(self, name: str, queue: str = "default", weight: float = 1) -> None:
        super().__init__(name=name, queue=queue, weight=weight)

    @validates("queue", "name")
    def _check_name(self, field: str, value: str) -> str:
        return check_name(field, value)

    @validates("weight")
    def _check_weight(self, field: str, value: float) -> float:
        return check_number(field, value, 0.01, 1000)


class TypedMessage(Base, Generic[P]):
    """The base of message classes: columns, checks and ``__init__``. See :mod:`fairqueue.payloads` for typed ones.

    :param channel: whose message it is; the channel need not exist.
    :param payload: what the worker needs, JSON unless the class has another ``payload_type``.
    :param queue: the queue of the channel.
    :param delay: seconds (or a timedelta) from now before which it isn't served, by the database clock.
    :param at: a datetime with a time zone before which it isn't served.
    :param priority: 0 or more; higher goes first inside the channel, never ahead of other channels.
    :param dequeue_at: the same as a number: Unix time in milliseconds, historic or negative for priority.
    :param cost: how much of the channel's share it uses up; more than 0, at most 1,000,000.
    :param body: binary data beside the payload.
    :raises InvalidValue: naming the field, for what can't be; nothing has been written then.
    """

    __abstract__ = True

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True))
    queue: Mapped[str] = mapped_column(Text, server_default="default")
    channel: Mapped[str] = mapped_column(Text)
    payload: Mapped[P] = mapped_column(JSONPayload, nullable=True)
    body: Mapped[bytes | None] = mapped_column(BytesPayload)
    dequeue_at: Mapped[int] = mapped_column(
        BigInteger,  # As PostgreSQL prints it, so that comparing defaults finds no difference.
        server_default=text("(floor((EXTRACT(epoch FROM clock_timestamp()) * (1000)::numeric)))::bigint"),
    )
    cost: Mapped[float] = mapped_column(Double, server_default=text("1"))
    attempt: Mapped[int] = mapped_column(Integer, server_default=text("0"))
    leased_until: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    state: Mapped[Any | None] = mapped_column(JSONPayload("state"))
    error: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=_NOW)

    def __init_subclass__(cls, payload_type: Any = None, **kw: Any) -> None:
        if not cls.__dict__.get("__abstract__") and cls.__name__ != "Message":
            # Another view of the same table: a table object of its own, in a MetaData of its own.
            cls.metadata = MetaData(schema=DEFAULT_SCHEMA)
            cls.__tablename__ = "message"
            column_type = payload_column_type(payload_type)
            if payload_type is bytes:
                cls.payload = mapped_column("body", column_type, nullable=True)
                cls.body = None  # type: ignore[assignment]
            else:
                cls.payload = mapped_column("payload", column_type, nullable=True)
            cls.__table_args__ = (PrimaryKeyConstraint("id", name="message_pkey"),)
        super().__init_subclass__(**kw)

    def __init__(
        self,
        channel: str,
        payload: P | None = None,
        *,
        queue: str = "default",
        delay: float | timedelta | None = None,
        at: datetime | None = None,
        priority: int | None = None,
        dequeue_at: int | None = None,
        cost: float = 1,
        body: bytes | None = None,
    ) -> None:
        # The same attributes for every message: a flush batches only objects that have the same set.
        values: dict[str, Any] = {"queue": queue, "channel": channel, "payload": payload, "cost": cost}
        if hasattr(type(self), "body") and type(self).body is not None:
            values["body"] = body
        elif body is not None:
            raise InvalidValue(f"body can't be given: the payload of {type(self).__name__} is the body")
        when = _dequeue_at(delay=delay, at=at, priority=priority, dequeue_at=dequeue_at)
        if when is not None:
            values["dequeue_at"] = when.expression() if isinstance(when, Delay) else when
        super().__init__(**values)

    @validates("queue", "channel")
    def _check_name(self, field: str, value: str) -> str:
        return check_name(field, value)

    @validates("cost")
    def _check_cost(self, field: str, value: float) -> float:
        return check_cost(value)


class Message(TypedMessage[Any]):
    """One unit of work with a JSON payload. Adding it to a session enqueues it when the session commits."""

    __tablename__ = "message"
    __table_args__ = (
        PrimaryKeyConstraint("id", name="message_pkey"),
        CheckConstraint("char_length(queue) BETWEEN 1 AND 255", name="message_queue_length"),
        CheckConstraint("char_length(channel) BETWEEN 1 AND 255", name="message_channel_length"),
        CheckConstraint("cost > 0 AND cost <= 1000000", name="message_cost_range"),
        CheckConstraint("pg_column_size(payload) <= 67108864", name="message_payload_size"),
        CheckConstraint("octet_length(body) <= 67108864", name="message_body_size"),
        Index(
            "message_ready",
            "queue",
            "channel",
            "dequeue_at",
            "id",
            postgresql_where=text("leased_until IS NULL"),
        ),
        Index("message_leased", "queue", "leased_until", postgresql_where=text("leased_until IS NOT NULL")),
    )


class History(Base):
    """One row a finished message. Read-only."""

    __tablename__ = "history"
    __table_args__ = (
        PrimaryKeyConstraint("finished_at", "message_id", name="history_pkey"),
        Index("history_xid", "xid"),
        Index("history_channel", "queue", "channel", "finished_at"),
        {"postgresql_partition_by": "RANGE (finished_at)"},
    )

    message_id: Mapped[int] = mapped_column(BigInteger)
    queue: Mapped[str] = mapped_column(Text)
    channel: Mapped[str] = mapped_column(Text)
    outcome: Mapped[str] = mapped_column(Text)
    attempt: Mapped[int] = mapped_column(Integer)
    cost: Mapped[float] = mapped_column(Double)
    error: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    finished_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=_NOW)
    xid: Mapped[int] = mapped_column(XID8, server_default=text("pg_current_xact_id()"))


# The scheduler's own tables: described here so that tools see the whole schema, written by the SQL functions only.
signal = Table(
    "signal",
    Base.metadata,
    Column("queue", Text, nullable=False),
    Column("channel", Text, nullable=False),
    Column("dequeue_at", BigInteger),
    Column("message_id", BigInteger),
    Column("xid", XID8, nullable=False, server_default=text("pg_current_xact_id()")),
    Index("signal_news", "queue", "xid"),
)

lane = Table(
    "lane",
    Base.metadata,
    Column("queue", Text, nullable=False),
    Column("channel", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("tag", BigInteger, nullable=False, autoincrement=False),
    Column("since", BigInteger, nullable=False),
    Column("weight", Double, nullable=False),
    Column("head_at", BigInteger, nullable=False),
    Column("head_id", BigInteger, nullable=False),
    Column("due", BigInteger),
    PrimaryKeyConstraint("queue", "channel", "tag", name="lane_pkey"),
    Index("lane_ready", "queue", "tag", "since", postgresql_where=text("state = 'ready'")),
    Index("lane_waiting", "queue", "due", postgresql_where=text("state = 'waiting'")),
    Index("lane_idle", "queue", "tag", postgresql_where=text("state = 'idle'")),
)

rotation = Table(
    "rotation",
    Base.metadata,
    Column("queue", Text, nullable=False),
    Column("turn", BigInteger, nullable=False, autoincrement=False),
    Column("vtime", BigInteger, nullable=False),
    Column("vsince", BigInteger, nullable=False),
    Column("activations", BigInteger, nullable=False),
    Column("news_from", XID8, nullable=False),
    Column("news_open", ARRAY(XID8), nullable=False),
    Column("lease_floor", DateTime(timezone=True), nullable=False),
    Column("due_floor", BigInteger, nullable=False),
    Column("idle_floor", BigInteger, nullable=False),
    Column("swept", Text, nullable=False),
    PrimaryKeyConstraint("queue", "turn", name="rotation_pkey"),
)


def in_schema(schema: str) -> dict[str, Any]:
    """Execution options with which statements go to the installation in ``schema``, for an engine or a session::

    engine = create_engine(url, execution_options=fq.in_schema("My Q"))
    """
    return {"schema_translate_map": {DEFAULT_SCHEMA: schema}}


def check_name(field: str, value: object) -> str:
    """The name of a queue or channel, or :class:`InvalidValue`."""
    if not isinstance(value, str):
        raise InvalidValue(f"{field} must be text, not {value!r}")
    if not 1 <= len(value) <= 255:
        raise InvalidValue(f"{field} must have 1 to 255 characters, not {len(value)}")
    if "\x00" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise InvalidValue(f"{field} holds a character that PostgreSQL can't store: {value!r}")
    return value


def check_number(field: str, value: object, minimum: float, maximum: float) -> float:
    """A number from ``minimum`` to ``maximum`` (so neither NaN nor infinite), or :class:`InvalidValue`."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not minimum <= value <= maximum:
        raise InvalidValue(f"{field} must be a number from {minimum:g} to {maximum:g}, not {value!r}")
    return float(value)


def check_cost(value: object) -> float:
    """The cost of a message, or :class:`InvalidValue`."""
    if value == 0:
        raise InvalidValue(f"cost must be more than 0, not {value!r}")
    return check_number("cost", value, 0, 1_000_000)


@event.listens_for(Base.metadata, "before_create")
def _refuse_create(*_: Any, **__: Any) -> None:
    raise FairqueueError(
        "fairqueue's tables are nothing without its functions and triggers: call fairqueue.attach(Base.metadata) with"
        " your own metadata and its create_all(), or fairqueue.schema.install(connection)"
    )
