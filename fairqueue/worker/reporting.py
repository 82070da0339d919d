"""The reporter of a run: it sends to the database what became of messages, in batches of all that came meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from fairqueue.leases import Outcome

from .database import Database
from .decisions import Decision, apply
from .jobs import Job, Signal
from .logs import log

__all__ = ["Reporter"]


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
        self.news = Signal()

    def add(self, job: Job, decision: Decision) -> None:
        self.unreported.add(job)
        self.decisions.setdefault(id(decision), (decision, []))[1].append(job)
        self.news.set()

    async def run(self) -> None:
        while True:
            await self.news.wait()
            batch, self.decisions = self.decisions, {}
            for decision, jobs in batch.values():
                try:
                    await self.send(decision, jobs)
                except Exception:  # noqa: BLE001 - one that can't be sent doesn't keep the others from it
                    for job in jobs:
                        await self.send_alone(decision, job)

    async def send_alone(self, decision: Decision, job: Job) -> None:
        try:
            try:
                await self.send(decision, [job])
            except Exception:
                # In a database that isn't UTF-8 it may be the reason, which must not hide why the handler failed.
                if (in_ascii := decision.in_ascii()) is None:
                    raise
                await self.send(in_ascii, [job])
        except Exception:  # noqa: BLE001 - whatever it is, the others don't wait for it
            log.exception("%s can't be reported, and comes back when its lease is over", job)
            self.done(job, decision, None)

    async def send(self, decision: Decision, jobs: list[Job]) -> None:
        """Report all that have the very same decision, in one statement.

        It locks them in the order of their ids. With several in one transaction it could come to a deadlock with
        somebody who cancels many.
        """
        messages = [job.message for job in jobs]
        outcomes = await self.database.insist(
            "report how messages ended", lambda session: apply(session, decision, messages), alone=True, patience=3
        )
        for job, outcome in zip(jobs, outcomes or [], strict=True):
            self.done(job, decision, outcome)

    def done(self, job: Job, decision: Decision, outcome: Outcome | None) -> None:
        self.unreported.discard(job)
        self.ended(job, decision, outcome)
