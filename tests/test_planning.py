"""Where much is waiting it is scheduled ahead: every order is, to the message, what it is without a plan."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import expire, lease_of, move_clock, plan_ahead, put, sql, truncate
from tests.fixtures.connections import Raw
from tests.invariants import check_invariants
from tests.limiting import NOW, leases, limit
from tests.reference import BLOCKED, Entry, Policy
from tests.twins import EARLY, HOUR, Put, Twins, planned


def several_of_each(twins: Twins) -> None:
    for channel in "abcdef":
        twins.put(channel, [1, 2, 0.5] * (2 if channel == "d" else 5), NOW if channel in "ef" else EARLY)
    twins.put("d", at=NOW + HOUR)
    twins.serve(3)
    twins.plan()
    assert len(planned(twins.session)) > 30
    assert {channel for channel, _ in planned(twins.session)} == set("abcdef")


def heads_of_many(twins: Twins) -> None:
    """Of 70 channels, some of which have no more than that one, or another one for later.

    The first dequeue hears of all of them: in what order the news of one statement is taken in nobody says.
    """
    messages: list[Put] = []
    for number, channel in enumerate(["g", "h", "i", *"abcdef", *(f"j{number}" for number in range(61))]):
        messages += [(channel, NOW if channel in "ef" else EARLY, cost) for cost in [1, 2, 0.5, 1][: 1 + number % 4]]
        if number % 8 == 0:
            messages.append((channel, NOW + HOUR - number, 1))
    twins.put_all(messages)
    twins.serve(3)
    twins.plan(18)
    assert [channel for channel, _ in planned(twins.session)] == [*"bcdef", *(f"j{number}" for number in range(12))]


@pytest.fixture(params=[several_of_each, heads_of_many])
def twins(session: Session, clock_that_stands: None, request: pytest.FixtureRequest) -> Twins:
    """What e and f have is just due, and there is something for later. Some were served, and there is a plan."""
    twins = Twins(session, {"b": Policy(weight=2)})
    request.param(twins)
    return twins


# Where plans are made by themselves


WEIGHTS = {f"c{number}": Policy(weight=[1, 1, 2, 3, 0.5][number % 5]) for number in range(20)}


@pytest.mark.slow
@pytest.mark.parametrize("running", [None, 250], ids=["", "max_concurrency"])
@pytest.mark.parametrize("limit", [1, 7, 100])
def test_the_order_is_that_of_single_dequeues(
    session: Session, clock_that_stands: None, limit: int, running: int | None
) -> None:
    """Of some thousand messages in 20 channels, with weights and costs; with a limit on what runs, this holds too."""
    twins = Twins(session, WEIGHTS)
    if running:
        session.add(fq.Queue("default", max_concurrency=running))
        session.commit()
        twins.reference.max_concurrency = running
    for number, channel in enumerate(WEIGHTS):
        costs = [[1, 1, 0.1, 7, 1][(number + place) % 5] for place in range(60 if limit < 100 else 150)]
        twins.put(channel, costs)
    plans: set[int] = set()
    for turn in count():
        served = twins.serve(limit)
        if turn % 10 == 0 or limit > 1:
            check_invariants(session.connection())
            plans.update(id_ for _, id_ in planned(session)[-1:])
        if not twins.left:
            break
        if running and len(served) < limit:
            assert len(twins.leases) == running
            twins.end(list(twins.leases)[: running - limit])
    assert len(plans) > 1


@pytest.mark.parametrize("limit", [1, 7])
def test_however_far_apart_its_messages_stand(session: Session, clock_that_stands: None, limit: int) -> None:
    """Where the next ones of a channel are looked for first is a guess, from where those before stood."""
    twins = Twins(session)
    times = {
        "even": [EARLY] * 60,
        "spread": [NOW - 1000 * (60 - place) for place in range(60)],
        "bursts": [NOW - HOUR * (3 - place // 20) for place in range(60)],
        "close": [NOW - 20 + place // 3 for place in range(60)],
        "thinner": [EARLY - 2 ** (60 - place) for place in range(60)],
        "denser": [NOW - 2 ** (60 - place) for place in range(60)],
        "far": [1 - 2**62] * 5 + [NOW] * 55,
        "first": [1 - 2**62] * 60,
    }
    for place in range(60):
        for channel, at in times.items():
            twins.put(channel, at=at[place])
    for channel in times:
        twins.put(channel, [1, 1], at=NOW + 1)
    for id_ in twins.put("far", [1] * 5):
        edit(twins, id_, dequeue_at=-(2**63))
    while twins.serve(limit):
        assert all(twins.left[id_][1].at <= NOW for _, id_ in planned(session))
        plan_ahead(session, 40)
    assert {entry.at for _, entry in twins.left.values()} == {NOW + 1}
    twins.open()
    twins.drain(limit)
    gaps = session.execute(text("SELECT channel, gap_at > 0, gap_id > 0 FROM fairqueue.lane WHERE gap_id <> 0")).all()
    assert dict.fromkeys(times, True) == {channel: at or id_ for channel, at, id_ in gaps}


def test_ids_that_fall_where_times_are_too_large_to_tell_apart(session: Session) -> None:
    """As numbers of floating point they are the same."""
    expected: dict[str, list[int]] = {}
    for place, channel in enumerate("ab"):
        for at, first in ((1 - 2**62, 9 * 10**18), (2 - 2**62, 1)):
            ids = [first + 2 * nth + place for nth in range(200)]
            sql(
                session,
                "INSERT INTO fairqueue.message (id, channel, dequeue_at) OVERRIDING SYSTEM VALUE"
                " SELECT unnest(CAST(:ids AS bigint[])), :channel, :at",
                ids=ids,
                channel=channel,
                at=at,
            )
            expected.setdefault(channel, []).extend(ids)
    served: dict[str, list[int]] = {"a": [], "b": []}
    while batch := lease_of(session, 7):
        for message in batch:
            served[message.channel].append(message.id)
        # A few are planned where their ids fall; and then many.
        heads = session.scalars(text("SELECT head_at FROM fairqueue.lane")).all()
        plan_ahead(session, 20 if max(heads) == 1 - 2**62 else 300)
    assert served == expected
    check_invariants(session.connection())


def test_a_lane_is_written_once_for_several_messages(session: Session) -> None:
    for number in range(20):
        put(session, f"c{number}", 40)
    lease_of(session, 1)
    plan_ahead(session, 600)
    writes = text("SELECT n_tup_upd FROM pg_stat_xact_user_tables WHERE schemaname = 'fairqueue' AND relname = 'lane'")
    # Of this transaction alone, as it hasn't ended.
    before = session.scalar(writes)
    assert before is not None
    for _ in range(500):
        assert len(session.scalars(fq.dequeue()).all()) == 1
    after = session.scalar(writes)
    assert after is not None
    assert after - before < 100


def test_among_many_channels_it_is_longer(session: Session) -> None:
    """35 ahead would not come to each of a hundred channels twice; eight times as many do. So where it is continued.

    Eight times 30 would come to few more than twice, and many lanes would have none to spare: one of each is planned.
    """
    channels = [f"c{number}" for number in range(100)]
    each = [put(session, channel, 9) for channel in channels]
    order = [message.id for message in lease_of(session, 100)]
    plan_ahead(session, 30)
    order += [message.id for message in lease_of(session, 2)]
    assert len(planned(session)) == 30 - 2
    order += [message.id for message in lease_of(session, 28)]
    plan_ahead(session, 35)
    order += [message.id for message in lease_of(session, 2)]
    before = planned(session)
    assert 6 * 35 < len(before) < 8 * 35
    order += [message.id for _ in range(50) for message in lease_of(session, 3)]
    after = planned(session)
    assert set(before) & set(after) < set(after)
    order += [message.id for _ in range(50) for message in lease_of(session, 3)]
    assert order == [ids[turn] for turn in range(9) for ids in each][: len(order)]
    check_invariants(session.connection())


def test_one_that_comes_to_nothing(session: Session) -> None:
    """As each channel has one message more at most: it isn't tried again before what is planned has been served."""
    each = [put(session, channel, 9) for channel in "abc"]
    order = [message.id for message in lease_of(session, 2)]
    plan_ahead(session)
    state = text("SELECT planned - place, ahead, plan_at FROM fairqueue.rotation")
    while not order[2:] or session.execute(state).one()[0] > 7:
        order += [message.id for message in lease_of(session, 1)]
    plan_ahead(session)
    for expected in range(5, -1, -1):
        order += [message.id for message in lease_of(session, 1)]
        left, ahead, plan_at = session.execute(state).one()
        assert (left, plan_at - ahead) == (expected, expected)
    order += [message.id for message in lease_of(session, 9)]
    assert order == [ids[turn] for turn in range(9) for ids in each]
    check_invariants(session.connection())


# What happens while there is a plan


def a_more_urgent_message(twins: Twins) -> None:
    twins.put("c", at=EARLY - 1)


def edit(twins: Twins, id_: int, channel: str | None = None, **changes: float) -> None:
    """A user's UPDATE of a message that is ready."""
    name, entry = twins.left[id_]
    for column, value in {"channel": channel, **changes}.items():
        if value is not None:
            sql(twins.session, f"UPDATE fairqueue.message SET {column} = :value WHERE id = :id", value=value, id=id_)
    twins.remove([id_])
    entry = Entry(int(changes.get("dequeue_at", entry.at)), id_, changes.get("cost", entry.cost))
    twins.left[id_] = channel or name, entry
    twins.reference.enqueue(channel or name, [entry], urgent=True)


def one_is_put_first(twins: Twins) -> None:
    edit(twins, [id_ for channel, id_ in planned(twins.session) if channel == "e"][-1], dequeue_at=NOW - 5)


def one_with_a_lower_id_comes(twins: Twins) -> None:
    """In time it is the first one's equal, of a channel of which one is planned."""
    ids = [id_ for _, id_ in planned(twins.session)]
    first = min(id_ for id_, (_, entry) in twins.left.items() if entry.at == EARLY and id_ not in ids)
    channel = next(name for name, id_ in planned(twins.session) if id_ > first and twins.left[id_][1].at == EARLY)
    assert twins.left[first][0] != channel
    edit(twins, first, channel=channel)


def one_is_put_off(twins: Twins) -> None:
    edit(twins, planned(twins.session)[9][1], dequeue_at=NOW + HOUR)


def one_goes_to_another_channel(twins: Twins) -> None:
    edit(twins, planned(twins.session)[9][1], channel="a")


def one_becomes_costly(twins: Twins) -> None:
    edit(twins, planned(twins.session)[9][1], cost=50)


def one_is_cancelled(twins: Twins) -> None:
    twins.cancel([planned(twins.session)[9][1]])


def all_of_a_channel_are_cancelled(twins: Twins) -> None:
    twins.cancel([id_ for channel, id_ in planned(twins.session) if channel == "c"])


def all_that_is_planned_is_cancelled(twins: Twins) -> None:
    twins.cancel([id_ for _, id_ in planned(twins.session)])


def half_of_all_are_deleted(twins: Twins) -> None:
    sql(twins.session, "DELETE FROM fairqueue.message WHERE id % 2 = 0 AND leased_until IS NULL")
    twins.remove([id_ for id_ in twins.left if id_ % 2 == 0])


def all_are_truncated(twins: Twins, meanwhile: int = 0) -> None:
    """Others with the same ids, in the same places of the table, belong to other channels."""
    sql(twins.session, "TRUNCATE fairqueue.message RESTART IDENTITY")
    twins.remove(list(twins.left))
    twins.leases.clear()
    for channel in twins.reference.channels.values():
        channel.running.clear()
    twins.reference.changed = True
    for _ in range(meanwhile):
        assert twins.serve(1) == []
    for name in "fedcba":
        twins.put(name, [1] * 15)


def nothing_is_left_for_a_while(twins: Twins) -> None:
    all_are_truncated(twins, meanwhile=2)


def the_table_is_rewritten(twins: Twins) -> None:
    """So that its rows are in other places."""
    twins.session.execute(text("DELETE FROM fairqueue.message WHERE id = 50"))
    twins.session.commit()
    twins.remove([50])
    connection = twins.session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
    connection.execute(text("VACUUM FULL fairqueue.message"))
    twins.session.close()


def a_weight_changes(twins: Twins) -> None:
    twins.policy("c", Policy(weight=3))


def a_channel_is_paused(twins: Twins) -> None:
    twins.policy("c", Policy(paused_until=BLOCKED))


def a_channel_may_run_one(twins: Twins) -> None:
    twins.policy("c", Policy(max_concurrency=1))


def a_channel_may_run_three(twins: Twins) -> None:
    twins.policy("c", Policy(max_concurrency=3))


def a_channel_gets_a_rate(twins: Twins) -> None:
    twins.policy("c", Policy(interval=HOUR))


def a_channel_that_was_served_by_plan_gets_a_rate(twins: Twins) -> None:
    """Its next release counts from its last message, at whatever time the plan was made."""
    twins.now += 2 * HOUR
    move_clock(twins.session, twins.now)
    while twins.serve(1)[0][0] != "c":
        pass
    twins.policy("c", Policy(interval=HOUR))


def the_queue_is_paused(twins: Twins, until: int | None = BLOCKED) -> None:
    sql(twins.session, "SELECT fairqueue.queue_set('default', paused => :on)", on=until is not None)
    twins.reference.paused_until = until
    twins.reference.changed = True


def the_queue_is_paused_and_resumed(twins: Twins) -> None:
    the_queue_is_paused(twins)
    twins.put("new")
    assert twins.serve(5) == []
    assert fq.check(twins.session) == []
    twins.session.commit()
    the_queue_is_paused(twins, None)


def the_queue_gets_a_limit(twins: Twins) -> None:
    sql(twins.session, "SELECT fairqueue.queue_set('default', max_concurrency => 1000)")
    twins.reference.max_concurrency = 1000
    twins.reference.changed = True


def a_lease_runs_out(twins: Twins) -> None:
    """Of the message served last: it comes back to its old place, before those of its channel that are planned."""
    id_ = max(twins.leases)
    lease = twins.leases.pop(id_)
    expire(twins.session, [id_])
    twins.reference.end(lease.channel, id_)
    entry = Entry(lease.dequeue_at, id_, lease.cost)
    twins.reference.enqueue(lease.channel, [entry], urgent=True)
    twins.left[id_] = lease.channel, entry


def the_clock_goes_back(twins: Twins, by: int = HOUR) -> None:
    """What e and f have is no longer due."""
    twins.now -= by
    move_clock(twins.session, twins.now)


def the_clock_goes_back_a_little(twins: Twins) -> None:
    the_clock_goes_back(twins, 10)


def the_queue_is_repaired(twins: Twins) -> None:
    sql(twins.session, "SELECT fairqueue.queue_repair()")
    twins.reference.rebuild(twins.now)


def tags_become_large(twins: Twins) -> None:
    """So that they start again from zero, when all that was planned of some channels has been served."""
    while {channel for channel, _ in planned(twins.session)} == set("abcdef"):
        twins.serve(1)
    large = 2_000_000_000_000_000_000
    tags = "ARRAY(SELECT t.tag + :n FROM unnest(tags) WITH ORDINALITY AS t (tag, place) ORDER BY t.place)"
    for change in (
        "lane SET tag = tag + :n, planned = planned + :n",
        "rotation SET vtime = vtime + :n, idle_floor = :n, due_floor = 0",  # so that the next dequeue takes its turn
        f"plan SET tags = {tags}",
    ):
        sql(twins.session, f"UPDATE fairqueue.{change}", n=large)
    twins.serve(1)
    kept = "SELECT count(*) FROM fairqueue.lane WHERE greatest(tag, planned) >= :n"
    assert twins.session.scalar(text(kept), {"n": large}) == 0


EVENTS: list[Callable[[Twins], None]] = [
    a_more_urgent_message,
    one_is_put_first,
    one_with_a_lower_id_comes,
    one_is_put_off,
    one_goes_to_another_channel,
    one_becomes_costly,
    one_is_cancelled,
    all_of_a_channel_are_cancelled,
    all_that_is_planned_is_cancelled,
    half_of_all_are_deleted,
    all_are_truncated,
    nothing_is_left_for_a_while,
    the_table_is_rewritten,
    a_weight_changes,
    a_channel_is_paused,
    a_channel_may_run_one,
    a_channel_may_run_three,
    a_channel_gets_a_rate,
    a_channel_that_was_served_by_plan_gets_a_rate,
    the_queue_is_paused_and_resumed,
    the_queue_gets_a_limit,
    a_lease_runs_out,
    the_clock_goes_back,
    the_clock_goes_back_a_little,
    the_queue_is_repaired,
    tags_become_large,
]


@pytest.mark.parametrize("limit", [1, 7])
@pytest.mark.parametrize("event", EVENTS)
def test_a_plan_is_given_up_when_it_is_no_longer_right(
    twins: Twins, event: Callable[[Twins], None], limit: int
) -> None:
    event(twins)
    for _ in range(20 // limit):
        twins.serve(limit)
        assert fq.check(twins.session) == []
        twins.session.commit()
    twins.open()
    twins.drain(7)


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
    while planned(session) or session.scalar(text("SELECT 0 IN (SELECT tag FROM fairqueue.lane WHERE due = 0)")):
        twins.serve(1)
    session.commit()
    twins.plan(10)  # c9 has three to go before any other.
    assert planned(session) == []
    twins.open()
    twins.drain(1, 20)


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
    twins.drain(limit, 600)


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


# Others


def orders(engine: Engine, session: Session, raw: psycopg.Connection) -> Iterator[list[int]]:
    """What is served with a plan, and without one, while somebody else holds three messages, and when they are free."""
    for ahead in (64, 0):
        truncate(engine)
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
    sql(
        session,
        """
        UPDATE fairqueue.plan p
        SET rows[array_position(p.ids, :id)] = (SELECT m.ctid FROM fairqueue.message m WHERE m.id = :id)
        WHERE :id = ANY (p.ids)
        """,
        id=moved,
    )
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
    FROM fairqueue.plan p CROSS JOIN LATERAL unnest(p.ids) WITH ORDINALITY AS e (id, nth)
    WHERE EXISTS (SELECT FROM fairqueue.taken k WHERE e.id = ANY (k.ids)) AND e.id = ANY (:ids)"""


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
