"""The history to Parquet by Spark, day by day, each row once; and out of the database when it is safe there.

::

    from datetime import timedelta
    from fairqueue.spark.archiving import archive

    done = archive(spark, "/data/history", url="postgresql://pipeline@db/app", release_before=timedelta(days=7))
    spark.read.parquet("/data/history").where("day = '2026-11-21'").show()

It goes on where the last run has stopped, however that ended: :mod:`.engine.archives` says how. Tasks read from the
database and write files themselves, with no detour through the JVM; Spark spreads them over its executors.

Limitations: all executors, and the driver, have to reach the path, by what pyarrow knows: a folder that they share,
``s3://``, ``gs://``, ``hdfs://``. One archive per feed. Not through a pooler that gives each transaction another
connection: the lock that keeps two runs apart is one of a connection.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from fairqueue._checks import check_count, check_name, check_seconds

from .engine.place import Place

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from .engine.archives import Archived

__all__ = ["archive"]


def archive(
    spark: SparkSession,
    path: str,
    *,
    url: str | None = None,
    schema: str = "fairqueue",
    passfile: str | None = None,
    feed: str = "archive",
    max_rows: int = 1_000_000,
    release_before: float | timedelta | None = None,
    progress: Callable[[Archived], None] = lambda _: None,
) -> Archived:
    """Archive what the history has now.

    :param path: a folder of its own: a path, or a URL.
    :param url: ``postgresql://user@host/database``, without a password; None: what FAIRQUEUE_DSN or DATABASE_URL says.
    :param schema: where fairqueue is installed.
    :param passfile: a file in libpq's format, at the same path on every machine.
    :param feed: the name by which retention keeps what isn't archived yet; another one for another archive.
    :param max_rows: in a batch: what is lost when a run is interrupted, and what its tasks share.
    :param release_before: drop days in the database that ended so many seconds ago, or a timedelta, if their files have
        the same; None: none.
    :param progress: is told after each batch and each day.
    :raises InvalidValue: if a parameter can't be, no database is named, or the path is another archive's.
    :raises FairqueueError: if another process writes to the archive, the feed is another archive's, files are missing,
        or they don't have what the database has.
    """
    from .engine.archives import Archive

    check_name("feed", feed)
    check_count("max_rows", max_rows, 1)
    age = None if release_before is None else timedelta(seconds=check_seconds("release_before", release_before))
    place = Place(url=url, schema=schema, passfile=passfile)
    run = Archive(place, path, feed=feed, each=partial(_on_executors, spark))
    return run.run(max_rows=max_rows, release_before=age, progress=progress)


def _on_executors(spark: SparkSession, function: Callable[[Any], Any], items: Sequence[Any], /) -> list[Any]:
    """What the function returns for each of the items, in a task each."""

    def called(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        for batch in batches:
            numbers = batch.column("id").to_pylist()
            results = [pickle.dumps(function(items[number])) for number in numbers]
            yield pa.RecordBatch.from_arrays(
                [pa.array(numbers, pa.int64()), pa.array(results, pa.binary())], names=["id", "result"]
            )

    if not items:
        return []
    frame = spark.range(0, len(items), 1, len(items)).mapInArrow(called, "id bigint, result binary")
    return [pickle.loads(row.result) for row in sorted(frame.collect(), key=lambda row: row.id)]  # noqa: S301 (our own)
