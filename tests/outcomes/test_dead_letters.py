"""A message that used up its attempts is kept with all that it had, and can be put back."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import clock, drain, expire, lease_of, move_clock, put, sql, stop_clock, take, wait_until
from tests.fixtures.connections import Raw
from tests.observing import impatient, observer, value, waits_for_a_lock

pytestmark = pytest.mark.shared_database

LARGE = "".join(chr(0x4E00 + number * 7919 % 20_000) for number in range(20_000))  # stored out of line


def kill(session: Session, channel: str, count: int = 1, queue: str = "default", **fields: Any) -> list[int]:
    """Messages of a channel that failed for good."""
    ids = put(session, channel, count, queue=queue, max_attempts=1, **fields)
    batch = lease_of(session, 1000, queue=queue)
    assert {row.result for row in session.execute(fq.fail(batch, "broken"))} == {"dead"}
    session.commit()
    return ids


def dead(session: Session) -> list[int]:
    ids = list(session.scalars(select(fq.DeadMessage.id).order_by(fq.DeadMessage.id)))
    session.commit()
    return ids


def results(session: Session, statement: Any) -> list[tuple[int, str]]:
    told = [(row.id, row.result) for row in session.execute(statement)]
    session.commit()
    return told


def redriven(ids: list[int]) -> list[tuple[int, str]]:
    return [(id_, "redriven") for id_ in ids]


class TestKept:
    def test_everything(self, engine: Engine, session: Session) -> None:
        at = clock(session)
        stop_clock(engine, at)
        (id_,) = put(
            session,
            "acme",
            payload={"doc": LARGE},
            body=b"\x00\xff" * 5000,
            key="k",
            cost=2.5,
            max_attempts=2,
            backoff=7,
        )
        for second, state in ((1, {"page": 3}), (2, None)):
            move_clock(session, at + second * 1000)
            batch = session.scalars(fq.dequeue(worker=f"w{second}")).all()
            session.execute(fq.defer(batch, state=state) if state else fq.fail(batch, "once", delay=0))
            session.commit()
        move_clock(session, at + 3000)
        batch = session.scalars(fq.dequeue(worker="w3")).all()
        move_clock(session, at + 4000)
        session.execute(fq.fail(batch, ValueError("twice")))
        session.commit()
        assert session.query(fq.Message).count() == 0

        letter = session.scalars(select(fq.DeadMessage)).one()
        moments = [
            datetime.fromtimestamp(at // 1000 + second, UTC).replace(microsecond=at % 1000 * 1000)
            for second in (0, 1, 4)
        ]
        kept = {column.key: getattr(letter, column.key) for column in fq.DeadMessage.__table__.columns}
        assert kept == {
            "id": id_,
            "queue": "default",
            "channel": "acme",
            "key": "k",
            "payload": {"doc": LARGE},
            "body": b"\x00\xff" * 5000,
            "cost": 2.5,
            "max_attempts": 2,
            "backoff": 7,
            "attempt": 3,
            "worker": "w3",
            "state": {"page": 3},
            "error": "ValueError: twice",
            "created_at": moments[0],
            "first_leased_at": moments[1],
            "died_at": moments[2],
        }
        session.execute(fq.redrive(id_))
        message = session.get_one(fq.Message, id_)
        kept.pop("died_at")
        assert {key: getattr(message, key) for key in kept} == kept

    def test_error_of_an_earlier_attempt(self, session: Session) -> None:
        """Stays where the last one says nothing."""
        put(session, "acme", max_attempts=2)
        for error in ("once", None):
            session.execute(fq.fail(lease_of(session), error, delay=0))
        session.commit()
        assert session.scalars(select(fq.DeadMessage)).one().error == "once"

    def test_forgotten(self, session: Session) -> None:
        """Users may delete them."""
        (id_,) = kill(session, "acme")
        session.delete(session.get_one(fq.DeadMessage, id_))
        session.commit()
        assert results(session, fq.redrive(id_)) == [(id_, "not_found")]

    @pytest.mark.shared_database(False)
    @pytest.mark.parametrize("when", ["", " DEFERRABLE INITIALLY DEFERRED"])
    def test_one_that_can_not_die(self, engine: Engine, session: Session, when: str) -> None:
        """A foreign key of the application's keeps it; others whose last leases ran out at the same time do die.

        It waits as one that failed, longer each time.
        """
        stop_clock(engine, at := clock(session))
        kept, other = put(session, "acme", max_attempts=1, backoff=100) + put(session, "globex", max_attempts=1)
        sql(session, f"CREATE TABLE public.invoice (message_id bigint REFERENCES fairqueue.message{when})")
        sql(session, "INSERT INTO public.invoice VALUES (:id)", id=kept)
        expired = lease_of(session, 2)
        for attempt in (2, 3):
            expire(session, [message.id for message in expired])
            delay = 100_000 * (attempt - 1)
            for wait in (0, delay // 2 - 1):
                move_clock(session, at + wait)
                assert lease_of(session, 2) == []
            move_clock(session, at := at + delay)
            (again,) = expired = lease_of(session, 2)
            assert (again.id, again.attempt) == (kept, attempt)
            assert "no dead letter: update or delete on table" in str(again.error)
            assert dead(session) == [other]

    @pytest.mark.shared_database(False)
    @pytest.mark.parametrize("is_trigger", [False, True], ids=["key", "trigger"])
    def test_one_whose_death_others_forbid_in_the_end(self, engine: Engine, session: Session, is_trigger: bool) -> None:
        """What refers to what refers to it, or a trigger there, both of them at the commit: the queue goes on."""
        stop_clock(engine, at := clock(session))
        kept, other = put(session, "acme", max_attempts=1) + put(session, "globex", max_attempts=1)
        on_delete = "bigint REFERENCES fairqueue.message ON DELETE CASCADE"
        sql(session, f"CREATE TABLE public.document (id int PRIMARY KEY, message_id {on_delete})")
        sql(session, "INSERT INTO public.document VALUES (1, :id)", id=kept)
        if is_trigger:
            body = "$$ BEGIN RAISE 'update or delete on table is forbidden'; END $$"
            sql(session, f"CREATE FUNCTION public.forbid() RETURNS trigger LANGUAGE plpgsql AS {body}")
            events = "AFTER DELETE ON public.document DEFERRABLE INITIALLY DEFERRED"
            sql(session, f"CREATE CONSTRAINT TRIGGER forbidden {events} FOR EACH ROW EXECUTE FUNCTION public.forbid()")
        else:
            reference = "int REFERENCES public.document DEFERRABLE INITIALLY DEFERRED"
            sql(session, f"CREATE TABLE public.page (document_id {reference})")
            sql(session, "INSERT INTO public.page VALUES (1)")
        expire(session, [message.id for message in lease_of(session, 2)])
        assert lease_of(session, 2) == []
        move_clock(session, at + 1000)
        (again,) = lease_of(session, 2)
        assert again.id == kept
        assert "no dead letter: update or delete on table" in str(again.error)
        assert dead(session) == [other]

    @pytest.mark.shared_database(False)
    def test_one_that_would_have_to_wait(self, engine: Engine, session: Session, raw: Raw, database_url: str) -> None:
        """Somebody works on what refers to it: the dequeue doesn't wait for him for long, and others do die."""
        stop_clock(engine, at := clock(session))
        session.execute(text("SET statement_timeout = '20s'"))
        kept, other = put(session, "acme", max_attempts=1) + put(session, "globex", max_attempts=1)
        reference = "bigint REFERENCES fairqueue.message ON DELETE SET NULL"
        sql(session, f"CREATE TABLE public.invoice (message_id {reference})")
        sql(session, "INSERT INTO public.invoice VALUES (:id)", id=kept)
        expire(session, [message.id for message in lease_of(session, 2)])
        accounting = raw(database_url)
        accounting.execute("SELECT FROM public.invoice FOR UPDATE")
        assert lease_of(session, 2) == []
        move_clock(session, at + 1000)
        (again,) = lease_of(session, 2)
        assert again.id == kept
        assert "no dead letter: canceling statement due to lock timeout" in str(again.error)
        assert dead(session) == [other]
        accounting.rollback()
        expire(session, [kept])
        assert lease_of(session, 2) == []
        assert dead(session) == [kept, other]

    @pytest.mark.shared_database(False)
    def test_what_is_deferred_stays_so(self, session: Session) -> None:
        """In the transaction of a dequeue that has looked whether a foreign key forbids a death."""
        reference = "bigint REFERENCES fairqueue.message DEFERRABLE INITIALLY DEFERRED"
        sql(session, f"CREATE TABLE public.invoice (message_id {reference})")
        (id_,) = put(session, "acme", max_attempts=1)
        expire(session, [message.id for message in lease_of(session)])
        assert session.scalars(fq.dequeue()).all() == []
        assert session.scalars(select(fq.DeadMessage.id)).all() == [id_]
        session.execute(text("INSERT INTO public.invoice VALUES (:id)"), {"id": id_ + 1})
        (new,) = fq.enqueue_many(session, [{"channel": "acme"}])
        session.commit()
        assert new == id_ + 1

    @pytest.mark.shared_database(False)
    def test_where_the_owner_may_not_use_what_refers_to_it(self, session: Session) -> None:
        """A schema of somebody else's, whose constraints it can't name."""
        role = f'"{session.scalar(text("SELECT current_database()"))} owner"'
        sql(session, "CREATE SCHEMA hidden")
        sql(session, "CREATE TABLE hidden.invoice (message_id bigint REFERENCES fairqueue.message DEFERRABLE)")
        sql(session, f"CREATE ROLE {role}")
        try:
            sql(session, f"GRANT USAGE ON SCHEMA fairqueue TO {role}")
            for kind in ("TABLES", "SEQUENCES", "FUNCTIONS"):
                sql(session, f"GRANT ALL ON ALL {kind} IN SCHEMA fairqueue TO {role}")
            sql(session, f"ALTER FUNCTION fairqueue.message_dequeue OWNER TO {role}")
            ids = put(session, "acme", max_attempts=1)
            expire(session, [message.id for message in lease_of(session)])
            assert lease_of(session) == []
            assert dead(session) == ids
        finally:
            session.rollback()
            sql(session, f"REASSIGN OWNED BY {role} TO CURRENT_USER")
            sql(session, f"DROP OWNED BY {role}")
            sql(session, f"DROP ROLE {role}")

    def test_id_that_is_taken(self, session: Session) -> None:
        """Who chooses ids himself can't make calls fail for everybody: what puts back, nor a second death of one id."""
        (id_,) = kill(session, "acme")
        insert = (
            "INSERT INTO fairqueue.message (id, channel, max_attempts) OVERRIDING SYSTEM VALUE VALUES (:id, 'acme', 1)"
        )
        sql(session, insert, id=id_)
        assert results(session, fq.redrive(queue="default")) == [(id_, "duplicate")]
        assert results(session, fq.fail(lease_of(session), "again")) == [(id_, "dead")]
        assert session.get_one(fq.DeadMessage, id_).error == "broken"


class TestRedrive:
    def test_one_some_or_all(self, session: Session) -> None:
        acme, globex = kill(session, "acme", 3), kill(session, "globex", 2)
        other = kill(session, "acme", 2, queue="other")
        assert results(session, fq.redrive(acme[1])) == redriven([acme[1]])
        letters = [session.get_one(fq.DeadMessage, id_) for id_ in (globex[1], acme[0])]
        assert results(session, fq.redrive(letters)) == redriven([globex[1], acme[0]])
        assert results(session, fq.redrive([acme[0], -1, acme[2], acme[2]])) == [
            *((acme[0], "not_found"), (-1, "not_found"), (acme[2], "redriven"), (acme[2], "redriven")),
        ]
        more = kill(session, "acme", 2)  # and those of above that were redriven, with them
        assert results(session, fq.redrive(queue="default", channel="acme")) == redriven(sorted([*acme, *more]))
        assert dead(session) == [*globex, *other]
        assert results(session, fq.redrive(queue="default")) == redriven(globex)
        assert results(session, fq.redrive(queue="default")) == []
        assert dead(session) == other
        assert results(session, fq.redrive([])) == []

    def test_all_attempts_anew(self, session: Session) -> None:
        """It goes on as it was, in its place in the rotation, with as many attempts as at first."""
        (id_,) = put(session, "acme", payload=7, key="k", max_attempts=2)
        sql(session, "UPDATE fairqueue.message SET state = '[1]'")
        for round_ in range(3):
            for attempt in (1, 2):
                (message,) = lease_of(session)
                assert (message.attempt, message.forgiven) == (2 * round_ + attempt, 2 * round_)
                assert (message.payload, message.state, message.key) == (7, [1], "k")
                assert message.error == (None if round_ == 0 and attempt == 1 else "broken")
                told = "failed" if attempt == 1 else "dead"
                assert results(session, fq.fail(message, "broken", delay=0)) == [(id_, told)]
            assert take(session) == []
            assert results(session, fq.redrive(id_)) == redriven([id_])
        assert [message.id for message in drain(session)] == [id_]

    def test_backoff_anew(self, engine: Engine, session: Session) -> None:
        at = clock(session)
        stop_clock(engine, at)
        (id_,) = kill(session, "acme", backoff=100)
        sql(session, "UPDATE fairqueue.dead_message SET attempt = 9, max_attempts = 20")
        move_clock(session, at + 5000)
        session.execute(fq.redrive(id_))
        message = session.get_one(fq.Message, id_)
        assert message.dequeue_at == at + 5000
        assert results(session, fq.fail(lease_of(session))) == [(id_, "failed")]
        session.refresh(message)
        assert at + 5000 + 50_000 <= message.dequeue_at <= at + 5000 + 100_000

    @pytest.mark.parametrize("verb", ["complete", "fail", "defer", "heartbeat"])
    def test_fence(self, session: Session, verb: str) -> None:
        """Who still works on an old lease is refused, whether the message is ready again or leased again."""
        put(session, "acme", max_attempts=1)
        (late,) = lease_of(session)
        session.execute(fq.fail(late))
        session.execute(fq.redrive(late.id))
        session.commit()
        assert results(session, getattr(fq, verb)(late)) == [(late.id, "stale")]
        (again,) = lease_of(session)
        assert results(session, getattr(fq, verb)(late)) == [(late.id, "stale")]
        assert results(session, fq.complete(again)) == [(late.id, "completed")]

    def test_key_that_is_taken(self, session: Session) -> None:
        """It stays dead until the live one is gone; the others of the call go back."""
        first, second = kill(session, "acme", key="k")[0], kill(session, "acme", key="k")[0]
        (third,) = kill(session, "globex", key="k")
        assert results(session, fq.redrive(queue="default")) == [
            *((first, "redriven"), (second, "duplicate"), (third, "redriven")),
        ]
        assert dead(session) == [second]
        session.execute(fq.complete(lease_of(session, 9)))
        assert results(session, fq.redrive(second)) == redriven([second])

    def test_rolls_back(self, session: Session) -> None:
        (id_,) = kill(session, "acme")
        session.execute(fq.redrive(id_))
        session.rollback()
        assert dead(session) == [id_]
        assert take(session) == []

    def test_deletes_nothing_that_it_did_not_put_back(self, session: Session) -> None:
        """Each dead letter is afterwards in exactly one of the two tables."""
        ids = kill(session, "acme", 50)
        sql(session, "UPDATE fairqueue.dead_message SET key = 'k' || id % 10")
        told = dict(results(session, fq.redrive(ids)))
        assert list(told.values()).count("redriven") == 10
        live = set(session.scalars(select(fq.Message.id)))
        assert live == {id_ for id_, result in told.items() if result == "redriven"}
        assert set(dead(session)) == set(ids) - live


class TestConcurrentRedrives:
    QUERY = b"SELECT id, result FROM fairqueue.message_redrive(%s)"

    @pytest.mark.parametrize(
        ("finish", "told"), [(psycopg.Connection.commit, "not_found"), (psycopg.Connection.rollback, "redriven")]
    )
    def test_of_the_same(
        self,
        session: Session,
        raw: Raw,
        database_url: str,
        finish: Callable[[psycopg.Connection], None],
        told: str,
    ) -> None:
        """The second waits for the first, before it locks any other, and puts back what that one did not."""
        ids = kill(session, "acme", 50)
        one, two, watching = raw(database_url), raw(database_url), observer(raw, database_url)
        one.execute(self.QUERY, (ids[:2],))
        with ThreadPoolExecutor(1) as pool:
            # In the opposite order, which is not the one in which they are locked.
            second = pool.submit(lambda: two.execute(self.QUERY, (ids[::-1],)).fetchall())
            wait_until(lambda: waits_for_a_lock(watching, two))
            other = impatient(raw, database_url)
            other.execute("SELECT FROM fairqueue.dead_message WHERE id = ANY (%s) FOR UPDATE", (ids[2:],))
            other.rollback()
            finish(one)
            assert second.result() == [*redriven(ids[:1:-1]), (ids[1], told), (ids[0], told)]
        two.commit()
        assert value(watching, "SELECT count(*) FROM fairqueue.message") == 50
        assert dead(session) == []

    @pytest.mark.parametrize("names", [("aab", "aaa"), ("aca", "abb"), ("caa", "bbb")])
    def test_beside_enqueues(self, session: Session, raw: Raw, database_url: str, names: tuple[str, str]) -> None:
        """Keys are entered in their order, as by who enqueues many: one that waits for the second has not yet taken
        the first.

        Each is named by a letter for its queue, channel and key.
        """
        ids = [id_ for queue, channel, key in map(tuple, names) for id_ in kill(session, channel, queue=queue, key=key)]
        create = b"SELECT fairqueue.message_create(queue => %s, channel => %s, key => %s)"
        one, two, watching = raw(database_url), raw(database_url), observer(raw, database_url)
        one.execute(create, list(names[1]))
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(lambda: two.execute(self.QUERY, (ids,)).fetchall())
            wait_until(lambda: waits_for_a_lock(watching, two) or future.done())
            assert not future.done()
            other = impatient(raw, database_url)
            other.execute(create, list(names[0]))
            other.rollback()
            one.rollback()
            assert future.result() == redriven(ids)

    def test_races(self, session: Session, raw: Raw, database_url: str) -> None:
        """Of overlapping calls in all orders each message is put back by one, and nobody deadlocks."""
        ids = kill(session, "acme", 120)
        connections = [raw(database_url) for _ in range(6)]

        def race(number: int) -> list[int]:
            back: list[int] = []
            for start in range(0, 120, 20):
                some = ids[start : start + 40]
                with connections[number].transaction():
                    told = connections[number].execute(self.QUERY, (some if number % 2 else some[::-1],)).fetchall()
                back += [id_ for id_, result in told if result == "redriven"]
            return back

        with ThreadPoolExecutor(6) as pool:
            back = [id_ for each in pool.map(race, range(6)) for id_ in each]
        assert sorted(back) == ids
        assert [message.id for message in lease_of(session, 1000)] == ids
