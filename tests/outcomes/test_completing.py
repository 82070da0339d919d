"""At least once, and exactly once in effect where the work and its completion commit together."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import psycopg
import pytest
from psycopg import IsolationLevel
from psycopg.errors import SerializationFailure
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import wait_until
from tests.fixtures.connections import Raw
from tests.observing import impatient, observer, rows, value, waits_for_a_lock

pytestmark = pytest.mark.shared_database

Pairs = list[tuple[int, int]]

VERBS = ["complete", "fail", "defer"]
DONE = {"complete": "completed", "fail": "failed", "defer": "deferred"}
#: And those that end no work.
TOLD = {**DONE, "heartbeat": "extended", "cancel": "cancelled"}


def enqueue(engine: Engine, count: int = 1, channel: str = "acme") -> None:
    with Session(engine) as session:
        fq.enqueue_many(session, [{"channel": channel} for _ in range(count)])
        session.commit()


def lease(engine: Engine, limit: int = 1, seconds: float = 30) -> list[fq.LeasedMessage]:
    with Session(engine) as session:
        batch = session.scalars(fq.dequeue(limit=limit, lease=seconds)).all()
        session.commit()
    return list(batch)


def lease_again(engine: Engine) -> fq.LeasedMessage:
    """What a second worker gets once the lease of the first has run out."""
    got: list[fq.LeasedMessage] = []

    def found() -> bool:
        got.extend(lease(engine))
        return bool(got)

    wait_until(found)
    return got[0]


def results(session: Session, statement: object) -> list[tuple[int, str]]:
    return [tuple(row) for row in session.execute(statement)]  # type: ignore[call-overload]


def act_on(verb: str, *messages: fq.LeasedMessage) -> object:
    """The statement that ends these leases, or extends them."""
    return getattr(fq, verb)(messages)


def end(connection: psycopg.Connection, verb: str, pairs: Pairs) -> list[str]:
    """Call a SQL function, without committing."""
    ids, attempts = [id_ for id_, _ in pairs], [attempt for _, attempt in pairs]
    query = f"SELECT result FROM fairqueue.message_{verb}(%s::bigint[], %s::integer[])"
    return [result for (result,) in connection.execute(query.encode(), (ids, attempts))]


def pairs(batch: list[fq.LeasedMessage]) -> Pairs:
    return [(message.id, message.attempt) for message in batch]


class TestWithinTheBusinessTransaction:
    @pytest.mark.shared_database(False)
    def test_commits_with_it(self, engine: Engine, session: Session) -> None:
        enqueue(engine)
        [message] = lease(engine)
        session.execute(text("CREATE TABLE invoice (id bigint)"))
        assert results(session, fq.complete(message)) == [(message.id, "completed")]
        session.commit()
        assert session.scalar(text("SELECT count(*) FROM fairqueue.message")) == 0
        session.execute(text("INSERT INTO invoice VALUES (1)"))

    def test_rolls_back_with_it(self, engine: Engine, session: Session) -> None:
        enqueue(engine)
        [message] = lease(engine)
        session.execute(fq.complete(message))
        session.rollback()
        assert results(session, fq.complete(message)) == [(message.id, "completed")]

    def test_rolls_back_to_a_savepoint(self, engine: Engine, session: Session) -> None:
        enqueue(engine)
        [message] = lease(engine)
        with session.begin_nested() as savepoint:
            session.execute(fq.complete(message))
            savepoint.rollback()
        session.commit()
        assert results(session, fq.heartbeat(message)) == [(message.id, "extended")]

    def test_is_no_news_where_nothing_is_limited(self, engine: Engine, session: Session) -> None:
        """Neither that a lease goes on nor that it has ended costs dequeues anything."""
        enqueue(engine)
        [message] = lease(engine)
        for act, result in ((fq.heartbeat, "extended"), (fq.complete, "completed")):
            assert results(session, act(message)) == [(message.id, result)]
            assert session.scalar(text("SELECT count(*) FROM fairqueue.signal")) == 0

    @pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
    def test_in_every_isolation_level(self, engine: Engine, level: str) -> None:
        enqueue(engine)
        [message] = lease(engine)
        with Session(engine.execution_options(isolation_level=level)) as session:
            assert results(session, fq.complete(message)) == [(message.id, "completed")]
            session.commit()

    def test_hinders_nobody(self, engine: Engine, raw: Raw, database_url: str) -> None:
        """While a completion is open, others enqueue to the channel, dequeue from it, and complete."""
        enqueue(engine, 3)
        first, second = lease(engine, 2)
        slow, other = raw(database_url), impatient(raw, database_url)
        assert end(slow, "complete", pairs([first])) == ["completed"]
        with other.transaction():
            other.execute("INSERT INTO fairqueue.message (channel) VALUES ('acme')")
        with other.transaction():
            assert len(other.execute("SELECT * FROM fairqueue.message_dequeue('default', 9)").fetchall()) == 2
        with other.transaction():
            assert end(other, "complete", pairs([second])) == ["completed"]
        slow.commit()
        assert rows(other)["message"] == 2

    @pytest.mark.shared_database(False)
    def test_serializable_completions_all_commit(self, engine: Engine, raw: Raw, database_url: str) -> None:
        """Handlers of different messages have no dependency on one another, so none may fail with 40001."""
        enqueue(engine, 10)
        batch = lease(engine, 4)
        handlers = [raw(database_url) for _ in batch]
        for connection, message in zip(handlers, batch, strict=True):
            connection.isolation_level = IsolationLevel.SERIALIZABLE
            assert end(connection, "complete", pairs([message])) == ["completed"]
        for connection in handlers:
            connection.commit()

    @pytest.mark.shared_database(False)
    def test_serializable_handlers_that_enqueue_can_be_retried(
        self, engine: Engine, raw: Raw, database_url: str
    ) -> None:
        """A completion reads: where another serializable handler enqueues next to it, it may have to try again."""
        enqueue(engine, 10)
        batch = lease(engine, 2)
        handlers = [raw(database_url) for _ in batch]
        for connection, message in zip(handlers, batch, strict=True):
            connection.isolation_level = IsolationLevel.SERIALIZABLE
            assert end(connection, "complete", pairs([message])) == ["completed"]
        for connection in handlers:
            connection.execute("INSERT INTO fairqueue.message (channel) VALUES ('acme')")
        for connection, message in zip(handlers, batch, strict=True):
            try:
                connection.commit()
            except SerializationFailure:
                connection.rollback()
                assert end(connection, "complete", pairs([message])) == ["completed"]
                connection.execute("INSERT INTO fairqueue.message (channel) VALUES ('acme')")
                connection.commit()
        with Session(engine) as session:
            assert session.query(fq.Message).count() == 10


class TestFence:
    @pytest.mark.parametrize("verb", TOLD)
    def test_after_another_worker_has_got_it(self, engine: Engine, session: Session, verb: str) -> None:
        """'stale', and the other worker's lease is as it was."""
        enqueue(engine)
        [late] = lease(engine, seconds=0.001)
        again = lease_again(engine)
        assert (again.id, again.attempt) == (late.id, 2)
        assert "ran out" in (again.error or "")
        assert results(session, act_on(verb, late)) == [(late.id, "stale")]
        session.commit()
        assert results(session, fq.complete(again)) == [(late.id, "completed")]

    @pytest.mark.parametrize("verb", TOLD)
    def test_after_it_went_back_to_its_channel(self, engine: Engine, session: Session, verb: str) -> None:
        enqueue(engine)
        [message] = lease(engine)
        assert results(session, fq.fail(message)) == [(message.id, "failed")]
        assert results(session, act_on(verb, message)) == [(message.id, "stale")]

    @pytest.mark.parametrize("verb", TOLD)
    def test_after_it_is_gone(self, engine: Engine, session: Session, verb: str) -> None:
        enqueue(engine)
        [message] = lease(engine)
        assert results(session, fq.cancel(message)) == [(message.id, "cancelled")]
        assert results(session, act_on(verb, message)) == [(message.id, "not_found")]

    def test_cancelled_by_its_id(self, engine: Engine, session: Session) -> None:
        """Which means the message, whoever has it; a lease means what is still its own."""
        enqueue(engine, 2)
        mine, others = lease(engine), lease(engine)
        assert results(session, fq.fail(mine, delay=0)) == [(mine[0].id, "failed")]
        session.commit()
        assert pairs(lease(engine)) == [(mine[0].id, 2)]
        assert results(session, fq.cancel([*mine, *others])) == [(mine[0].id, "stale"), (others[0].id, "cancelled")]
        assert results(session, fq.cancel(mine[0].id, "not needed")) == [(mine[0].id, "cancelled")]
        errors = text("SELECT error FROM fairqueue.history WHERE outcome = 'cancelled' ORDER BY finished_at")
        assert session.scalars(errors).all() == [None, "not needed"]

    @pytest.mark.parametrize("pair", [tuple, list, "row"])
    def test_cancelled_by_pairs(self, pair: Any, engine: Engine, session: Session) -> None:
        """Which are leases, as they are for the others, not the ids of two messages."""
        enqueue(engine, 3)
        mine, others = lease(engine), lease(engine)
        assert [message.id for message in (*mine, *others)] == [1, 2]
        assert results(session, fq.fail(mine, delay=0)) == [(1, "failed")]
        session.commit()
        assert pairs(lease(engine)) == [(1, 2)]
        assert results(session, fq.cancel((3, 1))) == [(3, "stale")]
        one = session.execute(text("VALUES (3, 1)")).one()
        assert results(session, fq.cancel(one if pair == "row" else pair(one) if pair is tuple else [one])) == [
            (3, "stale")
        ]
        rows = session.execute(text("VALUES (1, 1), (2, 1)")).all()
        given: Any = rows if pair == "row" else [pair(row) for row in rows]
        assert results(session, fq.cancel(given)) == [(1, "stale"), (2, "cancelled")]
        assert results(session, fq.cancel((1, 2))) == [(1, "cancelled")]
        assert session.scalars(select(fq.Message.id)).all() == [3]

    def test_lease_that_ran_out_unnoticed(self, engine: Engine, session: Session) -> None:
        """Nobody else has the message, so the work is not done twice: it counts."""
        enqueue(engine)
        [message] = lease(engine, seconds=0.001)
        ran_out = text("SELECT clock_timestamp() > leased_until FROM fairqueue.message")
        wait_until(lambda: session.scalar(ran_out))
        assert results(session, fq.heartbeat(message)) == [(message.id, "extended")]
        assert results(session, fq.complete(message)) == [(message.id, "completed")]

    def test_guessed_attempts(self, engine: Engine, session: Session) -> None:
        enqueue(engine, 2)
        [message] = lease(engine)
        ready = message.id + 1
        given = [(message.id, 0), (message.id, 2), (ready, 0), (ready, 1), (-1, 1)]
        told = results(session, fq.complete(given))
        assert told == [*[(id_, "stale") for id_, _ in given[:4]], (-1, "not_found")]
        assert session.scalar(text("SELECT count(*) FROM fairqueue.message")) == 2


class TestResults:
    @pytest.mark.parametrize("verb", TOLD)
    def test_in_the_order_given(self, engine: Engine, session: Session, verb: str) -> None:
        enqueue(engine, 4)
        one, two, three, four = lease(engine, 4)
        session.execute(fq.complete(two))
        given = [four, two, one, three, one]
        told = [TOLD[verb], "not_found", *[TOLD[verb]] * 3]
        expected = [(message.id, result) for message, result in zip(given, told, strict=True)]
        assert results(session, getattr(fq, verb)(given)) == expected

    @pytest.mark.parametrize("verb", TOLD)
    def test_the_same_lease_twice_in_a_call(self, engine: Engine, session: Session, verb: str) -> None:
        enqueue(engine)
        [message] = lease(engine)
        assert results(session, act_on(verb, message, message)) == [(message.id, TOLD[verb])] * 2

    @pytest.mark.parametrize("verb", TOLD)
    def test_nothing_given(self, session: Session, verb: str) -> None:
        assert results(session, getattr(fq, verb)([])) == []


class TestHeartbeat:
    def test_extends_and_never_shortens(self, engine: Engine, session: Session) -> None:
        enqueue(engine)
        [message] = lease(engine, seconds=60)
        query = text("SELECT leased_until FROM fairqueue.message")
        session.execute(fq.heartbeat(message, lease=1))
        assert session.scalar(query) == message.leased_until
        session.execute(fq.heartbeat(message, lease=120))
        assert session.scalar(query) > message.leased_until

    def test_busy_while_a_completion_is_open(self, engine: Engine, raw: Raw, database_url: str) -> None:
        """A heartbeat never waits, so one thread can send those of many messages."""
        enqueue(engine, 2)
        batch = lease(engine, 2)
        working, beating = raw(database_url), impatient(raw, database_url)
        end(working, "complete", pairs(batch[:1]))
        assert end(beating, "heartbeat", pairs(batch)) == ["busy", "extended"]
        beating.commit()
        working.commit()
        assert end(beating, "heartbeat", pairs(batch)) == ["not_found", "extended"]

    @pytest.mark.parametrize("turn", [1, -1])
    def test_two_attempts_of_a_message(self, engine: Engine, session: Session, turn: int) -> None:
        """As a worker has them that leased a message again after its lease ran out: the first handler has to stop."""
        enqueue(engine)
        [first] = lease(engine)
        session.execute(fq.fail(first, delay=0))
        session.commit()
        [second] = lease(engine)
        expected = [(first.id, "stale"), (first.id, "extended")]
        assert results(session, fq.heartbeat([first, second][::turn])) == expected[::turn]


class TestRaces:
    def test_overlapping_batches_in_opposite_order(self, engine: Engine, raw: Raw, database_url: str) -> None:
        """They take the messages in one order, so the second waits for the first instead of deadlocking with it."""
        for verb in VERBS:
            enqueue(engine, 3)
            batch = pairs(lease(engine, 3))
            watching, holder = observer(raw, database_url), raw(database_url)
            one, two = raw(database_url), raw(database_url)
            # Somebody in the middle makes both stop there, if both can get there.
            holder.execute("SELECT FROM fairqueue.message WHERE id = %s FOR UPDATE", batch[1][:1])
            with ThreadPoolExecutor(2) as pool:
                first = pool.submit(end, one, verb, batch)
                wait_until(lambda: waits_for_a_lock(watching, one))  # noqa: B023
                second = pool.submit(end, two, verb, batch[::-1])
                wait_until(lambda: waits_for_a_lock(watching, two))  # noqa: B023
                holder.rollback()
                assert first.result() == [DONE[verb]] * 3
                one.commit()
                assert set(second.result()) <= {"stale", "not_found"}
                two.rollback()
            with watching.transaction():
                watching.execute("DELETE FROM fairqueue.message")

    @pytest.mark.parametrize("verb", [*VERBS, "cancel", "take out"])
    def test_in_the_order_of_ids(self, engine: Engine, raw: Raw, database_url: str, verb: str) -> None:
        """Whatever the order given: who waits for the first of them has not yet taken the second."""
        enqueue(engine, 2)
        batch = pairs(lease(engine, 2))[::-1]
        watching, one, two, other = (raw(database_url) for _ in range(4))
        watching.autocommit = True
        first = b"SELECT FROM fairqueue.message WHERE id = %s FOR UPDATE"
        one.execute(first, batch[1][:1])

        def act() -> list[str]:
            if verb != "take out":
                return end(two, verb, batch)
            query = "SELECT result FROM fairqueue.message_cancel(%s)"
            return [result for (result,) in two.execute(query, ([id_ for id_, _ in batch],))]

        with ThreadPoolExecutor(1) as pool:
            told = pool.submit(act)
            wait_until(lambda: waits_for_a_lock(watching, two))
            other.execute(first + b" NOWAIT", batch[0][:1])
            other.rollback()
            one.rollback()
            assert told.result() == [{**DONE, "cancel": "cancelled", "take out": "cancelled"}[verb]] * 2

    @pytest.mark.parametrize("verb", [*VERBS, "cancel"])
    def test_it_has_become_another_s_meanwhile(self, engine: Engine, raw: Raw, database_url: str, verb: str) -> None:
        """Who waits for a message that was taken back and leased again goes by what it is then."""
        enqueue(engine)
        late = pairs(lease(engine))
        watching, waiting, other = observer(raw, database_url), raw(database_url), raw(database_url)
        other.execute("UPDATE fairqueue.message SET attempt = attempt + 1")
        with ThreadPoolExecutor(1) as pool:
            told = pool.submit(end, waiting, verb, late)
            wait_until(lambda: waits_for_a_lock(watching, waiting))
            other.commit()
            assert told.result() == ["stale"]
        waiting.commit()
        assert value(watching, "SELECT attempt FROM fairqueue.message WHERE leased_until IS NOT NULL") == 2

    def test_everybody_ends_the_same_leases(self, engine: Engine, raw: Raw, database_url: str) -> None:
        """Eight sessions, four verbs, opposite orders: each lease is ended once, and nobody deadlocks."""
        enqueue(engine, 200)
        batch = pairs(lease(engine, 200))
        connections = [raw(database_url) for _ in range(8)]
        start = Barrier(len(connections))

        def race(number: int) -> list[str]:
            connection, verb = connections[number], [*VERBS, "heartbeat"][number % 4]
            ended: list[str] = []
            start.wait()
            for at in range(0, 200, 20):
                some = batch[at : at + 40]
                with connection.transaction():
                    ended += end(connection, verb, some if number < 4 else some[::-1])
            return ended

        with ThreadPoolExecutor(len(connections)) as pool:
            told = [result for job in [pool.submit(race, n) for n in range(8)] for result in job.result()]
        assert sum(result in DONE.values() for result in told) == 200
        watching = observer(raw, database_url)
        assert value(watching, "SELECT count(*) FROM fairqueue.message WHERE leased_until IS NOT NULL") == 0

    @pytest.mark.shared_database(False)
    @pytest.mark.parametrize("end_it", [
        "fail(ARRAY[%s], ARRAY[%s])",
        "fail(ARRAY[%s], ARRAY[%s], retry => false)",
        "cancel(ARRAY[%s], ARRAY[%s])",
    ])  # fmt: skip
    def test_the_work_refers_to_its_message(self, engine: Engine, raw: Raw, database_url: str, end_it: str) -> None:
        """A foreign key locks the message; who ends it meanwhile waits, and can't deadlock with the completion."""
        enqueue(engine)
        [(id_, attempt)] = pairs(lease(engine))
        watching, working, ending = observer(raw, database_url), raw(database_url), raw(database_url)
        watching.execute("CREATE TABLE invoice (message_id bigint REFERENCES fairqueue.message ON DELETE SET NULL)")
        working.execute("INSERT INTO invoice VALUES (%s)", (id_,))
        with ThreadPoolExecutor(1) as pool:
            told = pool.submit(value, ending, f"SELECT result FROM fairqueue.message_{end_it}", id_, attempt)
            wait_until(lambda: waits_for_a_lock(watching, ending))
            assert end(working, "complete", [(id_, attempt)]) == ["completed"]
            working.commit()
            assert told.result() == "not_found"

    @pytest.mark.shared_database(False)
    def test_two_workers_on_one_message(self, engine: Engine) -> None:
        """The slow one is told so and rolls its work back: the work has happened once."""
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE invoice (worker integer)"))
        enqueue(engine)
        [late] = lease(engine, seconds=0.001)
        again = lease_again(engine)
        start = Barrier(2)

        def work(number: int, message: fq.LeasedMessage) -> str:
            with Session(engine) as session:
                session.execute(text("INSERT INTO invoice VALUES (:worker)"), {"worker": number})
                start.wait()
                result: str = session.execute(fq.complete(message)).one().result
                session.commit() if result == fq.Outcome.COMPLETED else session.rollback()
                return result

        with ThreadPoolExecutor(2) as pool:
            slow, fast = pool.map(work, (1, 2), (late, again))
        assert slow in {"stale", "not_found"}
        assert fast == "completed"
        with engine.begin() as connection:
            assert connection.scalars(text("SELECT worker FROM invoice")).all() == [2]

    @pytest.mark.parametrize("finish", [psycopg.Connection.commit, psycopg.Connection.rollback])
    def test_lease_runs_out_while_its_completion_is_open(
        self, engine: Engine, raw: Raw, database_url: str, finish: Callable[[psycopg.Connection], None]
    ) -> None:
        """Nobody else gets the message while it may yet be completed, and no dequeue waits for that."""
        enqueue(engine, 2)
        [slow] = lease(engine, seconds=0.001)
        working, other = raw(database_url), impatient(raw, database_url)
        assert end(working, "complete", pairs([slow])) == ["completed"]
        with other.transaction():
            leased = other.execute("SELECT id FROM fairqueue.message_dequeue('default', 9)").fetchall()
        assert leased == [(slow.id + 1,)]
        finish(working)
        if finish is psycopg.Connection.rollback:
            assert lease_again(engine).id == slow.id
        else:
            assert lease(engine) == []
