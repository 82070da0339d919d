"""The report: its figures are those of a plain computation, its page holds nothing that a name could smuggle in."""

import math
import random
import re
import time
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy.orm import Session

import fairqueue as fq
from fairqueue.cli import Target
from fairqueue.cli.program import program
from fairqueue.errors import InvalidValue
from tests.acts import complete, lease_of, put
from tests.fixtures.spark import on_spark
from tests.spark import report_reference as reference

pytest.importorskip("pyspark")

from fairqueue.cli.failures import Failed
from fairqueue.cli.output import make_console
from fairqueue.cli.spark.report import _archived, _print, _writable
from fairqueue.cli.spark.report import report as command
from fairqueue.spark.reporting import Report, Summary, page, report, summary
from fairqueue.spark.reporting.fairness import with_entitlement
from fairqueue.spark.reporting.summaries import _rows
from fairqueue.spark.reporting.windows import parse_window
from fairqueue.spark.reporting.words import percentiles_are
from fairqueue.spark.schemas import HISTORY, MESSAGES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = on_spark

EVIL = "<script>alert('x')</script>&amp;\x1b[2J"
CHANNELS = (EVIL, "$x_1$ % \u4e2d\u6587", "007", "acme", "globex", "initech", "umbrella")
WEIGHTS = {("a", None): 200.0, ("a", "acme"): 50.0, ("b", "acme"): 3.0, ("b", "nobody"): 7.0}
SINCE = datetime(2026, 3, 28, 23, 2, 30, tzinfo=UTC)
UNTIL = SINCE + timedelta(minutes=83)
WINDOW = timedelta(minutes=10)

Row = dict[str, Any]


def messages(seed: int, count: int) -> tuple[list[Row], list[Row]]:
    """A history and live messages with all that happens, and some that only clocks that are set back bring about."""
    rng = random.Random(seed)  # noqa: S311
    history: list[Row] = []
    live: list[Row] = []
    for number in range(count):
        kind = rng.choice(["completed"] * 12 + ["retried", "dead", "redriven", *["cancelled"] * 2, "dropped", "odd"])
        row: Row = _ended(rng, kind) | {"message_id": number, "id": number}
        if rng.random() < 0.07:
            live.append(_alive(row, rng.choice(["waiting", "leased", "retried"])))
            continue
        history.append(row)
        if kind == "redriven":
            again = row["finished_at"] + timedelta(seconds=rng.randint(1, 500))
            row = {**row, "dequeue_at": int(again.timestamp() * 1000), "attempt": 2, "leased_at": again}
            if rng.random() < 0.5:
                history.append({**row, "outcome": "completed", "finished_at": again + timedelta(seconds=5)})
            else:
                live.append(_alive(row, "leased"))
    return history + _burst(count), live


def _burst(first: int) -> list[Row]:
    """Much in flight at the end of a window, and little work."""
    at = datetime(2026, 3, 28, 23, 49, 59, tzinfo=UTC)
    times = {"created_at": at, "first_leased_at": at, "leased_at": at, "finished_at": at + timedelta(seconds=2)}
    rest = {"queue": "b", "channel": "burst", "outcome": "completed", "attempt": 1, "cost": 1.0, "dequeue_at": 0}
    return [{"message_id": number, **times, **rest} for number in range(first, first + 40)]


def _ended(rng: random.Random, kind: str) -> Row:
    # Whole tens of seconds, so that much happens at the same time; the first channel has most.
    created = SINCE + timedelta(seconds=10 * rng.randint(-90, 590))
    due = created + timedelta(seconds=rng.choice([0, 0, 0, -500, 700]))
    waited = 10 * rng.choice([0, 1, rng.randint(0, 6), rng.randint(0, 6), rng.randint(0, 300)])
    worked = timedelta(seconds=rng.choice([0, rng.randint(1, 30), rng.randint(1, 30), rng.randint(1, 2500)]))
    started = max(created, due) + timedelta(seconds=waited)
    row: Row = {
        "queue": rng.choice("aab"),
        "channel": CHANNELS[min(int(rng.expovariate(0.6)), len(CHANNELS) - 1)],
        "outcome": {"retried": "completed", "redriven": "dead", "odd": "completed"}.get(kind, kind),
        "attempt": 1,
        "cost": rng.choice([1.0, 1.0, 0.1, 2.5]),
        "dequeue_at": rng.choice([int(due.timestamp() * 1000)] * 9 + [-(2**62), 2**62]),
        "created_at": created,
        "first_leased_at": started,
        "leased_at": started,
        "finished_at": started + worked,
    }
    unseen = {"first_leased_at": None, "leased_at": None}
    if kind == "retried":
        again = started + worked / 2
        row |= {"leased_at": again, "dequeue_at": int(again.timestamp() * 1000)}
    elif kind == "dropped":
        row |= {**unseen, "finished_at": created}
    elif kind == "cancelled" and rng.random() < 0.7:
        row |= {**unseen, "finished_at": started}
    elif kind == "odd":
        row |= rng.choice([{"finished_at": created - worked}, {"created_at": started + worked}])
    return row


def _alive(row: Row, state: str) -> Row:
    row = {**row, "leased_until": UNTIL if state == "leased" else None}
    return row | {"first_leased_at": None, "leased_at": None} if state == "waiting" else row


def frame(spark: "SparkSession", rows: list[Row], schema: str) -> "DataFrame":
    names = [part.split()[0] for part in schema.split(",")]
    return spark.createDataFrame([tuple(row.get(name) for name in names) for row in rows], schema)


@pytest.fixture(scope="module")
def rows() -> tuple[list[Row], list[Row]]:
    return messages(7, 600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def found(spark: "SparkSession", rows: tuple[list[Row], list[Row]], folder: Path) -> Report:
    history, live = rows
    weights = [(queue, channel, weight) for (queue, channel), weight in WEIGHTS.items()]
    return report(
        frame(spark, history, HISTORY),
        folder,
        live=frame(spark, live, MESSAGES),
        weights=spark.createDataFrame(weights, "queue string, channel string, weight double"),
        window=WINDOW,
        since=SINCE,
        until=UNTIL,
    )


@pytest.fixture(scope="module")
def few(found: Report) -> Summary:
    return summary(found, top=2)


@pytest.fixture(scope="module")
def shown(few: Summary) -> str:
    return page(few)


def collected(table: "DataFrame", *key: str) -> dict[Any, Row]:
    found: dict[Any, Row] = {}
    for row in table.collect():
        figures = row.asDict()
        if "window" in figures:
            figures["window"] = figures["window"].astimezone(UTC)
        name = tuple(figures[each] for each in key)
        assert name not in found
        found[name] = figures
    return found


def assert_same(found: dict[Any, Row], expected: dict[Any, Row]) -> None:
    assert found.keys() == expected.keys()
    for key, row in expected.items():
        got = {name: found[key][name] for name in row}
        nothing = {name for name, value in row.items() if value is None}
        assert nothing == {name for name, value in got.items() if value is None}, key
        known = {name: value for name, value in row.items() if value is not None}
        assert {name: got[name] for name in known} == pytest.approx(known, rel=1e-6, abs=1e-6), key


def test_figures_are_those_of_a_plain_computation(found: Report, rows: tuple[list[Row], list[Row]]) -> None:
    history = [row for row in rows[0] if row["finished_at"] >= SINCE and row["created_at"] < UNTIL]
    expected = reference.compute(history, rows[1], WEIGHTS, WINDOW, since=SINCE, until=UNTIL)
    assert found.exact
    assert found.weighted
    assert len(expected.channel_windows) > 80
    for figure in ("starved", "backlog", "in_flight", "dead", "cancelled", "dropped", "noisy"):
        assert any(row[figure] for row in expected.channel_windows.values()), f"nothing has {figure}"
    assert expected.channel_windows["b", "burst", datetime(2026, 3, 28, 23, 40, tzinfo=UTC)]["noisy"]
    assert_same(collected(found.channel_windows, "queue", "channel", "window"), expected.channel_windows)
    assert_same(collected(found.queue_windows, "queue", "window"), expected.queue_windows)
    assert_same(collected(found.channels, "queue", "channel"), expected.channels)


def test_the_totals_of_a_queue_are_those_of_its_channels(found: Report) -> None:
    channels = collected(found.channels, "queue", "channel").values()
    for total in found.queues.collect():
        mine = [row for row in channels if row["queue"] == total["queue"]]
        for name in ("enqueued", "served", "dead", "backlog", "wait_n", "service_n"):
            assert total[name] == sum(row[name] for row in mine)
        assert total["wait_max"] == max(row["wait_max"] for row in mine if row["wait_n"])
        assert total["starved"] == max(row["starved"] or 0 for row in mine)


def test_sketches_are_near_and_said_to_be_used(
    spark: "SparkSession", rows: tuple[list[Row], list[Row]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without a period, live messages and weights, which then are what history says, and 1.

    The first window is a shorter one: it was over before all was known, though an hour would not have been. In the last
    one nothing starts. Written where this process is, not Spark; in a folder whose name would be a wildcard.
    """
    monkeypatch.chdir(tmp_path)
    seen = [row for row in rows[0] if row["finished_at"] >= datetime(2026, 3, 28, 23, tzinfo=UTC)]
    seen.append({**_burst(9_999)[0], "finished_at": datetime(2026, 3, 29, 2, 30, tzinfo=UTC)})  # long at work
    history = [row for row in seen if row["queue"] == "b"]
    sketched = report(frame(spark, seen, HISTORY), "out [1]", queue="b", window="1 hour", exact_rows=1)
    assert sketched.path == str(tmp_path / "out [1]")
    assert (tmp_path / "out [1]" / "queues" / "_SUCCESS").exists()
    assert not sketched.exact
    assert not sketched.weighted
    expected = reference.compute(history, [], {}, timedelta(hours=1))
    first, *_, last = sorted(expected.queue_windows)
    assert first[1] < datetime(2026, 3, 28, 23, tzinfo=UTC)
    assert expected.queue_windows[first]["jain"] is expected.queue_windows[last]["jain"] is None
    assert any(row["cost_started"] for (queue, _, at), row in expected.channel_windows.items() if (queue, at) == first)
    percentile = re.compile("p[0-9]+$")
    exact = {key: {n: v for n, v in row.items() if not percentile.search(n)} for key, row in expected.channels.items()}
    assert_same(collected(sketched.channels, "queue", "channel"), exact)
    assert_same(collected(sketched.queue_windows, "queue", "window"), expected.queue_windows)
    lives = reference.lives_of(history, [])
    for row in sketched.channels.collect():
        waits = sorted(
            (life.started - life.due) / 1e6
            for life in lives["b", row["channel"]]
            if life.first and life.started is not None
        )
        if waits:
            assert row["wait_p95"] == waits[math.ceil(0.95 * len(waits)) - 1]
    assert "from sketches" in percentiles_are(sketched)


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.words = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name.endswith(("href", "src"))]

    def handle_data(self, data: str) -> None:
        self.words += data


def test_the_page_needs_nothing_and_takes_names_for_text(shown: str) -> None:
    read = _Tags()
    read.feed(shown)
    assert "svg" in read.tags
    assert not read.tags & {"script", "link", "img", "iframe", "object"}
    assert all(link.startswith("#") for link in read.links)
    assert "url(http" not in shown
    assert "<script>alert('x')</script>&amp;\\x1b[2J" in read.words
    assert "\x1b" not in shown
    assert "Percentiles are exact." in read.words
    assert "currentColor" in shown


def test_the_summary_is_small(few: Summary) -> None:
    assert [queue.total["queue"] for queue in few.queues] == ["a", "b"]
    for queue in few.queues:
        assert len(queue.largest) == len(queue.starved) == 2
        assert queue.largest[0]["cost_started"] >= queue.largest[1]["cost_started"]
        assert queue.starved[0]["starved"] >= queue.starved[1]["starved"]
        assert queue.noisiest[0]["channel"] == queue.largest[0]["channel"] != queue.quietest[0]["channel"]
        assert [row["rank"] for row in queue.ranks] == list(range(1, len(queue.ranks) + 1))


def test_scales_are_labelled_in_words() -> None:
    """Also between powers of ten, where waits are near each other; a few of them where they are not."""
    from fairqueue.spark.reporting.pictures import ranks
    from fairqueue.spark.reporting.summaries import QueueSummary

    def labels(least: float, most: float) -> list[str]:
        rows = [{"rank": rank, "low": least, "middle": least, "high": most} for rank in (1, 40)]
        picture = ranks(QueueSummary({}, [], [], [], [], [], rows))
        assert picture is not None
        assert "math" not in picture
        return re.findall(r">([^<>\n]* m?s)</text>", picture)

    near = labels(2, 8)
    assert {"3.0 s", "6.0 s"} <= {*near}
    far = labels(0.02, 500)
    assert {"1.0 s", "10 s"} <= {*far}
    assert len({*far}) < 8


def test_times_have_a_zone(few: Summary, shown: str, spark: "SparkSession", monkeypatch: pytest.MonkeyPatch) -> None:
    """UTC, wherever it is computed."""
    windows = [row["window"] for queue in few.queues for row in queue.windows]
    assert {each.tzinfo for each in windows} == {UTC}
    assert re.search(r"in the worst, 2026-03-2\d \d\d:\d\d:\d\d\+00:00", shown)
    try:
        with monkeypatch.context() as patched:
            patched.setenv("TZ", "America/Lima")
            time.tzset()
            assert _rows(spark.sql("SELECT timestamp_micros(0) AS window")) == [
                {"window": datetime(1970, 1, 1, tzinfo=UTC)}
            ]
    finally:
        time.tzset()


def test_no_messages(spark: "SparkSession", tmp_path: Path) -> None:
    (tmp_path / "channels" / "_temporary").mkdir(parents=True)  # as a report leaves it that is killed
    empty = report(frame(spark, [], HISTORY), tmp_path, live=frame(spark, [], MESSAGES))
    assert empty.rows == 0
    assert empty.channels.count() == empty.queue_windows.count() == 0
    assert "Nothing happened" in page(summary(empty))


def test_the_command(
    spark: "SparkSession", database_url: str, session: Session, other: psycopg.Connection, tmp_path: Path
) -> None:
    """What has ended, what is still waiting, by the weights that are set, of a queue that looks like a number.

    All of it, though a transaction is open that began before.
    """
    from pyarrow import parquet

    other.execute("SELECT pg_current_xact_id()")
    session.add(fq.Channel(queue="007", name="acme", weight=3))
    put(session, "acme", 5, queue="007")
    put(session, "globex", 2, queue="007")
    complete(session, lease_of(session, 4, queue="007"))
    lease_of(session, queue="007")
    put(session, EVIL, queue="007")
    result = CliRunner().invoke(program, ["--dsn", database_url, "spark", "report", "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "queue 007: 3 channels, 8 enqueued, 4 served, 0 dead, 3 waiting" in result.stdout
    assert "Percentiles are exact. Weights are those of the policies." in result.stdout
    assert "\x1b" not in result.stdout
    assert "&lt;script&gt;" in (tmp_path / "out" / "index.html").read_text()
    rows = parquet.read_table(tmp_path / "out" / "channels").to_pylist()
    found = {row["channel"]: (row["weight"], row["enqueued"], row["served"], row["started"]) for row in rows}
    assert found == {"acme": (3, 5, 3, 4), "globex": (1, 2, 1, 1), EVIL: (1, 1, 0, 0)}


def test_the_terminal_has_each_queue(few: Summary, capsys: pytest.CaptureFixture[str]) -> None:
    _print(make_console(), few)
    found = re.findall(r"^queue (\w+): (\d+) channels, (\d+) enqueued, ", capsys.readouterr().out, re.MULTILINE)
    totals = [queue.total for queue in few.queues]
    assert found == [(total["queue"], str(total["channels"]), str(total["enqueued"])) for total in totals]
    assert [queue for queue, *_ in found] == ["a", "b"]


def test_the_page_of_a_report_that_was_killed(tmp_path: Path) -> None:
    """While it replaced another."""
    (tmp_path / "index.html").touch()
    (tmp_path / "channels").mkdir()
    with pytest.raises(Failed, match="has a page that is of no report"):
        _writable(str(tmp_path))
    (tmp_path / "channels" / "_SUCCESS").touch()
    assert _writable(str(tmp_path)) == tmp_path


def test_the_history_of_an_archive(spark: "SparkSession", tmp_path: Path) -> None:
    """Of a queue that looks like a number, from a day on."""
    midnight = datetime(2026, 5, 2, tzinfo=UTC)
    rows = [
        {"message_id": n, "queue": "007", "channel": EVIL, "finished_at": midnight + timedelta(seconds=seconds)}
        for n, seconds in enumerate((-30, 30))
    ]
    history = frame(spark, rows, HISTORY).selectExpr("*", "to_date(finished_at) AS day")
    history.write.partitionBy("day", "queue").parquet(str(tmp_path / "archive"))
    (row,) = _archived(spark, str(tmp_path / "archive"), midnight).collect()
    assert (row["message_id"], row["queue"], row["channel"]) == (1, "007", EVIL)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--archive", "nothing"], 1, "has no Parquet that can be read"),
        (["--archive", "x", "--since", "noon"], 2, "must be a time such as"),
        (["--archive", "x", "--window", "fortnight"], 2, "window must be a length of time"),
        (["--archive", "x", "--since", "2026-05-02", "--until", "2026-05-01"], 2, "until must be after since"),
        (["--archive", "x", "--out", "file"], 1, "is no folder that you may write to"),
        (["--archive", "x", "--out", "site"], 1, "has a page that is of no report"),
        ([], 2, "no database is named"),
    ],
)
@pytest.mark.usefixtures("spark")
def test_the_command_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").touch()
    result = CliRunner().invoke(command, arguments, obj=Target(None))
    assert result.exit_code == code
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_what_can_not_be_is_refused(spark: "SparkSession", tmp_path: Path) -> None:
    history = frame(spark, [], HISTORY)
    with pytest.raises(InvalidValue, match="until must be after since"):
        report(history, tmp_path / "out", since=UNTIL, until=SINCE)
    with pytest.raises(InvalidValue, match="since must be a datetime with a time zone"):
        report(history, tmp_path / "out", since=SINCE.replace(tzinfo=None))
    with pytest.raises(InvalidValue, match="until must be a datetime with a time zone, not '2026-11-01'"):
        report(history, tmp_path / "out", until="2026-11-01")  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match="lacks cost"):
        report(history.drop("cost"), tmp_path / "out")
    with pytest.raises(InvalidValue, match="lacks leased_until"):
        report(history, tmp_path / "out", live=frame(spark, [], MESSAGES).drop("leased_until"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["channels", "queues/models.py"])
def test_what_is_not_of_a_report_stays(spark: "SparkSession", tmp_path: Path, name: str) -> None:
    mine = tmp_path / name
    mine.parent.mkdir(exist_ok=True)
    mine.touch()
    with pytest.raises(InvalidValue, match=rf"^path has something in {tmp_path / name.partition('/')[0]} that"):
        report(frame(spark, [], HISTORY), tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [mine]


def test_too_many_rows_are_refused_before_they_are_made(
    spark: "SparkSession", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody who waited for a month, in seconds."""
    at = datetime(2026, 1, 1, tzinfo=UTC)
    late = {"first_leased_at": at + timedelta(days=30), "finished_at": at + timedelta(days=30)}
    row = {"message_id": 1, "queue": "a", "channel": "b", "outcome": "completed", "cost": 1.0, "dequeue_at": 0}
    monkeypatch.setattr("fairqueue.spark.reporting.tables.MOST_ROWS", 1_000_000)
    with pytest.raises(InvalidValue, match=r"window must be longer than 0:00:01.*2,592,001 rows"):
        report(frame(spark, [{**row, "created_at": at, **late}], HISTORY), tmp_path / "out", window="1s")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "seconds"), [("1 hour", 3600), ("15 min", 900), ("30s", 30), ("1d", 86_400), ("2 Days", 172_800)]
)
def test_windows(text: str, seconds: int) -> None:
    assert parse_window(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "hour", "0s", "-1h", "1.5h", "1 month", "400 d", "1h 30m"])
def test_what_is_no_window(text: str) -> None:
    with pytest.raises(InvalidValue, match="window must be a length of time"):
        parse_window(text)


_costs = st.one_of(st.just(0.0), st.sampled_from([1.0, 2.0]), st.floats(0.01, 1e6))
_weights = st.one_of(st.just(1.0), st.floats(0.01, 1000))
_groups = st.lists(
    st.lists(st.tuples(_costs, _costs, _weights), min_size=1, max_size=8),
    min_size=16,
    max_size=40,
)


@settings(max_examples=3)
@given(groups=_groups)
def test_entitlement_is_max_min(spark: "SparkSession", groups: list[list[tuple[float, float, float]]]) -> None:
    """Many queues at once, because one alone takes Spark as long."""
    rows = [(group, place, *row) for group, members in enumerate(groups) for place, row in enumerate(members)]
    schema = "g int, place int, cost_started double, cost_backlog double, weight double"
    found = with_entitlement(spark.createDataFrame(rows, schema), "g").collect()
    got = {(row["g"], row["place"]): row["entitled"] for row in found}
    for group, members in enumerate(groups):
        capacity = sum(started for started, _, _ in members)
        demands = [started + backlog for started, backlog, _ in members]
        expected = reference.entitlements(demands, [weight for *_, weight in members], capacity)
        mine = [got[group, place] for place in range(len(members))]
        assert mine == pytest.approx(expected, rel=1e-6, abs=1e-9 * max(1, *demands))
        assert sum(mine) == pytest.approx(capacity, rel=1e-9, abs=1e-9)
