"""Sizes

The time of one dequeue at each backlog and number of channels, over that in a small database, as in Growth; the goal is
set there, for two of these sizes. There is one database for each number of channels, which is filled up from backlog to
backlog; messages are dealt out to the channels in turn, so where there are as many channels as messages each has one.
What is taken is filled up again, where the last ones were dealt out. synchronous_commit is off.

A call for many messages is quick where they come from few channels: several of a channel are scheduled at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from benchmarks.measuring import Bench, Case, Size
from benchmarks.pairs import LARGE, SMALL, Calls, open_pair
from benchmarks.records import Record
from benchmarks.systems import OURS, Fill

#: Roughly, to fill in a message and take in what is new.
_SECONDS = 0.00002


@dataclass(frozen=True)
class Numbers:
    """The sizes of a run."""

    small: tuple[int, int]  # messages, channels
    #: The backlogs of each number of channels, ascending.
    backlogs: dict[int, tuple[int, ...]]
    calls: dict[int, int]
    patience: float


_NUMBERS = {
    "quick": Numbers(
        small=(10_000, 100),
        backlogs={100: (10_000, 100_000), 1_000: (10_000, 100_000), 10_000: (10_000, 100_000)},
        calls={1: 100, 100: 20},
        patience=0.5,
    ),
    # Growth has the largest backlog of most channels: to make that takes longer than all of these.
    "full": Numbers(
        small=(10_000, 100),
        backlogs={
            100: (10_000, 100_000, 1_000_000, 10_000_000),
            1_000: (10_000, 100_000, 1_000_000),
            10_000: (10_000, 100_000, 1_000_000, 10_000_000),
            100_000: (100_000, 1_000_000),
            1_000_000: (1_000_000,),
        },
        calls={1: 100, 100: 30},
        patience=2.0,
    ),
    "tiny": Numbers((100, 5), {5: (100, 200)}, {1: 2, 100: 1}, 0.3),
}


def cases(size: Size) -> list[Case]:
    numbers = _NUMBERS[size.name]
    measured = 1.0 + size.rounds * (0.1 + sum(numbers.calls.values()) * 0.005)
    return [
        Case(f"{channels:,} channels", partial(measure, channels), len(backlogs) * measured + backlogs[-1] * _SECONDS)
        for channels, backlogs in numbers.backlogs.items()
    ]


def measure(channels: int, bench: Bench) -> Iterable[Record]:
    numbers = _NUMBERS[bench.size.name]
    messages, few = numbers.small
    for system in bench.taking_part([OURS]):
        with open_pair(bench, system, Calls(numbers.calls, numbers.patience)) as pair:
            pair.fill(SMALL, Fill(messages, few, bench.payload))
            pair.settle(SMALL)
            large, backlog = Fill(0, channels, bench.payload), 0
            for wanted in numbers.backlogs[channels]:
                pair.fill(LARGE, pair.fills.get(LARGE, large).more(wanted - backlog))
                pair.settle(LARGE)
                backlog = wanted
                case: dict[str, int | str] = {"messages": backlog, "channels": channels}
                yield from pair.compare(case, f"that with {messages:,} messages of {few:,} channels")
