"""The rows that a load takes are those that fq.enqueue_many takes, and they become the same messages."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("pyarrow")

import pyarrow as pa

from fairqueue._rows import Record, record_of
from fairqueue.errors import InvalidValue
from fairqueue.spark.engine.columns import Columns
from fairqueue.spark.engine.lenient import lenient
from tests.spark.loads import document

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass
class Kind:
    """A type that a column may have: values of it, and the same as a field of a message."""

    arrow: pa.DataType
    values: st.SearchStrategy[Any]
    field: str = ""
    convert: Callable[[Any], Any] = lambda value: value


def mostly(good: st.SearchStrategy[Any], *others: Any) -> st.SearchStrategy[Any]:
    """Rows of several columns should not all be refused."""
    return st.integers(0, 9).flatmap(lambda n: st.sampled_from([None, *others]) if n > 8 else good)


def whole(*others: int) -> st.SearchStrategy[Any]:
    return mostly(st.integers(1, 99), 0, -1, *others)


NAMES = mostly(st.sampled_from(["acme", "globex", "ü" * 255]), "", "x" * 256, "a\x00b")
SECONDS = mostly(st.floats(0, 1e6, width=32), -0.5, 31_557_601.0, 315_576_001.0, math.nan, math.inf)
SPANS = mostly(st.timedeltas(timedelta(0), timedelta(365)), timedelta(-1), timedelta(366), timedelta(36525))
DECIMALS = mostly(st.decimals(0, 9999, places=3, allow_nan=False).map(abs), Decimal(-1), Decimal(99_999_999))
TIMES = mostly(st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30)).map(lambda at: at.replace(tzinfo=UTC)))  # noqa: DTZ001
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
DOCUMENTS = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2)
)
FAR = (2**62, 2**62 - 1, -(2**62), -(2**62) + 1)
SHAPE = {"a": pa.float64(), "b": pa.list_(pa.string())}


def parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidValue(str(error)) from error


KINDS: dict[str, list[Kind]] = {
    "channel": [Kind(pa.string(), NAMES), Kind(pa.large_string(), NAMES)],
    "queue": [Kind(pa.string(), NAMES)],
    "key": [Kind(pa.string(), NAMES)],
    "payload": [
        Kind(pa.string(), mostly(DOCUMENTS.map(json.dumps), "{", "1e999", '"\\ud800"', '"\\\\u0000"'), "", parsed),
        Kind(pa.binary(), mostly(st.binary(max_size=3)), "body"),
        Kind(pa.struct(SHAPE), st.none() | st.fixed_dictionaries({"a": st.floats(), "b": st.lists(st.text())})),
        Kind(pa.map_(pa.string(), pa.int64()), st.none() | st.dictionaries(st.text(max_size=3), st.integers(0, 9))),
        Kind(pa.list_(pa.bool_()), st.none() | st.lists(st.none() | st.booleans())),
    ],
    "body": [Kind(pa.binary(), mostly(st.binary(max_size=3)))],
    "dequeue_at": [
        Kind(pa.int64(), whole(*FAR)),
        Kind(pa.timestamp("us", "UTC"), TIMES, "at"),
        Kind(pa.timestamp("us", "America/Lima"), TIMES, "at"),
    ],
    "delay": [Kind(pa.float64(), SECONDS), Kind(pa.duration("us"), SPANS), Kind(pa.int16(), whole())],
    "priority": [Kind(pa.int64(), whole(*FAR)), Kind(pa.int8(), whole())],
    "cost": [
        Kind(pa.float64(), SECONDS),
        Kind(pa.float32(), SECONDS),
        Kind(pa.decimal128(12, 3), DECIMALS, "", float),
        Kind(pa.int32(), whole(1_000_000, 1_000_001)),
    ],
    "max_attempts": [Kind(pa.int64(), whole(2**31, 2**31 - 1)), Kind(pa.int8(), whole())],
    "backoff": [
        Kind(pa.float64(), SECONDS),
        Kind(pa.duration("us"), SPANS),
        Kind(pa.decimal128(12, 3), DECIMALS, "", float),
    ],
}  # fmt: skip


@dataclass
class Load:
    kinds: dict[str, Kind]
    rows: list[dict[str, Any]]

    @property
    def batch(self) -> pa.RecordBatch:
        arrays = [pa.array([row[name] for row in self.rows], kind.arrow) for name, kind in self.kinds.items()]
        return pa.RecordBatch.from_arrays(arrays, list(self.kinds))

    def record(self, row: dict[str, Any], *, read_json: bool = True) -> Record | None:
        """What fq.enqueue_many would make of a row; None: nothing."""
        fields: dict[str, Any] = {}
        try:
            for name, kind in self.kinds.items():
                if row[name] is not None and (read_json or name != "payload" or kind.convert is not parsed):
                    fields[kind.field or name] = kind.convert(row[name])
            record = record_of(fields)  # type: ignore[arg-type]
        except InvalidValue:
            return None
        if "at" in fields:  # which Python's floats blur
            record = record._replace(dequeue_at=(fields["at"] - EPOCH) // timedelta(milliseconds=1))
        return record


@st.composite
def loads(draw: st.DrawFn) -> Load:
    names = ["channel", *draw(st.lists(st.sampled_from(sorted(KINDS.keys() - {"channel"})), unique=True))]
    kinds = {name: draw(st.sampled_from(KINDS[name])) for name in names}
    if "body" in names and "payload" in names and kinds["payload"].field == "body":
        del kinds["body"]
    rows = st.fixed_dictionaries({name: kind.values for name, kind in kinds.items()})
    return Load(kinds, draw(st.lists(rows, max_size=8)))


@example(Load({"channel": KINDS["channel"][0], "priority": KINDS["priority"][0]}, [{"channel": "a", "priority": 0}]))
@given(loads())
def test_a_row_is_what_a_message_may_be(load: Load) -> None:
    """The same rows are taken that fq.enqueue_many takes, and they are the same messages."""
    columns = Columns(load.batch.schema)
    records = [load.record(row) for row in load.rows]

    staged, refused = columns.sorted_out(load.batch)

    expected = sorted((r for r in records if r is not None), key=lambda record: (record.queue, record.channel))
    assert len(staged) == len(expected)
    for found, record in zip(staged.to_pylist(), expected, strict=True):
        assert_same(found, record)
    assert len(refused) == len(records) - len(expected)
    assert all(refused["reason"].to_pylist())
    # As they came, but in UTC: NaN is like no other value.
    as_they_came = lenient(load.batch).filter(pa.array([record is None for record in records], pa.bool_()))
    assert str(refused.drop_columns("reason").to_pylist()) == str(as_they_came.to_pylist())

    # What JSON is, the database sees.
    wrong = [place for place, row in enumerate(load.rows) if load.record(row, read_json=False) is None]
    if wrong:
        with pytest.raises(InvalidValue, match=f"^row {100 + wrong[0]} of the partition: "):
            columns.staged(load.batch, 100)
    else:
        assert len(columns.staged(load.batch, 100)) == len(load.rows)


#: What load_enter makes of nothing. A priority of 0 is no delay, which matters only where a message is replaced.
LEFT_OUT = {"cost": 1.0, "delay": 0.0}


def assert_same(found: dict[str, Any], record: Record) -> None:
    for name, expected in record._asdict().items():
        value = found.get(name)
        if name == "payload":
            assert (value and document(found)) == (expected and json.loads(expected))
        elif isinstance(expected, float):
            # Arrow makes them of decimals not quite as Python does.
            assert (LEFT_OUT[name] if value is None else value) == pytest.approx(expected, rel=1e-12), name
        else:
            assert value == expected, name
