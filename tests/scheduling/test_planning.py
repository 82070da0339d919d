"""Where much is waiting it is scheduled ahead: every order is, to the message, what it is without a plan."""

from itertools import count

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import lease_of, plan_ahead, put, sql
from tests.invariants import check_invariants
from tests.limiting import NOW
from tests.reference import Policy
from tests.scheduling.twins import EARLY, HOUR, Twins, planned

pytestmark = pytest.mark.shared_database

WEIGHTS = {f"c{number}": Policy(weight=[1, 1, 2, 3, 0.5][number % 5]) for number in range(20)}


@pytest.mark.slow
@pytest.mark.parametrize("running", [None, 250], ids=["", "max_concurrency"])
@pytest.mark.parametrize("limit", [1, 7, 100])
def test_the_order_is_that_of_single_dequeues(
    session: Session, clock_that_stands: None, limit: int, running: int | None
) -> None:
    """Of 800 messages and more in 20 channels, with weights and costs; with a limit on what runs, this holds too."""
    twins = Twins(session, WEIGHTS)
    if running:
        session.add(fq.Queue("default", max_concurrency=running))
        session.commit()
        twins.reference.max_concurrency = running
    for number, channel in enumerate(WEIGHTS):
        costs = [[1, 1, 0.1, 7, 1][(number + place) % 5] for place in range({1: 60, 7: 40, 100: 150}[limit])]
        twins.put(channel, costs)
    plans: set[int] = set()
    for turn in count():
        served = twins.serve(limit)
        if turn % {1: 10, 7: 3, 100: 1}[limit] == 0:
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
    for channel, at in times.items():
        twins.put(channel, at=at[0])
    twins.put_all([(channel, at[place], 1) for place in range(1, 60) for channel, at in times.items()])
    for channel in times:
        twins.put(channel, [1, 1], at=NOW + 1)
    for id_ in twins.put("far", [1] * 5):
        twins.edit(id_, dequeue_at=-(2**63))
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
