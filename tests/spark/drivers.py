"""Drivers that a test starts as processes, and may kill: `python -m tests.spark.drivers NAME URL FOLDER [MASTER]`."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pyspark import cloudpickle

from fairqueue.spark import local_session
from tests.fixtures.spark import SETTINGS
from tests.spark import faulty


def dying(url: str, folder: Path) -> None:
    """Two jobs keep it busy until it is killed: one is about to enter its load, one has done so."""
    with local_session("local[2]", memory="512m", settings=SETTINGS) as spark, ThreadPoolExecutor(2) as pool:
        spark.dataSource.register(faulty.FaultySource)

        def load(job: str) -> None:
            # In a thread, Spark knows data sources only after it was given a frame there.
            rows = spark.createDataFrame(
                [(job, str(number)) for number in range(100)], "channel string, payload string"
            )
            faults = {"driver": f"wait {job}", "folder": str(folder)}
            options = {"url": url, "job": job, "faults": json.dumps(faults)}
            rows.write.format("faulty").mode("append").options(**options).save()

        list(pool.map(load, ("before", "after")))


def speculating(url: str, folder: Path, master: str) -> None:
    """Two jobs on a cluster, each with a task that goes on when another attempt has long taken its place."""
    settings = {
        **SETTINGS,
        "spark.executor.memory": "512m",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "40",
        "spark.speculation": "true",
        "spark.speculation.interval": "100ms",
        "spark.speculation.multiplier": "1.5",
        "spark.speculation.quantile": "0.5",
        "spark.speculation.minTaskRuntime": "200ms",
    }
    # The executors don't find the tests.
    cloudpickle.register_pickle_by_value(faulty)  # type: ignore[no-untyped-call]
    with local_session(master, memory="512m", settings=settings) as spark:
        spark.dataSource.register(faulty.FaultySource)
        for kind in ("linger", "linger at the end"):
            place = folder / kind
            place.mkdir()
            rows = spark.range(0, 400, 1, 4).selectExpr(f"'{kind}' AS channel", "string(id) AS payload")
            faults: dict[str, Any] = {"3": [kind, 1], "folder": str(place)}
            options = {"url": url, "job": kind, "faults": json.dumps(faults)}
            rows.write.format("faulty").mode("append").options(**options).save()
            (place / "done").touch()


if __name__ == "__main__":
    role, url, folder, *rest = sys.argv[1:]
    if role == "dying":
        dying(url, Path(folder))
    else:
        speculating(url, Path(folder), *rest)
