"""Databases for tests: cloned from a template, thrown away afterwards."""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Iterator
from typing import LiteralString, Self

import psycopg
from psycopg.sql import SQL, Composable, Identifier, Literal

from fairqueue._url import libpq, parsed

__all__ = ["COMMENT", "Databases"]

#: How :class:`fairqueue.testing.Clock` knows a database whose time may be moved.
COMMENT = "made by fairqueue.testing"


class Databases:
    """Makes databases on a server, and drops them.

    :param url: an SQLAlchemy URL of any database there, of a role that may create others.
    :param prefix: what their names begin with. None: something that no other process uses, so that any number of them
        can share the server.
    """

    def __init__(self, url: str, prefix: str | None = None) -> None:
        place = parsed(url)
        # Which would say where connections go, whatever database the URL names.
        self._url = place.difference_update_query(["dbname"])
        self._prefix = prefix or f"fairqueue_test_{secrets.token_hex(4)}"
        self._numbers = itertools.count(1)
        self._finished: list[str] = []
        self._admin = psycopg.connect(libpq(place), autocommit=True)
        # Copying files is the quicker way only where nothing has to be synchronised to disk.
        unsafe = self._admin.execute("SHOW fsync").fetchone() == ("off",)
        self._strategy = SQL("STRATEGY file_copy" if unsafe and self._admin.info.server_version >= 150000 else "")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._admin:  # and close it
            self._drop_finished()

    @contextlib.contextmanager
    def create(self, template: str) -> Iterator[str]:
        """The SQLAlchemy URL of a new database, good within the block; a copy of ``template``, which nobody may use."""
        # That another test's database can't be dropped is nothing to the one that asks for this; the end says why.
        with contextlib.suppress(psycopg.Error):
            self._drop_finished()
        name = f"{self._prefix}_{next(self._numbers)}"
        self._execute("CREATE DATABASE {name} TEMPLATE {template} {strategy}", name, template=Identifier(template))
        try:
            self._execute("COMMENT ON DATABASE {name} IS {comment}", name, comment=Literal(COMMENT))
            # So that no test hangs for ever, whoever connects.
            self._execute("ALTER DATABASE {name} SET lock_timeout = '30s'", name)
            self._execute("ALTER DATABASE {name} SET statement_timeout = '120s'", name)
            yield self._url.set(database=name).render_as_string(hide_password=False)
        finally:
            self._finished.append(name)

    def close(self, name: str) -> None:
        """Let nobody in any more, and put out who is: a database that somebody uses can't be copied."""
        self._execute("ALTER DATABASE {name} ALLOW_CONNECTIONS false", name)
        # Of this role: PostgreSQL refuses that of others, and its own, to whoever is no superuser.
        ours = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND usename = current_user"
        self._admin.execute(ours, [name])

    def _drop_finished(self) -> None:
        """One test late: right after it, its backends may still be on their way out, and DROP would wait."""
        problem: psycopg.Error | None = None
        for name in list(self._finished):
            try:
                self._execute("DROP DATABASE IF EXISTS {name} WITH (FORCE)", name)
            except psycopg.Error as error:
                problem = error  # it is tried again
            else:
                self._finished.remove(name)
        if problem is not None:
            raise problem

    def _execute(self, statement: LiteralString, name: str, **parts: Composable) -> None:
        self._admin.execute(SQL(statement).format(name=Identifier(name), strategy=self._strategy, **parts))
