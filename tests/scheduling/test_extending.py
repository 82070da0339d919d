"""Before a plan is used up, one dequeue plans on, while the others take what was planned before."""

import random
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import lease_of, plan_ahead, put, sql, wait_until
from tests.invariants import check_invariants
from tests.observing import value, waits_for_a_lock
from tests.scheduling.taking import CHANNELS, GATE, Ids, Named, backlog, dequeue, finish, ids_planned
from tests.scheduling.twins import Twins, heads_of_many, planned

pytestmark = [pytest.mark.usefixtures("clock_that_stands"), pytest.mark.shared_database]


@pytest.fixture
def short(session: Session) -> Ids:
    """Six channels with 120 messages each, of which so few are planned that the next dequeue plans on."""
    backlog(session, 120)
    return ids_planned(session)


def check_rotates(session: Session) -> None:
    """Each channel comes once in six, and its messages in their order."""
    order = planned(session)
    for place, (channel, id_) in enumerate(order[6:]):
        assert order[place] == (channel, id_ - 1)


def test_others_take_while_one_plans(session: Session, short: Ids, workers: list[psycopg.Connection]) -> None:
    done = [dequeue(worker) for worker in workers[:3]]
    assert done == [short[:3], short[3:6], short[6:9]]
    workers[1].commit()
    assert ids_planned(session) == short[:3] + short[6:]
    done.append(dequeue(workers[1], 6))
    assert done[3] == short[9:15]
    for worker in workers:
        worker.commit()
    order = ids_planned(session)
    assert order[: len(short) - 15] == short[15:]
    assert len(order) > 200
    check_rotates(session)
    finish(session, workers, *done)


def test_what_follows_is_taken_side_by_side(session: Session, short: Ids, workers: list[psycopg.Connection]) -> None:
    done = [dequeue(workers[0], 6)]
    workers[0].commit()
    order = ids_planned(session)
    turn = session.scalar(text("SELECT turn FROM fairqueue.rotation"))
    session.commit()
    done += [dequeue(worker, 8) for worker in [workers[0], workers[1]] * 4]
    done += [dequeue(worker, 8) for worker in workers]
    assert [id_ for ids in done[1:] for id_ in ids] == order[: 12 * 8]
    assert session.scalar(text("SELECT turn FROM fairqueue.rotation")) == turn
    finish(session, workers, *done)


def test_what_is_rolled_back_was_not_planned(session: Session, short: Ids, workers: list[psycopg.Connection]) -> None:
    dequeue(workers[0])
    workers[0].rollback()
    assert ids_planned(session) == short
    assert dequeue(workers[2]) == short[3:6]
    workers[2].commit()
    planned = ids_planned(session)
    assert planned[: len(short) - 3] == short[:3] + short[6:]
    assert len(planned) > 200
    finish(session, workers)


def test_once_is_enough(session: Session, short: Ids, workers: list[psycopg.Connection]) -> None:
    """Though the next one began before that was known; and no more is planned until half has been served."""
    state = text("SELECT planned, xmin::text FROM fairqueue.rotation")
    done = [dequeue(worker) for worker in workers]
    for worker in workers:
        worker.commit()
    before = session.execute(state).one()
    done += [dequeue(worker) for worker in workers]
    for worker in workers:
        worker.commit()
    assert session.execute(state).one() == before
    session.commit()
    finish(session, workers, *done)


@pytest.mark.shared_database(False)
def test_who_comes_too_late_to_plan(
    session: Session, short: Ids, workers: list[psycopg.Connection], watching: psycopg.Connection, named: Named
) -> None:
    """When it began there was need of it, and when it comes to it, it has been done."""
    sql(session, GATE)
    gate, late = named("gate"), named("plans 42")
    gate.execute("SELECT pg_advisory_lock(42)")
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(dequeue, late)
        wait_until(lambda: waits_for_a_lock(watching, late))
        done = [dequeue(workers[0])]
        workers[0].commit()
        state = text("SELECT planned, ahead, plan_at FROM fairqueue.rotation")
        before = session.execute(state).one()
        session.commit()
        gate.execute("SELECT pg_advisory_unlock(42)")
        done.append(serving.result())
    late.commit()
    assert done == [short[3:6], short[:3]]
    assert session.execute(state).one() == before
    session.commit()
    finish(session, workers, *done)


def test_a_turn_plans_on_where_too_little_is_left(session: Session, short: Ids) -> None:
    """Too little to be taken side by side."""
    plan_ahead(session, 0)
    lease_of(session, 80)
    plan_ahead(session, 300)
    left = ids_planned(session)
    assert 20 < len(left) < 40
    assert [message.id for message in lease_of(session, 5)] == left[:5]
    assert len(ids_planned(session)) > 300
    check_rotates(session)


def test_what_was_served_is_forgotten(session: Session, short: Ids) -> None:
    """Of the plan, too, which never has more than is ahead, and what was served since it was last continued."""
    sizes = set()
    while lease_of(session, 7):
        sizes.add(session.scalar(text("SELECT coalesce(sum(cardinality(ids)), 0) FROM fairqueue.plan")))
        plan_ahead(session, 60)
    assert 60 < max(sizes) < 4 * 60 + 120


def test_where_nothing_can_be_planned(session: Session, workers: list[psycopg.Connection]) -> None:
    """It isn't tried again each time."""
    for channel in CHANNELS:
        put(session, channel, 22)
    lease_of(session, 1)
    plan_ahead(session, 200)
    lease_of(session, 1)
    assert len(planned(session)) == 6 * 22 - 6 - 2
    state = text("SELECT planned, ahead < plan_at AS is_off, xmin::text FROM fairqueue.rotation")
    before = session.execute(state).one()
    session.commit()
    done = [dequeue(workers[0])]
    workers[0].commit()
    after = session.execute(state).one()
    session.commit()
    assert (before.planned, before.is_off, after.planned, after.is_off) == (before.planned, False, before.planned, True)
    done.append(dequeue(workers[0]))
    workers[0].commit()
    assert session.execute(state).one() == after
    finish(session, workers, *done)


def test_heads_that_follow_heads(session: Session, clock_that_stands: None) -> None:
    """A channel that waits then, for its next message, comes sooner than any that waited before."""
    twins = Twins(session)
    heads_of_many(twins)
    due = text("SELECT min(due) FROM fairqueue.lane WHERE due > 0")
    before, first = planned(session), session.scalars(due).one()
    plan_ahead(session, 18)
    twins.serve(1)
    assert planned(session)[: len(before) - 1] == before[1:]
    assert session.scalars(due).one() < first
    assert fq.check(session) == []
    twins.open()
    twins.drain(7)


def test_a_channel_that_comes_before_what_follows(
    session: Session, short: Ids, workers: list[psycopg.Connection]
) -> None:
    """It has its place in each round, those that were planned before it came and those that are planned then."""
    dequeue(workers[0], 6)
    late = put(session, "late", 40)
    workers[0].commit()
    check_rotates(session)
    served = lease_of(session, 7 * 30)
    assert [message.id for message in served if message.channel == "late"] == late[:30]
    assert all({m.channel for m in served[k : k + 7]} == {*CHANNELS, "late"} for k in range(0, len(served), 7))
    check_invariants(session.connection())


def test_a_channel_that_comes_is_in_the_next_plan(session: Session, short: Ids) -> None:
    """As the one that there is isn't continued before it."""
    put(session, "late", 120)
    served = 0
    while not any(channel == "late" for channel, _ in planned(session)):
        served += len(lease_of(session, 2))
        assert served < 300


def test_a_limit_that_is_set_meanwhile(session: Session, short: Ids, workers: list[psycopg.Connection]) -> None:
    """It holds for what is planned behind its back, too."""
    dequeue(workers[0], 6)
    session.merge(fq.Channel("a", max_concurrency=3))
    session.commit()
    workers[0].commit()
    served = lease_of(session, 200)
    of_a = "SELECT count(*) FROM fairqueue.message WHERE channel = 'a' AND leased_until IS NOT NULL"
    assert session.scalar(text(of_a)) == 3
    assert len(served) == 200
    check_invariants(session.connection())


@pytest.mark.shared_database(False)
def test_they_die_at_any_time(session: Session, database_url: str, watching: psycopg.Connection) -> None:
    """Who plans, too: what is left is served by the others, each message once, and the scheduler is never wrong."""
    for number in range(20):
        put(session, f"c{number}", 50)
    lease_of(session, 1)
    mortals = create_engine(database_url, connect_args={"application_name": "mortal"})

    def work(seed: int) -> Ids:
        dice = random.Random(seed)  # noqa: S311
        served: Ids = []
        while True:
            with suppress(OperationalError), Session(mortals) as worker:
                while batch := lease_of(worker, dice.randint(1, 8)):
                    served += [message.id for message in batch]
                return served

    kill = """
        SELECT count(pg_terminate_backend(pid)) FROM (
            SELECT pid FROM pg_stat_activity
            WHERE application_name = 'mortal' AND datname = current_database() AND state <> 'idle'
            ORDER BY random() LIMIT 1) a"""
    killed, leased = 0, 0
    with ThreadPoolExecutor(4) as threads:
        working = [threads.submit(work, seed) for seed in range(4)]
        while wait(working, 0.01).not_done:  # to leave time to them
            assert fq.check(session) == []
            now = session.scalar(text("SELECT count(*) FROM fairqueue.message WHERE leased_until IS NOT NULL")) or 0
            session.commit()
            if now >= leased + 20:
                leased = now
                plan_ahead(session, 60)  # so that there is often need of more
                killed += value(watching, kill)
    mortals.dispose()
    served = [id_ for future in working for id_ in future.result()]
    assert len(served) == len(set(served))
    assert session.scalars(text("SELECT id FROM fairqueue.message WHERE leased_until IS NULL")).all() == []
    assert killed > 1
    assert (session.scalar(text("SELECT planned FROM fairqueue.rotation")) or 0) > 300
    check_invariants(session.connection())
