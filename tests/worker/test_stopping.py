"""How a worker ends: told to, or killed. Nothing is lost or left behind by that."""

import asyncio
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from sqlalchemy import create_engine, event, select, text
from sqlalchemy.orm import Session

import fairqueue as fq
from fairqueue import embedded, schema
from fairqueue.cli.signals import handled
from fairqueue.worker import listening, running
from tests.acts import expire, lease_of, put, wait_until
from tests.fixtures.postgres import Postgres
from tests.fixtures.workers import EngineOf, WorkerOf
from tests.invariants import check_invariants
from tests.worker.working import (
    RARELY,
    Process,
    act,
    add_effects,
    effects,
    endings,
    is_empty,
    leased,
    statements,
    threads_of_workers,
    wait_for_endings,
    wait_until_it_waits,
)

Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path, database_url: str) -> Iterator[Start]:
    """Starts a worker process, with a handler given as source; it ends with the test at the latest."""
    started: list[Process] = []

    def start(handler: str, **options: object) -> Process:
        started.append(Process(tmp_path, database_url, handler, **options))
        return started[-1]

    yield start
    for process in started:
        process.kill()


PATIENT = """
def handle(message):
    say("started")
    wait_for("go")
"""
PATIENT_ASYNC = """
async def handle(message, session):
    await session.execute(text("SELECT 1"))
    say("started")
    await wait_for_async("go")
"""
HANGING = """
def handle(message, session):
    session.execute(text("INSERT INTO public.effect VALUES (1, 1)"))
    say("started")
    time.sleep(3600)
"""
HANGING_ASYNC = """
async def handle(message, session):
    await session.execute(text("INSERT INTO public.effect VALUES (1, 1)"))
    say("started")
    await asyncio.sleep(3600)
"""


class TestProcesses:
    @pytest.mark.parametrize(
        ("handler", "number"),
        [(PATIENT, signal.SIGTERM), (PATIENT_ASYNC, signal.SIGINT), (PATIENT, signal.SIGHUP)],
        ids=["plain", "async", "closed terminal"],
    )
    def test_finishes_what_it_has(self, start: Start, session: Session, handler: str, number: signal.Signals) -> None:
        """And takes on nothing more."""
        put(session, "acme", 3)
        with handled(signal.SIG_DFL, signal.SIGHUP):  # what is ignored here would be so there
            process = start(handler, concurrency=2)
        process.wait_until_said("started", 2)
        process.signal(number)
        process.wait_for_log("stops; to be finished: 2")
        if number == signal.SIGHUP:  # of the shell's; the next one is the system's
            process.signal(number)
        process.say("go")
        assert process.wait() == 0
        assert endings(session) == ["completed"] * 2
        left = session.execute(select(fq.Message.attempt, fq.Message.leased_until)).all()
        assert left == [(0, None)]

    @pytest.mark.parametrize("own", ["", "import signal\nsignal.signal(signal.SIGHUP, lambda *_: say('own'))\n"])
    def test_a_closed_terminal_that_means_nothing(self, start: Start, session: Session, own: str) -> None:
        """It is ignored under nohup, or handled by the program."""
        put(session, "acme")
        with handled(signal.SIG_IGN, signal.SIGHUP):
            process = start(f"{own}{PATIENT}")
        process.wait_until_said("started")
        process.signal(signal.SIGHUP)
        if own:
            process.wait_until_said("own")
        process.say("go")
        put(session, "acme")
        wait_for_endings(session, 2)
        process.signal()
        assert process.wait() == 0

    @pytest.mark.parametrize(
        ("handler", "signals"), [(HANGING, 1), (HANGING_ASYNC, 1), (HANGING, 2)], ids=["plain", "async", "twice"]
    )
    def test_hands_back_what_does_not_end(self, start: Start, session: Session, handler: str, signals: int) -> None:
        """After the time of grace, or a second signal. The process ends, though a thread of it hangs."""
        add_effects(session)
        ids = [id_ for priority in (5, 0) for id_ in put(session, "acme", priority=priority, max_attempts=1)]
        process = start(handler, concurrency=1, grace=0.1 if signals == 1 else 3600)
        process.wait_until_said("started")
        process.signal()
        if signals == 2:
            process.wait_for_log("stops; to be finished: 1")
            process.signal()
        assert process.wait() == 3
        assert "is handed back unfinished" in process.log.read_text()
        assert effects(session) == []
        batch = lease_of(session, 2)
        assert [(message.id, message.attempt, message.forgiven) for message in batch] == [
            (ids[0], 2, 1),
            (ids[1], 1, 0),
        ]
        check_invariants(session.connection())

    def test_interrupted_in_its_main_thread(self, start: Start, session: Session) -> None:
        """What an async handler raises there may be a Ctrl-C: it ends the process, and isn't the message's error."""
        put(session, "acme")
        process = start("async def handle(message): raise KeyboardInterrupt")
        assert process.wait() == -signal.SIGINT
        assert session.scalars(select(fq.Message.error)).all() == [None]

    def test_killed(self, start: Start, worker_of: WorkerOf, session: Session) -> None:
        """Its messages come back when their leases are over; what it wrote is gone, and nobody listens any more."""
        add_effects(session)
        (id_,) = put(session, "acme")
        before = connections(session)
        process = start(HANGING)
        process.wait_until_said("started")
        wait_until(lambda: advisory_locks(session) == 1)
        process.kill()
        assert endings(session) == []
        # A dequeue that the server had heard of may still lease something, to nobody.
        wait_until(lambda: connections(session) == before)
        assert advisory_locks(session) == 0
        expire(session, [id_])
        with worker_of("plain session", act):
            assert wait_for_endings(session, 1) == {"completed": 1}
        assert effects(session) == [(id_, 2)]


def counted(session: Session, query: str) -> int:
    session.rollback()
    count: int = session.scalars(text(query)).one()
    return count


def connections(session: Session) -> int:
    query = "SELECT count(*) FROM pg_stat_activity"
    query += " WHERE datname = current_database() AND backend_type = 'client backend'"
    return counted(session, query)


def advisory_locks(session: Session) -> int:
    query = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock'"
    query += " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    return counted(session, query)


class TestEmbedding:
    @pytest.mark.parametrize("kind", ["plain", "async session", "asyncpg"])
    def test_in_a_with_block(self, kind: str, session: Session, worker_of: WorkerOf) -> None:
        """What was begun is finished, also when the block ends with an error; which is raised as it is."""
        go, begun = threading.Event(), threading.Event()

        def body(message: fq.LeasedMessage[Any], _: object) -> None:
            begun.set()
            assert go.wait(30) if kind == "plain" else True

        app = worker_of(kind, body)
        for _ in range(2):  # again, in another event loop
            put(session, "acme")
            with pytest.raises(KeyError, match="mine"), app:  # noqa: PT012
                assert begun.wait(30)
                threading.Timer(0.05, go.set).start()
                raise KeyError("mine")
            assert is_empty(session)
            go.clear()
            begun.clear()

    @pytest.mark.parametrize("kind", ["plain", "async session", "asyncpg"])
    async def test_in_an_event_loop(self, kind: str, session: Session, worker_of: WorkerOf) -> None:
        app = worker_of(kind, lambda *_: None)
        put(session, "acme", 5)
        with pytest.raises(KeyError, match="mine"):  # noqa: PT012
            async with app:
                await anyio.to_thread.run_sync(wait_for_endings, session, 5)
                with pytest.raises(fq.FairqueueError, match=r"is running already: .* make another Worker"):
                    await app.run_async()
                raise KeyError("mine")
        assert is_empty(session)
        if kind != "plain":
            await app.engine.dispose()  # type: ignore[misc]

    async def test_in_a_scope_that_is_cancelled(self, session: Session, worker_of: WorkerOf) -> None:
        """As when another task of the group fails: what was begun is finished."""
        go, begun = threading.Event(), threading.Event()

        def body(message: fq.LeasedMessage[Any], _: object) -> None:
            begun.set()
            assert go.wait(30)

        app = worker_of("plain", body)
        put(session, "acme")
        with anyio.CancelScope() as scope:
            async with app:
                await anyio.to_thread.run_sync(begun.wait, 30)
                threading.Timer(0.05, go.set).start()
                scope.cancel()
        assert endings(session) == ["completed"]
        assert is_empty(session)

    @pytest.mark.parametrize("notify", [False, True])
    async def test_while_it_waits(self, notify: bool, session: Session, worker_of: WorkerOf) -> None:
        """For something to do: it ends, and doesn't look once more before, however long that takes."""
        app = worker_of("plain", lambda *_: None, notify=notify, poll=RARELY, grace=RARELY)
        async with asyncio.timeout(30), app:
            await anyio.to_thread.run_sync(wait_until, lambda: app._run is not None and app._run.idler.waiting)

    @pytest.mark.parametrize("how", ["once", "twice", "by a scope"])
    async def test_cancelled(self, how: str, session: Session, engine_of: EngineOf) -> None:
        """It is a stop, and the second time one that doesn't wait: what was begun is finished, or else handed back."""
        put(session, "acme", 2, max_attempts=1)
        app = fq.Worker(engine_of("async"), concurrency=1, prefetch=1)
        begun, go = asyncio.Event(), asyncio.Event()
        scope = anyio.CancelScope()

        @app.handler
        async def work(message: fq.LeasedMessage[Any]) -> None:
            begun.set()
            await go.wait()

        async def work_within_scope() -> None:
            with scope:
                await app.run_async()

        task = asyncio.create_task(work_within_scope())
        async with asyncio.timeout(30):
            await begun.wait()
            run = app._run
            assert run is not None
            (scope if how == "by a scope" else task).cancel()
            await run.stopping.wait()
            if how == "twice":
                task.cancel()
            else:
                for _ in range(10):  # in each turn of the event loop a scope would cancel it again
                    await asyncio.sleep(0)
                go.set()
            await asyncio.wait([task])
        await app.engine.dispose()  # type: ignore[misc]
        assert task.cancelled() == (how != "by a scope")
        assert endings(session) == ([] if how == "twice" else ["completed"])
        left = session.execute(select(fq.Message.attempt - fq.Message.forgiven, fq.Message.leased_until)).all()
        assert left == [(0, None)] * (2 if how == "twice" else 1)

    @pytest.mark.parametrize("kind", ["plain", "async", "asyncpg"])
    def test_before_there_is_a_database(
        self, kind: str, postgres: Postgres, session: Session, worker_of: WorkerOf
    ) -> None:
        """The block doesn't wait for it; the worker does."""
        put(session, "acme")
        app = worker_of(kind, lambda *_: None)
        closed = f'ALTER DATABASE "{app.engine.url.database}" ALLOW_CONNECTIONS'
        maintenance = create_engine(postgres.url, isolation_level="AUTOCOMMIT")
        with maintenance.connect() as connection:
            connection.execute(text(f"{closed} false"))
            with app:
                pass
            with app:
                assert endings(session) == []
                connection.execute(text(f"{closed} true"))
                wait_for_endings(session, 1)
        maintenance.dispose()
        assert is_empty(session)

    def test_before_the_schema_is_there(
        self, postgres: Postgres, empty_database_url: str, engine_of: EngineOf, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Nor does the block wait for that, where it didn't for the database: the worker begins when it is there."""
        engine = engine_of("plain", url=empty_database_url)
        app = fq.Worker(engine, poll=0.05)
        done = threading.Event()
        app.handler(lambda _: done.set())
        closed = f'ALTER DATABASE "{engine.url.database}" ALLOW_CONNECTIONS'
        maintenance = create_engine(postgres.url, isolation_level="AUTOCOMMIT")
        with maintenance.connect() as connection:
            connection.execute(text(f"{closed} false"))
            with app:
                connection.execute(text(f"{closed} true"))
                wait_until(lambda: "has no fairqueue" in caplog.text)
                with Session(engine) as session:
                    schema.install(session.connection())
                    fq.enqueue(session, "acme")
                    session.commit()
                assert done.wait(30)
        maintenance.dispose()

    def test_stopped_from_elsewhere(self, session: Session, worker_of: WorkerOf) -> None:
        """From another thread, which may be the handler's; a stop of a worker that doesn't run does nothing."""
        app = worker_of("plain", lambda *_: app.stop())
        app.stop()
        put(session, "acme", 2)
        app.concurrency = 1
        assert asyncio.run(app.run_async()) == 0
        app.stop()
        assert endings(session) == ["completed"]
        with app:
            wait_for_endings(session, 2)

    @pytest.mark.parametrize("kind", ["plain", "async"])
    def test_stopped_before_the_block_ends(self, kind: str, session: Session, engine_of: EngineOf) -> None:
        """The end of the block isn't a second stop, which wouldn't wait for the handlers."""
        put(session, "acme")
        begun = threading.Event()
        app = fq.Worker(engine_of(kind), poll=0.05)

        def plain(message: object) -> None:
            begun.set()
            stopping.wait(30)

        async def asynchronous(message: object) -> None:
            begun.set()
            await anyio.to_thread.run_sync(stopping.wait, 30)

        stopping = threading.Event()
        app.handler(plain if kind == "plain" else asynchronous)
        with app:
            assert begun.wait(30)
            app.stop()
            threading.Timer(0.2, stopping.set).start()
        assert endings(session) == ["completed"]

    def test_several_workers_and_one_that_fails(
        self, session: Session, worker_of: WorkerOf, engine_of: EngineOf
    ) -> None:
        """The others finish what they have; then the error is raised."""
        put(session, "acme", queue="good")
        good = worker_of("plain", lambda *_: None, queue="good")
        bad = worker_of("plain", lambda *_: None, queue="bad")

        async def fail_later(**_: object) -> int:
            await anyio.to_thread.run_sync(wait_for_endings, session, 1)
            raise KeyError("mine")

        bad.run_async = fail_later  # type: ignore[method-assign]
        with pytest.raises(KeyError, match="mine"):
            fq.worker.run(good, bad)
        assert leased(session) == 0

    def test_several_workers_of_one_engine(self, session: Session, engine_of: EngineOf) -> None:
        """Its connections are closed once, when the last one has ended."""
        engine = engine_of("async")
        disposed: list[Any] = []
        event.listen(engine.sync_engine, "engine_disposed", disposed.append)
        first, last = (fq.Worker(engine, queue=queue, poll=0.05) for queue in ("first", "last"))
        first.handler(lambda _: first.stop())

        @last.handler
        def stop(_: fq.LeasedMessage[Any]) -> None:
            wait_until(lambda: first._run is None)
            assert not disposed
            last.stop()

        for queue in ("first", "last"):
            put(session, "acme", queue=queue)
        assert fq.worker.run(first, last) == 0
        assert len(disposed) == 1


@pytest.mark.parametrize("kind", ["plain session", "async", "asyncpg session"])
@pytest.mark.parametrize("grace", [0, 30])
def test_nothing_stays_leased(kind: str, grace: float, session: Session, worker_of: WorkerOf) -> None:
    """Stopped while it dequeues, the worst moment, and at others: what it has leased is finished or handed back."""
    add_effects(session)
    put(session, "acme", 1000)
    app = worker_of(kind, act, grace=grace, concurrency=5)
    engine: Any = getattr(app.engine, "sync_engine", app.engine)

    def stop_now(_: Any, __: Any, statement: str, *___: Any) -> None:
        if "message_dequeue" in statement:
            app.stop()

    dice = random.Random(kind)  # noqa: S311
    for number in range(12):
        if at_worst := number % 2 == 0:
            event.listen(engine, "before_cursor_execute", stop_now)
        before = len(endings(session))
        with app:
            if at_worst:
                wait_until(lambda: app._run is None)
                event.remove(engine, "before_cursor_execute", stop_now)
                assert len(endings(session)) == before, "nothing of it is begun"
            else:
                wait_for_endings(session, before + dice.randrange(4))
        assert leased(session) == 0
        if kind == "async":
            assert sorted(endings(session)) == ["completed"] * len(endings(session))
        else:
            assert len(effects(session)) == len(endings(session))
    used = session.execute(select(fq.Message.id).where(fq.Message.attempt != fq.Message.forgiven)).all()
    assert used == []
    check_invariants(session.connection())


@pytest.mark.xdist_group("a server that hangs")
@pytest.mark.parametrize("kind", ["plain session", "async session", "asyncpg session"])
def test_a_server_that_hangs(
    kind: str, own_server: embedded.Server, worker_of: WorkerOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop ends the worker all the same, though nothing can be handed back."""
    monkeypatch.setattr(running, "_LAST_WORDS", 0.2)
    monkeypatch.setattr(listening, "ANSWER_TIMEOUT", 0.2)
    for module in ("", ".database", ".wire"):
        monkeypatch.setattr(f"fairqueue.worker{module}.CLOSING", 0.5)
    app = worker_of(kind, lambda *_: None, engine={"url": own_server.url()}, grace=0.2)
    stopped: list[int] = []

    def go_on() -> None:
        while stopped:
            os.kill(stopped.pop(), signal.SIGCONT)

    waits = threading.Timer(30, go_on)
    try:
        with (
            app,
            statements(app.engine, "queue_unlisten") as taken_back,
            statements(app.engine, "queue_due") as asked,
        ):
            wait_until_it_waits(app)
            for pid in (own_server.pid, *children(own_server.pid)):
                os.kill(pid, signal.SIGSTOP)
                stopped.append(pid)
            asked.clear()
            waits.start()
            run = app._run
            assert run is not None
            assert run.idler.listener is not None
            run.threads.call_soon(run.idler.listener.cease)
            wait_until(lambda: taken_back and (asked or not run.idler.waiting))  # it looks, or asks when to look
        assert stopped, "it has waited for the server"
    finally:
        waits.cancel()
        go_on()
    # What was abandoned comes to its end with the server.
    wait_until(lambda: threads_of_workers() == 0)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture(scope="module")
def own_server() -> Iterator[embedded.Server]:
    """With fairqueue. Whoever stops its processes has them go on."""
    with embedded.ephemeral() as server:
        engine = create_engine(server.url())
        with engine.begin() as connection:
            schema.install(connection)
        engine.dispose()
        yield server
