"""Behind a pooler in transaction mode a worker works as well; it says that it has to look by itself."""

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

import fairqueue as fq
from fairqueue.worker import listening
from tests.acts import put_all, wait_until
from tests.fixtures.connections import Raw
from tests.fixtures.workers import WorkerOf
from tests.invariants import check_invariants
from tests.observing import observer
from tests.worker.pooler import Pooler
from tests.worker.working import act, add_effects, effects, is_empty, wait_for_endings

SERVERS = 2


@pytest.fixture
def pooler(database_url: str) -> Iterator[Pooler]:
    with Pooler(database_url, SERVERS) as pooler:
        yield pooler


@pytest.fixture
def through(pooler: Pooler) -> Iterator[Engine]:
    engine = create_engine(pooler.url, connect_args={"prepare_threshold": None})
    yield engine
    engine.dispose()


def test_the_pooler_is_one(pooler: Pooler, through: Engine) -> None:
    """Ten clients, two backends; a transaction stays on one; a client that goes leaves nothing open."""
    barrier = threading.Barrier(10, timeout=30)

    def client(pids: list[list[int]]) -> None:
        with psycopg.connect(pooler.url.replace("+psycopg", ""), prepare_threshold=None) as connection:
            barrier.wait()
            for _ in range(5):
                with connection.transaction():
                    query = "SELECT pg_backend_pid()"
                    pids.append([connection.execute(query).fetchone()[0] for _ in range(3)])  # type: ignore[index]

    pids: list[list[int]] = []
    threads = [threading.Thread(target=client, args=(pids,)) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pids) == 50
    assert all(len(set(each)) == 1 for each in pids)
    assert {each[0] for each in pids} == set(pooler.pids)
    gone = [psycopg.connect(pooler.url.replace("+psycopg", "")) for _ in range(SERVERS)]
    for connection in gone:
        connection.execute("CREATE TEMPORARY TABLE t ()")
        connection.close()
    with through.connect() as other:
        assert other.scalar(text("SELECT count(*) FROM pg_class WHERE relname = 't'")) == 0


@pytest.mark.parametrize("kind", ["plain", "plain session", "async session"])
def test_a_worker(  # noqa: PLR0917
    kind: str,
    session: Session,
    pooler: Pooler,
    through: Engine,
    worker_of: WorkerOf,
    raw: Raw,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two server connections, five messages at a time: each is handled once, and no session keeps anything."""
    monkeypatch.setattr(listening, "PROBE_TIMEOUT", 0.1)
    monkeypatch.setattr(listening, "RETRY_INTERVAL", 0.2)
    add_effects(session)
    handled: Counter[int] = Counter()

    def body(message: fq.LeasedMessage[Any], own: Session | None) -> None:
        handled[message.id] += 1
        act(message, own)

    engine = {"url": pooler.url, "connect_args": {"prepare_threshold": None}}
    with worker_of(kind, body, engine=engine, concurrency=5):
        wait_until(lambda: "notifications of the database do not arrive" in caplog.text)
        put_all(session, {f"tenant{number}": 10 for number in range(8)})
        assert wait_for_endings(session, 80) == {"completed": 80}
        wait_until(lambda: caplog.text.count("do not arrive") >= 3)
    assert set(handled.values()) == {1}
    assert len(handled) == 80
    assert len(effects(session)) == (80 if kind.endswith("session") else 0)
    assert is_empty(session)
    assert set(pooler.transactions) == set(pooler.pids)
    watching = observer(raw, database_url)
    held = watching.execute("SELECT * FROM pg_locks WHERE locktype = 'advisory' AND pid = ANY (%s)", [pooler.pids])
    assert held.fetchall() == []
    with through.connect() as connection:
        settings = ("synchronous_commit", "transaction_isolation", "search_path")
        kept = {name: connection.scalar(text(f"SHOW {name}")) for name in settings}
    assert kept == {name: watching.execute(f"SHOW {name}".encode()).fetchone()[0] for name in settings}  # type: ignore[index]
    check_invariants(session.connection())
