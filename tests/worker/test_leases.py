"""A worker's leases: it keeps them for as long as it works, and lets go of what it has lost."""

import asyncio
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from sqlalchemy import Engine, event, select, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session
from sqlalchemy.util import await_only

import fairqueue as fq
from fairqueue.testing import Clock
from fairqueue.worker import database, heart, running
from fairqueue.worker.threads import Threads
from tests.acts import lease_of, put, take, wait_until
from tests.fixtures.workers import EngineOf, WorkerOf
from tests.worker.working import (
    RARELY,
    act,
    add_effects,
    effects,
    endings,
    leased,
    statements,
    wait_for_endings,
    wait_until_it_waits,
)
from tests.wrong import LOST


def go_by(monkeypatch: pytest.MonkeyPatch, clock: Callable[[], float]) -> None:
    """The clock by which workers know how old their leases are."""
    for module in (running, heart):
        monkeypatch.setattr(module, "monotonic", clock)


def test_they_are_extended(engine: Engine, session: Session, worker_of: WorkerOf) -> None:
    """A handler may take longer than a lease, by far: nobody else gets its message."""
    put(session, "acme")
    done = threading.Event()
    lasts = text("SELECT extract(epoch FROM leased_until - fairqueue.clock())::float FROM fairqueue.message")

    def left() -> float:
        session.rollback()
        return session.scalar(lasts) or 0.0

    with Clock(engine) as clock:
        clock.freeze()
        with worker_of("plain", lambda *_: done.wait(30), lease=1):
            wait_until(lambda: leased(session))
            for _ in range(3):
                wait_until(lambda: left() == 1)
                clock.tick(0.75)
                assert take(session) == []
            done.set()
            assert wait_for_endings(session, 1) == {"completed": 1}


def test_while_the_database_is_away(
    engine: Engine,
    session: Session,
    worker_of: WorkerOf,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each try is soon enough for a lease, and for all the messages that there are by then."""
    go_by(monkeypatch, lambda: 0.0)  # or dequeues would be preceded by heartbeats
    (first,) = put(session, "acme")
    done = threading.Event()
    away = True
    asked: list[object] = []

    def fail(*arguments: Any) -> None:
        statement, parameters = arguments[2:4]
        if "message_heartbeat" in statement:
            asked.append(sorted(next(value for value in parameters.values() if isinstance(value, list))))
            if away:
                raise OperationalError(None, None, ConnectionError("gone"))

    with Clock(engine) as clock:
        clock.freeze()  # no lease runs out meanwhile
        app = worker_of("plain", lambda *_: done.wait(30), lease=1)
        event.listen(app.engine, "before_cursor_execute", fail)
        with app:
            wait_until(lambda: asked == [[first]])
            (second,) = put(session, "acme")
            wait_until(lambda: len(asked) == 7)
            away = False
            wait_until(lambda: len(asked) == 8)
            done.set()
            assert wait_for_endings(session, 2) == {"completed": 2}
    assert asked[6:8] == [[first, second]] * 2
    pauses = re.findall(r"can't extend leases, trying again in (\S+) s: ConnectionError: gone", caplog.text)
    assert len(pauses) == 7
    assert max(map(float, pauses)) <= 0.3  # a third of the lease


async def test_a_long_lease_while_the_database_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be over if the next try came minutes after the database is back."""
    pauses: list[float] = []

    def pause(_: int, longest: float) -> float:
        pauses.append(longest)
        if len(pauses) == 3:
            scope.cancel()
        return 0.0

    monkeypatch.setattr(database, "backoff", pause)
    monkeypatch.setattr(anyio, "sleep", lambda _: anyio.lowlevel.checkpoint())  # until its first beat
    job: Any = "held"
    threads = Threads()
    beating = heart.Heart(database.Database(LOST, threads), 600, {job}, deque(), print)
    with anyio.CancelScope() as scope:
        await beating.beat()
    threads.close()
    assert pauses == [10, 10, 10]


@pytest.mark.parametrize("how", ["cancelled", "taken"])
@pytest.mark.parametrize("kind", ["async", "asyncpg session"])
def test_one_that_is_lost(  # noqa: PLR0917
    kind: str,
    how: str,
    engine: Engine,
    session: Session,
    engine_of: EngineOf,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An async handler is cancelled at the next heartbeat; its slot is free, and what it wrote is undone."""
    add_effects(session)
    (id_,) = put(session, "acme")
    ended: list[str] = []
    app = fq.Worker(engine_of(kind), lease=1, concurrency=1, poll=0.05)

    async def work(message: fq.LeasedMessage[Any], own: Any) -> None:
        if message.id != id_:
            return
        if kind.endswith("session"):
            await own.run_sync(lambda plain: act(message, plain))
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def work_alone(message: fq.LeasedMessage[Any]) -> None:
        await work(message, None)

    app.handler(work if kind.endswith("session") else work_alone)
    with app:
        wait_until(lambda: leased(session))
        if how == "cancelled":
            assert session.execute(fq.cancel(id_)).one().result == "cancelled"
            session.commit()
        else:
            with Clock(engine) as clock:

                def take_it() -> bool:
                    clock.tick(3)  # each time: a heartbeat may come before, and extends what nobody has taken
                    return bool(lease_of(session))

                wait_until(take_it)
        wait_until(lambda: ended)
        put(session, "globex")
        wait_until(lambda: "completed" in endings(session))
    assert "is no longer ours" in caplog.text
    assert effects(session) == []


def test_what_has_committed_is_not_given_up(
    session: Session, engine_of: EngineOf, caplog: pytest.LogCaptureFixture
) -> None:
    """A heartbeat that comes while the session closes finds no message any more, as it is done."""
    put(session, "acme")
    closed: list[str] = []
    asynchronous = engine_of("async session")

    class Slow(AsyncSession):
        async def close(self) -> None:
            try:
                with statements(asynchronous, "message_heartbeat") as sent:
                    await asyncio.to_thread(wait_until, lambda: len(sent) >= 3)
            finally:
                await super().close()
                closed.append("closed")

    app = fq.Worker(asynchronous, lease=1, async_session=async_sessionmaker(asynchronous, class_=Slow))

    @app.handler
    async def handle(_: fq.LeasedMessage[Any], own: AsyncSession) -> None:
        await own.execute(text("SELECT"))

    with app:
        assert wait_for_endings(session, 1) == {"completed": 1}
        wait_until(lambda: closed)
    # Where the end of the worker meets a query, psycopg says so.
    words = [each.getMessage() for each in caplog.records]
    assert [each for each in words if not each.startswith("query cancellation interrupted")] == []


@pytest.mark.parametrize("done", [False, True], ids=["in work", "done, not reported"])
def test_after_a_freeze(
    done: bool, engine: Engine, session: Session, worker_of: WorkerOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or an outage, longer than the lease: the worker doesn't take from itself what nobody else has taken."""
    put(session, "acme")
    began: list[tuple[str, int]] = []
    go = threading.Event()
    frozen = 0

    def body(message: fq.LeasedMessage[Any], _: object) -> None:
        began.append((message.channel, message.attempt))
        if not done and message.channel == "acme":
            assert go.wait(30)

    def refuse(_: Any, __: Any, statement: str, *___: Any) -> None:
        if "message_complete" in statement and not go.is_set():
            raise OperationalError(None, None, ConnectionError("gone"))

    go_by(monkeypatch, lambda: time.monotonic() + frozen)
    app = worker_of("plain", body, concurrency=2, lease=3600, poll=RARELY)
    event.listen(app.engine, "before_cursor_execute", refuse)
    with Clock(engine) as clock, statements(app.engine, "message_heartbeat") as sent, app:
        wait_until(lambda: began)
        wait_until_it_waits(app)
        frozen = 4000
        clock.tick(frozen)
        put(session, "globex")
        wait_until(lambda: len(began) >= 2)
        go.set()
        assert wait_for_endings(session, 2) == {"completed": 2}
    assert began == [("acme", 1), ("globex", 1)]
    assert len(sent) == 1


def test_what_was_taken_meanwhile(
    engine: Engine, session: Session, worker_of: WorkerOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker learns it from what precedes the dequeue, and not only from the next heartbeat."""
    first, second = put(session, "acme", 2)
    began: list[int] = []
    go = threading.Event()
    frozen = 0

    def body(message: fq.LeasedMessage[Any], _: object) -> None:
        began.append(message.id)
        if message.id == first:
            go.wait(30)

    go_by(monkeypatch, lambda: time.monotonic() + frozen)
    app = worker_of("plain", body, concurrency=1, prefetch=3, lease=3600, poll=RARELY)
    with Clock(engine) as clock, app:
        wait_until(lambda: began)
        wait_until_it_waits(app)
        frozen = 4000
        clock.tick(frozen)
        assert [message.id for message in lease_of(session, 2)] == [first, second]
        (third,) = put(session, "globex")
        wait_until(lambda: leased(session) == 3)
        go.set()
        assert wait_for_endings(session, 1) == {"completed": 1}
    assert began == [first, third]


def test_since_when(session: Session, worker_of: WorkerOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Since before the dequeue was sent, which may take long: the next one is preceded by a heartbeat."""
    put(session, "acme")
    passed = 0
    go = threading.Event()

    def take_long(_: Any, __: Any, statement: str, *___: Any) -> None:
        nonlocal passed
        if "message_dequeue(" in statement:
            passed = 2000

    go_by(monkeypatch, lambda: time.monotonic() + passed)
    app = worker_of("plain", lambda *_: go.wait(30), concurrency=2, lease=3600, poll=RARELY)
    event.listen(app.engine, "before_cursor_execute", take_long)
    with statements(app.engine, "message_heartbeat") as sent, app:
        wait_until(lambda: leased(session))
        wait_until_it_waits(app)
        put(session, "globex")
        wait_until(lambda: leased(session) == 2)
        go.set()
    assert len(sent) == 1


def test_one_that_is_just_being_completed(
    session: Session, worker_of: WorkerOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the handler's own transaction: to a heartbeat it is neither extended nor lost."""
    put(session, "acme")
    told: list[str] = []
    let_go = heart.Heart.let_go

    def note(of: heart.Heart, results: list[tuple[Any, str]]) -> None:
        let_go(of, results)
        told.extend(result for _, result in results)

    def body(_: object, own: Session) -> None:
        event.listen(own, "before_commit", lambda _: await_only(wait_until_told()))

    async def wait_until_told() -> None:
        while "busy" not in told:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    monkeypatch.setattr(heart.Heart, "let_go", note)
    with worker_of("async session", body, lease=1):
        assert wait_for_endings(session, 1) == {"completed": 1}
    assert session.scalars(select(fq.History.attempt)).all() == [1]


def test_a_lost_message_is_cancelled_once(session: Session, engine_of: EngineOf) -> None:
    """Not again at each heartbeat: its handler may take its time to clean up."""
    (id_,) = put(session, "acme")
    cleaned: list[int] = []
    app = fq.Worker(engine_of("async"), lease=1)

    @app.handler
    async def work(message: fq.LeasedMessage[Any]) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            until = len(sent) + 2
            while len(sent) < until:  # noqa: ASYNC110 - it is a list
                await asyncio.sleep(0.01)
            cleaned.append(message.id)

    with statements(app.engine, "message_heartbeat") as sent, app:
        wait_until(lambda: leased(session))
        session.execute(fq.cancel(id_))
        session.commit()
        wait_until(lambda: cleaned)
    assert cleaned == [id_]
