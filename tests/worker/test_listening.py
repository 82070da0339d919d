"""The connection that a worker listens on: lost, dumb, made anew; and what is committed at the worst moment."""

import asyncio
import logging
import threading
import time
from typing import Any

import anyio
import psycopg
import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import Session

import fairqueue as fq
from fairqueue.worker import listening
from fairqueue.worker.database import Database
from fairqueue.worker.threads import Threads
from fairqueue.worker.wire import Wire, connect
from tests.acts import put, wait_until
from tests.fixtures.workers import EngineOf, WorkerOf
from tests.worker.working import (
    LISTENING,
    RARELY,
    statements,
    wait_for_endings,
    wait_until_it_waits,
)

THIS_DATABASE = " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"


class Probes:
    """The notifications by which a worker tries whether any arrive."""

    #: As behind a pooler; those that aren't may take their time.
    are_lost = False


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> Probes:
    probes = Probes()
    arrives = listening.Listener._arrives

    async def arrives_or_not(listener: listening.Listener, wire: Wire) -> bool:
        monkeypatch.setattr(listening, "PROBE_TIMEOUT", 0.1 if probes.are_lost else 30)
        probe = listener._probe
        if probes.are_lost:
            listener._probe = "elsewhere"
        try:
            return await arrives(listener, wire)
        finally:
            listener._probe = probe

    monkeypatch.setattr(listening.Listener, "_arrives", arrives_or_not)
    monkeypatch.setattr(listening, "PROBE_INTERVAL", 0.2)
    monkeypatch.setattr(listening, "RETRY_INTERVAL", 0.1)
    return probes


class TestRaces:
    """What is committed at the worst moment. In threads, so that a statement can be held up without the worker."""

    def test_before_it_has_asked(
        self, engine: Engine, session: Session, worker_of: WorkerOf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Between the dequeue that found nothing and the request: nobody notifies, so it has to look once more."""
        monkeypatch.setattr(listening, "PROBE_TIMEOUT", RARELY)  # a busy machine is no pooler
        app = worker_of("plain", lambda *_: None, poll=RARELY)

        def enqueue_first(_: Any, __: Any, statement: str, *___: Any) -> None:
            if "queue_listen" in statement:
                with Session(engine) as other:
                    put(other, "acme")

        event.listen(app.engine, "before_cursor_execute", enqueue_first)
        with app:
            wait_for_endings(session, 1)

    @pytest.mark.parametrize("slow", [False, True])
    def test_while_it_takes_that_back(
        self, slow: bool, engine: Engine, session: Session, worker_of: WorkerOf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """When it has been taken back, but the worker doesn't know that yet, it must not rely on being notified.

        Slow: the answer comes so late that the fetcher has given up waiting for it, and looks and asks in turn.
        """
        app = worker_of("plain", lambda *_: None, poll=RARELY)
        armed, taken_back = threading.Event(), threading.Event()

        def inside() -> Any:
            return app._run

        def hear_of_one_while_busy(_: Any, __: Any, statement: str, *___: Any) -> None:
            if "message_dequeue" in statement and armed.is_set():
                armed.clear()
                with Session(engine) as other:
                    put(other, "acme")
                wait_until(lambda: not inside().idler.listener._wanted)

        def enqueue_meanwhile(_: Any, __: Any, statement: str, *___: Any) -> None:
            if "queue_unlisten" in statement and not taken_back.is_set():
                taken_back.set()
                with Session(engine) as other:
                    wait_for_endings(other, 2)
                    wait_until(
                        lambda: inside().idler.waiting and not inside().jobs and not inside().news._event.is_set()
                    )
                    wait_until(lambda: inside().idler.listener._wanted)  # again
                    if slow:
                        looks, until = len(sent), time.monotonic() + 1
                        wait_until(lambda: len(sent) > looks + 3 or time.monotonic() > until)
                    put(other, "acme")

        event.listen(app.engine, "before_cursor_execute", hear_of_one_while_busy)
        event.listen(app.engine, "after_cursor_execute", enqueue_meanwhile)
        with app, statements(app.engine, "message_dequeue") as sent:
            wait_until_it_waits(app)
            monkeypatch.setattr(listening, "PROBE_TIMEOUT", 0.01 if slow else RARELY)
            armed.set()
            put(session, "acme")
            wait_for_endings(session, 3)
        assert taken_back.is_set()

    def test_what_comes_before_the_answer(
        self, session: Session, worker_of: WorkerOf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """While the listener gets no answer, the worker hears what it learns otherwise: here, that there is room."""
        for timeout in ("PROBE_TIMEOUT", "ANSWER_TIMEOUT"):
            monkeypatch.setattr(listening, timeout, RARELY)
        session.merge(fq.Channel("acme", max_concurrency=1))
        put(session, "acme", 2)
        asked, ended = threading.Event(), threading.Event()
        app = worker_of("plain", lambda *_: asked.wait(30), poll=RARELY)

        def answer_late(_: Any, __: Any, statement: str, *___: Any) -> None:
            if "queue_listen" in statement:
                asked.set()
                assert ended.wait(30)

        event.listen(app.engine, "before_cursor_execute", answer_late)
        with app:
            try:
                wait_for_endings(session, 2)
            finally:
                ended.set()
        assert asked.is_set()

    def test_an_answer_that_comes_late(
        self, engine: Engine, session: Session, worker_of: WorkerOf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """When the request is granted after the worker has stopped waiting for that, and looked: it looks again."""
        app = worker_of("plain", lambda *_: None, poll=RARELY)
        armed, asking, looked = threading.Event(), threading.Event(), threading.Event()

        def inside() -> Any:
            return app._run

        def ask_late(_: Any, __: Any, statement: str, *___: Any) -> None:
            if "queue_listen" in statement and armed.is_set():
                asking.set()
                assert looked.wait(30)

        def enqueue_after_the_look(_: Any, __: Any, statement: str, *___: Any) -> None:
            if "message_dequeue" in statement and asking.is_set() and not looked.is_set():
                with Session(engine) as other:
                    put(other, "acme")
                looked.set()
                wait_until(lambda: inside().idler.listener._asked)

        event.listen(app.engine, "before_cursor_execute", ask_late)
        event.listen(app.engine, "after_cursor_execute", enqueue_after_the_look)
        with app:
            wait_until_it_waits(app)
            monkeypatch.setattr(listening, "PROBE_TIMEOUT", 0.01)
            armed.set()
            inside().threads.call_soon(inside().idler.listener.cease)
            inside().threads.call_soon(inside().news.set)
            wait_for_endings(session, 1)

    def test_an_answer_that_is_not_waited_for(
        self, engine: Engine, session: Session, worker_of: WorkerOf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """While nobody notifies, it looks as often as it was told to."""
        monkeypatch.setattr(listening, "PROBE_TIMEOUT", RARELY)
        monkeypatch.setattr(listening, "ANSWER_TIMEOUT", RARELY)
        asked, go = threading.Event(), threading.Event()

        def hold_up(_: Any, __: Any, statement: str, *___: Any) -> None:
            if "queue_listen" in statement:
                asked.set()
                assert go.wait(60)

        app = worker_of("plain", lambda *_: None, poll=0.05)
        event.listen(app.engine, "before_cursor_execute", hold_up)
        with app:
            assert asked.wait(30)
            put(session, "acme")
            wait_for_endings(session, 1)
            go.set()


class TestTheConnection:
    async def test_that_nobody_waits_for(self, engine_of: EngineOf) -> None:
        """A worker that is stopped while its listener connects leaves no connection behind."""
        engine = engine_of("plain")
        made: list[Any] = []
        under_way, gate = threading.Event(), threading.Event()

        def connect_late(*_: Any) -> None:
            under_way.set()
            gate.wait(30)

        event.listen(engine, "do_connect", connect_late)
        event.listen(engine, "connect", lambda connection, _: made.append(connection))
        database = Database(engine, Threads())
        async with anyio.create_task_group() as tasks:

            async def listen() -> None:
                async with connect(database):
                    pytest.fail("connected")

            tasks.start_soon(listen)
            await anyio.to_thread.run_sync(under_way.wait, 30)
            tasks.cancel_scope.cancel()
        gate.set()
        wait_until(lambda: made and made[0].closed)
        database.threads.close()

    async def test_that_was_made_at_the_last_moment(self, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nor does one that is cancelled when the connection is there, and nobody has it yet."""
        engine = engine_of("plain")
        made: list[Any] = []
        event.listen(engine, "connect", lambda connection, _: made.append(connection))
        database = Database(engine, Threads())

        async def run(function: Any) -> None:
            function()
            raise asyncio.CancelledError

        monkeypatch.setattr(database.threads, "run", run)
        with pytest.raises(asyncio.CancelledError):
            async with connect(database):
                pytest.fail("connected")
        assert made[0].closed

    @pytest.mark.parametrize("kind", LISTENING)
    async def test_whose_it_is(
        self, kind: str, session: Session, worker_of: WorkerOf, watching: psycopg.Connection
    ) -> None:
        """The worker's, not the pool's; and it is closed with the worker, though the event loop goes on."""
        app = worker_of(kind, lambda *_: None, poll=RARELY)
        engine: Any = getattr(app.engine, "sync_engine", app.engine)
        made: list[Any] = []  # so that it isn't closed for being garbage
        event.listen(engine, "connect", lambda connection, _: made.append(connection))

        def listeners() -> int:
            query = "SELECT FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock'"
            return len(watching.execute(query + THIS_DATABASE).fetchall())

        async with app:
            await anyio.to_thread.run_sync(wait_until_it_waits, app)
            assert listeners() == 1
            await anyio.to_thread.run_sync(wait_until, lambda: engine.pool.checkedout() == 0)
        await anyio.to_thread.run_sync(wait_until, lambda: listeners() == 0)
        if kind != "plain":
            await app.engine.dispose()  # type: ignore[misc]

    @pytest.mark.parametrize("kind", LISTENING)
    async def test_what_comes_with_an_answer(
        self, kind: str, session: Session, engine_of: EngineOf, watching: psycopg.Connection
    ) -> None:
        """To a statement of the listener's own: a notification is heard all the same."""
        database = Database(engine_of(kind), Threads())
        with anyio.fail_after(30):
            async with connect(database) as wire:
                await wire.listen("news")
                watching.execute("NOTIFY news")
                assert await wire.execute(text("SELECT 1")) == 1
                assert await wire.wait(anyio.Event()) == ["news"]
        database.threads.close()
        if isinstance(database.engine, AsyncEngine):
            await database.engine.dispose()

    @pytest.mark.parametrize("kind", LISTENING)
    def test_lost(
        self, kind: str, session: Session, worker_of: WorkerOf, watching: psycopg.Connection, caplog: Any
    ) -> None:
        """It is made anew, and what came in between is found."""
        app = worker_of(kind, lambda *_: None, poll=RARELY)
        query = "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock'"
        with app:
            wait_until_it_waits(app)
            for number in range(3):
                assert watching.execute(query + THIS_DATABASE).fetchall() == [(True,)]
                put(session, "acme")
                wait_for_endings(session, number + 1)
                wait_until_it_waits(app)
        assert caplog.text.count("lost the connection that listens") == 3

    @pytest.mark.parametrize("kind", LISTENING)
    def test_probe(
        self,
        kind: str,
        session: Session,
        worker_of: WorkerOf,
        probes: Probes,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Notifications that don't arrive are noticed, and said once; then it polls; and when they do, it listens."""
        probes.are_lost = True
        app = worker_of(kind, lambda *_: None)
        with app:
            wait_until(lambda: "notifications of the database do not arrive" in caplog.text)
            put(session, "acme")
            wait_for_endings(session, 1)
            caplog.clear()
            caplog.set_level(logging.INFO, "fairqueue.worker")
            probes.are_lost = False
            wait_until_it_waits(app)
        assert "notifications of the database arrive" in caplog.text

    def test_that_goes_dumb(
        self,
        session: Session,
        worker_of: WorkerOf,
        probes: Probes,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """One that has worked and doesn't any more, as behind a firewall that forgot it, is made anew, soon.

        Also if the new one doesn't work at once, as while a server recovers: it isn't taken for a pooler.
        """
        app = worker_of("plain", lambda *_: None, poll=RARELY)
        with app:
            wait_until_it_waits(app)
            probes.are_lost = True
            wait_until(lambda: caplog.text.count("notifications don't arrive any more") == 2)
            probes.are_lost = False
            wait_until_it_waits(app)
            put(session, "acme")
            wait_for_endings(session, 1)
        assert "do not arrive, so queue" not in caplog.text

    @pytest.mark.parametrize("kind", LISTENING)
    def test_a_probe_while_it_asks(
        self, kind: str, session: Session, worker_of: WorkerOf, probes: Probes, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It waits for the answer to that, which would else be taken for one to something else."""
        session.execute(text("ALTER FUNCTION fairqueue.queue_listen RENAME TO listen_at_once"))
        slow = "SELECT pg_sleep(0.5); SELECT fairqueue.listen_at_once(queue)"
        slow = f"CREATE FUNCTION fairqueue.queue_listen(queue text) RETURNS text LANGUAGE sql AS '{slow}'"
        session.execute(text(slow))
        session.commit()
        app = worker_of(kind, lambda *_: None, poll=RARELY)
        with app:
            wait_until_it_waits(app)
            put(session, "acme")
            wait_for_endings(session, 1)
        assert "lost the connection" not in caplog.text

    def test_a_probe_without_an_answer(
        self, worker_of: WorkerOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """As on a connection of the pool whose server is gone without a word: the listener goes on."""
        monkeypatch.setattr(listening, "ANSWER_TIMEOUT", 0.2)
        app = worker_of("plain", lambda *_: None, poll=RARELY)
        probed: list[str] = []
        go = threading.Event()

        def hang(_: Any, __: Any, statement: str, *___: Any) -> None:
            if "pg_notify" in statement:
                probed.append(statement)
                assert len(probed) > 1 or go.wait(30)

        event.listen(app.engine, "before_cursor_execute", hang)
        with app:
            wait_until_it_waits(app)
            go.set()
        assert "lost the connection that listens, trying again in" in caplog.text
        assert "TimeoutError" in caplog.text

    def test_that_may_not_ask(self, session: Session, worker_of: WorkerOf, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its role lacks a right, say: it isn't made anew ten times a second for ever, as all was well until then."""
        failures: list[int] = []

        def pause(failed: int) -> float:
            failures.append(failed)
            return 0.01

        def refuse(_: Any, __: Any, statement: str, *___: Any) -> None:
            if "queue_listen" in statement:
                raise PermissionError("queue_listen")

        monkeypatch.setattr(listening, "backoff", pause)
        app = worker_of("plain", lambda *_: None)
        event.listen(app.engine, "before_cursor_execute", refuse)
        with app:
            wait_until(lambda: len(failures) >= 4)
            put(session, "acme")
            wait_for_endings(session, 1)
        assert failures[:4] == [1, 2, 3, 4]


@pytest.mark.parametrize("notify", [True, False])
def test_a_driver_that_cannot_hear(
    notify: bool, session: Session, worker_of: WorkerOf, caplog: pytest.LogCaptureFixture
) -> None:
    """It works, and says once why it polls; but not where it is meant to."""
    app = worker_of("plain", lambda *_: None, notify=notify)
    app.engine.dialect.driver = "psycopg2"
    with app:
        put(session, "acme")
        wait_for_endings(session, 1)
    said = (
        "the driver psycopg2 can't hear notifications of the database, so queue 'default' is polled each 0.05 s: begin"
        " the engine's URL with postgresql+psycopg://. Worker(notify=False) says that it is meant to be so"
    )
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [said] * notify
