"""When a message may be served: at once, after a delay, at a time, or ahead of the others of its channel.

All of these are one number, ``dequeue_at``: Unix time in milliseconds. A channel serves its messages in the order of
``(dequeue_at, id)``, none before the database clock has reached its time; so a priority is a time in the past, and a
message that is urgent and for later can't be expressed::

    >>> dequeue_at(priority=5)
    -5
    >>> dequeue_at(priority=5, delay=60)
    Traceback (most recent call last):
    ...
    fairqueue.errors.InvalidValue: only one of delay, priority may be given: a priority is a time in the past, ...
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from sqlalchemy import BigInteger, DateTime, func

from ._checks import check_moment, check_seconds, is_whole
from ._functions import SchemaFunction
from .errors import InvalidValue

__all__ = ["EPOCH", "Delay", "clock", "dequeue_at", "since_epoch"]

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


class Delay(float):
    """A number of seconds from now, by the clock of the database."""

    def expression(self) -> SchemaFunction:
        """The time as SQL; makes SQLAlchemy insert the message with a statement of its own."""
        at = clock() + func.make_interval(0, 0, 0, 0, 0, 0, float(self))
        return SchemaFunction("unix_ms", at, type_=BigInteger)


def clock() -> SchemaFunction:
    """The time by the clock of the database, as SQL."""
    return SchemaFunction("clock", type_=DateTime(timezone=True))


def since_epoch(moment: datetime) -> timedelta:
    """The time since 1970. Subclasses of datetime, as Pendulum's, may make something else of a difference."""
    return datetime.__sub__(moment, EPOCH)


def dequeue_at(
    *,
    delay: float | timedelta | None = None,
    at: datetime | None = None,
    priority: int | None = None,
    dequeue_at: int | None = None,
) -> int | Delay | None:
    """The ``dequeue_at`` that is meant: a number, a :class:`Delay` that the database has to add up, or None for now.

    :param delay: seconds from now by the database clock, or a timedelta.
    :param at: a point in time, with a time zone.
    :param priority: 0 (as it comes) or more; higher goes first inside the channel.
    :param dequeue_at: Unix time in milliseconds as it is stored.
    :raises InvalidValue: if more than one is given, but for a priority of 0, or one can't be.
    """
    if priority is not None and (not is_whole(priority) or not 0 <= priority < 2**62):
        raise InvalidValue(f"priority must be a whole number of 0 or more, not {priority!r}")
    # One of 0, as it comes, may stand beside a time.
    options = {"delay": delay, "at": at, "priority": priority or None, "dequeue_at": dequeue_at}
    given = [name for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise InvalidValue(
            f"only one of {', '.join(given)} may be given: a priority is a time in the past, so a message can't be"
            " urgent and for later"
        )
    if delay is not None:
        return Delay(check_seconds("delay", delay))
    if at is not None:
        return since_epoch(check_moment("at", at)) // _MILLISECOND  # a float may be a millisecond early
    if priority:
        return -priority
    if dequeue_at is not None and (not is_whole(dequeue_at) or not -(2**62) < dequeue_at < 2**62):
        raise InvalidValue(f"dequeue_at must be Unix time in whole milliseconds, not {dequeue_at!r}")
    return dequeue_at
