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

A lease is (message id, attempt). :func:`complete` and its siblings act on the messages whose lease still is the one
that is given, and return a row ``(id, result)`` for each, in the order given; so a worker that was too slow is told
``"stale"`` and has to roll back its work, which another worker is doing again.

Limitations: :func:`dequeue` needs a READ COMMITTED transaction, and holds the turn of its queue until that ends: other
dequeues of the queue wait for it (10 s at most, then they raise). A transaction that has already written doesn't wait,
and gets nothing, as waiting could deadlock; one that holds an advisory lock or a LOCK TABLE isn't recognised as such.
Producers and completions never wait for a dequeue. In REPEATABLE READ and SERIALIZABLE transactions PostgreSQL may
refuse a completion with a serialization failure: if the lease was extended after the transaction began, and, when it
is SERIALIZABLE, if others enqueue at the same time; try it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, overload
from typing import cast as cast_type

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Double,
    Integer,
    Row,
    Text,
    cast,
    column,
    func,
    literal,
    select,
    type_coerce,
)
from sqlalchemy.dialects.postgresql import JSONB, array
from sqlalchemy.orm import Bundle
from typing_extensions import TypeVar

from ._functions import SchemaFunction
from .errors import InvalidValue
from .models import Message, TypedMessage, check_name
from .payloads import Unread, json_text, lazily
from .schedule import check_seconds, is_whole

if TYPE_CHECKING:
    # As SQLAlchemy 2.1 has it: one parameter a column.
    from sqlalchemy.sql.selectable import TypedReturnsRows

    Results = TypedReturnsRows[int, str]

__all__ = ["LeasedMessage", "Outcome", "cancel", "complete", "defer", "dequeue", "fail", "heartbeat"]

P = TypeVar("P", default=Any)


class Outcome(StrEnum):
    """What happened to a message, as :func:`complete` and the other functions that end leases say it."""

    COMPLETED = "completed"
    FAILED = "failed"
    DEFERRED = "deferred"
    EXTENDED = "extended"
    CANCELLED = "cancelled"
    #: The lease is over: it ran out, and the message is ready again or another worker has it.
    STALE = "stale"
    #: An open transaction is ending this very lease (only :func:`heartbeat` says so; the others wait).
    BUSY = "busy"
    #: There is no such message any more: it was completed or cancelled.
    NOT_FOUND = "not_found"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedMessage(Generic[P]):
    """A message as it was when it was leased: a value, which no session refreshes.

    The pair of ``id`` and ``attempt`` is the lease. An entity would be reloaded after a commit and then carry the
    attempt of whoever has the message by then.
    """

    id: int
    queue: str
    channel: str
    attempt: int
    #: The payload as it is stored: JSON data, or bytes.
    raw: Any
    body: bytes | None
    #: What :func:`defer` saved at an earlier attempt.
    state: Any
    #: What the last failure said.
    error: str | None
    dequeue_at: int
    cost: float
    created_at: datetime
    leased_until: datetime
    reader: Callable[[Any], P] | None = field(default=None, repr=False, compare=False)

    @property
    def payload(self) -> P:
        """The payload, as an object where the message has a type.

        :raises InvalidValue: if what is stored doesn't fit the type. Only this message is concerned: :func:`fail` it.
        """
        payload: Any = self.raw
        if self.reader is not None and payload is not None:
            payload = self.reader(payload)
        return cast_type("P", payload)


Lease = LeasedMessage[Any] | tuple[int, int]
Leases = Lease | Iterable[Lease]


class _LeaseBundle(Bundle[Any]):
    """Reads the columns of a row into one :class:`LeasedMessage`."""

    inherit_cache = True

    def create_row_processor(
        self, query: Any, procs: Sequence[Callable[[Row[Any]], Any]], labels: Sequence[str]
    ) -> Callable[[Row[Any]], Any]:
        def process(row: Row[Any]) -> LeasedMessage[Any]:
            values = {label: proc(row) for label, proc in zip(labels, procs, strict=True)}
            if isinstance(values["raw"], Unread):
                values["raw"], values["reader"] = values["raw"]
            return LeasedMessage(**values)

        return process


@overload
def dequeue(
    *, limit: int = 1, lease: float | timedelta = 30, queue: str = "default"
) -> TypedReturnsRows[LeasedMessage[Any]]: ...
@overload
def dequeue(
    *,
    limit: int = 1,
    lease: float | timedelta = 30,
    queue: str = "default",
    message_type: type[TypedMessage[P]],
) -> TypedReturnsRows[LeasedMessage[P]]: ...
def dequeue(
    *,
    limit: int = 1,
    lease: float | timedelta = 30,
    queue: str = "default",
    message_type: type[TypedMessage[Any]] = Message,
) -> TypedReturnsRows[LeasedMessage[Any]]:
    """Lease up to ``limit`` messages; execute with ``session.scalars()`` and commit at once.

    :param limit: how many, 1 to 10,000. Fewer come back only when fewer are eligible.
    :param lease: for how long, in seconds or as a timedelta. Then they go back to their channels.
    :param queue: whose channels compete.
    :param message_type: the class whose ``payload_type`` the payloads are read as.
    :returns: a statement; its rows are :class:`LeasedMessage` in the order in which they were scheduled.
    """
    if not is_whole(limit) or not 1 <= limit <= 10_000:
        raise InvalidValue(f"limit must be a whole number from 1 to 10000, not {limit!r}")
    row = SchemaFunction(
        "message_dequeue",
        cast(check_name("queue", queue), Text),
        cast(limit, Integer),
        _seconds("lease", lease, minimum=0.001),
    ).table_valued(*(column(name, Message.__table__.c[name].type) for name in _RETURNED), name="leased")
    stored = message_type.__mapper__.columns["payload"]
    values = {name: row.c[name] for name in _RETURNED if name != "payload"} | {
        "queue": literal(queue, Text),
        "raw": type_coerce(row.c[stored.name], lazily(stored.type)),
    }
    return select(_LeaseBundle("message", *(value.label(name) for name, value in values.items())))


def complete(leases: Leases) -> Results:
    """End leases whose work is done; the messages are gone when the transaction commits.

    Best in the transaction of the work itself: then its effects and the completion commit together, or not at all.
    Results: ``"completed"``, ``"stale"``, ``"not_found"``.

    :param leases: one :class:`LeasedMessage`, or any number, or pairs of (id, attempt).
    """
    return _results("message_complete", *_arrays(leases))


def fail(leases: Leases, error: str | BaseException | None = None, *, delay: float | timedelta = 0) -> Results:
    """End leases whose work failed; the messages will be tried again.

    Results: ``"failed"``, ``"stale"``, ``"not_found"``.

    :param error: what went wrong; kept with the message for the next attempt to see.
    :param delay: seconds or a timedelta before the next attempt. With 0 a message keeps its place in its channel.
    """
    if isinstance(error, BaseException):
        error = f"{type(error).__name__}: {error}"
    if not isinstance(error, str | None):
        raise InvalidValue(f"error must be text or an exception, not {error!r}")
    # What PostgreSQL can't store must not hide why a handler failed.
    text = None if error is None else error.replace("\x00", "").encode(errors="replace").decode()
    return _results("message_fail", *_arrays(leases), cast(text, Text), _seconds("delay", delay))


def defer(leases: Leases, *, delay: float | timedelta = 0, state: Any = None) -> Results:
    """End leases whose work is to go on later.

    Results: ``"deferred"``, ``"stale"``, ``"not_found"``.

    :param delay: seconds or a timedelta before the next attempt.
    :param state: JSON that the next attempt finds in ``message.state``. None leaves what an earlier one saved.
    """
    ids, attempts = _arrays(leases)
    saved = (
        None
        if state is None
        else func.array_fill(cast(literal(json_text(state, "state"), Text), JSONB), array([func.cardinality(ids)]))
    )
    return _results("message_defer", ids, attempts, _seconds("delay", delay), cast(saved, ARRAY(JSONB)))


def heartbeat(leases: Leases, *, lease: float | timedelta = 30) -> Results:
    """Extend leases to ``lease`` seconds from now; never shortens one.

    Results: ``"extended"``, ``"busy"``, ``"stale"``, ``"not_found"`` (completed or cancelled: stop working on it).
    """
    return _results("message_heartbeat", *_arrays(leases), _seconds("lease", lease, minimum=0.001))


def cancel(messages: int | LeasedMessage[Any] | Iterable[int | LeasedMessage[Any]]) -> Results:
    """Take messages out of the queue for good, ready or leased.

    Results: ``"cancelled"``, ``"not_found"``. Who works on one learns it at the next heartbeat or completion.

    :param messages: one id or :class:`LeasedMessage`, or any number.
    """
    ids = []
    for message in messages if isinstance(messages, Iterable) else [messages]:
        if not isinstance(message, LeasedMessage) and not is_whole(message):
            raise InvalidValue(f"a message is an id or a LeasedMessage, not {message!r}")
        ids.append(message.id if isinstance(message, LeasedMessage) else message)
    return _results("message_cancel", cast(ids, ARRAY(BigInteger)))


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
)


def _results(function: str, *arguments: Any) -> Results:
    row = SchemaFunction(function, *arguments).table_valued(
        column("id", BigInteger), column("result", Text), name="ended"
    )
    return select(row.c.id, row.c.result)


def _arrays(leases: Leases) -> tuple[Any, Any]:
    """The ids and the attempts of leases, as SQL arrays."""
    pairs = [_pair(lease) for lease in _each(leases)]
    return (
        cast([id_ for id_, _ in pairs], ARRAY(BigInteger)),
        cast([attempt for _, attempt in pairs], ARRAY(Integer)),
    )


def _each(given: object) -> Iterable[object]:
    """The leases of a call, which takes one or any number."""
    if not isinstance(given, Iterable) or (isinstance(given, tuple) and any(map(is_whole, given))):
        return [given]
    return given


def _pair(lease: object) -> tuple[int, int]:
    if isinstance(lease, LeasedMessage):
        return lease.id, lease.attempt
    match lease:
        case (int(id_), int(attempt)):
            return id_, attempt
    raise InvalidValue(f"a lease is a LeasedMessage from dequeue() or a pair (id, attempt), not {lease!r}")


def _seconds(field: str, value: float | timedelta, minimum: float = 0) -> Any:
    return cast(check_seconds(field, value, minimum), Double)
