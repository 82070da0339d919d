"""A large database beside a small one of the same system: what a dequeue takes in each, some calls by turns."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

from .measuring import Bench, alternate, vacuum
from .records import Record, Wanted, ratio_record
from .systems import Fill, System

__all__ = ["LARGE", "SMALL", "Calls", "Pair", "open_pair"]

LARGE, SMALL = "large", "small"
#: Calls before those that are timed: so many take in the news of what was filled up, whatever the batch.
_WARM = 10


@dataclass(frozen=True)
class Calls:
    """What a turn of a round is."""

    #: How many, by batch.
    number: dict[int, int]
    #: Seconds after which a turn ends, however many calls it had.
    patience: float


@dataclass(frozen=True)
class Pair:
    """Two databases. Each of these is by LARGE and SMALL."""

    bench: Bench
    system: System
    calls: Calls
    dsns: dict[str, str]
    connections: dict[str, Any]
    #: What was filled in last, and how many messages were taken since: as many are filled in before the next turn, so
    #: that each finds the same backlog, of the same channels.
    fills: dict[str, Fill] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)

    def fill(self, subject: str, fill: Fill) -> None:
        self.system.fill(self.connections[subject], fill)
        self.fills[subject] = fill

    def settle(self, subject: str, *, vacuumed: bool = True) -> None:
        """Take in what was filled in."""
        self.system.settle(self.connections[subject])
        if vacuumed:
            vacuum(self.dsns[subject])

    def compare(self, case: dict[str, int | str], reference: str, wanted: Wanted | None = None) -> Iterable[Record]:
        """The time of a dequeue, at each batch that the system has."""
        batches = list(self.calls.number)
        for batch in batches if self.system.batches else batches[:1]:
            turn = partial(self._turn, batch)
            for subject in self.connections:
                turn(subject)
            times = alternate(list(self.connections), self.bench.size.rounds, turn)
            yield ratio_record(
                "time of a dequeue",
                self.system.name,
                {**case, "batch": batch},
                times[LARGE],
                "ms",
                reference=reference,
                of=times[SMALL],
                wanted=wanted,
            )

    def _turn(self, batch: int, subject: str) -> float:
        """The mean time of some calls, in ms: those that plan ahead count. What was taken is filled up again first."""
        connection, system = self.connections[subject], self.system
        if taken := self.taken.get(subject):
            self.fill(subject, self.fills[subject].more(taken))
        self.taken[subject] = 0
        until = time.perf_counter() + self.calls.patience

        def timed(calls: int) -> list[float]:
            times: list[float] = []
            while len(times) < calls and (not times or time.perf_counter() < until):
                start = time.perf_counter()
                leases = system.dequeue(connection, batch)
                times.append(time.perf_counter() - start)
                self.taken[subject] += system.complete(connection, leases)
            return times

        timed(_WARM)
        return fmean(timed(self.calls.number[batch])) * 1000


@contextmanager
def open_pair(bench: Bench, system: System, calls: Calls) -> Iterator[Pair]:
    """Two new databases, and a connection to each."""
    with ExitStack() as stack:
        pair = Pair(bench, system, calls, {}, {})
        for subject in (LARGE, SMALL):
            dsn = pair.dsns[subject] = stack.enter_context(bench.place.database(system))
            stack.callback(bench.consumers.release)
            connection = pair.connections[subject] = stack.enter_context(system.connected(dsn))
            connection.execute("SET synchronous_commit = off")  # Waiting for the disk is the same in both.
        yield pair
