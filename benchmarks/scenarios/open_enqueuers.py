"""Open enqueuers

Transactions that have enqueued stay open while others are served. Each of them enqueues to three tenants, in an order
of its own, and stays open. What was committed before, for the same tenants, is eligible all the time. Waits are those
for locks that last longer than 20 ms, of enqueuers and consumers, as another connection sees them; and what gives up
after a second. Each figure is that of the worst of five runs. Ours have a minute to enqueue, as none of them waits for
another, others two seconds, as some would wait for each other for good.

At an earlier revision, one of five runs had 12 statements of ours that waited, whose locks weren't noted; VACUUM could
still lock everybody out there to cut off empty pages.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psycopg

from benchmarks.measuring import Bench, Case, Size
from benchmarks.records import Record, Wanted, at_least, at_most, value_record
from benchmarks.systems import LIMIT, OURS, System

_SYSTEMS = {
    "quick": (OURS, LIMIT, "channel-row"),
    "full": (OURS, LIMIT, "channel-row", "partition-by", "blocks"),
    "tiny": (OURS, "channel-row"),
}
#: Transactions, seconds that they stay open, seconds that they have to enqueue. Where they wait for each other, the
#: server looks for deadlocks after a second.
_NUMBERS = {"quick": (50, 1.0, 0.3), "full": (50, 10.0, 2.0), "tiny": (4, 0.3, 0.3)}
#: Seconds that ours have to enqueue: none of them waits for another, but the machine may be busy.
_PATIENCE = 60.0
_TENANTS = 50
_REPEATS = {"quick": 5, "full": 5, "tiny": 1}
_EACH = 20  # messages of each tenant that are there before


def cases(size: Size) -> list[Case]:
    enqueuers, seconds, setup = _NUMBERS[size.name]
    return [
        Case(
            f"{name}, {enqueuers} transactions open for {seconds:g} s",
            partial(measure, name),
            _REPEATS[size.name] * (seconds + setup + 0.6),
        )
        for name in _SYSTEMS[size.name]
    ]


@dataclass
class _Enqueuer:
    """A transaction that enqueues, stays open until it is over, and commits in the end."""

    system: System
    connection: psycopg.Connection[Any]
    rows: list[tuple[str, str]]
    over: threading.Event
    #: It has enqueued, or gives up.
    done: threading.Event = field(default_factory=threading.Event)
    is_open: bool = False

    def run(self) -> bool:
        """Returns whether it met a deadlock."""
        try:
            with self.connection.transaction():
                for row in self.rows:
                    self.system.enqueue(self.connection, [row])
                self.is_open = True
                self.done.set()
                self.over.wait()
        except psycopg.errors.DeadlockDetected:
            return True
        except psycopg.errors.LockNotAvailable:
            pass  # seen by the watch
        finally:
            self.done.set()
        return False


def measure(name: str, bench: Bench) -> Iterable[Record]:
    if name not in bench.systems:
        return
    count, seconds, _setup = _NUMBERS[bench.size.name]
    runs = [_once(bench, bench.systems[name], number) for number in range(_REPEATS[bench.size.name])]
    case: dict[str, int | str] = {"transactions": count, "seconds": f"{seconds:g}"}
    figures: list[tuple[str, str, Wanted, Callable[[list[float]], float]]] = [
        ("share of eligible messages served meanwhile", "share", at_least(1), min),
        ("statements that waited for a lock", "statements", at_most(0), max),
        ("deadlocks", "deadlocks", at_most(0), max),
    ]
    for number, (figure, unit, wanted, worst) in enumerate(figures):
        found = [run[number] for run in runs]
        goal = wanted if name == OURS else None
        yield value_record(figure, name, case, found, unit, wanted=goal, value=worst(found))


def _once(bench: Bench, system: System, seed: int) -> tuple[float, float, float]:
    count, seconds, setup = _NUMBERS[bench.size.name]
    patience = _PATIENCE if system.name == OURS else setup
    dice = random.Random(seed)  # noqa: S311
    tenants = [f"t{i}" for i in range(_TENANTS)]
    over, looked = threading.Event(), threading.Event()
    with bench.place.database(system) as dsn, ExitStack() as stack:
        consumer, watcher, *producers = (stack.enter_context(system.connected(dsn)) for _ in range(count + 2))
        system.enqueue(consumer, [(tenant, bench.payload) for tenant in tenants for _ in range(_EACH)])
        eligible = system.backlog(consumer)
        for connection in (consumer, *producers):
            connection.execute(
                f"SET lock_timeout = {1000 if connection is consumer else int((patience + seconds) * 1000)}"
            )
        enqueuers = [
            _Enqueuer(system, producer, [(tenant, bench.payload) for tenant in dice.sample(tenants, 3)], over)
            for producer in producers
        ]
        # Its threads are waited for before the connections are closed.
        threads = stack.enter_context(ThreadPoolExecutor(count + 1))
        try:
            watching = threads.submit(_look, watcher, looked)
            enqueuing = [threads.submit(enqueuer.run) for enqueuer in enqueuers]
            # Those that wait for each other don't get there; ours never do.
            until = time.monotonic() + patience
            for enqueuer in enqueuers:
                enqueuer.done.wait(max(0.0, until - time.monotonic()))
            there = sum(enqueuer.is_open for enqueuer in enqueuers)
            if system.name == OURS and there < count:
                over.set()
                for result in enqueuing:
                    result.result()  # raises what kept it from that
                raise AssertionError(f"only {there} of {count} transactions have enqueued")
            served = _serve(system, consumer, eligible, seconds)
            looked.set()
            waits = watching.result()
        finally:
            looked.set()
            over.set()
        deadlocks = sum(enqueuer.result() for enqueuer in enqueuing)
    return served / eligible, float(waits), float(deadlocks)


def _serve(system: System, consumer: Any, eligible: int, seconds: float) -> int:
    """How many are served meanwhile."""
    # Of several calls, one that gives up would take the others' messages along.
    batch = 10 if system.batches else 1
    served, until = 0, time.monotonic() + seconds
    while served < eligible and time.monotonic() < until:
        try:
            leases = system.dequeue(consumer, batch)
            served += system.complete(consumer, leases)
        except psycopg.errors.LockNotAvailable:
            continue  # seen by the watch; the lease stays
        if not leases:
            time.sleep(0.01)
    # The whole time, for those that come late.
    time.sleep(max(0.0, until - time.monotonic()))
    return served


def _look(connection: psycopg.Connection[Any], looked: threading.Event) -> int:
    """Looks again and again who waits for a lock; how many statements did."""
    waits: set[tuple[Any, ...]] = set()  # backend, and beginning of its wait
    while not looked.wait(0.02):
        waits.update(
            connection.execute(
                "SELECT l.pid, l.waitstart FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid"
                " WHERE a.datname = current_database() AND NOT l.granted"
                " AND l.waitstart < clock_timestamp() - interval '20 ms'"
            ).fetchall()
        )
    return len(waits)
