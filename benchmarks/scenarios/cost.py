"""Cost of a message

WAL, buffers, dead tuples, statements, and CPU of server and client, from enqueue to completion. One connection
enqueues, dequeues and completes, in blocks by turns with the reference. CPU counts nothing of what others do on the
machine meanwhile. WAL and the other counters are the server's. synchronous_commit is off.

A batch is enqueued before each is dequeued, so each dequeue of fairqueue has news to take in. The ratio of CPU goes by
the machine, and by what the limit comes to: on a Xeon, on 2026-11-28, it was 5.9 to 6.7 one by one, of a limit that
took 184 µs, 2.9 to 4.2 in batches of 10, and 2.4 to 3.3 in batches of 100.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import psycopg

from benchmarks.measuring import Bench, Case, Size, alternate, backend_cpu, open_connections, vacuum
from benchmarks.records import Record, ratio_record, value_record
from benchmarks.systems import LIMIT, OURS, Fill, payload_of

_SYSTEMS = {
    "quick": (OURS, LIMIT, "channel-row", "blocks"),
    "full": (OURS, LIMIT, "fifo", "channel-row", "partition-by", "blocks"),
    "tiny": (OURS, LIMIT, "channel-row"),
}
_CHANNELS = 1_000
_BACKLOG = {"quick": 10_000, "full": 100_000, "tiny": 200}
#: Messages of a block.
_BLOCK = {"quick": 300, "full": 3_000, "tiny": 20}
#: Seconds after which a block ends early.
_PATIENCE = 3.0
_BATCHES = {"quick": (1, 100), "full": (1, 10, 100), "tiny": (10,)}


@dataclass(frozen=True)
class Cost:
    """Of one message."""

    server_cpu: float | None
    client_cpu: float
    wal: float
    buffers: float
    dead: float
    statements: float


_FIGURES = {
    "server_cpu": ("CPU of the server", "µs"),
    "client_cpu": ("CPU of the client", "µs"),
    "wal": ("WAL", "bytes"),
    "buffers": ("buffers touched", "pages"),
    "dead": ("rows updated or deleted", "rows"),
    "statements": ("statements of the client", "statements"),
}


class _Counted(psycopg.Cursor[Any]):
    """Counts statements; one for each row where many are sent in one go."""

    statements = 0

    def execute(self, *args: Any, **options: Any) -> Self:
        _Counted.statements += 1
        return super().execute(*args, **options)

    def executemany(self, query: Any, params_seq: Iterable[Any], **options: Any) -> None:
        rows = list(params_seq)
        _Counted.statements += len(rows)
        super().executemany(query, rows, **options)


def cases(size: Size) -> list[Case]:
    seconds = len(_SYSTEMS[size.name]) * (1.5 + size.rounds * min(_PATIENCE, _BLOCK[size.name] * 0.0005))
    return [
        Case(f"batch {batch}, {payload} B", partial(measure, batch, payload), seconds)
        for batch in _BATCHES[size.name]
        for payload in size.payloads
    ]


def measure(batch: int, size: int, bench: Bench) -> Iterable[Record]:
    systems = bench.taking_part(_SYSTEMS[bench.size.name])
    block = max(batch, _BLOCK[bench.size.name])
    payload = payload_of(size)
    with bench.databases(systems) as databases, open_connections(bench.systems, databases) as connections:
        for system in systems:
            connection = connections[system.name]
            system.fill(connection, Fill(_BACKLOG[bench.size.name], _CHANNELS, payload))
            system.settle(connection)
            vacuum(databases[system.name])
            connection.execute("SET synchronous_commit = off")  # Neither WAL nor work depend on it.
            connection.cursor_factory = _Counted
            for _ in range(20):
                system.complete(connection, system.dequeue(connection, batch))

        def once(name: str) -> Cost:
            system, connection = bench.systems[name], connections[name]
            pid = connection.info.backend_pid if bench.server else None
            before, cpu, mine = _counters(connection), pid and backend_cpu(pid), time.process_time()
            _Counted.statements = 0
            passed, until = 0, time.monotonic() + _PATIENCE
            while passed < block and time.monotonic() < until:
                rows = [(f"c{(passed + i) % _CHANNELS}", payload) for i in range(batch)]
                system.enqueue(connection, rows)
                passed += system.complete(connection, system.dequeue(connection, batch))
            statements = _Counted.statements
            mine, cpu_after = time.process_time() - mine, pid and backend_cpu(pid)
            after = _counters(connection)
            return Cost(
                None if cpu is None or cpu_after is None else (cpu_after - cpu) * 1e6 / passed,
                mine * 1e6 / passed,
                (after[0] - before[0]) / passed,
                (after[1] - before[1]) / passed,
                (after[2] - before[2]) / passed,
                statements / passed,
            )

        bench.place.checkpoint()  # what was loaded is written by nobody's block
        costs = alternate([system.name for system in systems], bench.size.rounds, once)
    case: dict[str, int | str] = {"batch": batch, "payload": size}
    for name, found in costs.items():
        for field, (figure, unit) in _FIGURES.items():
            values = [getattr(cost, field) for cost in found]
            if None in values:
                bench.note(f"{figure}: this server doesn't tell")
            elif LIMIT in costs and name != LIMIT and field != "statements":
                of = [getattr(cost, field) for cost in costs[LIMIT]]
                yield ratio_record(figure, name, case, values, unit, reference=LIMIT, of=of)
            else:
                yield value_record(figure, name, case, values, unit)


def _counters(connection: psycopg.Connection[Any]) -> tuple[int, int, int]:
    """WAL bytes of the server, buffers, rows updated and deleted in this database up to now."""
    version = connection.info.server_version
    if version >= 150000:
        connection.execute("SELECT pg_stat_force_next_flush()")
    else:
        time.sleep(1.1)  # what a server tells at most so often
    row = connection.execute(
        "SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn,"
        " (SELECT sum(blks_hit + blks_read) FROM pg_stat_database WHERE datname = current_database()),"
        " (SELECT sum(n_tup_upd + n_tup_del) FROM pg_stat_user_tables)"
    ).fetchone()
    assert row is not None
    return int(row[0]), int(row[1]), int(row[2] or 0)
