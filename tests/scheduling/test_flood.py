"""One tenant enqueues 10,000 messages one by one while nobody dequeues; the others don't notice."""

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import alter, drain, expire, lease_of, move_clock, one_by_one, put, put_all, sql, take
from tests.fixtures.connections import Raw
from tests.invariants import check_invariants
from tests.limiting import LEASE, NOW, limit
from tests.observing import buffers, value, without_autovacuum
from tests.scheduling.twins import HOUR

pytestmark = pytest.mark.shared_database

#: More than 100 single dequeues take in, which is 6,800 signals; one of 100 messages takes in 464.
FLOOD = 10_000
Leases = list[fq.LeasedMessage]


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
def flood(other: psycopg.Connection) -> psycopg.Connection:
    enqueue_one_by_one(other, FLOOD)
    return other


@pytest.mark.slow
@pytest.mark.shared_database(False)
def test_a_flood_keeps_nobody_waiting(session: Session, flood: psycopg.Connection) -> None:
    """Each of 50 others is served among the first 100 messages, by single dequeues and by one of 100."""
    assert value(flood, "SELECT count(DISTINCT xid::text) FROM fairqueue.signal") == FLOOD
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


def fail(session: Session, batch: Leases) -> None:
    session.execute(fq.fail(batch, "no", delay=0))


def are_deferred(session: Session, batch: Leases) -> None:
    session.execute(fq.defer(batch))


def run_out(session: Session, batch: Leases) -> None:
    expire(session, [message.id for message in batch])


def are_put_back_from_the_dead(session: Session, batch: Leases) -> None:
    session.execute(fq.fail(batch, "no", retry=False))
    session.execute(fq.redrive([message.id for message in batch]))


def are_edited(session: Session, batch: Leases) -> None:
    session.execute(fq.defer(batch, delay=3600))
    take(session)
    ids = [message.id for message in batch]
    sql(session, "UPDATE fairqueue.message SET dequeue_at = 0 WHERE id = ANY (:ids)", ids=ids)


@pytest.mark.parametrize("quiet", [["quiet"], ["quiet", "calm"]])
@pytest.mark.parametrize("come_back", [fail, are_deferred, run_out, are_put_back_from_the_dead, are_edited])
def test_what_comes_back_waits_behind_no_flood(
    session: Session, other: psycopg.Connection, come_back: Callable[[Session, Leases], None], quiet: list[str]
) -> None:
    """Each dequeue takes in some 70 of 2,000 signals."""
    put_all(session, dict.fromkeys(quiet, 1))
    batch = lease_of(session, 2)
    enqueue_one_by_one(other, 2000)
    come_back(session, batch)
    session.commit()
    assert {*quiet} <= {channel for _ in range(2 + len(quiet)) for channel in take(session)}
    assert value(other, "SELECT count(*) FROM fairqueue.signal") > 1500
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


def test_who_is_for_later_is_served_in_time_beside_a_flood(
    session: Session, clock_that_stands: None, other: psycopg.Connection
) -> None:
    """Its message is known before its signal is."""
    enqueue_one_by_one(other, 2000)
    put(session, "quiet", dequeue_at=NOW + HOUR)
    assert [*take(session), *take(session)] == ["flood"] * 2
    assert value(other, "SELECT count(*) FROM fairqueue.signal WHERE channel = 'quiet'") == 1
    check_invariants(session.connection())
    move_clock(session, NOW + HOUR)
    assert "quiet" in [*take(session, lease=LEASE), *take(session, lease=LEASE)]


def begun(connection: psycopg.Connection) -> psycopg.Connection:
    """With a transaction that has written something of its own, and has enqueued nothing yet."""
    connection.execute("SELECT pg_current_xact_id()")
    return connection


def enqueues(connection: psycopg.Connection) -> None:
    connection.execute("INSERT INTO fairqueue.message (channel) VALUES ('late')")
    connection.commit()


@pytest.mark.parametrize("limit", [1, 10])
def test_order_of_a_channel_beside_a_flood(
    session: Session, other: psycopg.Connection, raw: Raw, database_url: str, limit: int
) -> None:
    """What is looked for behind what is known finds the second message of a channel before the first."""
    early = begun(raw(database_url))
    quiet = [f"quiet{number}" for number in range(50)]
    enqueue_one_by_one(other, 300)
    ids = {channel: put(session, channel) for channel in quiet}
    enqueue_one_by_one(other, 2000)
    enqueues(early)
    for channel in quiet:
        ids[channel] += put(session, channel)
    enqueue_one_by_one(other, 300)
    served: dict[str, list[int]] = {channel: [] for channel in quiet}
    for _ in range(400 // limit):
        for message in lease_of(session, limit):
            served.setdefault(message.channel, []).append(message.id)
    assert {channel: served[channel] for channel in quiet} == ids


def test_old_transactions_hide_nobody_behind_a_flood(
    session: Session, other: psycopg.Connection, raw: Raw, database_url: str
) -> None:
    """Each of them began before it, and enqueues when all of it is there."""
    old = [begun(raw(database_url)) for _ in range(10)]
    enqueue_one_by_one(other, 1500)
    put(session, "quiet")
    enqueue_one_by_one(other, 1500)
    served: list[str] = []
    for connection in old:
        enqueues(connection)
        served += take(session)
    assert "quiet" in served[:4]


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("before", [6, 15, 21])
def test_floods_of_old_transactions_hide_nobody_who_is_as_old(
    session: Session, raw: Raw, database_url: str, place: int, before: int
) -> None:
    """Whichever of them it is, and is read first; nothing else is told of; and in the end all of it is served."""
    for _ in range(before):
        sql(session, "SELECT pg_current_xact_id()")
    old = [begun(raw(database_url)) for _ in range(5)]
    put(session, "known")
    assert take(session) == ["known"]
    for number, connection in enumerate(old):
        connection.execute(one_by_one(1 if number == place else 300, "quiet" if number == place else "flood").encode())
    for connection in old:
        connection.commit()
    assert "quiet" in [*take(session), *take(session), *take(session)]
    check_invariants(session.connection())
    session.commit()
    assert len(drain(session, 100)) == 1198


def test_a_flood_beside_more_channels_than_are_looked_for_in_one_go(
    session: Session, other: psycopg.Connection
) -> None:
    """Each dequeue goes on where the last one stopped, though all whom that found have more."""
    enqueue_one_by_one(other, 2000)
    insert = (
        "INSERT INTO fairqueue.message (channel) SELECT 'c' || g FROM generate_series(1, 150) g, generate_series(1, 5)"
    )
    sql(session, insert)
    for _ in range(4):
        take(session)
    assert value(other, "SELECT count(*) FROM fairqueue.lane WHERE due = 0") == 151
    assert value(other, "SELECT count(*) FROM fairqueue.signal") > 1500


#: Why a channel has to wait, however much it has.
WAITS: dict[str, dict[str, Any]] = {
    "for a pause": {"paused": True},
    "for room": {"max_concurrency": 1},
    "for its rate": {"release_interval_ms": 100_000_000},
    "for later": {},
}


@pytest.mark.slow
@pytest.mark.shared_database(False)
@pytest.mark.parametrize("why", WAITS)
def test_a_backlog_that_has_to_wait_costs_nothing_beside_a_flood(
    session: Session, other: psycopg.Connection, raw: Raw, database_url: str, why: str
) -> None:
    """In pages that a dequeue touches: those of a newcomer are found without looking at all of it."""
    without_autovacuum(other)
    other.commit()
    limit(session, "big", **WAITS[why])
    insert = "INSERT INTO fairqueue.message (channel, dequeue_at) SELECT 'big', :at + i FROM generate_series(1, :n) i"
    sql(session, insert, at=NOW * 10 if why == "for later" else 0, n=100_000)
    take(session)
    enqueue_one_by_one(other, 3000)
    for newcomer in ("alpha", "omega"):
        put(session, newcomer)
    connection = raw(database_url)
    connection.autocommit = True
    # They are 225; some 800 if each looked at all of it.
    touched = [buffers(connection, 1) for _ in range(6)]
    assert max(touched[1:]) < 500, touched
    assert value(other, "SELECT count(*) FROM fairqueue.signal") > 2000
    assert value(other, "SELECT sum(attempt) FROM fairqueue.message WHERE channel IN ('alpha', 'omega')") == 2


@pytest.mark.shared_database(False)
def test_news_of_those_that_have_to_wait_delay_no_dequeue_for_long(
    engine: Engine, session: Session, other: psycopg.Connection
) -> None:
    """A dequeue that finds nothing reads some of it, and leaves the rest to the next ones."""
    for bound in ("v_news >= {}", "v_news * 4, {}"):
        alter(engine, "scheduler_serve", bound.format(20_000), bound.format(1000))
    limit(session, "blocked", paused=True)
    put(session, "blocked")
    assert take(session) == []
    news = "INSERT INTO fairqueue.signal (queue, channel, dequeue_at, message_id, urgent)"
    sql(session, f"{news} SELECT 'default', 'blocked', 1, 1, false FROM generate_series(1, 5000)")
    put(session, "quiet")
    left = [5000]
    assert take(session) == ["quiet"]
    while left[-1]:
        assert take(session) == []
        left.append(value(other, "SELECT count(*) FROM fairqueue.signal"))
        other.commit()
        assert left[-2] - left[-1] <= 2500
    assert len(left) > 3
    check_invariants(session.connection())


@pytest.mark.parametrize("names", [["a", "m", "z"], ["A", "\u00e9", "~", "zz", "\U0001f600", "-", "1"]])
def test_a_round_finds_whoever_there_is_by_whatever_name(
    session: Session, other: psycopg.Connection, names: list[str]
) -> None:
    """Before, between and behind those that are known, and those that have been known for long and are idle."""
    put_all(session, dict.fromkeys(names[::2], 1))
    drain(session)
    enqueue_one_by_one(other, 2000)
    put_all(session, dict.fromkeys(names, 1))
    assert {*names} <= {channel for _ in range(1 + len(names)) for channel in take(session)}
    check_invariants(session.connection())


def test_order_of_channels_whose_ids_are_older_than_the_first_signals(
    session: Session, other: psycopg.Connection
) -> None:
    """The ids that the first signals tell say nothing of those that come later."""
    one = "INSERT INTO fairqueue.message (id, channel) OVERRIDING SYSTEM VALUE VALUES ({}, {}); END LOOP;"
    other.execute(
        f"""
        DO $$ BEGIN
            FOR number IN 1001 .. 2000 LOOP {one.format("number", "'flood'")}
            FOR number IN 1 .. 50 LOOP {one.format("number", "'c' || number")}
            FOR number IN 1 .. 50 LOOP {one.format("2000 + number", "'c' || number")}
        END $$
        """.encode()
    )
    other.commit()
    served: dict[str, list[int]] = {}
    for _ in range(400):
        (message,) = lease_of(session)
        served.setdefault(message.channel, []).append(message.id)
    assert {tuple(ids) for channel, ids in served.items() if channel != "flood"} == {
        (number, 2000 + number) for number in range(1, 51)
    }
