"""A worker process: takes a batch, works on one file after the other, and completes each with its result."""

from __future__ import annotations

import sys
from multiprocessing import parent_process
from multiprocessing.synchronize import Event, Semaphore

from sqlalchemy import Engine, func, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from .queues import QUEUES, Job, Queue
from .tables import Place, Result
from .work import examine

#: Seconds between two looks into an empty queue.
_IDLE = 0.01


def work(place: Place, run: str, batch: int, ready: Semaphore, stop: Event) -> None:
    """The whole life of a worker process: until it is told to stop, or the demo is gone."""
    queue = QUEUES[run]
    demo = parent_process()
    try:
        with place.engine() as engine:
            with Session(engine) as session:
                queue.backlog(session)  # connected
            ready.release()
            while not stop.is_set() and (demo is None or demo.is_alive()):
                if not serve(engine, queue, run, batch, stop):
                    stop.wait(_IDLE)
    except DBAPIError as error:
        sys.exit(f"A worker has lost the database: {error.orig}")


def serve(engine: Engine, queue: Queue, run: str, batch: int, stop: Event) -> int:
    """Take one batch and work on it; says how many messages it had."""
    with Session(engine) as session, session.begin():
        jobs = queue.dequeue(session, batch)
        # In the transaction, while it is our turn: the times of two batches are in the order in which they were taken.
        handed_at = session.scalar(select(func.clock_timestamp()))
    for number, job in enumerate(jobs):
        if stop.is_set():
            break
        result = Result(handed_at=handed_at, place_in_batch=number, **_columns(run, job))
        with Session(engine) as session:
            session.add(result)
            if queue.complete(session, job):
                session.commit()  # result and completion, or neither
    return len(jobs)


def _columns(run: str, job: Job) -> dict[str, object]:
    findings = examine(job.path)
    return {
        "run": run,
        "tenant": job.tenant,
        "path": job.path,
        "enqueued_at": job.enqueued_at,
        **vars(findings),
    }
