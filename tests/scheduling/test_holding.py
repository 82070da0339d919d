"""Who takes from a plan tells from a row's xmax that others are at it, and doesn't touch what isn't to be had."""

from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from tests.acts import put, sql, wait_until
from tests.fixtures.connections import Raw
from tests.observing import impatient, observer, value, waits_for_a_lock
from tests.scheduling.taking import Ids, dequeue, finish

pytestmark = pytest.mark.shared_database

LOCK = "SELECT FROM fairqueue.message FOR {}"
CHANGE = "UPDATE fairqueue.message SET cost = 2"
HELD = """
SELECT fairqueue.row_is_held({}, {}, age(pg_snapshot_xmin(s)::xid), age(pg_snapshot_xmax(s)::xid), s)
FROM (SELECT %s::pg_snapshot AS s) AS s"""


class Row:
    """A message, what others do to it, and what that looks like by a snapshot."""

    def __init__(self, raw: Raw, url: str) -> None:
        self.first, self.second, self.watching = raw(url), raw(url), observer(raw, url)

    def snapshot(self) -> object:
        return value(self.watching, "SELECT pg_current_snapshot()::text")

    def held(self, snapshot: object) -> object:
        """By the version that this snapshot sees, which is the only one that was not updated."""
        query = HELD.format("m.ctid", "m.xmax") + ", fairqueue.message m"
        return value(self.watching, query, snapshot)


@pytest.fixture
def row(session: Session, raw: Raw, database_url: str) -> Row:
    put(session, "a")
    return Row(raw, database_url)


def test_nobody_has_touched_it(row: Row) -> None:
    assert row.held(row.snapshot()) is False


@pytest.mark.parametrize("act", [CHANGE, LOCK.format("UPDATE"), LOCK.format("NO KEY UPDATE")])
def test_somebody_is_at_it(row: Row, act: str) -> None:
    """Since before the snapshot, or since after it; in a subtransaction, too."""
    before = row.snapshot()
    row.first.execute("SELECT pg_current_xact_id()")
    row.second.execute("SELECT pg_current_xact_id()")
    row.second.commit()
    middle = row.snapshot()
    with row.first.transaction():
        row.first.execute(act.encode())
        after = row.snapshot()
        assert [row.held(snapshot) for snapshot in (before, middle, after)] == [True] * 3
    assert [row.held(snapshot) for snapshot in (before, middle, after, row.snapshot())] == [True] * 4
    row.first.rollback()
    assert row.held(row.snapshot()) is False


def test_somebody_gave_it_back(row: Row) -> None:
    """Though others are under way who began before."""
    row.second.execute("SELECT pg_current_xact_id()")
    row.first.execute(CHANGE.encode())
    row.watching.execute("SELECT pg_current_xact_id()")
    snapshot = row.snapshot()
    assert row.held(snapshot) is True
    row.first.rollback()
    assert row.held(snapshot) is False
    assert row.held(row.snapshot()) is False


def test_somebody_has_locked_it(row: Row) -> None:
    """And has let go of it, which doesn't show in the row, while others are under way who began before."""
    row.second.execute("SELECT pg_current_xact_id()")
    row.first.execute(LOCK.format("UPDATE").encode())
    row.first.commit()
    assert row.held(row.snapshot()) is False


def test_several_have_locked_it(row: Row) -> None:
    """What xmax is then, is no transaction: any answer will do."""
    for connection in (row.first, row.second):
        connection.execute(LOCK.format("KEY SHARE").encode())
    assert row.held(row.snapshot()) in (True, False)
    for low, high in ((3, 3), (3, 10**6), (2**40 + 3, 2**41 + 3)):
        assert row.held(f"{low}:{high}:") in (True, False)
    # Where it can't even be one.
    assert value(row.watching, HELD.format("'(0,1)'", "'1500000000'"), row.snapshot()) is False


#: row_is_held waits, when "held 42" asks, for whoever has lock 42.
GATE = """
ALTER FUNCTION fairqueue.row_is_held RENAME TO row_is_held_by_somebody;
CREATE FUNCTION fairqueue.row_is_held(place tid, xmax xid, oldest integer, newest integer, snapshot pg_snapshot)
RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('application_name') = 'held 42' THEN
        PERFORM pg_advisory_xact_lock_shared(42);
    END IF;
    RETURN fairqueue.row_is_held_by_somebody(place, xmax, oldest, newest, snapshot);
END
$$
"""


@pytest.mark.shared_database(False)
def test_what_others_get_meanwhile_is_theirs_at_once(
    session: Session, order: Ids, workers: list[psycopg.Connection], raw: Raw, database_url: str
) -> None:
    """One is in the middle of its statement when another commits, which then need not wait to complete."""
    sql(session, GATE)
    gate, slow, watching = raw(database_url), impatient(raw, database_url), observer(raw, database_url)
    slow.execute("SET lock_timeout = 0; SET application_name = 'held 42'")
    slow.commit()
    gate.execute("SELECT pg_advisory_lock(42)")
    done = [dequeue(worker) for worker in workers[:2]]
    session.execute(text("SELECT pg_current_xact_id()"))
    session.commit()  # somebody who began later has come to an end
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(dequeue, slow)
        wait_until(lambda: waits_for_a_lock(watching, slow))
        workers[1].commit()
        gate.execute("SELECT pg_advisory_unlock(42)")
        done.append(serving.result())
    assert done == [order[:3], order[3:6], order[6:9]]
    completed = workers[1].execute("SELECT result FROM fairqueue.message_complete(%s, '{1,1,1}')", [done[1]]).fetchall()
    assert completed == [("completed",)] * 3
    workers[1].rollback()
    slow.commit()
    finish(session, workers, *done)


def test_what_a_user_had_locked_is_served(session: Session, order: Ids, workers: list[psycopg.Connection]) -> None:
    """All of it, for a foreign key say; that they have let go of it long ago doesn't show in the rows themselves."""
    old = workers[3]
    old.execute("SELECT pg_current_xact_id()")
    session.connection().exec_driver_sql(LOCK.format("KEY SHARE"))
    session.commit()
    done = [dequeue(worker) for worker in workers[:3]]
    assert done == [order[:3], order[3:6], order[6:9]]
    finish(session, workers, *done)
