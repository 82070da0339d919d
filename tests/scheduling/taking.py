"""Dequeues side by side, each in a transaction that ends when the test says so."""

from collections.abc import Callable, Sequence
from typing import Protocol

import psycopg
from sqlalchemy import select, text, update
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import lease_of, plan_ahead, put, sql
from tests.invariants import check_invariants
from tests.observing import DRAWN
from tests.scheduling.twins import planned

CHANNELS = "abcdef"
Ids = list[int]
#: A connection with this name.
Named = Callable[[str], psycopg.Connection]


class DequeueAfter(Protocol):
    """What happens between two dequeues, how the transaction of the first ends, and their size: what both return."""

    def __call__(self, meanwhile: Callable[[], None], end: str, size: int = 24) -> tuple[Ids, Ids]: ...


#: Keys as they are, but that some wait for whoever has lock 42: "first 42" before it looks whether it is the first,
#: "plans 42" before it plans.
GATE = """
CREATE OR REPLACE FUNCTION fairqueue.queue_key(queue text, part integer DEFAULT 0) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_name CONSTANT text := current_setting('application_name');
BEGIN
    IF v_name LIKE 'first %' AND part = 1 OR v_name LIKE 'plans %' AND part = 2 THEN
        PERFORM pg_advisory_xact_lock_shared(regexp_replace(v_name, '\\D', '', 'g')::bigint);
    END IF;
    RETURN hashtextextended(queue, hashtextextended('fairqueue', 720720 + part));
END
$$
"""


def ids_planned(session: Session) -> Ids:
    """In their order."""
    return [id_ for _, id_ in planned(session)]


def backlog(session: Session, ahead: int) -> None:
    """Six channels with 120 messages each, of which about so many are planned."""
    fill(session)
    plan(session, ahead)


def fill(session: Session) -> None:
    for channel in CHANNELS:
        put(session, channel, 120)


def plan(session: Session, ahead: int) -> None:
    """About so many of what is there are planned."""
    lease_of(session, 1)
    plan_ahead(session, ahead)
    lease_of(session, 1)


def plan_once(session: Session) -> Ids:
    """Some 600 of what is there are planned, which nobody continues: their ids, in their order."""
    plan(session, 600)
    plan_ahead(session, 0)
    return ids_planned(session)


def a_lane_comes_first(session: Session) -> tuple[int, int]:
    """Much is planned, but the lane of channel few stands before the end of it: the id of what is planned next after
    that lane, and its place from here.
    """
    fill(session)
    put(session, "few", 7)
    plan_once(session)
    after = text("""
        SELECT e.id, p.place + e.nth - 1 - r.place AS place
        FROM fairqueue.rotation r, fairqueue.plan p,
            unnest(p.ids, p.tags, p.sinces) WITH ORDINALITY AS e (id, tag, since, nth)
        WHERE (e.tag, e.since) > (r.lane_tag, r.lane_since) AND p.place + e.nth - 1 > r.place
        ORDER BY p.place, e.nth LIMIT 1""")
    id_, place = session.execute(after).one()
    session.commit()
    return id_, place


def drawn(session: Session) -> int:
    """For how many messages of the plan there have been tickets since the last turn."""
    tickets: int = session.scalars(text(DRAWN)).one()
    session.commit()
    return tickets


def give_all_away(session: Session) -> None:
    """All tickets: no queue that makes a plan gets any."""
    sql(session, "INSERT INTO fairqueue.tickets SELECT n, 'other' || n FROM generate_series(1, 64) AS n")


def a_second_later(session: Session) -> None:
    """The next dequeue takes the turn, and finds what others had drawn and didn't take."""
    sql(session, "UPDATE fairqueue.rotation SET clock = clock - 1001")


def forget_news(session: Session) -> None:
    """What was done is not known yet, as if it had been committed while others were at it."""
    sql(session, "DELETE FROM fairqueue.signal")


def dequeue(worker: psycopg.Connection, limit: int = 3) -> Ids:
    return [id_ for (id_,) in worker.execute("SELECT id FROM fairqueue.message_dequeue('default', %s, 3600)", [limit])]


def finish(session: Session, workers: Sequence[psycopg.Connection], *done: Ids) -> None:
    """All that is left is served, each message once."""
    for worker in workers:
        worker.commit()
    check_invariants(session.connection())
    session.commit()
    served = [id_ for ids in done for id_ in ids]
    while batch := lease_of(session, 40):
        served += [message.id for message in batch]
        check_invariants(session.connection())
        session.commit()
    leased = session.scalars(text("SELECT id FROM fairqueue.message WHERE leased_until IS NOT NULL")).all()
    assert len(leased) == session.scalar(text("SELECT count(*) FROM fairqueue.message"))
    assert len(served) == len(set(served))
    assert set(served) <= set(leased)


def cancelled(session: Session, id_: int) -> None:
    session.execute(fq.cancel(id_))


def replaced(session: Session, id_: int) -> None:
    channel = session.scalars(select(fq.Message.channel).where(fq.Message.id == id_)).one()
    session.execute(update(fq.Message).where(fq.Message.id == id_).values(key="k"))
    session.commit()
    assert fq.enqueue_unique(session, channel, "new", key="k", on_conflict="replace") == id_
