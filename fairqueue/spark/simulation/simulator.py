"""A queue and its workers, from event to event: no clock, no database, no chance."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

import numpy as np

from .loads import NEVER, Integers, Load

__all__ = ["Service", "serve"]


class _Scheduler(Protocol):
    def arrive(self, message: int, now: int) -> None: ...
    def end(self, message: int, now: int) -> None: ...
    def take(self, now: int) -> int | None: ...
    def due(self) -> int: ...


@dataclass(frozen=True)
class Service:
    """What came of a load.

    :param order: the messages, in the order in which their service began.
    :param started: for each message, when it began, in nanoseconds from the first arrival.
    """

    order: Integers
    started: Integers


def serve(load: Load, workers: int, scheduler: _Scheduler) -> Service:
    """Serve a load until nothing is left. A worker serves one message at a time and asks for the next at once."""
    at, service = [*load.at.tolist(), NEVER], load.service.tolist()
    arrive, end, take = scheduler.arrive, scheduler.end, scheduler.take
    started = [0] * len(service)
    order: list[int] = []
    ends: list[tuple[int, int]] = []
    free, next_, left = workers, 0, len(service)
    while left:
        # An idle worker is told of whatever happens; as long as all are busy, nothing that happens has to be looked at.
        now = ends[0][0] if ends else NEVER
        if free:
            now = min(now, at[next_], scheduler.due())
        while ends and ends[0][0] <= now:
            end(heappop(ends)[1], now)
            free += 1
        while at[next_] <= now:
            arrive(next_, now)
            next_ += 1
        while free and (message := take(now)) is not None:
            started[message] = now
            order.append(message)
            heappush(ends, (now + service[message], message))
            free -= 1
            left -= 1
    return Service(np.array(order, dtype=np.int64), np.array(started, dtype=np.int64))
