"""Batch write: ``df.write.format("fairqueue").option(...).mode("append").save()``.

``commit`` = ``atomic``: tasks stage, the driver enters everything in one transaction. ``direct``: each task enters its
own part in one, at once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING

import psycopg
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.pandas.types import to_arrow_schema

from fairqueue.errors import InvalidValue
from fairqueue.spark.engine.columns import Columns
from fairqueue.spark.engine.files import Folder
from fairqueue.spark.engine.loading import (
    LoadFailed,
    Part,
    abandon,
    clean,
    enter,
    load_part,
    new_run,
    notes,
    progress,
    stage,
)
from fairqueue.spark.engine.rejects import Rejects, discard, keep

from .options import Options

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

__all__ = ["KNOWN", "OPTIONS", "JobWriter", "Message", "Rows", "told"]

#: Those that batch and stream writes share.
OPTIONS = {"queue", "channel", "on_conflict", "rejects", "clean_hours"}
#: Those of a batch write.
KNOWN = OPTIONS | {"commit", "job"}

_log = logging.getLogger(__name__)


@dataclass
class Message(WriterCommitMessage):
    """What a task tells the driver."""

    part: Part
    #: The file with the rows that were refused.
    rejects: str | None = None
    #: Of a stream: its id, and which attempt at a batch this is.
    query: str = ""
    run: str = ""


class Rows:
    """What batch and stream writes have in common: the rows on their way to a staging table."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self.place = options.place
        self.on_conflict = options.choice("on_conflict", ("ignore", "raise"))
        self.clean_hours = options.number("clean_hours", 24)
        rejects = options.text("rejects")
        # As the driver has it: executors are in other folders.
        self.rejects = None if rejects is None else Folder(rejects).path
        queue = options.text("queue") or "default"
        self._columns = Columns(to_arrow_schema(schema, timezone="UTC"), queue=queue, channel=options.text("channel"))

    def staged(self, batches: Iterable[pa.RecordBatch], rejects: Rejects | None) -> Iterator[pa.RecordBatch]:
        """The batches as the staging table takes them; what is refused goes to ``rejects``, or is an error."""
        first = 0
        for batch in batches:
            if rejects is None:
                yield self._columns.staged(batch, first)
            else:
                good, bad = self._columns.sorted_out(batch)
                rejects.add(bad)
                yield good
            first += len(batch)

    def direct(self, staged: Iterable[pa.RecordBatch], now: int) -> Iterator[pa.RecordBatch]:
        """The same as the table of messages takes them."""
        for batch in staged:
            yield self._columns.direct(batch, now)

    def opened(self, run: str, number: int) -> Rejects | None:
        return None if self.rejects is None else Rejects(self.rejects, run, number)

    def settle(self, run: str, load: str, messages: Sequence[Message]) -> None:
        """After a load has been entered: the files of its refused rows, and what dead loads have left.

        None of this is an error: Spark would tell that the load has failed, and who tries again enters it twice.
        """
        if self.rejects is not None:
            try:
                keep(self.rejects, load, [message.rejects for message in messages if message.rejects])
                discard(self.rejects, run)
            except Exception:  # noqa: BLE001 (each file system has errors of its own)
                _log.warning(
                    "%s is entered, but files of its refused rows could not be moved from %s/_attempts/%s-*",
                    *(load, self.rejects, run),
                    exc_info=True,
                )
        # The next load tries again.
        with suppress(psycopg.Error):
            clean(self.place, self.clean_hours)

    def abandon(self, run: str) -> None:
        """Instead of that, when it failed. What is entered stays: it may have failed after the database's commit.

        So the files of refused rows go only together with a staging table, which shows that nothing has been entered.
        """
        if abandon(self.place, run) and self.rejects is not None:
            discard(self.rejects, run)


def told(messages: Sequence[Message | None]) -> list[Message]:
    """What the tasks told, all of them: without one, its rows would be missing."""
    if None in messages:
        raise LoadFailed("what a task has told the driver is lost: load again; nothing was entered")
    return [message for message in messages if message]


class JobWriter(DataSourceArrowWriter):
    """Made once, by the driver; its copies do the rest, so all they share is what is set here."""

    def __init__(self, given: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        options = Options(given, KNOWN)
        if overwrite:
            raise InvalidValue('a queue can\'t be overwritten: write with mode("append")')
        self.rows = Rows(options, schema)
        # Chosen by enqueue(), it can be asked afterwards what became of it.
        self.run = options.text("__run__") or new_run()
        self.direct = options.choice("commit", ("atomic", "direct")) == "direct"
        if self.direct and "key" in schema.names and options.text("on_conflict") != "raise":
            raise InvalidValue(
                "commit direct copies straight into the queue, and can't leave out rows whose key is live: set"
                " on_conflict to raise, or use commit atomic"
            )
        job = options.text("job")
        if job is not None and len(job) > 200:
            raise InvalidValue(f"option job must have at most 200 characters, not {len(job)}")
        #: Under which the load is noted, as a whole or part by part. The notes of nameless ones go after a while.
        self.name, self.prefix = notes(self.run, job)
        # Also of a nameless one: that there is a queue is better known before any task starts.
        self.done = progress(self.rows.place, self.name) is not None

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Message:
        context = TaskContext.get()
        assert context is not None
        number, place = context.partitionId(), self.rows.place
        rejects = self.rows.opened(self.run, number)
        batches: Iterator[pa.RecordBatch] = self.rows.staged(iterator, rejects)
        if self.done:
            part = Part(number, sum(len(batch) for batch in batches))
        elif self.direct:
            name = f"{self.prefix}/{number}"
            # The first rows may take long, and the server ends connections that wait in a transaction.
            batches = chain([*islice(batches, 1)], batches)
            part = Part(number, load_part(place, name, lambda now: self.rows.direct(batches, now)))
        else:
            part = stage(place, self.run, number, batches)
        return Message(part, None if rejects is None else rejects.close())

    def commit(self, messages: list[Message | None]) -> None:  # type: ignore[override]
        tasks = told(messages)
        if self.done or not self.direct:  # of what was done before, only that it was the same is looked at
            parts = [task.part for task in tasks]
            enter(self.rows.place, self.run, parts, name=self.name, on_conflict=self.rows.on_conflict)
        self.rows.settle(self.run, self.prefix, tasks)

    def abort(self, messages: list[Message | None]) -> None:  # type: ignore[override]
        self.rows.abandon(self.run)
