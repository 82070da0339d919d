"""The pytest plugin in projects of its users: that of docs/testing.md, and some that it has to put up with."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.sql import SQL, Identifier
from sqlalchemy import make_url, text
from sqlalchemy.orm import Session

from fairqueue.embedded import EmbeddedError
from fairqueue.testing import plugin
from fairqueue.testing._databases import Databases
from tests.alembic.hosts import ATTACHED, INVOICE, Host
from tests.fixtures.postgres import Postgres, libpq
from tests.pages import ROOT, blocks

PAGE = (ROOT / "docs" / "testing.md").read_text("utf-8")
FILES = {name: code for name, code in blocks(PAGE, "python") if name}
# What an environment that was made before the plugin was has to be told of, and other plugins that are slow to import.
ARGUMENTS = [
    *([] if metadata.entry_points(group="pytest11", name="fairqueue") else ["-p", "fairqueue.testing.plugin"]),
    *("-p", "no:pytest_postgresql", "-p", "no:hypothesispytest", "-p", "no:cacheprovider", "-W", "error"),
]

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester, postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs pytest in the project's folder, on the server of these tests. Each run takes seconds, so there are few."""
    monkeypatch.setenv("FAIRQUEUE_TEST_DSN", postgres.url.render_as_string(hide_password=False))

    def run(*arguments: str) -> pytest.RunResult:
        return pytester.runpytest_subprocess(*ARGUMENTS, *arguments)

    return run


@pytest.fixture
def shop(pytester: pytest.Pytester) -> Path:
    """The project of the page, but for what has a folder of its own."""
    for name, code in FILES.items():
        if "/" not in name:
            (pytester.path / name).write_text(code)
    return pytester.path


class TestPage:
    def test_embedded(self, shop: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        """All of it, without any server but the one that comes along; and what it shows of tests that fail."""
        monkeypatch.delenv("FAIRQUEUE_TEST_DSN")
        other_document = FILES["test_shop.py"].replace("document.id}", "2}")
        (shop / "test_other_document.py").write_text(other_document)
        no_document, _, _ = FILES["test_failures.py"].partition("def test_attempts")
        no_document = no_document.replace("with pytest.raises(NoResultFound)", "if True")
        (shop / "test_no_document.py").write_text(no_document)
        result = run()
        result.assert_outcomes(passed=7, failed=2)
        # What pytest shows, and nothing of our own code.
        ((_, shown),) = blocks(PAGE, "text")
        result.stdout.fnmatch_lines([line.replace("[", "[[]") for line in shown.splitlines()], consecutive=True)
        result.stdout.no_fnmatch_line("*fairqueue/*.py:*")
        # The handler's line, and for which message it was.
        result.stdout.fnmatch_lines(
            [
                "*session.get_one(Document, *",
                "E*NoResultFound: No row was found*",
                "E*Raised by count for message 1 of channel 'acme', attempt 1; outcome: failed",
            ]
        )

    def test_alembic(self, pytester: pytest.Pytester, run: Run, empty_database_url: str) -> None:
        """The user's own history makes the template; it runs once."""
        host = Host(pytester.path / "history", empty_database_url, ATTACHED + INVOICE)
        host.autogenerate()
        ini = (pytester.path / "history" / "alembic.ini").read_text().replace("%(here)s", "%(here)s/history")
        (pytester.path / "alembic.ini").write_text(ini)
        conftest = FILES["migrated/conftest.py"].replace(
            "    def upgrade(engine):\n",
            "    def upgrade(engine):\n        with open('log', 'a') as log:\n            log.write('upgrade ')\n",
        )
        pytester.makeconftest(conftest)
        pytester.makepyfile(
            """
            import logging
            import fairqueue as fq
            import pytest
            from fairqueue.testing import assert_enqueued, drain
            from sqlalchemy import text

            logger = logging.getLogger("app")

            @pytest.mark.parametrize("_", range(2))
            def test_invoice(fairqueue_session, _):
                message = fq.enqueue(fairqueue_session, "acme")
                fairqueue_session.flush()
                insert = text("INSERT INTO invoice (id, message_id) VALUES (1, :id)")
                fairqueue_session.execute(insert, {"id": message.id})
                fairqueue_session.commit()
                assert fairqueue_session.scalar(text("SELECT count(*) FROM alembic_version")) == 1
                assert_enqueued(fairqueue_session)
                assert not logger.disabled
            """
        )
        run().assert_outcomes(passed=2)
        assert (pytester.path / "log").read_text() == "upgrade "

    @pytest.mark.parametrize("case", [("readme", "README.md", "models"), ("factory", "docs/web.md", "app")])
    def test_flask(
        self, pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch, case: tuple[str, str, str]
    ) -> None:
        """The tests of this page for the applications of others, whose own database isn't there."""
        name, page, models = case
        monkeypatch.setenv("DATABASE_URL", "postgresql+psycopg://nobody@127.0.0.1:1/nothing")
        for file, code in blocks((ROOT / page).read_text("utf-8"), "python"):
            if file not in {"", "env.py"}:
                (pytester.path / file).write_text(code)
        tests = pytester.mkdir("tests")
        (tests / "conftest.py").write_text(FILES["conftest.py"].replace("shop", models))
        (tests / "test_upload.py").write_text(FILES[f"flask/test_{name}.py"])
        run().assert_outcomes(passed=1)

    def test_another_schema(self, pytester: pytest.Pytester, run: Run) -> None:
        """And an application that keeps a connection to what it has installed, in its own pool."""
        pytester.makeconftest(
            FILES["jobs/conftest.py"]
            + """
from sqlalchemy import MetaData, create_engine

metadata = MetaData()
fq.attach(metadata, schema="jobs")
engines = []


@pytest.fixture(scope="session")
def fairqueue_install():
    def install(engine):
        engines.append(create_engine(engine.url))
        metadata.create_all(engines[0])

    return install
"""
        )
        pytester.makepyfile(
            """
            import asyncio
            import fairqueue as fq
            import pytest
            from fairqueue.testing import assert_enqueued
            from sqlalchemy.ext.asyncio import AsyncSession

            def test_one(fairqueue_session, fairqueue_clock):
                fq.enqueue(fairqueue_session, "acme", delay=60)
                fairqueue_session.commit()
                fairqueue_clock.tick(60)
                assert len(fairqueue_session.scalars(fq.dequeue()).all()) == 1

            def test_another(fairqueue_async_engine):
                async def act():
                    async with AsyncSession(fairqueue_async_engine) as session:
                        fq.enqueue(session, "acme")
                        await assert_enqueued(session)

                asyncio.run(act())

            def test_errors(fairqueue_session):
                for _ in range(2):
                    fq.enqueue(fairqueue_session, "acme", key="k")
                with pytest.raises(fq.DuplicateKey):
                    fairqueue_session.flush()

            def test_errors_of_async_sessions(fairqueue_async_engine):
                async def act():
                    async with AsyncSession(fairqueue_async_engine) as session:
                        for _ in range(2):
                            fq.enqueue(session, "acme", key="k")
                        with pytest.raises(fq.DuplicateKey):
                            await session.flush()

                asyncio.run(act())
            """
        )
        run().assert_outcomes(passed=4)


class TestDatabases:
    TEST = """
        import os
        import fairqueue as fq
        import pytest
        from fairqueue.testing import assert_enqueued

        @pytest.mark.parametrize("number", range(3))
        def test_alone(fairqueue_session, fairqueue_engine, fairqueue_clock, number):
            fq.enqueue(fairqueue_session, "acme", number)
            fairqueue_session.commit()
            (message,) = assert_enqueued(fairqueue_session, payload=number)
            assert message.id == 1
            worker = os.environ.get("PYTEST_XDIST_WORKER", "alone")
            with open(f"{worker}.log", "a") as log:
                print(fairqueue_engine.url.database, file=log)
        """

    def test_nothing_waits_for_ever(self, session: Session) -> None:
        """In none of them, whoever connects; in milliseconds."""
        query = "SELECT name, setting FROM pg_settings WHERE name IN ('lock_timeout', 'statement_timeout')"
        found = {row.name: row.setting for row in session.execute(text(query))}
        assert found == {"lock_timeout": "30000", "statement_timeout": "120000"}

    def test_each_test_has_its_own(self, pytester: pytest.Pytester, run: Run, postgres: Postgres) -> None:
        """In parallel, too; and none is left afterwards."""
        pytester.makepyfile(self.TEST)
        run("-n", "2", "--dist", "each").assert_outcomes(passed=6)
        names = [line for log in ("gw0.log", "gw1.log") for line in (pytester.path / log).read_text().split()]
        assert len(set(names)) == 6
        with psycopg.connect(libpq(postgres.url.render_as_string(hide_password=False))) as connection:
            prefixes = [name.rpartition("_")[0] for name in names]
            query = "SELECT datname FROM pg_database, unnest(%s::text[]) AS p WHERE starts_with(datname, p)"
            assert connection.execute(query, [prefixes]).fetchall() == []

    @pytest.mark.parametrize("scheme", ["postgresql", "postgresql+asyncpg"])
    def test_of_a_server_that_is_named_by_another_driver(self, postgres: Postgres, scheme: str) -> None:
        """And whose query names a database, which would go before the one in the path."""
        named = postgres.url.set(drivername=scheme).update_query_dict({"dbname": "postgres"})
        with Databases(named.render_as_string(hide_password=False)) as databases, databases.create("template0") as url:
            made = make_url(url)
            assert made.drivername == "postgresql+psycopg"
            with psycopg.connect(libpq(url)) as connection:
                assert connection.info.dbname == made.database

    def test_what_cannot_be_dropped(self, postgres: Postgres) -> None:
        """It is tried again, and is nobody else's error, unless it can't be dropped in the end."""
        url = postgres.url.render_as_string(hide_password=False)
        with psycopg.connect(libpq(url), autocommit=True) as connection:
            names: list[str] = []

            def make(databases: Databases, *, stays: bool = False) -> None:
                with databases.create("template0") as made:
                    names.append(make_url(made).database or "")
                keep(names[-1], stays)

            def keep(name: str, stays: bool) -> None:
                connection.execute(SQL("ALTER DATABASE {} IS_TEMPLATE {}").format(Identifier(name), stays))

            def there() -> list[str]:
                found = connection.execute("SELECT datname FROM pg_database WHERE datname = ANY (%s)", [names])
                return [name for (name,) in found]

            def leave() -> None:
                with Databases(url) as databases:
                    make(databases, stays=True)

            try:
                with Databases(url) as databases:
                    make(databases, stays=True)
                    make(databases)
                    keep(names[0], False)
                    make(databases)
                    assert names[0] not in there()
                with pytest.raises(psycopg.errors.WrongObjectType, match="template"):
                    leave()
            finally:
                for name in there():
                    keep(name, False)
                    connection.execute(SQL("DROP DATABASE {}").format(Identifier(name)))

    def test_what_the_test_itself_has_dropped(self, postgres: Postgres) -> None:
        url = postgres.url.render_as_string(hide_password=False)
        with Databases(url) as databases, psycopg.connect(libpq(url), autocommit=True) as connection:
            with databases.create("template0") as made:
                connection.execute(SQL("DROP DATABASE {}").format(Identifier(make_url(made).database or "")))
            with databases.create("template0"):
                pass

    def test_each_folder_has_its_own(self, pytester: pytest.Pytester, run: Run) -> None:
        """What is installed: in one run, and only once for each, also where the tests take turns."""
        conftest = """
import pytest
from fairqueue import schema
from sqlalchemy import text

@pytest.fixture(scope="session")
def fairqueue_install():
    def install(engine):
        with open("log", "a") as log:
            log.write("{folder} ")
        with engine.begin() as connection:
            schema.install(connection)
            connection.execute(text("CREATE TABLE {folder} ()"))
    return install
"""
        test = """
from sqlalchemy import inspect

def test_one(fairqueue_engine):
    assert inspect(fairqueue_engine).get_table_names() == {tables}

def test_another(fairqueue_engine):
    assert inspect(fairqueue_engine).get_table_names() == {tables}
"""
        for folder in ("a", "b"):
            (pytester.path / folder).mkdir()
            (pytester.path / folder / "conftest.py").write_text(conftest.replace("{folder}", folder))
            (pytester.path / folder / f"test_{folder}.py").write_text(test.replace("{tables}", f"['{folder}']"))
        (pytester.path / "test_neither.py").write_text(test.replace("{tables}", "[]"))
        run().assert_outcomes(passed=6)
        assert sorted((pytester.path / "log").read_text().split()) == ["a", "b"]
        broken = conftest.replace("schema.install(connection)", "connection.execute(text('SELECT nonsense'))")
        (pytester.path / "a" / "conftest.py").write_text(broken.replace("{folder}", "a"))
        run("a").assert_outcomes(errors=2)
        assert sorted((pytester.path / "log").read_text().split()) == ["a", "a", "b"], "what fails, too, is tried once"

    def test_of_the_users_own(
        self, shop: Path, run: Run, empty_database_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without our fixtures, as on the page; and with one overridden, from which the others go on: here an engine,
        in another schema. Neither asks for the server. Of a database with another name than the page's nothing goes."""
        monkeypatch.setenv("TEST_DATABASE_URL", empty_database_url)
        monkeypatch.setenv("PYTHONPATH", str(shop))
        monkeypatch.setenv("FAIRQUEUE_TEST_DSN", "postgresql://nobody@127.0.0.1:1/nothing")
        name = make_url(empty_database_url).database
        conftest, test = FILES["own/conftest.py"], FILES["own/test_shop.py"]
        for file, code in {
            "own/conftest.py": conftest.replace("shop_test", str(name)),
            "own/test_own.py": test,
            "another/conftest.py": conftest,
            "another/test_another.py": test + "\n\ndef test_clock(clock):\n    pass\n",
            "overridden/conftest.py": """
import fairqueue as fq
import os
import pytest
from fairqueue import schema
from sqlalchemy import create_engine

@pytest.fixture
def fairqueue_engine():
    engine = create_engine(os.environ["TEST_DATABASE_URL"], execution_options=fq.in_schema("My Q"))
    with engine.begin() as connection:
        schema.install(connection, "My Q")
    yield engine
    with engine.begin() as connection:
        schema.uninstall(connection, "My Q")
    engine.dispose()
""",
            "overridden/test_overridden.py": """
import fairqueue as fq
from fairqueue.testing import drain

def test_later(fairqueue_session, fairqueue_clock):
    fq.enqueue(fairqueue_session, "acme", delay=60)
    fairqueue_session.commit()
    fairqueue_clock.tick(60)
    assert len(drain(fairqueue_session, lambda message: None)) == 1
""",
        }.items():
            (shop / file).parent.mkdir(exist_ok=True)
            (shop / file).write_text(code)
        run("own", "overridden").assert_outcomes(passed=2 + 1)
        with psycopg.connect(libpq(empty_database_url)) as connection:
            connection.execute("CREATE TABLE document AS SELECT 7 AS id")
        result = run("another")
        result.assert_outcomes(errors=3)
        result.stdout.fnmatch_lines([f"E*TEST_DATABASE_URL leads to '{name}', and these tests drop what is there*"])
        with psycopg.connect(libpq(empty_database_url)) as connection:
            assert connection.execute("TABLE document").fetchall() == [(7,)]
            assert connection.execute("SELECT to_regclass('fairqueue.message')").fetchone() == (None,)

    def test_of_an_installation_elsewhere(self, pytester: pytest.Pytester, run: Run) -> None:
        """An env.py that takes its URL from somewhere else migrates another database; this says so."""
        pytester.makeconftest(
            """
            import pytest

            @pytest.fixture(scope="session")
            def fairqueue_install():
                return lambda engine: None
            """
        )
        pytester.makepyfile("def test_queue(fairqueue_url):\n    pass")
        result = run()
        result.assert_outcomes(errors=1)
        result.stdout.fnmatch_lines(["*fairqueue_install has left no queue in the test database: *connect to another*"])


class TestInEveryRun:
    """Whoever has fairqueue installed has the plugin in all their runs of pytest."""

    def test_importing_it_is_nearly_free(self) -> None:
        program = (
            "import pytest, sys; before = set(sys.modules); import fairqueue.testing.plugin;"
            "print(*sorted(set(sys.modules) - before))"
        )
        imported = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        assert imported.split() == ["fairqueue", "fairqueue._lazy", "fairqueue.testing", "fairqueue.testing.plugin"]

    def test_nothing_happens(self, pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        """Until a test asks for it; where there is no server, that one is told what can be done."""
        monkeypatch.delenv("FAIRQUEUE_TEST_DSN")
        monkeypatch.setenv("FAIRQUEUE_PG_BIN", str(pytester.path))
        pytester.makepyfile(
            """
            import sys

            def test_any():
                assert 'sqlalchemy' not in sys.modules

            def test_queue(fairqueue_url):
                pass
            """
        )
        result = run()
        result.assert_outcomes(passed=1, errors=1)
        result.stdout.fnmatch_lines(
            ["E*FAIRQUEUE_PG_BIN=* does not hold the programs*", "E*FAIRQUEUE_TEST_DSN*"], consecutive=True
        )

    def test_a_url_that_cannot_be_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FAIRQUEUE_TEST_DSN", "postgresql://u:p@s:s3cret@h/d")
        fixture: Any = inspect.unwrap(plugin.fairqueue_server_url)
        with pytest.raises(EmbeddedError, match=r"^FAIRQUEUE_TEST_DSN: the database URL can't be read") as error:
            next(fixture())
        assert "s3cret" not in str(error.value)

    def test_nothing_clashes(self) -> None:
        """No hook, so no option and no marker; and no fixture without our name."""
        names = {name for name in vars(plugin) if not name.startswith("__")}
        assert not {name for name in names if name.startswith("pytest_")}
        fixtures = {name for name in names if type(getattr(plugin, name)).__name__ == "FixtureFunctionDefinition"}
        assert {name for name in fixtures if not name.lstrip("_").startswith("fairqueue_")} == set()
        documented = {line.split("`")[1] for line in PAGE.splitlines() if line.startswith("| `fairqueue_")}
        assert {name for name in fixtures if not name.startswith("_")} == documented
