"""What peers have in common: a package that may be missing, an event loop for those that need one, their own workers.

A peer is used by its own public API, with the settings that its documentation gives for speed. Where it has calls to
fetch and to complete, consumers use these, as they do ours. Where it only has a worker, a process runs that, with a
handler that does nothing.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from multiprocessing.connection import Connection
from typing import Any, ClassVar, Self, TypeVar

import psycopg

from benchmarks.processes import answer
from benchmarks.systems.base import LEASE, Lease, System, value_of

T = TypeVar("T")

#: Seconds between two looks at whether a worker has finished.
_LOOK = 0.005
#: Seconds in which a worker has to begin.
_PATIENCE = 60.0


class Peer(System):
    """A queue from a package registry."""

    #: Its distribution.
    package: ClassVar[str]
    schedules = False

    def missing(self) -> str | None:
        if self.version() is None:
            return f"{self.package} isn't installed: pip install 'fairqueue[benchmarks]'"
        return None

    def prepare(self) -> str | None:
        """Get what pip doesn't; if that can't be had, why."""
        return None

    def version(self) -> str | None:
        """What is installed of it; None: nothing."""
        try:
            return installed(self.package)
        except PackageNotFoundError:
            return None


class Client:
    """A connection of a package that wants an event loop; all its calls are made in this one's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, api: Any, close: Callable[[], Awaitable[Any]]) -> None:
        self.api = api
        self._loop = loop
        self._close = close

    @classmethod
    def open(cls, opening: Coroutine[Any, Any, tuple[Any, Callable[[], Awaitable[Any]]]]) -> Self:
        """A client of what is opened: its API, and what closes it."""
        loop = asyncio.new_event_loop()
        return cls(loop, *loop.run_until_complete(opening))

    def run(self, awaitable: Awaitable[T]) -> T:
        return self._loop.run_until_complete(awaitable)

    def close(self) -> None:
        async def closing() -> None:
            await self._close()

        self.run(closing())
        self._loop.close()


class Working(Peer):
    """One that is used by its worker alone."""

    #: How many messages the worker has at a time, if it can be told.
    at_a_time: int = 4
    #: How many messages aren't completed.
    backlog_sql: ClassVar[str]

    @abstractmethod
    def work(self, dsn: str, handle: Callable[[str], None], stop: threading.Event) -> None:
        """Run its worker until `stop` is set. Its handler calls `handle(channel)` and does nothing else."""

    def left(self, dsn: str) -> int:
        """How many messages aren't completed."""
        with psycopg.connect(dsn, autocommit=True) as connection:
            return int(value_of(connection, self.backlog_sql))

    def dequeue(self, connection: Any, n: int, *, lease: float = LEASE, timed: bool = False) -> list[Lease]:
        raise NotImplementedError(f"{self.name} is used by its worker")

    def complete(self, connection: Any, leases: Sequence[Lease]) -> int:
        raise NotImplementedError(f"{self.name} is used by its worker")

    def backlog(self, connection: Any) -> int:
        raise NotImplementedError(f"{self.name} is used by its worker")


@dataclass
class Served:
    """What a worker did."""

    #: Channels, in the order in which their messages began.
    order: list[str]
    #: How many were completed.
    completed: int
    #: Messages completed in a second, from the first one's beginning until none was left or it was stopped.
    rate: float


def work(pipe: Connection, system: Working) -> None:
    """The life of a worker process. Sent a DSN and seconds, it works until nothing is left or these are over."""
    logging.disable(logging.WARNING)  # Some warn of how they are stopped.
    answer(pipe, lambda order: serve(system, *order), lambda _: system.name)


def serve(system: Working, dsn: str, seconds: float) -> Served:
    stop = threading.Event()
    begun: list[str] = []
    first: list[float] = []

    def handle(channel: str) -> None:
        if not first:
            first.append(time.monotonic())
        begun.append(channel)

    with psycopg.connect(dsn, autocommit=True) as connection, ThreadPoolExecutor(1) as watcher:
        watching = watcher.submit(_watch, connection, system.backlog_sql, begun, first, seconds=seconds, stop=stop)
        try:
            system.work(dsn, handle, stop)
        finally:
            stop.set()
        completed, ended = watching.result()
    return Served(begun, completed, completed / (ended - first[0]))


def _watch(
    connection: psycopg.Connection[Any],
    backlog_sql: str,
    begun: Sequence[str],
    first: Sequence[float],
    *,
    seconds: float,
    stop: threading.Event,
) -> tuple[int, float]:
    """Stop it when nothing is left or the time is over. How many were completed then, and when that was."""
    total, until = value_of(connection, backlog_sql), time.monotonic() + _PATIENCE
    while not stop.wait(_LOOK):
        if first:
            until = first[0] + seconds
        now = time.monotonic()
        if now > until or len(begun) >= total:
            left = value_of(connection, backlog_sql)
            if now > until or not left:
                stop.set()
                if not first:
                    break
                return total - left, now
    raise TimeoutError(f"no message began within {_PATIENCE:g} s")
