"""What is enqueued: the message, with a JSON payload or one of a type."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Generic

from sqlalchemy import (
    BigInteger,
    ClauseElement,
    Connection,
    DateTime,
    Double,
    Identity,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    Text,
    event,
    inspect,
    text,
)
from sqlalchemy.orm import InstanceState, Mapped, Mapper, mapped_column, validates
from sqlalchemy.types import TypeEngine
from typing_extensions import TypeVar

from fairqueue._checks import YEAR, check_count, check_name, check_seconds, is_number
from fairqueue.errors import InvalidValue
from fairqueue.payloads import BytesPayload, JSONPayload, declared_payload_type, payload_column_type
from fairqueue.schedule import Delay
from fairqueue.schedule import dequeue_at as _dequeue_at
from fairqueue.schema import DEFAULT_SCHEMA

from .base import NOW, Base

__all__ = ["Message", "TypedMessage", "check_backoff", "check_cost", "check_key", "check_max_attempts"]

P = TypeVar("P", default=Any)
T = TypeVar("T")

_UNSAID: Any = object()
#: The columns that a producer doesn't write.
_NOT_GIVEN = (
    *("id", "attempt", "forgiven", "leased_until", "first_leased_at", "leased_at", "worker", "counted", "state"),
    *("error", "created_at"),
)


def _left_out(column_type: TypeEngine[T]) -> TypeEngine[T]:
    """The type of a column that is the scheduler's: an INSERT doesn't name it, so a producer needs no right to it.

    SQLAlchemy names all columns without a default and gives those that were not set as NULL, unless their type takes
    None for a value like any other.
    """
    return column_type.evaluates_none()


def _or_none(check: Callable[..., T], **limits: float) -> Callable[[str, object], T | None]:
    """The check of a field that may be None."""

    def checked(field: str, value: object) -> T | None:
        return None if value is None else check(field, value, **limits)

    return checked


check_key = _or_none(check_name)
check_max_attempts = _or_none(check_count, minimum=1)
check_backoff = _or_none(check_seconds, maximum=YEAR)


def check_cost(field: str, value: object) -> float:
    """The cost of a message, or :class:`InvalidValue`."""
    if not is_number(value) or not 0 < value <= 1_000_000:
        raise InvalidValue(f"{field} must be more than 0 and at most 1000000, not {value!r}")
    return float(value)


def _check_dequeue_at(field: str, value: Any) -> Any:
    return value if isinstance(value, ClauseElement) else _dequeue_at(dequeue_at=value)


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "queue": check_name,
    "channel": check_name,
    "key": check_key,
    "dequeue_at": _check_dequeue_at,
    "cost": check_cost,
    "max_attempts": check_max_attempts,
    "backoff": check_backoff,
}


class TypedMessage(Base, Generic[P]):
    """The base of message classes: columns, checks and ``__init__``. See :mod:`fairqueue.payloads` for typed ones.

    :param channel: whose message it is; the channel need not exist.
    :param payload: what the worker needs, JSON unless the class has another ``payload_type``.
    :param queue: the queue of the channel.
    :param delay: seconds (or a timedelta) from now before which it isn't served, by the database clock.
    :param at: a datetime with a time zone before which it isn't served.
    :param priority: 0 or more; higher goes first inside the channel, never ahead of other channels.
    :param dequeue_at: the same as a number: Unix time in milliseconds, historic or negative for priority.
    :param cost: how much of the channel's share it uses up; more than 0, at most 1,000,000. It is counted in whole
        720,720ths of the channel's weight, so that what is below a ten-thousandth of that is rounded noticeably.
    :param body: binary data beside the payload.
    :param key: no two live messages of a channel have the same one; the flush of a second one raises SQLAlchemy's
        IntegrityError. :func:`fairqueue.enqueue_unique` ignores or replaces instead.
    :param max_attempts: after how many failed attempts it is a dead letter; None: as the queue has it.
    :param backoff: seconds (or a timedelta) before the second attempt; None: as the queue has it.
    :raises InvalidValue: naming the field, for what can't be; for a payload or body, which may still change, when it is
        flushed. Nothing has been written then.
    """

    __abstract__ = True

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True))
    queue: Mapped[str] = mapped_column(Text, server_default="default")
    channel: Mapped[str] = mapped_column(Text)
    key: Mapped[str | None] = mapped_column(Text)
    payload: Mapped[P] = mapped_column(JSONPayload, nullable=True)
    body: Mapped[bytes | None] = mapped_column(BytesPayload)
    dequeue_at: Mapped[int] = mapped_column(
        BigInteger, server_default=text(f"{DEFAULT_SCHEMA}.unix_ms({DEFAULT_SCHEMA}.clock())")
    )
    cost: Mapped[float] = mapped_column(Double, server_default=text("1"))
    max_attempts: Mapped[int | None] = mapped_column(Integer)
    backoff: Mapped[float | None] = mapped_column(Double)
    attempt: Mapped[int] = mapped_column(Integer, server_default=text("0"))
    forgiven: Mapped[int] = mapped_column(Integer, server_default=text("0"))
    leased_until: Mapped[datetime | None] = mapped_column(_left_out(DateTime(timezone=True)))
    first_leased_at: Mapped[datetime | None] = mapped_column(_left_out(DateTime(timezone=True)))
    leased_at: Mapped[datetime | None] = mapped_column(_left_out(DateTime(timezone=True)))
    worker: Mapped[str | None] = mapped_column(_left_out(Text()))
    counted: Mapped[int | None] = mapped_column(_left_out(BigInteger()))
    state: Mapped[Any | None] = mapped_column(_left_out(JSONPayload("state")))
    error: Mapped[str | None] = mapped_column(_left_out(Text()))
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)

    _payload_type: ClassVar[Any] = _UNSAID

    def __init_subclass__(cls, payload_type: Any = _UNSAID, **kw: Any) -> None:
        mapped = [base.__name__ for base in cls.__mro__[1:] if "__mapper__" in vars(base)]
        if mapped:
            raise InvalidValue(f"{cls.__name__} must derive from TypedMessage[...] itself, not from {mapped[0]}")
        if payload_type is not _UNSAID:
            cls._payload_type = payload_type
        if not cls.__dict__.get("__abstract__") and (cls.__module__, cls.__name__) != (__name__, "Message"):
            # Another view of the same table: a table object of its own, in a MetaData of its own.
            cls.metadata = MetaData(schema=DEFAULT_SCHEMA)
            cls.__tablename__ = "message"
            payload_type = cls._payload_type
            if payload_type is _UNSAID:
                payload_type = declared_payload_type(cls, TypedMessage)
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
        key: str | None = None,
        max_attempts: int | None = None,
        backoff: float | timedelta | None = None,
    ) -> None:
        # The same attributes for every message: a flush batches only objects that have the same set.
        values: dict[str, Any] = {
            "queue": queue,
            "channel": channel,
            "payload": payload,
            "cost": cost,
            "key": key,
            "max_attempts": max_attempts,
            "backoff": backoff,
        }
        if type(self).body is not None:
            values["body"] = body
        elif body is not None:
            raise InvalidValue(f"body can't be given: the payload of {type(self).__name__} is the body")
        when = _dequeue_at(delay=delay, at=at, priority=priority, dequeue_at=dequeue_at)
        if when is not None:
            values["dequeue_at"] = when.expression() if isinstance(when, Delay) else when
        super().__init__(**values)

    @validates(*_CHECKS)
    def _check(self, field: str, value: Any) -> Any:
        return _CHECKS[field](field, value)


@event.listens_for(TypedMessage, "before_insert", propagate=True)
def _begin_anew(mapper: Mapper[Any], connection: Connection, message: TypedMessage[Any]) -> None:
    """A message that was flushed, rolled back and added again is a new one: the id that it had isn't to be sent.

    One that somebody else has set, as merge() does, is: PostgreSQL refuses it, where a message would come twice.
    """
    state: InstanceState[Any] = inspect(message)
    if "id" in state.dict and "id" not in state.committed_state:
        for name in _NOT_GIVEN:
            if name not in state.committed_state:
                state.dict.pop(name, None)


class Message(TypedMessage[Any]):
    """One unit of work with a JSON payload. Adding it to a session enqueues it when the session commits."""

    __tablename__ = "message"
    __table_args__ = (
        PrimaryKeyConstraint("id", name="message_pkey"),
        Index(
            "message_ready",
            "queue",
            "channel",
            "dequeue_at",
            "id",
            postgresql_where=text("leased_until IS NULL"),
        ),
        Index("message_leased", "queue", "leased_until", postgresql_where=text("leased_until IS NOT NULL")),
        Index("message_key", "queue", "channel", "key", unique=True, postgresql_where=text("key IS NOT NULL")),
    )
    if TYPE_CHECKING:
        payload: Mapped[Any]  # not of a generic class: it can be queried


def check_message_type(value: object) -> type[TypedMessage[Any]]:
    """Message, or a TypedMessage, or :class:`InvalidValue`."""
    if not (isinstance(value, type) and issubclass(value, TypedMessage) and "__mapper__" in vars(value)):
        raise InvalidValue(f"message_type must be Message or a TypedMessage, not {value!r}")
    return value
