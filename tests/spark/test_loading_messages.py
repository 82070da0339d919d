"""What a bulk load makes of rows, without Spark: keys, order, limits, and parts that go straight into the queue."""

from typing import Any, Literal

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

pytest.importorskip("adbc_driver_postgresql")

import fairqueue as fq
from fairqueue.spark.engine.loading import (
    Entered,
    LoadFailed,
    clean,
    enter,
    load_part,
    new_run,
    progress,
    stage,
)
from fairqueue.spark.engine.place import Place
from tests.acts import clock, complete, drain, lease_of, put
from tests.fixtures.connections import Raw
from tests.invariants import check_invariants
from tests.observing import impatient, observer, value
from tests.spark.loads import JOB, Others, bodies, direct, keyed, numbered, once_each, staged, stages


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

    @pytest.mark.parametrize(("on_conflict", "key"), [("ignore", "live"), ("raise", "new")])
    def test_what_else_has_to_be_unique(
        self, place: Place, session: Session, watching: psycopg.Connection[Any], on_conflict: str, key: str
    ) -> None:
        """By an index of the application's own: such a row is neither left out nor taken for one with a key."""
        put(session, "acme", key="live", payload="taken")
        watching.execute("CREATE UNIQUE INDEX of_our_own ON fairqueue.message (payload)")
        run = new_run()
        part = stage(place, run, 0, staged({"key": key, "payload": "1"}, {"payload": '"taken"'}))
        with pytest.raises(LoadFailed, match=r'^duplicate key value violates unique constraint "of_our_own"'):
            enter(place, run, [part], on_conflict=on_conflict)
        once_each(watching, ["live"])

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

    @pytest.mark.parametrize(
        "names",
        [
            [["aac", "aab"], ["aad", "aaa"]],
            [["aac", "aab"], ["aa"]],
            [["aca", "abb"]],
            [["caa", "bbb"]],
            [["caa"], ["bbb"], ["cbb"]],
        ],
        ids=["keys", "keys_of_some", "channels", "queues", "queues_of_parts"],
    )
    def test_in_their_order(
        self, place: Place, others: Others, watching: psycopg.Connection[Any], names: list[list[str]]
    ) -> None:
        """As producers enter them, so that nobody waits in a circle: who waits for one doesn't hold those behind it.

        Each is named by a letter for its queue, channel and key. It waits for the second one.
        """
        create = "SELECT fairqueue.message_create(%s, queue => %s, key => %s)"
        free, held = [name for part in names for name in part][:2]
        producer, other = others.connect(), impatient(others.raw, others.url)
        producer.execute(create, (held[1], held[0], held[2]))
        run = new_run()
        columns: list[str] = ["queue", "channel", "key"]
        rows = [[dict(zip(columns, name, strict=False)) for name in part] for part in names]
        parts = [stage(place, run, number, staged(*part)) for number, part in enumerate(rows)]
        load = others.waiting(lambda: enter(place, run, parts))
        other.execute(create, (free[1], free[0], free[2]))
        other.commit()
        producer.rollback()
        assert load().entered == sum(map(len, names)) - 1
        once_each(watching, [name for part in names for name in part], "concat(queue, channel, key)")


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
        self,
        place: Place,
        session: Session,
        watching: psycopg.Connection[Any],
        overflow: Literal["reject", "drop"],
        straight: bool,
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

    def test_twice_in_a_database_with_another_isolation(
        self, place: Place, others: Others, watching: psycopg.Connection[Any]
    ) -> None:
        """In which a statement would fail that finds what wasn't there yet when its transaction began."""
        database = watching.info.dbname
        watching.execute(
            f"ALTER DATABASE \"{database}\" SET default_transaction_isolation = 'repeatable read'".encode()
        )
        self.test_twice_at_the_same_time(place, others, watching, "commit")

    def test_claimed_within_a_savepoint(self, session: Session) -> None:
        """The count is noted by the same transaction, whatever part of it claimed."""
        with session.begin_nested():
            session.execute(text("SELECT fairqueue.load_claim('part/x/0')"))
        session.execute(text("SELECT fairqueue.load_count('part/x/0', 7)"))
        session.commit()
        assert session.scalar(text("SELECT fairqueue.load_claim('part/x/0')")) == 7
        session.execute(text("SELECT fairqueue.load_count('part/x/0', 9)"))
        assert session.scalar(text("SELECT fairqueue.load_claim('part/x/0')")) == 7

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
