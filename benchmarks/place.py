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

_PREFIX = "fairqueue_bench_"
_LOCK = 720_720


class Place:
    """Where the run is: makes databases, each with one system installed, and drops them."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.name = _PREFIX + secrets.token_hex(4)
        self._numbers = itertools.count(1)
        self.admin: psycopg.Connection[Any] = psycopg.connect(dsn, autocommit=True)
        # Held as long as we live: so others know that our databases are in use.
        self.admin.execute("SELECT pg_advisory_lock(%s, hashtext(%s))", (_LOCK, self.name))
        self._drop_abandoned()

    def close(self) -> None:
        self._drop(f"{self.name}\\_%")
        self.admin.close()

    @contextlib.contextmanager
    def database(self, system: System | None = None) -> Iterator[str]:
        """The DSN of a new database with the system installed, good within the block."""
        name = f"{self.name}_{next(self._numbers)}"
        self.admin.execute(SQL("CREATE DATABASE {} TEMPLATE template0").format(Identifier(name)))
        try:
            dsn = libpq(parsed(self.dsn).set(database=name))
            if system is not None:
                system.install(dsn)
            yield dsn
        finally:
            self._drop(name)

    def checkpoint(self) -> None:
        """What was loaded doesn't weigh on what is measured next. Needs a right that not everybody has.

        Once a case, not before each measurement: after a checkpoint the log has full pages for a while.
        """
        with contextlib.suppress(psycopg.errors.InsufficientPrivilege):
            self.admin.execute("CHECKPOINT")

    def _drop(self, pattern: str) -> None:
        names = self.admin.execute("SELECT datname FROM pg_database WHERE datname LIKE %s", (pattern,)).fetchall()
        for (name,) in names:
            self.admin.execute(SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(Identifier(name)))

    def _drop_abandoned(self) -> None:
        found = self.admin.execute(
            "SELECT DISTINCT regexp_replace(datname, '_[0-9]+$', '') FROM pg_database WHERE datname LIKE %s",
            (_PREFIX.replace("_", r"\_") + "%",),
        ).fetchall()
        for (run,) in found:
            key = (_LOCK, run)
            if self.admin.execute("SELECT pg_try_advisory_lock(%s, hashtext(%s))", key).fetchone() == (True,):
                self._drop(run.replace("_", r"\_") + r"\_%")
                self.admin.execute("SELECT pg_advisory_unlock(%s, hashtext(%s))", key)


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
        yield place, server
