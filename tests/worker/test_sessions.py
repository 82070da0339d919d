"""The sessions of handlers: made in whatever way, and whatever their own end does."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import fairqueue as fq
from fairqueue.worker import Handler
from tests.acts import put
from tests.fixtures.workers import EngineOf
from tests.worker.working import handler_of, wait_for_endings


def message(number: int) -> Any:
    return SimpleNamespace(reader=None, number=number)


@pytest.mark.parametrize("kind", ["plain session", "async session"])
def test_an_end_that_swallows(kind: str, session: Session, engine_of: EngineOf) -> None:
    """What was raised is of its message all the same; and the place is free again."""
    engine = engine_of(kind)

    @contextmanager
    def plain() -> Iterator[Session]:
        with Session(engine) as own, suppress(Exception):
            yield own

    @asynccontextmanager
    async def asynchronous() -> AsyncIterator[AsyncSession]:
        async with AsyncSession(engine) as own:
            with suppress(Exception):
                yield own

    def body(leased: fq.LeasedMessage[Any], _: object) -> None:
        if leased.channel == "bad":
            raise ValueError("bad")
        if leased.channel == "unwanted":
            raise fq.Cancel("unwanted")

    for channel in ("bad", "unwanted", "good"):
        put(session, channel, max_attempts=1)
    sessions: dict[str, Any] = {"session": plain} if kind == "plain session" else {"async_session": asynchronous}
    app = fq.Worker(engine, concurrency=1, lease=3600, poll=0.05, **sessions)
    app.handler(handler_of(kind, body))
    with app:
        assert wait_for_endings(session, 3) == {"dead": 1, "cancelled": 1, "completed": 1}
    session.rollback()
    assert session.get_one(fq.DeadMessage, 1).error == "ValueError: bad"


async def test_a_decision_that_several_raise_at_once() -> None:
    """An object of a module, while the session of the first one still ends: each has the reason of its own."""
    later, both = fq.Retry(delay=60), asyncio.Barrier(2)

    class Slow(AsyncSession):
        async def close(self) -> None:
            await both.wait()
            await super().close()

    async def work(given: Any, _: AsyncSession) -> None:
        try:
            raise KeyError(given.number)
        except KeyError as error:
            raise later from error

    handler = Handler(work)
    handled = await asyncio.gather(*(handler.run_async(message(number), Slow) for number in (1, 2)))
    decisions: list[Any] = [each.decision for each in handled]
    assert [decision.reason for decision in decisions] == ["KeyError: 1", "KeyError: 2"]
    assert later.__traceback__ is None


async def test_those_of_a_scope() -> None:
    """A registry by tasks doesn't grow: each message has a task of its own."""
    scoped = async_scoped_session(async_sessionmaker(), asyncio.current_task)
    own: set[int] = set()

    async def work(_: Any, session: AsyncSession) -> None:
        assert scoped() is session
        own.add(id(asyncio.current_task()))
        raise fq.Retry

    handler = Handler(work)
    tasks = [asyncio.create_task(handler.run_async(message(number), scoped)) for number in range(3)]
    assert {type((await task).decision) for task in tasks} == {fq.Retry}
    assert len(own) == 3
    assert scoped.registry.registry == {}


def test_those_of_a_scope_in_threads() -> None:
    """Nor does one by messages."""
    current = 0
    scoped = scoped_session(sessionmaker(), scopefunc=lambda: current)
    kept: list[int] = []

    def work(_: Any, session: Session) -> None:
        assert scoped() is session
        kept.append(len(scoped.registry.registry))
        raise fq.Retry

    for current in range(3):
        assert type(Handler(work).run(message(current), scoped).decision) is fq.Retry
    assert kept == [1, 1, 1]
    assert scoped.registry.registry == {}


@pytest.mark.parametrize(
    ("parameter", "factory"),
    [
        ("session", async_sessionmaker()),
        ("session", async_scoped_session(async_sessionmaker(), lambda: None)),
        ("session", AsyncSession),
        ("async_session", sessionmaker()),
        ("async_session", scoped_session(sessionmaker())),
        ("async_session", Session),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_those_of_the_other_kind(parameter: str, factory: Any, engine_of: EngineOf) -> None:
    """They would fail each message until it is dead."""
    with pytest.raises(fq.InvalidValue, match=f"^{parameter} must make the other kind of session, not be "):
        fq.Worker(engine_of("plain"), **{parameter: factory})


@pytest.mark.parametrize("kind", ["plain session", "async session"])
def test_those_of_another_schema(kind: str, engine_of: EngineOf) -> None:
    """Its messages have the same ids: one of them might be completed."""
    engine = engine_of(kind)
    jobs = engine.execution_options(**fq.in_schema("jobs"))
    make: Any = sessionmaker if kind == "plain session" else async_sessionmaker
    parameter = "session" if kind == "plain session" else "async_session"
    for one, other, message_ in [
        (jobs, engine, r"leads to schema 'jobs', but the sessions of .* to 'fairqueue'"),
        (engine, jobs, r"leads to schema 'fairqueue', but the sessions of .* to 'jobs'"),
        (jobs, jobs.execution_options(schema_translate_map={None: "tenant_7"}), r"fq.in_schema\('jobs'\)"),
    ]:
        app = fq.Worker(one, **{parameter: make(other)})
        app.handler(handler_of(kind, lambda *_: None))
        with pytest.raises(fq.InvalidValue, match=message_), app:
            pass
    own = {"execution_options": fq.in_schema("jobs")} if version("sqlalchemy") >= "2.1" else {"bind": jobs}
    for there in ({"bind": jobs}, {"bind": engine, "binds": {fq.Message: jobs}}, {"bind": engine, **own}):
        app = fq.Worker(jobs, **{parameter: make(**there)})
        app.handler(handler_of(kind, lambda *_: None))
        with pytest.raises(fq.SchemaVersionError), app:  # as there is none
            pass
        app = fq.Worker(engine, **{parameter: make(**there)})
        app.handler(handler_of(kind, lambda *_: None))
        with (
            pytest.raises(fq.InvalidValue, match=r"leads to schema 'fairqueue', but the sessions of .* to 'jobs'"),
            app,
        ):
            pass
