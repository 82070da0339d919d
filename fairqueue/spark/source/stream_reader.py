"""``spark.readStream.format("fairqueue")``: the history as it grows, every row once.

::

    frame = spark.readStream.format("fairqueue").options(url="postgresql://reader@db/app", feed="warehouse").load()

====================== =============================================================================================
option                 meaning
====================== =============================================================================================
``feed``               a name: retention keeps what this stream hasn't read. Its cursor is moved when Spark says that a
                       batch is done, which it says with the next one. ``feed_forget(name)`` when it is no longer read
``starting``           of a new checkpoint: ``earliest`` (unless said), all that there is, or ``latest``
``max_rows_per_batch`` at most so many rows in a batch; otherwise all that there are
``partitions``         of a batch; one a core, and one for 500,000 rows, unless said
``columns``            only these, with commas between; or say ``.schema(...)``
``fail_on_data_loss``  whether rows that were dropped before they were read are an error: ``true`` (unless said), or
                       ``false``; with ``feed`` there are none. A new checkpoint for a feed that was ahead of it, or
                       that it would lead past unread rows, is refused until ``feed_forget(name)``: what lies between
                       isn't kept, or wouldn't be
====================== =============================================================================================

The checkpoint holds how far the stream is: it goes on there, on the same server only. A transaction that stays open on
the server, and has written anything, holds the stream up; nothing is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from fairqueue.errors import InvalidValue
from fairqueue.spark.engine.feeds import Feed, Offset
from fairqueue.spark.engine.reading import Selection

from .options import Options
from .reader import Partition, arrow_schema_of, named

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

__all__ = ["FeedReader"]

_KNOWN = {"table", "columns", "feed", "starting", "max_rows_per_batch", "partitions", "fail_on_data_loss"}


class FeedReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One of these lives in the driver for as long as the stream; ``read`` runs on copies of it."""

    def __init__(self, given: Mapping[str, str], schema: StructType) -> None:
        options = Options(given, _KNOWN)
        if options.choice("table", ("history", "messages")) != "history":
            raise InvalidValue("only table=history can be read as a stream")
        fail_on_loss = options.choice("fail_on_data_loss", ("true", "false")) == "true"
        self._feed = Feed(options.place, options.text("feed"), fail_on_loss=fail_on_loss)
        self._latest = options.choice("starting", ("earliest", "latest")) == "latest"
        self._max_rows = options.number("max_rows_per_batch", None)
        self._parts = options.number("partitions", None)
        self._schema = schema
        self._selection = Selection("history", columns=named(schema, "history"))
        self._target: Offset | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        start = self._feed.begin(latest=self._latest)
        self._feed.register(start)
        return start.document()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadAllAvailable() if self._max_rows is None else ReadMaxRows(self._max_rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._feed.horizon()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        max_rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return self._feed.next(Offset.of(start), max_rows=max_rows, horizon=self._target).document()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return [Partition(part) for part in self._feed.plan(Offset.of(start), Offset.of(end), parts=self._parts)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Partition)
        return self._feed.read(partition.part, self._selection, arrow_schema_of(self._schema))

    def commit(self, end: dict[str, Any]) -> None:
        self._feed.move(Offset.of(end))
