"""The race: workers for each queue, the same uploads for both, and a look at the progress until both are empty.

The queues run side by side, so that whatever else the machine does hits both alike.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import get_context
from multiprocessing.context import SpawnProcess

from sqlalchemy import Engine, func, insert, select
from sqlalchemy.orm import Session

from fairqueue.cli.signals import ignored
from fairqueue.errors import FairqueueError

from .load import NOISY, Load
from .queues import QUEUES
from .tables import Place, Result, Upload
from .worker import work

#: For each queue, how many files are done: of the noisy tenant, and of the quiet ones.
Done = Mapping[str, tuple[int, int]]

_LOOK = 0.1  # seconds between two looks at the progress
_GRACE = 2.0  # seconds for the workers to finish their files


class WorkersGone(FairqueueError):
    """The workers of a queue have ended before the work."""


def race(place: Place, load: Load, *, workers: int, batch: int, watch: Callable[[Done], None]) -> None:
    """Send the load through both queues, each with ``workers`` of its own, and return when all is done."""
    with place.engine() as engine, _running(place, workers, batch) as processes:
        watch(dict.fromkeys(QUEUES, (0, 0)))
        upload(engine, load)
        while True:
            with Session(engine) as session:
                left = {name for name, queue in QUEUES.items() if queue.backlog(session)}
                watch({name: _done(session, name) for name in QUEUES})
            if not left:
                return
            for name in left:
                if not any(process.is_alive() for process in processes[name]):
                    raise WorkersGone(f"all workers of {QUEUES[name].label} have ended before the work")
            time.sleep(_LOOK)


def upload(engine: Engine, load: Load) -> None:
    """The tenants upload one after the other, each in a transaction that also enqueues: both, or neither."""
    for tenant, paths in load.uploads.items():
        for name, queue in QUEUES.items():
            with Session(engine) as session, session.begin():
                session.execute(insert(Upload), [{"run": name, "tenant": tenant, "path": path} for path in paths])
                queue.enqueue(session, tenant, paths)


@contextlib.contextmanager
def _running(place: Place, workers: int, batch: int) -> Iterator[dict[str, list[SpawnProcess]]]:
    """Worker processes that are connected and looking for work; none is left afterwards."""
    context = get_context("spawn")  # a forked one would share our connections
    ready, stop = context.Semaphore(0), context.Event()
    processes = {
        name: [
            context.Process(target=work, args=(place, name, batch, ready, stop), daemon=True) for _ in range(workers)
        ]
        for name in QUEUES
    }
    everyone = [process for team in processes.values() for process in team]
    try:
        # Inherited: Ctrl-C, or what else a whole group of processes is sent, is for the demo alone, which then stops
        # its workers. One that died of it while it looked at `stop` would leave that locked.
        with ignored():
            for process in everyone:
                process.start()
        for _ in everyone:
            while not ready.acquire(timeout=_LOOK):
                if any(process.exitcode is not None for process in everyone):
                    raise WorkersGone("a worker could not start")
        yield processes
    finally:
        stop.set()
        deadline = time.monotonic() + _GRACE
        for process in everyone:
            if process.pid is not None:
                process.join(max(0, deadline - time.monotonic()))
                process.kill()  # if it is still there; its transaction is rolled back
                process.join()


def _done(session: Session, name: str) -> tuple[int, int]:
    noisy = func.count().filter(Result.tenant == NOISY)
    counted = session.execute(select(noisy, func.count() - noisy).where(Result.run == name)).one()
    return counted[0], counted[1]
