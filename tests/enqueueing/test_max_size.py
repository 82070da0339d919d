"""max_size: a channel that is full takes in no more, and no other channel notices.

And producers wait for nobody all the same: enqueueing takes no lock for it, and to a channel without a max_size adds no
read that could fail a serializable transaction.
"""

import itertools
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg import IsolationLevel, errors
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

import fairqueue as fq
from fairqueue.errors import translated
from tests.acts import expire, lease_of, put, sql
from tests.fixtures.connections import Raw
from tests.observing import impatient, observer, rows, value
from tests.watching import Watched

pytestmark = pytest.mark.shared_database

INSERT = "INSERT INTO fairqueue.message (channel) SELECT %s FROM generate_series(1, %s)"
INSERT_THREE = "INSERT INTO fairqueue.message (channel) VALUES ('acme'), ('acme'), ('acme')"
READY = "SELECT count(*) FROM fairqueue.message WHERE channel = %s AND leased_until IS NULL"
FULL = "channel 'acme' of queue 'default' is full: its max_size is 3"


def bound(session: Session, max_size: int = 3, **policy: Any) -> None:
    session.merge(fq.Channel("acme", max_size=max_size, **policy))
    session.commit()


def payloads(session: Session, channel: str = "acme") -> list[Any]:
    """What is ready, in its order."""
    query = "SELECT payload FROM fairqueue.message WHERE channel = :channel AND leased_until IS NULL"
    found = list(session.scalars(text(query + " ORDER BY dequeue_at, id"), {"channel": channel}))
    session.commit()
    return found


def history(session: Session) -> list[tuple[Any, ...]]:
    query = "SELECT message_id, channel, outcome, error FROM fairqueue.history ORDER BY message_id"
    return [tuple(row) for row in session.execute(text(query))]


DOORS: dict[str, Callable[[Session], object]] = {
    "many": lambda session: fq.enqueue_many(session, [{"channel": "globex"}, {"channel": "acme"}]),
    "many with keys": lambda session: fq.enqueue_many(session, [{"channel": "acme", "key": "k"}]),
    "copy": lambda session: fq.enqueue_copy(session, [{"channel": "acme"}, {"channel": "globex"}]),
    "unique": lambda session: fq.enqueue_unique(session, "acme", key="k"),
    "replace": lambda session: fq.enqueue_unique(session, "acme", key="k", on_conflict="replace"),
}


class TestReject:
    @pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
    def test_what_sends_raises(self, session: Session, door: Callable[[Session], object]) -> None:
        bound(session)
        put(session, "acme", 3)
        with pytest.raises(fq.ChannelFull) as error:
            door(session)
        assert str(error.value) == FULL
        session.rollback()
        assert session.scalar(text("SELECT count(*) FROM fairqueue.message")) == 3
        session.rollback()
        lease_of(session)
        door(session)
        session.commit()

    @pytest.mark.shared_database(False)
    def test_a_flush(self, engine: Engine, session: Session) -> None:
        bound(session)
        session.add_all(fq.Message("acme", number) for number in range(4))
        with pytest.raises(DBAPIError) as error:
            session.flush()
        assert str(translated(error.value)) == FULL
        session.rollback()
        fq.translate_errors(engine)
        session.add_all(fq.Message("acme", number) for number in range(4))
        with pytest.raises(fq.ChannelFull, match="max_size is 3"):
            session.commit()
        session.rollback()
        assert payloads(session) == []

    @pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
    async def test_async(self, database_url: str, session: Session, driver: str) -> None:
        from sqlalchemy.ext.asyncio import create_async_engine

        bound(session)
        engine = create_async_engine(database_url.replace("+psycopg", f"+{driver}"))
        fq.translate_errors(engine)
        async with AsyncSession(engine) as other:
            await fq.enqueue_many(other, [{"channel": "acme"} for _ in range(3)])
            await other.commit()
            for enqueue in (
                lambda: fq.enqueue_many(other, [{"channel": "acme"}]),
                lambda: fq.enqueue_unique(other, "acme", key="k"),
                other.flush,
            ):
                fq.enqueue(other, "globex" if enqueue != other.flush else "acme")
                with pytest.raises(fq.ChannelFull) as error:
                    await enqueue()
                assert str(error.value) == FULL
                await other.rollback()
        await engine.dispose()

    def test_sqlstate(self, session: Session, raw: Raw, database_url: str) -> None:
        """What other languages go by."""
        bound(session)
        connection = observer(raw, database_url)
        with pytest.raises(psycopg.DatabaseError) as error:
            connection.execute(INSERT, ("acme", 4))
        assert error.value.sqlstate == "QF001"
        assert error.value.diag.message_primary == FULL
        assert "raise max_size" in str(error.value.diag.message_hint)
        connection.execute(INSERT, ("acme", 3))
        with pytest.raises(psycopg.DatabaseError, match="is full"):
            connection.execute("SELECT fairqueue.message_create('acme')")
        assert rows(connection) == {"channel": 1, "message": 3, "signal": 2}

    def test_savepoint(self, session: Session) -> None:
        """The rest of the transaction goes on."""
        bound(session)
        put(session, "acme", 3)
        fq.enqueue(session, "globex")
        with pytest.raises(fq.ChannelFull), session.begin_nested():
            fq.enqueue_many(session, [{"channel": "acme"}])
        session.commit()
        assert payloads(session, "globex") == [None]


class TestDrop:
    def test_the_last_of_the_statement(self, session: Session) -> None:
        """By their places in the channel, not in the statement; what was there before stays."""
        bound(session, 4, overflow="drop")
        put(session, "acme", 2, payload="old")
        many: list[fq.MessageRow] = [{"channel": "acme", "payload": n, "priority": n} for n in range(5)]
        ids = fq.enqueue_many(session, many)
        session.commit()
        assert payloads(session) == [4, 3, "old", "old"]
        told = [(ids[n], "acme", "dropped", "the channel was full") for n in range(3)]
        assert history(session) == told

    def test_only_there(self, session: Session) -> None:
        """Several channels in one statement, each by its own policy."""
        bound(session, 1, overflow="drop")
        session.add_all([fq.Channel("globex", max_size=2), fq.Queue("default")])
        session.commit()
        channels = ["acme", "globex", "other"] * 2
        fq.enqueue_many(session, [{"channel": channel, "payload": n} for n, channel in enumerate(channels)])
        session.commit()
        assert [payloads(session, channel) for channel in ("acme", "globex", "other")] == [[0], [1, 4], [2, 5]]
        assert [row[0] for row in history(session)] == [4]

    def test_nothing_that_has_been_leased(self, session: Session) -> None:
        """Copied from elsewhere together with new ones, as a dead letter is put back: it isn't refused."""
        bound(session, 1, overflow="drop")
        insert = "INSERT INTO fairqueue.message (channel, payload, attempt) VALUES ('acme', '1', 0), ('acme', '2', {})"
        sql(session, insert.format(3))
        assert payloads(session) == [2]

    def test_every_door(self, session: Session) -> None:
        """Nothing is raised, and an id is given, which history knows; its key is free again."""
        bound(session, 1, overflow="drop")
        put(session, "acme")
        dropped = fq.enqueue(session, "acme", key="k")
        session.commit()
        second = fq.enqueue_unique(session, "acme", key="k")
        [third] = fq.enqueue_many(session, [{"channel": "acme", "key": "k"}], on_conflict="ignore")
        fq.enqueue_copy(session, [{"channel": "acme", "key": "k"}])
        fourth = session.scalar(text("SELECT fairqueue.message_create('acme')"))
        session.commit()
        known = [row[0] for row in history(session)]
        assert known[1:3] == [second, third]
        assert (len(known), known[-1]) == (5, fourth)
        assert session.get(fq.Message, known[0]) is None
        assert dropped not in session
        assert len(lease_of(session, 9)) == 1

    def test_the_scheduler_takes_no_harm(self, session: Session) -> None:
        bound(session, 1, overflow="drop")
        for _ in range(3):
            put(session, "acme", 5)
            assert [m.channel for m in lease_of(session, 9)] == ["acme"]
        assert [row.problem for row in session.execute(text("SELECT problem FROM fairqueue.queue_check()"))] == []


class TestPolicy:
    @pytest.mark.parametrize(
        ("queue", "channel", "expected"),
        [
            ({}, {}, (9, 0)),
            ({"channel_max_size": 2}, {}, "reject"),
            ({"channel_max_size": 2, "channel_overflow": "drop"}, {}, (2, 7)),
            ({"channel_max_size": 2, "channel_overflow": "drop"}, {"weight": 2}, (2, 7)),
            ({"channel_max_size": 2, "channel_overflow": "drop"}, {"max_size": 4}, (4, 5)),
            ({"channel_max_size": 2, "channel_overflow": "drop"}, {"max_size": 9}, (9, 0)),
            ({"channel_max_size": 2, "channel_overflow": "drop"}, {"overflow": "reject"}, "reject"),
            ({"channel_max_size": 2}, {"overflow": "drop"}, (2, 7)),
            ({"channel_overflow": "drop"}, {"max_size": 4}, (4, 5)),
            ({}, {"max_size": 4, "overflow": "drop"}, (4, 5)),
            ({}, {"max_size": 8}, "reject"),
        ],
    )
    @pytest.mark.parametrize("beside", [0, 1])
    def test_of_channel_and_queue(
        self,
        session: Session,
        queue: dict[str, Any],
        channel: dict[str, Any],
        expected: tuple[int, int] | str,
        beside: int,
    ) -> None:
        """The channel's own, or the queue's default, each by itself; beside a message of another channel, too."""
        rows: list[fq.MessageRow] = [{"channel": name} for name in ["acme"] * 9 + ["beside"] * beside]
        session.add_all([fq.Queue("default", **queue), fq.Queue("other"), fq.Channel("globex", max_size=1)])
        if channel:
            session.add(fq.Channel("acme", **channel))
        session.commit()
        if expected == "reject":
            with pytest.raises(fq.ChannelFull):
                fq.enqueue_many(session, rows)
        else:
            fq.enqueue_many(session, rows)
            session.commit()
            assert (len(payloads(session)), len(history(session))) == expected
        session.rollback()
        put(session, "acme", 9, queue="other")

    def test_changes_take_effect_at_once(self, session: Session) -> None:
        put(session, "acme", 9)
        bound(session)
        with pytest.raises(fq.ChannelFull):
            put(session, "acme")
        session.rollback()
        bound(session, 10)
        put(session, "acme")
        with pytest.raises(fq.ChannelFull):
            put(session, "acme")
        session.rollback()
        sql(session, "UPDATE fairqueue.channel SET max_size = NULL")
        put(session, "acme", 9)


class TestWhatCounts:
    def test_ready_messages(self, session: Session) -> None:
        """Scheduled ones do, leased ones don't."""
        bound(session)
        put(session, "acme", delay=3600)
        put(session, "acme", 2)
        with pytest.raises(fq.ChannelFull):
            put(session, "acme")
        session.rollback()
        assert len(lease_of(session, 9)) == 2
        put(session, "acme", 2)

    @pytest.mark.parametrize("way", ["fail", "defer", "reclaim", "edit", "move", "replace", "redrive"])
    def test_what_comes_back_is_never_refused(self, session: Session, way: str) -> None:
        """Only what is new; but until there is room again, all of that."""
        bound(session)
        [first] = put(session, "globex" if way == "move" else "acme", key="k", max_attempts=1)
        [leased] = lease_of(session)
        if way == "redrive":
            session.execute(fq.fail(leased))
            session.commit()
        elif way in {"edit", "move", "replace"}:
            session.execute(fq.defer(leased))
            session.commit()
        put(session, "acme", 2 if way in {"edit", "replace"} else 3)
        if way == "fail":
            sql(session, "UPDATE fairqueue.message SET max_attempts = 9")
            session.execute(fq.fail(leased))
        elif way == "defer":
            session.execute(fq.defer(leased))
        elif way == "reclaim":
            sql(session, "UPDATE fairqueue.message SET max_attempts = 9")
            expire(session, [first])
            lease_of(session, queue="default", limit=1)
        elif way == "redrive":
            assert session.execute(fq.redrive([first])).one().result == "redriven"
        elif way == "replace":
            assert fq.enqueue_unique(session, "acme", 2, key="k", on_conflict="replace") == first
        else:
            message = session.get_one(fq.Message, first)
            message.channel, message.dequeue_at = "acme", 7
        session.commit()
        assert session.get(fq.Message, first, populate_existing=True) is not None
        if way not in {"edit", "replace", "reclaim"}:
            assert len(payloads(session)) == 4
        with pytest.raises(fq.ChannelFull):
            put(session, "acme")

    def test_a_transaction_counts_its_own(self, session: Session) -> None:
        bound(session)
        for _ in range(3):
            fq.enqueue_many(session, [{"channel": "acme"}])
        with pytest.raises(fq.ChannelFull):
            fq.enqueue_many(session, [{"channel": "acme"}])

    @pytest.mark.parametrize("level", [IsolationLevel.READ_COMMITTED, IsolationLevel.REPEATABLE_READ])
    def test_overshoot(self, session: Session, raw: Raw, database_url: str, level: IsolationLevel) -> None:
        """By what other open transactions have put in, and by no more; and nobody waits."""
        bound(session)
        connections = [impatient(raw, database_url) for _ in range(4)]
        for connection in connections:
            connection.isolation_level = level
            connection.execute(INSERT, ("acme", 3))
        for connection in connections:
            with pytest.raises(psycopg.DatabaseError, match="is full"), connection.transaction():
                connection.execute(INSERT, ("acme", 1))
            connection.commit()
        watching = observer(raw, database_url)
        assert value(watching, READY, "acme") == 4 * 3
        with pytest.raises(psycopg.DatabaseError, match="is full"):
            watching.execute(INSERT, ("acme", 1))


@pytest.mark.shared_database(False)
class TestSerializable:
    """Producers wait for nobody at the highest level either."""

    def both(self, raw: Raw, database_url: str, first: list[str], second: list[str]) -> None:
        """Two serializable transactions, a statement of one after a statement of the other; both commit."""
        connections = [impatient(raw, database_url) for _ in range(2)]
        for connection in connections:
            connection.isolation_level = IsolationLevel.SERIALIZABLE
            connection.execute("SELECT 1")
        for statements in itertools.zip_longest(first, second):
            for connection, statement in zip(connections, statements, strict=True):
                if statement:
                    connection.execute(statement.encode())
        for connection in connections:
            connection.commit()

    @pytest.mark.parametrize("bounded", [0, 1, 500])
    def test_channels_without_a_max_size(self, session: Session, raw: Raw, database_url: str, bounded: int) -> None:
        """Each makes channels and enqueues to them and to the other's, in both orders, while others are bounded."""
        for number in range(bounded):
            session.add(fq.Channel(f"b{number}", max_size=1))
        session.commit()
        policy = "INSERT INTO fairqueue.channel (name, weight) VALUES ('{}', 2)"
        queue = "INSERT INTO fairqueue.queue (name) VALUES ('{}')"
        message = "INSERT INTO fairqueue.message (queue, channel) VALUES ('{0}', '{0}'), ('default', '{1}')"
        for a, b in itertools.pairwise("uvwxyz"):
            self.both(
                raw, database_url,
                [policy.format(a + "1"), queue.format(a), message.format(a, b + "1"), message.format(b, a + "1")],
                [message.format(b, a + "1"), policy.format(b + "2"), queue.format(b + "2"), message.format(a, b + "1")],
            )  # fmt: skip

    @pytest.mark.parametrize("count", [2, 300])
    def test_reads_nothing_but_what_is_bounded(self, session: Session, raw: Raw, database_url: str, count: int) -> None:
        """The predicate locks of an enqueue: on two indexes, which hold no policy of an unbounded channel."""
        session.add_all([fq.Channel(f"c{number}", weight=2) for number in range(count)])
        session.add_all([fq.Channel(f"b{number}", max_size=1) for number in range(count)])
        session.add_all([fq.Queue(f"q{number}", max_attempts=2) for number in range(count)])
        session.commit()
        connection = raw(database_url)
        connection.isolation_level = IsolationLevel.SERIALIZABLE
        locked = (
            "SELECT DISTINCT relation::regclass::text FROM pg_locks"
            " WHERE mode = 'SIReadLock' AND pid = pg_backend_pid()"
        )

        def reads() -> set[str]:
            found = {name for (name,) in connection.execute(locked.encode())}
            return {name for name in found if name.startswith("fairqueue.")}

        for analyzed in (False, True):
            if analyzed:
                observer(raw, database_url).execute("ANALYZE fairqueue.channel, fairqueue.queue")
            for channel in ("c1", "new"):
                connection.execute(INSERT, (channel, 5))
                connection.execute("SELECT fairqueue.message_create(%s, queue => 'q1')", (channel,))
                assert reads() <= {"fairqueue.channel_bounded", "fairqueue.queue_bounded"}
                connection.commit()
            connection.execute(INSERT, ("b1", 1))
            assert "fairqueue.message_ready" in reads(), "where it counts, it reads"
            connection.rollback()

    def test_bounded_channels_may_conflict(self, session: Session, raw: Raw, database_url: str) -> None:
        """Here counting is reading: of two that could overshoot one is told to try again."""
        bound(session)
        with pytest.raises(errors.SerializationFailure):
            self.both(raw, database_url, [INSERT_THREE], [INSERT_THREE])
        assert value(observer(raw, database_url), READY, "acme") == 3


@pytest.mark.shared_database(False)
class TestCost:
    """In buffers, which auto_explain shows for each statement inside."""

    def test_index_entries(self, session: Session, raw: Raw, database_url: str) -> None:
        """No scan, however many messages and channels: as many entries as max_size and the statement have."""
        sql(
            session, "INSERT INTO fairqueue.channel (name, max_size) SELECT 'b' || g, 7 FROM generate_series(1, 5000) g"
        )
        sql(session, "INSERT INTO fairqueue.channel (name) SELECT 'c' || g FROM generate_series(1, 5000) g")
        sql(
            session,
            "INSERT INTO fairqueue.message (channel) SELECT 'c' || (1 + g % 100) FROM generate_series(1, 20000) g",
        )
        sql(session, "ALTER TABLE fairqueue.message DISABLE TRIGGER message_enqueued")
        sql(session, "INSERT INTO fairqueue.message (channel) SELECT 'b1' FROM generate_series(1, 20000)")
        sql(session, "ALTER TABLE fairqueue.message ENABLE TRIGGER message_enqueued")
        sql(session, "UPDATE fairqueue.channel SET overflow = 'drop'")
        watched = Watched(raw(database_url))
        for channel, count, read in [("c7", 1, 0), ("c7", 1000, 0), ("b2", 1, 1), ("b2", 2, 3), ("b1", 10, 17)]:
            watched.run(INSERT, channel, count)
            scans = [
                (node["Relation Name"], node["Node Type"], node["Actual Rows"] * node["Actual Loops"], node)
                for statement in watched.statements
                if "INSERT INTO" not in statement.query and "DELETE" not in statement.query
                for node in statement.nodes
                if "Relation Name" in node
            ]
            kinds = {kind for table, kind, _, _ in scans}
            assert kinds <= {"Index Scan", "Index Only Scan"}, scans
            assert sum(found for table, _, found, _ in scans if table == "message") == read
            assert sum(node["Shared Hit Blocks"] + node["Shared Read Blocks"] for *_, node in scans) < 60
            assert sum("channel" in statement.query for statement in watched.statements) < 10

    def test_many_full_channels(self, session: Session, raw: Raw, database_url: str) -> None:
        """Not all of a statement's messages are gone through for each of them."""
        session.add(fq.Queue("default", channel_max_size=1, channel_overflow="drop"))
        session.commit()
        watched = Watched(raw(database_url))
        statements = watched.run(
            "INSERT INTO fairqueue.message (channel) SELECT 'c' || g % 200 FROM generate_series(1, 1000) g"
        )
        read = sum(
            (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
            for statement in statements
            for node in statement.nodes
            if node["Node Type"] == "Named Tuplestore Scan"
        )
        assert 1000 <= read <= 5000
        assert len(history(session)) == 800

    def test_the_number_that_means_none(self, session: Session, raw: Raw, database_url: str) -> None:
        """It lifts the queue's default for a channel, whose backlog isn't counted then."""
        put(session, "acme", 1000)
        session.add_all([fq.Queue("default", channel_max_size=7), fq.Channel("acme", max_size=2**31 - 1)])
        session.commit()
        watched = Watched(raw(database_url))
        statements = watched.run(INSERT, "acme", 10)
        assert sum("channel_max_size" in statement.query for statement in statements), "it was watched"
        assert sum(statement.rows_of("message") for statement in statements) == 0
        with pytest.raises(fq.ChannelFull):
            put(session, "globex", 8)
