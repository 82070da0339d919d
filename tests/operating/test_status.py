"""Status: every figure is what plain Python counts in the same rows, whatever they are."""

import random
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, insert, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

import fairqueue as fq
from fairqueue import roles
from fairqueue import schema as fq_schema
from fairqueue.status import ChannelStatus, QueueStatus, Status, status
from fairqueue.testing import Clock
from tests import acts

pytestmark = pytest.mark.shared_database

# In the middle of a millisecond: rounding shows.
NOW = datetime(2031, 5, 6, 7, 8, 9, 123456, UTC)
NOW_MS = int(NOW.timestamp() * 1000)
NAMES = ["b", "a", "B", "ä", "a b", "c[red]", "\x1b", "d"]


class Rows:
    """Random rows of a database, and what they come to."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311
        self.messages = [self.message() for _ in range(200)]
        self.dead = [self.letter(id_) for id_ in range(1000, 1030)]
        self.history = [self.ending(id_) for id_ in range(2000, 2100)]
        self.channels = {(queue, name): self.policy(queue, name) for queue in ("one", "two") for name in NAMES[:5]}
        self.queues: dict[str, dict[str, Any]] = {
            "two": {"name": "two", "max_concurrency": 9, "channel_max_concurrency": 4, "channel_max_size": 70},
            "idle": {"name": "idle", "paused": True, "resume_at": NOW + timedelta(hours=1)},
        }

    def place(self) -> dict[str, Any]:
        return {"queue": self.random.choice(["one", "two"]), "channel": self.random.choice(NAMES)}

    def ago(self) -> datetime:
        return NOW - timedelta(seconds=self.random.uniform(0, 5000))

    def message(self) -> dict[str, Any]:
        near = NOW_MS + self.random.choice([-(10**7), -5000, -1, 0, 1, 5000, 10**7])
        at = self.random.choice([near, near, 0, -5, -(2**62) + 1, 2**62 - 1])
        leased = self.random.random() < 0.3
        until = NOW + timedelta(seconds=self.random.choice([-5, 5])) if leased else None  # one may have run out
        return {**self.place(), "dequeue_at": at, "created_at": self.ago(), "leased_until": until}

    def letter(self, id_: int) -> dict[str, Any]:
        return {"id": id_, **self.place(), "cost": 1, "attempt": 1, "created_at": self.ago()}

    def ending(self, id_: int) -> dict[str, Any]:
        outcome = self.random.choice(["completed", "completed", "dead", "cancelled", "dropped"])
        finished = {"finished_at": self.ago(), "outcome": outcome, "created_at": self.ago()}
        return {"message_id": id_, **self.place(), "attempt": 1, "cost": 1, "dequeue_at": 0, **finished}

    def policy(self, queue: str, name: str) -> dict[str, Any]:
        paused = self.random.random() < 0.5
        resume_at = (
            NOW + timedelta(seconds=self.random.choice([-1, 1])) if paused and self.random.random() < 0.6 else None
        )
        return {
            "queue": queue,
            "name": name,
            "paused": paused,
            "resume_at": resume_at,
            "max_concurrency": self.random.choice([None, 3]),
            "release_interval_ms": self.random.choice([None, 250]),
            "max_size": self.random.choice([None, 1000]),
        }

    def store(self, session: Session) -> None:
        """As they are: no trigger has a say."""
        session.execute(text("SET LOCAL session_replication_role = replica"))
        for model, rows in (
            (fq.Message, self.messages),
            (fq.DeadMessage, self.dead),
            (fq.History, self.history),
            (fq.Channel, list(self.channels.values())),
        ):
            session.connection().execute(insert(model.__table__), rows)  # type: ignore[arg-type]
        for row in self.queues.values():
            session.connection().execute(insert(fq.Queue.__table__), row)  # type: ignore[arg-type]
        session.commit()

    def expected(self) -> Status:
        queues = {row["queue"] for row in [*self.messages, *self.dead]} | {row["queue"] for row in self.recent()}
        return Status(NOW, [self.queue(name) for name in sorted(queues | self.queues.keys())])

    def recent(self) -> list[dict[str, Any]]:
        return [
            row
            for row in self.history
            if row["outcome"] == "completed" and row["finished_at"] > NOW - timedelta(hours=1)
        ]

    def queue(self, name: str) -> QueueStatus:
        used = {row["channel"] for row in [*self.messages, *self.dead, *self.recent()] if row["queue"] == name}
        channels = [self.channel(name, channel) for channel in used]
        policy = self.queues.get(name, {})
        return QueueStatus(
            name=name,
            **self.figures(name, used),
            **self.pause(policy),
            max_concurrency=policy.get("max_concurrency"),
            channel_count=len(channels),
            channels=sorted(channels, key=lambda each: (-each.ready, -each.running, each.name.encode())),
        )

    def channel(self, queue: str, name: str) -> ChannelStatus:
        default = {field[8:]: value for field, value in self.queues.get(queue, {}).items() if field[:8] == "channel_"}
        policy = self.channels.get((queue, name), {})
        limits = default | {field: value for field, value in policy.items() if value is not None}
        return ChannelStatus(
            name=name,
            **self.figures(queue, [name]),
            **self.pause(policy),
            max_concurrency=limits.get("max_concurrency"),
            release_interval_ms=limits.get("release_interval_ms", 0),
            max_size=limits.get("max_size"),
        )

    def figures(self, queue: str, channels: Iterable[str]) -> dict[str, Any]:
        def mine(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [row for row in rows if row["queue"] == queue and row["channel"] in channels]

        unleased = [row for row in mine(self.messages) if row["leased_until"] is None]
        ready = [row for row in unleased if row["dequeue_at"] <= NOW_MS]
        since = [max(moment(row["dequeue_at"]), row["created_at"]) for row in ready]
        return {
            "ready": len(ready),
            "waiting": len(unleased) - len(ready),
            "running": len(mine(self.messages)) - len(unleased),
            "oldest": NOW - min(since) if since else None,
            "served": len(mine(self.recent())),
            "dead": len(mine(self.dead)),
        }

    def pause(self, policy: dict[str, Any]) -> dict[str, Any]:
        resume_at = policy.get("resume_at")
        paused = policy.get("paused", False) and (resume_at is None or resume_at > NOW)
        return {"paused": paused, "resume_at": resume_at if paused else None}


def moment(ms: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=max(ms, 0))


def stop_clock(engine: Engine) -> None:
    """To the microsecond."""
    clock = Clock(engine).__enter__()
    clock.freeze()
    clock.move_to(NOW)


@pytest.mark.parametrize("seed", range(8))
def test_every_figure_is_what_the_rows_say(seed: int, engine: Engine, session: Session) -> None:
    stop_clock(engine)
    rows = Rows(seed)
    rows.store(session)
    expected = rows.expected()
    assert status(session) == expected
    assert status(session, "two").queues == [queue for queue in expected.queues if queue.name == "two"]


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_limit_leaves_channels_out_and_changes_no_figure(limit: int, engine: Engine, session: Session) -> None:
    stop_clock(engine)
    rows = Rows(99)
    rows.store(session)
    found, expected = status(session, limit=limit).queues, rows.expected().queues
    assert [each.channels for each in found] == [each.channels[:limit] for each in expected]
    assert [(each.ready, each.channel_count) for each in found] == [
        (each.ready, each.channel_count) for each in expected
    ]


@pytest.mark.parametrize("seed", range(4))
def test_those_whose_oldest_message_has_waited_longest_may_come_first(
    seed: int, engine: Engine, session: Session
) -> None:
    stop_clock(engine)
    rows = Rows(seed)
    rows.store(session)
    found, expected = status(session, limit=3, sort="oldest").queues, rows.expected().queues
    for queue, as_it_is in zip(found, expected, strict=True):
        by_age = sorted(
            as_it_is.channels,
            key=lambda each: (each.oldest is None, -(each.oldest or timedelta()), -each.running, each.name.encode()),
        )
        assert queue == replace(as_it_is, channels=by_age[:3])


def test_nothing_is_nothing_and_a_queue_that_is_named_is_there(session: Session) -> None:
    assert status(session).queues == []
    (queue,) = status(session, "new").queues
    assert (queue.name, queue.ready, queue.oldest, queue.channels) == ("new", 0, None, [])


async def test_an_async_session_gets_the_same(async_engine: AsyncEngine, session: Session) -> None:
    acts.put(session, "acme", 3)
    async with AsyncSession(async_engine) as async_session:
        found = await status(async_session)
    assert found.queues[0].channels[0].ready == 3
    assert found.queues[0].oldest is not None


@pytest.mark.shared_database(False)
def test_another_schema_and_an_observer(engine: Engine, session: Session) -> None:
    """Who may only look can; what is looked at is the installation that the session is for."""
    with engine.begin() as connection:
        fq_schema.install(connection, "My Q")
        connection.execute(text("CREATE ROLE looker_of_status"))
        roles.grant(connection, "looker_of_status", "observer", schema="My Q")
    try:
        there = engine.execution_options(**fq.in_schema("My Q"))
        with Session(there) as other:
            acts.put(other, "acme", 2)
            other.execute(text("SET LOCAL ROLE looker_of_status"))
            assert status(other).queues[0].ready == 2
        assert status(session).queues == []
    finally:
        session.rollback()
        with engine.begin() as connection:
            connection.execute(text("DROP OWNED BY looker_of_status"))
            connection.execute(text("DROP ROLE looker_of_status"))


@pytest.mark.parametrize("wrong", [{"queue": ""}, {"limit": -1}, {"limit": 1.5}, {"sort": "name"}])
def test_what_cannot_be_is_refused(wrong: dict[str, Any], session: Session) -> None:
    with pytest.raises(fq.InvalidValue, match=f"^{next(iter(wrong))} must"):
        status(session, **wrong)
