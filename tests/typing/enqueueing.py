"""What enqueueing takes and returns, for each kind of session."""

from collections.abc import Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any, assert_type

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

import fairqueue as fq
from fairqueue.testing import assert_enqueued, enqueued

ROWS: list[fq.MessageRow] = [
    {"channel": "acme"},
    {"channel": "acme", "payload": {"doc": 1}, "delay": timedelta(minutes=1)},
    {"channel": "acme", "at": datetime.now(UTC), "queue": "q", "cost": 2.5, "body": b"x"},
    {"channel": "acme", "key": "k", "max_attempts": 3, "backoff": timedelta(seconds=5)},
]


def sync(session: Session, scoped: scoped_session[Session]) -> None:
    assert_type(fq.enqueue(session, "acme", {"doc": 1}, delay=60), fq.Message)
    assert_type(fq.enqueue(scoped, "acme"), fq.Message)
    assert_type(fq.enqueue_many(session, ROWS), list[int])
    assert_type(fq.enqueue_many(scoped, [{"channel": "acme"}]), list[int])
    assert_type(fq.enqueue_copy(session, ({"channel": "acme", "payload": n} for n in range(9))), int)
    assert_type(fq.enqueue(session, "acme", key="k", max_attempts=3, backoff=1.5), fq.Message)
    assert_type(fq.enqueue_unique(session, "acme", {"doc": 1}, key="k"), int)
    assert_type(fq.enqueue_unique(scoped, "acme", key="k", on_conflict="replace", delay=5), int)
    assert_type(fq.enqueue_many(session, ROWS, on_conflict="replace"), list[int])
    assert_type(fq.enqueue_many(session, ROWS, on_conflict="ignore"), list[int | None])


async def asynchronous(session: AsyncSession, scoped: async_scoped_session[AsyncSession]) -> None:
    assert_type(fq.enqueue(session, "acme"), fq.Message)
    assert_type(await fq.enqueue_many(session, ROWS), list[int])
    assert_type(await fq.enqueue_many(scoped, [{"channel": "acme"}]), list[int])
    assert_type(await fq.enqueue_copy(session, ROWS), int)
    assert_type(await fq.enqueue_unique(session, "acme", key="k", on_conflict="raise"), int)
    assert_type(await fq.enqueue_unique(scoped, "acme", key="k"), int)
    assert_type(await fq.enqueue_many(session, ROWS, on_conflict="ignore"), list[int | None])
    await session.execute(fq.pause(channel="acme", until=datetime.now(UTC)))


def policies(session: Session, engine: Engine, async_engine: AsyncEngine) -> None:
    session.execute(fq.pause(queue="default"))
    session.execute(fq.resume(queue="q", channel="acme"))
    session.merge(fq.Channel("acme", "q", 2, max_concurrency=5, release_interval_ms=None, overflow="drop", paused=True))
    session.merge(fq.Queue("q", max_concurrency=None, max_attempts=3, backoff=0.5, channel_max_size=7))
    assert_type(fq.Channel("acme").max_size, int | None)
    assert_type(fq.Queue("q").max_attempts, int)
    assert_type(fq.Queue("q").resume_at, datetime | None)
    fq.translate_errors(engine)
    fq.translate_errors(async_engine)


def models() -> None:
    message = fq.Message("acme", {"doc": 1}, priority=3)
    assert_type(message.id, int)
    assert_type(message.payload, Any)
    assert_type(message.body, bytes | None)
    assert_type(message.key, str | None)
    assert_type(message.backoff, float | None)
    assert_type(fq.Channel("acme").weight, float | None)


def testing(session: Session, asynchronous: AsyncSession) -> None:
    assert_type(enqueued(session, payload=1, containing={}, key=None, at=datetime.now(UTC)), list[fq.Message])
    _ = assert_type(enqueued(asynchronous), Coroutine[Any, Any, list[fq.Message]])
    assert_type(assert_enqueued(session, queue="q", channel="acme", count=2), list[fq.Message])
    _ = assert_type(assert_enqueued(asynchronous, key="k"), Coroutine[Any, Any, list[fq.Message]])


async def forgotten(session: AsyncSession) -> None:
    """An await."""
    fq.enqueue_many(session, ROWS)  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
    assert_enqueued(session)  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]


def mistakes(session: Session) -> None:
    enqueued(session, chanel="acme")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    assert_enqueued(session, at=3)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue,reportArgumentType]
    fq.enqueue_many(session, [{"payload": 1}])  # type: ignore[typeddict-item]  # pyright: ignore[reportCallIssue,reportArgumentType]
    fq.enqueue_many(session, [{"channel": "acme", "prioritty": 1}])  # type: ignore[typeddict-unknown-key]  # pyright: ignore[reportCallIssue,reportArgumentType]
    fq.enqueue_unique(session, "acme")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    fq.enqueue_unique(session, "acme", key="k", on_conflict="update")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue,reportArgumentType]
    fq.enqueue_many(session, ROWS, on_conflict="update")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue,reportArgumentType]
    fq.Channel("acme", wieght=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    fq.Queue("q", max_attempts=None)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    fq.pause("acme")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    fq.pause(channel=None)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    fq.enqueue(session)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
