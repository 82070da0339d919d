"""Growth: the time of one dequeue as backlog and channels grow, with channels that can't be served, and after much use

Each figure is the time of a dequeue in a large database over that in a small one of the same system, call by call by
turns; 1 means that size doesn't matter. Completions aren't timed. A call that takes more than a few seconds ends its
case early.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from benchmarks.consumers import Task
from benchmarks.measuring import Bench, Case, Size, alternate
from benchmarks.records import Record, Wanted, at_most, ratio_record
from benchmarks.systems import LIMIT, OURS, Fill, System

_SYSTEMS = (OURS, LIMIT, "channel-row", "partition-by", "blocks")
_WAITING = (OURS, LIMIT, "channel-row", "priority", "priority-two-indexes", "priority-after-time", "marked")
_BATCHES = (1, 100)
#: Seconds after which a system's turn of a round ends, however many calls it had.
_PATIENCE = 2.0


@dataclass(frozen=True)
class Numbers:
    """The sizes of a run."""

    small: tuple[int, int] = (10_000, 100)  # messages, channels
    large: tuple[tuple[int, int], ...] = ((100_000, 10_000),)
    #: Channels that can't be served.
    crowd: int = 10_000
    #: Messages that have passed.
    passed: int = 50_000
    #: Calls of each turn of a round, by batch.
    calls: dict[int, int] = field(default_factory=lambda: {1: 40, 100: 10})


_NUMBERS = {
    "quick": Numbers(),
    "full": Numbers(
        large=((1_000_000, 100), (10_000_000, 100), (1_000_000, 10_000), (10_000_000, 1_000_000)),
        crowd=100_000,
        passed=10_000_000,
        calls={1: 100, 100: 30},
    ),
    "tiny": Numbers((100, 5), ((300, 5),), crowd=10, passed=100, calls={1: 2, 100: 1}),
}


def cases(size: Size) -> list[Case]:
    numbers, found = _NUMBERS[size.name], []
    tiny = size.name == "tiny"
    for messages, channels in numbers.large:
        # What reads its whole backlog at each call isn't waited for at ten million.
        names = (OURS, LIMIT, "channel-row") if messages > 1_000_000 else _SYSTEMS
        for name in (OURS, LIMIT) if tiny else names:
            label = f"{name}, {messages:,} messages of {channels:,} channels"
            found.append(Case(label, partial(sizes, name, messages, channels), 5 + messages / 30_000))
    for name in (OURS, LIMIT) if tiny else _WAITING:
        label = f"{name}, {numbers.crowd:,} channels wait for their hour"
        found.append(Case(label, partial(waiting, name), 8 + numbers.crowd / 5_000))
    for limit in ("max_concurrency => 1", "release_interval_ms => 36000000"):
        label = f"{OURS}, {numbers.crowd:,} channels at their {limit.split()[0]}"
        found.append(Case(label, partial(blocked, limit), 8 + numbers.crowd / 2_000))
    for name in (OURS, LIMIT):
        label = f"{name}, after {numbers.passed:,} messages"
        found.append(Case(label, partial(passed, name), 8 + numbers.passed / 5_000))
    return found


@dataclass(frozen=True)
class Comparison:
    """A large database of one system beside a small one."""

    system: System
    case: dict[str, int | str]
    #: What the small one is.
    reference: str
    #: Makes the one or the other: connection, its DSN, whether it is the large one.
    prepare: Callable[[Any, str, bool], None]
    wanted: Wanted
    vacuum: bool = True


def sizes(name: str, messages: int, channels: int, bench: Bench) -> Iterable[Record]:
    small = _NUMBERS[bench.size.name].small
    for system in bench.taking_part([name]):

        def prepare(connection: Any, dsn: str, large: bool, system: System = system) -> None:
            system.fill(connection, Fill(*((messages, channels) if large else small), bench.payload))

        case: dict[str, int | str] = {"messages": messages, "channels": channels}
        reference = f"{small[0]:,} messages of {small[1]:,}"
        yield from _compare(bench, Comparison(system, case, reference, prepare, at_most(1.5)))


def waiting(name: str, bench: Bench) -> Iterable[Record]:
    crowd, small = _NUMBERS[bench.size.name].crowd, _NUMBERS[bench.size.name].small
    for system in bench.taking_part([name]):

        def prepare(connection: Any, dsn: str, large: bool, system: System = system) -> None:
            if large:
                hour = Fill(crowd, crowd, bench.payload, prefix="later", delay_ms=36_000_000)
                system.fill(connection, hour)
            system.fill(connection, Fill(*small, bench.payload))

        case: dict[str, int | str] = {"waiting channels": crowd}
        yield from _compare(bench, Comparison(system, case, "none of them", prepare, at_most(1.2)))


def blocked(limit: str, bench: Bench) -> Iterable[Record]:
    """Each of the crowd has two messages and runs the one that it may."""
    crowd, small = _NUMBERS[bench.size.name].crowd, _NUMBERS[bench.size.name].small
    for system in bench.taking_part([OURS]):

        def prepare(connection: Any, dsn: str, large: bool, system: System = system) -> None:
            if large:
                connection.execute(
                    f"SELECT fairqueue.channel_set('blocked' || i, {limit}) FROM generate_series(0, %s - 1) i".encode(),
                    (crowd,),
                )
                system.fill(connection, Fill(2 * crowd, crowd, bench.payload, prefix="blocked"))
                while system.dequeue(connection, 10_000):
                    pass  # held on to
            system.fill(connection, Fill(*small, bench.payload))

        case: dict[str, int | str] = {"blocked channels": crowd, "by": limit.partition(" ")[0]}
        yield from _compare(bench, Comparison(system, case, "none of them", prepare, at_most(1.2)))


def passed(name: str, bench: Bench) -> Iterable[Record]:
    numbers = _NUMBERS[bench.size.name]
    messages, channels = numbers.small
    for system in bench.taking_part([name]):

        def prepare(connection: Any, dsn: str, large: bool, system: System = system) -> None:
            if large:
                step = min(numbers.passed, 100_000)
                for _ in range(0, numbers.passed, step):
                    system.fill(connection, Fill(step, channels, bench.payload))
                    bench.consumers.run(2, dsn, system.name, Task(100, durability="off"))
            system.fill(connection, Fill(messages, channels, bench.payload))

        case: dict[str, int | str] = {"passed before": numbers.passed}
        # As autovacuum has left it.
        yield from _compare(bench, Comparison(system, case, "a new database", prepare, at_most(1.5), vacuum=False))


def _compare(bench: Bench, comparison: Comparison) -> Iterable[Record]:
    system = comparison.system
    with ExitStack() as stack:
        connections = {}
        for subject in ("large", "small"):
            dsn = stack.enter_context(bench.place.database(system))
            stack.callback(bench.consumers.release)
            connections[subject] = connection = system.connect(dsn)
            stack.callback(connection.close)
            connection.execute("SET synchronous_commit = off")  # Waiting for the disk is the same in both.
            comparison.prepare(connection, dsn, subject == "large")
            system.settle(connection)
            if comparison.vacuum:
                bench.vacuum(connection)
        # One message of one that has no batches is enough.
        for batch in _BATCHES if system.batches else _BATCHES[:1]:
            turn = partial(_turn, bench, system, connections, batch)
            for subject in connections:
                turn(subject)
            times = alternate(list(connections), bench.size.rounds, turn)
            yield ratio_record(
                "time of a dequeue",
                system.name,
                {**comparison.case, "batch": batch},
                times["large"],
                "ms",
                reference=comparison.reference,
                of=times["small"],
                wanted=comparison.wanted if system.name == OURS else None,
            )


def _turn(bench: Bench, system: System, connections: dict[str, Any], batch: int, subject: str) -> float:
    """The median time of some calls, in ms. What they take is filled up again, before the first of them."""
    connection, numbers = connections[subject], _NUMBERS[bench.size.name]
    system.fill(connection, Fill(numbers.calls[batch] * batch, numbers.small[1], bench.payload))
    until = time.perf_counter() + _PATIENCE
    for _ in range(5):  # The news is taken in.
        system.complete(connection, system.dequeue(connection, batch))
    times = []
    for _ in range(numbers.calls[batch]):
        start = time.perf_counter()
        leases = system.dequeue(connection, batch)
        times.append(time.perf_counter() - start)
        system.complete(connection, leases)
        if time.perf_counter() > until:
            break
    return median(times) * 1000
