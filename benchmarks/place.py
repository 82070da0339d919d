"""The server, and databases on it that go with the run.

An embedded PostgreSQL of this run's own, with PostgreSQL's own settings, on disk; or the server in FAIRQUEUE_DSN, whose
role has to be able to make databases. Those of a run that was killed are dropped by the next one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg.sql import SQL, Identifier

from fairqueue import embedded
from fairqueue._url import libpq, parsed

from .systems import System
from .systems.base import SQLSystem

_PREFIX = "fairqueue_bench_"
#: Databases of runs that aren't there any more. A run's admin connection has its name; advisory locks would not do, as
#: those that are taken in one database aren't seen in another. What others call their databases is theirs.
_ABANDONED = f"""
    SELECT d.datname FROM pg_database d
    WHERE d.datname ~ '^{_PREFIX}[0-9a-f]{{8}}_[0-9]+$' AND pg_has_role(d.datdba, 'USAGE') AND NOT EXISTS (
        SELECT FROM pg_stat_activity a WHERE a.application_name = regexp_replace(d.datname, '_[0-9]+$', '')
    )
"""


class Place:
    """Where the run is: makes databases, each with one system installed, and drops them."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.name = _PREFIX + secrets.token_hex(4)
        self._numbers = itertools.count(1)
        #: A database of each system that is nothing but SQL, from which its others are copied.
        self._models: dict[str, str] = {}
        self._until_closed = contextlib.ExitStack()
        # Open as long as we live: so others know that our databases are in use.
        self.admin: psycopg.Connection[Any] = psycopg.connect(dsn, autocommit=True, application_name=self.name)
        for (name,) in self.admin.execute(_ABANDONED.encode()).fetchall():
            self._drop(name)

    def close(self) -> None:
        self._until_closed.close()
        self.admin.close()

    def check(self) -> None:
        """Raise what says so if the server has gone away."""
        self.admin.execute("SELECT")

    @contextlib.contextmanager
    def database(self, system: System | None = None) -> Iterator[str]:
        """The DSN of a new database with the system installed, good within the block."""
        model = self._model(system) if isinstance(system, SQLSystem) else None
        with self._created(model or "template0") as name:
            if system is not None and model is None:
                system.install(self._dsn(name))
            yield self._dsn(name)

    def checkpoint(self) -> None:
        """What was loaded doesn't weigh on what is measured next. Needs a right that not everybody has.

        Once a case, not before each measurement: after a checkpoint the log has full pages for a while.
        """
        with contextlib.suppress(psycopg.errors.InsufficientPrivilege):
            self.admin.execute("CHECKPOINT")

    def _model(self, system: SQLSystem) -> str:
        if system.name not in self._models:
            name = self._until_closed.enter_context(self._created("template0"))
            system.install(self._dsn(name))
            self._models[system.name] = name
        return self._models[system.name]

    @contextlib.contextmanager
    def _created(self, template: str) -> Iterator[str]:
        name = f"{self.name}_{next(self._numbers)}"
        try:
            create = SQL("CREATE DATABASE {} TEMPLATE {}").format(Identifier(name), Identifier(template))
            self.admin.execute(create)
            yield name
        finally:
            self._drop(name)

    def _dsn(self, name: str) -> str:
        return libpq(parsed(self.dsn).set(database=name))

    def _drop(self, name: str) -> None:
        self.admin.execute(SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(Identifier(name)))


@contextlib.contextmanager
def opened() -> Iterator[tuple[Place, embedded.Server | None]]:
    """The place of a run, and its server if that is an embedded one."""
    with contextlib.ExitStack() as stack:
        server = None
        if given := os.environ.get("FAIRQUEUE_DSN"):
            dsn = libpq(parsed(given))
        else:
            server = stack.enter_context(embedded.ephemeral(fast=False))
            dsn = server.dsn
        place = Place(dsn)
        stack.callback(place.close)
        with place.database():
            pass  # or no case would have figures, and those of earlier runs would be overwritten by none
        yield place, server
