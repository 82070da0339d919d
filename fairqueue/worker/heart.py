"""The heart of a run: it extends the leases of all that the worker holds, and lets go of what it has lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic

import anyio
from sqlalchemy.orm import Session

from fairqueue.consuming import heartbeat
from fairqueue.leases import Outcome

from .database import LONGEST, Database, not_durable
from .jobs import Job
from .logs import log

__all__ = ["Heart"]

#: What a heartbeat says of a lease that is over.
_OVER = (Outcome.STALE, Outcome.NOT_FOUND)


class Heart:
    """Extends leases, each third of one.

    :param lease: in seconds.
    :param jobs: all that the worker holds, as the run changes it.
    :param standby: those of them that haven't begun.
    :param lost: called with each that won't begin, as it is no longer ours.
    """

    def __init__(
        self,
        database: Database,
        lease: float,
        jobs: set[Job],
        standby: deque[Job],
        lost: Callable[[Job], object],
    ) -> None:
        self.database = database
        self.lease = lease
        self.jobs = jobs
        self.standby = standby
        self.lost = lost

    async def beat(self) -> None:
        pause = self.lease / 3
        longest = min(pause, LONGEST)  # while the database is away: who comes too late finds the leases over
        while True:
            await anyio.sleep(pause)
            if self.jobs:
                self.let_go(await self.database.insist("extend leases", self.extend, alone=True, longest=longest) or [])

    async def catch_up(self) -> None:
        """Extend leases if it is late with that: the dequeue that follows must not put our own messages back."""
        late = monotonic() - self.lease / 2
        if any(job.extended < late for job in self.jobs):
            self.let_go(await self.database.run(self.extend, alone=True))

    def extend(self, session: Session) -> list[tuple[Job, str]]:
        """Extend the leases of the jobs there are at this try: others than before it failed, where it did."""
        # Also those that are done: their reports may have to wait for the database. A copy, as we may be in a thread.
        jobs = list(self.jobs)
        if not jobs:
            return []
        now = monotonic()
        statement = not_durable(heartbeat([job.message for job in jobs], lease=self.lease))
        results = [row.result for row in session.execute(statement)]
        for job in jobs:
            job.extended = now
        return list(zip(jobs, results, strict=True))

    def let_go(self, results: list[tuple[Job, str]]) -> None:
        """Of what we hold, those that are no longer ours: as far as that can be done."""
        for job, result in results:
            if result not in _OVER:
                continue
            try:
                self.standby.remove(job)
            except ValueError:
                # Once: it may take its time to clean up, which another one would cut short. And not one that commits:
                # the message is gone because it is done, or the commit will find that it was too late.
                if job.task is not None and not (job.task.done() or job.given_up or job.settling):
                    log.warning("%s is no longer ours (%s): cancelled", job, result)
                    job.give_up()
            else:
                log.warning("%s is no longer ours (%s): not begun", job, result)
                self.lost(job)
