"""What an error means to somebody at a command line, and the way out; in one line, without passwords."""

from __future__ import annotations

import traceback

import click
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, InterfaceError, NoSuchModuleError, OperationalError

from fairqueue.errors import FairqueueError, InvalidValue, sqlstate

from .failures import Failed, Invalid
from .target import Target

__all__ = ["explained", "way_to_right"]

# Of libpq and of the server, by what they say: a connection that fails has no code.
_CONNECTION = {
    "password": "check the user and the password of the database URL",
    "no pg_hba.conf entry": "the server lets this user in from elsewhere only: ask its administrator",
    "does not exist": "check the database URL",
    "timeout": "check the host and the port of the database URL",
    "refused": "check the host and the port of the database URL, and that the server runs",
    "No such file": "check the host and the port of the database URL, and that the server runs",
    "translate host name": "check the host of the database URL",
    "resolve host": "check the host of the database URL",
    "not known": "check the host of the database URL",  # of psycopg 3.2
}
# Of the driver, about what it can't send or read: the connection is fine.
_DRIVER = {
    "connection option": "check the options of the database URL",
    "DateStyle": "set PGDATESTYLE=ISO in the environment",
    "timestamp too": "a time in the database is none that Python knows, as the end of a pause may be:"
    " `fairqueue channel resume`, or `fairqueue queue resume`, ends it",
}
_NO_RIGHT = "42501"
_WAYS_OUT = {
    _NO_RIGHT: "the owner of the queue's schema can give rights: `fairqueue grant ROLE observer` to look at it,"
    " `fairqueue grant ROLE operator` to change it",
    "23505": "somebody else has made the same at this moment: try again",
    "42704": "create it first",
    "55P03": "try again",
    "57014": "try again, or raise statement_timeout",
    "40001": "try again",
    "40P01": "try again",
}


def explained(error: Exception, *, kind: str | None = None) -> Failed | None:
    """The same as an error of the command line; None for what nobody expects, and whose traceback is worth having.

    :param kind: of role that may do it, or ``owner``, if no kind may; None: an observer or an operator.
    """
    failure = _explained(error, kind)
    target = click.get_current_context().find_object(Target)
    if failure is None or target is None:
        return failure
    return type(failure)(failure.message.replace("`fairqueue ", f"`{target.command} "))


def way_to_right(kind: str) -> str:
    """Who can give the right that a role of this kind has, and how."""
    return f"the owner of the queue's schema can give the right: `fairqueue grant ROLE {kind}`"


def _explained(error: Exception, kind: str | None) -> Failed | None:
    if isinstance(error, InvalidValue | ArgumentError):
        way_out = "; an engine's URL begins with postgresql+psycopg://" if isinstance(error, NoSuchModuleError) else ""
        return Invalid(f"{error}{way_out}")
    if isinstance(error, FairqueueError):
        return Failed(str(error))
    if isinstance(error, NotImplementedError) and "DateStyle" in str(error):
        error = DataError(None, None, error)  # psycopg has it as no error of a database; the worker has made it one
    if type(error).__module__.partition(".")[0] == "psycopg":  # of what goes without SQLAlchemy, as Spark's drivers do
        import psycopg

        error = DBAPIError.instance(None, None, error, psycopg.Error)
    if isinstance(error, DBAPIError):
        return Failed(_of_database(error, kind))
    if isinstance(error, UnicodeEncodeError):  # without what it was of: that may hold a password
        return Invalid("a value on the command line, or in the environment, is no text in UTF-8")
    return _of_import(error) if isinstance(error, ImportError) else None


def _of_import(error: ImportError) -> Failed | None:
    package = error.name if isinstance(error, ModuleNotFoundError) else None
    if "pq wrapper" in str(error):  # psycopg without libpq: an error of its own making, which names no module
        package = "psycopg"
    if package == "psycopg2" and _is_of_an_engine(error):  # which SQLAlchemy 2.0 takes postgresql:// for
        return Failed("psycopg2 is not installed; begin the engine's URL with postgresql+psycopg://")
    if package in {"rich", "psycopg"}:
        return Failed(f"{package} is not installed, or not in full; pip install 'fairqueue[cli]'")
    return None


def _is_of_an_engine(error: ImportError) -> bool:
    """Whether it was SQLAlchemy that looked for the module, and not the application."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__", "")).startswith("sqlalchemy.")


def _of_database(error: DBAPIError, kind: str | None) -> str:
    driver: BaseException | None = error.orig
    code = sqlstate(driver)
    diagnostics = getattr(driver, "diag", None)
    message = getattr(diagnostics, "message_primary", None)
    if message is None:
        # Not from the server: the connection could not be made, or was lost; or the driver can't go on.
        message = " ".join(str(driver).split()) or type(driver).__name__
        known, else_ = _DRIVER, ""
        if isinstance(error, OperationalError | InterfaceError):
            known, else_ = _CONNECTION, "check the database URL, and that the server runs"
        way_out = next((way_out for words, way_out in known.items() if words in message), else_)
        return f"{message}; {way_out}" if way_out else message
    if message.startswith("permission denied for database"):
        return f"{message}; its owner can GRANT CREATE ON DATABASE, or CREATE SCHEMA ... AUTHORIZATION, to this role"
    hint = getattr(diagnostics, "message_hint", None) or ""
    way_out = _WAYS_OUT.get(code) or hint
    if code == _NO_RIGHT and kind == "owner":
        way_out = hint or "only the owner of the queue's schema can do this: connect as that role"
    elif code == _NO_RIGHT and kind:
        way_out = way_to_right(kind)
    return f"{message}; {way_out}" if way_out else message
