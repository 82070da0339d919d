"""What enqueueing takes and returns, for each kind of session."""

from datetime import UTC, datetime, timedelta
from typing import Any, assert_type

from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

import fairqueue as fq

ROWS: list[fq.MessageRow] = [
    {"channel": "acme"},
    {"channel": "acme", "payload": {"doc": 1}, "delay": timedelta(minutes=1)},
    {"channel": "acme", "at": datetime.now(UTC), "queue": "q", "cost": 2.5, "body": b"x"},
]


def sync(session: Session, scoped: scoped_session[Session]) -> None:
    assert_type(fq.enqueue(session, "acme", {"doc": 1}, delay=60), fq.Message)
    assert_type(fq.enqueue(scoped, "acme"), fq.Message)
    assert_type(fq.enqueue_many(session, ROWS), list[int])
    assert_type(fq.enqueue_many(scoped, [{"channel": "acme"}]), list[int])
    assert_type(fq.enqueue_copy(session, ({"channel": "acme", "payload": n} for n in range(9))), int)


async def asynchronous(session: AsyncSession, scoped: async_scoped_session[AsyncSession]) -> None:
    assert_type(fq.enqueue(session, "acme"), fq.Message)
    assert_type(await fq.enqueue_many(session, ROWS), list[int])
    assert_type(await fq.enqueue_many(scoped, [{"channel": "acme"}]), list[int])
    assert_type(await fq.enqueue_copy(session, ROWS), int)


def models() -> None:
    message = fq.Message("acme", {"doc": 1}, priority=3)
    assert_type(message.id, int)
    assert_type(message.payload, Any)
    assert_type(message.body, bytes | None)
    assert_type(fq.Channel("acme").weight, float)


def mistakes(session: Session) -> None:
    fq.enqueue_many(session, [{"payload": 1}])  # type: ignore[typeddict-item]  # pyright: ignore[reportCallIssue,reportArgumentType]
    fq.enqueue_many(session, [{"channel": "acme", "prioritty": 1}])  # type: ignore[typeddict-unknown-key]  # pyright: ignore[reportCallIssue,reportArgumentType]
    fq.enqueue(session)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
