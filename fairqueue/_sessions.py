"""Sessions, plain and async, scoped or not: a function of a Session runs in whichever is given."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy.orm import Session

from .errors import InvalidValue, translated
from .models import Message

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
    from sqlalchemy.orm import scoped_session

    SyncSession = Session | scoped_session[Any]
    AnyAsyncSession = AsyncSession | async_scoped_session[Any]

__all__ = ["BIND", "run_in", "session_of", "unscoped"]

T = TypeVar("T")

#: Where a session has several databases, its messages' is asked. As SQLAlchemy says it itself, to what an application
#: has in place of Session.get_bind(): by the mapper.
BIND = {"mapper": Message.__mapper__}


def unscoped(given: Any) -> Any:
    """What a scoped session stands for; anything else as it is."""
    return given() if hasattr(given, "session_factory") else given


def session_of(given: Any, *, or_connection: bool = False) -> Any:
    """The Session or AsyncSession that is given, or that a scoped one stands for."""
    session = unscoped(given)
    # The async ones by what they have, as importing them would bring asyncio along.
    if isinstance(session, Session) or hasattr(session, "sync_session"):
        return session
    if or_connection and (isinstance(session, Connection) or hasattr(session, "sync_connection")):
        return session
    wanted = "a Session or an AsyncSession, or a scoped one"
    if or_connection:
        wanted += ", or a Connection or an AsyncConnection"
    # Not itself, which may be a URL with a password.
    raise InvalidValue(f"session must be {wanted}, not {type(session).__name__}")


def run_in(given: Any, function: Callable[[Session], T], *, or_connection: bool = False) -> T | Coroutine[Any, Any, T]:
    """Call ``function`` with the session; for one that is async, return an awaitable that does.

    :param or_connection: a Connection or AsyncConnection does, too.
    """

    def run(session: Session) -> T:
        try:
            return function(session)
        except Exception as error:
            meant = translated(error)
            if meant is None:
                raise
            raise meant from error

    session = session_of(given, or_connection=or_connection)
    if hasattr(session, "run_sync"):
        coroutine: Coroutine[Any, Any, T] = session.run_sync(run)
        return coroutine
    return run(session)
