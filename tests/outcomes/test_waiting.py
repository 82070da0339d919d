"""Waiting for messages to end: every ending is told, and many who wait are no burden."""

import asyncio
import contextlib
import itertools
import pickle
import time
import types
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy import Engine, create_engine, event, select, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

import fairqueue as fq
from fairqueue import schema, waiting
from tests.acts import lease_of, move_clock, put, sql, stop_clock, wait_until
from tests.fixtures.connections import Raw
from tests.fixtures.workers import EngineOf
from tests.limiting import NOW
from tests.observing import observer, value, waits_for_a_lock

pytestmark = pytest.mark.shared_database


class Time:
    """A clock that passes only while somebody sleeps, and says what was waited for."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []
        self.meanwhile: Callable[[], object] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        self.pauses.append(seconds)
        self.meanwhile()

    async def sleep_async(self, seconds: float) -> None:
        self.sleep(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    monkeypatch.setattr(waiting, "time", clock)
    monkeypatch.setattr(waiting, "asyncio", SimpleNamespace(sleep=clock.sleep_async))
    return clock


def end(session: Session, how: str) -> None:
    """End whatever is leased."""
    batch = [(id_, attempt) for id_, attempt in session.execute(select(fq.Message.id, fq.Message.attempt))]
    acts: dict[str, Any] = {
        "completed": lambda: fq.complete(batch),
        "dead": lambda: fq.fail(batch, "broken", retry=False),
        "cancelled": lambda: fq.cancel([id_ for id_, _ in batch]),
        "failed": lambda: fq.fail(batch, "broken", delay=0),
    }
    assert {row.result for row in session.execute(acts[how]())} == {how}
    session.commit()


class TestEndings:
    @pytest.mark.parametrize("how", ["completed", "dead", "cancelled"])
    async def test_each(
        self, engine: Engine, async_engine: AsyncEngine, session: Session, clock: Time, how: str
    ) -> None:
        """Told after it has happened while somebody waited, the same to both engines."""
        (id_,) = put(session, "acme")
        lease_of(session)
        clock.meanwhile = lambda: end(session, how) if len(clock.pauses) == 3 else None
        ending = fq.wait_for(engine, id_, timeout=60)
        error = "broken" if how == "dead" else None
        assert (ending.id, ending.outcome, ending.attempt, ending.error) == (id_, how, 1, error)
        assert ending.finished_at == session.scalar(select(fq.History.finished_at))
        assert len(clock.pauses) == 3
        session.commit()
        assert await fq.wait_for(async_engine, id_, timeout=60) == ending
        assert await fq.wait_for(async_engine, [id_, id_], timeout=None) == [ending, ending]
        assert len(clock.pauses) == 3

    async def test_asynchronous(self, async_engine: AsyncEngine, session: Session, clock: Time) -> None:
        ids = put(session, "acme", 2)
        lease_of(session, 2)
        pool: Any = async_engine.pool

        def meanwhile() -> None:
            assert pool.checkedout() == 0, "the connection is for others in between"
            if len(clock.pauses) == 3:
                end(session, "completed")

        clock.meanwhile = meanwhile
        endings = await fq.wait_for(async_engine, ids, timeout=60)
        assert [(ending.id, ending.outcome) for ending in endings] == [(id_, "completed") for id_ in ids]
        with pytest.raises(fq.WaitTimeout):
            await fq.wait_for(async_engine, put(session, "acme")[0], timeout=60)

    def test_a_failure_that_is_retried_is_none(self, engine: Engine, session: Session, clock: Time) -> None:
        """Nor is a death that is undone before anybody has looked; what comes after it counts."""
        (id_,) = put(session, "acme")

        def meanwhile() -> None:
            match len(clock.pauses):
                case 1 | 2:
                    lease_of(session)
                    end(session, "failed")
                case 3:
                    lease_of(session)
                    end(session, "dead")
                    session.execute(fq.redrive(id_))
                    session.commit()
                case 4:
                    lease_of(session)
                    end(session, "completed")

        clock.meanwhile = meanwhile
        ending = fq.wait_for(engine, id_, timeout=60)
        assert (ending.outcome, ending.attempt) == ("completed", 4)

    def test_without_history(self, engine: Engine, session: Session, clock: Time) -> None:
        """It is over, and of the dead there is a letter."""
        sql(session, "INSERT INTO fairqueue.queue (name, history_days) VALUES ('default', 0)")
        first, second = put(session, "acme", 2)
        batch = lease_of(session, 2)
        session.execute(fq.complete(batch[0]))
        session.execute(fq.fail(batch[1], "broken", retry=False))
        session.commit()
        endings = fq.wait_for(engine, [first, second, 10**9], timeout=0)
        assert endings[0] == fq.Ending(first, None)
        assert (endings[1].outcome, endings[1].attempt, endings[1].error) == ("dead", 1, "broken")
        assert endings[1].finished_at is not None
        assert endings[2] == fq.Ending(10**9, None), "never was"

    def test_put_back_while_somebody_asks(self, session: Session, raw: Raw, database_url: str) -> None:
        """It is dead, or there again: at no moment it is neither, though no history is kept."""
        sql(session, "SELECT fairqueue.queue_set('default', history_days => 0)")
        put(session, "acme")
        (dead,) = lease_of(session)
        session.execute(fq.fail(dead, retry=False))
        session.commit()
        other, asking, watching = raw(database_url), raw(database_url), observer(raw, database_url)
        other.execute("LOCK TABLE fairqueue.dead_message IN ACCESS EXCLUSIVE MODE")
        other.execute("SELECT FROM fairqueue.message_redrive(%s)", ([dead.id],))
        with ThreadPoolExecutor(1) as pool:
            query = "SELECT outcome FROM fairqueue.message_ending(%s)"
            told = pool.submit(value, asking, query, [dead.id])
            wait_until(lambda: waits_for_a_lock(watching, asking))
            other.commit()
            assert told.result() == "dead"

    def test_after_the_clock_was_set_back(self, engine: Engine, session: Session) -> None:
        """The last one counts, though an earlier one has a later time."""
        stop_clock(engine, NOW)
        (id_,) = put(session, "acme", max_attempts=1)
        session.execute(fq.fail(lease_of(session)))
        move_clock(session, NOW - 3_600_000)
        session.execute(fq.redrive(id_))
        session.commit()
        session.execute(fq.complete(lease_of(session)))
        session.commit()
        assert fq.wait_for(engine, id_, timeout=0).outcome == "completed"

    def test_that_ended_twice_in_one_attempt(self, engine: Engine, session: Session) -> None:
        """Dead, put back, and cancelled before it was tried again."""
        stop_clock(engine, NOW)
        (id_,) = put(session, "acme", max_attempts=1)
        session.execute(fq.fail(lease_of(session)))
        session.execute(fq.redrive(id_))
        move_clock(session, NOW + 1)
        session.execute(fq.cancel(id_))
        session.commit()
        assert fq.wait_for(engine, id_, timeout=0).outcome == "cancelled"

    def test_of_entities(self, engine: Engine, session: Session) -> None:
        """They are not read again, as their rows are gone."""
        message = fq.enqueue(session, "acme")
        with pytest.raises(fq.InvalidValue, match="a message has no id before it is flushed"):
            fq.wait_for(engine, message, timeout=0)
        session.commit()
        with Session(engine) as other:
            leased = lease_of(other)
            other.execute(fq.complete(leased))
            other.commit()
        assert [ending.outcome for ending in fq.wait_for(engine, [message, leased[0]], timeout=0)] == ["completed"] * 2
        session.close()
        assert fq.wait_for(engine, message, timeout=0).outcome == "completed"
        assert session.execute(fq.cancel(message)).one().result == "not_found"

    def test_in_another_schema(self, empty_database_url: str) -> None:
        engine = create_engine(empty_database_url, execution_options=fq.in_schema("My Q"))
        with engine.begin() as connection:
            schema.install(connection, "My Q")
        with Session(engine) as session:
            (id_,) = put(session, "acme")
            session.execute(fq.cancel(id_))
            session.commit()
        assert fq.wait_for(engine, id_, timeout=0).outcome == "cancelled"
        engine.dispose()

    @pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
    def test_of_an_engine_of_any_isolation(self, database_url: str, session: Session, clock: Time, level: Any) -> None:
        (id_,) = put(session, "acme")
        lease_of(session)
        clock.meanwhile = lambda: end(session, "completed")
        engine = create_engine(database_url, isolation_level=level)
        assert fq.wait_for(engine, id_, timeout=60).outcome == "completed"
        with engine.connect() as connection:
            assert connection.scalar(text("SHOW transaction_isolation")) == level.lower(), "as it was"
        engine.dispose()

    def test_one_look(self, session: Session) -> None:
        """As a statement: rows for those that have ended, in the order given."""
        one, two, three = put(session, "acme", 3)
        session.execute(fq.cancel([one, three]))
        session.commit()
        rows = session.execute(fq.ending([three, two, one])).all()
        assert [(row.id, row.outcome) for row in rows] == [(three, "cancelled"), (one, "cancelled")]
        assert session.execute(fq.ending(two)).all() == session.execute(fq.ending([])).all() == []


class TestBurden:
    @pytest.fixture
    def waiter(self, database_url: str) -> Iterator[Engine]:
        engine = create_engine(database_url, pool_size=1, max_overflow=0)
        yield engine
        engine.dispose()

    @pytest.fixture
    def looks(self, waiter: Engine) -> list[list[int]]:
        """The ids that were asked for, look by look."""
        asked: list[list[int]] = []

        @event.listens_for(waiter, "before_cursor_execute")
        def note(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
            (ids,) = parameters.values()
            asked.append(ids)

        return asked

    def test_of_a_long_wait(self, waiter: Engine, session: Session, clock: Time, looks: list[list[int]]) -> None:
        """15 minutes: soon at first, then every 1 to 2 s, and not a statement more. The last look is at the end."""
        (id_,) = put(session, "acme")
        checked_out: list[int] = []
        clock.meanwhile = lambda: checked_out.append(waiter.pool.checkedout())  # type: ignore[attr-defined]
        with pytest.raises(fq.WaitTimeout, match=rf"^1 of 1 messages had not ended after 900 s: {id_}$") as raised:
            fq.wait_for(waiter, id_, timeout=900)
        assert isinstance(raised.value, TimeoutError)
        assert isinstance(raised.value, fq.FairqueueError)
        assert clock.now == pytest.approx(1900)
        assert len(looks) == len(clock.pauses) + 1
        assert 450 <= len(looks) < 750
        interval = 0.05
        for pause in clock.pauses[:-1]:
            assert interval / 2 <= pause <= interval
            interval = min(interval * 1.5, 2)
        assert len({round(pause, 6) for pause in clock.pauses}) > 250, "spread"
        assert set(checked_out) == {0}, "the connection is for others in between"

    def test_of_many_messages(self, waiter: Engine, session: Session, clock: Time, looks: list[list[int]]) -> None:
        """One statement a look, for those only that have not ended yet."""
        ids = put(session, "acme", 1000)

        def meanwhile() -> None:
            session.execute(fq.cancel(ids[(len(clock.pauses) - 1) * 100 :][:100]))
            session.commit()

        clock.meanwhile = meanwhile
        endings = fq.wait_for(waiter, reversed(ids), timeout=60)
        assert [ending.id for ending in endings] == ids[::-1]
        assert [len(asked) for asked in looks] == [1000, *range(1000, 0, -100)]

    def test_of_none(self, waiter: Engine, looks: list[list[int]]) -> None:
        assert fq.wait_for(waiter, [], timeout=None) == []
        assert looks == []

    def test_time_that_is_up(self, waiter: Engine, session: Session, clock: Time, looks: list[list[int]]) -> None:
        """0 is one look. Whoever has ended by then counts, and the rest is named."""
        ids = put(session, "acme", 13)
        session.execute(fq.cancel(ids[0]))
        session.commit()
        named = ", ".join(map(str, ids[1:11]))
        with pytest.raises(
            fq.WaitTimeout, match=f"^12 of 13 messages had not ended after 0 s: {named}, ...$"
        ) as raised:
            fq.wait_for(waiter, ids, timeout=0)
        assert [(end.id, end.outcome) for end in raised.value.endings] == [(ids[0], fq.Outcome.CANCELLED)]
        assert vars(pickle.loads(pickle.dumps(raised.value))) == vars(raised.value)  # noqa: S301
        assert (len(looks), clock.pauses) == (1, [])
        clock.meanwhile = lambda: end(session, "cancelled")
        assert len(fq.wait_for(waiter, ids, timeout=0.01)) == 13
        assert clock.pauses == [pytest.approx(0.01)]


@types.coroutine
def cancelled_at(number: int, waiting: Generator[Any, None, Any]) -> Generator[Any, None, None]:
    """Await what never returns; cancel it when it would go on from its so manieth pause, and let it clean up."""
    pause = waiting.send(None)
    for each in itertools.count(1):
        with contextlib.suppress(Exception):  # who has paused reads how that ended
            yield pause
        pause = waiting.throw(asyncio.CancelledError()) if each == number else waiting.send(None)


@pytest.mark.skipif(sqlalchemy.__version__.startswith("2.0."), reason="at some moments 2.0 leaves a connection open")
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_a_waiter_that_is_cancelled(driver: str, engine_of: EngineOf, session: Session) -> None:
    """Gives its connection back, whatever it does at that moment: connect, ask, give back, sleep, and ask again."""
    (id_,) = put(session, "acme")
    for number in range(1, 26):
        engine = engine_of(driver)
        with pytest.raises(asyncio.CancelledError) as ended:
            await cancelled_at(number, fq.wait_for(engine, id_, timeout=None).__await__())
        assert ended.tb is not None  # which has the frames, so what they hold is not garbage
        assert engine.pool.checkedout() == 0
        async with AsyncSession(engine) as other:
            await other.execute(fq.ending(id_))
        await engine.dispose()


async def test_a_waiter_whose_time_is_up_elsewhere(async_engine: AsyncEngine, session: Session) -> None:
    (id_,) = put(session, "acme")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(fq.wait_for(async_engine, id_, timeout=None), 0.2)
    assert async_engine.pool.checkedout() == 0  # type: ignore[attr-defined]


def test_in_real_time(engine: Engine, session: Session) -> None:
    """Nothing patched: it comes back at its time."""
    (id_,) = put(session, "acme")
    started = time.monotonic()
    with pytest.raises(fq.WaitTimeout):
        fq.wait_for(engine, id_, timeout=0.3)
    assert time.monotonic() - started >= 0.3
