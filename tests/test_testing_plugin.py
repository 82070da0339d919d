"""The pytest plugin in projects of its users: that of docs/testing.md, and some that it has to put up with."""

import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import make_url

from fairqueue.testing import plugin
from tests.alembic_hosts import ATTACHED, INVOICE, Host
from tests.fixtures.postgres import Postgres, libpq
from tests.test_documentation import ROOT, blocks

PAGE = (ROOT / "docs" / "testing.md").read_text("utf-8")
FILES = {name: code for name, code in blocks(PAGE, "python") if name}
# An environment that was made before the plugin was has to be told of it.
LOADED = () if metadata.entry_points(group="pytest11", name="fairqueue") else ("-p", "fairqueue.testing.plugin")

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester, postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs pytest in the project's folder, on the server of these tests."""
    monkeypatch.setenv("FAIRQUEUE_TEST_DSN", postgres.url.render_as_string(hide_password=False))

    def run(*arguments: str) -> pytest.RunResult:
        return pytester.runpytest_subprocess(*LOADED, "-W", "error", "-p", "no:cacheprovider", *arguments)

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
        """All of it, without any server but the one that comes along."""
        monkeypatch.delenv("FAIRQUEUE_TEST_DSN")
        run().assert_outcomes(passed=7)

    def test_failure(self, shop: Path, run: Run) -> None:
        """What it shows of a failure is what pytest shows, and nothing of our own code."""
        test = shop / "test_shop.py"
        test.write_text(test.read_text().replace("document.id}", "2}"))
        result = run("test_shop.py")
        result.assert_outcomes(failed=1)
        ((_, shown),) = blocks(PAGE, "text")
        result.stdout.fnmatch_lines([line.replace("[", "[[]") for line in shown.splitlines()], consecutive=True)
        result.stdout.no_fnmatch_line("*fairqueue/*.py:*")

    def test_handler_that_raises(self, shop: Path, run: Run) -> None:
        """pytest shows the handler's line, and for which message it was."""
        test = shop / "test_failures.py"
        test.write_text(test.read_text().replace("with pytest.raises(NoResultFound)", "if True"))
        result = run("test_failures.py", "-k", "no_document")
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(
            [
                "*session.get_one(Document, *",
                "E*NoResultFound: No row was found*",
                "E*Raised by count for message 1 of channel 'acme', attempt 1; outcome: failed",
            ]
        )
        result.stdout.no_fnmatch_line("*fairqueue/*.py:*")

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
            import fairqueue as fq
            import pytest
            from fairqueue.testing import assert_enqueued, drain
            from sqlalchemy import text

            @pytest.mark.parametrize("_", range(2))
            def test_invoice(fairqueue_session, _):
                message = fq.enqueue(fairqueue_session, "acme")
                fairqueue_session.flush()
                insert = text("INSERT INTO invoice (id, message_id) VALUES (1, :id)")
                fairqueue_session.execute(insert, {"id": message.id})
                fairqueue_session.commit()
                assert fairqueue_session.scalar(text("SELECT count(*) FROM alembic_version")) == 1
                assert_enqueued(fairqueue_session)
            """
        )
        run().assert_outcomes(passed=2)
        assert (pytester.path / "log").read_text() == "upgrade "

    def test_own_database(self, shop: Path, run: Run, empty_database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        own = shop / "own"
        own.mkdir()
        name = make_url(empty_database_url).database
        for file in ("conftest.py", "test_shop.py"):
            (own / file).write_text(FILES[f"own/{file}"].replace("shop_test", str(name)))
        monkeypatch.setenv("TEST_DATABASE_URL", empty_database_url)
        monkeypatch.setenv("PYTHONPATH", str(shop))
        monkeypatch.setenv("FAIRQUEUE_TEST_DSN", "postgresql://nobody@127.0.0.1:1/nothing")
        run("own").assert_outcomes(passed=2)
        (own / "conftest.py").write_text(FILES["own/conftest.py"])
        result = run("own")
        result.assert_outcomes(passed=1, errors=1)
        result.stdout.fnmatch_lines([f"*test_database is 'shop_test', but the engine is connected to '{name}'"])


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

    def test_fixtures_can_be_overridden(
        self, pytester: pytest.Pytester, run: Run, empty_database_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The others go on from there: here from an engine, in another schema, of somebody else's database."""
        monkeypatch.setenv("FAIRQUEUE_TEST_DSN", "postgresql://nobody@127.0.0.1:1/nothing")
        pytester.makeconftest(
            f"""
            import fairqueue as fq
            import pytest
            from fairqueue import schema
            from sqlalchemy import create_engine

            @pytest.fixture
            def fairqueue_engine():
                engine = create_engine({empty_database_url!r}, execution_options=fq.in_schema("My Q"))
                with engine.begin() as connection:
                    schema.install(connection, "My Q")
                yield engine
                with engine.begin() as connection:
                    schema.uninstall(connection, "My Q")
                engine.dispose()
            """
        )
        pytester.makepyfile(
            """
            import fairqueue as fq
            from fairqueue.testing import drain

            def test_later(fairqueue_session, fairqueue_clock):
                fq.enqueue(fairqueue_session, "acme", delay=60)
                fairqueue_session.commit()
                fairqueue_clock.tick(60)
                assert len(drain(fairqueue_session, lambda message: None)) == 1
            """
        )
        run().assert_outcomes(passed=1)

    def test_no_server(self, pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        """It says what can be done."""
        monkeypatch.delenv("FAIRQUEUE_TEST_DSN")
        monkeypatch.setenv("FAIRQUEUE_PG_BIN", str(pytester.path))
        pytester.makepyfile("def test_any(fairqueue_url): pass")
        result = run()
        result.assert_outcomes(errors=1)
        result.stdout.fnmatch_lines(
            ["E*FAIRQUEUE_PG_BIN=* does not hold the programs*", "E*FAIRQUEUE_TEST_DSN*"], consecutive=True
        )


class TestInEveryRun:
    """Whoever has fairqueue installed has the plugin in all their runs of pytest."""

    def test_importing_it_is_nearly_free(self) -> None:
        program = (
            "import pytest, sys; before = set(sys.modules); import fairqueue.testing.plugin;"
            "print(*sorted(set(sys.modules) - before))"
        )
        imported = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        assert imported.split() == ["fairqueue", "fairqueue.testing", "fairqueue.testing.plugin"]

    def test_nothing_happens(self, pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FAIRQUEUE_TEST_DSN", "nonsense")
        pytester.makepyfile("import sys\ndef test_any(): assert 'sqlalchemy' not in sys.modules")
        run().assert_outcomes(passed=1)

    def test_nothing_clashes(self) -> None:
        """No hook, so no option and no marker; and no fixture without our name."""
        names = {name for name in vars(plugin) if not name.startswith("__")}
        assert not {name for name in names if name.startswith("pytest_")}
        fixtures = {name for name in names if type(getattr(plugin, name)).__name__ == "FixtureFunctionDefinition"}
        assert {name for name in fixtures if not name.lstrip("_").startswith("fairqueue_")} == set()
        documented = {line.split("`")[1] for line in PAGE.splitlines() if line.startswith("| `fairqueue_")}
        assert {name for name in fixtures if not name.startswith("_")} == documented
