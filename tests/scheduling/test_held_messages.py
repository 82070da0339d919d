"""What somebody holds in an open transaction is passed over, and costs its channel neither a turn nor much time."""

import itertools
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import alter, clear, lease_of, put, sql, wait_until
from tests.fixtures.connections import Raw
from tests.invariants import check_invariants
from tests.limiting import limit_queue
from tests.observing import buffers, observer, value, waits_for_a_lock
from tests.scheduling.taking import dequeue, fill, finish, plan_once

pytestmark = pytest.mark.shared_database

HOLDS = {
    "locked": "SELECT FROM fairqueue.message WHERE id = ANY (%(ids)s) FOR UPDATE",
    "edited": "UPDATE fairqueue.message SET cost = 2 WHERE id = ANY (%(ids)s)",
    "cancelled": "SELECT fairqueue.message_cancel(%(ids)s)",
}
#: Of the statement that serves, what it looks at first.
CONDITIONS = {
    "scheduler_serve_heads": "l.queue = r.queue AND l.due = 0",
    "scheduler_serve_plan": "p.queue = r.queue AND",
}


@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize("held", [1, 3])
def test_the_rest_of_its_channel_has_its_share(
    session: Session, other: psycopg.Connection, hold: str, limit: int, held: int
) -> None:
    acme, globex = put(session, "acme", 20), put(session, "globex", 20)
    other.execute(HOLDS[hold].encode(), {"ids": acme[:held]})
    served = [message for _ in range(12 // limit) for message in lease_of(session, limit)]
    assert Counter(message.channel for message in served) == {"acme": 6, "globex": 6}
    assert [message.id for message in served if message.channel == "acme"] == acme[held : held + 6]
    assert [message.id for message in served if message.channel == "globex"] == globex[:6]
    other.rollback()
    assert {message.id for message in lease_of(session, 2)} == {acme[0], globex[6]}
    assert len(lease_of(session, 100)) == 26
    check_invariants(session.connection())


@pytest.mark.parametrize("policy", [{}, {"max_concurrency": 2}])
def test_many_are_passed_over_in_one_go(session: Session, other: psycopg.Connection, policy: dict[str, int]) -> None:
    """In a few rounds, that is: one for each would take long, and all others would wait for it."""
    if policy:
        sql(session, "SELECT fairqueue.channel_set('acme', max_concurrency => 2)")
    acme = put(session, "acme", 300)
    other.execute(HOLDS["edited"].encode(), {"ids": acme[:-1]})
    for expected in ([acme[-1]], []):
        before = value(other, "SELECT count(*) FROM fairqueue.signal")
        assert [message.id for message in lease_of(session, 1)] == expected
        after = value(other, "SELECT count(*) FROM fairqueue.signal")
        assert after - before < 20
    put(session, "globex")
    assert [message.channel for message in lease_of(session, 1)] == ["globex"]
    other.rollback()
    assert [message.id for message in lease_of(session, 1)] == acme[:1]
    check_invariants(session.connection())


@pytest.mark.shared_database(False)
@pytest.mark.parametrize("served_by", CONDITIONS)
def test_one_that_is_edited_within_the_statement(
    engine: Engine, session: Session, raw: Raw, database_url: str, served_by: str
) -> None:
    """After its snapshot, before it locks. What is another channel's by then is that one's, which is paused; the batch
    is full all the same, and what counts is what is leased.
    """
    limit_queue(session, max_concurrency=10_000)
    session.execute(fq.pause(channel="paused"))
    fill(session)
    if served_by == "scheduler_serve_plan":
        plan_once(session)
    condition = CONDITIONS[served_by]
    alter(engine, served_by, condition, f"(SELECT true FROM pg_advisory_xact_lock_shared(42)) AND {condition}")
    gate, worker, watching = raw(database_url), raw(database_url), observer(raw, database_url)
    gate.execute("SELECT pg_advisory_lock(42)")
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(dequeue, worker, 6)
        wait_until(lambda: waits_for_a_lock(watching, worker))
        moved = "UPDATE fairqueue.message SET channel = 'paused' WHERE leased_until IS NULL AND channel IN ('a', 'c')"
        sql(session, moved)
        gate.execute("SELECT pg_advisory_unlock(42)")
        served = serving.result()
    assert len(served) == 6
    worker.commit()
    assert {session.get_one(fq.Message, id_).channel for id_ in served} == {*"bdef"}
    session.execute(fq.resume(channel="paused"))
    finish(session, [worker], served)


@pytest.mark.shared_database(False)
@pytest.mark.parametrize("limit", [1, 100])
def test_thousands_don_t_make_others_wait(
    session: Session, other: psycopg.Connection, raw: Raw, database_url: str, limit: int
) -> None:
    """As when a tenant is removed: no dequeue walks over all that is held. What stands behind it waits as well."""
    looking = raw(database_url)
    looking.autocommit = True
    sql(session, "INSERT INTO fairqueue.message (channel) SELECT 'acme' FROM generate_series(1, 30000)")
    (last,) = put(session, "acme")
    assert len(lease_of(session, 1)) == 1
    before = buffers(looking, 1)
    other.execute("UPDATE fairqueue.message SET cost = 2 WHERE id < %s", (last,))
    for _ in range(3):
        (quiet,) = put(session, "quiet")
        # They are 12,000 and 35,000; over all that is held they would be 121,000.
        assert buffers(looking, limit) < before + 45_000
        assert session.get_one(fq.Message, quiet).leased_until is not None
        session.commit()
    other.rollback()
    assert len(lease_of(session, 10_000)) == 10_000
    check_invariants(session.connection())


@pytest.mark.shared_database(False)
def test_the_largest_batches_beside_some(session: Session, other: psycopg.Connection) -> None:
    """They look at thousands in one go, and there is more behind."""
    sql(session, "INSERT INTO fairqueue.message (channel) SELECT 'acme' FROM generate_series(1, 25000)")
    other.execute(HOLDS["edited"].encode(), {"ids": [3, 7, 12_000]})
    assert [len(lease_of(session, 10_000)) for _ in range(3)] == [10_000, 10_000, 4_997]
    other.rollback()
    assert {message.id for message in lease_of(session, 10)} == {3, 7, 12_000}
    check_invariants(session.connection())


@pytest.mark.parametrize("free", [0, 30])
def test_many_channels_have_nothing_else(session: Session, other: psycopg.Connection, free: int) -> None:
    """A dequeue ends, though they are news for the next one again and again; and their news doesn't pile up."""
    channels = 500
    sql(session, "INSERT INTO fairqueue.message (channel) SELECT 'c' || i FROM generate_series(1, :n) i", n=channels)
    other.execute("SELECT FROM fairqueue.message FOR UPDATE")
    put(session, "free", free)
    session.execute(text("SET statement_timeout = '20s'"))  # it would never end
    for turn in range(1, 12):
        assert len(lease_of(session, 3)) == min(3, max(0, free - 3 * (turn - 1)))
        waiting = value(other, "SELECT count(*) FROM fairqueue.signal")
        assert waiting < 3 * channels
    other.rollback()
    assert len(lease_of(session, 2 * channels)) == channels
    check_invariants(session.connection())


def test_a_row_that_refers_to_a_message_holds_it_not(session: Session, other: psycopg.Connection) -> None:
    """An open transaction with a foreign key: nobody waits for it, and nothing is passed over."""
    session.execute(text("SET lock_timeout = '1s'"))
    first, *_, last = put(session, "acme", 9) + put(session, "acme", key="k")
    refer = b"SELECT FROM fairqueue.message FOR KEY SHARE"
    other.execute(refer)
    assert fq.enqueue_unique(session, "acme", "new", key="k", on_conflict="replace") == last
    assert fq.enqueue_many(session, [{"channel": "acme", "key": "k"}], on_conflict="replace") == [last]
    session.commit()
    leases = [message for limit in (1, 6) for message in lease_of(session, limit)]
    assert [message.id for message in leases] == [*range(first, first + 7)]
    assert {row.result for row in session.execute(fq.heartbeat(leases))} == {"extended"}
    session.commit()
    other.rollback()
    other.execute(refer)
    sql(session, "SELECT fairqueue.channel_set('acme', max_concurrency => 8)")
    assert [message.id for message in lease_of(session, 9)] == [first + 7]
    assert session.scalar(text("SELECT count(*) FROM fairqueue.signal")) == 0, "all are counted"
    check_invariants(session.connection())


@pytest.mark.parametrize("policy", [{}, {"max_concurrency": 1}, {"release_interval_ms": 3_600_000}])
@pytest.mark.parametrize("held", [1, 50, 60])
def test_those_that_several_have_locked(
    session: Session, other: psycopg.Connection, raw: Raw, database_url: str, *, policy: dict[str, Any], held: int
) -> None:
    """The rows don't tell who. Their channel is charged for what is served, and that counts toward its limits."""
    session.add(fq.Channel("acme", **policy))
    acme, globex = put(session, "acme", 60), put(session, "globex", 40)
    free = acme[held : held + 1] if policy else acme[held:]
    lockers = (other, raw(database_url))
    for locker in lockers:
        locker.execute("SELECT FROM fairqueue.message WHERE id = ANY (%s) FOR SHARE", (acme[:held],))
    expected = [message for turn in itertools.zip_longest(free, globex) for message in turn if message]
    for turn in range(3):
        assert [message.id for message in lease_of(session, 6)] == expected[6 * turn : 6 * turn + 6]
        check_invariants(session.connection())
        session.commit()
    for locker in lockers:
        locker.rollback()
    assert (acme[0] in [message.id for message in lease_of(session, 6)]) == (not policy or held == 60)
    check_invariants(session.connection())


def test_one_that_is_not_due_yet_stands_behind_them(session: Session, other: psycopg.Connection) -> None:
    (first,) = put(session, "acme")
    put(session, "acme", delay=3600)
    other.execute(HOLDS["locked"].encode(), {"ids": [first]})
    assert lease_of(session, 5) == []
    assert lease_of(session, 5) == []
    other.rollback()
    assert [message.id for message in lease_of(session, 5)] == [first]
    check_invariants(session.connection())


@settings(max_examples=30, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    backlog=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 8), st.booleans()), min_size=1, max_size=9),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=5),
)
def test_what_is_not_held_is_served_as_if_that_were_all(
    engine: Engine, other: psycopg.Connection, backlog: list[tuple[str, int, bool]], sizes: list[int]
) -> None:
    """In turns, each channel's in its order, as much as is asked for; and the rest when it is held no more."""
    clear(engine)
    with Session(engine) as session:
        free: dict[str, deque[int]] = {}
        held: list[int] = []
        for channel, count, is_held in backlog:
            (held if is_held else free.setdefault(channel, deque())).extend(put(session, channel, count))
        other.execute(HOLDS["locked"].encode(), {"ids": held})
        served: Counter[str] = Counter()
        for size in itertools.cycle(sizes):
            batch = lease_of(session, size)
            assert len(batch) == min(size, sum(map(len, free.values())))
            for message in batch:
                assert message.id == free[message.channel].popleft()
                served[message.channel] += 1
                waiting = [served[name] for name, ids in free.items() if ids]
                assert max(waiting, default=0) - min(waiting, default=0) <= 1
            if not batch:
                break
        other.rollback()
        assert sorted(message.id for message in lease_of(session, 100)) == held
        check_invariants(session.connection())
