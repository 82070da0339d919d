"""Processes that are a `fairqueue.Worker`, and the faults that befall them: killed, stopped, told to stop."""

import asyncio
import contextlib
import logging
import os
import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.faults.crew import Crew, context, nothing
from tests.faults.place import LEASE
from tests.faults.troubles import Troubles

PROCESSES = 4
EFFECT = text("INSERT INTO public.effect VALUES (:id, :attempt)")


def pause_and_fail(message: fq.LeasedMessage[Any]) -> float:
    """What may become of a message: how long it takes, or an error. Rarely it takes longer than its lease."""
    chance = random.random()  # noqa: S311
    if chance < 0.03:
        raise KeyError(message.id)
    if chance < 0.06:
        raise fq.Retry("not yet", delay=0.01)
    return LEASE * 1.2 if chance < 0.065 else chance / 20


def plain(message: fq.LeasedMessage[Any], session: Session) -> object:
    session.execute(EFFECT, {"id": message.id, "attempt": message.attempt})
    time.sleep(pause_and_fail(message))
    return fq.Defer(state=1) if message.state is None and message.id % 10 == 0 else None


async def asynchronous(message: fq.LeasedMessage[Any], session: AsyncSession) -> object:
    await session.execute(EFFECT, {"id": message.id, "attempt": message.attempt})
    await asyncio.sleep(pause_and_fail(message))
    return fq.Defer(state=1) if message.state is None and message.id % 10 == 0 else None


def work(url: str, name: str, is_async: bool, log: Path) -> None:
    """What a process runs."""
    logging.basicConfig(filename=log, level="INFO", format="%(asctime)s %(name)s %(levelname)s %(message)s")
    make: Any = create_async_engine if is_async else create_engine
    app = fq.Worker(make(url, pool_size=8), concurrency=4, lease=LEASE, poll=0.2, grace=0.5, name=name)
    app.handler(asynchronous if is_async else plain)
    os._exit(app.run())  # in the middle of what a process of multiprocessing does at its end


class Workers(Crew):
    """Half of them with plain handlers, half with async ones."""

    def __init__(self, url: str, seconds: float, folder: Path) -> None:
        self.url, self.folder = url, folder
        first = context.Process(target=nothing)
        first.start()
        first.join()
        self.until = time.monotonic() + seconds
        self.started = 0
        self.ended: list[int | None] = []
        self.processes = [self.start() for _ in range(PROCESSES)]

    def start(self) -> BaseProcess:
        self.started += 1
        name = f"worker{self.started}"
        arguments = (self.url, name, self.started % 2 == 0, self.folder / f"{name}.log")
        process: BaseProcess = context.Process(target=work, args=arguments, daemon=True)
        process.start()
        return process

    def replace_the_dead(self) -> None:
        """All that were killed, or have ended as they were told to."""
        for number, process in enumerate(self.processes):
            if process.exitcode is not None:
                process.join()
                self.ended.append(process.exitcode)
                self.processes[number] = self.start()

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join(30)
            self.ended.append(process.exitcode)

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in self.folder.glob("worker*.log"))


class WorkerTroubles(Troubles):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        del self.kinds[self.set_clock]
        self.kinds[self.tell_to_stop] = 4

    def tell_to_stop(self) -> None:
        """Once, or as somebody does who is in a hurry."""
        process = self.crew.signal(self.dice, signal.SIGTERM)
        if process is not None and process.pid is not None and self.dice.random() < 0.3:
            with contextlib.suppress(ProcessLookupError):  # the first one was enough
                os.kill(process.pid, signal.SIGTERM)
