"""Producing: messages that commit, roll back and savepoint with the caller's own rows.

::

    import fairqueue as fq

    session.add(fq.Message(channel="acme", payload={"doc": 1}))           # the same, in the ORM's words
    fq.enqueue(session, "acme", {"doc": 1}, delay=60)
    fq.enqueue_many(session, [{"channel": "acme", "payload": {"doc": i}} for i in range(1_000)])
    fq.enqueue_copy(session, ({"channel": "acme", "payload": {"doc": i}} for i in range(10_000)))
    fq.enqueue_unique(session, "acme", {"doc": 1}, key="index 1")         # unless it is there already
    session.commit()

The functions take a Session or an AsyncSession; those that talk to the database return an awaitable for the latter::

    ids = await fq.enqueue_many(async_session, rows)

The commit expires a message like any object of the session, and the next access is a query: the message may be gone by
then, and a producer role may not read it. Read its id before: ``session.flush(); job = message.id; session.commit()``.

Enqueueing appends rows and takes no lock that anybody waits for, in any isolation level, however long the transaction
stays open.

**Keys.** No two live messages of a channel, ready or leased, have the same key; it is free again when its message has
ended. ``on_conflict`` says what becomes of a second one:

=========== ==========================================================================================================
"raise"     :class:`fairqueue.DuplicateKey`. What :func:`enqueue` or ``session.add()`` put in does this at its flush, as
            SQLAlchemy's IntegrityError unless the engine was given to :func:`fairqueue.translate_errors`.
"ignore"    the one that is there stays as it is
"replace"   one that is ready takes on the new contents and starts anew, with all its attempts. It keeps its id; and its
            place in the channel, or is due now if it was delayed, unless a time or a priority, be it 0, is given. One
            that is leased may have read the old contents: it loses its key and goes its way, and the new message is put
            in beside it.
=========== ==========================================================================================================

Uniqueness has to wait: enqueueing a key waits while another transaction that has enqueued the same key, or changed or
completed its message, is open. So keep such transactions short, and if one enqueues several keys in several statements,
let all do it in the same order, or PostgreSQL ends one of two that wait for each other. In REPEATABLE READ and
SERIALIZABLE it may raise a serialization failure where a key was taken or given up since the transaction began; try
again.

**Bounded channels.** Where :class:`fairqueue.Channel` has a max_size, more is refused with
:class:`fairqueue.ChannelFull`, or dropped: see its ``overflow``. A flush, too, raises this only where the engine was
given to :func:`fairqueue.translate_errors`, else SQLAlchemy's DatabaseError. A dropped message has an id, which only
its history knows. What other open transactions have put in isn't counted, so it may be overshot by that much. A
SERIALIZABLE transaction that enqueues to a bounded channel may meet a serialization failure.

**After an error** PostgreSQL does nothing more in the transaction, and its commit is a rollback that says nothing.
After a flush SQLAlchemy refuses to commit (PendingRollbackError). Who catches ``DuplicateKey`` or ``ChannelFull`` and
goes on needs a savepoint around the call::

    try:
        with session.begin_nested():
            fq.enqueue_unique(session, "acme", {"doc": 1}, key="index 1", on_conflict="raise")
    except fq.DuplicateKey:
        ...  # what was done before is still there
    session.commit()
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

from sqlalchemy import BigInteger, Connection, event, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.util import await_only

from ._checks import check_choice
from ._functions import SchemaFunction
from ._rows import COPY_COLUMNS, MessageRow, copy_records, create_many, create_one, insert_many, record_of, records
from ._sessions import BIND, run_in, session_of
from .errors import FairqueueError, InvalidValue
from .models import Message
from .schedule import clock
from .schema import quote, schema_of

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from ._sessions import AnyAsyncSession, SyncSession

__all__ = ["MessageRow", "OnConflict", "enqueue", "enqueue_copy", "enqueue_many", "enqueue_unique"]

OnConflict = Literal["raise", "ignore", "replace"]


def enqueue(
    session: SyncSession | AnyAsyncSession,
    channel: str,
    payload: Any = None,
    *,
    queue: str = "default",
    delay: float | timedelta | None = None,
    at: datetime | None = None,
    priority: int | None = None,
    dequeue_at: int | None = None,
    cost: float = 1,
    body: bytes | None = None,
    key: str | None = None,
    max_attempts: int | None = None,
    backoff: float | timedelta | None = None,
) -> Message:
    """Add a message to the session and return it; it is sent with the session's next flush.

    Does no I/O, so it is the same for Session and AsyncSession. Parameters and errors: :class:`fairqueue.Message`.
    What is to happen with a key that is live already can only be told where the database is asked: by
    :func:`enqueue_unique`.
    """
    message = Message(
        channel,
        payload,
        queue=queue,
        delay=delay,
        at=at,
        priority=priority,
        dequeue_at=dequeue_at,
        cost=cost,
        body=body,
        key=key,
        max_attempts=max_attempts,
        backoff=backoff,
    )
    session_of(session).add(message)
    return message


@overload
def enqueue_unique(
    session: SyncSession,
    channel: str,
    payload: Any = None,
    *,
    key: str,
    on_conflict: OnConflict = "ignore",
    queue: str = "default",
    delay: float | timedelta | None = None,
    at: datetime | None = None,
    priority: int | None = None,
    dequeue_at: int | None = None,
    cost: float = 1,
    body: bytes | None = None,
    max_attempts: int | None = None,
    backoff: float | timedelta | None = None,
) -> int: ...
@overload
def enqueue_unique(
    session: AnyAsyncSession,
    channel: str,
    payload: Any = None,
    *,
    key: str,
    on_conflict: OnConflict = "ignore",
    queue: str = "default",
    delay: float | timedelta | None = None,
    at: datetime | None = None,
    priority: int | None = None,
    dequeue_at: int | None = None,
    cost: float = 1,
    body: bytes | None = None,
    max_attempts: int | None = None,
    backoff: float | timedelta | None = None,
) -> Coroutine[Any, Any, int]: ...
def enqueue_unique(
    session: SyncSession | AnyAsyncSession,
    channel: str,
    payload: Any = None,
    *,
    key: str,
    on_conflict: OnConflict = "ignore",
    **fields: Any,
) -> int | Coroutine[Any, Any, int]:
    """Enqueue a message unless one with its key is live; returns the id of the live one, new or not.

    An id, not an entity: by then the message may have been served, and a producer need not have the right to read it.

    :param key: no two live messages of a channel have the same.
    :param on_conflict: ``"ignore"``, ``"replace"`` or ``"raise"``; see :mod:`fairqueue.producing`. The other parameters
        are those of :class:`fairqueue.Message`.
    :raises InvalidValue: naming the field; nothing has been sent then.
    :raises DuplicateKey: if told to.
    :raises ChannelFull: if the channel has no room for a new message.
    """
    if key is None:
        raise InvalidValue("key must be text, not None: use enqueue for messages without one")
    row: Any = {"channel": channel, "payload": payload, "key": key, **fields}
    sending = create_one(record_of(row), check_choice("on_conflict", on_conflict, *get_args(OnConflict)))

    def run(session: Session) -> int:
        session.flush()
        return int(session.scalars(*sending, bind_arguments=BIND).one())

    return run_in(session, run)


@overload
def enqueue_many(
    session: SyncSession, rows: Iterable[MessageRow], *, on_conflict: Literal["raise", "replace"] = "raise"
) -> list[int]: ...
@overload
def enqueue_many(
    session: SyncSession, rows: Iterable[MessageRow], *, on_conflict: Literal["ignore"]
) -> list[int | None]: ...
@overload
def enqueue_many(
    session: AnyAsyncSession, rows: Iterable[MessageRow], *, on_conflict: Literal["raise", "replace"] = "raise"
) -> Coroutine[Any, Any, list[int]]: ...
@overload
def enqueue_many(
    session: AnyAsyncSession, rows: Iterable[MessageRow], *, on_conflict: Literal["ignore"]
) -> Coroutine[Any, Any, list[int | None]]: ...
def enqueue_many(
    session: SyncSession | AnyAsyncSession, rows: Iterable[MessageRow], *, on_conflict: OnConflict = "raise"
) -> list[Any] | Coroutine[Any, Any, list[Any]]:
    """Enqueue any number of messages with one statement; returns their ids in the order of ``rows``.

    For more than some 20 MB of payloads and bodies call it several times, or :func:`enqueue_copy`: the time in which
    the driver sends a statement grows with the square of its size, and PostgreSQL closes the connection at 1 GB.

    :param session: a Session; for an AsyncSession, an awaitable is returned.
    :param rows: dicts with the parameters of :class:`fairqueue.Message`: see :class:`fairqueue.MessageRow`.
    :param on_conflict: what becomes of rows whose key is live already; see :mod:`fairqueue.producing`. With
        ``"ignore"``, None stands for the id of each row that was ignored. Where several rows have the same key they
        come one after the other: of those to be ignored the first one counts, of those to replace each other the last
        one.
    :raises InvalidValue: naming row and field; nothing has been sent then.
    :raises DuplicateKey: if told to.
    :raises ChannelFull: if a channel has no room for all of them; none has been enqueued then.
    """
    check_choice("on_conflict", on_conflict, *get_args(OnConflict))
    batch = list(records(rows))
    has_keys = any(record.key is not None for record in batch)
    sending = create_many(batch, on_conflict) if has_keys else insert_many(batch)

    def run(session: Session) -> list[Any]:
        session.flush()
        return list(session.scalars(*sending, bind_arguments=BIND))

    return run_in(session, run)


@overload
def enqueue_copy(session: SyncSession, rows: Iterable[MessageRow]) -> int: ...
@overload
def enqueue_copy(session: AnyAsyncSession, rows: Iterable[MessageRow]) -> Coroutine[Any, Any, int]: ...
def enqueue_copy(session: SyncSession | AnyAsyncSession, rows: Iterable[MessageRow]) -> int | Coroutine[Any, Any, int]:
    """Enqueue messages by COPY on the session's own connection, in its transaction; returns how many.

    The fastest way for bulk. ``rows`` may be a generator: they are sent as they come, and not kept. It can't ask this
    session for anything meanwhile, nor end its transaction, and what it would load by the way (an expired attribute)
    raises :class:`FairqueueError`: the connection is busy. Rows with keys should come in the order of their keys, so
    that two calls don't wait for each other. Needs psycopg.

    :param session: as for :func:`enqueue_many`.
    :param rows: likewise.
    :raises InvalidValue: naming row and field. After this and all that follows, the transaction has to be rolled back.
    :raises DuplicateKey: if a key is live already.
    :raises ChannelFull: if a channel has no room for all of them.
    :raises FairqueueError: if ``rows`` use the session, or the engine has another driver.
    :raises sqlalchemy.exc.DBAPIError: for what else the driver says, as with any statement.
    """

    def run(session: Session) -> int:
        session.flush()
        connection = session.connection(bind_arguments=BIND)
        dialect = connection.dialect
        if dialect.driver != "psycopg":  # nor psycopg2, whose cursor has another copy
            raise FairqueueError(
                f"enqueue_copy needs psycopg, and this engine's driver is {dialect.driver}: use enqueue_many"
            )
        driver: Any = connection.connection.driver_connection
        now: Any = connection.scalar(select(SchemaFunction("unix_ms", clock(), type_=BigInteger)))
        schema = schema_of({**connection.get_execution_options(), **getattr(session, "execution_options", {})})
        copy = f"COPY {quote(schema)}.message ({', '.join(COPY_COLUMNS)}) FROM STDIN"
        # The driver would wait for its own connection, for ever.
        for act, refuse in _REFUSED.items():
            event.listen(connection, act, refuse)
        try:
            if dialect.is_async:
                return await_only(_copy_async(driver, copy, copy_records(rows, now)))
            return _copy(driver, copy, copy_records(rows, now))
        except dialect.loaded_dbapi.Error as error:
            # psycopg up to 3.3.0 says of a refusal only that the connection is closed.
            if isinstance(error.__context__, FairqueueError):
                raise error.__context__ from None
            raise _wrapped(connection, driver, copy, error) from error
        finally:
            for act, refuse in _REFUSED.items():
                event.remove(connection, act, refuse)

    return run_in(session, run)


def _refuse_to_roll_back(connection: Connection) -> None:
    connection.invalidate()  # or its pool would roll it back all the same
    _refuse()


def _refuse(*_: Any) -> None:
    raise FairqueueError(
        "rows of enqueue_copy can't use the session that sends them: read what they need before, or from another"
        " session, or use enqueue_many"
    )


def _wrapped(connection: Connection, driver: Any, statement: str, error: Exception) -> BaseException:
    """The driver's error, as SQLAlchemy raises those of statements that it sends itself."""
    lost: bool = driver.closed
    if lost:
        connection.invalidate(error)  # or to roll it back would fail, too, and hide why
    dialect = connection.dialect
    wrapped: BaseException = DBAPIError.instance(
        statement, None, error, dialect.loaded_dbapi.Error, connection_invalidated=lost, dialect=dialect
    )
    return wrapped


_REFUSED: dict[str, Callable[..., None]] = {
    "before_cursor_execute": _refuse,
    "commit": _refuse,
    "rollback": _refuse_to_roll_back,
}


def _copy(driver: Any, copy: str, records: Iterable[tuple[Any, ...]]) -> int:
    count = 0
    with driver.cursor() as cursor, cursor.copy(copy) as sink:
        for record in records:
            sink.write_row(record)
            count += 1
    return count


async def _copy_async(driver: Any, copy: str, records: Iterable[tuple[Any, ...]]) -> int:
    count = 0
    async with driver.cursor() as cursor, cursor.copy(copy) as sink:
        for record in records:
            await sink.write_row(record)
            count += 1
    return count
