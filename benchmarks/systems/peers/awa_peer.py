"""Awa, whose worker is in Rust."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import make_url

from .base import Client, Working

_QUEUE = "bench"


@dataclass
class Job:
    channel: str
    payload: str


def url(dsn: str) -> str:
    """As its driver reads it: a name of the host has to be there, also where a socket is used."""
    parsed = make_url(dsn)
    return parsed.set(host=parsed.host or "localhost").render_as_string(hide_password=False)


class Awa(Working):
    name = "awa"
    about = "Awa: its worker with an async handler, in order of arrival"
    package = "awa-pg"
    url = "https://github.com/hardbyte/awa"

    backlog_sql = "SELECT count(*) FROM awa.jobs WHERE state NOT IN ('completed', 'failed', 'cancelled')"

    def install(self, dsn: str) -> None:
        with self.connected(dsn) as connection:
            connection.run(connection.api.migrate())

    def connect(self, dsn: str) -> Client:
        async def opening() -> Any:
            import awa

            client = awa.AsyncClient(url(dsn))
            return client, client.close

        return Client.open(opening())

    def enqueue(self, connection: Client, rows: Sequence[tuple[str, str]]) -> None:
        async def insert() -> None:
            await connection.api.insert_many_copy([Job(*row) for row in rows], queue=_QUEUE)

        connection.run(insert())

    def work(self, dsn: str, handle: Callable[[str], None], stop: threading.Event) -> None:
        async def working() -> None:
            import awa

            client = awa.AsyncClient(url(dsn))

            async def job(found: Any) -> None:
                handle(found.args.channel)

            client.task(Job, queue=_QUEUE)(job)
            await client.start([(_QUEUE, self.at_a_time)])
            try:
                await asyncio.to_thread(stop.wait)
            finally:
                await client.shutdown()
                await client.close()

        asyncio.run(working())
