"""`fairqueue spark enqueue`: files into a queue."""

import csv
import json
import os
import re
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from click.testing import CliRunner, Result
from sqlalchemy import Engine, func, make_url, select
from sqlalchemy.orm import Session

import fairqueue as fq
from fairqueue import roles
from fairqueue.cli.program import program
from fairqueue.cli.spark.base import options_of
from fairqueue.cli.target import Target
from fairqueue.errors import FairqueueError, InvalidValue
from fairqueue.spark.engine.place import Place
from fairqueue.spark.enqueueing import Enqueued, _folder, _format_of, enqueue, read_files
from tests.fixtures.spark import on_spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [*on_spark, pytest.mark.usefixtures("spark")]

CSV = "tenant,doc,pages\nacme,a,3\nglobex,b,1\nacme,c,2\n"


def run(url: str, *arguments: object) -> Result:
    return CliRunner().invoke(program, ["--dsn", url, "spark", *map(str, arguments)])


def messages(engine: Engine) -> list[tuple[str, str | None, Any, bytes | None]]:
    with Session(engine) as session:
        found = [(m.channel, m.key, m.payload, m.body) for m in session.scalars(select(fq.Message))]
    return sorted(found, key=repr)


def enqueued(spark: "SparkSession", engine: Engine, url: str, source: "Path | DataFrame", channel: str) -> list[Any]:
    """The payloads of all messages, after those of a source, channel by channel."""
    enqueue(spark, str(source) if isinstance(source, Path) else source, channel=channel, options={"url": url})
    return [payload for _, _, payload, _ in messages(engine)]


def test_csv_as_a_job(engine: Engine, database_url: str, tmp_path: Path) -> None:
    """Columns and expressions; the same job again adds nothing, also where the first run was not heard of."""
    path = tmp_path / "documents.csv"
    path.write_text(CSV)
    payload = "struct(int(pages) AS pages)"
    arguments = ("enqueue", path, "--channel", "tenant", "--set", "key=upper(doc)", "--payload", payload)
    first = run(database_url, *arguments, "--job", "monday")
    assert first.exit_code == 0, first.output
    assert first.output.startswith("3 rows in")
    expected = [
        ("acme", "A", {"pages": 3}, None),
        ("acme", "C", {"pages": 2}, None),
        ("globex", "B", {"pages": 1}, None),
    ]
    assert messages(engine) == expected
    again = run(database_url, *arguments, "--job", "monday")
    assert again.output == "3 rows: job monday was done before, nothing was added.\n"
    path.write_text(CSV + "initech,d,9\n")
    other = run(database_url, *arguments, "--job", "monday")
    assert other.exit_code == 1
    assert "job/monday has been loaded before, with 3 rows, not 4" in other.output
    assert messages(engine) == expected


def test_a_job_among_the_options(spark: "SparkSession", engine: Engine, database_url: str) -> None:
    """Its name is as good there, and Spark doesn't tell upper from lower case. Direct knows of what atomic has done."""
    frame = spark.range(2).selectExpr("'acme' AS tenant")
    first = enqueue(spark, frame, channel="tenant", options={"url": database_url, "JOB": "tuesday"}, job="monday")
    assert first == Enqueued(2, 2, repeated=False)
    for options in ({"job": "monday"}, {"JOB": "monday", "Commit": "direct"}):
        again = enqueue(spark, frame, channel="tenant", options={"Url": database_url} | options)
        assert again == Enqueued(2, 0, repeated=True), options
        assert len(messages(engine)) == 2


def test_a_direct_job_that_goes_on(spark: "SparkSession", engine: Engine, database_url: str) -> None:
    """What was missing is added, and told; a job whose name begins the same is another one."""
    frame = spark.range(0, 4, 1, 2).selectExpr("'acme' AS tenant")

    def load(job: str | None) -> Enqueued:
        return enqueue(spark, frame, channel="tenant", options={"url": database_url, "commit": "direct"}, job=job)

    assert [load(job) for job in ("monday/1", None, "monday", None)] == [Enqueued(4, 4, repeated=False)] * 4
    with engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM fairqueue.load WHERE name = 'part/monday/0'")
    assert [load("monday") for _ in range(2)] == [Enqueued(4, 2, repeated=False), Enqueued(4, 0, repeated=True)]


def test_rows_that_become_no_messages(engine: Engine, database_url: str, tmp_path: Path) -> None:
    path = tmp_path / "documents.csv"
    path.write_text(CSV)
    arguments = ("enqueue", path, "--channel", "tenant", "--set", "key=doc", "--rejects", tmp_path / "rejects")
    assert run(database_url, *arguments).output.endswith(" a second.\n")
    path.write_text(CSV + "initech,d,1\n,e,1\n")
    again = run(database_url, *arguments)
    assert again.output.startswith("5 rows in")
    assert f"1 became messages: the others have keys that are live, or are in {tmp_path / 'rejects'}." in again.output
    assert len(messages(engine)) == 4


def test_folder_of_files(engine: Engine, database_url: str, tmp_path: Path) -> None:
    """One message a file, its channel the folder that it is in; the contents only where they are asked for."""
    for folder, name in (("acme", "1.txt"), ("acme", "deep/2.txt"), ("globex", "3.txt")):
        file = tmp_path / "files" / folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    result = run(database_url, "enqueue", tmp_path / "files", "--channel", "folder", "--set", "body=content")
    assert result.exit_code == 0, result.output
    found = [(channel, payload["name"], payload["length"], body) for channel, _, payload, body in messages(engine)]
    assert sorted(found) == [
        ("acme", "1.txt", 5, b"1.txt"),
        ("acme", "2.txt", 10, b"deep/2.txt"),
        ("globex", "3.txt", 5, b"3.txt"),
    ]


def test_the_whole_row_is_the_payload(spark: "SparkSession", engine: Engine, database_url: str, tmp_path: Path) -> None:
    """Also a column that is named as one of files is, which is left out of theirs."""
    document = {"tenant": "acme", "title": "a", "content": "all that matters"}
    path = tmp_path / "documents.json"
    path.write_text(json.dumps(document))
    assert enqueued(spark, engine, database_url, path, "tenant") == [document]
    assert enqueued(spark, engine, database_url, spark.read.json(str(path)), "tenant") == [document] * 2


def test_times_down_to_the_microsecond(spark: "SparkSession", engine: Engine, database_url: str) -> None:
    at = "'2026-11-21 12:00:00.123456'"
    frame = spark.sql(f"SELECT 'acme' AS tenant, timestamp {at} AS at, timestamp_ntz {at} AS local")
    (payload,) = enqueued(spark, engine, database_url, frame, "tenant")
    assert payload["at"] == "2026-11-21T12:00:00.123456Z"
    assert payload["local"] == "2026-11-21T12:00:00.123456"


class TestFolders:
    """What a file's folder is: the first one below the path."""

    @pytest.mark.parametrize("source", ["data/data", "old-docs/docs", ".", "a b/../data/", "data*/d?ta"])
    def test_of_files(
        self, spark: "SparkSession", tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
    ) -> None:
        """Whatever the folders above it are named; a path is one of this process, wherever the JVM is."""
        from pyspark.sql import functions as sf

        monkeypatch.chdir(tmp_path)
        below = tmp_path / {"data*/d?ta": "data/data", "a b/../data/": "data"}.get(source, source)
        for name in ("1.txt", "acme/1.txt", "globex/deep/data/1.txt"):
            file = below / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("1")
        (tmp_path / "a b").mkdir(exist_ok=True)
        paths = (source, f"{tmp_path}/{source}", f"file:{tmp_path}/{source}", f"file://{tmp_path}/{source}")
        found = [read_files(spark, path, "files").select(sf.lit(path).alias("asked"), "folder") for path in paths]
        rows = reduce(lambda one, other: one.union(other), found).collect()  # in one job
        for path in paths:
            assert {row.folder for row in rows if row.asked == path} == {None, "acme", "globex"}, path

    def test_of_what_has_no_folder_above_it(self, spark: "SparkSession") -> None:
        sources = ["s3a://bucket", "s3a://bucket/", "s3a://bucket/acme/..", "/", "hdfs:///"]
        places = {source: source.partition("acme")[0].rstrip("/") or "file:" for source in sources}
        names = ("1", "acme/1", "acme/deep/1")
        paths = [(source, f"{place}/{name}") for source, place in places.items() for name in names]
        folders = [_folder(source).alias(source) for source in sources]
        rows = spark.createDataFrame(paths, "source string, path string").select("source", *folders).collect()
        for source in sources:
            assert [row[source] for row in rows if row.source == source] == [None, "acme", "acme"], source


class TestText:
    """CSV and JSON: what is in the file, or an error."""

    @pytest.mark.parametrize("end", ["\n", "\r\n"])
    def test_values_of_several_lines(
        self, spark: "SparkSession", engine: Engine, database_url: str, tmp_path: Path, end: str
    ) -> None:
        rows = [{"tenant": "acme", "text": 'one\ntwo, he said "three" \\'}, {"tenant": "globex", "text": "four"}]
        path = tmp_path / "documents.csv"
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator=end)
            writer.writeheader()
            writer.writerows(rows)
        assert enqueued(spark, engine, database_url, path, "tenant") == rows

    def test_digits_stay_as_they_are(
        self, spark: "SparkSession", engine: Engine, database_url: str, tmp_path: Path
    ) -> None:
        path = tmp_path / "documents.csv"
        path.write_text("tenant,zip\n007,01234\n7,1e3\n")
        assert enqueued(spark, engine, database_url, path, "tenant") == [
            {"tenant": "007", "zip": "01234"},
            {"tenant": "7", "zip": "1e3"},
        ]

    @pytest.mark.parametrize("header", ["doc,tenant", "tenant,name", "tenant", "tenant,doc,size"])
    def test_files_with_other_columns(self, engine: Engine, database_url: str, tmp_path: Path, header: str) -> None:
        """Else the values of one would be taken for those of another."""
        folder = tmp_path / "documents.csv"
        folder.mkdir()
        for name, first in (("1.csv", "tenant,doc"), ("2.csv", header)):
            (folder / name).write_text(f"{first}\n{first.upper()}\n")
        result = run(database_url, "enqueue", folder, "--channel", "tenant")
        assert result.exit_code == 1
        assert result.output.count("\n") == 1
        assert ".csv. " in result.output, "which file it is"
        assert "CSV header" in result.output
        if header == "doc,tenant":
            assert re.search("Expected: (tenant|doc) but found: (tenant|doc)\n", result.output)
        assert messages(engine) == []

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("cut.json", '{"tenant": "acme"}\n{"tenant": "acme", "cut o\n'),
            ("short.csv", "doc,tenant,size\na,acme,1\nb,acme\n"),
            ("long.csv", "doc,tenant\na,acme\na,b,acme\n"),
        ],
    )
    def test_what_is_no_row(self, engine: Engine, database_url: str, tmp_path: Path, name: str, text: str) -> None:
        """Also where the columns that are wrong aren't asked for."""
        path = tmp_path / name
        path.write_text(text)
        result = run(database_url, "enqueue", path, "--channel", "tenant", "--payload", "struct(tenant)")
        assert result.exit_code == 1
        assert result.output.count("\n") == 1
        assert "Malformed records are detected" in result.output
        assert messages(engine) == []


def test_parquet_with_other_columns(spark: "SparkSession", engine: Engine, database_url: str, tmp_path: Path) -> None:
    """Of all files, whichever is read first."""
    path = tmp_path / "documents.parquet"
    for others in ("1 AS a", "2 AS a, 'x' AS b", "3 AS c"):
        spark.sql(f"SELECT 'acme' AS tenant, {others}").write.mode("append").parquet(str(path))
    found = enqueued(spark, engine, database_url, path, "tenant")
    assert sorted(found, key=str) == sorted(
        [
            {"tenant": "acme", "a": 1, "b": None, "c": None},
            {"tenant": "acme", "a": 2, "b": "x", "c": None},
            {"tenant": "acme", "a": None, "b": None, "c": 3},
        ],
        key=str,
    )


def test_rows_that_cannot_be(spark: "SparkSession", engine: Engine, database_url: str, tmp_path: Path) -> None:
    """An error in one line and nothing enqueued; or, when asked for, the others enqueued and these elsewhere."""
    path = tmp_path / "rows.json"
    rows = [{"tenant": "acme", "cost": 1}, {"tenant": None, "cost": 1}, {"tenant": "globex", "cost": -1}]
    path.write_text("\n".join(map(json.dumps, rows)))
    arguments = ("enqueue", path, "--channel", "tenant", "--set", "cost=cost")
    failed = run(database_url, *arguments)
    assert failed.exit_code == 1
    assert failed.output == "fairqueue: row 1 of the partition: channel must not be null\n"
    assert messages(engine) == []
    sorted_out = run(database_url, *arguments, "--rejects", tmp_path / "rejects")
    assert sorted_out.exit_code == 0, sorted_out.output
    assert [channel for channel, *_ in messages(engine)] == ["acme"]
    rejects = spark.read.parquet(str(tmp_path / "rejects")).collect()
    assert {(row.channel, row.reason.split(", not ")[0]) for row in rejects} == {
        (None, "channel must not be null"),
        ("globex", "cost must be more than 0 and at most 1,000,000"),
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--channel", "tenat"), "`tenat` cannot be resolved"),
        (("--channel", "tenant", "--set", "priorty=1"), "unknown column 'priorty'"),
        (("--channel", "tenant", "--set", "key"), "--set must be COLUMN=EXPR, not 'key'"),
        (("--channel", "length(doc)"), "column channel must be a string, not int32"),
    ],
)
def test_bad_input(engine: Engine, database_url: str, tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    path = tmp_path / "documents.csv"
    path.write_text(CSV)
    result = run(database_url, "enqueue", path, *arguments)
    assert result.exit_code in {1, 2}
    assert said in result.output
    assert result.output.count("\n") == 1
    assert messages(engine) == []


@pytest.fixture
def loader(engine: Engine, database_url: str) -> Iterator[str]:
    """A URL of somebody with a password, who may only look."""
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE ROLE spark_loader LOGIN PASSWORD 'se@cret'")
        roles.grant(connection, "spark_loader", "observer")
    url = make_url(database_url).set(username="spark_loader", password="se@cret")
    yield url.render_as_string(hide_password=False)
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP OWNED BY spark_loader; DROP ROLE spark_loader")


@pytest.mark.parametrize("commit", ["atomic", "direct"])
def test_a_right_that_is_missing_in_a_task(
    engine: Engine, loader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit: str
) -> None:
    """What to do is said as it is where the driver lacks a right."""
    monkeypatch.setenv("PGPASSWORD", "")
    path = tmp_path / "documents.csv"
    path.write_text(CSV)
    result = run(loader, "enqueue", path, "--channel", "tenant", "--commit", commit)
    function = {"atomic": "stage_create", "direct": "load_claim"}[commit]
    told = "the owner of the queue's schema can give the right: `fairqueue grant ROLE pipeline`"
    assert (result.exit_code, result.output) == (
        1,
        f"fairqueue: permission denied for function {function}; {told}\n",
    )
    assert messages(engine) == []


@pytest.mark.parametrize("arguments", [("enqueue", "x.json", "--channel", "tenant"), ("archive", "x")])
def test_a_password_is_there_before_spark_is(
    loader: str, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    """Its processes have the environment as it was when they started."""
    seen = []

    def start(*_: Any, **__: Any) -> None:
        seen.append(os.environ["PGPASSWORD"])
        raise InvalidValue("that is all")

    monkeypatch.setenv("PGPASSWORD", "")
    monkeypatch.setattr("fairqueue.spark.local_session", start)
    assert run(loader, *arguments).output == "fairqueue: that is all\n"
    assert seen == ["se@cret"]


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://app:se%40cret@db:5432/shop?sslmode=require",
        "postgresql://app@db:5432/shop?password=se%40cret&sslmode=require",
        "postgresql://app:other@db:5432/shop?password=se%40cret&sslmode=require",
    ],
)
def test_a_password_goes_into_the_environment(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not into the options, which Spark shows."""
    monkeypatch.setenv("PGPASSWORD", "")
    options = options_of(Target(url, "queue"))
    assert options == {"url": "postgresql://app@db:5432/shop?sslmode=require", "schema": "queue"}
    assert os.environ["PGPASSWORD"] == "se@cret"
    assert Place(**options).url == options["url"]


@pytest.mark.parametrize("command", ["clean", "archive", "enqueue"])
def test_a_database_that_is_not_there(command: str, tmp_path: Path) -> None:
    """One line, with the way out."""
    arguments = {"clean": [], "archive": [str(tmp_path)], "enqueue": [str(tmp_path), "--channel", "name"]}[command]
    found = CliRunner().invoke(program, ["--dsn", "postgresql://x@127.0.0.1:1/x", "spark", command, *arguments])
    assert found.exit_code == 1
    assert found.stderr.count("\n") == 1
    assert "check the host and the port of the database URL, and that the server runs" in found.stderr


def test_it_cannot_be_asked_what_became_of_it(
    spark: "SparkSession", database_url: str, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who takes this for a failure may enqueue all of it again."""
    asked: list[object] = []

    def noted(*names: object) -> None:
        asked.append(names)
        if len(asked) == 2:
            raise psycopg.OperationalError("the server closed the connection")

    monkeypatch.setattr("fairqueue.spark.engine.loading.noted", noted)
    with pytest.raises(FairqueueError, match=r"^all 3 rows are enqueued, and it can't be asked .*: the server closed"):
        enqueue(spark, spark.range(3), channel="'acme'", options={"url": database_url})
    assert session.scalar(select(func.count()).select_from(fq.Message)) == 3


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("a.csv", "csv"),
        ("a.CSV.GZ", "csv"),
        ("a.jsonl.bz2", "json"),
        ("a.gz", "files"),
        ("a", "files"),
        ("a.pdf", "files"),
    ],
)
def test_what_a_path_ends_in(path: str, kind: str) -> None:
    assert _format_of(f"/data/{path}") == kind


def test_clean(engine: Engine, database_url: str) -> None:
    """What a dead load has left, by its age."""
    with engine.begin() as connection:
        connection.exec_driver_sql(f"SELECT fairqueue.stage_create('{'0' * 32}', 1)")
    assert run(database_url, "clean").output == "0 staging tables dropped.\n"
    assert run(database_url, "clean", "--older-than", "0s").output == "1 staging table dropped.\n"
