"""Checking: does what the scheduler keeps agree with the messages and policies that it was derived from?

::

    import fairqueue as fq

    for difference in fq.check(session):                       # of all queues; none when all is well
        print(difference.queue, difference.channel, difference.problem, difference.expected, difference.found)
    session.commit()

    mended = fq.check(session, "default", repair=True)         # what was found, and is no more
    session.commit()                                           # at once: until then nobody can dequeue

A check is safe on a live queue: it is one statement, which takes no lock and sees one moment, and every transaction
that changes a message leaves word of it for the scheduler, so that both sides agree between any two. It reads all that
the scheduler keeps and all leases, and the first ready message of each channel; so its cost grows with the number of
active channels and leases, not with the backlog.

A repair derives everything anew from the rows, whatever it was. Meanwhile the queue can be enqueued to as ever, and
leases can end. It may be used after a restore from a dump, after rows were changed with triggers disabled, and when a
check says so.

Limitations: what has no other source than the scheduler itself can't be checked: the share of service that each channel
has had, and when the last message of a rate-limited one was released.
"""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from sqlalchemy import Text, cast, column, select
from sqlalchemy.orm import Session

from ._checks import check_flag, check_name
from ._functions import SchemaFunction
from ._sessions import BIND, run_in

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection

    from ._sessions import AnyAsyncSession, SyncSession

__all__ = ["Difference", "check"]


@dataclass(frozen=True, slots=True)
class Difference:
    """What :func:`check` found: something that the scheduler keeps is not what the rows say."""

    queue: str
    #: None: it concerns the queue as a whole.
    channel: str | None
    #: What is wrong, in words.
    problem: str
    #: What it is by the rows, and what the scheduler has. None where there is nothing.
    expected: str | None
    found: str | None


@overload
def check(session: SyncSession | Connection, queue: str | None = None, *, repair: bool = False) -> list[Difference]: ...
@overload
def check(
    session: AnyAsyncSession | AsyncConnection, queue: str | None = None, *, repair: bool = False
) -> Coroutine[Any, Any, list[Difference]]: ...
def check(session: Any, queue: str | None = None, *, repair: bool = False) -> Any:
    """Compare what the scheduler keeps with the rows that it was derived from; returns the differences.

    :param session: a Session or Connection; for an AsyncSession or AsyncConnection, an awaitable is returned.
    :param queue: which queue; None: all.
    :param repair: derive the state of each queue that has differences anew, in this transaction. It has to be
        READ COMMITTED and must have written nothing before; commit it at once, as it keeps everybody else from
        dequeueing. It waits for its turn to do so, of the first such queue: where there are several and they are live,
        better give one after the other as ``queue``.
    :returns: what was found, before the repair; an empty list when all is well.
    :raises InvalidValue: naming the parameter.
    """
    name = None if queue is None else check_name("queue", queue)
    check_flag("repair", repair)
    found = SchemaFunction("queue_check", cast(name, Text)).table_valued(
        *(column(field, Text) for field in Difference.__dataclass_fields__), name="found"
    )
    statement = select(*found.c).order_by(
        found.c.queue, found.c.channel.nulls_first(), found.c.problem, found.c.expected, found.c.found
    )

    def run(session: Session | Connection) -> list[Difference]:
        # A Session may have several databases, and there is no mapper in these statements that would tell which.
        where: dict[str, Any] = {"bind_arguments": BIND} if isinstance(session, Session) else {}
        differences = [Difference(*row) for row in session.execute(statement, **where)]
        for broken in sorted({difference.queue for difference in differences}) if repair else ():
            session.execute(select(SchemaFunction("queue_repair", cast(broken, Text))), **where)
        return differences

    return run_in(session, run, or_connection=True)
