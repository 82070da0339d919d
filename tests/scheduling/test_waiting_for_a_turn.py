"""A dequeue goes by the time at which its turn has come, however long it has waited for that."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psycopg
import pytest
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import EPOCH, lease_of, move_clock, put, wait_until
from tests.fixtures.connections import Raw
from tests.limiting import NOW
from tests.observing import observer, waits_for_a_lock
from tests.scheduling.taking import dequeue, fill, plan_once

pytestmark = [pytest.mark.usefixtures("clock_that_stands"), pytest.mark.shared_database]

#: What happens while a dequeue waits, by whom it waits for, who commits then. Returns the ids that it got.
Waiting = Callable[[Callable[[psycopg.Connection], object]], list[int]]


@pytest.fixture
def dequeue_that_waits(raw: Raw, database_url: str) -> Waiting:
    holder, worker, watching = raw(database_url), raw(database_url), observer(raw, database_url)

    def run(meanwhile: Callable[[psycopg.Connection], object]) -> list[int]:
        holder.execute("SELECT fairqueue.scheduler_turn('default')")
        with ThreadPoolExecutor(1) as pool:
            serving = pool.submit(dequeue, worker)
            wait_until(lambda: waits_for_a_lock(watching, worker))
            meanwhile(holder)
            holder.commit()
            served = serving.result()
        worker.commit()
        return served

    return run


def nothing_is_planned(session: Session) -> None:
    put(session, "acme", 9)


def much_is_planned(session: Session) -> None:
    """It waits for a share in the turn."""
    fill(session)
    plan_once(session)


@pytest.mark.parametrize("prepare", [nothing_is_planned, much_is_planned])
def test_a_lease_begins_then(session: Session, dequeue_that_waits: Waiting, prepare: Callable[[Session], None]) -> None:
    prepare(session)
    served = dequeue_that_waits(lambda _: move_clock(session, NOW + 5000))
    leases = [session.get_one(fq.Message, id_) for id_ in served]
    assert len(leases) == 3
    assert {lease.leased_at for lease in leases} == {EPOCH + timedelta(milliseconds=NOW + 5000)}


def test_a_release_is_one_of_then(session: Session, dequeue_that_waits: Waiting) -> None:
    """Of what is released meanwhile the next one keeps its distance, also where the clock seems to have gone back."""
    session.add(fq.Channel("acme", release_interval_ms=5000))
    put(session, "acme", 3)

    def meanwhile(holder: psycopg.Connection) -> None:
        move_clock(session, NOW + 5000)
        assert len(dequeue(holder)) == 1

    assert dequeue_that_waits(meanwhile) == []
    for moment, served in ((5000, 0), (9999, 0), (10_000, 1)):
        move_clock(session, NOW + moment)
        assert len(lease_of(session, 3)) == served
