"""The ways to enqueue: one message, many, a COPY; now, later, or ahead of the others of a channel.

Each for Session, scoped_session, AsyncSession and async_scoped_session. How many statements each takes is in
test_batching.py, what they refuse in test_bad_input.py.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import psycopg
import pytest
from psycopg import errors
from sqlalchemy import Engine, NullPool, create_engine, func, make_url, select, text
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import fairqueue as fq
from tests.acts import sessions_elsewhere
from tests.fixtures.connections import Raw
from tests.observing import observer, rows, value

pytestmark = pytest.mark.shared_database

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
NOON_MS = 1_893_499_200_000

BACKEND = select(func.pg_backend_pid())

Enqueue = Callable[..., None]


class Moment(datetime):
    """As that of Pendulum: a difference of two of these is of a class that can't be divided by a timedelta."""

    def __sub__(self, other: Any) -> Any:
        return "a difference"


def one(session: Session, **row: Any) -> None:
    fq.enqueue(session, **row)
    session.flush()


def many(session: Session, **row: Any) -> None:
    fq.enqueue_many(session, [row])  # type: ignore[list-item]


def copy(session: Session, **row: Any) -> None:
    fq.enqueue_copy(session, [row])  # type: ignore[list-item]


def unique(session: Session, **row: Any) -> None:
    fq.enqueue_unique(session, **{"key": secrets.token_hex(4), **row})


def losing(watching: psycopg.Connection, backend: int) -> Iterator[fq.MessageRow]:
    """Rows in whose midst the connection that sends them ends."""
    yield {"channel": "acme"}
    watching.execute("SELECT pg_terminate_backend(%s)", [backend])
    yield {"channel": "acme"}


every_door = pytest.mark.parametrize("enqueue", [one, many, copy, unique])


def stored(session: Session) -> fq.Message:
    """The only message there is, as the database has it."""
    session.expire_all()
    return session.scalars(select(fq.Message)).one()


def due_in(session: Session) -> float:
    """In how many milliseconds the only message is due, by the clock of the database."""
    query = "SELECT dequeue_at - fairqueue.unix_ms(clock_timestamp()) FROM fairqueue.message"
    due: float = session.scalars(text(query)).one()
    return due


def payloads(session: Session, limit: int = 100) -> list[Any]:
    """What a worker gets."""
    return [message.payload for message in session.scalars(fq.dequeue(limit=limit))]


@every_door
class TestWhen:
    def test_now(self, session: Session, enqueue: Enqueue) -> None:
        """By the clock of the database, at the moment of the statement, not at the begin of the transaction."""
        began = session.scalar(text("SELECT fairqueue.unix_ms(now()) FROM pg_sleep(0.002)"))
        enqueue(session, channel="acme")
        assert began is not None
        assert due_in(session) <= 0
        assert began < stored(session).dequeue_at
        assert len(payloads(session)) == 1

    @pytest.mark.parametrize("delay", [60, 60.0, timedelta(minutes=1)], ids=["int", "float", "timedelta"])
    def test_delay(self, session: Session, enqueue: Enqueue, delay: Any) -> None:
        before = session.scalar(text("SELECT fairqueue.unix_ms(clock_timestamp())"))
        enqueue(session, channel="acme", delay=delay)
        after = session.scalar(text("SELECT fairqueue.unix_ms(clock_timestamp())"))
        assert before is not None
        assert after is not None
        assert before + 60_000 <= stored(session).dequeue_at <= after + 60_000
        assert payloads(session) == []

    def test_delay_of_nothing(self, session: Session, enqueue: Enqueue) -> None:
        enqueue(session, channel="acme", delay=0)
        assert len(payloads(session)) == 1

    @pytest.mark.parametrize(
        "at",
        [
            NOON,
            NOON.astimezone(timezone(timedelta(hours=-9, minutes=-30))),
            Moment(2030, 1, 1, 12, tzinfo=UTC),
        ],
        ids=["UTC", "elsewhere", "of another class"],
    )
    def test_at(self, session: Session, enqueue: Enqueue, at: datetime) -> None:
        enqueue(session, channel="acme", at=at)
        assert stored(session).dequeue_at == NOON_MS

    def test_at_is_rounded_down(self, session: Session, enqueue: Enqueue) -> None:
        """Also before 1970, where rounding towards zero would be up."""
        enqueue(session, channel="acme", at=datetime(1969, 12, 31, 23, 59, 59, 999_100, tzinfo=UTC))
        assert stored(session).dequeue_at == -1

    def test_at_is_to_the_millisecond(self, session: Session, enqueue: Enqueue) -> None:
        """Also where a float of seconds has no digits for it."""
        enqueue(session, channel="acme", at=datetime(2038, 1, 19, 3, 14, 8, 2_000, tzinfo=UTC))
        assert stored(session).dequeue_at == 2**31 * 1000 + 2

    @pytest.mark.parametrize("dequeue_at", [0, -5, NOON_MS])
    def test_dequeue_at(self, session: Session, enqueue: Enqueue, dequeue_at: int) -> None:
        enqueue(session, channel="acme", dequeue_at=dequeue_at)
        assert stored(session).dequeue_at == dequeue_at

    def test_priority(self, session: Session, enqueue: Enqueue) -> None:
        """Higher goes first within the channel; none is 0; equal ones go in the order of enqueueing."""
        for number, priority in enumerate([0, 3, None, 7, 3]):
            enqueue(session, channel="acme", payload=number, priority=priority)
        assert payloads(session) == [3, 1, 4, 0, 2]

    def test_a_priority_of_0_is_none(self, session: Session, enqueue: Enqueue) -> None:
        """So it may be said of what is for later."""
        enqueue(session, channel="acme", dequeue_at=7, priority=0)
        enqueue(session, channel="acme", delay=60, priority=0)
        session.flush()
        first, second = session.scalars(select(fq.Message.dequeue_at).order_by(fq.Message.dequeue_at))
        assert (first, second > time.time() * 1000) == (7, True)

    def test_priority_does_not_jump_other_channels(self, session: Session, enqueue: Enqueue) -> None:
        for number in range(2):
            enqueue(session, channel="acme", payload=f"acme {number}")
        for number in range(2):
            enqueue(session, channel="globex", payload=f"globex {number}", priority=9)
        assert payloads(session) == ["acme 0", "globex 0", "acme 1", "globex 1"]


@every_door
class TestFields:
    def test_defaults(self, session: Session, enqueue: Enqueue) -> None:
        enqueue(session, channel="acme")
        message = stored(session)
        assert (message.queue, message.channel, message.payload, message.body) == ("default", "acme", None, None)
        assert (message.cost, message.attempt, message.leased_until, message.state) == (1, 0, None, None)
        assert (message.max_attempts, message.backoff, message.forgiven) == (None, None, 0)
        assert (message.key is None) == (enqueue is not unique)
        assert session.scalar(text("SELECT num_nulls(payload, body) FROM fairqueue.message")) == 2

    def test_all(self, session: Session, enqueue: Enqueue) -> None:
        payload = {"doc": [1, 2.5, None, True, "é\N{GRINNING FACE}\\u0000"]}
        enqueue(session, channel="t\N{SNOWMAN}", queue="q %s:x", payload=payload, cost=2.5, body=b"\x00\xff\\")
        message = stored(session)
        assert (message.channel, message.queue, message.payload) == ("t\N{SNOWMAN}", "q %s:x", payload)
        assert (message.cost, message.body) == (2.5, b"\x00\xff\\")

    @pytest.mark.parametrize("backoff", [1.5, 90, timedelta(minutes=1.5)], ids=["float", "int", "timedelta"])
    def test_key_and_attempts(self, session: Session, enqueue: Enqueue, backoff: Any) -> None:
        enqueue(session, channel="acme", key="k %s:x", max_attempts=3, backoff=backoff)
        message = stored(session)
        assert (message.key, message.max_attempts) == ("k %s:x", 3)
        assert message.backoff == (backoff if backoff == 1.5 else 90)

    @pytest.mark.parametrize("payload", [0, False, "", [], {}, "null"])
    def test_empty_payloads_are_kept(self, session: Session, enqueue: Enqueue, payload: Any) -> None:
        enqueue(session, channel="acme", payload=payload)
        assert stored(session).payload == payload
        assert session.scalar(text("SELECT payload IS NULL FROM fairqueue.message")) is False

    def test_longest_names(self, session: Session, enqueue: Enqueue) -> None:
        """255 characters, not bytes; also through the indexes of messages and lanes."""
        name = "\N{GRINNING FACE}" * 255
        enqueue(session, channel=name, queue=name)
        leased = session.scalars(fq.dequeue(queue=name)).one()
        assert (leased.queue, leased.channel) == (name, name)
        enqueue(session, channel=name, key=name)


class TestMany:
    def test_generator(self, session: Session) -> None:
        ids = fq.enqueue_many(session, ({"channel": "acme", "payload": n} for n in range(10)))
        assert payloads(session) == list(range(10))
        assert ids == sorted(ids)
        assert fq.enqueue_many(session, []) == []

    def test_rows_of_a_query(self, session: Session) -> None:
        """No dicts, but much like them."""
        found: Any = session.execute(text("SELECT 'acme' AS channel, generate_series(1, 3) AS payload")).mappings()
        fq.enqueue_many(session, found)
        assert payloads(session) == [1, 2, 3]

    def test_ids_are_in_the_order_of_the_rows(self, session: Session) -> None:
        mixture: list[fq.MessageRow] = [{"channel": f"c{n % 3}", "payload": n, "priority": n % 5} for n in range(100)]
        ids = fq.enqueue_many(session, mixture)
        found = {message.id: message.payload for message in session.scalars(select(fq.Message))}
        assert [found[id_] for id_ in ids] == list(range(100))

    def test_a_buffer_that_is_used_again(self, session: Session) -> None:
        """A body is what it was when its row came."""
        buffer = bytearray(1)

        def source() -> Iterator[Any]:
            for number in range(3):
                buffer[0] = number
                yield {"channel": "acme", "body": buffer}

        fq.enqueue_many(session, source())
        assert [message.body for message in session.scalars(fq.dequeue(limit=3))] == [b"\x00", b"\x01", b"\x02"]

    def test_bad_row_in_the_middle_leaves_nothing(self, session: Session, raw: Raw, database_url: str) -> None:
        with pytest.raises(fq.InvalidValue, match="row 7: cost must be more than 0"):
            fq.enqueue_many(session, ({"channel": "acme", "cost": 7 - n} for n in range(20)))
        session.commit()
        assert rows(observer(raw, database_url)) == {}

    def test_generator_that_fails(self, session: Session, raw: Raw, database_url: str) -> None:
        def source() -> Iterator[fq.MessageRow]:
            yield {"channel": "acme"}
            raise LookupError("the source dried up")

        with pytest.raises(LookupError, match="dried up"):
            fq.enqueue_many(session, source())
        session.commit()
        assert rows(observer(raw, database_url)) == {}

    def test_what_was_added_before_is_flushed_before(self, session: Session) -> None:
        fq.enqueue(session, "acme", "first")
        fq.enqueue_many(session, [{"channel": "acme", "payload": "second"}])
        fq.enqueue(session, "acme", "third")
        fq.enqueue_copy(session, [{"channel": "acme", "payload": "fourth"}])
        assert payloads(session) == ["first", "second", "third", "fourth"]


class TestCopy:
    def test_is_in_the_sessions_transaction(self, session: Session, raw: Raw, database_url: str) -> None:
        watching = observer(raw, database_url)
        assert fq.enqueue_copy(session, [{"channel": "acme"} for _ in range(10)]) == 10
        assert rows(watching) == {}
        session.rollback()
        assert rows(watching) == {}
        fq.enqueue_copy(session, [{"channel": "acme"} for _ in range(10)])
        session.commit()
        assert rows(watching) == {"message": 10, "signal": 1}

    def test_savepoint(self, session: Session) -> None:
        with session.begin_nested() as savepoint:
            fq.enqueue_copy(session, [{"channel": "acme", "payload": "undone"}])
            savepoint.rollback()
        fq.enqueue_copy(session, [{"channel": "acme", "payload": "kept"}])
        assert payloads(session) == ["kept"]

    def test_bad_row_in_the_middle_leaves_nothing(self, session: Session, raw: Raw, database_url: str) -> None:
        with pytest.raises(fq.InvalidValue, match="row 5: channel must have 1 to 255 characters, not 0"):
            fq.enqueue_copy(session, ({"channel": "acme"[n - 1 :]} for n in range(20)))
        session.rollback()
        assert rows(observer(raw, database_url)) == {}

    def test_rows_that_need_the_session(self, session: Session) -> None:
        """The driver would wait for ever for its own connection."""
        message = fq.enqueue(session, "acme", "first")
        session.commit()  # and what is known of it expires
        with pytest.raises(fq.FairqueueError, match="rows of enqueue_copy can't use the session that sends them"):
            fq.enqueue_copy(session, ({"channel": message.channel} for _ in range(3)))
        session.rollback()
        assert fq.enqueue_copy(session, [{"channel": message.channel, "payload": "second"}]) == 1
        assert payloads(session) == ["first", "second"]

    @pytest.mark.parametrize("act", ["commit", "rollback", "close"])
    def test_rows_that_end_the_transaction(self, session: Session, act: str) -> None:
        def source() -> Iterator[fq.MessageRow]:
            yield {"channel": "acme"}
            getattr(session, act)()

        with pytest.raises(fq.FairqueueError, match="rows of enqueue_copy can't use the session that sends them"):
            fq.enqueue_copy(session, source())
        session.rollback()
        assert fq.enqueue_copy(session, [{"channel": "acme", "payload": "later"}]) == 1
        session.commit()
        assert payloads(session) == ["later"]

    def test_rows_are_not_kept(self, session: Session) -> None:
        """Each is written before the next one is made."""
        alive: set[int] = set()

        class Row(dict[str, Any]):
            def __del__(self) -> None:
                alive.discard(id(self))

        def source() -> Iterator[Any]:
            for _ in range(1000):
                row = Row(channel="acme")
                alive.add(id(row))
                assert len(alive) <= 3
                yield row

        assert fq.enqueue_copy(session, source()) == 1000

    def test_what_the_server_refuses(self, session: Session) -> None:
        """SQLAlchemy's error, as for any other statement."""
        session.execute(text("SET TRANSACTION READ ONLY"))
        with pytest.raises(DBAPIError, match=r"read-only transaction(.|\n)*COPY") as refused:
            fq.enqueue_copy(session, [{"channel": "acme"}])
        assert isinstance(refused.value.orig, errors.ReadOnlySqlTransaction)
        session.rollback()
        assert fq.enqueue_copy(session, [{"channel": "acme", "payload": "later"}]) == 1
        assert payloads(session) == ["later"]

    def test_a_connection_that_is_lost(self, session: Session, watching: psycopg.Connection) -> None:
        with pytest.raises(OperationalError) as lost:
            fq.enqueue_copy(session, losing(watching, session.scalars(BACKEND).one()))
        assert lost.value.connection_invalidated
        session.rollback()
        assert fq.enqueue_copy(session, [{"channel": "acme", "payload": "later"}]) == 1
        assert payloads(session) == ["later"]

    def test_a_connection_of_the_applications(self, database_url: str) -> None:
        """A class that is derived from the driver's, wherever it is defined, will do."""

        class Ours(psycopg.Connection[Any]):
            pass

        url = make_url(database_url).set(drivername="postgresql").render_as_string(hide_password=False)
        engine = create_engine("postgresql+psycopg://", creator=lambda: Ours.connect(url), poolclass=NullPool)
        with Session(engine) as session:
            assert fq.enqueue_copy(session, [{"channel": "acme"}]) == 1


class TestAddedAgain:
    """As a retry loop does it: what the server gave the message in the transaction before is not sent again."""

    @pytest.mark.parametrize("savepoint", [True, False])
    def test_after_a_rollback(self, session: Session, savepoint: bool) -> None:
        message = fq.Message("acme", {"doc": 1}, priority=3, key="k")
        begun = session.begin_nested() if savepoint else session
        session.add(message)
        session.flush()
        before = message.id
        assert (message.attempt, message.leased_until, message.state) == (0, None, None)
        begun.rollback()
        session.add(message)
        session.commit()
        assert message.id > before
        leased = session.scalars(fq.dequeue()).one()
        assert (leased.id, leased.payload, leased.key, leased.dequeue_at) == (message.id, {"doc": 1}, "k", -3)

    def test_merging_what_is_gone(self, session: Session) -> None:
        """Is refused, as it ever was: it would be enqueued a second time."""
        message = fq.enqueue(session, "acme")
        session.commit()
        session.refresh(message)
        session.expunge(message)
        session.execute(fq.complete(session.scalars(fq.dequeue()).one()))
        session.commit()
        session.merge(message)
        with pytest.raises(DBAPIError, match="cannot insert a non-DEFAULT value"):
            session.flush()


class TestSessions:
    """The same functions take all four kinds of sessions."""

    def test_scoped_session(self, engine: Engine) -> None:
        session = scoped_session(sessionmaker(engine))
        fq.enqueue(session, "acme", 1)
        assert len(fq.enqueue_many(session, [{"channel": "acme", "payload": 2}])) == 1
        assert fq.enqueue_copy(session, [{"channel": "acme", "payload": 3}]) == 1
        assert [m.payload for m in session.scalars(fq.dequeue(limit=9))] == [1, 2, 3]
        session.remove()

    @pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
    @pytest.mark.parametrize("scoped", [False, True], ids=["AsyncSession", "async_scoped_session"])
    def test_async(self, database_url: str, raw: Raw, driver: str, scoped: bool) -> None:
        watching = observer(raw, database_url)

        async def main() -> None:
            engine = create_async_engine(make_url(database_url).set(drivername=f"postgresql+{driver}"))
            make = async_sessionmaker(engine)
            session: Any = async_scoped_session(make, asyncio.current_task) if scoped else make()
            fq.enqueue(session, "acme", 1)
            ids: Awaitable[Sequence[int]] = fq.enqueue_many(
                session,
                [{"channel": "acme", "payload": 2}, {"channel": "acme", "payload": 3, "delay": 60, "body": b"\0"}],
            )
            first, second = await ids
            assert first < second
            if driver == "psycopg":
                assert await fq.enqueue_copy(session, [{"channel": "acme", "payload": 4}]) == 1
            else:
                with pytest.raises(
                    fq.FairqueueError, match="needs psycopg, and this engine's driver is asyncpg: use enqueue_many"
                ):
                    await fq.enqueue_copy(session, [{"channel": "acme", "payload": 4}])
                await fq.enqueue_many(session, [{"channel": "acme", "payload": 4}])
            assert rows(watching) == {}
            await session.commit()
            assert value(watching, "SELECT count(*) FROM fairqueue.message") == 4
            got = (await session.scalars(fq.dequeue(limit=9))).all()
            assert [message.payload for message in got] == [1, 2, 4]
            await session.commit()
            await (session.remove() if scoped else session.close())
            await engine.dispose()

        asyncio.run(main())

    def test_async_generator_failing_in_a_copy(self, database_url: str, raw: Raw) -> None:
        async def main() -> None:
            engine = create_async_engine(database_url)
            async with AsyncSession(engine) as session:
                with pytest.raises(fq.InvalidValue, match="row 1: channel is missing"):
                    await fq.enqueue_copy(session, [{"channel": "acme"}, {}])  # type: ignore[typeddict-item]
                await session.rollback()
                assert await fq.enqueue_copy(session, []) == 0
                await session.commit()
            await engine.dispose()

        asyncio.run(main())
        assert rows(observer(raw, database_url)) == {}

    def test_async_connection_that_is_lost(self, database_url: str, watching: psycopg.Connection) -> None:
        async def main() -> None:
            engine = create_async_engine(database_url)
            async with AsyncSession(engine) as session:
                with pytest.raises(OperationalError) as lost:
                    await fq.enqueue_copy(session, losing(watching, (await session.scalars(BACKEND)).one()))
                assert lost.value.connection_invalidated
                await session.rollback()
                assert await fq.enqueue_copy(session, [{"channel": "acme"}]) == 1
            await engine.dispose()

        asyncio.run(main())

    def test_several_databases(self, engine: Engine) -> None:
        """Each model has its own: the messages' is found by their mapper."""
        nowhere = create_engine("postgresql+psycopg://nobody@nowhere.invalid/app")
        with Session(nowhere, binds={fq.Message: engine}) as session:
            fq.enqueue(session, "acme", 1)
            fq.enqueue_unique(session, "acme", 2, key="k")
            fq.enqueue_many(session, [{"channel": "acme", "payload": 3}])
            fq.enqueue_copy(session, [{"channel": "acme", "payload": 4}])
            fq.enqueue_many(session, [{"channel": "acme", "payload": 5, "key": "l"}])
            found = session.scalars(fq.dequeue(limit=9), bind_arguments={"mapper": fq.Message}).all()
            assert [message.payload for message in found] == [1, 2, 3, 4, 5]

    @pytest.mark.shared_database(False)
    def test_another_schema(self, engine: Engine) -> None:
        """COPY, which SQLAlchemy doesn't write, goes where the other statements go."""
        for session in sessions_elsewhere(engine):
            with session:
                fq.enqueue_many(session, [{"channel": "acme", "payload": 1, "delay": 0}])
                fq.enqueue_copy(session, [{"channel": "acme", "payload": 2}])
                fq.enqueue(session, "acme", 3)
                session.flush()
                assert session.scalar(text('SELECT count(*) FROM "My Q".message')) == 3
                assert session.scalar(text("SELECT count(*) FROM fairqueue.message")) == 0
                assert payloads(session) == [1, 2, 3]
