"""Flood

One tenant enqueues many messages, a transaction each, while nobody dequeues; then each of 50 others one. The figure is
the time of the first dequeue, which has all that news before it, over the median of the next 200: the first one of a
worker must not wait for a flood. The connection has dequeued from another queue before, so its plans are made.
synchronous_commit is off.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from statistics import median

import psycopg

from benchmarks.measuring import Bench, Case, Size, open_connections
from benchmarks.records import Record, ratio_record
from benchmarks.systems import OURS

_MESSAGES = {"quick": 50_000, "full": 500_000, "tiny": 100}
_BATCHES = (1, 100)
_OTHERS = 50
_NEXT = {"quick": 200, "full": 200, "tiny": 2}

_ENQUEUE = """
DO $$
BEGIN
    FOR number IN 1 .. {} LOOP
        INSERT INTO fairqueue.message (channel) VALUES ('flood');
        COMMIT;
    END LOOP;
END
$$
"""


def cases(size: Size) -> list[Case]:
    messages = _MESSAGES[size.name]
    return [
        Case(f"batch {batch}", partial(measure, batch), size.rounds * (1 + messages * 0.00006)) for batch in _BATCHES
    ]


def measure(batch: int, bench: Bench) -> Iterable[Record]:
    messages = _MESSAGES[bench.size.name]
    for system in bench.taking_part([OURS]):
        first, rest = [], []
        for _ in range(bench.size.rounds):
            with (
                bench.databases([system]) as databases,
                open_connections(bench.systems, databases) as connections,
            ):
                connection = connections[system.name]
                times = _run(connection, messages, batch, _NEXT[bench.size.name])
            first.append(times[0])
            rest.append(median(times[1:]))
        case: dict[str, int | str] = {"messages": messages, "batch": batch}
        yield ratio_record("first dequeue", system.name, case, first, "ms", reference="the next ones", of=rest)


def _run(connection: psycopg.Connection, messages: int, batch: int, rest: int) -> list[float]:
    connection.execute("SET synchronous_commit = off")
    connection.execute("INSERT INTO fairqueue.message (queue, channel) VALUES ('warm', 'warm')")
    for _ in range(10):
        _dequeue(connection, "warm", 1)
    connection.execute(_ENQUEUE.format(messages).encode())
    for number in range(_OTHERS):
        connection.execute("INSERT INTO fairqueue.message (channel) VALUES (%s)", (f"quiet{number}",))
    return [_dequeue(connection, "default", batch) for _ in range(1 + rest)]


def _dequeue(connection: psycopg.Connection, queue: str, limit: int) -> float:
    start = time.perf_counter()
    connection.execute("SELECT * FROM fairqueue.message_dequeue(%s, %s)", (queue, limit)).fetchall()
    return (time.perf_counter() - start) * 1000
