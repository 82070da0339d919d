"""Many scenarios at once, each in a Spark task of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from fairqueue.errors import InvalidValue

from .results import COLUMNS, run
from .scenarios import Scenario

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["simulate"]

_COLUMNS = {"scenario": "bigint"} | COLUMNS


def simulate(spark: SparkSession, scenarios: Sequence[Scenario]) -> DataFrame:
    """The rows of :func:`~fairqueue.spark.simulation.run` for each scenario, in no order; ``scenario`` is its place.

    ::

        from fairqueue.spark import local_session
        from fairqueue.spark.simulation import grid, simulate

        scenarios = grid(tenants=[100, 1_000], scheduler=["arrival", "fair"], load=1.1, messages=5_000)
        with local_session() as spark:
            simulate(spark, scenarios).where("group = 'quiet'").show()

    It is lazy like any DataFrame: who uses it twice simulates twice. So collect it, or write it, first.

    :raises InvalidValue: if there are no scenarios.
    """
    if not scenarios:
        raise InvalidValue("scenarios must be at least one, not none")
    # Tasks begin in the order of their partitions; a long one that came last would be waited for by all.
    ordered = sorted(
        enumerate(scenarios), key=lambda each: (each[1].arrivals is not None, each[1].messages), reverse=True
    )

    def simulate_each(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        for batch in batches:
            for task in batch.column(0).to_pylist():
                place, scenario = ordered[task]
                rows = [{"scenario": place} | row for row in run(scenario)]
                yield pa.RecordBatch.from_pylist(rows, schema=pa.schema(columns))

    columns = [(name, _arrow_type(type_)) for name, type_ in _COLUMNS.items()]
    ddl = ", ".join(f"`{name}` {type_}" for name, type_ in _COLUMNS.items())
    # A range of n in n partitions has one in each, which repartition() doesn't promise.
    return spark.range(0, len(ordered), 1, len(ordered)).mapInArrow(simulate_each, ddl)


def _arrow_type(name: str) -> pa.DataType:
    import pyarrow as pa

    types = {"string": pa.string(), "bigint": pa.int64(), "double": pa.float64()}
    return types[name] if name in types else pa.list_(pa.float64())
