"""Where a limit is committed while a dequeue is under way: it counts what is leased already.

The statements of a dequeue see one after the other what has been committed. What it reads of a policy may be newer than
the signals that it has read.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import put, sql, wait_until
from tests.fixtures.connections import Raw
from tests.invariants import check_invariants
from tests.limiting import leases, limit, limit_queue
from tests.observing import observer, waits_for_a_lock

pytestmark = pytest.mark.shared_database

#: A trigger of the application's: whoever writes a message waits for those who lock the table public.gate.
GATE = """
CREATE TABLE public.gate ();
CREATE FUNCTION public.pass() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    LOCK public.gate IN SHARE MODE;
    RETURN NULL;
END
$$;
CREATE TRIGGER pass AFTER UPDATE ON fairqueue.message FOR EACH STATEMENT EXECUTE FUNCTION public.pass();
"""
HOLD_SIGNALS = "SELECT FROM fairqueue.signal FOR UPDATE"
HOLD_LEASES = "LOCK public.gate IN EXCLUSIVE MODE"


def by_news(session: Session, first: fq.LeasedMessage) -> str:
    """What a dequeue has to take in is that messages came; returns how it can be held in the middle of that."""
    return HOLD_SIGNALS


def by_the_end_of_a_lease(session: Session, first: fq.LeasedMessage) -> str:
    """One that the queue's own limit counted."""
    limit_queue(session, max_concurrency=100)
    leases(session, 1)
    session.execute(fq.fail(first, delay=0))
    session.commit()
    return HOLD_SIGNALS


def by_the_sweep(session: Session, first: fq.LeasedMessage) -> str:
    """Its signal stands behind those of a flood."""
    sql(session, "DELETE FROM fairqueue.signal")
    sql(
        session,
        """
        INSERT INTO fairqueue.signal (queue, channel, dequeue_at, message_id, urgent)
        SELECT 'default', 'globex', 4000000000000, 1, false FROM generate_series(1, 1000)
        """,
    )
    return HOLD_SIGNALS


def by_a_new_count_of_all(session: Session, first: fq.LeasedMessage) -> str:
    """The queue gets a limit of its own; it is held when it has counted what is leased."""
    sql(session, GATE)
    limit_queue(session, max_concurrency=100)
    return HOLD_LEASES


def limit_channel(session: Session) -> None:
    limit(session, max_concurrency=1)


def limit_all_channels(session: Session) -> None:
    limit_queue(session, channel_max_concurrency=1)


@pytest.fixture
def dequeue_held(raw: Raw, database_url: str) -> Callable[[str, Callable[[], None]], int]:
    """Dequeue under a lock, and while it waits for that something happens. Returns how many messages were leased."""

    def run(lock: str, meanwhile: Callable[[], None]) -> int:
        holder, worker, watching = raw(database_url), raw(database_url), observer(raw, database_url)
        holder.execute(lock.encode())
        with ThreadPoolExecutor(1) as pool:
            serving = pool.submit(
                worker.execute, "SELECT count(*) FROM fairqueue.message_dequeue('default', 100, 3600)"
            )
            wait_until(lambda: waits_for_a_lock(watching, worker))
            meanwhile()
            holder.commit()
            (served,) = serving.result().fetchone() or (None,)
        worker.commit()
        assert isinstance(served, int)
        return served

    return run


@pytest.mark.parametrize("limit_it", [limit_channel, limit_all_channels])
@pytest.mark.parametrize(
    "learns",
    [
        by_news,
        by_the_end_of_a_lease,
        by_the_sweep,
        pytest.param(by_a_new_count_of_all, marks=pytest.mark.shared_database(False)),
    ],
)
@pytest.mark.parametrize("knows_the_channel", [True, False])
def test_a_limit_that_is_committed_during_a_dequeue(
    session: Session,
    dequeue_held: Callable[[str, Callable[[], None]], int],
    limit_it: Callable[[Session], None],
    learns: Callable[[Session, fq.LeasedMessage], str],
    knows_the_channel: bool,
) -> None:
    """Two messages of the channel are leased already, without a limit."""
    put(session, "acme", 2)
    (first, _) = leases(session, 2)
    put(session, "acme", 4)
    lock = learns(session, first)
    if not knows_the_channel:
        sql(session, "DELETE FROM fairqueue.lane")  # As of a channel that had nothing to do for a while.
    assert dequeue_held(lock, lambda: limit_it(session)) == 0
    assert leases(session) == []
    check_invariants(session.connection(), caps=False)


@pytest.mark.shared_database(False)
def test_a_lease_that_is_held_when_all_are_counted(
    session: Session, raw: Raw, database_url: str, dequeue_held: Callable[[str, Callable[[], None]], int]
) -> None:
    """So that it may have ended, for all that is known, counts toward the limit that its channel gets then, too."""
    put(session, "acme", 2)
    (first, _) = leases(session, 2)
    put(session, "acme", 4)
    other = raw(database_url)
    other.execute("SELECT FROM fairqueue.message WHERE id = %s FOR UPDATE", (first.id,))
    lock = by_a_new_count_of_all(session, first)
    assert dequeue_held(lock, lambda: limit(session, max_concurrency=2)) == 0
    other.rollback()
    assert leases(session) == []
    check_invariants(session.connection())


@pytest.mark.parametrize("limit_it", [limit_channel, limit_all_channels])
def test_it_is_committed_by_one_that_has_been_at_it_for_long(
    session: Session,
    engine: Engine,
    dequeue_held: Callable[[str, Callable[[], None]], int],
    limit_it: Callable[[Session], None],
) -> None:
    """Since before other policies were read: its signal is looked for by itself."""
    with Session(engine) as old:
        old.execute(text("SELECT pg_current_xact_id()"))
        limit(session, "globex", weight=2)
        put(session, "acme", 2)
        leases(session, 2)
        put(session, "acme", 4)
        xid = old.scalars(text("SELECT CAST(pg_current_xact_id() AS text)")).one()
        assert session.scalars(text("SELECT CAST(urgent_open AS text[]) FROM fairqueue.rotation")).one() == [xid]
        session.commit()
        assert dequeue_held(HOLD_SIGNALS, lambda: limit_it(old)) == 0
    assert leases(session) == []
    check_invariants(session.connection(), caps=False)
