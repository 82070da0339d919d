"""A worker that has nothing to do: it is told at once when it has, and costs nobody anything meanwhile."""

import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, event, select, text
from sqlalchemy.orm import Session

import fairqueue as fq
from fairqueue.worker import listening
from tests.acts import lease_of, put, wait_until
from tests.fixtures.connections import Raw
from tests.fixtures.workers import EngineOf, WorkerOf
from tests.observing import value
from tests.worker.working import LISTENING, RARELY, endings, is_empty, statements, wait_for_endings, wait_until_it_waits


@pytest.fixture
def heard(raw: Raw, database_url: str) -> Callable[[], int]:
    """How many notifications have been sent for the queue so far; by somebody who doesn't ask for them."""
    connection = raw(database_url)
    connection.autocommit = True
    connection.execute("SET search_path = fairqueue")
    name = value(connection, "SELECT 'fairqueue_' || to_hex(queue_wake('default'))")
    connection.execute(f'LISTEN "{name}"'.encode())
    notifications: list[psycopg.Notify] = []
    connection.add_notify_handler(notifications.append)

    def so_far() -> int:
        # Notifications come before the end of the answer to a statement that was sent after their commit.
        connection.execute("SELECT 1")
        return len(notifications)

    return so_far


def asks(watching: psycopg.Connection) -> bool:
    """Whether somebody has asked for notifications."""
    query = """SELECT EXISTS (SELECT FROM pg_locks l WHERE l.locktype = 'advisory' AND l.mode = 'ShareLock'
        AND (l.classid::bigint << 32 | l.objid::bigint) = queue_wake('default')
        AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database()))"""
    return bool(value(watching, query))


def test_who_waits_has_a_lock_of_its_own(session: Session) -> None:
    """Not one of those of dequeues: else they would take a worker that listens for one of them, and the reverse."""
    query = "SELECT count(*) FROM generate_series(0, 9) p WHERE fairqueue.queue_key('q', p) = fairqueue.queue_wake('q')"
    assert session.execute(text(query)).scalar_one() == 0


def test_who_enqueues_beside_another(session: Session, raw: Raw, database_url: str, heard: Callable[[], int]) -> None:
    """One who is just looking whether somebody waits is none who waits."""
    other = raw(database_url)
    other.execute("SET search_path = fairqueue")
    other.execute("SELECT pg_advisory_lock(queue_wake('default'))")
    put(session, "acme")
    assert heard() == 0


def enqueue(session: Session) -> None:
    put(session, "acme")


def enqueue_many(session: Session) -> None:
    put(session, "acme", 3)


def add(session: Session) -> None:
    session.add(fq.Message(channel="acme"))
    session.commit()


def copy(session: Session) -> None:
    fq.enqueue_copy(session, [{"channel": "acme"}])
    session.commit()


def redrive(session: Session) -> None:
    assert session.execute(fq.redrive(queue="default")).one().result == "redriven"
    session.commit()


def resume(session: Session) -> None:
    session.execute(fq.resume(channel="paused"))
    session.commit()


def resume_all(session: Session) -> None:
    session.execute(fq.resume(queue="default"))
    session.commit()


def move(session: Session) -> None:
    session.execute(text("UPDATE fairqueue.message SET dequeue_at = 0 WHERE channel = 'later'"))
    session.commit()


def fail(session: Session) -> None:
    (message,) = session.scalars(select(fq.Message).where(fq.Message.leased_until.is_not(None)))
    session.execute(fq.fail((message.id, message.attempt), "try again", delay=0))
    session.commit()


def allow_more(session: Session) -> None:
    session.execute(text("UPDATE fairqueue.channel SET max_concurrency = 2 WHERE name = 'full'"))
    session.commit()


def add_policy(session: Session) -> None:
    session.add(fq.Channel(name="full", max_concurrency=2))
    session.commit()


def give_policy_away(session: Session) -> None:
    session.execute(text("UPDATE fairqueue.channel SET queue = 'elsewhere' WHERE name = 'paused'"))
    session.commit()


def rename_policy(session: Session) -> None:
    session.execute(text("UPDATE fairqueue.queue SET name = 'elsewhere'"))
    session.commit()


def truncate_policies(session: Session) -> None:
    session.execute(text("TRUNCATE fairqueue.channel"))
    session.commit()


def prepare(session: Session, what: Callable[[Session], None]) -> None:
    """What is there beforehand, for nobody to work on."""
    if what is redrive:
        put(session, "dead")
        (message,) = lease_of(session)
        session.execute(fq.fail(message, retry=False))
    if what in (resume, give_policy_away, truncate_policies):
        session.execute(fq.pause(channel="paused"))
        put(session, "paused")
    if what in (resume_all, rename_policy):
        session.execute(fq.pause(queue="default"))
        put(session, "acme")
    if what is move:
        put(session, "later", delay=3600)
    if what is fail:
        put(session, "leased")
        assert lease_of(session)
    if what in (allow_more, add_policy):
        limited = fq.Channel(name="full", max_concurrency=1)
        session.add(limited if what is allow_more else fq.Queue("default", channel_max_concurrency=1))
        put(session, "full", 2)
        assert lease_of(session)
    session.commit()


PRODUCING = [
    *(enqueue, enqueue_many, add, copy, redrive, move, fail),
    *(resume, resume_all, allow_more, add_policy, give_policy_away, rename_policy, truncate_policies),
]


@pytest.mark.parametrize("what", PRODUCING)
def test_whatever_can_be_worked_on(what: Callable[[Session], None], session: Session, worker_of: WorkerOf) -> None:
    """Comes at once, again and again, to a worker that looks by itself each minute."""
    prepare(session, what)
    before = len(endings(session))
    app = worker_of("plain", lambda *_: None, poll=RARELY)
    with app:
        wait_until_it_waits(app)
        what(session)
        wait_until(lambda: len(endings(session)) > before)
        wait_until_it_waits(app)
        enqueue(session)
        wait_for_endings(session, before + 2)


@pytest.mark.parametrize("kind", LISTENING)
def test_each_driver(kind: str, session: Session, worker_of: WorkerOf) -> None:
    app = worker_of(kind, lambda *_: None, poll=RARELY)
    with app:
        wait_until_it_waits(app)
        for number in range(20):
            wait_until_it_waits(app)
            put(session, "acme")
            wait_for_endings(session, number + 1)


class TestSlots:
    """Who has no free slot asks for nothing."""

    def test_busy(
        self, session: Session, engine_of: EngineOf, heard: Callable[[], int], watching: psycopg.Connection
    ) -> None:
        """The first notification that finds a worker busy is the last, until it has a free slot again."""
        go, begun = threading.Event(), threading.Semaphore(0)
        app = fq.Worker(engine_of("plain"), concurrency=2, poll=RARELY)

        @app.handler
        def work(message: object) -> None:
            begun.release()
            assert go.wait(30)

        with app:
            wait_until_it_waits(app)
            assert asks(watching)
            for _ in range(2):
                put(session, "acme")
                assert begun.acquire(timeout=30)
            put(session, "acme")
            wait_until(lambda: not asks(watching))
            before = heard()
            assert before > 0
            for _ in range(10):
                put(session, "acme")
            assert heard() == before
            go.set()
            wait_for_endings(session, 13)
            wait_until_it_waits(app)
            put(session, "acme")
            assert heard() == before + 1
            wait_for_endings(session, 14)

    def test_one_of_several_workers(
        self, session: Session, worker_of: WorkerOf, engine_of: EngineOf, watching: psycopg.Connection
    ) -> None:
        """While one is busy, another one is told."""
        go, begun = threading.Event(), threading.Event()
        busy = fq.Worker(engine_of("plain"), concurrency=1, poll=RARELY)

        @busy.handler
        def work(message: object) -> None:
            begun.set()
            assert go.wait(30)

        idle = worker_of("plain", lambda *_: None, poll=RARELY)
        with busy:
            wait_until_it_waits(busy)
            put(session, "acme")
            assert begun.wait(30)
            with idle:
                wait_until_it_waits(idle)
                for number in range(5):
                    put(session, "acme")
                    wait_for_endings(session, number + 1)
                    wait_until_it_waits(idle)
                go.set()

    def test_not_wanted(self, session: Session, worker_of: WorkerOf, heard: Callable[[], int]) -> None:
        """notify=False: the worker doesn't listen, so producers don't notify; it finds the messages by itself."""
        app = worker_of("plain", lambda *_: None, notify=False)
        with statements(app.engine, "LISTEN") as listens, statements(app.engine, "queue_listen") as more, app:
            put(session, "acme", 3)
            wait_for_endings(session, 3)
            put(session, "acme")
            wait_for_endings(session, 4)
        assert listens == more == []
        assert heard() == 0


def test_a_statement_notifies_once(session: Session, worker_of: WorkerOf, heard: Callable[[], int]) -> None:
    """However many rows and channels it has, and also if each row signals by itself."""
    app = worker_of("plain", lambda *_: None, poll=RARELY, queue="default")
    session.execute(fq.pause(queue="default"))
    session.commit()
    with app:
        wait_until_it_waits(app)
        before = heard()
        fq.enqueue_many(session, [{"channel": f"tenant{number % 7}"} for number in range(100)])
        session.commit()
        assert heard() == before + 1
        session.execute(text("UPDATE fairqueue.message SET dequeue_at = 0"))
        session.commit()
        assert heard() == before + 2
        put(session, "acme", queue="elsewhere")
        assert heard() == before + 2


@pytest.mark.parametrize("kind", LISTENING)
def test_an_idle_worker_looks_as_often_as_it_says(kind: str, worker_of: WorkerOf, session: Session) -> None:
    """Not more often, that is, whatever happens elsewhere."""
    poll, looks = 0.05, 10
    app = worker_of(kind, lambda *_: None, poll=poll)
    times: list[float] = []
    engine: Any = getattr(app.engine, "sync_engine", app.engine)

    def note(_: Any, __: Any, statement: str, *___: Any) -> None:
        if "message_dequeue" in statement:
            times.append(time.monotonic())

    with app:
        wait_until_it_waits(app)
        event.listen(engine, "before_cursor_execute", note)
        put(session, "acme", queue="elsewhere")
        wait_until(lambda: len(times) >= looks)
        event.remove(engine, "before_cursor_execute", note)
    assert times[looks - 1] - times[0] >= (looks - 1) * poll * 0.99


def test_requests_are_throttled(
    engine: Engine, session: Session, worker_of: WorkerOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is woken while it is busy, again and again, looks by itself for a while before it asks again."""
    monkeypatch.setattr(listening, "THROTTLE", 0.15)
    app = worker_of("plain", lambda *_: None, poll=RARELY)
    asked: list[float] = []
    messages = 6

    def note(_: Any, __: Any, statement: str, *___: Any) -> None:
        run: Any = app._run
        if "queue_listen" in statement:
            asked.append(time.monotonic())
        elif "message_dequeue" in statement and run.idler.listener.listens and len(asked) < messages:
            with Session(engine) as other:
                put(other, "acme")
            wait_until(lambda: not run.idler.listener.listens)

    event.listen(app.engine, "before_cursor_execute", note)
    with app:
        wait_until_it_waits(app)
        put(session, "acme")
        wait_for_endings(session, messages)
    # From the second on each is decided on a throttle after the one before.
    assert len(asked) - 2 <= (asked[-1] - asked[0]) / listening.THROTTLE


def test_many_wakers_and_workers(engine: Engine, session: Session, worker_of: WorkerOf, engine_of: EngineOf) -> None:
    """Nobody sleeps on a message, however asking, notifying, taking back and committing fall together."""
    apps = [worker_of(kind, lambda *_: None, poll=RARELY, concurrency=2) for kind in ("plain", "async")]
    # A transaction that is open as they fall asleep wakes nobody: none is to wait for a busy machine to send COMMIT.
    at_once = engine.execution_options(isolation_level="AUTOCOMMIT")

    def produce(number: int) -> None:
        with Session(at_once) as own:
            for count in range(40):
                put(own, f"tenant{number}", 1 + count % 3)
                if count % 5 == 0:
                    wait_until(lambda: is_empty(own))

    with apps[0], apps[1]:
        threads = [threading.Thread(target=produce, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wait_until(lambda: is_empty(session))
    assert set(endings(session)) == {"completed"}
