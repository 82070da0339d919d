"""Looking at what the server and its other sessions do, so that no test has to sleep and hope."""

from typing import Any

import psycopg

from tests.fixtures.connections import Raw

#: For how many messages of the plan there have been tickets since the last turn.
DRAWN = "SELECT coalesce(pg_sequence_last_value(tickets) - ticket_base, 0) FROM fairqueue.rotation"
RELATIONS = ("channel", "history", "lane", "message", "missed", "plan", "queue", "rotation", "signal")


def observer(raw: Raw, database_url: str) -> psycopg.Connection:
    """A connection that sees each moment anew."""
    connection = raw(database_url)
    connection.autocommit = True
    return connection


def impatient(raw: Raw, database_url: str) -> psycopg.Connection:
    """A connection to which waiting for a lock is an error, so that a test of waiting needs no clock."""
    connection = raw(database_url)
    connection.execute("SET lock_timeout = '1s'")
    connection.commit()
    return connection


def waits_for_a_lock(observer: psycopg.Connection, waiting: psycopg.Connection) -> bool:
    """Whether the statement that `waiting` runs in another thread is waiting for a lock."""
    query = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s"
    return bool(value(observer, query, waiting.info.backend_pid))


def value(connection: psycopg.Connection, query: str, *parameters: object) -> Any:
    """The one value that a query returns."""
    row = connection.execute(query.encode(), parameters or None).fetchone()
    assert row is not None
    return row[0]


def rows(connection: psycopg.Connection, schema: str = "fairqueue") -> dict[str, object]:
    """How many rows each table has, of those that have any."""
    counts = {table: value(connection, f'SELECT count(*) FROM "{schema}".{table}') for table in RELATIONS}
    return {table: count for table, count in counts.items() if count}


def without_autovacuum(connection: psycopg.Connection) -> None:
    """Which analyses, too, and makes sessions plan again: nothing to count on."""
    for table in {*RELATIONS, "dead_message"} - {"history"}:  # which has partitions
        connection.execute(f"ALTER TABLE fairqueue.{table} SET (autovacuum_enabled = off)".encode())


def leases(connection: psycopg.Connection, number: int) -> tuple[list[int], list[int]]:
    rows = connection.execute(
        "SELECT id, attempt FROM fairqueue.message_dequeue('default', %s, 3600)", (number,)
    ).fetchall()
    return [row[0] for row in rows], [row[1] for row in rows]


def buffers(connection: psycopg.Connection, limit: int) -> int:
    """The pages that a dequeue touches."""
    row = connection.execute(
        "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT * FROM fairqueue.message_dequeue('default', %s, 3600)", (limit,)
    ).fetchone()
    assert row is not None
    plan = row[0][0]["Plan"]
    return sum(plan[f"Shared {kind} Blocks"] for kind in ("Hit", "Read", "Dirtied"))
