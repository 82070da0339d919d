"""A message that an open transaction has locked keeps its worker from nothing else."""

import threading
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from tests.acts import put, wait_until
from tests.fixtures.workers import WorkerOf
from tests.worker.working import RARELY, endings, wait_for_endings

pytestmark = pytest.mark.shared_database

LOCK = "SELECT FROM fairqueue.message WHERE id = %s FOR UPDATE"
SET_ASIDE = "somebody has it locked, so its end is reported later"


@pytest.mark.parametrize("kind", ["plain", "async", "asyncpg"])
def test_the_others_are_reported(
    kind: str, session: Session, other: psycopg.Connection, worker_of: WorkerOf, caplog: pytest.LogCaptureFixture
) -> None:
    """And it, when it is free."""
    put(session, "acme", 2)
    put(session, "globex", 30)

    def body(message: Any, _: Any) -> None:
        if message.channel == "acme":
            other.execute(LOCK, [message.id])  # as a user may, who has just seen that it runs

    with worker_of(kind, body, concurrency=1, prefetch=3, poll=RARELY):
        wait_until(lambda: len(endings(session)) == 30)
        wait_until(lambda: caplog.text.count(SET_ASIDE) == 2)
        other.rollback()
        assert wait_for_endings(session, 32) == {"completed": 32}
    assert caplog.text.count(SET_ASIDE) == 2


def test_the_others_are_handed_back(
    session: Session, other: psycopg.Connection, worker_of: WorkerOf, caplog: pytest.LogCaptureFixture
) -> None:
    """When it stops: what runs, and what stands by, with no attempt used up."""
    (locked,) = put(session, "acme")
    put(session, "globex", 4)
    begun, go = threading.Event(), threading.Event()

    def body(message: Any, _: Any) -> None:
        if message.id == locked:
            other.execute(LOCK, [locked])
        else:
            begun.set()
            go.wait(30)

    try:
        with worker_of("plain", body, concurrency=1, prefetch=4, poll=RARELY, grace=0):
            assert begun.wait(30)
            wait_until(lambda: SET_ASIDE in caplog.text)
        ready = "SELECT channel, attempt - forgiven FROM fairqueue.message WHERE leased_until IS NULL"
        assert session.execute(text(ready)).all() == [("globex", 0)] * 4
        assert f"message {locked} of channel 'acme', attempt 1 could be neither finished nor handed back" in caplog.text
    finally:
        go.set()
        other.rollback()
