"""Transactions that commit in another order than they wrote, and users who edit rows: nothing is ever stranded."""

from collections.abc import Callable

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import TIDY, clock, drain, expire, lease_of, put, sql, take
from tests.invariants import check_invariants

pytestmark = pytest.mark.shared_database


def insert(connection: psycopg.Connection, channel: str, at: int | None = None) -> int:
    row = connection.execute(
        "INSERT INTO fairqueue.message (channel, dequeue_at)"
        " VALUES (%s, coalesce(%s, fairqueue.unix_ms(clock_timestamp()))) RETURNING id",
        (channel, at),
    ).fetchone()
    assert row is not None
    return int(row[0])


# What happens while a transaction that has enqueued to channel a stays open.


def nothing(session: Session) -> None:
    pass


def a_dequeue_finds_nothing(session: Session) -> None:
    assert take(session) == []


def others_are_ahead(session: Session) -> None:
    put(session, "a", 3)
    assert take(session) == ["a"]


def the_channel_is_drained(session: Session) -> None:
    put(session, "a", 3)
    assert take(session, 10) == ["a"] * 3


def the_channel_is_drained_one_by_one(session: Session) -> None:
    put(session, "a", 3)
    assert len(drain(session)) == 3


def the_lane_is_forgotten(session: Session) -> None:
    put(session, "a", 1)
    assert take(session, 9) == ["a"]
    put(session, "b", 201)
    assert len(take(session, 200)) == 200
    sql(session, TIDY)
    assert take(session) == ["b"]
    assert session.scalar(text("SELECT count(*) FROM fairqueue.lane WHERE channel = 'a'")) == 0


def the_channel_waits(session: Session) -> None:
    put(session, "a", 1, dequeue_at=clock(session) + 86_400_000)
    assert take(session) == []


def many_transactions_pass(session: Session) -> None:
    for number in range(70):
        put(session, f"other{number % 3}", 1)
        take(session, 2)


def its_neighbours_are_cancelled(session: Session) -> None:
    ids = put(session, "a", 3)
    take(session)
    session.execute(fq.cancel(ids))
    session.commit()
    take(session)


def a_lease_runs_out(session: Session) -> None:
    put(session, "a", 1)
    (message,) = lease_of(session)
    expire(session, [message.id])
    assert take(session) == ["a"]


def nothing_but_a_policy_comes(session: Session) -> None:
    take(session)
    session.merge(fq.Channel("b", weight=2))
    session.commit()
    take(session)


MEANWHILE = [
    nothing,
    a_dequeue_finds_nothing,
    others_are_ahead,
    the_channel_is_drained,
    the_channel_is_drained_one_by_one,
    the_lane_is_forgotten,
    the_channel_waits,
    many_transactions_pass,
    its_neighbours_are_cancelled,
    a_lease_runs_out,
    nothing_but_a_policy_comes,
]
Meanwhile = Callable[[Session], None]


def check_served(session: Session, ids: list[int]) -> None:
    """The next dequeue serves these, in the order of the channel."""
    batch = [message for message in lease_of(session, 1000) if message.channel == "a"]
    assert set(ids) <= {message.id for message in batch}
    assert [message.id for message in batch] == [m.id for m in sorted(batch, key=lambda m: (m.dequeue_at, m.id))]
    check_invariants(session.connection())


@pytest.mark.parametrize("meanwhile", MEANWHILE)
@pytest.mark.parametrize("at", [None, -5], ids=["now", "urgent"])
def test_a_late_commit(session: Session, other: psycopg.Connection, meanwhile: Meanwhile, at: int | None) -> None:
    late = insert(other, "a", at)
    meanwhile(session)
    other.commit()
    check_served(session, [late])


@pytest.mark.parametrize("limit", [1, 100])
def test_a_late_commit_beside_a_full_fold(session: Session, other: psycopg.Connection, limit: int) -> None:
    """The last of the signals taken in is the dequeue's own, and the transaction that is open the newest but that."""
    put(session, "b", 64 + 4 * limit)
    expire(session, [message.id for message in lease_of(session, 1000)])
    late = insert(other, "a")
    assert take(session, limit) == ["b"] * limit
    other.commit()
    check_served(session, [late])


@pytest.mark.parametrize("limit", [1, 100])
def test_a_late_commit_beside_a_full_fold_of_its_own(session: Session, other: psycopg.Connection, limit: int) -> None:
    """What was enqueued in the transaction that dequeues."""
    take(session)
    late = insert(other, "a")
    for _ in range(64 + 4 * limit):
        session.execute(text("INSERT INTO fairqueue.message (channel) VALUES ('b')"))
    assert len(list(session.scalars(fq.dequeue(limit=limit)))) == limit
    session.commit()
    other.commit()
    check_served(session, [late])


@pytest.mark.parametrize("meanwhile", MEANWHILE)
def test_a_late_commit_to_a_known_channel(session: Session, other: psycopg.Connection, meanwhile: Meanwhile) -> None:
    put(session, "a", 2)
    take(session, 2)
    late = insert(other, "a", -5)
    meanwhile(session)
    other.commit()
    check_served(session, [late])


@pytest.mark.parametrize("meanwhile", MEANWHILE)
def test_an_old_transaction_that_enqueues_again_and_again(
    session: Session, other: psycopg.Connection, meanwhile: Meanwhile
) -> None:
    """Its transaction id is older than what dequeues have read by then."""
    other.execute("SELECT pg_current_xact_id()")
    meanwhile(session)
    ids = [insert(other, "a")]
    take(session)
    ids.append(insert(other, "a", -1))
    put(session, "a", 1)
    drain(session)
    other.commit()
    check_served(session, ids)


@pytest.mark.parametrize("meanwhile", MEANWHILE)
def test_savepoints(session: Session, other: psycopg.Connection, meanwhile: Meanwhile) -> None:
    other.execute("SAVEPOINT kept")
    ids = [insert(other, "a")]
    other.execute("RELEASE kept")
    meanwhile(session)
    other.execute("SAVEPOINT undone")
    lost = insert(other, "a", -7)
    other.execute("ROLLBACK TO undone")
    other.execute("SAVEPOINT kept")
    ids.append(insert(other, "a", -6))
    other.commit()
    batch = drain(session, 50)
    assert set(ids) <= {message.id for message in batch}
    assert lost not in {message.id for message in batch}
    check_invariants(session.connection())


@pytest.mark.parametrize("meanwhile", MEANWHILE)
def test_a_transaction_that_enqueues_dequeues_and_enqueues_again(
    session: Session, other: psycopg.Connection, meanwhile: Meanwhile
) -> None:
    """Its own dequeue reads its own news, and those that come after are read by the next."""
    first = insert(other, "a", -3)
    meanwhile(session)
    put(session, "z", 1)  # a younger transaction
    drain(session)
    got = other.execute("SELECT id FROM fairqueue.message_dequeue('default', 5)").fetchall()
    assert got == [(first,)]
    second = insert(other, "a", -4)
    other.commit()
    check_served(session, [second])


def test_a_transaction_that_enqueues_after_a_policy_was_news(session: Session, other: psycopg.Connection) -> None:
    """Of a younger transaction, which its own dequeue takes in."""
    put(session, "a", 1)
    take(session)
    other.execute("SELECT pg_current_xact_id()")
    session.merge(fq.Channel("b", weight=2))
    session.commit()
    assert other.execute("SELECT id FROM fairqueue.message_dequeue('default', 5)").fetchall() == []
    late = insert(other, "a")
    other.commit()
    check_served(session, [late])


def test_a_transaction_that_pauses_after_a_message_was_news(session: Session, other: psycopg.Connection) -> None:
    put(session, "a", 1)
    take(session)
    other.execute("SELECT pg_current_xact_id()")
    ids = put(session, "a", 2)
    assert other.execute("SELECT id FROM fairqueue.message_dequeue('default', 1)").fetchall() == [(ids[0],)]
    other.execute("SELECT fairqueue.channel_set('a', paused => true)")
    other.commit()
    assert take(session) == []
    check_invariants(session.connection())


@pytest.mark.parametrize("undo", ["ROLLBACK TO before", "ROLLBACK"])
def test_a_dequeue_that_is_rolled_back_has_not_happened(session: Session, other: psycopg.Connection, undo: str) -> None:
    """The whole transaction, or back to a savepoint."""
    ids = put(session, "a", 2)
    other.execute("SAVEPOINT before")
    assert len(other.execute("SELECT * FROM fairqueue.message_dequeue('default', 9)").fetchall()) == 2
    other.execute(undo.encode())
    check_served(session, ids)


# Users edit rows


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
@pytest.mark.parametrize(
    "edit",
    [
        "SELECT FROM fairqueue.message WHERE id = %s FOR UPDATE",
        "UPDATE fairqueue.message SET payload = '{}' WHERE id = %s",
        "UPDATE fairqueue.message SET dequeue_at = -1 WHERE id = %s",
        "UPDATE fairqueue.message SET channel = 'b' WHERE id = %s",
    ],
)
def test_a_message_under_an_open_edit_is_passed_over(
    session: Session, other: psycopg.Connection, edit: str, end: str
) -> None:
    locked, *rest = put(session, "a", 3)
    other.execute(edit.encode(), (locked,))
    assert [message.id for message in lease_of(session, 10)] == rest
    for _ in range(5):
        assert take(session, 10) == []
    other.execute(end.encode())
    assert [message.id for message in lease_of(session, 10)] == [locked]
    check_invariants(session.connection())


@pytest.mark.parametrize("known", [False, True])
def test_an_edit_that_commits_between_dequeues(session: Session, known: bool) -> None:
    """Moved to the front, to the end, to tomorrow, to another channel; deleted."""
    first, front, end, tomorrow, elsewhere, deleted = put(session, "a", 6)
    if known:
        put(session, "a", 1, priority=1)
        take(session)
    now = clock(session)
    for id_, change in [
        (front, "dequeue_at = -9"),
        (end, f"dequeue_at = {now}"),
        (tomorrow, f"dequeue_at = {now + 86_400_000}"),
        (elsewhere, "channel = 'b'"),
    ]:
        sql(session, f"UPDATE fairqueue.message SET {change} WHERE id = {id_}")
    session.delete(session.get_one(fq.Message, deleted))
    session.commit()
    served = [message.id for message in drain(session)]
    assert sorted(served) == sorted([first, front, end, elsewhere])
    assert [id_ for id_ in served if id_ != elsewhere] == [front, first, end]
    check_invariants(session.connection())


def test_two_channels_that_one_message_made_active(session: Session) -> None:
    """A message that was moved between channels doesn't tie them together."""
    (first, *_) = put(session, "a", 5)
    (message,) = lease_of(session)
    assert message.id == first
    session.execute(fq.fail(message, delay=0))
    session.commit()
    put(session, "c", 3)
    sql(session, "UPDATE fairqueue.message SET channel = 'b' WHERE id = :id", id=first)
    put(session, "b", 5)
    assert len(drain(session, 4)) == 13
    check_invariants(session.connection())


def test_a_channel_that_was_emptied_hides_no_other(session: Session) -> None:
    """Cancelling one tenant's messages leaves everybody else's in their places."""
    put(session, "a", 3)
    gone = put(session, "b", 3)
    put(session, "c", 3)
    assert take(session, 3) == ["a", "b", "c"]
    session.execute(fq.cancel(gone))
    session.commit()
    assert take(session, 2) == ["a", "c"]
    assert take(session, 2) == ["a", "c"]
    check_invariants(session.connection())


@pytest.mark.parametrize("dequeued", [0, 5])
def test_truncating_the_messages(session: Session, dequeued: int) -> None:
    for number in range(30):
        put(session, f"c{number}", 2)
    take(session, dequeued or 1)
    sql(session, "TRUNCATE fairqueue.message")
    assert take(session, 10) == []
    put(session, "c7", 2)
    put(session, "new", 1)
    assert sorted(take(session, 10)) == ["c7", "c7", "new"]
    check_invariants(session.connection())
