"""Which database the queue is in, and how to connect to it from any process of a cluster.

::

    place = Place(url="postgresql://loader@db/app", passfile="/etc/fairqueue/pgpass")
    with place.connect() as connection:
        connection.execute("SELECT 1")

A place travels: Spark keeps options in plans and sends them to executors. So it holds no password. libpq finds that
where it always does: PGPASSWORD, a passfile, a certificate. Without a ``url``, each process takes what its environment
has in FAIRQUEUE_DSN or DATABASE_URL.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from fairqueue._url import libpq, parsed
from fairqueue.errors import InvalidValue
from fairqueue.schema import DEFAULT_SCHEMA, check_schema_name, quote

if TYPE_CHECKING:
    import psycopg
    from adbc_driver_manager.dbapi import Connection as ArrowConnection
    from sqlalchemy import URL

__all__ = ["Place", "row_of"]

_VARIABLES = ("FAIRQUEUE_DSN", "DATABASE_URL")
_CONNECT_TIMEOUT = "10"  # seconds


@dataclass(frozen=True)
class Place:
    """A database with fairqueue in it.

    :param url: ``postgresql://user@host/database``, without a password; None: what the environment says.
    :param schema: where fairqueue is installed.
    :param passfile: a file in libpq's format, at the same path on every machine.
    """

    url: str | None = field(default=None, repr=False)
    schema: str = DEFAULT_SCHEMA
    passfile: str | None = None

    def __post_init__(self) -> None:
        check_schema_name(self.schema)
        if self.url is not None and _has_password(parsed(self.url)):
            raise InvalidValue(
                "url must not hold a password, as Spark keeps options in its plans; put it into PGPASSWORD or a"
                " passfile (option passfile), or the whole URL into FAIRQUEUE_DSN, on the driver and on the executors"
            )

    def name(self, table: str) -> str:
        """The name of one of fairqueue's tables or functions, with its schema."""
        return f"{quote(self.schema)}.{quote(table)}"

    def connect(self, **settings: Any) -> psycopg.Connection[Any]:
        """A connection for statements. Its transactions are READ COMMITTED, whatever the database says."""
        import psycopg

        connection = psycopg.connect(self._libpq(), **settings)
        connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        return connection

    def row(self, query: str, *parameters: object) -> Any:
        """The first row that a statement returns, in a transaction of its own; None: it returns none."""
        with self.connect() as connection:
            return row_of(connection, query, *parameters)

    @contextmanager
    def arrow(self) -> Iterator[ArrowConnection]:
        """A connection for rows, with a READ COMMITTED transaction that is rolled back unless it is committed."""
        from adbc_driver_manager import AdbcConnection
        from adbc_driver_manager.dbapi import Connection

        database = _database(self._libpq())
        with Connection(database, AdbcConnection(database.driver)) as connection:
            with connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
            yield connection

    def _libpq(self) -> str:
        url = self.url or next((os.environ[name] for name in _VARIABLES if os.environ.get(name)), None)
        if url is None:
            raise InvalidValue(
                f"no database is named: set the option url, or {' or '.join(_VARIABLES)} on driver and executors"
            )
        defaults = {"connect_timeout": _CONNECT_TIMEOUT, "application_name": "fairqueue"}
        if self.passfile is not None:
            defaults["passfile"] = self.passfile
        place = parsed(url)
        return libpq(place.update_query_dict({**defaults, **place.query}))


class _Database:
    """What ADBC knows of a database: its types, which take longer to ask for than a small task. No connection.

    Its connections would close it with the last one.
    """

    def __init__(self, url: str) -> None:
        from adbc_driver_postgresql import connect

        self.driver = connect(url)

    def close(self) -> None:
        """Not yet: the next task in this process needs it again."""


@lru_cache(maxsize=8)
def _database(url: str) -> Any:
    return _Database(url)


def _has_password(url: URL) -> bool:
    return url.password is not None or not {"password", "sslpassword"}.isdisjoint(url.query)


def row_of(connection: psycopg.Connection[Any], query: str, *parameters: object) -> Any:
    """The first row that a statement returns; None: it returns none."""
    return connection.execute(query.encode(), parameters or None).fetchone()
