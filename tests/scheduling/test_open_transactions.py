"""Transactions that stay open beside dequeues, in any order, with more news than one dequeue takes in.

Whatever commits is served, each message to one worker at a time, and what the scheduler keeps is right at every moment.
There is no order to compare with: the reference says that of queues whose news is taken in at once.
FAIRQUEUE_TEST_EXAMPLES=2000 makes the machine run for long.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import psycopg
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import clear, complete, drain, expire, lease_of, one_by_one, plan_ahead, sql
from tests.fixtures.connections import Raw
from tests.invariants import check_invariants
from tests.scheduling.drawing import run_machine

CHANNELS = ["a", "b", "c", "d"]
channels = st.sampled_from(CHANNELS)
#: Beyond what one dequeue of a message takes in, 68, and about that.
counts = st.sampled_from([1, 1, 2, 40, 67, 68, 69, 150])
batches = st.sampled_from([1, 1, 7, 100])
who = st.sampled_from([0, 1, 2])
some = st.integers(0, 1_000_000)


def has_leases(machine: "OpenTransactions") -> bool:
    return bool(machine.leases)


class OpenTransactions(RuleBasedStateMachine):
    engine: ClassVar[Engine]
    producers: ClassVar[list[psycopg.Connection]]
    operator: ClassVar[psycopg.Connection]
    #: Who edits.
    user: ClassVar[psycopg.Connection]
    #: Who writes nothing of the queue's.
    stranger: ClassVar[psycopg.Connection]

    @initialize(plans=st.booleans())
    def begin(self, plans: bool) -> None:
        clear(self.engine)
        self.session = Session(self.engine, expire_on_commit=False)
        self.leases: dict[int, fq.LeasedMessage[Any]] = {}
        self.held = False
        sql(self.session, "SELECT fairqueue.queue_set('default', max_attempts => 1000000, backoff => 0)")
        if plans:
            sql(self.session, "INSERT INTO fairqueue.message (channel) SELECT 'a' FROM generate_series(1, 100)")
            self.dequeue(1)
            plan_ahead(self.session)

    def teardown(self) -> None:
        if hasattr(self, "session"):
            try:
                self.all_is_served()
            finally:
                self.session.close()
                for connection in self.others():
                    connection.rollback()  # or, where it has failed, the next one would wait for them

    def others(self) -> list[psycopg.Connection]:
        return [*self.producers, self.operator, self.user, self.stranger]

    def all_is_served(self) -> None:
        """When all have committed, and limits are gone."""
        self.session.rollback()
        for connection in self.others():
            connection.commit()
        self.agrees()
        complete(self.session, self.leases.values())
        sql(self.session, "DELETE FROM fairqueue.channel")
        served = drain(self.session, 100)
        assert {message.id for message in served} == set(self.session.scalars(text("SELECT id FROM fairqueue.message")))
        self.agrees()

    # Producers

    @rule(who=who, channel=channels, count=counts)
    def insert(self, who: int, channel: str, count: int) -> None:
        """One by one: a signal each."""
        self.producers[who].execute(one_by_one(count, channel).encode())

    @rule(who=who, count=counts, ahead=st.booleans())
    def insert_in_all(self, who: int, count: int, ahead: bool) -> None:
        """In one statement: a signal for each channel; with priorities, before others."""
        self.producers[who].execute(
            "INSERT INTO fairqueue.message (channel, dequeue_at)"
            " SELECT (%s::text[])[1 + g %% 4], CASE WHEN %s THEN -g ELSE fairqueue.unix_ms(fairqueue.clock()) END"
            " FROM generate_series(1, %s) g",
            (CHANNELS, ahead, count),
        )

    @rule(who=who, channel=channels, count=counts)
    def insert_in_vain(self, who: int, channel: str, count: int) -> None:
        with self.producers[who].transaction(force_rollback=True):
            self.insert(who, channel, count)

    @rule(who=who)
    def producer_commits(self, who: int) -> None:
        self.producers[who].commit()

    @rule(who=who)
    def producer_rolls_back(self, who: int) -> None:
        self.producers[who].rollback()

    # Workers

    @rule(limit=batches)
    def dequeue(self, limit: int) -> None:
        for message in lease_of(self.session, limit):
            assert message.id not in self.leases
            self.leases[message.id] = message

    @rule(limit=batches, channel=channels, count=counts, commits=st.booleans())
    def enqueue_and_dequeue(self, limit: int, channel: str, count: int, commits: bool) -> None:
        """In one transaction, whose signals are among those that are taken in."""
        self.session.execute(text(one_by_one(count, channel)))
        found = list(self.session.scalars(fq.dequeue(limit=limit, lease=3600)))
        self.session.execute(text(one_by_one(1, channel)))
        if commits:
            self.session.commit()
            self.leases.update((message.id, message) for message in found)
        else:
            self.session.rollback()

    def leases_from(self, place: int, count: int) -> list[fq.LeasedMessage[Any]]:
        ids = sorted(self.leases)
        place %= len(ids)
        return [self.leases.pop(id_) for id_ in ids[place : place + count]]

    @precondition(has_leases)
    @rule(place=some, count=counts)
    def finish(self, place: int, count: int) -> None:
        assert set(complete(self.session, self.leases_from(place, count))) == {"completed"}

    @precondition(has_leases)
    @rule(place=some, count=counts, act=st.sampled_from([fq.fail, fq.defer]))
    def hand_back(self, place: int, count: int, act: Callable[..., Any]) -> None:
        results = {row.result for row in self.session.execute(act(self.leases_from(place, count), delay=0))}
        self.session.commit()
        assert results <= {"failed", "deferred"}

    @precondition(has_leases)
    @rule(place=some, count=counts)
    def run_out(self, place: int, count: int) -> None:
        expire(self.session, [message.id for message in self.leases_from(place, count)])

    # Operators, users, and everybody else

    @rule(channel=channels, limit=st.sampled_from([None, 1, 3, 1000]))
    def set_limit(self, channel: str, limit: int | None) -> None:
        if limit is None:
            self.operator.execute("DELETE FROM fairqueue.channel WHERE name = %s", (channel,))
        else:
            self.operator.execute("SELECT fairqueue.channel_set(%s, max_concurrency => %s)", (channel, limit))

    @rule()
    def operate(self) -> None:
        self.operator.commit()

    @precondition(lambda machine: not machine.held)
    @rule(count=st.sampled_from([1, 2, 80]), edit=st.booleans())
    def hold(self, count: int, edit: bool) -> None:
        """The first ready messages, which then are passed over."""
        self.held = True
        query = (
            "SELECT id FROM fairqueue.message WHERE leased_until IS NULL ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED"
        )
        ids = [id_ for (id_,) in self.user.execute(query, (count,))]
        if edit:
            self.user.execute("UPDATE fairqueue.message SET dequeue_at = 0 WHERE id = ANY (%s)", (ids,))

    @rule(commits=st.booleans())
    def let_go(self, commits: bool) -> None:
        self.held = False
        if commits:
            self.user.commit()
        else:
            self.user.rollback()

    @rule(commits=st.booleans())
    def others_write(self, commits: bool) -> None:
        """Transaction ids pass, or one stays open."""
        self.stranger.execute("SELECT pg_current_xact_id()")
        if commits:
            self.stranger.commit()

    @rule()
    def agrees(self) -> None:
        check_invariants(self.session.connection(), caps=False)
        self.session.commit()


@pytest.fixture
def machine(engine: Engine, raw: Raw, database_url: str) -> type[OpenTransactions]:
    OpenTransactions.engine = engine
    OpenTransactions.producers = [raw(database_url) for _ in range(3)]
    OpenTransactions.operator, OpenTransactions.user, OpenTransactions.stranger = (raw(database_url) for _ in range(3))
    return OpenTransactions


@pytest.mark.soak
def test_whatever_commits_is_served(machine: type[OpenTransactions]) -> None:
    run_machine(machine, 40)
