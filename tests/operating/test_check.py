"""fairqueue.check: finds whatever is wrong in what the scheduler keeps, and nothing else; a repair mends it.

Each derived number is corrupted by hand, as no code of the queue's own would do it.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import count

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

import fairqueue as fq
from fairqueue import schema
from tests.acts import (
    complete,
    drain,
    lease_of,
    move_clock,
    plan_ahead,
    put,
    put_all,
    sql,
    stop_clock,
    take,
    wait_until,
)
from tests.fixtures.connections import Raw
from tests.invariants import check_invariants
from tests.limiting import NOW
from tests.observing import DRAWN, observer, value, waits_for_a_lock

pytestmark = pytest.mark.shared_database

HOUR = 3_600_000
LEASE = 1_000_000

Leases = list[fq.LeasedMessage]


def checked(session: Session, queue: str | None = None, repair: bool = False) -> list[fq.Difference]:
    found = fq.check(session, queue, repair=repair)
    session.commit()
    return found


@pytest.fixture
def leased(engine: Engine, session: Session) -> Leases:
    """A queue with all kinds of lanes, and with news of all kinds; returns the leases that are out.

    Ready and half have room, capped is at its limit, paused is paused; rated waits for its next release, later for its
    hour; idle has no message. Nobody has heard yet of fresh, of an end in half, and of the policy of edited.
    """
    stop_clock(engine, NOW)
    session.add_all(
        [
            fq.Queue("default", max_concurrency=12),
            fq.Channel("capped", max_concurrency=2),
            fq.Channel("half", max_concurrency=4, weight=2),
            fq.Channel("rated", release_interval_ms=1000, burst=2),
            fq.Channel("paused", paused=True),
        ]
    )
    for channel in ("idle", "capped", "half", "rated", "paused", "ready"):
        put(session, channel, 1 if channel == "idle" else 5)
    put(session, "later", 2, dequeue_at=NOW + HOUR)
    put(session, "edited", 2, dequeue_at=NOW + HOUR)
    leases = lease_of(session, 9, LEASE)
    first = ["idle", "capped", "half", "rated", "ready"]
    assert [m.channel for m in leases] == [*first, "half", "capped", "half", "rated"]
    assert complete(session, [leases.pop(2)]) == ["completed"]
    put(session, "fresh", 2)
    session.add(fq.Channel("edited", max_concurrency=7))
    session.commit()
    assert checked(session) == []
    return leases


LANE = "UPDATE fairqueue.lane SET {} WHERE channel = '{}'"
ROTATION = "UPDATE fairqueue.rotation SET {}"
SECOND_ROTATION = (
    "INSERT INTO fairqueue.rotation SELECT queue, {}, era + 1, vtime, vsince, activations, news_from, news_open,"
    " urgent_from, urgent_open, lease_floor, due_floor, idle_floor, swept, max_concurrency, paused_until, running,"
    " counted_from, clock, maintain_at, place, planned, ahead, plan_at, lane_tag, lane_since FROM fairqueue.rotation"
)
FOREVER = 2**63 - 1

MISSING = "a ready message that no lane and no signal leads to"
AHEAD = "transactions that this server has not come to"
UNREAD = "a signal that no dequeue will read"
COUNTED = "leases that count toward max_concurrency"
POLICY = "policy (weight, max_concurrency, release_interval, burst, paused_until)"
QUEUE_POLICY = "policy (max_concurrency, paused_until)"
TOO_LONG = "a lane that waits for too long"
WAITS = "a ready lane that has to wait"
PASSED = "a ready lane that the rotation has passed"

#: What is done to the scheduler's tables, whose fault it is (None: the queue's), and how it is called.
CORRUPTIONS: list[tuple[str, str | None, str]] = [
    # lanes: where they stand
    (LANE.format("due = NULL", "ready"), "ready", MISSING),
    (LANE.format(f"due = {FOREVER}", "ready"), "ready", TOO_LONG),
    (LANE.format(f"due = {NOW + HOUR}", "rated"), "rated", TOO_LONG),
    (LANE.format(f"due = {NOW + 2 * HOUR}", "later"), "later", TOO_LONG),
    (LANE.format(f"due = {NOW - HOUR}", "later"), "later", "a lane below due_floor"),
    (LANE.format("due = 0", "capped"), "capped", WAITS),
    (LANE.format("due = 0", "paused"), "paused", WAITS),
    (LANE.format("due = 0", "rated"), "rated", WAITS),
    (LANE.format("due = 0", "later"), "later", WAITS),
    (LANE.format("due = -1", "ready"), "ready", "a lane below due_floor"),
    (LANE.format("head_at = head_at + 1", "ready"), "ready", MISSING),
    (LANE.format("head_id = head_id + 1", "ready"), "ready", MISSING),
    (LANE.format("tag = 0", "ready"), "ready", PASSED),
    (LANE.format("tag = (SELECT vtime FROM fairqueue.rotation), since = 0", "ready"), "ready", PASSED),
    (LANE.format("since = 1000000", "ready"), "ready", "an activation that is still to come"),
    (LANE.format("since = (SELECT since FROM fairqueue.lane WHERE channel = 'half')", "ready"), "half",
     "lanes with one activation"),
    # lanes: what they count, and what they know of their channels
    (LANE.format("running = 1", "capped"), "capped", COUNTED),
    (LANE.format("running = 3", "capped"), "capped", COUNTED),
    (LANE.format("counted_from = 1000", "capped"), "capped", COUNTED),
    (LANE.format("counted_from = 1000", "ready"), "ready", "a count that is still to begin"),
    (LANE.format(f"released_at = {NOW + HOUR}", "rated"), "rated", "a release that is still to come"),
    (LANE.format("weight = 5", "half"), "half", POLICY),
    (LANE.format("max_concurrency = 3", "capped"), "capped", POLICY),
    (LANE.format("max_concurrency = NULL", "capped"), "capped", POLICY),
    (LANE.format("release_interval = 0", "rated"), "rated", POLICY),
    (LANE.format("burst = 3", "rated"), "rated", POLICY),
    (LANE.format("paused_until = NULL", "paused"), "paused", POLICY),
    ("DELETE FROM fairqueue.lane WHERE channel = 'ready'", "ready", MISSING),
    ("DELETE FROM fairqueue.lane WHERE channel = 'capped'", "capped", "counted leases of a channel without a lane"),
    ("DELETE FROM fairqueue.lane", "ready", MISSING),
    (("INSERT INTO fairqueue.lane SELECT queue, channel, due, tag + 1, since + 1000, head_at, head_id, weight,"
     " max_concurrency, release_interval, burst, paused_until, running, counted_from, released_at, planned"
     " FROM fairqueue.lane WHERE channel = 'capped'"), "capped", "lanes of a channel"),
    # the rotation
    (ROTATION.format("era = era + 1"), None, "the era of a turn"),
    (ROTATION.format("running = running + 1"), None, COUNTED),
    (ROTATION.format("running = 0"), None, COUNTED),
    (ROTATION.format("counted_from = 1000"), None, COUNTED),
    (ROTATION.format("max_concurrency = NULL"), None, QUEUE_POLICY),
    (ROTATION.format(f"paused_until = {FOREVER}"), None, QUEUE_POLICY),
    (ROTATION.format("lease_floor = 'infinity'"), "capped", "a lease below lease_floor"),
    (ROTATION.format(f"due_floor = {FOREVER}"), "later", "a lane below due_floor"),
    (ROTATION.format("vtime = vtime + 100000000"), "ready", PASSED),
    (ROTATION.format("vsince = vsince + 1000"), "ready", PASSED),
    (ROTATION.format("arrival_tag = 4000000000000000000"), None, "a start of arrivals beyond all lanes"),
    (ROTATION.format("activations = 0"), "ready", "an activation that is still to come"),
    (ROTATION.format("news_from = pg_current_xact_id(), news_open = '{}'"), "fresh", UNREAD),
    (ROTATION.format("urgent_from = pg_current_xact_id(), urgent_open = '{}'"), "half", UNREAD),
    (ROTATION.format("urgent_from = '1000000000000'"), None, AHEAD),
    (SECOND_ROTATION.format("turn + 64"), None, "rotations of a queue"),
    (SECOND_ROTATION.format("turn"), None, "rotations of a queue"),
    ("DELETE FROM fairqueue.rotation", "capped", "a lease below lease_floor"),
    ("DELETE FROM fairqueue.rotation", None, "rotations of a queue"),
    # signals and messages
    ("DELETE FROM fairqueue.signal WHERE channel = 'fresh'", "fresh", MISSING),
    ("DELETE FROM fairqueue.signal WHERE channel = 'half'", "half", COUNTED),
    ("DELETE FROM fairqueue.signal WHERE channel = 'edited'", "edited", POLICY),
    ("INSERT INTO fairqueue.signal (queue, channel, counted, urgent) VALUES ('default', 'capped', 1, true)",
     "capped", COUNTED),
    ("UPDATE fairqueue.message SET counted = NULL WHERE channel = 'capped'", "capped", COUNTED),
]  # fmt: skip


@pytest.mark.parametrize(("corruption", "channel", "problem"), CORRUPTIONS)
def test_what_is_wrong_is_found_and_mended(
    session: Session, leased: Leases, corruption: str, channel: str | None, problem: str
) -> None:
    sql(session, corruption)
    found = checked(session, "default")
    assert ("default", channel, problem) in {(d.queue, d.channel, d.problem) for d in found}
    assert all(d.expected != d.found for d in found)
    assert checked(session, repair=True) == found
    assert checked(session) == []
    check_all_served(session, leased)


@pytest.mark.parametrize("news", [
    "UPDATE fairqueue.message SET leased_until = '2000-01-01' WHERE leased_until IS NOT NULL",
    "UPDATE fairqueue.message SET leased_until = NULL WHERE channel = 'capped'",
    "DELETE FROM fairqueue.message WHERE channel <> 'later'",
    "UPDATE fairqueue.message SET dequeue_at = 0 WHERE leased_until IS NULL",
    "UPDATE fairqueue.queue SET max_concurrency = 1, channel_max_concurrency = 1, channel_weight = 3, paused = true",
    "UPDATE fairqueue.channel SET max_concurrency = 1, weight = 3, release_interval_ms = 5, paused = NOT paused",
    "DELETE FROM fairqueue.channel",
    "DELETE FROM fairqueue.queue",
    "TRUNCATE fairqueue.message, fairqueue.channel, fairqueue.queue",
])  # fmt: skip
def test_what_nobody_has_heard_of_yet_is_not_wrong(session: Session, leased: Leases, news: str) -> None:
    sql(session, news)
    assert checked(session) == []
    lease_of(session)
    assert checked(session) == []


#: A policy that no signal tells of.
UNTOLD = """
    ALTER TABLE fairqueue.channel DISABLE TRIGGER USER;
    INSERT INTO fairqueue.channel (name, weight) VALUES ('a', 2);
    ALTER TABLE fairqueue.channel ENABLE TRIGGER USER;"""
BEHIND = "a planned message that its lane is not behind"
AFTER = "a lane behind a planned message that is not there"
BEYOND = "a planned message beyond the end of the plan"
OVERTAKEN = "a planned message that the rotation has passed"
MISSED = "a planned message that was missed"


@pytest.mark.parametrize(("corruption", "channel", "problem"), [
    (LANE.format("tag = (SELECT vtime + 1 FROM fairqueue.rotation)", "a"), "a", BEHIND),
    (LANE.format("since = since + 1", "b"), "b", BEHIND),
    (LANE.format("planned = -1", "a"), "a", BEHIND),
    (LANE.format("due = NULL", "a"), "a", MISSING),
    ("UPDATE fairqueue.plan SET channels = array_replace(channels, 'a', 'gone')", "gone", BEHIND),
    (ROTATION.format("planned = place"), "b", BEYOND),
    (ROTATION.format("lane_tag = lane_tag + 1000000"), "a", "a ready lane before the first one"),
    (ROTATION.format("arrival_tag = 4000000000000000000"), None, "a start of arrivals beyond all lanes"),
    ("DELETE FROM fairqueue.plan", "a", MISSING),
    ("DELETE FROM fairqueue.plan", "a", AFTER),
    (LANE.format("planned = tag - 1", "a"), "a", AFTER),
    (f"DO $$ BEGIN DELETE FROM fairqueue.plan; {UNTOLD} END $$", "a", MISSING),
    ("UPDATE fairqueue.plan SET tags = array_fill(-1::bigint, ARRAY[cardinality(tags)])", "a", OVERTAKEN),
    ("INSERT INTO fairqueue.missed SELECT queue, turn - 1, place FROM fairqueue.rotation", None, MISSED),
    ("INSERT INTO fairqueue.missed SELECT queue, turn + 1, place FROM fairqueue.rotation", None, MISSED),
    ("SELECT setval(tickets, ticket_base - 1) FROM fairqueue.rotation", None, "tickets drawn"),
])  # fmt: skip
def test_what_is_wrong_about_a_plan_is_found_and_mended(
    session: Session, corruption: str, channel: str | None, problem: str
) -> None:
    """The second message that is planned was taken without the turn."""
    put_all(session, {"a": 30, "b": 30})
    take(session)
    plan_ahead(session)
    take(session)
    take(session)
    assert session.scalar(text(DRAWN)) == 1
    assert checked(session) == []
    sql(session, corruption)
    found = checked(session, "default")
    assert (channel, problem) in {(d.channel, d.problem) for d in found}
    assert checked(session, repair=True) == found
    assert checked(session) == []
    assert len(drain(session, 7)) == 57
    assert checked(session) == []


def check_all_served(session: Session, out: Leases) -> None:
    """Everything that is left is served, once, and never more at a time than the limits allow."""
    session.execute(fq.resume(channel="paused"))
    session.commit()
    left = set(session.scalars(text("SELECT id FROM fairqueue.message")))
    session.commit()
    served = [message.id for message in out]
    for hour in count():
        while batch := lease_of(session, 4, LEASE):
            served += [message.id for message in batch]
            out = [*out, *batch]
        check_invariants(session.connection())
        session.commit()
        if hour > 0 and not out:
            break
        move_clock(session, NOW + hour * HOUR)
        assert set(complete(session, out[:6])) <= {"completed"}
        out = out[6:]
    assert sorted(served) == sorted(left)
    assert checked(session) == []


def test_an_empty_queue_and_one_that_does_not_exist(session: Session) -> None:
    put(session, "acme")
    assert checked(session, repair=True) == []
    assert len(drain(session)) == 1
    assert checked(session, "never heard of", repair=True) == []


def test_a_plan_that_is_gone_with_what_was_planned(session: Session) -> None:
    """Its lanes stand behind nothing any more."""
    put_all(session, {"a": 20, "b": 200})
    lease_of(session)
    plan_ahead(session, 64)
    lease_of(session)
    sql(session, "DELETE FROM fairqueue.plan")
    sql(session, "DELETE FROM fairqueue.message WHERE channel = 'a' AND leased_until IS NULL")
    sql(session, "SELECT fairqueue.queue_repair()")
    assert checked(session) == []


def test_ends_that_nobody_heard_of_before_a_repair(session: Session) -> None:
    """Of leases that are younger than all that are left, where nothing else tells how far turns had come."""
    put(session, "acme", 9)
    sql(session, "SELECT fairqueue.channel_set('acme', max_concurrency => 3)")
    leases = [message for _ in range(3) for message in lease_of(session)]
    assert complete(session, leases[1:]) == ["completed"] * 2
    sql(session, "DELETE FROM fairqueue.rotation")
    sql(session, "SELECT fairqueue.queue_repair()")
    assert checked(session) == []
    assert len(lease_of(session, 9)) == 2
    assert checked(session) == []


def test_an_end_to_come_when_all_that_was_kept_is_gone(session: Session, raw: Raw, database_url: str) -> None:
    """What the lease was counted in is known by the message alone; it ends once, though the repair found it held."""
    put(session, "acme", 9)
    sql(session, "SELECT fairqueue.channel_set('acme', max_concurrency => 3)")
    (*_, held) = [message for _ in range(3) for message in lease_of(session)]
    other = raw(database_url)
    other.execute("SELECT FROM fairqueue.message_complete(ARRAY[%s], ARRAY[%s])", (held.id, held.attempt))
    sql(session, "DELETE FROM fairqueue.rotation")
    sql(session, "DELETE FROM fairqueue.lane")
    sql(session, "SELECT fairqueue.queue_repair()")
    other.commit()
    assert len(lease_of(session, 9)) == 1
    assert checked(session) == []


@pytest.mark.parametrize("name", ["never heard of", "", "n" * 300])
def test_a_repair_of_a_queue_that_is_none(session: Session, name: str) -> None:
    """Makes none of it, which would keep history for 30 days."""
    put(session, "acme")
    session.execute(text("SELECT fairqueue.queue_repair(:name)"), {"name": name})
    session.commit()
    assert session.scalars(text("SELECT queue FROM fairqueue.rotation WHERE queue <> 'default'")).all() == []
    assert checked(session) == []


def test_a_lease_given_by_hand(session: Session) -> None:
    """Of a message that was never leased: nothing is wrong with it, and it comes back when it is over."""
    put(session, "acme")
    sql(session, "UPDATE fairqueue.message SET leased_until = fairqueue.clock() + interval '1 hour'")
    assert checked(session, repair=True) == []
    assert drain(session) == []
    sql(session, "UPDATE fairqueue.message SET leased_until = fairqueue.clock()")
    assert [message.attempt for message in drain(session)] == [1]
    assert checked(session) == []


def test_whom_a_rotation_that_is_gone_owes(session: Session) -> None:
    """The lanes say it, whether some are ready or none."""
    put(session, "costly", 2, cost=10)
    put(session, "busy", 30)
    assert sorted(take(session, 2)) == ["busy", "costly"]
    sql(session, "DELETE FROM fairqueue.rotation")
    sql(session, "SELECT fairqueue.queue_repair()")
    assert take(session, 9) == ["busy"] * 9
    assert len(take(session, 100)) == 21
    sql(session, "DELETE FROM fairqueue.rotation")
    sql(session, "SELECT fairqueue.queue_repair()")
    put_all(session, {"new": 30, "busy": 1})
    assert "busy" in take(session, 2)


def test_who_comes_where_arrivals_had_a_start_beyond_all_lanes(session: Session) -> None:
    put_all(session, {"a": 9, "b": 9})
    assert len(take(session, 2)) == 2
    sql(session, ROTATION.format("arrival_tag = 4000000000000000000"))
    put(session, "new", 9)
    sql(session, "SELECT fairqueue.queue_repair()")
    assert "new" in take(session, 3)


def test_each_queue_by_itself(session: Session) -> None:
    for queue in ("default", "other", "third"):
        session.add(fq.Channel("acme", queue=queue, max_concurrency=5))
        put(session, "acme", 3, queue=queue)
        assert take(session, 2, queue=queue) == ["acme"] * 2
    sql(session, "UPDATE fairqueue.lane SET running = 0 WHERE queue <> 'third'")
    wrong = [fq.Difference(queue, "acme", COUNTED, "2", "0") for queue in ("default", "other")]
    assert checked(session) == wrong
    assert [checked(session, queue) for queue in ("default", "other", "third")] == [wrong[:1], wrong[1:], []]
    assert checked(session, "other", repair=True) == wrong[1:]
    assert checked(session, repair=True) == wrong[:1]
    assert checked(session) == []


def test_several_queues_are_repaired_at_once(session: Session) -> None:
    for queue in ("default", "other"):
        put(session, "acme", 3, queue=queue)
        take(session, 1, queue=queue)
    sql(session, "DELETE FROM fairqueue.lane")
    assert [d.queue for d in checked(session, repair=True)] == ["default", "other"]
    assert checked(session) == []
    assert [take(session, 9, queue=queue) for queue in ("default", "other")] == [["acme"] * 2] * 2


def test_a_repair_asks_for_a_transaction_of_its_own(session: Session, raw: Raw, database_url: str) -> None:
    """It waits for its turn, unless that could deadlock."""
    put(session, "acme", 3)
    take(session)
    sql(session, "DELETE FROM fairqueue.lane")
    other = raw(database_url.replace("+psycopg", ""))
    other.execute("SELECT * FROM fairqueue.message_dequeue()")
    session.add(fq.Channel("acme"))
    session.flush()
    with pytest.raises(OperationalError, match="'default' is being dequeued from") as refused:
        fq.check(session, repair=True)
    assert "in a transaction of its own" in str(refused.value)
    session.rollback()
    other.rollback()
    assert len(checked(session, repair=True)) == 1
    assert take(session, 5) == ["acme"] * 2


def test_a_repair_goes_by_the_clock_of_its_turn(
    engine: Engine, session: Session, other: psycopg.Connection, raw: Raw, database_url: str
) -> None:
    """Not by that of its call: what was released while it waited was released later than that."""
    stop_clock(engine, NOW)
    session.add(fq.Channel("rated", release_interval_ms=5000))
    put(session, "rated", 3)
    other.execute("SELECT FROM fairqueue.message_dequeue('default', 1)")
    waiting, watching = raw(database_url), observer(raw, database_url)
    with ThreadPoolExecutor(1) as pool:
        repair = pool.submit(waiting.execute, "SELECT fairqueue.queue_repair()")
        wait_until(lambda: waits_for_a_lock(watching, waiting))
        move_clock(session, NOW + 4000)
        other.rollback()
        repair.result()
    waiting.commit()
    assert value(watching, "SELECT clock FROM fairqueue.rotation") == NOW + 4000
    assert checked(session) == []


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_repair_has_to_see_what_others_do_meanwhile(session: Session, level: str) -> None:
    put(session, "acme", 3)
    take(session)
    sql(session, "DELETE FROM fairqueue.lane")
    session.connection(execution_options={"isolation_level": level})
    assert len(fq.check(session)) == 1
    with pytest.raises(DBAPIError, match=f"needs READ COMMITTED, this transaction is {level}"):
        fq.check(session, repair=True)


async def test_asyncio(session: Session, async_engine: AsyncEngine) -> None:
    put(session, "acme", 3)
    take(session)
    sql(session, "DELETE FROM fairqueue.lane")
    async with AsyncSession(async_engine) as async_session:
        found = await fq.check(async_session)
        assert [(d.channel, d.problem) for d in found] == [("acme", MISSING)]
        assert await fq.check(async_session, "default", repair=True) == found
        await async_session.commit()
    async with async_engine.connect() as connection:
        assert await fq.check(connection) == []


def test_several_databases(engine: Engine, session: Session) -> None:
    """Of a session with several, that of the messages is looked at, and repaired."""
    put(session, "acme", 2)
    take(session)
    sql(session, "DELETE FROM fairqueue.lane")
    nowhere = create_engine("postgresql+psycopg://nobody@nowhere.invalid/app")
    for default in (nowhere, None):
        with Session(default, binds={fq.Message: engine}) as several:
            assert [(d.channel, d.problem) for d in fq.check(several)] == [("acme", MISSING)]
    with Session(nowhere, binds={fq.Message: engine}) as several:
        assert len(fq.check(several, repair=True)) == 1
        several.commit()
    assert checked(session) == []


@pytest.mark.shared_database(False)
def test_a_connection_and_another_schema(engine: Engine) -> None:
    with engine.begin() as connection:
        schema.install(connection, "elsewhere")
    elsewhere = engine.execution_options(schema_translate_map={"fairqueue": "elsewhere"})
    with Session(elsewhere) as session:
        put(session, "acme", 3)
        take(session)
        sql(session, "DELETE FROM elsewhere.lane")
    with elsewhere.begin() as connection:
        assert [d.problem for d in fq.check(connection, repair=True)] == [MISSING]
    with elsewhere.begin() as connection:
        assert fq.check(connection) == []
    with engine.begin() as connection:
        assert fq.check(connection) == []


@pytest.mark.parametrize(("arguments", "message"), [
    ({"queue": ""}, "queue must have 1 to 255 characters"),
    ({"queue": 5}, "queue must be"),
    ({"repair": "yes"}, "repair must be True or False"),
])  # fmt: skip
def test_bad_input(session: Session, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(fq.InvalidValue, match=message):
        fq.check(session, **arguments)  # type: ignore[call-overload]


# What happens to whole tables


def test_truncated_messages(session: Session, leased: Leases) -> None:
    """Before a dequeue has heard of it, and after."""
    sql(session, "TRUNCATE fairqueue.message")
    assert checked(session) == []
    assert lease_of(session, 10) == []
    assert checked(session) == []
    put(session, "capped", 3)
    put(session, "half", 5)
    assert sorted(take(session, 10)) == ["capped"] * 2 + ["half"] * 4
    assert checked(session) == []


@pytest.mark.parametrize("table", ["channel", "queue"])
def test_truncated_policies(session: Session, table: str) -> None:
    """The limits and pauses that were in it are over at the next dequeue."""
    put(session, "limited", 3)
    sql(session, "SELECT fairqueue.channel_set('limited', max_concurrency => 1)")
    if table == "queue":
        sql(session, "SELECT fairqueue.queue_set('default', paused => true)")
    assert take(session, 10) == {"channel": ["limited"], "queue": []}[table]
    assert take(session, 10) == []
    sql(session, f"TRUNCATE fairqueue.{table}")
    assert checked(session) == []
    assert take(session, 10) == {"channel": ["limited"] * 2, "queue": ["limited"]}[table]
    assert checked(session) == []


@pytest.mark.parametrize("ahead", [1000, 10**12])
def test_a_dump_that_was_restored_on_another_server(session: Session, leased: Leases, ahead: int) -> None:
    """Whose transaction ids are behind those of the old one: the horizon, and the signals that were not folded yet."""
    for column in ("news_from", "urgent_from"):
        sql(session, f"UPDATE fairqueue.rotation SET {column} = (({column}::text)::bigint + :n)::text::xid8", n=ahead)
    for column in ("news_open", "urgent_open"):
        sql(session, f"UPDATE fairqueue.rotation SET {column} = ARRAY[((news_from::text)::bigint - 1)::text::xid8]")
    sql(session, "UPDATE fairqueue.signal SET xid = ((xid::text)::bigint + :n)::text::xid8", n=ahead)
    assert {d.problem for d in checked(session)} == {AHEAD}
    put(session, "ready", 2)
    sql(session, "UPDATE fairqueue.channel SET weight = 5 WHERE name = 'half'")
    assert {d.problem for d in checked(session)} == {AHEAD, UNREAD}
    assert len(lease_of(session, 1, LEASE)) == 1
    assert checked(session) == []


def test_a_dump_restored_with_an_end_that_was_awaited(session: Session, raw: Raw, database_url: str) -> None:
    """It is read once, though all news is read again."""
    late = raw(database_url)
    late.execute("SELECT pg_current_xact_id()")
    put(session, "acme", 9)
    sql(session, "SELECT fairqueue.channel_set('acme', max_concurrency => 3)")
    (first, *_) = lease_of(session, 3)
    late.execute("SELECT FROM fairqueue.message_complete(ARRAY[%s], ARRAY[%s])", (first.id, first.attempt))
    late.commit()
    sql(session, ROTATION.format("news_from = '1000000000000', urgent_from = '1000000000000'"))
    assert len(lease_of(session, 9)) == 1
    assert checked(session) == []


@pytest.mark.shared_database(False)
def test_a_dump_restored_as_it_is_needs_no_repair(session: Session, leased: Leases) -> None:
    """Rows that come back as they were, and not through the functions: what agreed then agrees."""
    for table in ("message", "lane", "missed", "plan", "rotation", "signal"):
        sql(session, f"CREATE TABLE public.kept_{table} AS SELECT * FROM fairqueue.{table}")
    drain(session)
    sql(session, "SET session_replication_role = replica")
    for table in ("message", "lane", "missed", "plan", "rotation", "signal"):
        sql(session, f"DELETE FROM fairqueue.{table}")
        sql(session, f"INSERT INTO fairqueue.{table} OVERRIDING SYSTEM VALUE SELECT * FROM public.kept_{table}")
    sql(session, "SET session_replication_role = origin")
    assert checked(session) == []
    check_all_served(session, leased)
