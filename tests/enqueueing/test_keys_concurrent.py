"""Keys with several transactions at a time: the second with a key waits for the first, and goes by how that ended.

What becomes of a second message with a key when nobody else is at it, is in test_keys.py.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg import IsolationLevel, errors
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import complete, lease_of, put, sql, wait_until
from tests.enqueueing.keyed import KEY, MODES, live, message
from tests.fixtures.connections import Raw
from tests.observing import impatient, observer, value, waits_for_a_lock

pytestmark = pytest.mark.shared_database

CREATE = "SELECT fairqueue.message_create('acme', to_jsonb(%s::text), key => %s, on_conflict => %s)"
#: What is there before, and the modes of the first and of the second. Where the first changes nothing, as it neither is
#: alone nor replaces, nobody waits for it: that is in test_keys.py.
CASES = [
    (before, *modes)
    for before in ("free", "ready", "leased")
    for modes in itertools.product(MODES, MODES)
    if before == "free" or modes[0] == "replace"
]


class Two:
    """Two connections, of which the second has to wait for the first, and who sees it."""

    def __init__(self, raw: Raw, database_url: str, pool: ThreadPoolExecutor) -> None:
        self.first, self.second = raw(database_url), raw(database_url)
        self.watching = observer(raw, database_url)
        self.pool = pool

    def meanwhile(self, mode: str) -> Callable[[], str]:
        """Let the second enqueue "second", and see it wait; returns what waits for its end: "done" or an error."""

        def run() -> str:
            try:
                self.second.execute(CREATE, ("second", KEY, mode))
                self.second.commit()
            except psycopg.Error as error:
                self.second.rollback()
                return type(error).__name__
            return "done"

        future = self.pool.submit(run)
        wait_until(lambda: waits_for_a_lock(self.watching, self.second) or future.done())
        assert not future.done(), "it has to wait, since the first may yet be rolled back"
        return future.result


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def two(raw: Raw, database_url: str, pool: ThreadPoolExecutor) -> Two:
    return Two(raw, database_url, pool)


class TestConcurrent:
    """Two transactions with one key. The second waits for the first, and then goes by how that ended."""

    @pytest.mark.parametrize("ends", ["commit", "rollback"])
    @pytest.mark.parametrize("case", CASES, ids="-".join)
    def test_enqueues(self, session: Session, two: Two, case: tuple[str, str, str], ends: str) -> None:
        before, mode, second_mode = case
        if before != "free":
            put(session, "acme", payload="old", key=KEY)
        if before == "leased":
            lease_of(session)
        two.first.execute(CREATE, ("first", KEY, mode))
        result = two.meanwhile(second_mode)
        getattr(two.first, ends)()
        told = result()

        there = "first" if ends == "commit" else "old" if before != "free" else None
        expected = {"raise": there or "second", "ignore": there or "second", "replace": "second"}[second_mode]
        assert told == ("UniqueViolation" if there and second_mode == "raise" else "done")
        [(_, payload)] = live(session)
        assert payload == expected
        # Nothing is lost: a leased message is still there, and beside it what replaced it.
        replaced = before == "leased" and payload != "old"
        assert session.scalar(text("SELECT count(*) FROM fairqueue.message")) == 1 + replaced

    @pytest.mark.parametrize("ends", ["commit", "rollback"])
    @pytest.mark.parametrize("mode", MODES)
    def test_while_its_completion_is_open(self, session: Session, two: Two, mode: str, ends: str) -> None:
        """It is asked for again just as it is being completed: it must not be ignored for what is already done."""
        put(session, "acme", payload="old", key=KEY)
        [leased] = lease_of(session)
        session.execute(fq.complete(leased))
        result = two.meanwhile(mode)
        getattr(session, ends)()
        told = result()
        if ends == "commit":
            assert told == "done"
            assert [payload for _, payload in live(session)] == ["second"]
        else:
            assert told == ("UniqueViolation" if mode == "raise" else "done")
            assert [payload for _, payload in live(session)] == ["second" if mode == "replace" else "old"]
            assert complete(session, [leased]) == ["completed"]

    @pytest.mark.parametrize("ends", ["commit", "rollback"])
    def test_while_it_is_being_leased(self, session: Session, two: Two, ends: str) -> None:
        """What a worker is given is what it works on, and nothing that came in between."""
        put(session, "acme", payload="old", key=KEY)
        [leased] = session.scalars(fq.dequeue())
        result = two.meanwhile("replace")
        getattr(session, ends)()
        assert result() == "done"
        [(id_, payload)] = live(session)
        assert payload == "second"
        assert (id_ == leased.id) == (ends == "rollback")
        if ends == "commit":
            running = message(session, leased.id)
            assert (running.payload, running.key, running.attempt) == ("old", None, 1)

    @pytest.mark.parametrize("mode", MODES)
    def test_nobody_else_waits(self, session: Session, raw: Raw, database_url: str, two: Two, mode: str) -> None:
        """While a transaction with a key is open: other keys, no key, other channels, dequeues and completions."""
        put(session, "acme", payload="old", key="other")
        if mode == "replace":
            put(session, "acme", payload="held", key=KEY)
        two.first.execute(CREATE, ("first", KEY, mode))
        other = impatient(raw, database_url)
        other.execute("SELECT fairqueue.message_create('acme', '1')")
        other.execute(CREATE, ("x", "third", "replace"))
        other.execute("SELECT fairqueue.message_create('globex', '1', key => %s)", (KEY,))
        other.commit()
        leased = other.execute("SELECT id, attempt, payload FROM fairqueue.message_dequeue('default', 9)").fetchall()
        other.commit()
        assert [payload for _, _, payload in leased if payload not in ("x", 1)] == ["old"]
        assert len(leased) == 4
        other.execute("SELECT fairqueue.message_complete(%s, %s)", ([m[0] for m in leased], [m[1] for m in leased]))
        other.commit()
        two.first.commit()
        assert [m.payload for m in lease_of(session, 9)] == ["first"]

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("names", [("aac", "aab", "aaa"), ("aca", "abb"), ("caa", "bbb")])
    def test_bulk_enters_keys_in_their_order(
        self, session: Session, raw: Raw, database_url: str, two: Two, *, mode: Any, names: Sequence[str]
    ) -> None:
        """So two of them can't wait for each other: one that waits for the last has not yet taken the first.

        Each is named by a letter for its queue, channel and key.
        """
        create = "SELECT fairqueue.message_create(queue => %s, channel => %s, key => %s)"
        two.first.execute(create, list(names[-1]))
        backend = session.scalar(text("SELECT pg_backend_pid()"))
        rows: list[Any] = [dict(zip(("queue", "channel", "key"), name, strict=True)) for name in names]
        future = two.pool.submit(lambda: fq.enqueue_many(session, rows, on_conflict=mode))
        waits = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s"
        wait_until(lambda: value(two.watching, waits, backend) or future.done())
        assert not future.done()
        other = impatient(raw, database_url)
        other.execute(create, list(names[0]))
        other.rollback()
        two.first.rollback()
        assert len(future.result()) == len(names)

    def test_bulk_replaces_beside_completions(self, session: Session, raw: Raw, database_url: str, two: Two) -> None:
        """Both lock messages in the order of ids: one that waits for the first has not yet locked the second."""
        first, second = put(session, "acme", key="b") + put(session, "acme", key="a")
        two.first.execute("SELECT FROM fairqueue.message WHERE id = %s FOR UPDATE", (first,))
        backend = session.scalar(text("SELECT pg_backend_pid()"))
        rows: list[Any] = [{"channel": "acme", "key": key, "payload": "new"} for key in ("a", "b")]
        future = two.pool.submit(lambda: fq.enqueue_many(session, rows, on_conflict="replace"))
        waits = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s"
        wait_until(lambda: value(two.watching, waits, backend) or future.done())
        assert not future.done()
        other = impatient(raw, database_url)
        other.execute("SELECT FROM fairqueue.message WHERE id = %s FOR UPDATE", (second,))
        other.rollback()
        two.first.rollback()
        assert future.result() == [second, first]

    def test_bulk_replaces_what_came_while_it_waited(self, raw: Raw, database_url: str, two: Two) -> None:
        """And is waited for in its turn: what is locked by the order of keys and what by ids don't mix."""
        many = (
            "SELECT array_agg(m.id ORDER BY m.place) FROM (SELECT %s::text[] AS keys) k,"
            " fairqueue.message_create_many(array_fill('default'::text, ARRAY[cardinality(keys)]),"
            " array_fill('acme'::text, ARRAY[cardinality(keys)]), keys, NULL, NULL, NULL, NULL,"
            " array_fill(1::float8, ARRAY[cardinality(keys)]), NULL, NULL, %s) m"
        )

        def create(connection: psycopg.Connection, keys: Sequence[str]) -> Any:
            return value(connection, many, list(keys), "raise")

        def replace(connection: psycopg.Connection, keys: Sequence[str]) -> Any:
            ids = value(connection, many, list(keys), "replace")
            connection.commit()
            return ids

        patient, quick = two.second, raw(database_url)
        other = raw(database_url)
        ids = create(two.first, ["k3", "k1"])
        (between,) = create(other, ["k2"])
        waiting = two.pool.submit(replace, patient, ["k1", "k2", "k3"])
        wait_until(lambda: waits_for_a_lock(two.watching, patient))
        two.first.commit()
        blockers = "SELECT %s = ANY (pg_blocking_pids(%s))"
        wait_until(lambda: value(two.watching, blockers, other.info.backend_pid, patient.info.backend_pid))
        beside = two.pool.submit(replace, quick, ["k1", "k3"])
        wait_until(lambda: waits_for_a_lock(two.watching, quick) or beside.done())
        other.commit()
        assert waiting.result() == [ids[1], between, ids[0]]
        assert beside.result() == ids[::-1]

    @pytest.mark.shared_database(False)
    def test_gone_before_it_is_looked_for(self, session: Session) -> None:
        """What was in the way may be completed before anybody can say which it was: then there is a new message."""
        sql(
            session,
            f"""
            CREATE FUNCTION public.complete() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                IF NOT EXISTS (SELECT FROM arrived) THEN DELETE FROM fairqueue.message WHERE key = '{KEY}'; END IF;
                RETURN NULL;
            END $$;
            CREATE TRIGGER complete AFTER INSERT ON fairqueue.message REFERENCING NEW TABLE AS arrived
            FOR EACH STATEMENT EXECUTE FUNCTION public.complete()""",
        )
        (old,) = put(session, "acme", payload="old", key=KEY)
        new = fq.enqueue_unique(session, "acme", "new", key=KEY, on_conflict="ignore")
        assert new not in (None, old)
        session.commit()
        assert live(session) == [(new, "new")]

    @pytest.mark.parametrize("level", [IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE])
    @pytest.mark.parametrize("mode", ["ignore", "replace"])
    def test_higher_isolation(self, session: Session, two: Two, mode: str, level: IsolationLevel) -> None:
        """A key that was taken since the transaction began is a serialization failure, not an endless search."""
        second = two.second
        second.isolation_level = level
        second.execute("SELECT count(*) FROM fairqueue.message")
        put(session, "acme", payload="first", key=KEY)
        with pytest.raises(errors.SerializationFailure):
            second.execute(CREATE, ("second", KEY, mode))
        second.rollback()
        second.execute(CREATE, ("second", KEY, mode))
        second.commit()
        assert live(session) == [(1, "second" if mode == "replace" else "first")]

    def test_no_replacement_is_lost(self, engine: Engine, pool: ThreadPoolExecutor) -> None:
        """Whatever worker and producers do at the same time, the contents committed last are served last."""
        served: list[Any] = []
        committed: list[Any] = []

        def produce(name: int) -> None:
            with Session(engine) as session:
                for number in range(40):
                    fq.enqueue_unique(session, "acme", [name, number], key=KEY, on_conflict="replace")
                    # Between the row lock and the commit nobody else has this key: so this is the order of commits.
                    committed.append([name, number])
                    session.commit()

        def work(until: Callable[[], bool]) -> None:
            with Session(engine) as session:
                while True:
                    finished = until()
                    batch = lease_of(session, 5)
                    served.extend(m.payload for m in batch)
                    session.execute(fq.complete(batch))
                    session.commit()
                    if finished and not batch:
                        return

        producers = [pool.submit(produce, name) for name in range(3)]
        worker = pool.submit(work, lambda: all(each.done() for each in producers))
        for each in [*producers, worker]:
            each.result(60)
        assert served[-1] == committed[-1]
        assert all(payload in committed for payload in served)
        assert len({tuple(payload) for payload in served}) == len(served)
