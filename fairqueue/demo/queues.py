"""The two queues: one in arrival order, one fair, behind the same few verbs.

Both lease messages for a limited time, fence a lease by its attempt, and complete in the worker's own transaction. They
differ in whose message comes next, and in nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from typing import Protocol

from sqlalchemy import delete, func, insert, literal_column, or_, select, update
from sqlalchemy.orm import Session

import fairqueue as fq

from .tables import PlainMessage

#: Seconds. A worker that dies takes its batch out of sight for that long; one file has to be done in less.
LEASE = 120


@dataclass(frozen=True)
class Job:
    """A message in the hands of a worker; id and attempt are the lease."""

    id: int
    attempt: int
    tenant: str
    path: str
    enqueued_at: datetime


class Queue(Protocol):
    """What the demo asks of a queue. Nothing here commits."""

    @property
    def label(self) -> str: ...

    def enqueue(self, session: Session, tenant: str, paths: Sequence[str]) -> None: ...

    def dequeue(self, session: Session, limit: int) -> list[Job]: ...

    def complete(self, session: Session, job: Job) -> bool:
        """Whether the lease was still ours; if not, the work has to be rolled back."""
        ...

    def backlog(self, session: Session) -> int: ...


class FairQueue:
    """fairqueue: each tenant is a channel, and the channels take turns."""

    label = "fairqueue"

    def enqueue(self, session: Session, tenant: str, paths: Sequence[str]) -> None:
        fq.enqueue_many(session, [{"channel": tenant, "payload": {"path": path}} for path in paths])

    def dequeue(self, session: Session, limit: int) -> list[Job]:
        batch = session.scalars(fq.dequeue(limit=limit, lease=LEASE))
        return [Job(m.id, m.attempt, m.channel, m.payload["path"], m.created_at) for m in batch]

    def complete(self, session: Session, job: Job) -> bool:
        _id, result = session.execute(fq.complete((job.id, job.attempt))).one()
        return result == fq.Outcome.COMPLETED

    def backlog(self, session: Session) -> int:
        return session.scalar(select(func.count()).select_from(fq.Message)) or 0


class ArrivalOrder:
    """The usual queue in PostgreSQL: oldest message first, FOR UPDATE SKIP LOCKED."""

    label = "arrival order"

    def enqueue(self, session: Session, tenant: str, paths: Sequence[str]) -> None:
        session.execute(insert(PlainMessage), [{"tenant": tenant, "payload": {"path": path}} for path in paths])

    def dequeue(self, session: Session, limit: int) -> list[Job]:
        now = func.clock_timestamp()
        oldest = (
            select(PlainMessage.id)
            .where(or_(PlainMessage.leased_until.is_(None), PlainMessage.leased_until < now))
            .order_by(PlainMessage.id)
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        leased = session.execute(
            update(PlainMessage)
            .where(PlainMessage.id.in_(oldest))
            .values(attempt=PlainMessage.attempt + 1, leased_until=now + literal_column(f"interval '{LEASE} s'"))
            .returning(
                PlainMessage.id,
                PlainMessage.attempt,
                PlainMessage.tenant,
                PlainMessage.payload,
                PlainMessage.created_at,
            )
            .execution_options(synchronize_session=False)
        )
        batch = sorted(leased, key=attrgetter("id"))
        return [Job(m.id, m.attempt, m.tenant, m.payload["path"], m.created_at) for m in batch]

    def complete(self, session: Session, job: Job) -> bool:
        done = delete(PlainMessage).where(PlainMessage.id == job.id, PlainMessage.attempt == job.attempt)
        return session.scalar(done.returning(PlainMessage.id)) is not None

    def backlog(self, session: Session) -> int:
        return session.scalar(select(func.count()).select_from(PlainMessage)) or 0


#: In the order in which they run.
QUEUES: dict[str, Queue] = {"arrival": ArrivalOrder(), "fair": FairQueue()}
