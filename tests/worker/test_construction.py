"""What a Worker refuses to be made of, before it does anything."""

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache, partial, wraps
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import Engine, create_engine, select
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Session, scoped_session, sessionmaker

import fairqueue as fq
from fairqueue.worker import Handler
from fairqueue.worker.sessions import check_isolation, check_pool
from tests.acts import put, wait_until
from tests.fixtures.workers import EngineOf, WorkerOf
from tests.worker.working import is_empty, threads_of_workers

if TYPE_CHECKING:
    from sqlalchemy import orm


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("queue", ""),
        ("concurrency", 0),
        ("concurrency", 2.5),
        ("prefetch", -1),
        ("lease", 0.5),
        ("lease", timedelta(milliseconds=1)),
        ("poll", 0),
        ("grace", -1),
        ("notify", "yes"),
        ("name", "x" * 256),
        ("message_type", dict),
        ("session", 7),
        ("async_session", 7),
    ],
)
def test_each_parameter_is_named(parameter: str, value: Any) -> None:
    with pytest.raises(fq.InvalidValue, match=f"^{parameter} "):
        fq.Worker(create_engine("postgresql+psycopg://"), **{parameter: value})


def test_the_engine(session: Session, database_url: str) -> None:
    """A URL, with its password, is not in the error."""
    for engine in (database_url, session):
        with pytest.raises(fq.InvalidValue, match=r"^engine must be an Engine or an AsyncEngine, not (str|Session)$"):
            fq.Worker(engine)  # type: ignore[arg-type]


@pytest.mark.parametrize("url", ["postgresql+asyncpg://x/y", "postgresql+psycopg_async://x/y"])
def test_an_engine_that_cannot_be_awaited(url: str) -> None:
    """It would only say that a greenlet is missing, again and again."""
    with pytest.raises(
        fq.InvalidValue, match=r"^engine is an Engine of the async driver .*: .* create_async_engine\(\)"
    ):
        fq.Worker(create_engine(url))
    with pytest.raises(fq.InvalidValue, match=r"^engine is an Engine of the async driver"):
        fq.Worker(create_async_engine(url).sync_engine)


def test_another_database() -> None:
    """Where the application's tests use SQLite, say."""

    class Base(DeclarativeBase):
        pass

    fq.attach(Base.metadata)
    engine = create_engine("sqlite://")
    with pytest.raises(fq.InvalidValue, match=r"engine must be of PostgreSQL, not sqlite: .*fairqueue\.embedded"):
        fq.Worker(engine)
    with pytest.raises(fq.InvalidValue, match="engine must be of PostgreSQL, not sqlite"):
        Base.metadata.create_all(engine)


def test_one_handler(engine: Engine) -> None:
    app = fq.Worker(engine, queue="jobs")
    app.handler(lambda _: None)
    with pytest.raises(fq.InvalidValue, match=r"queue 'jobs' has a handler already, .*<lambda>"):
        app.handler(lambda _: None)
    with pytest.raises(fq.FairqueueError, match="queue 'default' has no handler"):
        fq.Worker(engine).run()


def test_outside_the_main_thread(engine: Engine) -> None:
    app = fq.Worker(engine)
    app.handler(lambda _: None)
    refused = pytest.raises(fq.FairqueueError, match=r"^run\(\) needs the main thread, .* `with worker:` here$")
    with ThreadPoolExecutor(1) as thread, refused:
        thread.submit(app.run).result()


def test_what_is_no_handler(engine: Engine) -> None:
    def yields(message: Any) -> Any:
        yield message

    async def yields_too(message: Any) -> Any:
        yield message

    def other_way_round(session: Session, message: Any) -> None: ...
    def of_a_session(session: Any) -> None: ...
    def of_a_class(self: Any, message: Any) -> None: ...
    async def in_words(db: "AsyncSession", message: Any) -> None: ...

    for each in (other_way_round, of_a_session, of_a_class, in_words):
        name = f"test_what_is_no_handler.<locals>.{each.__name__}"
        with pytest.raises(fq.InvalidValue, match=rf"^a handler must be .*\(message, session\), not {name}\("):
            fq.Worker(engine).handler(each)
    given: list[Any] = [42, lambda: None, lambda _, __, ___: None, lambda *, _: None, yields, yields_too, type]
    for each in given:
        with pytest.raises(fq.InvalidValue, match=r"^a handler must be a function"):
            fq.Worker(engine).handler(each)
    for field in ("dead", "cancel"):
        wrong: Any = {field: (ValueError, "KeyError")}
        with pytest.raises(fq.InvalidValue, match=f"^{field} must be an exception class or a tuple of them"):
            fq.Worker(engine).handler(**wrong)(lambda _: None)


def test_who_gets_a_session() -> None:
    """A second parameter is a setting of the function's own where it has a default and another name."""

    def plain(message: Any, db: Any) -> None: ...
    def optional(message: Any, session: Any = None) -> None: ...
    def setting(message: Any, limit: int = 100) -> None: ...
    def positional(message: Any, limit: int = 100, /, session: Any = None) -> None: ...
    def keyword(message: Any, *, session: Any = None) -> None: ...
    def passes_on(*args: Any, **kwargs: Any) -> None: ...
    def rest(message: Any, *args: Any, session: Any = None) -> None: ...
    async def asynchronous(message: Any, limit: int = 100) -> None: ...

    takes: dict[Any, bool] = {plain: True, optional: True, setting: False, positional: False, keyword: False}
    takes |= {passes_on: True, rest: True, asynchronous: False, partial(setting, limit=5): False}
    for function, expected in takes.items():
        assert Handler(function).takes_session == expected, function


def test_a_decorator_that_opens_the_session() -> None:
    """What is called takes less than the function that it says to be."""

    def work(message: Any, session: Any) -> None: ...

    @wraps(work)
    def opens_one(message: Any) -> None: ...
    @wraps(work)
    def passes_on(*args: Any) -> None: ...
    @cache  # written in C
    def cached(message: Any) -> None: ...

    assert not Handler(opens_one).takes_session
    assert Handler(passes_on).takes_session
    assert not Handler(cached).takes_session


@pytest.mark.skipif(sys.version_info < (3, 14), reason="before, types are evaluated with the def")
def test_types_that_are_imported_for_type_checkers_only() -> None:
    """Nobody needs them to call it; what a session is by its type is still seen by its name."""

    def work(message: Any, db: orm.Session) -> None: ...
    def other_way_round(db: orm.Session, message: Any) -> None: ...

    assert Handler(work).takes_session
    assert Handler(partial(work)).takes_session
    with pytest.raises(fq.InvalidValue, match=r"^a handler must be .*, not .*other_way_round\("):
        Handler(other_way_round)


def test_sessions_that_do_not_fit(engine_of: EngineOf) -> None:
    engine, async_engine = engine_of("plain"), engine_of("async")

    def plain(message: Any, session: Session) -> None: ...
    async def asynchronous(message: Any, session: Any) -> None: ...

    with pytest.raises(fq.InvalidValue, match=r"asynchronous is async and takes a session.*async_session="):
        fq.Worker(engine).handler(asynchronous)
    with pytest.raises(fq.InvalidValue, match=r"plain is no async function and takes a session.*session="):
        fq.Worker(async_engine).handler(plain)
    fq.Worker(engine, async_session=async_sessionmaker(async_engine)).handler(asynchronous)
    fq.Worker(async_engine, session=sessionmaker(engine)).handler(plain)
    app = fq.Worker(async_engine)
    app.handler(asynchronous)
    assert app.async_session is not None
    assert not app.async_session().sync_session.expire_on_commit, "what is read afterwards can't be awaited"


def test_a_pool_that_is_too_small(session: Session, engine_of: EngineOf, caplog: pytest.LogCaptureFixture) -> None:
    """It is refused where handlers have their sessions of it; where they take none, they might open some."""
    small = engine_of("plain", pool_size=3, max_overflow=2)
    app = fq.Worker(small, concurrency=2)
    app.handler(lambda _, __: None)
    with pytest.raises(fq.InvalidValue, match=r"concurrency 2 needs up to 6 connections, .* has 5 .*pool_size=6"):
        app.run()
    without = fq.Worker(small, concurrency=2)
    without.handler(lambda _: None)
    elsewhere = fq.Worker(small, concurrency=2, session=sessionmaker(engine_of("plain")))
    elsewhere.handler(lambda _, __: None)
    enough = fq.Worker(small, concurrency=1)
    enough.handler(lambda _: None)
    warning = "up to 6 connections are needed, and the pool has 5 at most"
    for each in (enough, elsewhere, without):
        assert warning not in caplog.text
        put(session, "acme")
        with each:
            wait_until(lambda: is_empty(session))
    assert warning in caplog.text
    assert "max_overflow=3)" in caplog.text


def test_whose_pool_it_is(engine_of: EngineOf) -> None:
    """That of the sessions counts, however their engine was made; one that nobody knows is taken as it is."""
    small, large = engine_of("plain", pool_size=3, max_overflow=2), engine_of("plain")

    def check(engine: Any, session: Any, handler: Callable[..., object] = lambda _, __: None) -> None:
        app = fq.Worker(engine, concurrency=2, session=session)
        app.handler(handler)
        assert app.registered is not None
        check_pool(app, app.registered)

    check(small, lambda: Session(large))
    check(large, None)
    check(small, scoped_session(sessionmaker(large)))
    serializable = sessionmaker(small.execution_options(isolation_level="SERIALIZABLE"))
    for session in (None, serializable, scoped_session(serializable)):
        with pytest.raises(fq.InvalidValue, match=r"needs up to 6 connections, .* has 5 "):
            check(small, session)

    async def asynchronous(message: Any, session: Any) -> None: ...

    small = engine_of("async", pool_size=3, max_overflow=2)
    for async_session in (None, async_scoped_session(async_sessionmaker(small), asyncio.current_task)):
        app = fq.Worker(small, concurrency=2, async_session=async_session)
        app.handler(asynchronous)
        assert app.registered is not None
        with pytest.raises(fq.InvalidValue, match=r"needs up to 6 connections, .* has 5 "):
            check_pool(app, app.registered)


@pytest.mark.parametrize("scoped", [False, True])
def test_whose_isolation_it_is(scoped: bool, engine_of: EngineOf, caplog: pytest.LogCaptureFixture) -> None:
    factory = sessionmaker(engine_of("plain", isolation_level="SERIALIZABLE"))
    app = fq.Worker(engine_of("plain"), session=scoped_session(factory) if scoped else factory)
    app.handler(lambda _, __: None)
    assert app.registered is not None
    check_isolation(app, app.registered)
    assert "has sessions that are SERIALIZABLE" in caplog.text


@pytest.mark.parametrize("scoped", [False, True])
def test_whose_engines_it_closes(scoped: bool, session: Session, engine_of: EngineOf) -> None:
    """Those of its sessions, too, whichever way they were told: their event loop ends with the worker."""
    own, theirs = engine_of("async"), engine_of("async")
    factory = async_sessionmaker(binds={fq.Message: theirs})
    app = fq.Worker(own, async_session=async_scoped_session(factory, asyncio.current_task) if scoped else factory)
    used: list[int] = []

    @app.handler
    async def work(message: fq.LeasedMessage[Any], session: AsyncSession) -> None:
        await session.get(fq.Message, message.id)
        used.append(theirs.pool.checkedout())

    put(session, "acme")
    with app:
        wait_until(lambda: is_empty(session))
    assert used == [1]
    assert own.pool.checkedin() == theirs.pool.checkedin() == 0


def test_its_name(session: Session, worker_of: WorkerOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the process in which it runs, which may have been forked when the worker was there already."""
    put(session, "acme")
    app = worker_of("plain", lambda *_: None)
    assert app.name == f"{socket.gethostname()}:{os.getpid()}"
    monkeypatch.setattr(os, "getpid", lambda: 1234567)
    with app:
        wait_until(lambda: is_empty(session))
    assert session.scalars(select(fq.History.worker)).all() == [f"{socket.gethostname()}:1234567"]


def test_a_schema_that_is_not_there(empty_database_url: str, worker_of: WorkerOf) -> None:
    """Raised plainly, however the worker is run."""
    app = worker_of("plain", lambda *_: None, engine={"url": empty_database_url})
    with pytest.raises(fq.SchemaVersionError, match="has no fairqueue"):
        app.run()
    with pytest.raises(fq.SchemaVersionError, match="has no fairqueue"), app:
        pass

    async def embed() -> None:
        async with app:
            pass

    with pytest.raises(fq.SchemaVersionError, match="has no fairqueue"):
        asyncio.run(embed())
    wait_until(lambda: threads_of_workers() == 0)
