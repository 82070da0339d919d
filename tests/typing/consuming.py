"""The payload's type goes from the message class to the leased message."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, assert_type

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

import fairqueue as fq


@dataclass
class Upload:
    path: str


class UploadMessage(fq.TypedMessage[Upload], payload_type=Upload):
    pass


class Blob(fq.TypedMessage[bytes], payload_type=bytes):
    pass


def dequeue(session: Session) -> None:
    assert_type(session.scalars(fq.dequeue(message_type=UploadMessage)).all(), Sequence[fq.LeasedMessage[Upload]])
    assert_type(session.scalars(fq.dequeue(message_type=Blob)).one(), fq.LeasedMessage[bytes])
    for message in session.scalars(fq.dequeue(limit=10, lease=30, queue="q", message_type=UploadMessage)):
        assert_type(message.payload, Upload)
        assert_type(message.payload.path, str)
        assert_type(message.id, int)
        assert_type(message.error, str | None)
        assert_type(message.leased_until, datetime)


async def dequeue_async(session: AsyncSession) -> None:
    batch = (await session.scalars(fq.dequeue(message_type=UploadMessage))).all()
    assert_type(batch, Sequence[fq.LeasedMessage[Upload]])
    await session.execute(fq.complete(batch))


def acts(session: Session, message: fq.LeasedMessage, batch: Sequence[fq.LeasedMessage[Upload]]) -> None:
    """One or many, leases or pairs of numbers."""
    row = session.execute(fq.complete(message)).one()
    assert_type(row.id, Any)
    for id_, result in session.execute(fq.complete(batch)):
        assert_type(id_, int)
        assert_type(result, str)
    for statement in (
        fq.fail(message, "broken", delay=1),
        fq.fail(batch, ValueError("broken")),
        fq.defer([(1, 1)], state={"page": 2}),
        fq.heartbeat((1, 1), lease=60),
        fq.cancel(message),
        fq.cancel(7),
        fq.cancel([1, 2, 3]),
        fq.cancel(batch),
    ):
        assert_type(session.execute(statement).all()[0].result, Any)


def mistakes(message: fq.LeasedMessage) -> None:
    """What a checker finds before the program runs."""
    message.attempt = 2  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
    fq.complete("message")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    fq.dequeue(10)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    fq.dequeue(limit="10")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue,reportArgumentType]
