"""The queues of others in the benchmarks: each serves every message once, and in the order that it is known for."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from benchmarks.consumers import Consumers
from benchmarks.measuring import TINY, Bench, Case
from benchmarks.place import Place
from benchmarks.processes import Child, ProcessFailed
from benchmarks.scenarios import peers
from benchmarks.scenarios.fairness import places_of_quiet
from benchmarks.systems import OURS, SYSTEMS, System, payload_of
from benchmarks.systems.fair import Fairqueue
from benchmarks.systems.peers import OUR_WORKER, PEERS, Peer, Working
from benchmarks.systems.peers.base import work
from benchmarks.systems.peers.own import FairqueueWorker
from benchmarks.systems.peers.pgboss import PgBoss
from tests.fixtures.postgres import libpq

# What others warn of isn't ours to mend.
pytestmark = pytest.mark.filterwarnings("default")

PAYLOAD = payload_of(100)
FETCHED = [peer for peer in PEERS.values() if not isinstance(peer, Working)]
WORKERS = [peer for peer in PEERS.values() if isinstance(peer, Working)]
NOISY = 20
ROWS = [("noisy", PAYLOAD)] * NOISY + [(f"quiet{i % 4}", PAYLOAD) for i in range(NOISY)]
CHANNELS = Counter(channel for channel, _payload in ROWS)
#: Those that serve a round of all tenants before the second message of one.
WHOLE_ROUNDS = {"pgmq-grouped-rr", "procrastinate-lock"}


def here(peer: Peer) -> Peer:
    reason = peer.missing()
    if reason is None and isinstance(peer, PgBoss) and not peer.fetched():
        reason = "pg-boss is fetched by the benchmarks, not by tests"
    if reason:
        pytest.skip(reason)
    return peer


@pytest.fixture
def dsn(empty_database_url: str) -> str:
    return libpq(empty_database_url)


@pytest.mark.parametrize("peer", FETCHED, ids=lambda peer: peer.name)
def test_every_message_is_fetched_once(peer: Peer, dsn: str) -> None:
    here(peer).install(dsn)
    connection = peer.connect(dsn)
    try:
        peer.enqueue(connection, ROWS)
        assert peer.backlog(connection) == len(ROWS)
        order: list[str] = []
        while batch := peer.dequeue(connection, 10, timed=True):
            assert {lease.payload["pad"] for lease in batch} == {PAYLOAD[9:-2]}
            assert peer.backlog(connection) == len(ROWS) - len(order)  # fetched, not completed
            assert peer.complete(connection, batch) == len(batch)
            order += [lease.channel for lease in batch]
        assert peer.backlog(connection) == 0
    finally:
        connection.close()
    assert Counter(order) == CHANNELS
    worst, _ = places_of_quiet(order)
    if peer.name in WHOLE_ROUNDS:
        assert worst == 4
    elif not peer.fair:
        assert worst >= NOISY + 3


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[Child]:
    """The process of the worker that the test is parametrized with."""
    process = Child(work, here(request.getfixturevalue("peer")))
    process.receive()
    yield process
    process.end()


@pytest.mark.parametrize("peer", WORKERS, ids=lambda peer: peer.name)
def test_every_message_is_worked_on_once(peer: Working, process: Child, dsn: str) -> None:
    peer.install(dsn)
    for _ in range(2):  # in one process
        connection = peer.connect(dsn)
        peer.enqueue(connection, ROWS)
        connection.close()
        assert peer.left(dsn) == len(ROWS)
        process.send((dsn, 60.0))
        served = process.receive()
        assert served.completed == len(ROWS)
        assert served.rate > 0
        assert Counter(served.order) == CHANNELS
        assert peer.left(dsn) == 0
        worst, _ = places_of_quiet(served.order)
        assert worst < NOISY if peer.fair else worst >= NOISY


@pytest.mark.parametrize("peer", [PEERS[OUR_WORKER]], ids=[OUR_WORKER])
def test_worker_that_fails(peer: Peer, process: Child, dsn: str) -> None:
    """It has no tables. The process says so, and goes on."""
    for _ in range(2):
        process.send((dsn, 1.0))
        with pytest.raises(ProcessFailed, match=r"fairqueue-worker: .*fairqueue"):
            process.receive()


class Broken(Fairqueue):
    name = "pgmq"

    def connect(self, dsn: str) -> Any:
        raise RuntimeError("not today")


class BrokenWorker(FairqueueWorker):
    name = "dbos"

    def work(self, dsn: str, handle: Callable[[str], None], stop: threading.Event) -> None:
        raise RuntimeError("not today")


@pytest.fixture
def bench(place: Place, consumers: Consumers) -> Bench:
    """With ours, and with two that fail."""
    systems: dict[str, System] = {name: SYSTEMS[name] for name in (OURS, OUR_WORKER)}
    systems |= {system.name: system for system in (Broken(), BrokenWorker())}
    return Bench(place, consumers, TINY, systems)


@pytest.mark.parametrize("case", peers.cases(TINY), ids=lambda case: case.label)
def test_peer_that_fails(case: Case, bench: Bench) -> None:
    """It has no figures, and the page says why; the others have theirs."""
    records = list(case.run(bench))
    assert {record.system for record in records} <= {OURS, OUR_WORKER}
    assert all(record.value > 0 for record in records)
    assert bench.failed
    assert any("not today" in note for note in bench.notes)


def test_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = PEERS["pgmq"]
    monkeypatch.setattr(type(peer), "package", "pgmq-of-nobody")
    assert peer.missing() == "pgmq-of-nobody isn't installed: pip install 'fairqueue[benchmarks]'"
