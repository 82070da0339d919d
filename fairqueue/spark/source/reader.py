"""``spark.read.format("fairqueue")``: live messages, or the history, as they are.

::

    frame = spark.read.format("fairqueue").options(url="postgresql://reader@db/app", since="2026-11-01").load()

============== =====================================================================================================
option         meaning
============== =====================================================================================================
``table``      ``history`` (unless said) or ``messages``
``queue``      only of this one
``channels``   only of these channels: ``acme,globex``, or a JSON list for names with a comma
``since``      from this time on, by ``finished_at`` of history, ``created_at`` of messages; ISO 8601, UTC unless said
``until``      up to this time, exclusive
``columns``    only these, with commas between; or say ``.schema(...)``
``partitions`` how many; about one for 64 MB, and one a core, unless said
``snapshot``   of :func:`fairqueue.spark.snapshot`: read as of then
============== =====================================================================================================

Filters of a DataFrame don't reach the database: these options do. Without a snapshot, history is read as of the oldest
transaction that is open when Spark plans the query, and messages in one partition.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

from pyspark.sql.datasource import DataSourceReader, InputPartition

from fairqueue.errors import InvalidValue
from fairqueue.spark.engine.reading import Part, Selection, TableName, columns_of, plan, read

from .options import Options

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

__all__ = ["Partition", "TableReader", "arrow_schema_of", "named", "schema_of"]

_KNOWN = {"table", "queue", "channels", "since", "until", "columns", "partitions", "snapshot"}


@dataclass
class Partition(InputPartition):
    """A part, as Spark hands it on."""

    part: Any


class TableReader(DataSourceReader):
    """Filters are not pushed: up to Spark 4.3.0, two plans that share a DataFrame would share what was pushed."""

    def __init__(self, given: Mapping[str, str], schema: StructType) -> None:
        options = Options(given, _KNOWN)
        self._place = options.place
        self._snapshot = options.text("snapshot")
        self._parts = options.number("partitions", None)
        self._schema = schema
        channels = options.text("channels")
        self._selection = Selection(
            _table(options),
            columns=named(schema, _table(options)),
            queue=options.text("queue"),
            channels=None if channels is None else _names(channels),
            since=_time(options, "since"),
            until=_time(options, "until"),
        )

    def partitions(self) -> list[Partition]:
        return [
            Partition(part) for part in plan(self._place, self._selection, parts=self._parts, snapshot=self._snapshot)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Spark makes a partition of its own where there is none.
        part = partition.part if isinstance(partition, Partition) else Part(())
        return read(self._place, self._selection, part, arrow_schema_of(self._schema))


def schema_of(given: Mapping[str, str]) -> str:
    """The columns that the options ask for, as Spark's DDL. Other options than these are looked at by who reads."""
    options = Options(given, {name.lower() for name in given})
    table = _table(options)
    known = columns_of(table)
    columns = options.text("columns")
    selection = Selection(table, columns=() if columns is None else _names(columns))
    return ", ".join(f"{name} {known[name]}" for name in selection.columns)


def named(schema: StructType, table: TableName) -> tuple[str, ...]:
    """The columns of a schema that the user may have made up."""
    known = columns_of(table)
    for field in schema.fields:
        kind = field.dataType.simpleString()
        kind = "timestamp_ltz" if kind == "timestamp" else kind  # whose name in DDL may mean the other one
        if kind != known.get(field.name, kind):
            raise InvalidValue(f"column {field.name} of {table} is a {known[field.name]}, not a {kind}")
    return tuple(schema.fieldNames())


def arrow_schema_of(schema: StructType) -> pa.Schema:
    """Exactly what Spark checks for."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema, timezone="UTC")


def _table(options: Options) -> TableName:
    return cast("TableName", options.choice("table", ("history", "messages")))


def _names(value: str) -> tuple[str, ...]:
    """From ``a,b`` or ``["a", "b"]``."""
    if not value.startswith("["):
        return tuple(name.strip() for name in value.split(","))
    try:
        names = json.loads(value)
    except json.JSONDecodeError as error:
        raise InvalidValue(f"names must be a,b or a JSON list, not {value!r}: {error}") from None
    if not all(isinstance(name, str) for name in names):
        raise InvalidValue(f"names must be strings, not {value!r}")
    return tuple(names)


def _time(options: Options, name: str) -> datetime | None:
    value = options.text(name)
    if value is None:
        return None
    try:
        time = datetime.fromisoformat(value)
    except ValueError:
        raise InvalidValue(
            f"option {name} must be a time in ISO 8601, as 2026-11-01T12:00:00Z, not {value!r}"
        ) from None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)
