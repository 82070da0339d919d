"""Reading in parts, without Spark: together they are one consistent set of rows, whatever goes on meanwhile."""

from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("adbc_driver_postgresql")

from fairqueue.errors import FairqueueError, InvalidValue
from fairqueue.spark.engine.place import Place
from fairqueue.spark.engine.reading import (
    Part,
    Selection,
    Slice,
    arrow_schema,
    divided,
    plan,
    read,
    snapshot,
)
from fairqueue.testing._databases import Databases
from tests.fixtures.connections import Raw
from tests.fixtures.postgres import libpq
from tests.observing import value
from tests.spark.histories import DAY, add, add_days, history, noon, ordered, release, row
from tests.spark.idling import connections, ended_after

HISTORY = Selection("history")
MESSAGES = Selection("messages")


@pytest.fixture
def connection(raw: Raw, database_url: str) -> psycopg.Connection[Any]:
    return raw(database_url)


def rows_of(place: Place, selection: Selection, part: Part) -> list[dict[str, Any]]:
    schema = arrow_schema(selection)
    batches = list(read(place, selection, part, schema))
    assert all(batch.schema.equals(schema) for batch in batches)
    return [each for batch in batches for each in batch.to_pylist()]


def all_of(place: Place, selection: Selection, **options: Any) -> list[dict[str, Any]]:
    return [each for part in plan(place, selection, **options) for each in rows_of(place, selection, part)]


def fill(connection: psycopg.Connection[Any]) -> None:
    """Three days with a partition and one without; some blocks each."""
    add_days(connection, 0, 1, 2)
    for day in range(4):
        add(connection, [row(number, day, error="x" * (number % 300)) for number in range(1, 301)])
        connection.commit()


@pytest.fixture
def filled(connection: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    fill(connection)
    return connection


@pytest.fixture(scope="module")
def filled_url(databases: Databases, template: Any) -> Iterator[str]:
    """Of a database for tests that only read."""
    with databases.create(template.template_dbname) as url:
        with psycopg.connect(libpq(url)) as connection:
            fill(connection)
        yield url


class TestParts:
    @pytest.fixture
    def database_url(self, filled_url: str) -> str:
        return filled_url

    @pytest.fixture
    def filled(self, connection: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
        return connection

    @pytest.mark.parametrize("parts", [1, 2, 7, None])
    @pytest.mark.parametrize("held", [True, False])
    def test_together_are_all_rows(
        self, place: Place, filled: psycopg.Connection[Any], database_url: str, parts: int | None, held: bool
    ) -> None:
        if held:
            with snapshot(database_url) as now:
                found = all_of(place, HISTORY, parts=parts, snapshot=now)
        else:
            found = all_of(place, HISTORY, parts=parts)
        assert ordered(found) == history(filled)
        assert len(found) == 1200

    @pytest.mark.parametrize(
        ("selection", "where"),
        [
            ({"queue": "007"}, "queue = '007'"),
            ({"channels": ("tenant, 1", "it's \\ none")}, "channel = 'tenant, 1'"),
            ({"since": noon(1)}, "finished_at >= '2026-03-29T12:00Z'"),
            ({"until": noon(1)}, "finished_at < '2026-03-29T12:00Z'"),
            (
                {"since": noon(1) - timedelta(hours=12), "until": noon(1) + timedelta(hours=12)},
                "finished_at::date = '2026-03-29'",
            ),
            (
                {"since": noon(3) + timedelta(microseconds=7), "queue": "default"},
                "finished_at >= '2026-03-31T12:00:00.000007Z' AND queue = 'default'",
            ),
        ],
    )
    def test_a_selection(
        self, place: Place, filled: psycopg.Connection[Any], selection: dict[str, Any], where: str
    ) -> None:
        filled.execute("SET timezone = 'UTC'")
        wanted = history(filled, where)
        assert 0 < len(wanted) < 1200
        assert ordered(all_of(place, Selection("history", **selection))) == wanted

    def test_days_that_are_not_asked_for_are_not_read(self, place: Place, filled: psycopg.Connection[Any]) -> None:
        day = Selection("history", since=noon(1) - timedelta(hours=12), until=noon(1) + timedelta(hours=12))
        read = {each.table for part in plan(place, day) for each in part.slices}
        assert read == {"history_2026_03_29", "history_default"}

    def test_columns_come_as_asked_for(self, place: Place, filled: psycopg.Connection[Any]) -> None:
        selection = Selection("history", columns=("xid", "message_id", "leased_at"), since=noon(3))
        wanted = [
            (each["xid"], each["message_id"], each["leased_at"])
            for each in history(filled, "finished_at >= '2026-03-31'")
        ]
        found = all_of(place, selection)
        assert sorted(wanted, key=str) == sorted((tuple(each.values()) for each in found), key=str)
        assert list(found[0]) == ["xid", "message_id", "leased_at"]

    def test_are_read_by_blocks(self, place: Place, filled: psycopg.Connection[Any]) -> None:
        """Each looks at its own."""
        parts = plan(place, HISTORY, parts=6)
        slices = [each for part in parts for each in part.slices if each.first and each.end]
        assert slices
        for each in slices:
            query = HISTORY.query(place.name(each.table), *each.conditions())
            plan_ = filled.execute(f"EXPLAIN {query}".encode()).fetchall()
            assert "Tid Range Scan" in plan_[0][0]

    @given(st.dictionaries(st.text("abc", min_size=1), st.integers(0, 3000)), st.integers(1, 40))
    def test_divide_every_block_once(self, sizes: dict[str, int], parts: int) -> None:
        result = divided(sizes, parts, 8192)
        length = -(-sum(sizes.values()) // parts)
        blocks = [
            (each.table, block)
            for slices in result
            for each in slices
            for block in range(each.first, sizes[each.table] if each.end is None else each.end)
        ]
        assert blocks == [(table, block) for table, count in sizes.items() for block in range(count)]
        assert len(result) <= parts
        for slices in result:
            assert sum((sizes[e.table] if e.end is None else e.end) - e.first for e in slices) <= length
        assert sum(each.end is None for slices in result for each in slices) == sum(map(bool, sizes.values()))

    def test_are_more_the_more_there_is(self) -> None:
        assert len(divided({"a": 1}, None, 8192)) == 1
        assert len(divided({"a": 2**17}, None, 8192)) == 16
        assert len(divided({"a": 2**30}, None, 8192)) == 1024


def test_messages(place: Place, connection: psycopg.Connection[Any]) -> None:
    """Payloads as JSON, bodies as bytes, and what isn't there as null."""
    connection.execute(
        """INSERT INTO fairqueue.message (channel, payload, body, key) VALUES
            ('acme', '{"a": [1, null, "é"]}', NULL, 'k'), ('acme', NULL, '\\x00ff', NULL),
            ('globex', 'null', NULL, NULL)"""
    )
    connection.commit()
    found = sorted(all_of(place, MESSAGES), key=lambda each: each["id"])
    assert [(each["payload"], each["body"], each["key"], each["leased_until"]) for each in found] == [
        ('{"a": [1, null, "é"]}', None, "k", None),
        (None, b"\x00\xff", None, None),
        ("null", None, None, None),
    ]
    assert [each["channel"] for each in all_of(place, Selection("messages", channels=("globex",)))] == ["globex"]


def test_of_nothing(place: Place, database_url: str) -> None:
    assert all_of(place, HISTORY) == all_of(place, MESSAGES) == []
    with snapshot(database_url) as now:
        assert plan(place, HISTORY, snapshot=now) == plan(place, MESSAGES, snapshot=now) == []


class TestMeanwhile:
    def test_messages_under_a_snapshot(
        self, place: Place, connection: psycopg.Connection[Any], database_url: str
    ) -> None:
        """Between its parts messages come, go and move; it has just those that were there."""
        connection.execute(
            "INSERT INTO fairqueue.message (channel, payload) SELECT 'acme', to_jsonb(repeat('x', 300))"
            " FROM generate_series(1, 600)"
        )
        connection.commit()

        def disturb(step: int) -> None:
            connection.execute("INSERT INTO fairqueue.message (channel) SELECT 'new' FROM generate_series(1, 40)")
            connection.execute("DELETE FROM fairqueue.message WHERE id %% 9 = %s AND id <= 600", (step,))
            connection.execute(
                "UPDATE fairqueue.message SET attempt = attempt + 1 WHERE id %% 9 = %s AND id <= 600", (step + 4,)
            )
            connection.commit()

        def ids(held: str | None, parts: list[Part]) -> list[int]:
            found = []
            for step, part in enumerate(parts):
                found += [each["id"] for each in rows_of(place, MESSAGES, part)]
                disturb(step)
            return sorted(found)

        with snapshot(database_url) as now:
            connection.execute("DELETE FROM fairqueue.message WHERE id = 600")
            connection.commit()
            parts = plan(place, MESSAGES, parts=4, snapshot=now)
            assert len(parts) == 4
            assert ids(now, parts) == list(range(1, 601))
        naive = [Part(part.slices) for part in parts]
        before = [number for (number,) in connection.execute("SELECT id FROM fairqueue.message").fetchall()]
        assert ids(None, naive) != sorted(before), "else this test would show nothing"

    def test_messages_without_a_snapshot_are_one_part(self, place: Place) -> None:
        assert plan(place, MESSAGES, parts=8) == [Part((Slice("message"),))]

    def test_history_is_as_it_was_planned(
        self, place: Place, filled: psycopg.Connection[Any], raw: Raw, database_url: str
    ) -> None:
        """Whoever commits later is not in it, however early it began."""
        late = raw(database_url)
        add(late, [row(1001, 0)])
        wanted = history(filled)
        parts = plan(place, HISTORY, parts=3)
        late.commit()
        add(filled, [row(1002, day) for day in range(4)])
        filled.commit()
        found = [each for part in parts for each in rows_of(place, HISTORY, part)]
        assert ordered(found) == wanted

    def test_a_partition_is_made_of_what_was_in_the_default(
        self, place: Place, filled: psycopg.Connection[Any]
    ) -> None:
        wanted = history(filled)
        parts = plan(place, HISTORY, parts=3)
        found = rows_of(place, HISTORY, parts[0])
        add_days(filled, 3)
        assert value(filled, "SELECT count(*) FROM fairqueue.history_default") == 0
        filled.commit()
        for part in parts[1:]:
            found += rows_of(place, HISTORY, part)
        assert ordered(found) == wanted

    def test_a_partition_is_dropped(self, place: Place, filled: psycopg.Connection[Any]) -> None:
        parts = plan(place, HISTORY)
        filled.execute("DROP TABLE fairqueue.history_2026_03_28")
        filled.commit()
        with pytest.raises(FairqueueError, match="a partition of history has been dropped since"):
            _ = [rows_of(place, HISTORY, part) for part in parts]

    def test_no_partition_is_dropped_under_a_snapshot(
        self, place: Place, filled: psycopg.Connection[Any], database_url: str
    ) -> None:
        """Who would drop one gives up soon, and tries again; others are made meanwhile."""
        wanted = history(filled)
        drop = "SELECT fairqueue.history_drop('2026-03-29')"
        filled.execute("SET lock_timeout = '100ms'")
        with snapshot(database_url) as now:
            assert value(filled, drop) is False
            filled.commit()
            for act in (partial(release, filled, DAY), lambda: filled.execute("TRUNCATE fairqueue.message")):
                with pytest.raises(psycopg.errors.LockNotAvailable):
                    act()
                filled.rollback()
            add_days(filled, 4)
            assert ordered(all_of(place, HISTORY, snapshot=now)) == wanted
        assert value(filled, drop) is True

    def test_a_partition_is_dropped_under_the_snapshot_of_somebody_else(
        self, place: Place, filled: psycopg.Connection[Any], raw: Raw, database_url: str
    ) -> None:
        """Who has locked nothing. What is asked for isn't all there; other days are."""
        other = raw(database_url)
        other.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        now = value(other, "SELECT pg_export_snapshot()")
        filled.execute("DROP TABLE fairqueue.history_2026_03_28")
        filled.commit()
        with pytest.raises(FairqueueError, match="a partition of history has been dropped since"):
            plan(place, HISTORY, snapshot=now)
        assert len(all_of(place, Selection("history", since=noon(0.5)), snapshot=now)) == 900

    def test_no_queue(self, database_url: str) -> None:
        elsewhere = Place(url=database_url, schema="elsewhere")
        with pytest.raises(FairqueueError, match=r"^schema 'elsewhere' has no fairqueue: run the migrations"):
            rows_of(elsewhere, MESSAGES, plan(elsewhere, MESSAGES)[0])

    def test_a_snapshot_is_over(self, place: Place, filled: psycopg.Connection[Any], database_url: str) -> None:
        with snapshot(database_url) as now:
            parts = plan(place, HISTORY, snapshot=now)
        with pytest.raises(FairqueueError, match=f"nobody holds the snapshot '{now}'"):
            rows_of(place, HISTORY, parts[0])
        with pytest.raises(FairqueueError, match=f"nobody holds the snapshot '{now}'"):
            plan(place, HISTORY, snapshot=now)
        with pytest.raises(FairqueueError, match="nobody holds the snapshot 'one'"):
            plan(place, MESSAGES, snapshot="one")

    def test_a_snapshot_is_held_as_long_as_it_takes(
        self, connection: psycopg.Connection[Any], database_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its transaction does nothing meanwhile, for which a server may be set to end it."""
        of_a_transaction = "name IN ('idle_in_transaction_session_timeout', 'transaction_timeout')"
        query = f"SELECT name, setting FROM pg_settings WHERE {of_a_transaction}"
        names = [name for name, _ in connection.execute(query).fetchall()]
        ended_after(connection, *names)
        held = connections(monkeypatch)
        with snapshot(database_url):
            assert held[0].execute(query).fetchall() == [(name, "0") for name in names]

    def test_rows_of_another_server(self, place: Place, filled: psycopg.Connection[Any], database_url: str) -> None:
        """After a restore, transaction ids say nothing; it is refused, with the way out, which works."""
        filled.execute("UPDATE fairqueue.history SET xid = '9000000000000000000' WHERE message_id = 7")
        filled.commit()
        with pytest.raises(FairqueueError, match="restored from a dump; once, run UPDATE") as error:
            plan(place, HISTORY)
        with snapshot(database_url) as now:
            assert len(all_of(place, HISTORY, snapshot=now)) == 1200
        filled.execute(str(error.value).partition("run ")[2].encode())
        filled.commit()
        assert ordered(all_of(place, HISTORY)) == history(filled)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"columns": ("nope",)}, "unknown column 'nope' of history: there are message_id, queue"),
        ({"columns": ("queue", "queue")}, "columns must differ: queue, queue"),
        ({"since": noon(1), "until": noon(1)}, "since (2026-03-29T12:00:00+00:00) must be before until (2026-03-29T12"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValue) as error:
        Selection("history", **fields)
    assert message in str(error.value)
