"""A tenant whose handlers hang keeps the slots that they are in, and nothing else."""

import asyncio
import threading
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import put, put_all, wait_until
from tests.fixtures.workers import EngineOf
from tests.worker.working import RARELY, wait_for_endings

OTHERS = {f"tenant{number}": 5 for number in range(5)}


def hanging_worker(app: fq.Worker, asynchronous: bool, go: threading.Event, hanging: list[int]) -> None:
    """A handler that hangs for the messages of one tenant, until it may go."""

    def plain(message: fq.LeasedMessage[Any]) -> None:
        if message.channel == "hangs":
            hanging.append(message.id)
            assert go.wait(60)

    async def wait(message: fq.LeasedMessage[Any]) -> None:
        if message.channel == "hangs":
            hanging.append(message.id)
            while not go.is_set():  # noqa: ASYNC110 - set by another thread
                await asyncio.sleep(0.01)

    app.handler(wait if asynchronous else plain)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("limit", [None, 2])
def test_the_others_go_on(asynchronous: bool, limit: int | None, session: Session, engine_of: EngineOf) -> None:
    """While slots remain; for which the tenant's max_concurrency sees, however many messages it has."""
    if limit is not None:
        session.add(fq.Channel(name="hangs", max_concurrency=limit))
    put(session, "hangs", 2 if limit is None else 100)
    go, hanging = threading.Event(), list[int]()
    app = fq.Worker(engine_of("async" if asynchronous else "plain"), concurrency=3, poll=0.05)
    hanging_worker(app, asynchronous, go, hanging)
    with app:
        wait_until(lambda: len(hanging) == 2)
        for number in range(2):
            put_all(session, OTHERS)
            assert wait_for_endings(session, 25 * (number + 1)) == {"completed": 25 * (number + 1)}
        assert len(hanging) == 2
        assert set(session.scalars(select(fq.History.channel))) == OTHERS.keys()
        go.set()
        wait_for_endings(session, 50 + len(hanging))
        app.stop()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_tenant_goes_on_too(asynchronous: bool, session: Session, engine_of: EngineOf) -> None:
    """When its handlers have ended, its others are next at once: the worker looks for more when it has ended one."""
    session.add(fq.Channel(name="hangs", max_concurrency=1))
    put(session, "hangs", 4)
    go, hanging = threading.Event(), list[int]()
    app = fq.Worker(engine_of("async" if asynchronous else "plain"), concurrency=3, poll=RARELY)
    hanging_worker(app, asynchronous, go, hanging)
    with app:
        wait_until(lambda: hanging)
        go.set()
        assert wait_for_endings(session, 4) == {"completed": 4}
    assert sorted(hanging) == hanging
