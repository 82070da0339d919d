"""Short words for what the tests do with a queue."""

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta

import sqlalchemy
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

import fairqueue as fq
from fairqueue import schema
from fairqueue.testing import Clock

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
#: Those first whose triggers leave signals.
TABLES = (
    "message",
    "channel",
    "queue",
    "dead_message",
    "history",
    "lane",
    "plan",
    "missed",
    "tickets",
    "rotation",
    "signal",
    "load",
    "stage",
    "feed",
    "dropped",
)
#: The next dequeue is one of those that tidy up.
TIDY = """
    UPDATE fairqueue.rotation
    SET turn = (turn / 64 + 1) * 64, era = fairqueue.rotation_era((turn / 64 + 1) * 64), due_floor = 0
"""


def put(session: Session, channel: str, count: int = 1, **fields: object) -> list[int]:
    """Enqueue messages of one channel in a transaction of their own."""
    row: fq.MessageRow = {"channel": channel, **fields}  # type: ignore[typeddict-item]
    ids = fq.enqueue_many(session, [row] * count)
    session.commit()
    return ids


def one_by_one(count: int, channel: str) -> str:
    """So many INSERTs of a message as one statement: one transaction, and a signal each."""
    return f"""
        DO $$ BEGIN
            FOR number IN 1 .. {count} LOOP
                INSERT INTO fairqueue.message (channel) VALUES ('{channel}');
            END LOOP;
        END $$
    """


def put_all(session: Session, counts: Mapping[str, int]) -> None:
    """Enqueue so many messages of each channel, channel after channel."""
    for channel, count in counts.items():
        put(session, channel, count)


def take(session: Session, limit: int = 1, lease: float = 3600, queue: str = "default") -> list[str]:
    """One dequeue in a transaction of its own: the channels served."""
    return [message.channel for message in lease_of(session, limit, lease, queue)]


def lease_of(session: Session, limit: int = 1, lease: float = 3600, queue: str = "default") -> list[fq.LeasedMessage]:
    """One dequeue in a transaction of its own: the messages served."""
    batch = list(session.scalars(fq.dequeue(limit=limit, lease=lease, queue=queue)))
    session.commit()
    return batch


def drain(session: Session, limit: int = 1, queue: str = "default") -> list[fq.LeasedMessage]:
    """Dequeue until nothing comes back."""
    served: list[fq.LeasedMessage] = []
    while batch := lease_of(session, limit, queue=queue):
        served += batch
    return served


def complete(session: Session, leases: Iterable[fq.LeasedMessage]) -> list[str]:
    results = [row.result for row in session.execute(fq.complete(leases))]
    session.commit()
    return results


def sql(session: Session, statement: str, **parameters: object) -> None:
    session.execute(text(statement), parameters)
    session.commit()


def plan_ahead(session: Session, messages: int = 64) -> None:
    """As if much had been served: so many messages are scheduled ahead by the next dequeue that finds no plan."""
    sql(session, "UPDATE fairqueue.rotation SET ahead = :n, plan_at = 0", n=messages)


def alter(engine: Engine, function: str, old: str, new: str) -> None:
    """Let a function of the queue's say something else for the rest of the test: a bound that few rows come to.

    For tests with a database of their own.
    """
    query = text("SELECT pg_get_functiondef(CAST(:name AS regproc))")
    with engine.begin() as connection:
        definition: str = connection.execute(query, {"name": f"fairqueue.{function}"}).scalar_one()
        assert old in definition
        schema.run(connection, definition.replace(old, new))


def expire(session: Session, ids: Iterable[int]) -> None:
    """Time travel: what it would look like if these leases had been given long ago."""
    expired = {"ids": list(ids)}
    session.execute(text("UPDATE fairqueue.message SET leased_until = '2000-01-01' WHERE id = ANY (:ids)"), expired)
    session.commit()


def clock(session: Session) -> int:
    """The database clock in Unix milliseconds."""
    now: int = session.execute(text("SELECT fairqueue.unix_ms(fairqueue.clock())")).scalar_one()
    session.commit()
    return now


def stop_clock(engine: Engine, at: int) -> None:
    """Time travel: let the queue go by a clock that stands at `at`, in Unix milliseconds, for the rest of the test."""
    clock = Clock(engine).__enter__()
    clock.freeze()
    clock.move_to(EPOCH + timedelta(milliseconds=at))


def move_clock(session: Session, at: int) -> None:
    """Set the clock that stop_clock stopped."""
    session.commit()
    engine = session.get_bind()
    assert isinstance(engine, Engine)
    Clock(engine).move_to(EPOCH + timedelta(milliseconds=at))


def wait_until(condition: Callable[[], object], deadline: float = 30) -> None:
    """Come back when the condition holds; fail when it doesn't before the deadline."""
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, f"{condition} did not come true within {deadline} s"
        time.sleep(0.005)


def sessions_elsewhere(engine: Engine) -> list[Session]:
    """Install the queue in the schema "My Q", too; returns sessions that were told of it in each way there is."""
    with engine.begin() as connection:
        schema.install(connection, "My Q")
    options = fq.in_schema("My Q")
    sessions = [Session(engine.execution_options(**options)), Session(engine)]
    sessions[1].connection(execution_options=options)
    if sqlalchemy.__version__ >= "2.1":
        sessions.append(Session(engine, execution_options=options))
    return sessions


def clear(engine: Engine) -> None:
    """As after a fresh installation, ids from 1. Not by TRUNCATE, after which every session plans everything anew."""
    statements = [f"DELETE FROM fairqueue.{table};" for table in TABLES]
    statements += [
        f"PERFORM setval(pg_get_serial_sequence('fairqueue.{table}', 'id'), 1, false);"
        for table in ("message", "dropped")
    ]
    with engine.begin() as connection:
        connection.execute(text(f"DO $$ BEGIN {' '.join(statements)} END $$"))
