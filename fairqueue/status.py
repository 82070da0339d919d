"""Status: what stands in each queue and channel, and how long it has been standing there.

::

    import fairqueue as fq
    from fairqueue.status import status

    now = status(session, limit=10)                     # of each queue the ten channels with the most ready messages
    for queue in now.queues:
        print(queue.name, queue.ready, queue.running, queue.oldest)
        for channel in queue.channels:
            print(channel.name, channel.ready, channel.waiting, channel.running, channel.served, channel.dead)

It is one statement, so it sees one moment, and takes no lock. A role of the kind ``"observer"`` may do it.

It counts: its cost grows with the number of live messages and dead letters, and of outcomes in the last hour: about a
second for a million. With few look every few seconds, with many each minute.

Limitations: a channel is there if it has a message, a dead letter or a completion in the last hour; one that only has a
policy isn't. Where a queue's ``history_days`` is 0, ``served`` is 0.
"""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

from sqlalchemy import (
    CTE,
    BigInteger,
    ColumnElement,
    DateTime,
    Double,
    Executable,
    Row,
    Subquery,
    Text,
    and_,
    case,
    cast,
    false,
    func,
    literal_column,
    null,
    or_,
    select,
    true,
    tuple_,
    union_all,
)

from ._checks import check_choice, check_count, check_name
from ._functions import SchemaFunction
from ._sessions import run_in
from .models import Channel, DeadMessage, History, Message, Queue
from .schedule import clock

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection
    from sqlalchemy.orm import Session

    from ._sessions import AnyAsyncSession, SyncSession

__all__ = ["ChannelStatus", "QueueStatus", "Sort", "Status", "status"]

#: Which channels of a queue come first: those with most ready messages, or those whose oldest one has waited longest.
Sort = Literal["ready", "oldest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figures:
    """What is counted of a channel, and of a queue as the sum of its channels."""

    name: str
    #: Messages that may be served now, but for limits and pauses.
    ready: int
    #: Messages whose time has not come.
    waiting: int
    #: Messages that are leased, also those whose lease ran out and that no dequeue has taken back yet.
    running: int
    #: For how long the oldest ready message has been there and due; None: there is none. Where it came back to its old
    #: place, handed back or as its first lease ran out, that lease is included: when it ended is kept nowhere.
    oldest: timedelta | None
    #: Messages that were completed in the last hour.
    served: int
    #: Dead letters.
    dead: int
    #: Whether it is paused now, and until when; None: until it is resumed. Of a channel: itself, not its queue.
    paused: bool
    resume_at: datetime | None
    #: How many may be leased at a time; None: any number.
    max_concurrency: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelStatus(_Figures):
    """A channel, with the limits that apply to it: its own, or else the default of its queue."""

    #: Milliseconds between two of its messages being leased; 0: none.
    release_interval_ms: int
    #: How many messages may be ready or waiting in it; None: any number.
    max_size: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStatus(_Figures):
    """A queue: the figures of all its channels taken together, and its own pause and limit."""

    #: How many channels it has.
    channel_count: int
    #: The first of them, in the order that was asked for; of equals by most running messages, then by name.
    channels: list[ChannelStatus]


@dataclass(frozen=True, slots=True)
class Status:
    """What :func:`status` found."""

    #: When, by the clock of the database.
    at: datetime
    #: By name.
    queues: list[QueueStatus]


@overload
def status(
    session: SyncSession | Connection, queue: str | None = None, *, limit: int | None = None, sort: Sort = "ready"
) -> Status: ...
@overload
def status(
    session: AnyAsyncSession | AsyncConnection,
    queue: str | None = None,
    *,
    limit: int | None = None,
    sort: Sort = "ready",
) -> Coroutine[Any, Any, Status]: ...
def status(session: Any, queue: str | None = None, *, limit: int | None = None, sort: Sort = "ready") -> Any:
    """Count what stands in the queues and their channels.

    :param session: a Session or Connection; for an AsyncSession or AsyncConnection, an awaitable is returned.
    :param queue: which queue; None: all that have a policy, a message, a dead letter, or a completion in the last hour.
    :param limit: how many channels of each queue to return, 0 or more; None: all. The figures of the queue are those of
        all its channels in any case.
    :param sort: ``"ready"``: the channels with the most ready messages come first. ``"oldest"``: those whose oldest
        ready message has been there and due for longest.
    :raises InvalidValue: naming the parameter.
    """
    name = None if queue is None else check_name("queue", queue)
    most = None if limit is None else check_count("limit", limit, 0)
    statement = _statement(name, most, check_choice("sort", sort, *get_args(Sort)))

    def run(session: Session) -> Status:
        rows = session.execute(statement).all()
        groups = groupby((row for row in rows if row.queue is not None), key=lambda row: row.queue)
        # The first row of a queue is the queue itself.
        return Status(rows[0].at, [_queue(next(group), list(group)) for _, group in groups])

    return run_in(session, run, or_connection=True)


def _queue(row: Row[Any], channels: list[Row[Any]]) -> QueueStatus:
    return QueueStatus(
        name=row.queue,
        **_figures(row),
        channel_count=row.channel_count,
        channels=[
            ChannelStatus(
                name=channel.channel,
                **_figures(channel),
                release_interval_ms=channel.release_interval_ms,
                max_size=channel.max_size,
            )
            for channel in channels
        ],
    )


def _figures(row: Row[Any]) -> dict[str, Any]:
    paused = bool(row.paused) and (row.resume_at is None or row.resume_at > row.at)
    return {
        "ready": row.ready,
        "waiting": row.waiting,
        "running": row.running,
        "oldest": None if row.since is None else max(row.at - row.since, timedelta(0)),
        "served": row.served,
        "dead": row.dead,
        "paused": paused,
        "resume_at": row.resume_at if paused else None,
        "max_concurrency": row.max_concurrency,
    }


def _statement(queue: str | None, limit: int | None, sort: str) -> Executable:
    """A row for each queue, followed by those of its first channels; one row without a queue where there is none."""
    now = select(clock().label("at")).cte("now")
    totals = _totals(queue, now)
    first = totals.c.ready.desc() if sort == "ready" else totals.c.since.asc().nulls_last()
    ranked = (
        select(
            *totals.c,
            func.row_number()
            .over(
                partition_by=(totals.c.queue, totals.c.is_queue),
                order_by=(first, totals.c.running.desc(), totals.c.channel),
            )
            .label("place"),
            func.count(totals.c.channel).over(partition_by=totals.c.queue).label("channel_count"),
        )
        # A queue that has a policy and nothing else makes a group of its own, of no channel.
        .where(or_(totals.c.is_queue, totals.c.channel.is_not(None)))
        .subquery("ranked")
    )
    shown = true() if limit is None else or_(ranked.c.is_queue, ranked.c.place <= limit)
    return (
        select(
            now.c.at,
            *ranked.c,
            case((ranked.c.is_queue, Queue.paused), else_=func.coalesce(Channel.paused, false())).label("paused"),
            case((ranked.c.is_queue, Queue.resume_at), else_=Channel.resume_at).label("resume_at"),
            case(
                (ranked.c.is_queue, Queue.max_concurrency),
                else_=func.coalesce(Channel.max_concurrency, Queue.channel_max_concurrency),
            ).label("max_concurrency"),
            func.coalesce(Channel.release_interval_ms, Queue.channel_release_interval_ms, 0).label(
                "release_interval_ms"
            ),
            func.coalesce(Channel.max_size, Queue.channel_max_size).label("max_size"),
        )
        .select_from(now)
        .outerjoin(ranked, shown)
        .outerjoin(Queue, Queue.name == ranked.c.queue)
        .outerjoin(Channel, and_(Channel.queue == ranked.c.queue, Channel.name == ranked.c.channel))
        .order_by(ranked.c.queue, ranked.c.is_queue.desc(), ranked.c.place)
    )


def _totals(queue: str | None, now: CTE) -> Subquery:
    """The figures by channel and by queue."""
    at = select(now.c.at).scalar_subquery()
    at_ms = select(SchemaFunction("unix_ms", now.c.at, type_=BigInteger)).scalar_subquery()
    ready = and_(Message.leased_until.is_(None), Message.dequeue_at <= at_ms)
    # A priority is a time long past, and may be one that no timestamp can express.
    due = func.to_timestamp(cast(func.greatest(Message.dequeue_at, 0), Double) / literal_column("1000"))
    zero: ColumnElement[int] = literal_column("0")
    none = cast(null(), DateTime(timezone=True))
    hour_ago = at - timedelta(hours=1)
    counted = union_all(
        select(
            Message.queue,
            Message.channel,
            func.count().filter(ready).label("ready"),
            func.count().filter(Message.leased_until.is_(None)).label("unleased"),
            func.count().label("live"),
            func.min(case((ready, func.greatest(due, Message.created_at)))).label("since"),
            zero.label("served"),
            zero.label("dead"),
        )
        .where(_is(Message.queue, queue))
        .group_by(Message.queue, Message.channel),
        select(History.queue, History.channel, zero, zero, zero, none, func.count(), zero)
        .where(History.finished_at > hour_ago, History.outcome == "completed", _is(History.queue, queue))
        .group_by(History.queue, History.channel),
        select(DeadMessage.queue, DeadMessage.channel, zero, zero, zero, none, zero, func.count())
        .where(_is(DeadMessage.queue, queue))
        .group_by(DeadMessage.queue, DeadMessage.channel),
        # The queue that was asked for is there in any case.
        select(Queue.name, null(), zero, zero, zero, none, zero, zero)
        if queue is None
        else select(cast(queue, Text), null(), zero, zero, zero, none, zero, zero),
    ).subquery("counted")

    def total(column: str) -> ColumnElement[int]:
        return cast(func.sum(counted.c[column]), BigInteger)

    totals = select(
        counted.c.queue,
        counted.c.channel,
        (func.grouping(counted.c.channel) == 1).label("is_queue"),
        total("ready").label("ready"),
        (total("unleased") - total("ready")).label("waiting"),
        (total("live") - total("unleased")).label("running"),
        func.min(counted.c.since).label("since"),
        total("served").label("served"),
        total("dead").label("dead"),
    ).group_by(func.grouping_sets(tuple_(counted.c.queue, counted.c.channel), counted.c.queue))
    return totals.subquery("totals")


def _is(column: Any, queue: str | None) -> ColumnElement[bool]:
    return true() if queue is None else column == queue
