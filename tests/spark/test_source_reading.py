"""The data source as Spark uses it: frames and streams of the history, and the archive's command."""

import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from datetime import UTC
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from click.testing import CliRunner

from tests.fixtures.spark import on_spark

pytest.importorskip("pyspark")

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import StructType

from fairqueue.cli import Target
from fairqueue.cli.spark.archive import archive as command
from fairqueue.errors import InvalidValue
from fairqueue.spark import archive
from fairqueue.spark.engine.reading import Selection, arrow_schema
from fairqueue.spark.engine.reading import snapshot as held_snapshot
from fairqueue.spark.schemas import HISTORY, MESSAGES
from fairqueue.spark.source.reader import Partition, TableReader, arrow_schema_of, schema_of
from fairqueue.spark.source.stream_reader import FeedReader
from fairqueue.testing._databases import Databases
from tests.fixtures.postgres import libpq
from tests.spark.histories import add, add_days, history, noon, ordered, row

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = on_spark


@pytest.fixture(scope="module")
def url(databases: Databases, template: Any) -> Iterator[str]:
    """A database for all: 90 outcomes of three days."""
    with databases.create(template.template_dbname) as url:
        with psycopg.connect(libpq(url)) as connection:
            add_days(connection, 0, 1)
            add(connection, [row(number, day) for number in range(30) for day in range(3)])
        yield url


def struct(ddl: str) -> StructType:
    found = StructType.fromDDL(ddl)
    assert isinstance(found, StructType)
    return found


@pytest.fixture
def connection(url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(libpq(url)) as connection:
        yield connection


def loaded(spark: "SparkSession", url: str, **options: object) -> "DataFrame":
    return spark.read.format("fairqueue").options(url=url, **{name: str(each) for name, each in options.items()}).load()


def rows_of(frame: "DataFrame") -> list[dict[str, Any]]:
    """With times as PostgreSQL's driver has them."""
    rows = [each.asDict() for each in frame.collect()]
    times = ("created_at", "first_leased_at", "leased_at", "finished_at")
    return ordered({n: v.astimezone(UTC) if n in times and v else v for n, v in each.items()} for each in rows)


class TestFrames:
    def test_of_history_used_more_than_once(
        self, spark: "SparkSession", url: str, connection: psycopg.Connection[Any]
    ) -> None:
        """Column by column what is there; and a filter on it changes nothing for what else is done with it."""
        frame = loaded(spark, url, partitions=3)
        assert rows_of(frame) == history(connection)
        few = frame.where("message_id = 7")
        assert [few.count(), frame.count(), few.union(frame).count()] == [3, 90, 93]
        with redirect_stdout(StringIO()) as told:
            few.explain("extended")
        assert "message_id" in told.getvalue()
        assert "postgresql" not in told.getvalue(), "the URL is nobody else's business"

    @pytest.mark.parametrize("schema", ["finished_at timestamp_ltz", None])
    def test_where_timestamps_are_another_type(
        self, spark: "SparkSession", url: str, connection: psycopg.Connection[Any], schema: str | None
    ) -> None:
        spark.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
        try:
            reader = spark.read.format("fairqueue").options(url=url)
            found = (reader if schema is None else reader.schema(schema)).load().select("finished_at").collect()
        finally:
            spark.conf.unset("spark.sql.timestampType")
        times = [each["finished_at"] for each in history(connection)]
        assert sorted(each.finished_at.astimezone(UTC) for each in found) == sorted(times)

    def test_is_of_one_moment(self, spark: "SparkSession", database_url: str) -> None:
        """In which it is first used, however often that is; for what came later it is loaded again."""
        with psycopg.connect(libpq(database_url)) as connection:
            frame, other = loaded(spark, database_url), loaded(spark, database_url)
            frame.createOrReplaceTempView("fairqueue_history")
            for number in range(2):
                add(connection, [row(number)])
                connection.commit()
                assert spark.sql("SELECT * FROM fairqueue_history").count() == 1
            assert other.count() == 2
            spark.catalog.dropTempView("fairqueue_history")

    def test_of_some_columns(self, spark: "SparkSession", url: str) -> None:
        schema = "xid bigint, message_id bigint"
        frame = spark.read.format("fairqueue").schema(schema).options(url=url, since=noon(2).isoformat()).load()
        assert frame.columns == ["xid", "message_id"]
        assert sorted(each.message_id for each in frame.collect()) == list(range(30))
        some = loaded(spark, url, columns="queue,cost", channels='["tenant, 1"]')
        assert some.agg({"cost": "count"}).first() == (18,)

    def test_of_nothing_under_a_snapshot(self, spark: "SparkSession", url: str) -> None:
        with held_snapshot(url) as now:
            assert loaded(spark, url, table="messages", snapshot=now).count() == 0

    def test_with_what_can_t_be(self, spark: "SparkSession", url: str) -> None:
        with pytest.raises(Exception, match="unknown option 'colums': known are channels, columns"):
            loaded(spark, url, colums="queue").count()


class TestReaders:
    """Those that Spark makes, without Spark."""

    @pytest.mark.parametrize(("table", "ddl"), [("history", HISTORY), ("messages", MESSAGES)])
    def test_types_are_what_spark_checks_for(self, table: Any, ddl: str) -> None:
        assert arrow_schema(Selection(table)).equals(arrow_schema_of(struct(ddl)))
        assert struct(schema_of({"table": table})) == struct(ddl)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"table": "lane"}, "option table must be history or messages, not 'lane'"),
            ({"since": "yesterday"}, "option since must be a time in ISO 8601"),
            ({"partitions": "0"}, "option partitions must be a whole number of 1 or more"),
            ({"channels": "["}, "names must be a,b or a JSON list, not '['"),
            ({"channels": "[1]"}, "names must be strings, not '[1]'"),
            ({"snapshot": ""}, "option snapshot must not be empty"),
            ({"feed": "x"}, "unknown option 'feed'"),
        ],
    )
    def test_options_that_can_t_be(self, options: dict[str, str], message: str) -> None:
        with pytest.raises(InvalidValue) as error:
            TableReader(options, struct(HISTORY))
        assert message in str(error.value)

    def test_schemas_that_can_t_be(self) -> None:
        with pytest.raises(InvalidValue, match="unknown column 'tenant' of history: there are message_id"):
            TableReader({}, struct("tenant string"))
        with pytest.raises(InvalidValue, match="column cost of history is a double, not a string"):
            TableReader({}, struct("cost string"))
        with pytest.raises(InvalidValue, match="unknown column 'tenant' of messages"):
            schema_of({"columns": "tenant", "table": "messages"})

    def test_streams_that_can_t_be(self) -> None:
        with pytest.raises(InvalidValue, match="only table=history can be read as a stream"):
            FeedReader({"table": "messages"}, struct(MESSAGES))
        with pytest.raises(InvalidValue, match="option starting must be earliest or latest, not 'now'"):
            FeedReader({"starting": "now"}, struct(HISTORY))

    def test_limits_are_obeyed(self, url: str, connection: psycopg.Connection[Any]) -> None:
        reader = FeedReader({"url": url, "max_rows_per_batch": "10"}, struct(HISTORY))
        start = reader.initialOffset()
        assert reader.getDefaultReadLimit() == ReadMaxRows(10)

        def rows(limit: Any) -> int:
            planned = reader.partitions(start, reader.latestOffset(start, limit))
            return sum(each.part.rows for each in planned if isinstance(each, Partition))

        assert rows(ReadMaxRows(10)) <= 10
        assert rows(ReadAllAvailable()) == 90
        reader.prepareForTriggerAvailableNow()
        add(connection, [row(1000)])
        connection.commit()
        assert rows(ReadAllAvailable()) == 90, "it came after that"
        connection.execute("DELETE FROM fairqueue.history WHERE message_id = 1000")
        connection.commit()

    @pytest.mark.parametrize("starting", ["earliest", "latest"])
    def test_a_stream_may_begin_after_its_end(self, databases: Databases, template: Any, starting: str) -> None:
        """Of what is available now: Spark asks for its end first; and the history is empty yet."""
        with databases.create(template.template_dbname) as url, psycopg.connect(libpq(url)) as connection:
            reader = FeedReader({"url": url, "starting": starting}, struct(HISTORY))
            reader.prepareForTriggerAvailableNow()
            connection.execute("SELECT pg_current_xact_id()")
            connection.commit()
            start = reader.initialOffset()
            assert reader.latestOffset(start, ReadAllAvailable()) == start
            add(connection, [row(1)])
            connection.commit()
            reader.prepareForTriggerAvailableNow()
            assert reader.latestOffset(start, ReadAllAvailable()) != start


def test_a_stream(spark: "SparkSession", databases: Databases, template: Any, tmp_path: Path) -> None:
    """In batches; stopped and begun again; with a writer that commits late; its feed is moved."""
    with databases.create(template.template_dbname) as url, psycopg.connect(libpq(url)) as connection:

        def follow() -> None:
            frame = spark.readStream.format("fairqueue").options(url=url, feed="lake", max_rows_per_batch=20).load()
            query = frame.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
            query.trigger(availableNow=True).start(str(tmp_path / "rows")).awaitTermination()

        with psycopg.connect(libpq(url)) as late:
            add(connection, [row(number) for number in range(50)])
            connection.commit()
            add(late, [row(100)])
            add(connection, [row(101)])
            connection.commit()
            follow()
        assert spark.read.parquet(str(tmp_path / "rows")).count() == 50
        follow()
        assert rows_of(spark.read.parquet(str(tmp_path / "rows"))) == history(connection)
        cursor = connection.execute("SELECT xid::text::bigint FROM fairqueue.feed WHERE name = 'lake'").fetchone()
        assert cursor is not None
        assert cursor[0] >= history(connection)[0]["xid"]


def test_the_archive(spark: "SparkSession", url: str, connection: psycopg.Connection[Any], tmp_path: Path) -> None:
    """By its command; what Spark reads from it is the history; and the days are dropped."""
    wanted = history(connection)
    result = CliRunner().invoke(
        command, [str(tmp_path / "lake"), "--max-rows", "40", "--release-before", "1d"], obj=Target(url)
    )
    assert result.exit_code == 0, result.output
    assert "90 rows archived in" in result.stdout
    assert "days are dropped in the database." in result.stdout
    frame = spark.read.schema(f"{HISTORY}, day date").parquet(str(tmp_path / "lake"))
    rows = rows_of(frame)
    assert {each.pop("day") == each["finished_at"].date() for each in rows} == {True}
    assert rows == wanted
    assert history(connection) == []
    assert json.loads((tmp_path / "lake" / "_archive.json").read_text())["feed"] == "archive"


def test_the_archive_as_a_function(spark: "SparkSession", database_url: str, tmp_path: Path) -> None:
    with psycopg.connect(libpq(database_url)) as connection:
        add(connection, [row(number) for number in range(3)])
        connection.commit()
        done = archive(spark, str(tmp_path), url=database_url, feed="lake", max_rows=2, release_before=86_400.0)
        assert (done.rows, len(done.released)) == (3, 1)
        assert history(connection) == []
    for wrong, told in (
        ({"feed": ""}, "feed must have 1 to 255 characters, not 0"),
        ({"feed": None}, "feed must be text, not None"),
        ({"max_rows": 0}, "max_rows must be a whole number from 1 to "),
        ({"max_rows": 1.5}, "max_rows must be a whole number from 1 to "),
        ({"release_before": -1}, "release_before must be between 0 and "),
        ({"release_before": "7d"}, "release_before must be between 0 and "),
        ({"url": "postgresql://me:secret@db/app"}, "url must not hold a password"),
    ):
        with pytest.raises(InvalidValue, match=f"^{told}"):
            archive(spark, str(tmp_path), **{"url": database_url, **wrong})  # type: ignore[arg-type]
