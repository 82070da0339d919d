"""The tables of a report, in Parquet."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark import StorageLevel
from pyspark.sql import functions as sf

from fairqueue.errors import InvalidValue
from fairqueue.spark.paths import absolute, literal
from fairqueue.spark.schemas import REPORT

from . import figures, tenants
from .messages import lives
from .windows import Period, check_order, microseconds, moment, parse_window

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["EXACT_ROWS", "MOST_ROWS", "Report", "report"]

#: Above, percentiles are sketched. An exact one holds its group in memory, some 100 bytes a row: if all of them are of
#: one tenant and window, that is what a driver of 1 GB can take.
EXACT_ROWS = 2_000_000
#: Of tenants by window: some minutes more, and gigabytes of Parquet.
MOST_ROWS = 50_000_000


@dataclass(frozen=True, slots=True)
class Report:
    """What :func:`report` has made. The DataFrames read its Parquet folders, which are named as they are."""

    path: str
    since: datetime
    until: datetime
    window: timedelta
    #: Messages and further outcomes that were read.
    rows: int
    #: Whether percentiles are exact (interpolated), or from sketches (their ranks are right to 0.1 %).
    exact: bool
    #: Whether weights were given; otherwise all are 1.
    weighted: bool
    channel_windows: DataFrame = field(repr=False)
    queue_windows: DataFrame = field(repr=False)
    channels: DataFrame = field(repr=False)
    queues: DataFrame = field(repr=False)


def report(
    history: DataFrame,
    path: str | Path,
    *,
    live: DataFrame | None = None,
    weights: DataFrame | None = None,
    queue: str | None = None,
    window: str | timedelta = "1 hour",
    since: datetime | None = None,
    until: datetime | None = None,
    exact_rows: int = EXACT_ROWS,
) -> Report:
    """Compute the figures and write them as Parquet.

    :param history: with the columns of :data:`~fairqueue.spark.schemas.HISTORY`; others don't matter.
    :param path: a folder that the driver and the executors can write; an earlier report in it is replaced.
    :param live: with the columns of :data:`~fairqueue.spark.schemas.MESSAGES`: who still waits, or is in work. Without
        it those who wait until today are the ones that are missing.
    :param weights: ``queue``, ``channel``, ``weight``; where ``channel`` is null, of the queue's other channels. By
        default 1.
    :param queue: only this one.
    :param window: how long a window is; they are aligned to 1970 in UTC.
    :param since: with a time zone; None: from the first message on. History has to reach back to it.
    :param until: with a time zone, and not part of the period; None: up to the last thing that is known, with ``live``
        up to now. Later history is used too: it tells who waited.
    :param exact_rows: up to so many rows percentiles are exact.
    :raises InvalidValue: naming the parameter; nothing has been written.
    """
    length = microseconds(parse_window(window))
    check_order(since, until)
    start, end = moment("since", since), moment("until", until)
    path = absolute(str(path))
    _check_replaceable(Path(path))
    if start is not None:
        history = history.where(sf.col("finished_at") >= sf.timestamp_micros(sf.lit(start)))
    if end is not None:
        history = history.where(sf.col("created_at") < sf.timestamp_micros(sf.lit(end)))
    if queue is not None:
        history, live = history.where(sf.col("queue") == queue), live and live.where(sf.col("queue") == queue)
    parts = int(history.sparkSession.conf.get("spark.sql.shuffle.partitions") or 200)
    # On disk, so that memory is bounded whatever comes; by tenant, so that what follows needs hardly another shuffle.
    rows = lives(history, live, parts).persist(StorageLevel.DISK_ONLY)
    try:
        extent = _extent(rows, now=live is not None)
        period, known = extent.period(start, end, length)
        exact = extent.rows <= exact_rows
        written = _write(rows, path.rstrip("/"), weights, period, known, exact=exact)
    finally:
        rows.unpersist()
    return Report(
        path,
        period.time(period.start),
        period.time(period.end),
        timedelta(microseconds=length),
        extent.rows,
        exact,
        weights is not None,
        **written,
    )


def _check_replaceable(path: Path) -> None:
    """That what would be overwritten is a report's: its folders have names that others have, too."""
    for folder in (path / name for name in REPORT):
        if not folder.exists():
            continue
        # What a report leaves that was killed is under _temporary.
        found = {each.name for each in folder.iterdir()} - {"_temporary"} if folder.is_dir() else {folder.name}
        if found and "_SUCCESS" not in found:
            raise InvalidValue(
                f"path has something in {folder} that is not of a finished report, and would be lost: name another"
                " folder, or remove that"
            )


@dataclass(frozen=True, slots=True)
class _Extent:
    """How many rows there are, and from when to when; microseconds."""

    rows: int
    created: int | None
    finished: int | None
    latest: int

    def period(self, start: int | None, end: int | None, length: int) -> tuple[Period, int]:
        """The period, and from when on all is known: from where history is said to reach back to; else from the first
        outcome on, for older ones may have been dropped.
        """
        end = self.latest + 1 if end is None else end
        if start is not None:
            return Period(start, end, length), start
        start = min(end - 1 if self.created is None else self.created, end - 1)
        return Period(start, end, length), max(start, self.finished or start)


def _extent(rows: DataFrame, *, now: bool) -> _Extent:
    times = ("created", "started", "leased", "finished")
    found = rows.agg(
        sf.count(sf.lit(1)), sf.min("created"), sf.min("finished"), *(sf.max(name) for name in times)
    ).collect()[0]
    count, created, finished, *latest = found
    known = [each for each in latest if each is not None]
    if now or not known:
        known.append(moment("now", datetime.now(UTC)) or 0)
    return _Extent(count, created, finished, max(known))


def _write(
    rows: DataFrame, path: str, weights: DataFrame | None, period: Period, known: int, *, exact: bool
) -> dict[str, DataFrame]:
    quantiles = tenants.quantiles_of(exact=exact)
    written: dict[str, DataFrame] = {}

    def write(name: str, frame: DataFrame) -> DataFrame:
        frame.write.mode("overwrite").parquet(f"{path}/{name}")
        # Told its columns, which otherwise are looked for in the files, by a job.
        written[name] = rows.sparkSession.read.schema(frame.schema).parquet(literal(f"{path}/{name}"))
        return written[name]

    changes = tenants.carried(tenants.sums(rows, period, known, quantiles), period).persist(StorageLevel.DISK_ONLY)
    try:
        expected = tenants.row_count(changes)
        if expected > MOST_ROWS:
            raise InvalidValue(
                f"window must be longer than {timedelta(microseconds=period.length)}, or since and until closer: there"
                f" would be {expected:,} rows of a tenant and a window, and a report has at most {MOST_ROWS:,}"
            )
        by_channel = write(
            "channel_windows", figures.channel_windows(tenants.every_window(changes, period), weights, period)
        )
    finally:
        changes.unpersist()
    channels = write("channels", figures.channels(by_channel, rows, period, quantiles))
    by_queue = write("queue_windows", figures.queue_windows(by_channel, rows, period, quantiles, known))
    write("queues", figures.queues(channels, by_queue, rows, period, quantiles))
    return written
