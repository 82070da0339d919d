"""DBOS Transact, whose queues are partitioned by tenant."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from .base import Working

_QUEUE = "bench"
_JOB = "job"


class DBOS(Working):
    name = "dbos"
    about = "DBOS Transact: a queue partitioned by tenant, partition_concurrency 1 for its batched dequeue"
    package = "dbos"
    url = "https://github.com/dbos-inc/dbos-transact-py"
    fair = True

    backlog_sql = "SELECT count(*) FROM dbos.workflow_status WHERE status IN ('ENQUEUED', 'PENDING')"

    def install(self, dsn: str) -> None:
        from dbos import run_dbos_database_migrations

        run_dbos_database_migrations(dsn)
        with self.connected(dsn) as connection:
            connection.register_queue(
                _QUEUE, worker_concurrency=self.at_a_time, partition_concurrency=1, polling_interval_sec=0.001
            )

    def connect(self, dsn: str) -> Any:
        from dbos import DBOSClient

        client = DBOSClient(system_database_url=dsn)
        client.close = client.destroy
        return client

    def enqueue(self, connection: Any, rows: Sequence[tuple[str, str]]) -> None:
        for channel, payload in rows:
            options = {"workflow_name": _JOB, "queue_name": _QUEUE, "queue_partition_key": channel}
            connection.enqueue(options, channel, payload)

    def work(self, dsn: str, handle: Callable[[str], None], stop: threading.Event) -> None:
        from dbos import DBOS

        DBOS(config={"name": "bench", "system_database_url": dsn, "log_level": "CRITICAL", "run_admin_server": False})

        def job(channel: str, payload: str) -> None:
            handle(channel)

        DBOS.workflow(name=_JOB)(job)
        DBOS.launch()
        try:
            stop.wait()
        finally:
            DBOS.destroy(destroy_registry=True)
