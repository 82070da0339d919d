"""One tenant enqueues 100,000 messages one by one while nobody dequeues; the others don't notice."""

from collections.abc import Callable

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import count, drain, expire, lease_of, put, sql, take
from tests.fixtures.connections import Raw
from tests.invariants import check_invariants

FLOOD = 100_000


def enqueue_one_by_one(connection: psycopg.Connection, messages: int) -> None:
    """A transaction, and so a signal, for each message."""
    connection.autocommit = True
    connection.execute("SET synchronous_commit = off")
    connection.execute("SET statement_timeout = 0")
    connection.execute(
        f"""
        DO $$ BEGIN
            FOR number IN 1 .. {messages} LOOP
                INSERT INTO fairqueue.message (channel) VALUES ('flood');
                COMMIT;
            END LOOP;
        END $$
        """.encode()
    )


@pytest.fixture
def other(raw: Raw, database_url: str) -> psycopg.Connection:
    return raw(database_url)


@pytest.fixture
def flood(other: psycopg.Connection) -> psycopg.Connection:
    enqueue_one_by_one(other, FLOOD)
    return other


@pytest.mark.slow
def test_a_flood_keeps_nobody_waiting(session: Session, flood: psycopg.Connection) -> None:
    """Each of 50 others is served among the first 100 messages, by single dequeues and by one of 100."""
    assert count(flood, "SELECT count(DISTINCT xid::text) FROM fairqueue.signal") == FLOOD
    quiet = {f"quiet{number}" for number in range(50)}
    for channel in sorted(quiet):
        put(session, channel)
    served = list(session.scalars(text("SELECT channel FROM fairqueue.message_dequeue('default', 100)")))
    assert quiet <= set(served)
    session.rollback()
    served = [channel for _ in range(100) for channel in take(session)]
    assert quiet <= set(served)
    assert len(served) == 100
    check_invariants(session.connection())


# What comes back in a flood has an old id, and nobody need know of it but by its own signal.


def fails(session: Session, message: fq.LeasedMessage) -> None:
    session.execute(fq.fail(message, "no", delay=0))


def is_deferred(session: Session, message: fq.LeasedMessage) -> None:
    session.execute(fq.defer(message, delay=0))


def runs_out(session: Session, message: fq.LeasedMessage) -> None:
    expire(session, [message.id])


def is_put_back_from_the_dead(session: Session, message: fq.LeasedMessage) -> None:
    session.execute(fq.fail(message, "no", retry=False))
    session.execute(fq.redrive(message.id))


def is_edited(session: Session, message: fq.LeasedMessage) -> None:
    session.execute(fq.defer(message, delay=3600))
    take(session)
    sql(session, "UPDATE fairqueue.message SET dequeue_at = 0 WHERE id = :id", id=message.id)


@pytest.mark.parametrize("comes_back", [fails, is_deferred, runs_out, is_put_back_from_the_dead, is_edited])
def test_what_comes_back_waits_behind_no_flood(
    session: Session, other: psycopg.Connection, comes_back: Callable[[Session, fq.LeasedMessage], None]
) -> None:
    """Each dequeue takes in some 70 of 2,000 signals."""
    put(session, "quiet")
    (message,) = lease_of(session)
    enqueue_one_by_one(other, 2000)
    comes_back(session, message)
    session.commit()
    assert "quiet" in [*take(session), *take(session), *take(session)]
    assert count(other, "SELECT count(*) FROM fairqueue.signal") > 1500
    check_invariants(session.connection())


def test_what_somebody_held_waits_behind_no_flood(
    session: Session, other: psycopg.Connection, raw: Raw, database_url: str
) -> None:
    user = raw(database_url)
    put(session, "quiet")
    enqueue_one_by_one(other, 2000)
    user.execute("SELECT FROM fairqueue.message WHERE channel = 'quiet' FOR UPDATE")
    assert [*take(session), *take(session), *take(session)] == ["flood"] * 3
    user.rollback()
    assert "quiet" in [*take(session), *take(session)]
    assert len(drain(session, 1000)) == 1996
    check_invariants(session.connection())
