"""Bulk loads without Spark: each row is in the queue once, or none is, whatever happens on the way."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.orm import Session

pytest.importorskip("adbc_driver_postgresql")

import fairqueue as fq
from fairqueue import embedded, roles, schema
from fairqueue.errors import InvalidValue
from fairqueue.spark.engine.loading import (
    Entered,
    LoadFailed,
    Part,
    abandon,
    clean,
    enter,
    load_part,
    new_run,
    progress,
    stage,
)
from fairqueue.spark.engine.place import Place
from tests.acts import clock, complete, drain, lease_of, put, wait_until
from tests.alembic_hosts import Host
from tests.catalog import snapshot
from tests.fixtures.connections import Raw
from tests.invariants import check_invariants
from tests.loads import bodies, direct, keyed, numbered, once_each, staged, stages
from tests.observing import impatient, observer, value

JOB = "job/2026-11-21"
WAITING = """
    SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND wait_event_type = 'Lock' AND application_name = 'fairqueue'"""


@pytest.fixture
def place(database_url: str) -> Place:
    return Place(url=database_url)


@pytest.fixture
def watching(raw: Raw, database_url: str) -> psycopg.Connection[Any]:
    return observer(raw, database_url)


class Others:
    """Connections and threads beside the test's own."""

    def __init__(self, raw: Raw, url: str, pool: ThreadPoolExecutor) -> None:
        self.raw, self.url, self.pool = raw, url, pool
        self.watching = observer(raw, url)

    def connect(self) -> psycopg.Connection[Any]:
        return self.raw(self.url)

    def entering(self, run: str, parts: list[Part], name: str | None = None) -> psycopg.Connection[Any]:
        """A driver that has entered a load, and has not committed yet."""
        driver = self.connect()
        tables, counts = [part.table for part in parts], [part.rows for part in parts]
        driver.execute("SELECT fairqueue.load_enter(%s, %s, %s, %s)", (run, tables, counts, name))
        return driver

    def waiting(self, act: Callable[[], Any]) -> Callable[[], Any]:
        """Let another thread do what has to wait, and see that it does; returns what waits for its end."""
        future = self.pool.submit(act)
        wait_until(lambda: value(self.watching, WAITING) or future.done())
        assert not future.done(), future.result()
        return lambda: future.result(30)


@pytest.fixture
def others(raw: Raw, database_url: str) -> Iterator[Others]:
    with ThreadPoolExecutor(4) as pool:
        yield Others(raw, database_url, pool)


class TestAttempts:
    """What tasks and drivers do that die, are repeated, or are not heard of."""

    def test_a_part_that_is_staged_twice(self, place: Place, watching: psycopg.Connection[Any]) -> None:
        """The driver hears of one attempt; the other's table goes with the run."""
        run = new_run()
        stage(place, run, 0, keyed("a", "b"))
        parts = [stage(place, run, 0, keyed("a", "b")), stage(place, run, 1, keyed("c")), stage(place, run, 2, [])]
        assert stages(watching) == 3
        once_each(watching, [])
        assert enter(place, run, parts) == Entered(3, 3, repeated=False)
        once_each(watching, ["a", "b", "c"])
        assert stages(watching) == 0

    def test_a_task_that_fails_on_the_way(self, place: Place, watching: psycopg.Connection[Any]) -> None:
        """Its own error is told, and nothing is left."""

        def rows() -> Iterator[Any]:
            yield from keyed("a")
            raise InvalidValue("row 1 of the partition: cost must be more than 0")

        with pytest.raises(InvalidValue, match=r"^row 1 of the partition: cost"):
            stage(place, new_run(), 0, rows())
        with pytest.raises(InvalidValue, match=r"^row 1 of the partition: cost"):
            load_part(place, "part/x/0", lambda _: rows())
        assert stages(watching) == 0
        assert progress(place, "part/x/0") is None
        once_each(watching, [])

    def test_an_attempt_that_is_late(self, place: Place, watching: psycopg.Connection[Any]) -> None:
        """A task that nobody has stopped stages its part when the load has long been entered."""
        run = new_run()
        assert enter(place, run, [stage(place, run, 0, keyed("a"))]).entered == 1
        stage(place, run, 0, keyed("a"))
        once_each(watching, ["a"])
        assert clean(place, hours=1) == 0
        assert clean(place, hours=0) == 1
        assert stages(watching) == 0

    def test_a_driver_that_gives_up(self, place: Place, watching: psycopg.Connection[Any]) -> None:
        run, other = new_run(), new_run()
        part = stage(place, run, 0, keyed("a"))
        kept = stage(place, other, 0, keyed("b"))
        assert abandon(place, run) == 1
        assert abandon(place, run) == 0
        with pytest.raises(
            LoadFailed, match=f"there is no staging table '{part.table}' of run {run}: it has been dropped"
        ):
            enter(place, run, [part], name=JOB)
        # The name is as good as before.
        assert enter(place, other, [kept], name=JOB) == Entered(1, 1, repeated=False)
        once_each(watching, ["b"])

    def test_a_driver_that_dies_before_the_commit(
        self, place: Place, others: Others, watching: psycopg.Connection[Any]
    ) -> None:
        run = new_run()
        parts = [stage(place, run, 0, keyed("a"))]
        driver = others.entering(run, parts, JOB)
        watching.execute("SELECT pg_terminate_backend(%s)", (driver.info.backend_pid,))
        wait_until(
            lambda: (
                value(watching, "SELECT count(*) FROM pg_stat_activity WHERE pid = %s", driver.info.backend_pid) == 0
            )
        )
        once_each(watching, [])
        again = new_run()
        assert enter(place, again, [stage(place, again, 0, keyed("a"))], name=JOB) == Entered(1, 1, repeated=False)
        once_each(watching, ["a"])
        assert stages(watching) == clean(place, hours=0) == 1

    @pytest.mark.parametrize("emptied", ["all", "some"])
    def test_a_table_that_is_not_as_it_was(self, place: Place, watching: psycopg.Connection[Any], emptied: str) -> None:
        run = new_run()
        parts = [stage(place, run, 0, keyed("a")), stage(place, run, 1, keyed("b", "c"))]
        where = "" if emptied == "all" else "WHERE key = 'b'"
        watching.execute(f'DELETE FROM fairqueue."{parts[1].table}" {where}'.encode())
        left = 0 if emptied == "all" else 1
        told = f"staging table {parts[1].table} has {left} rows, not 2: the server has crashed meanwhile .*Load again"
        with pytest.raises(LoadFailed, match=told):
            enter(place, run, parts, name=JOB)
        once_each(watching, [])
        assert progress(place, JOB) is None

    def test_rows_that_no_table_holds(self, place: Place, watching: psycopg.Connection[Any]) -> None:
        """A task took its part for loaded, and the note of that is gone: nothing must pass for done."""
        run = new_run()
        parts = [Part(0, 2), stage(place, run, 1, keyed("a"))]
        with pytest.raises(LoadFailed, match=r"^3 rows were given, and only 1 are staged"):
            enter(place, run, parts, name=JOB)
        once_each(watching, [])
        assert progress(place, JOB) is None

    def test_many_tables(self, place: Place, watching: psycopg.Connection[Any]) -> None:
        """More than one transaction can lock."""
        watching.execute("SELECT fairqueue.stage_create(%s, i) FROM generate_series(1, 501) i", (new_run(),))
        assert value(watching, "SELECT fairqueue.stage_clean('1 hour')") == 0
        assert value(watching, "SELECT fairqueue.stage_clean('0')") == 500
        assert clean(place, hours=0) == 1
        assert stages(watching) == 0

    def test_cleaning_waits_for_nobody(self, place: Place, others: Others, watching: psycopg.Connection[Any]) -> None:
        """Neither do drivers: somebody reads the tables that are to be dropped, as pg_dump does."""
        run = new_run()
        parts = [stage(place, run, number, keyed(str(number))) for number in range(2)]
        reader = others.connect()
        reader.execute(f'SELECT FROM fairqueue."{parts[0].table}"'.encode())
        patient = make_url(others.url).update_query_dict({"options": "-c lock_timeout=0"}).render_as_string(False)
        entered = others.pool.submit(enter, Place(url=patient), run, parts)
        assert entered.result(30) == Entered(2, 2, repeated=False)
        stage(place, new_run(), 0, keyed("x"))
        assert stages(watching) == 2
        assert clean(place, hours=0) == 1
        # What is left of it can't be entered again.
        for name in (run, ""):
            with pytest.raises(LoadFailed, match=r"^there is no staging table "):
                enter(place, name, parts[:1])
        reader.rollback()
        assert clean(place) == 1
        assert stages(watching) == 0
        once_each(watching, ["0", "1"])

    def test_cleaning_what_is_being_entered(
        self, place: Place, others: Others, watching: psycopg.Connection[Any]
    ) -> None:
        run = new_run()
        driver = others.entering(run, [stage(place, run, 0, keyed("a"))], JOB)
        assert clean(place, hours=0) == 0
        driver.commit()
        assert clean(place, hours=0) == 0
        once_each(watching, ["a"])

    def test_bad_ages(self, place: Place) -> None:
        with pytest.raises(psycopg.Error, match="older_than must not be negative, not -01:00:00"):
            clean(place, hours=-1)


class TestNames:
    """The same load again adds nothing."""

    def test_again(self, place: Place, watching: psycopg.Connection[Any]) -> None:
        for repeated in (False, True, True):
            run = new_run()
            parts = [stage(place, run, 0, keyed("a", "b")), stage(place, run, 1, keyed("b"))]
            assert enter(place, run, parts, name=JOB) == Entered(3, 2, repeated)
            assert stages(watching) == 0
        once_each(watching, ["a", "b"])
        assert progress(place, JOB) == 0
        run = new_run()
        assert enter(place, run, [Part(0, 2), Part(1, 1)], name=JOB) == Entered(3, 2, repeated=True)
        told = f"^{JOB} has been loaded before, with 3 rows, not 1; what was loaded then is in the queue, nothing was"
        with pytest.raises(LoadFailed, match=told):
            enter(place, run, [stage(place, run, 0, keyed("c"))], name=JOB)
        once_each(watching, ["a", "b"])
        assert stages(watching) == 0

    def test_with_nothing_in_it(self, place: Place) -> None:
        assert enter(place, new_run(), [], name=JOB) == Entered(0, 0, repeated=False)
        assert enter(place, new_run(), [Part(0, 0)], name=JOB) == Entered(0, 0, repeated=True)

    @pytest.mark.parametrize("fate", ["commit", "rollback"])
    def test_two_drivers(self, place: Place, others: Others, watching: psycopg.Connection[Any], fate: str) -> None:
        """The second waits, and goes by how the first ended."""
        runs = [new_run(), new_run()]
        parts = [[stage(place, run, 0, keyed("a", "b"))] for run in runs]
        first = others.entering(runs[0], parts[0], JOB)
        second = others.waiting(lambda: enter(place, runs[1], parts[1], name=JOB))
        getattr(first, fate)()
        assert second() == Entered(2, 2, repeated=fate == "commit")
        once_each(watching, ["a", "b"])
        assert stages(watching) == clean(place, hours=0) == (0 if fate == "commit" else 1)

    @pytest.mark.parametrize("key", ["a", None])
    def test_two_drivers_of_one_run(
        self, place: Place, others: Others, watching: psycopg.Connection[Any], key: str | None
    ) -> None:
        """Without a name, too: there is one set of tables, which are gone."""
        run = new_run()
        parts = [stage(place, run, 0, staged({"key": key}))]
        first = others.entering(run, parts)
        second = others.waiting(lambda: enter(place, run, parts))
        first.commit()
        with pytest.raises(LoadFailed):
            second()
        assert value(watching, "SELECT count(*) FROM fairqueue.message") == 1

    def test_the_batches_of_a_stream(self, place: Place, watching: psycopg.Connection[Any]) -> None:
        """Only a higher number is entered; which rows a lower one has doesn't matter."""
        query = "query/1f"
        found: list[bool] = []
        for epoch in (0, 0, 3, 3, 2, 0, 4):
            run = new_run()
            keys = [f"{epoch}-{number}" for number in range(epoch + 1)] if found else ["0-0"]
            found.append(enter(place, run, [stage(place, run, 0, keyed(*keys))], name=query, epoch=epoch).repeated)
            assert stages(watching) == 0
        assert found == [False, True, False, True, True, True, False]
        once_each(watching, ["0-0", *(f"3-{n}" for n in range(4)), *(f"4-{n}" for n in range(5))])
        assert progress(place, query) == 4
        # Another number of rows under an old number: a source that isn't read the same way twice.
        assert enter(place, new_run(), [Part(0, 99)], name=query, epoch=0).repeated

    def test_another_query_is_another(self, place: Place) -> None:
        for name in ("query/1", "query/2", "job/1", 'job/"1"', "job/'; --", "job/ü\U0001f600"):
            run = new_run()
            assert not enter(place, run, [stage(place, run, 0, numbered([1]))], name=name, epoch=None).repeated
            assert progress(place, name) == 0


class TestKeys:
    def test_ignored(self, place: Place, session: Session, watching: psycopg.Connection[Any]) -> None:
        """What is live stays; of those that are there twice the first one counts, also over parts."""
        put(session, "acme", key="live", payload="old")
        rows = [("a", 1), ("live", 2), ("b", 3), ("a", 4), ("b", 5)]
        run = new_run()
        parts = [
            stage(place, run, number, staged(*({"key": key, "payload": str(n)} for key, n in some)))
            for number, some in enumerate([rows[:3], rows[3:]])
        ]
        # In whatever order the tasks ended.
        assert enter(place, run, parts[::-1]) == Entered(5, 2, repeated=False)
        once_each(watching, ["a=1", "b=3", 'live="old"'], "key || '=' || payload")

    def test_of_another_channel(self, place: Place, watching: psycopg.Connection[Any]) -> None:
        run = new_run()
        rows = staged(*({"key": "k", "channel": c, "queue": q} for c, q in (("a", "x"), ("b", "x"), ("a", "y"))))
        assert enter(place, run, [stage(place, run, 0, rows)], on_conflict="raise").entered == 3

    @pytest.mark.parametrize("keys", [["a", "a"], ["b", "live"]])
    def test_raised(self, place: Place, session: Session, watching: psycopg.Connection[Any], keys: list[str]) -> None:
        put(session, "acme", key="live")
        run = new_run()
        parts = [stage(place, run, number, keyed(key)) for number, key in enumerate(keys)]
        told = f"^a key is live in its channel, or twice in what is loaded; nothing was entered .*, {keys[1]}\\)"
        with pytest.raises(LoadFailed, match=told):
            enter(place, run, parts, name=JOB, on_conflict="raise")
        once_each(watching, ["live"])
        assert progress(place, JOB) is None
        with pytest.raises(LoadFailed, match=r"^on_conflict must be 'ignore' or 'raise', not 'replace'"):
            enter(place, run, parts, on_conflict="replace")
        assert enter(place, run, parts, name=JOB).entered == 1

    @pytest.mark.parametrize("on_conflict", ["ignore", "raise"])
    @pytest.mark.parametrize("fate", ["commit", "rollback"])
    def test_a_producer_that_holds_the_key(
        self, place: Place, others: Others, watching: psycopg.Connection[Any], on_conflict: str, fate: str
    ) -> None:
        producer = others.connect()
        producer.execute("SELECT fairqueue.message_create('acme', key => 'k')")
        run = new_run()
        parts = [stage(place, run, 0, keyed("j", "k"))]
        load = others.waiting(lambda: enter(place, run, parts, on_conflict=on_conflict))
        getattr(producer, fate)()
        if (on_conflict, fate) == ("raise", "commit"):
            with pytest.raises(LoadFailed, match=r"^a key is live"):
                load()
            once_each(watching, ["k"])
        else:
            assert load().entered == (1 if fate == "commit" else 2)
            once_each(watching, ["j", "k"])

    def test_the_first_of_many(self, place: Place, watching: psycopg.Connection[Any]) -> None:
        run = new_run()
        rows = staged(*({"key": str(number * 5 % 7), "payload": str(number)} for number in range(300)))
        assert enter(place, run, [stage(place, run, 0, rows)]) == Entered(300, 7, repeated=False)
        once_each(watching, range(7), "payload::int")

    def test_in_their_order(self, place: Place, others: Others, watching: psycopg.Connection[Any]) -> None:
        """As producers enter them, so that nobody waits in a circle: who waits for "b" doesn't hold "c" yet."""
        producer, other = others.connect(), impatient(others.raw, others.url)
        producer.execute("SELECT fairqueue.message_create('acme', key => 'b')")
        run = new_run()
        parts = [stage(place, run, number, keyed(*keys)) for number, keys in enumerate(["cb", "da"])]
        load = others.waiting(lambda: enter(place, run, parts))
        other.execute("SELECT fairqueue.message_create('acme', key => 'c')")
        other.commit()
        producer.rollback()
        assert load().entered == 3
        once_each(watching, "abcd")


class TestMessages:
    """What is entered is as good as what any producer enqueues."""

    def test_all_columns(self, place: Place, session: Session) -> None:
        row = {"queue": "slow", "channel": "globex", "key": "k", "payload": '{"a": [1, null]}', "body": b"\x00\xff"}
        more = {"dequeue_at": -7, "cost": 2.5, "max_attempts": 3, "backoff": 0.5}
        run = new_run()
        enter(place, run, [stage(place, run, 0, staged(row | more, {}))])
        found = {message.channel: message for message in session.query(fq.Message)}
        values = {name: getattr(found["globex"], name) for name in row | more}
        assert values == row | more | {"payload": {"a": [1, None]}}
        plain = found["acme"]
        assert (plain.queue, plain.key, plain.payload, plain.body, plain.cost) == ("default", None, None, None, 1)
        assert (plain.max_attempts, plain.backoff, plain.attempt) == (None, None, 0)
        assert plain.dequeue_at == plain.created_at.timestamp() * 1000 // 1

    @pytest.mark.usefixtures("clock_that_stands")
    def test_when(self, place: Place, session: Session) -> None:
        """By the clock of the database, from when the load is entered."""
        now = clock(session)
        rows: list[dict[str, Any]] = [{"delay": 1.5}, {"dequeue_at": 5}, {"priority": 3}, {"priority": 0}, {}]
        run = new_run()
        enter(place, run, [stage(place, run, 0, staged(*rows))])
        load_part(place, "part/0", lambda at: direct(at, *rows))
        ats = session.scalars(text("SELECT dequeue_at FROM fairqueue.message ORDER BY id")).all()
        assert sorted(ats) == sorted([now + 1500, 5, -3, now, now] * 2)

    def test_order(self, place: Place, session: Session) -> None:
        """Of a channel: that of parts and of rows in them, where dequeue_at is the same, as it is unless said."""
        run = new_run()
        first = staged(*({"channel": f"c{n % 3}", "payload": str(n), "key": f"k{97 * n % 100}"} for n in range(100)))
        second = staged(*({"channel": f"c{n % 3}", "payload": str(n)} for n in range(100, 200)))
        parts = [stage(place, run, 7, second), stage(place, run, 3, first)]
        enter(place, run, parts)
        # Sooner than all those, which are due now.
        run = new_run()
        enter(place, run, [stage(place, run, 0, numbered([-1, -2], channel="c0", dequeue_at=9))])
        served = drain(session, limit=7)
        by_channel: dict[str, list[Any]] = {}
        for message in served:
            by_channel.setdefault(message.channel, []).append(message.payload)
        assert by_channel == {
            "c0": [-1, -2, *range(0, 200, 3)],
            "c1": list(range(1, 200, 3)),
            "c2": list(range(2, 200, 3)),
        }
        assert len({message.channel for message in served[:3]}) == 3

    def test_order_of_large_tables(self, place: Place, others: Others, watching: psycopg.Connection[Any]) -> None:
        """PostgreSQL begins to read a large table where somebody else is reading it."""
        run = new_run()
        part = stage(place, run, 0, [bodies(20_000, 1900)])
        # Another reader that has come half way; where it was is remembered.
        with others.connect().cursor("half") as reader:
            reader.execute(f'SELECT FROM fairqueue."{part.table}"'.encode())
            reader.fetchmany(10_000)
        reader.connection.rollback()
        enter(place, run, [part])
        assert value(watching, "SELECT array_agg(key ORDER BY id) = array_agg(key ORDER BY key) FROM fairqueue.message")

    def test_served_and_checked(self, place: Place, engine: Engine, session: Session) -> None:
        """Workers that wait are woken; what the scheduler keeps agrees with the rows."""
        run = new_run()
        enter(place, run, [stage(place, run, 0, numbered(range(3), channel="a"))])
        batch = lease_of(session, 2)
        run = new_run()
        enter(place, run, [stage(place, run, part, numbered(range(3), channel=f"b{part}")) for part in range(2)])
        load_part(place, "part/0", lambda now: direct(now, *({"channel": "a"} for _ in range(3))))
        assert fq.check(session) == []
        batch += drain(session, limit=2)
        assert len(batch) == 12
        assert set(complete(session, batch)) == {"completed"}
        with engine.connect() as connection:
            check_invariants(connection)

    def test_listeners_are_told(self, place: Place, raw: Raw, database_url: str) -> None:
        listener = observer(raw, database_url)
        listener.execute("SELECT fairqueue.queue_listen('default')")
        run = new_run()
        enter(place, run, [stage(place, run, 0, numbered([1]))])
        assert len(list(listener.notifies(timeout=10, stop_after=1))) == 1

    @pytest.mark.parametrize("straight", [False, True])
    @pytest.mark.parametrize("overflow", ["reject", "drop"])
    def test_full_channels(
        self, place: Place, session: Session, watching: psycopg.Connection[Any], overflow: str, straight: bool
    ) -> None:
        session.merge(fq.Channel("acme", max_size=2, overflow=overflow))
        session.commit()
        run = new_run()
        rows = [{"payload": str(number)} for number in range(3)]

        def load() -> Entered | int:
            if straight:
                return load_part(place, "part/0", lambda now: direct(now, *rows))
            return enter(place, run, [stage(place, run, 0, staged(*rows))], name=JOB)

        if overflow == "reject":
            with pytest.raises(LoadFailed, match=r"^channel 'acme' of queue 'default' is full: its max_size is 2 HINT"):
                load()
            assert progress(place, JOB) is progress(place, "part/0") is None
            once_each(watching, [])
        else:
            assert load() in {3, Entered(3, 3, repeated=False)}
            once_each(watching, [0, 1], "payload::int")
            assert value(watching, "SELECT array_agg(outcome) FROM fairqueue.history") == ["dropped"]
        assert fq.check(session) == []

    def test_what_only_the_database_can_tell(self, place: Place, watching: psycopg.Connection[Any]) -> None:
        with pytest.raises(
            LoadFailed, match=r"^invalid input syntax for type json .* COPY stage_\w+, line 2, column payload"
        ) as failed:
            stage(place, new_run(), 0, staged({"payload": "{}"}, {"payload": "{"}))
        assert "\n" not in str(failed.value)
        run = new_run()
        part = stage(place, run, 0, numbered([1]))
        watching.execute(f'UPDATE fairqueue."{part.table}" SET cost = -1'.encode())
        with pytest.raises(LoadFailed, match=r"^cost must be more than 0 and at most 1000000, not -1"):
            enter(place, run, [part])
        assert stages(watching) == 1


class TestDirect:
    """A part that goes straight into the queue, in one transaction with the note of it."""

    def test_once(self, place: Place, watching: psycopg.Connection[Any]) -> None:
        for _ in range(2):
            assert load_part(place, "part/x/0", lambda now: direct(now, {"key": "a"}, {"key": "b"})) == 2
            assert load_part(place, "part/x/1", lambda _: iter(())) == 0
        once_each(watching, ["a", "b"])
        told = "^part/x/0 has been loaded before, with 2 rows, not 1; what was loaded then is in the queue"
        with pytest.raises(LoadFailed, match=told):
            load_part(place, "part/x/0", lambda now: direct(now, {"key": "c"}))
        once_each(watching, ["a", "b"])

    @pytest.mark.parametrize("fate", ["commit", "rollback"])
    def test_twice_at_the_same_time(
        self, place: Place, others: Others, watching: psycopg.Connection[Any], fate: str
    ) -> None:
        """As speculation has it."""
        first = others.connect()
        first.execute("SELECT fairqueue.load_claim('part/x/0')")
        first.execute("INSERT INTO fairqueue.message (channel, key) VALUES ('acme', 'a')")
        first.execute("SELECT fairqueue.load_count('part/x/0', 1)")
        second = others.waiting(lambda: load_part(place, "part/x/0", lambda now: direct(now, {"key": "a"})))
        getattr(first, fate)()
        assert second() == 1
        once_each(watching, ["a"])

    def test_a_live_key(self, place: Place, session: Session, watching: psycopg.Connection[Any]) -> None:
        put(session, "acme", key="a")
        with pytest.raises(
            LoadFailed, match=r"^duplicate key value .*message_key.*\(default, acme, a\) already exists"
        ):
            load_part(place, "part/x/0", lambda now: direct(now, {"key": "b"}, {"key": "a"}))
        once_each(watching, ["a"])
        assert progress(place, "part/x/0") is None

    def test_notes_of_nameless_jobs_go(self, place: Place, watching: psycopg.Connection[Any]) -> None:
        """The others stay for good."""
        names = ["run/1/0", "run/2/0", "part/run/0", JOB]
        for name in names:
            load_part(place, name, lambda _: iter(()))
        watching.execute("UPDATE fairqueue.load SET entered_at = now() - interval '2 days' WHERE name <> 'run/2/0'")
        clean(place)
        assert [name for name in names if progress(place, name) is None] == ["run/1/0"]

    def test_a_note_is_not_rewritten(self, place: Place, watching: psycopg.Connection[Any]) -> None:
        load_part(place, "part/x/0", lambda now: direct(now, {}))
        watching.execute("SELECT fairqueue.load_count('part/x/0', 99)")
        assert value(watching, "SELECT rows FROM fairqueue.load") == 1


class TestRights:
    @pytest.fixture
    def role(self, engine: Engine, watching: psycopg.Connection[Any]) -> Iterator[str]:
        """One that may nothing yet; it is only known to this database."""
        name = f"{value(watching, 'SELECT current_database()')} ü"
        watching.execute(f'CREATE ROLE "{name}"'.encode())
        with engine.begin() as connection:
            roles.grant(connection, name, "producer")
        yield name
        watching.execute(f'DROP OWNED BY "{name}"; DROP ROLE "{name}"'.encode())

    def place_of(self, database_url: str, role: str) -> Place:
        """As who has said SET ROLE, which a connection may do by itself."""
        options = "-c role=" + role.replace(" ", "\\ ")
        return Place(url=make_url(database_url).update_query_dict({"options": options}).render_as_string(False))

    def test_pipeline(self, engine: Engine, session: Session, database_url: str, role: str) -> None:
        with engine.begin() as connection:
            roles.revoke(connection, role)
            roles.grant(connection, role, "pipeline")
        place = self.place_of(database_url, role)
        run = new_run()
        part = stage(place, run, 0, keyed("a"))
        stage(place, run, 0, keyed("a"))
        assert enter(place, run, [part], name=JOB) == Entered(1, 1, repeated=False)
        assert load_part(place, "part/x/0", lambda now: direct(now, {"key": "b"}, {"delay": -0.0})) == 2
        stage(place, run, 0, keyed("a"))
        assert abandon(place, run) == 1
        stage(place, run, 0, keyed("a"))
        assert clean(place, hours=0) == 1
        assert progress(place, JOB) == 0
        assert len(drain(session)) == 3

    def test_without(self, database_url: str, role: str) -> None:
        place = self.place_of(database_url, role)
        with pytest.raises(LoadFailed, match=r"^permission denied for function stage_create$"):
            stage(place, new_run(), 0, keyed("a"))
        with pytest.raises(LoadFailed, match=r"^permission denied for function load_enter$"):
            enter(place, new_run(), [])
        with pytest.raises(LoadFailed, match=r"^permission denied for function load_claim$"):
            load_part(place, "part/x/0", lambda now: direct(now, {"key": "b"}))

    @pytest.mark.parametrize("table", ["message", "history", "load", 'pg_catalog"."pg_class', "stage_", "x'; --"])
    def test_only_staging_tables(self, place: Place, session: Session, table: str) -> None:
        """Nothing else is read, or dropped."""
        put(session, "acme")
        run = new_run()
        with pytest.raises(LoadFailed, match=r"^there is no staging table "):
            enter(place, run, [Part(0, 1, table)])
        assert len(drain(session)) == 1

    def test_only_those_of_the_run(self, place: Place, watching: psycopg.Connection[Any]) -> None:
        mine, theirs = new_run(), new_run()
        part = stage(place, theirs, 0, keyed("a"))
        with pytest.raises(LoadFailed, match=r"^there is no staging table "):
            enter(place, mine, [part])
        assert abandon(place, mine) == 0
        assert stages(watching) == 1

    @pytest.mark.parametrize("run", ["", "message", "x" * 32, "A" * 32, "0" * 31, "'; DROP TABLE message; --", None])
    def test_bad_runs(self, place: Place, run: Any) -> None:
        with pytest.raises(LoadFailed, match="run must be 32 hexadecimal digits and part not negative, not"):
            stage(place, run, 0, keyed("a"))

    def test_bad_parts(self, place: Place) -> None:
        with pytest.raises(LoadFailed, match=r"part not negative, not '.*' and -1"):
            stage(place, new_run(), -1, keyed("a"))


class TestSchemas:
    @pytest.mark.parametrize("name", ["My schema", 'qu"ote; --', "ü"])
    def test_any_name(self, database_url: str, engine: Engine, watching: psycopg.Connection[Any], name: str) -> None:
        """And they go with it."""
        before = snapshot(watching)
        with engine.begin() as connection:
            schema.install(connection, name)
        place = Place(url=database_url, schema=name)
        run = new_run()
        part = stage(place, run, 0, keyed("a", "b"))
        assert enter(place, run, [part], name=JOB) == Entered(2, 2, repeated=False)
        assert load_part(place, "part/x/0", lambda now: direct(now, {"key": "c"})) == 1
        with Session(engine.execution_options(**fq.in_schema(name))) as session:
            assert len(list(session.scalars(fq.dequeue(limit=9)))) == 3
            session.rollback()
        for number in range(3):
            stage(place, new_run(), number % 2, keyed("a"))
        with engine.begin() as connection:
            schema.uninstall(connection, name)
        assert snapshot(watching) == before

    def test_tools_see_no_difference(
        self, tmp_path: Path, empty_database_url: str, raw: Raw, watching: psycopg.Connection[Any]
    ) -> None:
        """A load may run while somebody writes a migration."""
        host = Host(tmp_path, empty_database_url, settings='settings["include_schemas"] = True\n')
        database = observer(raw, empty_database_url)
        nothing = snapshot(database)
        host.autogenerate()
        host.upgrade()
        stage(Place(url=empty_database_url), new_run(), 0, keyed("a"))
        assert stages(database) == 1
        host.check()
        host.downgrade()
        assert [line for line in snapshot(database) if "alembic_version" not in line] == nothing


class TestPlaces:
    @pytest.mark.parametrize(
        "url",
        [
            "postgresql://app:hunter2@db/app",
            "postgresql+psycopg://:hunter2@db/app",
            "postgresql://app@db/app?password=hunter2",
            "postgresql://app@db/app?sslmode=require&sslpassword=hunter2",
        ],
    )
    def test_passwords(self, url: str) -> None:
        with pytest.raises(InvalidValue, match=r"^url must not hold a password") as refused:
            Place(url=url)
        assert "hunter2" not in str(refused.value)
        assert "hunter2" not in repr(refused.value)

    def test_nothing_is_shown(self) -> None:
        assert "secret" not in repr(Place(url="postgresql://secret@db/app"))
        with pytest.raises(InvalidValue, match=r"^url can't be read") as refused:
            Place(url="postgresql://app:hunter2@db:port/app")
        assert refused.value.__suppress_context__
        assert "hunter2" not in str(refused.value)

    def test_settings(self, database_url: str, tmp_path: Path) -> None:
        """Those of libpq go in the URL, also with characters that mean something there."""
        url = make_url(database_url).update_query_dict({"application_name": "a + b&c=%20"}).render_as_string(False)
        for place in (Place(url=url), Place(url=url, passfile=str(tmp_path / "a b"))):
            with place.connect() as connection:
                assert connection.info.parameter_status("application_name") == "a + b&c=%20"
            with place.arrow() as other, other.cursor() as cursor:
                cursor.execute("SELECT current_setting('application_name')")
                assert cursor.fetchone() == ("a + b&c=%20",)

    def test_from_the_environment(self, monkeypatch: pytest.MonkeyPatch, database_url: str) -> None:
        for name in ("FAIRQUEUE_DSN", "DATABASE_URL"):
            monkeypatch.delenv(name, raising=False)
        with pytest.raises(InvalidValue, match=r"^no database is named: set the option url, or FAIRQUEUE_DSN"):
            progress(Place(), JOB)
        monkeypatch.setenv("DATABASE_URL", database_url)
        assert progress(Place(), JOB) is None


@pytest.mark.slow
def test_a_server_that_crashes() -> None:
    """Between staging and entering: unlogged tables are empty then, which passes for nothing."""
    with embedded.ephemeral() as server:
        engine = create_engine(server.url())
        with engine.begin() as connection:
            schema.install(connection)
        engine.dispose()
        place = Place(url=server.url())
        run = new_run()
        enter(place, run, [stage(place, run, 0, keyed("before"))], name="job/before")
        lost = new_run()
        parts = [stage(place, lost, number, keyed(str(number))) for number in range(2)]
        server.restart("immediate")
        with pytest.raises(LoadFailed, match="has 0 rows, not 1: the server has crashed meanwhile"):
            enter(place, lost, parts, name=JOB)
        with psycopg.connect(server.url().replace("+psycopg", ""), autocommit=True) as watching:
            once_each(watching, ["before"])
            assert abandon(place, lost) == 2
            run = new_run()
            parts = [stage(place, run, number, keyed(str(number))) for number in range(2)]
            assert enter(place, run, parts, name=JOB) == Entered(2, 2, repeated=False)
            once_each(watching, ["before", "0", "1"])
            server.restart("immediate")
        # What was committed is there, and known to be.
        assert enter(place, new_run(), [Part(0, 1), Part(1, 1)], name=JOB) == Entered(2, 2, repeated=True)
        with psycopg.connect(server.url().replace("+psycopg", ""), autocommit=True) as watching:
            once_each(watching, ["before", "0", "1"])
            assert stages(watching) == 0
