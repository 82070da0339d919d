"""Many workers at once: every message is served, once, and no dequeue comes back short while there is work."""

import itertools
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import complete, expire, lease_of, put, wait_until
from tests.faults.crew import context
from tests.faults.workers import take_and_hang
from tests.fixtures.postgres import libpq
from tests.invariants import check_invariants

WORKERS = 16
LEASE = timedelta(hours=1)


@dataclass
class Report:
    """What one worker saw, by the clock of the database."""

    leased: list[tuple[int, datetime]] = field(default_factory=list)
    #: The ends of the calls that came back with less than they asked for.
    short: list[datetime] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


def work(url: str, limit: int, start: threading.Barrier) -> Report:
    """Dequeue and complete until nothing comes back."""
    report = Report()
    with psycopg.connect(libpq(url), autocommit=True) as connection:
        start.wait(60)
        while True:
            batch = connection.execute(
                "SELECT id, attempt, leased_until FROM fairqueue.message_dequeue('default', %s, %s)",
                (limit, LEASE.total_seconds()),
            ).fetchall()
            if len(batch) < limit:
                end = connection.execute("SELECT clock_timestamp()").fetchone()
                assert end is not None
                report.short.append(end[0])
            if not batch:
                return report
            report.sizes.append(len(batch))
            report.leased += [(id_, leased_until - LEASE) for id_, _, leased_until in batch]
            connection.execute(
                "SELECT * FROM fairqueue.message_complete(%s::bigint[], %s::integer[])",
                ([row[0] for row in batch], [row[1] for row in batch]),
            )


def work_together(url: str, limit: int) -> list[Report]:
    start = threading.Barrier(WORKERS)
    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(work, [url] * WORKERS, [limit] * WORKERS, [start] * WORKERS))


def check_reports(reports: list[Report], ids: list[int]) -> None:
    """Each message was leased once, and none was there for a call that came back short.

    All of them were eligible from the beginning; so one that was leased after a call had ended was eligible, and
    nobody's, as long as that call lasted.
    """
    leased = [id_ for report in reports for id_, _ in report.leased]
    assert sorted(leased) == sorted(ids)
    last = max(at for report in reports for _, at in report.leased)
    false_empties = [end for report in reports for end in report.short if end < last]
    assert not false_empties


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 10])
def test_many_channels_with_one_message_each(engine: Engine, session: Session, database_url: str, limit: int) -> None:
    ids = fq.enqueue_many(session, [{"channel": f"tenant{number}"} for number in range(1000 * min(limit, 2))])
    session.commit()
    check_reports(work_together(database_url, limit), ids)
    with engine.connect() as connection:
        check_invariants(connection)


@pytest.mark.slow
def test_one_channel_with_the_whole_backlog(session: Session, database_url: str) -> None:
    """Every batch is full: sharing one channel costs nobody anything."""
    ids = put(session, "only", 5000)
    reports = work_together(database_url, 10)
    check_reports(reports, ids)
    assert {size for report in reports for size in report.sizes} == {10}


@pytest.mark.slow
def test_killed_workers_lose_no_message(session: Session, database_url: str) -> None:
    """What they held is served again when the leases have run out, and everything is completed once."""
    ids = [id_ for name in "abc" for id_ in put(session, name, 50)]
    workers = []
    for _ in range(3):
        ready = context.Event()
        worker = context.Process(target=take_and_hang, args=(database_url, ready), daemon=True)
        worker.start()
        workers.append((worker, ready))
    for worker, ready in workers:
        assert ready.wait(60)
        worker.kill()
        worker.join()
    held = session.scalars(text("SELECT id FROM fairqueue.message WHERE leased_until IS NOT NULL")).all()
    assert len(held) == 60
    expire(session, held)
    attempts: Counter[int] = Counter()
    completed: Counter[int] = Counter()

    def all_completed() -> bool:
        batch = lease_of(session, 7)
        for message, result in zip(batch, complete(session, batch), strict=True):
            attempts[message.id] = message.attempt
            completed[message.id] += result == "completed"
        return len(completed) == len(ids)

    wait_until(all_completed, deadline=60)
    assert completed == dict.fromkeys(ids, 1)
    assert Counter(attempts.values()) == {1: 90, 2: 60}
    assert session.scalar(text("SELECT count(*) FROM fairqueue.message")) == 0


def test_enqueueing_while_others_dequeue(session: Session, database_url: str) -> None:
    """Producers that commit in any order, beside workers: nothing is lost and nothing is served twice."""
    numbers = itertools.count()
    served: list[int] = []
    stop = threading.Event()

    def produce() -> None:
        with psycopg.connect(libpq(database_url)) as connection:
            while (number := next(numbers)) < 400:
                for channel in (f"c{number % 7}", f"c{number % 5}"):
                    connection.execute(
                        "INSERT INTO fairqueue.message (channel, dequeue_at) VALUES (%s, %s)",
                        (channel, -number),
                    )
                connection.execute("SELECT pg_sleep(random() * 0.01)")
                connection.commit()

    def consume() -> None:
        with psycopg.connect(libpq(database_url), autocommit=True) as connection:
            while True:
                last = stop.is_set()
                batch = connection.execute("SELECT id FROM fairqueue.message_dequeue('default', 3)")
                found = [row[0] for row in batch]
                served.extend(found)
                if last and not found:
                    return

    with ThreadPoolExecutor() as pool:
        consumers = [pool.submit(consume) for _ in range(3)]
        producers = [pool.submit(produce) for _ in range(4)]
        for producer in producers:
            producer.result()
        stop.set()
        for consumer in consumers:
            consumer.result()
    assert len(served) == len(set(served)) == 800
    check_invariants(session.connection())
