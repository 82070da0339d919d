"""What an operator sets: the policy of a queue and of its channels."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Literal, get_args

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    DateTime,
    Double,
    Index,
    Integer,
    PrimaryKeyConstraint,
    Text,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column, validates

from fairqueue._checks import (
    YEAR,
    check_choice,
    check_count,
    check_end,
    check_flag,
    check_name,
    check_number,
    check_seconds,
)
from fairqueue.errors import InvalidValue

from .base import NOW, Base

__all__ = ["UNSET", "Channel", "Queue"]


class _Unset:
    def __repr__(self) -> str:
        return "UNSET"


Overflow = Literal["reject", "drop"]

#: A parameter that was left out, which is not the same as None: merging an object leaves such a column as it is.
UNSET: Any = _Unset()


# What each setting has to be, of a queue, of a channel, and as a queue's default for its channels.
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "queue": check_name,
    "name": check_name,
    "weight": lambda field, value: check_number(field, value, 0.01, 1000),
    "max_concurrency": lambda field, value: check_count(field, value, 1),
    "release_interval_ms": lambda field, value: check_count(field, value, 0, 1000 * YEAR),
    "burst": lambda field, value: check_count(field, value, 1, 1_000_000),
    "max_size": lambda field, value: check_count(field, value, 1),
    "overflow": lambda field, value: check_choice(field, value, *get_args(Overflow)),
    "paused": check_flag,
    "resume_at": check_end,
    "max_attempts": lambda field, value: check_count(field, value, 1),
    "backoff": lambda field, value: check_seconds(field, value, maximum=YEAR),
    "max_backoff": lambda field, value: check_seconds(field, value, maximum=YEAR),
    "history_days": lambda field, value: check_count(field, value, 0, 36_500),
}


class _Policy(Base):
    """Checks what is set, and leaves out what is UNSET. None is a value where the column takes it."""

    __abstract__ = True

    def __init__(self, **values: Any) -> None:
        given = {field: value for field, value in values.items() if value is not UNSET}
        # A time to resume is given only with a pause, which has no other end.
        if given.get("resume_at") is not None and given.get("paused") is not True:
            raise InvalidValue("resume_at says until when a pause lasts: give paused=True with it")
        if "paused" in given:
            given.setdefault("resume_at", None)  # or a merge would keep that of the last pause
        super().__init__(**given)

    @validates(*_CHECKS, *(f"channel_{field}" for field in _CHECKS))
    def _check(self, field: str, value: Any) -> Any:
        if value is None and self.__table__.c[field].nullable:
            return None
        return _CHECKS[field.removeprefix("channel_")](field, value)


class Queue(_Policy):
    """Policy of a queue, a namespace of channels, and the default policy of its channels. A row is optional.

    What is left out is the default in a new row; ``session.merge()`` leaves it as it is in one that is there.

    :param name: the queue.
    :param max_concurrency: how many of its messages may be leased at a time; None: any number.
    :param paused: nothing is served while it is.
    :param resume_at: until when it is paused, a datetime with a time zone; None: until it is resumed. Afterwards both
        stay as they are; :func:`fairqueue.pause` pauses it again.
    :param max_attempts: after how many failed attempts a message is a dead letter; 20.
    :param backoff: seconds before the second attempt, or a timedelta, doubled for each further one; 1.
    :param max_backoff: the most seconds between two attempts, or a timedelta; 3600.
    :param history_days: for how many days outcomes are kept at least, 0 to 36,500; 30. With 0 none are written. Days
        are dropped for all queues together: the longest of all counts, and 30 for those that have no row, or 0.
    :param channel_weight: what applies to channels that have no policy of their own, or None in it. The names are
        those of :class:`Channel`; by default weight 1, no max_concurrency, release_interval_ms 0, burst 1, no
        max_size, overflow ``"reject"``.
    :raises InvalidValue: naming the field.
    """

    __tablename__ = "queue"
    __table_args__ = (
        PrimaryKeyConstraint("name", name="queue_pkey"),
        CheckConstraint("char_length(name) BETWEEN 1 AND 255", name="queue_name_length"),
        CheckConstraint("max_concurrency >= 1", name="queue_max_concurrency_range"),
        CheckConstraint("isfinite(resume_at)", name="queue_resume_at_finite"),
        CheckConstraint("max_attempts >= 1", name="queue_max_attempts_range"),
        CheckConstraint(f"backoff >= 0 AND backoff <= {YEAR}", name="queue_backoff_range"),
        CheckConstraint(f"max_backoff >= 0 AND max_backoff <= {YEAR}", name="queue_max_backoff_range"),
        CheckConstraint("history_days BETWEEN 0 AND 36500", name="queue_history_days_range"),
        CheckConstraint("channel_weight >= 0.01 AND channel_weight <= 1000", name="queue_channel_weight_range"),
        CheckConstraint("channel_max_concurrency >= 1", name="queue_channel_max_concurrency_range"),
        CheckConstraint(
            "channel_release_interval_ms BETWEEN 0 AND 31557600000", name="queue_channel_release_interval_ms_range"
        ),
        CheckConstraint("channel_burst BETWEEN 1 AND 1000000", name="queue_channel_burst_range"),
        CheckConstraint("channel_max_size >= 1", name="queue_channel_max_size_range"),
        CheckConstraint("channel_overflow IN ('reject', 'drop')", name="queue_channel_overflow_known"),
        Index(
            "queue_bounded", text("(ARRAY[name])"), unique=True, postgresql_where=text("channel_max_size IS NOT NULL")
        ),
        Index("queue_without_history", "name", postgresql_where=text("history_days = 0")),
    )

    name: Mapped[str] = mapped_column(Text)
    max_concurrency: Mapped[int | None] = mapped_column(Integer)
    paused: Mapped[bool] = mapped_column(Boolean, server_default=text("false"))
    resume_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    max_attempts: Mapped[int] = mapped_column(Integer, server_default=text("20"))
    backoff: Mapped[float] = mapped_column(Double, server_default=text("1"))
    max_backoff: Mapped[float] = mapped_column(Double, server_default=text("3600"))
    history_days: Mapped[int] = mapped_column(Integer, server_default=text("30"))
    channel_weight: Mapped[float] = mapped_column(Double, server_default=text("1"))
    channel_max_concurrency: Mapped[int | None] = mapped_column(Integer)
    channel_release_interval_ms: Mapped[int] = mapped_column(BigInteger, server_default=text("0"))
    channel_burst: Mapped[int] = mapped_column(Integer, server_default=text("1"))
    channel_max_size: Mapped[int | None] = mapped_column(Integer)
    channel_overflow: Mapped[str] = mapped_column(Text, server_default="reject")
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)

    def __init__(
        self,
        name: str,
        *,
        max_concurrency: int | None = UNSET,
        paused: bool = UNSET,
        resume_at: datetime | None = UNSET,
        max_attempts: int = UNSET,
        backoff: float | timedelta = UNSET,
        max_backoff: float | timedelta = UNSET,
        history_days: int = UNSET,
        channel_weight: float = UNSET,
        channel_max_concurrency: int | None = UNSET,
        channel_release_interval_ms: int = UNSET,
        channel_burst: int = UNSET,
        channel_max_size: int | None = UNSET,
        channel_overflow: Overflow = UNSET,
    ) -> None:
        super().__init__(
            name=name,
            max_concurrency=max_concurrency,
            paused=paused,
            resume_at=resume_at,
            max_attempts=max_attempts,
            backoff=backoff,
            max_backoff=max_backoff,
            history_days=history_days,
            channel_weight=channel_weight,
            channel_max_concurrency=channel_max_concurrency,
            channel_release_interval_ms=channel_release_interval_ms,
            channel_burst=channel_burst,
            channel_max_size=channel_max_size,
            channel_overflow=channel_overflow,
        )


class Channel(_Policy):
    """Policy of a channel. A row is optional: without one the defaults of the queue apply, as they do for None.

    What is left out is None in a new row; ``session.merge()`` leaves it as it is in one that is there::

        session.merge(fq.Channel("globex", max_concurrency=5, release_interval_ms=100, burst=3, weight=2))

    :param name: the channel, usually a tenant's name or key.
    :param queue: the queue that the channel is in.
    :param weight: its share against the other channels of the queue, 0.01 to 1000.
    :param max_concurrency: how many of its messages may be leased at a time.
    :param release_interval_ms: milliseconds between two of its messages being leased, from when it is set on; 0: none.
    :param burst: how many messages it may go on with at once after it has waited long enough, 1 to 1,000,000.
    :param max_size: how many of its messages may be ready or waiting for their time; 2147483647: any number, whatever
        the queue's default is.
    :param overflow: what happens to more: ``"reject"`` (:class:`fairqueue.ChannelFull`) or ``"drop"``. A row that
        refers to a message by a foreign key can't be written when that is dropped: take "reject" then.
    :param paused: nothing is served while it is.
    :param resume_at: until when it is paused, a datetime with a time zone; None: until it is resumed. Afterwards both
        stay as they are; :func:`fairqueue.pause` pauses it again.
    :raises InvalidValue: naming the field.
    """

    __tablename__ = "channel"
    __table_args__ = (
        PrimaryKeyConstraint("queue", "name", name="channel_pkey"),
        CheckConstraint("char_length(queue) BETWEEN 1 AND 255", name="channel_queue_length"),
        CheckConstraint("char_length(name) BETWEEN 1 AND 255", name="channel_name_length"),
        CheckConstraint("weight >= 0.01 AND weight <= 1000", name="channel_weight_range"),
        CheckConstraint("max_concurrency >= 1", name="channel_max_concurrency_range"),
        CheckConstraint("release_interval_ms BETWEEN 0 AND 31557600000", name="channel_release_interval_ms_range"),
        CheckConstraint("burst BETWEEN 1 AND 1000000", name="channel_burst_range"),
        CheckConstraint("max_size >= 1", name="channel_max_size_range"),
        CheckConstraint("overflow IN ('reject', 'drop')", name="channel_overflow_known"),
        CheckConstraint("isfinite(resume_at)", name="channel_resume_at_finite"),
        Index(
            "channel_bounded", text("(ARRAY[queue, name])"), unique=True, postgresql_where=text("max_size IS NOT NULL")
        ),
    )

    queue: Mapped[str] = mapped_column(Text, server_default="default")
    name: Mapped[str] = mapped_column(Text)
    weight: Mapped[float | None] = mapped_column(Double)
    max_concurrency: Mapped[int | None] = mapped_column(Integer)
    release_interval_ms: Mapped[int | None] = mapped_column(BigInteger)
    burst: Mapped[int | None] = mapped_column(Integer)
    max_size: Mapped[int | None] = mapped_column(Integer)
    overflow: Mapped[str | None] = mapped_column(Text)
    paused: Mapped[bool] = mapped_column(Boolean, server_default=text("false"))
    resume_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)

    def __init__(
        self,
        name: str,
        queue: str = "default",
        weight: float | None = UNSET,
        *,
        max_concurrency: int | None = UNSET,
        release_interval_ms: int | None = UNSET,
        burst: int | None = UNSET,
        max_size: int | None = UNSET,
        overflow: Overflow | None = UNSET,
        paused: bool = UNSET,
        resume_at: datetime | None = UNSET,
    ) -> None:
        super().__init__(
            name=name,
            queue=queue,
            weight=weight,
            max_concurrency=max_concurrency,
            release_interval_ms=release_interval_ms,
            burst=burst,
            max_size=max_size,
            overflow=overflow,
            paused=paused,
            resume_at=resume_at,
        )
