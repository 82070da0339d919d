"""What Spark writes to the queue, and how it says what it can't. With faults: test_faults.py."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy.orm import Session

from tests.fixtures.spark import on_spark

pytest.importorskip("pyspark")

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.errors import PySparkException
from pyspark.sql.types import StructType

import fairqueue as fq
from fairqueue.errors import InvalidValue
from fairqueue.spark import local_session
from fairqueue.spark.engine.loading import LoadFailed, Part, stage
from fairqueue.spark.source.writer import JobWriter, Message, told
from tests.acts import drain
from tests.observing import value
from tests.spark.loads import keyed, once_each, stages

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = on_spark


def save(frame: "DataFrame", url: str, **options: str) -> None:
    frame.write.format("fairqueue").mode("append").options(url=url, **options).save()


def test_all_columns(spark: "SparkSession", database_url: str, session: Session) -> None:
    """As Spark's own types; and a worker gets them."""
    frame = spark.sql(
        """
        SELECT 'slow' AS queue, 'acme' AS channel, 'k1' AS key,
            named_struct('text', 'ü', 'at', timestamp '2026-11-21 12:00:00', 'price', 1.50bd,
                'tags', map('a', array(1))) AS payload,
            binary('raw') AS body, timestamp '2026-11-21 12:00:00.0019' AS dequeue_at,
            CAST(NULL AS INTERVAL DAY TO SECOND) AS delay, CAST(NULL AS int) AS priority, 2.5bd AS cost,
            3S AS max_attempts, INTERVAL '1.5' SECOND AS backoff
        UNION ALL SELECT NULL, 'globex', NULL, NULL, NULL, NULL, INTERVAL '1' HOUR, NULL, NULL, NULL, NULL
        UNION ALL SELECT NULL, 'globex', NULL, NULL, NULL, NULL, NULL, 7, 1, NULL, NULL"""
    )
    save(frame, database_url, queue="quick")
    found = {message.dequeue_at: message for message in session.query(fq.Message)}
    urgent, full, later = (found[at] for at in sorted(found))
    noon = datetime(2026, 11, 21, 12, tzinfo=UTC)
    assert (full.queue, full.channel, full.key, full.body) == ("slow", "acme", "k1", b"raw")
    assert full.payload == {"text": "ü", "at": noon.isoformat(), "price": 1.5, "tags": {"a": [1]}}
    assert full.dequeue_at == noon.timestamp() * 1000 + 1
    assert (full.cost, full.max_attempts, full.backoff) == (2.5, 3, 1.5)
    assert (later.queue, later.channel, later.key, later.payload, later.cost) == ("quick", "globex", None, None, 1)
    assert later.dequeue_at == later.created_at.timestamp() * 1000 // 1 + 3_600_000
    assert (urgent.queue, urgent.dequeue_at) == ("quick", -7)
    session.rollback()
    assert [message.channel for message in drain(session, queue="quick")] == ["globex"]


def test_from_a_thread_of_its_own(spark: "SparkSession", database_url: str, watching: psycopg.Connection[Any]) -> None:
    """There is no session of this thread; that of another one is used, left as it is, and not ended."""
    spark.conf.set("spark.sql.session.timeZone", "GMT+8")
    try:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(write_in_a_session, database_url).result()
        once_each(watching, ["a"])
        assert spark.conf.get("spark.sql.session.timeZone") == "GMT+8"
        assert spark.range(3).count() == 3
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")


def write_in_a_session(url: str) -> None:
    with local_session() as spark:
        save(spark.range(1).selectExpr("'acme' AS channel", "'a' AS key"), url)


def test_no_transaction_waits_for_rows(
    database_url: str, watching: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes to make them: the server may end it, and while it is open feeds stand still."""
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state ~ '^idle in transac'"
    found = []

    def rows() -> Iterator[pa.RecordBatch]:
        for name in "ab":
            found.append(value(watching, waiting))
            yield pa.RecordBatch.from_pydict({"channel": [name]})

    monkeypatch.setattr("pyspark.TaskContext.get", lambda: SimpleNamespace(partitionId=lambda: 0))
    schema = StructType().add("channel", "string")
    for options in ({"job": "whole"}, {"job": "in parts", "commit": "direct"}):
        for _ in ("first", "again"):
            writer = JobWriter({"url": database_url, **options}, schema, overwrite=False)
            writer.commit([writer.write(rows())])
    once_each(watching, ["a", "a", "b", "b"], "channel")
    assert found == [0] * 8


def test_rows_that_are_refused(
    spark: "SparkSession", database_url: str, watching: psycopg.Connection[Any], tmp_path: Path
) -> None:
    """With a job that is run again, each is there once, as it came, with its reason."""
    frame = spark.range(0, 9, 1, 3).selectExpr(
        "if(id = 4, NULL, 'acme') AS channel",
        "concat('k', id) AS key",
        "if(id = 7, double('NaN'), 1.0d) AS cost",
        "if(id IN (2, 8), '{', '{}') AS payload",
    )
    rejects = tmp_path / "rejects ü"
    for job, commit in (("a", "atomic"), ("a", "atomic"), ("b", "direct"), ("b", "direct")):
        options = {"job": job, "commit": commit, "on_conflict": "raise", "channel": f"unless said {job}"}
        rows = frame if job == "a" else frame.replace("acme", "globex")
        save(rows, database_url, rejects=str(rejects), **options)
    keys = [f"k{number}" for number in (0, 1, 3, 4, 5, 6)]
    once_each(watching, keys * 2)
    assert value(watching, "SELECT array_agg(channel ORDER BY channel) FROM fairqueue.message WHERE key = 'k4'") == [
        "unless said a",
        "unless said b",
    ]
    refused = spark.read.parquet(str(rejects)).orderBy("channel", "key").collect()
    assert [(row.channel, row.key, row.payload) for row in refused] == [
        (channel, key, payload)
        for channel in ("acme", "globex")
        for key, payload in (("k2", "{"), ("k7", "{}"), ("k8", "{"))
    ]
    assert [row.reason.partition(":")[0] for row in refused[:3]] == [
        "payload is not JSON",
        "cost must be more than 0 and at most 1,000,000, not nan",
        "payload is not JSON",
    ]
    assert list((rejects / "_attempts").iterdir()) == []
    assert stages(watching) == 0


def test_refused_rows_that_cannot_be_put_in_their_place(
    spark: "SparkSession", database_url: str, watching: psycopg.Connection[Any], tmp_path: Path
) -> None:
    """By then the load is entered, and so it hasn't failed; they stay where they are."""
    rejects = tmp_path / "rejects"
    in_the_way = rejects / f"{sha256(b'part/nightly').hexdigest()[:32]}-0.parquet"
    in_the_way.mkdir(parents=True)
    frame = spark.range(0, 4, 1, 1).selectExpr("'acme' AS channel", "concat('k', id) AS key", "id - 0.5d AS cost")
    save(frame, database_url, rejects=str(rejects), job="nightly")
    once_each(watching, ["k1", "k2", "k3"])
    (left,) = (rejects / "_attempts").iterdir()
    assert [row.key for row in spark.read.parquet(str(left)).collect()] == ["k0"]
    in_the_way.rmdir()
    save(frame, database_url, rejects=str(rejects), job="nightly")
    assert [row.key for row in spark.read.parquet(str(rejects)).collect()] == ["k0"]


def test_refused_rows_of_a_process_in_another_folder(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As executors are: a path is one of the driver's."""
    monkeypatch.chdir(tmp_path)
    given = {"url": database_url, "rejects": "rejects", "commit": "direct"}
    writer = JobWriter(given, StructType().add("channel", "string"), overwrite=False)
    (tmp_path / "work").mkdir()
    with monkeypatch.context() as executor:
        executor.chdir(tmp_path / "work")
        rejects = writer.rows.opened(writer.run, 0)
        assert rejects is not None
        rejects.add(pa.RecordBatch.from_pydict({"channel": [""], "reason": ["none"]}))
        message = Message(Part(0, 1), rejects.close())
    writer.commit([message])
    assert pq.read_table(tmp_path / "rejects")["reason"].to_pylist() == ["none"]


def test_it_is_told(database_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = {"url": database_url, "rejects": str(tmp_path), "commit": "direct"}
    writer = JobWriter(given, StructType().add("channel", "string"), overwrite=False)
    writer.commit([Message(Part(0, 1), f"{writer.run}-0-gone.parquet")])
    (said,) = caplog.messages
    assert said == (
        f"run/{writer.run} is entered, but files of its refused rows could not be moved from"
        f" {tmp_path}/_attempts/{writer.run}-*"
    )


def test_refused_rows_of_a_load_that_failed(database_url: str, tmp_path: Path) -> None:
    """They go with what is staged. Where nothing is, the load may have been entered."""
    for staged in (False, True):
        given = {"url": database_url, "rejects": str(tmp_path)}
        writer = JobWriter(given, StructType().add("channel", "string"), overwrite=False)
        file = tmp_path / "_attempts" / f"{writer.run}-0-0.parquet"
        file.parent.mkdir(exist_ok=True)
        file.touch()
        if staged:
            stage(writer.rows.place, writer.run, 0, keyed("k"))
        writer.abort([])
        assert file.exists() != staged


class TestRefusals:
    """Before anything runs."""

    @pytest.mark.parametrize(
        ("options", "select", "told"),
        [
            ({"mode": "error"}, "channel", 'cannot be written in the "ErrorIfExists" mode'),
            ({"schema": "nowhere"}, "channel", 'relation "nowhere.load" does not exist'),
            ({}, "id", "unknown column 'id': a load has queue, channel,"),
        ],
    )
    def test_by_spark(
        self, spark: "SparkSession", database_url: str, options: dict[str, str], select: str, told: str
    ) -> None:
        frame = spark.sql(f"SELECT {select} FROM VALUES ('acme', 1) AS t (channel, id)")
        given = {"mode": "append", "url": database_url} | options
        with pytest.raises(PySparkException) as refused:
            frame.write.save(format="fairqueue", **given)
        assert told in str(refused.value)

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ({"chanel": "x"}, "unknown option 'chanel': known are channel, clean_hours, commit,"),
            ({"path": "/somewhere"}, "unknown option 'path'"),
            ({"commit": "later"}, "option commit must be atomic or direct, not 'later'"),
            ({"on_conflict": "replace"}, "option on_conflict must be ignore or raise, not 'replace'"),
            ({"clean_hours": "0"}, "option clean_hours must be a whole number of 1 or more, not '0'"),
            ({"clean_hours": "²"}, "option clean_hours must be a whole number"),
            ({"job": ""}, "option job must not be empty"),
            ({"job": "x" * 201}, "option job must have at most 200 characters, not 201"),
            ({"rejects": ""}, "option rejects must not be empty"),
            ({"rejects": "file:/rejects"}, "'file:/rejects' is a URL with one slash, which Spark knows"),
            ({"queue": "x" * 256}, "queue must have 1 to 255 characters, not 256"),
            ({"schema": "x" * 64}, "schema must be a name of 1 to 63 bytes"),
            ({"url": "mysql://db"}, "a database URL must begin with postgresql://"),
            ({"URL": "postgresql://app:hunter2@db/app"}, "url must not hold a password"),
        ],
    )
    def test_options(self, options: dict[str, str], told: str) -> None:
        """Nobody is asked for any of these."""
        given = {"url": "postgresql://nobody@127.0.0.1:1/nowhere"} | options
        with pytest.raises(InvalidValue, match=f"^{told}") as refused:
            JobWriter(given, StructType().add("channel", "string"), overwrite=False)
        assert "hunter2" not in str(refused.value)

    def test_what_a_queue_does_not_have(self) -> None:
        given = {"url": "postgresql://nobody@127.0.0.1:1/nowhere", "commit": "direct"}
        schema = StructType().add("channel", "string").add("key", "string")
        with pytest.raises(InvalidValue, match="can't be overwritten: write with mode"):
            JobWriter(given, schema, overwrite=True)
        with pytest.raises(InvalidValue, match="can't leave out rows whose key is live"):
            JobWriter(given, schema, overwrite=False)

    def test_a_message_that_is_lost(self) -> None:
        with pytest.raises(LoadFailed, match="nothing was entered"):
            told([None])


def test_a_row_that_can_not_be(
    spark: "SparkSession", database_url: str, watching: psycopg.Connection[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written. And neither the error nor a plan, also of those that Spark keeps, tells of the database."""
    bad = spark.range(0, 4, 1, 2).selectExpr("if(id = 3, NULL, 'acme') AS channel")
    for url, reason in (
        (database_url, "InvalidValue: row 1 of the partition: channel must not be null"),
        ("postgresql://hunter2@127.0.0.1:1/hunter2", "Connection refused"),
    ):
        with pytest.raises(PySparkException, match=reason) as failed:
            save(bad, url)
        assert_nothing_of(url, str(failed.value))
    once_each(watching, [])
    assert stages(watching) == 0

    frame = spark.read.format("fairqueue").options(url=database_url).load()
    for mode in ("extended", "formatted", "cost", "codegen"):
        frame.explain(mode=mode)
    explained = "".join(capfd.readouterr())
    assert "Physical Plan" in explained
    assert_nothing_of(database_url, explained)

    context: Any = spark.sparkContext._jsc
    context.sc().listenerBus().waitUntilEmpty()
    session: Any = spark._jsparkSession
    executions = session.sharedState().statusStore().executionsList()
    kept = "".join(executions.apply(number).physicalPlanDescription() for number in range(executions.size()))
    assert "AppendData" in kept
    assert_nothing_of(database_url, kept)
    assert "hunter2" not in kept


def assert_nothing_of(url: str, text: str) -> None:
    name = url.partition("?")[0].rpartition("/")[2]
    assert name
    assert name not in text
    assert url not in text


def test_a_stream(spark: "SparkSession", database_url: str, watching: psycopg.Connection[Any], tmp_path: Path) -> None:
    """What is new, each time; also when Spark forgets that it was done."""
    incoming, checkpoint, rejects = tmp_path / "incoming", tmp_path / "checkpoint", tmp_path / "rejects"
    incoming.mkdir()

    def run(*names: str) -> None:
        for name in names:
            lines = [{"channel": "acme", "key": f"{name}-{number}", "cost": number} for number in range(3)]
            (incoming / f"{name}.json").write_text("\n".join(map(json.dumps, lines)))
        frame = spark.readStream.schema("channel string, key string, cost double").json(str(incoming))
        options = {"url": database_url, "checkpointLocation": str(checkpoint), "rejects": str(rejects)}
        query = frame.writeStream.format("fairqueue").options(on_conflict="raise", **options)
        started = query.trigger(availableNow=True).start()
        started.awaitTermination()
        assert_nothing_of(database_url, str(started.lastProgress))

    run("a", "b")
    commits = checkpoint / "commits"
    assert [path.name for path in commits.glob("[0-9]*")] == ["0"]
    for path in commits.glob("*0*"):
        path.unlink()
    run("c")
    assert sorted(path.name for path in commits.glob("[0-9]*")) == ["0", "1"]
    once_each(watching, [f"{name}-{number}" for name in "abc" for number in (1, 2)])
    assert sorted(row.key for row in spark.read.parquet(str(rejects)).collect()) == [f"{name}-0" for name in "abc"]
    assert stages(watching) == 0
