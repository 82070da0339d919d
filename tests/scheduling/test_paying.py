"""Each channel pays for what it got of a plan, whatever became of that before anybody settled; and for nothing else."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import lease_of, sql, wait_until
from tests.invariants import check_invariants
from tests.observing import value, waits_for_a_lock
from tests.scheduling.taking import (
    CHANNELS,
    GATE,
    DequeueAfter,
    Ids,
    Named,
    a_lane_comes_first,
    a_second_later,
    dequeue,
    drawn,
    finish,
    forget_news,
    plan_once,
)

pytestmark = [pytest.mark.usefixtures("clock_that_stands"), pytest.mark.shared_database]


def each_owes_for_what_it_got(session: Session) -> None:
    """Every lane stands where the messages that were leased of it lead to, each as often as it was."""
    check_invariants(session.connection())
    session.execute(text("SELECT fairqueue.scheduler_unplan('default')"))
    session.execute(text("UPDATE fairqueue.rotation SET lane_tag = NULL, lane_since = NULL"))
    tags = session.execute(text("SELECT channel, tag FROM fairqueue.lane")).all()
    served = session.execute(
        text("""
            SELECT m.channel, sum(m.attempt * fairqueue.lane_step(m.cost, coalesce(c.weight, 1)))
            FROM fairqueue.message m LEFT JOIN fairqueue.channel c ON c.name = m.channel
            WHERE m.attempt > 0 GROUP BY m.channel""")
    ).all()
    assert {*tags} == {*served}
    check_invariants(session.connection())


@pytest.mark.parametrize("seed", range(5))
def test_each_channel_owes_for_what_it_got(session: Session, workers: list[psycopg.Connection], seed: int) -> None:
    """Whatever its messages cost, and whatever was cancelled or given back in between, if not one after the other."""
    chance = random.Random(seed)  # noqa: S311 - not for secrets
    for channel in CHANNELS:
        session.add(fq.Channel(name=channel, weight=chance.choice([1, 2.5])))
        fq.enqueue_many(session, [{"channel": channel, "cost": chance.choice([1, 3, 40])} for _ in range(120)])
    session.commit()
    order = plan_once(session)
    gone = {*dequeue(workers[3])}  # which keeps its share, so that nobody takes the turn meanwhile
    given_back: set[int] = set()
    for _ in range(16):
        worker = chance.choice(workers[:3])
        given = {*dequeue(worker)}
        gone |= given
        left = [id_ for id_ in order if id_ not in gone | given_back][:16]
        if chance.random() < 0.5:
            session.execute(fq.cancel(chance.sample(left, 6)))
            forget_news(session)
        # What one that is rolled back had missed isn't known.
        missed = "SELECT count(*) FROM fairqueue.missed"
        if chance.random() < 0.3 and value(worker, missed) == session.scalar(text(missed)):
            worker.rollback()
            gone -= given
            given_back |= given
        else:
            worker.commit()
    workers[3].commit()
    a_second_later(session)
    lease_of(session, 5)
    each_owes_for_what_it_got(session)


def failed(session: Session, leased: list[fq.LeasedMessage], delay: float) -> None:
    session.execute(fq.fail(leased, "no luck", delay=delay))


def deferred(session: Session, leased: list[fq.LeasedMessage], delay: float) -> None:
    session.execute(fq.defer(leased, delay=delay))


@pytest.mark.parametrize("end", [failed, deferred])
@pytest.mark.parametrize("delay", [0, 3600])
def test_what_comes_back_was_served(
    session: Session,
    order: Ids,
    workers: list[psycopg.Connection],
    end: Callable[[Session, list[fq.LeasedMessage], float], None],
    delay: float,
) -> None:
    """Before anybody has settled what was taken. Its channel waits for its next turn, as the plan has it."""
    leased = lease_of(session, 6)
    assert [message.id for message in leased] == order[:6]
    done = dequeue(workers[0])
    workers[0].commit()
    end(session, leased[1:3], delay)
    session.commit()
    done += [message.id for message in lease_of(session, 6)]
    # Two places of it are those of the channels of what came back, which comes first there.
    assert done == (order[6:15] if delay else [*order[6:13], *order[1:3]])
    each_owes_for_what_it_got(session)


def test_who_checks_knows_that_the_plan_leads_to_it_no_more(session: Session, order: Ids) -> None:
    """Nobody has settled yet, and the news of it is lost."""
    failed(session, lease_of(session, 3)[:1], 0)
    session.commit()
    check_invariants(session.connection())
    signals = session.execute(text("DELETE FROM fairqueue.signal RETURNING message_id")).scalars()
    assert signals.all() == order[:1]
    problems = session.scalars(text("SELECT problem FROM fairqueue.queue_check()")).all()
    assert problems == ["a ready message that no lane and no signal leads to"]
    session.rollback()


def test_what_was_not_drawn_costs_nothing(session: Session, order: Ids, workers: list[psycopg.Connection]) -> None:
    """Though it is gone, and the plan is taken back for what somebody gave back."""
    dequeue(workers[0], 6)
    dequeue(workers[1], 6)
    workers[0].rollback()
    workers[1].commit()
    session.execute(fq.cancel(order[20:40]))
    session.commit()
    forget_news(session)
    a_second_later(session)
    assert [message.id for message in lease_of(session, 1)] == order[:1]
    each_owes_for_what_it_got(session)


def test_nor_does_what_was_drawn_after_a_lane(session: Session, workers: list[psycopg.Connection]) -> None:
    """Nobody has taken that, nor noted that it is gone."""
    id_, place = a_lane_comes_first(session)
    dequeue(workers[0], 3)
    for _ in range(3, place - 1):
        dequeue(workers[1], 1)
        workers[1].commit()
    workers[0].rollback()
    session.execute(fq.cancel(id_))
    session.commit()
    forget_news(session)
    assert len(lease_of(session, 5)) == 5
    each_owes_for_what_it_got(session)


def test_what_is_gone_costs_nothing_though_who_saw_it_had_to_give_way(
    session: Session, order: Ids, workers: list[psycopg.Connection], dequeue_after: DequeueAfter
) -> None:
    """Others are at it, and it has looked for long. What it knew isn't lost when it lets go of its share."""
    gone = order[3 : 3 + 36 * 3]

    def meanwhile() -> None:
        session.execute(fq.cancel(gone))
        session.commit()
        forget_news(session)

    done, served = dequeue_after(meanwhile, "commit", 3)
    assert done == order[:3]
    assert not {*served} & {*gone}
    each_owes_for_what_it_got(session)


@pytest.mark.shared_database(False)
@pytest.mark.parametrize("is_first", [True, False])
def test_what_somebody_knew_of_an_earlier_turn(
    session: Session, order: Ids, workers: list[psycopg.Connection], named: Named, is_first: bool
) -> None:
    """Another has had the turn before it, and has settled: nothing is said of that any more, neither by who then takes
    the turn nor by who waits behind that one for a share.
    """
    slow, gate, watching = named("first 42"), named("gate"), named("watching")
    watching.autocommit = True
    done = [dequeue(workers[0])]
    session.execute(fq.cancel(order[3 : 3 + 36 * 3]))
    session.commit()
    forget_news(session)
    sql(session, GATE)
    gate.execute("SELECT pg_advisory_lock(42)")
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(dequeue, slow)
        wait_until(lambda: waits_for_a_lock(watching, slow))
        workers[0].commit()
        a_second_later(session)
        done.append([message.id for message in lease_of(session, 3)])
        done.append(dequeue(workers[1]))
        workers[1].commit()
        assert drawn(session) == 3
        if not is_first:
            workers[2].execute("SELECT pg_advisory_xact_lock(fairqueue.queue_key('default', 1))")
        gate.execute("SELECT pg_advisory_unlock(42)")
        done.append(serving.result())
    slow.commit()
    assert drawn(session) == (0 if is_first else 6)
    assert session.scalar(text("SELECT count(*) FROM fairqueue.missed")) == 0
    finish(session, workers, *done)
