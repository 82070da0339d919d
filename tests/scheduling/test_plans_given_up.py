"""Whatever happens that makes a plan wrong, the order is, to the message, what it is without one."""

from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import text

import fairqueue as fq
from tests.acts import move_clock, sql
from tests.limiting import NOW
from tests.reference import BLOCKED, Policy
from tests.scheduling.twins import EARLY, HOUR, Twins, heads_of_many, planned, several_of_each

pytestmark = pytest.mark.shared_database


def a_more_urgent_message(twins: Twins) -> None:
    twins.put("c", at=EARLY - 1)


def one_is_put_first(twins: Twins) -> None:
    twins.edit([id_ for channel, id_ in planned(twins.session) if channel == "e"][-1], dequeue_at=NOW - 5)


def one_with_a_lower_id_comes(twins: Twins) -> None:
    """In time it is the first one's equal, of a channel of which one is planned."""
    ids = [id_ for _, id_ in planned(twins.session)]
    first = min(id_ for id_, (_, entry) in twins.left.items() if entry.at == EARLY and id_ not in ids)
    channel = next(name for name, id_ in planned(twins.session) if id_ > first and twins.left[id_][1].at == EARLY)
    assert twins.left[first][0] != channel
    twins.edit(first, channel=channel)


def one_is_put_off(twins: Twins) -> None:
    twins.edit(planned(twins.session)[9][1], dequeue_at=NOW + HOUR)


def one_goes_to_another_channel(twins: Twins) -> None:
    twins.edit(planned(twins.session)[9][1], channel="a")


def one_becomes_costly(twins: Twins) -> None:
    twins.edit(planned(twins.session)[9][1], cost=50)


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


def the_queue_is_paused_and_resumed(twins: Twins) -> None:
    twins.pause()
    twins.put("new")
    assert twins.serve(5) == []
    assert fq.check(twins.session) == []
    twins.session.commit()
    twins.pause(None)


def the_queue_gets_a_limit(twins: Twins) -> None:
    twins.limit(1000)


def a_lease_runs_out(twins: Twins) -> None:
    """Of the message served last: it comes back to its old place, before those of its channel that are planned."""
    twins.run_out(max(twins.leases))


def the_clock_goes_back(twins: Twins) -> None:
    """What e and f have is no longer due."""
    twins.set_back(HOUR)


def the_clock_goes_back_a_little(twins: Twins) -> None:
    twins.set_back(10)


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


def all_pairs() -> Iterator[tuple[Callable[[Twins], None], Callable[[Twins], None], int]]:
    """Each event meets both kinds of plan and both limits; and so do these each other."""
    for number, event in enumerate(EVENTS):
        yield event, several_of_each, 7 if number % 2 else 1
        yield event, heads_of_many, 1 if number % 2 else 7


@pytest.mark.parametrize(("event", "twins", "limit"), [*all_pairs()], indirect=["twins"])
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
