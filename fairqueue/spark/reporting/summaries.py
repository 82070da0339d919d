"""The few figures of a report that a page and a terminal show: small, whatever the size of the report."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pyspark.sql import Window
from pyspark.sql import functions as sf

from .tables import Report

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["QueueSummary", "Summary", "summary"]

#: Queues that are shown, and windows that a picture has room for.
QUEUES, WINDOWS = 4, 1_000
#: Ranks that are this near on a logarithmic scale are one point of a picture.
_PER_DECADE = 12

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class QueueSummary:
    """One queue. A row has the columns of the report's tables."""

    total: Row
    #: The channels that had most, and those that were longest left waiting.
    largest: list[Row]
    starved: list[Row]
    #: By time, the last ones.
    windows: list[Row]
    #: The windows of the channel that had most, and of one that had little but was there for long.
    noisiest: list[Row]
    quietest: list[Row]
    #: Channels of about a size: the first one's ``rank``, and ``low``, ``middle`` and ``high`` p95 of their waits.
    ranks: list[Row]


@dataclass(frozen=True, slots=True)
class Summary:
    report: Report
    #: Those with most messages.
    queues: list[QueueSummary]
    queue_count: int


def summary(report: Report, top: int = 10) -> Summary:
    """Collect them.

    :param top: so many channels of each queue.
    """
    found = report.queues.orderBy(sf.desc(sf.col("enqueued") + sf.col("started")), "queue")
    return Summary(report, [_queue(report, total, top) for total in _rows(found.limit(QUEUES))], report.queues.count())


def _queue(report: Report, total: Row, top: int) -> QueueSummary:
    def mine(frame: DataFrame) -> DataFrame:
        return frame.where(sf.col("queue") == total["queue"])

    channels, by_channel = mine(report.channels), mine(report.channel_windows)
    largest = channels.orderBy(sf.desc("cost_started"), sf.desc("enqueued"), "channel")
    starved = channels.where(sf.col("starved") > 0).orderBy(sf.desc("starved"), "channel")
    shown = _rows(largest.limit(max(top, 1)))
    noisiest = str(shown[0]["channel"])
    return QueueSummary(
        total,
        shown[:top],
        _rows(starved.limit(top)),
        _last(mine(report.queue_windows)),
        _last(by_channel.where(sf.col("channel") == sf.lit(noisiest))),
        _last(by_channel.where(sf.col("channel") == sf.lit(_quiet(by_channel, noisiest)))),
        _ranks(channels),
    )


def _quiet(by_channel: DataFrame, noisiest: str) -> str | None:
    """Of the half that was served in most windows, who had least: there is something to be drawn of it."""
    served = by_channel.where((sf.col("started") > 0) & (sf.col("channel") != sf.lit(noisiest))).groupBy("channel")
    sizes = served.agg(sf.count(sf.lit(1)).alias("windows"), sf.sum("cost_started").alias("size"))
    middle = sf.median("windows").over(Window.partitionBy())
    found = sizes.withColumn("middle", middle).where(sf.col("windows") >= sf.col("middle"))
    rows = found.orderBy("size", "channel").limit(1).collect()
    return rows[0]["channel"] if rows else None


def _ranks(channels: DataFrame) -> list[Row]:
    size = Window.orderBy(sf.desc("cost_started"), "channel")
    wait: Column = sf.col("wait_p95")
    ranked = channels.where(wait.isNotNull()).select(sf.row_number().over(size).alias("rank"), wait)
    return _rows(
        ranked.groupBy(sf.floor(sf.log10("rank") * _PER_DECADE))
        .agg(
            sf.min("rank").alias("rank"),
            sf.min(wait).alias("low"),
            sf.median(wait).alias("middle"),
            sf.max(wait).alias("high"),
        )
        .orderBy("rank")
        .select("rank", "low", "middle", "high")
    )


def _last(frame: DataFrame) -> list[Row]:
    return _rows(frame.orderBy(sf.desc("window")).limit(WINDOWS))[::-1]


def _rows(frame: DataFrame) -> list[Row]:
    """With their times in UTC: Spark hands them over as those of this process, and doesn't say so."""
    return [
        {name: value.astimezone(UTC) if isinstance(value, datetime) else value for name, value in row.asDict().items()}
        for row in frame.collect()
    ]
