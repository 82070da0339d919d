"""The simulator without Spark: it serves as the reference does, keeps every limit, and idles for no reason."""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fairqueue.spark.simulation import Channel, Load, Scenario, run
from fairqueue.spark.simulation.loads import NEVER
from fairqueue.spark.simulation.schedulers import SCHEDULERS, Fair, Scheduler, steps
from fairqueue.spark.simulation.simulator import Service, serve
from fairqueue.spark.simulation.workloads import make_load
from tests.reference import BLOCKED, Entry, Policy, Reference, step

#: The reference takes the beginning of time for the last release of a channel: so let that be long ago.
EPOCH = 10**15


class ReferenceScheduler:
    """The reference in place of one of the simulator's schedulers."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.reference = Reference()
        for number, channel in enumerate(load.channels):
            policy = Policy(channel.weight, channel.max_concurrency, channel.interval, channel.burst)
            self.reference.channels[str(number)].policy = policy

    def arrive(self, message: int, now: int) -> None:
        entry = Entry(EPOCH + int(self.load.at[message]), message, float(self.load.cost[message]))
        self.reference.enqueue(str(self.load.channel[message]), [entry])

    def end(self, message: int, now: int) -> None:
        self.reference.end(str(self.load.channel[message]), message)

    def take(self, now: int) -> int | None:
        served = self.reference.dequeue(1, EPOCH + now)
        return served[0][1] if served else None

    def due(self) -> int:
        channels = self.reference.channels.values()
        # Seen from far ahead, because a release that is later than any could be is taken for a clock set back.
        times = [channel.time(2 * EPOCH, channel.head) for channel in channels if channel.head is not None]
        return min((time - EPOCH for time in times if time != BLOCKED), default=NEVER)


@st.composite
def loads(draw: st.DrawFn) -> Load:
    """Few channels and few moments, so that there are ties, limits are reached, and channels come and go."""
    channel = st.builds(
        Channel,
        weight=st.sampled_from([1, 1, 2, 3, 0.37, 1000]),
        max_concurrency=st.sampled_from([None, None, 1, 2]),
        interval=st.sampled_from([0, 0, 3, 10]),
        burst=st.sampled_from([1, 2, 4]),
    )
    alike = st.integers(2, 5).flatmap(lambda number: channel.map(lambda each: [each] * number))
    channels = draw(st.lists(channel, min_size=1, max_size=5) | alike)
    message = st.tuples(
        st.sampled_from([0, 0, 0, 0, 0, 1, 3, 40]),  # after the one before
        st.integers(0, len(channels) - 1),
        st.sampled_from([1, 1, 2, 5, 30]),  # service
        st.sampled_from([1.0, 1.0, 1.0, 0.01, 3.3, 50.0]),  # cost
    )
    pauses, numbers, services, costs = zip(*draw(st.lists(message, min_size=1, max_size=60)), strict=True)
    at = np.cumsum(pauses)
    return Load(at - at[0], np.array(numbers), np.array(services), np.array(costs), channels)


workers = st.integers(1, 6)
few_examples = settings(max_examples=60, derandomize=True)
examples = settings(max_examples=120, derandomize=True)


#: Two channels that wait for the same moment, with a backlog and without one: who came first has the first turn.
TIED = Load.of([(0, 0), (0, 1), (0, 1), (0, 0)], [Channel(interval=10)] * 2, service=1)
IDLE = Load.of([(0, 0), (0, 1), (3, 1), (3, 0)], [Channel(interval=10)] * 2, service=1)


@given(load=loads(), workers=workers)
@example(load=TIED, workers=2)
@example(load=IDLE, workers=2)
@examples
def test_fair_is_the_reference(load: Load, workers: int) -> None:
    """The same messages in the same order at the same times: weights, costs, limits, rates and ties."""
    fair, reference = serve(load, workers, Fair(load)), serve(load, workers, ReferenceScheduler(load))
    assert fair.order.tolist() == reference.order.tolist()
    assert fair.started.tolist() == reference.started.tolist()


@given(cost=st.floats(0, 1e6), weight=st.floats(0.01, 1000))
@examples
def test_tags_move_as_in_the_reference(cost: float, weight: float) -> None:
    assert steps(np.array([cost]), np.array([weight])).tolist() == [step(cost, weight)]


@given(load=loads(), workers=workers, scheduler=st.sampled_from(list(SCHEDULERS.values())))
@examples
def test_every_promise_is_kept(load: Load, workers: int, scheduler: type[Scheduler]) -> None:
    """Looked at from outside, moment by moment: what is known is only what arrived, what was served, and when."""
    service = serve(load, workers, scheduler(load))
    assert sorted(service.order.tolist()) == list(range(len(load.at)))
    assert (service.started >= load.at).all()
    assert (np.diff(service.started[service.order]) >= 0).all()
    check_rates(load, service)
    ended = service.started + load.service
    for now in sorted({*load.at.tolist(), *service.started.tolist(), *ended.tolist()}):
        running = Counter(load.channel[(service.started <= now) & (ended > now)].tolist())
        assert running.total() <= workers
        for number, channel in enumerate(load.channels):
            assert running[number] <= (channel.max_concurrency or workers)
        # A worker that idles has nothing that it may do.
        waiting = load.channel[(load.at <= now) & (service.started > now)].tolist()
        if running.total() < workers:
            for number in set(waiting):
                channel = load.channels[number]
                at_limit = channel.max_concurrency is not None and running[number] >= channel.max_concurrency
                assert at_limit or not may_release(load, service, number, now), (now, number)


def check_rates(load: Load, service: Service) -> None:
    """In any stretch of time, no more messages than the burst and one for each interval."""
    for number, channel in enumerate(load.channels):
        starts = sorted(service.started[load.channel == number].tolist())
        for first in range(len(starts)):
            for last in range(first + channel.burst, len(starts)):
                assert starts[last] - starts[first] >= (last - first + 1 - channel.burst) * channel.interval


def may_release(load: Load, service: Service, number: int, now: int) -> bool:
    """Whether one more message of the channel after those that began up to now would keep to its rate."""
    channel = load.channels[number]
    starts = [start for start in service.started[load.channel == number].tolist() if start <= now]
    return all(
        now - start >= (len(starts) - place + 1 - channel.burst) * channel.interval
        for place, start in enumerate(sorted(starts))
        if len(starts) - place >= channel.burst
    )


@given(load=loads(), workers=workers)
@few_examples
def test_arrival_order_without_limits(load: Load, workers: int) -> None:
    load = replace(load, channels=[Channel() for _ in load.channels])
    assert serve(load, workers, SCHEDULERS["arrival"](load)).order.tolist() == list(range(len(load.at)))


def rotation(load: Load) -> Iterator[int]:
    """All that is there is served in rotation, by one worker."""
    row = deque(dict.fromkeys(load.channel.tolist()))
    left = {channel: deque(np.flatnonzero(load.channel == channel).tolist()) for channel in row}
    while row:
        channel = row.popleft()
        yield left[channel].popleft()
        if left[channel]:
            row.append(channel)


@given(load=loads())
@few_examples
def test_round_robin_is_a_rotation(load: Load) -> None:
    load = replace(load, at=np.zeros_like(load.at), channels=[Channel() for _ in load.channels])
    assert serve(load, 1, SCHEDULERS["round_robin"](load)).order.tolist() == list(rotation(load))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_one_worker_waits_as_theory_says(scheduler: str) -> None:
    """M/M/1: the mean wait is rho / (1 - rho) service times, here 4 s, in whatever order messages are served."""
    load = make_load(Scenario(tenants=20, workers=1, load=0.8, messages=100_000))
    waits = serve(load, 1, SCHEDULERS[scheduler](load)).started - load.at
    assert waits.mean() / 1e9 == pytest.approx(4, rel=0.1)


def test_many_workers_wait_as_theory_says() -> None:
    """M/M/c, Erlang's C formula: 8 workers at load 0.9 wait 0.8777 service times on average."""
    load = make_load(Scenario(tenants=20, workers=8, load=0.9, messages=200_000, service=0.2))
    waits = serve(load, 8, Fair(load)).started - load.at
    offered, term, below = 7.2, 1.0, 0.0
    for servers in range(8):
        below += term
        term *= offered / (servers + 1)
    last = term / (1 - 0.9)
    theory = 0.2 * last / (below + last) / (8 - offered)
    assert waits.mean() / 1e9 == pytest.approx(theory, rel=0.1)


def row(group: str = "quiet", **scenario: Any) -> dict[str, Any]:
    return next(row for row in run(Scenario(**scenario)) if row["group"] == group)


def test_quiet_tenants_don_t_wait_for_a_noisy_one() -> None:
    """5,000 messages uploaded at once, one worker busy half of the time with the others."""
    scenario: dict[str, Any] = {
        "workload": "burst",
        "tenants": 20,
        "workers": 1,
        "load": 0.5,
        "messages": 10_000,
        "upload": 5_000,
    }
    by_arrival, fair = row(**scenario, scheduler="arrival"), row(**scenario, scheduler="fair")
    assert by_arrival["wait_p99"] > 4_000
    assert fair["wait_p99"] < 20
    assert by_arrival["first_place"] > 5_000
    assert fair["first_place"] <= 19


def test_a_tenant_under_many_names_has_many_shares() -> None:
    """Fair queueing is fair to names: under 30 of them, beside 10 others, a tenant gets three quarters."""
    scenario: dict[str, Any] = {"workload": "split", "tenants": 11, "workers": 2, "load": 4, "messages": 20_000}
    shares = {names: row("noisy", **scenario, names=names)["utilisation"] for names in (1, 30)}
    assert shares[1] == pytest.approx(1 / 11, abs=0.05)
    assert shares[30] == pytest.approx(3 / 4, abs=0.05)
    weighted = row("noisy", **scenario, names=30, weights=(1 / 30, 1))
    assert weighted["utilisation"] == pytest.approx(1 / 11, abs=0.05), "the way out: a weight for each name"


def test_limits_of_a_scenario() -> None:
    load = make_load(Scenario(tenants=3, weights=(4, 2), max_concurrency=5, interval_ms=250, burst=3, messages=100))
    assert load.channels[0] == Channel(0, 4, 5, 250_000_000, 3)
    assert [channel.weight for channel in load.channels] == [4, 2, 2]


@pytest.mark.parametrize("workload", ["zipf", "burst", "diurnal", "split"])
def test_the_seed_decides(workload: str) -> None:
    scenario = Scenario(workload=workload, tenants=50, messages=2_000, service_law="lognormal")
    assert run(scenario) == run(scenario)
    assert run(replace(scenario, seed=2)) != run(scenario)
    once, again = make_load(scenario), make_load(replace(scenario, scheduler="arrival", max_concurrency=1))
    assert (once.at == again.at).all()
    assert (once.service == again.service).all()
    assert (once.channel == again.channel).all()


@pytest.mark.parametrize(("law", "spread"), [("constant", 0), ("exponential", 1), ("lognormal", np.sqrt(np.e - 1))])
def test_service_times(law: str, spread: float) -> None:
    service = make_load(Scenario(service=0.2, service_law=law, messages=200_000)).service / 1e9
    assert service.mean() == pytest.approx(0.2, rel=0.02)
    assert service.std() == pytest.approx(0.2 * spread, rel=0.1)


def test_loads_are_what_the_scenario_says() -> None:
    steady = Scenario(tenants=100, workers=5, load=0.8, messages=100_000, service=0.5, skew=1)
    load = make_load(steady)
    assert load.at[-1] / 1e9 == pytest.approx(100_000 * 0.5 / (5 * 0.8), rel=0.02)
    counts = np.bincount(load.tenant)
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.1)
    daily = make_load(replace(steady, workload="diurnal", swing=1, cycles=1))
    quarters, _ = np.histogram(daily.at, bins=4)
    # The integral of 1 + sin over quarters of a period.
    assert quarters / 100_000 == pytest.approx([1 / 4 + 1 / (2 * np.pi)] * 2 + [1 / 4 - 1 / (2 * np.pi)] * 2, abs=0.02)
    split = make_load(replace(steady, workload="split", names=4))
    assert np.bincount(split.tenant)[0] == pytest.approx(50_000, rel=0.02)
    assert np.bincount(split.channel)[:4].tolist() == pytest.approx([12_500] * 4, rel=0.05)
    burst = make_load(replace(steady, workload="burst"))
    assert (burst.at == 0).sum() == 10_000
    assert np.bincount(burst.tenant)[0] == 10_000
    assert all(a <= b for each in (load, daily, split, burst) for a, b in pairwise(each.at[:1000].tolist()))


def test_what_a_row_says() -> None:
    """Two messages of one tenant, then one of another, one worker, a second each."""
    from fairqueue.spark.simulation.results import measure

    load = Load.of([(0, 0), (0, 0), (10**9, 1)], [Channel(0), Channel(1)])
    by_arrival, fair = (measure(load, serve(load, 1, SCHEDULERS[name](load)), 1, 0.5) for name in ("arrival", "fair"))
    quiet, noisy, all_ = by_arrival
    assert (quiet["group_tenants"], noisy["group_tenants"], all_["group_tenants"]) == (1, 1, 2)
    assert (quiet["group_messages"], noisy["group_messages"], all_["group_messages"]) == (1, 2, 3)
    assert (quiet["wait_p50"], noisy["wait_p50"], noisy["wait_max"], all_["wait_p50"]) == (1, 0.5, 1, 1)
    assert (quiet["services_p99"], quiet["first_place"], all_["span"]) == (2, 1, 1)
    assert (noisy["throughput"], noisy["utilisation"], quiet["utilisation"]) == (1, 1, 0)
    assert fair[0]["wait_p50"] == 0
    assert fair[1]["wait_max"] == 2
