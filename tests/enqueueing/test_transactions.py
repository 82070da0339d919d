"""Enqueueing belongs to the caller's transaction, and stands in nobody's way.

Whatever the isolation level and however long the transaction stays open. `lock_timeout` makes an error of every wait
that should not be, so nothing here depends on how fast a machine is.
"""

import asyncio
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import psycopg
import pytest
from psycopg import IsolationLevel
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import wait_until
from tests.fixtures.connections import Raw
from tests.fixtures.postgres import libpq
from tests.observing import impatient, observer, rows, value

pytestmark = pytest.mark.shared_database

LEVELS = [IsolationLevel.READ_COMMITTED, IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE]
ENQUEUE = "INSERT INTO fairqueue.message (channel) VALUES (%s)"
DEQUEUE = "SELECT id, attempt, channel FROM fairqueue.message_dequeue('default', %s)"
COMPLETE = "SELECT result FROM fairqueue.message_complete(%s::bigint[], %s::integer[])"

every_level = pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name.lower())


@pytest.fixture(params=LEVELS, ids=lambda level: level.name.lower())
def producer(request: pytest.FixtureRequest, raw: Raw, database_url: str) -> psycopg.Connection:
    """A connection of each isolation level in turn."""
    connection = raw(database_url)
    connection.isolation_level = request.param
    return connection


def dequeue(connection: psycopg.Connection, limit: int = 10) -> list[tuple[int, int, str]]:
    """Lease and commit, as a worker does."""
    with connection.transaction():
        return connection.execute(DEQUEUE, (limit,)).fetchall()


def complete(connection: psycopg.Connection, leased: list[tuple[int, int, str]]) -> list[str]:
    with connection.transaction():
        ended = connection.execute(COMPLETE, ([m[0] for m in leased], [m[1] for m in leased]))
        return [result for (result,) in ended]


class TestOpenEnqueue:
    """A transaction that has enqueued to a channel, and is not yet committed, hinders nobody there."""

    def test_everybody_goes_on(self, producer: psycopg.Connection, raw: Raw, database_url: str) -> None:
        other = impatient(raw, database_url)
        with other.transaction():
            other.execute(ENQUEUE, ("acme",))
        producer.execute(ENQUEUE, ("acme",))

        for each in LEVELS:
            other.isolation_level = each
            with other.transaction():
                other.execute(ENQUEUE, ("acme",))
        other.isolation_level = None
        leased = dequeue(other)
        assert len(leased) == 4
        for ended, message in zip([*LEVELS, None], leased, strict=True):
            other.isolation_level = ended
            assert complete(other, [message]) == ["completed"]

        other.isolation_level = None
        producer.commit()
        assert len(dequeue(other)) == 1

    def test_through_asyncpg_too(self, raw: Raw, database_url: str) -> None:
        other = impatient(raw, database_url)

        async def hold_open() -> None:
            engine = create_async_engine(make_url(database_url).set(drivername="postgresql+asyncpg"))
            async with AsyncSession(engine) as session:
                fq.enqueue(session, "acme")
                await session.flush()
                with other.transaction():
                    other.execute(ENQUEUE, ("acme",))
                leased = dequeue(other)
                assert len(leased) == 1
                assert complete(other, leased) == ["completed"]
                await session.commit()
            await engine.dispose()

        asyncio.run(hold_open())
        assert len(dequeue(other)) == 1

    @pytest.mark.shared_database(False)
    def test_its_locks(self, producer: psycopg.Connection) -> None:
        """Only such as writers of the same table share, and on its own transaction id."""
        for channel in ("acme", "globex"):
            producer.execute(ENQUEUE, (channel,))
        producer.execute("SELECT fairqueue.message_create('initech', '{}')")
        locks = producer.execute(
            "SELECT locktype, relation::regclass::text, mode FROM pg_locks"
            " WHERE pid = pg_backend_pid() AND relation IS DISTINCT FROM 'pg_locks'::regclass"
        ).fetchall()
        written = {"message", "signal", "message_id_seq", "signal_news"}
        written |= {"message_pkey", "message_ready", "message_leased", "message_key"}
        modes = {name: {"RowExclusiveLock"} for name in written}
        read = ("channel", "channel_pkey", "queue", "queue_pkey", "queue_without_history")
        modes |= {name: {"AccessShareLock"} for name in read}
        # Only what is bounded is read, so a change of any other policy can't be in conflict with it.
        modes |= {name: {"AccessShareLock", "SIReadLock"} for name in ("channel_bounded", "queue_bounded")}
        for locktype, relation, mode in locks:
            if locktype == "relation":
                assert mode in modes[relation.removeprefix("fairqueue.")]
            else:
                assert (locktype, mode) in {("virtualxid", "ExclusiveLock"), ("transactionid", "ExclusiveLock")}


def test_vacuum_locks_nobody_out(session: Session, raw: Raw, database_url: str) -> None:
    """To cut off empty pages it would have to; so it leaves them, unless told otherwise."""
    fq.enqueue_many(session, [{"channel": f"c{n % 7}", "payload": secrets.token_hex(5000)} for n in range(50)])
    session.commit()
    while batch := session.scalars(fq.dequeue(limit=10)).all():
        session.execute(fq.complete(batch))
        session.commit()
    session.rollback()
    watching = observer(raw, database_url)

    def pages(table: str) -> list[int]:
        """Of the table and of what is too large for it."""
        sizes = "pg_relation_size(oid), pg_relation_size(nullif(reltoastrelid, 0))"
        size = f"SELECT {sizes} FROM pg_class WHERE oid = '{table}'::regclass"
        (row,) = watching.execute(size.encode()).fetchall()
        return [number or 0 for number in row]

    for table in ("fairqueue.message", "fairqueue.signal"):
        before = pages(table)
        assert before[0] > 0
        watching.execute(f"VACUUM {table}".encode())
        assert pages(table) == before, table
    assert min(pages("fairqueue.message")) > 0
    watching.execute("VACUUM (TRUNCATE) fairqueue.message")
    assert pages("fairqueue.message") == [0, 0]


@pytest.mark.shared_database(False)
def test_vacuum_truncates_nothing_that_is_used_all_the_time(raw: Raw, database_url: str) -> None:
    """Neither tables, among them the days of history, nor what is too large for them."""
    query = """
        SELECT c.relname FROM pg_class c LEFT JOIN pg_class t ON t.oid = c.reltoastrelid
        WHERE c.relnamespace = 'fairqueue'::regnamespace AND c.relkind = 'r'
            AND (NOT coalesce(c.reloptions, '{}') @> '{vacuum_truncate=off}'
                OR t.oid IS NOT NULL AND NOT coalesce(t.reloptions, '{}') @> '{vacuum_truncate=off}')
    """
    others = {name for (name,) in observer(raw, database_url).execute(query)}
    # Used by feeds and loads, and by a dequeue when it drops a day.
    assert others == {"feed", "load", "stage", "dropped"}


class TestConcurrency:
    def test_opposite_orders_never_deadlock(self, raw: Raw, database_url: str) -> None:
        """Eight transactions at a time touch 50 channels in both orders, while others dequeue and complete."""
        connections = [impatient(raw, database_url) for _ in range(10)]
        start = Barrier(len(connections))
        channels = [f"tenant {n}" for n in range(50)]
        rounds = 6
        total = 8 * rounds * len(channels)
        done: list[int] = []

        def produce(number: int) -> None:
            connection = connections[number]
            start.wait()
            for turn in range(rounds):
                connection.isolation_level = LEVELS[(number + turn) % len(LEVELS)]
                with connection.transaction():
                    for channel in channels if number % 2 else reversed(channels):
                        connection.execute(ENQUEUE, (channel,))

        def consume(number: int) -> None:
            connection = connections[number]
            start.wait()

            def all_done() -> bool:
                leased = dequeue(connection, 50)
                assert set(complete(connection, leased)) <= {"completed"}
                done.extend(id_ for id_, _, _ in leased)
                return len(done) == total

            wait_until(all_done, 60)

        with ThreadPoolExecutor(len(connections)) as pool:
            jobs = [pool.submit(produce, number) for number in range(8)]
            jobs += [pool.submit(consume, number) for number in (8, 9)]
            for job in jobs:
                job.result()
        assert len(set(done)) == total
        assert rows(connections[0]).get("message", 0) == 0

    @pytest.mark.shared_database(False)
    def test_serializable_business_transactions_all_commit(self, raw: Raw, database_url: str) -> None:
        """Enqueueing adds no dependency between transactions that have none of their own."""
        first, *_ = connections = [impatient(raw, database_url) for _ in range(4)]
        with first.transaction():
            first.execute("CREATE TABLE invoice (tenant text)")
        for connection in connections:
            connection.isolation_level = IsolationLevel.SERIALIZABLE
        for number, connection in enumerate(connections):
            connection.execute("INSERT INTO invoice VALUES (%s)", (f"tenant {number}",))
            connection.execute(ENQUEUE, ("acme",))
        for connection in reversed(connections):
            connection.execute(ENQUEUE, ("acme",))
        for connection in connections:
            connection.commit()
        assert value(first, "SELECT count(*) FROM fairqueue.message") == 8

    def test_serializable_beside_dequeues(self, raw: Raw, database_url: str) -> None:
        """Nor do dequeues, folds and completions between its statements."""
        producer, worker = raw(database_url), impatient(raw, database_url)
        with worker.transaction():
            worker.execute(ENQUEUE, ("acme",))
        producer.isolation_level = IsolationLevel.SERIALIZABLE
        for _ in range(3):
            producer.execute(ENQUEUE, ("acme",))
            with worker.transaction():
                worker.execute(ENQUEUE, ("acme",))
            complete(worker, dequeue(worker))
        producer.commit()
        assert len(dequeue(worker)) == 3


class TestVisibility:
    def test_nothing_before_the_commit(self, producer: psycopg.Connection, raw: Raw, database_url: str) -> None:
        worker = impatient(raw, database_url)
        producer.execute(ENQUEUE, ("acme",))
        assert dequeue(worker) == []
        producer.commit()
        assert [channel for _, _, channel in dequeue(worker)] == ["acme"]

    def test_late_commit_is_not_lost(self, raw: Raw, database_url: str) -> None:
        """Ids are given at insert, seen at commit: dequeues meanwhile go beyond those that are still to come."""
        late, early = raw(database_url), impatient(raw, database_url)
        late.execute(ENQUEUE, ("acme",))
        for _ in range(3):
            with early.transaction():
                early.execute(ENQUEUE, ("acme",))
            assert len(dequeue(early)) == 1
        late.commit()
        assert len(dequeue(early)) == 1

    def test_rollback_leaves_nothing(self, producer: psycopg.Connection, raw: Raw, database_url: str) -> None:
        producer.execute(ENQUEUE, ("acme",))
        producer.rollback()
        assert rows(observer(raw, database_url)) == {}
        assert dequeue(impatient(raw, database_url)) == []

    def test_rollback_to_a_savepoint(self, session: Session, raw: Raw, database_url: str) -> None:
        fq.enqueue(session, "kept")
        with session.begin_nested() as savepoint:
            fq.enqueue(session, "undone")
            fq.enqueue_many(session, [{"channel": "undone"}])
            session.flush()
            savepoint.rollback()
        with session.begin_nested():
            fq.enqueue(session, "kept too")
        session.commit()
        assert rows(observer(raw, database_url)) == {"message": 2, "signal": 2}
        assert [m[2] for m in dequeue(impatient(raw, database_url))] == ["kept", "kept too"]

    def test_failing_business_statement(self, session: Session, raw: Raw, database_url: str) -> None:
        fq.enqueue(session, "acme")
        session.flush()
        with pytest.raises(Exception, match="division by zero"):
            session.execute(text("SELECT 1 / 0"))
        session.rollback()
        assert rows(observer(raw, database_url)) == {}

    def test_killed_producer(self, raw: Raw, database_url: str) -> None:
        """kill -9 in the middle: what it had committed is there, nothing else is."""
        program = (
            "import psycopg, sys\n"
            "connection = psycopg.connect(sys.argv[1])\n"
            f"for turn in range(2):\n"
            f"    connection.cursor().executemany({ENQUEUE!r}, [('acme',)] * 100)\n"
            "    if turn == 0: connection.commit()\n"
            "print(connection.info.backend_pid, flush=True)\n"
            "sys.stdin.read()\n"
        )
        with subprocess.Popen(
            [sys.executable, "-c", program, libpq(database_url)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout
            pid = int(process.stdout.readline())
            os.kill(process.pid, signal.SIGKILL)
        watching = observer(raw, database_url)
        wait_until(lambda: not value(watching, "SELECT count(*) FROM pg_stat_activity WHERE pid = %s", pid))
        assert rows(watching) == {"message": 100, "signal": 100}
        assert len(dequeue(impatient(raw, database_url), 1000)) == 100


@pytest.mark.shared_database(False)
class TestTwoPhaseCommit:
    """PREPARE TRANSACTION: enqueued when the coordinator commits, whoever does."""

    @pytest.fixture
    def coordinator(self, raw: Raw, database_url: str) -> Iterator[psycopg.Connection]:
        """Leaves nothing that is prepared: it belongs to the server, and its database couldn't be dropped."""
        connection = impatient(raw, database_url)
        if value(connection, "SHOW max_prepared_transactions") == "0":
            pytest.skip("needs a server with max_prepared_transactions")
        connection.commit()
        yield connection
        connection.rollback()
        for xid in connection.tpc_recover():
            if xid.database == connection.info.dbname:
                connection.tpc_rollback(xid)

    def test_prepared_messages(self, coordinator: psycopg.Connection, raw: Raw, database_url: str) -> None:
        names = {name: f"{coordinator.info.dbname} {name}" for name in ("kept", "undone")}
        for name, prepared in names.items():
            producer = raw(database_url)
            producer.tpc_begin(prepared)
            producer.execute(ENQUEUE, (name,))
            producer.tpc_prepare()
            producer.close()
            with coordinator.transaction():
                coordinator.execute(ENQUEUE, ("acme",))
            leased = dequeue(coordinator)
            assert [channel for _, _, channel in leased] == ["acme"]
            assert complete(coordinator, leased) == ["completed"]
        coordinator.tpc_rollback(names["undone"])
        coordinator.tpc_commit(names["kept"])
        assert [channel for _, _, channel in dequeue(coordinator)] == ["kept"]
