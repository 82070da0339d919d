"""Stream write: ``df.writeStream.format("fairqueue").option("checkpointLocation", ...).start()``.

Each batch is entered once: the queue notes, for each query, the number of the last one, in the transaction that enters
its messages. A query is its checkpoint: with a new one, Spark begins again, and so does the queue.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter

from fairqueue.errors import InvalidValue
from fairqueue.spark.engine.loading import Part, enter, new_run, progress, stage

from .options import Options
from .writer import OPTIONS, Message, Rows, told

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

__all__ = ["StreamWriter"]


class StreamWriter(DataSourceStreamArrowWriter):
    """Made anew for each batch, and once more to commit it: only messages tell the one what the other did."""

    def __init__(self, given: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise InvalidValue('a queue can\'t be overwritten: write with outputMode("append")')
        self.rows = Rows(Options(given, OPTIONS), schema)
        self.run = new_run()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Message:
        context = TaskContext.get()
        assert context is not None
        number, place = context.partitionId(), self.rows.place
        query = context.getLocalProperty("sql.streaming.queryId")
        epoch = context.getLocalProperty("streaming.sql.batchId")
        assert query is not None
        rejects = self.rows.opened(self.run, number)
        batches = self.rows.staged(iterator, rejects)
        last = progress(place, f"query/{query}")
        if last is not None and epoch is not None and int(epoch) <= last:
            part = Part(number, sum(len(batch) for batch in batches))
        else:
            part = stage(place, self.run, number, batches)
        return Message(part, None if rejects is None else rejects.close(), query, self.run)

    def commit(self, messages: list[Message | None], batchId: int) -> None:  # type: ignore[override] # noqa: N803
        tasks = told(messages)
        if not tasks:
            return
        name, run = f"query/{tasks[0].query}", tasks[0].run
        parts = [task.part for task in tasks]
        enter(self.rows.place, run, parts, name=name, epoch=batchId, on_conflict=self.rows.on_conflict)
        self.rows.settle(run, f"{name}/{batchId}", tasks)

    def abort(self, messages: list[Message | None], batchId: int) -> None:  # type: ignore[override] # noqa: N803
        # Where no task has told its run, its tables are left to clean().
        for run in {message.run for message in messages if message}:
            self.rows.abandon(run)
