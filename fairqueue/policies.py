"""Policies at run time: pausing and resuming a queue or one of its channels, for Session and AsyncSession alike.

::

    from datetime import UTC, datetime, timedelta
    import fairqueue as fq

    session.execute(fq.pause(channel="globex"))                      # until it is resumed
    session.execute(fq.resume(channel="globex"))
    session.execute(fq.pause(queue="transcode", until=datetime.now(UTC) + timedelta(hours=1)))
    session.commit()

What is paused is enqueued to as ever, and leases that are out go on; nothing more is served. It takes effect at the
next dequeue after the commit. The other policies are those of :class:`fairqueue.Channel` and :class:`fairqueue.Queue`,
which are merged and edited like any entity. SQLAlchemy 2.0 doesn't flush these before a statement, as 2.1 does: there
say ``session.flush()`` between adding a channel and pausing it.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, Boolean, DateTime, Double, Integer, Text, cast, select

from ._checks import check_end, check_name
from ._functions import SchemaFunction
from .errors import InvalidValue
from .models.policies import UNSET

if TYPE_CHECKING:
    from sqlalchemy import Select

__all__ = ["pause", "resume"]


def pause(*, queue: str = UNSET, channel: str = UNSET, until: datetime | None = None) -> Select[None]:
    """Serve nothing more of a channel, or of a whole queue, which has to be named then.

    :param queue: the queue, or that of the channel, ``"default"`` unless given.
    :param channel: its name; left out, it is the whole queue, but None is refused.
    :param until: when it goes on by itself, a datetime with a time zone; None: when it is resumed. A pause that is on
        gets this end.
    :raises InvalidValue: naming the parameter, or if neither queue nor channel is given.
    :returns: a statement, to be executed.
    """
    return _set_pause(queue, channel, True, None if until is None else check_end("until", until))


def resume(*, queue: str = UNSET, channel: str = UNSET) -> Select[None]:
    """End the pause of a channel, or that of a queue. Channels that are paused themselves stay so.

    :param queue: the queue, or that of the channel, ``"default"`` unless given.
    :param channel: its name; left out, it is the queue, but None is refused.
    :raises InvalidValue: naming the parameter, or if neither queue nor channel is given.
    :returns: a statement, to be executed.
    """
    return _set_pause(queue, channel, False, None)


def _set_pause(queue: str, channel: str, paused: bool, until: datetime | None) -> Select[None]:
    if queue is UNSET and channel is UNSET:
        raise InvalidValue("one of queue and channel must be given: a queue by itself stands for all of its channels")
    pausing = (cast(paused, Boolean), cast(until, DateTime(timezone=True)))
    name = cast(check_name("queue", "default" if queue is UNSET else queue), Text)
    if channel is UNSET:  # not None: a tenant's name that is missing by mistake must not pause everybody
        return select(SchemaFunction("queue_set", name, cast(None, Integer), *pausing))
    # weight, max_concurrency, release_interval_ms, burst, max_size, overflow: as they are
    others = [cast(None, type_) for type_ in (Double, Integer, BigInteger, Integer, Integer, Text)]
    return select(SchemaFunction("channel_set", cast(check_name("channel", channel), Text), name, *others, *pausing))
