"""Rows on their way into the queue, without Spark or a database: which are taken, as what, and why others aren't."""

import math
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from fairqueue import payloads
from fairqueue.errors import InvalidValue
from fairqueue.spark.engine import columns as columns_module
from fairqueue.spark.engine.columns import Columns
from fairqueue.spark.engine.rejects import Rejects
from tests.spark.loads import document

SECOND = 1_000_000


def batch(**columns: Any) -> pa.RecordBatch:
    """Of lists or arrays; all rows are of the channel acme unless said."""
    rows = len(next(iter(columns.values())))
    return pa.RecordBatch.from_pydict({"channel": ["acme"] * rows, **columns})


def taken(**columns: Any) -> list[dict[str, Any]]:
    """The rows that are taken; both ways of checking agree on them."""
    rows = batch(**columns)
    staged, refused = Columns(rows.schema).sorted_out(rows)
    assert not len(refused), refused.to_pylist()
    assert Columns(rows.schema).staged(rows).equals(staged)
    taken: list[dict[str, Any]] = staged.to_pylist()
    return taken


def reasons(**columns: Any) -> list[str]:
    """Why rows are refused, all of them."""
    rows = batch(**columns)
    staged, refused = Columns(rows.schema).sorted_out(rows)
    assert not len(staged), staged.to_pylist()
    reasons: list[str] = refused["reason"].to_pylist()
    return reasons


WHEN = "Unix milliseconds as a whole number, or a timestamp with a time zone"


class TestSchema:
    @pytest.mark.parametrize(
        ("column", "kind"),
        [
            *[(name, kind) for name in ("queue", "channel", "key") for kind in (pa.string(), pa.large_string())],
            *[("payload", kind) for kind in (pa.string(), pa.binary(), pa.large_binary())],
            ("payload", pa.struct({"a": pa.date32()})),
            *[("payload", kind) for kind in (pa.map_(pa.string(), pa.int32()), pa.list_(pa.float32()))],
            *[("dequeue_at", kind) for kind in (pa.int64(), pa.int32(), pa.timestamp("us", "UTC"))],
            *[(name, pa.duration("us")) for name in ("delay", "backoff")],
            *[(name, kind) for name in ("delay", "backoff", "cost") for kind in (pa.int8(), pa.decimal128(9, 2))],
            *[(name, kind) for name in ("priority", "max_attempts") for kind in (pa.int16(), pa.int64())],
            ("body", pa.binary()),
            ("cost", pa.float32()),
        ],
    )  # fmt: skip
    def test_types_that_are_taken(self, column: str, kind: pa.DataType) -> None:
        schema = pa.schema({"channel": pa.string(), column: kind})
        nothing = schema.empty_table().to_batches() or [pa.RecordBatch.from_pylist([], schema)]
        assert Columns(schema).staged(nothing[0]).num_rows == 0

    @pytest.mark.parametrize(
        ("column", "kind", "wanted"),
        [
            ("channel", pa.int64(), "a string, not int64"),
            ("queue", pa.binary(), "a string, not binary"),
            ("payload", pa.int32(), "a string of JSON, binary, a struct, a map or an array, not int32"),
            ("body", pa.string(), "binary, not string"),
            ("dequeue_at", pa.float64(), WHEN + ", not double"),
            ("dequeue_at", pa.date32(), WHEN + ", not date32[day]"),
            # As fq.Message refuses a datetime without a time zone.
            ("dequeue_at", pa.timestamp("us"), WHEN + ", not timestamp[us]"),
            ("delay", pa.string(), "a number or a day-time interval, not string"),
            ("priority", pa.float32(), "a whole number, not float"),
            ("cost", pa.bool_(), "a number, not bool"),
            ("max_attempts", pa.decimal128(9, 2), "a whole number, not decimal128(9, 2)"),
            ("backoff", pa.month_day_nano_interval(), "a number or a day-time interval, not month_day_nano_interval"),
        ],
    )  # fmt: skip
    def test_types_that_are_refused(self, column: str, kind: pa.DataType, wanted: str) -> None:
        with pytest.raises(InvalidValue) as refused:
            Columns(pa.schema({"channel": pa.string()} | {column: kind}))
        assert str(refused.value) == f"column {column} must be {wanted}"

    def test_nothing_without_a_type(self) -> None:
        """As Spark SQL has it of a NULL that isn't cast."""
        with pytest.raises(InvalidValue, match=r"^column key is NULL without a type: cast it to a string, or drop it"):
            Columns(pa.schema({"channel": pa.string(), "key": pa.null()}))

    @pytest.mark.parametrize(
        "kind",
        [
            "variant",
            "struct<v: variant>",
            "array<variant>",
            "map<string, variant>",
            "struct<a: array<struct<v: variant>>>",
        ],
    )
    def test_a_variant_is_not_a_struct(self, kind: str) -> None:
        """Spark hands it over as one, of two lumps of bytes; its JSON would be those."""
        pytest.importorskip("pyspark")
        from pyspark.sql.pandas.types import to_arrow_schema
        from pyspark.sql.types import ArrayType, DataType, MapType, StringType, StructType, VariantType

        kinds: dict[str, DataType] = {
            "variant": VariantType(),
            "struct<v: variant>": StructType().add("v", VariantType()),
            "array<variant>": ArrayType(VariantType()),
            "map<string, variant>": MapType(StringType(), VariantType()),
            "struct<a: array<struct<v: variant>>>": StructType().add(
                "a", ArrayType(StructType().add("v", VariantType()))
            ),
        }
        schema = StructType().add("channel", StringType()).add("payload", kinds[kind])
        with pytest.raises(InvalidValue, match=r"^column payload must be a string of JSON, .* not .*<value: binary"):
            Columns(to_arrow_schema(schema, timezone="UTC"))

    def test_binary_with_a_comment_is_binary(self) -> None:
        """Which Spark hands over as metadata of the column."""
        doc = pa.field("doc", pa.binary(), metadata={b"SPARK::metadata::json": b'{"comment": "a scan"}'})
        schema = pa.schema([("channel", pa.string()), ("payload", pa.struct([doc]))])
        batch = pa.RecordBatch.from_pylist([{"channel": "acme", "payload": {"doc": b"\x0c"}}], schema)
        assert Columns(schema).staged(batch).to_pylist()[0]["payload"] == b'\x01{"doc": "0c"}'

    @pytest.mark.parametrize(
        ("names", "options", "told"),
        [
            (["channel", "chanel"], {}, "unknown column 'chanel': a load has queue, channel, .*; drop it or rename it"),
            (["channel", "Key"], {}, "unknown column 'Key'"),
            (["key"], {}, "column channel is missing: add it, or set the option channel"),
            (["channel", "key", "key"], {}, "column key is there twice"),
            (["key"], {"channel": ""}, "channel must have 1 to 255 characters, not 0"),
            (["channel"], {"queue": "x" * 256}, "queue must have 1 to 255 characters, not 256"),
            (["channel"], {"queue": "a\x00"}, "queue holds a character that PostgreSQL can't store"),
        ],
    )
    def test_names(self, names: list[str], options: dict[str, str], told: str) -> None:
        with pytest.raises(InvalidValue, match=f"^{told}"):
            Columns(pa.schema([(name, pa.string()) for name in names]), **options)

    def test_one_body(self) -> None:
        with pytest.raises(InvalidValue, match=r"^a binary payload is the body, and there is a column body, too"):
            Columns(pa.schema({"channel": pa.string(), "payload": pa.binary(), "body": pa.binary()}))


class TestDefaults:
    def test_where_the_row_says_nothing(self) -> None:
        rows = pa.RecordBatch.from_pydict({"queue": ["a", None], "channel": [None, "acme"]})
        staged = Columns(rows.schema, queue="slow", channel="all").staged(rows)
        assert staged.to_pylist() == [{"queue": "a", "channel": "all"}, {"queue": "slow", "channel": "acme"}]

    def test_where_there_is_no_column(self) -> None:
        rows = pa.RecordBatch.from_pydict({"key": ["k", None]})
        staged = Columns(rows.schema, channel="all").staged(rows).to_pylist()
        assert staged == [{"queue": "default", "channel": "all", "key": key} for key in ("k", None)]

    def test_no_channel_at_all(self) -> None:
        assert reasons(channel=pa.array([None], pa.string())) == ["channel must not be null"]


class TestPayload:
    def test_what_becomes_json(self) -> None:
        inner = pa.struct(
            {
                "text": pa.string(),
                "whole": pa.decimal128(38, 0),
                "price": pa.decimal128(9, 2),
                "at": pa.timestamp("us", "UTC"),
                "local": pa.timestamp("us"),
                "day": pa.date32(),
                "time": pa.time64("us"),
                "span": pa.duration("us"),
                "bytes": pa.binary(),
                "flags": pa.map_(pa.int32(), pa.list_(pa.bool_())),
                "nothing": pa.null(),
            }
        )
        value = {
            "text": "ü\U0001f600\\u0000",
            "whole": Decimal(10**37),
            "price": Decimal("19.99"),
            "at": datetime(2026, 11, 21, 12, tzinfo=timezone(timedelta(hours=1))),
            "local": datetime(2026, 11, 21, 12),  # noqa: DTZ001
            "day": date(2026, 11, 21),
            "time": time(12, 30),
            "span": timedelta(seconds=1.5),
            "bytes": b"\x00\xff",
            "flags": [(1, [True, None])],
            "nothing": None,
        }
        staged = taken(payload=pa.array([value, None], inner))
        assert document(staged[0]) == {
            **value,
            "whole": 10**37,
            "price": 19.99,
            "at": "2026-11-21T11:00:00+00:00",
            "local": "2026-11-21T12:00:00",
            "day": "2026-11-21",
            "time": "12:30:00",
            "span": 1.5,
            "bytes": "00ff",
            "flags": {"1": [True, None]},
        }
        assert staged[1]["payload"] is None

    @pytest.mark.parametrize(
        ("kind", "key", "name"),
        [
            (pa.bool_(), True, "true"),
            (pa.decimal128(38, 20), Decimal("0.12345678901234567890"), "0.12345678901234567890"),
            (pa.binary(), b"\x00\xff", "00ff"),
            (pa.timestamp("us", "UTC"), datetime(2026, 11, 21, tzinfo=UTC), "2026-11-21T00:00:00+00:00"),
        ],
    )
    def test_keys_of_a_map(self, kind: pa.DataType, key: Any, name: str) -> None:
        """They have the form that values have."""
        (row,) = taken(payload=pa.array([[(key, 1)]], pa.map_(kind, pa.int32())))
        assert document(row) == {name: 1}

    def test_times_of_a_session_in_a_zone_that_only_spark_knows(self) -> None:
        """They are in UTC."""

        def kind(zone: str) -> pa.DataType:
            at = pa.timestamp("us", zone)
            return pa.struct({"at": at, "list": pa.list_(at), "map": pa.map_(pa.string(), pa.struct({"at": at}))})

        noon = datetime(2026, 11, 21, 12, tzinfo=UTC)
        value = {"at": noon, "list": [noon, None], "map": [("a", {"at": noon})]}
        declared = batch(payload=pa.array([value, None], kind("UTC")))
        rows = batch(payload=declared["payload"].cast(kind("GMT+8")))
        staged = Columns(declared.schema).staged(rows)
        assert staged.equals(Columns(declared.schema).staged(declared))
        text = noon.isoformat()
        assert document(staged.to_pylist()[0]) == {"at": text, "list": [text, None], "map": {"a": {"at": text}}}

    def test_structs_that_are_null(self, tmp_path: Path) -> None:
        """As Spark has them: with fields that are declared never to be."""
        kind = pa.struct([pa.field("id", pa.int64(), nullable=False)])
        payload = pa.StructArray.from_arrays([pa.array([1, None])], fields=list(kind), mask=pa.array([False, True]))
        rows = batch(payload=payload, cost=[1.0, 0.0])
        staged, refused = Columns(rows.schema).sorted_out(rows)
        assert [document(row) for row in staged.to_pylist()] == [{"id": 1}]
        rejects = Rejects(str(tmp_path), "run", 0)
        rejects.add(refused)
        assert pq.read_table(tmp_path / "_attempts" / str(rejects.close()))["payload"].to_pylist() == [None]

    def test_strings_go_as_they_are(self) -> None:
        """Such as numbers that have more digits than Python's; what is binary is the body."""
        texts = ['{"a": 1.00000000000000000000001}', "null", None]
        sent = [row["payload"] for row in taken(payload=texts)]
        assert sent == [text and b"\x01" + text.encode() for text in texts]
        assert taken(payload=[b"\x00", None]) == [
            {"queue": "default", "channel": "acme", "body": body} for body in (b"\x00", None)
        ]

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("{", "payload is not JSON: Expecting property name"),
            ("", "payload is not JSON: Expecting value"),
            ("\ufeff1", "payload is not JSON: "),
            ('"\\u0000"', "payload holds a NUL character, which PostgreSQL can't store in JSON"),
            ('"\\ud800"', "payload holds half a surrogate pair"),
            ('["\t"]', "payload is not JSON: Invalid control character"),
            ("NaN", "payload holds a number or a structure that JSON has no form for"),
            ("[" * 100_000, "payload is not JSON: maximum recursion depth"),
        ],
    )
    def test_strings_that_the_database_refuses(self, text: str, told: str) -> None:
        (reason,) = reasons(payload=[text])
        assert reason.startswith(told)

    @pytest.mark.parametrize(
        ("payload", "told"),
        [
            (pa.array([{"a": math.nan}]), "payload holds a number or a structure that JSON has no form for"),
            (pa.array([["a\x00"]]), "payload holds a NUL character"),
            (pa.array([[2**62]], pa.list_(pa.timestamp("us", "UTC"))), "payload is not JSON: "),
        ],
    )
    def test_values_that_json_has_no_form_for(self, payload: pa.Array, told: str) -> None:
        rows = batch(payload=payload)
        with pytest.raises(InvalidValue, match=f"^row 7 of the partition: {told}"):
            Columns(rows.schema).staged(rows, 7)
        assert len(Columns(rows.schema).sorted_out(rows)[1]) == 1

    def test_decimals(self) -> None:
        """They are numbers of JSON as they are, or refused; never rounded."""
        numbers = ["0.1", "-19.990", "1234567890123.456", "12345678901234567.89", "0.12345678901234567890"]
        kind = pa.struct({"price": pa.decimal128(38, 20)})
        rows = batch(payload=pa.array([{"price": Decimal(number)} for number in numbers], kind))
        staged, refused = Columns(rows.schema).sorted_out(rows)
        assert [document(row) for row in staged.to_pylist()] == [{"price": float(number)} for number in numbers[:3]]
        assert [reason.partition(",")[0] for reason in refused["reason"].to_pylist()] == [
            f"payload holds the decimal {Decimal(number):.20f}" for number in numbers[3:]
        ]

    def test_sizes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (payloads, columns_module):
            monkeypatch.setattr(module, "MAX_BYTES", 10)
        assert len(taken(payload=['"12345678"'], body=[b"1234567890"])) == 1
        assert reasons(payload=['"123456789"']) == ["payload has 11 bytes as JSON, more than 10"]
        assert reasons(payload=["1" + " " * 10]) == ["payload must have at most 10 bytes, not 11"]
        assert reasons(payload=[["12345678"]]) == ["payload has 12 bytes as JSON, more than 10"]
        assert reasons(body=[b"12345678901"]) == ["body must have at most 10 bytes, not 11"]
        assert reasons(payload=[b"12345678901"]) == ["body must have at most 10 bytes, not 11"]


@pytest.mark.parametrize("column", ["queue", "channel", "key", "payload"])
def test_strings_that_are_not_utf8(column: str) -> None:
    """Spark's strings may be anything."""
    raw = pa.array([b"1", b"1\xff", None, b"1"])
    texts = pa.Array.from_buffers(pa.string(), len(raw), raw.buffers(), raw.null_count)
    rows = batch(**{column: texts})
    staged, refused = Columns(rows.schema, channel="all").sorted_out(rows)
    assert len(staged) == 3
    staged.validate(full=True)
    assert refused["reason"].to_pylist() == [f"{column} is not UTF-8"]


class TestTimes:
    @pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "+05:30"])
    @pytest.mark.parametrize(("unit", "ticks"), [("s", 1), ("ms", 1_000), ("us", SECOND), ("ns", 10**9)])
    def test_timestamps(self, unit: str, ticks: int, zone: str) -> None:
        """A zone is how a time is shown, not which it is."""
        staged = taken(dequeue_at=pa.array([1_800_000_000 * ticks, -ticks, None], pa.timestamp(unit, zone)))
        assert [row["dequeue_at"] for row in staged] == [1_800_000_000_000, -1_000, None]

    def test_down_to_the_millisecond(self) -> None:
        """Also before 1970."""
        staged = taken(dequeue_at=pa.array([1_999, -1, -1_000, -1_001], pa.timestamp("us", "UTC")))
        assert [row["dequeue_at"] for row in staged] == [1, -1, -1, -2]

    def test_intervals(self) -> None:
        times = [timedelta(seconds=90.5), timedelta(microseconds=-1), timedelta(days=3653), timedelta(days=999_999)]
        spans = pa.array(times, pa.duration("us"))
        rows = batch(delay=spans)
        staged, refused = Columns(rows.schema).sorted_out(rows)
        assert [row["delay"] for row in staged.to_pylist()] == [90.5]
        assert refused["reason"].to_pylist() == [
            "delay must be from 0 to 315,576,000, not -0.000001",
            "delay must be from 0 to 315,576,000, not 315619200",
            "delay must be from 0 to 315,576,000, not 8.63999136e+10",
        ]

    @pytest.mark.parametrize("other", ["dequeue_at", "delay"])
    def test_only_one(self, other: str) -> None:
        assert taken(priority=[0], **{other: [1]})[0][other] == 1  # a priority of 0 is none
        assert reasons(priority=[1], **{other: [1]}) == [
            f"only one of {', '.join(sorted([other, 'priority']))} may be given: set the others to null"
        ]

    def test_when_a_row_goes_straight_into_the_queue(self) -> None:
        rows = batch(
            dequeue_at=pa.array([5, None, None, None], pa.int64()),
            delay=pa.array([None, 1.0001, None, None]),
            priority=pa.array([None, None, 3, None], pa.int32()),
            cost=pa.array([None, 2, None, None], pa.int32()),
        )
        columns = Columns(rows.schema)
        direct = columns.direct(columns.staged(rows), now=1_000_000)
        assert direct.to_pydict() == {
            "queue": ["default"] * 4,
            "channel": ["acme"] * 4,
            "dequeue_at": [5, 1_001_001, -3, 1_000_000],
            "cost": [1, 2, 1, 1],
        }
        (row,) = columns_of({"channel": ["acme"]}, 7).to_pylist()
        assert row == {"queue": "default", "channel": "acme", "dequeue_at": 7}


def test_rows_go_channel_by_channel() -> None:
    """As the indexes of messages do; those of a channel keep their order, in which they are served."""
    channels = [f"c{97 * n % 7}" for n in range(500)]
    rows = pa.RecordBatch.from_pydict({"channel": channels, "dequeue_at": list(range(500))})
    columns = Columns(rows.schema)
    expected = sorted(rows.to_pylist(), key=lambda row: row["channel"])
    for found in (columns.staged(rows), columns.sorted_out(rows)[0], columns.direct(columns.staged(rows), 0)):
        assert found.drop_columns("queue").to_pylist() == expected


def columns_of(values: dict[str, Any], now: int) -> pa.RecordBatch:
    rows = pa.RecordBatch.from_pydict(values)
    columns = Columns(rows.schema)
    return columns.direct(columns.staged(rows), now)
