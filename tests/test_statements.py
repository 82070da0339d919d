"""The statements that the functions make: what is asked for again is neither built nor compiled again."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, event, union_all
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import lease_of, put


class NoteMessage(fq.TypedMessage[dict[str, int]]):
    payload_type = dict[str, int]


def test_the_same_dequeue_is_one_statement() -> None:
    assert fq.dequeue(limit=2, lease=60) is fq.dequeue(limit=2, lease=timedelta(minutes=1), queue="default")


def test_another_dequeue_is_another_statement() -> None:
    statements = [
        fq.dequeue(),
        fq.dequeue(limit=2),
        fq.dequeue(lease=31),
        fq.dequeue(queue="mail"),
        fq.dequeue(worker="w"),
        fq.dequeue(message_type=NoteMessage),
    ]
    assert len(set(map(id, statements))) == len(statements)


ACTS: dict[str, Callable[[Session, int], Any]] = {
    "enqueue_many": lambda session, n: fq.enqueue_many(session, [{"channel": f"c{n}", "payload": i} for i in range(n)]),
    "enqueue_many, rarely": lambda session, n: fq.enqueue_many(session, [{"channel": f"c{n}", "max_attempts": n}]),
    "enqueue_many with keys": lambda session, n: fq.enqueue_many(session, [{"channel": f"c{n}", "key": f"k{n}"}]),
    "enqueue_unique": lambda session, n: fq.enqueue_unique(session, f"c{n}", {"n": n}, key=f"k{n}"),
    "dequeue": lambda session, n: session.scalars(fq.dequeue(limit=n, lease=n)).all(),
    "complete": lambda session, n: session.execute(fq.complete([(n, i) for i in range(n)])).all(),
    "fail": lambda session, n: session.execute(fq.fail([(n, 1)], f"it was {n}", delay=n)).all(),
    "heartbeat": lambda session, n: session.execute(fq.heartbeat([(n, 1)], lease=n)).all(),
}


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_other_values_are_compiled_no_more(
    engine: Engine, session: Session, act: Callable[[Session, int], Any]
) -> None:
    known: list[bool] = []

    @event.listens_for(engine, "before_cursor_execute")
    def note(*arguments: Any) -> None:
        known.append(arguments[4].cache_hit.name == "CACHE_HIT")

    act(session, 1)
    assert not all(known)
    known.clear()
    for number in (2, 3):
        act(session, number)
    assert known
    assert all(known)


def test_several_in_one_statement(session: Session) -> None:
    """Each has its own values."""
    put(session, "acme", 2)
    first, second = lease_of(session, 2)
    completions: list[Any] = [fq.complete(first), fq.complete([(second.id, 7)])]
    both = session.execute(union_all(*completions)).all()
    assert sorted((row.id, row.result) for row in both) == [(first.id, "completed"), (second.id, "stale")]
