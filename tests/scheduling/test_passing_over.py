"""Messages that dequeues side by side pass over: cancelled, replaced, or given back by one that rolled back.

What is left of them comes next. Nobody gets for nothing what was served past them, and who arrives then waits for none
of it.
"""

from collections import Counter
from collections.abc import Callable

import psycopg
import pytest
from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import lease_of, put, sql
from tests.invariants import check_invariants
from tests.scheduling.taking import (
    CHANNELS,
    Ids,
    a_second_later,
    cancelled,
    dequeue,
    finish,
    forget_news,
    plan_once,
    replaced,
)

pytestmark = [pytest.mark.usefixtures("clock_that_stands"), pytest.mark.shared_database]


def test_a_message_that_is_gone_keeps_nobody(session: Session, order: Ids, workers: list[psycopg.Connection]) -> None:
    """It is passed over while others are at it. Within a second the turn is taken: what comes next is found anew."""
    done = [dequeue(workers[0])]
    assert session.execute(fq.cancel(order[3:5])).all() == [(order[3], "cancelled"), (order[4], "cancelled")]
    session.commit()
    done.append(dequeue(workers[1]))
    assert done[1] == order[5:8]
    workers[0].commit()
    workers[1].commit()
    turn = "SELECT turn FROM fairqueue.rotation"
    before = session.scalar(text(turn))
    a_second_later(session)
    done.append(dequeue(workers[2]))
    workers[2].commit()
    session.commit()
    assert session.scalar(text(turn)) != before
    finish(session, workers, *done)


def test_who_is_alone_takes_the_turn_at_once(session: Session, order: Ids, workers: list[psycopg.Connection]) -> None:
    """What comes next in the place of one that is gone is found before anything that is planned after it."""
    session.execute(fq.cancel(order[2]))
    session.commit()
    (channel,) = session.scalars(select(fq.Message.channel).where(fq.Message.id == order[8]))
    (instead,) = session.scalars(
        select(func.min(fq.Message.id)).where(fq.Message.channel == channel, fq.Message.id > order[2])
    )
    assert instead is not None
    assert dequeue(workers[0]) == [*order[:2], instead]
    finish(session, workers, [*order[:2], instead])


def test_many_that_are_gone_keep_nobody(session: Session, order: Ids, workers: list[psycopg.Connection]) -> None:
    done = [dequeue(workers[0])]
    session.execute(fq.cancel(order[4:100]))
    session.commit()
    forget_news(session)
    done += [dequeue(workers[1], 5), dequeue(workers[2])]
    assert done[1:] == [[order[3], *order[100:104]], order[104:107]]
    finish(session, workers, *done)


def test_only_what_is_gone_was_missed(session: Session, order: Ids, workers: list[psycopg.Connection]) -> None:
    """And what was there, which somebody gave back, is found as well."""
    done = [dequeue(workers[0])]
    session.execute(fq.cancel([order[3], order[5]]))
    session.commit()
    forget_news(session)
    assert dequeue(workers[1]) == [order[4], *order[6:8]]
    done.append(dequeue(workers[2]))
    assert done[1] == order[8:11]
    missed = workers[1].execute("SELECT place FROM fairqueue.missed ORDER BY place").fetchall()
    place = session.scalars(text("SELECT place FROM fairqueue.rotation")).one()
    assert [number - place for (number,) in missed] == [4, 6]
    workers[1].rollback()
    finish(session, workers, *done)


@pytest.mark.parametrize("size", [6, 30, 60])
def test_who_comes_after_a_rollback_waits_for_no_more_than_a_round(
    session: Session, order: Ids, workers: list[psycopg.Connection], size: int
) -> None:
    """However much was given back: all stand where as many messages would have led to."""
    dequeue(workers[0], size)
    done = dequeue(workers[1], size)
    workers[0].rollback()
    workers[1].commit()
    put(session, "late", 50)
    batch = lease_of(session, 100)
    assert [message.channel for message in batch].index("late") <= 2 * len(CHANNELS)
    finish(session, workers, done, [message.id for message in batch])


def prepared(session: Session, channels: str, costs: list[float]) -> Ids:
    """Channels with messages of these costs each, most of them planned: their ids, in that order."""
    for channel in channels:
        fq.enqueue_many(session, [{"channel": channel, "cost": cost} for cost in costs])
    session.commit()
    return plan_once(session)


@pytest.mark.parametrize("channels", ["a", "ab"])
def test_who_comes_after_much_was_cancelled_waits_for_no_more_than_a_round(
    session: Session, workers: list[psycopg.Connection], channels: str
) -> None:
    """While others were at it, who passed over it."""
    order = prepared(session, channels, [1] * 400)
    done = [dequeue(workers[0], 10)]
    workers[2].execute("SELECT * FROM fairqueue.message_cancel(%s)", [order[10:110]])
    for _ in range(4):
        done.append(dequeue(workers[1], 10))
        workers[1].commit()
    workers[2].commit()
    workers[0].commit()
    done.append([message.id for message in lease_of(session, 1)])  # which settles
    check_invariants(session.connection())
    put(session, "late", 300)
    batch = lease_of(session, 1 + 2 * len(channels))
    assert "late" in [message.channel for message in batch]
    finish(session, workers, *done, [message.id for message in batch])


@pytest.mark.parametrize("channels", ["a", "ab"])
@pytest.mark.parametrize("costs", [[100] * 40 + [1] * 300, [1] * 40 + [100] * 300])
def test_who_comes_after_a_rollback_is_neither_ahead_nor_behind(
    session: Session, workers: list[psycopg.Connection], channels: str, costs: list[float]
) -> None:
    """Though what was given back cost much less than what was taken past it, or much more."""
    prepared(session, channels, costs)
    dequeue(workers[0], 30 * len(channels))
    for count in (10, 15, 15):
        dequeue(workers[1], count * len(channels))
        workers[1].commit()
    workers[0].rollback()
    put(session, "late", 300)
    batch = [message.channel for message in lease_of(session, 250)]
    check_invariants(session.connection())
    assert batch.index("late") <= 2 * len(channels)
    # No further behind than by the dearest message.
    assert batch.index("a") <= max(costs) + 1


def taken_past(session: Session, workers: list[psycopg.Connection], lose: Callable[[], object]) -> list[Ids]:
    """Three messages are taken, some are lost meanwhile, and 120 are taken past them: what was taken."""
    done = [dequeue(workers[0])]
    lose()
    session.commit()
    forget_news(session)
    for _ in range(40):
        done.append(dequeue(workers[1]))
        workers[1].commit()
    workers[0].commit()
    a_second_later(session)
    return done


@pytest.fixture
def owed(session: Session, order: Ids, workers: list[psycopg.Connection]) -> Callable[[int], Counter[str]]:
    """15 planned messages of channel d are cancelled, and 120 of all are taken past them. What so many after it are."""
    of_it = {*session.scalars(select(fq.Message.id).where(fq.Message.channel == "d"))}
    gone = [id_ for id_ in order[3:] if id_ in of_it][:15]
    done = taken_past(session, workers, lambda: session.execute(fq.cancel(gone)))

    def serve(messages: int) -> Counter[str]:
        batch = lease_of(session, messages)
        finish(session, workers, *done, [message.id for message in batch])
        return Counter(message.channel for message in batch)

    return serve


def nothing(session: Session) -> None:
    pass


def a_policy_of_the_queue(session: Session) -> None:
    session.add(fq.Queue(name="default", max_concurrency=100_000))
    session.commit()


def a_repair(session: Session) -> None:
    sql(session, "SELECT fairqueue.queue_repair()")


@pytest.mark.parametrize("event", [nothing, a_policy_of_the_queue, a_repair])
def test_who_is_owed_comes_first(
    session: Session, owed: Callable[[int], Counter[str]], event: Callable[[Session], None]
) -> None:
    event(session)
    assert owed(10) == {"d": 10}


@pytest.mark.parametrize("event", [nothing, a_policy_of_the_queue, a_repair])
def test_who_comes_then_does_not(
    session: Session, owed: Callable[[int], Counter[str]], event: Callable[[Session], None]
) -> None:
    event(session)
    put(session, "late", 50)
    # The others had three or so more each than they would have had together with channel d.
    assert owed(14 + 7 * 4) == {"d": 19, "late": 6, "c": 4, "e": 4, "a": 3, "b": 3, "f": 3}


def test_who_comes_then_does_not_though_less_was_taken_past_others_since(
    session: Session, owed: Callable[[int], Counter[str]], workers: list[psycopg.Connection]
) -> None:
    """What channel d is owed is planned, and a message of it is gone again."""
    lease_of(session, 1)
    order = plan_once(session)
    assert dequeue(workers[0]) == order[:3]
    session.execute(fq.cancel(order[3]))
    session.commit()
    forget_news(session)
    assert dequeue(workers[1]) == order[4:7]
    for worker in workers[:2]:
        worker.commit()
    put(session, "late", 50)
    assert owed(33) == {"d": 10, "late": 6, "c": 4, "e": 4, "a": 3, "b": 3, "f": 3}


@pytest.fixture
def waiting(session: Session, clock_that_stands: None) -> None:
    """Channel late, which is there before all others, has messages for later."""
    put(session, "late", 50, delay=3600)


@pytest.mark.usefixtures("waiting")
def test_nor_does_who_becomes_due_then(session: Session, owed: Callable[[int], Counter[str]]) -> None:
    first = Counter(message.channel for message in lease_of(session, 1))
    session.execute(text("SET LOCAL session_replication_role = replica"))  # no news: its hour has come
    session.execute(text("UPDATE fairqueue.message SET dequeue_at = -1 WHERE channel = 'late'"))
    session.execute(text("UPDATE fairqueue.lane SET head_at = -1, head_id = 0, due = 1 WHERE channel = 'late'"))
    sql(session, "UPDATE fairqueue.rotation SET due_floor = 1")
    served = owed(13 + 7 * 4) + first
    assert served == {"d": 19, "late": 6, "c": 4, "e": 4, "a": 3, "b": 3, "f": 3}


@pytest.mark.parametrize("lose", [cancelled, replaced])
def test_what_was_taken_past_one_that_is_gone_was_not_for_nothing(
    session: Session, order: Ids, workers: list[psycopg.Connection], lose: Callable[[Session, int], None]
) -> None:
    """Its channel gets no more for it than the one, and who comes then starts where the others are."""
    done = taken_past(session, workers, lambda: lose(session, order[3]))
    put(session, "late", 50)
    batch = lease_of(session, 28)
    served = Counter(message.channel for message in batch)
    assert {served[channel] for channel in CHANNELS} <= {3, 4, 5}
    assert served["late"] == 4
    finish(session, workers, *done, [message.id for message in batch])


def test_what_was_taken_past_what_is_rolled_back_was_not_for_nothing(
    session: Session, order: Ids, workers: list[psycopg.Connection]
) -> None:
    """Though the plan is taken back then, as a message comes before what is planned."""
    dequeue(workers[0], 6)
    done = []
    for _ in range(40):
        done.append(dequeue(workers[1]))
        workers[1].commit()
    workers[0].rollback()
    put(session, "b", priority=5)
    put(session, "late", 50)
    batch = lease_of(session, 6 + 7 * 4)
    served = Counter(message.channel for message in batch)
    # Channel b had been served once more before.
    assert served == {**dict.fromkeys([*CHANNELS, "late"], 5), "b": 4}
    assert {*order[:6]} <= {message.id for message in batch}
    finish(session, workers, *done, [message.id for message in batch])


def test_who_comes_after_much_was_put_off_is_not_ahead(session: Session, workers: list[psycopg.Connection]) -> None:
    """What isn't due any more is no more to be had than what is cancelled."""
    order = prepared(session, "ab", [1] * 400)
    dequeue(workers[0], 10)
    session.execute(
        text("""
            UPDATE fairqueue.message SET dequeue_at = fairqueue.unix_ms(fairqueue.clock()) + 3600000
            WHERE channel = 'b' AND id = ANY (:ids)"""),
        {"ids": order[10:]},
    )
    session.commit()
    forget_news(session)
    for _ in range(4):
        dequeue(workers[1], 10)
        workers[1].commit()
    workers[0].commit()
    put(session, "late", 300)
    lease_of(session, 1)
    tags = {
        lane.channel: lane.tag / 720720 for lane in session.execute(text("SELECT channel, tag FROM fairqueue.lane"))
    }
    assert 0 <= tags["a"] - tags["late"] <= 2


def test_the_first_of_two_is_rolled_back(session: Session, order: Ids, workers: list[psycopg.Connection]) -> None:
    """As much has been served as up to where its channel stands: it is the next one, and not passed."""
    assert [dequeue(worker, 1) for worker in workers[:2]] == [order[:1], order[1:2]]
    workers[0].rollback()
    workers[1].commit()
    put(session, "a")  # so that the next dequeue takes its turn
    served = [message.id for message in lease_of(session, 1)]
    check_invariants(session.connection())
    assert served == order[:1]
    finish(session, workers, order[1:2], served)
