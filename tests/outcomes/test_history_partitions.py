"""The partitions of history: made ahead, dropped in time, and in nobody's way."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import complete, lease_of, move_clock, put, sql, stop_clock, wait_until
from tests.fixtures.connections import Raw
from tests.observing import value
from tests.outcomes.days import DAY, DAY_0, at, finished, maintain, name, partitions, places

#: Those who wait for a lock of history, or of history_default.
WAITING = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation::regclass::text LIKE 'fairqueue.history%'"


@pytest.fixture
def day_0(engine: Engine) -> None:
    """It is noon of DAY_0, and no partition has been made for it."""
    stop_clock(engine, at(0))


class TestPartitions:
    def test_of_an_installation(self, session: Session) -> None:
        """It begins with those of its day and the week after."""
        today = session.execute(text("SELECT (clock_timestamp() AT TIME ZONE 'UTC')::date")).scalar_one()
        for day in range(7):  # not the eighth: it may be past midnight by now
            assert session.scalar(text(f"SELECT to_regclass('fairqueue.history_{today + timedelta(day):%Y_%m_%d}')"))
        finished(session)
        assert not {"history_default"} & set(places(session).values())

    @pytest.mark.parametrize("zone", ["UTC", "Pacific/Kiritimati", "America/Los_Angeles"])
    @pytest.mark.parametrize("style", ["ISO, MDY", "SQL, DMY", "German"])
    def test_are_days_in_utc(self, session: Session, day_0: None, zone: str, style: str) -> None:
        """Whatever the session's settings are; the first and the last moment of a day are in it."""
        session.execute(text(f"SET timezone = '{zone}'"))
        session.execute(text(f"SET datestyle = '{style}'"))
        assert maintain(session)
        assert partitions(session) == [name(day) for day in range(8)]
        for moment in (at(2, 0), at(2, DAY - 1)):
            move_clock(session, moment)
            (id_,) = finished(session)
            assert places(session)[id_] == name(2)

    def test_dequeues_make_them(self, session: Session, day_0: None) -> None:
        """Nobody has to."""
        put(session, "acme", 64)
        for _ in range(32):
            complete(session, lease_of(session))
        assert set(partitions(session)) >= {name(day) for day in range(8)}
        move_clock(session, at(1, 0))
        lease_of(session)
        assert name(8) in partitions(session), "each day"
        move_clock(session, at(40))
        lease_of(session)
        assert partitions(session) == [name(day) for day in range(40, 48)], "and what is too old goes"

    def test_what_no_partition_has_room_for(self, session: Session, day_0: None) -> None:
        """Goes to history_default, and to the day's partition when that is made."""
        first, second = finished(session, 2, key=None)
        move_clock(session, at(1))
        (third,) = finished(session)
        move_clock(session, at(-1))
        (fourth,) = finished(session)
        assert set(places(session).values()) == {"history_default"}
        move_clock(session, at(0))
        before = session.execute(text("SELECT * FROM fairqueue.history ORDER BY message_id")).all()
        assert maintain(session)
        assert places(session) == {
            first: name(0),
            second: name(0),
            third: name(1),
            fourth: "history_default",  # of a day that is over
        }
        assert session.execute(text("SELECT * FROM fairqueue.history ORDER BY message_id")).all() == before

    def test_too_much_to_move(self, session: Session, day_0: None) -> None:
        """Would take long; it stays where it is, and the other days get their partitions."""
        insert = (
            "INSERT INTO fairqueue.history (message_id, queue, channel, outcome, attempt, cost, dequeue_at, created_at)"
            " SELECT g, 'default', 'acme', 'completed', 1, 1, 0, fairqueue.clock() FROM generate_series(1, 10001) g"
        )
        sql(session, insert)
        assert maintain(session)
        assert partitions(session) == [name(day) for day in range(1, 8)]
        sql(session, "DELETE FROM fairqueue.history WHERE message_id = 1")
        assert maintain(session)
        assert partitions(session) == [name(day) for day in range(8)]
        assert set(places(session).values()) == {name(0)}

    @pytest.mark.parametrize(("days", "kept"), [([], 30), ([3, 0], 30), ([3, 1], 3), ([40, 1], 40)])
    def test_are_dropped_in_time(self, session: Session, day_0: None, days: list[int], kept: int) -> None:
        """When they are older than the longest history_days of all queues; 0 counts as 30."""
        insert = "INSERT INTO fairqueue.queue (name, history_days) VALUES (:name, :days)"
        sql(session, insert, name="long", days=100)
        for day in range(-41, 0, 8):
            move_clock(session, at(day))
            assert maintain(session)
        assert partitions(session) == [name(day) for day in range(-41, 7)]
        sql(session, "DELETE FROM fairqueue.queue")
        for number, history_days in enumerate(days):
            sql(session, insert, name=f"q{number}", days=history_days)
        sql(session, f"ALTER TABLE fairqueue.history DETACH PARTITION fairqueue.{name(-41)}")
        sql(session, "CREATE TABLE fairqueue.archive (LIKE fairqueue.history) PARTITION BY RANGE (finished_at)")
        sql(session, f"ALTER TABLE fairqueue.archive ATTACH PARTITION fairqueue.{name(-41)} DEFAULT")
        move_clock(session, at(0))
        assert maintain(session)
        assert partitions(session) == [name(day) for day in range(-kept, 8)]
        assert session.scalar(text(f"SELECT to_regclass('fairqueue.{name(-41)}')")), "is somebody's archive now"

    @pytest.fixture
    def only_old_ones(self, session: Session, day_0: None) -> None:
        """There is nothing to make any more, only what was made 40 days ago to drop; and nobody gives up soon."""
        move_clock(session, at(-40))
        assert maintain(session)
        move_clock(session, at(0))
        today = "(fairqueue.clock() AT TIME ZONE 'UTC')::date"
        sql(session, f"SELECT fairqueue.history_add({today} + n, false) FROM generate_series(0, 7) AS n")
        sql(session, "ALTER FUNCTION fairqueue.history_maintain() SET lock_timeout = '20s'")

    def test_are_not_dropped_while_somebody_writes_what_a_feed_will_read(
        self, engine: Engine, session: Session, other: psycopg.Connection, only_old_ones: None
    ) -> None:
        """Who has completed something on that day only commits now."""
        xid = value(other, "SELECT pg_current_xact_id()::text")
        other.execute(outcomes(-40, -40).encode())
        sql(session, f"INSERT INTO fairqueue.feed (name, xid, message_id) VALUES ('late', '{xid}', 0)")
        maintained_after(engine, session, other)
        assert places(session) == {1: name(-40)}
        assert partitions(session) == [name(-40), *(name(day) for day in range(8))]

    def test_nor_is_what_somebody_is_just_detaching(
        self, engine: Engine, session: Session, other: psycopg.Connection, only_old_ones: None
    ) -> None:
        other.execute(f"ALTER TABLE fairqueue.history DETACH PARTITION fairqueue.{name(-40)}".encode())
        maintained_after(engine, session, other)
        assert session.scalar(text(f"SELECT to_regclass('fairqueue.{name(-40)}')")), "it is theirs"
        assert partitions(session) == [name(day) for day in range(8)]

    def test_are_dropped_in_parts(self, session: Session, day_0: None) -> None:
        """Of very many days as many in one transaction as it can hold locks of."""
        sql(session, "INSERT INTO fairqueue.queue (name, history_days) VALUES ('long', 100)")
        for day in range(-90, 0, 8):
            move_clock(session, at(day))
            assert maintain(session)
        move_clock(session, at(0))
        assert maintain(session)
        sql(session, "DELETE FROM fairqueue.queue")
        assert maintain(session) is False
        assert partitions(session) == [name(day) for day in range(-40, 8)], "the oldest go first"
        assert maintain(session) is True
        assert partitions(session) == [name(day) for day in range(-30, 8)]

    def test_what_a_feed_has_not_read_keeps_nothing_else(self, session: Session, day_0: None) -> None:
        """However many days that is: those after them are dropped, and that is all there is to do."""
        for day in range(-100, 0, 8):
            move_clock(session, at(day))
            sql(session, "INSERT INTO fairqueue.queue (name, history_days) VALUES ('long', 100) ON CONFLICT DO NOTHING")
            assert maintain(session)
        sql(session, "INSERT INTO fairqueue.feed (name, xid, message_id) VALUES ('late', '0', 0)")
        sql(session, outcomes(-100, -46))
        sql(session, "DELETE FROM fairqueue.queue")
        move_clock(session, at(0))
        assert maintain(session) is True
        assert partitions(session) == [name(day) for day in (*range(-100, -45), *range(-30, 8))]

    @pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
    def test_are_not_dropped_under_an_old_snapshot(
        self, session: Session, other: psycopg.Connection, day_0: None, level: str
    ) -> None:
        """It knows nothing of a feed that is new."""
        maintain(session)
        finished(session)
        move_clock(session, at(40))
        other.execute(f"SET TRANSACTION ISOLATION LEVEL {level}".encode())
        other.execute("SELECT count(*) FROM fairqueue.queue")
        session.execute(text("SELECT fairqueue.feed_move('new', '0', 0)"))
        session.commit()
        assert value(other, "SELECT fairqueue.history_maintain()") is False
        other.commit()
        assert maintain(session)
        assert name(0) in partitions(session)

    def test_are_kept_for_queues_without_a_policy(self, session: Session, day_0: None) -> None:
        """Another queue's row says nothing of theirs."""
        move_clock(session, at(-29))
        put(session, "acme", 1)
        lease_of(session)
        sql(session, "INSERT INTO fairqueue.queue (name, history_days) VALUES ('bulk', 3)")
        move_clock(session, at(0))
        assert maintain(session)
        assert name(-29) in partitions(session)
        sql(session, "INSERT INTO fairqueue.queue (name, history_days) VALUES ('default', 3)")
        assert maintain(session)
        assert name(-29) not in partitions(session)

    def test_what_is_old_in_the_default(self, session: Session, day_0: None) -> None:
        insert = (
            "INSERT INTO fairqueue.history (message_id, queue, channel, outcome, attempt, cost, dequeue_at, created_at,"
            " finished_at) SELECT g, 'default', 'acme', 'completed', 1, 1, 0, 'epoch',"
            " fairqueue.clock() - make_interval(days => :days) FROM generate_series(CAST(:first AS integer), :last) g"
        )
        sql(session, insert, days=31, first=1, last=10_005)
        sql(session, insert, days=30, first=20_001, last=20_003)
        assert maintain(session) is False, "there is more of it"
        assert maintain(session) is True
        assert sorted(places(session)) == [20_001, 20_002, 20_003]


class TestInNobodysWay:
    def test_open_completions_delay_no_partition(
        self, session: Session, other: psycopg.Connection, day_0: None
    ) -> None:
        """Those of the days to come are made beside them, and completions go on beside that."""
        maintain(session)
        ids = put(session, "acme", 2)
        sql(session, "UPDATE fairqueue.message SET attempt = 1, leased_until = fairqueue.clock()")
        other.execute("SELECT fairqueue.message_complete(%s, '{1}')", (ids[:1],))
        move_clock(session, at(3))
        assert session.execute(text("SELECT fairqueue.history_maintain()")).scalar_one() is True
        other.execute("SET lock_timeout = '1s'")
        other.execute("SELECT fairqueue.message_complete(%s, '{1}')", (ids[1:],))
        other.commit()
        session.commit()
        assert partitions(session) == [name(day) for day in range(11)]
        assert sorted(places(session)) == ids

    @pytest.mark.parametrize(
        "hold",
        [
            "LOCK TABLE fairqueue.history IN ROW EXCLUSIVE MODE",
            "SELECT count(*) FROM fairqueue.history",
            "LOCK TABLE fairqueue.history IN ACCESS EXCLUSIVE MODE",
            "SELECT fairqueue.message_complete(ARRAY[1], ARRAY[1])",
        ],
        ids=["lock of a writer", "report", "migration", "completion"],
    )
    def test_others_that_hold_a_lock(self, session: Session, other: psycopg.Connection, day_0: None, hold: str) -> None:
        """It gives up soon, loses nothing, and does it the next time."""
        move_clock(session, at(-40))
        assert maintain(session)
        move_clock(session, at(0))
        put(session, "acme")
        sql(session, "UPDATE fairqueue.message SET attempt = 1, leased_until = fairqueue.clock()")
        other.execute(hold.encode())
        started = clock_of_server(session)
        assert maintain(session) is False
        assert clock_of_server(session) - started < 15, "at most 100 ms for each of its two parts, not a lock_timeout"
        assert name(-40) in partitions(session)
        other.commit()
        if "complete" not in hold:
            session.execute(fq.complete([(1, 1)]))
            session.commit()
        assert list(places(session)) == [1]
        assert maintain(session) is True
        assert places(session) == {1: name(0)}
        assert partitions(session) == [name(day) for day in range(8)]

    def test_a_transaction_that_goes_on_completing(
        self, engine: Engine, session: Session, other: psycopg.Connection, day_0: None
    ) -> None:
        """It has locked history, and comes to history_default while a partition waits to be made: no deadlock."""
        sql(session, "SELECT fairqueue.queue_set('brief', history_days => 0)")
        ids = put(session, "acme", queue="brief") + put(session, "acme")
        sql(session, "UPDATE fairqueue.message SET attempt = 1, leased_until = fairqueue.clock()")
        sql(session, "ALTER FUNCTION fairqueue.history_maintain() SET lock_timeout = '20s'")
        other.execute("SET deadlock_timeout = '10ms'")
        other.execute("SELECT fairqueue.message_complete(%s, '{1}')", (ids[:1],))
        with ThreadPoolExecutor(1) as pool, Session(engine) as maintaining:
            maintained = pool.submit(maintain, maintaining)
            wait_until(lambda: session.scalar(text(WAITING)))
            query = "SELECT result FROM fairqueue.message_complete(%s, '{1}')"
            assert value(other, query, ids[1:]) == "completed"
            other.commit()
            assert maintained.result() is True
        assert places(session) == {ids[1]: name(0)}

    def test_one_part_that_has_to_wait_is_not_all(
        self, session: Session, other: psycopg.Connection, day_0: None
    ) -> None:
        """There is nothing to drop; but those to be made are to be tried again."""
        assert maintain(session) is True
        move_clock(session, at(1))
        other.execute("SELECT FROM fairqueue.history_default")
        assert maintain(session) is False
        other.commit()
        assert maintain(session) is True

    def test_who_waits_for_another_finds_them_made(
        self, engine: Engine, session: Session, other: psycopg.Connection, day_0: None
    ) -> None:
        sql(session, "ALTER FUNCTION fairqueue.history_maintain() SET lock_timeout = '20s'")
        other.execute("SELECT fairqueue.history_maintain()")
        maintained_after(engine, session, other)
        assert partitions(session) == [name(day) for day in range(8)]

    def test_who_writes_to_the_default_is_waited_for(
        self, engine: Engine, session: Session, other: psycopg.Connection, day_0: None
    ) -> None:
        """What is on its way there may be of the day that is made, which has begun meanwhile."""
        (id_,) = put(session, "acme")
        sql(session, "UPDATE fairqueue.message SET attempt = 1, leased_until = fairqueue.clock()")
        move_clock(session, at(1))
        other.execute("SELECT fairqueue.message_complete(%s, '{1}')", ([id_],))
        with ThreadPoolExecutor(1) as pool, Session(engine) as making:
            made = pool.submit(sql, making, f"SELECT fairqueue.history_add('{DAY_0 + timedelta(1)}', false)")
            wait_until(lambda: session.scalar(text(WAITING)))
            other.commit()
            made.result()
        assert places(session) == {id_: name(1)}

    def test_dequeues_go_on_meanwhile(self, session: Session, other: psycopg.Connection, day_0: None) -> None:
        other.execute("SELECT count(*) FROM fairqueue.history")
        put(session, "acme", 40)
        for _ in range(40):
            assert complete(session, lease_of(session)) == ["completed"]
        assert set(places(session).values()) == {"history_default"}
        other.rollback()
        lease_of(session)
        assert partitions(session) == []
        move_clock(session, at(0) + 600_000)
        lease_of(session)
        assert set(places(session).values()) == {name(0)}, "ten minutes later it is tried again"

    def test_what_can_t_be_done_is_a_warning(self, session: Session, other: psycopg.Connection, day_0: None) -> None:
        move_clock(session, at(-40))
        maintain(session)
        sql(session, f"CREATE VIEW report AS SELECT * FROM fairqueue.{name(-39)}")
        move_clock(session, at(0))
        notices: list[str] = []
        other.add_notice_handler(lambda notice: notices.append(str(notice.message_primary)))
        other.autocommit = True
        assert value(other, "SELECT fairqueue.history_maintain()") is False
        assert notices == [f"history_maintain: cannot drop table {name(-39)} because other objects depend on it"]
        assert set(partitions(session)) == {name(-39), *(name(day) for day in range(8))}, "all others go"
        put(session, "acme", 20)
        assert len([lease_of(session) for _ in range(20)]) == 20

    def test_several_at_once(self, session: Session, raw: Raw, database_url: str, day_0: None) -> None:
        """Beside completions: no error, nothing lost, every partition there in the end."""
        ids = put(session, "acme", 400)
        sql(session, "UPDATE fairqueue.message SET attempt = 1, leased_until = fairqueue.clock()")
        connections = [raw(database_url) for _ in range(6)]
        start = threading.Barrier(6)

        def run(number: int) -> set[object]:
            connection = connections[number]
            connection.autocommit = True
            start.wait()
            if number < 3:
                return {value(connection, "SELECT fairqueue.history_maintain()") for _ in range(5)}
            query = "SELECT result FROM fairqueue.message_complete(%s, %s)"
            mine = ids[number - 3 :: 3]
            return {value(connection, query, mine[n : n + 5], [1] * 5) for n in range(0, len(mine) - 4, 5)}

        with ThreadPoolExecutor(6) as pool:
            told = list(pool.map(run, range(6)))
        assert set.union(*told[:3]) <= {True, False}
        assert set.union(*told[3:]) == {"completed"}
        assert maintain(session) is True
        assert partitions(session) == [name(day) for day in range(8)]
        assert len(places(session)) == 400 - session.query(fq.Message).count()


def clock_of_server(session: Session) -> float:
    now = session.execute(text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one()
    session.commit()
    return float(now)


def outcomes(first: int, last: int) -> str:
    """SQL that writes one of each of these days."""
    return f"""
        INSERT INTO fairqueue.history
            (message_id, queue, channel, outcome, attempt, cost, dequeue_at, created_at, finished_at)
        SELECT n, 'default', 'acme', 'completed', 1, 1, 0, now(), to_timestamp(({at(first - 1)} + n * {DAY}) / 1000.0)
        FROM generate_series(1, {last - first + 1}::bigint) AS n
    """


def maintained_after(engine: Engine, session: Session, other: psycopg.Connection) -> None:
    """All is done, as soon as the other one has committed, which is waited for."""
    with ThreadPoolExecutor(1) as pool, Session(engine) as maintaining:
        maintained = pool.submit(maintain, maintaining)
        wait_until(lambda: session.scalar(text(WAITING)))
        other.commit()
        assert maintained.result() is True
    session.rollback()
