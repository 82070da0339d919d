"""The archive, without Spark: each row once, whatever is interrupted, and nothing dropped that isn't there."""

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine

pytest.importorskip("adbc_driver_postgresql")

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.dataset import partitioning

from fairqueue import schema
from fairqueue.errors import FairqueueError, InvalidValue
from fairqueue.spark.engine.archives import Archive, Archived
from fairqueue.spark.engine.feeds import Offset
from fairqueue.spark.engine.place import Place
from fairqueue.spark.engine.reading import Selection, arrow_schema
from tests.acts import stop_clock, wait_until
from tests.fixtures.connections import Raw
from tests.observing import observer, value, waits_for_a_lock
from tests.pages import ROOT, blocks
from tests.spark.histories import COLUMNS, DAY, add, add_days, history, noon, ordered, release, row
from tests.spark.idling import connections, ended_after

SCHEMA = arrow_schema(Selection("history"))
STEPS = ["begun", "staged", "recorded", "moved", "published", "finished", "released"]


def one_by_one(function: Callable[[Any], Any], items: Sequence[Any], /) -> list[Any]:
    return [function(item) for item in items]


class Stopped(Exception):
    """Instead of a crash."""


class Stopping(Archive):
    """One that stops when it has reached a step so many times."""

    stop: tuple[str, int] = ("", 0)

    def _reached(self, step: str) -> None:
        name, times = self.stop
        if step == name:
            self.stop = (name, times - 1)
            if times == 1:
                raise Stopped


@pytest.fixture
def connection(raw: Raw, database_url: str) -> psycopg.Connection[Any]:
    return raw(database_url)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "history"


@pytest.fixture
def archive(database_url: str, folder: Path) -> Stopping:
    return Stopping(Place(url=database_url), str(folder), feed="archive", each=one_by_one)


def run(archive: Archive, *, max_rows: int = 7, age: float | None = None) -> Archived:
    return archive.run(max_rows=max_rows, release_before=None if age is None else timedelta(days=age))


def files(folder: Path) -> list[Path]:
    """As any program would find them."""
    return sorted(folder.glob("day=*/queue=*/*.parquet"))


def archived(folder: Path) -> list[dict[str, Any]]:
    """All rows in the files, as a reader has them that knows nothing but Parquet and Hive's folders."""
    if not folder.exists() or not files(folder):
        return []
    # It takes what looks like a number for one.
    schema = pa.schema([*SCHEMA, pa.field("day", pa.string())])
    table = pq.read_table(
        folder,
        schema=schema,
        partitioning=partitioning(schema=pa.schema([("day", pa.string()), ("queue", pa.string())]), flavor="hive"),
    )
    rows = table.to_pylist()
    assert all(each.pop("day") == each["finished_at"].astimezone(UTC).date().isoformat() for each in rows)
    return ordered(rows)


class TestRows:
    def test_are_those_of_the_history(
        self, archive: Stopping, connection: psycopg.Connection[Any], folder: Path
    ) -> None:
        """Column by column; by days and queues of any name; with a partition and without; in several batches."""
        add_days(connection, 0, 1)
        for number in range(1, 16):
            midnight = datetime(DAY.year, DAY.month, DAY.day, tzinfo=UTC) + timedelta(days=number % 3)
            add(
                connection,
                [
                    row(number),
                    row(number, 1),
                    row(number, 2),
                    row(100 + number, finished_at=midnight),
                    row(200 + number, finished_at=midnight - timedelta(microseconds=1)),
                ],
            )
            connection.commit()
        done = run(archive, max_rows=18)
        assert done.rows == 75
        assert done.batches >= 75 / 18
        assert archived(folder) == history(connection)
        names = {path.parent.relative_to(folder).as_posix() for path in files(folder)}
        assert "day=2026-03-28/queue=007" in names
        assert "day=2026-03-29/queue=a%2Fb%3Dc %2541 é" in names
        assert pq.read_schema(files(folder)[0]).names == [name for name in COLUMNS if name != "queue"]
        assert run(archive) == Archived(), "there is nothing new"

    def test_of_a_history_that_is_empty_yet(
        self, archive: Stopping, connection: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """While others write: it begins after the horizon that it has taken."""
        horizon = archive._feed.horizon

        def then_others_write() -> Offset:
            found = horizon()
            connection.execute("SELECT pg_current_xact_id()")
            connection.commit()
            return found

        monkeypatch.setattr(archive._feed, "horizon", then_others_write)
        assert run(archive).rows == 0
        add(connection, [row(1)])
        connection.commit()
        assert run(archive).rows == 1

    def test_that_come_later_are_added(
        self, archive: Stopping, connection: psycopg.Connection[Any], folder: Path, raw: Raw, database_url: str
    ) -> None:
        late = raw(database_url)
        add(late, [row(1)])
        add(connection, [row(2)])
        connection.commit()
        assert run(archive).rows == 0, "a transaction that is older is still open"
        late.commit()
        assert run(archive).rows == 2
        add(connection, [row(3)])
        connection.commit()
        assert run(archive).rows == 1
        assert archived(folder) == history(connection)

    def test_manifests_say_what_is_where(
        self, archive: Stopping, connection: psycopg.Connection[Any], folder: Path
    ) -> None:
        add(connection, [row(number, day) for number in range(1, 10) for day in range(2)])
        connection.commit()
        run(archive, max_rows=5)
        manifests = [json.loads(path.read_text()) for path in (folder / "_batches").glob("*.json")]
        assert sum(each["rows"] for each in manifests) == 18
        assert sorted(file["path"] for each in manifests for file in each["files"]) == [
            path.relative_to(folder).as_posix() for path in files(folder)
        ]
        for day in (DAY, DAY + timedelta(days=1)):
            mine = [each["days"][day.isoformat()] for each in manifests if day.isoformat() in each["days"]]
            found = (sum(each["rows"] for each in mine), sum(int(each["checksum"]) for each in mine))
            assert found == connection.execute("SELECT * FROM fairqueue.history_digest(%s)", (day,)).fetchone()


class TestInterruptions:
    @pytest.mark.parametrize(("step", "times"), [("begun", 1), *product(STEPS[1:], (1, 2))])
    def test_at_each_step(
        self, archive: Stopping, connection: psycopg.Connection[Any], folder: Path, step: str, times: int
    ) -> None:
        """Then there is more history, and it is run again, and stopped once more; in the end all is there, once."""
        add_days(connection, 0, 1, 2)
        add(connection, [row(number, day, queue="default") for number in range(1, 12) for day in range(2)])
        connection.commit()
        everything = history(connection)
        for round_ in range(2):
            archive.stop = (step, times)
            try:
                run(archive, max_rows=12, age=0)
            except Stopped:
                if (round_, times) == (0, 1):
                    assert bool(files(folder)) == (step not in {"begun", "staged", "recorded"})
            else:
                assert round_, "the second time there is less to do"
            assert self.held(folder, connection) == everything
            add(connection, [row(100 + round_, 2 + round_, queue="default")])
            connection.commit()
            everything = ordered([*everything, *history(connection, f"message_id = {100 + round_}")])
        archive.stop = ("", 0)
        run(archive, age=0)
        assert archived(folder) == everything
        assert history(connection) == []
        assert not list((folder / "_staging").iterdir())

    def held(self, folder: Path, connection: psycopg.Connection[Any]) -> list[dict[str, Any]]:
        """What is in the files, where nothing is twice, and in the database together."""
        rows = archived(folder)
        assert max(Counter(str(each) for each in rows).values(), default=1) == 1
        return ordered([*rows, *(each for each in history(connection) if each not in rows)])

    def test_by_kill(
        self, archive: Stopping, connection: psycopg.Connection[Any], folder: Path, database_url: str
    ) -> None:
        add(connection, [row(number, day) for number in range(1, 12) for day in range(2)])
        connection.commit()
        command = [sys.executable, "-m", "tests.spark.archive_killed", database_url, str(folder), "moved"]
        killed = subprocess.run(command, capture_output=True, text=True, check=False)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert self.held(folder, connection) == history(connection)
        assert len(files(folder)) == 1
        run(archive)
        assert archived(folder) == history(connection)

    def test_what_stays_on_the_stage(
        self, archive: Stopping, connection: psycopg.Connection[Any], folder: Path
    ) -> None:
        """It is of nobody, and goes when there is nothing to archive, too."""
        add(connection, [row(1)])
        connection.commit()
        run(archive)
        left = folder / "_staging" / "of a run that died"
        left.mkdir(parents=True)
        (left / "0.parquet").touch()
        assert run(archive).rows == 0
        assert not left.exists()

    def test_by_another_run(self, archive: Stopping, connection: psycopg.Connection[Any], database_url: str) -> None:
        """Which doesn't begin as long as this one goes on; and this one records nothing when it has lost its lock."""
        add(connection, [row(1)])
        connection.commit()
        other = Stopping(Place(url=database_url), archive._folder.path, feed="archive", each=one_by_one)
        refused = []

        def meanwhile(step: str) -> None:
            if step == "staged":
                with pytest.raises(
                    FairqueueError, match="another process writes to the archive of feed 'archive'"
                ) as error:
                    run(other)
                refused.append(error.value)
                connection.execute("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'")
                connection.commit()

        archive._reached = meanwhile  # type: ignore[method-assign]
        with pytest.raises(psycopg.OperationalError):
            run(archive)
        assert refused
        assert run(other).rows == 1


class TestRelease:
    @pytest.fixture
    def filled(self, connection: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
        """Two days with a partition, and one without."""
        add_days(connection, 0, 1)
        add(connection, [row(number, day) for number in range(1, 8) for day in range(3)])
        connection.commit()
        return connection

    def days(self, connection: psycopg.Connection[Any]) -> dict[date, int]:
        return dict(Counter(each["finished_at"].astimezone(UTC).date() for each in history(connection)))

    def test_days_that_are_old_enough(self, archive: Stopping, filled: psycopg.Connection[Any], folder: Path) -> None:
        everything = history(filled)
        today = datetime.now(UTC)
        age = (today - noon(1)).total_seconds() / 86400
        done = run(archive, age=age - 0.4)
        assert done.released == [DAY], "the day after had just begun when this one was so old"
        assert self.days(filled) == {DAY + timedelta(days=1): 7, DAY + timedelta(days=2): 7}
        assert run(archive, age=1).released[:2] == [DAY + timedelta(days=1), DAY + timedelta(days=2)]
        assert history(filled) == []
        assert archived(folder) == everything

    def test_without_an_age_none(self, archive: Stopping, filled: psycopg.Connection[Any]) -> None:
        assert run(archive).released == []
        assert sum(self.days(filled).values()) == 21

    def test_in_a_database_with_another_isolation(
        self, archive: Stopping, filled: psycopg.Connection[Any], folder: Path
    ) -> None:
        """What is said for the database as a whole is said of others' transactions."""
        everything = history(filled)
        database = filled.info.dbname
        filled.execute(f"ALTER DATABASE \"{database}\" SET default_transaction_isolation = 'repeatable read'".encode())
        filled.commit()
        assert run(archive, age=0).released == [DAY + timedelta(days=day) for day in range(3)]
        assert archived(folder) == everything

    @pytest.mark.parametrize(
        "harm",
        ["a file is missing", "a file is there twice", "a value differs", "a null became empty", "of another day"],
    )
    def test_not_when_the_files_have_something_else(
        self, archive: Stopping, filled: psycopg.Connection[Any], folder: Path, harm: str
    ) -> None:
        run(archive, max_rows=1000)
        path = next(path for path in files(folder) if f"day={DAY}/queue=default" in str(path))
        table = pq.ParquetFile(path).read()
        match harm:
            case "a file is missing":
                path.unlink()
            case "a file is there twice":
                path.with_name("copy.parquet").write_bytes(path.read_bytes())
            case "a value differs":
                pq.write_table(table.set_column(6 - 1, "cost", pa.array([0.3] * len(table))), path)
            case "a null became empty":
                assert table["key"].null_count
                pq.write_table(table.set_column(2, "key", table["key"].fill_null("")), path)
            case _:
                target = folder / f"day={DAY + timedelta(days=1)}" / "queue=default" / "other.parquet"
                target.write_bytes(path.read_bytes())
        with pytest.raises(
            FairqueueError,
            match=r"not dropped: 2026-03-28 has 7 rows with checksum \d+, not \d|other.parquet has rows of 2026-03-28",
        ):
            run(archive, age=0)
        # The other days go.
        assert self.days(filled) == {DAY + timedelta(days=harm == "of another day"): 7}

    def test_days_that_retention_drops_meanwhile(
        self, archive: Stopping, filled: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They are none that the files should have been compared with."""
        tomorrow = DAY + timedelta(days=1)

        def reached(step: str) -> None:
            if step == "released":
                filled.execute(f"DROP TABLE IF EXISTS fairqueue.history_{tomorrow:%Y_%m_%d}".encode())
                filled.commit()

        monkeypatch.setattr(archive, "_reached", reached)
        assert run(archive, age=0).released == [DAY, DAY + timedelta(days=2)]

    def test_not_what_another_feed_has_not_read(self, archive: Stopping, filled: psycopg.Connection[Any]) -> None:
        filled.execute("SELECT fairqueue.feed_move('slow', '1', 1)")
        filled.commit()
        done = run(archive, age=0)
        assert done.released == [] or DAY not in done.released
        assert done.kept[DAY] == "the feed slow has not read all of 2026-03-28"
        assert self.days(filled)[DAY] == 7
        filled.execute("SELECT fairqueue.feed_forget('slow')")
        filled.commit()
        assert DAY in run(archive, age=0).released

    def test_not_what_somebody_still_writes(
        self, archive: Stopping, filled: psycopg.Connection[Any], folder: Path, raw: Raw, database_url: str
    ) -> None:
        """A completion of that day that is not committed yet."""
        run(archive)
        open_ = raw(database_url)
        add(open_, [row(99)])
        done = run(archive, age=0)
        assert DAY in done.kept
        assert DAY not in done.released
        open_.commit()
        assert DAY in run(archive, age=0).released
        assert [each["message_id"] for each in archived(folder)].count(99) == 1

    def test_not_a_day_that_goes_on(self, engine: Engine, filled: psycopg.Connection[Any]) -> None:
        midnight = int(noon(0.5).timestamp() * 1000)
        stop_clock(engine, midnight - 1)
        with pytest.raises(psycopg.DatabaseError, match="day must be over: 2026-03-28 is not"):
            release(filled, DAY)
        filled.rollback()
        stop_clock(engine, midnight)
        release(filled, DAY)

    @pytest.mark.parametrize("days", [(0, 1, 2), ()], ids=["partitions", "default"])
    def test_only_that_day(self, connection: psycopg.Connection[Any], days: Sequence[int]) -> None:
        """Once all feeds have read it, whatever they have read of those before and after."""
        add_days(connection, *days)
        for number, day in enumerate((1, 0, 2)):
            add(connection, [row(number, day)])
            connection.commit()
        xid = history(connection, "message_id = 0")[0]["xid"]
        connection.execute("SELECT fairqueue.feed_move('slow', %s::text::xid8, 0)", (xid,))
        with pytest.raises(psycopg.DatabaseError, match="the feed slow has not read all of 2026-03-29"):
            release(connection, DAY + timedelta(days=1))
        connection.rollback()
        connection.execute("SELECT fairqueue.feed_move('slow', %s::text::xid8, 1)", (xid,))
        release(connection, DAY + timedelta(days=1))
        connection.commit()
        assert self.days(connection) == {DAY: 1, DAY + timedelta(days=2): 1}

    def test_not_what_was_detached(self, filled: psycopg.Connection[Any]) -> None:
        """Somebody keeps that table: it is no history any more, though it has the name of a day."""
        table = f"fairqueue.history_{DAY:%Y_%m_%d}"
        filled.execute(f"ALTER TABLE fairqueue.history DETACH PARTITION {table}".encode())
        release(filled, DAY)
        filled.commit()
        assert value(filled, f"SELECT count(*) FROM {table}") == 7
        add(filled, [row(99)])
        filled.commit()
        release(filled, DAY)
        filled.commit()
        assert value(filled, f"SELECT count(*) FROM {table}") == 7
        assert DAY not in self.days(filled)

    def test_what_is_written_while_it_waits(self, filled: psycopg.Connection[Any], raw: Raw, database_url: str) -> None:
        """It gives up soon; and where it doesn't, it counts what has come."""
        open_, watching = raw(database_url), observer(raw, database_url)
        add(open_, [row(99)])
        filled.execute("SET statement_timeout = '20s'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            release(filled, DAY)
        filled.rollback()
        filled.execute("ALTER FUNCTION fairqueue.history_release SET lock_timeout = '20s'")
        filled.commit()
        with ThreadPoolExecutor(1) as pool:
            released = pool.submit(release, filled, DAY)
            wait_until(lambda: waits_for_a_lock(watching, filled))
            open_.commit()
            with pytest.raises(psycopg.DatabaseError, match="2026-03-28 has 8 rows with checksum"):
                released.result()

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            ("NULL, 0, 0", "day, rows and checksum must not be null"),
            ("'2026-03-28', 7, 1", "2026-03-28 has 7 rows with checksum "),
            (
                "'2026-03-28', 8, (SELECT checksum FROM fairqueue.history_digest('2026-03-28'))",
                "2026-03-28 has 7 rows with checksum ",
            ),
        ],
    )
    def test_in_sql(self, filled: psycopg.Connection[Any], call: str, message: str) -> None:
        with pytest.raises(psycopg.DatabaseError) as error:
            filled.execute(f"SELECT fairqueue.history_release({call})".encode())
        assert str(error.value.diag.message_primary).startswith(message)
        filled.rollback()
        filled.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        with pytest.raises(psycopg.DatabaseError, match="history_release needs READ COMMITTED"):
            filled.execute("SELECT fairqueue.history_release('2026-03-28', 7, 1)")


class TestPlaces:
    def test_of_another_archive_are_refused(
        self, archive: Stopping, connection: psycopg.Connection[Any], database_url: str, folder: Path, tmp_path: Path
    ) -> None:
        add(connection, [row(1)])
        connection.commit()
        run(archive)
        place = Place(url=database_url)
        with pytest.raises(FairqueueError, match="feed 'archive' has its archive elsewhere, not in"):
            run(Archive(place, str(tmp_path / "other"), feed="archive", each=one_by_one))
        with pytest.raises(InvalidValue, match="is the archive of feed 'archive', not of 'second'"):
            run(Archive(place, str(folder), feed="second", each=one_by_one))
        connection.execute("SELECT fairqueue.feed_move('archive', '900000', 1)")
        connection.commit()
        with pytest.raises(FairqueueError, match="feed 'archive' is ahead of"):
            run(archive)
        assert run(Archive(place, str(tmp_path / "other"), feed="second", each=one_by_one)).rows == 1

    def test_of_another_schema_are_refused(
        self, archive: Stopping, engine: Engine, database_url: str, folder: Path
    ) -> None:
        with engine.begin() as begun:
            schema.install(begun, schema="second")
        run(archive)
        with pytest.raises(FairqueueError, match="the offset is of the server, database and schema "):
            run(Archive(Place(url=database_url, schema="second"), str(folder), feed="archive", each=one_by_one))

    def test_of_a_schema_that_is_renamed(
        self, archive: Stopping, connection: psycopg.Connection[Any], database_url: str, folder: Path
    ) -> None:
        """As the documentation has it: it is the same history, and goes on."""
        add(connection, [row(1)])
        connection.commit()
        run(archive)
        ((_, renaming),) = blocks((ROOT / "docs" / "operations.md").read_text("utf-8"), "plpgsql")
        connection.execute(renaming.encode())
        connection.execute("UPDATE jobs.history SET xid = pg_current_xact_id()")  # which is another row to a feed
        connection.commit()
        renamed = Archive(Place(url=database_url, schema="jobs"), str(folder), feed="archive", each=one_by_one)
        assert run(renamed).rows == 1
        assert run(renamed).rows == 0

    @pytest.mark.parametrize("path", ["file:/data/history", "dbfs:/history"])
    def test_that_only_spark_knows(self, database_url: str, path: str) -> None:
        """They are none below the working directory."""
        with pytest.raises(InvalidValue, match=f"^'{path}' is a URL with one slash, which Spark knows"):
            Archive(Place(url=database_url), path, feed="archive", each=one_by_one)

    def test_of_files_that_got_lost_are_an_error(
        self, archive: Stopping, connection: psycopg.Connection[Any], folder: Path
    ) -> None:
        add(connection, [row(1)])
        connection.commit()
        archive.stop = ("published", 1)
        with pytest.raises(Stopped):
            run(archive)
        files(folder)[0].unlink()
        with pytest.raises(FairqueueError, match=r"parquet is missing, which the archive has had"):
            run(archive)

    def test_the_next_run_need_not_wait_for_the_server_to_notice_the_end(
        self, archive: Stopping, connection: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It does so some time after a connection was closed; here it is not closed at all."""
        open_still: list[psycopg.Connection[Any]] = []

        def forget(self: psycopg.Connection[Any]) -> None:
            open_still.append(self)

        with monkeypatch.context() as patch:
            patch.setattr(psycopg.Connection, "close", forget)
            add(connection, [row(1)])
            connection.commit()
            assert run(archive).rows == 1
            assert run(archive).rows == 0
        for each in open_still:
            each.close()

    def test_the_lock_is_held_however_long_a_batch_takes(
        self, archive: Stopping, connection: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its connection has nothing to do meanwhile, for which a server may be set to end it."""
        ended_after(connection, "idle_session_timeout")
        add(connection, [row(1)])
        connection.commit()
        held = connections(monkeypatch)
        found = []

        def meanwhile(step: str) -> None:
            if step == "staged":
                found.append(value(held[0], "SHOW idle_session_timeout"))

        archive._reached = meanwhile  # type: ignore[method-assign]
        run(archive)
        assert found == ["0"]

    def test_queues_with_names_too_long_for_a_folder(
        self, archive: Stopping, connection: psycopg.Connection[Any]
    ) -> None:
        add(connection, [row(1, queue="é" * 200)])
        connection.commit()
        with pytest.raises(FairqueueError, match="can't be archived: its name is too long for a folder"):
            run(archive)
