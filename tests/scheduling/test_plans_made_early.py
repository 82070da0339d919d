"""What a session reads that planned its statements while all tables were nearly empty, as a worker's does that was
started first of all: nothing tells it to plan anew before the tables have been analysed.
"""

from itertools import product

import pytest

from tests.fixtures.connections import Raw
from tests.observing import DRAWN, leases, value, without_autovacuum
from tests.watching import Connection, Statement, Watched

pytestmark = pytest.mark.slow

TABLES = ("message", "dead_message", "channel", "queue", "lane", "signal")


def way_of_messages(connection: Connection, watched: Watched) -> list[Statement]:
    """They are enqueued, served, given back, and die; and policies change."""
    statements = watched.run(
        "INSERT INTO fairqueue.message (channel) SELECT 'c' || g % 50 FROM generate_series(1, 300) AS g"
    )
    statements += watched.run("SELECT fairqueue.channel_set('c1', max_concurrency => 1, max_size => 1000)")
    statements += watched.run("SELECT fairqueue.channel_set('c2', max_size => 5, overflow => 'drop')")
    for limit, act in product((1, 10, 100), ("heartbeat", "complete", "fail", "defer", "cancel")):
        statements += watched.run("INSERT INTO fairqueue.message (channel) VALUES ('c2'), ('c3')")
        statements += watched.run(f"SELECT * FROM fairqueue.message_dequeue('default', {limit})")
        statements += watched.run(f"SELECT * FROM fairqueue.message_{act}(%s, %s)", *leases(connection, 20))
    dead, attempts = leases(connection, 20)
    statements += watched.run("SELECT * FROM fairqueue.message_fail(%s, %s, retry => false)", dead, attempts)
    statements += watched.run("SELECT * FROM fairqueue.message_redrive(%s)", dead)
    for _ in range(2):
        statements += watched.run(
            "SELECT * FROM fairqueue.message_create_many(ARRAY['default', 'default'], ARRAY['c1', 'c2'],"
            " ARRAY['k', 'k'], NULL, NULL, NULL, NULL, ARRAY[1, 1], NULL, NULL, 'replace')"
        )
    expired, _ = leases(connection, 20)
    connection.execute("UPDATE fairqueue.message SET leased_until = '2000-01-01' WHERE id = ANY (%s)", (expired,))
    return statements + watched.run("SELECT * FROM fairqueue.message_dequeue('default', 100)")


def test_who_came_first_reads_no_more(raw: Raw, database_url: str) -> None:
    connection = raw(database_url)
    connection.autocommit = True
    without_autovacuum(connection)
    watched = Watched(raw(database_url))
    for _ in range(2):
        way_of_messages(connection, watched)

    connection.execute("INSERT INTO fairqueue.channel (name) SELECT 'x' || g FROM generate_series(1, 20000) g")
    connection.execute("INSERT INTO fairqueue.queue (name) SELECT 'q' || g FROM generate_series(1, 20000) g")
    connection.execute(
        "INSERT INTO fairqueue.message (channel) SELECT 'x' || (1 + g % 20000) FROM generate_series(1, 40000) g"
    )
    while value(connection, "SELECT count(*) FROM fairqueue.signal"):  # News of all is in proportion to all.
        leases(connection, 1000)

    read = [
        (
            max(statement.rows_of(table) for table in TABLES),
            max(node["Actual Loops"] * node.get("Rows Removed by Join Filter", 0) for node in statement.nodes),
            statement.query[:200],
        )
        for statement in way_of_messages(connection, watched)
    ]
    assert not [(rows, joined, query) for rows, joined, query in read if max(rows, joined) > 2000]


def test_settling_reads_what_was_drawn(raw: Raw, database_url: str) -> None:
    """By its ids, though nothing says how many messages there are: not the backlog. And of what was missed, what this
    turn has, not the dead entries of those before.
    """
    connection, other, old = raw(database_url), raw(database_url), raw(database_url)
    connection.autocommit = True
    without_autovacuum(connection)
    old.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    value(old, "SELECT count(*) FROM fairqueue.missed")
    connection.execute("INSERT INTO fairqueue.missed SELECT 'default', 0, g FROM generate_series(1, 20000) g")
    connection.execute("DELETE FROM fairqueue.missed")
    connection.execute("VACUUM ANALYZE fairqueue.missed")
    connection.execute("INSERT INTO fairqueue.message (channel) SELECT 'c' || g % 20 FROM generate_series(1, 5000) g")
    watched = Watched(raw(database_url))
    dequeue = "SELECT * FROM fairqueue.message_dequeue('default', 3)"
    watched.run(dequeue)
    connection.execute("UPDATE fairqueue.rotation SET ahead = 512, plan_at = 0")
    for _ in range(5):  # The first of them plans.
        watched.run(dequeue)
    other.execute(dequeue.encode())
    other.rollback()
    watched.run(dequeue)
    connection.execute("UPDATE fairqueue.rotation SET clock = clock - 1001")
    connection.execute("ANALYZE fairqueue.plan")
    drawn, planned = value(connection, DRAWN), value(connection, "SELECT planned - place FROM fairqueue.rotation")
    assert 15 <= drawn < 100 < planned < 2000
    settling = [
        statement
        for statement in watched.run(dequeue)
        if "v_ids" in statement.query or "scheduler_planned" in statement.query or "m.attempt <= " in statement.query
    ]
    assert len(settling) >= 3
    scans = [node for statement in settling for node in statement.nodes if "Relation Name" in node]
    assert {node["Index Name"] for node in scans if node["Relation Name"] == "message"} == {"message_pkey"}
    missed = [node for node in scans if node["Relation Name"] == "missed"]
    assert missed
    assert all("turn" in node.get("Index Cond", "") for node in missed)
    (looked,) = [statement.rows_of("message") for statement in settling if "v_ids" in statement.query]
    assert 0 < looked <= drawn
    assert max(statement.rows_of("message") for statement in settling) <= planned
    old.rollback()


def test_a_check_reads_each_plan_once(raw: Raw, database_url: str) -> None:
    """Not those of all queues for each of them."""
    connection = raw(database_url)
    connection.autocommit = True
    without_autovacuum(connection)
    connection.execute(
        "INSERT INTO fairqueue.message (queue, channel)"
        " SELECT 'q' || g % 10, 'c' || g / 10 % 5 FROM generate_series(1, 10000) g"
    )
    for queue in range(10):
        for _ in range(2):
            value(connection, "SELECT count(*) FROM fairqueue.message_dequeue(%s, 3)", f"q{queue}")
            connection.execute("UPDATE fairqueue.rotation SET ahead = 512, plan_at = 0")
    plans = value(connection, "SELECT count(*) FROM fairqueue.plan")
    assert plans >= 100
    statements = Watched(raw(database_url)).run("SELECT fairqueue.queue_check()")
    assert sum(statement.rows_of("plan") for statement in statements) <= 2 * plans
