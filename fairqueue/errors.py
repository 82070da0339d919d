"""What fairqueue raises.

Every error of its own is a :class:`FairqueueError`; what else a database refuses stays SQLAlchemy's. Those about a
value name the field, the value and the way out::

    import fairqueue as fq

    try:
        fq.Message(channel="")
    except fq.InvalidValue as error:
        print(error)  # channel must have 1 to 255 characters, not 0

:class:`ChannelFull` and :class:`DuplicateKey` come from the database. The functions that send something themselves,
such as :func:`fairqueue.enqueue_many`, raise them. What a session sends when it flushes is SQLAlchemy's business, which
raises its own errors, unless the engine is told otherwise, once, where it is made::

    fq.translate_errors(engine)

    session.add(fq.Message("acme", key="nightly report"))
    session.add(fq.Message("acme", key="nightly report"))
    try:
        session.commit()
    except fq.DuplicateKey:
        session.rollback()

Limitations: without that, a flush raises SQLAlchemy's IntegrityError or DBAPIError; :func:`translated` says what it
means. It isn't done for all engines of a program, because some are not fairqueue's, and their owners may rely on the
errors of SQLAlchemy.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine, event
from sqlalchemy.exc import DBAPIError, DontWrapMixin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.engine import ExceptionContext
    from sqlalchemy.ext.asyncio import AsyncEngine

    from .waiting import Ending

__all__ = [
    "ChannelFull",
    "DuplicateKey",
    "FairqueueError",
    "InvalidValue",
    "SchemaVersionError",
    "WaitTimeout",
    "translate_errors",
    "translated",
]


class FairqueueError(Exception):
    """The base of all errors that fairqueue raises itself."""


class InvalidValue(FairqueueError, ValueError, DontWrapMixin):
    """A value was refused before anything was written. The message names the field and the value."""


class SchemaVersionError(FairqueueError):
    """The database holds another version of the schema than this library works with, or none."""


class WaitTimeout(FairqueueError, TimeoutError):
    """:func:`fairqueue.wait_for` has waited as long as it was allowed to.

    :param endings: a :class:`fairqueue.waiting.Ending` for each message that has ended by then.
    """

    def __init__(self, message: str, endings: Sequence[Ending] = ()) -> None:
        super().__init__(message)
        self.endings = list(endings)


class ChannelFull(FairqueueError):
    """As many of the channel's messages as its max_size says aren't leased, and its overflow is ``"reject"``.

    The statement has done nothing, and the transaction has to be rolled back, at least to a savepoint before it.
    """


class DuplicateKey(FairqueueError):
    """The channel has a live message with this key already.

    The statement has done nothing, and the transaction has to be rolled back, at least to a savepoint before it.
    :func:`fairqueue.enqueue_unique` ignores or replaces instead.
    """


def translated(error: BaseException) -> ChannelFull | DuplicateKey | None:
    """What an error of the driver, or of SQLAlchemy around it, means in fairqueue's words; None if nothing."""
    driver: Any = error.orig if isinstance(error, DBAPIError) else error
    code = sqlstate(driver)
    if code not in _CODES:
        return None
    # psycopg keeps the fields of the server's message in diag, asyncpg in the error itself, which SQLAlchemy wraps.
    fields = getattr(driver, "diag", None) or driver.__cause__ or driver
    text = getattr(fields, "message_primary", None) or getattr(fields, "message", None) or str(driver)
    if code == _UNIQUE_VIOLATION:
        detail = getattr(fields, "message_detail", None) or getattr(fields, "detail", None)
        place = (getattr(fields, "table_name", None), getattr(fields, "constraint_name", None))
        # A table of the application's may have the same names, in another schema; it has other columns.
        columns = _COLUMNS.search(detail or "")
        if place != ("message", "message_key") or (columns and columns[1] != "queue, channel, key"):
            return None
        return DuplicateKey(f"{text}: {detail}" if detail else text)
    return ChannelFull(text)


def sqlstate(driver: BaseException | None) -> str:
    """The code of a driver's error; empty where it isn't the server's."""
    return str(getattr(driver, "sqlstate", None) or getattr(driver, "pgcode", None) or "")


def translate_errors(engine: Engine | AsyncEngine) -> None:
    """From now on raise :class:`ChannelFull` and :class:`DuplicateKey` for what sessions of this engine flush.

    :param engine: an Engine or an AsyncEngine; again changes nothing.
    :raises InvalidValue: for what is none.
    """
    sync_engine = getattr(engine, "sync_engine", engine)
    if not isinstance(sync_engine, Engine):
        raise InvalidValue(
            f"engine must be an Engine or an AsyncEngine, not {type(engine).__name__}:"
            " give the one that sessions are made of"
        )
    event.listen(sync_engine, "handle_error", _translate)  # once, however often it is called


def _translate(context: ExceptionContext) -> BaseException | None:
    # What is returned is raised in place of SQLAlchemy's own error.
    return translated(context.original_exception)


# As in "Key (queue, channel, key)=(default, acme, a) already exists.", in whatever language. Our own functions say
# something else there, and the server nothing to a role that may not read these columns.
_COLUMNS = re.compile(r"\((.*?)\)=\(")

_UNIQUE_VIOLATION = "23505"
_CHANNEL_FULL = "QF001"
_CODES = {_UNIQUE_VIOLATION, _CHANNEL_FULL}
