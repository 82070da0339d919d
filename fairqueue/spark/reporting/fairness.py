"""What each tenant was entitled to in a window, and Jain's index of what it had of that.

A queue can give in a window what it did give: the cost of the messages that were started. What is fair of it is the
max-min share by weight (Bertsekas and Gallager, Data Networks, 1992, 6.5.2): nobody gets more than it has demand for,
and nobody who gets less could get more but from somebody who has no more by weight. Demand is what was started and what
is left waiting at the end of the window. So an idle queue is fair, whoever uses it; the plain index over counts calls a
queue unfair for tenants that differ in what they ask for.

With demands d and weights w, in falling order of d / w, somebody is entitled to min(d, w level), where ::

    level = max over k of (d_1 + ... + d_k - what was left waiting) / (w_1 + ... + w_k)

since what was left waiting is what the hungriest have to do without: the quotient rises with k while the next one still
asks for more than it, and falls from there on.

Jain's index (Jain, Chiu and Hawe, DEC-TR-301, 1984) is (sum x)^2 / (n sum x^2) with x = started / entitled: 1 is fair,
1/n is all for one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as sf

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["jain", "with_entitlement"]


def with_entitlement(frame: DataFrame, *group: str) -> DataFrame:
    """With the ``level`` of the group, and the cost that each row is ``entitled`` to.

    :param frame: ``cost_started``, ``cost_backlog`` and ``weight`` by row.
    """
    everyone = Window.partitionBy(*group)
    demand, weight = sf.col("demand"), sf.col("weight")
    hungriest = everyone.orderBy((demand / weight).desc()).rowsBetween(Window.unboundedPreceding, Window.currentRow)
    level = (sf.sum(demand).over(hungriest) - sf.col("missing")) / sf.sum(weight).over(hungriest)
    highest = sf.greatest(sf.max("level").over(everyone), sf.lit(0.0))
    return (
        frame.withColumn("demand", sf.col("cost_started") + sf.col("cost_backlog"))
        .withColumn("missing", sf.sum("cost_backlog").over(everyone))
        .withColumn("level", level)
        # By sums of fractions it would be next to nothing.
        .withColumn("level", sf.when(sf.sum("cost_started").over(everyone) > 0, highest).otherwise(0.0))
        .withColumn("entitled", sf.least(demand, weight * sf.col("level")))
        .drop("demand", "missing")
    )


def jain(had: Column) -> Column:
    """Jain's index of the values that are not null; null without any."""
    return sf.sum(had) ** 2 / (sf.count(had) * sf.sum(had * had))
