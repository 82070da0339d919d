"""Leases under limits: taken, held by others in open transactions, and served to the end with all limits kept."""

import psycopg
from sqlalchemy import text
from sqlalchemy.orm import Session

import fairqueue as fq
from tests import limiting
from tests.acts import complete, lease_of
from tests.invariants import check_invariants

Lease = fq.LeasedMessage
LEASE = 10_000


def leases(session: Session, count: int = 100) -> list[Lease]:
    batch = lease_of(session, count, LEASE)
    check_invariants(session.connection(), caps=False)
    session.commit()
    return batch


def limit(session: Session, at: int | None, channel: str = "acme") -> None:
    limiting.limit(session, channel, max_concurrency=at)


def limit_queue(session: Session, at: int | None) -> None:
    limiting.limit_queue(session, max_concurrency=at)


def limit_all(session: Session, at: int | None) -> None:
    limiting.limit_queue(session, channel_max_concurrency=at)


def check_all_served(session: Session, running: list[Lease]) -> None:
    """Completing one after the other, everything is served, and no limit is ever exceeded; the last end at once."""
    ended = [row.id for row in session.execute(text("SELECT id FROM fairqueue.message WHERE leased_until IS NULL"))]
    session.commit()
    served: list[int] = []
    while True:
        batch = leases(session)
        running = [*running, *batch]
        served += [lease.id for lease in batch]
        if not running:
            break
        number = 1 if len(served) < len(ended) else len(running)
        assert complete(session, running[:number]) == ["completed"] * number
        running = running[number:]
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
