"""Draining

How long consumers take to work off a backlog, from its first message to its last: as messages a second, over the queue
that isn't fair, side by side. Each drain begins with a full backlog, just filled up and vacuumed; what has been served
stays behind as dead rows until autovacuum comes, as in any burst that has to be got through. So this is what Dequeueing
looks at for a second, to the end. fairqueue takes in what was filled up, plans and settles meanwhile.
synchronous_commit "completions" means off for dequeues alone.

In batches of 1 and 10 the limit loses more on the way, as it walks over what it has served, so fairqueue comes to more
of it here than in the same cases of Dequeueing. In batches of 100 that makes no difference.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from benchmarks.consumers import Task, rate
from benchmarks.measuring import Bench, Case, Size, alternate, open_connections, vacuum
from benchmarks.records import Record
from benchmarks.scenarios.dequeueing import Cell, over_limit
from benchmarks.systems import Fill, payload_of

_CELLS = {
    "quick": [Cell(batch, 4) for batch in (10, 100)],
    "full": [
        Cell(1, 4),
        *(
            Cell(batch, consumers, durability=durability)
            for batch in (10, 100)
            for consumers in (4, 16)
            for durability in ("on", "completions")
        ),
    ],
    "tiny": [Cell(10, 2, 5)],
}
_BACKLOG = {"quick": 60_000, "full": 100_000, "tiny": 200}
#: Roughly, of a message that both serve, by batch.
_SECONDS = {1: 0.001, 10: 0.0002, 100: 0.0001}


def cases(size: Size) -> list[Case]:
    backlog = _BACKLOG[size.name]
    return [
        Case(cell.label, partial(measure, cell), 3 + _rounds(cell, size) * backlog * _SECONDS[cell.batch])
        for cell in _CELLS[size.name]
    ]


def _rounds(cell: Cell, size: Size) -> int:
    """One by one, a pair of drains takes minutes, and what it comes to isn't near the goal."""
    return size.rounds if cell.batch == 1 else cell.rounds(size)


def measure(cell: Cell, bench: Bench) -> Iterable[Record]:
    backlog = _BACKLOG[bench.size.name]
    # Not warmed by calls that don't count, as all of the backlog counts; the drain before the first one does it.
    task = Task(cell.batch, warm=0, durability=cell.durability)
    before = Task(100, durability=cell.durability)
    systems = bench.taking_part(cell.systems)
    fills = {system.name: Fill(backlog, cell.channels, payload_of(cell.payload)) for system in systems}
    with bench.databases(systems) as databases, open_connections(bench.systems, databases) as connections:
        for system in systems:
            system.fill(connections[system.name], fills[system.name])
            bench.consumers.run(cell.consumers, databases[system.name], system.name, before)

        def once(name: str) -> float:
            system, connection = bench.systems[name], connections[name]
            fills[name] = system.fill_up(connection, fills[name], backlog)
            vacuum(databases[name])
            return rate(bench.consumers.run(cell.consumers, databases[name], name, task))

        bench.place.checkpoint()
        rates = alternate([system.name for system in systems], _rounds(cell, bench.size), once)
    case: dict[str, int | str] = {
        "batch": cell.batch,
        "consumers": cell.consumers,
        "channels": cell.channels,
        "backlog": backlog,
        "synchronous_commit": cell.durability,
    }
    yield from over_limit("messages of a backlog that is worked off", case, rates, cell.wanted)
