"""Limits on what runs are exact, however they are set, changed and taken away, and however leases end.

The queue goes by a clock that stands still, so each number here is one. Rates and pauses are in test_rates.py, and
transactions that overlap in test_interleaved.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import TIDY, complete, expire, lease_of, move_clock, put, put_all, sql, take
from tests.invariants import check_invariants
from tests.limiting import LEASE, NOW, leases, limit, limit_queue, serve

Lease = fq.LeasedMessage
End = Callable[[Session, Lease], object]


pytestmark = [pytest.mark.usefixtures("clock_that_stands"), pytest.mark.shared_database]


# Where a limit may be set, with the same effect on a channel that is alone


def by_channel(session: Session, at: int | None) -> None:
    limit(session, max_concurrency=at)


def by_queue(session: Session, at: int | None) -> None:
    limit_queue(session, max_concurrency=at)


def by_default(session: Session, at: int | None) -> None:
    limit_queue(session, channel_max_concurrency=at)


def by_function(session: Session, at: int | None) -> None:
    if at is None:
        sql(session, "UPDATE fairqueue.channel SET max_concurrency = NULL")
    else:
        sql(session, "SELECT fairqueue.channel_set('acme', max_concurrency => :at)", at=at)


SETTERS = [by_channel, by_queue, by_default, by_function]
Setter = Callable[[Session, int | None], None]

each_setter = pytest.mark.parametrize("set_limit", SETTERS)


# How a lease may end


def by_complete(session: Session, lease: Lease) -> None:
    assert complete(session, [lease]) == ["completed"]


def by_fail(session: Session, lease: Lease) -> None:
    assert session.execute(fq.fail(lease, delay=3600)).one().result == "failed"


def by_fail_at_once(session: Session, lease: Lease) -> None:
    assert session.execute(fq.fail(lease, delay=0)).one().result == "failed"


def by_death(session: Session, lease: Lease) -> None:
    assert session.execute(fq.fail(lease, retry=False)).one().result == "dead"


def by_defer(session: Session, lease: Lease) -> None:
    assert session.execute(fq.defer(lease)).one().result == "deferred"


def by_cancel(session: Session, lease: Lease) -> None:
    assert session.execute(fq.cancel(lease)).one().result == "cancelled"


def by_orm_delete(session: Session, lease: Lease) -> None:
    session.delete(session.get_one(fq.Message, lease.id))


def by_expiry(session: Session, lease: Lease) -> None:
    expire(session, [lease.id])


def by_expiry_of_the_last_attempt(session: Session, lease: Lease) -> None:
    sql(session, "UPDATE fairqueue.message SET max_attempts = 1 WHERE id = :id", id=lease.id)
    expire(session, [lease.id])


ENDS = [
    by_complete,
    by_fail,
    by_fail_at_once,
    by_death,
    by_defer,
    by_cancel,
    by_orm_delete,
    by_expiry,
    by_expiry_of_the_last_attempt,
]


class TestConcurrency:
    @each_setter
    @pytest.mark.parametrize("end", ENDS)
    def test_an_end_makes_room_for_one(self, session: Session, set_limit: Setter, end: End) -> None:
        put(session, "acme", 9)
        set_limit(session, 3)
        batch = leases(session)
        assert len(batch) == 3
        assert serve(session) == []
        for lease in [batch[1], *leases(session)]:
            end(session, lease)
            session.commit()
            assert len(serve(session)) == 1
            assert serve(session) == []
        check_invariants(session.connection())

    @each_setter
    def test_limits_change_while_messages_run(self, session: Session, set_limit: Setter) -> None:
        """Introduced, lowered, raised, removed, introduced again: at the next dequeue, and all that runs counts."""
        put(session, "acme", 30)
        running = leases(session, 4)
        set_limit(session, 5)
        running += (got := leases(session))
        assert len(got) == 1
        set_limit(session, 2)
        for _ in range(3):
            complete(session, [running.pop()])
            assert serve(session) == []
        complete(session, [running.pop(0)])
        running += (got := leases(session))
        assert len(got) == 1
        set_limit(session, 6)
        running += (got := leases(session))
        assert len(got) == 4
        set_limit(session, None)
        running += (got := leases(session, 3))
        assert len(got) == 3
        set_limit(session, 8)
        assert serve(session) == []
        complete(session, running[:2])
        assert len(serve(session)) == 1

    def test_the_rest_of_a_batch_goes_to_others(self, session: Session) -> None:
        put_all(session, {"acme": 50, "globex": 4, "initech": 50})
        limit(session, max_concurrency=2)
        served = serve(session, 20)
        assert {name: served.count(name) for name in set(served)} == {"acme": 2, "globex": 4, "initech": 14}
        limit_queue(session, max_concurrency=25)
        assert serve(session, 20) == ["initech"] * 5

    @pytest.mark.parametrize("batch", [1, 2, 3, 10])
    def test_never_more_and_never_idle(self, session: Session, batch: int) -> None:
        """Whatever the batch: as many run as may, of each and of all, and in the end each was served once."""
        put_all(session, {"acme": 13, "globex": 8, "initech": 11})
        limit_queue(session, max_concurrency=5, channel_max_concurrency=2)
        limit(session, "initech", max_concurrency=1000)
        served: list[int] = []
        running: list[Lease] = []
        while len(served) < 32 or running:
            while got := lease_of(session, batch, LEASE):
                running += got
                served += [lease.id for lease in got]
            left = session.execute(
                text("SELECT channel, count(*) FROM fairqueue.message WHERE leased_until IS NULL GROUP BY channel")
            ).all()
            check_invariants(session.connection())
            names = [lease.channel for lease in running]
            if len(running) < 5:
                assert all(row.channel != "initech" and names.count(row.channel) == 2 for row in left)
            complete(session, [running.pop(0)])
        assert sorted(served) == sorted(set(served))

    def test_service_tiers(self, session: Session) -> None:
        """A default for all, an override for some; null is the default, a large number no limit."""
        limit_queue(session, channel_max_concurrency=2)
        for name, at in {"free": None, "plus": 4, "team": 2**31 - 1}.items():
            limit(session, name, max_concurrency=at)
        put_all(session, {"free": 20, "plus": 20, "team": 20, "unknown": 20})
        served = serve(session)
        assert {n: served.count(n) for n in set(served)} == {"free": 2, "plus": 4, "team": 20, "unknown": 2}
        limit_queue(session, channel_max_concurrency=3)
        assert sorted(serve(session)) == ["free", "unknown"]
        limit(session, "plus", max_concurrency=None)
        assert serve(session) == []
        session.delete(session.get_one(fq.Queue, "default"))
        session.commit()
        assert len(serve(session)) == 17 + 16 + 17

    def test_tiers_by_class_of_rate(self, session: Session) -> None:
        limit_queue(session, channel_release_interval_ms=1000, channel_burst=2)
        limit(session, "fast", release_interval_ms=0)
        limit(session, "wide", burst=5)
        put_all(session, {"fast": 9, "wide": 9, "other": 9})
        served = serve(session)
        assert {n: served.count(n) for n in set(served)} == {"fast": 9, "wide": 5, "other": 2}

    @each_setter
    @pytest.mark.parametrize("batch", [1, 7])
    def test_a_rollback_gives_the_room_back(self, session: Session, set_limit: Setter, batch: int) -> None:
        put(session, "acme", 9)
        set_limit(session, 3)
        for _ in range(3):
            assert session.scalars(fq.dequeue(limit=batch)).all()
            session.rollback()
        assert len(serve(session)) == 3

    def test_a_leased_message_stays_in_its_channel(self, session: Session) -> None:
        put(session, "acme", 3)
        (lease,) = leases(session, 1)
        for change in ("channel = 'globex'", "queue = 'other'"):
            with pytest.raises(DBAPIError, match=f"message {lease.id} is leased until .* can't be moved"):
                sql(session, f"UPDATE fairqueue.message SET {change} WHERE id = {lease.id}")
            session.rollback()
        sql(session, f"UPDATE fairqueue.message SET channel = 'acme', payload = '1' WHERE id = {lease.id}")
        limit(session, max_concurrency=2)
        sql(session, "UPDATE fairqueue.message SET channel = 'globex' WHERE leased_until IS NULL")
        assert serve(session) == ["globex"] * 2
        assert complete(session, [lease]) == ["completed"]

    def test_a_message_that_runs_again_and_again_counts_once(self, session: Session) -> None:
        put(session, "acme", 5)
        limit(session, max_concurrency=2)
        for _ in range(20):
            batch = leases(session)
            assert len(batch) == 2
            session.execute(fq.fail(batch, delay=0))
            session.commit()
            check_invariants(session.connection())
            session.commit()

    @each_setter
    @pytest.mark.parametrize(
        "act", ["DELETE FROM fairqueue.message", "UPDATE fairqueue.message SET payload = '1'"], ids=["delete", "edit"]
    )
    def test_what_becomes_of_one_that_came_back_makes_no_more_room(
        self, session: Session, set_limit: Setter, act: str
    ) -> None:
        """Its lease had ended before."""
        put(session, "acme", 6)
        set_limit(session, 2)
        session.execute(fq.fail(leases(session)[0], delay=0))
        session.commit()
        sql(session, f"{act} WHERE attempt > 0 AND leased_until IS NULL")
        assert len(serve(session)) == 1
        check_invariants(session.connection())


# Deleting and re-creating


def delete_and_create(session: Session, **policy: Any) -> None:
    session.delete(session.get_one(fq.Channel, ("default", "acme")))
    session.flush()
    session.add(fq.Channel("acme", **policy))
    session.commit()


def delete_then_create(session: Session, **policy: Any) -> None:
    session.delete(session.get_one(fq.Channel, ("default", "acme")))
    session.commit()
    session.add(fq.Channel("acme", **policy))
    session.commit()


def delete_serve_others_and_create(session: Session, **policy: Any) -> None:
    """The scheduler hears of the deletion by itself."""
    session.delete(session.get_one(fq.Channel, ("default", "acme")))
    session.commit()
    put(session, "zero", 1, priority=9)
    while "zero" not in take(session, 1, LEASE):
        pass
    session.add(fq.Channel("acme", **policy))
    session.commit()


def merge(session: Session, **policy: Any) -> None:
    limit(session, **policy)


def rename_there_and_back(session: Session, **policy: Any) -> None:
    sql(session, "UPDATE fairqueue.channel SET name = 'elsewhere' WHERE name = 'acme'")
    session.expire_all()
    sql(session, "UPDATE fairqueue.channel SET name = 'acme' WHERE name = 'elsewhere'")


RECREATIONS = [delete_and_create, delete_then_create, merge, rename_there_and_back]


class TestRecreation:
    @pytest.mark.parametrize("recreate", RECREATIONS)
    def test_what_runs_is_not_forgotten(self, session: Session, recreate: Callable[..., None]) -> None:
        put(session, "acme", 20)
        limit(session, max_concurrency=3)
        running = leases(session)
        for _ in range(3):
            recreate(session, max_concurrency=3)
            assert serve(session) == []
        complete(session, running)
        assert len(serve(session)) == 3
        check_invariants(session.connection())

    @pytest.mark.parametrize("recreate", RECREATIONS)
    def test_nor_is_the_rate(self, session: Session, recreate: Callable[..., None]) -> None:
        put(session, "acme", 20)
        limit(session, release_interval_ms=1000, burst=3)
        assert len(serve(session)) == 3
        for _ in range(3):
            recreate(session, release_interval_ms=1000, burst=3)
            assert serve(session) == []
        move_clock(session, NOW + 999)
        assert serve(session) == []
        move_clock(session, NOW + 1000)
        assert serve(session) == ["acme"]

    def test_a_deletion_that_was_heard_of(self, session: Session) -> None:
        """What was taken without a limit counts when there is one again, and toward the rate as well."""
        put(session, "acme", 20)
        limit(session, max_concurrency=3, release_interval_ms=1000)
        assert serve(session) == ["acme"]
        session.delete(session.get_one(fq.Channel, ("default", "acme")))
        session.commit()
        assert len(serve(session, 4)) == 4
        limit(session, max_concurrency=6, release_interval_ms=1000)
        move_clock(session, NOW + 999)
        assert serve(session) == []
        move_clock(session, NOW + 1000)
        assert serve(session) == ["acme"]
        move_clock(session, NOW + 2000)
        assert serve(session) == []

    def test_a_lane_that_counts_is_not_forgotten(self, session: Session) -> None:
        """However far the virtual time goes on; and one that counts nothing any more is."""
        put_all(session, {"capped": 2, "rated": 1, "plain": 1})
        limit(session, "capped", max_concurrency=2)
        limit(session, "rated", release_interval_ms=10_000)
        running = [lease for lease in leases(session) if lease.channel == "capped"]
        put(session, "busy", 300)
        assert len(take(session, 200)) == 200
        # The next dequeue takes the turn, and it is one of those that tidy up.
        sql(session, TIDY)
        take(session)
        lanes = select(text("channel FROM fairqueue.lane ORDER BY channel"))
        assert session.scalars(lanes).all() == ["busy", "capped", "rated"]
        put_all(session, {"capped": 3, "rated": 3})
        assert {"capped", "rated"} & set(serve(session)) == set()
        complete(session, running[:1])
        move_clock(session, NOW + 10_000)
        assert sorted(serve(session)) == ["capped", "rated"]

    def test_what_runs_in_a_channel_that_is_forgotten_counts(self, session: Session) -> None:
        """As soon as there is a limit for all channels of the queue."""
        put(session, "quiet", 3)
        assert serve(session) == ["quiet"] * 3
        put(session, "busy", 300)
        assert len(take(session, 200)) == 200
        sql(session, TIDY)
        take(session)
        assert session.scalars(text("SELECT channel FROM fairqueue.lane")).all() == ["busy"]
        limit_queue(session, channel_max_concurrency=4)
        put(session, "quiet", 3)
        assert serve(session) == ["quiet"]

    def test_however_many_lanes_count_none_is_kept_for_ever(self, session: Session) -> None:
        """Not more of them are looked at in one go than some hundred; once they count nothing, all are forgotten."""
        limit_queue(session, channel_max_concurrency=1)
        limit(session, "busy", max_concurrency=1000)
        fq.enqueue_many(session, [{"channel": f"c{number}"} for number in range(300)])
        session.commit()
        running = leases(session, 300)
        put(session, "busy", 402)
        tag = session.scalar(text("SELECT max(tag) FROM fairqueue.lane WHERE channel <> 'busy'"))
        looked_at = "SELECT count(*) FROM fairqueue.lane WHERE channel <> 'busy' AND tag > :tag"
        for ended in (running, []):
            assert len(take(session, 200)) == 200
            sql(session, TIDY)
            assert take(session) == ["busy"]
            assert session.scalar(text(looked_at), {"tag": tag}) == (256 if ended else 0)
            assert set(complete(session, ended)) <= {"completed"}
        assert session.scalars(text("SELECT channel FROM fairqueue.lane")).all() == ["busy"]

    @pytest.mark.parametrize(("hours", "again"), [(1, []), (25, ["rated"])])
    def test_a_rate_that_was_taken_away_is_not_forgotten(self, session: Session, hours: int, again: list[str]) -> None:
        """For a day, though its channel is idle without it while the virtual time goes on."""
        limit(session, "rated", release_interval_ms=30 * 3_600_000)
        put(session, "rated")
        assert serve(session) == ["rated"]
        session.delete(session.get_one(fq.Channel, ("default", "rated")))
        session.commit()
        move_clock(session, NOW + hours * 3_600_000)
        put(session, "busy", 201)
        assert len(take(session, 200)) == 200
        sql(session, TIDY)
        assert take(session) == ["busy"]
        limit(session, "rated", release_interval_ms=30 * 3_600_000)
        put(session, "rated")
        assert take(session) == again


@pytest.mark.parametrize("end", ["fail", "defer", "expire"])
def test_a_lease_that_a_user_gives_takes_no_room_and_makes_none(session: Session, end: str) -> None:
    """However the one before it ended that was counted."""
    limit(session, max_concurrency=1)
    put(session, "acme", 3)
    (first,) = leases(session)
    if end == "expire":
        expire(session, [first.id])
    else:
        session.execute(getattr(fq, end)(first, delay=LEASE))
        session.commit()
    running = leases(session)
    while running[0].id == first.id:  # only from its second lease that runs out on does it wait
        expire(session, [first.id])
        running = leases(session)
    assert len(running) == 1
    sql(session, "UPDATE fairqueue.message SET leased_until = '3000-01-01' WHERE id = :id", id=first.id)
    assert fq.check(session) == []
    sql(session, "DELETE FROM fairqueue.message WHERE id = :id", id=first.id)
    assert leases(session) == []
    assert fq.check(session) == []


def test_a_lease_that_a_user_has_given_counts_for_its_channel_when_the_queue_counts_it(session: Session) -> None:
    """With the first limit of a queue all leases are counted: for both, or the channel would have room too early."""
    limit_queue(session, max_attempts=5)
    limit(session, max_concurrency=1)
    put(session, "acme")
    assert complete(session, leases(session)) == ["completed"]
    (given,) = put(session, "acme")
    sql(session, "UPDATE fairqueue.message SET leased_until = '3000-01-01' WHERE id = :id", id=given)
    put(session, "other")
    assert serve(session) == ["other"]
    limit_queue(session, max_concurrency=100)
    put(session, "acme", 2)
    assert serve(session) == []
    assert fq.check(session) == []
    sql(session, "DELETE FROM fairqueue.message WHERE id = :id", id=given)
    assert serve(session) == ["acme"]
    assert serve(session) == []
    assert fq.check(session) == []
