"""The files of docs/web.md, and the examples in fairqueue.flask and fairqueue.fastapi, run as they stand."""

import asyncio
import importlib
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from flask import Flask, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import fairqueue as fq
import fairqueue.fastapi
import fairqueue.flask
from tests.acts import wait_until
from tests.pages import ROOT, blocks

FILES = {name: code for name, code in blocks((ROOT / "docs" / "web.md").read_text("utf-8"), "python") if name}
TOO_LONG = "x" * 300


@pytest.fixture
def reader(tmp_path: Path, empty_database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The reader's folder, with the files of the page."""
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("DATABASE_URL", empty_database_url)
    yield
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def load(name: str) -> Any:
    return importlib.import_module(name)


def test_flask_with_flask_sqlalchemy(reader: None) -> None:
    app, jobs = load("app"), load("jobs")
    with jobs.flask_app.app_context():
        app.db.create_all()
        client = jobs.flask_app.test_client()
        assert client.post("/acme/documents", data="one two three").status_code == 202
        with jobs.app:
            wait_until(lambda: app.db.session.scalar(text("TABLE fairqueue.message")) is None)
        assert app.db.session.scalar(text("SELECT words FROM document")) == 3
        app.db.session.execute(text("SELECT fairqueue.channel_set('acme', max_size => 1)"))
        app.db.session.commit()
        assert [client.post("/acme/documents", data="one").status_code for _ in range(2)] == [202, 429]
        app.db.session.remove()
    assert client.post(f"/{TOO_LONG}/documents", data="one").status_code == 422
    with jobs.flask_app.app_context():
        assert app.db.session.scalar(text("SELECT count(*) FROM document")) == 2, "the last one was rolled back"
        app.db.session.remove()
        app.db.engine.dispose()


def test_flask_without_flask_sqlalchemy(reader: None) -> None:
    plain = load("plain")
    plain.metadata.create_all(plain.engine)
    client = plain.app.test_client()
    tenants = ("acme", "acme", TOO_LONG)
    assert [client.post(f"/{tenant}/reports/june").status_code for tenant in tenants] == [202, 409, 422]
    plain.engine.dispose()


async def test_fastapi(reader: None, anyio_backend: str) -> None:
    plain, api, hooks = load("plain"), load("api"), load("hooks")
    plain.metadata.create_all(plain.engine)
    with Session(plain.engine) as session:
        session.merge(fq.Channel("full", max_size=1))
        session.commit()
    plain.engine.dispose()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=api.app), base_url="http://localhost") as client:
        requests = [("acme", "one"), ("acme", ""), (TOO_LONG, "one"), ("full", "one"), ("full", "one")]
        answers = [await client.post(f"/{tenant}/documents", params={"text": text}) for tenant, text in requests]
    assert [answer.status_code for answer in answers] == [202, 422, 422, 202, 429]
    assert answers[2].json() == {"detail": "channel must have 1 to 255 characters, not 300"}
    await api.engine.dispose()
    async with hooks.app.router.lifespan_context(hooks.app):
        await asyncio.to_thread(wait_until, lambda: len(hooks.delivered) == 2)
    assert hooks.delivered == ["one", "one"]


def examples(docstring: str | None, url: str) -> list[str]:
    found = re.findall(r"::\n\n((?:(?:    .*)?\n)+)", docstring or "")
    return [textwrap.dedent(code).replace("postgresql+psycopg://localhost/app", url) for code in found]


def test_docstrings_of_flask(database_url: str) -> None:
    class Base(DeclarativeBase):
        pass

    known: dict[str, Any] = {
        "Base": Base, "Flask": Flask, "Session": Session, "SQLAlchemy": SQLAlchemy, "fq": fq, "request": request,
        "__name__": __name__, "with_app_context": fairqueue.flask.with_app_context,
    }  # fmt: skip
    create, enqueue = examples(fairqueue.flask.__doc__, database_url)
    exec(create, known)  # noqa: S102
    known["app"] = known["flask_app"] = app = known["create_app"]()

    class Document(known["db"].Model):  # type: ignore[misc]
        id: Mapped[int] = mapped_column(primary_key=True)
        tenant: Mapped[str]
        text: Mapped[str]

    known["Document"] = Document
    exec(enqueue, known)  # noqa: S102
    with app.app_context():
        known["db"].create_all()
        assert app.test_client().post("/acme/documents", data="text").status_code == 202
        (work,) = examples(textwrap.dedent(f"    {fairqueue.flask.with_app_context.__doc__}"), database_url)
        exec(work.replace("flask_app = create_app()\n", ""), known)  # noqa: S102
        with known["app"]:
            wait_until(lambda: known["db"].session.scalar(text("TABLE fairqueue.message")) is None)
        known["db"].session.remove()
        known["db"].engine.dispose()


async def test_docstring_of_fastapi(database_url: str, anyio_backend: str) -> None:
    known: dict[str, Any] = {}
    (code,) = examples(fairqueue.fastapi.__doc__, database_url)
    exec(code, known)  # noqa: S102
    app = known["app"]
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client,
    ):
        assert (await client.post("/acme/documents")).status_code == 202
        end = await fq.wait_for(known["engine"], 1, timeout=30)
    assert end.outcome == "completed"
    await known["engine"].dispose()
