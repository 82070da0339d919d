"""Spark

In and out of the queue by Spark, on this machine with two cores, against PostgreSQL's own binary COPY over as many
connections, into and out of the same tables, with the rows encoded beforehand: what no client can beat. Rows are read
from Parquet, and have keys or not. Spark's JDBC sink takes part where FAIRQUEUE_JDBC_JAR names PostgreSQL's driver and
FAIRQUEUE_DSN a server on TCP: as it comes, and with reWriteBatchedInserts and a batchsize of 10,000, which it has to be
told. It is not exactly once, and doesn't leave out keys.

What is entered at once is entered by one connection, where the others have two for it, on both cores. What such a load
can reach is COPY in one transaction, which needs no staging, as nobody tries its tasks again.
"""

from __future__ import annotations

import io
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from sqlalchemy import make_url

from benchmarks.measuring import Bench, Case, Size, alternate
from benchmarks.records import Record, at_least, ratio_record, value_record
from benchmarks.systems import OURS, SYSTEMS
from fairqueue.spark.java import has_java

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_WRITTEN = {"quick": 300_000, "full": 1_000_000, "tiny": 2_000}
# Reading is quicker: of fewer rows the fixed 0.4 s of a Spark job would be half.
_READ = {"quick": 1_000_000, "full": 3_000_000, "tiny": 2_000}
_REPORT = {"quick": (1_000_000, 10_000), "full": (10_000_000, 100_000), "tiny": (5_000, 20)}
_CONNECTIONS = 2
_FILES = 4
_CHANNELS = 1_000
_RAW = "binary COPY"
_ONE = "COPY in one transaction"
_JDBC = "Spark's JDBC sink"
_TUNED = "the same, tuned"

_COLUMNS = "queue, channel, key, payload, dequeue_at"
_SOURCE = """
    CREATE TABLE source AS
    SELECT 'default'::text AS queue, 'c' || floor({channels} * power(random(), 2))::integer AS channel,
        {key} AS key, jsonb_build_object('document', i, 'path', repeat('x', 70)) AS payload,
        1700000000000 + floor(random() * 1000)::bigint AS dequeue_at, i % {files} AS file
    FROM generate_series(1, {rows}) i
    ORDER BY random()
"""
_HISTORY = """
    INSERT INTO fairqueue.history (message_id, queue, channel, outcome, attempt, cost, worker, dequeue_at, created_at,
        first_leased_at, leased_at)
    SELECT i, 'default', 'c' || floor({channels} * power(random(), 2))::integer, 'completed', 1, 1, 'worker-1',
        1700000000000, now() - interval '2 s', now() - interval '1 s', now() - interval '1 s'
    FROM generate_series(1, {rows}) i
"""


def cases(size: Size) -> list[Case]:
    written, read = _WRITTEN[size.name], _READ[size.name]
    seconds = 30 + size.near * written * 0.00007
    return [
        *(
            Case(f"write {written:,} rows {keys} keys", partial(writing, written, keyed=keyed), seconds)
            for keys, keyed in (("with", True), ("without", False))
        ),
        Case(f"read and archive, {read:,} rows", partial(reading, read), 40 + size.rounds * read * 0.000012),
        Case(f"report, {_REPORT[size.name][0]:,} rows", partial(reporting, *_REPORT[size.name]), 60),
    ]


def writing(rows: int, bench: Bench, *, keyed: bool) -> Iterable[Record]:
    if not _can(bench):
        return
    with _database(bench) as (dsn, admin), _session(dsn) as spark, _folder() as folder:
        files = _rows(admin, spark, folder / "rows", rows, keyed=keyed)
        raw = [_encoded(admin, number) for number in range(_FILES)]
        ways: dict[str, Callable[[], None]] = {
            _RAW: partial(_in_parallel, dsn, partial(_send, raw)),
            "atomic": partial(_save, files, dsn, commit="atomic"),
            "direct": partial(_save, files, dsn, commit="direct", on_conflict="raise"),
        }
        if keyed:
            ways[_ONE] = partial(_in_one, dsn, raw)
            if options := _jdbc(bench, dsn):
                ways[_JDBC] = partial(_insert, files, options)
                tuned = {"url": f"{options['url']}&reWriteBatchedInserts=true", "batchsize": "10000"}
                ways[_TUNED] = partial(_insert, files, options | tuned)

        def once(name: str) -> float:
            admin.execute("TRUNCATE fairqueue.message, fairqueue.signal")
            start = time.perf_counter()
            ways[name]()
            took = time.perf_counter() - start
            (found,) = admin.execute("SELECT count(*) FROM fairqueue.message").fetchone() or (0,)
            assert found == rows, f"{name}: {found} of {rows}"
            return rows / took

        if bench.size.name != "tiny":
            for name in ways:
                once(name)  # the JVM compiles what is used often
        bench.place.checkpoint()
        rates = alternate(list(ways), bench.size.near, once)
        for name, least in (("atomic", 0.5), ("direct", 0.75)):
            case: dict[str, int | str] = {"way": name, "keys": "with keys" if keyed else "without", "rows": rows}
            for reference, wanted in {_RAW: at_least(least), _ONE: None, _JDBC: at_least(1), _TUNED: None}.items():
                if reference in rates:
                    yield ratio_record(
                        f"rows written by Spark, {name}",
                        OURS,
                        case,
                        rates[name],
                        "1/s",
                        reference=reference,
                        of=rates[reference],
                        wanted=wanted,
                    )


def reading(rows: int, bench: Bench) -> Iterable[Record]:
    if not _can(bench):
        return
    with _database(bench) as (dsn, admin), _session(dsn) as spark, _folder() as folder:
        from fairqueue.spark import archive

        admin.execute(_HISTORY.format(channels=_CHANNELS, rows=rows).encode())
        admin.execute("VACUUM (ANALYZE) fairqueue.history")
        options = _options(dsn)

        def by_spark() -> None:
            frame = spark.read.format("fairqueue").options(**options, partitions=_CONNECTIONS).load()
            frame.write.format("noop").mode("overwrite").save()

        ways: dict[str, Callable[[], None]] = {
            _RAW: partial(_in_parallel, dsn, partial(_receive, rows)),
            "batch read": by_spark,
        }

        def once(name: str) -> float:
            start = time.perf_counter()
            ways[name]()
            return rows / (time.perf_counter() - start)

        if bench.size.name != "tiny":
            for name in ways:
                once(name)  # the JVM compiles what is used often
        rates = alternate(list(ways), bench.size.rounds, once)
        yield ratio_record(
            "rows read by Spark",
            OURS,
            {"way": "read", "rows": rows},
            rates["batch read"],
            "1/s",
            reference=_RAW,
            of=rates[_RAW],
            wanted=at_least(0.6),
        )
        found = []
        for number in range(bench.size.rounds):
            start = time.perf_counter()
            path, feed = str(folder / str(number)), f"archive {number}"
            done = archive(spark, path, url=options["url"], schema=options["schema"], feed=feed)
            assert done.rows == rows, f"{done.rows} of {rows}"
            found.append(rows / (time.perf_counter() - start))
        yield value_record("rows archived", OURS, {"rows": rows}, found, "1/s", wanted=at_least(100_000))


def reporting(rows: int, tenants: int, bench: Bench) -> Iterable[Record]:
    if not _can(bench):
        return
    with _session(None) as spark, _folder() as folder:
        from fairqueue.spark import report
        from fairqueue.spark.reporting import page, summary

        _history(spark, rows, tenants).write.parquet(str(folder / "history"))
        case: dict[str, int | str] = {"rows": rows, "tenants": tenants}
        with _watched() as memory:
            start = time.perf_counter()
            found = report(spark.read.parquet(str(folder / "history")), folder / "report", window="1 hour")
            page(summary(found))
            yield value_record("report", OURS, case, [time.perf_counter() - start], "s")
        if memory:
            yield value_record("memory of a report", OURS, case, [max(memory) / 2**20], "MiB")


def _can(bench: Bench) -> bool:
    """Whether there is what Spark needs; the page says what is not."""
    if find_spec("pyspark") is None:
        bench.note("Spark was left out: PySpark is not installed")
    elif not has_java():
        bench.note("Spark was left out: there is no Java")
    else:
        return OURS in bench.systems
    return False


@contextmanager
def _database(bench: Bench) -> Iterator[tuple[str, psycopg.Connection[Any]]]:
    with bench.databases([SYSTEMS[OURS]]) as databases, psycopg.connect(databases[OURS], autocommit=True) as admin:
        yield databases[OURS], admin


@contextmanager
def _session(dsn: str | None) -> Iterator[SparkSession]:
    from fairqueue.spark import local_session

    if dsn is not None:
        _options(dsn)  # a password goes into the environment, before there is a JVM
    settings = {
        # One task a file.
        "spark.sql.files.maxPartitionBytes": "256m",
        "spark.sql.files.openCostInBytes": "256m",
        **({"spark.driver.extraClassPath": jar} if (jar := os.environ.get("FAIRQUEUE_JDBC_JAR")) else {}),
    }
    with local_session(f"local[{_CONNECTIONS}]", settings=settings) as spark:
        yield spark


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fairqueue-bench-") as folder:
        yield Path(folder)


def _options(dsn: str) -> dict[str, str]:
    from fairqueue.cli.spark.base import options_of
    from fairqueue.cli.target import Target

    return options_of(Target(dsn))


def _rows(admin: psycopg.Connection[Any], spark: SparkSession, folder: Path, rows: int, *, keyed: bool) -> DataFrame:
    """The rows of a load: in a table of PostgreSQL, for COPY, and in as many files as there are tasks."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    admin.execute("DROP TABLE IF EXISTS source")
    key = "md5(i::text)" if keyed else "NULL::text"
    admin.execute(_SOURCE.format(channels=_CHANNELS, key=key, files=_FILES, rows=rows).encode())
    folder.mkdir()
    for number in range(_FILES):
        found = admin.execute(
            "SELECT channel, key, payload::text, dequeue_at FROM source WHERE file = %s", (number,)
        ).fetchall()
        names = ["channel", "key", "payload", "dequeue_at"]
        types = [pa.string(), pa.string(), pa.string(), pa.int64()]
        columns = [pa.array(values, kind) for values, kind in zip(zip(*found, strict=True), types, strict=True)]
        pq.write_table(pa.table(columns, names), folder / f"{number}.parquet")
    frame = spark.read.parquet(str(folder))
    return frame if keyed else frame.drop("key")


def _encoded(admin: psycopg.Connection[Any], number: int) -> bytes:
    buffer = io.BytesIO()
    query = f"COPY (SELECT {_COLUMNS} FROM source WHERE file = {number}) TO STDOUT (FORMAT binary)"
    with admin.cursor().copy(query.encode()) as copy:
        for data in copy:
            buffer.write(data)
    return buffer.getvalue()


def _send(encoded: Sequence[bytes], connection: psycopg.Connection[Any], number: int) -> None:
    """A part of the files in one connection, a transaction each, as tasks do."""
    for data in encoded[number::_CONNECTIONS]:
        _copy(connection, data)
        connection.commit()


def _copy(connection: psycopg.Connection[Any], data: bytes) -> None:
    with connection.cursor().copy(f"COPY fairqueue.message ({_COLUMNS}) FROM STDIN (FORMAT binary)".encode()) as copy:
        for first in range(0, len(data), 1 << 17):
            copy.write(data[first : first + (1 << 17)])


def _receive(rows: int, connection: psycopg.Connection[Any], number: int) -> None:
    share = rows // _CONNECTIONS
    where = f"message_id > {number * share} AND message_id <= {(number + 1) * share}"
    with connection.cursor().copy(
        f"COPY (SELECT * FROM fairqueue.history WHERE {where}) TO STDOUT (FORMAT binary)".encode()
    ) as copy:
        for _ in copy:
            pass


def _in_parallel(dsn: str, act: Callable[[psycopg.Connection[Any], int], None]) -> None:
    def run(number: int) -> None:
        with psycopg.connect(dsn) as connection:
            act(connection, number)

    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        list(pool.map(run, range(_CONNECTIONS)))


def _save(rows: DataFrame, dsn: str, **options: str) -> None:
    rows.write.format("fairqueue").mode("append").options(**_options(dsn), **options).save()


def _in_one(dsn: str, encoded: Sequence[bytes]) -> None:
    with psycopg.connect(dsn) as connection:
        for data in encoded:
            _copy(connection, data)


def _jdbc(bench: Bench, dsn: str) -> dict[str, str] | None:
    """Options of Spark's own sink; None where it can't take part."""
    url = make_url(dsn)
    if not os.environ.get("FAIRQUEUE_JDBC_JAR") or url.password is None:
        bench.note(
            f"{_JDBC} was left out: FAIRQUEUE_JDBC_JAR and FAIRQUEUE_DSN don't name a driver and a server on TCP"
        )
        return None
    return {
        "url": f"jdbc:postgresql://{url.host}:{url.port}/{url.database}?stringtype=unspecified",
        # Not in the address, which Spark's plans and logs show.
        "user": str(url.username),
        "password": str(url.password),
        "dbtable": "fairqueue.message",
        "driver": "org.postgresql.Driver",
    }


def _insert(rows: DataFrame, options: Mapping[str, str]) -> None:
    rows.write.format("jdbc").mode("append").options(**options).save()


def _history(spark: SparkSession, rows: int, tenants: int) -> DataFrame:
    """A day's history, made by Spark: many small tenants and a few large ones."""
    return spark.sql(f"""
        SELECT id AS message_id, 'default' AS queue, concat('c', channel) AS channel,
            CAST(NULL AS string) AS key, IF(id % 1000 = 0, 'dead', 'completed') AS outcome, 1 AS attempt,
            1.0D AS cost, CAST(NULL AS string) AS error, 'worker-1' AS worker, 0L AS dequeue_at,
            timestamp_millis(came) AS created_at,
            timestamp_millis(came + waited) AS first_leased_at, timestamp_millis(came + waited) AS leased_at,
            timestamp_millis(came + waited + 200) AS finished_at, 1000 + id AS xid
        FROM (SELECT id, CAST(floor({tenants} * power(rand(1), 3)) AS bigint) AS channel,
            1700000000000 + id * 86400000L div {rows} AS came, CAST(-ln(1 - rand(2)) * 5000 AS bigint) AS waited
            FROM range({rows}))
    """)


@contextmanager
def _watched() -> Iterator[list[int]]:
    """Bytes that this process's descendants have in memory, now and again; nothing where that can't be known."""
    found: list[int] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.2):
            if (total := _resident()) is not None:
                found.append(total)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()


def _resident() -> int | None:
    children: dict[int, list[int]] = {}
    sizes: dict[int, int] = {}
    try:
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(folder.name))
            sizes[int(folder.name)] = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
    total, waiting = 0, list(children.get(os.getpid(), []))
    while waiting:
        process = waiting.pop()
        total += sizes.get(process, 0)
        waiting += children.get(process, [])
    return total or None
