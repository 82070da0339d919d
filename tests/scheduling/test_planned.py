"""While there is a plan: what comes before it, behind it or beside it, and who else has to do with its messages."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import clear, lease_of, move_clock, one_by_one, plan_ahead, put, sql
from tests.fixtures.connections import Raw
from tests.invariants import check_invariants
from tests.limiting import NOW, leases, limit
from tests.reference import BLOCKED, Entry, Policy
from tests.scheduling.twins import HOUR, Twins, heads_of_many, planned

pytestmark = pytest.mark.shared_database

#: Which versions of which rows: the same as long as nobody has written them.
LANE_ROWS = text("SELECT l.ctid::text, l.xmin::text FROM fairqueue.lane l ORDER BY l.ctid")


@pytest.mark.parametrize("limit", [1, 7])
def test_what_comes_for_a_channel_that_has_no_more_than_what_is_planned(
    session: Session, clock_that_stands: None, limit: int
) -> None:
    """Something new for some, and for others a message whose time has come: their lanes stand behind the plan."""
    twins = Twins(session)
    heads_of_many(twins)
    before = planned(session)
    lanes = text(
        "SELECT channel, tag, since, due FROM fairqueue.lane WHERE channel IN ('b', 'f', 'j7') ORDER BY channel"
    )
    stood = session.execute(lanes).all()
    assert [row.due for row in stood] == [None, NOW + HOUR - 8, NOW + HOUR - 16]
    twins.put("b")
    twins.put("j7")
    twins.now += 2 * HOUR
    move_clock(session, twins.now)
    twins.serve(1)
    assert planned(session) == before[1:]
    assert fq.check(session) == []
    assert session.execute(lanes).all() == [(*row[:3], 0) for row in stood]
    session.commit()
    twins.drain(limit, 18)


@pytest.mark.parametrize("row", [False, True], ids=["without a row", "with a row"])
def test_a_pause_of_the_queue_leaves_plan_and_lanes_alone(twins: Twins, row: bool) -> None:
    """It holds, and ends, at once, however many channels there are."""
    if row:
        sql(twins.session, "SELECT fairqueue.queue_set('default', history_days => 7)")
    before, stood = planned(twins.session), twins.session.execute(LANE_ROWS).all()
    twins.session.commit()
    for until, served in ((BLOCKED, 0), (twins.now + HOUR, 0), (None, 5)):
        twins.pause(until)
        assert len(twins.serve(5)) == served
        assert planned(twins.session) == before[served:]
        assert twins.session.execute(LANE_ROWS).all() == stood
        assert fq.check(twins.session) == []
        twins.session.commit()
    sql(twins.session, "DELETE FROM fairqueue.queue")
    assert twins.session.scalars(text("SELECT queue FROM fairqueue.signal")).all() == []
    twins.session.commit()
    twins.open()
    twins.drain(7)


def test_a_limit_of_the_queue_leaves_plan_and_lanes_alone(twins: Twins) -> None:
    """It holds, and ends, at once, however many channels there are; only the first one has what runs counted."""
    marks = text("SELECT id, counted FROM fairqueue.message WHERE leased_until IS NOT NULL ORDER BY id")
    left, stood = planned(twins.session), twins.session.execute(LANE_ROWS).all()
    running = len(twins.leases)
    for at, served, is_first in (
        (running + 2, 2, True),
        (running + 5, 3, False),
        (1, 0, False),
        (None, 4, False),
        (running + 12, 3, True),
    ):
        before = {row.id: row.counted for row in twins.session.execute(marks)}
        twins.limit(at)
        assert len(twins.serve(4)) == served
        left = left[served:]
        assert planned(twins.session) == left
        assert twins.session.execute(LANE_ROWS).all() == stood
        after = {row.id: row.counted for row in twins.session.execute(marks)}
        assert len(after) == len(before) + served
        if is_first:
            assert len(set(after.values())) == 1
            assert None not in after.values()
        else:
            assert {id_: after[id_] for id_ in before} == before
        assert fq.check(twins.session) == []
        twins.session.commit()
    twins.limit(None)
    twins.open()
    twins.drain(7)


def test_news_before_and_behind_what_is_planned(twins: Twins) -> None:
    """The signal of both tells of the time of one, and of the id of the other."""
    assert "f" in dict(planned(twins.session))
    behind, before = fq.enqueue_many(twins.session, [{"channel": "f", "dequeue_at": at} for at in (NOW + 1, NOW - 5)])
    twins.session.commit()
    twins.reference.enqueue("f", [Entry(NOW + 1, behind), Entry(NOW - 5, before)])
    twins.left |= {behind: ("f", Entry(NOW + 1, behind)), before: ("f", Entry(NOW - 5, before))}
    twins.serve(1)
    assert planned(twins.session) == []
    twins.open()
    twins.drain(7)


def test_a_flood_of_one_who_began_before_what_is_planned(
    session: Session, clock_that_stands: None, raw: Raw, database_url: str
) -> None:
    """Messages of channels that aren't ready are looked for, of any id: not those that are planned."""
    old = raw(database_url)
    old.execute("INSERT INTO fairqueue.message (channel) VALUES ('j0')")
    twins = Twins(session)
    heads_of_many(twins)
    before = [id_ for _, id_ in planned(session)]
    old.execute(one_by_one(2000, "j0").encode())
    old.commit()
    assert [message.id for message in lease_of(session, 3)] == before[:3]
    assert [id_ for _, id_ in planned(session)] == before[3:]


def test_news_of_a_message_that_is_planned(twins: Twins) -> None:
    """It was committed between the news and the plan of one turn; the next one hears of it."""
    channel, id_ = planned(twins.session)[5]
    signal = """
        INSERT INTO fairqueue.signal (queue, channel, dequeue_at, message_id, urgent)
        VALUES ('default', :channel, :at, :id, false)"""
    sql(twins.session, signal, channel=channel, id=id_, at=twins.left[id_][1].at)
    twins.serve(1)
    assert planned(twins.session) == []
    twins.open()
    twins.drain(7)


def test_what_is_planned_of_a_channel_is_put_off(session: Session, clock_that_stands: None) -> None:
    """What stands behind that comes before it now; also where it came into the queue before it."""
    twins = Twins(session)
    for channel in "abcdef":
        for number in range(20):
            twins.put(channel, at=-number)
    twins.serve(3)
    twins.plan()
    for channel, id_ in planned(session):
        if channel == "a":
            twins.edit(id_, dequeue_at=NOW + HOUR)
    twins.serve(1)
    assert fq.check(session) == []
    twins.open()
    twins.drain(7)


@pytest.mark.shared_database(False)
def test_a_policy_is_taken_over_when_the_plan_has_been_taken_back(twins: Twins) -> None:
    """One that is committed in the middle of a turn is to be seen there before its signal is."""
    trigger = "ALTER TABLE fairqueue.channel {} TRIGGER USER"
    sql(twins.session, trigger.format("DISABLE"))
    twins.session.merge(fq.Channel("c", paused=True))
    twins.session.commit()
    sql(twins.session, trigger.format("ENABLE"))
    twins.put("c")
    twins.serve(1)
    pause = text("SELECT paused_until FROM fairqueue.lane WHERE channel = 'c'")
    assert twins.session.scalar(pause) is None
    assert planned(twins.session)
    twins.policy("c", Policy(weight=2, paused_until=BLOCKED))
    twins.serve(1)
    assert twins.session.scalar(pause) == BLOCKED
    twins.open()
    twins.drain(7)


def test_heads_are_planned_up_to_where_one_would_come_again(session: Session, clock_that_stands: None) -> None:
    """Past lanes that turn out to be empty, or to have something for later alone: these are ready no longer."""
    twins = Twins(session, {"c9": Policy(weight=4)})
    each = [twins.put(f"c{number}", [1] * (6 if number == 9 else 2)) for number in range(90)]
    twins.put("c12", at=NOW + HOUR)
    twins.serve(3)
    twins.cancel(each[10] + each[12])
    twins.plan(18)
    assert [channel for channel, _ in planned(session)] == [f"c{n}" for n in range(4, 21) if n not in (10, 12)]
    assert fq.check(session) == []
    due = text("SELECT due FROM fairqueue.lane WHERE channel IN ('c10', 'c12') ORDER BY channel")
    assert session.scalars(due).all() == [None, NOW + HOUR]
    session.commit()
    sql(session, "UPDATE fairqueue.rotation SET plan_at = 10000")  # nothing more for now
    while planned(session) or session.scalar(text("SELECT 0 IN (SELECT tag FROM fairqueue.lane WHERE due = 0)")):
        twins.serve(1)
    session.commit()
    twins.plan(10)  # c9 has three to go before any other.
    assert planned(session) == []
    twins.open()
    twins.drain(1, 20)


@pytest.mark.shared_database(False)
def test_heads_of_two_rounds_are_planned_together(session: Session, clock_that_stands: None, heads: None) -> None:
    """Behind the rest of one round, the beginning of the next: as far as the first of that rest doesn't come again."""
    twins = Twins(session)
    for number in range(10):
        twins.put(f"c{number}", [1] * 3)
    twins.serve(4)
    twins.plan(9)
    assert [channel for channel, _ in planned(session)] == ["c5", "c6", "c7", "c8", "c9", "c0", "c1", "c2"]
    twins.plan(20)
    twins.drain(3, 20)


@pytest.mark.shared_database(False)
def test_who_comes_again_at_the_tag_of_another_lane(session: Session, clock_that_stands: None, heads: None) -> None:
    """But became ready before that one, and so comes before it."""
    twins = Twins(session, {"a": Policy(weight=2)})
    twins.put("a", [1] * 6)
    twins.put("b", [1] * 3)
    assert [channel for channel, _ in twins.serve(2)] == ["a", "b"]
    twins.plan(9)
    assert planned(session) == []
    twins.drain(1, 9)


def test_what_could_not_be_continued_is_not_tried_again_at_once(session: Session, clock_that_stands: None) -> None:
    """By one who began to while somebody else found that nothing is left."""
    twins = Twins(session)
    for channel in "abc":
        twins.put(channel, [1] * 60)
    twins.serve(1)
    twins.plan(64)
    before = planned(session)
    sql(session, "UPDATE fairqueue.rotation SET plan_at = ahead + 1")
    sql(session, "SELECT fairqueue.scheduler_extend('default', fairqueue.unix_ms(fairqueue.clock()))")
    assert planned(session) == before
    sql(session, "UPDATE fairqueue.rotation SET plan_at = ahead")
    sql(session, "SELECT fairqueue.scheduler_extend('default', fairqueue.unix_ms(fairqueue.clock()))")
    assert planned(session)[: len(before)] == before != planned(session)


@pytest.mark.parametrize("limit", [1, 7, 100])
def test_a_new_channel_is_served_next(session: Session, clock_that_stands: None, limit: int) -> None:
    """1,000 messages of one tenant come first and are scheduled ahead; the last of 19 others waits for 19."""
    twins = Twins(session)
    twins.put("noisy", [1] * 1000)
    twins.serve(1)
    twins.plan(600)
    assert len(planned(session)) > 500
    quiet = [f"quiet{number}" for number in range(19)]
    for channel in quiet:
        twins.put(channel, [1] * 10)
    channels = [channel for _ in range(-(-20 // limit)) for channel, _ in twins.serve(limit)]
    assert max(channels.index(channel) for channel in quiet) < 19
    twins.drain(max(limit, 50), 600)


@pytest.mark.parametrize("policy", [Policy(max_concurrency=1), Policy(interval=20), Policy(paused_until=NOW + 30)])
def test_a_channel_with_limits_beside_planned_ones(session: Session, clock_that_stands: None, policy: Policy) -> None:
    """Whenever it may be served, it is when its turn comes."""
    twins = Twins(session)
    for channel in "abc":
        twins.put(channel, [1] * 60)
    twins.put("limited", [1] * 20)
    twins.policy("limited", policy._replace(paused_until=None))
    twins.serve(1)
    twins.policy("limited", policy)
    plans = 0
    while "a" in {channel for channel, _ in twins.left.values()}:
        plan_ahead(session)
        twins.serve(3)
        plans += bool(planned(session))
        check_invariants(session.connection())
        twins.now += 1
        move_clock(session, twins.now)
        running = [id_ for id_, lease in twins.leases.items() if lease.channel == "limited"]
        if running and twins.now % 5 == 0:
            twins.end(running[:1])
    assert plans > 5
    twins.open()
    twins.drain(3)


def orders(engine: Engine, session: Session, raw: psycopg.Connection) -> Iterator[list[int]]:
    """What is served with a plan, and without one, while somebody else holds three messages, and when they are free."""
    for ahead in (64, 0):
        clear(engine)
        for channel in "abcdef":
            put(session, channel, 15)
        order = [message.id for message in lease_of(session, 5)]
        if ahead:
            plan_ahead(session, ahead)
        order += [message.id for message in lease_of(session)]
        assert bool(planned(session)) == bool(ahead)
        held = [18, 33, 63]
        raw.execute("SELECT FROM fairqueue.message WHERE id = ANY (%s) FOR UPDATE", (held,))
        for _ in range(30):
            order += [message.id for message in lease_of(session, 2)]
        assert not {*order} & {*held}
        raw.rollback()
        while batch := lease_of(session, 2):
            order += [message.id for message in batch]
            check_invariants(session.connection())
            session.commit()
        assert sorted(order) == list(range(1, 91))
        yield order


def test_a_message_that_somebody_holds_is_passed_over(
    engine: Engine, session: Session, raw: Raw, database_url: str
) -> None:
    planned, unplanned = orders(engine, session, raw(database_url))
    assert planned == unplanned


def stand_in(session: Session, planned: int, message: int) -> None:
    """From now on this message is where the plan says that the planned one is."""
    sql(
        session,
        """
        UPDATE fairqueue.plan p
        SET rows[array_position(p.ids, :planned)] = (SELECT m.ctid FROM fairqueue.message m WHERE m.id = :message)
        WHERE :planned = ANY (p.ids)
        """,
        planned=planned,
        message=message,
    )


@pytest.mark.parametrize("limit_", [1, 3], ids=["with others", "in its turn"])
@pytest.mark.parametrize("change", ["channel = 'limited'", "queue = 'another'"])
def test_a_planned_message_that_is_another_channel_s_now(session: Session, change: str, limit_: int) -> None:
    """Moved, and back at the place in its table where it was planned: the limit of its new channel holds.

    Likewise, who dequeues from a queue gets nothing of another.
    """
    limit(session, "limited", max_concurrency=1)
    put(session, "limited")
    (first,) = leases(session, 1)
    for channel in ("a", "b"):
        put(session, channel, 40)
    plan_ahead(session)
    leases(session, 1)
    (_, moved) = planned(session)[10]
    sql(session, f"UPDATE fairqueue.message SET {change} WHERE id = :id", id=moved)
    leases(session, 1)  # Folds that.
    assert ("a", moved) in planned(session) or ("b", moved) in planned(session)
    stand_in(session, moved, moved)
    while batch := leases(session, limit_):
        assert moved not in [message.id for message in batch]
    check_invariants(session.connection())
    session.execute(fq.complete(first))
    session.commit()
    queue = session.scalars(text("SELECT queue FROM fairqueue.message WHERE id = :id"), {"id": moved}).one()
    assert [message.id for message in lease_of(session, queue=queue)] == [moved]


#: Where each of some messages was in the plan, of those that were taken from it without the turn.
PLACES = """
    SELECT e.id, p.place + e.nth
    FROM fairqueue.rotation r
    JOIN fairqueue.plan p ON p.queue = r.queue
    CROSS JOIN LATERAL unnest(p.ids) WITH ORDINALITY AS e (id, nth)
    WHERE p.place + e.nth - 1 > r.place AND e.id = ANY (:ids)"""


def test_two_dequeue_at_the_same_time(twins: Twins, engine: Engine) -> None:
    """Whether one after the other or side by side."""

    def work(limit: int) -> list[tuple[int, int, int, int]]:
        served: list[tuple[int, int, int, int]] = []
        with Session(engine) as session:
            while batch := session.scalars(fq.dequeue(limit=limit, lease=3600)).all():
                ids = [message.id for message in batch]
                turn = session.scalar(text("SELECT turn FROM fairqueue.rotation"))
                assert turn is not None
                places = {row.id: row[1] for row in session.execute(text(PLACES), {"ids": ids})}
                served += [(turn, places.get(id_, 0), nth, id_) for nth, id_ in enumerate(ids)]
                session.commit()
        return served

    with ThreadPoolExecutor(2) as threads:
        served = [row[-1] for row in sorted(row for rows in threads.map(work, (1, 3)) for row in rows)]
    assert served == [id_ for _, id_ in twins.reference.dequeue(len(twins.left), NOW, served)]
    assert sorted(served) == [id_ for id_, (_, entry) in twins.left.items() if entry.at <= NOW]


@pytest.mark.parametrize("savepoint", [True, False], ids=["savepoint", "transaction"])
def test_a_dequeue_in_vain(twins: Twins, savepoint: bool) -> None:
    """One that serves from a plan, and one that makes the next one."""
    session = twins.session
    for _ in range(2):
        before = planned(session)
        plan_ahead(session)
        with session.begin_nested() if savepoint else session.begin() as transaction:
            assert len(session.scalars(fq.dequeue(limit=3)).all()) == 3
            transaction.rollback()
        session.commit()
        assert planned(session) == before
        while planned(session):
            twins.serve(1)
    twins.open()
    twins.drain(7)


@pytest.mark.parametrize("limit_", [1, 3], ids=["with others", "in its turn"])
def test_another_message_where_a_planned_one_was(session: Session, limit_: int) -> None:
    """Of the same channel: it has come since, and the place in the table was free. It waits for its own turn."""
    for channel in ("a", "b"):
        put(session, channel, 40)
    leases(session, 1)
    plan_ahead(session)
    leases(session, 1)
    (channel, gone) = planned(session)[10]
    session.execute(fq.cancel(gone))
    session.commit()
    (new,) = put(session, channel)
    leases(session, 1)  # Folds that.
    assert (channel, gone) in planned(session)
    stand_in(session, gone, new)
    served: list[int] = []
    while batch := leases(session, limit_):
        served += [message.id for message in batch if message.channel == channel]
    assert served[-1] == new
    assert served == sorted(served)
    check_invariants(session.connection())
