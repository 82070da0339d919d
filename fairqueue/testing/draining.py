"""Running handlers here and now: no worker, no thread, no waiting.

::

    import fairqueue as fq
    from fairqueue.testing import drain

    def convert(message, session):                      # or a fq.Worker, with all that its handler was told
        if message.payload["pages"] > 1:
            fq.enqueue(session, message.channel, {"pages": message.payload["pages"] - 1})

    fq.enqueue(session, "acme", {"pages": 2})
    drained = drain(session, convert)
    assert [(message.payload["pages"], outcome) for message, outcome in drained] == [(2, "completed"), (1, "completed")]
    session.rollback()

With an AsyncSession or AsyncEngine it is ``await drain(...)``, and handlers may be async.

**A session** is drained in its own open transaction: messages needn't be committed, each handler works in a savepoint,
and nothing is committed. So it fits tests that roll everything back. Until that transaction ends nobody else can
dequeue from the queue, and what a handler does on connections of its own doesn't see it.

**An engine** is drained as a worker does it: each message is leased, handled and completed in committed transactions.

**Failures.** An exception of a handler is raised here as soon as the database knows of it, because that is what a test
wants to hear of. Those that the worker expects (``dead=``, ``cancel=``), and decisions such as ``fq.Retry``, are none.
With ``raises=False`` a failed message is tried again as it would be: when its backoff is over, which takes a
:class:`fairqueue.testing.Clock` and another drain.

Limitations: one message after the other, so nothing is seen of handlers that get in each other's way. A session has to
be READ COMMITTED; if another connection is dequeueing from the queue at that moment, there is nothing to be had.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import anyio
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.util import await_only

from fairqueue._checks import check_count, check_flag, check_name
from fairqueue._sessions import BIND, unscoped
from fairqueue.consuming import dequeue
from fairqueue.errors import FairqueueError, InvalidValue
from fairqueue.leases import LeasedMessage, Outcome
from fairqueue.models import Message, TypedMessage
from fairqueue.worker import Handled, Handler, Worker, apply
from fairqueue.worker.handlers import CANCELLED_FROM_WITHIN

if TYPE_CHECKING:
    from fairqueue._sessions import AnyAsyncSession, SyncSession

    Drained = list[tuple[LeasedMessage[Any], Outcome]]

__all__ = ["drain"]

_LEASE = 3600  # long enough for whoever stops at a breakpoint


@overload
def drain(
    where: SyncSession | Engine,
    handler: Worker | Callable[..., Any],
    *,
    queue: str | None = None,
    raises: bool = True,
    limit: int = 1000,
) -> Drained: ...
@overload
def drain(
    where: AnyAsyncSession | AsyncEngine,
    handler: Worker | Callable[..., Any],
    *,
    queue: str | None = None,
    raises: bool = True,
    limit: int = 1000,
) -> Coroutine[Any, Any, Drained]: ...
def drain(
    where: Any,
    handler: Worker | Callable[..., Any],
    *,
    queue: str | None = None,
    raises: bool = True,
    limit: int = 1000,
) -> Any:
    """Handle messages, also those that handlers enqueue, until none is eligible any more.

    :param where: a Session, whose transaction everything happens in, or an Engine, with transactions that are
        committed. For an AsyncSession or AsyncEngine, an awaitable is returned.
    :param handler: a :class:`fairqueue.Worker`, or a function ``f(message)`` or ``f(message, session)``. It gets a
        session of ``where``: made by the worker's ``session`` (``async_session``) where that is a sessionmaker, else a
        plain one.
    :param queue: which queue; None: the worker's, for a function ``"default"``.
    :param raises: raise what a handler raises, once the failure is in the database. False: go on with the others.
    :param limit: how many messages at most, 1 or more, so that a handler which enqueues for ever doesn't.
    :returns: each message and what became of it, in the order in which they were handled. A session's objects are
        expired then, as after a commit.
    :raises FairqueueError: if there are more than ``limit``, and those have been handled; or the worker has no handler.
    :raises InvalidValue: if a parameter can't be; if the handler is async, and ``where`` isn't; or if it takes a
        session, and ``where`` is one that has its messages in a database of their own.
    :raises Exception: what a handler raises, unless ``raises=False`` or it is one of those that the worker expects.
    """
    __tracebackhide__ = True
    where = unscoped(where)
    draining = _draining(handler, queue, raises, limit)
    if isinstance(where, Engine):
        return draining.run(where)
    if isinstance(where, Session):
        return draining.run_in(where)
    if isinstance(where, AsyncEngine):
        return _drain_async_engine(where, draining)
    if isinstance(where, AsyncSession):
        return _drain_async_session(where, draining)
    # Not itself, which may be a URL with a password; nor in other such errors.
    raise InvalidValue(
        f"where must be a Session or Engine, or an AsyncSession or AsyncEngine, not {type(where).__name__}"
    )


@dataclass(frozen=True)
class _Draining:
    handler: Handler
    queue: str
    message_type: type[TypedMessage[Any]]
    make_session: Callable[..., Session]
    make_async_session: Callable[..., AsyncSession]
    raises: bool
    limit: int

    def run(self, bind: Engine | Connection, async_bind: AsyncEngine | AsyncConnection | None = None) -> Drained:
        __tracebackhide__ = True
        if self.handler.is_async and async_bind is None:
            raise InvalidValue(f"{self.handler.name} is async: await drain() with an AsyncSession or AsyncEngine")
        drained: Drained = []
        while message := self.lease(bind, last=len(drained) == self.limit):
            handled = self.handle(message, bind, async_bind)
            outcome = handled.outcome
            if outcome is None:
                with _own_session(bind) as session:
                    (outcome,) = apply(session, handled.decision, [message])
                    session.commit()
            drained.append((message, outcome))
            error = handled.error
            if self.raises and error is not None and not handled.expected:
                error.add_note(
                    f"Raised by {self.handler.name} for message {message.id} of channel {message.channel!r}, attempt"
                    f" {message.attempt}; outcome: {outcome}"
                )
                trace = error.__traceback__
                raise error.with_traceback(trace and trace.tb_next)  # without the frame that caught it
        return drained

    def run_in(self, session: Session, connection: AsyncConnection | None = None) -> Drained:
        """In the session's transaction, in savepoints."""
        __tracebackhide__ = True
        if self.handler.takes_session and not _is_of_one_database(session):
            raise InvalidValue(
                f"{self.handler.name} takes a session, and where is one whose messages are in another database than"
                " what else it writes, so the two can't be committed together: let it take the message alone, or drain"
                " the engine of the messages"
            )
        session.flush()
        try:
            return self.run(session.connection(bind_arguments=BIND), connection)
        finally:
            if session.expire_on_commit:
                session.expire_all()

    def lease(self, bind: Engine | Connection, *, last: bool) -> LeasedMessage[Any] | None:
        statement = dequeue(lease=_LEASE, queue=self.queue, worker="drain", message_type=self.message_type)
        with _own_session(bind) as session:
            message = session.scalars(statement).one_or_none()
            if message is not None and last:
                session.rollback()
                raise FairqueueError(
                    f"queue {self.queue!r} has more messages after the {self.limit} that were handled: a handler that"
                    " goes on enqueueing or deferring? else drain with a higher limit"
                )
            session.commit()
        return message

    def handle(
        self, message: LeasedMessage[Any], bind: Engine | Connection, async_bind: AsyncEngine | AsyncConnection | None
    ) -> Handled:
        __tracebackhide__ = True
        if not self.handler.is_async:
            return self.handler.run(message, partial(_session, bind, self.make_session))
        return await_only(self.handle_async(message, bind, async_bind))  # we are in SQLAlchemy's greenlet

    async def handle_async(self, message: LeasedMessage[Any], bind: object, async_bind: object) -> Handled:
        __tracebackhide__ = True

        def sessions() -> AsyncSession:
            session = self.make_async_session(**_binding(async_bind))
            _pin(session.sync_session, bind)
            return session

        # A task of its own, as a worker's: if it ends as cancelled, and we aren't, it was cancelled from within.
        task = asyncio.create_task(self.handler.run_async(message, sessions))
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([task])
        if task.cancelled():
            return Handled(CANCELLED_FROM_WITHIN, error=asyncio.CancelledError())
        return task.result()


async def _drain_async_engine(engine: AsyncEngine, draining: _Draining) -> Drained:
    __tracebackhide__ = True
    async with AsyncSession(engine) as session:
        return await session.run_sync(lambda _: draining.run(engine.sync_engine, engine))


async def _drain_async_session(session: AsyncSession, draining: _Draining) -> Drained:
    __tracebackhide__ = True
    connection = await session.connection(bind_arguments=BIND)
    return await session.run_sync(draining.run_in, connection)


def _is_of_one_database(session: Session) -> bool:
    """Whether the session's messages go where all goes that it wasn't told of."""
    try:
        return session.get_bind() is session.get_bind(mapper=BIND["mapper"])
    except UnboundExecutionError:  # it was told of each model
        return False


def _session(bind: Engine | Connection, make: Callable[..., Session] = Session) -> Session:
    session = make(**_binding(bind))
    _pin(session, bind)
    return session


def _own_session(bind: Engine | Connection) -> Session:
    """For what isn't the handler's: READ COMMITTED, as a worker has it, whatever the engine has for handlers."""
    session = _session(bind)
    if isinstance(bind, Engine):
        session.connection(execution_options={"isolation_level": "READ COMMITTED"})
    return session


def _binding(bind: object) -> dict[str, Any]:
    """What has sessions work there, and there alone, whatever else those of the application are bound to."""
    return {"bind": bind, "binds": {}, "join_transaction_mode": "create_savepoint"}


def _pin(session: Session, bind: object) -> None:
    """Also one whose class chooses by itself, as of an application that reads from replicas."""
    if type(session).get_bind is not Session.get_bind:
        session.get_bind = lambda *_, **__: bind  # type: ignore[method-assign, assignment]


def _draining(given: Worker | Callable[..., Any], queue: str | None, raises: bool, limit: int) -> _Draining:
    message_type: type[TypedMessage[Any]] = Message
    make_session: Callable[..., Session] = Session
    make_async_session: Callable[..., AsyncSession] = partial(AsyncSession, expire_on_commit=False)
    if isinstance(given, Worker):
        message_type = given.message_type
        if given.registered is None:
            raise FairqueueError(f"the worker of queue {given.queue!r} has no handler: decorate one with @handler")
        queue = given.queue if queue is None else queue
        if isinstance(given.session, sessionmaker):
            make_session = given.session
        if isinstance(given.async_session, async_sessionmaker):
            make_async_session = given.async_session
        handler = given.registered
    else:
        handler = Handler(given)
    return _Draining(
        handler,
        check_name("queue", "default" if queue is None else queue),
        message_type,
        make_session,
        make_async_session,
        check_flag("raises", raises),
        check_count("limit", limit, 1),
    )
