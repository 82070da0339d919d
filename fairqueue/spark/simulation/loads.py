"""What is to be served: messages in the order of their arrival, and the channels that they belong to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["NEVER", "SECOND", "Channel", "Integers", "Load", "Numbers"]

#: A time, or a message, that never comes.
NEVER = 2**63 - 1
#: Times are whole numbers of nanoseconds: sums are exact, and the same on every machine.
SECOND = 1_000_000_000

Integers = NDArray[np.int64]
Numbers = NDArray[np.float64]


class Channel(NamedTuple):
    """Whose it is, and what an operator sets on it.

    :param tenant: its number; a tenant may have several channels.
    :param interval: the least time between two messages, in nanoseconds; 0: none.
    :param burst: how many may go at once after a pause.
    """

    tenant: int = 0
    weight: float = 1.0
    max_concurrency: int | None = None
    interval: int = 0
    burst: int = 1


@dataclass(frozen=True)
class Load:
    """Messages, in the order of their arrival; where several come at once, this order decides.

    :param at: when each arrives, in nanoseconds from the first.
    :param channel: the place of its channel among ``channels``.
    :param service: for how long it keeps a worker, in nanoseconds.
    :param cost: what it counts for its channel.
    """

    at: Integers
    channel: Integers
    service: Integers
    cost: Numbers
    channels: Sequence[Channel]

    @classmethod
    def of(cls, messages: Iterable[tuple[int, int]], channels: Sequence[Channel], service: int = SECOND) -> Load:
        """Messages of cost 1 from pairs of time and channel."""
        pairs = np.array(list(messages), dtype=np.int64).reshape(-1, 2)
        at, channel = pairs[:, 0], pairs[:, 1]
        return cls(at, channel, np.full(len(at), service), np.ones(len(at)), channels)

    @property
    def tenant(self) -> Integers:
        """Whose message each is."""
        return np.array([channel.tenant for channel in self.channels], dtype=np.int64)[self.channel]
