"""Growth

The time of one dequeue as backlog and channels grow, with channels that can't be served, and after much use. Each
figure is the mean time of a dequeue in a large database over that in a small one of the same system, some calls by
turns; 1 means that size doesn't matter. Both are vacuumed before, but for the one through which messages have passed:
it is as autovacuum has left it. Completions aren't timed. A turn ends after two seconds, however many calls it
had; what it took is filled up before the next one. synchronous_commit is off.

At batch 100, fairqueue has planned the small one ahead: one visit to a channel schedules several of its messages.
Where so many channels take turns that each message of a plan would be from another one, a plan pays for batches of a
few, or for several consumers, and here there is one. With planning switched off in both, size shows by itself; but
then a hundred channels are dealt a hundred messages by their shares, which takes longer than the first message of each
of many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.consumers import Task
from benchmarks.measuring import Bench, Case, Size
from benchmarks.pairs import LARGE, SMALL, Calls, Pair, open_pair
from benchmarks.records import Record, Wanted, at_most
from benchmarks.systems import LIMIT, OURS, Fill, System

#: What passes before isn't timed: the batch that gets most through.
_PASSING = 1_000
#: More messages than these only for what never reads its whole backlog.
_FOR_ALL = 1_000_000
#: Roughly, to fill in a message and take in what is new, or to have it pass.
_SECONDS = {OURS: 0.00006, LIMIT: 0.00002, "channel-row": 0.00002, "partition-by": 0.00006, "blocks": 0.00005}


@dataclass(frozen=True)
class Numbers:
    """The sizes of a run."""

    small: tuple[int, int]  # messages, channels
    large: tuple[tuple[int, int], ...]
    #: Channels that can't be served.
    crowd: int
    #: Messages that have passed.
    passed: int
    #: Calls of each turn of a round, by batch.
    calls: dict[int, int]
    #: Seconds after which a turn ends, however many calls it had.
    patience: float
    systems: tuple[str, ...] = (OURS, LIMIT, "channel-row", "partition-by", "blocks")
    #: Beside channels that wait for their hour.
    waiting: tuple[str, ...] = (OURS, LIMIT, "priority")
    #: Through which messages have passed.
    worn: tuple[str, ...] = (OURS, LIMIT)


_NUMBERS = {
    "quick": Numbers(
        small=(10_000, 100),
        large=((100_000, 10_000),),
        crowd=10_000,
        passed=50_000,
        calls={1: 100, 100: 20},
        patience=0.5,
        systems=(OURS, LIMIT),
    ),
    "full": Numbers(
        small=(10_000, 100),
        large=((1_000_000, 10_000), (10_000_000, 1_000_000)),
        crowd=100_000,
        passed=10_000_000,
        calls={1: 100, 100: 30},
        patience=2.0,
        waiting=(OURS, LIMIT, "channel-row", "priority", "priority-two-indexes", "priority-after-time", "marked"),
        worn=(OURS,),
    ),
    "tiny": Numbers((100, 5), ((300, 5),), 10, 100, {1: 2, 100: 1}, 0.3, (OURS,), (OURS,), (OURS,)),
}

#: Nothing is planned ahead after this.
_UNPLANNED = """
    CREATE OR REPLACE FUNCTION fairqueue.plan_after() RETURNS integer
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN 2147483647
"""


def cases(size: Size) -> list[Case]:
    numbers = _NUMBERS[size.name]
    measured = 1.0 + size.rounds * (0.1 + sum(numbers.calls.values()) * 0.005)
    found = []
    for messages, channels in numbers.large:
        for name in numbers.systems if messages <= _FOR_ALL else (OURS, LIMIT):
            label = f"{name}, {messages:,} messages of {channels:,} channels"
            seconds = measured + messages * _SECONDS[name]
            found.append(Case(label, partial(sizes, name, messages, channels, True), seconds))
        label = f"{OURS}, {messages:,} messages of {channels:,} channels, unplanned"
        seconds = measured + messages * _SECONDS[OURS]
        found.append(Case(label, partial(sizes, OURS, messages, channels, False), seconds))
    for name in numbers.waiting:
        label = f"{name}, {numbers.crowd:,} channels wait for their hour"
        found.append(Case(label, partial(waiting, name), measured + numbers.crowd * 0.00015))
    for limit in ("max_concurrency => 1", "release_interval_ms => 36000000"):
        label = f"{OURS}, {numbers.crowd:,} channels at their {limit.split()[0]}"
        found.append(Case(label, partial(blocked, limit), measured + numbers.crowd * 0.0005))
    for name in numbers.worn:
        label = f"{name}, after {numbers.passed:,} messages"
        found.append(Case(label, partial(passed, name), measured + numbers.passed * _SECONDS[name]))
    return found


@dataclass(frozen=True)
class Comparison:
    """A large database of one system beside a small one."""

    system: System
    case: dict[str, int | str]
    #: What the small one is.
    reference: str
    #: Makes the one or the other.
    prepare: Callable[[Pair, str], None]
    #: Of ours.
    wanted: Wanted | None
    #: Not so where the large one has been in use, and autovacuum with it.
    vacuumed: bool = True


def sizes(name: str, messages: int, channels: int, planned: bool, bench: Bench) -> Iterable[Record]:
    small = _NUMBERS[bench.size.name].small
    for system in bench.taking_part([name]):

        def prepare(pair: Pair, subject: str) -> None:
            if not planned:
                pair.connections[subject].execute(_UNPLANNED)
            pair.fill(subject, Fill(*((messages, channels) if subject == LARGE else small), bench.payload))

        case: dict[str, int | str] = {"messages": messages, "channels": channels}
        if not planned:
            case["served"] = "unplanned"
        reference = f"that with {small[0]:,} messages of {small[1]:,} channels"
        wanted = at_most(1.5) if planned else None  # the goal is for what users have
        yield from _compare(bench, Comparison(system, case, reference, prepare, wanted))


def waiting(name: str, bench: Bench) -> Iterable[Record]:
    crowd, small = _NUMBERS[bench.size.name].crowd, _NUMBERS[bench.size.name].small
    for system in bench.taking_part([name]):

        def prepare(pair: Pair, subject: str) -> None:
            if subject == LARGE:
                pair.fill(subject, Fill(crowd, crowd, bench.payload, prefix="later", delay_ms=36_000_000))
            pair.fill(subject, Fill(*small, bench.payload))

        case: dict[str, int | str] = {"waiting channels": crowd}
        yield from _compare(bench, Comparison(system, case, "the time without them", prepare, at_most(1.2)))


def blocked(limit: str, bench: Bench) -> Iterable[Record]:
    """Each of the crowd has two messages and runs the one that it may."""
    crowd, small = _NUMBERS[bench.size.name].crowd, _NUMBERS[bench.size.name].small
    for system in bench.taking_part([OURS]):

        def prepare(pair: Pair, subject: str) -> None:
            if subject == LARGE:
                connection, fill = pair.connections[subject], Fill(2 * crowd, crowd, bench.payload, prefix="blocked")
                _set_limit(connection, fill, limit)
                pair.fill(subject, fill)
                while pair.system.dequeue(connection, 10_000):
                    pass  # held on to
            pair.fill(subject, Fill(*small, bench.payload))

        case: dict[str, int | str] = {"blocked channels": crowd, "by": limit.partition(" ")[0]}
        yield from _compare(bench, Comparison(system, case, "the time without them", prepare, at_most(1.2)))


def passed(name: str, bench: Bench) -> Iterable[Record]:
    numbers = _NUMBERS[bench.size.name]
    messages, channels = numbers.small
    for system in bench.taking_part([name]):

        def prepare(pair: Pair, subject: str) -> None:
            if subject == LARGE:
                step = min(numbers.passed, 100_000)
                task = Task(_PASSING, durability="off")
                for _ in range(0, numbers.passed, step):
                    pair.fill(subject, Fill(step, channels, bench.payload))
                    bench.consumers.run(2, pair.dsns[subject], pair.system.name, task)
            pair.fill(subject, Fill(messages, channels, bench.payload))

        case: dict[str, int | str] = {"passed": numbers.passed}
        reference = "that in a new database"
        yield from _compare(bench, Comparison(system, case, reference, prepare, at_most(1.5), vacuumed=False))


def _set_limit(connection: Any, fill: Fill, limit: str) -> None:
    """Each of the channels that are to be filled gets it."""
    connection.execute(
        f"SELECT fairqueue.channel_set(%s || i, {limit}) FROM generate_series(0, %s - 1) i".encode(),
        (fill.prefix, fill.channels),
    )


def _compare(bench: Bench, comparison: Comparison) -> Iterable[Record]:
    numbers, system = _NUMBERS[bench.size.name], comparison.system
    with open_pair(bench, system, Calls(numbers.calls, numbers.patience)) as pair:
        for subject in pair.connections:
            comparison.prepare(pair, subject)
            pair.settle(subject, vacuumed=comparison.vacuumed or subject == SMALL)
        wanted = comparison.wanted if system.name == OURS else None
        yield from pair.compare(comparison.case, comparison.reference, wanted)
