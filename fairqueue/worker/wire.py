"""A connection that listens, for each driver that can: psycopg, with an Engine or an AsyncEngine, and asyncpg."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import anyio
from sqlalchemy import Connection, Engine, Executable, text
from sqlalchemy.ext.asyncio import AsyncEngine

from .database import CLOSING, Database

if TYPE_CHECKING:
    from psycopg import Connection as PsycopgConnection

    from .threads import Threads

__all__ = ["Wire", "can_listen", "connect", "first_of"]

_DRIVERS = {"psycopg", "asyncpg"}


class Wire(Protocol):
    """What a listener needs of a connection. Used by one task only."""

    #: Runs a statement, in a transaction of its own, and returns its one value, if it has one.
    execute: Callable[[Executable], Awaitable[Any]]

    async def listen(self, channel: str) -> None:
        """Hear the channel; does nothing the second time."""

    async def wait(self, event: anyio.Event) -> list[str]:
        """Wait for notifications or the event; returns the channels of the notifications.

        :raises OSError: if the connection is lost.
        """
        ...


def can_listen(engine: Engine | AsyncEngine) -> bool:
    return engine.dialect.driver in _DRIVERS


@contextlib.asynccontextmanager
async def connect(database: Database) -> AsyncIterator[Wire]:
    """A connection of its own: it doesn't go back to the engine's pool."""
    engine = database.engine
    if isinstance(engine, AsyncEngine):
        connection = await engine.connect()
        driver: Any = None
        try:
            await connection.execution_options(isolation_level="AUTOCOMMIT")
            raw = await connection.get_raw_connection()
            driver = raw.driver_connection
            raw.detach()

            def execute(statement: Executable) -> Awaitable[Any]:
                return connection.run_sync(_value, statement)

            yield _Psycopg(driver, execute) if hasattr(driver, "pgconn") else _Asyncpg(driver, execute)
        finally:
            with anyio.move_on_after(CLOSING, shield=True), contextlib.suppress(Exception):
                await connection.close()
                if driver is not None:
                    await driver.close()  # SQLAlchemy leaves one that is detached open
        return
    plain = await _connect_in_thread(engine, database.threads)
    plain_driver: Any = plain.connection.driver_connection
    plain.detach()
    try:
        yield _Psycopg(plain_driver, lambda statement: database.threads.run(partial(_value, plain, statement)))
    finally:
        plain_driver.close()  # not `plain`: that would wait for a statement which another thread executes


def _value(connection: Connection, statement: Executable) -> Any:
    result = connection.execute(statement)
    return result.scalar() if result.returns_rows else None


async def _connect_in_thread(engine: Engine, threads: Threads) -> Connection:
    """Like all that may wait for the database. If the caller is cancelled meanwhile, the connection is closed."""
    made: list[Connection] = []
    gone = False

    def discard() -> None:
        with contextlib.suppress(IndexError):  # the other thread has done it
            made.pop().invalidate()  # the pool may be closed by now, and wouldn't close it

    def open_one() -> None:
        made.append(engine.connect().execution_options(isolation_level="AUTOCOMMIT"))
        if gone:
            discard()

    try:
        await threads.run(open_one)
        return made.pop()
    except BaseException:
        gone = True
        discard()
        raise


class _Psycopg:
    def __init__(self, driver: PsycopgConnection[Any], execute: Callable[[Executable], Awaitable[Any]]) -> None:
        self.execute = execute
        self._driver = driver
        self._listening: set[str] = set()
        self._heard: deque[str] = deque()
        # Those that come along with the answer to a statement, maybe in another thread.
        driver.add_notify_handler(lambda notification: self._heard.append(notification.channel))

    async def listen(self, channel: str) -> None:
        if channel not in self._listening:
            await self.execute(text(f'LISTEN "{channel}"'))
            self._listening.add(channel)

    async def wait(self, event: anyio.Event) -> list[str]:
        if not self._heard:
            try:
                await first_of(event.wait, partial(anyio.wait_readable, self._driver.fileno()))
                self._driver.pgconn.consume_input()
                while (notification := self._driver.pgconn.notifies()) is not None:
                    self._heard.append(notification.relname.decode())
            except Exception as error:
                raise ConnectionError(str(error)) from error
        heard = list(self._heard)
        self._heard.clear()
        return heard


class _Asyncpg:
    def __init__(self, driver: Any, execute: Callable[[Executable], Awaitable[Any]]) -> None:
        self.execute = execute
        self._driver = driver
        self._listening: set[str] = set()
        self._heard: list[str] = []
        self._event = anyio.Event()
        driver.add_termination_listener(lambda _: self._event.set())

    async def listen(self, channel: str) -> None:
        if channel not in self._listening:
            await self._driver.add_listener(channel, self._notified)
            self._listening.add(channel)

    def _notified(self, connection: Any, pid: int, channel: str, payload: str) -> None:
        self._heard.append(channel)
        self._event.set()

    async def wait(self, event: anyio.Event) -> list[str]:
        await first_of(event.wait, self._event.wait)
        if self._driver.is_closed():
            raise ConnectionError("the connection was closed")
        self._event = anyio.Event()
        heard, self._heard = self._heard, []
        return heard


async def first_of(*waits: Callable[[], Awaitable[object]]) -> None:
    """Wait until one of them has come."""
    async with anyio.create_task_group() as tasks:

        async def wait(one: Callable[[], Awaitable[object]]) -> None:
            await one()
            tasks.cancel_scope.cancel()

        for one in waits:
            tasks.start_soon(wait, one)
