"""How slow is the first dequeue after a flood, compared with the others?

    python -m benchmarks.flood [messages]

Enqueues that many messages of one tenant (500,000 unless told), a transaction each, while nobody dequeues, then one
of each of 50 others, and prints the time of the first dequeue over the median of the next 200. The connection has
dequeued from another queue before, so that its plans are made. Runs on an embedded PostgreSQL of its own.
"""

import statistics
import sys
import time

import psycopg
from sqlalchemy import create_engine

from fairqueue import embedded, schema

ENQUEUE = """
DO $$
BEGIN
    FOR number IN 1 .. {} LOOP
        INSERT INTO fairqueue.message (channel) VALUES ('flood');
        COMMIT;
    END LOOP;
END
$$
"""


def main(messages: int = 500_000) -> None:
    with embedded.ephemeral() as server:
        engine = create_engine(server.url())
        with engine.begin() as begun:
            schema.install(begun)
        engine.dispose()
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            measure(connection, messages)


def measure(connection: psycopg.Connection, messages: int) -> None:
    connection.execute("SET synchronous_commit = off")
    connection.execute("INSERT INTO fairqueue.message (queue, channel) VALUES ('warm', 'warm')")
    for _ in range(10):
        dequeue(connection, "warm", 1)
    connection.execute(ENQUEUE.format(messages).encode())
    for number in range(50):
        connection.execute("INSERT INTO fairqueue.message (channel) VALUES (%s)", (f"quiet{number}",))
    for limit in (1, 100):
        times = [dequeue(connection, "default", limit) for _ in range(201)]
        median = statistics.median(times[1:])
        print(
            f"batch {limit}: first {times[0] * 1000:.2f} ms, median {median * 1000:.2f} ms,"
            f" largest {max(times[1:]) * 1000:.2f} ms, first/median {times[0] / median:.1f}"
        )


def dequeue(connection: psycopg.Connection, queue: str, limit: int) -> float:
    start = time.perf_counter()
    connection.execute("SELECT * FROM fairqueue.message_dequeue(%s, %s)", (queue, limit)).fetchall()
    return time.perf_counter() - start


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
