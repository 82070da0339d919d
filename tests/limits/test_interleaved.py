"""Limits and transactions that overlap: whatever is open when they are set, they are exact, and nothing is stranded."""

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import complete, drain, expire, lease_of, put, put_all, sql, truncate, wait_until
from tests.fixtures.connections import Raw
from tests.invariants import check_invariants
from tests.observing import observer, value

Lease = fq.LeasedMessage
LEASE = 10_000


@pytest.fixture
def other(raw: Raw, database_url: str) -> psycopg.Connection:
    """A session of somebody else."""
    return raw(database_url)


def leases(session: Session, count: int = 100) -> list[Lease]:
    batch = lease_of(session, count, LEASE)
    check_invariants(session.connection(), caps=False)
    session.commit()
    return batch


def limit(session: Session, at: int | None, channel: str = "acme") -> None:
    session.merge(fq.Channel(channel, max_concurrency=at))
    session.commit()


def limit_queue(session: Session, at: int | None) -> None:
    session.merge(fq.Queue("default", max_concurrency=at))
    session.commit()


def limit_all(session: Session, at: int | None) -> None:
    session.merge(fq.Queue("default", channel_max_concurrency=at))
    session.commit()


def check_all_served(session: Session, running: list[Lease]) -> None:
    """Completing one after the other, everything is served, and no limit is ever exceeded."""
    ended = [row.id for row in session.execute(text("SELECT id FROM fairqueue.message WHERE leased_until IS NULL"))]
    session.commit()
    served: list[int] = []
    while True:
        batch = leases(session)
        running = [*running, *batch]
        served += [lease.id for lease in batch]
        if not running:
            break
        assert complete(session, [running.pop(0)]) == ["completed"]
    assert sorted(served) == sorted(ended)
    check_invariants(session.connection())
    assert session.scalar(text("SELECT count(*) FROM fairqueue.message")) == 0
    session.commit()


# What holds a lease's row in an open transaction

LEASED = "(ARRAY[%(id)s]::bigint[], ARRAY[%(attempt)s]::integer[])"
MESSAGE = " FROM fairqueue.message WHERE id = %(id)s"

#: The act, and how much room there is when it commits.
HOLDS = {
    f"SELECT fairqueue.message_complete{LEASED}": 1,
    f"SELECT fairqueue.message_fail{LEASED[:-1]}, delay_seconds => 0)": 1,
    f"SELECT fairqueue.message_fail{LEASED[:-1]}, retry => false)": 1,
    f"SELECT fairqueue.message_defer{LEASED}": 1,
    "SELECT fairqueue.message_cancel(ARRAY[%(id)s]::bigint[])": 1,
    f"DELETE{MESSAGE}": 1,
    f"SELECT fairqueue.message_heartbeat{LEASED[:-1]}, 20000)": 0,
    "UPDATE fairqueue.message SET payload = '1' WHERE id = %(id)s": 0,
    f"SELECT{MESSAGE} FOR UPDATE": 0,
}


def hold(connection: psycopg.Connection, statement: str, lease: Lease) -> None:
    connection.execute(statement.encode(), {"id": lease.id, "attempt": lease.attempt})


def die(connection: psycopg.Connection, watching: psycopg.Connection) -> None:
    """Go away without a word; returns when the server has noticed."""
    pid = connection.info.backend_pid
    connection.close()
    wait_until(lambda: value(watching, "SELECT count(*) FROM pg_stat_activity WHERE pid = %s", pid) == 0)


# What happens meanwhile: in the end four may run


def a_channel_is_limited(session: Session) -> list[Lease]:
    limit(session, 4)
    return leases(session)


def a_queue_is_limited(session: Session) -> list[Lease]:
    limit_queue(session, 4)
    return leases(session)


def all_channels_are_limited(session: Session) -> list[Lease]:
    limit_all(session, 4)
    return leases(session)


def first_the_channel_then_the_queue(session: Session) -> list[Lease]:
    return a_channel_is_limited(session) + a_queue_is_limited(session)


def first_the_queue_then_the_channel(session: Session) -> list[Lease]:
    return a_queue_is_limited(session) + a_channel_is_limited(session)


def both_at_once(session: Session) -> list[Lease]:
    limit(session, 4)
    return a_queue_is_limited(session)


def again_and_again(session: Session) -> list[Lease]:
    batch = a_channel_is_limited(session)
    for _ in range(3):
        limit_queue(session, 4)
        batch += leases(session)
        limit(session, None)
        batch += leases(session)
        limit_queue(session, None)
        batch += a_channel_is_limited(session)
    return batch


def the_policy_is_deleted_and_created(session: Session) -> list[Lease]:
    batch = a_channel_is_limited(session)
    for _ in range(2):
        session.delete(session.get_one(fq.Channel, ("default", "acme")))
        session.commit()
        limit_queue(session, 4)
        batch += leases(session)
        session.delete(session.get_one(fq.Queue, "default"))
        session.commit()
        batch += a_channel_is_limited(session)
    return batch


def the_policy_is_created_anew_as_it_was(session: Session) -> list[Lease]:
    """Between two dequeues, which find what they knew."""
    batch = a_channel_is_limited(session)
    session.delete(session.get_one(fq.Channel, ("default", "acme")))
    session.flush()
    return batch + a_channel_is_limited(session)


def the_queue_is_repaired(session: Session) -> list[Lease]:
    batch = a_channel_is_limited(session)
    sql(session, "SELECT fairqueue.queue_repair()")
    batch += leases(session)
    batch += a_queue_is_limited(session)
    sql(session, "SELECT fairqueue.queue_repair()")
    return batch + leases(session)


MEANWHILE = [
    a_channel_is_limited,
    a_queue_is_limited,
    all_channels_are_limited,
    first_the_channel_then_the_queue,
    first_the_queue_then_the_channel,
    both_at_once,
    again_and_again,
    the_policy_is_deleted_and_created,
    the_policy_is_created_anew_as_it_was,
    the_queue_is_repaired,
]


@pytest.mark.parametrize("meanwhile", MEANWHILE)
@pytest.mark.parametrize("end", ["commit", "rollback", "death"])
def test_a_lease_is_held_while_limits_are_set(
    engine: Engine, session: Session, raw: Raw, meanwhile: Callable[[Session], list[Lease]], end: str
) -> None:
    """It was taken without a limit, and counts as long as its end isn't committed; and then no longer."""
    url = engine.url.render_as_string(hide_password=False)
    watching = observer(raw, url)
    for statement, room in HOLDS.items() if end == "commit" else list(HOLDS.items())[::3]:
        truncate(engine)
        put(session, "acme", 12)
        running = leases(session, 3)
        other = raw(url)
        hold(other, statement, running[0])
        running += meanwhile(session)
        assert len(running) == 4, statement
        if end == "death":
            die(other, watching)
        else:
            getattr(other, end)()
        freed = room if end == "commit" else 0
        for _ in range(3):
            running += leases(session)
            assert len(running) == 4 + freed, statement
        check_all_served(session, running[1:] if freed else running)


@pytest.mark.parametrize("limited", [limit, limit_queue, limit_all])
def test_a_lease_that_was_held_is_looked_at_no_more(
    session: Session, other: psycopg.Connection, limited: Callable[[Session, int | None], None]
) -> None:
    """Once nobody holds it, as after a heartbeat, it is counted like any other, though it may be long until its end."""
    put(session, "acme", 6)
    running = leases(session, 3)
    hold(other, f"SELECT fairqueue.message_heartbeat{LEASED[:-1]}, 20000)", running[0])
    limited(session, 4)
    running += leases(session)
    assert session.scalar(text("SELECT count(*) FROM fairqueue.signal")) == 1
    other.commit()
    running += leases(session)
    assert len(running) == 4
    assert session.scalar(text("SELECT count(*) FROM fairqueue.signal")) == 0
    assert complete(session, running[:1]) == ["completed"]
    check_all_served(session, running[1:])


def test_a_lease_that_is_held_counts_where_its_channel_was_forgotten(
    session: Session, other: psycopg.Connection
) -> None:
    """It has run out, and dequeues have looked for it in vain."""
    put(session, "acme")
    (held,) = leases(session)
    expire(session, [held.id])
    hold(other, next(iter(HOLDS)), held)
    put(session, "globex", 300)
    drain(session)
    assert session.scalar(text("SELECT count(*) FROM fairqueue.lane WHERE channel = 'acme'")) == 0
    limit_all(session, 1)
    put_all(session, {"acme": 1, "initech": 1})
    assert [lease.channel for lease in leases(session)] == ["initech"]
    other.commit()
    assert [lease.channel for lease in leases(session)] == ["acme"]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("limited", [limit, limit_queue])
def test_more_leases_are_held_than_are_looked_at_in_one_go(
    session: Session, other: psycopg.Connection, limited: Callable[[Session, int | None], None], end: str
) -> None:
    """A dequeue comes to an end, and once they are over there is room again."""
    sql(session, "INSERT INTO fairqueue.message (channel) SELECT 'acme' FROM generate_series(1, 20100)")
    running = [lease for _ in range(3) for lease in lease_of(session, 10_000, LEASE)]
    assert len(running) == 20_100
    pairs = {"ids": [lease.id for lease in running], "attempts": [lease.attempt for lease in running]}
    other.execute("SELECT count(*) FROM fairqueue.message_complete(%(ids)s, %(attempts)s)", pairs)
    put(session, "acme", 2)
    limited(session, 1)
    session.execute(text("SET statement_timeout = '60s'"))
    for _ in range(3):
        assert leases(session) == []
    getattr(other, end)()
    if end == "rollback":
        for _ in range(2):
            assert leases(session) == []
        assert session.scalar(text("SELECT count(*) FROM fairqueue.signal")) == 0
        session.execute(text("SELECT count(*) FROM fairqueue.message_complete(:ids, :attempts)"), pairs)
        session.commit()
    (only,) = leases(session)
    check_all_served(session, [only])


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


@pytest.mark.parametrize("change", ["paused = true", "max_concurrency = 1"])
def test_a_policy_of_many_channels_holds_at_once(session: Session, change: str) -> None:
    """Even for the last of more than are taken in in one go."""
    count, place = 20_100, "FROM generate_series(1, :n) i"
    sql(session, f"INSERT INTO fairqueue.channel (name) SELECT 'c' || i {place}", n=count)
    sql(session, f"INSERT INTO fairqueue.message (channel) SELECT 'c' || i {place}, generate_series(1, 2)", n=count)
    first = len(leases(session, 10_000))
    assert first == 10_000  # by now, more than a quarter of all channels are known to be there
    while session.execute(text("SELECT count(*) FROM fairqueue.lane")).scalar_one() < count:
        first += len(leases(session, 1))
    sql(session, f"UPDATE fairqueue.channel SET {change}")
    served = leases(session, 10_000)
    assert len(served) == (0 if change.startswith("paused") else min(count - first, 10_000))
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
