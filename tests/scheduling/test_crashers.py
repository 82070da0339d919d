"""A tenant whose messages kill every worker that takes them gets no more than its turn, and comes to an end.

The clock stands still but for what the test moves it by, so leases run out when the test says so.
"""

import multiprocessing
import signal
from collections import Counter, defaultdict

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import clock, complete, drain, lease_of, move_clock, put, stop_clock
from tests.faults.crew import context
from tests.faults.place import keep_books
from tests.faults.workers import work_until_killed
from tests.fixtures.connections import Raw
from tests.invariants import check_invariants
from tests.observing import value

CRASHERS, ATTEMPTS = 32, 2
#: By as many real processes; the other crashes differ from these only in that no process is there to die.
KILLED = 4
#: In seconds; each dequeue takes one. An odd number, so that leases run out when it is the other tenant's turn.
LEASE = 21


def kill_workers(url: str) -> None:
    for _ in range(KILLED):
        worker: multiprocessing.Process = context.Process(target=work_until_killed, args=(url, LEASE), daemon=True)
        worker.start()
        worker.join(60)
        assert worker.exitcode == -signal.SIGKILL


@pytest.mark.slow
def test_crashers_take_their_turn_and_no_more(engine: Engine, session: Session, raw: Raw, database_url: str) -> None:
    with engine.begin() as connection:
        keep_books(connection)
    stop_clock(engine, now := clock(session))
    crashers = put(session, "crasher", CRASHERS, max_attempts=ATTEMPTS)
    ready = put(session, "ready", CRASHERS * ATTEMPTS + 300)
    kill_workers(database_url)

    # The same without processes.
    observer = raw(database_url)
    observer.autocommit = True
    end = now + 1000 * (2 * CRASHERS * ATTEMPTS + 2 * LEASE)
    while value(observer, "SELECT count(*) FROM fairqueue.message WHERE channel = 'crasher'"):
        assert now < end, "all are dead by now"
        move_clock(session, now := now + 1000)
        (message,) = lease_of(session, lease=LEASE)
        if message.channel == "ready":
            session.execute(
                text("INSERT INTO public.effect VALUES (:id, :attempt)"), {"id": message.id, "attempt": message.attempt}
            )
            assert complete(session, [message]) == ["completed"]

    leases = session.execute(text("SELECT channel, message_id, attempt FROM public.lease_log ORDER BY seq")).all()
    places = [place for place, lease in enumerate(leases) if lease.channel == "ready"]
    late = [(nth, place) for nth, place in enumerate(places) if place > 2 * nth + 1]
    assert not late, "the other tenant has every second place, at the latest"

    attempts: defaultdict[int, list[int]] = defaultdict(list)
    for lease in leases:
        if lease.channel == "crasher":
            attempts[lease.message_id].append(lease.attempt)
    assert attempts == {id_: list(range(1, ATTEMPTS + 1)) for id_ in crashers}
    dead = session.scalars(select(fq.DeadMessage).order_by(fq.DeadMessage.id)).all()
    assert [(letter.id, letter.attempt) for letter in dead] == [(id_, ATTEMPTS) for id_ in crashers]
    assert {letter.error for letter in dead} == {"the lease of the last attempt ran out"}
    outcomes = session.execute(text("SELECT outcome, count(*) FROM fairqueue.history GROUP BY outcome")).all()
    assert Counter({row.outcome: row.count for row in outcomes}) == {"dead": CRASHERS, "completed": len(places)}
    effects = session.scalars(text("SELECT message_id FROM public.effect ORDER BY message_id")).all()
    assert effects == ready[: len(places)], "what was served has its effect, and what killed its worker has none"

    rest = drain(session, 100)
    assert [message.id for message in rest] == ready[len(places) :]
    assert set(complete(session, rest)) == {"completed"}
    assert lease_of(session, 10) == []
    check_invariants(session.connection())
    assert value(observer, "SELECT count(*) FROM fairqueue.message") == 0
