"""What a worker leases ahead stands by: it runs in its order, when there is a slot; if none comes, nothing is lost."""

import threading
from collections import Counter
from contextvars import ContextVar
from time import monotonic
from typing import Any

import pytest
from anyio import to_thread
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

import fairqueue as fq
from fairqueue.worker.pace import Pace
from fairqueue.worker.reporting import Reporter
from fairqueue.worker.running import Run
from tests.acts import lease_of, put, put_all, wait_until
from tests.fixtures.workers import EngineOf, WorkerOf
from tests.invariants import check_invariants
from tests.worker.working import RARELY, endings, leased, wait_for_endings

TENANT: ContextVar[str | None] = ContextVar("tenant", default=None)
KINDS = ("plain", "plain session", "async")


@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_by_runs_in_its_order(kind: str, session: Session, worker_of: WorkerOf) -> None:
    """No more at a time than slots, and in the order in which the queue served them, which is fair."""
    put_all(session, {"noisy": 20, "quiet": 3})
    began: list[str] = []
    with worker_of(kind, lambda message, _: began.append(message.channel), concurrency=1, prefetch=7, poll=RARELY):
        assert wait_for_endings(session, 23) == {"completed": 23}
    assert began == ["noisy", "quiet"] * 3 + ["noisy"] * 17


def test_slots_and_leases(session: Session, worker_of: WorkerOf) -> None:
    put(session, "acme", 20)
    go = threading.Event()
    running: Counter[str] = Counter()
    lock = threading.Lock()

    def body(*_: Any) -> None:
        with lock:
            running["now"] += 1
            running["most"] = max(running["most"], running["now"])
        go.wait(30)
        with lock:
            running["now"] -= 1

    with worker_of("plain", body, concurrency=2, prefetch=5):
        wait_until(lambda: running["now"] == 2)
        wait_until(lambda: leased(session) == 7)
        go.set()
        assert wait_for_endings(session, 20) == {"completed": 20}
    assert running["most"] == 2


def test_more_places_than_a_dequeue_fills(session: Session, worker_of: WorkerOf) -> None:
    put(session, "acme", 3)
    with worker_of("plain", lambda *_: None, concurrency=10_000, prefetch=10_000):
        assert wait_for_endings(session, 3) == {"completed": 3}


@pytest.mark.parametrize("kind", KINDS)
def test_contexts(kind: str, session: Session, worker_of: WorkerOf) -> None:
    """What a handler sets for its own context is not there in the next one, though it has the same thread."""
    put(session, "acme", 4)
    found: list[str | None] = []

    def body(*_: Any) -> None:
        found.append(TENANT.get())
        TENANT.set("acme")

    with worker_of(kind, body, concurrency=1, prefetch=3):
        wait_for_endings(session, 4)
    assert found == [None] * 4


def test_what_comes_as_a_thread_ends(
    session: Session, engine: Engine, worker_of: WorkerOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread has found nothing more, but its slot isn't free yet; and the fetcher has as much as it wants."""
    put(session, "acme")
    app = worker_of("plain", lambda *_: None, concurrency=1, prefetch=2, poll=RARELY)
    original = Run.handle_in_thread
    late = [1]

    def slowly(run: Run) -> None:
        original(run)
        if late:
            late.clear()
            # In one statement: the worker may fall asleep while a transaction is open.
            with Session(engine.execution_options(isolation_level="AUTOCOMMIT")) as other:
                fq.enqueue_many(other, [{"channel": "acme"}, {"channel": "acme"}])
            wait_until(lambda: len(run.standby) == 2)

    monkeypatch.setattr(Run, "handle_in_thread", slowly)
    with app:
        assert wait_for_endings(session, 3) == {"completed": 3}


@pytest.mark.parametrize("kind", KINDS[:2])
def test_stopped(kind: str, session: Session, worker_of: WorkerOf) -> None:
    """What stands by is handed back at once, while the handlers that run have their time; no attempt is used up."""
    ids = put(session, "acme", 6)
    begun, go = threading.Event(), threading.Event()

    def body(*_: Any) -> None:
        begun.set()
        go.wait(30)

    app = worker_of(kind, body, concurrency=1, prefetch=4)
    with app:
        assert begun.wait(30)
        wait_until(lambda: leased(session) == 5)
        app.stop()
        wait_until(lambda: leased(session) == 1)
        go.set()
    assert endings(session) == ["completed"]
    left = session.execute(
        select(fq.Message.id, fq.Message.attempt - fq.Message.forgiven).order_by(fq.Message.id)
    ).all()
    assert [tuple(row) for row in left] == [(id_, 0) for id_ in ids[1:]]
    assert [message.id for message in lease_of(session, 10)] == ids[1:]
    check_invariants(session.connection())


def test_one_that_is_lost(session: Session, worker_of: WorkerOf, caplog: pytest.LogCaptureFixture) -> None:
    """A message whose lease is over while it stands by is not begun."""
    first, second, third = put(session, "acme", 3)
    go = threading.Event()
    began: list[int] = []

    def body(message: Any, _: Any) -> None:
        began.append(message.id)
        if message.id == first:
            go.wait(30)

    with worker_of("plain", body, concurrency=1, prefetch=2, lease=3):
        wait_until(lambda: leased(session) == 3)
        assert session.execute(fq.cancel(second)).one().result == "cancelled"
        session.commit()
        wait_until(lambda: "is no longer ours (not_found): not begun" in caplog.text)
        go.set()
        assert wait_for_endings(session, 3) == {"completed": 2, "cancelled": 1}
    assert began == [first, third]


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_report_that_takes_long(
    kind: str, prefetch: int, session: Session, worker_of: WorkerOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile as many more begin as there are places; and then no more, as what isn't reported may be done again."""
    ids = put(session, "acme", 6)
    places = 1 + prefetch
    began: list[int] = []
    report = held_reports(monkeypatch)
    app = worker_of(kind, lambda message, _: began.append(message.id), concurrency=1, prefetch=prefetch, poll=RARELY)
    with app:
        wait_until(lambda: began == ids[: 2 * places])
        run = app._run
        assert run is not None
        wait_until(lambda: len(run.reporter.unreported) == 2 * places)
        assert run.free() == 0
        assert leased(session) == 2 * places
        report.set()
        assert wait_for_endings(session, 6) == {"completed": 6}
    assert began == ids


def test_nothing_more_is_there(session: Session, worker_of: WorkerOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that ends while the worker looks for more is no reason to look again, before it is reported."""
    first, second = put(session, "acme", 2)
    looks: list[int] = []
    ends = {first: threading.Event(), second: threading.Event()}
    looked, report = threading.Event(), held_reports(monkeypatch)
    dequeue = Run.dequeue

    async def look(run: Run, limit: int) -> list[Any]:
        looks.append(limit)
        if len(looks) == 2:
            await to_thread.run_sync(looked.wait, 30)
        return await dequeue(run, limit)

    monkeypatch.setattr(Run, "dequeue", look)
    app = worker_of(
        "plain", lambda message, _: ends[message.id].wait(30), concurrency=2, prefetch=0, poll=RARELY, notify=False
    )
    with app:
        wait_until(lambda: leased(session) == 2)
        run = app._run
        assert run is not None
        ends[first].set()
        wait_until(lambda: len(looks) == 2)
        ends[second].set()
        wait_until(lambda: len(run.reporter.unreported) == 2)
        looked.set()
        wait_until(lambda: run.idler.waiting)
        for _ in range(10):  # what the event loop had to do is done
            turned = threading.Event()
            run.threads.call_soon(turned.set)
            assert turned.wait(30)
        assert looks == [2, 1]
        report.set()
        assert wait_for_endings(session, 2) == {"completed": 2}


def test_by_default_as_many_as_are_begun_meanwhile(session: Session, worker_of: WorkerOf) -> None:
    """A dequeue takes longer than these handlers: so the slot doesn't wait for each of their messages."""
    put(session, "acme", 300)
    standing = 0

    def body(*_: Any) -> None:
        nonlocal standing
        run = app._run
        assert run is not None
        standing = max(standing, len(run.standby))

    app = worker_of("plain", body, concurrency=1)
    with app:
        assert wait_for_endings(session, 300) == {"completed": 300}
    assert standing > 1
    check_invariants(session.connection())


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_no_slot_comes_free(
    kind: str, session: Session, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What stands by is left to others, without an attempt, and no more is leased ahead."""
    caplog.set_level("INFO")
    first, *others = put(session, "acme", 10)
    go = threading.Event()
    told = choose(monkeypatch, 3)
    later = 0.0
    monkeypatch.setattr("fairqueue.worker.running.monotonic", lambda: monotonic() + later)
    app = fq.Worker(engine_of(kind), concurrency=1, poll=RARELY)

    def plain(message: fq.LeasedMessage[Any]) -> None:
        if message.id == first:
            go.wait(30)

    async def asynchronous(message: fq.LeasedMessage[Any]) -> None:
        await to_thread.run_sync(plain, message)

    app.handler(plain if kind == "plain" else asynchronous)
    with app:
        run = app._run
        assert run is not None
        wait_until(lambda: [messages for messages, _ in told] == [1, 3] and run.full)
        later = 999.9
        run.threads.call_soon(run.news.set)
        wait_until(lambda: leased(session) == 1)
        wait_until(lambda: not run.reporter.unreported and run.full)
        assert (run.pace.prefetch, run.free(), leased(session)) == (0, 0, 1)
        left = session.execute(
            select(fq.Message.id, fq.Message.attempt - fq.Message.forgiven)
            .where(fq.Message.leased_until.is_(None))
            .order_by(fq.Message.id)
        ).all()
        assert [tuple(row) for row in left] == [(id_, 0) for id_ in others]
        session.commit()
        go.set()
        assert wait_for_endings(session, 10) == {"completed": 10}
    assert "leaves to others what stands by (3): the oldest has done so for more than 1000 s" in caplog.text
    check_invariants(session.connection())


@pytest.mark.parametrize("ends", [0, 3])
def test_news_is_no_slot(
    ends: int, session: Session, worker_of: WorkerOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The oldest that stands by counts, however much else happens: a notification, ends, a dequeue, a heartbeat."""
    caplog.set_level("INFO")
    put(session, "acme", 10)
    later = 0.0
    go = threading.Semaphore(0)
    began: list[int] = []

    def body(message: Any, _: Any) -> None:
        began.append(message.id)
        go.acquire(timeout=30)

    told = choose(monkeypatch, 4)
    monkeypatch.setattr("fairqueue.worker.running.monotonic", lambda: monotonic() + later)
    app = worker_of("plain", body, concurrency=1, poll=RARELY)
    with app:
        run = app._run
        assert run is not None
        wait_until(lambda: len(told) == 2 and run.full)
        later = 900
        for _ in range(ends):
            go.release()
        run.threads.call_soon(run.news.set)
        wait_until(lambda: len(began) == 1 + ends and len(told) == (3 if ends else 2) and run.full)
        assert len(run.standby) == 4
        assert "leaves to others" not in caplog.text
        later = 999.9
        run.threads.call_soon(run.news.set)
        wait_until(lambda: "stands by (4): the oldest has done so for more than 1000 s" in caplog.text)
        go.release(10)
        assert wait_for_endings(session, 10) == {"completed": 10}
    check_invariants(session.connection())


def test_fewer_places_than_are_unreported(
    session: Session, worker_of: WorkerOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once they are reported the worker goes on."""
    put(session, "acme", 30)
    told = choose(monkeypatch, 10, 10, 0)
    report = held_reports(monkeypatch)
    with worker_of("plain", lambda *_: None, concurrency=1, poll=RARELY) as app:
        run = app._run
        assert run is not None
        wait_until(lambda: len(told) == 3 and run.full)
        wait_until(lambda: len(run.reporter.unreported) == sum(messages for messages, _ in told))
        assert run.free() < 0
        report.set()
        assert wait_for_endings(session, 30) == {"completed": 30}


def test_without_a_backlog(session: Session, worker_of: WorkerOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing stands by while another worker may have a slot for it; nor does who has no slot wait for more."""
    put(session, "acme")
    go = threading.Event()
    told = choose(monkeypatch, 3)
    with worker_of("plain", lambda *_: go.wait(30), concurrency=1, poll=RARELY, notify=False) as app:
        run = app._run
        assert run is not None
        wait_until(lambda: run.full)
        assert (run.pace.prefetch, run.idler.waiting) == (0, False)
        put(session, "acme")
        assert len(lease_of(session, 2)) == 1
        assert len(told) == 2
        go.set()
        assert wait_for_endings(session, 1) == {"completed": 1}


def test_what_the_pace_is_told(session: Session, worker_of: WorkerOf, monkeypatch: pytest.MonkeyPatch) -> None:
    put(session, "acme", 20)
    begun, go = threading.Event(), threading.Event()
    told = choose(monkeypatch, 4, 10)
    dequeue = Run.dequeue

    async def once_begun(run: Run, limit: int) -> list[Any]:
        if told:
            await to_thread.run_sync(begun.wait, 30)
        return await dequeue(run, limit)

    def body(*_: Any) -> None:
        begun.set()
        go.wait(30)

    monkeypatch.setattr(Run, "dequeue", once_begun)
    with worker_of("plain", body, concurrency=1, poll=RARELY):
        wait_until(lambda: len(told) == 3)
        go.set()
        assert wait_for_endings(session, 20) == {"completed": 20}
    assert told[:3] == [(1, 0), (4, 0), (6, 4)]


def held_reports(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is reported before this is set."""
    report = threading.Event()
    send = Reporter.send

    async def hold(reporter: Reporter, *what: Any) -> None:
        await to_thread.run_sync(report.wait, 30)
        await send(reporter, *what)

    monkeypatch.setattr(Reporter, "send", hold)
    return report


def choose(monkeypatch: pytest.MonkeyPatch, *prefetch: int) -> list[tuple[int, int]]:
    """After each dequeue as many are to stand by, whatever the pace is. Returns what it was told: leased, standing."""
    told: list[tuple[int, int]] = []

    def dequeued(pace: Pace, messages: int, *, standing: int, **_: float) -> None:
        told.append((messages, standing))
        pace.prefetch = prefetch[min(len(told), len(prefetch)) - 1]

    monkeypatch.setattr(Pace, "dequeued", dequeued)
    return told
