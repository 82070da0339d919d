"""Rows of history as nobody would like to meet them, and the history as Python has it."""

from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from typing import Any

import psycopg

from fairqueue.spark.schemas import HISTORY

DAY = date(2026, 3, 28)
COLUMNS = [column.split()[0] for column in HISTORY.split(",")]

_INSERT = """
    INSERT INTO fairqueue.history (message_id, queue, channel, key, outcome, attempt, cost, error, worker, dequeue_at,
        created_at, first_leased_at, leased_at, finished_at)
    VALUES (%(message_id)s, %(queue)s, %(channel)s, %(key)s, %(outcome)s, %(attempt)s, %(cost)s, %(error)s, %(worker)s,
        %(dequeue_at)s, %(created_at)s, %(first_leased_at)s, %(leased_at)s, %(finished_at)s)"""


def noon(day: float = 0) -> datetime:
    return datetime(DAY.year, DAY.month, DAY.day, 12, tzinfo=UTC) + timedelta(days=day)


def row(message_id: int, day: float = 0, **others: Any) -> dict[str, Any]:
    """An outcome on a day, counted from DAY; every third was cancelled before it was ever leased."""
    leased = noon() + timedelta(days=day, seconds=-1)
    never = message_id % 3 == 0
    return {
        "message_id": message_id,
        "queue": ("default", "007", "a/b=c %41 é")[message_id % 3],
        "channel": f"tenant, {message_id % 5}",
        "key": (None, "", "naïve 'key' \\ \"\n|\x1f")[message_id % 3],
        "outcome": "cancelled" if never else "completed",
        "attempt": 0 if never else message_id % 7,
        "cost": 0.1 * message_id + 1e-17,
        "error": (None, "Zeile 1\nZeile 2 \U0001f642", "")[message_id % 3],
        "worker": None if never else "host/1",
        "dequeue_at": -message_id * 10**12,
        "created_at": leased - timedelta(microseconds=message_id),
        "first_leased_at": None if never else leased - timedelta(days=1000),
        "leased_at": None if never else leased,
        "finished_at": noon() + timedelta(days=day, microseconds=message_id),
        **others,
    }


def add(connection: psycopg.Connection[Any], rows: Iterable[dict[str, Any]]) -> None:
    """In the transaction that is open, or, with autocommit, each in one of its own."""
    connection.cursor().executemany(_INSERT, list(rows))


def add_days(connection: psycopg.Connection[Any], *days: int) -> None:
    """Partitions; rows of other days go to history_default."""
    for day in days:
        connection.execute("SELECT fairqueue.history_add(%s, true)", (DAY + timedelta(days=day),))
    connection.commit()


def history(connection: psycopg.Connection[Any], where: str = "true") -> list[dict[str, Any]]:
    """What is there, as Spark would have it."""
    query = f"SELECT {', '.join(COLUMNS)} FROM fairqueue.history WHERE {where}"
    found = connection.execute(query.encode()).fetchall()
    connection.commit()
    rows = [dict(zip(COLUMNS, values, strict=True)) for values in found]
    return ordered({**each, "xid": int(each["xid"])} for each in rows)


def release(connection: psycopg.Connection[Any], day: date) -> None:
    """Drop a day, as who has all of it elsewhere."""
    connection.execute(
        "SELECT fairqueue.history_release(%(day)s, d.rows, d.checksum) FROM fairqueue.history_digest(%(day)s) d",
        {"day": day},
    )


def ordered(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda each: (each["message_id"], each["finished_at"]))
