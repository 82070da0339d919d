"""The figures of each tenant and window, from the rows of :mod:`.messages`.

A tenant has a row in a window in which it had something enqueued, started or finished, or waiting or in work: nobody
else is in it. So the rows grow with what happened, not with tenants times windows; only a tenant that waits, or works,
through many windows has a row in each of them, which is counted before they are made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as sf

from .messages import TENANT
from .waiting import waiting
from .windows import Period

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = [
    "COUNTS",
    "OUTCOMES",
    "QUANTILES",
    "SPREADS",
    "Quantiles",
    "carried",
    "every_window",
    "quantiles_of",
    "row_count",
    "sums",
]

OUTCOMES = {"served": "completed", "dead": "dead", "cancelled": "cancelled", "dropped": "dropped"}
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}

_SECOND = 1e6
#: Of a rank: p99 is a value between the true p98.9 and p99.1.
_ACCURACY = 1000

#: Makes an array of QUANTILES of a column.
Quantiles = Callable[["Column"], "Column"]

#: Of one window add up to those of many.
COUNTS = ("enqueued", "started", *OUTCOMES)
SPREADS = {name: (*(f"{name}_{short}" for short in QUANTILES), f"{name}_max") for name in ("wait", "service")}
_ONCE = (*SPREADS["wait"], *SPREADS["service"], "starved")
_SUMS = (*COUNTS, "cost_started", "grown", "cost_grown", "taken", "work")


def quantiles_of(*, exact: bool) -> Quantiles:
    """Exact percentiles are interpolated and keep all values of a group in memory; sketches hold some thousand."""
    at = list(QUANTILES.values())
    if exact:
        return lambda column: sf.percentile(column, at)
    return lambda column: sf.percentile_approx(column, at, _ACCURACY)


def waited(period: Period) -> Column:
    """How long a message waited that started in the period, in seconds."""
    return sf.when(period.has(sf.col("started")), (sf.col("started") - sf.col("due")) / _SECOND)


def worked(period: Period) -> Column:
    """How long was worked on what ended in the period, in seconds."""
    return sf.when(period.has(sf.col("ended")), (sf.col("ended") - sf.col("leased")) / _SECOND)


def spread(name: str, value: Column, quantiles: Quantiles) -> list[Column]:
    return [quantiles(value).alias(f"{name}_q"), sf.max(value).alias(f"{name}_max")]


def unfolded(frame: DataFrame, *names: str) -> DataFrame:
    """With a column for each quantile in place of the arrays of them."""
    kept: list[Column | str] = []
    for each in frame.columns:
        name = each.removesuffix("_q")
        if name in names and name != each:
            kept += [sf.col(each)[place].alias(f"{name}_{short}") for place, short in enumerate(QUANTILES)]
        else:
            kept.append(each)
    return frame.select(*kept)


def sums(rows: DataFrame, period: Period, known: int, quantiles: Quantiles) -> DataFrame:
    """What happened to a tenant in a window; all that was before the period is one window.

    :param known: of :func:`.waiting.waiting`.
    """

    def happened(column: str, *figures: Column) -> DataFrame:
        at = sf.col(column)
        return rows.where(at < period.end).groupBy(*TENANT, period.window(at).alias("w")).agg(*figures)

    def rest(column: str) -> Column:
        """Seconds from an event to the end of its window."""
        return (period.ends(period.window(sf.col(column))) - sf.col(column)) / _SECOND

    parts = [
        waiting(rows, period, known),
        happened("created", sf.count(sf.lit(1)).alias("enqueued")),
        happened("leased", sf.count(sf.lit(1)).alias("taken"), sf.sum(rest("leased")).alias("work")),
        happened(
            "finished",
            *(sf.count_if(sf.col("outcome") == known).alias(name) for name, known in OUTCOMES.items()),
            (-sf.count("ended")).alias("taken"),
            sf.sum(-rest("ended")).alias("work"),
            # What was worked on ended when it finished.
            *spread("service", worked(period), quantiles),
        ),
        happened("started", *spread("wait", waited(period), quantiles)),
    ]
    whole = reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), parts)
    whole = unfolded(whole, *SPREADS)
    return whole.groupBy(*TENANT, "w").agg(
        *(sf.max(name).alias(name) for name in _ONCE),
        *(sf.coalesce(sf.sum(name), sf.lit(0)).alias(name) for name in _SUMS),
    )


def carried(frame: DataFrame, period: Period) -> DataFrame:
    """With what stood at the end of each window, and until which window nothing changed."""
    in_order = Window.partitionBy(*TENANT).orderBy("w")
    so_far = in_order.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    backlog = sf.sum("grown").over(so_far)
    cost = sf.sum("cost_grown").over(so_far)
    last = sf.coalesce(sf.lead("w").over(in_order) - 1, sf.lit(period.last))
    in_flight = sf.sum("taken").over(so_far)
    return frame.withColumns(
        {
            "backlog": backlog,
            # Sums of fractions don't come to nothing by themselves.
            "cost_backlog": sf.when(backlog > 0, sf.greatest(cost, sf.lit(0.0))).otherwise(0.0),
            "in_flight": in_flight,
            "last": sf.when((backlog > 0) | (in_flight > 0), last).otherwise(sf.col("w")),
        }
    )


def row_count(frame: DataFrame) -> int:
    """How many rows :func:`every_window` will make."""
    (found,) = frame.agg(sf.sum(sf.col("last") - sf.col("w") + 1)).collect()
    return int(found[0] or 0)


def every_window(frame: DataFrame, period: Period) -> DataFrame:
    """The rows of :func:`carried`, and those of the windows in which nothing changed."""
    new = sf.col("v") == sf.col("w")
    length = (period.ends(sf.col("v")) - period.begins(sf.col("v"))) / _SECOND
    here_before = sf.col("in_flight") - sf.when(new, sf.col("taken")).otherwise(0)
    busy = here_before * length + sf.when(new, sf.col("work")).otherwise(0.0)
    return (
        frame.withColumn("v", sf.explode(sf.sequence("w", "last")))
        .where(sf.col("v") >= period.first)
        .select(
            *TENANT,
            sf.col("v").alias("w"),
            "backlog",
            "cost_backlog",
            "in_flight",
            sf.greatest(busy, sf.lit(0.0)).alias("busy"),
            *(sf.when(new, sf.col(name)).alias(name) for name in _ONCE),
            *(sf.when(new, sf.col(name)).otherwise(0).alias(name) for name in (*COUNTS, "cost_started")),
        )
    )
