"""Rates are exact to the millisecond, pauses too; and limited channels have their fair part of what limits allow.

The queue goes by a clock that the tests move.
"""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import clear, complete, drain, move_clock, put, put_all, sql, take
from tests.invariants import check_invariants
from tests.limiting import LEASE, NOW, leases, limit, limit_queue, serve

pytestmark = [pytest.mark.usefixtures("clock_that_stands"), pytest.mark.shared_database]


class Gcra:
    """The generic cell rate algorithm (ITU-T I.371), one message at a time, in its virtual-scheduling form."""

    def __init__(self, interval: int, burst: int) -> None:
        self.interval, self.burst = interval, burst
        self.arrival = 0  # theoretical arrival time of the next message

    def take(self, now: int, count: int) -> int:
        taken = 0
        while taken < count and self.arrival - now <= (self.burst - 1) * self.interval:
            self.arrival = max(now, self.arrival) + self.interval
            taken += 1
        return taken


class TestRate:
    @settings(max_examples=40, derandomize=True)
    @given(
        interval=st.sampled_from([1, 7, 1000, 60_000]),
        burst=st.sampled_from([1, 2, 3, 20]),
        steps=st.lists(st.tuples(st.floats(0, 3.5), st.sampled_from([1, 1, 2, 5, 30])), min_size=1, max_size=12),
    )
    def test_is_gcra(
        self, engine: Engine, session: Session, interval: int, burst: int, steps: list[tuple[float, int]]
    ) -> None:
        clear(engine)
        move_clock(session, now := NOW)
        put(session, "acme", 100)
        limit(session, release_interval_ms=interval, burst=burst)
        model = Gcra(interval, burst)
        for wait, count in steps:
            move_clock(session, now := now + round(wait * interval))
            assert len(serve(session, min(count, 100))) == model.take(now, count)
            check_invariants(session.connection())
            session.commit()

    @pytest.mark.parametrize("batch", [1, 2, 100])
    def test_no_more_than_a_burst_after_idle_time(self, session: Session, batch: int) -> None:
        """And then one an interval, to the millisecond, whether messages were waiting or have just come."""
        limit(session, release_interval_ms=100, burst=4)
        for late in (0, 10_000_000):
            put(session, "acme", 9, dequeue_at=NOW + late)
            move_clock(session, NOW + late)
            assert len(drain(session, batch)) == 4
            for number in range(1, 6):
                move_clock(session, NOW + late + 100 * number - 1)
                assert drain(session, batch) == []
                move_clock(session, NOW + late + 100 * number)
                assert len(drain(session, batch)) == 1

    def test_a_changed_interval_applies_at_once(self, session: Session) -> None:
        """Counted from the last release, for messages that wait already."""
        put(session, "acme", 20)
        limit(session, release_interval_ms=60_000)
        assert serve(session) == ["acme"]
        limit(session, release_interval_ms=1000)
        move_clock(session, NOW + 999)
        assert serve(session) == []
        move_clock(session, NOW + 1000)
        assert serve(session) == ["acme"]
        limit(session, release_interval_ms=5000)
        move_clock(session, NOW + 5999)
        assert serve(session) == []
        limit(session, burst=3)
        assert len(serve(session)) == 2
        limit(session, release_interval_ms=0)
        assert len(serve(session)) == 16

    def test_a_channel_that_is_deleted_keeps_what_its_burst_took(self, session: Session) -> None:
        """Created anew it has no other burst, until the time of the first one has passed."""
        limit(session, release_interval_ms=1000, burst=10)
        put(session, "acme", 10)
        assert len(serve(session)) == 10
        sql(session, "DELETE FROM fairqueue.channel")
        assert serve(session) == []
        limit(session, release_interval_ms=1000, burst=10)
        put(session, "acme", 30)
        assert serve(session) == []
        check_invariants(session.connection())
        move_clock(session, NOW + 1000)
        assert len(serve(session)) == 1
        move_clock(session, NOW + 10_000)
        assert len(serve(session)) == 9

    def test_of_each_channel_by_itself(self, session: Session) -> None:
        limit_queue(session, channel_release_interval_ms=1000, channel_burst=2)
        put_all(session, {"acme": 9, "globex": 9, "initech": 1})
        assert sorted(serve(session)) == ["acme"] * 2 + ["globex"] * 2 + ["initech"]
        move_clock(session, NOW + 1000)
        assert sorted(serve(session)) == ["acme", "globex"]

    def test_with_max_concurrency(self, session: Session) -> None:
        """Each limit by itself, whichever is reached first."""
        put(session, "acme", 20)
        limit(session, max_concurrency=3, release_interval_ms=1000, burst=2)
        running = leases(session)
        assert len(running) == 2
        move_clock(session, NOW + 5000)
        running += leases(session)
        assert len(running) == 3
        assert serve(session) == []
        complete(session, running)
        assert len(serve(session)) == 1
        assert serve(session) == []
        move_clock(session, NOW + 6000)
        assert len(serve(session)) == 1

    @pytest.mark.parametrize("back", [1, 900, 1100, 3_600_000])
    @pytest.mark.parametrize("burst", [1, 3])
    def test_a_clock_that_was_set_back(self, session: Session, back: int, burst: int) -> None:
        """Closes a channel for no more than an interval, or the second that is not noticed."""
        put(session, "acme", 20, priority=1)
        limit(session, release_interval_ms=2000, burst=burst)
        assert len(serve(session)) == burst
        move_clock(session, NOW - back)
        assert serve(session) == []
        move_clock(session, NOW - back + 2000 + 1000)
        assert len(serve(session)) >= 1
        move_clock(session, NOW - back + 2000 * burst + 10_000)
        assert len(serve(session)) == burst

    def test_a_clock_that_is_set_back_again_and_again(self, session: Session) -> None:
        """By less than is noticed at a time."""
        put(session, "acme", 20, priority=1)
        limit(session, release_interval_ms=2000)
        assert len(serve(session)) == 1
        for number in range(1, 11):
            move_clock(session, NOW - 900 * number)
            put(session, "other", 1)
            serve(session)
        move_clock(session, NOW - 9000 + 2000 + 1000)
        assert serve(session) == ["acme"]


# Pauses


def pause_channel(session: Session, until: int | None) -> None:
    sql(session, f"SELECT fairqueue.channel_set('acme', paused => true, resume_at => {_time(until)})")


def pause_queue(session: Session, until: int | None) -> None:
    sql(session, f"SELECT fairqueue.queue_set('default', paused => true, resume_at => {_time(until)})")


def _time(until: int | None) -> str:
    return "NULL" if until is None else f"timestamptz 'epoch' + {until} * interval '1 millisecond'"


def resume_channel(session: Session) -> None:
    session.execute(fq.resume(channel="acme"))
    session.commit()


def resume_queue(session: Session) -> None:
    session.execute(fq.resume(queue="default"))
    session.commit()


PAUSES = [(pause_channel, resume_channel), (pause_queue, resume_queue)]
each_pause = pytest.mark.parametrize(("pause", "resume"), PAUSES)


class TestPause:
    @each_pause
    @pytest.mark.parametrize("known", [False, True])
    def test_until_resumed(
        self, session: Session, pause: Callable[..., None], resume: Callable[..., None], known: bool
    ) -> None:
        """Before the channel was heard of, or while it is served."""
        put(session, "acme", 5)
        if known:
            assert serve(session, 1) == ["acme"]
        pause(session, None)
        put(session, "acme", 2)
        for later in (0, 10**9):
            move_clock(session, NOW + later)
            assert serve(session, 1) == []
        resume(session)
        assert len(serve(session, 1)) == 1

    @each_pause
    def test_until_a_time(self, session: Session, pause: Callable[..., None], resume: Callable[..., None]) -> None:
        put(session, "acme", 5)
        pause(session, NOW + 5000)
        move_clock(session, NOW + 4999)
        assert serve(session, 1) == []
        move_clock(session, NOW + 5000)
        assert serve(session, 1) == ["acme"]
        pause(session, NOW + 9000)
        assert serve(session, 1) == []
        pause(session, NOW + 6000)
        move_clock(session, NOW + 6000)
        assert serve(session, 1) == ["acme"]
        pause(session, None)
        move_clock(session, NOW + 10**9)
        assert serve(session, 1) == []
        resume(session)
        assert serve(session, 1) == ["acme"]

    @each_pause
    def test_leases_go_on(self, session: Session, pause: Callable[..., None], resume: Callable[..., None]) -> None:
        put(session, "acme", 5)
        limit(session, max_concurrency=3)
        first, second, third = leases(session)
        pause(session, None)
        complete(session, [first])
        session.execute(fq.fail(second, delay=0))
        session.execute(fq.heartbeat(third, lease=LEASE))
        session.commit()
        assert serve(session) == []
        resume(session)
        assert len(serve(session)) == 2

    def test_of_one_channel_only(self, session: Session) -> None:
        put_all(session, {"acme": 3, "globex": 3})
        pause_channel(session, None)
        assert serve(session) == ["globex"] * 3

    def test_a_resumed_queue_leaves_paused_channels(self, session: Session) -> None:
        put_all(session, {"acme": 3, "globex": 3})
        pause_channel(session, None)
        pause_queue(session, None)
        assert serve(session) == []
        resume_queue(session)
        assert serve(session) == ["globex"] * 3

    @pytest.mark.parametrize("table", ["channel", "queue"])
    def test_a_new_pause_goes_by_the_queue_s_clock(self, session: Session, table: str) -> None:
        """A time that is past by that, and was there before, doesn't end it; one that is to come does."""
        sql(
            session,
            f"INSERT INTO fairqueue.{table} (name) VALUES (:name)",
            name="acme" if table == "channel" else "default",
        )
        put(session, "acme", 2)
        at = f"timestamptz 'epoch' + {NOW + 5000} * interval '1 millisecond'"
        sql(session, f"UPDATE fairqueue.{table} SET resume_at = {at}")
        sql(session, f"UPDATE fairqueue.{table} SET paused = true")
        assert serve(session, 1) == []
        move_clock(session, NOW + 5000)
        assert serve(session, 1) == ["acme"]
        sql(session, f"UPDATE fairqueue.{table} SET paused = false, resume_at = NULL")
        sql(session, f"UPDATE fairqueue.{table} SET resume_at = {at}")
        sql(session, f"UPDATE fairqueue.{table} SET paused = true")
        assert serve(session, 1) == []


# Fairness among channels of which some are limited


class TestFairness:
    @pytest.mark.parametrize("batch", [1, 3])
    def test_a_channel_that_comes_back_gains_nothing(self, session: Session, batch: int) -> None:
        """Neither the turns that it missed while it was at its limit, nor a place behind the others."""
        put_all(session, {"capped": 50, "a": 200, "b": 200})
        limit(session, "capped", max_concurrency=1)
        (lease,) = leases(session, 1)
        assert lease.channel == "capped"
        assert set(take(session, 60)) == {"a", "b"}
        limit(session, "capped", max_concurrency=1000)
        served: list[str] = []
        while len(served) < 30:
            served += take(session, batch)
        assert served.count("capped") == 10
        assert all(sorted(served[i : i + 3]) == ["a", "b", "capped"] for i in range(0, 30, 3))

    def test_a_rated_channel_takes_its_turn_when_it_is_due(self, session: Session) -> None:
        put_all(session, {"rated": 50, "a": 200, "b": 200})
        limit(session, "rated", release_interval_ms=1000)
        assert sorted(take(session, 9)).count("rated") == 1
        for second in range(1, 6):
            move_clock(session, NOW + 1000 * second)
            assert take(session, 6).index("rated") < 3

    def test_weights_and_limits(self, session: Session) -> None:
        """The share of a channel at its limit goes to the others by their weights."""
        put_all(session, {"heavy": 600, "light": 600, "capped": 600})
        limit(session, "heavy", weight=3)
        limit(session, "capped", weight=10, max_concurrency=4)
        served = take(session, 44)
        assert [served.count(name) for name in ("heavy", "light", "capped")] == [30, 10, 4]
        limit(session, "capped", max_concurrency=None)
        served = take(session, 140)
        assert [served.count(name) for name in ("heavy", "light", "capped")] == [30, 10, 100]

    def test_limited_channels_cost_the_others_nothing(self, session: Session) -> None:
        """A thousand of them at their limits, and the others are served in turn."""
        limit_queue(session, channel_max_concurrency=1)
        limit(session, "a", max_concurrency=1000)
        limit(session, "b", max_concurrency=1000)
        fq.enqueue_many(session, [{"channel": f"full{number}"} for number in range(500) for _ in range(2)])
        session.commit()
        assert len(set(serve(session, 1000))) == 500
        put_all(session, {"a": 10, "b": 10})
        assert take(session, 20) == ["a", "b"] * 10
