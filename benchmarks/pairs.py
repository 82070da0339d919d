"""A large database beside a small one of the same system: what a dequeue takes in each, some calls by turns."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from .measuring import Bench, alternate
from .records import Record, Wanted, ratio_record
from .systems import Fill, System

__all__ = ["LARGE", "SMALL", "Calls", "Pair", "open_pair"]

LARGE, SMALL = "large", "small"


@dataclass(frozen=True)
class Calls:
    """What a turn of a round is."""

    #: How many, by batch.
    number: dict[int, int]
    #: Seconds after which a turn ends, however many calls it had.
    patience: float
    #: Those that what was taken is filled up in: all of the small database.
    channels: int


@dataclass(frozen=True)
class Pair:
    """Two databases. Each of these is by LARGE and SMALL."""

    bench: Bench
    system: System
    calls: Calls
    dsns: dict[str, str]
    connections: dict[str, Any]

    def settle(self, subject: str, *, vacuum: bool = True) -> None:
        """Take in what was filled in."""
        self.system.settle(self.connections[subject])
        if vacuum:
            self.bench.vacuum(self.connections[subject])

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
        """The mean time of some calls, in ms: those that plan ahead count. What they take is filled up again first."""
        connection, system, number = self.connections[subject], self.system, self.calls.number[batch]
        system.fill(connection, Fill(number * batch, self.calls.channels, self.bench.payload))
        until = time.perf_counter() + self.calls.patience
        for _ in range(5):  # The news is taken in.
            system.complete(connection, system.dequeue(connection, batch))
        times = []
        for _ in range(number):
            start = time.perf_counter()
            leases = system.dequeue(connection, batch)
            times.append(time.perf_counter() - start)
            system.complete(connection, leases)
            if time.perf_counter() > until:
                break
        return fmean(times) * 1000


@contextmanager
def open_pair(bench: Bench, system: System, calls: Calls) -> Iterator[Pair]:
    """Two new databases, and a connection to each."""
    with ExitStack() as stack:
        pair = Pair(bench, system, calls, {}, {})
        for subject in (LARGE, SMALL):
            dsn = pair.dsns[subject] = stack.enter_context(bench.place.database(system))
            stack.callback(bench.consumers.release)
            connection = pair.connections[subject] = system.connect(dsn)
            stack.callback(connection.close)
            connection.execute("SET synchronous_commit = off")  # Waiting for the disk is the same in both.
        yield pair
