"""Rows into staging tables, staging tables into the queue, and what is left when a load dies.

::

    run = new_run()
    parts = [stage(place, run, part, batches) for part, batches in enumerate(partitions)]   # on any machines
    entered = enter(place, run, parts, name="job/2026-11-21")                               # once, at the end

A row becomes a message in :func:`enter` and nowhere else, in one transaction that also notes the name of the load. So:

* nothing is seen of a load that fails; :func:`abandon` or, where nobody is left to call it, :func:`clean` drops its
  tables;
* a part that is staged twice has two tables, and only the one that the driver heard of is entered;
* entering a load again that has a name adds nothing, whether or not the first time was heard of;
* a staging table that a crash of the server has emptied is noticed, as its rows are counted.

:func:`load_part` is the other way: a task enters its own part, at once, under a name of its own.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pyarrow as pa

from fairqueue.errors import FairqueueError

from .place import Place, row_of

__all__ = [
    "Entered",
    "LoadFailed",
    "Part",
    "abandon",
    "clean",
    "enter",
    "load_part",
    "new_run",
    "noted",
    "notes",
    "progress",
    "stage",
]


class LoadFailed(FairqueueError):
    """A load could not be done. Nothing of it is in the queue, unless the message says otherwise."""


@dataclass(frozen=True)
class Part:
    """One part of a load, staged: what a task tells the driver.

    :param table: where the rows are; None: there were none, or they have been dealt with.
    """

    number: int
    rows: int
    table: str | None = None


@dataclass(frozen=True)
class Entered:
    """What became of a load.

    :param rows: that were given.
    :param entered: of them, those that became messages, if only to be dropped by their channel's ``overflow``; the
        others had keys that were live.
    :param repeated: the load had been entered before; the numbers are those of that time.
    """

    rows: int
    entered: int
    repeated: bool


def new_run() -> str:
    """A name for one attempt to load something."""
    return uuid.uuid4().hex


def stage(place: Place, run: str, number: int, batches: Iterable[pa.RecordBatch]) -> Part:
    """Copy one part, as :class:`.columns.Columns` makes it, into a staging table of its own."""
    iterator = iter(batches)
    first = next(iterator, None)
    if first is None:
        return Part(number, 0)
    with place.arrow() as connection, connection.cursor() as cursor:
        with _explained():
            cursor.execute(
                f"SELECT {place.name('stage_create')}($1::text, $2::bigint::integer)", parameters=(run, number)
            )
            (table,) = cursor.fetchall()[0]
        rows = _copy(place, cursor, table, chain([first], iterator))
        connection.commit()
    return Part(number, rows, table)


def enter(
    place: Place,
    run: str,
    parts: Sequence[Part],
    *,
    name: str | None = None,
    epoch: int | None = None,
    on_conflict: str = "ignore",
) -> Entered:
    """Make messages of all parts, in one transaction.

    :param name: under which the load is noted; None: it isn't.
    :param epoch: of a stream, the number of its batch: only one higher than that noted is entered. None: of a job,
        which is entered once.
    :param on_conflict: ``"ignore"`` leaves out rows whose key is live, ``"raise"`` fails.
    :raises LoadFailed: if a job of this name had another number of rows, a staging table is gone or was emptied, a row
        can't be, or its key is live.
    """
    import psycopg

    staged = [part for part in sorted(parts, key=lambda part: part.number) if part.table is not None]
    rows = sum(part.rows for part in parts)
    values = (run, [part.table for part in staged], [part.rows for part in staged], name, epoch or 0, on_conflict)
    with place.connect() as connection:
        try:
            row = row_of(connection, f"SELECT * FROM {place.name('load_enter')}(%s, %s, %s, %s, %s, %s)", *values)
        except psycopg.Error as error:
            raise LoadFailed(_said(error)) from error
        entered = Entered(*row)
        if not entered.repeated and entered.rows != rows:
            raise LoadFailed(
                f"{rows:,} rows were given, and only {entered.rows:,} are staged: the others were loaded before, but"
                " the note of that is gone; nothing was entered"
            )
    if entered.repeated and epoch is None:
        _compare(name, entered.rows, rows)
    return entered


def load_part(place: Place, name: str, batches: Callable[[int], Iterable[pa.RecordBatch]]) -> int:
    """Make messages of one part, in one transaction of its own, unless one of this name has been loaded.

    :param batches: makes them, as :meth:`.columns.Columns.direct` has it, of the time in Unix milliseconds.
    :returns: how many rows it has.
    :raises LoadFailed: if this name was used for another number of rows, or a key is live.
    """
    with place.arrow() as connection, connection.cursor() as cursor:
        with _explained():
            cursor.execute(
                f"SELECT {place.name('load_claim')}($1::text), {place.name('unix_ms')}({place.name('clock')}())",
                parameters=(name,),
            )
            before, now = cursor.fetchall()[0]
        if before is not None:
            connection.rollback()  # it isn't to wait for the rows
            rows = sum(len(batch) for batch in batches(now))
            _compare(name, before, rows)
            return rows
        rows = _copy(place, cursor, "message", batches(now))
        with _explained():
            cursor.execute(f"SELECT 1 FROM {place.name('load_count')}($1::text, $2::bigint)", parameters=(name, rows))
            connection.commit()
    return rows


def progress(place: Place, name: str) -> int | None:
    """The last epoch noted under this name; None: there is none."""
    row = place.row(f"SELECT epoch FROM {place.name('load')} WHERE name = %s", name)
    return None if row is None else int(row[0])


def notes(run: str, job: str | None) -> tuple[str, str]:
    """The name under which a load is noted that is entered as a whole, and that of its parts without their number."""
    return (f"run/{run}", f"run/{run}") if job is None else (f"job/{job}", f"part/{job}")


def noted(place: Place, names: tuple[str, str]) -> int | None:
    """How many messages a load has made so far, by its :func:`notes`; None: there are none."""
    load = place.name("load")
    query = f"SELECT sum(entered)::bigint FROM {load} WHERE name = %s OR regexp_replace(name, '/[0-9]+$', '') = %s"
    entered: int | None = place.row(query, *names)[0]
    return entered


def abandon(place: Place, run: str) -> int:
    """Drop what a run has staged; how many tables that were. What it has entered stays."""
    return int(place.row(f"SELECT {place.name('stage_drop')}(%s)", run)[0])


def clean(place: Place, hours: float = 24) -> int:
    """Drop what dead loads have staged longer ago than that; how many tables that were."""
    dropped = 0
    query = f"SELECT n FROM {place.name('stage_clean')}(make_interval(secs => %s)) n WHERE n > 0"
    # So many at a time.
    while row := place.row(query, hours * 3600):
        dropped += row[0]
    return dropped


def _copy(place: Place, cursor: Any, table: str, batches: Iterable[pa.RecordBatch]) -> int:
    """Copy into a table within the caller's transaction; how many rows that were."""
    iterator = iter(batches)
    first = next(iterator, None)
    if first is None:
        return 0
    counted = _Counted(chain([first], iterator))
    with _explained(counted):
        reader = pa.RecordBatchReader.from_batches(first.schema, counted)
        cursor.adbc_ingest(table, reader, mode="append", db_schema_name=place.schema)
    return counted.rows


class _Counted:
    """Batches, counted on their way through ADBC, which would tell an error of theirs in its own words."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self.rows = 0
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        try:
            for batch in self._batches:
                self.rows += len(batch)
                yield batch
        except Exception as error:
            self.error = error
            raise


@contextmanager
def _explained(batches: _Counted | None = None) -> Iterator[None]:
    """An error of the database as one of ours; one of the batches as itself."""
    from adbc_driver_manager import Error

    try:
        yield
    except (Error, pa.ArrowException) as error:
        if batches is not None and batches.error is not None:
            raise batches.error from None
        raise LoadFailed(_said(error)) from error


def _compare(name: str | None, before: int, rows: int) -> None:
    """That what has been loaded before was the same, as far as can be told."""
    if before != rows:
        raise LoadFailed(
            f"{name} has been loaded before, with {before:,} rows, not {rows:,}; what was loaded then is in the queue,"
            " nothing was added: choose another name for other data"
        )


def _said(error: Exception) -> str:
    """What the database said, in one line, without what ADBC says around it, which may be the query."""
    text = " ".join(str(error).split())
    return re.sub(r"^[A-Z_]+: .*? ERROR: | Query was:.*| ?\. SQLSTATE: \w+$", "", text)
