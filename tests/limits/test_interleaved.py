"""Limits and transactions that overlap: whatever is open when they are set, they are exact, and nothing is stranded.

Leases that are held while limits are set are in test_held_leases.py.
"""

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import alter, complete, lease_of, put, put_all, sql
from tests.fixtures.connections import Raw
from tests.limits.leasing import (
    HOLDS,
    LEASE,
    MESSAGE,
    Lease,
    check_all_served,
    hold,
    leases,
    limit,
    limit_all,
    limit_queue,
)

pytestmark = pytest.mark.shared_database


@pytest.mark.parametrize("limited", [limit, limit_queue, limit_all])
@pytest.mark.parametrize("first", [0, 1])
def test_completions_that_commit_in_any_order(
    session: Session, raw: Raw, database_url: str, first: int, limited: Callable[[Session, int], None]
) -> None:
    """Each makes room for one when it commits, and not before."""
    put(session, "acme", 12)
    limited(session, 3)
    running = leases(session)
    assert len(running) == 3
    others = [raw(database_url) for _ in range(3)]
    complete_it = next(iter(HOLDS))
    for connection, lease in zip(others, running, strict=True):
        hold(connection, complete_it, lease)
        assert leases(session) == []
    new: list[Lease] = []
    for number in (first, 1 - first):
        others[number].commit()
        batch = leases(session)
        assert len(batch) == 1
        assert leases(session) == []
        new += batch
    others[2].rollback()
    assert leases(session) == []
    check_all_served(session, [running[2], *new])


@pytest.mark.parametrize("limited", [limit, limit_queue, limit_all])
def test_a_limit_is_lowered_while_leases_end(
    session: Session, raw: Raw, database_url: str, limited: Callable[[Session, int], None]
) -> None:
    put(session, "acme", 12)
    limited(session, 4)
    running = leases(session)
    others = [raw(database_url) for _ in range(3)]
    for connection, lease in zip(others, running, strict=False):
        hold(connection, next(iter(HOLDS)), lease)
    others[0].commit()
    limited(session, 2)
    assert leases(session) == []
    others[1].commit()
    assert leases(session) == []
    others[2].commit()
    batch = leases(session)
    assert len(batch) == 1
    check_all_served(session, [running[3], *batch])


@pytest.mark.parametrize("limited", [limit, limit_queue, limit_all])
@pytest.mark.parametrize("undo", ["rollback", "savepoint", "death"])
def test_a_dequeue_that_did_not_happen_takes_no_room(
    session: Session, raw: Raw, database_url: str, limited: Callable[[Session, int], None], undo: str
) -> None:
    put(session, "acme", 8)
    limited(session, 3)
    kept = leases(session, 1)
    other = raw(database_url)
    other.execute("SAVEPOINT before")
    assert len(other.execute("SELECT * FROM fairqueue.message_dequeue('default', 9)").fetchall()) == 2
    if undo == "savepoint":
        other.execute("ROLLBACK TO before")
        assert len(other.execute("SELECT * FROM fairqueue.message_dequeue('default', 1)").fetchall()) == 1
        other.execute("ROLLBACK TO before")
        other.commit()
    elif undo == "rollback":
        other.rollback()
    else:
        other.close()
    batch = leases(session)
    assert len(batch) == 2
    check_all_served(session, kept + batch)


# Commit order is not id order


@pytest.mark.parametrize("limited", [limit, limit_queue, limit_all])
def test_a_late_commit_to_a_channel_at_its_limit(
    session: Session, other: psycopg.Connection, limited: Callable[[Session, int], None]
) -> None:
    """It goes first when there is room, being older."""
    late = other.execute("INSERT INTO fairqueue.message (channel) VALUES ('acme') RETURNING id").fetchone()
    assert late is not None
    put(session, "acme", 5)
    limited(session, 1)
    running = leases(session)
    other.commit()
    assert leases(session) == []
    assert complete(session, running) == ["completed"]
    running = leases(session)
    assert [lease.id for lease in running] == [late[0]]
    check_all_served(session, running)


# Policies that are not committed yet

CHANGES = {
    "INSERT INTO fairqueue.channel (name, max_concurrency) VALUES ('acme', 4)": 1,
    "SELECT fairqueue.channel_set('acme', max_concurrency => 4)": 1,
    "INSERT INTO fairqueue.queue (name, max_concurrency) VALUES ('default', 4)": 1,
    "SELECT fairqueue.queue_set('default', channel_max_concurrency => 4)": 1,
    "SELECT fairqueue.channel_set('acme', paused => true)": 0,
    "SELECT fairqueue.queue_set('default', paused => true)": 0,
    "SELECT fairqueue.channel_set('acme', release_interval_ms => 1000000)": 1,
}


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("arrivals", [0, 1])
@pytest.mark.parametrize(("change", "room"), CHANGES.items())
def test_a_policy_that_commits_later(
    session: Session, other: psycopg.Connection, change: str, room: int, *, arrivals: int, end: str
) -> None:
    """It waits for nobody and nobody for it; it holds from the next dequeue after its commit on."""
    put(session, "acme", 9)
    running = leases(session, 1)
    other.execute(change.encode())
    put(session, "acme", arrivals)
    running += leases(session, 2)
    assert len(running) == 3
    getattr(other, end)()
    batch = leases(session)
    assert len(batch) == (room if end == "commit" else 6 + arrivals)
    sql(session, "DELETE FROM fairqueue.channel")
    sql(session, "DELETE FROM fairqueue.queue")
    check_all_served(session, running + batch)


@pytest.mark.parametrize("limited", [limit, limit_queue, limit_all])
def test_a_limit_that_is_lifted_later(
    session: Session, other: psycopg.Connection, limited: Callable[[Session, int], None]
) -> None:
    put(session, "acme", 9)
    limited(session, 2)
    running = leases(session)
    other.execute("DELETE FROM fairqueue.channel")
    other.execute("DELETE FROM fairqueue.queue")
    assert leases(session) == []
    assert complete(session, [running.pop()]) == ["completed"]
    running += (batch := leases(session))
    assert len(batch) == 1
    other.commit()
    running += (batch := leases(session))
    assert len(batch) == 6
    check_all_served(session, running)


# Ready messages that somebody holds

EDITS = [
    f"SELECT{MESSAGE} FOR UPDATE",
    "UPDATE fairqueue.message SET payload = '1' WHERE id = %(id)s",
    "UPDATE fairqueue.message SET dequeue_at = dequeue_at + 1 WHERE id = %(id)s",
    "UPDATE fairqueue.message SET channel = 'globex' WHERE id = %(id)s",
    "SELECT fairqueue.message_cancel(ARRAY[%(id)s]::bigint[])",
]


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("limited", [limit, limit_queue, limit_all])
def test_a_message_that_is_passed_over_takes_no_room(
    session: Session, other: psycopg.Connection, limited: Callable[[Session, int], None], edit: str, end: str
) -> None:
    put(session, "acme", 9)
    limited(session, 3)
    (first,) = leases(session, 1)
    session.execute(fq.fail(first, delay=0))
    session.commit()
    other.execute(edit.encode(), {"id": first.id})
    running: list[Lease] = []
    for _ in range(5):
        running += leases(session)
    assert first.id not in {lease.id for lease in running}
    getattr(other, end)()
    running += leases(session)
    running += leases(session)
    counted = [lease for lease in running if limited is limit_queue or lease.channel == "acme"]
    assert len(counted) == 3
    check_all_served(session, running)


@pytest.mark.parametrize("policy", [{"max_concurrency": 1}, {"release_interval_ms": 10_000_000}])
@pytest.mark.parametrize("held", [1, 3])
def test_a_message_that_is_held_stops_nobody(
    session: Session, other: psycopg.Connection, policy: dict[str, int], held: int
) -> None:
    """Not even in a channel that has room for one only."""
    ids = put(session, "acme", 5)
    session.merge(fq.Channel("acme", **policy))  # type: ignore[arg-type]
    session.commit()
    for id_ in ids[:held]:
        other.execute(EDITS[0].encode(), {"id": id_})
    assert [lease.id for lease in leases(session, 1)] == ids[held : held + 1]
    other.commit()


def test_a_message_that_is_held_leaves_the_room_of_the_queue_to_others(
    session: Session, other: psycopg.Connection
) -> None:
    (first, *_) = put(session, "acme", 2)
    put(session, "globex", 2)
    limit_queue(session, 1)
    other.execute(EDITS[0].encode(), {"id": first})
    assert len(leases(session, 1)) == 1
    other.commit()


@pytest.mark.shared_database(False)
@pytest.mark.parametrize("change", ["paused = true", "max_concurrency = 1"])
def test_a_policy_of_many_channels_holds_at_once(engine: Engine, session: Session, change: str) -> None:
    """Even for the last of more than are taken in in one go."""
    alter(engine, "scheduler_serve", "v_now, 20000,", "v_now, 300,")
    count, place = 402, "FROM generate_series(1, :n) i"
    sql(session, f"INSERT INTO fairqueue.channel (name) SELECT 'c' || i {place}", n=count)
    sql(session, f"INSERT INTO fairqueue.message (channel) SELECT 'c' || i {place}, generate_series(1, 2)", n=count)
    first = len(lease_of(session, 150, LEASE))
    assert first == 150  # by now, more than a quarter of all channels are known to be there
    while session.execute(text("SELECT count(*) FROM fairqueue.lane")).scalar_one() < count:
        first += len(lease_of(session, 1, LEASE))
    sql(session, f"UPDATE fairqueue.channel SET {change}")
    served = leases(session, 1000)
    assert len(served) == (0 if change.startswith("paused") else count - first)
    assert len({lease.channel for lease in served}) == len(served)


# A fleet


@pytest.mark.slow
def test_limits_hold_across_a_fleet(database_url: str, session: Session) -> None:
    """What workers see themselves: of no channel, and of the queue, do more run at a time than may."""
    limits = {"one": 1, "two": 2, "three": 3, "free": 1000}
    whole = 6
    for name, at in limits.items():
        limit(session, at, name)
    limit_queue(session, whole)
    put_all(session, dict.fromkeys(limits, 60))
    engine = create_engine(database_url, pool_size=8)
    running: Counter[str] = Counter()
    most: Counter[str] = Counter()
    done: list[int] = []
    guard = threading.Lock()

    def work(seed: int) -> None:
        with Session(engine) as worker:
            while len(done) < 60 * len(limits):
                batch = lease_of(worker, 1 + seed % 4, LEASE)
                with guard:
                    for message in batch:
                        for name in (message.channel, "all"):
                            running[name] += 1
                            most[name] = max(most[name], running[name])
                for message in batch:
                    with guard:
                        running.subtract([message.channel, "all"])
                        done.append(message.id)
                    complete(worker, [message])

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))
    engine.dispose()
    assert sorted(done) == sorted(set(done))
    assert all(most[name] <= at for name, at in {**limits, "all": whole}.items()), most
    check_all_served(session, [])
