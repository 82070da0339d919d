"""Consuming: statements that lease messages and end leases, for Session and AsyncSession alike.

::

    import fairqueue as fq

    with Session(engine) as session:
        batch = session.scalars(fq.dequeue(limit=10, lease=30)).all()
        session.commit()                        # at once: the lease keeps the messages, not the transaction

    for message in batch:
        with Session(engine) as session:
            session.add(Invoice(...))           # the work, in the transaction that also completes the message
            outcome = session.execute(fq.complete(message)).one()
            if outcome.result == fq.Outcome.COMPLETED:
                session.commit()

Every function returns a statement; nothing is sent before a session executes it. With an AsyncSession::

    batch = (await session.scalars(fq.dequeue(limit=10))).all()

A session of several databases is told which one, as a statement of functions names no model::

    batch = session.scalars(fq.dequeue(limit=10), bind_arguments={"mapper": fq.Message.__mapper__}).all()

A lease is (message id, attempt). :func:`complete` and its siblings act on the messages whose lease still is the one
that is given, and return a row ``(id, result)`` for each, in the order given; so a worker that was too slow is told
``"stale"`` and has to roll back its work, which another worker is doing again.

A message that has failed as often as its ``max_attempts`` says, or its queue's, is a dead letter. It is kept, and can
be put back::

    from sqlalchemy import select

    for letter in session.scalars(select(fq.DeadMessage).where(fq.DeadMessage.queue == "default")):
        print(letter.channel, letter.attempt, letter.error)
    session.execute(fq.redrive(queue="default"))
    session.commit()

Limitations: :func:`dequeue` needs a READ COMMITTED transaction, and holds the turn of its queue until that ends: other
dequeues of the queue wait for it (10 s at most, then they raise). A transaction that has already written doesn't wait,
and gets nothing, as waiting could deadlock; one that holds an advisory lock or a LOCK TABLE isn't recognised as such.
Producers never wait for a dequeue; completions, and producers whose messages are dropped, only for that which, once a
day, drops the oldest day of history, until it commits. In REPEATABLE READ and SERIALIZABLE transactions PostgreSQL may
refuse a completion with a serialization failure: if the lease was extended after the transaction began, and, when it
is SERIALIZABLE, if others enqueue at the same time; try it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, overload

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    Double,
    Integer,
    Row,
    Text,
    cast,
    column,
    func,
    literal,
    select,
)
from sqlalchemy.dialects.postgresql import JSONB, array
from sqlalchemy.orm import Bundle
from typing_extensions import TypeVar

from ._checks import check_count, check_flag, check_name, check_seconds
from ._functions import SchemaFunction
from .errors import InvalidValue
from .leases import LeasedMessage, Leases, Messages, Outcome, is_lease, lease_arrays, listed, message_ids
from .models import Message, TypedMessage
from .models.messages import check_message_type
from .payloads import Unread, json_text, lazily

if TYPE_CHECKING:
    # As SQLAlchemy 2.1 has it: one parameter a column.
    from sqlalchemy.sql.selectable import TypedReturnsRows

    Results = TypedReturnsRows[int, str]

__all__ = ["LeasedMessage", "Outcome", "cancel", "complete", "defer", "dequeue", "fail", "heartbeat", "redrive"]

P = TypeVar("P", default=Any)


class _LeaseBundle(Bundle[Any]):
    """Reads the columns of a row into one :class:`LeasedMessage`."""

    inherit_cache = True

    def create_row_processor(
        self, query: Any, procs: Sequence[Callable[[Row[Any]], Any]], labels: Sequence[str]
    ) -> Callable[[Row[Any]], Any]:
        def process(row: Row[Any]) -> LeasedMessage[Any]:
            values = {label: proc(row) for label, proc in zip(labels, procs, strict=True)}
            for name in ("raw", "state"):  # a state that can't be read keeps the payload from being read, too
                if isinstance(values[name], Unread):
                    values[name], values["reader"] = values[name]
            return LeasedMessage(**values)

        return process


@overload
def dequeue(
    *, limit: int = 1, lease: float | timedelta = 30, queue: str = "default", worker: str | None = None
) -> TypedReturnsRows[LeasedMessage[Any]]: ...
@overload
def dequeue(
    *,
    limit: int = 1,
    lease: float | timedelta = 30,
    queue: str = "default",
    worker: str | None = None,
    message_type: type[TypedMessage[P]],
) -> TypedReturnsRows[LeasedMessage[P]]: ...
def dequeue(
    *,
    limit: int = 1,
    lease: float | timedelta = 30,
    queue: str = "default",
    worker: str | None = None,
    message_type: type[TypedMessage[Any]] = Message,
) -> TypedReturnsRows[LeasedMessage[Any]]:
    """Lease up to ``limit`` messages; execute with ``session.scalars()`` and commit at once.

    :param limit: how many, 1 to 10,000. Fewer come back only when fewer are eligible, or when thousands of channels,
        leases or policies had to be gone through first: the next call goes on.
    :param lease: for how long, in seconds or as a timedelta. Then they go back to their channels.
    :param queue: whose channels compete.
    :param worker: the name of who leases them, at most 255 characters; kept with the message and in its history.
    :param message_type: the class whose ``payload_type`` the payloads are read as.
    :raises InvalidValue: naming the parameter.
    :returns: a statement; its rows are :class:`LeasedMessage` in the order in which they were scheduled. Executed, it
        raises SQLAlchemy's DBAPIError where another dequeue has held the queue for 10 s (an OperationalError with
        psycopg, SQLSTATE 55P03), and where the transaction isn't READ COMMITTED (25001).
    """
    return _dequeue(
        check_name("queue", queue),
        check_count("limit", limit, 1, 10_000),
        check_seconds("lease", lease, 0.001),
        None if worker is None else check_name("worker", worker),
        check_message_type(message_type),
    )


# Who consumes asks for the same again and again. Making the statement, and having SQLAlchemy find out that it knows it,
# takes longer than what the server does for one message; a statement never changes, so it serves all who ask for it.
@lru_cache(maxsize=128, typed=True)
def _dequeue(
    queue: str, limit: int, seconds: float, worker: str | None, message_type: type[TypedMessage[Any]]
) -> TypedReturnsRows[LeasedMessage[Any]]:
    row = SchemaFunction(
        "message_dequeue", cast(queue, Text), cast(limit, Integer), cast(seconds, Double), cast(worker, Text)
    ).table_valued(*(column(name, Message.__table__.c[name].type) for name in _RETURNED), name="leased")
    stored = message_type.__mapper__.columns["payload"]
    values = {name: lazily(row.c[name]) for name in _RETURNED if name != "payload"} | {
        "queue": literal(queue, Text),
        "raw": lazily(row.c[stored.name], stored.type),
    }
    return select(_LeaseBundle("message", *(value.label(name) for name, value in values.items())))


def complete(leases: Leases) -> Results:
    """End leases whose work is done; the messages are gone when the transaction commits.

    Best in the transaction of the work itself: then its effects and the completion commit together, or not at all.
    Results: ``"completed"``, ``"stale"``, ``"not_found"``.

    :param leases: one :class:`LeasedMessage`, or any number, or pairs of (id, attempt).
    :raises InvalidValue: for what is none.
    :returns: a statement, to be executed: its rows are ``(id, result)``.
    """
    return _results("message_complete", *lease_arrays(leases))


def fail(
    leases: Leases,
    error: str | BaseException | None = None,
    *,
    delay: float | timedelta | None = None,
    retry: bool = True,
) -> Results:
    """End leases whose work failed; the messages will be tried again, until they have used up their attempts.

    Results: ``"failed"``, ``"dead"``, ``"stale"``, ``"not_found"``. How many attempts there are, and how the delay
    grows, is said by the message's ``max_attempts`` and ``backoff``, else by its :class:`fairqueue.Queue`.

    :param leases: as for :func:`complete`.
    :param error: what went wrong; kept with the message for the next attempt to see.
    :param delay: seconds or a timedelta before the next attempt. None: the backoff, doubled with each failure and
        spread at random. With 0 a message keeps its place in its channel.
    :param retry: False: no further attempt would help; the messages are dead letters at once.
    :raises InvalidValue: naming the parameter.
    :returns: a statement, to be executed: its rows are ``(id, result)``.
    """
    text = None if error is None else error_text("error", error)
    seconds = _delay(delay)
    return _results(
        "message_fail", *lease_arrays(leases), cast(text, Text), seconds, cast(check_flag("retry", retry), Boolean)
    )


def defer(leases: Leases, *, delay: float | timedelta | None = None, state: Any = None) -> Results:
    """End leases whose work is to go on later; which is no failure, and uses up no attempt.

    Results: ``"deferred"``, ``"stale"``, ``"not_found"``.

    :param leases: as for :func:`complete`.
    :param delay: seconds or a timedelta before the next attempt. None: at once, but behind what is ready in the
        channel by then. With 0 at once, in its old place.
    :param state: JSON that the next attempt finds in ``message.state``. None leaves what an earlier one saved.
    :raises InvalidValue: naming the parameter.
    :returns: a statement, to be executed: its rows are ``(id, result)``.
    """
    ids, attempts = lease_arrays(leases)
    saved = (
        None
        if state is None
        else func.array_fill(cast(literal(json_text(state, "state"), Text), JSONB), array([func.cardinality(ids)]))
    )
    return _results("message_defer", ids, attempts, _delay(delay), cast(saved, ARRAY(JSONB)))


def heartbeat(leases: Leases, *, lease: float | timedelta = 30) -> Results:
    """Extend leases to ``lease`` seconds from now; never shortens one.

    Results: ``"extended"``, ``"busy"``, ``"stale"``, ``"not_found"`` (completed or cancelled: stop working on it).

    :param leases: as for :func:`complete`.
    :param lease: seconds or a timedelta, 0.001 at least.
    :raises InvalidValue: naming the parameter.
    :returns: a statement, to be executed: its rows are ``(id, result)``.
    """
    return _results("message_heartbeat", *lease_arrays(leases), cast(check_seconds("lease", lease, 0.001), Double))


def cancel(messages: Messages | Leases, error: str | BaseException | None = None) -> Results:
    """Take messages out of the queue for good.

    An id or a :class:`fairqueue.Message` means the message, ready or leased; who works on it learns that at the next
    heartbeat or completion. A :class:`LeasedMessage` or a pair of (id, attempt) means a lease, as for :func:`complete`:
    what has become somebody else's stays. Results: ``"cancelled"``, ``"not_found"``, of a lease ``"stale"``, too.

    :param messages: one of these, or any number, but leases not among others; two ids in a list, as a tuple is a pair.
    :param error: why; kept in history.
    :raises InvalidValue: for what is none, for leases among others, and for a message that isn't flushed.
    :returns: a statement, to be executed: its rows are ``(id, result)``.
    """
    given: list[Any] = listed(messages)
    leases = [each for each in given if is_lease(each)]
    if leases and len(leases) < len(given):
        raise InvalidValue(
            f"messages must be all leases or none of them, but {len(leases)} of {len(given)} are: cancel these by"
            " themselves"
        )
    ids, attempts = (
        lease_arrays(leases) if leases else (cast(message_ids(given), ARRAY(BigInteger)), cast(None, ARRAY(Integer)))
    )
    text = None if error is None else error_text("error", error)
    return _results("message_cancel", ids, attempts, cast(text, Text))


@overload
def redrive(messages: Messages) -> Results: ...
@overload
def redrive(*, queue: str, channel: str | None = None) -> Results: ...
def redrive(messages: Messages | None = None, *, queue: str | None = None, channel: str | None = None) -> Results:
    """Put dead letters back into their channels, with all their attempts before them.

    Results: ``"redriven"``, ``"not_found"``, ``"duplicate"`` (a live message of the channel has its key: it stays
    dead). A message keeps its id, state and last error.

    :param messages: one id or :class:`fairqueue.DeadMessage`, or any number; or instead of these
    :param queue: all dead letters of a queue,
    :param channel: and, if given, of this channel only.
    :raises InvalidValue: naming the parameter, or if not one of messages and queue is given.
    :returns: a statement, to be executed: its rows are ``(id, result)``.
    """
    if (messages is None) == (queue is None):
        raise InvalidValue(f"one of messages and queue must be given, not {'none' if queue is None else 'both'}")
    if channel is not None and queue is None:
        raise InvalidValue(f"channel {channel!r} must be given with its queue, not with messages")
    return _results(
        "message_redrive",
        cast(None if messages is None else message_ids(messages), ARRAY(BigInteger)),
        cast(None if queue is None else check_name("queue", queue), Text),
        cast(None if channel is None else check_name("channel", channel), Text),
    )


_RETURNED = (
    "id",
    "channel",
    "attempt",
    "payload",
    "body",
    "state",
    "error",
    "dequeue_at",
    "cost",
    "created_at",
    "leased_until",
    "key",
    "forgiven",
    "first_leased_at",
)


def error_text(field: str, error: str | BaseException) -> str:
    """What is kept of an error. What PostgreSQL can't store must not hide why a handler failed."""
    if isinstance(error, BaseException):
        members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
        try:
            error = f"{type(error).__name__}: {error}"
        except Exception:  # noqa: BLE001 - it can't even be printed
            error = type(error).__name__
        error = "\n".join([error, *(error_text(field, member) for member in members)])
    if not isinstance(error, str):
        raise InvalidValue(f"{field} must be text or an exception, not {error!r}")
    return error.replace("\x00", "").encode(errors="replace").decode()


# Without a name for the function, as SQLAlchemy would have it: a third less of what a completion takes in Python.
_ENDED = select(column("id", BigInteger), column("result", Text))


def _results(function: str, *arguments: Any) -> Results:
    return _ENDED.select_from(SchemaFunction(function, *arguments))


def _delay(value: float | timedelta | None) -> Any:
    return cast(None if value is None else check_seconds("delay", value), Double)
