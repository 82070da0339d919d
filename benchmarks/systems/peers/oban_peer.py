"""Oban for Python, without its paid extensions."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import psycopg

from .base import Client, Working

_QUEUE = "bench"
_PYTHON = (3, 12)


class Oban(Working):
    name = "oban"
    about = "Oban for Python: its worker, in order of arrival"
    package = "oban"
    url = "https://github.com/oban-bg/oban-py"

    backlog_sql = "SELECT count(*) FROM oban_jobs WHERE state NOT IN ('completed', 'discarded', 'cancelled')"

    def missing(self) -> str | None:
        if sys.version_info < _PYTHON:
            return f"oban needs Python {'.'.join(map(str, _PYTHON))} or later"
        return super().missing()

    def install(self, dsn: str) -> None:
        from oban.schema import install_sql

        with psycopg.connect(dsn) as connection:
            connection.execute(install_sql().encode())

    def connect(self, dsn: str) -> Client:
        async def opening() -> Any:
            from oban import Oban

            pool = await Oban.create_pool(dsn)
            return Oban(pool=pool), pool.close

        return Client.open(opening())

    def enqueue(self, connection: Client, rows: Sequence[tuple[str, str]]) -> None:
        job = _job(lambda _channel: None)
        jobs = [job.new({"channel": channel, "payload": payload}) for channel, payload in rows]
        connection.run(connection.api.enqueue_many(jobs))

    def work(self, dsn: str, handle: Callable[[str], None], stop: threading.Event) -> None:
        async def working() -> None:
            from oban import Oban

            pool = await Oban.create_pool(dsn)
            _job(handle)
            async with Oban(pool=pool, queues={_QUEUE: self.at_a_time}):
                await asyncio.to_thread(stop.wait)
            await pool.close()

        asyncio.run(working())


def _job(handle: Callable[[str], None]) -> Any:
    """The class that Oban finds by its name: the one that was made last."""
    from oban import worker

    @worker(queue=_QUEUE)
    class Job:
        async def process(self, job: Any) -> None:
            handle(job.args["channel"])

    return Job
