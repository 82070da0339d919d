"""Messages that are for later: each in its time, and what their channels owe until then."""

from collections import Counter

import pytest
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import clock, lease_of, move_clock, put, take, wait_until
from tests.invariants import check_invariants
from tests.limiting import NOW

pytestmark = pytest.mark.shared_database


def test_a_message_is_never_served_before_its_time(session: Session) -> None:
    now = clock(session)
    later, sooner = now + 300, now + 150
    put(session, "a", 1, dequeue_at=later)
    put(session, "a", 1, dequeue_at=sooner)
    put(session, "b", 1, dequeue_at=sooner)
    put(session, "never", 1, dequeue_at=now + 86_400_000)
    served: list[fq.LeasedMessage] = []

    def all_served() -> bool:
        for message in lease_of(session, 10):
            assert message.dequeue_at <= clock(session)
            served.append(message)
        check_invariants(session.connection())
        return len(served) == 3

    wait_until(all_served)
    assert [message.dequeue_at for message in served] == [sooner, sooner, later]
    assert take(session, 10) == []


@pytest.mark.usefixtures("clock_that_stands")
def test_channels_whose_messages_are_for_later_come_each_in_its_time(session: Session) -> None:
    for number in range(4):
        put(session, f"c{number}", dequeue_at=NOW + number)
    for number in range(4):
        move_clock(session, NOW + number)
        assert take(session, 9) == [f"c{number}"]
    # Of two whose time came between two dequeues, the one whose time it was first.
    put(session, "second", dequeue_at=NOW + 10)
    put(session, "first", dequeue_at=NOW + 9)
    assert take(session) == []
    move_clock(session, NOW + 10)
    assert take(session, 2) == ["first", "second"]


def test_a_message_that_is_for_later_doesn_t_hide_one_that_is_ready(session: Session) -> None:
    later = clock(session) + 86_400_000
    put(session, "a", 1, dequeue_at=later)
    assert take(session) == []
    put(session, "a", 2)
    assert take(session, 10) == ["a", "a"]
    put(session, "a", 1, dequeue_at=later - 1)
    assert take(session, 10) == []
    put(session, "a", 1, priority=1)
    assert take(session, 10) == ["a"]
    check_invariants(session.connection())


@pytest.mark.usefixtures("clock_that_stands")
def test_a_channel_whose_messages_are_for_later_still_owes_what_it_has_had(session: Session) -> None:
    put(session, "owes", 1, cost=10)
    put(session, "owes", 10, dequeue_at=NOW + 1)
    put(session, "busy", 100)
    assert sorted(take(session, 2)) == ["busy", "owes"]
    move_clock(session, NOW + 1)
    assert take(session, 9) == ["busy"] * 9
    assert Counter(take(session, 10)) == {"busy": 5, "owes": 5}
