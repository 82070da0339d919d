"""Eight processes do with a queue what they like, without faults and with them: what is promised holds all the time.

`make soak` lets them do so for long. See tests/faults.
"""

import os
import random
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from fairqueue import embedded, schema
from tests.acts import complete, lease_of, put, wait_until
from tests.faults.crew import Crew, Logs, context
from tests.faults.ending import check, drain
from tests.faults.place import CLOCK, keep_books, prepare
from tests.faults.troubles import Troubles, set_clock
from tests.faults.witness import Witness
from tests.faults.workers import work_late
from tests.invariants import check_invariants

SECONDS = float(os.environ.get("FAIRQUEUE_TEST_SECONDS", "4"))


@pytest.fixture
def seed() -> str:
    seed = os.environ.get("FAIRQUEUE_TEST_SEED") or secrets.token_hex(4)
    print(f"FAIRQUEUE_TEST_SEED={seed}")
    return seed


def last_lease(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.scalar(text("SELECT coalesce(max(seq), 0) FROM public.lease_log")) or 0


def end(engine: Engine, logs: Logs, limited_to: int) -> None:
    """All that was committed comes to its end, and to one."""
    drain(engine)
    ends = check(engine, logs, limited_to)
    print(f"{ends}, after {logs.acts}")
    assert ends["completed"]


@pytest.mark.slow
@pytest.mark.soak
def test_random_life(engine: Engine, database_url: str, seed: str, tmp_path: Path) -> None:
    """Enqueueing, working, and editing in any order and at the same time."""
    with engine.begin() as connection:
        prepare(connection)
    witness = Witness(database_url)
    crew = Crew(database_url, seed, SECONDS, tmp_path)
    try:
        while not crew.is_over():
            witness.look()
        end(engine, crew.end(), last_lease(engine))
        witness.look()
    finally:
        crew.kill()
        witness.close()


@pytest.fixture
def own_server() -> Iterator[embedded.Server]:
    """One that may crash."""
    with embedded.ephemeral() as server:
        yield server


@pytest.mark.slow
@pytest.mark.soak
def test_random_life_with_faults(own_server: embedded.Server, seed: str, tmp_path: Path) -> None:
    """The same while processes are killed and stopped, connections end, the server crashes and the clock is set."""
    url = own_server.url()
    engine = create_engine(url)
    with engine.begin() as connection:
        schema.install(connection)
        prepare(connection)
        connection.exec_driver_sql(CLOCK)
    witness = Witness(url)
    crew = Crew(url, seed, SECONDS, tmp_path, faults=True)
    troubles = Troubles(own_server, url, crew, witness, random.Random(seed))  # noqa: S311
    try:
        while troubles.crashes or not crew.is_over():
            troubles.make()
            witness.look()
        troubles.end()
        engine.dispose()
        logs = crew.end()
        limited_to = last_lease(engine)
        set_clock(url, 7200)  # Whatever was to be waited for is over.
        end(engine, logs, limited_to)
        witness.look()
        print(troubles.seen)
        assert troubles.seen.keys() >= {"kill -9", "immediate stop"}
    finally:
        troubles.end()
        crew.kill()
        witness.close()
        engine.dispose()


@pytest.mark.parametrize(("completes_first", "other_completes"), [(True, False), (False, True), (False, False)])
def test_a_worker_that_is_stopped_for_longer_than_its_lease(
    engine: Engine, session: Session, database_url: str, completes_first: bool, other_completes: bool
) -> None:
    """It is refused when it goes on; unless it had completed already, when nobody else gets the message."""
    with engine.begin() as connection:
        keep_books(connection)
    put(session, "acme")
    ours, theirs = context.Pipe()
    worker = context.Process(target=work_late, args=(database_url, 0.05, completes_first, theirs), daemon=True)
    worker.start()
    assert ours.poll(60)
    ours.recv()
    os.kill(worker.pid, signal.SIGSTOP)
    wait_until(lambda: session.scalar(text("SELECT max(leased_until) < clock_timestamp() FROM fairqueue.message")))
    again = lease_of(session)
    assert [message.attempt for message in again] == ([] if completes_first else [2])
    if other_completes and again:
        session.execute(text("INSERT INTO public.effect VALUES (:id, 2)"), {"id": again[0].id})
        assert complete(session, again) == ["completed"]
    ours.send("go on")
    os.kill(worker.pid, signal.SIGCONT)
    assert ours.poll(60)
    refused = "not_found" if other_completes else "stale"
    assert ours.recv() == ("completed" if completes_first else refused,)
    worker.join(60)
    if again and not other_completes:
        session.execute(text("INSERT INTO public.effect VALUES (:id, 2)"), {"id": again[0].id})
        assert complete(session, again) == ["completed"]
    effects = session.scalars(text("SELECT attempt FROM public.effect")).all()
    assert effects == [1 if completes_first else 2]
    check_invariants(session.connection())
