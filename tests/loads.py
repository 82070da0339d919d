"""What the tests of loading need: parts, and what must hold of a load however it went."""

import random
from collections.abc import Iterable, Mapping
from typing import Any

import psycopg
import pyarrow as pa

from fairqueue.spark.engine.columns import Columns
from tests.observing import value

#: Of all columns that a test here gives; the others are as they come.
_KINDS = {
    "queue": pa.string(),
    "channel": pa.string(),
    "key": pa.string(),
    "payload": pa.string(),
    "body": pa.binary(),
    "dequeue_at": pa.int64(),
    "delay": pa.float64(),
    "priority": pa.int64(),
    "cost": pa.float64(),
    "max_attempts": pa.int32(),
    "backoff": pa.float64(),
}


def batch(*rows: Mapping[str, Any]) -> pa.RecordBatch:
    """Rows as tasks get them, of the channel acme unless they say."""
    used = {"channel", *(name for row in rows for name in row)}
    schema = pa.schema({name: kind for name, kind in _KINDS.items() if name in used})
    return pa.RecordBatch.from_pylist([{"channel": "acme", **row} for row in rows], schema)


def staged(*rows: Mapping[str, Any]) -> list[pa.RecordBatch]:
    """The same as staging tables take them, a batch a row."""
    batches = (batch(row) if len(rows) == 1 else batch(*rows).slice(place, 1) for place, row in enumerate(rows))
    return [Columns(each.schema).staged(each) for each in batches]


def keyed(*keys: str) -> list[pa.RecordBatch]:
    return staged(*({"key": key, "payload": f'"{key}"'} for key in keys))


def numbered(numbers: Iterable[int], **fields: Any) -> list[pa.RecordBatch]:
    return staged(*({"payload": str(number), **fields} for number in numbers))


def stages(watching: psycopg.Connection[Any], schema: str = "fairqueue") -> int:
    """How many staging tables there are; each of them is noted."""
    found = watching.execute(
        "SELECT relname FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace"
        " WHERE nspname = %s AND relname LIKE 'stage\\_%%' AND relkind = 'r'",
        (schema,),
    ).fetchall()
    noted = watching.execute(f'SELECT name FROM "{schema}".stage'.encode()).fetchall()
    assert sorted(found) == sorted(noted)
    return len(found)


def once_each(watching: psycopg.Connection[Any], expected: Iterable[Any], of: str = "key") -> None:
    """Each of the expected messages is there once, and nothing else."""
    query = f"SELECT array_agg({of} ORDER BY {of}) FROM fairqueue.message"
    assert value(watching, query) == (sorted(expected) or None)


def direct(now: int, *rows: Mapping[str, Any]) -> list[pa.RecordBatch]:
    """The same as the table of messages takes them."""
    return [Columns(batch(*rows).schema).direct(each, now) for each in staged(*rows)]


def bodies(rows: int, size: int) -> pa.RecordBatch:
    """Large rows in the order of their keys."""
    made = {
        "queue": ["default"] * rows,
        "channel": ["acme"] * rows,
        "key": [f"{number:09}" for number in range(rows)],
        "body": [random.randbytes(size) for _ in range(rows)],  # noqa: S311
    }
    return pa.RecordBatch.from_pydict(made)
