"""How often a message is tried, and when. The clock stands still, so that times can be compared."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import EPOCH, clock, expire, lease_of, move_clock, put, sql, stop_clock, take
from tests.fixtures.connections import Raw
from tests.limiting import LEASE

pytestmark = pytest.mark.shared_database

MANY = 200


@pytest.fixture
def now(engine: Engine, session: Session) -> int:
    """The time, which stands still, in Unix milliseconds."""
    at = clock(session)
    stop_clock(engine, at)
    return at


def results(session: Session, statement: Any) -> list[tuple[int, str]]:
    told = [(row.id, row.result) for row in session.execute(statement)]
    session.commit()
    return told


def served(session: Session) -> list[int]:
    return [message.id for message in lease_of(session, 10)]


def fail_until_dead(session: Session) -> int:
    """How many attempts that took."""
    for attempt in range(1, 100):
        (message,) = lease_of(session)
        assert message.attempt == attempt
        if results(session, fq.fail(message, delay=0)) == [(message.id, "dead")]:
            return attempt
    raise AssertionError("it lives for ever")


class TestAttempts:
    @pytest.mark.parametrize(
        ("message", "queue", "expected"),
        [(None, None, 20), (3, None, 3), (1, None, 1), (None, 4, 4), (2, 5, 2), (6, 5, 6)],
    )
    def test_how_many(self, session: Session, message: int | None, queue: int | None, expected: int) -> None:
        """The message's own number, else the queue's, else 20."""
        if queue is not None:
            sql(session, "INSERT INTO fairqueue.queue (name, max_attempts) VALUES ('default', :n)", n=queue)
        put(session, "acme", max_attempts=message)
        assert fail_until_dead(session) == expected
        assert take(session) == []

    def test_of_the_queue_change_at_once(self, session: Session) -> None:
        put(session, "acme")
        (message,) = lease_of(session)
        sql(session, "INSERT INTO fairqueue.queue (name, max_attempts) VALUES ('default', 1)")
        assert results(session, fq.fail(message)) == [(message.id, "dead")]

    def test_deferrals_use_up_none(self, session: Session) -> None:
        put(session, "acme", max_attempts=2)
        for number in range(5):
            (message,) = lease_of(session)
            assert (message.attempt, message.forgiven) == (number + 1, number)
            assert results(session, fq.defer(message)) == [(message.id, "deferred")]
        for told in ("failed", "dead"):
            (message,) = lease_of(session)
            assert results(session, fq.fail(message, delay=0)) == [(message.id, told)]

    @pytest.mark.parametrize(("said", "order"), [({}, [1, 0]), ({"delay": None}, [1, 0]), ({"delay": 0}, [0, 1])])
    def test_a_deferral_goes_behind_what_is_ready(self, session: Session, said: Any, order: list[int]) -> None:
        """In its channel; unless it is to keep its place."""
        ids = [put(session, "acme", priority=priority)[0] for priority in (2, 1)]
        (message,) = lease_of(session)
        assert results(session, fq.defer(message, **said)) == [(ids[0], "deferred")]
        assert served(session) == [ids[place] for place in order]

    @pytest.mark.parametrize("empty", [0, False, "", [], {}], ids=repr)
    def test_an_empty_state_is_one(self, session: Session, empty: Any) -> None:
        """None is what leaves the last one."""
        put(session, "acme")
        for saved, found in (("much", "much"), (empty, empty), (None, empty)):
            (message,) = lease_of(session)
            session.execute(fq.defer(message, delay=0, state=saved))
            stored = session.scalars(select(fq.Message.state)).one()
            assert (type(stored), stored) == (type(found), found)
            session.commit()

    def test_lease_that_ran_out_uses_up_one(self, session: Session) -> None:
        """A message that kills its workers doesn't go on doing so for ever."""
        put(session, "acme", max_attempts=3, backoff=0)
        for attempt in (1, 2, 3):
            (message,) = lease_of(session)
            assert message.attempt == attempt
            expire(session, [message.id])
        assert take(session) == []
        dead = session.scalars(select(fq.DeadMessage)).one()
        assert (dead.id, dead.attempt) == (message.id, 3)
        assert "ran out" in str(dead.error)

    @pytest.mark.parametrize(("attempt", "is_dead"), [(19, False), (20, True)])
    def test_leases_that_ran_out_as_often_as_by_default(self, session: Session, attempt: int, is_dead: bool) -> None:
        """Of a queue that has no policy."""
        put(session, "acme", backoff=0)
        (message,) = lease_of(session)
        sql(session, "UPDATE fairqueue.message SET attempt = :n", n=attempt)
        expire(session, [message.id])
        assert take(session) == ([] if is_dead else ["acme"])
        assert session.query(fq.DeadMessage).count() == is_dead

    def test_no_retry(self, session: Session) -> None:
        put(session, "acme")
        (message,) = lease_of(session)
        assert results(session, fq.fail(message, "hopeless", retry=False)) == [(message.id, "dead")]

    def test_some_of_a_batch(self, session: Session) -> None:
        """In the order given, each its own result, the same lease twice the same."""
        put(session, "acme", 2, max_attempts=1)
        put(session, "acme", 2)
        last, gone, again, other = lease_of(session, 4)
        session.execute(fq.complete(gone))
        given = [(other.id, 1), (last.id, 1), (gone.id, 1), (last.id, 1), (last.id, 7), (again.id, 7), (again.id, 1)]
        assert [result for _, result in results(session, fq.fail(given))] == [
            *("failed", "dead", "not_found", "dead", "not_found", "stale", "failed")
        ]


def delays(session: Session, now: int, **fields: Any) -> list[float]:
    """After how many seconds each of many messages is to be tried again, in order; all of them failed together."""
    before = {name: fields.pop(name) for name in ("attempt", "forgiven") if name in fields}
    put(session, "acme", MANY, **fields)
    for name, number in before.items():
        sql(session, f"UPDATE fairqueue.message SET {name} = {number}")
    batch = lease_of(session, MANY)
    assert {result for _, result in results(session, fq.fail(batch))} == {"failed"}
    return sorted((at - now) / 1000 for at in session.scalars(text("SELECT dequeue_at FROM fairqueue.message")))


class TestBackoff:
    @pytest.mark.parametrize(
        ("fields", "queue", "seconds"),
        [
            ({}, None, 1),
            ({"attempt": 3}, None, 8),
            ({"attempt": 3, "forgiven": 2}, None, 2),
            ({"attempt": 12}, None, 3600),
            ({"attempt": 2_147_483_646, "forgiven": 2_147_000_000}, None, 3600),
            ({"attempt": 3, "forgiven": 2_000_000_000}, None, 1),
            ({"backoff": 0.5, "attempt": 1}, None, 1),
            ({"backoff": 31_557_600, "attempt": 2_000_000, "forgiven": -2_000_000_000}, None, 3600),
            ({}, (10, 60), 10),
            ({"attempt": 2}, (10, 60), 40),
            ({"attempt": 3}, (10, 60), 60),
            ({"backoff": 2, "attempt": 2}, (10, 60), 8),
            ({"backoff": 100}, (10, 60), 60),
            ({"attempt": 19}, (100, 31_557_600), 31_557_600),
        ],
    )
    def test_doubles_up_to_a_bound_and_is_spread(
        self, session: Session, now: int, fields: dict[str, Any], queue: tuple[float, float] | None, seconds: float
    ) -> None:
        """Between half of it and all of it, and anywhere there."""
        if queue is not None:
            insert = "INSERT INTO fairqueue.queue (name, backoff, max_backoff) VALUES ('default', :backoff, :most)"
            sql(session, insert, backoff=queue[0], most=queue[1])
        found = delays(session, now, max_attempts=2_147_483_647, **fields)
        assert seconds / 2 - 0.001 <= found[0] < 0.6 * seconds
        assert 0.9 * seconds < found[-1] <= seconds
        assert 0.65 * seconds < sum(found) / MANY < 0.85 * seconds

    def test_none(self, session: Session, now: int) -> None:
        """A backoff of 0 is no delay, and leaves the message its place."""
        put(session, "acme", 2, backoff=0)
        (message,) = lease_of(session)
        move_clock(session, now + 1000)
        results(session, fq.fail(message))
        assert [again.id for again in lease_of(session)] == [message.id]

    def test_is_waited_for(self, session: Session, now: int) -> None:
        put(session, "acme", backoff=100)
        (message,) = lease_of(session)
        results(session, fq.fail(message))
        for later, served in ((49_000, []), (100_000, ["acme"])):
            move_clock(session, now + later)
            assert take(session) == served

    def test_delay_that_is_given(self, session: Session, now: int) -> None:
        """It is what it says; 0 keeps the place."""
        query = text("SELECT dequeue_at FROM fairqueue.message")
        put(session, "acme", dequeue_at=-7, backoff=100)
        for delay, at in ((0, -7), (0.25, now + 250), (86_400, now + 86_400_000)):
            move_clock(session, now)
            sql(session, "UPDATE fairqueue.message SET dequeue_at = -7")
            (message,) = lease_of(session)
            results(session, fq.fail(message, delay=delay))
            assert session.scalar(query) == at

    def test_of_what_was_leased_beside_a_message_that_kills(self, session: Session, now: int) -> None:
        """A lease that ran out says nothing of its message the first time; later ones part it from the others."""
        ids = put(session, "acme", MANY, dequeue_at=-7, backoff=100)
        for attempt in (1, 2):
            batch = lease_of(session, MANY)
            assert [(message.id, message.attempt, message.dequeue_at) for message in batch] == [
                (id_, attempt, -7) for id_ in ids
            ]
            expire(session, ids)
        assert lease_of(session, MANY) == []
        found = [(at - now) / 1000 for at in session.scalars(text("SELECT dequeue_at FROM fairqueue.message"))]
        assert 100 <= min(found) < 120
        assert 180 < max(found) <= 200
        move_clock(session, now + 150_000)
        assert 0 < len(lease_of(session, MANY)) < MANY


def test_whoever_holds_it_when_its_lease_has_run_out(session: Session, now: int, raw: Raw, database_url: str) -> None:
    """However long that takes, it is looked for again within 10 minutes; and the next one is no worse off by that."""
    other = raw(database_url)
    ids = put(session, "acme", 2)
    lease_of(session, 2, LEASE)
    for id_, held, later in zip(ids, (10 * 3_600_000, 0), (600_000, 20), strict=True):
        expire(session, [id_])
        other.execute("SELECT FROM fairqueue.message WHERE id = %s FOR UPDATE", (id_,))
        assert served(session) == []
        move_clock(session, now := now + held)
        assert served(session) == []
        other.rollback()
        move_clock(session, now := now + later)
        assert [message.id for message in lease_of(session, 2, LEASE)] == [id_]


def test_a_lease_is_of_30_seconds(session: Session, now: int) -> None:
    """Where nothing else is said, from a dequeue as from a heartbeat."""
    put(session, "acme")
    message = session.scalars(fq.dequeue()).one()
    assert message.leased_until == EPOCH + timedelta(milliseconds=now + 30_000)
    move_clock(session, now + 10_000)
    session.execute(fq.heartbeat(message))
    assert session.scalar(select(fq.Message.leased_until)) == EPOCH + timedelta(milliseconds=now + 40_000)


class TestLeasesThatUsersSet:
    """Dequeues know the earliest end of a lease; whoever sets one without them tells it."""

    @pytest.fixture
    def leased(self, session: Session) -> tuple[int, int]:
        """Two messages: the first one's lease is long, and is the only one."""
        first, second = put(session, "acme", 2)
        assert [message.id for message in lease_of(session, lease=600)] == [first]
        return first, second

    def test_ended(self, session: Session, leased: tuple[int, int]) -> None:
        """As of a worker that is known to be dead."""
        sql(session, "UPDATE fairqueue.message SET leased_until = fairqueue.clock() WHERE leased_until IS NOT NULL")
        assert [(message.id, message.attempt) for message in lease_of(session, 10)] == [(leased[0], 2), (leased[1], 1)]

    def test_shortened(self, session: Session, now: int, leased: tuple[int, int]) -> None:
        """It ends when it now says, and not before."""
        sql(session, "UPDATE fairqueue.message SET leased_until = leased_until - interval '9 minutes'")
        assert served(session) == [leased[1]]
        move_clock(session, now + 59_000)
        assert served(session) == []
        move_clock(session, now + 61_000)
        assert served(session) == [leased[0]]

    def test_shortened_beside_a_dequeue(self, engine: Engine, session: Session, leased: tuple[int, int]) -> None:
        """The dequeue can't know it yet; the next one does."""
        with Session(engine) as other:
            other.execute(
                text("UPDATE fairqueue.message SET leased_until = '2000-01-01' WHERE id = :id"), {"id": leased[0]}
            )
            assert served(session) == [leased[1]]
            other.commit()
        assert served(session) == [leased[0]]

    def test_shortened_in_the_transaction_of_a_dequeue(self, session: Session, leased: tuple[int, int]) -> None:
        session.execute(text("SELECT FROM fairqueue.message_dequeue()"))
        sql(session, "UPDATE fairqueue.message SET leased_until = '2000-01-01'")
        assert sorted(served(session)) == list(leased)

    def test_given_by_hand(self, session: Session, leased: tuple[int, int]) -> None:
        sql(session, "UPDATE fairqueue.message SET leased_until = '2000-01-01' WHERE leased_until IS NULL")
        assert served(session) == [leased[1]]

    def test_ended_as_another_attempt(self, session: Session, now: int, leased: tuple[int, int]) -> None:
        """So that whoever has it is refused from now on."""
        sql(
            session,
            "UPDATE fairqueue.message SET leased_until = fairqueue.clock(), attempt = attempt + 1"
            " WHERE leased_until IS NOT NULL",
        )
        assert served(session) == [leased[1]]
        assert fq.check(session) == []
        move_clock(session, now + 600_000)  # it was no first attempt, so it waits for its next one
        assert leased[0] in served(session)

    def test_given_by_hand_as_an_attempt(self, session: Session, leased: tuple[int, int]) -> None:
        sql(
            session,
            "UPDATE fairqueue.message SET leased_until = '2000-01-01', attempt = attempt + 1 WHERE id = :id",
            id=leased[1],
        )
        assert [(message.id, message.attempt) for message in lease_of(session, 10)] == [(leased[1], 2)]

    def test_copied(self, session: Session) -> None:
        """With leases that are still good elsewhere, to where nothing was dequeued yet."""
        copied = "INSERT INTO fairqueue.message (channel, attempt, leased_until) VALUES ('acme', 1, :until)"
        for until in ("2000-01-01", "3000-01-01"):
            session.execute(text(copied), {"until": until})
        session.commit()
        assert [message.attempt for message in lease_of(session, 10)] == [2]

    def test_of_another_queue(self, session: Session) -> None:
        """It is for those who dequeue from that one, whose policy it goes by."""
        session.add(fq.Queue("strict", max_attempts=1))
        put(session, "acme", queue="strict")
        (id_,) = put(session, "acme", queue="lenient")
        for queue in ("strict", "lenient"):
            expire(session, [message.id for message in lease_of(session, queue=queue)])
        assert lease_of(session, 10, queue="strict") == []
        assert session.scalars(text("SELECT queue FROM fairqueue.dead_message")).all() == ["strict"]
        session.commit()
        assert [(message.id, message.attempt) for message in lease_of(session, 10, queue="lenient")] == [(id_, 2)]

    def test_copied_into_several_queues(self, session: Session) -> None:
        """By one statement: of each lease its own queue is told, which knows of no earlier one."""
        for queue in ("a", "b"):
            put(session, "acme", queue=queue)
            assert len(lease_of(session, queue=queue)) == 1
        sql(
            session,
            "INSERT INTO fairqueue.message (queue, channel, attempt, leased_until)"
            " VALUES ('a', 'acme', 1, '2000-01-01'), ('b', 'acme', 1, '2000-01-01')",
        )
        assert fq.check(session) == []
        for queue in ("b", "a"):
            assert [message.attempt for message in lease_of(session, 10, queue=queue)] == [2]
        assert fq.check(session) == []
        assert session.scalar(text("SELECT count(*) FROM fairqueue.signal")) == 0
