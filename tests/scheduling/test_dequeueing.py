"""One dequeue of a queue at a time: who waits for whom, for how long, and who never does."""

from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from psycopg import IsolationLevel, errors
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import alter, wait_until
from tests.fixtures.connections import Raw
from tests.observing import impatient, observer, rows, value, waits_for_a_lock

pytestmark = pytest.mark.shared_database

DEQUEUE = "SELECT id FROM fairqueue.message_dequeue(%s, 1)"


def enqueue(connection: psycopg.Connection, count: int = 3, queue: str = "default") -> None:
    connection.execute(
        "INSERT INTO fairqueue.message (queue, channel) SELECT %s, 'acme' FROM generate_series(1, %s)",
        (queue, count),
    )
    connection.commit()


def dequeue(connection: psycopg.Connection, queue: str = "default") -> int | None:
    """Lease one message, without committing."""
    row = connection.execute(DEQUEUE, (queue,)).fetchone()
    return row[0] if row else None


class TestIsolation:
    @pytest.mark.parametrize("level", [IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE])
    def test_needs_read_committed(self, raw: Raw, database_url: str, level: IsolationLevel) -> None:
        """A snapshot as old as its transaction would show messages that others have long taken."""
        connection = raw(database_url)
        enqueue(connection)
        connection.isolation_level = level
        expected = f"message_dequeue needs READ COMMITTED, this transaction is {level.name.replace('_', ' ')}"
        with pytest.raises(errors.ActiveSqlTransaction, match=expected) as error:
            dequeue(connection)
        assert error.value.diag.message_hint == "Dequeue in a short transaction of its own."
        connection.rollback()
        connection.isolation_level = None
        assert dequeue(connection) == 1

    def test_through_a_session(self, engine: Engine) -> None:
        strict = engine.execution_options(isolation_level="REPEATABLE READ")
        with Session(strict) as session, pytest.raises(DBAPIError, match="needs READ COMMITTED"):
            session.scalars(fq.dequeue()).all()

    def test_autocommit_is_as_good(self, engine: Engine, session: Session) -> None:
        fq.enqueue(session, "acme")
        session.commit()
        with Session(engine.execution_options(isolation_level="AUTOCOMMIT")) as worker:
            [message] = worker.scalars(fq.dequeue())
            assert session.execute(fq.complete(message)).one().result == "completed"


class TestTurn:
    def test_the_next_waits_and_then_gets_messages(self, raw: Raw, database_url: str) -> None:
        """For which it sets lock_timeout, and puts it back."""
        first, second, watching = raw(database_url), raw(database_url), observer(raw, database_url)
        enqueue(first)
        second.execute("SET lock_timeout = '17s'")
        second.commit()
        assert dequeue(first) == 1
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(dequeue, second)
            wait_until(lambda: waits_for_a_lock(watching, second))
            first.commit()
            assert waiting.result() == 2
        assert value(second, "SHOW lock_timeout") == "17s"
        second.commit()
        assert value(second, "SHOW lock_timeout") == "17s"

    def test_rolled_back_turn(self, raw: Raw, database_url: str) -> None:
        """A worker that dies before it commits its dequeue has taken nothing."""
        first, second, watching = raw(database_url), raw(database_url), observer(raw, database_url)
        enqueue(first)
        assert dequeue(first) == 1
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(dequeue, second)
            wait_until(lambda: waits_for_a_lock(watching, second))
            value(watching, "SELECT pg_terminate_backend(%s)", first.info.backend_pid)
            assert waiting.result() == 1

    def test_queues_have_turns_of_their_own(self, raw: Raw, database_url: str) -> None:
        first, second = raw(database_url), impatient(raw, database_url)
        enqueue(first)
        enqueue(first, queue="transcode")
        assert dequeue(first) == 1
        assert dequeue(second, "transcode") == 4

    def test_names_that_look_alike_have_turns_of_their_own(self, raw: Raw, database_url: str) -> None:
        """A dot in a name joins nothing: schema a with queue b.c is not schema a.b with queue c."""
        connection, keys = raw(database_url), set()
        for schema, queue in {"a": "b.c", "a.b": "c"}.items():
            connection.execute(f'CREATE SCHEMA "{schema}"'.encode())
            connection.execute(f'SET search_path = "{schema}"'.encode())
            keys |= {value(connection, f"SELECT fairqueue.{name}(%s)", queue) for name in ("queue_key", "queue_wake")}
        assert len(keys) == 4

    @pytest.mark.parametrize("waits", [False, True])
    def test_of_two_queues_in_opposite_order(self, raw: Raw, database_url: str, waits: bool) -> None:
        """Nobody waits for a second one, and nothing is found, though neither has written anything."""
        first, second = impatient(raw, database_url), impatient(raw, database_url)
        for queue in ("default", "transcode"):
            enqueue(first, queue=queue)
            for _ in range(4):
                dequeue(first, queue)
                first.commit()
        if waits:
            other, watching = raw(database_url), observer(raw, database_url)
            assert dequeue(other) is None
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(dequeue, first)
                wait_until(lambda: waits_for_a_lock(watching, first))
                other.commit()
                assert waiting.result() is None
        for connection, queue in ((first, "default"), (second, "transcode"))[waits:]:
            assert dequeue(connection, queue) is None
            assert value(connection, "SELECT pg_current_xact_id_if_assigned()") is None
        for connection, queue in ((first, "transcode"), (second, "default")):
            assert dequeue(connection, queue) is None

    def test_enqueues_and_completions_pass_by(self, raw: Raw, database_url: str) -> None:
        first, other = raw(database_url), impatient(raw, database_url)
        enqueue(first)
        leased = dequeue(first)
        first.commit()
        assert dequeue(first)
        enqueue(other)
        for verb, told in {"heartbeat": "extended", "complete": "completed"}.items():
            query = f"SELECT result FROM fairqueue.message_{verb}(ARRAY[%s]::bigint[], ARRAY[1])"
            assert value(other, query, leased) == told
            other.commit()

    @pytest.mark.shared_database(False)
    def test_gives_up_after_a_time_and_names_the_holder(
        self, engine: Engine, raw: Raw, database_url: str, empty_database_url: str
    ) -> None:
        """And neither who waits, too, nor who has the same lock in another database.

        After 10 s, which this test makes 50 ms. The session's own lock_timeout is put back.
        """
        holder, waiting, watching = raw(database_url), raw(database_url), observer(raw, database_url)
        another, elsewhere = raw(database_url), raw(empty_database_url)
        alter(engine, "scheduler_turn", "'10s'", "'50ms'")
        enqueue(holder)
        assert dequeue(holder) == 1
        turn = "SELECT (l.classid::bigint << 32) | l.objid::bigint FROM pg_locks l WHERE l.locktype = 'advisory'"
        lock = f"SELECT pg_advisory_lock({value(watching, turn)})".encode()
        elsewhere.execute(lock)
        another.pgconn.send_query(lock)
        wait_until(lambda: waits_for_a_lock(watching, another))

        waiting.execute("SET lock_timeout = '17s'")
        waiting.commit()
        with pytest.raises(errors.LockNotAvailable, match=r"queue .default. has been held by another") as error:
            dequeue(waiting)
        assert error.value.diag.message_detail == f"Held by the server process with pid {holder.info.backend_pid}."
        assert "Commit the transaction of a dequeue at once" in str(error.value.diag.message_hint)
        waiting.rollback()
        assert value(waiting, "SHOW lock_timeout") == "17s"
        waiting.rollback()
        another.cancel()
        wait_until(lambda: not waits_for_a_lock(watching, another))

        holder.commit()
        assert dequeue(waiting) == 2


class TestWithinAWritingTransaction:
    """A transaction that has written may hold what the turn's holder needs: waiting could deadlock."""

    def test_gets_nothing_instead_of_waiting(self, raw: Raw, database_url: str) -> None:
        holder, writer = raw(database_url), impatient(raw, database_url)
        enqueue(holder)
        assert dequeue(holder) == 1
        enqueue_row = "INSERT INTO fairqueue.message (channel) VALUES ('globex')"
        writer.execute(enqueue_row)
        assert dequeue(writer) is None
        writer.commit()
        holder.commit()
        writer.execute(enqueue_row)
        assert dequeue(writer) == 4, "with the turn free, it is served like anybody"

    @pytest.mark.shared_database(False)
    def test_does_not_deadlock(self, raw: Raw, database_url: str) -> None:
        """The classic embrace: each has what the other wants."""
        holder, writer, watching = raw(database_url), raw(database_url), observer(raw, database_url)
        watching.execute("CREATE TABLE invoice AS SELECT 1 AS id")
        enqueue(holder)
        writer.execute("UPDATE invoice SET id = 2")
        assert dequeue(holder) == 1
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(holder.execute, "UPDATE invoice SET id = 3")
            wait_until(lambda: waits_for_a_lock(watching, holder))
            assert dequeue(writer) is None
            writer.commit()
            waiting.result()
        holder.commit()
        assert value(watching, "SELECT id FROM invoice") == 3

    def test_sees_its_own_messages(self, session: Session) -> None:
        fq.enqueue(session, "acme", {"doc": 1})
        [message] = session.scalars(fq.dequeue())
        assert message.payload == {"doc": 1}
        session.rollback()
        assert session.scalars(fq.dequeue()).all() == []


@pytest.mark.shared_database(False)
def test_empty_queue_writes_nothing(raw: Raw, database_url: str) -> None:
    """Polling a queue that was never used leaves no trace, not even a transaction id."""
    connection = raw(database_url)
    assert dequeue(connection) is None
    assert value(connection, "SELECT pg_current_xact_id_if_assigned()") is None
    assert rows(connection) == {}


@pytest.mark.shared_database(False)
class TestReplication:
    def test_where_all_tables_are_published(self, raw: Raw, database_url: str) -> None:
        """As tools that stream changes do: the server refuses an UPDATE or DELETE whose row it couldn't name."""
        connection = raw(database_url)
        connection.autocommit = True
        connection.execute("CREATE PUBLICATION everything FOR ALL TABLES")
        for _ in range(3):
            enqueue(connection, 2)
            found = dequeue(connection)
            connection.execute("SELECT * FROM fairqueue.message_complete(ARRAY[%s::bigint], ARRAY[1])", (found,))
        connection.execute("SELECT fairqueue.channel_set('acme', max_concurrency => 1)")
        assert dequeue(connection)
        nameless = connection.execute(
            "SELECT c.relname FROM pg_class c"
            " WHERE c.relnamespace = 'fairqueue'::regnamespace AND c.relkind IN ('r', 'p') AND c.relpersistence = 'p'"
            " AND c.relreplident = 'd'"
            " AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary)"
        )
        assert not nameless.fetchall()
