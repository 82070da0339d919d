"""What the statements of a message's way cost, in rows and buffers: not in time, which depends on the machine.

auto_explain shows the plan of every statement that a function runs.
"""

from collections.abc import Iterator

import psycopg
import pytest
from pytest_postgresql.executors import NoopExecutor
from sqlalchemy import Engine, create_engine

from fairqueue.schema import install
from fairqueue.testing import Clock
from fairqueue.testing._databases import Databases
from tests.fixtures.connections import Raw
from tests.fixtures.databases import prepared
from tests.fixtures.postgres import libpq
from tests.observing import leases, value, without_autovacuum
from tests.watching import Connection, Statement, Watched

pytestmark = pytest.mark.slow

TABLES = {"message", "dead_message", "channel", "queue", "lane", "missed", "plan", "rotation", "signal"}
INDEXES = {
    "channel_pkey",
    "dead_message_pkey",
    "lane_idle",
    "lane_pkey",
    "lane_ready",
    "lane_waiting",
    "message_leased",
    "message_key",
    "message_pkey",
    "message_ready",
    "plan_pkey",
    "queue_pkey",
    "queue_without_history",
    "rotation_pkey",
    "signal_news",
}


def load(engine: Engine) -> None:
    """200,000 messages in 20,000 channels, just loaded, never analysed."""
    with psycopg.connect(libpq(engine.url.render_as_string(hide_password=False)), autocommit=True) as connection:
        without_autovacuum(connection)
        connection.execute("INSERT INTO fairqueue.channel (name) SELECT 'c' || g FROM generate_series(1, 20000) g")
        leases(connection, 1)  # Takes in all changes of policies, whatever their number.
        connection.execute(
            "INSERT INTO fairqueue.message (channel) SELECT 'c' || (1 + g % 20000) FROM generate_series(1, 200000) g"
        )


@pytest.fixture(scope="module")
def load_once(databases: Databases, template: NoopExecutor) -> Iterator[str]:
    """A database to be cloned, with all of it."""
    with prepared(databases, template, load) as name:
        yield name


@pytest.fixture
def loaded_url(databases: Databases, load_once: str) -> Iterator[str]:
    with databases.create(load_once) as url:
        yield url


@pytest.fixture
def loaded(raw: Raw, loaded_url: str) -> Connection:
    connection = raw(loaded_url)
    connection.autocommit = True
    return connection


@pytest.fixture
def watched(raw: Raw, loaded_url: str) -> Watched:
    return Watched(raw(loaded_url))


def small_queue(url: str, connection: Connection, watched: Watched) -> list[Statement]:
    """Time passes in a queue beside: lanes wake, and idle ones are forgotten."""
    connection.execute(
        "INSERT INTO fairqueue.message (queue, channel) SELECT 'small', 'a' FROM generate_series(1, 130)"
    )
    connection.execute(
        "INSERT INTO fairqueue.message (queue, channel, dequeue_at)"
        " VALUES ('small', 'b', fairqueue.unix_ms(fairqueue.clock()) + 60000)"
    )
    dequeue = "SELECT * FROM fairqueue.message_dequeue('small', 1, 3600)"
    statements = watched.run(dequeue)
    due = "SELECT due FROM fairqueue.lane WHERE queue = 'small' AND due > 0"
    assert value(connection, f"SELECT ({due}) > fairqueue.unix_ms(fairqueue.clock())")
    engine = create_engine(url)
    with Clock(engine) as clock:
        clock.tick(60)
        for _ in range(130):
            statements += watched.run(dequeue)
    engine.dispose()
    return statements


def planning(connection: Connection, watched: Watched) -> list[Statement]:
    """A plan is made, served from, and taken back: for a message that is gone, and for one that comes first."""
    connection.execute(
        "INSERT INTO fairqueue.message (queue, channel, dequeue_at)"
        " SELECT 'planned', 'c' || g % 20, g FROM generate_series(1, 5000) g"
    )
    dequeue = "SELECT * FROM fairqueue.message_dequeue('planned')"
    statements = watched.run(dequeue)
    for change in (
        "DELETE FROM fairqueue.message WHERE id = (SELECT ids[5] FROM fairqueue.plan ORDER BY place LIMIT 1)",
        "INSERT INTO fairqueue.message (queue, channel, dequeue_at) VALUES ('planned', 'c7', -1)",
    ):
        connection.execute("UPDATE fairqueue.rotation SET ahead = 512, plan_at = 0 WHERE queue = 'planned'")
        statements += watched.run(dequeue)
        assert value(connection, "SELECT count(*) FROM fairqueue.plan") > 10
        connection.execute(change.encode())
        for _ in range(5):
            statements += watched.run(dequeue)
        assert value(connection, "SELECT count(*) FROM fairqueue.plan") == 0
    # Where the next messages stand is guessed from those before: they are found without a second look.
    looks = [
        [node["Actual Loops"] for node in statement.nodes if node.get("Index Name") == "message_ready"]
        for statement in statements
        if "FROM worthwhile" in statement.query
    ]
    assert looks == [[20, 20], [20, 0], [20, 0]]
    for table, rows in {"message": 4 * 512, "lane": 4 * 20}.items():
        assert max(statement.rows_of(table) for statement in statements) <= rows
    return statements


def planning_heads(connection: Connection, watched: Watched) -> list[Statement]:
    """Of 20,000 channels: each of those that come next is looked at once."""
    connection.execute("UPDATE fairqueue.rotation SET ahead = 512, plan_at = 0 WHERE queue = 'default'")
    statements = watched.run("SELECT * FROM fairqueue.message_dequeue()")
    assert value(connection, "SELECT sum(cardinality(ids)) FROM fairqueue.plan WHERE queue = 'default'") == 512
    (plan,) = [statement for statement in statements if "scheduler_plan_write" in statement.query]
    assert plan.rows_of("message") <= 2 * 512
    assert plan.rows_of("lane") <= 2 * 512
    return statements


def test_no_statement_scans_a_table(loaded: Connection, loaded_url: str, watched: Watched) -> None:
    statements = watched.run("INSERT INTO fairqueue.message (channel) VALUES ('c1'), ('c2')")
    statements += watched.run("UPDATE fairqueue.channel SET weight = 2 WHERE queue = 'default' AND name = 'c3'")
    statements += watched.run("SELECT fairqueue.channel_set('c1', max_concurrency => 1, max_size => 1000)")
    for _ in range(2):
        statements += watched.run("SELECT fairqueue.message_create('c1', '{}', key => 'k', on_conflict => 'ignore')")
    statements += watched.run("SELECT fairqueue.message_create('c1', '{}', delay_seconds => 0.01)")
    for limit in (1, 100):
        for act in ("complete", "fail", "defer", "heartbeat"):
            for _ in range(10):  # Folds, sweeps, tidies.
                statements += watched.run(f"SELECT * FROM fairqueue.message_dequeue('default', {limit})")
            ids, attempts = leases(loaded, 20)
            statements += watched.run(f"SELECT * FROM fairqueue.message_{act}(%s, %s)", ids, attempts)
    statements += watched.run("SELECT * FROM fairqueue.message_cancel(%s)", leases(loaded, 20)[0])
    # Reclaims; wakes.
    expired, _ = leases(loaded, 50)
    loaded.execute("UPDATE fairqueue.message SET leased_until = '2000-01-01' WHERE id = ANY (%s)", (expired,))
    statements += watched.run("SELECT * FROM fairqueue.message_dequeue('default', 100)")
    # Dies; is put back.
    dead, attempts = leases(loaded, 20)
    statements += watched.run("SELECT * FROM fairqueue.message_fail(%s, %s, retry => false)", dead, attempts)
    statements += watched.run("SELECT * FROM fairqueue.message_redrive(%s)", dead)
    statements += planning_heads(loaded, watched)
    # A limit on what runs.
    busy = loaded.execute("SELECT max(channel) FROM fairqueue.message WHERE leased_until IS NOT NULL").fetchone()
    statements += watched.run("SELECT fairqueue.channel_set(%s, max_concurrency => 1)", *busy or ())
    statements += watched.run("SELECT * FROM fairqueue.message_dequeue('default', 100)")
    statements += small_queue(loaded_url, loaded, watched)
    statements += planning(loaded, watched)

    scans = [
        (node["Relation Name"], statement.query[:200])
        for statement in statements
        for node in statement.nodes
        if node["Node Type"] == "Seq Scan" and node.get("Relation Name") in TABLES
        if "nullif(q.history_days" not in statement.query  # Once a day, of all queues.
    ]
    assert not scans
    used = {node["Index Name"] for statement in statements for node in statement.nodes if "Index Name" in node}
    assert used >= INDEXES, "the test has missed a statement"


def rows_read(watched: Watched, limit: int, queue: str = "default") -> dict[str, int]:
    statements = watched.run(f"SELECT * FROM fairqueue.message_dequeue('{queue}', {limit})")
    return {table: sum(statement.rows_of(table) for statement in statements) for table in TABLES}


def test_a_dequeue_reads_in_proportion_to_what_it_serves(loaded: Connection, watched: Watched) -> None:
    """With 200,000 messages in 20,000 channels waiting, and the news of them."""
    for limit in (1, 10, 100):
        for _ in range(5):
            rows = rows_read(watched, limit)
            assert max(rows.values()) <= 20 * (16 + limit), rows


def test_most_turns_leave_no_entry_in_an_index(raw: Raw, database_url: str) -> None:
    """Which the next ones would read, to find the last one: of all that a page has, and some for each message."""
    connection = raw(database_url)
    without_autovacuum(connection)
    connection.execute("INSERT INTO fairqueue.message (channel) SELECT 'c' || g FROM generate_series(1, 200) g")
    connection.commit()
    updates = (
        b"SELECT n_tup_upd, n_tup_upd - n_tup_hot_upd FROM pg_stat_xact_user_tables"
        b" WHERE schemaname = 'fairqueue' AND relname = 'rotation'"
    )
    turns = entries = 0
    for _ in range(150):
        # In one transaction, as it isn't said when the server begins to count anew.
        before = connection.execute(updates).fetchone() or (0, 0)
        leases(connection, 1)
        after = connection.execute(updates).fetchone() or (0, 0)
        turns += after[0] - before[0]
        entries += after[1] - before[1]
        connection.commit()
    assert turns >= 150
    assert entries < 30
    # Some do: under an old snapshot, others would have to look through all that were before.
    assert value(connection, "SELECT era FROM fairqueue.rotation") >= 2


def test_channels_at_their_limits_cost_a_dequeue_nothing(raw: Raw, database_url: str) -> None:
    """2,100 that are at their max_concurrency, ahead of their rate, or waiting for their hour, beside 100 others."""
    connection = raw(database_url)
    connection.autocommit = True
    without_autovacuum(connection)
    crowd(connection, "capped", 700, "max_concurrency => 1")
    crowd(connection, "rated", 700, "release_interval_ms => 36000000")
    crowd(connection, "later", 700, delay=36_000_000)
    leases(connection, 10000)
    assert value(connection, "SELECT count(*) FROM fairqueue.lane WHERE due > 0") == 2100
    crowd(connection, "free", 100, messages=100)
    crowd(connection, "free", 100, messages=100, queue="alone")

    watched = Watched(raw(database_url))
    for limit in (1, 100):
        for queue in ("default", "alone"):
            for _ in range(5):  # The news is taken in.
                rows_read(watched, limit, queue)
        assert rows_read(watched, limit, "default") == rows_read(watched, limit, "alone")


def crowd(
    connection: Connection,
    name: str,
    channels: int,
    limit: str = "",
    *,
    messages: int = 2,
    delay: int = 0,
    queue: str = "default",
) -> None:
    if limit:
        connection.execute(
            f"SELECT fairqueue.channel_set(%s || g, {limit}) FROM generate_series(1, %s) g".encode(), (name, channels)
        )
    connection.execute(
        "INSERT INTO fairqueue.message (queue, channel, dequeue_at)"
        " SELECT %s, %s || c, fairqueue.unix_ms(statement_timestamp()) + %s"
        " FROM generate_series(1, %s) m, generate_series(1, %s) c",
        (queue, name, delay, messages, channels),
    )


def test_unequal_costs_don_t_make_a_dequeue_read_more(raw: Raw, database_url: str) -> None:
    """A tenant that is far ahead of the others doesn't make each of these offer a whole batch."""
    connection = raw(database_url)
    connection.autocommit = True
    connection.execute("INSERT INTO fairqueue.message (channel, cost) VALUES ('large', 1000), ('large', 1000)")
    connection.execute(
        "INSERT INTO fairqueue.message (channel) SELECT 'c' || (1 + g % 98) FROM generate_series(1, 98 * 300) g"
    )
    watched = Watched(raw(database_url))
    rows_read(watched, 100)
    for _ in range(3):
        assert max(rows_read(watched, 100).values()) <= 20 * (16 + 100)


def test_cancelled_channels_don_t_take_a_round_each(loaded: Connection) -> None:
    """After a TRUNCATE, or when a whole backlog is cancelled, lanes are found empty many at a time."""
    for _ in range(10):
        leases(loaded, 1000)
    loaded.execute("TRUNCATE fairqueue.message")
    before = value(loaded, "SELECT turn FROM fairqueue.rotation")
    assert leases(loaded, 1) == ([], [])
    assert value(loaded, "SELECT turn FROM fairqueue.rotation") - before < 1000


def seen_nearly_empty(connection: Connection, left: int) -> None:
    """20,000 messages of 1,000 channels, in a table that was analysed when there were so few."""
    connection.autocommit = True
    without_autovacuum(connection)
    fill = "INSERT INTO fairqueue.message (channel) SELECT 'c' || g % 1000 FROM generate_series(1, 20000) g"
    connection.execute(fill.encode())
    for number in range(left):
        connection.execute(
            "INSERT INTO fairqueue.message (channel, dequeue_at)"
            " VALUES (%s, fairqueue.unix_ms(fairqueue.clock()) + 86400000)",
            (f"later{number}",),
        )
    connection.execute("DELETE FROM fairqueue.message WHERE channel NOT LIKE 'later%'")
    while value(connection, "SELECT count(*) FROM fairqueue.signal"):
        leases(connection, 10000)
    connection.execute("VACUUM (ANALYZE) fairqueue.message")
    connection.execute(fill.encode())


@pytest.mark.parametrize("left", [1, 2])
def test_who_saw_the_table_nearly_empty_reads_no_more(left: int, raw: Raw, database_url: str) -> None:
    """Analysed in a quiet hour, it seems to be cheap to read as a whole, when a load has just come."""
    connection = raw(database_url)
    seen_nearly_empty(connection, left)
    connection.execute("SELECT fairqueue.channel_set('small', max_size => 5, overflow => 'drop')")

    watched = Watched(raw(database_url))
    statements = []
    for limit in (1, 10, 100):
        for _ in range(3):
            statements += watched.run(f"SELECT * FROM fairqueue.message_dequeue('default', {limit})")
    for act in ("heartbeat", "complete", "fail", "defer", "cancel"):
        statements += watched.run(f"SELECT * FROM fairqueue.message_{act}(%s, %s)", *leases(connection, 20))
    dead, attempts = leases(connection, 20)
    statements += watched.run("SELECT * FROM fairqueue.message_fail(%s, %s, retry => false)", dead, attempts)
    statements += watched.run("SELECT * FROM fairqueue.message_redrive(%s)", dead)
    ready = connection.execute("SELECT id FROM fairqueue.message WHERE leased_until IS NULL LIMIT 20").fetchall()
    statements += watched.run("SELECT * FROM fairqueue.message_cancel(%s)", [id_ for (id_,) in ready])
    statements += watched.run("INSERT INTO fairqueue.message (channel) SELECT 'small' FROM generate_series(1, 20)")
    for _ in range(2):
        statements += watched.run("SELECT fairqueue.message_create('c1', '{}', key => 'k', on_conflict => 'replace')")
        statements += watched.run(
            "SELECT * FROM fairqueue.message_create_many(ARRAY['default', 'default'], ARRAY['c1', 'c2'],"
            " ARRAY['k', 'k'], NULL, NULL, NULL, NULL, ARRAY[1, 1], NULL, NULL, 'replace')"
        )
    expired, _ = leases(connection, 20)
    connection.execute("UPDATE fairqueue.message SET leased_until = '2000-01-01' WHERE id = ANY (%s)", (expired,))
    statements += watched.run("SELECT * FROM fairqueue.message_dequeue('default', 100)")
    read = [(statement.rows_of("message"), statement.query[:200]) for statement in statements]
    assert not [(rows, query) for rows, query in read if rows > 2000]


def test_nor_does_who_serves_a_plan(raw: Raw, database_url: str) -> None:
    """In batches so large that they are served in turn; the indexes were large once, and the plan seems to be long."""
    connection = raw(database_url)
    seen_nearly_empty(connection, 1)
    for names, pages, rows in (("message, message_pkey, message_ready", 5000, 1), ("plan", 1, 100_000)):
        connection.execute(
            "UPDATE pg_class SET relpages = %s, reltuples = %s"
            " WHERE relnamespace = 'fairqueue'::regnamespace AND relname = ANY (string_to_array(%s, ', '))",
            (pages, rows, names),
        )
    watched = Watched(raw(database_url))
    statements = []
    while not value(connection, "SELECT count(*) FROM fairqueue.plan"):
        statements += watched.run("SELECT * FROM fairqueue.message_dequeue('default', 100)")
    for _ in range(3):
        statements += watched.run("SELECT * FROM fairqueue.message_dequeue('default', 1000)")
    assert any("WITH next AS" in statement.query for statement in statements)
    read = [(statement.rows_of("message"), statement.query[:200]) for statement in statements]
    assert not [(rows, query) for rows, query in read if rows > 15_000]


def test_a_check_looks_at_each_channel_once(raw: Raw, empty: Engine, empty_database_url: str) -> None:
    """While its signals wait, and when they are lanes; also in a session that has checked often, and keeps a plan."""
    with empty.begin() as begun:
        install(begun)  # all other tests' databases have a queue_check that is planned once
    connection = raw(empty_database_url)
    connection.autocommit = True
    without_autovacuum(connection)
    connection.execute(
        "INSERT INTO fairqueue.message (channel) SELECT 'c' || g FROM generate_series(1, 500) g, generate_series(1, 40)"
    )
    those_who_check = {queue: Watched(raw(empty_database_url)) for queue in ("", "'default'")}
    for _ in range(2):
        for queue, watched in those_who_check.items():
            runs = [watched.run(f"SELECT * FROM fairqueue.queue_check({queue})") for _ in range(6)]
            (check,) = [statement for statement in runs[-1] if "WITH RECURSIVE" in statement.query]
            in_vain = [node["Actual Loops"] * node.get("Rows Removed by Join Filter", 0) for node in check.nodes]
            pages = sum(check.nodes[0][f"Shared {kind} Blocks"] for kind in ("Hit", "Read"))
            assert sum(in_vain) <= 5000
            assert pages <= 10_000
        while value(connection, "SELECT count(*) FROM fairqueue.signal"):
            leases(connection, 10)


def test_a_check_of_many_queues_looks_at_each_once(raw: Raw, empty: Engine, empty_database_url: str) -> None:
    """However many there are, with limits and arrivals: no table is compared with each row of another one."""
    with empty.begin() as begun:
        install(begun)  # as above
    connection = raw(empty_database_url)
    connection.autocommit = True
    without_autovacuum(connection)
    connection.execute(
        "INSERT INTO fairqueue.message (queue, channel)"
        " SELECT 'q' || g, 'c' || c FROM generate_series(1, 100) g, generate_series(1, 10) c"
    )
    connection.execute(
        "SELECT count(*) FROM generate_series(1, 100) g CROSS JOIN LATERAL fairqueue.message_dequeue('q' || g, 1)"
    )
    assert value(connection, "SELECT count(*) FROM fairqueue.lane") == 1000
    connection.execute("UPDATE fairqueue.rotation SET max_concurrency = 5, arrival_tag = 100")
    statements = Watched(raw(empty_database_url)).run("SELECT * FROM fairqueue.queue_check()")
    (check,) = [statement for statement in statements if "WITH RECURSIVE" in statement.query]
    in_vain = [
        node["Actual Loops"] * (node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Join Filter", 0))
        for node in check.nodes
    ]
    assert sum(in_vain) <= 20_000
