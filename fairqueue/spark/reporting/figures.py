"""From rows of messages to the tables of a report: channels and queues, by window and over all of the period.

Times are seconds, costs in the units of messages. A channel has a row in a window in which something of its was
enqueued, waiting, started, in work or ended; what is not in a table was nothing.

=================================== ==================================================================================
window                              when it begins; the first and the last one may be shorter than the others
enqueued                            messages that were made
started                             messages that were leased for the first time
served, dead, cancelled, dropped    outcomes: completed, and as they are called
backlog, in_flight                  messages that waited, or were in work, when the window ended
wait_p50, p95, p99, max             of what was started: from when it was due to its first lease
service_p50, p95, p99, max          of what was completed or died: from its last lease
wait_n, service_n                   of how many these are
starved                             the longest interval of waiting without a start that ended in the window
busy                                time worked: of two messages at a time, twice as long
cost_started, share                 what of the queue was the channel's, in cost
entitled, entitled_share, level     what of it should have been, and to which cost by weight all are entitled
noisy                               over 10 % of what is in flight and at least 30, or over 10 % of the time worked
jain                                Jain's index of ``cost_started`` over ``entitled``
worst_ratio, low_ratio              what the worst channel, and nine in ten at least, had of what they were entitled to
coarse                              shares were less than a message: who had one says nothing
=================================== ==================================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as sf

from . import tenants
from .fairness import jain, with_entitlement
from .messages import TENANT
from .tenants import COUNTS, SPREADS, Quantiles
from .windows import Period

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["channel_windows", "channels", "queue_windows", "queues"]

#: A neighbour is noisy that has so much of the work, and in flight at least so many.
NOISY_SHARE, NOISY_IN_FLIGHT = 0.1, 30


def channel_windows(grid: DataFrame, weights: DataFrame | None, period: Period) -> DataFrame:
    """A row a tenant and window, of :func:`.tenants.every_window`."""
    everyone = Window.partitionBy("queue", "w")

    def part(column: str) -> Column:
        """Of the queue's whole; null where that is nothing."""
        whole = sf.sum(column).over(everyone)
        return sf.when(whole > 0, sf.col(column) / whole)

    frame = with_entitlement(_weighted(grid, weights), "queue", "w")
    noisy = (sf.col("in_flight") >= NOISY_IN_FLIGHT) & (part("in_flight") > NOISY_SHARE) | (part("busy") > NOISY_SHARE)
    return frame.select(
        *TENANT,
        sf.timestamp_micros(period.begins(sf.col("w"))).alias("window"),
        *COUNTS,
        "backlog",
        "in_flight",
        *SPREADS["wait"],
        *SPREADS["service"],
        "starved",
        "busy",
        "weight",
        "cost_started",
        "cost_backlog",
        "entitled",
        "level",
        part("cost_started").alias("share"),
        part("entitled").alias("entitled_share"),
        sf.coalesce(noisy, sf.lit(False)).alias("noisy"),
    )


def queue_windows(
    by_channel: DataFrame, rows: DataFrame, period: Period, quantiles: Quantiles, known: int
) -> DataFrame:
    """A row a queue and window.

    :param by_channel: of :func:`channel_windows`.
    :param known: microseconds; windows that end before have no index, since not all is known of them.
    """
    ratio = sf.col("cost_started") / sf.when(sf.col("entitled") > 0, sf.col("entitled"))
    # The first one begins with the period, and may be shorter.
    begin = sf.unix_micros("window")
    complete = begin - sf.pmod(begin, sf.lit(period.length)) + period.length > known
    had = sf.when(complete, ratio)
    figures = (
        by_channel.withColumn("had", had)
        .groupBy("queue", "window")
        .agg(
            sf.count(sf.lit(1)).alias("channels"),
            sf.count_if(sf.col("backlog") > 0).alias("waiting_channels"),
            sf.count_if("noisy").alias("noisy_channels"),
            *(sf.sum(name).alias(name) for name in (*COUNTS, "backlog", "in_flight", "busy", "cost_started")),
            sf.max("starved").alias("starved"),
            sf.max("level").alias("level"),
            sf.coalesce(sf.min(sf.when(sf.col("backlog") > 0, sf.col("weight"))), sf.min("weight")).alias("lightest"),
            jain(sf.col("had")).alias("jain"),
            sf.percentile_approx("had", 0.1).alias("low_ratio"),
            # Of those with the same, who was entitled to most.
            sf.min_by(
                sf.struct("channel", "had", "entitled"),
                sf.when(sf.col("had").isNotNull(), sf.struct("had", -sf.col("entitled"))),
            ).alias("worst"),
        )
    )
    # Where a share is less than a message, who had one and who had none is no question of fairness.
    coarse = sf.col("lightest") * sf.col("level") * sf.col("started") < sf.col("cost_started")
    worst = {"worst_channel": "channel", "worst_ratio": "had", "worst_entitled": "entitled"}
    return (
        figures.withColumns({name: sf.col(f"worst.{short}") for name, short in worst.items()})
        .withColumn("coarse", sf.coalesce(coarse, sf.lit(False)))
        .drop("worst", "lightest")
        .join(_spread_by_window(rows, "wait", period, quantiles), ["queue", "window"], "left")
        .join(_spread_by_window(rows, "service", period, quantiles), ["queue", "window"], "left")
    )


def channels(by_channel: DataFrame, rows: DataFrame, period: Period, quantiles: Quantiles) -> DataFrame:
    """A row a tenant: all of the period."""
    last = sf.timestamp_micros(period.begins(sf.lit(period.last)))
    figures = by_channel.groupBy(*TENANT).agg(
        *(sf.sum(name).alias(name) for name in COUNTS),
        sf.sum(sf.when(sf.col("window") == last, sf.col("backlog")).otherwise(0)).alias("backlog"),
        sf.max("starved").alias("starved"),
        sf.sum("busy").alias("busy"),
        sf.max("weight").alias("weight"),
        sf.sum("cost_started").alias("cost_started"),
        sf.sum("entitled").alias("entitled"),
        sf.count_if("noisy").alias("noisy_windows"),
    )
    everyone = Window.partitionBy("queue")
    shares = {}
    for share, column in (("share", "cost_started"), ("entitled_share", "entitled")):
        whole = sf.sum(column).over(everyone)
        shares[share] = sf.when(whole > 0, sf.col(column) / whole)
    return figures.withColumns(shares).join(_spreads(rows, TENANT, period, quantiles), [*TENANT], "left")


def queues(
    by_channel: DataFrame, by_window: DataFrame, rows: DataFrame, period: Period, quantiles: Quantiles
) -> DataFrame:
    """A row a queue: all of the period.

    :param by_channel: of :func:`channels`.
    :param by_window: of :func:`queue_windows`.
    """
    figures = by_channel.groupBy("queue").agg(
        sf.count(sf.lit(1)).alias("channels"),
        sf.count_if(sf.col("noisy_windows") > 0).alias("noisy_channels"),
        *(sf.sum(name).alias(name) for name in (*COUNTS, "backlog", "busy", "cost_started")),
        sf.max("starved").alias("starved"),
        sf.max_by("channel", "starved").alias("starved_channel"),
    )
    told = sf.when(~sf.col("coarse"), sf.col("jain"))
    indexes = by_window.groupBy("queue").agg(
        sf.count("jain").alias("windows"),
        sf.count_if("coarse").alias("coarse_windows"),
        sf.median(told).alias("jain_median"),
        sf.min(told).alias("jain_worst"),
        sf.min_by("window", told).alias("jain_worst_window"),
    )
    return figures.join(indexes, "queue", "left").join(_spreads(rows, ("queue",), period, quantiles), "queue", "left")


def _spreads(rows: DataFrame, group: tuple[str, ...], period: Period, quantiles: Quantiles) -> DataFrame:
    """Waits and service over all of the period."""
    values = {"wait": tenants.waited(period), "service": tenants.worked(period)}
    found = rows.groupBy(*group).agg(
        *(sf.count(value).alias(f"{name}_n") for name, value in values.items()),
        *(column for name, value in values.items() for column in tenants.spread(name, value, quantiles)),
    )
    return tenants.unfolded(found, *values)


def _spread_by_window(rows: DataFrame, name: str, period: Period, quantiles: Quantiles) -> DataFrame:
    at, value = {"wait": ("started", tenants.waited), "service": ("ended", tenants.worked)}[name]
    some = rows.where(period.has(sf.col(at)))
    window = sf.timestamp_micros(period.begins(period.window(sf.col(at)))).alias("window")
    figures = tenants.spread(name, value(period), quantiles)
    return tenants.unfolded(some.groupBy("queue", window).agg(sf.count(at).alias(f"{name}_n"), *figures), name)


def _weighted(grid: DataFrame, weights: DataFrame | None) -> DataFrame:
    """With the ``weight`` of each tenant: its own, or that of its queue, or 1."""
    if weights is None:
        return grid.withColumn("weight", sf.lit(1.0))
    own = weights.where(sf.col("channel").isNotNull()).select(*TENANT, sf.col("weight").alias("own"))
    default = weights.where(sf.col("channel").isNull()).select("queue", sf.col("weight").alias("default"))
    frame = grid.join(own, [*TENANT], "left").join(sf.broadcast(default), "queue", "left")
    return frame.withColumn("weight", sf.coalesce("own", "default", sf.lit(1.0))).drop("own", "default")
