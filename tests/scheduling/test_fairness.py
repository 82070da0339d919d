"""The next message comes from the channel with the lowest start tag, exactly, whatever the size of the batches."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import (
    alter,
    clear,
    clock,
    complete,
    drain,
    expire,
    lease_of,
    plan_ahead,
    put,
    put_all,
    sql,
    take,
    wait_until,
)
from tests.invariants import check_invariants
from tests.reference import Entry, Policy, Reference

pytestmark = pytest.mark.shared_database

QUIET = [f"quiet{number}" for number in range(19)]


def reference_of(session: Session) -> Reference:
    """A reference that has the messages and the weights that are in the database, each channel told of once."""
    reference = Reference()
    rows = session.execute(
        text("SELECT channel, dequeue_at, id, cost FROM fairqueue.message WHERE leased_until IS NULL ORDER BY id")
    ).all()
    for row in rows:
        reference.enqueue(row.channel, [Entry(row.dequeue_at, row.id, row.cost)])
    for channel in session.scalars(text("SELECT name FROM fairqueue.channel")).all():
        weight = session.get_one(fq.Channel, ("default", channel)).weight
        reference.channels[channel].policy = Policy(weight=weight or 1)
    session.commit()
    return reference


@pytest.mark.parametrize(("limit", "dequeues"), [(1, 300), (7, 43), (100, 20)])
def test_quiet_tenants_don_t_wait_for_a_noisy_one(session: Session, limit: int, dequeues: int) -> None:
    """1,000 messages of one tenant come first; the last of 19 others is served at place 19, not 1,018."""
    put(session, "noisy", 1000)
    put_all(session, {name: 1000 // 19 + (number < 1000 % 19) for number, name in enumerate(QUIET)})
    reference = reference_of(session)
    served = [(message.channel, message.id) for _ in range(dequeues) for message in lease_of(session, limit)]
    channels = [channel for channel, _ in served]
    assert max(channels.index(name) for name in QUIET) == 19
    assert served == reference.dequeue(len(served), clock(session))
    assert len(served) == dequeues * limit
    check_invariants(session.connection())


@pytest.mark.parametrize("limit", [1, 12])
def test_weights_are_shares(session: Session, limit: int) -> None:
    """At every moment, no service is a unit away from 1 : 2 : 3."""
    weights = {"one": 1, "two": 2, "three": 3}
    session.add_all(fq.Channel(name=name, weight=weight) for name, weight in weights.items())
    put_all(session, dict.fromkeys(weights, 80))
    served: Counter[str] = Counter()
    for place in range(0, 120, limit):
        for channel in take(session, limit):
            served[channel] += 1
            shares = [served[name] / weight for name, weight in weights.items()]
            assert max(shares) - min(shares) <= 1, (place, served)
    assert served == {"one": 20, "two": 40, "three": 60}


@pytest.mark.parametrize("limit", [1, 11])
def test_a_costly_message_uses_up_more_of_the_share(session: Session, limit: int) -> None:
    """At every moment, what two channels have had in cost differs by no more than one message."""
    put(session, "large", 40, cost=10)
    put(session, "small", 400, cost=1)
    had = {"large": 0, "small": 0}
    for _ in range(0, 330, limit):
        for channel in take(session, limit):
            had[channel] += 10 if channel == "large" else 1
            assert abs(had["large"] - had["small"]) <= 10
    assert had == {"large": 300, "small": 300}


@pytest.mark.parametrize("together", [True, False], ids=["one transaction", "a transaction each"])
def test_single_dequeues_share_equally(session: Session, together: bool) -> None:
    """Fairness rests on no clock: NOW() stands still within a transaction, and calls fall into one millisecond."""
    put_all(session, {"a": 90, "b": 90, "c": 90})
    served: Counter[str] = Counter()
    for _ in range(90):
        served[session.scalars(fq.dequeue()).one().channel] += 1
        if not together:
            session.commit()
    assert served == {"a": 30, "b": 30, "c": 30}


def test_a_late_tenant_is_served_within_the_current_round(session: Session) -> None:
    put_all(session, dict.fromkeys("abcd", 100))
    take(session, 42)
    put(session, "late", 10)
    assert "late" in take(session, 4 + 1)


def test_a_new_name_gains_nothing(session: Session) -> None:
    """A tenant that spreads over new names, each used once, waits as long as one that comes back after a pause."""
    put_all(session, dict.fromkeys("abc", 200))
    put(session, "pause", 1)
    take(session, 100)
    put(session, "pause", 1)
    put(session, "new", 1)
    place = take(session, 10)
    assert place.index("new") == place.index("pause") + 1


def test_a_channel_that_empties_and_comes_back_gains_nothing(session: Session) -> None:
    """One message at a time, enqueued again as soon as it is served: a fair share, and not more."""
    put(session, "busy", 100)
    put(session, "drip", 1)
    served: Counter[str] = Counter()
    for _ in range(40):
        (channel,) = take(session)
        served[channel] += 1
        if channel == "drip":
            put(session, "drip", 1)
    assert served == {"busy": 20, "drip": 20}


def test_priority_orders_a_channel_and_never_the_channels(session: Session) -> None:
    """Historic and negative times: ahead inside the channel, no further."""
    put(session, "calm", 3)
    first = put(session, "eager", 1, dequeue_at=0)
    low = put(session, "eager", 1, priority=1)
    high = put(session, "eager", 1, priority=10)
    old = put(session, "eager", 1, dequeue_at=-(2**62) + 1)
    batch = drain(session)
    assert [message.id for message in batch if message.channel == "eager"] == old + high + low + first
    assert "".join(message.channel[0] for message in batch) == "cececee"


def test_a_crashing_tenant_gets_its_share_and_no_more(session: Session) -> None:
    """Every lease of one tenant runs out, without a pause: what comes back goes into its own rotation."""
    put(session, "crashing", 5, backoff=0)
    put(session, "healthy", 200)
    served: Counter[str] = Counter()
    for _ in range(100):
        (message,) = lease_of(session)
        served[message.channel] += 1
        if message.channel == "crashing":
            expire(session, [message.id])
        else:
            assert complete(session, [message]) == ["completed"]
    assert served == {"crashing": 50, "healthy": 50}
    check_invariants(session.connection())


def test_a_lease_that_ran_out_counts_as_an_attempt(session: Session) -> None:
    """It comes back in its old place, and its worker's completion is refused."""
    put(session, "a", 2)
    (first,) = lease_of(session)
    expire(session, [first.id])
    (again, other) = lease_of(session, 2)
    assert (again.id, again.attempt) == (first.id, 2)
    assert complete(session, [first]) == ["stale"]
    assert complete(session, [again, other]) == ["completed", "completed"]


def test_a_lease_runs_out_by_itself(session: Session) -> None:
    put(session, "a", 1)
    (first,) = lease_of(session, lease=0.05)
    batch: list[fq.LeasedMessage] = []

    def served_again() -> bool:
        batch.extend(lease_of(session))
        return bool(batch)

    wait_until(served_again)
    assert (batch[0].id, batch[0].attempt) == (first.id, 2)
    assert clock(session) >= first.leased_until.timestamp() * 1000 - 1


def test_a_changed_weight_takes_effect_at_the_next_dequeue(session: Session) -> None:
    """By merge, by UPDATE, by DELETE."""
    put_all(session, {"a": 200, "b": 200})
    assert Counter(take(session, 20)) == {"a": 10, "b": 10}
    session.merge(fq.Channel(name="a", weight=3))
    session.commit()
    assert Counter(take(session, 40)) == {"a": 30, "b": 10}
    session.get_one(fq.Channel, ("default", "a")).weight = 0.25
    session.commit()
    assert Counter(take(session, 50)) == {"a": 10, "b": 40}
    session.delete(session.get_one(fq.Channel, ("default", "a")))
    session.commit()
    assert Counter(take(session, 20)) == {"a": 10, "b": 10}


def test_queues_don_t_share(session: Session) -> None:
    put(session, "a", 5)
    put(session, "a", 5, queue="other")
    assert len(drain(session, 3)) == 5
    assert len(drain(session, 3, queue="other")) == 5
    check_invariants(session.connection())


def test_channels_of_one_name_in_several_queues(session: Session) -> None:
    """Each is its queue's own, though one statement enqueues to all of them."""
    fq.enqueue_many(session, [{"channel": "a", "queue": queue} for queue in ("default", "other", "third")])
    session.commit()
    check_invariants(session.connection())
    assert [take(session, queue=queue) for queue in ("default", "other", "third")] == [["a"]] * 3


load = st.lists(
    st.tuples(
        st.sampled_from([1, 2, 3, 0.37, 1000]),  # weight
        st.lists(st.sampled_from([1, 1, 1, 0.01, 3.3, 50]), min_size=1, max_size=25),  # costs
        st.booleans(),  # cancelled before the batches
    ),
    min_size=1,
    max_size=8,
)


@given(load=load, limit=st.integers(2, 40), before=st.integers(0, 10))
@settings(max_examples=30, derandomize=True)
def test_a_batch_is_what_single_dequeues_would_have_been(
    engine: Engine, load: list[tuple[float, list[float], bool]], limit: int, before: int
) -> None:
    orders = []
    for size in (1, limit):
        clear(engine)
        with Session(engine) as session:
            gone: list[int] = []
            for number, (weight, costs, cancelled) in enumerate(load):
                session.add(fq.Channel(name=str(number), weight=weight))
                rows: list[fq.MessageRow] = [
                    {"channel": str(number), "cost": float(cost), "priority": 1} for cost in costs
                ]
                ids = fq.enqueue_many(session, rows)
                session.commit()
                gone += ids if cancelled else []
            order = [message.id for _ in range(before) for message in lease_of(session)]
            session.execute(fq.cancel(gone))
            session.commit()
            order += [message.id for message in drain(session, size)]
            check_invariants(session.connection())
            orders.append(order)
    assert orders[0] == orders[1]


def test_tags_start_again_long_before_they_overflow(session: Session) -> None:
    """Nothing about the order changes when the scheduler makes its numbers small again."""
    session.add(fq.Channel(name="a", weight=0.3))
    put_all(session, {"a": 50, "b": 150, "c": 150})
    take(session, 9)
    limit = 2_000_000_000_000_000_000
    sql(session, f"UPDATE fairqueue.lane SET tag = tag + {limit}")
    moved = "SET vtime = vtime + :n, arrival_tag = vtime + :n, idle_floor = :n"
    sql(session, f"UPDATE fairqueue.rotation {moved}", n=limit)
    reference = reference_of(session)
    for lane in session.execute(text("SELECT channel, tag, since FROM fairqueue.lane")).all():
        channel = reference.channels[lane.channel]
        channel.tag, channel.since, channel.ready = lane.tag, lane.since, True
    reference.vtime = session.scalars(text("SELECT vtime FROM fairqueue.rotation")).one()
    session.commit()
    served = [(m.channel, m.id) for _ in range(150) for m in lease_of(session)]
    assert served == reference.dequeue(150, clock(session))
    vtime = session.scalar(text("SELECT vtime FROM fairqueue.rotation"))
    assert vtime is not None
    assert vtime < limit
    check_invariants(session.connection())


def test_tags_of_what_is_planned_when_they_start_again(session: Session) -> None:
    """It is planned anew, with small ones."""
    put_all(session, {"a": 50, "b": 150, "c": 150})
    take(session)
    plan_ahead(session, 64)
    take(session)
    large = 2_000_000_000_000_000_000
    sql(session, "UPDATE fairqueue.lane SET tag = tag + :n, planned = planned + :n", n=large)
    tags = "ARRAY(SELECT t + :n FROM unnest(tags) WITH ORDINALITY AS u (t, nth) ORDER BY nth)"
    sql(session, f"UPDATE fairqueue.plan SET tags = {tags}", n=large)
    sql(session, "UPDATE fairqueue.rotation SET vtime = vtime + :n, lane_tag = NULL", n=large)
    check_invariants(session.connection())
    served = [channel for _ in range(30) for channel in take(session)]
    assert Counter(served) == dict.fromkeys("abc", 10)
    assert session.scalar(text("SELECT max(tag) FROM fairqueue.lane")) < large // 2
    check_invariants(session.connection())


@pytest.mark.shared_database(False)
def test_who_comes_when_tags_start_again_starts_where_the_others_are(engine: Engine, session: Session) -> None:
    """In a dequeue that reads its news in several rounds, as there is much of it."""
    alter(engine, "scheduler_serve", "v_now, 20000,", "v_now, 300,")
    session.add(fq.Queue(name="default", max_concurrency=1))
    put(session, "a", 20)
    lease_of(session, 1)
    large = 2_000_000_000_000_000_000
    sql(session, "UPDATE fairqueue.lane SET tag = tag + :n", n=large)
    sql(session, "UPDATE fairqueue.rotation SET vtime = vtime + :n", n=large)
    put(session, "new")
    sql(session, "DELETE FROM fairqueue.signal")
    ends = "SELECT 'default', 'x', NULL::bigint, NULL::bigint, -1, true FROM generate_series(1, 300)"
    news = "SELECT queue, channel, dequeue_at, id, NULL, true FROM fairqueue.message WHERE channel = 'new'"
    for signals in (ends, news):
        sql(
            session,
            f"INSERT INTO fairqueue.signal (queue, channel, dequeue_at, message_id, counted, urgent) {signals}",
        )
    lease_of(session, 1)
    assert session.scalar(text("SELECT max(tag) FROM fairqueue.lane")) < large // 2


@pytest.mark.parametrize("limit", [1, 6])
def test_the_lightest_messages_of_the_heaviest_channels(session: Session, limit: int) -> None:
    """The least cost over the largest weight is something still, so that they take turns."""
    for channel in "ab":
        session.add(fq.Channel(name=channel, weight=1000))
        put(session, channel, 3, cost=1e-300)
    assert [message.channel for message in drain(session, limit)] == [*"ababab"]


def test_channels_that_come_and_go_for_long(session: Session) -> None:
    """Forgetting channels that were idle for long changes no order."""
    reference = Reference()
    for turn in range(200):
        for name in ("busy", f"visitor{turn}" if turn < 100 else f"visitor{turn % 10}"):
            (id_,) = put(session, name, 1, priority=1)
            reference.enqueue(name, [Entry(-1, id_)])
        served = [(message.channel, message.id) for message in lease_of(session, 2 if turn % 3 else 1)]
        assert served == reference.dequeue(len(served), 0, [id_ for _, id_ in served])
    lanes = session.scalar(text("SELECT count(*) FROM fairqueue.lane"))
    assert lanes is not None
    assert lanes < 101
    check_invariants(session.connection())


def test_names_that_are_used_once_leave_nothing_behind(session: Session) -> None:
    """Each time that all has been served, nobody is owed anything any more."""
    for number in range(200):
        put(session, f"once{number}")
        assert take(session, 2) == [f"once{number}"]
    # Lanes are kept for 64 messages, and looked at each 64 turns; nothing is to be known of 200.
    assert session.scalar(text("SELECT count(*) FROM fairqueue.lane")) < 100
    check_invariants(session.connection())


@pytest.mark.shared_database(False)
def test_more_names_than_are_forgotten_in_one_go(engine: Engine, session: Session) -> None:
    alter(engine, "scheduler_tidy", "LIMIT 10000", "LIMIT 300")
    alter(engine, "scheduler_tidy", "count(*) < 10000", "count(*) < 300")
    fq.enqueue_many(session, [{"channel": f"once{number}"} for number in range(600)])
    put(session, "busy", 200)
    while len(take(session, 1000)) == 1000:
        pass
    left = []
    for _ in range(2):
        turn = "(turn / 64 + 1) * 64"  # one that tidies up
        sql(session, f"UPDATE fairqueue.rotation SET turn = {turn}, era = fairqueue.rotation_era({turn})")
        put(session, "busy")
        assert take(session) == ["busy"]
        left.append(session.scalar(text("SELECT count(*) FROM fairqueue.lane")))
    assert left == [301, 1]


def test_what_was_served_before_all_was_served_is_no_debt(session: Session) -> None:
    """Nor is it credit: both take turns."""
    put(session, "a", 1, cost=100)
    assert take(session, 2) == ["a"]
    put(session, "a", 3)
    put(session, "b", 3)
    assert take(session, 6) == ["a", "b"] * 3
