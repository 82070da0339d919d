"""What waited and what was started, by tenant and window, and how long the tenant was left waiting.

A tenant is *starved* while it has a waiting message and none of its messages is started. All comings and goings of a
tenant are gone through once, in their order. An interval begins when a message comes to where none waits, or when one
is started and others are left; it ends when one is started, when the last one that waits is gone without (cancelled),
or with the report. It counts in the window in which it ends.

This is one sort and two running frames: O(n log n), and memory for some thousand rows. Where no waiting message is ever
cancelled, the oldest one that waits, taken from the end on, would do with half the rows; here it would be wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as sf

from .messages import TENANT
from .windows import Period

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["waiting"]

_COMES, _STARTS, _GOES = 0, 1, 2  # and in this order at the same time


def waiting(rows: DataFrame, period: Period, known: int) -> DataFrame:
    """By tenant and window ``w``: ``started`` and its cost, what the backlog grew by and its cost, and ``starved``.

    :param rows: of :func:`.messages.lives`.
    :param known: microseconds. Before that, messages may have been started that the rows don't tell of; so nobody is
        taken to have been starved.
    """
    due, left, end = sf.col("due"), sf.col("left"), sf.lit(period.end)
    leaves = sf.when(sf.col("started") < end, _STARTS).otherwise(_GOES)
    comes_and_leaves = sf.array(
        sf.struct(due.alias("t"), sf.lit(_COMES).alias("kind")),
        sf.struct(sf.least(left, end).alias("t"), leaves.alias("kind")),
    )
    events = rows.where(due < end).select(*TENANT, "cost", sf.inline(comes_and_leaves))

    t, kind, cost, others = sf.col("t"), sf.col("kind"), sf.col("cost"), sf.col("others")
    order = Window.partitionBy(*TENANT).orderBy("t", "kind")
    so_far = order.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    before = order.rowsBetween(Window.unboundedPreceding, -1)
    change = sf.when(kind == _COMES, 1).otherwise(-1)
    begins = sf.when((kind == _STARTS) | (kind == _COMES) & (others == 1), t)
    ends = (kind == _STARTS) | (kind == _GOES) & (others == 0)
    starved = (t - sf.greatest(sf.col("from"), sf.lit(known))) / 1e6
    # What is still there at the end has not gone.
    grown = sf.when(t < end, change).otherwise(0)
    return (
        events.withColumn("others", sf.sum(change).over(so_far))
        .withColumn("from", sf.last(begins, ignorenulls=True).over(before))
        .groupBy(*TENANT, period.window(sf.least(t, end - 1)).alias("w"))
        .agg(
            sf.count_if(kind == _STARTS).alias("started"),
            sf.sum(sf.when(kind == _STARTS, cost).otherwise(0.0)).alias("cost_started"),
            sf.sum(grown).alias("grown"),
            sf.sum(grown * cost).alias("cost_grown"),
            sf.max(sf.when(ends & (starved > 0), starved)).alias("starved"),
        )
    )
