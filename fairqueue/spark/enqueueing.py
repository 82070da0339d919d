"""Files into a queue: Parquet, JSON, CSV, or the files of a folder themselves.

::

    from fairqueue.spark import enqueue, local_session

    with local_session() as spark:
        done = enqueue(
            spark, "documents.parquet", channel="tenant", expressions={"key": "document_id"}, job="2026-11-21"
        )
    print(done.rows)

``channel``, ``payload`` and the others are expressions of Spark SQL over the columns of the files, so a column's name
will do. Without a ``payload``, the whole row becomes the payload. A column of CSV is text, as it is written, for
``01234`` may be no number: cast what is one. What can't be read as CSV or JSON is an error, and nothing is enqueued.

The files of a folder (``format="files"``) have the columns ``path``, ``name``, ``folder`` (the first one below the
path, or null), ``length``, ``modified``, ``content``; the payload is all but the content, which is not even read unless
an expression asks for it. Spark leaves out empty files, and files and folders whose names begin with ``_`` or ``.``.

How rows become messages, exactly once, is in :mod:`fairqueue.spark.source.writer`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Literal, get_args

from .paths import PLACE, absolute

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

__all__ = ["FORMATS", "Enqueued", "Format", "enqueue", "read_files"]

Format = Literal["parquet", "json", "csv", "files"]
FORMATS: tuple[Format, ...] = get_args(Format)

# Unless Spark is told to fail, what it can't read becomes a row of nulls.
_JSON = {"mode": "FAILFAST"}
_CSV = {
    "mode": "FAILFAST",
    "header": "true",
    # As programs write it: a quoted value may have line breaks, and a quote in it is there twice.
    "multiLine": "true",
    "escape": '"',
    # Else the names are those of one file, whatever the others have in their place.
    "enforceSchema": "false",
}
# Else the columns are those of one file.
_PARQUET = {"mergeSchema": "true"}
#: Unless said, times are cut to milliseconds.
_AS_JSON = {
    "ignoreNullFields": "false",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss[.SSSSSS][XXX]",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss[.SSSSSS]",
}


@dataclass(frozen=True)
class Enqueued:
    """What became of it.

    :param rows: that were read; with rejects, those that were refused among them.
    :param messages: that they became; fewer where keys were live, rows were refused, or parts had been loaded before.
    :param repeated: the job had been done before, and nothing was added.
    """

    rows: int
    messages: int
    repeated: bool


def enqueue(
    spark: SparkSession,
    source: str | DataFrame,
    *,
    channel: str,
    format: Format | None = None,  # noqa: A002
    payload: str | None = None,
    expressions: Mapping[str, str] | None = None,
    options: Mapping[str, str] | None = None,
    job: str | None = None,
) -> Enqueued:
    """Enqueue one message a row.

    :param source: a path that Spark can read, or a DataFrame.
    :param channel: an expression over its columns.
    :param format: of the files; None: what the path ends in, also where they are compressed, else ``"files"``.
    :param payload: an expression: a string is JSON, binary is a body, a struct, map or array becomes JSON as Spark's
        to_json has it (NaN is a string, binary base64); None: the whole row.
    :param expressions: of other columns: ``key``, ``queue``, ``cost``, ``dequeue_at``, ``delay``, ``priority``, ...
    :param options: of the data source: ``url``, ``queue``, ``commit``, ``on_conflict``, ``rejects``, ...
    :param job: a name for this load: enqueueing it again adds nothing.
    :raises InvalidValue: if something can't be.
    :raises pyspark.errors.PySparkException: if Spark, or the database, fails. With commit atomic, nothing is enqueued,
        unless what failed is the way back from the database's commit; with a ``job`` it can be tried again.
    :raises FairqueueError: if all is enqueued, and it couldn't be asked how many messages that are.
    """
    import psycopg
    from pyspark.sql import Observation
    from pyspark.sql import functions as sf

    from fairqueue.errors import FairqueueError
    from fairqueue.spark.engine.loading import new_run, noted, notes
    from fairqueue.spark.source.options import Options
    from fairqueue.spark.source.writer import KNOWN

    # By lower-case name, as Spark has them, so that none is there twice.
    given = {key.lower(): value for key, value in (options or {}).items()} | ({} if job is None else {"job": job})
    asked = Options(given, KNOWN)
    kind = format or (_format_of(source) if isinstance(source, str) else None)
    rows = read_files(spark, source, kind) if isinstance(source, str) else source
    names = [name for name in rows.columns if kind != "files" or name != "content"]
    columns = {"channel": sf.expr(channel), "payload": _whole(names) if payload is None else sf.expr(payload)}
    columns |= {name: sf.expr(text) for name, text in (expressions or {}).items()}
    # As Spark's own code does it, which is faster than ours.
    made = rows.select(*(column.alias(name) for name, column in columns.items()))
    if dict(made.dtypes)["payload"].startswith(("struct", "map", "array")):
        made = made.withColumn("payload", sf.to_json("payload", _AS_JSON))
    given["__run__"] = new_run()
    load = notes(given["__run__"], asked.text("job"))
    before = noted(asked.place, load)
    counted = Observation()
    made.observe(counted, sf.count(sf.lit(1)).alias("rows")).write.format("fairqueue").mode("append").options(
        **given
    ).save()
    try:
        after = noted(asked.place, load)
    except psycopg.Error as error:
        raise FairqueueError(
            f"all {counted.get['rows']} rows are enqueued, and it can't be asked how many messages they are: {error}"
        ) from error
    added = (after or 0) - (before or 0)
    return Enqueued(int(counted.get["rows"]), added, repeated=before is not None and added == 0)


def read_files(spark: SparkSession, path: str, format: Format | None = None) -> DataFrame:  # noqa: A002
    """The rows of files, or one a file.

    :raises InvalidValue: if the format isn't one.
    """
    from pyspark.sql import functions as sf

    # Here, as the help of a command, which names the formats, does without SQLAlchemy.
    from fairqueue.errors import InvalidValue

    kind = format or _format_of(path)
    if kind not in FORMATS:
        raise InvalidValue(f"format must be {', '.join(FORMATS)}, not {kind!r}")
    if kind != "files":
        settings = {"csv": _CSV, "json": _JSON, "parquet": _PARQUET}[kind]
        return spark.read.format(kind).options(**settings).load(path)
    path = absolute(path)  # its depth has to be known
    files = spark.read.format("binaryFile").option("recursiveFileLookup", "true").load(path)
    return files.select(
        "path",
        sf.element_at(sf.split("path", "/"), -1).alias("name"),
        _folder(path).alias("folder"),
        "length",
        sf.col("modificationTime").alias("modified"),
        "content",
    )


def _folder(path: str) -> Column:
    """The first folder below a path, which is an absolute one or a URL, and may have wildcards: by its depth."""
    from pyspark.sql import functions as sf

    depth = len([part for part in posixpath.normpath("/" + re.sub(PLACE, "", path)).split("/") if part])
    parts = sf.split(sf.regexp_replace("path", PLACE + "/", ""), "/")
    return sf.when(sf.size(parts) > depth + 1, sf.get(parts, depth))


def _whole(names: list[str]) -> Column:
    """All that is in these columns, whatever their names."""
    from pyspark.sql import functions as sf

    return sf.struct(*(f"`{name.replace('`', '``')}`" for name in names))


def _format_of(path: str) -> Format:
    plain = PurePosixPath(re.sub(r"\.(bz2|deflate|gz|lz4|snappy|zst)$", "", path, flags=re.IGNORECASE))
    suffix = plain.suffix.lstrip(".").lower()
    known: dict[str, Format] = {"parquet": "parquet", "json": "json", "jsonl": "json", "ndjson": "json", "csv": "csv"}
    return known.get(suffix, "files")
