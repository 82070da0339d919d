"""One run of a worker: a fetcher, the jobs, a reporter and a heart, as tasks of one event loop.

* The *fetcher* leases as many messages as there are free places: ``concurrency``, and those to stand by, together. It
  asks again when half of what stands by has been begun. When it gets fewer, there is nothing more to do, and it waits
  (:mod:`.idling`). What stands by because the fetcher chose so (:mod:`.pace`) is left to others when the oldest has
  done so for too long; after the dequeue, where one is under way.
* A *job* is a message, from its lease until its end is in the database. It has a place until what becomes of it is
  decided. ``concurrency`` of them run at a time, the others stand by in the order in which they were leased. A slot
  goes on with what stands by until nothing does; a thread does so by itself, and leaves to the event loop what became
  of each.
* The *reporter* (:mod:`.reporting`) sends decisions to the database in batches. The fetcher doesn't wait for it; but
  of those to be reported, all beyond as many as there are places keep theirs, so that what can't be reported isn't
  taken on for long.
* The *heart* (:mod:`.heart`) extends the leases of all jobs. After an outage or a freeze the fetcher doesn't wait for
  it: a dequeue puts back all messages whose leases have run out, our own among them.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

import anyio
from anyio.abc import TaskGroup

from fairqueue.consuming import dequeue
from fairqueue.leases import Outcome

from .database import Database, not_durable
from .decisions import Decision, Defer
from .handlers import CANCELLED_FROM_WITHIN, Handled, UnreadablePayload
from .heart import Heart
from .idling import Idler
from .jobs import Job, Signal
from .logs import log
from .pace import Pace
from .reporting import Reporter
from .threads import Threads

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from . import Worker

__all__ = ["Run"]

#: What becomes of a message that we leave to others: no attempt is used up, and it keeps its place.
_HAND_BACK = Defer(delay=0)
_HAND_BACK.verdict = "is left to others"
#: Seconds that handing back may take, at the end of the time of grace.
_LAST_WORDS = 5.0
_LARGEST_BATCH = 1_000


class Run:
    """From start to stop.

    :param started: called once, when whoever started the worker need wait no more.
    """

    def __init__(self, worker: Worker, started: Callable[[], object]) -> None:
        assert worker.registered is not None
        self.worker = worker
        self.started = started
        self.begun = False
        self.handler = worker.registered
        self.threads = Threads()
        self.database = Database(worker.engine, self.threads)
        self.statements: dict[int, Any] = {}
        self.jobs: set[Job] = set()
        self.standby: deque[Job] = deque()
        self.pace = Pace(worker.prefetch)
        #: Those that a thread has run, until the event loop hears of it.
        self.handled: deque[tuple[Job, Handled]] = deque()
        self.collecting = False
        self.busy = 0
        self.reporter = Reporter(self.database, self.ended)
        self.heart = Heart(
            self.database, worker.lease, self.jobs, self.standby, lambda job: self.ended(job, _HAND_BACK, None)
        )
        self.unfinished: set[Job] = set()
        self.fetching = True
        self.news = Signal()  # for the fetcher
        self.releases = Signal()  # for the end
        self.stopping = anyio.Event()
        #: The look at the schema, which comes first.
        self.looking = anyio.CancelScope()
        self.grace = anyio.CancelScope()
        self.idler = Idler(worker, self.database, self.news)
        #: The fetcher waits for a place.
        self.full = False

    def begin(self) -> None:
        """Also where there is no database yet: a web application doesn't wait for it."""
        if not self.begun:
            self.begun = True
            self.started()

    def stop(self, *, hurry: bool) -> None:
        """Take on no more messages; the second time, in a hurry, don't wait for those at hand. In the event loop."""
        if not self.stopping.is_set():
            log.info("%s stops; to be finished: %d", self.worker.name, len(self.jobs))
        elif hurry:
            self.grace.cancel()
        self.stopping.set()
        self.looking.cancel()
        self.leave_to_others()
        self.news.set()

    def leave_to_others(self) -> int:
        """Hand back what stands by. Returns how many those are."""
        left = 0
        with contextlib.suppress(IndexError):  # threads take from it, too
            while True:
                self.decide(self.standby.popleft(), _HAND_BACK)
                left += 1
        return left

    async def to_its_end(self) -> int:
        """In a task of its own, which goes on when we are cancelled: that is a stop, the second time in a hurry."""
        task = asyncio.create_task(self())
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                # Shielded from a scope that has cancelled us: it would do so again and again.
                with anyio.CancelScope(shield=cancelled is not None):
                    await asyncio.wait([task])
            except asyncio.CancelledError as error:
                cancelled = error
                self.stop(hurry=True)
        unfinished = task.result()
        if cancelled is not None:
            raise cancelled
        return unfinished

    async def __call__(self) -> int:
        """Work until stopped. Returns how many messages were handed back unfinished."""
        worker = self.worker
        if not self.stopping.is_set():
            log.info("%s works on queue %r, %d at a time", worker.name, worker.queue, worker.concurrency)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.reporter.run)
            tasks.start_soon(self.reporter.wait_for_locked)
            tasks.start_soon(self.heart.beat)
            if self.idler.listener:
                tasks.start_soon(self.idler.listener.run)
            tasks.start_soon(self.fetch, tasks)
            try:
                self.begin()
                await self.stopping.wait()
                await self.finish()
            finally:
                # Also when it is cancelled or fails: threads that are busy go on by themselves, and nobody would extend
                # the leases of what they then begin, nor report how it ended.
                self.stopping.set()
                self.standby.clear()
            tasks.cancel_scope.cancel()
        log.info("%s has stopped; handed back unfinished: %d", worker.name, len(self.unfinished))
        return len(self.unfinished)

    async def fetch(self, tasks: TaskGroup) -> None:
        while not self.stopping.is_set():
            patience = self.patience()
            if patience <= 0:
                self.pace.rest()
                if left := self.leave_to_others():
                    message = "%s leaves to others what stands by (%d): the oldest has done so for more than %g s"
                    log.info(message, self.worker.name, left, self.pace.patience)
                continue
            free = self.free()
            # Where something stands by, the next call can wait until it is worth its while.
            if free <= 0 or (self.standby and free <= self.pace.prefetch // 2):
                self.full = True
                await self.news.wait(patience)
                self.full = False
                continue
            limit = min(free, _LARGEST_BATCH)
            asked = monotonic()
            batch = await self.dequeue(limit)
            now = monotonic()
            if batch:
                self.idler.in_vain = 0
            self.pace.dequeued(len(batch), standing=len(self.standby), seconds=now - asked, now=now)
            for job in batch:
                self.jobs.add(job)
                if self.stopping.is_set():
                    self.decide(job, _HAND_BACK)
                else:
                    job.since = now
                    self.standby.append(job)
            self.start(tasks)
            if len(batch) < limit:
                self.pace.rest()
                if self.free() > 0:
                    await self.idler.idle()
        self.fetching = False
        self.releases.set()

    def patience(self) -> float:
        """Seconds that what stands by may go on doing so: by the one that has done so for the longest."""
        try:
            oldest = self.standby[0]
        except IndexError:  # also when a thread has just taken the last one
            return float("inf")
        return oldest.since + self.pace.patience - monotonic()

    def free(self) -> int:
        """How many more messages there are places for."""
        places = self.worker.concurrency + self.pace.prefetch
        return places - (len(self.jobs) - min(len(self.reporter.unreported), places))

    def start(self, tasks: TaskGroup) -> None:
        """Run what stands by, as far as there are slots."""
        for _ in range(min(len(self.standby), self.worker.concurrency - self.busy)):
            self.busy += 1
            tasks.start_soon(self.work, tasks)

    async def dequeue(self, limit: int) -> list[Job]:
        statement = self.statements.get(limit)
        if statement is None:  # building one takes longer than sending it
            worker = self.worker
            statement = self.statements[limit] = not_durable(
                dequeue(
                    limit=limit,
                    lease=worker.lease,
                    queue=worker.queue,
                    worker=worker.name,
                    message_type=worker.message_type,
                )
            )

        def lease(session: Session) -> list[Job]:
            now = monotonic()
            return [Job(message, now) for message in session.scalars(statement)]

        batch = await self.database.insist(
            "dequeue", lease, alone=True, until=self.stopping, before=self.heart.catch_up
        )
        return batch or []

    async def work(self, tasks: TaskGroup) -> None:
        """In a slot: handle what stands by, until nothing does."""
        try:
            if self.handler.is_async:
                while self.standby:
                    await self.handle(self.standby.popleft())
            else:
                await self.threads.run(self.handle_in_thread)
        finally:
            self.busy -= 1
        # What came after the thread had looked.
        self.start(tasks)

    async def handle(self, job: Job) -> None:
        # A task of its own: it is cancelled by itself, and once.
        job.task = asyncio.create_task(self.handler.run_async(job.message, self.worker.async_session, job.settle))
        try:
            await asyncio.wait([job.task])
        finally:
            job.task.cancel()
        cancelled = job.task.cancelled()
        handled = Handled(CANCELLED_FROM_WITHIN) if cancelled else job.task.result()
        if job.given_up and (cancelled or handled.error is not None):  # its own, or a TaskGroup's: an answer to ours
            handled = Handled(_HAND_BACK, error=handled.error)
        elif cancelled:
            log.warning("%s: %s: the handler was cancelled from within", job, handled.decision.verdict)
        self.settle(job, handled)

    def handle_in_thread(self) -> None:
        """One after the other, without the event loop in between: it would have to change threads twice for each."""
        while True:
            try:
                job = self.standby.popleft()
            except IndexError:
                return
            handled = contextvars.copy_context().run(self.handler.run, job.message, self.worker.session)
            self.handled.append((job, handled))
            if not self.collecting:
                self.collecting = True
                self.threads.call_soon(self.collect)

    def collect(self) -> None:
        self.collecting = False  # first: what a thread adds from now on may be too late for this time
        while self.handled:
            self.settle(*self.handled.popleft())

    def settle(self, job: Job, handled: Handled) -> None:
        """The handler has ended: see to it that its decision gets into the database."""
        if handled.outcome is None:
            self.decide(job, handled.decision)
        else:
            self.ended(job, handled.decision, handled.outcome, settled=True)
        if isinstance(handled.error, UnreadablePayload):  # nothing was called that a traceback could lead to
            log.warning("%s: %s: %s", job, handled.decision.verdict, handled.error.__cause__)
        elif handled.error is not None:
            log.warning("%s: %s", job, handled.decision.verdict, exc_info=handled.error)

    def decide(self, job: Job, decision: Decision) -> None:
        if not job.decided:
            job.decided = True
            self.reporter.add(job, decision)
            if self.full:  # else nothing more is there, as long as this isn't reported; or the fetcher will see
                self.news.set()

    def ended(self, job: Job, decision: Decision, outcome: Outcome | None, *, settled: bool = False) -> None:
        """Its end is in the database, or there is no point in trying.

        :param settled: in the handler's own transaction, which was rolled back if the lease was over.
        """
        job.decided = True
        self.jobs.discard(job)
        has_effect = outcome is not None and outcome in decision.outcomes
        if outcome is not None and has_effect == (decision is not _HAND_BACK):
            self.unfinished.discard(job)  # it was finished after all, or somebody else has it
        self.news.set()
        self.releases.set()
        if outcome is Outcome.DEAD:
            log.error("%s: the message is a dead letter now; `fairqueue dead list` shows it", job)
        elif outcome is not None and not has_effect and decision is not _HAND_BACK:
            log.warning(
                "%s: it was over already (%s), as its lease ran out, it was cancelled, or the handler ended it%s",
                job,
                outcome,
                ": what the handler wrote in its session is rolled back" if settled else "",
            )

    async def finish(self) -> None:
        """Give the jobs their time, then leave the rest to others."""
        with anyio.move_on_after(self.worker.grace), self.grace:
            while self.jobs or self.fetching:
                await self.releases.wait()
        self.collect()  # what threads have finished in this moment
        for job in list(self.jobs):
            if job.decided or (job.task is not None and job.task.done()):
                continue  # it is reported, or about to be, in the next turn of the event loop
            self.unfinished.add(job)
            log.warning("%s is handed back unfinished", job)
            if job.task is not None:
                job.give_up()
            else:
                self.decide(job, _HAND_BACK)
        with anyio.move_on_after(_LAST_WORDS):
            while self.jobs or self.fetching:
                await self.releases.wait()
        for job in self.jobs:
            log.error("%s could be neither finished nor handed back: it comes back when its lease is over", job)
        self.unfinished |= self.jobs
