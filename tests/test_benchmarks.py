"""The benchmarks measure what they say: each system serves every message once, and keeps its leases."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.consumers import Consumers
from benchmarks.environment import environment
from benchmarks.measuring import TINY, Bench, Case
from benchmarks.place import Place
from benchmarks.records import Record
from benchmarks.report import page
from benchmarks.scenarios import SCENARIOS, fairness
from benchmarks.systems import SYSTEMS, Fill, System, payload_of
from tests.fixtures.postgres import Postgres, libpq

PAYLOAD = payload_of(100)


@pytest.fixture(params=list(SYSTEMS.values()), ids=list(SYSTEMS))
def system(request: pytest.FixtureRequest) -> System:
    found: System = request.param
    if reason := found.missing():
        pytest.skip(reason)
    return found


@pytest.fixture
def connection(system: System, empty_database_url: str) -> Iterator[Any]:
    """A connection of the system to a database of its own."""
    dsn = libpq(empty_database_url)
    system.install(dsn)
    connection = system.connect(dsn)
    yield connection
    connection.close()


def test_every_message_is_served_once(system: System, connection: Any) -> None:
    system.enqueue(connection, [(f"t{i % 3}", PAYLOAD) for i in range(12)])
    system.fill(connection, Fill(messages=20, channels=5, payload=PAYLOAD))
    system.settle(connection)
    system.fill(connection, Fill(messages=10, channels=5, payload=PAYLOAD))
    system.fill(connection, Fill(messages=5, channels=5, payload=PAYLOAD, prefix="later", delay_ms=3_600_000))
    later = 5 if system.schedules else 0
    assert 40 <= system.backlog(connection) - later <= 42
    total, served = system.backlog(connection) - later, Counter[Any]()
    while batch := system.dequeue(connection, 7, timed=True):
        assert {lease.payload["pad"] for lease in batch} == {payload_of(100)[9:-2]}
        served.update(lease.id for lease in batch)
        assert system.complete(connection, batch) == len(batch)
    assert len(served) == total
    assert set(served.values()) == {1}
    assert system.backlog(connection) == later


def test_leases(system: System, connection: Any) -> None:
    system.enqueue(connection, [("a", PAYLOAD), ("b", PAYLOAD)])
    held = system.dequeue(connection, 2)
    assert sorted(lease.channel for lease in held) == ["a", "b"]
    assert not system.dequeue(connection, 2)  # they are leased
    assert system.complete(connection, held) == 2
    assert system.complete(connection, held) == 0

    system.enqueue(connection, [("a", PAYLOAD)])
    (late,) = system.dequeue(connection, 1, lease=0.001)
    while not (again := system.dequeue(connection, 1)):
        pass
    assert again[0].id == late.id
    assert again[0].attempt == late.attempt + 1
    assert system.complete(connection, [late]) == 0  # somebody else's now
    assert system.complete(connection, again) == 1
    assert system.backlog(connection) == 0


@pytest.mark.parametrize("system", [s for s in SYSTEMS.values() if s.fair], ids=lambda system: system.name)
def test_what_is_fair_takes_turns(system: System, connection: Any) -> None:
    system.enqueue(connection, [("noisy", PAYLOAD)] * 20 + [("a", PAYLOAD)] * 2 + [("b", PAYLOAD)] * 2)
    for _ in range(2):
        # In batches, without which partition-by always serves the oldest.
        assert {lease.channel for lease in system.dequeue(connection, 3)} == {"noisy", "a", "b"}
        time.sleep(0.002)  # channel-row goes by the clock, in whole milliseconds


@pytest.fixture(scope="module")
def bench(postgres: Postgres) -> Iterator[Bench]:
    place = Place(libpq(postgres.url.render_as_string(hide_password=False)))
    with Consumers() as consumers:
        yield Bench(place, consumers, TINY, dict(SYSTEMS), postgres.server)
    place.close()
    left = "SELECT count(*) FROM pg_database WHERE datname LIKE %s"
    with Place(place.dsn).admin as admin:
        assert admin.execute(left, (f"{place.name}%",)).fetchone() == (0,)


CASES = [(name, case) for name, module in SCENARIOS.items() for case in module.cases(TINY)]


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{name}: {case.label}" for name, case in CASES])
def test_every_scenario_runs(name: str, case: Case, bench: Bench) -> None:
    records = list(case.run(bench))
    assert records
    for record in records:
        assert math.isfinite(record.value)
        assert record.ratio is None or math.isfinite(record.ratio)
        assert Record.from_dict(json.loads(json.dumps(record.as_dict(), allow_nan=False))) == record
    result = {
        "size": "tiny",
        "seconds": 1.0,
        "environment": environment(bench.place.dsn),
        "notes": bench.notes,
        "records": [record.as_dict() for record in records],
    }
    text = page({name: result}, SCENARIOS, {})
    assert all(record.system in text for record in records)


def test_shares_by_max_min_fairness() -> None:
    assert fairness.max_min({"a": 10, "b": 2, "c": 10}, 12) == {"b": 2.0, "a": 5.0, "c": 5.0}


def test_jain_index_of_known_orders() -> None:
    sizes = {"a": 100, "b": 100}
    assert min(fairness.jain_over_windows(sizes, ["a", "b"] * 100)) == 1
    assert min(fairness.jain_over_windows(sizes, ["a"] * 100 + ["b"] * 100)) == 0.5
    # Who has little gets it all: not unfair.
    assert min(fairness.jain_over_windows({"a": 100, "b": 1}, ["a", "b"] + ["a"] * 99)) == 1
