"""Who is under way when news is read tells its own later: at the horizon, or on the list of those who began before it.

While there is a plan, each dequeue looks for all of them, and serves what is planned only where there are none.
"""

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import lease_of, plan_ahead, put, sql
from tests.fixtures.connections import Raw
from tests.invariants import check_invariants
from tests.limiting import limit
from tests.scheduling.taking import Ids, dequeue, drawn, finish

pytestmark = pytest.mark.shared_database

SEND = "INSERT INTO fairqueue.message (channel) VALUES ('late') RETURNING id"
LIMIT = "SELECT fairqueue.channel_set('a', max_concurrency => 1)"


def under_way(connection: psycopg.Connection) -> str:
    """Its transaction."""
    (xid,) = connection.execute("SELECT pg_current_xact_id()::text").fetchone() or ("",)
    return str(xid)


def listed(session: Session, xid: str) -> tuple[bool, bool]:
    """Whether it is on the list of those that messages, and policies, are awaited of."""
    query = "SELECT :xid = ANY (news_open::text[]), :xid = ANY (urgent_open::text[]) FROM fairqueue.rotation"
    messages, policies = session.execute(text(query), {"xid": xid}).one()
    session.commit()
    return messages, policies


def horizons(session: Session) -> tuple[int, int]:
    query = "SELECT news_from::text::bigint, urgent_from::text::bigint FROM fairqueue.rotation"
    messages, policies = session.execute(text(query)).one()
    session.commit()
    return messages, policies


def news_of_each_kind(session: Session) -> None:
    put(session, "b")
    limit(session, "b", weight=2)


def read(session: Session) -> Ids:
    """All of it has been read, and much is planned: what was served meanwhile."""
    served = lease_of(session, 12)
    plan_ahead(session, 600)
    served += lease_of(session, 1)
    plan_ahead(session, 0)
    return [message.id for message in served]


def awaited_of_one_kind(session: Session, late: psycopg.Connection, kind: str) -> Ids:
    """What was served until ``late`` was on the lists, and is then on this one alone.

    As if it had come to an end before the news of the other kind was read.
    """
    news_of_each_kind(session)
    served = read(session)
    assert listed(session, under_way(late)) == (True, True)
    other = {"news_open": "urgent_open", "urgent_open": "news_open"}[kind]
    sql(session, f"UPDATE fairqueue.rotation SET {other} = '{{}}'")
    return served


@pytest.fixture
def late(raw: Raw, database_url: str) -> psycopg.Connection:
    return raw(database_url)


@pytest.mark.usefixtures("order")
def test_a_message_that_was_committed_late(
    session: Session, late: psycopg.Connection, workers: list[psycopg.Connection]
) -> None:
    """Though it was sent before the last turn: its channel has its place in the round."""
    (id_,) = late.execute(SEND).fetchone() or (0,)
    done = [awaited_of_one_kind(session, late, "news_open"), dequeue(workers[0], 1)]
    workers[0].commit()
    late.commit()
    done.append(dequeue(workers[1], 7))
    assert id_ in done[-1]
    finish(session, workers, *done)


@pytest.mark.usefixtures("order")
def test_a_limit_that_was_committed_late(
    session: Session, late: psycopg.Connection, workers: list[psycopg.Connection]
) -> None:
    """It was set before the last turn, and holds from the next dequeue on."""
    late.execute(LIMIT)
    done = [awaited_of_one_kind(session, late, "urgent_open"), dequeue(workers[0], 1)]
    workers[0].commit()
    late.commit()
    done.append(dequeue(workers[1], 24))
    workers[1].commit()
    of_a = session.scalars(text("SELECT id FROM fairqueue.message WHERE channel = 'a'")).all()
    assert {*done[0]} & {*of_a}
    assert not {*done[2]} & {*of_a}
    check_invariants(session.connection(), caps=False)


@pytest.mark.parametrize("act", [SEND, LIMIT])
@pytest.mark.usefixtures("order")
def test_who_began_after_all_news_is_on_no_list(
    session: Session, late: psycopg.Connection, workers: list[psycopg.Connection], act: str
) -> None:
    """The horizon stands there, so each dequeue looks for what comes from it on, once for all."""
    news_of_each_kind(session)
    late.execute(act.encode())
    sql(session, "SELECT pg_current_xact_id()")  # who begins after that, has nothing to tell, and ends before
    done = [read(session)]
    assert listed(session, under_way(late)) == (False, False)
    turn = session.scalar(text("SELECT turn FROM fairqueue.rotation"))
    session.commit()
    done.append(dequeue(workers[0], 3))
    workers[0].commit()
    assert session.scalar(text("SELECT turn FROM fairqueue.rotation")) == turn
    session.commit()
    late.commit()
    done.append(dequeue(workers[1], 24))
    workers[1].commit()
    assert session.scalar(text("SELECT turn FROM fairqueue.rotation")) > turn
    channels = session.scalars(
        text("SELECT channel FROM fairqueue.message WHERE id = ANY(:ids)"), {"ids": done[-1]}
    ).all()
    assert "late" in channels if act == SEND else "a" not in channels
    check_invariants(session.connection(), caps=False)


def take_what_is_planned(session: Session) -> None:
    """Until those who took from the plan are through, and the turn comes."""
    while not drawn(session):
        lease_of(session, 20)
    while drawn(session):
        lease_of(session, 20)


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("has_ended", [True, False])
def test_the_list_is_made_anew_when_a_plan_has_been_taken(
    session: Session, late: psycopg.Connection, has_ended: bool
) -> None:
    """Until then each dequeue looks for who was on it, though it had nothing to tell. What was read stays behind."""
    xid = under_way(late)
    news_of_each_kind(session)
    read(session)
    if has_ended:
        late.rollback()
    before = horizons(session)
    assert listed(session, xid) == (True, True)
    take_what_is_planned(session)
    assert listed(session, xid) == ((False, False) if has_ended else (True, True))
    assert all(now > then for now, then in zip(horizons(session), before, strict=True))


@pytest.mark.usefixtures("order")
def test_who_stays_at_the_horizon_goes_on_the_list(session: Session, late: psycopg.Connection) -> None:
    """Or each dequeue would walk over all that it writes."""
    news_of_each_kind(session)
    xid = under_way(late)
    read(session)
    assert listed(session, xid) == (False, False)
    for _ in range(2):
        take_what_is_planned(session)
        plan_ahead(session, 300)
    assert listed(session, xid) == (True, True)
    late.execute(SEND)
    late.commit()
    served = session.scalars(fq.dequeue(limit=24)).all()
    assert "late" in {message.channel for message in served}
