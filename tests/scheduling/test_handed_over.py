"""Whichever way a message is served, the worker gets all of it as it was, and its row says who has it.

There are five ways, each a statement of its own.
"""

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import psycopg
import pytest
from psycopg.rows import dict_row
from sqlalchemy.orm import Session

from tests.acts import EPOCH, lease_of, sql
from tests.fixtures.connections import Raw
from tests.limiting import NOW
from tests.scheduling.taking import CHANNELS, give_all_away, plan_once

pytestmark = [pytest.mark.usefixtures("clock_that_stands"), pytest.mark.shared_database]

Dicts = psycopg.Connection[dict[str, Any]]

#: Every column says something else. The third of each channel was tried as often as can be counted.
ALL_OF_IT = """
    INSERT INTO fairqueue.message (channel, key, payload, body, dequeue_at, cost, max_attempts, backoff, attempt,
        forgiven, first_leased_at, leased_at, worker, counted, state, error, created_at)
    SELECT c, 'key ' || n, jsonb_build_object('payload', n), convert_to('body ' || n, 'UTF8'), -n, 2, 5, 7,
        CASE WHEN n = :count - 2 THEN 2147483647 ELSE n % 3 END, least(n % 3, 1),
        CASE WHEN n % 2 = 0 THEN timestamptz '2020-01-01 UTC' + n * interval '1 s' END, '2021-01-01 UTC', 'before', 7,
        jsonb_build_object('state', n), 'error ' || n, timestamptz '2019-01-01 UTC' + n * interval '1 s'
    FROM unnest(CAST(:channels AS text[])) AS c, generate_series(1, :count) AS n
"""
#: How often the functions that serve in turns were called, as far as nobody else has been told of it.
CALLS = "SELECT funcname, calls FROM pg_stat_xact_user_functions WHERE funcname LIKE 'scheduler_serve%'"


def heads(session: Session) -> None:
    sql(session, ALL_OF_IT, channels=[*CHANNELS], count=12)


def shares(session: Session) -> None:
    sql(session, ALL_OF_IT, channels=["acme"], count=12)


def planned(session: Session) -> None:
    sql(session, ALL_OF_IT, channels=[*CHANNELS], count=120)
    plan_once(session)
    lease_of(session, 1)


def planned_without_tickets(session: Session) -> None:
    """It has to be served in turns."""
    give_all_away(session)
    planned(session)
    sql(session, "DELETE FROM fairqueue.tickets")


TURN = ["scheduler_serve"]
WAYS = {
    "heads": (heads, 6, [*TURN, "scheduler_serve_heads"]),
    "shares": (shares, 6, [*TURN, "scheduler_serve_heads", "scheduler_serve_shares"]),
    "plan": (planned_without_tickets, 6, [*TURN, "scheduler_serve_plan"]),
    "tickets": (planned, 6, []),
    "one ticket": (planned, 1, []),
}


def messages(connection: Dicts) -> dict[int, dict[str, Any]]:
    return {row["id"]: row for row in connection.execute("SELECT * FROM fairqueue.message").fetchall()}


def calls(connection: Dicts) -> Counter[str]:
    return Counter({row["funcname"]: row["calls"] for row in connection.execute(CALLS).fetchall()})


@pytest.fixture
def connection(raw: Raw, database_url: str) -> Dicts:
    connection = raw(database_url)
    connection.execute("SET track_functions = 'all'")
    dicts = cast("Dicts", connection)
    dicts.row_factory = dict_row
    return dicts


@pytest.mark.parametrize(("prepare", "size", "ways"), WAYS.values(), ids=WAYS)
def test_all_of_it(
    session: Session, connection: Dicts, prepare: Callable[[Session], None], size: int, ways: list[str]
) -> None:
    prepare(session)
    now = EPOCH + timedelta(milliseconds=NOW)
    batch: list[dict[str, Any]] = []
    while all(message["attempt"] < 2_147_483_647 for message in batch):
        before, earlier = messages(connection), calls(connection)
        query = "SELECT * FROM fairqueue.message_dequeue('default', %s, 3600, 'w')"
        batch = connection.execute(query, [size]).fetchall()
        assert sorted(calls(connection) - earlier) == ways
        after = messages(connection)
        connection.commit()
        assert len(batch) == size
        for message in batch:
            expected = before[message["id"]]
            expected["attempt"] = min(expected["attempt"] + 1, 2_147_483_647)
            expected["leased_until"] = now + timedelta(hours=1)
            expected["first_leased_at"] = expected["first_leased_at"] or now
            assert message == {column: expected[column] for column in message}
            assert after[message["id"]] == {**expected, "leased_at": now, "worker": "w", "counted": None}
