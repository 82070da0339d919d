"""What the database says to what a worker has to say: whose fault it is, and what is reported all the same."""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import pytest
from sqlalchemy import Connection, Engine, cast, create_engine, event, func, insert, make_url, select, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.exc import DataError, DBAPIError, InterfaceError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

import fairqueue as fq
from fairqueue import schema
from fairqueue.worker.database import Database, _lost, backoff, in_a_line, place
from fairqueue.worker.threads import Threads
from tests.acts import put, wait_until
from tests.fixtures.databases import PREFIX
from tests.fixtures.postgres import Postgres
from tests.fixtures.workers import EngineOf, WorkerOf
from tests.worker.working import LISTENING, is_empty, statements, wait_for_endings

CIRCUMSTANCES = {
    "SELECT pg_terminate_backend(pg_backend_pid())": True,
    "SET LOCAL statement_timeout = 1; SELECT pg_sleep(60)": True,
    "SET TRANSACTION READ ONLY; CREATE TABLE public.effect ()": True,
    "DO $$ BEGIN RAISE SQLSTATE '40001'; END $$": True,
    "DO $$ BEGIN RAISE SQLSTATE '57P03'; END $$": True,  # the server is starting up
    "DO $$ BEGIN RAISE SQLSTATE '53300'; END $$": True,  # there are too many connections
    "DO $$ BEGIN RAISE SQLSTATE '08006'; END $$": True,  # the server has lost a connection of its own
    "DO $$ BEGIN RAISE SQLSTATE '55P03'; END $$": True,  # somebody has the lock
    "DO $$ BEGIN RAISE SQLSTATE '58030'; END $$": True,  # the disk fails
    "DO $$ BEGIN RAISE SQLSTATE '22023'; END $$": False,
    "DO $$ BEGIN RAISE SQLSTATE '54001'; END $$": False,  # it is too complex
    "SELECT no_such_column": False,
    "SELECT 1 / 0": False,
}


@pytest.mark.parametrize("kind", ["plain", "async", "asyncpg"])
async def test_what_is_not_the_statements_fault(kind: str, engine_of: EngineOf) -> None:
    """Only what the database refuses for its own sake is given up; drivers disagree on what is an OperationalError."""
    database = Database(engine_of(kind), Threads())
    for statement, lost in CIRCUMSTANCES.items():

        def execute(session: Session, statement: str = statement) -> None:
            for each in statement.split("; ") if statement.startswith("SET") else [statement]:
                session.execute(text(each))

        with pytest.raises(DBAPIError) as caught:
            await database.run(execute)
        assert _lost(caught.value) == lost, statement
    database.threads.close()
    if isinstance(database.engine, AsyncEngine):
        await database.engine.dispose()


@pytest.mark.parametrize("kind", ["plain", "async", "asyncpg"])
@pytest.mark.parametrize("where", [{"username": "nobody"}, {"database": "nowhere"}], ids=["login", "database"])
async def test_a_login_that_is_refused(
    kind: str, where: dict[str, Any], database_url: str, engine_of: EngineOf
) -> None:
    """As while a password is changed: what is to be reported waits until it is let in again."""
    database = Database(engine_of(kind, url=make_url(database_url).set(**where)), Threads())
    with pytest.raises(DBAPIError) as caught:
        await database.run(lambda session: session.execute(text("SELECT 1")))
    assert _lost(caught.value)
    database.threads.close()
    if isinstance(database.engine, AsyncEngine):
        await database.engine.dispose()


async def test_what_cannot_be_sent(engine_of: EngineOf) -> None:
    """A statement that is wrong is so next time, too; a pool that is used up is not."""
    database = Database(engine_of("plain", pool_size=1, max_overflow=0, pool_timeout=0.01), Threads())
    wrong: list[Any] = [text("SELECT :forgotten"), insert(fq.Message).values(unknown=1), "SELECT 1"]
    for statement in wrong:
        with pytest.raises(SQLAlchemyError) as caught:
            await database.run(partial(Session.execute, statement=statement))
        assert not isinstance(caught.value, DBAPIError)
        assert not _lost(caught.value), statement
    assert isinstance(database.engine, Engine)
    with database.engine.connect(), pytest.raises(SQLAlchemyError) as caught:
        await database.run(lambda session: session.execute(text("SELECT 1")))
    assert _lost(caught.value)
    database.threads.close()


@pytest.mark.parametrize("kind", LISTENING)
def test_an_engine_that_streams(kind: str, session: Session, worker_of: WorkerOf) -> None:
    """For its application's sake; a cursor on the server needs a transaction, which our statements go without."""
    (id_,) = put(session, "acme")
    app = worker_of(kind, lambda *_: None, engine={"execution_options": {"stream_results": True}})
    with app:
        assert wait_for_endings(session, 1) == {"completed": 1}
    if isinstance(app.engine, Engine):
        assert fq.wait_for(app.engine, id_, timeout=0).outcome == "completed"


def test_pauses() -> None:
    """Longer from failure to failure, up to a limit, and spread, so that not all workers come back at once."""
    for failures in (1, 3, 7, 2000):
        longest = min(0.1 * 2 ** min(failures, 20), 10)
        pauses = [backoff(failures) for _ in range(100)]
        assert longest / 2 <= min(pauses) < max(pauses) <= longest


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("kind", ["plain", "asyncpg"])
def test_a_decision_beyond_a_limit_of_the_server(kind: str, session: Session, worker_of: WorkerOf) -> None:
    """It is refused for good: given up, so that the others are reported, and it comes back when its lease is over."""

    class TooComplex(fq.Retry):
        def statement(self, leases: Any) -> Any:
            return select(cast(func.repeat("[", 1_000_000), JSONB).label("result"))

    put(session, "bad", payload="bad")

    def body(message: fq.LeasedMessage[Any], _: object) -> object:
        return TooComplex() if message.payload == "bad" else None

    app = worker_of(kind, body, lease=3600)
    with statements(app.engine, "repeat") as sent, app:
        wait_until(lambda: sent)
        put(session, "acme", 3)
        assert wait_for_endings(session, 3) == {"completed": 3}
        run = app._run
        assert run is not None
        wait_until(lambda: not run.jobs)  # nor is the lease extended


@pytest.mark.usefixtures("hasty")
def test_a_report_that_is_refused_at_first(
    session: Session, worker_of: WorkerOf, caplog: pytest.LogCaptureFixture
) -> None:
    """Twice, for whatever reason: it isn't given up so soon, as its message would be done again."""
    put(session, "acme")
    refused: list[object] = []

    def refuse(_: Any, __: Any, statement: str, *___: Any) -> None:
        if "message_complete" in statement and len(refused) < 2:
            refused.append(statement)
            raise DataError(None, None, ValueError("for now"))

    app = worker_of("plain", lambda *_: None, lease=3600)
    event.listen(app.engine, "before_cursor_execute", refuse)
    with caplog.at_level("INFO"), app:
        assert wait_for_endings(session, 1) == {"completed": 1}
    assert [line for line in caplog.messages if line.startswith("can ")] == ["can report how messages ended again"]


@pytest.mark.usefixtures("hasty")
def test_a_pool_that_is_used_up(session: Session, worker_of: WorkerOf, caplog: pytest.LogCaptureFixture) -> None:
    """A report waits for a connection, however long that takes."""
    put(session, "acme")
    held: list[Connection] = []

    def use_up(*_: object) -> None:
        while not held:
            with suppress(SQLAlchemyError):
                held.append(engine.connect())

    options = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 0.01}
    app = worker_of("plain", use_up, engine=options, concurrency=1, prefetch=0, lease=3600, notify=False)
    engine: Any = app.engine
    with app:
        wait_until(lambda: caplog.text.count("can't report how messages ended, trying again") >= 5)
        held[0].close()
        assert wait_for_endings(session, 1) == {"completed": 1}


async def test_a_connection_that_was_closed(engine_of: EngineOf) -> None:
    """To asyncpg that is an InterfaceError."""
    engine = engine_of("asyncpg")
    database = Database(engine, Threads())

    def close(session: Session) -> None:
        session.connection().connection.driver_connection.terminate()  # type: ignore[union-attr]
        session.execute(text("SELECT 1"))

    with pytest.raises(InterfaceError) as caught:
        await database.run(close)
    assert _lost(caught.value)
    await engine.dispose()


async def test_a_session_that_does_not_close(engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a server hangs: what was done counts, after a while."""
    engine = engine_of("async")
    database = Database(engine, Threads())

    async def close(session: AsyncSession) -> None:
        waited.append(session)
        await anyio.sleep_forever()

    waited: list[AsyncSession] = []
    monkeypatch.setattr(AsyncSession, "close", close)
    monkeypatch.setattr("fairqueue.worker.database.CLOSING", 0.01)
    assert await database.run(lambda session: session.scalar(text("SELECT 1"))) == 1
    assert len(waited) == 1
    monkeypatch.undo()
    await waited[0].close()
    await engine.dispose()


def test_one_that_was_never_there(caplog: pytest.LogCaptureFixture) -> None:
    """The log says once where it is looked for, and not that there is work going on."""
    engine = create_engine("postgresql+psycopg://nobody:s3cret@localhost:1/nowhere")
    app = fq.Worker(engine, name="w1")
    app.handler(lambda _: None)
    with caplog.at_level("INFO"), app:
        wait_until(lambda: caplog.text.count("can't look at the schema, trying again") >= 2)
    hint = "w1 hasn't reached its database yet: host localhost, port 1, dbname nowhere, user nobody"
    assert caplog.messages.count(hint) == 1
    assert "s3cret" not in caplog.text
    assert "works on" not in caplog.text


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql://", "where its driver looks by default"),
        ("postgresql:///app?host=/tmp&password=s3cret", "host /tmp, dbname app"),
        ("postgresql://app:1@s3cret@localhost/app", "its URL has an @ in the password, or behind it: write %40"),
        ("postgresql://app:1@s3cret/2@localhost/app", "its URL has an @ in the password, or behind it: write %40"),
    ],
)
def test_a_place_for_the_log(url: str, said: str) -> None:
    assert place(make_url(url)) == said


@pytest.fixture
def latin1(postgres: Postgres) -> Iterator[Engine]:
    """A database without most characters."""
    url = postgres.url.set(database=f"{PREFIX}_latin1")
    maintenance = create_engine(postgres.url, isolation_level="AUTOCOMMIT")
    with maintenance.connect() as connection:
        provider = "LOCALE_PROVIDER libc" if (connection.dialect.server_version_info or ()) >= (15,) else ""
        options = f"ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' {provider} TEMPLATE template0"
        connection.execute(text(f"CREATE DATABASE {url.database} {options}"))
        engine = create_engine(url)
        with engine.begin() as begun:
            schema.install(begun)
        yield engine
        engine.dispose()
        connection.execute(text(f"DROP DATABASE {url.database} WITH (FORCE)"))
    maintenance.dispose()


@pytest.mark.usefixtures("hasty")
def test_a_reason_beyond_the_encoding(latin1: Engine, worker_of: WorkerOf) -> None:
    """It is kept as far as the database can, whichever driver finds out, and of a class that isn't made of it."""

    class Dear(fq.DeadLetter):
        def __init__(self) -> None:
            super().__init__("é costs 3 €")

    def body(message: fq.LeasedMessage[Any], _: object) -> object:
        if message.payload == "raise":
            raise ValueError("3 €")
        return Dear()

    with Session(latin1) as session:
        for kind in LISTENING:
            ids = put(session, "acme", payload="raise", max_attempts=1) + put(session, "acme")
            with worker_of(kind, body, engine={"url": latin1.url}):
                wait_until(lambda: is_empty(session))
            reasons = select(fq.DeadMessage.error).where(fq.DeadMessage.id.in_(ids)).order_by(fq.DeadMessage.id)
            assert session.scalars(reasons).all() == ["ValueError: 3 \\u20ac", "\\xe9 costs 3 \\u20ac"], kind


def test_times_that_the_driver_cannot_read(session: Session, database_url: str) -> None:
    """The worker doesn't begin: what it leased it couldn't read, until all would be dead letters."""
    put(session, "acme")
    engine = create_engine(database_url, connect_args={"options": "-c DateStyle=German"})
    app = fq.Worker(engine)

    @app.handler
    def work(message: fq.LeasedMessage) -> None:
        pass

    with pytest.raises(DataError, match="DateStyle"), app:
        pass
    engine.dispose()
    assert session.scalars(select(fq.Message.attempt)).all() == [0]


@pytest.mark.parametrize("kind", ["plain session", "async session"])
def test_sessions_of_several_databases(kind: str, session: Session, worker_of: WorkerOf, engine_of: EngineOf) -> None:
    """The message is completed in the one that is the messages'."""
    put(session, "acme", max_attempts=1)
    app, nowhere = worker_of(kind, lambda *_: None), engine_of(kind, url="postgresql://nobody@nowhere.invalid/app")
    if isinstance(nowhere, AsyncEngine):
        app.async_session = async_sessionmaker(nowhere, binds={fq.Message: app.engine})
    else:
        app.session = sessionmaker(nowhere, binds={fq.Message: app.engine})
    with app:
        assert wait_for_endings(session, 1) == {"completed": 1}


def test_an_error_that_cannot_be_printed() -> None:
    """Of a connect hook of the application's, say: the worker tries again, and says what it can."""

    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert in_a_line(Odd()) == "Odd"
    assert in_a_line(ValueError("one\n  two")) == "ValueError: one two"
