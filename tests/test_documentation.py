"""Everything in README, docs and docstrings runs as written."""

import doctest
import importlib
import logging
import os
import re
import secrets
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from subprocess import run
from types import ModuleType
from typing import Any

import alembic.command
import alembic.config
import psycopg
import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from click.testing import CliRunner
from sqlalchemy import Engine, ForeignKey, NullPool, create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

import fairqueue as fq
from fairqueue import roles, schedule
from fairqueue.alembic.ops import CreateFairqueueOp
from fairqueue.cli.program import program
from fairqueue.testing import drain
from tests.fixtures.connections import Raw
from tests.fixtures.postgres import libpq
from tests.pages import README, ROOT, blocks


@pytest.fixture
def project(tmp_path: Path, empty_database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The reader's application: README's files in a folder, its modules importable."""
    files = {name: code for name, code in blocks(README, "python") if name}
    for name in files.keys() - {"env.py"}:
        (tmp_path / name).write_text(files[name])
    before, enabled = set(sys.modules), [logger for logger in loggers() if not logger.disabled]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("DATABASE_URL", empty_database_url)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name in {"models", "app", "worker", "api", "limits"}:
            del sys.modules[name]
    for logger in enabled:  # the env.py that Alembic writes switches off those that are there
        logger.disabled = False


def loggers() -> list[logging.Logger]:
    return [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]


def load(name: str) -> Any:
    module: ModuleType = importlib.import_module(name)
    return module


def migrate(project: Path) -> str:
    """What README says about Alembic; returns the revision that it writes."""
    config = alembic.config.Config(project / "alembic.ini")
    alembic.command.init(config, str(project / "migrations"))
    environment = project / "migrations" / "env.py"
    line = 'autogenerate_plugins=["alembic.autogenerate.*", "fairqueue"],'
    target, shown = [code for name, code in blocks(README, "python") if name == "env.py"]
    assert line in shown
    text = environment.read_text()
    assert "target_metadata = None\n" in text
    text = text.replace("target_metadata = None\n", target)
    text, places = re.subn(r"( +)target_metadata=target_metadata,?", rf"\g<0>, {line}", text)
    assert places == 2
    environment.write_text(text.replace(",,", ","))
    config = alembic.config.Config(project / "alembic.ini")
    config.set_main_option("script_location", str(project / "migrations"))
    alembic.command.revision(config, "documents and queue", autogenerate=True)
    alembic.command.upgrade(config, "head")
    alembic.command.check(config)
    (revision,) = (project / "migrations" / "versions").glob("*.py")
    return revision.read_text()


def test_readme_with_flask(project: Path) -> None:
    assert migrate(project).count("op.create_fairqueue(1)") == 1
    models, app, worker = load("models"), load("app"), load("worker")
    client = app.app.test_client()
    assert [client.post("/acme/documents", data="one two three").status_code for _ in range(3)] == [202] * 3
    assert client.post("/globex/documents", data="four").status_code == 202
    refused = client.post(f"/{'x' * 300}/documents", data="five")
    assert (refused.status_code, refused.json) == (422, {"error": "channel must have 1 to 255 characters, not 300"})
    assert len(drain(models.engine, worker.app)) == 4
    with Session(models.engine) as session:
        assert sorted(words for (words,) in session.query(models.Document.words)) == [1, 3, 3, 3]
    load("limits")
    look()
    models.engine.dispose()


def look() -> None:
    """README's console block of the command line."""
    (block,) = [code for _, code in blocks(README, "console") if "fairqueue status" in code]
    commands = re.findall(r"^\$ fairqueue (.*)$", block, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        result = CliRunner().invoke(program, ["--dsn", os.environ["DATABASE_URL"], *command.split()])
        assert result.exit_code == 0, result.output


def test_workers_page(engine: Engine) -> None:
    (code,) = [code for _, code in blocks((ROOT / "docs" / "workers.md").read_text("utf-8"), "python")]
    known: dict[str, Any] = {"engine": engine}
    exec(compile(code, "workers.md", "exec"), known)  # noqa: S102
    with Session(engine) as session:
        fq.enqueue(session, "acme", {"path": "a.pdf"})
        session.commit()
    outcomes = [str(outcome) for _, outcome in drain(engine, known["app"])]
    assert outcomes == ["deferred", "deferred", "deferred", "completed"]


async def test_readme_with_fastapi(project: Path, anyio_backend: str) -> None:
    import httpx

    models, api, worker = load("models"), load("api"), load("worker")
    models.Base.metadata.create_all(models.engine)
    transport = httpx.ASGITransport(app=api.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answers = [
            await client.post(f"/{tenant}/documents", params={"text": "one two"}) for tenant in ("acme", "x" * 300)
        ]
    assert [answer.status_code for answer in answers] == [202, 422]
    assert answers[1].json() == {"detail": "channel must have 1 to 255 characters, not 300"}
    await api.engine.dispose()
    assert len(drain(models.engine, worker.app)) == 1
    with Session(models.engine) as session:
        assert [words for (words,) in session.query(models.Document.words)] == [2]
    models.engine.dispose()


def test_site(tmp_path: Path) -> None:
    """It is built without a warning, and tells of each public name of the package."""
    pytest.importorskip("sphinx", reason="Sphinx is missing, which makes the site")
    flags = ["-q", "-W", "--keep-going", "-c", "docs", "-b", "html", "-d"]
    command = [sys.executable, "-m", "sphinx", *flags, str(tmp_path / "doctrees"), ".", str(tmp_path)]
    done = run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = [page.read_text("utf-8") for page in (tmp_path / "docs" / "api").glob("*.html")]
    told = set(re.findall(r'<dt class="sig [^>]*id="fairqueue\.[^"]*?(\w+)"', "".join(pages)))
    assert set(fq.__all__) - told == set()


def test_sql_page(database_url: str) -> None:
    """The blocks of docs/sql.md, one after the other; roles belong to the server, so theirs is rolled back."""
    page = (ROOT / "docs" / "sql.md").read_text("utf-8")
    with psycopg.connect(libpq(database_url), autocommit=True) as connection:
        for _, code in blocks(page, "sql"):
            connection.execute((f"BEGIN; {code} ROLLBACK;" if "CREATE ROLE" in code else code).encode())
        left = connection.execute("SELECT id, error FROM fairqueue.message ORDER BY id").fetchall()
    assert left == [], "4 was cancelled, 1 and 2 completed, 3 cancelled"


def test_operations_page(database_url: str, session: Session) -> None:
    """The blocks of docs/operations.md: a tenant goes, and what was left of another server is forgotten."""
    fq.enqueue_many(session, [{"channel": channel} for channel in ("acme", "globex", "acme")])
    session.commit()
    (leased,) = session.scalars(fq.dequeue(limit=1)).all()
    session.execute(fq.complete([leased]))
    session.execute(text("UPDATE fairqueue.history SET xid = '9999999999'"))
    session.execute(text("SELECT fairqueue.feed_move('archive', '9999999999', 1)"))
    session.commit()
    page = (ROOT / "docs" / "operations.md").read_text("utf-8")
    with psycopg.connect(libpq(database_url), autocommit=True) as connection:
        for _, code in blocks(page, "sql"):
            connection.execute(code.encode())
        left = connection.execute("SELECT channel FROM fairqueue.message").fetchall()
        kept = connection.execute(
            "SELECT channel FROM fairqueue.history UNION SELECT name FROM fairqueue.feed"
        ).fetchall()
    assert (left, kept) == ([("globex",)], [])
    assert fq.check(session) == []


def test_rights_of_a_worker(project: Path) -> None:
    """What docs/operations.md grants is what the handler of README needs. Roles belong to the server."""
    page = (ROOT / "docs" / "operations.md").read_text("utf-8")
    (own_tables,) = re.findall(r"`(GRANT [^`]* TO app_worker)`", page)
    models, app, worker = load("models"), load("app"), load("worker")
    models.Base.metadata.create_all(models.engine)
    assert app.app.test_client().post("/acme/documents", data="one two").status_code == 202
    name = f"app_worker_{secrets.token_hex(4)}"
    engine = create_engine(models.engine.url, connect_args={"options": f"-c role={name}"})
    with models.engine.begin() as connection:
        connection.execute(text(f"CREATE ROLE {name}"))
        roles.grant(connection, name, "worker")
    try:
        with models.engine.begin() as connection:
            connection.execute(text(own_tables.replace("app_worker", name)))
        assert [str(outcome) for _, outcome in drain(engine, worker.app)] == ["completed"]
    finally:
        engine.dispose()
        with models.engine.begin() as connection:
            connection.execute(text(f"DROP OWNED BY {name}; DROP ROLE {name}"))
        models.engine.dispose()


@pytest.mark.parametrize("already", [False, True])
def test_renaming_the_schema(engine: Engine, raw: Raw, database_url: str, already: bool) -> None:
    """Functions that look in the schema of before find nothing, or another queue; so that is noticed."""
    page = (ROOT / "docs" / "operations.md").read_text("utf-8")
    ((_, renaming),) = blocks(page, "plpgsql")
    owner = raw(database_url)
    if already:
        rename = "ALTER SCHEMA fairqueue RENAME TO jobs;"
        owner.execute(rename)
        owner.commit()
        renaming = renaming.replace(rename, "")
        with engine.connect() as connection, pytest.raises(fq.SchemaVersionError) as error:
            fq.verify(connection, "jobs")
        said = "schema 'jobs' was renamed, its functions still look for tables in fairqueue: rename"
        assert said in str(error.value)
        told = CliRunner().invoke(program, ["--dsn", database_url, "--schema", "jobs", "migrate"])
        assert (told.exit_code, said in told.stderr) == (1, True)
        with engine.connect() as connection, pytest.raises(fq.SchemaVersionError, match="was renamed"):
            Operations(MigrationContext.configure(connection)).invoke(CreateFairqueueOp(1, "jobs"))
    owner.execute(renaming.encode())
    with Session(engine.execution_options(**fq.in_schema("jobs"))) as session:
        fq.verify(session.connection())
        fq.enqueue(session, "acme", key="k")
        session.commit()
        leased = session.scalars(fq.dequeue()).all()
        assert session.execute(fq.complete(leased)).one().result == "completed"
        session.commit()
        assert fq.check(session) == []


@pytest.mark.filterwarnings("ignore:Using `httpx`")
def test_testing_page_with_fastapi(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The test of docs/testing.md for the application of docs/web.md; that again, with the lifespan and asyncpg."""
    pages = [(ROOT / "docs" / name).read_text("utf-8") for name in ("web.md", "testing.md")]
    files = {name: code for page in pages for name, code in blocks(page, "python")}
    for name in ("api.py", "hooks.py"):
        (tmp_path / name).write_text(files[name])
        request.addfinalizer(partial(sys.modules.pop, name.removesuffix(".py"), None))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("DATABASE_URL", database_url.replace("+psycopg", "+asyncpg"))
    known: dict[str, Any] = {}
    exec(compile(files["web/test_upload.py"], "test_upload.py", "exec"), known)  # noqa: S102
    known["test_upload"](create_async_engine(database_url, poolclass=NullPool))
    for _ in range(2):
        with known["TestClient"](load("hooks").app):
            pass


def test_names_are_there() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for name in re.findall(r"\bfq\.(\w+)", page.read_text("utf-8")):
            assert hasattr(fq, name), f"{page.name}: fq.{name}"


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_doctests() -> None:
    results = doctest.testmod(schedule, optionflags=doctest.ELLIPSIS)
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize(
    "name",
    [
        *("fairqueue", "fairqueue.producing", "fairqueue.consuming", "fairqueue.leases", "fairqueue.waiting"),
        *("fairqueue.models", "fairqueue.payloads", "fairqueue.policies", "fairqueue.errors", "fairqueue.checking"),
        *("fairqueue.status", "fairqueue.cli", "fairqueue.worker.pace"),
        *("fairqueue.testing", "fairqueue.testing.clock", "fairqueue.testing.messages", "fairqueue.testing.draining"),
    ],
)
def test_docstring_examples(name: str, engine: Any) -> None:
    """The example of a module's docstring, in an application that has what it refers to."""

    class Base(DeclarativeBase):
        pass

    class Existing(DeclarativeBase):
        pass

    class Invoice(Existing):
        __tablename__ = "invoice"
        id: Mapped[int] = mapped_column(primary_key=True)
        message_id: Mapped[int | None] = mapped_column(ForeignKey(fq.Message.id, ondelete="SET NULL"))
        message: Mapped[fq.Message | None] = relationship(fq.Message)

    Existing.metadata.create_all(engine)
    known: dict[str, Any] = {
        "Base": Base, "Invoice": Invoice, "Session": Session, "engine": engine, "Mapped": Mapped,
        "mapped_column": mapped_column, "relationship": relationship, "ForeignKey": ForeignKey,
    }  # fmt: skip
    module = importlib.import_module(name)
    examples = [
        textwrap.dedent(code)
        for code in re.findall(r"::\n\n((?:(?:    .*)?\n)+)", module.__doc__ or "")
        if "await " not in code
    ]
    assert examples
    with Session(engine) as session:
        known["session"] = session
        for example in examples:
            code = example.replace("Invoice(...)", "Invoice()").replace("shop_test", engine.url.database)
            exec(compile(code, name, "exec"), known)  # noqa: S102
            session.rollback()
