"""The database that a command works on, and the schema in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from .failures import Failed, Invalid

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Connection, Engine
    from sqlalchemy.orm import Session

__all__ = ["Target", "check_known", "make_engine", "now", "pass_target"]

_CONNECT_TIMEOUT = 10  # seconds


@dataclass(frozen=True)
class Target:
    """Where the queue is: what the context of a command has as ``obj``.

    :param place: an engine, which stays open, or a database URL; None: the user has not said.
    :param schema: where fairqueue is installed in it.
    :param command: what the user types before the name of a command.
    :param setting: by which the user names another schema.
    """

    place: Engine | str | None = field(repr=False)
    schema: str = "fairqueue"
    command: str = "fairqueue"
    setting: str = "--schema"

    @contextmanager
    def engine(self) -> Iterator[Engine]:
        """An engine whose statements go to the schema."""
        from fairqueue.models import in_schema

        # Repairs, and installs side by side, need it, whatever the application's engine or the database says.
        options: dict[str, Any] = {"isolation_level": "READ COMMITTED", **in_schema(self.schema)}
        if self.place is None:
            raise Invalid("no database is named; use --dsn, FAIRQUEUE_DSN or DATABASE_URL")
        if not isinstance(self.place, str):
            yield self.place.execution_options(**options)
            return
        engine = make_engine(self.place)
        try:
            yield engine.execution_options(**options)
        finally:
            engine.dispose()

    @contextmanager
    def session(self) -> Iterator[Session]:
        """A session; the version of the schema has been looked at. What is not committed is rolled back."""
        from sqlalchemy.orm import Session

        with self.engine() as engine, Session(engine) as session:
            self._check_version(session)
            yield session

    def version(self, connection: Connection) -> int:
        """The version in the schema; 0: there is none. An error if it is newer than this program, or can't work."""
        from fairqueue.schema import HEAD, check_whole, installed_version

        found = installed_version(connection, self.schema)
        check_whole(connection, self.schema)
        if found > HEAD:
            raise self._mismatch(found)
        return found

    def _check_version(self, session: Session) -> None:
        from fairqueue.schema import installed_version, works_with

        connection = session.connection()
        found = installed_version(connection, self.schema)
        if not works_with(connection, self.schema, found):
            raise self._mismatch(found)

    def _mismatch(self, found: int) -> Failed:
        from fairqueue.schema import HEAD, holds

        if found == 0:
            way_out = (
                f"run the application's migrations or, where it has none, `{self.command} migrate`; or name another by"
                f" {self.setting}"
            )
        elif found < HEAD:
            way_out = f"run `{self.command} migrate`, or the application's own migrations"
        else:
            way_out = "upgrade the package fairqueue"
        return Failed(f"{holds(self.schema, found, 'program')}; {way_out}")


pass_target = click.make_pass_decorator(Target)


def now(session: Session) -> datetime:
    """The time by the clock of the queue."""
    from sqlalchemy import select

    from fairqueue.schedule import clock

    at: datetime = session.scalars(select(clock())).one()
    return at


def check_known(session: Session, queue: str) -> None:
    """Fail if nothing is known of a queue in which nothing was found: it has no policy, has never served a message, and
    has none in its history.
    """
    from sqlalchemy import exists, or_, select

    from fairqueue.models import Channel, History, Queue, rotation

    # In this order: the history, where no index leads to a queue, is read only if there is nothing else.
    names = (Queue.name, Channel.queue, rotation.c.queue, History.queue)
    if not session.scalars(select(or_(*(exists().where(name == queue) for name in names)))).one():
        raise Failed(f"queue {queue!r}: nothing is known of it; its name may be misspelt")


def make_engine(url: str) -> Engine:
    """An engine of a command's own, for a database URL that says what it likes of the driver."""
    from sqlalchemy import create_engine

    from fairqueue._url import parsed

    place = parsed(url)
    # A pooler in transaction mode has a statement prepared on one server connection and executes it on another.
    arguments: dict[str, Any] = {"prepare_threshold": None}
    # What is given goes first; libpq may find one in its own places, too.
    elsewhere = [*place.query, *os.environ]
    if not {"connect_timeout", "service", "PGCONNECT_TIMEOUT", "PGSERVICE"}.intersection(elsewhere):
        arguments["connect_timeout"] = _CONNECT_TIMEOUT
    return create_engine(place, connect_args=arguments)
