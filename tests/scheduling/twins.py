"""A queue and the reference side by side: whatever happens to one happens to the other."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import text
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import EPOCH, complete, expire, lease_of, move_clock, plan_ahead, sql
from tests.limiting import LEASE, NOW, limit_queue
from tests.reference import BLOCKED, Entry, Policy, Reference

HOUR = 3_600_000
EARLY = -1

#: A message that is enqueued: its channel, its time, its cost.
Put = tuple[str, int, float]


def planned(session: Session) -> list[tuple[str, int]]:
    """What is scheduled ahead and hasn't been served: channel and id."""
    rows = session.execute(
        text("""
            SELECT e.channel, e.id
            FROM fairqueue.rotation r
            JOIN fairqueue.plan p ON p.queue = r.queue
            CROSS JOIN LATERAL unnest(p.ids, p.channels) WITH ORDINALITY AS e (id, channel, nth)
            WHERE p.place + e.nth - 1 > r.place
                AND (p.place + e.nth - 1 - r.place > coalesce(pg_sequence_last_value(r.tickets) - r.ticket_base, 0)
                    OR EXISTS (SELECT FROM fairqueue.message m WHERE m.id = e.id AND m.leased_until IS NULL))
            ORDER BY p.place, e.nth""")
    ).all()
    session.commit()
    return [(row.channel, row.id) for row in rows]


def _resume_at(until: int | None) -> datetime | None:
    """The end of a pause as policies have it."""
    return None if until in (None, BLOCKED) else EPOCH + timedelta(milliseconds=until)


class Twins:
    """A queue, and the reference, to which the same happens."""

    def __init__(self, session: Session, policies: dict[str, Policy] | None = None) -> None:
        self.session = session
        self.reference = Reference(plans=True)
        self.now = NOW
        self.left: dict[int, tuple[str, Entry]] = {}
        self.leases: dict[int, fq.LeasedMessage] = {}
        for channel, policy in (policies or {}).items():
            self.policy(channel, policy)

    def put(self, channel: str, costs: Sequence[float] = (1,), at: int = EARLY) -> list[int]:
        return self.put_all([(channel, at, cost) for cost in costs])

    def put_all(self, messages: Sequence[Put]) -> list[int]:
        """Of any channels, in one statement."""
        rows: list[fq.MessageRow] = [{"channel": name, "dequeue_at": at, "cost": cost} for name, at, cost in messages]
        ids = fq.enqueue_many(self.session, rows)
        self.session.commit()
        entries: dict[str, list[Entry]] = {}
        for (channel, at, cost), id_ in zip(messages, ids, strict=True):
            entries.setdefault(channel, []).append(Entry(at, id_, cost))
        for channel, found in entries.items():
            self.reference.enqueue(channel, found)
            self.left.update((entry.id, (channel, entry)) for entry in found)
        return ids

    def policy(self, channel: str, policy: Policy) -> None:
        self.session.merge(
            fq.Channel(
                channel,
                weight=policy.weight,
                max_concurrency=policy.max_concurrency,
                release_interval_ms=policy.interval or None,
                paused=policy.paused_until is not None,
                resume_at=_resume_at(policy.paused_until),
            )
        )
        self.session.commit()
        self.reference.set_policy(channel, policy)

    def pause(self, until: int | None = BLOCKED) -> None:
        """The whole queue; None ends it."""
        pause = "SELECT fairqueue.queue_set('default', paused => :on, resume_at => :at)"
        sql(self.session, pause, on=until is not None, at=_resume_at(until))
        self.reference.paused_until = until

    def limit(self, max_concurrency: int | None) -> None:
        """The whole queue; None ends it."""
        limit_queue(self.session, max_concurrency=max_concurrency)
        self.reference.set_limit(max_concurrency)

    def remove(self, ids: Sequence[int]) -> list[tuple[str, Entry]]:
        """From the reference; the queue was told already."""
        removed = [self.left.pop(id_) for id_ in ids]
        for channel, entry in removed:
            self.reference.remove(channel, [entry.id])
        return removed

    def cancel(self, ids: Sequence[int]) -> None:
        assert [row.result for row in self.session.execute(fq.cancel(ids))] == ["cancelled"] * len(ids)
        self.session.commit()
        self.remove(ids)

    def end(self, ids: Sequence[int]) -> None:
        """These leases are completed."""
        leases = [self.leases.pop(id_) for id_ in ids]
        assert complete(self.session, leases) == ["completed"] * len(ids)
        for lease in leases:
            self.reference.end(lease.channel, lease.id)

    def run_out(self, id_: int) -> None:
        """This lease: the message comes back to its old place."""
        lease = self.leases.pop(id_)
        expire(self.session, [id_])
        self.reference.end(lease.channel, id_)
        entry = Entry(lease.dequeue_at, id_, lease.cost)
        self.reference.enqueue(lease.channel, [entry], urgent=True)
        self.left[id_] = lease.channel, entry

    def set_back(self, by: int) -> None:
        """The clock, by so many milliseconds."""
        self.now -= by
        move_clock(self.session, self.now)

    def edit(self, id_: int, channel: str | None = None, **changes: float) -> None:
        """A user's UPDATE of a message that is ready."""
        name, entry = self.left[id_]
        for column, value in {"channel": channel, **changes}.items():
            if value is not None:
                sql(self.session, f"UPDATE fairqueue.message SET {column} = :value WHERE id = :id", value=value, id=id_)
        self.remove([id_])
        entry = Entry(int(changes.get("dequeue_at", entry.at)), id_, changes.get("cost", entry.cost))
        self.left[id_] = channel or name, entry
        self.reference.enqueue(channel or name, [entry], urgent=True)

    def serve(self, limit: int) -> list[tuple[str, int]]:
        """One dequeue, which is what the reference says."""
        batch = self.batch(limit)
        served = [(message.channel, message.id) for message in batch]
        expected = self.reference.dequeue(limit, self.now, [id_ for _, id_ in served])
        assert served == expected, f"{served}, not {expected}"
        for message in batch:
            self.leases[message.id] = message
            del self.left[message.id]
        return served

    def batch(self, limit: int) -> list[fq.LeasedMessage]:
        return lease_of(self.session, limit, LEASE)

    def plan(self, ahead: int = 64) -> None:
        """Some of it is scheduled ahead, and the first message of that has been served."""
        plan_ahead(self.session, ahead)
        self.serve(1)

    def drain(self, limit: int, ahead: int = 64) -> None:
        """All the rest, with one plan after the other."""
        while True:
            plan_ahead(self.session, ahead)
            if not self.serve(limit):
                break
        assert self.left == {}
        assert fq.check(self.session) == []
        self.session.commit()

    def open(self) -> None:
        """Everything is due, and there are no limits."""
        for name in self.session.scalars(text("SELECT name FROM fairqueue.channel")).all():
            self.policy(name, Policy())
        self.now = max(self.now, NOW) + 3 * HOUR
        move_clock(self.session, self.now)


def several_of_each(twins: Twins) -> None:
    for channel in "abcdef":
        twins.put(channel, [1, 2, 0.5] * (2 if channel == "d" else 5), NOW if channel in "ef" else EARLY)
    twins.put("d", at=NOW + HOUR)
    twins.serve(3)
    twins.plan()
    assert len(planned(twins.session)) > 30
    assert {channel for channel, _ in planned(twins.session)} == set("abcdef")


def heads_of_many(twins: Twins) -> None:
    """Of 70 channels, some of which have no more than that one, or another one for later.

    The first dequeue hears of all of them: in what order the news of one statement is taken in nobody says.
    """
    messages: list[Put] = []
    for number, channel in enumerate(["g", "h", "i", *"abcdef", *(f"j{number}" for number in range(61))]):
        messages += [(channel, NOW if channel in "ef" else EARLY, cost) for cost in [1, 2, 0.5, 1][: 1 + number % 4]]
        if number % 8 == 0:
            messages.append((channel, NOW + HOUR - number, 1))
    twins.put_all(messages)
    twins.serve(3)
    twins.plan(18)
    assert [channel for channel, _ in planned(twins.session)] == [*"bcdef", *(f"j{number}" for number in range(12))]
