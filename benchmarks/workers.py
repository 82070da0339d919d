"""fq.Worker in a process of its own, and producers in another one that keep to a schedule.

The schedule is fixed beforehand: a queue that is slow does not slow the arrivals down, and so hides nothing
(Schroeder, Wierman, Harchol-Balter: *Open Versus Closed: A Cautionary Tale*, NSDI 2006; Gil Tene calls the mistake
*coordinated omission*).
Times are time.monotonic() of this machine, which all its processes share.
"""

from __future__ import annotations

import contextlib
import queue as queues
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import psycopg
from sqlalchemy import create_engine

import fairqueue as fq
from fairqueue import embedded

from .processes import answer

#: Messages that are worked on at a time, and how long each takes, asleep.
CONCURRENCY = 2
SERVICE = 0.005
#: Seconds after which a message that hasn't begun is missing.
_MISSING = 60.0
#: Connections of the producers: more than ever wait for the disk at once, or they would fall behind.
_PRODUCERS = 4
#: Seconds until the schedule begins, for all of them to be there.
_HEADSTART = 0.05


class Arrival(NamedTuple):
    """A message to come."""

    #: Seconds from the beginning.
    at: float
    queue: str
    channel: str


class Sent(NamedTuple):
    #: Seconds that its transaction began late.
    late: float
    #: When its commit began.
    committed: float


def work(pipe: Connection, dsn: str, queue: str, notify: bool) -> None:
    """The life of a worker process. Sent a number, it waits for as many messages: number and beginning of each."""
    begun: queues.SimpleQueue[tuple[int, float]] = queues.SimpleQueue()
    engine = create_engine(embedded.sqlalchemy_url(dsn))
    app = fq.Worker(engine, queue=queue, concurrency=CONCURRENCY, notify=notify)

    @app.handler
    def handle(message: fq.LeasedMessage) -> None:
        begun.put((message.payload, time.monotonic()))
        time.sleep(SERVICE)

    def wait(expected: int) -> list[tuple[int, float]]:
        try:
            return [begun.get(timeout=_MISSING) for _ in range(expected)]
        except queues.Empty:
            raise TimeoutError(f"a message didn't begin within {_MISSING:g} s") from None

    with app:
        answer(pipe, wait, lambda _: f"queue {queue}")


def produce(pipe: Connection, dsn: str) -> None:
    """The life of the producers' process. Sent arrivals, it makes them; a message's payload is its number."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(psycopg.connect(dsn)) for _ in range(_PRODUCERS)]
        threads = stack.enter_context(ThreadPoolExecutor(_PRODUCERS))

        def make(arrivals: Sequence[Arrival]) -> list[Any]:
            start, next_one = time.monotonic() + _HEADSTART, count()
            sent: list[Any] = [None] * len(arrivals)

            def keep_to(connection: psycopg.Connection[Any]) -> None:
                while (number := next(next_one)) < len(arrivals):
                    due = start + arrivals[number].at
                    time.sleep(max(0.0, due - time.monotonic()))
                    sent[number] = send(connection, arrivals[number], number, due)

            list(threads.map(keep_to, connections))
            return sent

        answer(pipe, make, lambda _: "a producer")


def send(connection: psycopg.Connection[Any], arrival: Arrival, number: int, due: float) -> Sent:
    late = time.monotonic() - due
    connection.execute(
        "INSERT INTO fairqueue.message (queue, channel, payload) VALUES (%s, %s, to_jsonb(%s::integer))",
        (arrival.queue, arrival.channel, number),
        prepare=True,
    )
    committed = time.monotonic()
    connection.commit()
    return Sent(late, committed)
