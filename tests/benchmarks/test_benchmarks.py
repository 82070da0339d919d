"""The benchmarks measure what they say: each system serves every message once, and keeps its leases."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from rich.progress import Progress

from benchmarks.__main__ import main, measure
from benchmarks.consumers import Consumers
from benchmarks.environment import environment
from benchmarks.measuring import TINY, Bench, Case, alternate
from benchmarks.pictures import draw
from benchmarks.place import Place
from benchmarks.processes import Child, ProcessFailed
from benchmarks.records import Record, percentile, value_record
from benchmarks.report import PAGE, load, page
from benchmarks.scenarios import SCENARIOS, fairness, latency
from benchmarks.systems import OURS, OURS_WITHOUT_HISTORY, SYSTEMS, Fill, System, payload_of
from benchmarks.systems.peers import PEERS
from benchmarks.workers import Arrival, Sent, produce
from tests.benchmarks.results import result_of
from tests.fixtures.postgres import Postgres, libpq
from tests.fixtures.spark import on_spark, only_then
from tests.pages import ROOT

PAYLOAD = payload_of(100)


#: Without those from package registries.
DESIGNS = [system for name, system in SYSTEMS.items() if name not in PEERS]


@pytest.fixture(params=DESIGNS, ids=lambda system: system.name)
def system(request: pytest.FixtureRequest) -> System:
    found: System = request.param
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


@pytest.mark.parametrize("system", [SYSTEMS[OURS], SYSTEMS[OURS_WITHOUT_HISTORY]], ids=lambda system: system.name)
def test_history_is_kept_or_not(system: System, connection: Any) -> None:
    system.enqueue(connection, [("a", PAYLOAD)])
    system.settle(connection)  # takes one of them
    system.enqueue(connection, [("a", PAYLOAD), ("b", PAYLOAD)])
    assert system.complete(connection, system.dequeue(connection, 2)) == 2
    kept = connection.execute("SELECT count(*) FROM fairqueue.history").fetchone()[0]
    assert kept == (3 if system.keeps else 0)


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


@pytest.mark.parametrize("system", [s for s in DESIGNS if s.fair], ids=lambda system: system.name)
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
        yield Bench(place, consumers, TINY, {system.name: system for system in DESIGNS}, postgres.server)
    place.close()
    left = "SELECT count(*) FROM pg_database WHERE datname LIKE %s"
    with Place(place.dsn).admin as admin:
        assert admin.execute(left, (f"{place.name}%",)).fetchone() == (0,)


def _marks(name: str, case: Case) -> list[pytest.MarkDecorator]:
    if name != "spark":
        return []
    # A report of a day, with its page, takes as long as those of all the tests of reports.
    return [*on_spark, *([pytest.mark.soak, only_then] if case.label.startswith("report") else [])]


CASES = [
    pytest.param(name, case, id=f"{name}: {case.label}", marks=_marks(name, case))
    for name, module in SCENARIOS.items()
    if name != "peers"
    for case in module.cases(TINY)
]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_every_scenario_runs(
    name: str, case: Case, bench: Bench, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if name == "spark":
        request.getfixturevalue("spark")  # in the one session of all tests
    records = list(case.run(bench))
    assert records
    for record in records:
        assert math.isfinite(record.value)
        assert record.ratio is None or math.isfinite(record.ratio)
        assert Record(**json.loads(json.dumps(asdict(record), allow_nan=False))) == record
    result = result_of(records, environment(bench.place.dsn))
    text = page({name: result}, SCENARIOS, {})
    assert all(record.system in text for record in records)
    for picture in draw(tmp_path, name, result["records"]):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


PUBLISHED = sorted((ROOT / "docs" / "benchmarks").glob("*.json"))


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
@pytest.mark.parametrize("key", ["system", "figure"])
def test_pictures_of_what_was_measured(path: Path, key: str, tmp_path: Path) -> None:
    """Whatever else could not be, or wasn't chosen; of parts that are alike but for names and numbers, one."""
    parts: dict[str, list[dict[str, Any]]] = {}
    for record in json.loads(path.read_text())["records"]:
        parts.setdefault(record[key], []).append(record)
    kinds = {frozenset((r["figure"], r["ratio"] is None, *r["case"]) for r in part): part for part in parts.values()}
    for part in kinds.values():
        for picture in draw(tmp_path, path.stem, part):
            assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_a_case_that_fails_leaves_the_others(bench: Bench) -> None:
    """Whatever it raises; but Ctrl-C ends the run."""

    def raising(error: BaseException) -> Case:
        def run(bench: Bench) -> list[Record]:
            raise error

        return Case(f"{error!r}", run)

    own = Bench(bench.place, bench.consumers, TINY, {})
    good = Case("good", lambda _: [value_record("rate", "limit", {}, [1.0], "1/s")])

    def half(bench: Bench) -> Iterator[Record]:
        yield value_record("rate", "blocks", {}, [1.0], "1/s")
        raise TimeoutError("later")

    progress = Progress()
    task = progress.add_task("")
    errors: list[Exception] = [TimeoutError(), ProcessFailed("gone\nfor good"), psycopg.OperationalError("no server")]
    result = measure(own, "peers", [*map(raising, errors), good, Case("half", half)], progress, task)
    assert [record["system"] for record in result["records"]] == ["limit", "blocks"]  # also what came before the error
    assert [note.rpartition(": ")[2] for note in result["notes"]] == ["TimeoutError", "gone", "no server", "later"]
    assert own.failed == result["failed"] == 4
    with pytest.raises(KeyboardInterrupt):
        measure(own, "peers", [raising(KeyboardInterrupt())], progress, task)


def test_a_server_that_is_gone_ends_the_run(postgres: Postgres) -> None:
    """Nothing is written: what was measured before stays."""
    place = Place(libpq(postgres.url.render_as_string(hide_password=False)))

    def run(bench: Bench) -> list[Record]:
        place.admin.close()
        raise psycopg.OperationalError("no server")

    progress, bench = Progress(), Bench(place, Consumers(), TINY, {})
    task = progress.add_task("")
    with pytest.raises(psycopg.OperationalError, match="closed"):
        measure(bench, "peers", [Case("bad", run)], progress, task)


def test_only_databases_of_runs_that_are_gone_are_dropped(postgres: Postgres, empty_database_url: str) -> None:
    """Not those of others, whatever their names, nor of a run whose URL names another database of the server."""
    dsn = libpq(postgres.url.render_as_string(hide_password=False))
    theirs = ["fairqueue_bench_2024", "fairqueue_bench_0123abcd_results", "fairqueue_bench_0123abcd_1"]
    with psycopg.connect(dsn, autocommit=True) as connection:
        for name in theirs:
            connection.execute(f"CREATE DATABASE {name}".encode())
        try:
            there = "SELECT datname FROM pg_database WHERE datname = ANY (%s) ORDER BY datname"
            first = Place(dsn)
            with first.database() as used:
                second = Place(libpq(empty_database_url))
                with psycopg.connect(used) as still:
                    assert still.info.dbname.startswith(first.name)
            for place in (first, second):
                place.close()
            assert connection.execute(there.encode(), (theirs,)).fetchall() == [(theirs[1],), (theirs[0],)]
        finally:
            for name in theirs:
                connection.execute(f"DROP DATABASE IF EXISTS {name}".encode())


@pytest.mark.parametrize(
    ("dsn", "out", "told"),
    [
        ("postgresql://localhost:1/nothing", "out", "the server can't be used: connection failed"),
        ("nonsense", "out", "a database URL must begin with postgresql://"),
        ("nonsense", "file/out", "Not a directory"),
    ],
)
def test_what_cannot_begin_says_why(
    dsn: str, out: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIRQUEUE_DSN", dsn)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # SIGTERM stays ours
    (tmp_path / "file").touch()
    done = CliRunner().invoke(main, ["--tiny", "--out", str(tmp_path / out), "imports"])
    assert (done.exit_code, done.output.count("Error: ")) == (1, 1)
    assert f"Error: {told}" in done.output or f"{told}: '{tmp_path / out}'" in done.output


def test_a_picture_that_cannot_be_drawn_costs_no_figures(
    empty_database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(out: Path, name: str, records: Any) -> list[str]:
        assert json.loads((tmp_path / f"{name}.json").read_text())["records"] == records  # they are safe already
        raise RuntimeError("no ink")

    monkeypatch.setenv("FAIRQUEUE_DSN", empty_database_url)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # SIGTERM stays ours
    monkeypatch.setattr("benchmarks.__main__.draw", broken)
    done = CliRunner().invoke(main, ["--tiny", "--out", str(tmp_path), "imports", "flood"])
    assert (done.exit_code, done.exception) == (0, None)
    assert all("no pictures: no ink" in load(tmp_path, [name])[name]["notes"] for name in ("imports", "flood"))
    assert (tmp_path / PAGE).read_text().count("* no pictures: no ink\n") == 2


@pytest.mark.parametrize(
    ("size", "folder"), [([], "build/benchmarks"), (["--tiny"], "build/benchmarks"), (["--full"], "docs/benchmarks")]
)
def test_only_full_runs_are_published(size: list[str], folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def run(names: object, size: object, systems: object, out: Path, console: object) -> int:
        asked.append(out)
        return 0

    monkeypatch.setattr("signal.signal", lambda *_: None)  # SIGTERM stays ours
    monkeypatch.setattr("benchmarks.__main__.run", run)
    monkeypatch.setattr("pathlib.Path.mkdir", lambda *_, **__: None)
    assert CliRunner().invoke(main, size).exit_code == 0
    assert asked == [ROOT / folder]


def test_a_role_that_may_make_no_databases(
    empty_database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is told so before what was measured earlier is overwritten."""
    monkeypatch.setenv("FAIRQUEUE_DSN", empty_database_url)
    monkeypatch.setenv("PGOPTIONS", "-c role=pg_monitor")
    monkeypatch.setattr("signal.signal", lambda *_: None)  # SIGTERM stays ours
    done = CliRunner().invoke(main, ["--tiny", "--out", str(tmp_path), "flood"])
    assert (done.exit_code, list(tmp_path.iterdir())) == (1, [])
    assert "Error: the server can't be used: permission denied to create database\n" in done.output


class Scripted:
    """A process whose answers are known."""

    def __init__(self, *answers: Any) -> None:
        self.orders: list[Any] = []
        self.answers = list(answers)

    def send(self, order: Any) -> None:
        self.orders.append(order)

    def receive(self) -> Any:
        return self.answers.pop(0)


def test_latency_counts_from_the_commit() -> None:
    arrivals = [Arrival(0.0, "a", "c0"), Arrival(0.1, "b", "c0"), Arrival(0.2, "a", "c1")]
    producers: Any = Scripted([Sent(0.001, 10.0), Sent(0.0, 10.1), Sent(0.002, 10.2)])
    workers: Any = {"a": Scripted([(2, 10.25), (0, 10.01)]), "b": Scripted([(1, 10.6)]), "c": Scripted()}
    waits = latency.Running(producers, workers, None).turn(arrivals)
    assert list(waits) == ["a", "b"]
    assert [*waits["a"], *waits["b"]] == [pytest.approx(found) for found in ([50, 10], [2, 1], [500], [0])]
    assert [workers[queue].orders for queue in "abc"] == [[2], [1], []]


def test_arrivals_under_load_are_the_same_for_both_and_don_t_wait() -> None:
    class Instant(latency.Running):
        def turn(self, arrivals: Sequence[Arrival]) -> latency.Waits:
            turns.append(arrivals)
            return {}

    turns: list[Sequence[Arrival]] = []
    nobody: Any = None
    for number in (0, 1):
        latency._under_load(Instant(nobody, {}, None), rate=200.0, seconds=10.0, number=number)
    assert [turn[0].queue for turn in turns] == ["default", "polled", "polled", "default"]
    times = [[(arrival.at, arrival.channel) for arrival in turn] for turn in turns]
    assert times[0] == times[1] != times[2] == times[3]
    assert all(1_700 < len(turn) < 2_300 for turn in turns)  # 2,000, give or take seven standard deviations


def test_a_process_that_ends_says_so() -> None:
    child = Child(produce, "postgresql://localhost:1/nothing?connect_timeout=1")
    try:
        with pytest.raises(ProcessFailed, match=r"is gone, exit code 1"):
            child.receive()
    finally:
        child.end()


@pytest.mark.parametrize("count", range(1, 9))
def test_subjects_are_measured_in_turns_that_are_alike(count: int) -> None:
    """Each is as often in each place, and after itself, as the others; of an even number, after each of these too."""
    names = [str(number) for number in range(count)]
    order: list[str] = []
    alternate(names, 2 * count, order.append)
    rounds = [order[first : first + count] for first in range(0, len(order), count)]
    assert all(sorted(each) == names for each in rounds)
    assert set(Counter(place for each in rounds for place in enumerate(each)).values()) == {2}
    again = Counter(name for name, after in pairwise([*order, order[0]]) if name == after)
    assert len({again[name] for name in names}) == 1
    if count % 2 == 0:
        assert Counter(pair for each in rounds for pair in pairwise(each)) == dict.fromkeys(permutations(names, 2), 2)


def test_percentiles() -> None:
    assert [percentile([5.0, 1.0, 4.0, 2.0, 3.0], percent) for percent in (1, 50, 95, 100)] == [1, 3, 5, 5]


def test_shares_by_max_min_fairness() -> None:
    assert fairness.max_min({"a": 10, "b": 2, "c": 10}, 12) == {"b": 2.0, "a": 5.0, "c": 5.0}


def test_jain_index_of_known_orders() -> None:
    sizes = {"a": 100, "b": 100}
    assert min(fairness.jain_over_windows(sizes, ["a", "b"] * 100)) == 1
    assert min(fairness.jain_over_windows(sizes, ["a"] * 100 + ["b"] * 100)) == 0.5
    # Who has little gets it all: not unfair.
    assert min(fairness.jain_over_windows({"a": 100, "b": 1}, ["a", "b"] + ["a"] * 99)) == 1
