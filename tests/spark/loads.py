"""What the tests of loading need: parts, and what must hold of a load however it went."""

import json
import random
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import psycopg
import pyarrow as pa

from fairqueue.spark.engine.columns import Columns
from fairqueue.spark.engine.loading import Part
from tests.acts import wait_until
from tests.fixtures.connections import Raw
from tests.observing import observer, value

#: A name for a load.
JOB = "job/2026-11-21"
WAITING = """
    SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND wait_event_type = 'Lock' AND application_name = 'fairqueue'"""
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


def document(staged: dict[str, Any]) -> Any:
    """A payload as it was sent: the version of jsonb, and the text."""
    assert staged["payload"][:1] == b"\x01"
    return json.loads(staged["payload"][1:])


class Others:
    """Connections and threads beside the test's own."""

    def __init__(self, raw: Raw, url: str) -> None:
        self.raw, self.url, self.pool = raw, url, ThreadPoolExecutor(4)
        self.watching = observer(raw, url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown()

    def connect(self) -> psycopg.Connection[Any]:
        return self.raw(self.url)

    def entering(self, run: str, parts: list[Part], name: str | None = None) -> psycopg.Connection[Any]:
        """A driver that has entered a load, and has not committed yet."""
        driver = self.connect()
        tables, counts = [part.table for part in parts], [part.rows for part in parts]
        driver.execute("SELECT fairqueue.load_enter(%s, %s, %s, %s)", (run, tables, counts, name))
        return driver

    def waiting(self, act: Callable[[], Any]) -> Callable[[], Any]:
        """Let another thread do what has to wait, and see that it does; returns what waits for its end."""
        future = self.pool.submit(act)
        wait_until(lambda: value(self.watching, WAITING) or future.done())
        assert not future.done(), future.result()
        return lambda: future.result(30)
