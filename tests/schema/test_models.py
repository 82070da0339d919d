"""The models in an application: beside its own, through its sessions, in its create_all().

What they refuse is in enqueueing/test_bad_input.py; how they are batched, in test_batching.py there; typed payloads, in
test_payloads.py there.
"""

import asyncio
import copy
import dataclasses
import pickle
import re
from datetime import UTC, datetime
from inspect import signature as inspect_signature
from typing import Any

import pytest
from sqlalchemy import (
    Column,
    Engine,
    ForeignKey,
    Integer,
    MetaData,
    Table,
    create_mock_engine,
    event,
    inspect,
    make_url,
    select,
    text,
)
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

import fairqueue as fq
from fairqueue import schema
from tests.acts import put, take
from tests.catalog import snapshot
from tests.fixtures.connections import Raw
from tests.observing import observer


def host(**attached: Any) -> tuple[type[DeclarativeBase], type[Any]]:
    """An application: a base class with conventions of its own, and a table that refers to messages."""

    class Base(DeclarativeBase):
        metadata = MetaData(naming_convention={"pk": "primary_%(table_name)s", "ix": "index_%(table_name)s"})

    class Invoice(Base):
        __tablename__ = "invoice"
        id: Mapped[int] = mapped_column(primary_key=True)
        message_id: Mapped[int | None] = mapped_column(ForeignKey(fq.Message.id, ondelete="SET NULL"))
        message: Mapped[fq.Message | None] = relationship(fq.Message)

    fq.attach(Base.metadata, **attached)
    return Base, Invoice


class TestMessage:
    def test_attributes_before_the_flush(self) -> None:
        message = fq.Message("acme", {"doc": 1})
        assert (message.channel, message.payload, message.queue, message.cost) == ("acme", {"doc": 1}, "default", 1)
        assert message.id is None

    def test_attributes_after_the_flush(self, engine: Engine, session: Session) -> None:
        """What the database filled in came back with the INSERT: one statement."""
        sent: list[str] = []
        event.listen(engine, "before_cursor_execute", lambda *context: sent.append(context[2]))
        message = fq.enqueue(session, "acme")
        session.flush()
        assert message.id == 1
        assert message.attempt == 0
        assert message.dequeue_at > 1_700_000_000_000
        assert message.created_at.tzinfo is not None
        assert [message.leased_until, message.state, message.error, message.body, message.key] == [None] * 5
        assert len(sent) == 1
        assert not re.search("leased|state|error|worker|forgiven|attempt[,)]|counted", sent[0].split("RETURNING")[0])

    def test_edit_before_it_is_served(self, session: Session) -> None:
        """A ready message is a row like any: its place and its payload can be changed."""
        first, second = fq.enqueue(session, "acme", 1), fq.enqueue(session, "acme", 2)
        session.commit()
        second.dequeue_at = first.dequeue_at - 1
        first.payload = {"changed": True}
        session.commit()
        assert [m.payload for m in session.scalars(fq.dequeue(limit=2))] == [2, {"changed": True}]

    def test_delete_before_it_is_served(self, session: Session) -> None:
        undone, kept = fq.enqueue(session, "acme", 1), fq.enqueue(session, "acme", 2)
        session.commit()
        session.delete(undone)
        session.commit()
        assert [m.id for m in session.scalars(fq.dequeue(limit=2))] == [kept.id]

    @pytest.mark.parametrize(
        "field",
        ["id", "attempt", "forgiven", "leased_until", "leased_at", "first_leased_at", "worker", "counted", "state",
         "error", "created_at"],
    )  # fmt: skip
    def test_what_is_the_schedulers(self, field: str) -> None:
        """Mapped, and not to be given."""
        assert hasattr(fq.Message, field)
        with pytest.raises(TypeError, match=field):
            fq.Message("acme", **{field: None})  # type: ignore[arg-type]

    def test_every_column_is_one_or_the_other(self) -> None:
        parameters = set(inspect_signature(fq.Message).parameters)
        given = set(fq.Message.__table__.c.keys()) & parameters
        assert given == {
            "queue", "channel", "key", "payload", "body", "dequeue_at", "cost", "max_attempts", "backoff",
        }  # fmt: skip
        assert parameters - given == {"delay", "at", "priority"}


class TestPolicies:
    """More of them in limits/test_policies.py."""

    def test_can_be_asked(self, session: Session) -> None:
        session.add(fq.Queue(name="transcode"))
        session.add(fq.Channel("acme", weight=2))
        session.commit()
        assert session.get_one(fq.Queue, "transcode").created_at.tzinfo is not None
        channel = session.scalars(select(fq.Channel)).one()
        assert (channel.queue, channel.name, channel.weight, channel.paused) == ("default", "acme", 2, False)
        assert channel.created_at.tzinfo is not None

    def test_twice_is_an_error(self, session: Session) -> None:
        for make in (lambda: fq.Channel("acme"), lambda: fq.Queue(name="q")):
            session.add(make())
            session.commit()
            session.expunge_all()
            session.add(make())
            with pytest.raises(IntegrityError, match="duplicate key"):
                session.commit()
            session.rollback()

    def test_history_can_be_asked(self, session: Session) -> None:
        assert session.scalars(select(fq.History)).all() == []


class TestHostModels:
    def test_create_all_and_drop_all(self, empty: Engine, empty_database_url: str, raw: Raw) -> None:
        """The queue before the tables that refer to it, and after them; again changes nothing; nothing stays."""
        watching = observer(raw, empty_database_url)
        before = snapshot(watching)
        base, _ = host()
        base.metadata.create_all(empty)
        created = snapshot(watching)
        base.metadata.create_all(empty)
        assert snapshot(watching) == created
        with empty.connect() as connection:
            fq.verify(connection)
        assert inspect(empty).get_pk_constraint("invoice")["name"] == "primary_invoice"
        assert inspect(empty).get_pk_constraint("message", "fairqueue")["name"] == "message_pkey"
        base.metadata.drop_all(empty)
        assert snapshot(watching) == before
        base.metadata.drop_all(empty)
        assert snapshot(watching) == before

    def test_drop_all_of_some_tables(self, empty: Engine, empty_database_url: str, raw: Raw) -> None:
        """The queue stays, unless they are all."""
        watching = observer(raw, empty_database_url)
        before = snapshot(watching)
        base, invoice = host()
        other = Table("other", base.metadata, Column("id", Integer))
        base.metadata.create_all(empty)
        with Session(empty) as session:
            put(session, "acme")
            for some in ([], [other], [invoice.__table__], [other]):
                base.metadata.drop_all(empty, tables=some)
            assert take(session) == ["acme"]
        base.metadata.create_all(empty, tables=[other])
        base.metadata.drop_all(empty, tables=[other, invoice.__table__])
        assert snapshot(watching) == before

    def test_relationship(self, empty: Engine) -> None:
        base, invoice = host()
        base.metadata.create_all(empty)
        with Session(empty) as session:
            session.add(invoice(id=7, message=fq.Message("acme", {"invoice": 7})))
            session.commit()
            assert session.get_one(invoice, 7).message.payload == {"invoice": 7}
            [message] = session.scalars(fq.dequeue())
            session.commit()
            session.execute(fq.complete(message))
            session.commit()
            assert session.get_one(invoice, 7).message_id is None

    def test_several_schemas(self, empty: Engine, empty_database_url: str, raw: Raw) -> None:
        watching = observer(raw, empty_database_url)
        before = snapshot(watching)
        metadata = MetaData()
        theirs = Table("theirs", metadata, Column("id", Integer))
        for name in ("My Q", "fairqueue", "other"):
            fq.attach(metadata, schema=name)
        metadata.create_all(empty)
        for number, name in enumerate(("My Q", "fairqueue", "other")):
            with Session(empty.execution_options(**fq.in_schema(name))) as session:
                session.add(fq.Message("acme", number))
                session.add(fq.Channel("acme"))
                session.commit()
                assert [m.payload for m in session.scalars(fq.dequeue(limit=9))] == [number]
                assert session.scalars(select(theirs.c.id)).all() == [], "it is where it was"
        metadata.drop_all(empty)
        assert snapshot(watching) == before

    def test_attached_twice(self, empty: Engine) -> None:
        metadata = MetaData()
        for _ in range(3):
            fq.attach(metadata)
        sent: list[str] = []
        event.listen(empty, "before_cursor_execute", lambda *context: sent.append(context[2]))
        metadata.create_all(empty)
        assert sum("CREATE TABLE message" in statement for statement in sent) == 1
        assert sum(statement.startswith("SELECT pg_advisory") for statement in sent) == 2

    def test_somebody_elses(self, empty: Engine, empty_database_url: str, raw: Raw) -> None:
        """manage=False: nothing is installed, nothing is removed."""
        watching = observer(raw, empty_database_url)
        before = snapshot(watching)
        metadata = MetaData()
        fq.attach(metadata, manage=False)
        metadata.create_all(empty)
        assert snapshot(watching) == before
        with empty.begin() as connection:
            schema.install(connection)
        installed = snapshot(watching)
        metadata.drop_all(empty)
        assert snapshot(watching) == installed
        fq.attach(metadata, manage=True)
        metadata.drop_all(empty)
        assert snapshot(watching) == before

    def test_printing_the_tables(self) -> None:
        """As SQLAlchemy's manual does it: there is no database to look into whether the queue is there."""
        metadata = MetaData()
        Table("invoice", metadata, Column("id", Integer))
        printed: list[str] = []
        engine = create_mock_engine("postgresql+psycopg://", lambda statement, *_: printed.append(str(statement)))
        fq.attach(metadata)
        for act in (metadata.create_all, metadata.drop_all):
            with pytest.raises(fq.InvalidValue, match=r"not be one of a MockConnection: .*install_sql.*manage=False"):
                act(engine, checkfirst=False)
        fq.attach(metadata, manage=False)
        printed.clear()
        metadata.create_all(engine, checkfirst=False)
        assert ["CREATE TABLE invoice" in statement for statement in printed] == [True]

    def test_own_metadata_refuses(self, empty: Engine) -> None:
        """Tables alone, without functions and triggers, would take messages and never serve them."""
        with pytest.raises(fq.FairqueueError, match=r"call fairqueue.attach\(Base.metadata\)"):
            fq.Message.metadata.create_all(empty)
        assert not inspect(empty).has_schema("fairqueue")

    def test_wrong_version_is_told(self, engine: Engine) -> None:
        base, _ = host()
        with engine.begin() as connection:
            for name in ("version", "serves"):
                connection.execute(
                    text(f"CREATE OR REPLACE FUNCTION fairqueue.schema_{name}() RETURNS int LANGUAGE sql RETURN 99")
                )
        with pytest.raises(fq.SchemaVersionError, match="holds version 99"):
            base.metadata.create_all(engine)


class TestLeasedMessage:
    @pytest.fixture
    def leased(self, session: Session) -> fq.LeasedMessage:
        fq.enqueue(session, "acme", {"doc": 1}, body=b"x", cost=2)
        session.commit()
        leased: fq.LeasedMessage = session.scalars(fq.dequeue()).one()
        return leased

    def test_is_a_value(self, session: Session, leased: fq.LeasedMessage) -> None:
        """No session refreshes it: after a commit, a rollback, an expiry it says what the lease said."""
        known = dataclasses.asdict(leased)
        session.commit()
        session.execute(text("UPDATE fairqueue.message SET attempt = 7, payload = '2'"))
        session.commit()
        session.expire_all()
        session.close()
        assert dataclasses.asdict(leased) == known
        assert (leased.id, leased.queue, leased.channel, leased.attempt) == (1, "default", "acme", 1)
        assert (leased.payload, leased.body, leased.cost) == ({"doc": 1}, b"x", 2)
        assert leased.first_leased_at is not None
        assert leased.created_at < leased.first_leased_at < datetime.now(UTC) < leased.leased_until

    def test_can_be_told_apart(self, leased: fq.LeasedMessage) -> None:
        assert {leased, dataclasses.replace(leased), dataclasses.replace(leased, attempt=2)} == {
            leased,
            dataclasses.replace(leased, attempt=2),
        }

    def test_can_be_sent_elsewhere(self, leased: fq.LeasedMessage) -> None:
        assert pickle.loads(pickle.dumps(leased)) == copy.deepcopy(leased) == leased  # noqa: S301

    def test_cannot_be_changed(self, leased: fq.LeasedMessage) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            leased.attempt = 2  # type: ignore[misc]

    def test_is_not_the_entity(self, session: Session, leased: fq.LeasedMessage) -> None:
        """Both can be had in one session, and don't meet."""
        entity = session.get_one(fq.Message, leased.id)
        entity.payload = 2
        session.flush()
        assert leased.payload == {"doc": 1}

    def test_all_the_ways_to_fetch(self, session: Session) -> None:
        fq.enqueue_many(session, [{"channel": "acme"} for _ in range(5)])
        assert session.scalars(fq.dequeue()).one().id == 1
        second = session.scalar(fq.dequeue())
        assert second is not None
        assert second.id == 2
        [(third,)] = session.execute(fq.dequeue())
        [row] = session.execute(fq.dequeue()).mappings()
        assert (third.id, row["message"].id) == (3, 4)
        assert session.connection().execute(fq.dequeue()).first() is not None


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_async_session(database_url: str, driver: str) -> None:
    """The same models and statements, awaited."""

    async def main() -> None:
        engine = create_async_engine(make_url(database_url).set(drivername=f"postgresql+{driver}"))
        async with AsyncSession(engine) as session:
            session.add(fq.Message("acme", {"doc": [1, None, "é"]}, body=b"\x00", priority=3))
            session.add_all([fq.Message("acme", n, delay=0) for n in range(4)])
            session.add(fq.Channel("acme", weight=2))
            await session.commit()
            batch = (await session.scalars(fq.dequeue(limit=5, lease=60))).all()
            await session.commit()
            assert [m.payload for m in batch] == [{"doc": [1, None, "é"]}, 0, 1, 2, 3]
            assert batch[0].body == b"\x00"
            assert batch[0].dequeue_at == -3
            assert batch[0].leased_until.tzinfo is not None
            statements = {
                "extended": fq.heartbeat(batch[0], lease=90),
                "completed": fq.complete(batch[0]),
                "failed": fq.fail(batch[1], ValueError("broken"), delay=0),
                "deferred": fq.defer(batch[2], state={"page": 2}),
                "cancelled": fq.cancel([batch[3].id]),
                "stale": fq.complete(batch[1]),
                "not_found": fq.complete([batch[0]]),
            }
            for told, statement in statements.items():
                assert (await session.execute(statement)).one().result == told
            await session.commit()
            again = {m.id: m for m in await session.scalars(fq.dequeue(limit=9))}
            assert again[batch[1].id].error == "ValueError: broken"
            assert again[batch[2].id].state == {"page": 2}
            await session.commit()
        await engine.dispose()

    asyncio.run(main())
