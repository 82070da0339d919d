"""Consumers: processes of their own, one connection each, that start to dequeue and complete at the same moment.

The processes are made once for a run (they take a second to start) and then told what to do::

    with Consumers() as consumers:
        results = consumers.run(4, dsn, system, Task(batch=10, seconds=1.0))
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Self

import psycopg

from .processes import Child, ProcessFailed, answer
from .systems import SYSTEMS
from .systems.base import value_of

#: Seconds from "go" to the start, for everybody to have heard it.
_HEADSTART = 0.05


@dataclass(frozen=True)
class Task:
    """Dequeue and complete in batches, for so many seconds or until nothing is left."""

    batch: int
    #: None: until the queue is empty.
    seconds: float | None = None
    #: Keep the order of service.
    timed: bool = False
    #: Begin with so many calls that don't count, for connections and plans to be warm.
    warm: int = 6
    #: PostgreSQL's synchronous_commit; or "completions": off for dequeues alone, as a lost lease is but a redelivery.
    #: fq.Worker does it so.
    durability: str = "on"
    #: Seconds that the work on each message takes, in which the consumer sleeps, between dequeue and completion.
    work: float = 0.0


@dataclass
class Outcome:
    """What one consumer did. Times are time.monotonic() of this machine, which all its processes share."""

    served: int = 0
    started: float = 0.0
    #: The same moment as Unix time, by the clock that the order is by.
    begun: float = 0.0
    #: When the last of them was completed.
    ended: float = 0.0
    #: (Unix time, number of the call, place in the batch, channel), where it was asked for. The time is that of the
    #: server, or of this machine when the call has returned, where a system doesn't tell.
    order: list[tuple[float, int, int, str]] = field(default_factory=list)


class Consumers:
    """A pool of processes, grown as needed. Leaving the block ends them."""

    def __init__(self) -> None:
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End all of them; the next run starts new ones."""
        for child in self._children:
            child.close()  # all of them, before the first is waited for
        for child in self._children:
            child.end()
        self._children.clear()

    def run(self, count: int, dsn: str, system: str, task: Task) -> list[Outcome]:
        """Have so many of them work on the task, together."""
        try:
            return self._run(count, dsn, system, task)
        except ProcessFailed:
            self.end()  # Some are still at it.
            raise

    def _run(self, count: int, dsn: str, system: str, task: Task) -> list[Outcome]:
        fresh = [Child(consume) for _ in range(count - len(self._children))]
        self._children += fresh
        for child in fresh:
            child.receive()  # it has started
        team = self._children[:count]
        for child in team:
            child.send((dsn, system, task))
        for child in team:
            child.receive()  # connected, and warm
        start = time.monotonic() + _HEADSTART
        for child in team:
            child.send(start)
        return [child.receive() for child in team]

    def release(self) -> None:
        """Have all of them close their connections."""
        for child in self._children:
            child.send(None)
            child.receive()


def consume(pipe: Connection) -> None:
    """The whole life of a consumer process."""
    # They stay open while others are measured, as those of workers do: what a session plans, it plans once.
    pairs: dict[tuple[str, str, str], tuple[Any, Any]] = {}
    with contextlib.ExitStack() as stack:

        def act(order: tuple[str, str, Task] | None) -> Outcome | bool:
            if order is None:
                pairs.clear()
                stack.close()
                return True
            dsn, name, task = order
            place = dsn, name, task.durability
            pair = pairs[place] = pairs.get(place) or connect(stack, *place)
            return work(pipe, pair, name, task)

        answer(pipe, act, lambda order: order[1] if order else "its connections")


def connect(stack: contextlib.ExitStack, dsn: str, system: str, durability: str) -> tuple[Any, Any]:
    """What it dequeues by and what it completes by: one connection, or two where they differ in durability."""

    def one(durability: str) -> Any:
        connection = stack.enter_context(SYSTEMS[system].connected(dsn))
        if isinstance(connection, psycopg.Connection):
            connection.execute("SELECT set_config('synchronous_commit', %s, false)", (durability,))
        return connection

    if durability == "completions":
        return one("off"), one("on")
    only = one(durability)
    return only, only


def work(pipe: Connection, pair: tuple[Any, Any], name: str, task: Task) -> Outcome:
    system, outcome = SYSTEMS[name], Outcome()
    taking, ending = pair
    for _ in range(task.warm):
        system.complete(ending, system.dequeue(taking, task.batch, timed=task.timed))
    ahead = _ahead(taking) if task.timed else 0.0
    pipe.send(True)
    start = pipe.recv()
    time.sleep(max(0.0, start - time.monotonic()))
    outcome.started = outcome.ended = time.monotonic()
    outcome.begun = time.time() + ahead
    until = None if task.seconds is None else start + task.seconds
    for number, batch in enumerate(_batches(system, taking, task, until)):
        if task.timed:
            now = time.time()
            for n, lease in enumerate(batch):
                call, place = (number, n) if system.batches else (number * task.batch + n, 0)
                outcome.order.append((lease.at or now, call, place, lease.channel))
        time.sleep(task.work * len(batch))
        outcome.served += system.complete(ending, batch)
        outcome.ended = time.monotonic()
    return outcome


def _ahead(connection: Any) -> float:
    """Seconds that the server's clock is ahead of ours; 0 where the times of an order are ours."""
    if not isinstance(connection, psycopg.Connection):
        return 0.0
    now: float = value_of(connection, "SELECT extract(epoch FROM clock_timestamp())::double precision")
    return now - time.time()


def _batches(system: Any, connection: Any, task: Task, until: float | None) -> Iterator[list[Any]]:
    """Batches, none of them empty, until the time is over or nothing is left."""
    while until is None or time.monotonic() < until:
        if batch := system.dequeue(connection, task.batch, timed=task.timed):
            yield batch
        elif system.backlog(connection) == 0:
            return
        else:
            time.sleep(0.001)  # somebody else holds what is left


def rate(outcomes: list[Outcome]) -> float:
    """Messages a second of all of them together."""
    seconds = max(o.ended for o in outcomes) - min(o.started for o in outcomes)
    return sum(o.served for o in outcomes) / seconds
