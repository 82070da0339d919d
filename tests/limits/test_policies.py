"""Policies as users write them: through the models, in SQL, and by pause and resume.

What max_size does is in enqueueing/test_max_size.py. What they refuse is in test_bad_input.py and
test_bad_input_in_sql.py there.
"""

from datetime import UTC, datetime, timedelta
from inspect import signature
from typing import Any

import pytest
from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import put, sql, take
from tests.invariants import check_invariants

pytestmark = pytest.mark.shared_database

LATER = datetime(2100, 1, 1, tzinfo=UTC)
EARLIER = datetime(2001, 1, 1, tzinfo=UTC)

#: All that can be set for a channel, in the order of channel_set's parameters.
CHANNEL: dict[str, Any] = {
    "weight": 2.5,
    "max_concurrency": 5,
    "release_interval_ms": 100,
    "burst": 3,
    "max_size": 7,
    "overflow": "drop",
    "paused": True,
    "resume_at": LATER,
}
QUEUE: dict[str, Any] = {
    "max_concurrency": 50,
    "paused": True,
    "resume_at": LATER,
    "max_attempts": 4,
    "backoff": 0.5,
    "max_backoff": 60.5,
    "history_days": 0,
    "channel_weight": 2.5,
    "channel_max_concurrency": 5,
    "channel_release_interval_ms": 100,
    "channel_burst": 3,
    "channel_max_size": 7,
    "channel_overflow": "drop",
}
CHANNEL_DEFAULTS = {**dict.fromkeys(CHANNEL), "paused": False}
QUEUE_DEFAULTS = {
    **dict.fromkeys(QUEUE),
    "paused": False,
    "max_attempts": 20,
    "backoff": 1,
    "max_backoff": 3600,
    "history_days": 30,
    "channel_weight": 1,
    "channel_release_interval_ms": 0,
    "channel_burst": 1,
    "channel_overflow": "reject",
}


class Kind:
    """What is the same of channels and queues."""

    def __init__(self, model: Any, values: dict[str, Any], defaults: dict[str, Any]) -> None:
        self.model, self.values, self.defaults = model, values, defaults
        self.setter = f"fairqueue.{model.__tablename__}_set"

    def stored(self, session: Session) -> dict[str, Any]:
        """The policy of the only row there is, as the database has it."""
        session.expire_all()
        row = session.scalars(select(self.model)).one()
        return {field: getattr(row, field) for field in self.values}

    def set(self, session: Session, **values: Any) -> None:
        named = ", ".join(f"{name} => :{name}" for name in values)
        sql(session, f"SELECT {self.setter}('acme'{named and ', ' + named})", **values)


KINDS = {
    "channel": Kind(fq.Channel, CHANNEL, CHANNEL_DEFAULTS),
    "queue": Kind(fq.Queue, QUEUE, QUEUE_DEFAULTS),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


class TestEveryField:
    def test_none_is_forgotten(self, session: Session, kind: Kind) -> None:
        """Neither by the model's parameters, nor by the function's, nor by these tests."""
        keys = {"queue", "name", "created_at"}
        columns = [column.name for column in kind.model.__table__.c if column.name not in keys]
        assert list(kind.values) == columns
        assert [name for name in signature(kind.model).parameters if name not in keys] == columns
        names = session.scalar(text(f"SELECT proargnames FROM pg_proc WHERE oid = '{kind.setter}'::regproc"))
        assert [name for name in names or [] if name not in keys] == columns

    def test_round_trip(self, session: Session, kind: Kind) -> None:
        session.add(kind.model(name="acme", **kind.values))
        session.commit()
        assert kind.stored(session) == kind.values
        session.execute(text(f"DELETE FROM fairqueue.{kind.model.__tablename__}"))
        kind.set(session, **kind.values)
        assert kind.stored(session) == kind.values

    def test_defaults(self, session: Session, kind: Kind) -> None:
        session.add(kind.model(name="acme"))
        session.commit()
        assert kind.stored(session) == kind.defaults
        session.execute(text(f"DELETE FROM fairqueue.{kind.model.__tablename__}"))
        kind.set(session)
        assert kind.stored(session) == kind.defaults

    def test_what_is_left_out_stays(self, session: Session, kind: Kind) -> None:
        """Merging an entity and calling the function change only what they are given."""
        session.add(kind.model(name="acme", **kind.values))
        session.commit()
        session.expunge_all()
        session.merge(kind.model(name="acme"))
        session.commit()
        kind.set(session)
        assert kind.stored(session) == kind.values
        for field in kind.values:
            if field in {"paused", "resume_at"}:
                continue
            changed = "reject" if "overflow" in field else kind.values[field] + 1
            session.expunge_all()
            session.merge(kind.model(name="acme", **{field: changed}))
            session.commit()
            assert kind.stored(session) == {**kind.values, field: changed}
            kind.set(session, **{field: kind.values[field]})
            assert kind.stored(session) == kind.values

    def test_back_to_the_default(self, session: Session, kind: Kind) -> None:
        """None, said in so many words, is not what was left out."""
        session.add(kind.model(name="acme", **kind.values))
        session.commit()
        session.expunge_all()
        nullable = [c.name for c in kind.model.__table__.c if c.nullable and c.name != "resume_at"]
        session.merge(kind.model(name="acme", **dict.fromkeys(nullable)))
        session.commit()
        assert kind.stored(session) == {**kind.values, **dict.fromkeys(nullable)}


class TestSet:
    def test_pause(self, session: Session, kind: Kind) -> None:
        """A pause has the end that is given with it, or none; whatever was before."""

        def pause() -> tuple[bool, datetime | None]:
            stored = kind.stored(session)
            return stored["paused"], stored["resume_at"]

        steps: list[tuple[dict[str, Any], tuple[bool, datetime | None]]] = [
            ({"paused": True, "resume_at": LATER}, (True, LATER)),
            ({}, (True, LATER)),
            ({"paused": True}, (True, None)),
            ({"paused": True, "resume_at": LATER}, (True, LATER)),
            ({"paused": False}, (False, None)),
            ({"paused": True}, (True, None)),
        ]
        for values, expected in steps:
            kind.set(session, **values)
            assert pause() == expected
        for values, expected in steps:
            session.merge(kind.model(name="acme", **values))
            session.commit()
            assert pause() == expected

    def test_positional(self, session: Session) -> None:
        sql(session, "SELECT fairqueue.channel_set('globex', 'transcode', 2)")
        channel = session.scalars(select(fq.Channel)).one()
        assert (channel.name, channel.queue, channel.weight) == ("globex", "transcode", 2)
        assert fq.Channel("globex", "transcode", 2).weight == 2

    def test_several_at_once(self, session: Session) -> None:
        """The example of the documentation."""
        session.merge(fq.Channel(name="globex", max_concurrency=5, release_interval_ms=100, burst=3, weight=2))
        session.commit()
        globex = session.get_one(fq.Channel, ("default", "globex"))
        assert (globex.max_concurrency, globex.release_interval_ms, globex.burst, globex.weight) == (5, 100, 3, 2)


class TestPause:
    """What it means for a worker. Time itself is in test_limits.py."""

    @pytest.fixture(autouse=True)
    def messages(self, session: Session) -> None:
        for channel in ("acme", "globex"):
            put(session, channel, 4)
        put(session, "initech", queue="other")

    def do(self, session: Session, *statements: Any) -> None:
        for statement in statements:
            session.execute(statement)
        session.commit()

    def test_a_channel(self, session: Session) -> None:
        self.do(session, fq.pause(channel="acme"))
        assert take(session, 2) == ["globex", "globex"]
        self.do(session, fq.resume(channel="acme"), fq.resume(channel="unheard of"))
        assert sorted(take(session, 9)) == ["acme"] * 4 + ["globex"] * 2

    def test_a_queue(self, session: Session) -> None:
        self.do(session, fq.pause(queue="default"))
        assert take(session, 9) == []
        assert take(session, queue="other") == ["initech"]
        self.do(session, fq.resume(queue="default"), fq.pause(queue="other"))
        assert len(take(session, 9)) == 8

    def test_each_by_itself(self, session: Session) -> None:
        """The queue goes on; a channel that was paused by itself stays so."""
        self.do(session, fq.pause(queue="default"), fq.pause(channel="acme"))
        self.do(session, fq.resume(queue="default"))
        assert take(session, 9) == ["globex"] * 4

    @pytest.mark.parametrize("place", [{"channel": "acme"}, {"queue": "default"}], ids=["channel", "queue"])
    def test_until(self, session: Session, place: dict[str, str]) -> None:
        served = ["globex"] if "channel" in place else []
        self.do(session, fq.pause(**place, until=EARLIER))
        assert "acme" in take(session, 2)
        self.do(session, fq.pause(**place, until=LATER))
        assert take(session) == served
        self.do(session, fq.pause(**place, until=EARLIER))
        assert "acme" in take(session, 2)

    def test_the_last_until_is_read_back_in_each_time_zone(self, session: Session) -> None:
        last = datetime(9998, 12, 31, 23, 59, 59, tzinfo=UTC)
        self.do(session, fq.pause(channel="acme", until=last))
        for zone in ("Pacific/Kiritimati", "Etc/GMT+12"):
            session.execute(text(f"SET LOCAL TimeZone = '{zone}'"))
            assert session.scalars(select(fq.Channel.resume_at)).all() == [last]

    def test_limits_stay(self, session: Session) -> None:
        session.merge(fq.Channel("acme", weight=3, max_size=9))
        session.flush()
        self.do(session, fq.pause(channel="acme"), fq.resume(channel="acme"))
        channel = session.get_one(fq.Channel, ("default", "acme"))
        assert (channel.weight, channel.max_size, channel.paused) == (3, 9, False)

    def test_a_merge_does_not_resume(self, session: Session) -> None:
        """What an application sets when it starts must not undo what an operator did in the night."""
        session.merge(fq.Channel("acme", weight=2))
        session.flush()
        self.do(session, fq.pause(channel="acme"))
        session.expunge_all()
        session.merge(fq.Channel("acme", weight=2))
        session.commit()
        assert take(session, 2) == ["globex", "globex"]

    async def test_async(self, async_engine: AsyncEngine) -> None:
        async with AsyncSession(async_engine) as session:
            await session.execute(fq.pause(queue="default", until=datetime.now(UTC) + timedelta(hours=1)))
            await session.commit()
            assert (await session.scalars(fq.dequeue(limit=9))).all() == []
            await session.execute(fq.resume(queue="default"))
            await session.commit()
            assert len((await session.scalars(fq.dequeue(limit=9))).all()) == 8


@pytest.mark.parametrize(
    "again",
    [
        "SELECT fairqueue.channel_set('a', weight => 2)",
        "UPDATE fairqueue.channel SET weight = weight, paused = paused",
        "SELECT fairqueue.queue_set('default', channel_weight => 3)",
        "SELECT fairqueue.queue_set('default', history_days => 7)",
    ],
)
def test_what_is_written_again_as_it_was_costs_nothing(session: Session, again: str) -> None:
    """No dequeue has to read the policies of channels again, or to take back what is planned."""
    sql(session, "SELECT fairqueue.channel_set('a', weight => 2)")
    sql(session, "SELECT fairqueue.queue_set('default', channel_weight => 3)")
    take(session)
    sql(session, again)
    assert session.scalars(text("SELECT channel FROM fairqueue.signal")).all() == []
    sql(session, "SELECT fairqueue.channel_set('a', weight => 1)")
    assert session.scalars(text("SELECT channel FROM fairqueue.signal")).all() == ["a", "a"]


@pytest.mark.parametrize(
    ("act", "told"),
    [
        ("INSERT INTO fairqueue.queue (name) VALUES ('default')", set()),
        ("INSERT INTO fairqueue.queue (name, paused) VALUES ('default', true)", {"queue"}),
        ("INSERT INTO fairqueue.queue (name, channel_burst) VALUES ('default', 2)", {"channels"}),
        ("INSERT INTO fairqueue.queue (name, paused, max_concurrency) VALUES ('default', true, 1)", {"queue"}),
        ("UPDATE fairqueue.queue SET paused = false WHERE name = 'paused'", {"queue"}),
        ("UPDATE fairqueue.queue SET resume_at = '2100-01-01' WHERE name = 'paused'", {"queue"}),
        ("UPDATE fairqueue.queue SET resume_at = '2100-01-01' WHERE name = 'limited'", set()),
        ("UPDATE fairqueue.queue SET paused = true, channel_weight = 2 WHERE name = 'limited'", {"channels"}),
        ("DELETE FROM fairqueue.queue WHERE name = 'paused'", {"queue"}),
        ("DELETE FROM fairqueue.queue WHERE name = 'limited'", {"queue"}),
        ("UPDATE fairqueue.queue SET name = 'default' WHERE name = 'paused'", {"queue"}),
    ],
)
def test_a_queue_without_a_row_has_the_defaults_of_one(session: Session, act: str, told: set[str]) -> None:
    """So only for what becomes another policy of channels has a dequeue to look at all of them."""
    rows = "('paused', true, NULL::integer), ('limited', false, 5)"
    sql(session, f"INSERT INTO fairqueue.queue (name, paused, max_concurrency) VALUES {rows}")
    sql(session, "DELETE FROM fairqueue.signal")
    sql(session, act)
    signals = text("SELECT CASE WHEN dequeue_at IS NULL THEN 'channels' ELSE 'queue' END FROM fairqueue.signal")
    assert set(session.scalars(signals)) == told


def test_a_channel_that_never_had_a_message_has_no_lane(session: Session) -> None:
    """Whatever is set for it, or changed."""
    put(session, "a")
    for number in (1, 2):
        sql(session, "SELECT fairqueue.channel_set('b', weight => :n, max_concurrency => :n)", n=number)
        take(session)
    assert session.scalars(text("SELECT channel FROM fairqueue.lane")).all() == ["a"]


#: What of a policy dequeues don't go by; what they do, and where the row is another's then.
ENQUEUEING = {"max_size", "overflow", "channel_max_size", "channel_overflow"}
ENDING = {"max_attempts", "backoff", "max_backoff", "history_days"}


def test_whatever_dequeues_go_by_is_told(session: Session, kind: Kind) -> None:
    """Each by itself, and that the row is another channel's, or queue's, now; what they don't go by is not."""
    put(session, "a")
    take(session)
    table = kind.model.__table__
    sql(session, f"INSERT INTO {table} (name) VALUES ('{'a' if table.name == 'channel' else 'default'}')")
    changes = {**kind.values, "name": "b"} | ({"queue": "elsewhere"} if table.name == "channel" else {})
    for column, value in changes.items():
        take(session)
        sql(session, f"UPDATE {table} SET {column} = :value", value=value)
        told = session.scalar(text("SELECT count(DISTINCT (queue, channel)) FROM fairqueue.signal"))
        row = column in ("name", "queue")
        assert told == (2 if row else 0 if column in ENQUEUEING | ENDING else 1), column
        check_invariants(session.connection())
        session.commit()


@pytest.mark.parametrize("table", ["channel", "queue"])
@pytest.mark.parametrize(
    ("paused", "hours"), [(True, -1), (True, 1), (False, -1)], ids=["is over", "would go on", "was none"]
)
def test_a_new_pause_doesn_t_end_when_the_last_one_did(session: Session, table: str, paused: bool, hours: int) -> None:
    """Or would have, had it not been ended before, or been one at all; paused alone is set anew."""
    policy: fq.Channel | fq.Queue = fq.Channel("a") if table == "channel" else fq.Queue("default")
    policy.paused = paused
    policy.resume_at = datetime.now(UTC) + timedelta(hours=hours)
    session.add(policy)
    session.commit()
    policy.paused = False
    session.commit()
    policy.paused = True
    session.commit()
    put(session, "a")
    assert take(session) == []
    assert policy.resume_at is None
