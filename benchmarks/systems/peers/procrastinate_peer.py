"""Procrastinate, by the job manager that its own worker uses."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from benchmarks.systems.base import LEASE, Lease

from .base import Client, Peer

_QUEUE = "bench"


class Procrastinate(Peer):
    name = "procrastinate"
    about = "Procrastinate: fetch_job and finish_job of its JobManager, one job a call, in order of arrival"
    package = "procrastinate"
    url = "https://procrastinate.readthedocs.io"
    keeps = False
    batches = False

    def install(self, dsn: str) -> None:
        with self.connected(dsn) as connection:
            connection.run(connection.api.schema_manager.apply_schema_async())

    def connect(self, dsn: str) -> Client:
        async def opening() -> Any:
            import procrastinate

            app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=dsn, min_size=1, max_size=1))
            await app.open_async()
            return app, app.close_async

        return Client.open(opening())

    def enqueue(self, connection: Client, rows: Sequence[tuple[str, str]]) -> None:
        from procrastinate.jobs import Job

        jobs = [
            Job(
                queue=_QUEUE,
                lock=self.lock(channel),
                queueing_lock=None,
                task_name="job",
                task_kwargs={"channel": channel, "payload": json.loads(payload)},
            )
            for channel, payload in rows
        ]
        connection.run(connection.api.job_manager.batch_defer_jobs_async(jobs))

    def lock(self, channel: str) -> str | None:
        return None

    def dequeue(self, connection: Client, n: int, *, lease: float = LEASE, timed: bool = False) -> list[Lease]:
        async def fetch() -> list[Lease]:
            manager, found = connection.api.job_manager, []
            for _ in range(n):
                job = await manager.fetch_job(queues=[_QUEUE], worker_id=None)
                if job is None:
                    break
                found.append(Lease(job.id, job.attempts, job.task_kwargs["channel"], job.task_kwargs["payload"]))
            return found

        return connection.run(fetch())

    def complete(self, connection: Client, leases: Sequence[Lease]) -> int:
        from procrastinate.jobs import Status

        async def finish() -> None:
            for lease in leases:
                await connection.api.job_manager.finish_job_by_id_async(lease.id, Status.SUCCEEDED, delete_job=True)

        connection.run(finish())
        return len(leases)

    def backlog(self, connection: Client) -> int:
        async def count() -> int:
            found = await connection.api.job_manager.list_queues_async()
            return sum(row["todo"] + row["doing"] for row in found)

        return connection.run(count())


class ProcrastinateLock(Procrastinate):
    name = "procrastinate-lock"
    about = "Procrastinate with lock=tenant, as is advised for tenants: one job of each at a time"
    fair = True

    def lock(self, channel: str) -> str | None:
        return channel
