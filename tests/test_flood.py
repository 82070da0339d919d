"""One tenant enqueues 100,000 messages one by one while nobody dequeues; the others don't notice."""

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from tests.acts import count, put, take
from tests.fixtures.connections import Raw
from tests.invariants import check_invariants

FLOOD = 100_000

# A transaction, and so a signal, for each message.
ENQUEUE_ONE_BY_ONE = f"""
DO $$
BEGIN
    FOR number IN 1 .. {FLOOD} LOOP
        INSERT INTO fairqueue.message (channel) VALUES ('flood');
        COMMIT;
    END LOOP;
END
$$
"""


@pytest.fixture
def flood(raw: Raw, database_url: str) -> psycopg.Connection:
    connection = raw(database_url)
    connection.autocommit = True
    connection.execute("SET synchronous_commit = off")
    connection.execute("SET statement_timeout = 0")
    connection.execute(ENQUEUE_ONE_BY_ONE.encode())
    return connection


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
