"""How many INSERT statements each way of enqueueing takes.

One statement is one firing of the trigger `message_enqueued`, which appends one signal for each channel: so with one
channel, signals count statements. SQLAlchemy decides most of this, and may decide otherwise in a new release.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, func, insert, select, text
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.orm import Session

import fairqueue as fq
from fairqueue.models import signal

pytestmark = pytest.mark.shared_database

COUNT = 250
#: Of a tenth of SQLAlchemy's insertmanyvalues_page_size, which is 1000; test_pages_of_a_thousand has these.
PAGES = 3
ROWS = [{"channel": "acme", "payload": number} for number in range(COUNT)]
PAST = datetime(2001, 1, 1, tzinfo=UTC)


@pytest.fixture
def session(database_url: str) -> Iterator[Session]:
    engine = create_engine(database_url, insertmanyvalues_page_size=100)
    with Session(engine) as session:
        yield session
    engine.dispose()


def statements(session: Session) -> int:
    """How many INSERTs there were, all messages being of one channel."""
    counted = session.scalar(select(func.count()).select_from(signal))
    assert counted is not None
    return counted


def messages(session: Session) -> Sequence[fq.Message]:
    return session.scalars(select(fq.Message).order_by(fq.Message.id)).all()


class TestAddAll:
    @pytest.mark.parametrize(
        "fields",
        [
            lambda _: {},
            lambda n: {"payload": {"doc": n}},
            lambda n: {"payload": {"doc": n} if n % 2 else None},
            lambda n: {"cost": n + 1},
            lambda n: {"cost": n + 1} if n % 2 else {},
            lambda n: {"body": b"x" * n} if n % 3 else {"payload": n},
            lambda n: {"priority": n + 1},
            lambda _: {"at": PAST},
            lambda n: {"dequeue_at": n},
        ],
        ids=["nothing", "payload", "some payloads", "cost", "some costs", "bodies", "priority", "at", "dequeue_at"],
    )
    def test_in_pages(self, session: Session, fields: Any) -> None:
        """Whichever of the fields are given to which of the messages: they have the same attributes."""
        session.add_all(fq.Message("acme", **fields(number)) for number in range(COUNT))
        session.flush()
        assert statements(session) == PAGES

    def test_pages_of_a_thousand(self, engine: Engine) -> None:
        """So many have room in a statement, with all that a message may be given."""
        with Session(engine) as session:
            session.add_all(
                fq.Message("acme", n, body=b"x", key=str(n), dequeue_at=n, cost=2, max_attempts=3, backoff=1)
                for n in range(2_500)
            )
            session.flush()
            assert statements(session) == 3

    def test_enqueue_in_a_loop(self, session: Session) -> None:
        for number in range(COUNT):
            fq.enqueue(session, "acme", number)
        session.commit()
        assert statements(session) == PAGES

    def test_typed_messages(self, session: Session) -> None:
        class Document(fq.TypedMessage[dict[str, int]], payload_type=dict[str, int]):
            pass

        session.add_all(Document("acme", {"doc": number}) for number in range(COUNT))
        session.commit()
        assert statements(session) == PAGES

    def test_ids_in_the_order_of_add(self, session: Session) -> None:
        added = [fq.Message("acme", number) for number in range(COUNT)]
        session.add_all(added)
        session.flush()
        assert [message.id for message in added] == sorted(message.id for message in added)
        session.expunge_all()
        assert [message.payload for message in messages(session)] == list(range(COUNT))

    def test_many_channels(self, session: Session) -> None:
        """Still as many statements, now with a signal for each channel of each."""
        session.add_all(fq.Message(f"tenant {number % 10}") for number in range(COUNT))
        session.flush()
        assert statements(session) == PAGES * 10

    def test_delays_go_one_by_one(self, session: Session) -> None:
        """The database adds them up, which SQLAlchemy can't do in a batch: enqueue_many is the way."""
        session.add_all(fq.Message("acme", delay=60) for _ in range(20))
        session.flush()
        assert statements(session) == 20

    def test_mixing_scheduled_with_others_breaks_the_batch_up(self, session: Session) -> None:
        """The documented exception: each change between the two kinds begins a statement."""
        session.add_all(fq.Message("acme", priority=number % 2) for number in range(20))
        session.flush()
        assert statements(session) == 20
        fq.enqueue_many(
            session, [{"channel": "acme"} if n % 2 else {"channel": "acme", "priority": 1} for n in range(20)]
        )
        assert statements(session) == 21


class TestBulk:
    def test_enqueue_many(self, session: Session) -> None:
        """One statement, whatever the mixture; the ids are in the order of the rows."""
        mixture: list[fq.MessageRow] = [{"channel": "acme", "payload": number} for number in range(COUNT)]
        for number, row in enumerate(mixture):
            row.update([{}, {"delay": 60}, {"priority": 3}, {"at": PAST}, {"cost": 2}][number % 5])  # type: ignore[typeddict-item]
        ids = fq.enqueue_many(session, mixture)
        assert statements(session) == 1
        assert ids == sorted(ids)
        assert [message.payload for message in messages(session)] == list(range(COUNT))

    def test_enqueue_copy(self, session: Session) -> None:
        assert fq.enqueue_copy(session, ({"channel": "acme", "payload": n} for n in range(COUNT))) == COUNT
        assert statements(session) == 1
        assert [message.payload for message in messages(session)] == list(range(COUNT))

    def test_no_rows(self, session: Session) -> None:
        """A statement that inserts nothing signals nothing."""
        assert fq.enqueue_many(session, []) == []
        assert fq.enqueue_copy(session, []) == 0
        assert statements(session) == 0


class TestSQLAlchemysOwnInserts:
    def test_with_returning(self, session: Session) -> None:
        session.execute(insert(fq.Message).returning(fq.Message.id), ROWS)
        assert statements(session) == PAGES

    def test_without_returning_goes_one_by_one(self, session: Session) -> None:
        """A trap: psycopg's executemany sends as many statements as rows, and the trigger fires for each."""
        session.execute(insert(fq.Message), ROWS[:50])
        assert statements(session) == 50

    def test_values(self, session: Session) -> None:
        session.execute(insert(fq.Message).values(ROWS))
        assert statements(session) == 1

    def test_on_conflict(self, session: Session) -> None:
        """The trigger sees the rows that were really inserted, and none where none was."""
        first = pg_insert(fq.Message).on_conflict_do_nothing()
        session.execute(first.returning(fq.Message.id), ROWS)
        assert statements(session) == PAGES
        session.execute(
            text(
                "INSERT INTO fairqueue.message (id, channel) OVERRIDING SYSTEM VALUE"
                " SELECT id, 'other' FROM fairqueue.message ON CONFLICT DO NOTHING"
            )
        )
        assert statements(session) == PAGES
        assert session.scalar(select(func.count()).select_from(fq.Message)) == COUNT
