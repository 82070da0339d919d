"""A connection pooler in transaction mode, as small as tests need it.

::

    with Pooler(url, servers=2) as pooler:
        create_engine(pooler.url, connect_args={"prepare_threshold": None})

Clients share so many server connections: one is given to a client with the first message of a transaction, and taken
back when the server says that it is idle. What a session keeps beyond that, such as LISTEN, an advisory lock or a SET,
stays with the server connection; what comes in on one that no client has, such as a notification, is dropped. Clients
that ask to cancel are not heard. No TLS, and no password: servers are asked by their socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
from typing import Any, Self

import psycopg
import pytest
from sqlalchemy import make_url

from tests.fixtures.postgres import libpq

_SSL, _GSS, _CANCEL = 80877103, 80877104, 80877102
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Pooler:
    """In a thread with an event loop of its own, from `with` on."""

    def __init__(self, url: str, servers: int) -> None:
        self._target = make_url(url)
        if not (self._target.query.get("host") or "").startswith("/"):  # type: ignore[union-attr]
            pytest.skip("the pooler asks servers by their socket")
        self._count = servers
        with psycopg.connect(libpq(url)) as connection:
            self._user = connection.info.user
            self._database = connection.info.dbname
            self._socket = f"{connection.info.host}/.s.PGSQL.{connection.info.port}"
        self._free: asyncio.Queue[_Server]
        self._servers: list[_Server] = []
        self._clients: set[asyncio.Task[Any]] = set()
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)
        self.port = 0
        #: How many transactions each server connection has had.
        self.transactions: dict[int, int] = {}

    @property
    def url(self) -> str:
        place = {"host": "127.0.0.1", "port": self.port, "query": {"sslmode": "disable"}}
        return self._target.set(username=self._user, **place).render_as_string(hide_password=False)  # type: ignore[arg-type]

    @property
    def pids(self) -> list[int]:
        """The backends of the server connections."""
        return [server.pid for server in self._servers]

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self._free = asyncio.Queue()
        for number in range(self._count):
            server = _Server(self, number, await asyncio.open_unix_connection(self._socket))
            await server.start(self._user, self._database)
            self._servers.append(server)
            self.give_back(server)
        listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = listener.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        listener.close()
        tasks = [*self._clients, *(server.task for server in self._servers)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def give_back(self, server: _Server) -> None:
        server.client = None
        self._free.put_nowait(server)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await self._talk(reader, writer)
        finally:
            self._clients.discard(task)
            writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            (length,) = struct.unpack("!I", await reader.readexactly(4))
            startup = await reader.readexactly(length - 4)
            (code,) = struct.unpack("!I", startup[:4])
            if code == _CANCEL:
                return
            if code not in {_SSL, _GSS}:
                break
            writer.write(b"N")
        greeting = _message(b"R", struct.pack("!I", 0)) + self._servers[0].parameters
        writer.write(greeting + _message(b"K", struct.pack("!II", 0, 0)) + _message(b"Z", b"I"))
        server: _Server | None = None
        try:
            while (message := await _read(reader))[:1] != b"X":
                if server is None or server.client is not writer:
                    server = await self._free.get()
                    server.client = writer
                    self.transactions[server.pid] = self.transactions.get(server.pid, 0) + 1
                server.writer.write(message)
                await server.writer.drain()
        finally:
            if server is not None and server.client is writer:
                await self._abandon(server)

    async def _abandon(self, server: _Server) -> None:
        """The client went in the middle of a transaction."""
        server.client = _NOBODY
        server.writer.write(_message(b"S", b"") + _message(b"Q", b"ROLLBACK\x00"))


class _Nobody:
    def write(self, data: bytes) -> None: ...


_NOBODY = _Nobody()


class _Server:
    """A server connection."""

    def __init__(self, pooler: Pooler, number: int, stream: Stream) -> None:
        self.pooler, self.number = pooler, number
        self.reader, self.writer = stream
        self.client: asyncio.StreamWriter | _Nobody | None = None
        self.parameters = b""
        self.pid = 0

    async def start(self, user: str, database: str) -> None:
        fields = f"user\x00{user}\x00database\x00{database}\x00\x00".encode()
        self.writer.write(struct.pack("!II", len(fields) + 8, 196608) + fields)
        while (message := await _read(self.reader))[:1] != b"Z":
            if message[:1] == b"S":
                self.parameters += message
            elif message[:1] == b"K":
                (self.pid,) = struct.unpack("!I", message[5:9])
            assert message[:1] in {b"R", b"S", b"K"}, message
        self.task = asyncio.create_task(self._forward())

    async def _forward(self) -> None:
        """What the server says, to whoever has it."""
        try:
            while True:
                message = await _read(self.reader)
                if self.client is None:
                    continue  # a notification
                self.client.write(message)
                if message[:1] == b"Z" and message[5:6] == b"I":
                    self.pooler.give_back(self)
        finally:
            self.writer.close()


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!I", len(body) + 4) + body


async def _read(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readexactly(5)
    return head + await reader.readexactly(struct.unpack("!I", head[1:])[0] - 4)
