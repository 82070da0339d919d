"""Connections that are held for long, on servers that end those which do nothing."""

from typing import Any

import psycopg
import pytest
from psycopg import sql

from fairqueue.spark.engine.place import Place


def ended_after(connection: psycopg.Connection[Any], *names: str) -> None:
    """Let the test's database end connections for these reasons, some time."""
    database = sql.Identifier(connection.info.dbname)
    for name in names:
        connection.execute(sql.SQL("ALTER DATABASE {} SET {} = '1h'").format(database, sql.Identifier(name)))
    connection.commit()


def connections(monkeypatch: pytest.MonkeyPatch) -> list[psycopg.Connection[Any]]:
    """Those that are made from here on, in their order."""
    made: list[psycopg.Connection[Any]] = []
    connect = Place.connect

    def noted(place: Place, **settings: Any) -> psycopg.Connection[Any]:
        made.append(connect(place, **settings))
        return made[-1]

    monkeypatch.setattr(Place, "connect", noted)
    return made
