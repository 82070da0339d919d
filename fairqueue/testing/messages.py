"""What has been enqueued: looking at it, and saying what it has to be.

::

    import fairqueue as fq
    from fairqueue.testing import assert_enqueued, enqueued

    fq.enqueue(session, "acme", {"path": "a.pdf", "pages": 3})
    fq.enqueue(session, "acme", {"path": "b.pdf", "pages": 7})

    assert_enqueued(session, channel="acme", payload={"path": "a.pdf", "pages": 3})     # exactly one such message
    assert_enqueued(session, containing={"path": "b.pdf"})                              # with more in its payload
    assert_enqueued(session, channel="acme", count=2)
    assert_enqueued(session, channel="globex", count=0)

    assert [message.payload["pages"] for message in enqueued(session)] == [3, 7]
    session.rollback()

Both see what the session itself sees: what it has added or written, committed or not, and what others have committed.
With an AsyncSession they return an awaitable.

Enqueued are the messages that are ready, or will be when their time comes; those that failed and will be tried again
are among them. Not enqueued is what is leased, completed, or dead.
"""

from __future__ import annotations

from collections.abc import Coroutine
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

from sqlalchemy import select
from sqlalchemy.orm import Session

from fairqueue._checks import check_count, check_moment, check_name
from fairqueue._sessions import BIND, run_in
from fairqueue.errors import InvalidValue
from fairqueue.models import Message
from fairqueue.schedule import dequeue_at

from ._matching import Expected, report

if TYPE_CHECKING:
    from fairqueue._sessions import AnyAsyncSession, SyncSession

__all__ = ["assert_enqueued", "enqueued"]


class _Fields(TypedDict, total=False):
    """What can be said of a message."""

    queue: str
    channel: str
    payload: Any
    containing: dict[str, Any]
    key: str | None
    at: datetime
    dequeue_at: int
    priority: int


@overload
def enqueued(session: SyncSession, **fields: Unpack[_Fields]) -> list[Message]: ...
@overload
def enqueued(session: AnyAsyncSession, **fields: Unpack[_Fields]) -> Coroutine[Any, Any, list[Message]]: ...
def enqueued(session: Any, **fields: Any) -> Any:
    """The messages that are enqueued and have all that is given, in the order in which they were enqueued.

    What is left out isn't compared.

    :param session: a Session; for an AsyncSession, an awaitable is returned.
    :param queue: the queue; ``"default"`` is one, too.
    :param channel: the channel.
    :param payload: the whole payload as JSON data, compared with ``==``, so ``mock.ANY`` and ``pytest.approx`` work;
        but ``True`` isn't 1, a tuple is as good as a list, and None is a message without one.
    :param containing: what the payload has among other things, likewise in dicts within it. Lists are compared whole.
    :param key: the key; None is a message without one.
    :param at: when the message is due, to the millisecond, as a datetime with a time zone.
    :param dequeue_at: the same as Unix time in milliseconds, as it is stored.
    :param priority: 1 or more; a message without one is due at a time.
    :returns: :class:`fairqueue.Message` objects of no session: they stay as they were.
    :raises InvalidValue: if a parameter can't be; of ``at``, ``dequeue_at`` and ``priority`` only one may be given.
    :raises TypeError: if there is no such field.
    """
    expected = _expected(fields)

    def run(session: Session) -> list[Message]:
        return [message for message in _live(session) if not expected.differences(message)]

    return run_in(session, run)


@overload
def assert_enqueued(session: SyncSession, *, count: int = 1, **fields: Unpack[_Fields]) -> list[Message]: ...
@overload
def assert_enqueued(
    session: AnyAsyncSession, *, count: int = 1, **fields: Unpack[_Fields]
) -> Coroutine[Any, Any, list[Message]]: ...
def assert_enqueued(session: Any, *, count: int = 1, **fields: Any) -> Any:
    """Raise AssertionError unless just ``count`` messages are :func:`enqueued` that have all that is given.

    The error shows those that come closest, and how they differ. For "at least one", say
    ``assert enqueued(session, ...)``.

    :param count: how many there have to be, 0 or more. The other parameters are those of :func:`enqueued`.
    :returns: these messages.
    :raises AssertionError: if there are more or fewer.
    :raises InvalidValue: if a parameter can't be.
    :raises TypeError: if there is no such field.
    """
    __tracebackhide__ = True
    check_count("count", count, 0)
    expected = _expected(fields)

    def run(session: Session) -> tuple[list[Message], str | None]:
        compared = [(expected.differences(message), message) for message in _live(session)]
        found = [message for differences, message in compared if not differences]
        if len(found) == count:
            return found, None
        return found, report(expected, count, found, [each for each in compared if each[0]])

    answer = run_in(session, run)
    # Raised from here, so that pytest shows the line of the test and nothing of ours.
    return _asserted(*answer) if isinstance(answer, tuple) else _awaited(answer)


async def _awaited(answer: Coroutine[Any, Any, tuple[list[Message], str | None]]) -> list[Message]:
    __tracebackhide__ = True
    return _asserted(*await answer)


def _asserted(found: list[Message], problem: str | None) -> list[Message]:
    __tracebackhide__ = True
    if problem is not None:
        raise AssertionError(problem)
    return found


def _expected(given: dict[str, Any]) -> Expected:
    if unknown := given.keys() - _Fields.__annotations__.keys():
        raise TypeError(f"unknown field {', '.join(sorted(unknown))}")
    for name in given.keys() & {"queue", "channel"}:
        check_name(name, given[name])
    if given.get("key") is not None:
        check_name("key", given["key"])
    if "at" in given:
        check_moment("at", given["at"])
    if "dequeue_at" in given and given["dequeue_at"] is None:
        raise InvalidValue("dequeue_at must be Unix time in whole milliseconds, not None: leave it out")
    if "priority" in given and not given["priority"]:
        raise InvalidValue(
            f"priority must be 1 or more, not {given['priority']!r}: a message without one is due at a time, so leave"
            " it out, or say at"
        )
    due = {name: given.pop(name) for name in ("at", "priority", "dequeue_at") if name in given}
    if due:
        given["at" if "at" in due else "dequeue_at"] = dequeue_at(**due)
    if not isinstance(given.get("containing", {}), dict):
        raise InvalidValue(f"containing must be a dict, not {given['containing']!r}: for other JSON there is payload")
    return Expected(given)


def _live(session: Session) -> list[Message]:
    """All messages, ready or leased, as this session sees them."""
    session.flush()
    # Read by another session on its connection, they are nothing that the application's own session would refresh.
    # Without a savepoint, which there is none of in AUTOCOMMIT.
    connection = session.connection(bind_arguments=BIND)
    with Session(connection, join_transaction_mode="rollback_only") as reader:
        return list(reader.scalars(select(Message).order_by(Message.id)))
