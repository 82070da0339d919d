"""One row a message, or an outcome more of it: when it waited, when it was worked on, how it ended.

What history does not say is taken as follows.

* A message begins to wait at the later of ``created_at`` and ``dequeue_at``. A retry writes a new ``dequeue_at``; so
  one after the first lease says nothing about the first wait, which then is taken to have begun at ``created_at``.
* A message that was put back from the dead has an outcome for each of its lives. Its first row counts as the message,
  with its wait; the later ones count as outcomes alone.
* Only of the last lease is it known when it ended, and only if the message was completed or died with it: work is from
  ``leased_at`` to ``finished_at`` of such outcomes, and from ``leased_at`` on where a live message is leased.
* Where clocks have been set back, nothing is shorter than nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as sf

from fairqueue.errors import InvalidValue

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["TENANT", "lives"]

TENANT = ("queue", "channel")
#: The year 9999: a message may be scheduled for later than timestamps can hold.
_LAST_MS = 253_402_300_799_000


def lives(history: DataFrame, live: DataFrame | None, parts: int) -> DataFrame:
    """The messages, by tenant in ``parts`` partitions; times are microseconds.

    ====================  ============================================================================
    created, due          when it came, and began to wait; null in the second life of a message
    started               its first lease; null: none so far
    left                  when it stopped waiting: was leased, or ended without; null: it waits
    leased, ended         the work on it; null ``ended``: it goes on
    outcome, finished     how and when it ended; null: it is live
    ====================  ============================================================================

    :raises InvalidValue: if a column is missing.
    """
    _check("history", history, "message_id", "outcome", "finished_at")
    rows = history.select(
        *TENANT,
        sf.col("message_id").alias("id"),
        "outcome",
        "cost",
        *_times(sf.col("leased_at"), sf.col("finished_at")),
    )
    if live is not None:
        _check("live", live, "id", "leased_until")
        leased_at = sf.when(sf.col("leased_until").isNotNull(), sf.col("leased_at"))
        outcome, nothing = sf.lit(None).cast("string").alias("outcome"), sf.lit(None).cast("timestamp_ltz")
        rows = rows.unionByName(live.select(*TENANT, "id", outcome, "cost", *_times(leased_at, nothing)))
    outcomes = Window.partitionBy("id", "channel", "queue").orderBy(sf.col("finished").asc_nulls_last())
    rows = rows.repartition(parts, *TENANT).withColumn("first", sf.row_number().over(outcomes) == 1)

    created, scheduled, started, due = sf.col("created"), sf.col("scheduled"), sf.col("started"), sf.col("due")
    leased, finished = sf.col("leased"), sf.col("finished")
    left = sf.coalesce(started, finished)
    first = sf.col("first")
    worked = leased.isNotNull() & (sf.col("outcome").isNull() | sf.col("outcome").isin("completed", "dead"))
    return rows.withColumn(
        "due", sf.when(scheduled > started, created).otherwise(sf.greatest(created, scheduled))
    ).select(
        *TENANT,
        "cost",
        "outcome",
        "finished",
        sf.when(first, created).alias("created"),
        sf.when(first, due).alias("due"),
        # greatest and least pass over nulls, which would make a lease of none.
        sf.when(first & started.isNotNull(), sf.greatest(started, due)).alias("started"),
        sf.when(first & left.isNotNull(), sf.greatest(left, due)).alias("left"),
        sf.when(worked, sf.least(leased, finished)).alias("leased"),
        sf.when(worked, finished).alias("ended"),
    )


def _check(name: str, frame: DataFrame, *columns: str) -> None:
    wanted = (*columns, *TENANT, "cost", "dequeue_at", "created_at", "first_leased_at", "leased_at")
    if missing := [column for column in wanted if column not in frame.columns]:
        raise InvalidValue(f"{name} must have the columns {', '.join(wanted)}; it lacks {', '.join(missing)}")


def _times(leased_at: Column, finished_at: Column) -> list[Column]:
    scheduled = sf.least(sf.greatest(sf.col("dequeue_at"), sf.lit(0)), sf.lit(_LAST_MS)) * 1000
    started = sf.coalesce(sf.col("first_leased_at"), leased_at)
    times = {"created": sf.col("created_at"), "started": started, "leased": leased_at, "finished": finished_at}
    return [scheduled.alias("scheduled"), *(sf.unix_micros(time).alias(name) for name, time in times.items())]
