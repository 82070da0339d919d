"""The SQL functions, as programs in any other language call them.

Leading arguments by position, the rest by name; results in the order given. What they refuse is in
enqueueing/test_bad_input_in_sql.py, who may call them in test_security.py.
"""

from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from fairqueue import schema
from tests.fixtures.connections import Raw
from tests.observing import observer, value

Query = psycopg.Connection[Any]


@pytest.fixture
def sql(raw: Raw, database_url: str) -> Query:
    """An autocommitting connection on which `fairqueue` is the schema, so that calls read as in the manual."""
    connection = observer(raw, database_url)
    connection.execute("SET search_path = fairqueue")
    return connection


def one(sql: Query, query: str, *parameters: object) -> dict[str, Any]:
    [row] = every(sql, query, *parameters)
    return row


def every(sql: Query, query: str, *parameters: object) -> list[dict[str, Any]]:
    return sql.cursor(row_factory=dict_row).execute(query.encode(), parameters or None).fetchall()


def results(sql: Query, call: str) -> list[tuple[int, str]]:
    return [(row["id"], row["result"]) for row in every(sql, f"SELECT id, result FROM {call}")]


class TestMessageCreate:
    def test_returns_the_id(self, sql: Query) -> None:
        first = value(sql, "SELECT message_create('acme', '{\"doc\": 1}')")
        second = value(sql, "SELECT message_create('acme', '{\"doc\": 2}')")
        stored = every(sql, "SELECT id, queue, channel, payload, cost FROM message ORDER BY id")
        assert stored == [
            {"id": first, "queue": "default", "channel": "acme", "payload": {"doc": 1}, "cost": 1},
            {"id": second, "queue": "default", "channel": "acme", "payload": {"doc": 2}, "cost": 1},
        ]

    def test_by_position_and_by_name(self, sql: Query) -> None:
        sql.execute("SELECT message_create('acme', '1', 'q', NULL, 5, NULL, 2.5, '\\x00ff')")
        sql.execute(
            "SELECT message_create(channel => 'acme', payload => '1', queue => 'q', dequeue_at => 5, cost => 2.5,"
            " body => '\\x00ff')"
        )
        sql.execute("SELECT message_create('acme', '1', 'q', dequeue_at => 5, body => '\\x00ff', cost => 2.5)")
        columns = "queue, channel, payload, body, dequeue_at, cost, attempt, leased_until, state, error"
        [same] = every(sql, f"SELECT DISTINCT {columns} FROM message")
        assert same["body"] == b"\x00\xff"
        assert same["dequeue_at"] == 5

    def test_names_are_a_contract(self, sql: Query) -> None:
        """A parameter that is renamed breaks every caller that names it."""
        query = (
            "SELECT proname, pg_get_function_arguments(oid) AS arguments FROM pg_proc"
            " WHERE pronamespace = 'fairqueue'::regnamespace"
        )
        signatures = {row["proname"]: row["arguments"] for row in every(sql, query)}
        for name, leading in {
            "message_create": "channel text, payload jsonb DEFAULT NULL::jsonb, queue text DEFAULT 'default'::text,"
            " delay_seconds double precision DEFAULT NULL::double precision, dequeue_at bigint DEFAULT NULL::bigint,"
            " priority bigint DEFAULT NULL::bigint, cost double precision DEFAULT 1, body bytea DEFAULT NULL::bytea,"
            " key text DEFAULT NULL::text, on_conflict text DEFAULT 'raise'::text, max_attempts integer",
            "message_dequeue": "queue text DEFAULT 'default'::text, max_messages integer DEFAULT 1, lease_seconds",
            "message_complete": "ids bigint[], attempts integer[]",
            "message_fail": "ids bigint[], attempts integer[], error text DEFAULT NULL::text, delay_seconds double"
            " precision DEFAULT NULL::double precision, retry boolean DEFAULT true",
            "message_defer": "ids bigint[], attempts integer[], delay_seconds double precision DEFAULT NULL::double"
            " precision, states",
            "message_heartbeat": "ids bigint[], attempts integer[], lease_seconds double precision DEFAULT 30",
            "message_cancel": "ids bigint[]",
            "message_redrive": "ids bigint[] DEFAULT NULL::bigint[], queue text DEFAULT NULL::text, channel text",
            "message_ending": "ids bigint[]",
            "history_maintain": "",
            "message_create_many": "queues text[], channels text[], keys text[], payloads jsonb[], bodies bytea[],"
            " dequeue_ats bigint[], delays double precision[], costs double precision[], max_attempts integer[],"
            " backoffs double precision[], on_conflict text DEFAULT 'raise'::text",
            "channel_set": "name text, queue text DEFAULT 'default'::text, weight double precision DEFAULT NULL",
            "queue_set": "name text, max_concurrency integer DEFAULT NULL::integer, paused boolean",
            "schema_version": "",
            "schema_serves": "",
        }.items():
            assert signatures[name].startswith(leading), name

    def test_when(self, sql: Query) -> None:
        """By the clock of the database: milliseconds since 1970, rounded down; a priority is in the past."""
        clock = "unix_ms(clock_timestamp())"
        for arguments, due in {
            "": f"BETWEEN {clock} - 60000 AND {clock}",
            ", delay_seconds => 3600": f"BETWEEN {clock} + 3500000 AND {clock} + 3600000",
            ", delay_seconds => 0": f"BETWEEN {clock} - 60000 AND {clock}",
            ", dequeue_at => -7": "= -7",
            ", priority => 9": "= -9",
            ", priority => 0": f"BETWEEN {clock} - 60000 AND {clock}",
            ", priority => 0, delay_seconds => 3600": f"BETWEEN {clock} + 3500000 AND {clock} + 3600000",
            ", priority => 0, dequeue_at => -7": "= -7",
        }.items():
            sql.execute(f"SELECT message_create('acme'{arguments})".encode())
            assert value(sql, f"SELECT dequeue_at {due} FROM message") is True, arguments
            sql.execute("DELETE FROM message")

    def test_unix_ms(self, sql: Query) -> None:
        for moment, expected in {
            "1970-01-01 00:00:00.0019+00": 1,
            "1969-12-31 23:59:59.9999+00": -1,
            "2030-01-01 12:00:00+00": 1_893_499_200_000,
            "2030-01-01 12:00:00.123456+02": 1_893_492_000_123,
        }.items():
            assert value(sql, "SELECT unix_ms(%s::timestamptz)", moment) == expected


class TestMessageDequeue:
    def test_columns(self, sql: Query) -> None:
        sql.execute("INSERT INTO message (channel, payload, body, dequeue_at, cost, key)"
                    " VALUES ('acme', '{\"doc\": 1}', 'x', 5, 2, 'k')")  # fmt: skip
        message = one(sql, "SELECT *, leased_until - clock_timestamp() AS leased_for FROM message_dequeue()")
        assert list(message)[:14] == [
            *("id", "channel", "attempt", "payload", "body", "state", "error", "dequeue_at", "cost"),
            *("created_at", "leased_until", "key", "forgiven", "first_leased_at"),
        ]
        assert message.pop("created_at") <= message.pop("first_leased_at") < message.pop("leased_until")
        assert 29 < message.pop("leased_for").total_seconds() <= 30
        assert list(message.values()) == [1, "acme", 1, {"doc": 1}, b"x", None, None, 5, 2.0, "k", 0]

    def test_defaults_and_names(self, sql: Query) -> None:
        sql.execute("INSERT INTO message (queue, channel) SELECT 'q', 'acme' FROM generate_series(1, 9)")
        sql.execute("INSERT INTO message (channel) VALUES ('acme')")
        assert [row["id"] for row in every(sql, "SELECT id FROM message_dequeue()")] == [10]
        for call, count in {
            "message_dequeue('q')": 1,
            "message_dequeue('q', 2)": 2,
            "message_dequeue('q', 1, 0.5)": 1,
            "message_dequeue(queue => 'q', max_messages => 2, lease_seconds => 600)": 2,
            "message_dequeue(lease_seconds => 600, queue => 'q')": 1,
            "message_dequeue('q', 100)": 2,
            "message_dequeue('none')": 0,
        }.items():
            assert len(every(sql, f"SELECT * FROM {call}")) == count, call

    def test_in_the_order_of_scheduling(self, sql: Query) -> None:
        sql.execute("INSERT INTO message (channel) VALUES ('a'), ('a'), ('a'), ('b'), ('b'), ('c')")
        batch = every(sql, "SELECT channel FROM message_dequeue('default', 6)")
        assert "".join(row["channel"] for row in batch) == "abcaba"


class TestLeases:
    @pytest.fixture
    def leased(self, sql: Query) -> Query:
        """Messages 1, 2 and 3 are leased, 4 is ready, 5 isn't there."""
        sql.execute("INSERT INTO message (channel) VALUES ('acme'), ('acme'), ('acme'), ('acme')")
        assert len(every(sql, "SELECT * FROM message_dequeue('default', 3)")) == 3
        return sql

    @pytest.mark.parametrize(
        ("call", "told"),
        [
            ("message_complete({})", "completed"),
            ("message_complete(attempts => ARRAY[1, 1, 0, 1], ids => ARRAY[5, 3, 4, 1])", "completed"),
            ("message_fail({})", "failed"),
            ("message_fail({}, 'broken')", "failed"),
            ("message_fail({}, error => 'broken', delay_seconds => 60)", "failed"),
            ("message_fail({}, delay_seconds => NULL, retry => true)", "failed"),
            ("message_fail({}, 'broken', retry => false)", "dead"),
            ("message_defer({})", "deferred"),
            ("message_defer({}, 60)", "deferred"),
            ("message_defer({}, states => ARRAY['1', '2', '3', '4']::jsonb[])", "deferred"),
            ("message_heartbeat({})", "extended"),
            ("message_heartbeat({}, lease_seconds => 60)", "extended"),
        ],
    )
    def test_results_in_the_order_given(self, leased: Query, call: str, told: str) -> None:
        expected = [(5, "not_found"), (3, told), (4, "stale"), (1, told)]
        assert results(leased, call.format("ARRAY[5, 3, 4, 1], ARRAY[1, 1, 0, 1]")) == expected

    def test_cancel(self, leased: Query) -> None:
        """Takes leased ones and ready ones."""
        expected = [(5, "not_found"), (4, "cancelled"), (1, "cancelled"), (4, "cancelled")]
        assert results(leased, "message_cancel(ARRAY[5, 4, 1, 4])") == expected
        assert [row["id"] for row in every(leased, "SELECT id FROM message ORDER BY id")] == [2, 3]

    def test_nothing_given(self, leased: Query) -> None:
        for verb in ("complete", "fail", "defer", "heartbeat"):
            assert results(leased, f"message_{verb}('{{}}', '{{}}')") == []
        assert results(leased, "message_cancel('{}')") == []

    def test_fail(self, leased: Query) -> None:
        """The error is kept; without a delay the place too, else it moves it."""
        query = "SELECT error, attempt, leased_until, dequeue_at FROM message WHERE id = 1"
        before = one(leased, query)
        leased.execute("SELECT message_fail('{1}', '{1}', 'broken', 0)")
        assert one(leased, query) == {**before, "error": "broken", "leased_until": None}
        assert one(leased, "SELECT id, attempt, error FROM message_dequeue()") == {
            "id": 1,
            "attempt": 2,
            "error": "broken",
        }
        leased.execute("SELECT message_fail('{1}', '{2}', delay_seconds => 3600)")
        after = one(leased, query)
        assert after["dequeue_at"] > before["dequeue_at"] + 3_500_000
        assert after["error"] is None

    def test_redrive(self, leased: Query) -> None:
        leased.execute("SELECT message_fail('{1, 2, 3}', '{1, 1, 1}', 'broken', retry => false)")
        assert results(leased, "message_redrive(ARRAY[5, 3])") == [(5, "not_found"), (3, "redriven")]
        assert results(leased, "message_redrive(queue => 'default', channel => 'none')") == []
        assert results(leased, "message_redrive(queue => 'default')") == [(1, "redriven"), (2, "redriven")]
        assert [row["id"] for row in every(leased, "SELECT id FROM message_dequeue('default', 9)")] == [4, 3, 1, 2]

    def test_ending(self, leased: Query) -> None:
        """A row for each that is neither ready nor leased."""
        leased.execute("SELECT message_complete('{1}', '{1}')")
        leased.execute("SELECT message_fail('{2}', '{1}', 'broken', retry => false)")
        told = every(leased, "SELECT * FROM message_ending('{5, 4, 3, 2, 1}')")
        assert [list(row)[:5] for row in told] == [["id", "outcome", "attempt", "error", "finished_at"]] * 3
        assert [tuple(row.values())[:4] for row in told] == [
            (5, None, None, None),
            (2, "dead", 1, "broken"),
            (1, "completed", 1, None),
        ]

    def test_defer(self, leased: Query) -> None:
        """Each message its own state, which stays until another is given."""
        leased.execute("SELECT message_defer('{2,1}', '{1,1}', states => ARRAY['{\"page\": 2}', '1']::jsonb[])")
        states = every(leased, "SELECT id, state FROM message_dequeue('default', 9)")
        assert {row["id"]: row["state"] for row in states} == {4: None, 1: 1, 2: {"page": 2}}
        leased.execute("SELECT message_defer('{2}', '{2}')")
        assert one(leased, "SELECT state FROM message WHERE id = 2") == {"state": {"page": 2}}
        assert len(every(leased, "SELECT id FROM message_dequeue('default', 9)")) == 1
        leased.execute("SELECT message_defer('{2}', '{3}', states => ARRAY[NULL::jsonb])")
        assert one(leased, "SELECT state FROM message WHERE id = 2") == {"state": None}

    def test_heartbeat(self, leased: Query) -> None:
        query = "SELECT leased_until - clock_timestamp() > interval '1 hour' FROM message WHERE id = 1"
        assert value(leased, query) is False
        leased.execute("SELECT message_heartbeat('{1}', '{1}', 7200)")
        assert value(leased, query) is True
        leased.execute("SELECT message_heartbeat('{1}', '{1}', 1)")
        assert value(leased, query) is True


class TestKeys:
    """What each way does is in enqueueing/test_keys.py."""

    def test_create(self, sql: Query) -> None:
        first = value(sql, "SELECT message_create('acme', '1', key => 'k', max_attempts => 3, backoff => 1.5)")
        assert value(sql, "SELECT message_create('acme', '2', key => 'k', on_conflict => 'ignore')") == first
        assert value(sql, "SELECT message_create('acme', '3', key => 'k', on_conflict => 'replace')") == first
        with pytest.raises(psycopg.errors.UniqueViolation) as error:
            sql.execute("SELECT message_create('acme', '4', key => 'k')")
        assert error.value.diag.constraint_name == "message_key"
        assert one(sql, "SELECT payload, key, max_attempts, backoff FROM message") == {
            "payload": 3,
            "key": "k",
            "max_attempts": None,
            "backoff": None,
        }

    def test_create_many(self, sql: Query) -> None:
        """A list for each column, null where none has it; the place in the lists and the id of each."""
        call = (
            "SELECT * FROM message_create_many('{default,default}', '{acme,globex}', '{k,NULL}',"
            " ARRAY['1', NULL]::jsonb[], NULL, '{NULL,5}', '{60,NULL}', '{1,2.5}', NULL, NULL)"
        )
        assert every(sql, call) == [{"place": 1, "id": 1}, {"place": 2, "id": 2}]
        stored = every(sql, "SELECT channel, key, payload, cost FROM message ORDER BY id")
        assert [tuple(row.values()) for row in stored] == [("acme", "k", 1, 1), ("globex", None, None, 2.5)]
        assert value(sql, "SELECT dequeue_at FROM message WHERE id = 2") == 5
        assert value(sql, "SELECT dequeue_at > unix_ms(clock()) + 50000 FROM message WHERE id = 1") is True
        with pytest.raises(psycopg.errors.UniqueViolation) as error:
            sql.execute(call.encode())
        assert error.value.diag.message_primary == "channel 'acme' of queue 'default' has a live message with key 'k'"
        assert (error.value.diag.table_name, error.value.diag.constraint_name) == ("message", "message_key")
        assert (
            every(sql, "SELECT * FROM message_create_many('{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}')")
            == []
        )


class TestChannelSet:
    """All that can be set, by channel_set and queue_set, is in limits/test_policies.py."""

    def test_creates_and_changes(self, sql: Query) -> None:
        query = "SELECT queue, name, weight FROM channel"
        sql.execute("SELECT channel_set('acme')")
        assert one(sql, query) == {"queue": "default", "name": "acme", "weight": None}
        sql.execute("SELECT channel_set('acme', weight => 3)")
        sql.execute("SELECT channel_set('acme')")
        assert one(sql, query) == {"queue": "default", "name": "acme", "weight": 3}
        sql.execute("SELECT channel_set('acme', 'q', 2)")
        assert len(every(sql, query)) == 2

    def test_takes_effect_at_the_next_dequeue(self, sql: Query) -> None:
        sql.execute(
            "INSERT INTO message (channel) SELECT unnest(array_fill(c, ARRAY[8])) FROM unnest(ARRAY['a', 'b']) c"
        )
        served = "".join(row["channel"] for row in every(sql, "SELECT channel FROM message_dequeue('default', 4)"))
        assert served == "abab"
        sql.execute("SELECT channel_set('a', weight => 3)")
        served = "".join(row["channel"] for row in every(sql, "SELECT channel FROM message_dequeue('default', 8)"))
        assert (served.count("a"), served.count("b")) == (6, 2)


def test_schema_version(sql: Query) -> None:
    assert value(sql, "SELECT schema_version()") == schema.HEAD


def test_the_clock_goes_on_within_a_statement(sql: Query) -> None:
    """What comes after a wait is later than its statement."""
    assert value(sql, "SELECT count(DISTINCT clock()) > 1 FROM generate_series(1, 10000)")
