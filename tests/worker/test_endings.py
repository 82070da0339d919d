"""How a worker ends that wasn't told to, or at a bad moment; what it leaves, and what doesn't end it."""

import asyncio
import logging
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from typing import Any, NoReturn

import asyncpg
import pytest
from anyio import move_on_after, to_thread
from psycopg.abc import Buffer
from psycopg.adapt import Loader
from sqlalchemy import event, select, text
from sqlalchemy.exc import OperationalError, ProgrammingError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session

import fairqueue as fq
from fairqueue.worker import database, running
from fairqueue.worker.database import Database
from fairqueue.worker.heart import Heart
from fairqueue.worker.idling import Idler
from fairqueue.worker.jobs import Job
from fairqueue.worker.running import Run
from fairqueue.worker.threads import Threads
from tests.acts import expire, put, wait_until
from tests.fixtures.workers import EngineOf, WorkerOf
from tests.worker.working import LISTENING, RARELY, endings, leased, statements, threads_of_workers, wait_for_endings


class Rude(BaseException):
    pass


async def fail(_: Run, *__: object) -> NoReturn:
    raise ZeroDivisionError("mine")


def wait_for_its_threads() -> None:
    wait_until(lambda: threads_of_workers() == 0)


class TestFailures:
    @pytest.mark.parametrize("error", [ZeroDivisionError("mine"), Rude("mine")], ids=["error", "no Exception"])
    def test_in_a_with_block(
        self,
        error: BaseException,
        worker_of: WorkerOf,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """It is in the log at once, not only raised at the end of the block."""

        async def fail(_: Run, *__: object) -> NoReturn:
            raise error

        monkeypatch.setattr(Run, "dequeue", fail)
        with pytest.raises(BaseExceptionGroup), worker_of("plain", lambda *_: None, name="mine"):
            wait_until(lambda: "mine has failed, and works no more" in caplog.text)
        assert f"{type(error).__name__}: mine" in caplog.text

    async def test_in_an_event_loop(
        self, worker_of: WorkerOf, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Run, "dequeue", fail)
        with pytest.raises(ExceptionGroup):
            async with worker_of("plain", lambda *_: None, name="mine"):
                await to_thread.run_sync(wait_until, lambda: "mine has failed, and works no more" in caplog.text)
        assert "ZeroDivisionError: mine" in caplog.text

    @pytest.mark.usefixtures("hasty")
    @pytest.mark.parametrize(
        ("kind", "error"),
        [
            ("plain", RuntimeError("the token service is away")),
            ("async", RuntimeError("the token service is away")),
            # As SQLAlchemy 2.0 lets it through.
            ("asyncpg", asyncpg.exceptions.TooManyConnectionsError("sorry, too many clients already")),
            ("asyncpg", asyncpg.exceptions.InsufficientPrivilegeError("permission denied for database")),
        ],
    )
    def test_there_is_no_connection(
        self, kind: str, error: Exception, session: Session, worker_of: WorkerOf, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Whatever comes from making one passes."""
        put(session, "acme")
        app = worker_of(kind, lambda *_: None)
        refused: list[object] = []

        def refuse(*_: object) -> None:
            if len(refused) < 3:
                refused.append(1)
                raise error

        event.listen(getattr(app.engine, "sync_engine", app.engine), "do_connect", refuse)
        with app:
            assert wait_for_endings(session, 1) == {"completed": 1}
        assert "can't look at the schema, trying again" in caplog.text
        assert f"{type(error).__name__}: {error}" in caplog.text

    def test_a_connection_is_reset(self, session: Session, worker_of: WorkerOf) -> None:
        """Which is no error of SQLAlchemy's, as asyncpg has it."""
        put(session, "acme")
        app = worker_of("plain", lambda *_: None)
        resets: list[object] = []

        def reset(_: Any, __: Any, statement: str, *___: Any) -> None:
            if "message_dequeue(" in statement and not resets:
                resets.append(statement)
                raise ConnectionResetError("by the peer")

        event.listen(app.engine, "before_cursor_execute", reset)
        with app:
            assert wait_for_endings(session, 1) == {"completed": 1}
        assert resets

    @pytest.mark.parametrize("kind", LISTENING)
    def test_a_value_that_cannot_be_read(
        self, kind: str, session: Session, worker_of: WorkerOf, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It is an error of that dequeue: the worker goes on, and the message comes back when its lease is over."""
        (id_,) = put(session, "acme")
        app = worker_of(kind, lambda *_: None, lease=3600)
        reads: list[str] = []

        def read(value: str) -> datetime:
            reads.append(value)
            if len(reads) == 2:  # the first one is of the worker's start, without which it wouldn't begin
                raise OverflowError("date value out of range")
            return datetime.fromisoformat(value)

        class Reader(Loader):
            def load(self, data: Buffer) -> datetime:
                return read(bytes(data).decode())

        def connected(connection: Any, record: Any) -> None:
            if kind == "asyncpg":
                options = {"schema": "pg_catalog", "encoder": str, "decoder": read}
                connection.run_async(lambda driver: driver.set_type_codec("timestamptz", **options))
            else:
                record.driver_connection.adapters.register_loader("timestamptz", Reader)

        event.listen(getattr(app.engine, "sync_engine", app.engine), "connect", connected)
        with app:
            wait_until(lambda: leased(session) == 1)
            expire(session, [id_])
            assert wait_for_endings(session, 1) == {"completed": 1}
        assert "can't dequeue, trying again" in caplog.text
        assert "OverflowError: date value out of range" in caplog.text

    @pytest.mark.usefixtures("hasty")
    @pytest.mark.parametrize("kind", LISTENING)
    def test_a_server_that_is_the_primary_no_more(self, kind: str, session: Session, worker_of: WorkerOf) -> None:
        """Connections that lead to it may only read, and are given up: new ones lead elsewhere."""
        put(session, "acme")
        app = worker_of(kind, lambda *_: None)
        demoted = True

        def connected(connection: Any, _: object) -> None:
            if demoted:
                connection.cursor().execute("SET default_transaction_read_only = on")
                connection.commit()

        def listens() -> bool:
            run: Any = app._run
            return run is not None and run.idler.listener.works

        event.listen(getattr(app.engine, "sync_engine", app.engine), "connect", connected)
        with statements(app.engine, "message_dequeue(") as sent, app:
            wait_until(lambda: len(sent) >= 2 and listens())  # so that nobody else needs another connection
            demoted = False
            assert wait_for_endings(session, 1) == {"completed": 1}


async def test_the_database_is_away(worker_of: WorkerOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop waits neither for it nor for the end of a pause."""
    monkeypatch.setattr(database, "backoff", lambda *_: RARELY)
    app = worker_of("plain", lambda *_: None, notify=False, grace=RARELY)
    refused = threading.Event()

    def refuse(_: Any, __: Any, statement: str, *___: Any) -> None:
        if "message_dequeue(" in statement:
            refused.set()
            raise OperationalError(None, None, ConnectionError("away"))

    event.listen(app.engine, "before_cursor_execute", refuse)
    async with asyncio.timeout(30), app:
        assert await to_thread.run_sync(refused.wait, 30)


async def test_nothing_more_begins(session: Session, worker_of: WorkerOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is busy goes on by itself; but not with what stands by, whose leases nobody extends any more."""
    put(session, "acme", 4)
    begun, go = threading.Event(), threading.Event()
    began: list[int] = []

    def body(message: fq.LeasedMessage[Any], _: object) -> None:
        began.append(message.id)
        begun.set()
        go.wait(30)

    async def fail_once_it_is_busy(_: Idler) -> None:
        await to_thread.run_sync(begun.wait, 30)
        raise ZeroDivisionError

    monkeypatch.setattr(Idler, "idle", fail_once_it_is_busy)
    with pytest.raises(ExceptionGroup):
        await worker_of("plain", body, concurrency=1, prefetch=4).run_async()
    go.set()
    await to_thread.run_sync(wait_for_its_threads)
    assert len(began) == 1


async def test_a_handler_that_is_left(session: Session, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does an async one go on, whose lease nobody extends any more."""
    put(session, "acme")
    begun = asyncio.Event()
    ended: list[str] = []
    app = fq.Worker(engine_of("async"))

    @app.handler
    async def work(_: fq.LeasedMessage[Any]) -> None:
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("cancelled")

    async def fail_once_it_is_busy(_: Idler) -> None:
        await begun.wait()
        raise ZeroDivisionError

    monkeypatch.setattr(Idler, "idle", fail_once_it_is_busy)
    with pytest.raises(ExceptionGroup):
        await app.run_async()
    await to_thread.run_sync(wait_until, lambda: ended)
    await app.engine.dispose()  # type: ignore[misc]


async def test_what_comes_too_late(session: Session, worker_of: WorkerOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor with what a dequeue brings that can't be cancelled any more, as it gives back its connection."""
    put(session, "acme")
    dequeued = asyncio.Event()
    began: list[int] = []
    dequeue = Run.dequeue

    async def give_back(run: Run, limit: int) -> Any:
        batch = await dequeue(run, limit)
        if batch:
            dequeued.set()
            with move_on_after(1, shield=True):
                await run.stopping.wait()
        return batch

    async def fail_meanwhile(_: Heart) -> None:
        await dequeued.wait()
        raise ZeroDivisionError

    monkeypatch.setattr(Run, "dequeue", give_back)
    monkeypatch.setattr(Heart, "beat", fail_meanwhile)
    with pytest.raises(ExceptionGroup):
        await worker_of("plain", lambda message, _: began.append(message.id)).run_async()
    await to_thread.run_sync(wait_for_its_threads)
    assert began == []


class TestStarts:
    @pytest.fixture
    def app(self, worker_of: WorkerOf, monkeypatch: pytest.MonkeyPatch) -> Iterator[fq.Worker]:
        """Its look at the schema hangs."""
        app = worker_of("plain", lambda *_: None)
        go = threading.Event()
        monkeypatch.setattr(Database, "look", lambda *_: go.wait(30))
        yield app
        go.set()
        wait_for_its_threads()

    async def test_cancelled(self, app: fq.Worker) -> None:
        """Nothing goes on in the background."""
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2), app:
                pass
        assert app._run is None

    async def test_stopped(self, app: fq.Worker) -> None:
        task = asyncio.create_task(app.run_async())
        await asyncio.sleep(0.2)
        app.stop()
        async with asyncio.timeout(10):
            assert await task == 0

    @pytest.mark.usefixtures("hasty")
    def test_without_a_right(self, session: Session, worker_of: WorkerOf, caplog: pytest.LogCaptureFixture) -> None:
        """Where nobody waits for the start any more, as the database was away: it goes on until it has been granted."""
        put(session, "acme")
        errors = [
            OperationalError(None, None, ConnectionError("away")),
            ProgrammingError(None, None, PermissionError("denied")),
        ]

        def refuse(_: Any, __: Any, statement: str, *___: Any) -> None:
            if "default_transaction_isolation" in statement and errors:
                raise errors.pop(0)

        app = worker_of("plain", lambda *_: None)
        event.listen(app.engine, "before_cursor_execute", refuse)
        with app:
            assert wait_for_endings(session, 1) == {"completed": 1}
        assert "can't begin, and tries again: PermissionError: denied" in caplog.text

    async def test_a_second_block(self, session: Session, worker_of: WorkerOf) -> None:
        """It is refused, and the first one goes on, to its own end."""
        app = worker_of("plain", lambda *_: None)
        async with app:
            with pytest.raises(fq.FairqueueError, match="is running already"):
                async with app:
                    pass
            put(session, "acme")
            await to_thread.run_sync(wait_for_endings, session, 1)
        assert app._run is None


@pytest.mark.parametrize("how", ["an error of its own", "that of a task group"])
def test_a_cancellation_that_is_answered(
    how: str, session: Session, engine_of: EngineOf, caplog: pytest.LogCaptureFixture
) -> None:
    """With an error, after the time of grace: it is in the log, and the message is handed back all the same."""
    put(session, "acme", max_attempts=1)
    begun = threading.Event()
    app = fq.Worker(engine_of("async"), grace=0.1)

    async def hang() -> None:
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            raise ZeroDivisionError("while cleaning up")

    @app.handler
    async def work(message: fq.LeasedMessage[Any]) -> None:
        if how == "an error of its own":
            await hang()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(hang())

    with app:
        assert begun.wait(30)
    assert session.execute(select(fq.Message.attempt, fq.Message.forgiven)).all() == [(1, 1)]
    assert "ZeroDivisionError: while cleaning up" in caplog.text


def test_what_a_thread_finishes_at_the_last_moment(
    session: Session, worker_of: WorkerOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is reported as it ended, and not handed back, though the event loop hasn't heard of it yet."""
    put(session, "acme")
    original = Threads.call_soon

    def call_soon(threads: Threads, function: Any) -> None:
        if getattr(function, "__name__", "") == "collect":
            function = app.stop  # once more: the time of grace is over at this moment
        original(threads, function)

    monkeypatch.setattr(Threads, "call_soon", call_soon)
    app = worker_of("plain", lambda *_: app.stop())
    assert asyncio.run(app.run_async()) == 0
    assert endings(session) == ["completed"]


def test_what_cannot_be_reported(
    session: Session, worker_of: WorkerOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It isn't finished: it will be done again, and who started the worker is told so."""
    put(session, "acme")
    monkeypatch.setattr(running, "_LAST_WORDS", 0.1)

    def refuse(_: Any, __: Any, statement: str, *___: Any) -> None:
        if "message_complete" in statement:
            raise OperationalError(None, None, ConnectionError("gone"))

    app = worker_of("plain", lambda *_: app.stop(), grace=0.1)
    event.listen(app.engine, "before_cursor_execute", refuse)
    assert asyncio.run(app.run_async()) == 1
    assert "could be neither finished nor handed back: it comes back when its lease is over" in caplog.text


def test_the_program_s_own_signal_handlers_come_back(session: Session, worker_of: WorkerOf) -> None:
    put(session, "acme")
    app = worker_of("plain", lambda *_: app.stop())
    theirs = signal.signal(signal.SIGTERM, lambda *_: None), signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        assert app.run() == 0
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    finally:
        signal.signal(signal.SIGTERM, theirs[0])
        signal.signal(signal.SIGINT, theirs[1])


def test_what_a_task_finishes_at_the_last_moment(session: Session, engine_of: EngineOf) -> None:
    """It isn't unfinished, though the event loop comes to it only in its next turn."""
    put(session, "acme")
    app = fq.Worker(engine_of("async"), poll=0.05)

    @app.handler
    async def work(message: fq.LeasedMessage[Any]) -> None:
        run = app._run
        assert run is not None
        run.stop(hurry=True)
        await asyncio.sleep(0.2)  # it waits for us by now
        run.stop(hurry=True)

    assert app.run() == 0
    assert endings(session) == ["completed"]


def test_an_engine_of_the_handlers(session: Session, engine_of: EngineOf) -> None:
    """Its connections are closed with the event loop in which they were made."""
    put(session, "acme")
    own = engine_of("async")
    app = fq.Worker(engine_of("plain"), async_session=async_sessionmaker(own), poll=0.05)

    @app.handler
    async def work(message: fq.LeasedMessage[Any], session: Any) -> None:
        await session.execute(text("SELECT 1"))

    with app:
        assert wait_for_endings(session, 1) == {"completed": 1}
    assert own.pool.checkedin() == 0


@pytest.mark.parametrize("kind", ["plain", "async", "async session"])
def test_a_log_that_fails(
    kind: str,
    session: Session,
    worker_of: WorkerOf,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By a filter of the application's: messages and their places come first, and the worker stops when it is told."""
    refused: list[str] = []
    modules: set[str] = set()

    def refuse(record: logging.LogRecord) -> bool:
        refused.append(f"{record.levelname} {record.getMessage()}")
        modules.add(record.module)
        raise ValueError("filter")

    def body(message: fq.LeasedMessage[Any], _: object) -> None:
        if message.channel != "good":
            raise ValueError("bad")

    for channel in ("bad", "worse", "good"):
        put(session, channel, max_attempts=1)
    caplog.set_level(logging.INFO, "fairqueue.worker")
    log = logging.getLogger("fairqueue.worker")
    log.addFilter(refuse)
    try:
        with worker_of(kind, body, concurrency=1, lease=3600):
            assert wait_for_endings(session, 3) == {"dead": 2, "completed": 1}
    finally:
        log.removeFilter(refuse)
    levels = Counter(line.partition(" ")[0] for line in refused)
    assert levels["WARNING"] == 2
    assert levels["ERROR"] == 2
    assert any("has stopped" in line for line in refused)
    assert modules <= {"running", "listening"}  # where the line was logged, not where it was kept from doing harm
    assert capsys.readouterr().err.count("ValueError: filter") == len(refused)


async def test_what_has_committed_is_finished(
    session: Session, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the time of grace is over while the handler's session still closes: nothing is handed back."""
    put(session, "acme")
    engine, closing, given_up = engine_of("async session"), asyncio.Event(), asyncio.Event()
    give_up = Job.give_up

    class Slow(AsyncSession):
        async def close(self) -> None:
            closing.set()
            await given_up.wait()
            await super().close()

    def note(job: Job) -> None:
        give_up(job)
        given_up.set()

    monkeypatch.setattr(Job, "give_up", note)
    app = fq.Worker(engine, grace=0, async_session=async_sessionmaker(engine, class_=Slow))

    @app.handler
    async def handle(_: fq.LeasedMessage[Any], own: AsyncSession) -> None:
        await own.execute(text("SELECT"))

    running = asyncio.create_task(app.run_async())
    async with asyncio.timeout(30):
        await closing.wait()
        app.stop()
        assert await running == 0
    await engine.dispose()
    assert endings(session) == ["completed"]


def test_a_second_block_keeps_the_connections(worker_of: WorkerOf) -> None:
    """It is refused, and the one that runs goes on with those it has, in its own event loop."""
    app = worker_of("asyncpg", lambda *_: None)
    with app:
        pool = app.engine.pool
        with pytest.raises(fq.FairqueueError, match="is running already"), app:
            pass
        assert app.engine.pool is pool
    assert app.engine.pool is not pool
