"""Time travel: the queue goes by a clock that tests move, and by its own again afterwards."""

import contextlib
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import Session

import fairqueue as fq
from fairqueue import schema
from fairqueue.testing import Clock
from tests.acts import put, take
from tests.catalog import snapshot
from tests.fixtures.connections import Raw
from tests.observing import value

MOMENT = datetime(2031, 3, 30, 1, 2, 3, 456789, UTC)


def year(connection: psycopg.Connection) -> int:
    return int(value(connection, "SELECT extract(year FROM fairqueue.clock())::integer"))


@pytest.fixture
def foreign(database_url: str, raw: Raw) -> str:
    """The name of a database that somebody else made; it has a queue."""
    connection = raw(database_url)
    connection.autocommit = True
    name = connection.info.dbname
    connection.execute(f'COMMENT ON DATABASE "{name}" IS NULL'.encode())
    return name


class TestMoves:
    def test_to_the_millisecond(self, engine: Engine, session: Session) -> None:
        """A frozen clock stands, and what is due is due then, neither before nor after."""
        with Clock(engine) as clock:
            clock.freeze()
            start = clock.now()
            assert start == clock.now()
            put(session, "acme", delay=60)
            clock.tick(59.999)
            assert take(session) == []
            clock.tick(timedelta(milliseconds=1))
            assert take(session) == ["acme"]
            assert clock.now() == start + timedelta(seconds=60)
            clock.tick(-3600)
            assert clock.now() == start - timedelta(seconds=3540)
            for moment in (MOMENT, datetime(1815, 12, 10, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, 1, UTC)):
                clock.move_to(moment)
                assert clock.now() == moment

    def test_runs_on(self, engine: Engine, session: Session) -> None:
        """Until it is frozen: so what the application reckons by its own clock comes due, too."""
        with Clock(engine) as clock:
            put(session, "acme", at=datetime.now(UTC) + timedelta(hours=1))
            assert take(session) == []
            clock.tick(timedelta(hours=1))
            assert take(session) == ["acme"]
            clock.move_to(MOMENT)
            first, second = clock.now(), clock.now()
            assert MOMENT < first < second < MOMENT + timedelta(minutes=2)

    @pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
    def test_for_everybody_at_once(self, engine: Engine, raw: Raw, database_url: str, level: str) -> None:
        """In transactions that are open, too; and their rollback takes nothing back."""
        connection = raw(database_url)
        connection.execute(f"SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL {level}".encode())
        connection.commit()
        with Clock(engine) as clock:
            for moment in (2031, 2041):
                clock.move_to(datetime(moment, 7, 1, tzinfo=UTC))
                assert year(connection) == moment
            assert connection.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
            connection.rollback()
            assert year(connection) == 2041
        # It has read the clock and is still open: time is real for it all the same.
        assert year(connection) == datetime.now(UTC).year

    def test_who_may_only_insert(self, engine: Engine, raw: Raw, database_url: str) -> None:
        """Column defaults read the clock with the rights of whoever inserts."""
        connection = raw(database_url)
        with Clock(engine) as clock:
            clock.move_to(MOMENT)
            connection.execute("CREATE ROLE fairqueue_moved")  # rolled back in the end
            connection.execute("GRANT USAGE ON SCHEMA fairqueue TO fairqueue_moved")
            connection.execute("GRANT INSERT ON fairqueue.message TO fairqueue_moved")
            connection.execute("SET LOCAL ROLE fairqueue_moved")
            connection.execute("INSERT INTO fairqueue.message (channel) VALUES ('acme')")
            connection.execute("RESET ROLE")
            row = connection.execute("SELECT extract(year FROM created_at)::integer FROM fairqueue.message").fetchone()
            assert row == (2031,)
            connection.rollback()

    def test_another_schema(self, empty_database_url: str) -> None:
        name = """My "Q's" %s:x {y}"""
        engine = create_engine(empty_database_url, execution_options=fq.in_schema(name))
        with engine.begin() as connection:
            schema.install(connection, name)
        with Session(engine) as session, Clock(engine) as clock:
            put(session, "acme", delay=3600)
            clock.tick(3600)
            assert take(session) == ["acme"]
        engine.dispose()

    def test_a_database_that_is_named(self, engine: Engine, session: Session, foreign: str) -> None:
        with Clock(engine, test_database=foreign) as clock:
            put(session, "acme", delay=60)
            clock.tick(60)
            assert take(session) == ["acme"]


class TestAfterwards:
    @pytest.fixture
    def unchanged(self, database_url: str, raw: Raw) -> Iterator[None]:
        connection = raw(database_url)
        before = snapshot(connection)
        connection.rollback()
        yield
        assert snapshot(connection) == before

    def test_as_before(self, unchanged: None, engine: Engine) -> None:
        with contextlib.suppress(LookupError), Clock(engine) as clock:
            clock.move_to(MOMENT)
            raise LookupError

    def test_somebody_elses_function(self, engine: Engine, raw: Raw, database_url: str) -> None:
        """What is put back is what was there, not what this library would install."""
        connection = raw(database_url)
        connection.execute(
            "CREATE SCHEMA other; CREATE FUNCTION other.zone() RETURNS interval LANGUAGE sql RETURN interval '1 year';"
            "CREATE OR REPLACE FUNCTION fairqueue.clock() RETURNS timestamptz LANGUAGE sql VOLATILE COST 7"
            " RETURN clock_timestamp() - 10 * other.zone()"
        )
        connection.commit()
        before = snapshot(connection)
        connection.rollback()
        with Clock(engine):
            pass
        assert snapshot(connection) == before
        assert year(connection) == datetime.now(UTC).year - 10

    def test_of_a_run_that_was_killed(self, unchanged: None, engine: Engine) -> None:
        """The next one starts at real time, and puts back what the first one found."""
        killed = Clock(engine).__enter__()
        killed.move_to(MOMENT)
        killed.freeze()
        with Clock(engine) as clock:
            first = clock.now()
            assert abs(first - datetime.now(UTC)) < timedelta(minutes=2)
            assert first < clock.now()

    def test_while_somebody_reads_it(self, unchanged: None, engine: Engine, raw: Raw, database_url: str) -> None:
        """Leaving the block waits for nobody; the next one clears up."""
        reader = raw(database_url)
        with Clock(engine):
            year(reader)
            before = time.monotonic()
        assert time.monotonic() - before < 15  # and not the 30 s after which a test's database gives up
        reader.commit()
        with Clock(engine):
            pass

    def test_while_somebody_reads_it_and_the_engine_commits_at_once(self, engine: Engine, session: Session) -> None:
        """It doesn't wait for who does."""
        with Clock(engine.execution_options(isolation_level="AUTOCOMMIT")):
            session.scalar(text("SELECT fairqueue.clock()"))
            before = time.monotonic()
        assert time.monotonic() - before < 15
        session.rollback()
        with Clock(engine):
            pass

    def test_the_queue_was_removed(self, engine: Engine, raw: Raw, database_url: str) -> None:
        with Clock(engine), engine.begin() as connection:
            schema.uninstall(connection)
        left = "FROM pg_depend WHERE refclassid = 'pg_namespace'::regclass AND refobjid = 'fairqueue'::regnamespace"
        assert value(raw(database_url), f"SELECT count(*) {left}") == 0


class TestRefused:
    @pytest.fixture(autouse=True)
    def _untouched(self, database_url: str, raw: Raw) -> Iterator[None]:
        connection = raw(database_url)
        before = snapshot(connection)
        connection.rollback()
        yield
        assert snapshot(connection) == before

    def test_any_other_database(self, engine: Engine, foreign: str) -> None:
        with pytest.raises(fq.InvalidValue) as refused, Clock(engine):
            pass
        assert str(refused.value) == (
            f"database {foreign!r} was not made by fairqueue.testing, so its time is left alone: if it is only for"
            f" tests, say Clock(engine, test_database={foreign!r})"
        )

    def test_another_than_was_named(self, engine: Engine, foreign: str) -> None:
        with pytest.raises(fq.InvalidValue, match="test_database is 'shop_test', but the engine is connected to"):
            Clock(engine, test_database="shop_test").__enter__()

    def test_no_queue(self, engine: Engine) -> None:
        elsewhere = engine.execution_options(**fq.in_schema("elsewhere"))
        with pytest.raises(fq.SchemaVersionError, match="schema 'elsewhere' has no fairqueue"):
            Clock(elsewhere).__enter__()

    def test_values(self, engine: Engine, async_engine: AsyncEngine) -> None:
        for given in (async_engine, str(engine.url)):
            with pytest.raises(fq.InvalidValue, match=r"engine must be an Engine, not \w+:"):
                Clock(given)  # type: ignore[arg-type]
        with pytest.raises(fq.InvalidValue, match="test_database is 'shop_test', but the engine is connected to"):
            Clock(engine, test_database="shop_test").__enter__()
        with Clock(engine) as clock:
            with pytest.raises(fq.InvalidValue, match="at must be a datetime with a time zone"):
                clock.move_to(datetime(2031, 1, 1))  # noqa: DTZ001
            with pytest.raises(fq.InvalidValue, match="by must be between"):
                clock.tick(float("nan"))
