"""What the scheduler has to do, in plain Python: start-time fair queueing, one message at a time.

The next message comes from the channel with the lowest start tag. Serving a message moves its channel's tag on by
cost / weight. The virtual time is the start tag of the message that was served last, and a channel that becomes
ready starts at max(its own tag, virtual time). When all has been served, the virtual time is where the last
channel stands. Equal tags go to the channel that became ready first. A channel that is at its max_concurrency,
ahead of its rate, or paused is not ready, however many messages it has.

Goyal, Vin, Cheng: Start-time Fair Queueing (1996). The rate is the generic cell rate algorithm (ITU-T I.371).
"""

from bisect import insort
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

#: A time that never comes: only a signal ends the wait.
BLOCKED = 2**63 - 1


class Entry(NamedTuple):
    """A message, in the order in which its channel serves it."""

    at: int
    id: int
    cost: float = 1


class Policy(NamedTuple):
    """What an operator sets on a channel; times in milliseconds."""

    weight: float = 1
    max_concurrency: int | None = None
    interval: int = 0
    burst: int = 1
    paused_until: int | None = None


def step(cost: float, weight: float) -> int:
    """By how much serving a message moves the tag of its channel: a whole number, so that sums are exact."""
    return max(1, round(cost * 720720 / weight))


@dataclass
class Channel:
    policy: Policy = field(default_factory=Policy)
    tag: int = 0
    ready: bool = False
    #: Which activation made it ready.
    since: int = 0
    #: Where its first message is, as far as the scheduler knows, while it is not ready.
    head: tuple[int, int] | None = None
    #: Whether its place among equal tags is uncertain: the scheduler learns that a channel is empty when it next
    #: looks there, and a message that arrives before that is no new activation.
    vague: bool = False
    entries: list[Entry] = field(default_factory=list)
    running: set[int] = field(default_factory=set)
    #: When its last message was released, later by an interval for each that went ahead of its time in a burst.
    released_at: int = 0

    def due(self, now: int, head: tuple[int, int] | None) -> int:
        """When it may be served: 0 for now."""
        due = self.time(now, head)
        return due if due > now else 0

    def time(self, now: int, head: tuple[int, int] | None) -> int:
        """From when on it may be served."""
        policy = self.policy
        assert head is not None
        if policy.max_concurrency is not None and len(self.running) >= policy.max_concurrency:
            return BLOCKED
        released = min(self.released_at, now + (policy.burst - 1) * policy.interval)
        allowed = released + (2 - policy.burst) * policy.interval if policy.interval else 0
        return max(head[0], policy.paused_until or 0, allowed)

    def is_ripe(self, now: int) -> bool:
        return bool(self.entries) and self.due(now, self.entries[0][:2]) == 0


class Reference:
    """Where messages are scheduled ahead (`plans`), the scheduler looks later whether a channel has become empty."""

    def __init__(self, plans: bool = False) -> None:
        self.plans = plans
        self.channels: defaultdict[str, Channel] = defaultdict(Channel)
        self.vtime = 0
        self.activations = 0
        self.clock = 0
        #: What the next dequeue will hear of: for each statement and channel, where there may be something new.
        self.news: list[tuple[str, tuple[int, int] | None]] = []
        #: The same, of what it has to hear of first: what comes back, or was moved.
        self.urgent_news: list[tuple[str, tuple[int, int] | None]] = []
        #: Channels whose limits are looked at anew, because of a new policy or as a lease ended that counted.
        self.reviewed: set[str] = set()
        #: The policy of the queue, and whether the next dequeue has to look at all channels because of that of these.
        self.max_concurrency: int | None = None
        self.paused_until: int | None = None
        self.changed = False

    def enqueue(self, name: str, entries: Iterable[Entry], urgent: bool = False) -> None:
        """Messages of one channel that arrive with one statement."""
        for entry in (entries := list(entries)):
            insort(self.channels[name].entries, entry)
        if entries:
            place = (min(e.at for e in entries), min(e.id for e in entries))
            if urgent:
                self.urgent_news.append((name, place))
            else:
                self.news.append((name, place))

    def remove(self, name: str, ids: Collection[int]) -> None:
        """Cancelled, deleted, or about to be put back in another place."""
        channel = self.channels[name]
        channel.entries = [entry for entry in channel.entries if entry.id not in ids]

    def end(self, name: str, id_: int) -> None:
        """A lease ended."""
        self.channels[name].running.remove(id_)
        counted = self.max_concurrency is not None or self.channels[name].policy.max_concurrency is not None
        if counted:
            self.urgent_news.append((name, None))
            self.reviewed.add(name)

    def set_policy(self, name: str, policy: Policy) -> None:
        self.channels[name].policy = policy
        self.urgent_news.append((name, None))
        self.reviewed.add(name)

    def set_limit(self, max_concurrency: int | None) -> None:
        """Of the whole queue. With the first one leases are counted, also of those that had counted theirs."""
        if self.max_concurrency is None and max_concurrency is not None:
            for name, channel in self.channels.items():
                if channel.policy.max_concurrency is not None and channel.running:
                    self.set_policy(name, channel.policy)
        self.max_concurrency = max_concurrency

    def dequeue(self, n: int, now: int, seen: Sequence[int] = ()) -> list[tuple[str, int]]:
        """The next n messages; `seen`, what was served in fact, settles the order of channels that are vague."""
        self._hear(now)
        if self.max_concurrency is not None:
            n = min(n, self.max_concurrency - sum(len(channel.running) for channel in self.channels.values()))
        if self.paused_until is not None and self.paused_until > now:
            n = 0
        served: list[tuple[str, int]] = []
        while len(served) < n and (name := self._next(now, seen[len(served) : len(served) + 1])) is not None:
            channel = self.channels[name]
            entry = channel.entries.pop(0)
            served.append((name, entry.id))
            self.vtime = channel.tag
            channel.tag += step(entry.cost, channel.policy.weight)
            channel.running.add(entry.id)
            if channel.policy.interval:
                channel.released_at = max(channel.released_at + channel.policy.interval, now)
            if not channel.is_ripe(now):
                self._wait(channel, vague=n > 1 or self.plans)
        if len(served) < n:
            idle = (channel.tag for channel in self.channels.values() if not channel.ready and channel.head is None)
            self.vtime = max([self.vtime, *idle])
        return served

    def rebuild(self, now: int) -> None:
        """Look at all channels as they are."""
        for channel in self.channels.values():
            if not channel.ready:
                channel.head = None
        found = [(name, c.entries[0][:2] if c.entries else None) for name, c in self.channels.items()]
        self._hear_of(found, now, self.channels)

    def _hear(self, now: int) -> None:
        """Channels become ready: those with urgent news, those with news, those whose time has come."""
        if now < self.clock:
            # Which channels had a turn coming is hard to say of a time that is over twice.
            for channel in self.channels.values():
                channel.vague = True
        self.changed |= now < self.clock - 1000
        self.clock = now
        urgent_news, self.urgent_news = self.urgent_news, []
        self._hear_of(urgent_news, now, self.reviewed)
        self.reviewed.clear()
        if self.changed:
            self.rebuild(now)
            self.changed = False
        news, self.news = self.news, []
        self._hear_of(news, now, ())
        waiting = [c for c in self.channels.values() if c.head is not None and c.due(now, c.head) == 0]
        for channel in sorted(waiting, key=lambda c: (c.time(now, c.head), c.head and c.head[1])):
            # By a clock that was set back meanwhile, its rate may have said another time when it began to wait.
            channel.vague |= channel.policy.interval > 0
            self._activate(channel)
        for channel in self.channels.values():
            if channel.ready and not channel.is_ripe(now):
                self._wait(channel, vague=True)

    def _hear_of(self, news: Sequence[tuple[str, tuple[int, int] | None]], now: int, reviewed: Collection[str]) -> None:
        places: dict[str, tuple[int, int] | None] = {}
        for name, place in news:
            known = places.get(name)
            places[name] = min(place, known) if place and known else place or known
        for name, place in sorted(places.items(), key=lambda item: item[1][1] if item[1] else 0):
            channel = self.channels[name]
            if channel.policy.interval:
                ceiling = now + (channel.policy.burst - 1) * channel.policy.interval
                channel.released_at = min(channel.released_at, ceiling)
            if channel.ready:
                if not channel.is_ripe(now):
                    self._wait(channel, vague=True)
                continue
            moves = place is not None and (channel.head is None or place < channel.head)
            if moves:
                channel.head = place
            if (moves or name in reviewed) and channel.head is not None and channel.due(now, channel.head) == 0:
                self._activate(channel)
                channel.vague |= name in reviewed

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
