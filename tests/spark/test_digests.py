"""Digests, by which an archive knows that its files have what the database has: Python and SQL come to the same."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("adbc_driver_postgresql")

import pyarrow as pa

from fairqueue.spark.engine.digests import Digest, digests
from fairqueue.spark.engine.reading import Selection, arrow_schema
from fairqueue.testing._databases import Databases
from tests.fixtures.postgres import libpq
from tests.spark.histories import COLUMNS, DAY, add, row

SCHEMA = arrow_schema(Selection("history"))


class TestDigest:
    TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12)
    TIMES = st.datetimes(datetime(1970, 1, 1), datetime(2300, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001
    BIGINTS = st.integers(-(2**63), 2**63 - 1)
    ROWS = st.fixed_dictionaries({
        "message_id": BIGINTS, "queue": TEXTS, "channel": TEXTS, "key": st.none() | TEXTS, "outcome": TEXTS,
        "attempt": st.integers(0, 2**31 - 1), "cost": st.floats(allow_nan=False), "error": st.none() | TEXTS,
        "worker": st.none() | TEXTS, "dequeue_at": BIGINTS, "created_at": TIMES, "first_leased_at": st.none() | TIMES,
        "leased_at": st.none() | TIMES, "finished_at": TIMES,
    })  # fmt: skip

    @settings(max_examples=40)
    @given(rows=st.lists(ROWS, max_size=4, unique_by=lambda each: (each["message_id"], each["finished_at"])))
    def test_is_that_of_the_database(self, shared: psycopg.Connection[Any], rows: list[dict[str, Any]]) -> None:
        shared.rollback()
        add(shared, rows)
        query = f"SELECT {', '.join(COLUMNS)} FROM fairqueue.history".encode()
        stored = [dict(zip(COLUMNS, each, strict=True)) for each in shared.execute(query).fetchall()]
        batch = pa.RecordBatch.from_pylist([{**each, "xid": int(each["xid"])} for each in stored], schema=SCHEMA)
        found = digests(batch)
        assert sum(each.rows for each in found.values()) == len(rows)
        for day, digest in found.items():
            wanted = shared.execute("SELECT * FROM fairqueue.history_digest(%s)", (day,)).fetchone()
            assert wanted == (digest.rows, digest.checksum)

    def test_of_parts_is_that_of_the_whole(self) -> None:
        rows = [{**row(number), "xid": number} for number in range(50)]
        whole = digests(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))
        parts = [digests(pa.RecordBatch.from_pylist(each, schema=SCHEMA))[DAY] for each in (rows[30:], rows[:30][::-1])]
        assert {DAY: sum(parts, Digest())} == whole
        assert whole[DAY].rows == 50


@pytest.fixture(scope="module")
def shared(databases: Databases, template: Any) -> Iterator[psycopg.Connection[Any]]:
    with databases.create(template.template_dbname) as url, psycopg.connect(libpq(url)) as connection:
        yield connection
