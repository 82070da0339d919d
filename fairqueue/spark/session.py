"""A Spark session on this machine, for who has none.

::

    from fairqueue.spark import local_session

    with local_session() as spark:
        spark.read.format("fairqueue").option("table", "history").load().show()

On a cluster, make the session as you always do and register the data source yourself:
``spark.dataSource.register(FairQueueDataSource)``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .worker_python import worker_python

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["local_session"]

_LOGGING = Path(__file__).with_name("log4j2.properties").as_uri()
_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # The name of a machine may lead to an interface that nobody should listen on.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.log.level": "ERROR",
    "spark.driver.defaultJavaOptions": f"-Dlog4j2.configurationFile={_LOGGING}",
}


@contextmanager
def local_session(
    master: str = "local[*]", *, memory: str = "2g", settings: Mapping[str, str] | None = None
) -> Iterator[SparkSession]:
    """The session that there is, or a new one that ends with the block; the data source is registered in it.

    :param master: where Spark runs; ``local[*]`` is this process with all cores, and
        ``local[*,3]`` tries a task three times.
    :param memory: of the driver, which in a local session is all there is.
    :param settings: more of Spark's, or others than ours.
    """
    from pyspark.sql import SparkSession

    from .source import FairQueueDataSource

    there = SparkSession.getActiveSession() or _of_another_thread()
    if there is not None:
        there.dataSource.register(FairQueueDataSource)
        yield there
        return
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    cores = os.cpu_count() or 1
    ours = {**_SETTINGS, "spark.sql.shuffle.partitions": str(2 * cores)}
    builder = SparkSession.builder.master(master).appName("fairqueue").config("spark.driver.memory", memory)
    with worker_python(master) as of_workers:
        for name, value in {**ours, **of_workers, **(settings or {})}.items():
            builder = builder.config(name, value)
        spark = builder.getOrCreate()
    spark.dataSource.register(FairQueueDataSource)
    try:
        yield spark
    finally:
        spark.stop()


def _of_another_thread() -> SparkSession | None:
    """The session that another thread has made, whose it is to end it."""
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    try:
        there = SparkSession.active()
    except PySparkRuntimeError:
        return None
    context = getattr(there, "_sc", None)
    if context is not None and context._jsc is None:  # stopped without its session, which PySpark still names
        return None
    # Only now this thread has an active session too, without which Spark finds no data source in Python.
    there.createDataFrame([], "nothing int")
    return there
