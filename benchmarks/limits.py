"""What does a dequeue cost beside channels that are at their limits?

    python -m benchmarks.limits [channels]

Two queues in one database, each with 1,000 channels of 1,000 messages. In one of them there are besides so many
channels (100,000 unless told) at their max_concurrency, as many that wait for their hour, and as many that wait for
their rate. Prints the time of a dequeue there over the time of one in the other queue: medians of 200 each, taken by
turns, for batches of 1 and 100. Runs on an embedded PostgreSQL of its own.
"""

import statistics
import sys
import time

import psycopg
from sqlalchemy import create_engine

from fairqueue import embedded, schema

LIMITS = {
    "capped": "max_concurrency => 1",
    "waiting": "",
    "rated": "release_interval_ms => 36000000",
}


def main(channels: int = 100_000) -> None:
    with embedded.ephemeral() as server:
        engine = create_engine(server.url())
        with engine.begin() as begun:
            schema.install(begun)
        engine.dispose()
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            connection.execute("SET synchronous_commit = off")
            crowd(connection, channels)
            for queue in ("free", "crowded"):
                enqueue(connection, queue, "channel", channels=1000, messages=1000)
            connection.execute("VACUUM ANALYZE")
            measure(connection)


def crowd(connection: psycopg.Connection, channels: int) -> None:
    """Channels that can't be served: of each two messages one is running, or both are for later."""
    for name, limit in LIMITS.items():
        start = time.perf_counter()
        if limit:
            connection.execute(
                f"SELECT fairqueue.channel_set(%s || g, 'crowded', {limit}) FROM generate_series(1, %s) g".encode(),
                (name, channels),
            )
        delay = 36_000_000 if name == "waiting" else 0
        enqueue(connection, "crowded", name, channels=channels, messages=2, delay=delay)
        served, calls = 0, 0
        while batch := dequeue(connection, "crowded", 10_000)[1]:
            served, calls = served + batch, calls + 1
        print(
            f"{channels} channels {name}: {served} messages leased by {calls} dequeues, "
            f"{time.perf_counter() - start:.0f} s"
        )


def enqueue(
    connection: psycopg.Connection, queue: str, name: str, *, channels: int, messages: int, delay: int = 0
) -> None:
    connection.execute(
        "INSERT INTO fairqueue.message (queue, channel, dequeue_at)"
        " SELECT %s, %s || c, fairqueue.unix_ms(fairqueue.clock()) + %s"
        " FROM generate_series(1, %s) m, generate_series(1, %s) c",
        (queue, name, delay, messages, channels),
    )


def dequeue(connection: psycopg.Connection, queue: str, limit: int) -> tuple[float, int]:
    """The seconds it took, and how many messages came."""
    start = time.perf_counter()
    rows = connection.execute("SELECT * FROM fairqueue.message_dequeue(%s, %s, 36000)", (queue, limit)).fetchall()
    return time.perf_counter() - start, len(rows)


def measure(connection: psycopg.Connection) -> None:
    for limit in (1, 100):
        times: dict[str, list[float]] = {"free": [], "crowded": []}
        for queue in times:
            for _ in range(100):  # The news of its channels is taken in first.
                dequeue(connection, queue, limit)
        for _ in range(200):
            for queue, taken in times.items():
                seconds, served = dequeue(connection, queue, limit)
                assert served == limit
                taken.append(seconds)
        free, crowded = (statistics.median(taken) * 1000 for taken in times.values())
        print(f"batch {limit}: free {free:.2f} ms, crowded {crowded:.2f} ms, crowded/free {crowded / free:.2f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
