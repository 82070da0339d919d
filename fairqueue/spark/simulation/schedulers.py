"""In which order messages are served: by arrival, in rotation, or by start tags, as fairqueue does.

A scheduler hears of arrivals and of ends of service, and says which message is next. All of them keep the limits of
channels, so that what differs is the order alone::

    from fairqueue.spark.simulation import Channel, Load
    from fairqueue.spark.simulation.schedulers import Fair

    # Two messages of channel 0, then one of channel 1, all at once.
    load = Load.of([(0, 0), (0, 0), (0, 1)], channels=[Channel(), Channel()])
    scheduler = Fair(load)
    for message in range(3):
        scheduler.arrive(message, now=0)
    print([scheduler.take(now=0) for _ in range(3)])  # [0, 2, 1]

Each operation is O(log n) in the channels that have messages, and none depends on the backlog. Times are whole numbers
of nanoseconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from heapq import heappop, heappush, heapreplace
from typing import Any

import numpy as np

from .loads import NEVER, Integers, Load, Numbers

__all__ = ["SCHEDULERS", "Arrival", "Fair", "RoundRobin", "Scheduler", "steps"]

_LONG_AGO = -(2**62)


class Scheduler(ABC):
    """What all have in common: which channels are ready. A subclass says when their turns come.

    A channel is ready when it has a message that may be served now. Otherwise it is empty, or at its max_concurrency
    and waits for an end, or ahead of its rate and waits for a time.
    """

    def __init__(self, load: Load) -> None:
        self._channel: list[int] = load.channel.tolist()
        self._first, self._following = _chains(load)
        #: How many messages have arrived; they are numbered in the order of their arrival.
        self._arrived = 0
        #: The ready channels, by turn; each entry ends with the channel.
        self._ready: list[Any] = []
        #: Channels ahead of their rate: the time that each waits for, its first message, and itself.
        self._waiting: list[tuple[int, int, int]] = []
        self._limited = [c.max_concurrency is not None or c.interval > 0 for c in load.channels]
        self._caps = [NEVER if c.max_concurrency is None else c.max_concurrency for c in load.channels]
        self._rates = [(c.interval, c.burst) for c in load.channels]
        self._running = [0] * len(load.channels)
        #: When its last message was released, later by an interval for each that went ahead of its time in a burst.
        self._released = [_LONG_AGO] * len(load.channels)

    def arrive(self, message: int, now: int) -> None:
        """The next message has arrived."""
        self._arrived = message + 1
        channel = self._channel[message]
        if self._first[channel] == message:
            self._offer(channel, now)

    def end(self, message: int, now: int) -> None:
        """A message that was taken has been served."""
        channel = self._channel[message]
        if self._limited[channel]:
            self._running[channel] -= 1
            if self._running[channel] == self._caps[channel] - 1 and self._first[channel] < self._arrived:
                self._offer(channel, now)

    def take(self, now: int) -> int | None:
        """The message that is served now; None if there is none that may be."""
        waiting, ready = self._waiting, self._ready
        while waiting and waiting[0][0] <= now:
            self._activate(heappop(waiting)[2])
        if not ready:
            self._rest()
            return None
        channel: int = ready[0][-1]
        message = self._first[channel]
        following = self._first[channel] = self._following[message]
        turn = self._serve(channel, message)
        time = now
        if self._limited[channel]:
            self._running[channel] += 1
            if interval := self._rates[channel][0]:
                self._released[channel] = max(self._released[channel] + interval, now)
            time = self._time(channel)
        if following < self._arrived and time <= now:
            heapreplace(ready, turn)
        else:
            heappop(ready)
            if following >= self._arrived:
                self._leave(channel)
            elif time < NEVER:
                heappush(waiting, (time, following, channel))
        return message

    def due(self) -> int:
        """When a message may be served though nothing else has happened."""
        return self._waiting[0][0] if self._waiting else NEVER

    def _offer(self, channel: int, now: int) -> None:
        """It has messages, and was empty or at its max_concurrency."""
        time = self._time(channel) if self._limited[channel] else now
        if time <= now:
            self._activate(channel)
        elif time < NEVER:
            heappush(self._waiting, (time, self._first[channel], channel))

    def _time(self, channel: int) -> int:
        """From when on its next message may be served: the generic cell rate algorithm (ITU-T I.371)."""
        if self._running[channel] >= self._caps[channel]:
            return NEVER
        interval, burst = self._rates[channel]
        return self._released[channel] + (2 - burst) * interval if interval else _LONG_AGO

    def _leave(self, channel: int) -> None:  # noqa: B027 - most have nothing to do then
        """It is empty."""

    def _rest(self) -> None:  # noqa: B027
        """No channel is ready."""

    @abstractmethod
    def _activate(self, channel: int) -> None:
        """It has become ready: put its turn among the others."""

    @abstractmethod
    def _serve(self, channel: int, message: int) -> tuple[int, ...]:
        """The first channel's message is served; its next turn, ending with the channel."""


class Arrival(Scheduler):
    """First come, first served: what queues without channels do."""

    def _activate(self, channel: int) -> None:
        heappush(self._ready, (self._first[channel], channel))

    def _serve(self, channel: int, message: int) -> tuple[int, ...]:
        return self._first[channel], channel


class RoundRobin(Scheduler):
    """One message a turn; who was served, or arrives, goes to the end of the row. Knows neither weights nor costs."""

    _turns = 0

    def _activate(self, channel: int) -> None:
        self._turns += 1
        heappush(self._ready, (self._turns, channel))

    def _serve(self, channel: int, message: int) -> tuple[int, ...]:
        self._turns += 1
        return self._turns, channel


class Fair(Scheduler):
    """Start-time fair queueing (Goyal, Vin, Cheng 1996), as fairqueue has it.

    The next message comes from the channel with the lowest start tag; a message moves the tag on by cost / weight. The
    virtual time is the start tag of the message served last, or the highest tag of the empty channels where none is
    ready, and a channel that becomes ready starts at max(its own tag, virtual time). Equal tags go to the channel that
    became ready first.
    """

    def __init__(self, load: Load) -> None:
        super().__init__(load)
        weights = np.array([channel.weight for channel in load.channels])[load.channel]
        self._steps: list[int] = steps(load.cost, weights).tolist()
        self._tags = [0] * len(load.channels)
        self._vtime = 0
        self._activations = 0
        #: Empty channels, and such as were: the highest tag first, negated, as a heap has the lowest one first.
        self._empty: list[tuple[int, int]] = []

    def _activate(self, channel: int) -> None:
        self._activations += 1
        tag = self._tags[channel] = max(self._tags[channel], self._vtime)
        heappush(self._ready, (tag, self._activations, channel))

    def _leave(self, channel: int) -> None:
        heappush(self._empty, (-self._tags[channel], channel))

    def _rest(self) -> None:
        empty = self._empty
        while empty and (self._first[empty[0][1]] < self._arrived or self._tags[empty[0][1]] != -empty[0][0]):
            heappop(empty)
        if empty:
            self._vtime = max(self._vtime, -empty[0][0])

    def _serve(self, channel: int, message: int) -> tuple[int, ...]:
        tag, since, _ = self._ready[0]
        self._vtime = tag
        tag = self._tags[channel] = tag + self._steps[message]
        return tag, since, channel


SCHEDULERS: dict[str, type[Scheduler]] = {"arrival": Arrival, "round_robin": RoundRobin, "fair": Fair}


def steps(costs: Numbers, weights: Numbers) -> Integers:
    """By how much messages move the tags of their channels: whole numbers, so that sums are exact."""
    moved: Integers = np.maximum(1, np.rint(costs * 720720 / weights)).astype(np.int64)
    return moved


def _chains(load: Load) -> tuple[list[int], list[int]]:
    """Each channel's first message, and each message's following one in its channel; NEVER where there is none."""
    order = np.argsort(load.channel, kind="stable")
    channels = load.channel[order]
    same = channels[1:] == channels[:-1]
    following = np.full(len(order), NEVER)
    following[order[:-1]] = np.where(same, order[1:], NEVER)
    first = np.full(len(load.channels), NEVER)
    starts = np.flatnonzero(np.concatenate(([True], ~same))) if len(order) else order
    first[channels[starts]] = order[starts]
    return first.tolist(), following.tolist()
