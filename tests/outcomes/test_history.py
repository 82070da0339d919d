"""History: one row an outcome, with all that reports need, at a small and constant cost."""

import json
from collections.abc import Iterator

import pytest
from pytest_postgresql.executors import NoopExecutor
from sqlalchemy import Engine, select, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

import fairqueue as fq
from fairqueue.testing._databases import Databases
from tests.acts import clock, complete, lease_of, move_clock, put, sql, stop_clock
from tests.fixtures.connections import Raw
from tests.fixtures.databases import prepared
from tests.fixtures.workers import EngineOf
from tests.observing import observer, value
from tests.outcomes.days import DAY, maintain, moment, places
from tests.watching import Watched

pytestmark = pytest.mark.shared_database


async def test_transaction_ids_are_numbers(engine: Engine, session: Session, engine_of: EngineOf) -> None:
    """With each driver, read and compared."""
    put(session, "acme", 3)
    for message in lease_of(session, 3):
        complete(session, [message])
    xids = session.scalars(select(fq.History.xid).order_by(fq.History.message_id)).all()
    later = select(fq.History.xid).where(fq.History.xid > min(xids)).order_by(fq.History.xid)
    assert session.scalars(later).all() == sorted(xids)[1:]
    assert session.scalars(select(fq.History.xid).where(fq.History.xid.in_(xids[1:]))).all() == sorted(xids)[1:]
    asyncpg = engine_of("asyncpg")
    async with AsyncSession(asyncpg) as other:
        assert (await other.scalars(later)).all() == sorted(xids)[1:]
    await asyncpg.dispose()


class TestRows:
    def test_completed(self, engine: Engine, session: Session) -> None:
        """What it was, who did it, and each of its times."""
        start = clock(session)
        stop_clock(engine, start)
        (id_,) = put(session, "acme", key="k", cost=2.5, dequeue_at=-7)
        for second, worker in ((1, "w1"), (2, None), (3, "w3")):
            move_clock(session, start + second * 1000)
            batch = session.scalars(fq.dequeue(worker=worker)).all()
            move_clock(session, start + second * 1000 + 500)
            session.execute(fq.complete(batch) if worker == "w3" else fq.fail(batch, "broken", delay=0))
            xid = int(session.scalar(text("SELECT pg_current_xact_id()")))
            session.commit()
        row = session.scalars(select(fq.History)).one()
        assert {column.key: getattr(row, column.key) for column in fq.History.__table__.columns} == {
            "message_id": id_,
            "queue": "default",
            "channel": "acme",
            "key": "k",
            "outcome": "completed",
            "attempt": 3,
            "cost": 2.5,
            "error": None,
            "worker": "w3",
            "dequeue_at": -7,
            "created_at": moment(start),
            "first_leased_at": moment(start + 1000),
            "leased_at": moment(start + 3000),
            "finished_at": moment(start + 3500),
            "xid": xid,
        }

    def test_other_outcomes(self, engine: Engine, session: Session) -> None:
        """Dead, dead of a lease that ran out, cancelled while ready or leased, dropped; and dead again."""
        start = clock(session)
        stop_clock(engine, start)
        failed, expired, leased = (put(session, "acme", key=key, max_attempts=1)[0] for key in "abc")
        batch = session.scalars(fq.dequeue(limit=3, lease=100, worker="w")).all()
        session.commit()
        ready, full = (put(session, "acme", key=key)[0] for key in "de")
        move_clock(session, start + 50_000)
        session.execute(fq.fail(batch[0], "broken"))
        session.execute(fq.cancel([leased, ready]))
        session.execute(text("SELECT fairqueue.message_finish(ARRAY[:id], 'dropped', 'no room')"), {"id": full})
        move_clock(session, start + 100_000)
        assert lease_of(session) == []
        session.execute(fq.redrive(failed))
        move_clock(session, start + 200_000)
        session.execute(fq.cancel(failed))
        session.commit()

        ran_out = "the lease of the last attempt ran out"
        rows = session.scalars(select(fq.History).order_by(fq.History.finished_at, fq.History.message_id))
        assert [(row.message_id, row.outcome, row.attempt, row.key, row.worker, row.error) for row in rows] == [
            (failed, fq.Outcome.DEAD, 1, "a", "w", "broken"),
            (leased, fq.Outcome.CANCELLED, 1, "c", "w", None),
            (ready, fq.Outcome.CANCELLED, 0, "d", None, None),
            (full, fq.Outcome.DROPPED, 0, "e", None, "no room"),
            (expired, fq.Outcome.DEAD, 1, "b", "w", ran_out),
            (failed, fq.Outcome.CANCELLED, 1, "a", "w", "broken"),
        ]
        times = session.execute(
            select(fq.History.first_leased_at, fq.History.leased_at, fq.History.finished_at)
            .where(fq.History.message_id == failed)
            .order_by(fq.History.finished_at)
        ).all()
        first = moment(start)
        assert [tuple(row) for row in times] == [
            (first, first, moment(start + 50_000)),
            (first, None, moment(start + 200_000)),
        ]

    def test_is_that_of_its_transaction(self, session: Session) -> None:
        (id_,) = put(session, "acme")
        (message,) = lease_of(session)
        session.execute(fq.complete(message))
        session.rollback()
        assert places(session) == {}
        with session.begin_nested() as savepoint:
            session.execute(fq.complete(message))
            savepoint.rollback()
        assert complete(session, [message]) == ["completed"]
        assert list(places(session)) == [id_]
        assert complete(session, [message]) == ["not_found"]
        assert list(places(session)) == [id_]

    def test_none_is_kept(self, session: Session) -> None:
        """With history_days = 0; what was dropped for want of room is always known."""
        sql(session, "INSERT INTO fairqueue.queue (name, history_days) VALUES ('quiet', 0), ('loud', 1)")
        ids = {queue: put(session, "acme", 4, queue=queue) for queue in ("quiet", "loud", "default")}
        for queue, (_, _, cancelled, dropped) in ids.items():
            completed, failed = lease_of(session, 2, queue=queue)
            session.execute(fq.complete(completed))
            session.execute(fq.fail(failed, retry=False))
            session.execute(fq.cancel(cancelled))
            session.execute(text("SELECT fairqueue.message_finish(ARRAY[:id], 'dropped')"), {"id": dropped})
        session.commit()
        assert set(places(session)) == {ids["quiet"][3], *ids["loud"], *ids["default"]}
        assert session.query(fq.DeadMessage).count() == 3

    def test_of_a_batch_in_several_queues(self, session: Session) -> None:
        sql(session, "INSERT INTO fairqueue.queue (name, history_days) VALUES ('quiet', 0)")
        quiet, loud = put(session, "acme", 5, queue="quiet"), put(session, "acme", 5)
        leases = lease_of(session, 9) + lease_of(session, 9, queue="quiet")
        assert complete(session, leases) == ["completed"] * 10
        assert sorted(places(session)) == loud
        assert quiet


LEASED = list(range(1, 201))


def fill(engine: Engine) -> None:
    """39 partitions with 40,000 rows, and 200 leased messages."""
    with Session(engine) as session:
        start = clock(session)
        for day in range(-30, 1, 7):
            stop_clock(engine, start + day * DAY)
            maintain(session)
        insert = (
            "INSERT INTO fairqueue.history (message_id, queue, channel, outcome, attempt, cost, dequeue_at, created_at,"
            " finished_at) SELECT g, 'default', 'acme', 'completed', 1, 1, 0, 'epoch',"
            " fairqueue.clock() - (g % 30) * interval '1 day' FROM generate_series(1000, 41000) g"
        )
        sql(session, insert)
        sql(session, "INSERT INTO fairqueue.queue (name) SELECT 'q' || g FROM generate_series(1, 1000) g")
        assert put(session, "acme", 200) == LEASED
        sql(session, "UPDATE fairqueue.message SET attempt = 1, leased_until = 'infinity'")


@pytest.fixture(scope="module")
def full(databases: Databases, template: NoopExecutor) -> Iterator[str]:
    """A database to be cloned, with all of it."""
    with prepared(databases, template, fill) as name:
        yield name


@pytest.mark.shared_database(False)
class TestCost:
    @pytest.fixture
    def watched(self, databases: Databases, full: str, raw: Raw) -> Iterator[Watched]:
        with databases.create(full) as url:
            yield Watched(raw(url))

    def test_of_a_completion(self, watched: Watched) -> None:
        """By index only, and one partition: that of the day. So many pages a message, however much there is."""
        query = "SELECT * FROM fairqueue.message_complete(%s, %s)"
        watched.run(query, LEASED[:20], [1] * 20)
        for act, few in ((query, LEASED[20:40]), (query, LEASED[40:140])):
            statements = watched.run(act, few, [1] * len(few))
            scans = [node for statement in statements for node in statement.nodes if node["Node Type"] == "Seq Scan"]
            assert {node["Relation Name"] for node in scans} <= {"moved_clock"}
            (done,) = [each.nodes[0] for each in statements if "DELETE FROM message" in each.query]
            pages = done["Shared Hit Blocks"] + done["Shared Read Blocks"]
            assert pages <= 30 * len(few), json.dumps(done)
        with watched.connection.transaction():
            watched.connection.execute(query.encode(), (LEASED[140:], [1] * 60))
            locked = watched.connection.execute(
                "SELECT relation::regclass::text FROM pg_locks WHERE pid = pg_backend_pid()"
                " AND relation::regclass::text ~ 'history_\\d{4}_\\d\\d_\\d\\d$'"
            ).fetchall()
            assert len(locked) == 1

    def test_of_a_look(self, watched: Watched) -> None:
        """Who waits asks for live messages by their keys, and never looks into history for them."""
        query = "SELECT * FROM fairqueue.message_ending(%s)"
        watched.run(query, LEASED)
        statements = watched.run(query, LEASED)
        assert {node.get("Relation Name") for each in statements for node in each.nodes} <= {"message", None}
        watched.run(query, list(range(1000, 1050)))
        statements = watched.run(query, list(range(1000, 1050)))
        kinds = {node["Node Type"] for each in statements for node in each.nodes if "Relation Name" in node}
        assert kinds <= {"Index Scan", "Index Only Scan"}


def test_reads_as_a_change_feed(session: Session, raw: Raw, database_url: str) -> None:
    """By transaction id up to the horizon of a snapshot: what commits late is not passed over."""
    put(session, "acme", 3)
    early, late, last = lease_of(session, 3)
    slow = raw(database_url)
    slow.execute("SELECT fairqueue.message_complete(ARRAY[%s], ARRAY[1])", (early.id,))
    complete(session, [late])
    reading = observer(raw, database_url)
    seen: list[int] = []
    position = "0"
    for step in (lambda: None, slow.commit, lambda: complete(session, [last])):
        step()
        with reading.transaction():
            horizon = value(reading, "SELECT pg_snapshot_xmin(pg_current_snapshot())::text")
            rows = reading.execute(
                "SELECT message_id FROM fairqueue.history WHERE xid >= %s::xid8 AND xid < %s::xid8", (position, horizon)
            ).fetchall()
        seen += [id_ for (id_,) in rows]
        position = str(horizon)
    assert sorted(seen) == sorted([early.id, late.id, last.id])
