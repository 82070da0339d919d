"""PgQueuer, by the calls that its own worker makes."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from uuid import uuid4

from benchmarks.systems.base import LEASE, Lease

from .base import Client, Peer

_JOB = "job"


class PgQueuer(Peer):
    name = "pgqueuer"
    about = "PgQueuer: dequeue and log_jobs of its Queries, over asyncpg, in order of arrival"
    package = "pgqueuer"
    url = "https://github.com/janbjorge/pgqueuer"

    def install(self, dsn: str) -> None:
        with self.connected(dsn) as connection:
            connection.run(connection.api.install())

    def connect(self, dsn: str) -> Client:
        async def opening() -> Any:
            import asyncpg
            from pgqueuer.queries import Queries

            connection = await asyncpg.connect(dsn)
            return Queries.from_asyncpg_connection(connection), connection.close

        return Client.open(opening())

    def enqueue(self, connection: Client, rows: Sequence[tuple[str, str]]) -> None:
        payloads = [f"{channel} {payload}".encode() for channel, payload in rows]
        connection.run(connection.api.enqueue([_JOB] * len(rows), payloads, [0] * len(rows)))

    def dequeue(self, connection: Client, n: int, *, lease: float = LEASE, timed: bool = False) -> list[Lease]:
        from pgqueuer.queries import EntrypointExecutionParameter

        jobs = connection.run(
            connection.api.dequeue(
                batch_size=n,
                entrypoints={_JOB: EntrypointExecutionParameter(0)},
                queue_manager_id=uuid4(),
                global_concurrency_limit=None,
                heartbeat_timeout=timedelta(seconds=lease),
            )
        )
        leases = []
        for job in jobs:
            channel, _, payload = job.payload.decode().partition(" ")
            leases.append(Lease(job, job.attempts, channel, json.loads(payload)))
        return leases

    def complete(self, connection: Client, leases: Sequence[Lease]) -> int:
        connection.run(connection.api.log_jobs([(lease.id, "successful", None) for lease in leases]))
        return len(leases)

    def backlog(self, connection: Client) -> int:
        return sum(found.count for found in connection.run(connection.api.queue_size()))
