"""examples/shop over HTTP, as a whole: every upload that was accepted is counted once, and no other one.

Its web servers and workers are processes of their own, and so is the database. A hundred tenants upload through both
servers; among it, uploads that fail after they have enqueued. Meanwhile a worker is stopped, another one killed at its
work, and the database restarted twice. FAIRQUEUE_TEST_SECONDS is how long the tenants go on (make soak).
"""

import asyncio
import contextlib
import importlib
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import alembic.command
import alembic.config
import anyio
import httpx
import pytest
from anyio.from_thread import start_blocking_portal
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

import fairqueue as fq
from examples.shop.__main__ import FAILURES, Part, free_port, main, watch
from fairqueue import embedded
from tests.acts import wait_until
from tests.alembic.hosts import catalog
from tests.fixtures.connections import Raw
from tests.invariants import check_invariants
from tests.pages import ROOT

SECONDS = float(os.environ.get("FAIRQUEUE_TEST_SECONDS", "4"))
TENANTS = 100

Kind = Literal["good", "virus", "empty"]
TEXTS: dict[Kind, str] = {"good": "one two three", "virus": "a virus", "empty": ""}
#: What each is answered while all is well: the latter two fail after they have enqueued.
ANSWERS: dict[Kind, int] = {"good": 202, "virus": 422, "empty": 500}
#: What else: Flask-SQLAlchemy rolls back what was refused when Flask's error handlers have had their turn. If the
#: database goes away just then, nobody is left to say 503.
ALSO: set[tuple[Kind, int | None]] = {("virus", 500)}


@dataclass
class Upload:
    tenant: str
    name: str
    kind: Kind
    #: None: the connection broke, with this error.
    status: int | None = None
    error: httpx.TransportError | None = None

    @property
    def unknown(self) -> bool:
        """The database or a connection went away, maybe during the commit."""
        return self.status in {None, 503}


class Shop:
    """`python -m examples.shop`, and what it prints."""

    def __init__(self, url: str) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "examples.shop"],
            cwd=ROOT,
            env={**os.environ, "FAIRQUEUE_DSN": url},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.reader = threading.Thread(target=self._read)
        self.reader.start()
        try:
            self.web, self.api = self.wait_for(r"Website: (\S+)  API: (\S+)")
        except BaseException:
            self.kill()
            raise

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            self.lines.extend(lines)

    def wait_for(self, pattern: str, times: int = 1) -> tuple[str, ...]:
        """The groups of the last of so many lines in which the pattern is found."""

        def found() -> list[re.Match[str]]:
            return [match for line in list(self.lines) if (match := re.search(pattern, line))]

        wait_until(lambda: self.process.poll() is not None or len(found()) >= times, 60)
        assert len(found()) >= times, "".join(self.lines)
        return found()[-1].groups()

    def pid(self, part: str, start: int = 1) -> int:
        return int(self.wait_for(rf"^{part}: process (\d+)", start)[0])

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        self.reader.join()
        return code

    def kill(self) -> None:
        """All of it, whatever state it is in."""
        self.process.kill()
        self.process.wait()
        for line in list(self.lines):
            if match := re.search(r": process (\d+)", line):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(match[1]), signal.SIGKILL)
        self.reader.join()


@pytest.fixture
def own_server() -> Iterator[embedded.Server]:
    """One that can be restarted."""
    with embedded.ephemeral() as server:
        yield server


@pytest.fixture
def shop(own_server: embedded.Server) -> Iterator[Shop]:
    shop = Shop(own_server.url())
    yield shop
    shop.kill()
    assert not shop.reader.is_alive()


class Crowd:
    """The tenants, who upload until they are told to stop, and note what they were answered."""

    def __init__(self, shop: Shop, seed: str) -> None:
        self.shop = shop
        self.seed = seed
        self.uploads: list[Upload] = []
        self.closed = asyncio.Event()

    async def tenant(self, client: httpx.AsyncClient, name: str) -> None:
        dice = random.Random(f"{self.seed}/{name}")  # noqa: S311
        number = 0
        while not self.closed.is_set():
            with anyio.move_on_after(dice.expovariate(1)):
                await self.closed.wait()
            (kind,) = dice.choices(list(TEXTS), [8, 1, 1])
            await self.upload(client, Upload(name, f"{name}-{number}", kind), by_api=dice.random() < 0.5)
            number += 1
        # Both servers have survived everything: what they are sent now they accept.
        last = Upload(name, f"{name}-last", "good")
        await self.upload(client, last, by_api=dice.random() < 0.5)
        assert last.status == 202, last

    async def upload(self, client: httpx.AsyncClient, upload: Upload, by_api: bool) -> None:
        params, words = {"name": upload.name}, TEXTS[upload.kind]
        async with self.at_a_time:
            self.uploads.append(upload)
            try:
                if by_api:
                    url = f"{self.shop.api}/{upload.tenant}/documents"
                    answer = await client.post(url, params=params, json={"text": words})
                else:
                    url = f"{self.shop.web}/{upload.tenant}/documents"
                    answer = await client.post(url, params=params, content=words)
                upload.status = answer.status_code
            except httpx.TransportError as error:
                upload.error = error

    async def run(self) -> None:
        self.at_a_time = anyio.CapacityLimiter(20)
        # Servers close connections that have been idle, maybe just when they are used again: so each is used once.
        limits = httpx.Limits(max_keepalive_connections=0)
        async with (
            httpx.AsyncClient(limits=limits, timeout=60, trust_env=False) as client,
            anyio.create_task_group() as tenants,
        ):
            for number in range(TENANTS):
                tenants.start_soon(self.tenant, client, f"tenant{number}")


def make_trouble(shop: Shop, server: embedded.Server, engine: Engine) -> None:
    """One after the other, spread over the time that there is."""

    def go_on() -> None:
        time.sleep(SECONDS / 5)

    first = shop.pid("worker 1")
    shop.wait_for(rf" {first} INFO fairqueue\.worker: .* (works) on queue")  # else it wouldn't know what a signal means
    go_on()
    os.kill(first, signal.SIGTERM)
    assert shop.wait_for(r"^worker 1: ended with exit code (-?\d+)") == ("0",)
    shop.pid("worker 1", 2)

    go_on()
    kill_at_work(shop.pid("worker 2"), engine)
    assert shop.wait_for(r"^worker 2: ended with exit code (-?\d+)") == ("-9",)
    shop.pid("worker 2", 2)

    go_on()
    server.restart("fast")
    go_on()
    server.restart("immediate")
    engine.dispose()
    go_on()


def kill_at_work(pid: int, engine: Engine) -> None:
    """kill -9 at a moment when the process has leased messages."""

    def caught() -> bool:
        os.kill(pid, signal.SIGSTOP)
        with engine.connect() as connection:
            held = connection.scalar(
                text("SELECT count(*) FROM fairqueue.message WHERE worker LIKE '%:' || :pid"), {"pid": pid}
            )
        if not held:
            os.kill(pid, signal.SIGCONT)
        return bool(held)

    wait_until(caught)
    os.kill(pid, signal.SIGKILL)


def check_books(engine: Engine, uploads: list[Upload]) -> None:
    """Compare what the tenants were told with what is there."""
    with Session(engine) as session:
        rows = session.execute(
            text(
                "SELECT d.tenant, d.name, count(w.id) AS effects FROM document d"
                " LEFT JOIN word_count w ON w.document_id = d.id GROUP BY d.id"
            )
        ).all()
        documents = Counter((row.tenant, row.name) for row in rows)
        accepted = {(upload.tenant, upload.name) for upload in uploads if upload.status == 202}
        unknown = {(upload.tenant, upload.name) for upload in uploads if upload.unknown and upload.kind == "good"}
        assert {row for row in rows if row.effects != 1} == set(), "a document that wasn't counted, or twice"
        assert accepted - documents.keys() == set(), "a document that was accepted, and is not there"
        assert documents.keys() - accepted - unknown == set(), "a document of a request that failed"
        assert set(documents.values()) == {1}
        assert {tenant for tenant, _ in documents} == {f"tenant{number}" for number in range(TENANTS)}
        done = session.execute(text("SELECT outcome, count(*) FROM fairqueue.history GROUP BY outcome")).all()
        assert dict(map(tuple, done)) == {"completed": len(rows)}
        assert fq.check(session) == []
        check_invariants(session.connection())


@pytest.mark.slow
@pytest.mark.soak
def test_the_shop(own_server: embedded.Server, shop: Shop) -> None:
    seed = os.environ.get("FAIRQUEUE_TEST_SEED") or secrets.token_hex(4)
    print(f"FAIRQUEUE_TEST_SEED={seed}")
    engine = create_engine(own_server.url())
    crowd = Crowd(shop, seed)
    with start_blocking_portal() as portal:
        done = portal.start_task_soon(crowd.run)
        try:
            make_trouble(shop, own_server, engine)  # in the main thread, with which the database lives
        finally:
            portal.call(crowd.closed.set)
        done.result()

    answers = Counter((upload.kind, upload.status) for upload in crowd.uploads if not upload.unknown)
    print(answers)
    assert answers.keys() - ALSO == set(ANSWERS.items()), f"{answers}\n" + "".join(shop.lines[-200:])
    assert answers["virus", 422] > answers["virus", 500]
    with Session(engine) as session:
        wait_until(lambda: live(session) == 0, 60)
    check_books(engine, crowd.uploads)
    for answer in (
        httpx.post(f"{shop.web}/{'x' * 256}/documents", content="two words"),
        httpx.post(f"{shop.api}/{'x' * 256}/documents", json={"text": "two words"}),
        httpx.get(f"{shop.api}/tenant0/documents/{2**31}"),
        httpx.get(f"{shop.api}/tenant0/documents/{-(2**31) - 1}"),
    ):
        assert answer.status_code == 422, answer.text
    check_books(engine, crowd.uploads)
    engine.dispose()

    processes = [int(match[1]) for line in shop.lines if (match := re.search(r": process (\d+)", line))]
    assert shop.stop() == 0, "".join(shop.lines)
    assert "Stopping.\n" in shop.lines
    for pid in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.fixture
def load(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a module of the shop, for this database."""
    monkeypatch.setenv("DATABASE_URL", database_url)
    yield lambda name: importlib.import_module(f"examples.shop.{name}")
    for name in ("web", "api"):
        sys.modules.pop(f"examples.shop.{name}", None)


def limit(pool: Any) -> int:
    """Have it give no more connections than it keeps, and nobody wait for one; returns how many those are."""
    pool._max_overflow, pool._timeout = 0, 0.01
    size: int = pool.size()
    return size


def test_a_website_without_a_free_connection(load: Callable[[str], Any]) -> None:
    """It answers as without a database."""
    web = load("web")
    with web.app.app_context():
        engine = web.db.engine
    used = [engine.connect() for _ in range(limit(engine.pool))]
    assert web.app.test_client().post("/acme/documents", data="one").status_code == 503
    for connection in used:
        connection.close()
    engine.dispose()


async def test_an_api_without_a_free_connection(load: Callable[[str], Any], anyio_backend: str) -> None:
    api = load("api")
    used = [await api.engine.connect() for _ in range(limit(api.engine.pool))]
    transport = httpx.ASGITransport(app=api.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.post("/acme/documents", json={"text": "one"})).status_code == 503
    for connection in used:
        await connection.close()
    await api.engine.dispose()


def test_a_terminal_that_is_closed_at_once(own_server: embedded.Server) -> None:
    """What has been started by the first word that can't be printed is stopped."""
    port = free_port()
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-u", "-m", "examples.shop", "--workers", "0", "--web", str(port)],
        cwd=ROOT,
        env={**os.environ, "FAIRQUEUE_DSN": own_server.url()},
        stdout=writing,
        stderr=subprocess.DEVNULL,  # no pipe, whose end would have to be waited for
        check=False,
    )
    os.close(writing)
    assert done.returncode != 0
    left = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it is gone meanwhile
            if f"127.0.0.1:{port}" in (process / "cmdline").read_text():
                left.append(process.name)
                os.kill(int(process.name), signal.SIGKILL)
    assert left == []


def test_a_terminal_that_is_closed(own_server: embedded.Server) -> None:
    """No process is left, though nothing can be printed any more."""
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "examples.shop", "--workers", "0"],
        cwd=ROOT,
        env={**os.environ, "FAIRQUEUE_DSN": own_server.url()},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # noqa: PLW1509 (nohup ignores it)
    ) as process:
        assert process.stdout is not None
        parts = []
        try:
            for line in process.stdout:
                if match := re.search(r": process (\d+)", line):
                    parts.append(int(match[1]))
                if line.startswith("Ctrl-C stops everything."):
                    break
            process.stdout.close()
            process.send_signal(signal.SIGHUP)
            process.wait(60)
            assert len(parts) == 2
            for pid in parts:
                with pytest.raises(ProcessLookupError):
                    os.kill(pid, 0)
        finally:
            process.kill()
            for pid in parts:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def live(session: Session) -> int:
    count: int = session.execute(text("SELECT count(*) FROM fairqueue.message")).scalar_one()
    session.rollback()
    return count


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(sys, "argv", ["shop", f"--api={port}"])
        monkeypatch.setenv("FAIRQUEUE_DSN", "none")  # or else a server would be started
        with pytest.raises(SystemExit, match="2"):
            main()
    assert f"port {port} is taken: name another one" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["65536", "-1"])
def test_what_is_no_port(port: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["shop", f"--web={port}"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert f"a port must be from 1 to 65535, not {port}\n" in capsys.readouterr().err


def test_one_port_for_two(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr(sys, "argv", ["shop", f"--web={port}", f"--api={port}"])
    monkeypatch.setenv("FAIRQUEUE_DSN", "none")  # or else a server would be started
    with pytest.raises(SystemExit, match="2"):
        main()
    assert f"--web and --api are both {port}: name another one" in capsys.readouterr().err


@pytest.mark.parametrize("failures", [1, FAILURES])
def test_a_part_that_does_not_start(capsys: pytest.CaptureFixture[str], failures: int) -> None:
    """It is given up, with a clear word: at once while the shop is being opened, later after some tries."""
    part = Part("worker 1", "examples.shop.nonsense")
    part.start()
    with pytest.raises(SystemExit, match=r"worker 1 doesn't start \(exit code 1\), so everything is stopped"):
        watch([part], until_open=[1] if failures == 1 else None)
    assert capsys.readouterr().out.count("worker 1: process ") == failures


def test_its_migrations(empty_database_url: str, raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    """They agree with the models, and leave nothing behind on the way back."""
    monkeypatch.setenv("DATABASE_URL", empty_database_url)
    database = raw(empty_database_url)
    nothing = catalog(database)
    config = alembic.config.Config(ROOT / "examples" / "shop" / "alembic.ini")
    alembic.command.upgrade(config, "head")
    alembic.command.check(config)
    alembic.command.downgrade(config, "base")
    assert catalog(database) == nothing
