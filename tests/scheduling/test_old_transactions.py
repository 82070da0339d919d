"""An old transaction keeps all that was served since it began: index scans begin beyond it, so nothing gets slower.

In pages that are touched, not in time, which depends on the machine.
"""

import psycopg
import pytest
from psycopg.rows import TupleRow

from tests.acts import one_by_one, wait_until
from tests.fixtures.connections import Raw
from tests.observing import DRAWN, buffers, leases, value, without_autovacuum

pytestmark = pytest.mark.slow

Connection = psycopg.Connection[TupleRow]

PASSING = "INSERT INTO fairqueue.message (channel, dequeue_at) SELECT 'c' || g %% %s, -1 FROM generate_series(1, %s) g"


def pass_through(connection: Connection, channels: int, messages: int) -> None:
    """Have so many messages enqueued, served and completed; nothing is left of them."""
    connection.execute(PASSING, (channels, messages))
    while (batch := leases(connection, 1000))[0]:
        connection.execute("SELECT * FROM fairqueue.message_complete(%s, %s)", batch)


def least(connection: Connection, limit: int) -> int:
    """Of five dequeues: without those that do what is done now and then."""
    return min(buffers(connection, limit) for _ in range(5))


@pytest.mark.parametrize(
    "begin",
    ["BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1", "BEGIN; SELECT pg_current_xact_id()"],
    ids=["old snapshot", "forgotten transaction"],
)
def test_an_old_transaction_slows_nothing_down(raw: Raw, database_url: str, begin: str) -> None:
    """While nothing can be vacuumed, 20,000 messages pass, and a dequeue touches hardly more pages."""
    old, connection = raw(database_url), raw(database_url)
    old.autocommit = connection.autocommit = True
    without_autovacuum(connection)
    enqueue = (
        "INSERT INTO fairqueue.message (channel, dequeue_at) SELECT 'c' || g %% 50, -1 FROM generate_series(1, %s) g"
    )
    connection.execute(enqueue, (5000,))
    for _ in range(5):
        leases(connection, 100)
    old.execute(begin.encode())
    start = {limit: least(connection, limit) for limit in (1, 20)}
    for _ in range(100):
        connection.execute(enqueue, (200,))
        for _ in range(2):
            ids, attempts = leases(connection, 100)
            connection.execute("SELECT * FROM fairqueue.message_complete(%s, %s)", (ids, attempts))
    # What is planned has left a dead entry, and its row, for each of the 50 lanes.
    for limit, pages in start.items():
        assert least(connection, limit) <= 1.5 * pages + 100
    old.execute("COMMIT")


def test_nor_where_nothing_is_planned(raw: Raw, database_url: str) -> None:
    """Each dequeue takes several messages of each lane, and writes it."""
    old, connection = raw(database_url), raw(database_url)
    connection.autocommit = True
    without_autovacuum(connection)
    connection.execute("SELECT fairqueue.queue_set('default', channel_max_concurrency => 1000)")
    pass_through(connection, 20, 1000)
    connection.execute(PASSING, (20, 1000))
    old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    old.execute("SELECT 1")
    start = least(connection, 100)
    for _ in range(200):
        connection.execute(PASSING, (20, 100))
        connection.execute("SELECT * FROM fairqueue.message_complete(%s, %s)", leases(connection, 100))
    assert least(connection, 100) <= 1.5 * start + 100
    assert value(connection, "SELECT count(*) FROM fairqueue.plan") == 0


def test_a_lease_that_is_held_slows_nothing_down(raw: Raw, database_url: str) -> None:
    """It ran out while an open transaction has completed it. Now and then a dequeue looks, but not each of them."""
    old, connection = raw(database_url), raw(database_url)
    connection.autocommit = True
    without_autovacuum(connection)
    connection.execute(PASSING, (50, 1000))
    held = connection.execute("SELECT id, attempt FROM fairqueue.message_dequeue(lease_seconds => 0.001)").fetchone()
    assert held is not None
    old.execute("SELECT * FROM fairqueue.message_complete(ARRAY[%s::bigint], ARRAY[%s])", held)
    for _ in range(5):
        leases(connection, 100)
    for _ in range(100):
        connection.execute(PASSING, (50, 200))
        for _ in range(2):
            ids, attempts = leases(connection, 100)
            connection.execute("SELECT * FROM fairqueue.message_complete(%s, %s)", (ids, attempts))
    # They are 34, before PostgreSQL 17 83; if each dequeue looked, 110 and 210, and more with each message that passes.
    assert least(connection, 1) <= 95
    old.rollback()
    wait_until(lambda: leases(connection, 1)[0] == [held[0]])


def plan_buffers(connection: Connection) -> list[int]:
    """The pages touched to make a plan, to take the first message of it and the 62nd, and to take it back."""
    planned = "SELECT count(*) FROM fairqueue.plan p JOIN fairqueue.rotation r ON p.place > r.place - 32"
    connection.execute("SELECT fairqueue.scheduler_unplan('default')")
    connection.execute(
        "UPDATE fairqueue.rotation SET turn = turn / 64 * 64 + 65, era = fairqueue.rotation_era(turn / 64 * 64 + 65),"
        " planned = place, ahead = 512, plan_at = 0"
    )
    touched = [buffers(connection, 1)]
    assert value(connection, planned) == 16
    touched.append(buffers(connection, 1))
    for _ in range(60):
        leases(connection, 1)
    touched.append(buffers(connection, 1))
    assert value(connection, DRAWN) == 62
    connection.execute("INSERT INTO fairqueue.message (channel, dequeue_at) VALUES ('c7', -2)")
    touched.append(buffers(connection, 1))
    assert value(connection, planned) == 0
    return touched


@pytest.mark.usefixtures("clock_that_stands")
def test_an_old_transaction_slows_no_plan_down(raw: Raw, database_url: str) -> None:
    """While 5,000 messages pass through plans that are given up half-way, after as many."""
    old, connection = raw(database_url), raw(database_url)
    old.autocommit = connection.autocommit = True
    without_autovacuum(connection)
    connection.execute(
        "INSERT INTO fairqueue.message (channel, dequeue_at) SELECT 'c' || g % 50, -1 FROM generate_series(1, 15000) g"
    )
    leases(connection, 1)
    old.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
    touched: list[list[int]] = []
    for _ in range(2):
        for _ in range(20):
            connection.execute("UPDATE fairqueue.rotation SET ahead = 512, plan_at = 0")
            for _ in range(25):
                leases(connection, 10)
            connection.execute("INSERT INTO fairqueue.message (channel, dequeue_at) VALUES ('c7', -2)")
        touched.append(plan_buffers(connection))
    for before, after in zip(*touched, strict=True):
        assert after <= 1.5 * before, touched
    # Each planned message is looked at once more, by its id, when the plan is taken back.
    assert max(max(pages) for pages in touched) < 512 * 8, touched
    old.execute("COMMIT")


NEWS = """
DO $$ BEGIN
    FOR n IN 1..3000 LOOP
        INSERT INTO fairqueue.message (channel) VALUES ('c1');
        COMMIT;
        PERFORM fairqueue.channel_set('c1', weight => 1 + n % 2);
        COMMIT;
    END LOOP;
END $$
"""


@pytest.mark.usefixtures("clock_that_stands")
def test_who_takes_from_a_plan_looks_at_no_news_that_was_read(raw: Raw, database_url: str) -> None:
    """Of 6,000 transactions, all read; nor does a session that prepares its statements when vacuum has counted none."""
    old, connection, fresh = raw(database_url), raw(database_url), raw(database_url)
    old.autocommit = connection.autocommit = fresh.autocommit = True
    without_autovacuum(connection)
    connection.execute(PASSING, (50, 5000))
    leases(connection, 1)
    old.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
    connection.execute(NEWS)
    while value(connection, "SELECT count(*) FROM fairqueue.signal"):
        leases(connection, 100)
    connection.execute("VACUUM fairqueue.signal")
    leases(fresh, 1)
    before = value(connection, DRAWN)
    # They are 30; if it walked over all that was read, as PostgreSQL 14 to 16 might, 250.
    assert buffers(fresh, 1) < 100
    assert value(connection, DRAWN) == before + 1


def test_an_old_transaction_slows_no_news_down(raw: Raw, database_url: str) -> None:
    """Nor when more comes than is read in one go, while 36,000 messages of 300 channels pass."""
    old, connection = raw(database_url), raw(database_url)
    old.autocommit = connection.autocommit = True
    without_autovacuum(connection)
    connection.execute(PASSING, (300, 6000))
    leases(connection, 10)
    old.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
    touched = []
    for _ in range(12):
        connection.execute(PASSING, (300, 3000))
        touched.append(buffers(connection, 10))
        for _ in range(30):
            ids, attempts = leases(connection, 100)
            connection.execute("SELECT * FROM fairqueue.message_complete(%s, %s)", (ids, attempts))
    assert max(touched[-3:]) <= 2 * max(touched[:3]), touched
    old.execute("COMMIT")


@pytest.fixture
def drained(raw: Raw, database_url: str) -> Connection:
    """8,000 messages of 50 channels have passed, and an old transaction keeps the entries of all of them."""
    old, connection = raw(database_url), raw(database_url)
    connection.autocommit = True
    without_autovacuum(connection)
    pass_through(connection, 50, 500)
    old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    old.execute("SELECT 1")
    pass_through(connection, 50, 8000)
    return connection


def test_a_flood_looks_at_nothing_that_was_served(drained: Connection) -> None:
    """More signals than one call folds, so that it looks for the news of others: among what is new."""
    drained.execute(one_by_one(1000, "flood").encode())
    drained.execute("INSERT INTO fairqueue.message (channel) VALUES ('c7')")
    # They are 700; if it looked at each that was served, 5,000 more.
    assert buffers(drained, 1) < 3000
    assert value(drained, "SELECT count(*) FROM fairqueue.lane WHERE channel = 'c7' AND due = 0") == 1
    assert value(drained, "SELECT count(*) FROM fairqueue.signal WHERE channel = 'c7'") == 1


def test_no_turn_looks_at_what_was_served(drained: Connection) -> None:
    """Whatever is done now and then, in the turns of which it is done."""
    for turn in range(1024, 2080, 32):
        drained.execute("UPDATE fairqueue.rotation SET turn = %s, era = fairqueue.rotation_era(%s)", [2**20 + turn] * 2)
        assert buffers(drained, 1) < 3000


def test_a_new_policy_of_the_queue_looks_at_nothing_that_was_served(drained: Connection) -> None:
    """It is taken over by all lanes, from where they stand."""
    drained.execute(
        "INSERT INTO fairqueue.message (channel, dequeue_at) SELECT 'c' || g, -1 FROM generate_series(1, 5) g"
    )
    # As it is once the leases of those that were served would have ended.
    drained.execute("UPDATE fairqueue.rotation SET lease_floor = 'infinity'")
    leases(drained, 1)
    drained.execute("SELECT fairqueue.queue_set('default', channel_weight => 2)")
    assert buffers(drained, 1) < 3000
    assert value(drained, "SELECT count(*) FROM fairqueue.lane WHERE weight = 2") == 50


def test_an_open_transaction_s_own_news_cost_others_nothing(raw: Raw, database_url: str) -> None:
    """It has enqueued 20,000 messages one by one, and told of none yet."""
    busy, connection = raw(database_url), raw(database_url)
    connection.autocommit = True
    without_autovacuum(connection)
    pass_through(connection, 50, 500)
    start = least(connection, 1)
    busy.execute(one_by_one(20000, "busy").encode())
    pass_through(connection, 50, 500)
    assert least(connection, 1) <= 1.5 * start + 100
    busy.commit()
    assert len(leases(connection, 10)[0]) == 10


def test_an_open_transaction_s_own_news_cost_others_little_without_other_news(raw: Raw, database_url: str) -> None:
    """Who began after all that is known is found by 64 turns later, and awaited by itself from the next time on."""
    busy, connection = raw(database_url), raw(database_url)
    connection.autocommit = True
    without_autovacuum(connection)
    connection.execute(PASSING, (50, 500))
    start = least(connection, 1)
    busy.execute(one_by_one(20000, "busy").encode())
    for _ in range(128):
        leases(connection, 1)
    assert least(connection, 1) <= 1.5 * start + 100
    busy.commit()
    assert len(leases(connection, 10)[0]) == 10


def test_a_flood_among_many_ready_channels(raw: Raw, database_url: str) -> None:
    """The look for the news of others goes from one of them to the next, by name, and reads each once."""
    connection = raw(database_url)
    connection.autocommit = True
    without_autovacuum(connection)
    connection.execute(PASSING, (5000, 10_000))
    leases(connection, 2000)
    connection.execute(PASSING, (6000, 12_000))
    # They are 3,400; if each of 68 steps read all lanes, 8,000 more; with 272 of them, as beside few channels, 4,800.
    assert buffers(connection, 52) < 4500


def test_a_flood_beside_many_that_are_idle(raw: Raw, database_url: str) -> None:
    """The next lane that isn't idle is looked for once, however much news there is before it."""
    connection = raw(database_url)
    connection.autocommit = True
    without_autovacuum(connection)
    pass_through(connection, 5000, 5000)
    connection.execute(one_by_one(3000, "a").encode())
    connection.execute("INSERT INTO fairqueue.message (channel) SELECT 'c' || g FROM generate_series(1, 500) g")
    # They are 27,000; if it looked 400 times, each time through all idle lanes, a million.
    assert buffers(connection, 100) < 35_000
    assert value(connection, "SELECT count(*) > 200 FROM fairqueue.lane WHERE due = 0")


def test_a_retry_in_a_flood_leads_to_nothing_that_was_served(raw: Raw, database_url: str) -> None:
    """The message that comes back is older than all of it."""
    old, connection = raw(database_url), raw(database_url)
    connection.autocommit = True
    without_autovacuum(connection)
    connection.execute("INSERT INTO fairqueue.message (channel) VALUES ('retried')")
    lease = leases(connection, 1)
    old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    old.execute("SELECT 1")
    pass_through(connection, 50, 8000)
    connection.execute(one_by_one(67, "a").encode())
    connection.execute("SELECT * FROM fairqueue.message_fail(%s, %s, 'no', delay_seconds => 0)", lease)
    connection.execute(one_by_one(1000, "a").encode())
    # They are 700; if it looked at each that was served, 5,000 more.
    assert buffers(connection, 1) < 3000


def test_lanes_at_their_limits_are_left_alone(raw: Raw, database_url: str) -> None:
    """3,000 channels have a job that runs, and nothing else: their lanes are written now and then, some at a time."""
    connection = raw(database_url)
    connection.autocommit = True
    connection.execute("SELECT fairqueue.queue_set('default', channel_max_concurrency => 1)")
    connection.execute("INSERT INTO fairqueue.message (channel) SELECT 'c' || g FROM generate_series(1, 3000) g")
    leases(connection, 3000)
    versions = "SELECT array_agg(l.ctid::text ORDER BY l.channel) FROM fairqueue.lane l WHERE l.channel <> 'busy'"
    written = 0
    for _ in range(8):
        before = value(connection, versions)
        for _ in range(32):
            connection.execute("INSERT INTO fairqueue.message (channel) VALUES ('busy')")
            connection.execute("SELECT * FROM fairqueue.message_complete(%s, %s)", leases(connection, 1))
        after = value(connection, versions)
        written += sum(one != other for one, other in zip(before, after, strict=True))
    # They are up to 256 each 64th turn; if all were written whenever they are 64 messages behind, 9,000.
    assert 0 < written < 2500
