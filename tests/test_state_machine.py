"""Whatever users and workers do, in whatever order: the queue serves exactly what the reference would.

FAIRQUEUE_TEST_EXAMPLES=2000 makes the machine run for long.
"""

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, TypeVar, cast

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from sqlalchemy import Engine
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import clock, expire, lease_of, truncate, wait_until
from tests.invariants import check_invariants
from tests.reference import Entry, Reference

EXAMPLES = int(os.environ.get("FAIRQUEUE_TEST_EXAMPLES", "60"))
LEASE = 3600
DAY = 86_400_000

NAMES = ["acme", "globex", "initech", "umbrella", "wayne"]
names = st.sampled_from(NAMES)
costs = st.sampled_from([1, 1, 1, 0.1, 2, 7])
weights = st.sampled_from([1, 2, 3, 0.5, 10])
#: When a message may be served, in milliseconds from now.
delays = st.sampled_from([0, 0, -1, -5000, DAY, 40])
some = st.integers(0, 1_000_000)

Act = TypeVar("Act", bound=Callable[..., None])


def room(act: Act) -> Act:
    """What one call takes in before it serves is bounded, by 68 for a single message: leave out what is beyond."""
    return only_if(lambda machine: len(machine.reference.news) < 50, act)


def leased(act: Act) -> Act:
    return only_if(lambda machine: bool(machine.leases), act)


def only_if(condition: "Callable[[QueueMachine], bool]", act: Act) -> Act:
    """Not a Hypothesis precondition: what is leased depends on the clock, and what is drawn may not."""

    @functools.wraps(act)
    def wrapped(machine: "QueueMachine", **arguments: Any) -> None:
        if condition(machine):
            act(machine, **arguments)

    return cast("Act", wrapped)


class QueueMachine(RuleBasedStateMachine):
    engine: ClassVar[Engine]

    @initialize()
    def begin(self) -> None:
        truncate(self.engine)
        self.session = Session(self.engine, expire_on_commit=False)
        self.reference = Reference()
        self.leases: dict[int, fq.LeasedMessage[Any]] = {}
        self.where: dict[int, tuple[str, Entry]] = {}
        self.times: set[int] = set()
        self.add_many(rows=[(name, 1, 0) for name in NAMES for _ in range(3)])

    def teardown(self) -> None:
        if hasattr(self, "session"):
            try:
                self.everything_is_served()
            finally:
                self.session.close()

    def everything_is_served(self) -> None:
        """The invariants hold, and draining leaves nothing that is due."""
        self.session.rollback()
        check_invariants(self.session.connection())
        self.session.commit()
        self.dequeue(1000)
        now = clock(self.session)
        self.dequeue(1000)
        assert not [e for c in self.reference.channels.values() for e in c.entries if e.at < now]
        check_invariants(self.session.connection())

    # Producers

    def at(self, delay: int) -> int:
        """A time that no other message has, if it is to come: of two that come at once, either may be first."""
        at = clock(self.session) + delay
        while delay > 0 and at in self.times:
            at += 1
        self.times.add(at)
        return at

    def arrived(self, channel: str, entries: list[Entry]) -> None:
        self.reference.enqueue(channel, entries)
        self.where.update((entry.id, (channel, entry)) for entry in entries)

    @rule(channel=names, cost=costs, delay=delays)
    @room
    def add(self, channel: str, cost: float, delay: int) -> None:
        at = self.at(delay)
        message = fq.Message(channel, dequeue_at=at, cost=cost)
        self.session.add(message)
        self.session.commit()
        self.arrived(channel, [Entry(at, message.id, cost)])

    @rule(rows=st.lists(st.tuples(names, costs, delays), min_size=5, max_size=20))
    @room
    def add_many(self, rows: list[tuple[str, float, int]]) -> None:
        ats = [self.at(delay) for _, _, delay in rows]
        ids = fq.enqueue_many(
            self.session,
            [{"channel": c, "cost": cost, "dequeue_at": at} for (c, cost, _), at in zip(rows, ats, strict=True)],
        )
        self.session.commit()
        for channel in {row[0] for row in rows}:
            self.arrived(
                channel,
                [Entry(at, id_, cost) for at, id_, (c, cost, _) in zip(ats, ids, rows, strict=True) if c == channel],
            )

    @rule(channel=names, priority=st.integers(1, 3))
    @room
    def add_urgent(self, channel: str, priority: int) -> None:
        message = fq.enqueue(self.session, channel, priority=priority)
        self.session.commit()
        self.arrived(channel, [Entry(-priority, message.id)])

    @rule(channel=names, count=st.integers(1, 5), savepoint=st.booleans())
    def add_in_vain(self, channel: str, count: int, savepoint: bool) -> None:
        rows: list[fq.MessageRow] = [{"channel": channel}] * count
        if savepoint:
            with self.session.begin_nested() as nested:
                fq.enqueue_many(self.session, rows)
                nested.rollback()
            self.session.commit()
        else:
            fq.enqueue_many(self.session, rows)
            self.session.rollback()

    # Workers

    @rule(limit=st.sampled_from([1, 1, 2, 2, 3, 3, 4, 10]))
    def dequeue(self, limit: int) -> None:
        now = clock(self.session)
        batch = lease_of(self.session, limit, LEASE)
        if batch:  # What the call took for the time.
            now = int((batch[0].leased_until - timedelta(seconds=LEASE)).timestamp() * 1000)
        served = [(message.channel, message.id) for message in batch]
        assert served == self.reference.dequeue(limit, now, [id_ for _, id_ in served])
        for message in batch:
            assert message.dequeue_at <= now
            self.leases[message.id] = message

    def leases_from(self, place: int, count: int) -> list[fq.LeasedMessage[Any]]:
        """Up to `count` leases, which are no longer ours afterwards."""
        ids = sorted(self.leases)
        place %= len(ids)
        return [self.leases.pop(id_) for id_ in ids[place : place + count]]

    def back(self, id_: int, at: int | None = None) -> None:
        channel, entry = self.where[id_]
        self.arrived(channel, [entry if at is None else entry._replace(at=at)])

    @rule(place=some, count=st.integers(1, 10))
    @leased
    def complete(self, place: int, count: int) -> None:
        leases = self.leases_from(place, count)
        results = [row.result for row in self.session.execute(fq.complete(leases))]
        self.session.commit()
        assert results == ["completed"] * len(leases)

    @rule(place=some, count=st.integers(1, 3))
    @room
    @leased
    def fail(self, place: int, count: int) -> None:
        leases = self.leases_from(place, count)
        results = [row.result for row in self.session.execute(fq.fail(leases, "no"))]
        self.session.commit()
        assert results == ["failed"] * len(leases)
        for lease in leases:
            self.back(lease.id)

    @rule(place=some, delay=st.sampled_from([0, 0.03, 86_400]))
    @room
    @leased
    def defer(self, place: int, delay: float) -> None:
        (lease,) = self.leases_from(place, 1)
        assert self.session.execute(fq.defer(lease, delay=delay)).one().result == "deferred"
        self.session.commit()
        stored = self.session.get_one(fq.Message, lease.id, populate_existing=True)
        self.session.commit()
        self.back(lease.id, stored.dequeue_at)

    @rule(place=some, count=st.integers(1, 3))
    @room
    @leased
    def leases_run_out(self, place: int, count: int) -> None:
        leases = self.leases_from(place, count)
        expire(self.session, [lease.id for lease in leases])
        for lease in leases:
            self.back(lease.id)

    # Operators and users

    @rule()
    def time_passes(self) -> None:
        """Until nothing is about to become due."""
        start = clock(self.session)
        near = [e.at for c in self.reference.channels.values() for e in c.entries if e.at < start + DAY // 2]
        wait_until(lambda: clock(self.session) > max(near, default=0))

    @rule(channel=names, weight=weights)
    @room
    def set_weight(self, channel: str, weight: float) -> None:
        self.session.merge(fq.Channel(name=channel, weight=weight))
        self.session.commit()
        self.reference.channels[channel].weight = weight

    @rule(channel=names)
    @room
    def delete_channel_row(self, channel: str) -> None:
        if row := self.session.get(fq.Channel, ("default", channel)):
            self.session.delete(row)
        self.session.commit()
        self.reference.channels[channel].weight = 1

    def ready(self, place: int) -> tuple[str, Entry] | None:
        ready = [(name, entry) for name, c in sorted(self.reference.channels.items()) for entry in c.entries]
        return ready[place % len(ready)] if ready else None

    @rule(place=some, by_orm=st.booleans())
    def remove_ready(self, place: int, by_orm: bool) -> None:
        if not (found := self.ready(place)):
            return
        name, entry = found
        if by_orm:
            self.session.delete(self.session.get_one(fq.Message, entry.id))
        else:
            assert self.session.execute(fq.cancel(entry.id)).one().result == "cancelled"
        self.session.commit()
        self.reference.remove(name, [entry.id])

    @rule(channel=names)
    def cancel_channel(self, channel: str) -> None:
        ids = [entry.id for entry in self.reference.channels[channel].entries]
        self.session.execute(fq.cancel(ids))
        self.session.commit()
        self.reference.remove(channel, ids)

    @rule(place=some)
    @leased
    def cancel_leased(self, place: int) -> None:
        (lease,) = self.leases_from(place, 1)
        assert self.session.execute(fq.cancel(lease)).one().result == "cancelled"
        assert self.session.execute(fq.complete(lease)).one().result == "not_found"
        self.session.commit()

    @rule(place=some, delay=delays)
    @room
    def move(self, place: int, delay: int) -> None:
        """A user gives a ready message another time."""
        if not (found := self.ready(place)):
            return
        name, entry = found
        at = self.at(delay)
        self.session.get_one(fq.Message, entry.id, populate_existing=True).dequeue_at = at
        self.session.commit()
        if at != entry.at:
            self.reference.remove(name, [entry.id])
            self.where[entry.id] = (name, entry)
            self.back(entry.id, at)


@pytest.fixture
def machine(engine: Engine) -> type[QueueMachine]:
    QueueMachine.engine = engine
    return QueueMachine


def test_the_queue_does_what_the_reference_does(machine: type[QueueMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=40,
            deadline=None,
            derandomize="FAIRQUEUE_TEST_EXAMPLES" not in os.environ,
            suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
        ),
    )
