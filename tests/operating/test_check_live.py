"""fairqueue.check on a live queue: it finds no difference, whatever producers, workers and operators do meanwhile."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from threading import Event

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import lease_of, put, sql


class Traffic:
    """What producers, workers and operators do, each in a thread, until every message is completed or cancelled."""

    MESSAGES = 240

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.done = Event()
        self.produced = Event()
        self.ended: list[int] = []

    def session(self) -> Session:
        return Session(self.engine)

    def produce(self) -> None:
        with self.session() as session:
            for number in range(self.MESSAGES // 4):
                put(session, ("free", "capped", "rated", "edited")[number % 4], 4)
        self.produced.set()

    def work(self, seed: int) -> None:
        choose = random.Random(seed)  # noqa: S311
        with self.session() as session:
            while not self.done.is_set():
                batch = session.scalars(fq.dequeue(limit=choose.randint(1, 5), lease=3600)).all()
                if batch and choose.random() < 0.1:
                    session.rollback()
                    continue
                session.commit()
                for message in batch:
                    act = choose.choice([self.end, self.end, self.put_back])
                    act(session, message, choose.random() < 0.5)
                if self.produced.is_set() and len(self.ended) == self.MESSAGES:
                    self.done.set()

    def end(self, session: Session, message: fq.LeasedMessage, completed: bool) -> None:
        ended = fq.complete(message) if completed else fq.cancel(message)
        assert session.execute(ended).one().result in {"completed", "cancelled"}
        session.commit()
        self.ended.append(message.id)

    def put_back(self, session: Session, message: fq.LeasedMessage, failed: bool) -> None:
        back = fq.fail(message, delay=0) if failed else fq.defer(message)
        assert session.execute(back).one().result in {"failed", "deferred"}
        session.commit()

    def edit(self) -> None:
        choose = random.Random(5)  # noqa: S311
        with self.session() as session:
            while not self.done.is_set():
                if choose.random() < 0.2:
                    sql(session, "DELETE FROM fairqueue.channel WHERE name = 'edited'")
                limit = choose.choice([None, 1, 3])
                session.merge(fq.Channel("edited", max_concurrency=limit, weight=choose.choice([1, 2])))
                session.commit()
                session.merge(fq.Queue("default", max_concurrency=choose.choice([None, 4, 9]), max_attempts=10_000))
                session.commit()
                self.done.wait(0.005)  # to leave time to the others

    def repair(self) -> None:
        with self.session() as session:
            while not self.done.is_set():
                sql(session, "SELECT fairqueue.queue_repair()")
                self.done.wait(0.005)


@pytest.fixture
def traffic(database_url: str) -> Iterator[Traffic]:
    engine = create_engine(database_url, pool_size=10)
    with Session(engine) as session:
        session.add_all(
            [
                fq.Queue("default", max_attempts=10_000),
                fq.Channel("capped", max_concurrency=2),
                fq.Channel("rated", release_interval_ms=2, burst=3),
            ]
        )
        session.commit()
    yield Traffic(engine)
    engine.dispose()


@pytest.mark.parametrize("repairs", [False, True])
def test_a_live_queue_has_no_differences(traffic: Traffic, session: Session, repairs: bool) -> None:
    """Each check sees one moment, in which both sides agree; and a repair at any moment breaks nothing."""
    acts = [traffic.produce, *[lambda seed=seed: traffic.work(seed) for seed in range(3)], traffic.edit]
    if repairs:
        acts.append(traffic.repair)
    with ThreadPoolExecutor(len(acts)) as threads:
        running = [threads.submit(act) for act in acts]
        try:
            for number in count():
                assert fq.check(session) == []
                session.commit()
                capped = session.scalar(
                    text("SELECT count(*) FROM fairqueue.message WHERE channel = 'capped' AND leased_until IS NOT NULL")
                )
                session.commit()
                assert capped is not None
                assert capped <= 2
                if traffic.done.is_set() or any(act.done() and act.exception() for act in running):
                    assert number > 5
                    break
                traffic.done.wait(0.01)  # to leave time to the others
        finally:
            traffic.done.set()
    for act in running:
        act.result()
    assert sorted(traffic.ended) == sorted(set(traffic.ended))
    assert len(traffic.ended) == Traffic.MESSAGES
    assert fq.check(session) == []
    session.commit()
    assert lease_of(session, 100) == []
