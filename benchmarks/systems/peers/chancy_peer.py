"""Chancy, with a queue of its own for each tenant."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from .base import Client, Working

_LOG = logging.getLogger(__name__)  # without it, each job is shown on the terminal
#: Where the job of this process reports to: Chancy finds jobs by module and name.
_handles: list[Callable[[str], None]] = []


async def job(channel: str, payload: Any) -> None:
    _handles[-1](channel)


def _queue(name: str) -> Any:
    from chancy import Chancy, Queue

    return Queue(name, concurrency=1, executor=Chancy.Executor.Async, polling_interval=1, eager_polling=True)


class Chancy(Working):
    name = "chancy"
    about = "Chancy: a queue for each tenant, one job at a time, its async executor, eager polling"
    package = "chancy"
    url = "https://github.com/TkTech/chancy"
    fair = True

    backlog_sql = "SELECT count(*) FROM chancy_jobs WHERE state NOT IN ('succeeded', 'failed')"

    def install(self, dsn: str) -> None:
        with self.connected(dsn) as connection:
            connection.run(connection.api.migrate())
            # Its worker would declare this one, with processes for jobs.
            connection.run(connection.api.declare(_queue("default")))

    def connect(self, dsn: str) -> Client:
        async def opening() -> Any:
            from chancy import Chancy

            app = Chancy(dsn, log=_LOG)
            await app.pool.open()
            return app, app.pool.close

        return Client.open(opening())

    def enqueue(self, connection: Client, rows: Sequence[tuple[str, str]]) -> None:
        from chancy import Job

        async def push() -> None:
            for channel in {channel: None for channel, _ in rows}:
                await connection.api.declare(_queue(channel))
            jobs = [
                Job.from_func(job, kwargs={"channel": channel, "payload": json.loads(payload)}, queue=channel)
                for channel, payload in rows
            ]
            async for _ in connection.api.push_many(jobs):
                pass

        connection.run(push())

    def work(self, dsn: str, handle: Callable[[str], None], stop: threading.Event) -> None:
        async def working() -> None:
            from chancy import Chancy, Worker

            async with Chancy(dsn, log=_LOG) as app, Worker(app, register_signal_handlers=False):
                await asyncio.to_thread(stop.wait)

        _handles.append(handle)
        asyncio.run(working())
