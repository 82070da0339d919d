"""Whatever users, workers, operators and the clock do, in whatever order: the queue serves what the reference would.

The clock stands still between its own moves, so that what is due, what has run out and what a rate allows is exact.
FAIRQUEUE_TEST_EXAMPLES=2000 makes the machine run for long.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import clear, lease_of, move_clock, plan_ahead, stop_clock
from tests.invariants import check_invariants
from tests.limiting import NOW
from tests.reference import BLOCKED, Entry, Policy, Reference
from tests.scheduling.drawing import (
    DAY,
    HOUR,
    LEASE,
    NAMES,
    Known,
    costs,
    delays,
    leased,
    limits,
    names,
    pauses,
    policies,
    room,
    run_machine,
    some,
    weights,
)


class QueueMachine(RuleBasedStateMachine):
    engine: ClassVar[Engine]

    @initialize(plans=st.booleans())
    def begin(self, plans: bool) -> None:
        clear(self.engine)
        self.session = Session(self.engine, expire_on_commit=False)
        move_clock(self.session, NOW)
        self.now = NOW
        self.plans = plans
        self.reference = Reference(plans)
        self.leases: dict[int, fq.LeasedMessage[Any]] = {}
        self.known: dict[int, Known] = {}
        self.dead: set[int] = set()
        self.outcomes: list[tuple[int, str]] = []
        self.max_attempts = 20
        self.defaults = Policy()
        self.overrides: dict[str, dict[str, Any]] = {}
        self.times: set[int] = set()
        self.add_many(rows=[(name, 1, 0) for name in NAMES for _ in range(9 if plans else 3)], max_attempts=None)

    def teardown(self) -> None:
        if hasattr(self, "session"):
            try:
                self.everything_is_served()
            finally:
                self.session.close()

    def everything_is_served(self) -> None:
        """The invariants hold, and without limits draining leaves nothing that is due; every end is in the history."""
        self.session.rollback()
        check_invariants(self.session.connection(), caps=False)
        self.session.commit()
        self.lease(1000)
        for name in NAMES:
            self.delete_channel_row(name)
        self.delete_queue_row()
        self.move_to(self.now + 3 * HOUR)
        while self.lease(1000):
            pass
        assert not [e for c in self.reference.channels.values() for e in c.entries if e.at <= self.now]
        check_invariants(self.session.connection(), caps=False)
        told = self.session.execute(text("SELECT message_id, outcome FROM fairqueue.history")).all()
        assert sorted((row.message_id, row.outcome) for row in told) == sorted(self.outcomes)

    # Producers

    def at(self, delay: int) -> int:
        """A time that no other message has, if it is to come: of two that come at once, either may be first."""
        at = self.now + delay
        while delay > 0 and at in self.times:
            at += 1
        self.times.add(at)
        return at

    def arrived(self, channel: str, entries: list[Entry], max_attempts: int | None = None) -> None:
        self.reference.enqueue(channel, entries)
        self.known.update((entry.id, Known(channel, entry, max_attempts)) for entry in entries)

    @rule(channel=names, cost=costs, delay=delays)
    @room
    def add(self, channel: str, cost: float, delay: int) -> None:
        at = self.at(delay)
        message = fq.Message(channel, dequeue_at=at, cost=cost)
        self.session.add(message)
        self.session.commit()
        self.arrived(channel, [Entry(at, message.id, cost)])

    @rule(rows=st.lists(st.tuples(names, costs, delays), min_size=5, max_size=20), max_attempts=limits)
    @room
    def add_many(self, rows: list[tuple[str, float, int]], max_attempts: int | None) -> None:
        ats = [self.at(delay) for _, _, delay in rows]
        ids = fq.enqueue_many(
            self.session,
            [
                {"channel": c, "cost": cost, "dequeue_at": at, "max_attempts": max_attempts}
                for (c, cost, _), at in zip(rows, ats, strict=True)
            ],
        )
        self.session.commit()
        for channel in {row[0] for row in rows}:
            self.arrived(
                channel,
                [Entry(at, id_, cost) for at, id_, (c, cost, _) in zip(ats, ids, rows, strict=True) if c == channel],
                max_attempts,
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
        self.lease(limit)

    def lease(self, limit: int) -> int:
        ended = sorted((known.until, id_) for id_ in self.leases if (known := self.known[id_]).until <= self.now)
        if self.plans:
            plan_ahead(self.session)
        batch = lease_of(self.session, limit, LEASE / 1000)
        self.ran_out([id_ for _, id_ in ended])
        served = [(message.channel, message.id) for message in batch]
        assert served == self.reference.dequeue(limit, self.now, [id_ for _, id_ in served])
        for message in batch:
            known = self.known[message.id]
            known.attempt += 1
            known.until = self.now + LEASE
            assert (message.attempt, message.forgiven) == (known.attempt, known.forgiven)
            assert message.dequeue_at <= self.now
            assert message.id not in self.leases
            self.leases[message.id] = message
        return len(batch)

    def ran_out(self, ids: Iterable[int]) -> None:
        """What a dequeue did first with leases that ran out, in the order in which they did; as it says itself when."""
        for id_ in ids:
            del self.leases[id_]
            died = self.known[id_].used_up(self.max_attempts)
            self.back(id_, None if died else self.stored(id_).dequeue_at, died)

    def stored(self, id_: int) -> fq.Message:
        message = self.session.get_one(fq.Message, id_, populate_existing=True)
        self.session.commit()
        return message

    def leases_from(self, place: int, count: int) -> list[fq.LeasedMessage[Any]]:
        """Up to `count` leases, which are no longer ours afterwards."""
        ids = sorted(self.leases)
        place %= len(ids)
        return [self.leases.pop(id_) for id_ in ids[place : place + count]]

    def back(self, id_: int, at: int | None = None, died: bool = False) -> None:
        """A lease ended, and the message is ready again, or dead."""
        known = self.known[id_]
        self.reference.end(known.channel, id_)
        if died:
            self.dead.add(id_)
            self.outcomes.append((id_, "dead"))
        else:
            known.entry = known.entry._replace(at=known.entry.at if at is None else at)
            self.reference.enqueue(known.channel, [known.entry], urgent=True)

    def left(self, leases: Iterable[fq.LeasedMessage[Any]], outcome: str) -> None:
        for lease in leases:
            self.reference.end(lease.channel, lease.id)
            self.outcomes.append((lease.id, outcome))

    @rule(place=some, count=st.integers(1, 10))
    @leased
    def complete(self, place: int, count: int) -> None:
        leases = self.leases_from(place, count)
        results = [row.result for row in self.session.execute(fq.complete(leases))]
        self.session.commit()
        assert results == ["completed"] * len(leases)
        self.left(leases, "completed")

    @rule(place=some, count=st.integers(1, 3), delay=st.sampled_from([0, None, 5]))
    @room
    @leased
    def fail(self, place: int, count: int, delay: float | None) -> None:
        leases = self.leases_from(place, count)
        results = [row.result for row in self.session.execute(fq.fail(leases, "no", delay=delay))]
        died = [self.known[lease.id].used_up(self.max_attempts) for lease in leases]
        assert results == ["dead" if dead else "failed" for dead in died]
        self.session.commit()
        for lease, dead in zip(leases, died, strict=True):
            self.back(lease.id, None if dead else self.stored(lease.id).dequeue_at, dead)

    @rule(place=some, delay=st.sampled_from([None, 0, 0.03, 86_400]))
    @room
    @leased
    def defer(self, place: int, delay: float | None) -> None:
        (lease,) = self.leases_from(place, 1)
        assert self.session.execute(fq.defer(lease, delay=delay)).one().result == "deferred"
        self.session.commit()
        self.known[lease.id].forgiven += 1
        self.back(lease.id, lease.dequeue_at if delay == 0 else self.now + round((delay or 0) * 1000))

    @rule(place=some, lease=st.sampled_from([1, 7200]))
    @leased
    def heartbeat(self, place: int, lease: float) -> None:
        id_ = sorted(self.leases)[place % len(self.leases)]
        assert self.session.execute(fq.heartbeat(self.leases[id_], lease=lease)).one().result == "extended"
        self.session.commit()
        self.known[id_].until = max(self.known[id_].until, self.now + round(lease * 1000))

    @rule(channel=st.sampled_from([None, *NAMES]))
    @room
    def redrive(self, channel: str | None) -> None:
        self.move_to(self.now + 1)  # Two outcomes of a message have two times.
        rows = self.session.execute(fq.redrive(queue="default", channel=channel)).all()
        self.session.commit()
        expected = {id_ for id_ in self.dead if channel in (None, self.known[id_].channel)}
        assert {(row.id, row.result) for row in rows} == {(id_, "redriven") for id_ in expected}
        self.dead -= expected
        for name in NAMES:
            entries = [self.known[id_].entry for id_ in expected if self.known[id_].channel == name]
            entries = [entry._replace(at=self.now) for entry in entries]
            for entry in entries:
                self.known[entry.id].entry = entry
                self.known[entry.id].forgiven = self.known[entry.id].attempt
            self.reference.enqueue(name, entries, urgent=True)

    # The clock

    def move_to(self, now: int) -> None:
        self.now = now
        move_clock(self.session, now)

    @rule(by=st.sampled_from([1, 40, 999, 1000, 61_000, HOUR, 3 * HOUR, DAY, -500, -5000, -2 * HOUR]))
    def time_passes(self, by: int) -> None:
        """Or goes back."""
        self.move_to(self.now + by)

    # Operators and users

    def until(self, pause: int | None) -> tuple[bool, datetime | None, int | None]:
        """A pause as policies have it, and as the reference does."""
        if pause is None or pause == BLOCKED:
            return pause is not None, None, pause
        at = self.now + pause
        return True, datetime.fromtimestamp(at // 1000, UTC).replace(microsecond=at % 1000 * 1000), at

    def policy(self, channel: str) -> Policy:
        return self.defaults._replace(**self.overrides.get(channel, {}))

    @rule(channel=names, policy=policies)
    def set_policy(self, channel: str, policy: Policy) -> None:
        paused, resume_at, until = self.until(policy.paused_until)
        self.session.merge(
            fq.Channel(
                name=channel,
                weight=policy.weight,
                max_concurrency=policy.max_concurrency,
                release_interval_ms=policy.interval,
                burst=policy.burst,
                paused=paused,
                resume_at=resume_at,
            )
        )
        self.session.commit()
        self.overrides[channel] = policy._replace(paused_until=until)._asdict()
        if policy.max_concurrency is None:
            del self.overrides[channel]["max_concurrency"]
        self.reference.set_policy(channel, self.policy(channel))

    @rule(channel=names)
    def delete_channel_row(self, channel: str) -> None:
        if row := self.session.get(fq.Channel, ("default", channel)):
            self.session.delete(row)
            self.overrides.pop(channel, None)
            self.reference.set_policy(channel, self.policy(channel))
        self.session.commit()

    @rule(limit=limits, attempts=st.sampled_from([1, 2, 20]), pause=pauses, weight=weights, channel_limit=limits)
    def set_queue(
        self, limit: int | None, attempts: int, pause: int | None, weight: float, channel_limit: int | None
    ) -> None:
        paused, resume_at, until = self.until(pause)
        self.session.merge(
            fq.Queue(
                name="default",
                max_concurrency=limit,
                max_attempts=attempts,
                paused=paused,
                resume_at=resume_at,
                channel_weight=weight,
                channel_max_concurrency=channel_limit,
            )
        )
        self.session.commit()
        self.queue_is(limit, attempts, until, Policy(weight=weight, max_concurrency=channel_limit))

    @rule()
    def delete_queue_row(self) -> None:
        if row := self.session.get(fq.Queue, "default"):
            self.session.delete(row)
            self.queue_is(None, 20, None, Policy())
        self.session.commit()

    def queue_is(self, limit: int | None, attempts: int, until: int | None, defaults: Policy) -> None:
        # What holds for the whole queue is no reason to look at all channels.
        self.reference.changed |= defaults != self.defaults
        self.defaults, self.max_attempts = defaults, attempts
        for name, channel in self.reference.channels.items():
            channel.policy = self.policy(name)
        self.reference.set_limit(limit)
        self.reference.paused_until = until

    @rule()
    def repair(self) -> None:
        """Deriving everything anew changes nothing."""
        check_invariants(self.session.connection(), caps=False)
        self.session.commit()
        self.session.execute(text("SELECT fairqueue.queue_repair()"))
        self.session.commit()
        check_invariants(self.session.connection(), caps=False)
        self.session.commit()
        self.reference.rebuild(self.now)

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
            self.outcomes.append((entry.id, "cancelled"))
        self.session.commit()
        self.reference.remove(name, [entry.id])

    @rule(place=some)
    @leased
    def cancel_leased(self, place: int) -> None:
        (lease,) = self.leases_from(place, 1)
        assert self.session.execute(fq.cancel(lease)).one().result == "cancelled"
        assert self.session.execute(fq.complete(lease)).one().result == "not_found"
        self.session.commit()
        self.left([lease], "cancelled")

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
            self.known[entry.id].entry = entry._replace(at=at)
            self.reference.enqueue(name, [self.known[entry.id].entry], urgent=True)


@pytest.fixture(params=["", "heads"])
def machine(engine: Engine, request: pytest.FixtureRequest) -> type[QueueMachine]:
    QueueMachine.engine = engine
    stop_clock(engine, NOW)
    if request.param:
        request.getfixturevalue(request.param)
    return QueueMachine


@pytest.mark.soak
def test_the_queue_does_what_the_reference_does(machine: type[QueueMachine]) -> None:
    run_machine(machine, 60)
