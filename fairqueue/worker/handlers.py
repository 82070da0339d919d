"""A handler: the application's function, and how its end becomes a decision about the message.

::

    from fairqueue.worker import Handler

    handler = Handler(transcode, dead=(ValueError,))
    settled = handler.run(message, sessions)          # await handler.run_async(...), where transcode is async
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, SessionTransaction

from fairqueue.errors import InvalidValue
from fairqueue.leases import LeasedMessage, Outcome

from .decisions import COMPLETE, Cancel, DeadLetter, Decision, Retry, apply

if sys.version_info >= (3, 14):
    from annotationlib import Format

    # As text: what they name may be imported for type checkers only, and from 3.14 on it is looked up when asked for.
    _signature = partial(inspect.signature, annotation_format=Format.STRING)
else:
    _signature = inspect.signature
from .logs import log

__all__ = ["AROUND", "CANCELLED_FROM_WITHIN", "Errors", "Handled", "Handler", "UnreadablePayload"]

#: The attribute of a function that :attr:`Handler.around` is of. It is there for plain functions alone.
AROUND = "__fairqueue_around__"

#: What becomes of a message whose async handler ends as cancelled, and nobody has cancelled it.
CANCELLED_FROM_WITHIN = Retry("the handler was cancelled from within")

Errors = type[Exception] | tuple[type[Exception], ...]


@dataclass(frozen=True, slots=True)
class Handled:
    """How a handler ended, and with it its message."""

    decision: Decision
    #: What happened to the message, where the handler's own transaction has committed it; else None: to be reported.
    outcome: Outcome | None = None
    #: The exception that the decision was made of, for the log.
    error: BaseException | None = None
    #: It is one of those that ``dead`` or ``cancel`` name.
    expected: bool = False


class Handler:
    """A function that handles messages: ``f(message)`` or ``f(message, session)``, plain or async.

    A second parameter that has a default gets a session only if its name is ``session``.

    :param dead: exceptions after which no further attempt would help.
    :param cancel: exceptions after which the work isn't needed any more.
    :raises InvalidValue: if the function can't be called so, or ``dead`` or ``cancel`` are no exception classes.
    """

    def __init__(self, function: Callable[..., Any], *, dead: Errors = (), cancel: Errors = ()) -> None:
        self.function = function
        self.dead = _classes("dead", dead)
        self.cancel = _classes("cancel", cancel)
        self.has_warned = False
        #: In what its session is used, from its first statement to its end: of a decorator that has to do with that.
        self.around: Callable[[Session], AbstractContextManager[object]] = getattr(function, AROUND, nullcontext)
        self.takes_session = _takes_session(function)
        self.is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__qualname__", self.function))

    def run(self, message: LeasedMessage[Any], sessions: Callable[[], Session] | None) -> Handled:
        """Call a plain handler; raises nothing but a Ctrl-C. ``sessions`` may be None if it takes none."""
        handled: Handled | None = None
        try:
            _read(message)
            if not self.takes_session:
                return Handled(_decision(self.function(message)))
            assert sessions is not None
            with _opened_here(sessions) as session, self.around(session):
                try:
                    with self.watching(session):
                        decision = _decision(self.function(message, session))
                except BaseException as error:
                    handled = self.judge(error)
                    raise
                handled = settle(session, message, decision)
            return handled  # noqa: RET504 - what the session's end has swallowed, too
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the message's
            return self.judge(error, handled)

    async def run_async(
        self,
        message: LeasedMessage[Any],
        sessions: Callable[[], AsyncSession] | None,
        returned: Callable[[], object] = lambda: None,
    ) -> Handled:
        """Call an async handler; raises nothing but its cancellation, or a Ctrl-C.

        :param returned: called when the function has returned, before its session commits.
        """
        handled: Handled | None = None
        try:
            _read(message)
            if not self.takes_session:
                return Handled(_decision(await self.function(message)))
            assert sessions is not None
            async with _opened(sessions) as session:
                try:
                    with self.watching(session.sync_session):
                        decision = _decision(await self.function(message, session))
                except BaseException as error:
                    handled = self.judge(error)
                    raise
                returned()
                handled = await session.run_sync(settle, message, decision)
            return handled  # noqa: RET504 - what the session's end has swallowed, too
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the message's
            return self.judge(error, handled)

    @contextmanager
    def watching(self, session: Session) -> Iterator[None]:
        """Say so, once, if what runs meanwhile ends the session's transaction, which nobody would see otherwise.

        Savepoints may end; and an error rolls back afterwards, when nobody watches any more.
        """
        ended: list[SessionTransaction] = []

        def note(_: Session, transaction: SessionTransaction) -> None:
            if transaction.parent is None:
                ended.append(transaction)

        event.listen(session, "after_transaction_end", note)
        try:
            yield
        finally:
            event.remove(session, "after_transaction_end", note)
            if ended and not self.has_warned:
                self.has_warned = True
                log.warning(
                    "%s ends the transaction of its session itself (by commit, rollback or close): what it wrote until"
                    " then and the completion of its message no longer go together",
                    self.name,
                )

    def judge(self, error: BaseException, before: Handled | None = None) -> Handled:
        """What an exception says about the message. Alone in a group, as that of a TaskGroup, it counts itself.

        At once where it is raised, before a session ends, which takes its time, and may swallow it: a decision that
        several handlers share may be raised by another one meanwhile.

        :param before: what was known when the session ended; what it raises then makes no difference.
        :raises KeyboardInterrupt: again, if it may be a Ctrl-C, which comes to the main thread and no other.
        """
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise error
        if before is not None:
            if before.error is None:
                error.__traceback__ = None  # of a decision that may be raised again
            return before
        cause = error
        while isinstance(cause, BaseExceptionGroup) and len(cause.exceptions) == 1:
            (cause,) = cause.exceptions
        decision: Decision
        if isinstance(cause, Decision):
            decision = cause.explained(cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__))
            # One that is raised again and again would keep what it was raised for, and grow.
            cause.__traceback__ = cause.__cause__ = cause.__context__ = None
            cause.__suppress_context__ = False
            return Handled(decision)
        expected = False
        if isinstance(cause, UnreadablePayload):
            decision = DeadLetter(cause.__cause__ or cause)
        elif isinstance(cause, self.dead):
            decision, expected = DeadLetter(cause), True
        elif isinstance(cause, self.cancel):
            decision, expected = Cancel(cause), True
        else:
            decision = Retry(cause)
        return Handled(decision, error=error, expected=expected)


class UnreadablePayload(Exception):
    """The stored payload is not of the handler's message type, or can't be read: no attempt will change that."""


def settle(session: Session, message: LeasedMessage[Any], decision: Decision) -> Handled:
    """Commit what the handler wrote together with what becomes of its message; or, if the lease was over, neither."""
    # By itself: where apply() does it, SQLAlchemy's error begins with words about a query and its autoflush.
    session.flush()
    (outcome,) = apply(session, decision, [message])
    if outcome in decision.outcomes:
        session.commit()
    else:
        session.rollback()
    return Handled(decision, outcome)


@contextmanager
def _opened_here(sessions: Callable[[], Session]) -> Iterator[Session]:
    try:
        with sessions() as session:
            yield session
    finally:
        if (remove := getattr(sessions, "remove", None)) is not None:
            remove()  # a scoped_session would keep it, and what the handler set of it, for the scope's next message


@asynccontextmanager
async def _opened(sessions: Callable[[], AsyncSession]) -> AsyncIterator[AsyncSession]:
    try:
        async with sessions() as session:
            yield session
    finally:
        if (remove := getattr(sessions, "remove", None)) is not None:
            await remove()  # an async_scoped_session would keep it, for a task that is over


def _read(message: LeasedMessage[Any]) -> None:
    try:
        if message.reader is not None:
            _ = message.payload
    except InvalidValue as error:
        raise UnreadablePayload from error


def _decision(returned: object) -> Decision:
    # Of a function that doesn't look as if it were async, or yielded: nothing has been done yet.
    if inspect.isawaitable(returned) or inspect.isgenerator(returned) or inspect.isasyncgen(returned):
        if isinstance(returned, Coroutine | Generator):
            returned.close()
        raise TypeError(
            f"the handler returned {returned!r}, which nobody runs:"
            " make it a function that returns, or an async function, also where it is decorated"
        )
    if isinstance(returned, type) and issubclass(returned, Decision):
        return returned()  # as raise does
    return returned if isinstance(returned, Decision) else COMPLETE


def _classes(field: str, given: Errors) -> tuple[type[Exception], ...]:
    classes: tuple[Any, ...] = given if isinstance(given, tuple) else (given,)
    for each in classes:
        if not (isinstance(each, type) and issubclass(each, Exception)):
            raise InvalidValue(f"{field} must be an exception class or a tuple of them, not {given!r}")
    return classes


def _takes_session(function: Callable[..., Any]) -> bool:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidValue(f"a handler must be a function that returns, not {function!r}, which yields")
    try:
        signature = called = _signature(function)
    except (TypeError, ValueError) as error:
        raise InvalidValue(f"a handler must be a function of (message) or (message, session): {error}") from None
    # What a decorator puts in its place may take less, as where it opens the session itself.
    with suppress(ValueError):  # such as functools.cache, which is written in C
        called = _signature(function, follow_wrapped=False)
    if not (_takes(called, 1) and _takes(called, 2)):
        signature = called
    for arguments in (2, 1):
        if not _takes(signature, arguments):
            continue
        if _is_no_message(next(iter(signature.parameters.values()))):
            break
        return arguments == 2 and _is_for_a_session(signature)
    name = getattr(function, "__qualname__", repr(function))
    raise InvalidValue(f"a handler must be a function of (message) or (message, session), not {name}{signature}")


def _takes(signature: inspect.Signature, arguments: int) -> bool:
    try:
        signature.bind(*(None,) * arguments)
    except TypeError:
        return False
    return True


def _is_no_message(parameter: inspect.Parameter) -> bool:
    """Whether it is meant for a session by its name, or by its type, which may be text; or for a method's object."""
    type_ = getattr(parameter.annotation, "__name__", parameter.annotation)
    return parameter.name in {"session", "self", "cls"} or str(type_).rpartition(".")[2] in {"Session", "AsyncSession"}


def _is_for_a_session(signature: inspect.Signature) -> bool:
    """Whether the second positional argument is. A setting, such as limit=100, has a default."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    second = [each for each in signature.parameters.values() if each.kind in kinds][1:2]
    return all(each.default is each.empty or each.name == "session" for each in second)  # none: it goes to *args
