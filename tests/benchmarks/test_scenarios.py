"""The scenarios ask what they say, and what fails in the middle of one is no figure."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from benchmarks.consumers import Consumers
from benchmarks.measuring import TINY, Bench
from benchmarks.place import Place
from benchmarks.scenarios import dequeueing, draining, latency, old_snapshot, open_enqueuers
from benchmarks.scenarios.dequeueing import Cell
from benchmarks.systems import LIMIT, OURS, SYSTEMS, Fill, System
from benchmarks.systems.fair import Fairqueue
from tests.fixtures.postgres import libpq


@pytest.fixture
def bench(place: Place, consumers: Consumers) -> Bench:
    return Bench(place, consumers, TINY, {name: SYSTEMS[name] for name in (OURS, LIMIT)})


def test_the_limit_is_planned_as_ours_is(empty_database_url: str) -> None:
    dsn = libpq(empty_database_url)
    SYSTEMS[OURS].install(dsn)
    with SYSTEMS[LIMIT].connected(dsn) as connection:
        (settings,) = connection.execute(
            "SELECT proconfig FROM pg_proc WHERE oid = 'fairqueue.message_dequeue'::regproc"
        ).fetchone()
        ours = dict(setting.split("=", 1) for setting in settings if not setting.startswith("search_path="))
        limit = {name: connection.execute(f"SHOW {name}".encode()).fetchone()[0] for name in ours}
    assert limit == ours
    assert ours["enable_hashjoin"] == "off"


def test_a_channel_row_is_made_once(empty_database_url: str) -> None:
    """Each INSERT takes a number of the sequence, also where the channel is there already."""
    system, dsn = SYSTEMS["channel-row"], libpq(empty_database_url)
    system.install(dsn)
    last = "SELECT last_value FROM channel_id_seq"
    with system.connected(dsn) as connection, system.connected(dsn) as other:
        for _ in range(3):
            system.enqueue(connection, [("a", "1"), ("b", "2"), ("a", "3")])
        system.fill(connection, Fill(messages=2, channels=2, payload="1", prefix="f"))
        system.enqueue(connection, [("f1", "1")])
        assert connection.execute(last).fetchone() == (4,)
        with other.transaction(force_rollback=True):
            system.enqueue(other, [("c", "1")])
        system.enqueue(other, [("c", "1")])  # the channel was rolled back, too
        assert system.backlog(other) == 13


@pytest.mark.parametrize("scenario", [draining, dequeueing], ids=lambda module: module.__name__.rpartition(".")[2])
def test_what_has_a_goal_is_measured_more_often(scenario: Any, bench: Bench) -> None:
    bench = replace(bench, size=replace(TINY, near=3))
    for channels, pairs in ((1_000, 3), (5, 1)):
        cell = Cell(10, 1, channels)
        records = list(scenario.measure(cell if scenario is draining else [cell], bench))
        assert [(record.system, record.pairs, bool(record.wanted)) for record in records] == [
            (OURS, pairs, channels == 1_000),
            (LIMIT, None, False),
        ]


def test_who_begins_alternates_from_run_to_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def tenth(bench: Bench, system: System, *_: Any) -> float:
        order.append(system.name)
        return 1.0

    monkeypatch.setattr(old_snapshot, "_tenth", tenth)
    monkeypatch.setitem(old_snapshot._ROUNDS, TINY.name, 2)
    list(old_snapshot.measure(bench))
    first = order[::2]
    assert first == [OURS, LIMIT] * 5 + [LIMIT, OURS] * 5


@pytest.mark.parametrize(
    ("messages", "parts"),
    [
        (12, ["p50", "longest"]),
        (19, ["p50", "longest"]),
        (20, ["p50", "p95", "longest"]),
        (100, ["p50", "p95", "p99", "longest"]),
    ],
)
def test_no_percentile_is_the_longest(messages: int, parts: list[str]) -> None:
    found = {part: of(range(messages)) for part, of in latency.parts_of(messages).items()}
    assert list(found) == parts
    assert len(set(found.values())) == len(parts)


def test_few_waits_have_no_percentiles() -> None:
    def turn(messages: int) -> latency.Waits:
        return {queue: ([1.0] * messages, [0.0] * messages) for queue in ("default", "polled")}

    assert {record.case.get("of") for record in latency._records("idle", [turn(200), turn(12)])} == {
        "p50",
        "longest",
        None,
    }
    figures = [record.figure for record in latency._records("idle", [turn(12)])]
    assert figures[-1] == "producers behind their schedule, longest"


class Failing(Fairqueue):
    """Where it fails, as its publisher's code may."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.connections = 0

    def connect(self, dsn: str) -> psycopg.Connection[Any]:
        connection = super().connect(dsn)
        self.connections += 1
        if self.where == "watch" and self.connections == 2:
            connection.close()
        return connection

    def enqueue(self, connection: psycopg.Connection[Any], rows: Sequence[tuple[str, str]]) -> None:
        if len(rows) == 1:
            if self.where == "enqueuer":
                connection.execute("SELECT 1 / 0")
            if self.where == "waiting":  # for the others, each of which keeps it
                connection.execute("LOCK TABLE fairqueue.queue")
        super().enqueue(connection, rows)

    def dequeue(self, connection: psycopg.Connection[Any], n: int, **options: Any) -> Any:
        if self.where == "consumer":
            connection.execute("SELECT 1 / 0")
        return super().dequeue(connection, n, **options)


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("watch", "the connection is closed"),
        ("enqueuer", "division by zero"),
        ("consumer", "division by zero"),
        ("waiting", r"only \d of 4 transactions have enqueued"),
    ],
)
def test_an_error_among_open_enqueuers_is_no_figure(
    where: str, told: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All threads have ended then."""
    if where == "waiting":
        monkeypatch.setattr(open_enqueuers, "_PATIENCE", 0.6)
    bench.systems[OURS] = Failing(where)
    before = threading.active_count()
    with pytest.raises((AssertionError, psycopg.Error), match=told):
        list(open_enqueuers.measure(OURS, bench))
    assert threading.active_count() <= before
