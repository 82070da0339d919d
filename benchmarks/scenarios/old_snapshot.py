"""Old snapshot

A transaction stays open while messages pass, and vacuum can't remove what is dead: a REPEATABLE READ transaction is
open in each database, as that of a dump would be. Before each tenth of the messages is served, as many are enqueued,
1,000 in a statement. The figure is the rate of each tenth over that of the first, one consumer, tenth by tenth by
turns. All of that is done in new databases, five times; the median counts. synchronous_commit is off.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import psycopg

from benchmarks.measuring import Bench, Case, Size, open_connections, vacuum
from benchmarks.records import Record, Wanted, at_least, at_most, value_record
from benchmarks.systems import LIMIT, OURS, Fill, System

_SYSTEMS = (OURS, LIMIT)
_MESSAGES = {"quick": 50_000, "full": 500_000, "tiny": 200}
_BATCH = {"quick": 100, "full": 100, "tiny": 10}
#: Seconds a message, roughly: the more have passed, the slower those are that walk over them.
_ESTIMATE = {"quick": 0.0002, "full": 0.0004, "tiny": 0.001}
_ROUNDS = {"quick": 5, "full": 5, "tiny": 1}
_CHANNELS = 1_000
#: Messages that a statement enqueues.
_STATEMENT = 1_000
_WARM = 20


def cases(size: Size) -> list[Case]:
    messages = _MESSAGES[size.name]
    return [Case(f"{messages:,} messages", measure, _ROUNDS[size.name] * (3 + messages * _ESTIMATE[size.name]))]


def measure(bench: Bench) -> Iterable[Record]:
    messages, batch = _MESSAGES[bench.size.name], _BATCH[bench.size.name]
    systems = bench.taking_part(_SYSTEMS)
    runs: dict[str, list[list[float]]] = {system.name: [] for system in systems}
    for number in range(_ROUNDS[bench.size.name]):
        for name, run in _run(bench, systems, messages, batch, number).items():
            runs[name].append(run)
    for name, found in runs.items():
        case: dict[str, int | str] = {"batch": batch, "messages": messages}
        for tenth, rates in enumerate(zip(*found, strict=True), 1):
            yield value_record("rate of a tenth", name, {**case, "tenth": tenth}, rates, "1/s")
        # That the limit falls is what shows that the load was one.
        wanted: Wanted | None = {OURS: at_least(0.7), LIMIT: at_most(0.3)}.get(name) if messages >= 500_000 else None
        ratios = [rates[-1] / rates[0] for rates in found]
        yield value_record("last tenth over the first", name, case, ratios, "ratio", wanted=wanted)


def _run(bench: Bench, systems: Sequence[System], messages: int, batch: int, number: int) -> dict[str, list[float]]:
    """The rates of each system's tenths; who begins with a tenth in one run doesn't in the next."""
    rates: dict[str, list[float]] = {system.name: [] for system in systems}
    with (
        bench.databases(systems) as databases,
        open_connections(bench.systems, databases) as connections,
        ExitStack() as stack,
    ):
        for system in systems:
            connection = connections[system.name]
            system.fill(connection, Fill(messages // 5 + (_WARM + 10) * batch, _CHANNELS, bench.payload))
            system.settle(connection)
            vacuum(databases[system.name])
            connection.execute("SET synchronous_commit = off")  # It is about the server's work, not about the disk's.
            for _ in range(_WARM):
                system.complete(connection, system.dequeue(connection, batch))
            _old_snapshot(stack, databases[system.name])
        for tenth in range(10):
            for system in systems if (tenth + number) % 2 == 0 else reversed(systems):
                rates[system.name].append(_tenth(bench, system, connections[system.name], messages // 10, batch))
    return rates


def _tenth(bench: Bench, system: System, connection: Any, messages: int, batch: int) -> float:
    """So many are enqueued, then served; returns the rate of the latter."""
    for begin in range(0, messages, _STATEMENT):
        system.fill(connection, Fill(min(_STATEMENT, messages - begin), _CHANNELS, bench.payload))
    served, start = 0, time.perf_counter()
    while served < messages:
        leases = system.dequeue(connection, batch)
        if not leases:
            raise AssertionError(f"{system.name} returned nothing though there was a backlog")
        served += system.complete(connection, leases)
    return served / (time.perf_counter() - start)


def _old_snapshot(stack: ExitStack, dsn: str) -> None:
    connection: psycopg.Connection[Any] = stack.enter_context(psycopg.connect(dsn))
    connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    connection.execute("SELECT count(*) FROM pg_class")
