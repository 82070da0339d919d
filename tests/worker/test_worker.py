"""fq.Worker: every kind of handler does its work, each message once, and commits it with the completion."""

import asyncio
import re
import threading
from collections import Counter
from typing import Any

import pytest
from sqlalchemy import Engine, make_url, select, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

import fairqueue as fq
from fairqueue import roles, schema
from fairqueue.worker.reporting import Reporter
from tests.acts import expire, lease_of, put, put_all, wait_until
from tests.fixtures.workers import EngineOf, WorkerOf
from tests.invariants import check_invariants
from tests.worker.working import (
    KINDS,
    RARELY,
    WITH_SESSION,
    act,
    add_effects,
    effects,
    handler_of,
    is_empty,
    statements,
    wait_for_endings,
    wait_until_it_waits,
)


class Base(DeclarativeBase):
    pass


class Page(Base):
    __tablename__ = "page"
    number: Mapped[int] = mapped_column(primary_key=True)


@pytest.mark.parametrize("kind", KINDS)
def test_each_message_once(kind: str, session: Session, worker_of: WorkerOf) -> None:
    add_effects(session)
    put_all(session, {"acme": 20, "globex": 3, "initech": 2})
    handled: Counter[int] = Counter()

    def body(message: fq.LeasedMessage[Any], own: Session | None) -> None:
        handled[message.id] += 1
        act(message, own)

    with worker_of(kind, body, name="the worker"):
        assert wait_for_endings(session, 25) == {"completed": 25}
        put(session, "acme", payload={"late": True})
        assert wait_for_endings(session, 26) == {"completed": 26}
    assert set(handled.values()) == {1}
    assert len(handled) == 26
    assert effects(session) == ([(id_, 1) for id_ in sorted(handled)] if kind in WITH_SESSION else [])
    assert set(session.execute(select(fq.History.worker, fq.History.attempt))) == {("the worker", 1)}
    assert is_empty(session)
    check_invariants(session.connection())


@pytest.mark.parametrize("kind", WITH_SESSION)
def test_the_completion_is_in_the_handlers_transaction(kind: str, session: Session, worker_of: WorkerOf) -> None:
    add_effects(session)
    put(session, "acme")
    with worker_of(kind, act):
        wait_for_endings(session, 1)
    same = text("SELECT e.xmin::text = (h.xid::text::bigint % (2::bigint ^ 32)::bigint)::text FROM effect e, history h")
    session.execute(text("SET search_path = public, fairqueue"))
    assert session.scalar(same) is True


@pytest.mark.parametrize("kind", WITH_SESSION)
def test_writes_that_cannot_be_committed(kind: str, session: Session, worker_of: WorkerOf) -> None:
    """An error of the COMMIT itself is one of the handler's: neither its writes nor the completion are there."""
    add_effects(session)
    session.execute(
        text(
            "CREATE TABLE public.parent (id bigint PRIMARY KEY);"
            "ALTER TABLE public.effect ADD FOREIGN KEY (message_id) REFERENCES public.parent"
            " DEFERRABLE INITIALLY DEFERRED"
        )
    )
    put(session, "acme", max_attempts=2, backoff=0)
    with worker_of(kind, act):
        assert wait_for_endings(session, 1) == {"dead": 1}
    assert effects(session) == []
    assert "violates foreign key" in str(session.scalars(select(fq.DeadMessage.error)).one())


@pytest.mark.parametrize("kind", WITH_SESSION)
def test_writes_that_are_flushed_last(kind: str, session: Session, worker_of: WorkerOf) -> None:
    """What is kept of the error begins with what it is, not with what SQLAlchemy did when it came."""
    session.execute(text("CREATE TABLE public.page (number integer PRIMARY KEY)"))
    session.execute(text("INSERT INTO public.page VALUES (1)"))
    put(session, "acme", max_attempts=1)
    with worker_of(kind, lambda _, own: own.add(Page(number=1))):
        assert wait_for_endings(session, 1) == {"dead": 1}
    (error,) = session.scalars(select(fq.DeadMessage.error))
    assert re.match(r"IntegrityError: \(.*\) .*duplicate key value violates unique constraint", str(error)), error


@pytest.mark.parametrize(
    ("kind", "decision"), [*((kind, None) for kind in WITH_SESSION), ("plain session", fq.Cancel("not needed"))]
)
def test_a_lease_that_is_over(  # noqa: PLR0917
    kind: str, decision: object, engine: Engine, session: Session, worker_of: WorkerOf, caplog: pytest.LogCaptureFixture
) -> None:
    """Another worker has the message by now: what this one wrote is rolled back, whatever it decides."""
    add_effects(session)
    (id_,) = put(session, "acme", backoff=0)
    attempts: list[int] = []

    def body(message: fq.LeasedMessage[Any], own: Session) -> object:
        act(message, own)
        attempts.append(message.attempt)
        if message.attempt == 1:
            with Session(engine) as other:
                expire(other, [id_])
                (again,) = lease_of(other)
                assert again.attempt == 2
                expire(other, [id_])
            return decision
        return None

    with worker_of(kind, body, concurrency=1):  # so that it isn't this one that leases it again
        assert wait_for_endings(session, 1) == {"completed": 1}
    assert attempts == [1, 3]
    assert effects(session) == [(id_, 3)]
    assert "attempt 1: it was over already (stale), as its lease ran out, " in caplog.text
    assert "what the handler wrote in its session is rolled back" in caplog.text


def test_a_commit_without_an_answer(session: Session, engine_of: EngineOf, caplog: pytest.LogCaptureFixture) -> None:
    """What the handler wrote is there, with the completion, and the log doesn't say otherwise."""
    add_effects(session)
    (id_,) = put(session, "acme")

    class Cut(Session):
        def commit(self) -> None:
            super().commit()
            raise OperationalError(None, None, ConnectionError("the server closed the connection"))

    engine = engine_of("plain")
    app = fq.Worker(engine, poll=0.05, session=sessionmaker(engine, class_=Cut))
    app.handler(handler_of("plain session", act))
    with app:
        wait_until(lambda: "it was over already (not_found)" in caplog.text)
        assert wait_for_endings(session, 1) == {"completed": 1}
    assert effects(session) == [(id_, 1)]
    assert "is rolled back" not in caplog.text


@pytest.mark.parametrize("asynchronous", [False, True])
def test_concurrency(asynchronous: bool, session: Session, engine_of: EngineOf) -> None:
    """Four messages are in work at a time: never more, and not fewer while there are more."""
    put_all(session, {f"tenant{number}": 3 for number in range(4)})
    running: set[int] = set()
    most: list[int] = []
    lock = threading.Lock()
    barrier, async_barrier = threading.Barrier(4, timeout=30), asyncio.Barrier(4)
    app = fq.Worker(engine_of("async" if asynchronous else "plain"), concurrency=4, poll=0.05)

    def note(message: fq.LeasedMessage[Any], begins: bool) -> None:
        with lock:
            (running.add if begins else running.remove)(message.id)
            most.append(len(running))

    def plain(message: fq.LeasedMessage[Any]) -> None:
        note(message, True)
        barrier.wait()
        note(message, False)

    async def wait(message: fq.LeasedMessage[Any]) -> None:
        note(message, True)
        await asyncio.wait_for(async_barrier.wait(), 30)
        note(message, False)

    app.handler(wait if asynchronous else plain)
    with app:
        assert wait_for_endings(session, 12) == {"completed": 12}
    assert max(most) == 4


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_completions_go_in_batches(
    kind: str, session: Session, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that end while one is on its way, without a session, go in the next statement."""
    put_all(session, {"acme": 10, "globex": 10})
    reporting = threading.Event()
    batches: list[int] = []
    send = Reporter.send

    async def hold(reporter: Reporter, decision: fq.worker.Decision, jobs: list[Any], patience: float) -> None:
        batches.append(len(jobs))
        reporting.set()
        async with asyncio.timeout(30):
            while len(reporter.unreported) < 20 and len(batches) == 1:  # noqa: ASYNC110 - it is no event
                await asyncio.sleep(0.01)
        await send(reporter, decision, jobs, patience)

    def plain(message: fq.LeasedMessage[Any]) -> None:
        assert message.id == 1 or reporting.wait(30)

    async def wait(message: fq.LeasedMessage[Any]) -> None:
        while message.id != 1 and not reporting.is_set():  # noqa: ASYNC110 - of threads, too
            await asyncio.sleep(0.01)

    monkeypatch.setattr(Reporter, "send", hold)
    app = fq.Worker(engine_of(kind), concurrency=20, poll=0.05)
    app.handler(plain if kind == "plain" else wait)
    with statements(app.engine, "message_complete") as sent, app:
        assert wait_for_endings(session, 20) == {"completed": 20}
    assert (batches, len(sent)) == ([1, 19], 2)


def test_each_decision_is_a_transaction(session: Session, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one that waits for a message would keep the others locked, and it could come to a deadlock."""
    put_all(session, {"acme": 6})
    groups: list[tuple[str, int]] = []
    send = Reporter.send
    reporting = threading.Event()
    gone = fq.Cancel("gone")

    async def hold(reporter: Reporter, decision: fq.worker.Decision, jobs: list[Any], patience: float) -> None:
        groups.append((type(decision).__name__, len(jobs)))
        reporting.set()
        async with asyncio.timeout(30):
            while len(reporter.unreported) < 6 and len(groups) == 1:  # noqa: ASYNC110 - it is no event
                await asyncio.sleep(0.01)
        await send(reporter, decision, jobs, patience)

    def handle(message: fq.LeasedMessage[Any]) -> fq.Cancel | None:
        assert message.id == 1 or reporting.wait(30)
        return gone if message.id % 2 == 0 else None

    monkeypatch.setattr(Reporter, "send", hold)
    app = fq.Worker(engine_of("plain"), concurrency=6, poll=0.05)
    app.handler(handle)
    with app:
        assert wait_for_endings(session, 6) == {"completed": 3, "cancelled": 3}
    assert groups[0] == ("Decision", 1)
    assert sorted(groups[1:]) == [("Cancel", 3), ("Decision", 2)]


@pytest.mark.parametrize(
    ("kind", "level"),
    [
        *(("plain session", level) for level in ("AUTOCOMMIT", "REPEATABLE READ", "SERIALIZABLE", None)),
        ("async session", "SERIALIZABLE"),
        ("asyncpg", "REPEATABLE READ"),
        ("asyncpg", None),
    ],
)
def test_engines_of_any_isolation_level(  # noqa: PLR0917
    kind: str,
    level: str | None,
    session: Session,
    database_url: str,
    worker_of: WorkerOf,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Dequeueing needs READ COMMITTED; the handlers keep what their engine, or the server, has.

    In which they can't complete a message once its lease was extended, or aren't rolled back: that is said.
    """
    put(session, "acme", 3)
    seen = set()

    def body(message: fq.LeasedMessage[Any], own: Session | None) -> None:
        if own is not None:
            seen.add(own.scalar(text("SHOW transaction_isolation")))

    if level is None:
        name = make_url(database_url).database
        session.execute(text(f"ALTER DATABASE \"{name}\" SET default_transaction_isolation = 'serializable'"))
        session.commit()
    options: dict[str, Any] = {} if level is None else {"isolation_level": level}
    with worker_of(kind, body, engine=options, concurrency=1):
        assert wait_for_endings(session, 3) == {"completed": 3}
    expected = {"AUTOCOMMIT": "read committed", None: "serializable"}.get(level, str(level).lower())
    assert seen == ({expected} if kind in WITH_SESSION else set())
    assert ("fails when it is at work while its lease is extended" in caplog.text) == (not seen <= {"read committed"})
    assert ("leaves what it wrote when it fails" in caplog.text) == (level == "AUTOCOMMIT")


@pytest.mark.parametrize("kind", ["plain", "async session", "asyncpg"])
def test_only_completions_wait_for_the_disk(kind: str, session: Session, worker_of: WorkerOf) -> None:
    """Leases and heartbeats don't: one that is lost with the server is a redelivery."""
    session.execute(
        text(
            "CREATE TABLE public.seen (operation text, setting text);"
            "CREATE FUNCTION public.see() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " INSERT INTO public.seen VALUES (TG_OP, current_setting('synchronous_commit')); RETURN NULL; END $$;"
            "CREATE TRIGGER see AFTER UPDATE OR DELETE ON fairqueue.message EXECUTE FUNCTION public.see()"
        )
    )
    put(session, "acme", 3)
    with worker_of(kind, lambda *_: None):
        wait_for_endings(session, 3)
    seen = set(session.execute(text("SELECT * FROM public.seen")))
    assert seen == {("UPDATE", "off"), ("DELETE", "on")}


@pytest.mark.parametrize("kind", ["plain session", "async session", "asyncpg"])
def test_another_schema(kind: str, empty_database_url: str, engine_of: EngineOf, worker_of: WorkerOf) -> None:
    with engine_of("plain", url=empty_database_url).begin() as connection:
        schema.install(connection, 'My "Q"')
    options = {"url": empty_database_url, "execution_options": fq.in_schema('My "Q"')}
    engine = engine_of("plain", **options)
    app = worker_of(kind, lambda *_: None, engine=options, poll=RARELY)
    with Session(engine) as session, app:
        for _ in range(2):
            wait_until_it_waits(app)
            fq.enqueue(session, "acme")
            session.commit()
        assert wait_for_endings(session, 2) == {"completed": 2}


@pytest.mark.parametrize("kind", ["plain", "asyncpg"])
def test_the_role_of_workers_is_enough(kind: str, session: Session, database_url: str, worker_of: WorkerOf) -> None:
    """For all that a Worker does: it starts, listens, completes, fails, defers, cancels, extends leases, hands back."""
    role = f"worker_{make_url(database_url).database}"
    session.execute(text(f'CREATE ROLE "{role}"'))
    roles.grant(session.connection(), role, "worker")
    decisions = [None, fq.Retry("later"), fq.DeadLetter("never"), fq.Cancel("no need"), fq.Defer(delay=3600)]
    for number, _ in enumerate(decisions):
        put(session, f"tenant{number}", payload=number)
    hanging, started = threading.Event(), threading.Event()

    def body(message: fq.LeasedMessage[Any], _: object) -> object:
        return decisions[message.payload]

    as_role = {"server_settings": {"role": role}} if kind == "asyncpg" else {"options": f"-c role={role}"}
    options = {"connect_args": as_role}
    with worker_of(kind, body, engine=options, poll=60, lease=1):
        wait_until(lambda: wait_for_endings(session, 3))
    assert Counter(wait_for_endings(session, 3)) == {"completed": 1, "dead": 1, "cancelled": 1}

    def hang(message: fq.LeasedMessage[Any], _: object) -> None:
        started.set()
        hanging.wait(30)

    if kind == "plain":
        put(session, "acme", payload=0)
        app = worker_of(kind, hang, engine=options, poll=60, lease=1, grace=0)
        with statements(app.engine, "message_heartbeat") as beats, app:
            assert started.wait(30)
            wait_until(lambda: beats)
        hanging.set()
    left = session.execute(select(fq.Message.attempt, fq.Message.forgiven, fq.Message.leased_until)).all()
    assert all(row.leased_until is None for row in left)
    session.execute(text(f'DROP OWNED BY "{role}"; DROP ROLE "{role}"'))
    session.commit()


def test_an_error_of_the_database_that_stays(session: Session, worker_of: WorkerOf) -> None:
    """A worker that may not dequeue goes on trying, and can be stopped."""
    session.execute(text("ALTER FUNCTION fairqueue.message_dequeue RENAME TO gone"))
    session.commit()
    app = worker_of("plain", lambda *_: None)
    with statements(app.engine, "message_dequeue") as sent, app:
        wait_until(lambda: len(sent) >= 2)
    session.execute(text("ALTER FUNCTION fairqueue.gone RENAME TO message_dequeue"))
    session.commit()
    put(session, "acme")
    with app:
        assert wait_for_endings(session, 1) == {"completed": 1}


def test_the_handlers_session_factory_is_used(session: Session, engine_of: EngineOf) -> None:
    put(session, "acme")
    made: list[Session] = []

    class OwnSession(Session):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            made.append(self)

    engine = engine_of("plain")
    app = fq.Worker(engine, poll=0.05, session=sessionmaker(engine, class_=OwnSession))
    seen: list[object] = []
    app.handler(lambda _, session: seen.append(session))
    with app:
        wait_for_endings(session, 1)
    assert seen == made
    assert len(seen) == 1
