"""PGMQ, by its Python client and the SQL that comes with it, without the extension."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import psycopg

from benchmarks.systems.base import LEASE, Lease

from .base import Peer

_QUEUE = "bench"


class PGMQ(Peer):
    name = "pgmq"
    about = "PGMQ: read_batch and delete_batch of its Python client, in order of arrival"
    package = "pgmq"
    url = "https://github.com/pgmq/pgmq"
    keeps = False

    def install(self, dsn: str) -> None:
        from pgmq import install_pgmq_from_sql

        with psycopg.connect(dsn) as connection:
            install_pgmq_from_sql(conn=connection)
        with self.connected(dsn) as queue:
            queue.create_queue(_QUEUE)
            self.index(queue)

    def index(self, queue: Any) -> None:
        """Make what its way to read needs besides."""

    def connect(self, dsn: str) -> Any:
        from pgmq import PGMQueue
        from psycopg_pool import ConnectionPool

        pool = ConnectionPool(dsn, min_size=1, max_size=2, kwargs={"autocommit": True}, open=True)
        queue = PGMQueue(pool=pool, init_extension=False)
        # Else it sends a BEGIN and a COMMIT of its own around each statement.
        queue.conn = pool.getconn()

        def close() -> None:  # it leaves a pool that it was given open
            pool.putconn(queue.conn)
            pool.close()

        queue.close = close
        return queue

    def enqueue(self, connection: Any, rows: Sequence[tuple[str, str]]) -> None:
        connection.send_batch(
            _QUEUE,
            [json.loads(payload) for _channel, payload in rows],
            headers=[{"x-pgmq-group": channel} for channel, _payload in rows],
        )

    def dequeue(self, connection: Any, n: int, *, lease: float = LEASE, timed: bool = False) -> list[Lease]:
        return _leases(connection.read_batch(_QUEUE, vt=int(lease), batch_size=n, conn=connection.conn))

    def complete(self, connection: Any, leases: Sequence[Lease]) -> int:
        return len(connection.delete_batch(_QUEUE, [lease.id for lease in leases], conn=connection.conn))

    def backlog(self, connection: Any) -> int:
        return int(connection.metrics(_QUEUE).queue_length)


class PGMQGroupedRR(PGMQ):
    name = "pgmq-grouped-rr"
    about = "PGMQ: read_grouped_rr, which takes turns among the groups within one call"
    fair = True

    def index(self, queue: Any) -> None:
        queue.create_fifo_index(_QUEUE)

    def dequeue(self, connection: Any, n: int, *, lease: float = LEASE, timed: bool = False) -> list[Lease]:
        return _leases(connection.read_grouped_rr(_QUEUE, vt=int(lease), qty=n, conn=connection.conn))


def _leases(messages: Any) -> list[Lease]:
    return [Lease(m.msg_id, m.read_ct, m.headers["x-pgmq-group"], m.message) for m in messages or ()]
