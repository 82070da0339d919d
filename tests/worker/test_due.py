"""What waits for a time: nobody is notified when that has come, and an idle worker comes for it all the same."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event, func, select, text
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import EPOCH, lease_of, move_clock, put, sql, wait_until
from tests.fixtures.workers import WorkerOf
from tests.limiting import NOW
from tests.worker.working import KINDS, RARELY, wait_for_endings, wait_until_it_waits


def in_a_moment(session: Session) -> Any:
    return session.scalars(select(func.now() + timedelta(milliseconds=50))).one()


def let_out_by_a_rate(session: Session) -> None:
    session.add(fq.Channel("acme", release_interval_ms=50))
    put(session, "acme", 3)


def schedule(session: Session) -> None:
    for delay in (0.05, 0.1, 0.15):
        put(session, "acme", delay=delay)


def pause(session: Session) -> None:
    session.execute(fq.pause(channel="acme", until=in_a_moment(session)))
    put(session, "acme", 3)


def pause_all(session: Session) -> None:
    session.execute(fq.pause(queue="default", until=in_a_moment(session)))
    put(session, "acme", 3)


def fail(session: Session) -> None:
    put(session, "acme", 3, payload="fails at first")


@pytest.mark.parametrize("what", [let_out_by_a_rate, schedule, pause, pause_all, fail])
def test_whatever_waits(what: Callable[[Session], None], session: Session, worker_of: WorkerOf) -> None:
    """Comes when it is due, to a worker that waits by then, and hardly ever looks by itself."""

    def body(message: fq.LeasedMessage[Any], _: object) -> object:
        return fq.Retry(delay=0.05) if message.payload == "fails at first" and message.attempt == 1 else None

    with worker_of("plain", body, poll=RARELY) as app:
        wait_until_it_waits(app)
        what(session)
        assert wait_for_endings(session, 3) == {"completed": 3}


@pytest.mark.parametrize("kind", KINDS)
def test_each_driver_and_who_isn_t_notified(kind: str, session: Session, worker_of: WorkerOf) -> None:
    let_out_by_a_rate(session)
    with worker_of(kind, lambda *_: None, poll=RARELY, notify=False):
        wait_for_endings(session, 3)


def always_due_in(session: Session, seconds: int) -> None:
    sql(
        session,
        "CREATE OR REPLACE FUNCTION fairqueue.queue_due(queue text DEFAULT 'default') RETURNS double precision"
        f" LANGUAGE sql AS 'SELECT {seconds}::double precision'",
    )


def looks_of(app: fq.Worker) -> list[tuple[float, int]]:
    """When it dequeues, and how often before that in vain."""
    looks: list[tuple[float, int]] = []

    def note(_: Any, __: Any, statement: str, *___: Any) -> None:
        if "message_dequeue" in statement and app._run is not None:
            looks.append((time.monotonic(), app._run.idler.in_vain))

    engine: Any = app.engine
    event.listen(engine, "before_cursor_execute", note)
    return looks


def test_who_comes_too_late_looks_less_often(session: Session, worker_of: WorkerOf) -> None:
    """Where many workers wait for what a rate lets out, one at a time."""
    always_due_in(session, 0)
    app = worker_of("plain", lambda *_: None, poll=0.5)
    looks = looks_of(app)
    with app:
        wait_until(lambda: [in_vain for _, in_vain in looks[-2:]] == [6, 6])
        assert looks[-1][0] - looks[-2][0] >= 0.5 * 0.99
        assert sorted({in_vain for _, in_vain in looks}) == list(range(7))
        before = len(looks)
        put(session, "acme")
        wait_for_endings(session, 1)
        wait_until(lambda: 0 in [in_vain for _, in_vain in looks[before:]])


def test_what_was_left_is_looked_at_as_often_as_ever(session: Session, worker_of: WorkerOf) -> None:
    always_due_in(session, -1)
    app = worker_of("plain", lambda *_: None, poll=RARELY)
    looks = looks_of(app)
    with app:
        wait_until(lambda: len(looks) > 20)
    assert {in_vain for _, in_vain in looks} == {0, 1}


class TestQueueDue:
    """In how many seconds."""

    @staticmethod
    def due(session: Session) -> float | None:
        return session.execute(text("SELECT fairqueue.queue_due()")).scalar_one()  # type: ignore[no-any-return]

    def test_nothing(self, session: Session) -> None:
        assert self.due(session) is None
        put(session, "acme")
        assert lease_of(session)
        assert self.due(session) is None

    def test_the_first_of_all(self, session: Session) -> None:
        for delay in (200, 100, 300):
            put(session, f"tenant{delay}", delay=delay)
        assert not lease_of(session)
        due = self.due(session)
        assert due is not None
        assert 90 < due <= 100

    def test_not_before_the_end_of_a_pause(self, session: Session) -> None:
        put(session, "acme", delay=100)
        until = session.scalars(select(func.now() + timedelta(seconds=1000))).one()
        session.execute(fq.pause(queue="default", until=until))
        session.commit()
        assert not lease_of(session)
        due = self.due(session)
        assert due is not None
        assert 900 < due <= 1000
        session.execute(fq.pause(queue="default"))
        session.commit()
        assert not lease_of(session)
        assert self.due(session) is None

    @pytest.mark.parametrize("pause", [True, False])
    def test_nobody_has_looked_since(self, session: Session, pause: bool, clock_that_stands: None) -> None:
        """Whose time has come."""
        put(session, "acme", delay=0 if pause else 10)
        if pause:
            session.execute(fq.pause(queue="default", until=EPOCH + timedelta(milliseconds=NOW + 10_000)))
            session.commit()
        assert not lease_of(session)
        assert self.due(session) == 10
        move_clock(session, NOW + 11_000)
        assert self.due(session) == 0
