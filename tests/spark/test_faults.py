"""Faults while Spark writes: each row is in the queue once, or none is, and what the dead leave is found.

What doesn't need Spark for it is in test_loading.py: two drivers at once, the order of rows, keys, rights.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import create_engine

from tests.fixtures.spark import on_spark, only_then
from tests.pages import ROOT

pytest.importorskip("pyspark")

from pyspark import cloudpickle
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.find_spark_home import _find_spark_home

from fairqueue import embedded, schema
from fairqueue.spark.engine.loading import clean, progress
from fairqueue.spark.engine.place import Place
from fairqueue.testing._databases import Databases
from tests.acts import wait_until
from tests.fixtures.connections import Raw
from tests.observing import observer
from tests.spark import faulty
from tests.spark.loads import once_each, stages

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = on_spark

ROWS = range(300)
#: Without keys, as the queue itself would see to those.
NUMBER = "payload::int"
#: A worker that is killed in the middle, a task that fails twice, one whose message is lost.
ALL = {"0": ["kill", 1], "1": ["raise", 2], "2": ["lose", 1]}


@pytest.fixture(scope="module")
def session(spark: "SparkSession") -> "Iterator[SparkSession]":
    """It knows the source with faults, and hands rows on a few at a time, so that a partition has a middle."""
    # The workers may not find the tests.
    cloudpickle.register_pickle_by_value(faulty)  # type: ignore[no-untyped-call]
    spark.dataSource.register(faulty.FaultySource)
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "40")
    yield spark
    spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    cloudpickle.unregister_pickle_by_value(faulty)  # type: ignore[no-untyped-call]


def start(log: Path, *command: str, **environment: str) -> subprocess.Popen[str]:
    """A process that can be killed with all that it starts; its output goes to the end of a file."""
    with log.open("a") as output:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | environment,
            start_new_session=True,
            stdout=output,
            stderr=output,
            text=True,
        )


@dataclass(frozen=True)
class Driver:
    """A process on a database of its own, and the folder in which it says how far it is."""

    process: subprocess.Popen[str]
    url: str
    folder: Path

    def kill(self) -> None:
        # The JVM with it; and nothing, where it has ended by itself.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module", autouse=True)
def dying(
    session: "SparkSession", databases: Databases, template: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Driver]:
    """The driver that will be killed. It takes long to start, so it begins before the other tests of the module."""
    folder = tmp_path_factory.mktemp("dying")
    with databases.create(template.template_dbname) as url:
        process = start(folder / "log", sys.executable, "-m", "tests.spark.drivers", "dying", url, str(folder))
        driver = Driver(process, url, folder)
        try:
            yield driver
        finally:
            driver.kill()


def rows(session: "SparkSession", partitions: int = 3) -> "DataFrame":
    return session.range(0, 300, 1, partitions).selectExpr("'acme' AS channel", "string(id) AS payload")


def save(frame: "DataFrame", url: str, faults: dict[str, Any] | None = None, **options: str) -> None:
    given = {"url": url, "faults": json.dumps(faults or {}), **options}
    frame.write.format("faulty").mode("append").options(**given).save()


@pytest.mark.parametrize("commit", ["atomic", "direct"])
def test_tasks(session: "SparkSession", database_url: str, watching: psycopg.Connection[Any], commit: str) -> None:
    save(rows(session), database_url, ALL, commit=commit)
    once_each(watching, ROWS, NUMBER)
    assert stages(watching) == 0


def test_drivers(session: "SparkSession", database_url: str, watching: psycopg.Connection[Any]) -> None:
    """A job that fails for good leaves nothing; one that fails when all was done isn't done again."""
    place = Place(url=database_url)
    with pytest.raises(PySparkException, match="a fault at the end"):
        save(rows(session), database_url, {"2": ["lose", 3]}, job="nightly")
    once_each(watching, [])
    # Of the three attempts that nobody was told of, and perhaps of tasks that ended later than the job.
    assert stages(watching) <= clean(place, hours=0)
    assert stages(watching) == 0

    for fault, entered in (("fail before", False), ("fail after", True)):
        with pytest.raises(PySparkException, match=f"a {fault.replace('fail', 'fault')} entering"):
            save(rows(session), database_url, {"driver": fault}, job="nightly")
        once_each(watching, ROWS if entered else [], NUMBER)
        assert stages(watching) == 0
        assert (progress(place, "job/nightly") is not None) == entered

    for commit in ("atomic", "direct"):
        save(rows(session), database_url, {}, job="nightly", commit=commit)
        with pytest.raises(PySparkException, match="has been loaded before, with"):
            save(rows(session).limit(1), database_url, {}, job="nightly", commit=commit)
    once_each(watching, ROWS, NUMBER)
    assert stages(watching) == 0


def test_streams(session: "SparkSession", database_url: str, watching: psycopg.Connection[Any], tmp_path: Path) -> None:
    """Faults in tasks, and a batch that is entered without Spark knowing, which so delivers it again."""
    place, incoming = Place(url=database_url), tmp_path / "incoming"
    incoming.mkdir()

    def run(batch: int, faults: dict[str, Any]) -> str:
        lines = [json.dumps({"channel": "acme", "payload": str(1000 * batch + number)}) for number in ROWS]
        (incoming / f"{batch}.json").write_text("\n".join(lines))
        frame = session.readStream.schema("channel string, payload string").json(str(incoming)).repartition(3)
        options = {
            "url": database_url,
            "faults": json.dumps(faults),
            "checkpointLocation": str(tmp_path / "checkpoint"),
        }
        query = frame.writeStream.format("faulty").options(**options)
        started = query.trigger(availableNow=True).start()
        started.awaitTermination()
        return str(started.id)

    name = f"query/{run(0, {'0': ['kill', 1], '2': ['lose', 1]})}"
    assert progress(place, name) == 0
    with pytest.raises(StreamingQueryException, match="a fault after entering"):
        run(1, {"driver": "fail after"})
    assert progress(place, name) == 1
    assert not (tmp_path / "checkpoint" / "commits" / "1").exists()
    # Batch 1 again, and batch 2.
    run(2, {})
    assert progress(place, name) == 2
    once_each(watching, [1000 * batch + number for batch in range(3) for number in ROWS], NUMBER)
    assert stages(watching) == 0


def test_a_server_that_crashes_before_the_commit(session: "SparkSession", tmp_path: Path) -> None:
    with embedded.ephemeral() as server, ThreadPoolExecutor(1) as pool:
        url = server.url()
        engine = create_engine(url)
        with engine.begin() as connection:
            schema.install(connection)
        engine.dispose()

        def crash() -> None:
            wait_until((tmp_path / "before").exists, 120)
            server.restart("immediate")
            (tmp_path / "go").touch()

        crashed = pool.submit(crash)
        with pytest.raises(PySparkException, match=r"has 0 rows, not 100: the server has crashed meanwhile"):
            save(
                rows(session),
                url,
                {"driver": "wait before", "folder": str(tmp_path)},
                job="nightly",
            )
        crashed.result()
        save(rows(session), url, job="nightly")
        with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as watching:
            once_each(watching, ROWS, NUMBER)
            assert stages(watching) == 0


@pytest.mark.slow
def test_a_driver_that_is_killed(session: "SparkSession", dying: Driver, raw: Raw) -> None:
    """With kill -9, in the two moments in which it matters; whoever runs its jobs again need not know in which."""
    place, watching = Place(url=dying.url), observer(raw, dying.url)
    moments = [dying.folder / "before", dying.folder / "after"]
    wait_until(lambda: all(moment.exists() for moment in moments) or dying.process.poll() is not None, 300)
    dying.kill()
    assert dying.process.returncode == -signal.SIGKILL, (dying.folder / "log").read_text()
    assert [progress(place, f"job/{job}") for job in ("before", "after")] == [None, 0]
    assert stages(watching) == 2

    for job in ("before", "after"):
        again = session.range(0, 100, 1, 2).selectExpr(f"'{job}' AS channel", "string(id) AS payload")
        save(again, dying.url, job=job)
    once_each(
        watching,
        [f"{job}/{number}" for job in ("before", "after") for number in range(100)],
        "channel || '/' || payload",
    )
    assert clean(place, hours=0) == 2
    assert stages(watching) == 0


@pytest.mark.slow
@pytest.mark.soak
@only_then
def test_speculation(database_url: str, watching: psycopg.Connection[Any], tmp_path: Path) -> None:
    """Two attempts at one task, on two hosts, as a cluster has it: the one that is told of is entered."""
    log, processes = tmp_path / "log", []
    spark_class = str(Path(_find_spark_home()) / "bin" / "spark-class")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    master = f"spark://127.0.0.1:{port}"
    try:
        command = [spark_class, "org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", str(port)]
        processes.append(start(log, *command, "--webui-port", "0", SPARK_LOCAL_IP="127.0.0.1"))
        for host in ("127.0.0.2", "127.0.0.3"):
            command = [spark_class, "org.apache.spark.deploy.worker.Worker", "--host", host, "--cores", "1", master]
            command += ["--memory", "600m", "--webui-port", "0", "--work-dir", str(tmp_path / host)]
            processes.append(start(log, *command, SPARK_LOCAL_IP=host))
        driver = start(
            log, sys.executable, "-m", "tests.spark.drivers", "speculating", database_url, str(tmp_path), master
        )
        processes.append(driver)
        assert driver.wait(240) == 0, log.read_text()
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    kinds = ("linger", "linger at the end")
    for kind in kinds:
        # It was there, and nobody has told it to go.
        assert {path.name for path in (tmp_path / kind).iterdir()} == {"lingers", "done"}
    expected = [f"{kind}/{number}" for kind in kinds for number in range(400)]
    once_each(watching, expected, "channel || '/' || payload")
    assert stages(watching) == 0
