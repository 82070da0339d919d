"""What tests say about messages: what they find, and what they say when they don't."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import ANY

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import fairqueue as fq
from fairqueue.testing import Clock, assert_enqueued, drain, enqueued
from tests.acts import lease_of, put, sessions_elsewhere

PAYLOAD: Any = {"path": "a.pdf", "pages": 3, "draft": True, "tags": ["x", {"y": 1, "z": None}]}


class TestWhatIsCompared:
    @pytest.mark.parametrize(
        ("payload", "whole", "part"),
        [
            (PAYLOAD, True, True),
            ({"path": "a.pdf"}, False, True),
            ({}, False, True),
            (None, False, None),
            ({**PAYLOAD, "pages": 3.0}, True, True),
            ({**PAYLOAD, "pages": pytest.approx(3.1, abs=0.2), "path": ANY}, True, True),
            ({**PAYLOAD, "pages": "3"}, False, False),
            ({**PAYLOAD, "draft": 1}, False, False),
            ({**PAYLOAD, "more": None}, False, False),
            ({**PAYLOAD, "tags": ("x", {"y": 1, "z": None})}, True, True),
            ({**PAYLOAD, "tags": ["x", {"y": True, "z": None}]}, False, False),
            ({"tags": ["x", {"y": 1}]}, False, False),  # what is within a list is compared whole
            ({"tags": ["x"]}, False, False),
            ({"tags": "x"}, False, False),
            ([PAYLOAD], False, None),
            (ANY, True, None),
        ],
    )
    def test_payload(self, session: Session, payload: Any, whole: bool, part: bool | None) -> None:
        fq.enqueue(session, "acme", PAYLOAD)
        assert bool(enqueued(session, payload=payload)) == whole
        if part is not None:
            assert bool(enqueued(session, containing=payload)) == part

    def test_within_dicts(self, session: Session) -> None:
        fq.enqueue(session, "acme", {"file": {"path": "a.pdf", "pages": 3}})
        assert enqueued(session, containing={"file": {"pages": 3}})
        assert not enqueued(session, payload={"file": {"pages": 3}})

    def test_everything_else(self, engine: Engine, session: Session) -> None:
        with Clock(engine) as clock:
            clock.freeze()
            fq.enqueue(session, "acme", key="k", delay=60)
            fq.enqueue(session, "acme", 0, queue="mail")
            soon = clock.now() + timedelta(seconds=60)
            (keyed,), (mail,) = enqueued(session, key="k"), enqueued(session, payload=0)
            for field, there, others in (
                ("queue", "default", ["mail", "x"]),
                ("channel", "acme", ["Acme"]),
                ("key", "k", [None, "K"]),
                ("payload", None, [0, False, {}]),
                ("at", soon, [soon + timedelta(milliseconds=1), clock.now()]),
            ):
                assert keyed.id in {message.id for message in enqueued(session, **{field: there})}, field  # type: ignore[call-overload]
                for other in others:
                    assert keyed.id not in {message.id for message in enqueued(session, **{field: other})}, field  # type: ignore[call-overload]
            assert [message.id for message in enqueued(session)] == [keyed.id, mail.id]
            assert assert_enqueued(session, channel="acme", count=2)[1].queue == "mail"
            assert assert_enqueued(session, queue="default", payload=0, count=0) == []

    def test_when_it_is_due(self, session: Session) -> None:
        fq.enqueue(session, "acme", priority=5)
        fq.enqueue(session, "acme", dequeue_at=1_000)
        fq.enqueue(session, "acme")
        (urgent,) = assert_enqueued(session, priority=5)
        assert urgent.dequeue_at == -5
        assert_enqueued(session, dequeue_at=-5)
        assert_enqueued(session, priority=4, count=0)
        assert_enqueued(session, at=datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC))
        assert_enqueued(session, dequeue_at=1_000)
        with pytest.raises(AssertionError, match="expected 1 message with dequeue_at=-6"):
            assert_enqueued(session, priority=6)

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"channel": None}, "channel must be text, not None"),
            ({"queue": ""}, "queue must have 1 to 255 characters, not 0"),
            ({"key": 1}, "key must be text, not 1"),
            ({"at": None}, "at must be a datetime with a time zone, not None"),
            ({"dequeue_at": None}, "dequeue_at must be Unix time in whole milliseconds, not None"),
            ({"dequeue_at": 1.5}, "dequeue_at must be Unix time in whole milliseconds, not 1.5"),
            ({"priority": 0}, "priority must be 1 or more, not 0: a message without one is due at a time"),
            ({"priority": None}, "priority must be 1 or more, not None"),
            ({"priority": -1}, "priority must be a whole number"),
            ({"priority": 1, "dequeue_at": 5}, "only one of priority, dequeue_at may be given"),
            ({"containing": ["x"]}, "containing must be a dict, not ['x']: for other JSON there is payload"),
            ({"count": -1}, "count must be a whole number from 0"),
        ],
    )
    def test_refused(self, session: Session, wrong: Any, message: str) -> None:
        with pytest.raises(fq.InvalidValue) as refused:
            assert_enqueued(session, **wrong)
        assert str(refused.value).startswith(message)


class TestWhatIsThere:
    def test_as_the_session_sees_it(self, engine: Engine, session: Session) -> None:
        """What it has added itself, though it doesn't flush by itself; what others have committed; nothing else."""
        session.autoflush = False
        with Session(engine) as other:
            fq.enqueue(session, "mine")
            fq.enqueue(other, "other")
            assert_enqueued(session, channel="mine")
            assert_enqueued(session, channel="other", count=0)
            other.commit()
            assert_enqueued(session, channel="other")
            assert_enqueued(other, channel="mine", count=0)
            session.rollback()
        assert_enqueued(session, channel="mine", count=0)

    def test_only_what_waits(self, session: Session) -> None:
        put(session, "acme", 3)
        first, second, _ = lease_of(session, 3)
        session.execute(fq.fail(first))
        session.execute(fq.fail(second, retry=False))
        assert [message.id for message in enqueued(session)] == [first.id]

    def test_nothing_of_the_session_changes(self, session: Session) -> None:
        """What is returned is a copy: it stays as it was, and the application's own objects stay the session's."""
        mine = fq.enqueue(session, "acme", {"doc": 1})
        (found,) = enqueued(session)
        assert found is not mine
        assert mine in session
        assert found not in session
        found.payload = None
        session.commit()
        assert mine.payload == {"doc": 1}
        lease_of(session)
        assert (found.id, found.channel, found.leased_until) == (mine.id, "acme", None)

    def test_scoped_session(self, engine: Engine) -> None:
        scoped = scoped_session(sessionmaker(engine))
        fq.enqueue(scoped, "acme")
        assert_enqueued(scoped, channel="acme")
        scoped.remove()

    def test_autocommit(self, engine: Engine) -> None:
        with Session(engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
            fq.enqueue(session, "acme")
            assert_enqueued(session, channel="acme")

    def test_another_schema(self, engine: Engine) -> None:
        for session in sessions_elsewhere(engine):
            with session:
                fq.enqueue(session, "acme")
                assert_enqueued(session, channel="acme")
                assert len(drain(session, lambda message: None)) == 1  # noqa: ARG005
                assert enqueued(session) == []

    def test_several_databases(self, engine: Engine) -> None:
        """The messages' is found by their mapper, as it is to enqueue."""
        nowhere = create_engine("postgresql+psycopg://nobody@nowhere.invalid/app")
        for session in (Session(nowhere, binds={fq.Message: engine}), Session(binds={fq.Message: engine})):
            with session:
                fq.enqueue(session, "acme")
                assert_enqueued(session, channel="acme")
                with pytest.raises(fq.InvalidValue, match="takes a session, and where is one whose messages are in"):
                    drain(session, lambda message, session: None)  # noqa: ARG005
                assert len(drain(session, lambda message: None)) == 1  # noqa: ARG005
                assert enqueued(session) == []

    def test_a_class_that_chooses_by_itself(self, engine: Engine) -> None:
        """As SQLAlchemy's documentation has it for vertical partitioning."""
        nowhere = create_engine("postgresql+psycopg://nobody@nowhere.invalid/app")

        class Routing(Session):
            def get_bind(self, mapper: Any = None, **_: Any) -> Any:
                return engine if mapper and issubclass(mapper.class_, fq.Message) else nowhere

        with Routing() as session:
            fq.enqueue(session, "acme")
            fq.enqueue_unique(session, "acme", key="k")
            fq.enqueue_many(session, [{"channel": "acme"}])
            fq.enqueue_copy(session, [{"channel": "acme"}])
            assert_enqueued(session, channel="acme", key="k")
            assert len(enqueued(session)) == 4
            assert fq.check(session) == []
            assert len(drain(session, lambda message: None)) == 4  # noqa: ARG005

    async def test_several_databases_async(self, async_engine: AsyncEngine) -> None:
        nowhere = create_async_engine("postgresql+psycopg://nobody@nowhere.invalid/app")

        async def nothing(message: Any) -> None:
            pass

        async with AsyncSession(nowhere, binds={fq.Message: async_engine}) as session:
            fq.enqueue(session, "acme")
            await assert_enqueued(session, channel="acme")
            assert len(await drain(session, nothing)) == 1
            assert await enqueued(session) == []

    async def test_async(self, async_engine: AsyncEngine) -> None:
        async with AsyncSession(async_engine) as session:
            fq.enqueue(session, "acme", {"doc": 1})
            (message,) = await enqueued(session, channel="acme")
            assert message.payload == {"doc": 1}
            assert await assert_enqueued(session, channel="acme")
            with pytest.raises(AssertionError, match="expected 2 messages with channel='acme'; enqueued: 1"):
                await assert_enqueued(session, channel="acme", count=2)


def failure(session: Session, **expected: Any) -> list[str]:
    with pytest.raises(AssertionError) as failed:
        assert_enqueued(session, **expected)
    return str(failed.value).splitlines()


class TestWhatIsSaid:
    def test_the_closest_first(self, session: Session) -> None:
        put(session, "globex", payload={"doc": 2})
        put(session, "acme", payload={"doc": 1, "pages": [1, 2], "more": {}}, key="k")
        put(session, "acme", payload={"doc": 1, "pages": [1, 3]})
        lease_of(session)  # globex, the one that is first
        assert failure(session, channel="acme", payload={"doc": 1, "pages": [1, 4]}) == [
            "expected 1 message with channel='acme', payload={'doc': 1, 'pages': [1, 4]}; enqueued: 0",
            "The closest others:",
            "  3: queue 'default', channel 'acme', {'doc': 1, 'pages': [1, 3]}",
            "      payload['pages'][1] is 3, expected 4",
            "  2: queue 'default', channel 'acme', key 'k', {'doc': 1, 'more': {}, 'pages': [1, 2]}",
            "      payload['pages'][1] is 2, expected 4",
            "      payload['more'] is {}, expected nothing",
            "  1: queue 'default', channel 'globex', {'doc': 2}",
            "      it is leased",
            "      channel is 'globex', expected 'acme'",
            "      payload['doc'] is 2, expected 1",
            "      payload['pages'] is missing, expected [1, 4]",
        ]

    def test_too_many(self, session: Session) -> None:
        put(session, "acme", 7)
        lines = failure(session, channel="acme")
        assert lines[0] == "expected 1 message with channel='acme'; enqueued: 7"
        assert lines[1:] == [f"  {n}: queue 'default', channel 'acme', None" for n in range(1, 6)] + [
            "  ... and 2 more"
        ]

    def test_too_few(self, session: Session) -> None:
        (id_,) = put(session, "acme")
        assert failure(session, channel="acme", count=2) == [
            "expected 2 messages with channel='acme'; enqueued: 1",
            f"  {id_}: queue 'default', channel 'acme', None",
            "There are no others.",
        ]

    def test_none(self, session: Session) -> None:
        assert failure(session) == ["expected 1 message; enqueued: 0", "There are none that this session sees."]

    def test_times(self, engine: Engine, session: Session) -> None:
        with Clock(engine) as clock:
            clock.freeze()
            put(session, "acme", delay=60)
            put(session, "acme", dequeue_at=-(2**60))
            lines = failure(session, at=clock.now())
            now, soon = clock.now(), clock.now() + timedelta(seconds=60)
        text = "\n".join(lines)
        soon_text, now_text = (moment.isoformat(timespec="milliseconds") for moment in (soon, now))
        assert f"at is {soon_text}, expected {now_text}" in text
        assert f"at is {-(2**60)}, expected" in text

    def test_is_short(self, session: Session) -> None:
        """Whatever is in the queue: it is read in a terminal."""
        large = {f"field {number}": "x" * 1000 for number in range(20)}
        put(session, "acme", 100, payload={"doc": large, "list": list(range(1000))})
        text = "\n".join(failure(session, payload={"doc": {}, "list": []}))
        assert len(json.dumps(large)) > 20_000
        assert len(text) < 10_000
        assert "... and 95 more" in text
