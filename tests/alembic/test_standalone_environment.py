"""The project's own alembic.ini and alembic/, for those who have none."""

import io
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Protocol

import psycopg
import pytest
from alembic.config import CommandLine, Config
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from psycopg.sql import SQL, Identifier
from sqlalchemy import create_engine, make_url
from sqlalchemy.exc import ProgrammingError

from fairqueue import schema
from tests.catalog import snapshot
from tests.fixtures.connections import Raw
from tests.fixtures.postgres import libpq
from tests.pages import ROOT

INI = str(ROOT / "alembic.ini")

WAITING = """
SELECT count(*) FROM pg_locks JOIN pg_database d ON d.oid = database
WHERE locktype = 'advisory' AND NOT granted AND datname = current_database()
"""


class Run(Protocol):
    def __call__(self, dsn: str | None, *arguments: str) -> str: ...


@pytest.fixture
def alembic(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """The command, run in this process; it returns what was printed."""

    def run(dsn: str | None, *arguments: str) -> str:
        monkeypatch.delenv("FAIRQUEUE_DSN", raising=False)
        if dsn is not None:
            monkeypatch.setenv("FAIRQUEUE_DSN", dsn)
        line, output = CommandLine(), io.StringIO()
        options = line.parser.parse_args(["--raiseerr", *arguments])
        line.run_cmd(Config(INI, stdout=output, output_buffer=output, cmd_opts=options), options)
        return output.getvalue()

    handlers, level, path = logging.root.handlers[:], logging.root.level, sys.path[:]
    yield run
    logging.root.handlers[:], sys.path[:] = handlers, path
    logging.root.setLevel(level)


def start(dsn: str, *arguments: str) -> subprocess.Popen[str]:
    """The command in a process of its own, as people call it: from the project's folder."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "alembic", *arguments],
        cwd=ROOT,
        env=os.environ | {"FAIRQUEUE_DSN": dsn},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def catalog(connection: psycopg.Connection) -> list[str]:
    lines = snapshot(connection)
    connection.rollback()
    return lines


@pytest.mark.parametrize("scheme", ["postgresql+psycopg", "postgresql", "postgres"])
def test_up_and_down(alembic: Run, empty_database_url: str, raw: Raw, scheme: str) -> None:
    """It installs what the library installs, and leaves the database as it was."""
    dsn = empty_database_url.replace("postgresql+psycopg", scheme)
    database = raw(empty_database_url)
    nothing = catalog(database)
    assert not alembic(dsn, "current")
    assert catalog(database) == nothing

    alembic(dsn, "upgrade", "head")
    assert "(head)" in alembic(dsn, "current")
    engine = create_engine(empty_database_url)
    with engine.connect() as connection:
        schema.verify(connection)
    engine.dispose()

    alembic(dsn, "downgrade", "base")
    assert catalog(database) == nothing


def test_where_everybody_may_create(alembic: Run, empty_database_url: str, raw: Raw) -> None:
    """Nothing is installed there; but what is can be looked at, and removed."""
    database = raw(empty_database_url)
    nothing = catalog(database)
    alembic(empty_database_url, "upgrade", "head")
    database.execute("GRANT CREATE ON SCHEMA fairqueue TO PUBLIC")
    database.commit()
    assert "(head)" in alembic(empty_database_url, "current")
    alembic(empty_database_url, "downgrade", "base")
    assert catalog(database) == nothing
    database.execute("CREATE SCHEMA fairqueue; GRANT CREATE ON SCHEMA fairqueue TO PUBLIC")
    database.commit()
    with pytest.raises(ProgrammingError, match="everybody may create objects in schema fairqueue"):
        alembic(empty_database_url, "upgrade", "head")


def test_who_may_only_read(alembic: Run, empty_database_url: str, raw: Raw) -> None:
    """May ask where the database stands, before there is a queue and afterwards."""
    owner = raw(empty_database_url)
    reader = f"{owner.info.dbname} reader"
    owner.execute(SQL("CREATE ROLE {} LOGIN").format(Identifier(reader)))
    owner.commit()
    url = make_url(empty_database_url).set(username=reader).render_as_string(hide_password=False)
    try:
        assert not alembic(url, "current")
        alembic(empty_database_url, "upgrade", "head")
        for right in ("USAGE ON SCHEMA fairqueue", "SELECT ON TABLE fairqueue.alembic_version"):
            owner.execute(SQL("GRANT {} TO {}").format(SQL(right), Identifier(reader)))
        owner.commit()
        assert "(head)" in alembic(url, "current")
    finally:
        owner.rollback()
        owner.execute(SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(Identifier(reader)))
        owner.commit()


def test_several_schemas(alembic: Run, empty_database_url: str, raw: Raw) -> None:
    """Each has a history of its own; a schema that was there before stays."""
    database = raw(empty_database_url)
    database.execute('CREATE SCHEMA "My Q"')
    database.commit()
    nothing = catalog(database)
    alembic(empty_database_url, "upgrade", "head")
    one = catalog(database)
    alembic(empty_database_url, "-x", "schema=My Q", "upgrade", "head")
    assert [line for line in catalog(database) if line.startswith('relation "My Q".alembic_version ')]
    alembic(empty_database_url, "-x", "schema=My Q", "downgrade", "base")
    assert catalog(database) == one
    alembic(empty_database_url, "downgrade", "base")
    assert catalog(database) == nothing


def test_offline(alembic: Run, empty_database_url: str, raw: Raw) -> None:
    """--sql needs no database, and its script does the same."""
    database = raw(empty_database_url)
    nothing = catalog(database)
    with psycopg.connect(libpq(empty_database_url), autocommit=True) as psql:
        psql.execute(alembic(None, "upgrade", "head", "--sql").encode())
        offline = catalog(database)
        assert "(head)" in alembic(empty_database_url, "current")
        psql.execute(alembic(None, "downgrade", "head:base", "--sql").encode())
        assert catalog(database) == nothing
    alembic(empty_database_url, "upgrade", "head")
    assert catalog(database) == offline


def test_an_installation_by_other_means(alembic: Run, database_url: str, raw: Raw) -> None:
    """It is taken over as it is, with its messages."""
    database = raw(database_url)
    before = catalog(database)
    database.execute("SELECT fairqueue.message_create('tenant', '{}')")
    database.commit()
    alembic(database_url, "upgrade", "head")
    assert [line for line in catalog(database) if "alembic_version" not in line] == before
    assert database.execute("SELECT count(*) FROM fairqueue.message").fetchone() == (1,)


def test_two_at_once(empty_database_url: str, raw: Raw) -> None:
    """Both succeed, one of them by doing nothing: each waits before it looks at anything, with a view that stays."""
    database, observer = raw(empty_database_url), raw(empty_database_url)
    observer.autocommit = True
    name = Identifier(observer.info.dbname)
    observer.execute(SQL("ALTER DATABASE {} SET default_transaction_isolation = serializable").format(name))
    database.execute(schema.lock_sql("fairqueue").encode())
    programs = [start(empty_database_url, "upgrade", "head") for _ in range(2)]
    while observer.execute(WAITING).fetchone() != (2,):
        assert all(program.poll() is None for program in programs), "it did not wait"
        time.sleep(0.05)  # they need the processor
    database.commit()
    steps = [program.communicate()[1].count("Running upgrade") for program in programs]
    assert [program.returncode for program in programs] == [0, 0]
    assert sorted(steps) == [0, 1]


@pytest.mark.parametrize(
    ("dsn", "arguments", "message"),
    [
        (None, [], "set FAIRQUEUE_DSN"),
        ("", [], "set FAIRQUEUE_DSN"),
        ("host=localhost", [], "FAIRQUEUE_DSN: a database URL must begin with postgresql://"),
        ("mysql://localhost/app", [], "FAIRQUEUE_DSN: a database URL must begin with postgresql://"),
        ("postgresql://u:s3cret@localhost:x/app", [], "FAIRQUEUE_DSN: the database URL can't be read"),
        ("postgresql://localhost/app", ["-x", "schema="], "schema must be a name of 1 to 63 bytes, not ''"),
    ],
)
def test_errors(alembic: Run, dsn: str | None, arguments: list[str], message: str) -> None:
    """Of the kind that Alembic prints without a traceback; it says what to write."""
    with pytest.raises(CommandError, match=message):
        alembic(dsn, *arguments, "current")


def test_a_revision_for_each_version() -> None:
    """The last revision leads to the version that the library works with, and they are numbered alike."""
    revisions = ScriptDirectory.from_config(Config(INI)).walk_revisions()
    numbers = [int(revision.revision) for revision in revisions]
    assert numbers == list(range(schema.HEAD, 0, -1))
