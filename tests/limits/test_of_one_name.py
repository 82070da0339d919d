"""Two queues have channels of one name: neither's limits, nor what counts toward them, are the other's."""

import pytest
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import complete, lease_of, put, take
from tests.limiting import LEASE

pytestmark = pytest.mark.shared_database


def put_and_lease(session: Session, queue: str, leased: int) -> list[fq.LeasedMessage]:
    """One by one, so that there are as many turns."""
    put(session, "acme", leased + 10, queue=queue)
    return [message for _ in range(leased) for message in lease_of(session, 1, LEASE, queue)]


def limit(session: Session, queue: str, at: int | None) -> None:
    session.merge(fq.Channel("acme", queue=queue, max_concurrency=at))
    session.commit()


@pytest.mark.parametrize("limited", [False, True])
def test_what_runs_in_the_other_queue_counts_there(session: Session, limited: bool) -> None:
    """With a limit of the queue, whose turns number what it has counted; and without one."""
    if limited:
        for queue in ("a", "b"):
            session.add(fq.Queue(queue, max_concurrency=50))
        session.commit()
    running = put_and_lease(session, "b", 20)
    put_and_lease(session, "a", 2)
    complete(session, running[:1])  # of which b hasn't heard yet
    limit(session, "a", 3)
    assert take(session, 10, LEASE, "a") == ["acme"]
    assert fq.check(session) == []
    session.commit()
    assert len(take(session, 100, LEASE, "b")) == 10
    assert fq.check(session) == []


@pytest.mark.parametrize(("queue", "elsewhere"), [("a", "b"), ("b", "a")])
def test_whether_there_is_a_limit(session: Session, queue: str, elsewhere: str) -> None:
    limit(session, elsewhere, None)
    put_and_lease(session, queue, 2)
    limit(session, queue, 2)
    assert take(session, 10, LEASE, queue) == []
    assert fq.check(session) == []
    session.commit()
    limit(session, queue, 3)
    assert take(session, 10, LEASE, queue) == ["acme"]
    assert fq.check(session) == []
