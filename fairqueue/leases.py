"""What consuming deals in: leased messages, and what happened to them.

A worker gets :class:`LeasedMessage` values from :func:`fairqueue.dequeue`, and :class:`Outcome` words from the
statements that end leases::

    import fairqueue as fq

    session.add(fq.Message(channel="acme", payload={"doc": 1}))
    session.commit()
    for message in session.scalars(fq.dequeue()).all():
        session.commit()
        message.payload["doc"], message.attempt, message.leased_until
        assert session.execute(fq.complete(message)).one().result == fq.Outcome.COMPLETED
        session.commit()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Generic, TypeGuard
from typing import cast as cast_type

from sqlalchemy import ARRAY, BigInteger, Integer, Row, cast, inspect
from sqlalchemy.orm import InstanceState
from typing_extensions import TypeVar

from ._checks import check_count, is_whole
from .errors import InvalidValue
from .models import DeadMessage, TypedMessage

__all__ = [
    "Lease",
    "LeasedMessage",
    "Leases",
    "Messages",
    "OneMessage",
    "Outcome",
    "is_lease",
    "lease_arrays",
    "listed",
    "message_ids",
]

P = TypeVar("P", default=Any)


class Outcome(StrEnum):
    """What happened to a message, as :func:`fairqueue.complete` and the other functions that end leases say it.

    The ``outcome`` of :class:`fairqueue.History` and of :func:`fairqueue.wait_for` is one of these, too.
    """

    COMPLETED = "completed"
    #: It will be tried again.
    FAILED = "failed"
    #: It failed and will not be tried again: see :class:`fairqueue.DeadMessage`.
    DEAD = "dead"
    DEFERRED = "deferred"
    EXTENDED = "extended"
    CANCELLED = "cancelled"
    #: There was no room for it in its channel, whose ``overflow`` is ``"drop"`` (only history says so).
    DROPPED = "dropped"
    #: A dead letter is back in the queue.
    REDRIVEN = "redriven"
    #: It stays dead, because a live message of its channel has its key.
    DUPLICATE = "duplicate"
    #: The lease is over: it ran out, and the message is ready again or another worker has it.
    STALE = "stale"
    #: An open transaction is ending this very lease (only :func:`fairqueue.heartbeat` says so; the others wait).
    BUSY = "busy"
    #: There is no such message any more: it was completed or cancelled, or is dead.
    NOT_FOUND = "not_found"


@dataclass(frozen=True, kw_only=True)  # no slots: with them, LeasedMessage[Upload](...) fails on some Pythons
class LeasedMessage(Generic[P]):
    """A message as it was when it was leased: a value, which no session refreshes.

    The pair of ``id`` and ``attempt`` is the lease. An entity would be reloaded after a commit and then carry the
    attempt of whoever has the message by then.
    """

    id: int
    queue: str
    channel: str
    #: How often it has been leased, this time included.
    attempt: int
    #: The payload as it is stored: JSON data, or bytes. Text, if it is JSON that Python can't read.
    raw: Any
    body: bytes | None
    #: What :func:`fairqueue.defer` saved at an earlier attempt. Text, if it is JSON that Python can't read.
    state: Any
    #: What the last failure said.
    error: str | None
    #: Unix time in milliseconds; minus its priority, if it has one and has kept its place.
    dequeue_at: int
    cost: float
    created_at: datetime
    leased_until: datetime
    key: str | None = None
    #: How many of the attempts don't count as failures: deferrals, and those before it was put back from the dead.
    forgiven: int = 0
    first_leased_at: datetime | None = None
    reader: Callable[[Any], P] | None = field(default=None, repr=False, compare=False)

    def __hash__(self) -> int:
        return hash((self.id, self.attempt))

    @property
    def payload(self) -> P:
        """The payload, as an object where the message has a type; that is made anew each time.

        :raises InvalidValue: if what is stored doesn't fit the type, or it or the state can't be read. Only this
            message is concerned: :func:`fairqueue.fail` it.
        """
        return cast_type("P", self.raw) if self.reader is None else self.reader(self.raw)


Lease = LeasedMessage[Any] | tuple[int, int]
Leases = Lease | Iterable[Lease]
OneMessage = int | TypedMessage[Any] | LeasedMessage[Any] | DeadMessage
Messages = OneMessage | Iterable[OneMessage]


def lease_arrays(leases: Leases) -> tuple[Any, Any]:
    """The ids and the attempts of one lease or any number, as SQL arrays."""
    pairs = [_pair(lease) for lease in listed(leases)]
    return (
        cast([id_ for id_, _ in pairs], ARRAY(BigInteger)),
        cast([attempt for _, attempt in pairs], ARRAY(Integer)),
    )


def message_ids(messages: Messages) -> list[int]:
    """The ids of one message or any number."""
    return [_id(message) for message in (messages if isinstance(messages, Iterable) else [messages])]


def listed(given: object) -> list[object]:
    """What a call is about, which takes one lease, or whatever else, or any number."""
    if not isinstance(given, Iterable) or (isinstance(given, tuple | Row) and any(map(is_whole, given))):
        return [given]
    return [*given]


def is_lease(value: object) -> TypeGuard[Lease]:
    """Whether it is meant for one: a :class:`LeasedMessage`, or a pair, which may be a row's."""
    return isinstance(value, LeasedMessage | Sequence) and not isinstance(value, str)


def _pair(lease: object) -> tuple[int, int]:
    if isinstance(lease, LeasedMessage):
        return lease.id, lease.attempt
    match lease:
        case (int(id_), int(attempt)):
            return _check_id(id_), check_count("attempt", attempt, -(2**31))
    raise InvalidValue(f"a lease is a LeasedMessage from dequeue() or a pair (id, attempt), not {lease!r}")


def _id(message: object) -> int:
    if isinstance(message, TypedMessage | DeadMessage):
        # Not message.id, which after a commit would read the row again, and that may be gone by now.
        state: InstanceState[Any] = inspect(message)
        if state.identity is None:
            raise InvalidValue("a message has no id before it is flushed: commit first")
        return int(state.identity[0])
    if isinstance(message, LeasedMessage):
        return message.id
    if is_whole(message):
        return _check_id(message)
    raise InvalidValue(f"a message is an id, a Message, a LeasedMessage or a DeadMessage, not {message!r}")


def _check_id(value: int) -> int:
    """An id, if only of nothing, or :class:`InvalidValue` for what fits into no column."""
    return check_count("id", value, -(2**63), 2**63 - 1)
