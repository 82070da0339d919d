"""Of ever so much that has to be gone through before anything can be served, one dequeue does a part, and leaves the
rest to the next: whoever waits for the turn doesn't wait for long, and a statement_timeout doesn't undo it for ever.
"""

from itertools import pairwise

import psycopg
import pytest

from tests.fixtures.connections import Raw
from tests.observing import leases, value, without_autovacuum
from tests.watching import Connection

pytestmark = pytest.mark.slow


@pytest.fixture
def connection(raw: Raw, database_url: str) -> Connection:
    connection = raw(database_url)
    connection.autocommit = True
    without_autovacuum(connection)
    return connection


def parts(connection: psycopg.Connection, left: str) -> list[int]:
    """Dequeue until a message comes: how much was left after each that came to nothing. Workers come again at once."""
    found = []
    while not leases(connection, 1)[0]:
        found.append(value(connection, left))
        assert value(connection, "SELECT fairqueue.queue_due()") < 0
        assert len(found) < 10
    return found


def falls(numbers: list[int]) -> bool:
    return len(numbers) > 1 and all(a > b for a, b in pairwise(numbers))


def test_policies(connection: Connection) -> None:
    """They hold before anything is served."""
    connection.execute("INSERT INTO fairqueue.message (channel) VALUES ('c110000'), ('x')")
    connection.execute(
        "INSERT INTO fairqueue.channel (name, paused) SELECT 'c' || g, true FROM generate_series(1, 110000) g"
    )
    left = "SELECT count(*) FROM fairqueue.signal"
    assert falls([value(connection, left), *parts(connection, left)])
    assert value(connection, "SELECT channel FROM fairqueue.message WHERE leased_until IS NOT NULL") == "x"


def test_leases_that_ran_out(connection: Connection) -> None:
    """All of them have to wait before they are tried again."""
    connection.execute(
        "INSERT INTO fairqueue.message (channel, attempt, leased_until, backoff)"
        " SELECT 'c' || g % 100, 3, '2000-01-01', 3600 FROM generate_series(1, 60000) g"
    )
    counts = []
    left = "SELECT count(*) FROM fairqueue.message WHERE leased_until IS NOT NULL"
    while value(connection, left):
        assert leases(connection, 1) == ([], [])
        counts.append(value(connection, left))
    assert falls([60000, *counts])
    assert 1 < len(counts) < 10
    waiting = "SELECT count(*) FROM fairqueue.message WHERE dequeue_at > fairqueue.unix_ms(fairqueue.clock())"
    assert value(connection, waiting) == 60000


def test_channels_that_turn_out_to_be_empty(connection: Connection) -> None:
    connection.execute("INSERT INTO fairqueue.message (channel) SELECT 'c' || g FROM generate_series(1, 100000) g")
    while value(connection, "SELECT count(*) FROM fairqueue.signal"):
        connection.execute("SELECT count(*) FROM fairqueue.message_dequeue('default', 5000)")
    # But for the lane that comes last; which one that is differs between versions of PostgreSQL.
    connection.execute(
        "DELETE FROM fairqueue.message WHERE leased_until IS NOT NULL OR channel <> ("
        " SELECT channel FROM fairqueue.lane WHERE due = 0 ORDER BY tag DESC, since DESC LIMIT 1)"
    )
    left = "SELECT count(*) FROM fairqueue.lane WHERE due = 0"
    assert falls([value(connection, left), *parts(connection, left)])


def test_lanes_that_are_derived_anew(connection: Connection) -> None:
    """What is said of all channels holds for each before anything is served."""
    connection.execute("INSERT INTO fairqueue.message (channel) SELECT 'c' || g FROM generate_series(1, 12000) g")
    while value(connection, "SELECT count(*) FROM fairqueue.signal"):
        connection.execute("SELECT count(*) FROM fairqueue.message_dequeue('default', 5000)")
    connection.execute("SELECT fairqueue.queue_set('default', channel_weight => 2)")
    left = "SELECT count(*) FROM fairqueue.lane WHERE weight <> 2"
    found = parts(connection, left)
    assert len(found) == 2
    assert falls([value(connection, "SELECT count(*) FROM fairqueue.lane"), *found, value(connection, left)])
    assert value(connection, left) == 0
    assert value(connection, "SELECT rebuilt FROM fairqueue.rotation") is None
