"""What marks a lease as counted counts once, whatever a user does with the lease."""

import pytest
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import expire, put, sql
from tests.invariants import check_invariants
from tests.limiting import LEASE, NOW, leases, limit, serve

pytestmark = [pytest.mark.usefixtures("clock_that_stands"), pytest.mark.shared_database]


@pytest.mark.parametrize(
    "act", ["DELETE FROM fairqueue.message", "UPDATE fairqueue.message SET payload = '1'"], ids=["delete", "edit"]
)
def test_what_becomes_of_one_whose_lease_a_user_has_ended_makes_no_more_room(session: Session, act: str) -> None:
    """It still bears the mark of the turn that counted it."""
    put(session, "acme", 6)
    limit(session, max_concurrency=2)
    first, _ = leases(session)
    sql(
        session,
        "UPDATE fairqueue.message SET leased_until = NULL, dequeue_at = :later WHERE id = :id",
        later=NOW + LEASE,
        id=first.id,
    )
    sql(session, f"{act} WHERE id = :id", id=first.id)
    assert len(serve(session)) == 1
    assert serve(session) == []
    check_invariants(session.connection())


def test_nor_does_one_to_which_a_user_has_given_a_lease_again(session: Session) -> None:
    put(session, "acme", 3)
    limit(session, max_concurrency=1)
    (first,) = leases(session)
    for lease in ("NULL", "'3000-01-01'"):
        sql(session, f"UPDATE fairqueue.message SET leased_until = {lease} WHERE id = :id", id=first.id)
    assert len(serve(session)) == 1
    assert fq.check(session) == []
    sql(session, "DELETE FROM fairqueue.message WHERE id = :id", id=first.id)
    assert serve(session) == []
    assert fq.check(session) == []


def test_nor_does_one_that_was_copied(session: Session) -> None:
    """With the mark that it bore elsewhere, where there have been more turns."""
    limit(session, max_concurrency=1)
    put(session, "acme", 2)
    assert len(serve(session)) == 1
    sql(
        session,
        "INSERT INTO fairqueue.message (channel, attempt, leased_until, counted)"
        " VALUES ('acme', 1, '3000-01-01', 1000000)",
    )
    sql(session, "DELETE FROM fairqueue.message WHERE leased_until = '3000-01-01'")
    assert serve(session) == []
    assert fq.check(session) == []


@pytest.mark.shared_database(False)
def test_nor_does_one_that_could_not_die(session: Session) -> None:
    """What is put back, as a foreign key keeps it, is counted no more: not even where a user gives it a lease."""
    limit(session, max_concurrency=1)
    put(session, "acme", max_attempts=1)
    (first,) = leases(session)
    sql(session, "CREATE TABLE public.invoice (message_id bigint REFERENCES fairqueue.message)")
    sql(session, "INSERT INTO public.invoice VALUES (:id)", id=first.id)
    others = put(session, "acme", 2, priority=1)
    expire(session, [first.id])
    assert [message.id for message in leases(session)] == others[:1]
    sql(session, "UPDATE fairqueue.message SET leased_until = '3000-01-01' WHERE id = :id", id=first.id)
    assert fq.check(session) == []
    sql(session, "DELETE FROM public.invoice")
    sql(session, "DELETE FROM fairqueue.message WHERE id = :id", id=first.id)
    assert leases(session) == []
    assert fq.check(session) == []
