"""Dequeueing

Throughput of dequeue and complete, by batch, consumers and channels. Each figure is a ratio against *limit*, a queue
that isn't fair ([The systems](#the-systems)), measured side by side, with the same backlog at the beginning of each
measurement, and vacuumed: limit is at its best then, as it slows down when it walks over what it has served. What both
come to until all is served is in Draining, how a queue wears in Growth and Old snapshot. Before the first measurement
each queue is drained for as long as one takes, in batches of 100, as a long backlog is after a while: fairqueue plans
ahead when some hundred messages have been served in a row. Nothing is enqueued meanwhile; what taking in news costs is
in Cost of a message. limit and fairqueue write a history row an outcome; the published queues write none, or keep the
message. synchronous_commit "completions" means off for dequeues alone, as fq.Worker has it: a lost lease is only a
redelivery.

The goals are for 1,000 channels. Figures that have one stand near it, so in a full run each is the median of 15 pairs,
others of 7. The queues that aren't ours, but for the limit, are shown beside it: they take one message a call
(channel-row and the unfair ones), or read the whole backlog.

The ratio goes by the machine, too: for the disk both wait alike, and what fairness costs is CPU. With the same SQL, on
2026-11-29, all 21 cases that have a goal reached it on an EPYC (batch 1 0.68 to 0.86, batch 10 0.70 to 0.80, batch 100
0.76 to 0.84), and 15 of them on a Xeon: five of batch 1 (0.55 to 0.70), four of batch 10 (0.64 to 0.73) and six of
batch 100 (0.69 to 0.85). On the Xeon, the day before, dequeues that locked what they took one by one, in place of
drawing tickets for it, came to 8: to none of batch 1 (0.48 to 0.59), one of batch 10 (0.76, others 0.54 to 0.68) and
all of batch 100 (0.72 to 0.84).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.consumers import Task, rate
from benchmarks.measuring import Bench, Case, Size, alternate, open_connections, vacuum
from benchmarks.records import Record, Wanted, at_least, ratio_record, value_record
from benchmarks.systems import LIMIT, OURS, SYSTEMS, Fill, payload_of

#: What was published and doesn't try to be fair.
_OTHERS = ("fifo", "stalled-workers", "priority")
#: Of the limit's rate, by batch.
_WANTED = {1: 0.6, 10: 0.7, 100: 0.7}


@dataclass(frozen=True)
class Cell:
    batch: int
    consumers: int
    channels: int = 1_000
    payload: int = 100
    durability: str = "on"
    systems: tuple[str, ...] = (OURS, LIMIT)

    @property
    def wanted(self) -> Wanted | None:
        # What is wanted is said of 1,000 channels.
        return at_least(_WANTED[self.batch]) if self.channels == 1_000 else None

    def rounds(self, size: Size) -> int:
        return size.near if self.wanted else size.rounds

    @property
    def label(self) -> str:
        where = f"batch {self.batch}, {self.consumers} consumers, {self.channels:,} channels"
        return f"{where}, {self.payload} B, synchronous_commit {self.durability}"


_ONE_A_CALL = (OURS, LIMIT, "channel-row")
_FAIR = (*_ONE_A_CALL, "partition-by", "blocks")
_QUICK = [
    *(Cell(batch, 4, systems=_ONE_A_CALL) for batch in (1, 100)),
    Cell(10, 4, systems=_FAIR),
]
_FULL = [
    *(Cell(batch, consumers, systems=_ONE_A_CALL) for batch in (1, 10, 100) for consumers in (1, 16)),
    # One message a call whatever the batch is: once is enough for these others.
    Cell(1, 4, systems=(*_FAIR, *_OTHERS)),
    *(Cell(batch, 4, systems=_FAIR) for batch in (10, 100)),
    *(
        Cell(batch, consumers, channels)
        for channels in (1, 10, 100_000)
        for batch in (1, 10, 100)
        for consumers in (1, 4, 16)
    ),
    *(Cell(batch, 4, payload=2000) for batch in (1, 10, 100)),
    *(Cell(batch, consumers, durability="completions") for consumers in (4, 16) for batch in (1, 10, 100)),
    *(Cell(batch, 4, durability="off") for batch in (1, 10, 100)),
]
_CELLS = {"quick": _QUICK, "full": _FULL, "tiny": [Cell(10, 2, 5, systems=(OURS, LIMIT, "blocks"))]}
_BACKLOG = {"quick": 30_000, "full": 100_000, "tiny": 500}
#: Seconds of one measurement.
_SECONDS = {"quick": 0.5, "full": 1.0, "tiny": 0.05}

#: What deletes a message when it is completed. Only their databases serve more than one cell, vacuumed in between: what
#: keeps finished messages beside the others would be slower in the second one.
_LEAN = {OURS, LIMIT, "channel-row", "fifo", "stalled-workers", "priority"}


def cases(size: Size) -> list[Case]:
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for number, cell in enumerate(_CELLS[size.name]):
        alone = None if _LEAN.issuperset(cell.systems) else number
        groups.setdefault((cell.channels, cell.payload, cell.systems, alone), []).append(cell)
    once = _SECONDS[size.name] + 0.15
    return [
        Case(
            group[0].label + (f", and {len(group) - 1} like it" if len(group) > 1 else ""),
            partial(measure, group),
            len(group[0].systems) * sum((1.5, *(0.3 + cell.rounds(size) * once for cell in group))),
        )
        for group in groups.values()
    ]


def measure(cells: Sequence[Cell], bench: Bench) -> Iterable[Record]:
    backlog, load, many = _BACKLOG[bench.size.name], cells[0], Task(100, _SECONDS[bench.size.name])
    systems = bench.taking_part(load.systems)
    fills = {system.name: Fill(backlog, load.channels, payload_of(load.payload)) for system in systems}
    with bench.databases(systems) as databases, open_connections(bench.systems, databases) as connections:
        for system in systems:
            system.fill(connections[system.name], fills[system.name])
            system.settle(connections[system.name])
            bench.consumers.run(4, databases[system.name], system.name, many)

        def once(cell: Cell, name: str) -> float:
            system, connection = bench.systems[name], connections[name]
            fills[name] = system.fill_up(connection, fills[name], backlog)
            vacuum(databases[name])
            task = Task(cell.batch, _SECONDS[bench.size.name], durability=cell.durability)
            return rate(bench.consumers.run(cell.consumers, databases[name], name, task))

        for cell in cells:
            bench.place.checkpoint()
            rates = alternate([system.name for system in systems], cell.rounds(bench.size), partial(once, cell))
            yield from _records(cell, rates)


def over_limit(
    figure: str, case: Mapping[str, int | str], rates: Mapping[str, list[float]], wanted: Wanted | None
) -> Iterable[Record]:
    """The rates by system, over that of the limit, if that took part. The goal is ours."""
    if LIMIT not in rates:
        return
    for name, found in rates.items():
        if name == LIMIT:
            yield value_record(figure, name, case, found, "1/s")
        else:
            goal = wanted if name == OURS else None
            yield ratio_record(figure, name, case, found, "1/s", reference=LIMIT, of=rates[LIMIT], wanted=goal)


def _records(cell: Cell, rates: Mapping[str, list[float]]) -> Iterable[Record]:
    case: dict[str, int | str] = {
        "batch": cell.batch,
        "consumers": cell.consumers,
        "channels": cell.channels,
        "payload": cell.payload,
        "synchronous_commit": cell.durability,
    }
    yield from over_limit("messages dequeued and completed", case, rates, cell.wanted)
    if OURS in rates:
        for name in rates:
            if SYSTEMS[name].fair and name != OURS:
                over = "messages dequeued and completed, over queues that try to be fair"
                yield ratio_record(over, OURS, case, rates[OURS], "1/s", reference=name, of=rates[name])
