"""drain(): handlers run here and now, as a worker runs them, on a session's own transaction or an engine."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, ForeignKey, create_engine, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

import fairqueue as fq
from fairqueue import schema
from fairqueue.testing import Clock, assert_enqueued, drain, enqueued
from fairqueue.worker import Worker
from fairqueue.worker.handlers import UnreadablePayload
from tests.acts import put, take
from tests.fixtures.connections import Raw
from tests.invariants import check_invariants

Lease = fq.LeasedMessage[Any]


class Base(DeclarativeBase):
    pass


class Page(Base):
    __tablename__ = "page"
    number: Mapped[int] = mapped_column(primary_key=True)
    parent: Mapped[int | None] = mapped_column(ForeignKey("page.number"))


@pytest.fixture
def tables(engine: Engine) -> None:
    Base.metadata.create_all(engine)


def convert(message: Lease, session: Session) -> None:
    """Each page enqueues the one before it."""
    number = message.payload["page"]
    session.add(Page(number=number))
    if number > 1:
        fq.enqueue(session, message.channel, {"page": number - 1})


def once(message: Lease, session: Session) -> None:
    session.add(Page(number=message.payload["page"]))


def nothing(message: Lease) -> None:
    pass


def told(drained: list[tuple[Lease, fq.Outcome]]) -> list[tuple[Any, str]]:
    return [(message.payload, str(outcome)) for message, outcome in drained]


def pages(where: Engine | Connection) -> list[int]:
    with Session(where, join_transaction_mode="create_savepoint") as session:
        return list(session.scalars(select(Page.number).order_by(Page.number)))


@pytest.mark.usefixtures("tables")
class TestWhere:
    def test_session(self, engine: Engine, session: Session) -> None:
        """All in its own transaction: what isn't committed is handled, and nothing is committed."""
        fq.enqueue(session, "acme", {"page": 2})
        assert told(drain(session, convert)) == [({"page": 2}, "completed"), ({"page": 1}, "completed")]
        assert pages(session.connection()) == [1, 2]
        assert enqueued(session) == []
        check_invariants(session.connection(), caps=False)
        assert pages(engine) == []
        session.rollback()
        assert pages(engine) == []
        with engine.connect() as connection:
            check_invariants(connection, caps=False)
            assert connection.scalar(text("SELECT count(*) FROM fairqueue.history")) == 0
        put(session, "acme")
        assert take(session) == ["acme"]

    def test_session_that_is_rolled_back_at_the_end(self, engine: Engine) -> None:
        """The usual fixture: commits of the test and of the application are savepoints of one transaction."""
        with engine.connect() as connection:
            transaction = connection.begin()
            with Session(connection, join_transaction_mode="create_savepoint") as session:
                for first in (1, 11):
                    fq.enqueue(session, "acme", {"page": first + 1})
                    session.commit()
                    fq.enqueue(session, "acme", {"page": 99})
                    session.rollback()
                    assert told(drain(session, once)) == [({"page": first + 1}, "completed")]
                    session.rollback()  # takes back what was drained, as it does what was written
                    assert len(drain(session, once)) == 1
                    session.commit()
                assert pages(connection) == [2, 12]
            transaction.rollback()
        assert pages(engine) == []

    def test_engine(self, engine: Engine, session: Session) -> None:
        """As a worker does it: only what is committed, and everything is committed."""
        fq.enqueue(session, "acme", {"page": 2})
        assert drain(engine, convert) == []
        session.commit()
        assert len(drain(engine, convert)) == 2
        assert pages(engine) == [1, 2]

    @pytest.mark.parametrize("is_async", [False, True])
    @pytest.mark.parametrize("of", ["session", "engine"])
    async def test_async(self, async_engine: AsyncEngine, engine: Engine, is_async: bool, of: str) -> None:
        """Plain handlers too."""
        sessions: list[Any] = []

        async def convert_async(message: Lease, session: AsyncSession) -> None:
            await asyncio.sleep(0)
            sessions.append(session)
            await session.run_sync(lambda session: convert(message, session))

        handler: Callable[..., Any] = convert_async if is_async else convert
        async with AsyncSession(async_engine) as session:
            fq.enqueue(session, "acme", {"page": 2})
            if of == "engine":
                await session.commit()
            drained = await drain(session if of == "session" else async_engine, handler)
            assert told(drained) == [({"page": 2}, "completed"), ({"page": 1}, "completed")]
            assert await session.run_sync(lambda session: pages(session.connection())) == [1, 2]
            await session.rollback()
        assert [type(each) for each in sessions] == [AsyncSession] * (2 * is_async)
        assert pages(engine) == ([1, 2] if of == "engine" else [])

    def test_objects_are_as_after_a_commit(self, engine: Engine, session: Session) -> None:
        """Expired, unless the session is told not to."""
        page = Page(number=1)
        session.add(page)
        session.flush()

        def renumber(message: Lease, session: Session) -> None:
            session.execute(text("UPDATE page SET parent = number"))

        fq.enqueue(session, "acme")
        before = page.parent
        drain(session, renumber)
        assert (before, page.parent) == (None, 1)
        session.rollback()
        with Session(engine, expire_on_commit=False) as keeping:
            page = Page(number=1, parent=None)
            keeping.add(page)
            fq.enqueue(keeping, "acme")
            drain(keeping, renumber)
            assert page.__dict__["parent"] is None

    def test_here_and_now(self, engine: Engine, session: Session) -> None:
        """In this thread, so monkeypatch, mocks and breakpoints work."""
        threads = []
        put(session, "acme", 3)
        drain(engine, lambda _: threads.append(threading.get_ident()))
        assert threads == [threading.get_ident()] * 3

    def test_another_schema(self, engine: Engine) -> None:
        """Sessions in another schema are in test_testing_messages."""
        with engine.begin() as connection:
            schema.install(connection, "My Q")
        elsewhere = engine.execution_options(**fq.in_schema("My Q"))
        with Session(elsewhere) as session:
            put(session, "acme")
        assert len(drain(elsewhere, nothing)) == 1


class TestHow:
    def test_in_the_queues_order(self, session: Session) -> None:
        for channel, count in {"a": 3, "b": 1, "c": 2}.items():
            put(session, channel, count)
        drained = drain(session, nothing)
        assert [message.channel for message, _ in drained] == ["a", "b", "c", "a", "c", "a"]

    def test_limits_and_times_hold(self, engine: Engine, session: Session) -> None:
        session.add(fq.Channel("acme", release_interval_ms=1000))
        put(session, "acme", 2)
        put(session, "globex", delay=3600)
        with Clock(engine) as clock:
            served = []
            for seconds in (0, 1, 3599):
                clock.tick(seconds)
                served.append([message.channel for message, _ in drain(session, nothing)])
        assert served == [["acme"], ["acme"], ["globex"]]

    def test_queue(self, engine: Engine, session: Session) -> None:
        worker = Worker(engine, queue="mail")
        worker.handler(nothing)
        for queue in ("default", "mail", "other"):
            fq.enqueue(session, "acme", queue, queue=queue)
        assert told(drain(session, worker)) == [("mail", "completed")]
        assert told(drain(session, worker, queue="other")) == [("other", "completed")]
        assert told(drain(session, nothing)) == [("default", "completed")]

    def test_typed_payload(self, engine: Engine, session: Session) -> None:
        @dataclass
        class Upload:
            path: str

        class UploadMessage(fq.TypedMessage[Upload], payload_type=Upload):
            pass

        paths = []
        worker = Worker(engine, message_type=UploadMessage)
        worker.handler(lambda message: paths.append(message.payload.path))
        session.add(UploadMessage("acme", Upload("a.pdf")))
        drain(session, worker)
        assert paths == ["a.pdf"]
        fq.enqueue(session, "acme", {"wrong": 1})
        with pytest.raises(UnreadablePayload) as failed:
            drain(session, worker)
        assert isinstance(failed.value.__cause__, fq.InvalidValue)
        assert session.scalars(select(fq.DeadMessage.channel)).all() == ["acme"]

    async def test_sessions_of_the_worker(self, engine: Engine, async_engine: AsyncEngine, session: Session) -> None:
        """Made as the application makes them, but here: what it is bound to may be anywhere."""
        nowhere = create_engine("postgresql+psycopg://nobody@127.0.0.1:1/nothing")
        Base.metadata.create_all(engine)

        class Special(Session):
            pass

        binds = {fq.Message: nowhere, Base: nowhere}
        factory = sessionmaker(nowhere, class_=Special, binds=binds, info={"of": "the application"})
        worker = Worker(nowhere, session=factory)
        seen: list[Any] = []

        @worker.handler
        def look(message: Lease, session: Session) -> None:
            seen.append((isinstance(session, Special), session.info, session.scalar(text("SELECT current_database()"))))
            once(message, session)

        for where in (session, engine):
            put(session, "acme", payload={"page": len(seen)})
            assert len(drain(where, worker)) == 1
            session.commit()
        assert seen == [(True, {"of": "the application"}, engine.url.database)] * 2
        assert pages(engine) == [0, 1]

        elsewhere = create_async_engine(nowhere.url)

        class SpecialAsync(AsyncSession):
            pass

        worker = Worker(
            nowhere, async_session=async_sessionmaker(elsewhere, class_=SpecialAsync, binds={fq.Message: elsewhere})
        )

        @worker.handler
        async def look_async(message: Lease, session: AsyncSession) -> None:
            seen.append((isinstance(session, SpecialAsync), await session.scalar(text("SELECT current_database()"))))

        async with AsyncSession(async_engine) as here:
            fq.enqueue(here, "acme")
            assert len(await drain(here, worker)) == 1
        assert seen[2:] == [(True, engine.url.database)]

    @pytest.mark.parametrize("is_async", [False, True])
    async def test_sessions_that_choose_by_themselves(
        self, engine: Engine, async_engine: AsyncEngine, session: Session, is_async: bool
    ) -> None:
        """Choose what is drained, too."""
        nowhere = create_engine("postgresql+psycopg://nobody@127.0.0.1:1/nothing")
        seen: list[Any] = []

        class Routing(Session):
            def get_bind(self, *_: Any, **__: Any) -> Any:
                return nowhere

        put(session, "acme")
        if not is_async:
            worker = Worker(nowhere, session=sessionmaker(class_=Routing))

            @worker.handler
            def look(message: Lease, session: Session) -> None:
                seen.append(session.scalar(text("SELECT current_database()")))

            assert len(drain(engine, worker)) == 1
        else:
            worker = Worker(nowhere, async_session=async_sessionmaker(sync_session_class=Routing))

            @worker.handler
            async def look_async(message: Lease, session: AsyncSession) -> None:
                seen.append(await session.scalar(text("SELECT current_database()")))

            assert len(await drain(async_engine, worker)) == 1
        assert seen == [engine.url.database]

    @pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE", "AUTOCOMMIT"])
    def test_the_level_of_an_engine_is_for_handlers(self, engine: Engine, session: Session, level: str) -> None:
        """As with a worker: its own statements are READ COMMITTED. Of more than the limit nothing is taken."""
        put(session, "acme", 2)
        with pytest.raises(fq.FairqueueError, match="has more messages after the 1 that were handled"):
            drain(engine.execution_options(isolation_level=level), nothing, limit=1)
        assert [message.attempt for message in enqueued(session)] == [0]
        assert len(drain(engine.execution_options(isolation_level=level), nothing)) == 1


class TestFailures:
    async def test_a_handler_that_is_cancelled_from_within(self, async_engine: AsyncEngine, session: Session) -> None:
        """It has failed, as with a worker, and the others go on."""
        put(session, "cancelled")
        put(session, "acme")

        async def handle(message: Lease) -> None:
            if message.channel == "cancelled":
                task = asyncio.create_task(asyncio.sleep(60))
                task.cancel()
                await task

        drained = await drain(async_engine, handle, raises=False)
        assert [(message.channel, outcome) for message, outcome in drained] == [
            ("cancelled", "failed"),
            ("acme", "completed"),
        ]
        assert enqueued(session)[0].error == "the handler was cancelled from within"

    async def test_it_is_cancelled_itself(self, async_engine: AsyncEngine, session: Session) -> None:
        """As by a time limit of the test: not before the handler has cleaned up."""
        put(session, "acme")
        cleaned: list[int] = []

        async def handle(message: Lease) -> None:
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.01)
                cleaned.append(message.id)

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await drain(async_engine, handle)
        assert len(cleaned) == 1

    def test_are_raised(self, engine: Engine, session: Session) -> None:
        """Once the database knows, with what the message was; the others wait for the next drain."""
        put(session, "acme", 2)

        def broken(message: Lease, session: Session) -> None:
            session.add(fq.Message("never"))
            raise LookupError("no such page")

        with pytest.raises(LookupError, match="no such page") as failed:
            drain(engine, broken)
        assert failed.value.__notes__ == [
            f"Raised by {broken.__qualname__} for message 1 of channel 'acme', attempt 1; outcome: failed"
        ]
        assert [(m.id, m.error) for m in enqueued(session)] == [(1, "LookupError: no such page"), (2, None)]

    @pytest.mark.parametrize("raises", [False, True])
    def test_that_the_worker_expects(self, engine: Engine, session: Session, raises: bool) -> None:
        """What it was told about, and decisions, are no failures of the test."""
        worker = Worker(engine)

        @worker.handler(dead=ValueError, cancel=KeyError)
        def handle(message: Lease) -> None:
            raise {"dead": ValueError, "cancel": KeyError, "retry": fq.Retry, "never": fq.DeadLetter}[message.channel]

        for channel in ("dead", "cancel", "retry", "never"):
            put(session, channel)
        drained = drain(session, worker, raises=raises)
        assert [str(outcome) for _, outcome in drained] == ["dead", "cancelled", "failed", "dead"]

    async def test_that_the_worker_expects_in_a_group(self, async_engine: AsyncEngine) -> None:
        """As a TaskGroup raises them; others in a group are raised."""
        worker = Worker(async_engine)

        @worker.handler(dead=ValueError, cancel=KeyError)
        async def handle(message: Lease) -> None:
            async def fail() -> None:
                raise {"dead": ValueError, "cancel": KeyError, "other": TypeError}[message.channel]

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(fail())

        async with AsyncSession(async_engine) as here:
            for channel in ("dead", "cancel"):
                fq.enqueue(here, channel)
            assert [str(outcome) for _, outcome in await drain(here, worker)] == ["dead", "cancelled"]
            fq.enqueue(here, "other")
            with pytest.raises(ExceptionGroup):
                await drain(here, worker)

    def test_are_tried_again(self, engine: Engine, session: Session) -> None:
        """With raises=False: after the backoff, until the attempts are used up."""
        attempts = []

        def broken(message: Lease) -> None:
            attempts.append(message.attempt)
            raise LookupError

        fq.enqueue(session, "acme", max_attempts=3, backoff=60)
        session.commit()
        outcomes = []
        with Clock(engine) as clock:
            for _ in range(4):
                outcomes.append([str(outcome) for _, outcome in drain(session, broken, raises=False)])
                clock.tick(timedelta(hours=1))
        assert outcomes == [["failed"], ["failed"], ["dead"], []]
        assert attempts == [1, 2, 3]

    @pytest.mark.parametrize("of", ["session", "engine"])
    def test_of_the_database(self, engine: Engine, session: Session, of: str, tables: None) -> None:
        """A statement that fails spoils its own savepoint, not the test's transaction."""
        put(session, "acme", 2, payload={"page": 1})
        where: Session | Engine = session if of == "session" else engine
        with pytest.raises(IntegrityError):
            drain(where, convert)
        assert pages(session.connection()) == [1]
        assert_enqueued(session)

    def test_endless(self, engine: Engine, session: Session) -> None:
        handled: list[int] = []

        def again(message: Lease, session: Session) -> None:
            handled.append(message.id)
            fq.enqueue(session, "acme")

        for where in (session, engine):
            handled.clear()
            put(session, "acme")
            with pytest.raises(fq.FairqueueError, match="queue 'default' has more messages after the 20 that were"):
                drain(where, again, limit=20)
            assert len(handled) == 20
            assert_enqueued(session)
            assert len(drain(where, nothing, limit=1)) == 1
            session.commit()

    def test_a_turn_that_somebody_else_has(self, engine: Engine, session: Session, raw: Raw, database_url: str) -> None:
        """The limitation that is documented: a transaction that has written doesn't wait for others."""
        put(session, "acme", 2)
        other = raw(database_url)
        other.execute("SELECT FROM fairqueue.message_dequeue()")
        fq.enqueue(session, "acme")
        assert drain(session, nothing) == []
        other.rollback()
        assert len(drain(session, nothing)) == 3

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"where": 1}, "where must be a Session or Engine, or an AsyncSession or AsyncEngine, not int"),
            ({"where": fq.Message("acme")}, "where must be a Session or Engine, or an AsyncSession or AsyncEngine, "),
            ({"handler": lambda: None}, "a handler must be a function of (message) or (message, session)"),
            ({"handler": asyncio.sleep}, "sleep is async: await drain() with an AsyncSession or AsyncEngine"),
            ({"queue": ""}, "queue must have 1 to 255 characters, not 0"),
            ({"limit": 0}, "limit must be a whole number from 1"),
            ({"raises": 1}, "raises must be True or False, not 1"),
        ],
    )
    def test_refused(self, session: Session, arguments: Any, message: str) -> None:
        put(session, "acme")
        with pytest.raises(fq.InvalidValue) as refused:
            drain(**({"where": session, "handler": nothing} | arguments))
        assert str(refused.value).startswith(message)
        assert_enqueued(session)

    def test_no_handler(self, engine: Engine, session: Session) -> None:
        with pytest.raises(fq.FairqueueError, match="the worker of queue 'default' has no handler"):
            drain(session, Worker(engine))
