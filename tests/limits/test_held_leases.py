"""Leases that somebody holds in an open transaction while limits are set: they count until their end is committed."""

from collections.abc import Callable

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import TIDY, alter, clear, complete, expire, put, put_all, sql, take, wait_until
from tests.fixtures.connections import Raw
from tests.limits.leasing import (
    HOLDS,
    LEASE,
    LEASED,
    Lease,
    check_all_served,
    hold,
    leases,
    limit,
    limit_all,
    limit_queue,
)
from tests.observing import observer, value

pytestmark = pytest.mark.shared_database


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


MEANWHILE: list[Callable[[Session], list[Lease]]] = [
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
    watching, other = observer(raw, url), raw(url)
    # Where nothing comes of it, each statement meets a third of what happens.
    third = slice(None) if end == "commit" else slice(MEANWHILE.index(meanwhile) % 3, None, 3)
    for statement, room in list(HOLDS.items())[third]:
        clear(engine)
        put(session, "acme", 6)
        running = leases(session, 3)
        hold(other, statement, running[0])
        running += meanwhile(session)
        assert len(running) == 4, statement
        if end == "death":
            die(other, watching)
            other = raw(url)
        else:
            getattr(other, end)()
        freed = room if end == "commit" else 0
        for _ in range(2):
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


@pytest.mark.parametrize("known", [True, False])
def test_a_lease_that_is_held_counts_where_its_channel_was_forgotten(
    session: Session, other: psycopg.Connection, known: bool
) -> None:
    """It has run out, and dequeues have looked for it in vain; or the one that does takes in the limit, too."""
    put(session, "acme")
    (held,) = leases(session)

    def run_out() -> None:
        expire(session, [held.id])
        hold(other, next(iter(HOLDS)), held)

    if known:
        run_out()
    put(session, "globex", 201)
    assert len(take(session, 200)) == 200
    sql(session, TIDY)
    assert take(session) == ["globex"]
    assert session.scalar(text("SELECT count(*) FROM fairqueue.lane WHERE channel = 'acme'")) == 0
    if not known:
        session.commit()
        run_out()
    limit_all(session, 1)
    put_all(session, {"acme": 1, "initech": 1})
    assert [lease.channel for lease in leases(session)] == ["initech"]
    other.commit()
    assert [lease.channel for lease in leases(session)] == ["acme"]


@pytest.mark.shared_database(False)
@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("limited", [limit, limit_queue])
def test_more_leases_are_held_than_are_looked_at_in_one_go(
    engine: Engine,
    session: Session,
    other: psycopg.Connection,
    limited: Callable[[Session, int | None], None],
    end: str,
) -> None:
    """A dequeue comes to an end, and once they are over there is room again."""
    alter(engine, "scheduler_serve", "v_now, 20000,", "v_now, 300,")
    put(session, "acme", 402)
    taken = text("SELECT id, attempt FROM fairqueue.message_dequeue('default', 1000, :lease)")
    running = session.execute(taken, {"lease": LEASE}).all()
    session.commit()
    assert len(running) == 402
    pairs = {"ids": [row.id for row in running], "attempts": [row.attempt for row in running]}
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
