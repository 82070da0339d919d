"""Workers that are killed, stopped and cut off, and a server that crashes: what each message is to do is done once.

`make soak` does so for long. See tests/faults.
"""

import os
import random
import secrets
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

import fairqueue as fq
from fairqueue import embedded, schema
from tests.acts import wait_until
from tests.faults.witness import Witness
from tests.faults.working import Workers, WorkerTroubles
from tests.invariants import check_invariants
from tests.worker.working import add_effects, is_empty

SECONDS = float(os.environ.get("FAIRQUEUE_TEST_SECONDS", "8"))


@pytest.fixture
def own_server() -> Iterator[embedded.Server]:
    """One that may crash."""
    with embedded.ephemeral() as server:
        yield server


def produce(engine: Engine, dice: random.Random) -> None:
    """Some messages, with a note of each in the same transaction; which may be lost with the server."""
    try:
        with Session(engine) as session:
            rows: list[fq.MessageRow] = [{"channel": f"tenant{dice.randrange(8)}"} for _ in range(dice.randint(1, 12))]
            ids = fq.enqueue_many(session, rows)
            session.execute(text("INSERT INTO public.sent VALUES (:id)"), [{"id": id_} for id_ in ids])
            session.commit()
    except DBAPIError:
        pass


def compare(session: Session) -> int:
    """All that was sent has been done, once, and nothing else has. Returns how many."""
    sent = set(session.scalars(text("SELECT message_id FROM public.sent")))
    effects = Counter(session.scalars(text("SELECT message_id FROM public.effect")))
    # A deferral commits what was done until then.
    twice = {id_: 2 for id_ in sent if id_ % 10 == 0}
    assert effects == dict.fromkeys(sent, 1) | twice
    endings = session.execute(text("SELECT message_id, outcome FROM fairqueue.history")).all()
    assert Counter(tuple(row) for row in endings) == {(id_, "completed"): 1 for id_ in sent}
    assert fq.check(session, "default") == []
    check_invariants(session.connection())
    return len(sent)


@pytest.mark.slow
@pytest.mark.soak
def test_workers_with_faults(own_server: embedded.Server, tmp_path: Path) -> None:
    seed = os.environ.get("FAIRQUEUE_TEST_SEED") or secrets.token_hex(4)
    print(f"FAIRQUEUE_TEST_SEED={seed}")
    dice = random.Random(seed)  # noqa: S311
    url = own_server.url()
    engine = create_engine(url)
    with engine.begin() as connection:
        schema.install(connection)
        connection.execute(text("CREATE TABLE public.sent (message_id bigint NOT NULL)"))
    with Session(engine) as session:
        add_effects(session)
        session.add(fq.Queue(name="default", max_attempts=1_000_000, backoff=0.01, max_backoff=0.1))
        session.commit()
    witness = Witness(url)
    crew = Workers(url, SECONDS, tmp_path)
    troubles = WorkerTroubles(own_server, url, crew, witness, dice)
    try:
        while not crew.is_over():
            produce(engine, dice)
            troubles.make()
            witness.look()
        troubles.end()
        engine.dispose()  # its connections may have been ended
        crew.replace_the_dead()
        with Session(engine) as session:
            wait_until(lambda: is_empty(session), deadline=60)
            crew.stop()
            sent = compare(session)
        print(f"{sent} messages, {crew.started} workers, {troubles.seen}, exit codes {Counter(crew.ended)}")
        assert set(crew.ended) <= {0, 3, -9, -15}, crew.logs()
        assert sent > 100
        assert troubles.seen.keys() >= {"kill -9", "immediate stop"}
    finally:
        troubles.end()
        crew.kill()
        witness.close()
        engine.dispose()
