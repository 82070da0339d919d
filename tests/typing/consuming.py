"""The payload's type goes from the message class to the leased message."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, assert_type

from sqlalchemy import Engine, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

import fairqueue as fq
import fairqueue.cli
import fairqueue.spark.reporting
import fairqueue.testing


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
        assert_type(message.first_leased_at, datetime | None)
        assert_type(message.key, str | None)
        assert_type(message.forgiven, int)
    assert_type(session.scalars(fq.dequeue(worker="w1")).one().payload, Any)


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
        fq.fail(batch, ValueError("broken"), delay=None, retry=False),
        fq.defer([(1, 1)], state={"page": 2}),
        fq.heartbeat((1, 1), lease=60),
        fq.cancel(message),
        fq.cancel(7),
        fq.cancel([1, 2, 3]),
        fq.cancel((1, 1)),
        fq.cancel([(1, 1), (2, 1)]),
        fq.cancel(batch),
        fq.redrive(7),
        fq.redrive([1, 2, 3]),
        fq.redrive(session.scalars(select(fq.DeadMessage))),
        fq.redrive(queue="q"),
        fq.redrive(queue="q", channel="acme"),
    ):
        assert_type(session.execute(statement).all()[0].result, Any)


def outcomes(session: Session) -> None:
    letter = session.scalars(select(fq.DeadMessage)).one()
    assert_type(letter.error, str | None)
    assert_type(letter.died_at, datetime)
    assert_type(session.scalars(select(fq.History.outcome)).all(), Sequence[str])


def waiting(engine: Engine, session: Session, message: fq.Message, upload: UploadMessage) -> None:
    """One ending for one message, a list for several."""
    ending = fq.wait_for(engine, 7, timeout=1)
    assert_type(ending, fq.Ending)
    assert_type(ending.outcome, fq.Outcome | None)
    assert_type(ending.finished_at, datetime | None)
    assert_type(fq.wait_for(engine, message, timeout=timedelta(seconds=1)), fq.Ending)
    assert_type(fq.wait_for(engine, upload, timeout=None), fq.Ending)
    assert_type(fq.wait_for(engine, [1, message, upload], timeout=None), list[fq.Ending])
    for id_, outcome, _, _, finished_at in session.execute(fq.ending([message])):
        assert_type(id_, int)
        assert_type(outcome, str | None)
        assert_type(finished_at, datetime | None)


async def waiting_async(engine: AsyncEngine, message: fq.Message) -> None:
    assert_type(await fq.wait_for(engine, message, timeout=1), fq.Ending)
    assert_type(await fq.wait_for(engine, [message], timeout=1), list[fq.Ending])


def mistakes(message: fq.LeasedMessage, session: Session, engine: Engine) -> None:
    """What a checker finds before the program runs."""
    message.attempt = 2  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
    fq.complete("message")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    fq.dequeue(10)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    fq.dequeue(limit="10")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue,reportArgumentType]
    fq.redrive([1], queue="q")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    fq.redrive(channel="acme")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    fq.wait_for(session, 7, timeout=1)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue,reportArgumentType]
    fq.wait_for(engine, 7)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]


def mistyped() -> None:
    """Names are loaded when they are first used, which must not make any name good."""
    fq.dequeu()  # type: ignore[attr-defined]
    fairqueue.spark.archiv()  # type: ignore[attr-defined]
    fairqueue.spark.reporting.pages_of()  # type: ignore[attr-defined]
    fairqueue.testing.drained()  # type: ignore[attr-defined]
    fairqueue.cli.Targets()  # type: ignore[attr-defined]
