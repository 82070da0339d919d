"""Batches of Spark's as the other side takes them: what it says of their columns is not always so, or known elsewhere.

A struct that is null has fields that are, though Spark calls those of ``struct(id)`` NOT NULL, and what Arrow writes is
refused for it. Times come in the time zone of the session, which may be one that Python doesn't know, such as GMT+8.
"""

from __future__ import annotations

import pyarrow as pa
from pyarrow import types

__all__ = ["lenient"]


def lenient(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The same with fields that may be null, and times in UTC."""
    kinds = [_lenient(column.type) for column in batch.columns]
    pairs = zip(batch.columns, kinds, strict=True)
    columns = [column if column.type == kind else column.cast(kind) for column, kind in pairs]
    return pa.RecordBatch.from_arrays(columns, batch.schema.names)


def _lenient(kind: pa.DataType) -> pa.DataType:
    if types.is_struct(kind):
        return pa.struct([pa.field(field.name, _lenient(field.type)) for field in kind])
    if types.is_map(kind):
        return pa.map_(_lenient(kind.key_type), _lenient(kind.item_type))
    if types.is_list(kind):
        return pa.list_(_lenient(kind.value_type))
    if types.is_large_list(kind):
        return pa.large_list(_lenient(kind.value_type))
    if types.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp(kind.unit, "UTC")
    return kind
