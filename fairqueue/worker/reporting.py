"""The reporter of a run: it sends to the database what became of messages, in batches of all that came meanwhile.

A message that somebody else has locked in an open transaction, such as one that cancels a tenant's work, keeps none of
the others: it is set aside, for a task that waits for such messages, a second for each in turn. It waits, and doesn't
only look now and then: when the lock is gone, the report is to come before a dequeue that finds the lease over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from fairqueue.errors import FairqueueError, sqlstate
from fairqueue.leases import Outcome

from .database import Database
from .decisions import Decision, apply
from .jobs import Job, Signal
from .logs import log

__all__ = ["Reporter"]

#: Seconds that a report waits for what somebody else has locked: of many, of one, and of one that was set aside.
_A_WHILE, _BRIEFLY, _A_TURN = 0.25, 0.05, 1.0
_LOCK_NOT_AVAILABLE = "55P03"


class _Locked(FairqueueError):
    """Somebody else has locked one of the messages."""


class Reporter:
    """Sends decisions.

    :param ended: called with what the database says of each, or None where there is no point in trying again.
    """

    def __init__(self, database: Database, ended: Callable[[Job, Decision, Outcome | None], object]) -> None:
        self.database = database
        self.ended = ended
        #: With all jobs that have this very one, by its id.
        self.decisions: dict[int, tuple[Decision, list[Job]]] = {}
        #: Those that are decided, until it is in the database.
        self.unreported: set[Job] = set()
        #: Those of them that somebody else has locked.
        self.locked: deque[tuple[Decision, Job]] = deque()
        self.more_locked = Signal()
        self.news = Signal()

    def add(self, job: Job, decision: Decision) -> None:
        self.unreported.add(job)
        self.decisions.setdefault(id(decision), (decision, []))[1].append(job)
        self.news.set()

    async def run(self) -> None:
        while True:
            await self.news.wait()
            batch, self.decisions = self.decisions, {}
            patience = _A_WHILE
            for decision, jobs in batch.values():
                if len(jobs) > 1:
                    try:
                        await self.send(decision, jobs, patience)
                        continue
                    except _Locked:
                        patience = _BRIEFLY
                    except Exception:  # noqa: BLE001, S110 - one that can't be sent doesn't keep the others from it
                        pass
                for job in jobs:
                    if not await self.send_alone(decision, job, _BRIEFLY):
                        log.warning("%s: somebody has it locked, so its end is reported later", job)

    async def wait_for_locked(self) -> None:
        """Send what was set aside."""
        while True:
            await self.more_locked.wait()
            while self.locked:
                await self.send_alone(*self.locked.popleft(), _A_TURN)

    async def send_alone(self, decision: Decision, job: Job, patience: float) -> bool:
        """False: somebody has it locked, and it is set aside."""
        try:
            try:
                await self.send(decision, [job], patience)
            except _Locked:
                raise
            except Exception:
                # In a database that isn't UTF-8 it may be the reason, which must not hide why the handler failed.
                if (in_ascii := decision.in_ascii()) is None:
                    raise
                decision = in_ascii
                await self.send(decision, [job], patience)
        except _Locked:
            self.locked.append((decision, job))
            self.more_locked.set()
            return False
        except Exception:  # noqa: BLE001 - whatever it is, the others don't wait for it
            log.exception("%s can't be reported, and comes back when its lease is over", job)
            self.done(job, decision, None)
        return True

    async def send(self, decision: Decision, jobs: list[Job], patience: float) -> None:
        """Report all that have the very same decision, in one statement.

        It locks them in the order of their ids. With several in one transaction it could come to a deadlock with
        somebody who cancels many.
        """
        messages = [job.message for job in jobs]

        def report(session: Session) -> list[Outcome]:
            try:
                return apply(session, decision, messages, patience=patience)
            except DBAPIError as error:
                if sqlstate(error.orig) == _LOCK_NOT_AVAILABLE:
                    raise _Locked from error
                raise

        outcomes = await self.database.insist("report how messages ended", report, alone=True, patience=3)
        for job, outcome in zip(jobs, outcomes or [], strict=True):
            self.done(job, decision, outcome)

    def done(self, job: Job, decision: Decision, outcome: Outcome | None) -> None:
        self.unreported.discard(job)
        self.ended(job, decision, outcome)
