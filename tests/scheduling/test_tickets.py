"""The tickets by which dequeues side by side share out a plan: who has which, and what is when there are none."""

from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from sqlalchemy import Engine, text, update
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import alter, lease_of, plan_ahead, put, sql, wait_until
from tests.fixtures.connections import Raw
from tests.invariants import check_invariants
from tests.observing import impatient, observer, value, waits_for_a_lock
from tests.scheduling.taking import (
    CHANNELS,
    Ids,
    a_lane_comes_first,
    a_second_later,
    dequeue,
    drawn,
    finish,
    forget_news,
    give_all_away,
    ids_planned,
    plan_once,
)

pytestmark = [pytest.mark.usefixtures("clock_that_stands"), pytest.mark.shared_database]

TURN = "SELECT turn FROM fairqueue.rotation WHERE queue = 'default'"


def owners(session: Session) -> dict[str, list[int]]:
    """Which numbers each queue has."""
    found: dict[str, list[int]] = {}
    for number, queue in session.execute(text("SELECT number, queue FROM fairqueue.tickets ORDER BY number")).all():
        found.setdefault(queue, []).append(number)
    session.commit()
    return found


def test_each_queue_has_its_own_while_it_has_a_plan(session: Session) -> None:
    for queue in ("one", "two"):
        for channel in CHANNELS:
            put(session, channel, 60, queue=queue)
        lease_of(session, 1, queue=queue)
        plan_ahead(session, 100)
        lease_of(session, 1, queue=queue)
    assert owners(session) == {"one": [1], "two": [2]}
    served: dict[str, Ids] = {"one": [], "two": []}
    for _ in range(20):
        for queue, ids in served.items():
            ids += [message.id for message in lease_of(session, 3, queue=queue)]
    for ids in served.values():
        assert sorted(ids) == sorted(set(ids))
        assert len(ids) == 60
    while lease_of(session, 100, queue="one"):
        pass
    assert owners(session) == {"two": [2]}
    check_invariants(session.connection())


def test_without_any_all_are_served_in_turns(session: Session) -> None:
    """In the same order; and when there are some again, side by side from the next plan on."""
    for channel in CHANNELS:
        put(session, channel, 120)
    lease_of(session, 1)
    give_all_away(session)
    plan_ahead(session, 60)
    lease_of(session, 1)
    order = ids_planned(session)
    assert len(order) > 50
    turn = session.scalars(text(TURN)).one()
    done = [[message.id for message in lease_of(session, 3)] for _ in range(5)]
    assert [id_ for ids in done for id_ in ids] == order[:15]
    assert session.scalars(text(TURN)).one() == turn + 5
    session.commit()
    sql(session, "DELETE FROM fairqueue.tickets WHERE number = 64")
    plan_ahead(session, 300)
    done.append([message.id for message in lease_of(session, 30)])
    assert owners(session)["default"] == [64]
    turn = session.scalars(text(TURN)).one()
    done += [[message.id for message in lease_of(session, 3)] for _ in range(5)]
    assert session.scalars(text(TURN)).one() == turn
    assert drawn(session) == 15
    sql(session, "DELETE FROM fairqueue.tickets WHERE queue <> 'default'")
    finish(session, [], *done)


def test_who_gets_them_waits_for_nobody(session: Session, raw: Raw, database_url: str) -> None:
    """Another queue gets, or gives back, its own in a transaction that isn't over."""
    other = impatient(raw, database_url)
    other.execute("SELECT FROM fairqueue.scheduler_tickets('other', true)")
    for channel in CHANNELS:
        put(session, channel, 120)
    plan_once(session)
    assert owners(session) == {"default": [2]}
    other.commit()
    assert owners(session) == {"other": [1], "default": [2]}
    other.execute("SELECT FROM fairqueue.scheduler_tickets('other', false)")
    other.commit()
    assert owners(session) == {"default": [2]}


@pytest.mark.shared_database(False)
def test_one_that_another_got_meanwhile(session: Session, engine: Engine, raw: Raw, database_url: str) -> None:
    """Since the look at which are free: the next one is."""
    alter(engine, "scheduler_tickets", "IF pg_try", "PERFORM pg_advisory_xact_lock_shared(42); IF pg_try")
    first, gate, watching = raw(database_url), raw(database_url), observer(raw, database_url)
    gate.execute("SELECT pg_advisory_lock(42)")
    with ThreadPoolExecutor(1) as pool:
        getting = pool.submit(value, first, "SELECT tickets::text FROM fairqueue.scheduler_tickets('default', true)")
        wait_until(lambda: waits_for_a_lock(watching, first))
        sql(session, "INSERT INTO fairqueue.tickets VALUES (1, 'other')")
        gate.execute("SELECT pg_advisory_unlock(42)")
        assert getting.result() == "fairqueue.tickets_2"
    first.commit()
    assert owners(session) == {"other": [1], "default": [2]}
    sql(session, "DELETE FROM fairqueue.tickets")


def test_a_queue_with_a_limit_gets_none(session: Session) -> None:
    """As it is served in turns anyway. What is planned for it is served in its order."""
    session.add(fq.Queue(name="default", max_concurrency=1000))
    session.commit()
    for channel in CHANNELS:
        put(session, channel, 120)
    order = plan_once(session)
    assert len(order) > 500
    assert owners(session) == {}
    assert [message.id for message in lease_of(session, 9)] == order[:9]


def test_a_queue_that_gets_a_limit_gives_them_back(
    session: Session, order: Ids, workers: list[psycopg.Connection]
) -> None:
    """At once, though its limit has been reached; what was taken without the turn counts, and the plan goes on."""
    done = dequeue(workers[0])
    workers[0].commit()
    session.add(fq.Queue(name="default", max_concurrency=7))  # with those that were served before the plan
    session.commit()
    assert owners(session) == {"default": [1]}
    done += [message.id for message in lease_of(session, 3)]
    assert owners(session) == {}
    assert fq.check(session) == []
    session.execute(update(fq.Queue).values(max_concurrency=None))
    session.commit()
    done += [message.id for message in lease_of(session, 9)]
    assert done == order[: len(done)]
    finish(session, workers, done)


def the_table_is_rewritten(session: Session) -> None:
    session.commit()
    engine = session.get_bind()
    assert isinstance(engine, Engine)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM FULL fairqueue.message"))


@pytest.mark.shared_database(False)
class TestNothingIsLost:
    """Where the rows of what is planned are others, which no signal tells of."""

    @pytest.fixture(autouse=True)
    def with_gaps(self, session: Session) -> None:
        put(session, "gone", 50)
        session.execute(text("SELECT FROM fairqueue.message_cancel(ARRAY(SELECT id FROM fairqueue.message))"))
        session.commit()

    def test_of_what_was_given_back(self, session: Session, order: Ids, workers: list[psycopg.Connection]) -> None:
        dequeue(workers[0])
        workers[0].rollback()
        the_table_is_rewritten(session)
        assert drawn(session) == 3
        a_second_later(session)
        assert [message.id for message in lease_of(session, 3)] == order[:3]
        finish(session, workers, order[:3])

    def test_of_what_somebody_looked_for_in_vain(
        self, session: Session, order: Ids, workers: list[psycopg.Connection]
    ) -> None:
        """While others were there, and didn't let it have the turn."""
        workers[1].execute("SELECT fairqueue.scheduler_turn('default', true)")
        the_table_is_rewritten(session)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            dequeue(workers[0])
        workers[0].rollback()
        workers[1].commit()
        assert drawn(session) == 3 * 36
        assert [message.id for message in lease_of(session, 3)] == order[:3]
        finish(session, workers, order[:3])

    def test_of_a_dump_whose_sequences_went_on(
        self, session: Session, order: Ids, workers: list[psycopg.Connection]
    ) -> None:
        sql(session, "SELECT setval(tickets, ticket_base + 400) FROM fairqueue.rotation")
        the_table_is_rewritten(session)
        assert [message.id for message in lease_of(session, 3)] == order[:3]
        finish(session, workers, order[:3])


def test_what_comes_after_a_lane_was_not_taken(session: Session) -> None:
    """Though it is gone: the lane is not passed."""
    id_, place = a_lane_comes_first(session)
    session.execute(fq.cancel(id_))
    session.commit()
    done = [[message.id for message in lease_of(session, 1)] for _ in range(place)]
    (last,) = session.scalars(text("SELECT max(id) FROM fairqueue.message WHERE channel = 'few'"))
    assert done[-1] == [last]
    finish(session, [], *done)


def test_who_has_nothing_more_gives_them_back(session: Session, order: Ids) -> None:
    """Also where the plan was taken back first."""
    session.execute(text("SELECT FROM fairqueue.message_cancel(ARRAY(SELECT id FROM fairqueue.message))"))
    session.commit()
    assert owners(session) == {"default": [1]}
    assert lease_of(session, 1) == []
    assert owners(session) == {}


@pytest.mark.shared_database(False)
def test_those_of_a_batch_need_not_follow_one_another(
    session: Session, order: Ids, workers: list[psycopg.Connection]
) -> None:
    """Others have drawn those in between, and are about to take what is planned there."""
    sql(session, "ALTER SEQUENCE fairqueue.tickets_1 INCREMENT 2")
    done = [dequeue(workers[0], 20)]
    assert done == [order[1:41:2]]
    session.execute(fq.cancel(order[45]))
    session.commit()
    forget_news(session)
    done.append(dequeue(workers[1], 3))
    assert done[1] == [order[41], order[43], order[47]]
    assert value(workers[1], "SELECT count(*) FROM fairqueue.missed") == 1
    finish(session, workers, *done)


@pytest.mark.parametrize(
    "tickets",
    ["setval(tickets, ticket_base + 32)", "setval(tickets, ticket_base - 1)", "setval(tickets, 1, false)"],
)
def test_a_sequence_that_jumped(session: Session, order: Ids, tickets: str) -> None:
    """Ahead, as after a crash of the server; back, as by hand; or that is as new, where the tables were copied."""
    done = [message.id for message in lease_of(session, 3)]
    a_second_later(session)
    done += [message.id for message in lease_of(session, 3)]
    sql(session, f"SELECT {tickets} FROM fairqueue.rotation")
    done += [message.id for message in lease_of(session, 3)]
    assert drawn(session) >= 0
    a_second_later(session)
    served = done + [message.id for message in lease_of(session, 100)]
    assert len(set(served)) == 109
    assert done[:6] == order[:6]
    check_invariants(session.connection())
    session.commit()
    finish(session, [], served)


def test_a_repair_gives_them_back(session: Session, order: Ids, workers: list[psycopg.Connection]) -> None:
    done = dequeue(workers[0])
    workers[0].commit()
    assert owners(session) == {"default": [1]}
    sql(session, "SELECT fairqueue.queue_repair()")
    assert owners(session) == {}
    assert fq.check(session) == []
    session.commit()
    finish(session, workers, done)


def test_a_queue_that_is_paused_keeps_them(session: Session, order: Ids) -> None:
    """What is planned is served side by side again, without a new plan."""
    session.execute(fq.pause(queue="default"))
    session.commit()
    assert [lease_of(session, 1) for _ in range(3)] == [[], [], []]
    assert owners(session) == {"default": [1]}
    session.execute(fq.resume(queue="default"))
    session.commit()
    done = [[message.id for message in lease_of(session, 3)]]
    turn = session.scalars(text(TURN)).one()
    done += [[message.id for message in lease_of(session, 3)] for _ in range(5)]
    assert session.scalars(text(TURN)).one() == turn
    assert [id_ for ids in done for id_ in ids] == order[:18]
    finish(session, [], *done)


def test_those_of_a_queue_that_is_not_there(session: Session) -> None:
    """Somebody has removed its rows."""
    sql(session, "INSERT INTO fairqueue.tickets VALUES (5, 'gone')")
    assert [(d.queue, d.problem) for d in fq.check(session)] == [("gone", "tickets of the queue")]
    sql(session, "SELECT fairqueue.queue_repair('gone')")
    assert fq.check(session) == []
    assert owners(session) == {}
