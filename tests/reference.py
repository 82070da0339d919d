"""What the scheduler has to do, in plain Python: start-time fair queueing, one message at a time.

The next message comes from the channel with the lowest start tag. Serving a message moves its channel's tag on by
cost / weight. The virtual time is the start tag of the message that was served last, and a channel that becomes
ready starts at max(its own tag, virtual time). Equal tags go to the channel that became ready first.

Goyal, Vin, Cheng: Start-time Fair Queueing (1996).
"""

from bisect import insort
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Entry(NamedTuple):
    """A message, in the order in which its channel serves it."""

    at: int
    id: int
    cost: float = 1


def step(cost: float, weight: float) -> int:
    """By how much serving a message moves the tag of its channel: a whole number, so that sums are exact."""
    return max(1, round(cost * 720720 / weight))


@dataclass
class Channel:
    weight: float = 1
    tag: int = 0
    ready: bool = False
    #: Which activation made it ready.
    since: int = 0
    #: Where its first message is, as far as the scheduler knows, while it waits for that message's time.
    head: tuple[int, int] | None = None
    #: Whether its place among equal tags is uncertain: the scheduler learns that a channel is empty when it next
    #: looks there, and a message that arrives before that is no new activation.
    vague: bool = False
    entries: list[Entry] = field(default_factory=list)

    def is_ripe(self, now: int) -> bool:
        return bool(self.entries) and self.entries[0].at <= now


class Reference:
    def __init__(self) -> None:
        self.channels: defaultdict[str, Channel] = defaultdict(Channel)
        self.vtime = 0
        self.activations = 0
        #: What the next dequeue will hear of: for each statement and channel, where there may be something new.
        self.news: list[tuple[str, tuple[int, int]]] = []

    def enqueue(self, name: str, entries: Iterable[Entry]) -> None:
        """Messages of one channel that arrive with one statement."""
        for entry in (entries := list(entries)):
            insort(self.channels[name].entries, entry)
        if entries:
            self.news.append((name, (min(e.at for e in entries), min(e.id for e in entries))))

    def remove(self, name: str, ids: Collection[int]) -> None:
        """Cancelled, deleted, or about to be put back in another place."""
        channel = self.channels[name]
        channel.entries = [entry for entry in channel.entries if entry.id not in ids]

    def dequeue(self, n: int, now: int, seen: Sequence[int] = ()) -> list[tuple[str, int]]:
        """The next n messages; `seen`, what was served in fact, settles the order of channels that are vague."""
        self._hear(now)
        served: list[tuple[str, int]] = []
        while len(served) < n and (name := self._next(now, seen[len(served) : len(served) + 1])) is not None:
            channel = self.channels[name]
            entry = channel.entries.pop(0)
            served.append((name, entry.id))
            self.vtime = channel.tag
            channel.tag += step(entry.cost, channel.weight)
            if not channel.is_ripe(now):
                self._wait(channel, vague=n > 1)
        return served

    def _hear(self, now: int) -> None:
        """Channels become ready: first those with news, then those whose time has come."""
        news: dict[str, tuple[int, int]] = {}
        for name, place in self.news:
            news[name] = min(place, news.get(name, place))
        self.news.clear()
        for name, place in sorted(news.items(), key=lambda item: item[1][1]):
            channel = self.channels[name]
            if not channel.ready and (channel.head is None or place < channel.head):
                channel.head = place
                if place[0] <= now:
                    self._activate(channel)
        waiting = [(c.head, c) for c in self.channels.values() if c.head is not None and c.head[0] <= now]
        for _, channel in sorted(waiting, key=lambda item: item[0]):
            self._activate(channel)
        for channel in self.channels.values():
            if channel.ready and not channel.is_ripe(now):
                self._wait(channel, vague=True)

    def _activate(self, channel: Channel) -> None:
        self.activations += 1
        channel.ready, channel.since, channel.head = True, self.activations, None
        channel.tag = max(channel.tag, self.vtime)

    def _wait(self, channel: Channel, vague: bool) -> None:
        channel.ready, channel.vague = False, vague
        channel.head = channel.entries[0][:2] if channel.entries else None

    def _next(self, now: int, seen: Sequence[int]) -> str | None:
        ready = {name: channel for name, channel in self.channels.items() if channel.is_ripe(now)}
        lowest = min((channel.tag for channel in ready.values()), default=0)
        tied = [name for name, channel in ready.items() if channel.tag == lowest]
        if any(self.channels[name].vague for name in tied):
            tied = [name for name in tied if self.channels[name].entries[0].id in seen] or tied
        return min(tied, key=lambda name: self.channels[name].since, default=None)
