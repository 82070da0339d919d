"""When what a queue says of its channels changes, and when the clock is set back, lanes are derived anew: a part in
each turn. Until all have been, nothing is served; what happens meanwhile is taken in as at any other time.
"""

from collections.abc import Callable, Iterator
from itertools import product

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import TIDY, alter, complete, lease_of, put, sql, take
from tests.fixtures.connections import Raw
from tests.fixtures.workers import WorkerOf
from tests.limiting import LEASE, limit_queue
from tests.reference import BLOCKED, Policy
from tests.scheduling.twins import HOUR, Twins, heads_of_many, several_of_each
from tests.worker.working import RARELY, wait_for_endings

pytestmark = pytest.mark.shared_database(False)


@pytest.fixture(autouse=True)
def parts_of_five(engine: Engine) -> None:
    alter(engine, "scheduler_serve", "5000, false, r.rebuilt", "5, false, r.rebuilt")


def stop(session: Session) -> str | None:
    """The last lane that was derived anew, if others are still to be."""
    name: str | None = session.scalar(text("SELECT rebuilt FROM fairqueue.rotation"))
    return name


def rebuilt(session: Session) -> str | None:
    name = stop(session)
    session.commit()
    return name


def checked(session: Session) -> None:
    assert fq.check(session) == []
    session.commit()


class Parts(Twins):
    """Where dequeues come to nothing, because lanes are still to be derived anew, something else happens."""

    def __init__(self, session: Session, policies: dict[str, Policy]) -> None:
        super().__init__(session, policies)
        self.has_own_weight = set(policies)
        self.default = Policy()
        self.stops: list[str] = []
        self.meanwhile: list[Callable[[Parts], None]] = []

    def batch(self, limit: int) -> list[fq.LeasedMessage]:
        while not (batch := super().batch(limit)) and (stop := rebuilt(self.session)) is not None:
            self.stops.append(stop)
            checked(self.session)
            if self.meanwhile:
                self.meanwhile.pop(0)(self)
        assert rebuilt(self.session) is None
        return batch

    def defaults(self, policy: Policy) -> None:
        """Of the channels, but for weights that they say themselves."""
        self.default = policy
        limit_queue(self.session, channel_weight=policy.weight, channel_max_concurrency=policy.max_concurrency)
        for name, channel in self.reference.channels.items():
            channel.policy = policy._replace(weight=channel.policy.weight) if name in self.has_own_weight else policy
        self.reference.changed = True


@pytest.fixture
def twins(session: Session, clock_that_stands: None, request: pytest.FixtureRequest) -> Parts:
    twins = Parts(session, {"b": Policy(weight=2)})
    request.param(twins)
    return twins


def all_weigh_three(twins: Parts) -> None:
    twins.defaults(Policy(weight=3))


def all_weigh_four(twins: Parts) -> None:
    """What blocks some goes on: else these would begin anew, having been blocked for a moment."""
    twins.defaults(twins.default._replace(weight=4))


def each_may_run_one(twins: Parts) -> None:
    twins.defaults(Policy(max_concurrency=1))


def all_may_run_two_more(twins: Parts) -> None:
    """And each of them one."""
    twins.limit(len(twins.leases) + 2)
    twins.defaults(Policy(max_concurrency=1))


def the_clock_goes_back(twins: Parts) -> None:
    twins.set_back(HOUR)


def policies_are_truncated(twins: Parts) -> None:
    sql(twins.session, "TRUNCATE fairqueue.channel")
    twins.has_own_weight.clear()
    twins.defaults(twins.default)


def nothing(twins: Parts) -> None:
    pass


def messages_arrive(twins: Parts) -> None:
    for name in ("a", "c", "e"):
        twins.put(name, [1, 1])


def leases_end(twins: Parts) -> None:
    twins.end(list(twins.leases)[:2])


def a_lease_runs_out(twins: Parts) -> None:
    twins.run_out(next(iter(twins.leases)))


def some_are_cancelled(twins: Parts) -> None:
    """Not the last one: that nothing is left of a channel is found later."""
    for channel in "ad":
        ids = [id_ for id_, (name, _) in twins.left.items() if name == channel]
        twins.cancel(ids[:-1])


def one_goes_to_a_new_channel(twins: Parts, new: str = "A") -> None:
    """Which has a lane at once, before all others."""
    twins.edit(next(id_ for id_, (name, _) in twins.left.items() if name == "d"), channel=new)
    twins.reference.channels[new].policy = twins.reference.channels["d"].policy


def one_goes_to_a_last_channel(twins: Parts) -> None:
    """Whose turn is still to come."""
    one_goes_to_a_new_channel(twins, "z")


def a_channel_is_paused(twins: Parts) -> None:
    twins.policy("f", twins.reference.channels["f"].policy._replace(paused_until=BLOCKED))
    twins.has_own_weight.add("f")


def all_may_run_one_more(twins: Parts) -> None:
    twins.limit(len(twins.leases) + 1)


def there_is_no_limit(twins: Parts) -> None:
    twins.limit(None)


def the_queue_is_repaired(twins: Parts) -> None:
    sql(twins.session, "SELECT fairqueue.queue_repair()")


def a_part_is_undone(twins: Parts) -> None:
    before = rebuilt(twins.session)
    twins.session.scalars(fq.dequeue(limit=1)).all()
    assert stop(twins.session) != before
    twins.session.rollback()
    assert rebuilt(twins.session) == before


EVENTS = [all_weigh_three, each_may_run_one, all_may_run_two_more, the_clock_goes_back, policies_are_truncated]
RESTARTS = [all_weigh_four, the_clock_goes_back, policies_are_truncated]
OTHERS = [
    *(nothing, messages_arrive, leases_end, a_lease_runs_out, some_are_cancelled),
    *(one_goes_to_a_new_channel, one_goes_to_a_last_channel, a_channel_is_paused),
    *(all_may_run_one_more, there_is_no_limit, the_queue_is_repaired, a_part_is_undone),
]


Act = Callable[[Parts], None]


def all_pairs() -> Iterator[tuple[Act, Act, int, Callable[[Twins], None], int]]:
    """Each event meets whatever happens meanwhile, and each of both several lanes and many, one at a time and more."""
    for number, (event, meanwhile) in enumerate(product(EVENTS, [*RESTARTS, *OTHERS])):
        yield event, meanwhile, 1, several_of_each, 7 if number % 2 else 1
        if (number + number // len(EVENTS)) % 3 == 0:
            yield event, meanwhile, 1 + number % 13, heads_of_many, 1 if number % 2 else 7


@pytest.mark.parametrize(("event", "meanwhile", "part", "twins", "limit"), [*all_pairs()], indirect=["twins"])
def test_the_order_is_that_of_one_turn(twins: Parts, event: Act, meanwhile: Act, part: int, limit: int) -> None:
    """Whatever happens after that part, of 2 or 14."""
    twins.meanwhile = [*[nothing] * (part - 1), meanwhile]
    event(twins)
    for _ in range(28 // limit):
        twins.serve(limit)
        checked(twins.session)
    assert not twins.meanwhile
    # Begun again, or each once.
    assert (twins.stops != sorted(set(twins.stops))) == (meanwhile in RESTARTS)
    twins.limit(None)
    twins.defaults(Policy())
    twins.open()
    twins.drain(7)


@pytest.mark.parametrize("limit", [None, 100])
def test_leases_of_channels_without_a_lane_count(session: Session, limit: int | None) -> None:
    """Nobody had counted them, and the lanes had been forgotten."""
    names = [f"{letter}{number}" for letter in "afkp" for number in range(5)]
    for name in names:
        put(session, name)
    batch = {message.channel: message for message in lease_of(session, 100, LEASE)}
    assert sorted(batch) == sorted(names)
    gone = ["a0", "f1", "p4"]
    sql(session, "DELETE FROM fairqueue.lane WHERE due IS NULL AND channel = ANY (:gone)", gone=gone)
    assert session.scalar(text("SELECT count(*) FROM fairqueue.lane")) == 17
    session.commit()
    limit_queue(session, channel_max_concurrency=1, max_concurrency=limit)
    for name in names:
        put(session, name)
    stops = []
    while take(session, 100, LEASE) == [] and (stop := rebuilt(session)) is not None:
        stops.append(stop)
    assert len(stops) == 3
    assert take(session, 100, LEASE) == []
    checked(session)
    assert complete(session, [batch[name] for name in gone]) == ["completed"] * 3
    assert sorted(take(session, 100, LEASE)) == gone


@pytest.mark.parametrize("limit", [None, 12])
def test_leases_that_somebody_holds_count_once(
    session: Session, raw: Raw, database_url: str, limit: int | None
) -> None:
    """When they are counted with those of the queue, of their channel, and again after another change."""
    names = [f"tenant{number:02}" for number in range(12)]
    for name in names:
        put(session, name, 2)
    batch = lease_of(session, 12, LEASE)
    assert sorted(message.channel for message in batch) == names
    holder: psycopg.Connection = raw(database_url)
    holder.execute("SELECT FROM fairqueue.message WHERE leased_until IS NOT NULL FOR UPDATE")
    limit_queue(session, channel_max_concurrency=1, max_concurrency=limit)
    assert take(session, 100, LEASE) == []
    assert rebuilt(session) == "tenant04"
    limit_queue(session, channel_weight=2)
    while rebuilt(session) is not None:
        assert take(session, 100, LEASE) == []
        checked(session)
    holder.rollback()
    assert take(session, 100, LEASE) == []
    checked(session)
    assert complete(session, batch[:5]) == ["completed"] * 5
    checked(session)
    assert sorted(take(session, 100, LEASE)) == sorted(message.channel for message in batch[:5])
    checked(session)


def test_a_worker_comes_again_at_once(session: Session, worker_of: WorkerOf) -> None:
    """Not ever later, as where others were there first."""
    for number in range(100):
        put(session, f"tenant{number}")
    lease_of(session, 50)
    limit_queue(session, channel_weight=2)
    assert take(session) == []
    assert session.scalar(text("SELECT fairqueue.queue_due()")) == -1
    session.commit()
    with worker_of("plain", lambda *_: None, poll=RARELY):
        wait_for_endings(session, 50)
    assert rebuilt(session) is None


def test_lanes_that_turn_out_to_be_idle_are_forgotten(session: Session) -> None:
    """Though those that had been idle for so long were gone by then."""
    fq.enqueue_many(session, [{"channel": f"once{number}", "delay": 86_400} for number in range(12)])
    session.commit()
    assert take(session) == []
    put(session, "busy", 300)
    assert len(take(session, 200)) == 200
    sql(session, TIDY)
    assert take(session) == ["busy"]
    sql(session, "DELETE FROM fairqueue.message WHERE channel <> 'busy'")
    limit_queue(session, channel_weight=2)
    while take(session) == []:
        assert rebuilt(session) is not None
    sql(session, TIDY)
    assert take(session) == ["busy"]
    assert session.scalars(text("SELECT channel FROM fairqueue.lane")).all() == ["busy"]
