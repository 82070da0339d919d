"""What all models have in common: the base class, the schema, and the checks of names and numbers."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, NoReturn

from sqlalchemy import BindParameter, ColumnElement, Dialect, MetaData, Text, cast, event, text
from sqlalchemy.dialects.postgresql.base import ischema_names
from sqlalchemy.orm import DeclarativeBase
from sqlalchemy.types import UserDefinedType

from fairqueue.errors import FairqueueError, InvalidValue
from fairqueue.schedule import is_whole
from fairqueue.schema import DEFAULT_SCHEMA

__all__ = [
    "NOW",
    "TID",
    "XID8",
    "Base",
    "check_choice",
    "check_count",
    "check_end",
    "check_flag",
    "check_moment",
    "check_name",
    "check_number",
    "in_schema",
]

#: The time of the database, as PostgreSQL prints the default, so that comparing defaults finds no difference.
NOW = text(f"{DEFAULT_SCHEMA}.clock()")

_MAX_INTEGER = 2**31 - 1
#: What is read back in another time zone than UTC has to be in the years that Python knows.
_FIRST_MOMENT, _LAST_MOMENT = datetime(2, 1, 1, tzinfo=UTC), datetime(9999, 1, 1, tzinfo=UTC)


class XID8(UserDefinedType[int]):
    """PostgreSQL's 64-bit transaction id: a number, which travels as text."""

    cache_ok = True

    def get_col_spec(self, **kw: Any) -> str:
        return "xid8"

    def bind_processor(self, dialect: Dialect) -> Any:
        return lambda value: None if value is None else str(value)

    def bind_expression(self, bindvalue: BindParameter[int]) -> ColumnElement[int]:
        return cast(cast(bindvalue, Text), self)

    def result_processor(self, dialect: Dialect, coltype: object) -> Any:
        return lambda value: None if value is None else int(value)


class TID(UserDefinedType[str]):
    """PostgreSQL's place of a row in its table."""

    cache_ok = True

    def get_col_spec(self, **kw: Any) -> str:
        return "tid"


# So that inspecting a database that has the columns, as Alembic does, doesn't warn.
ischema_names.setdefault("xid8", XID8)
ischema_names.setdefault("tid", TID)


class Base(DeclarativeBase):
    """The base of fairqueue's own models. Its tables are created by :func:`fairqueue.attach` or Alembic."""

    metadata = MetaData(schema=DEFAULT_SCHEMA)


@event.listens_for(Base.metadata, "before_create")
def _refuse_create(*_: Any, **__: Any) -> NoReturn:
    raise FairqueueError(
        "fairqueue's tables are nothing without its functions and triggers: call fairqueue.attach(Base.metadata) with"
        " your own metadata and its create_all(), or fairqueue.schema.install(connection)"
    )


def in_schema(schema: str) -> dict[str, Any]:
    """Execution options with which statements go to the installation in ``schema``, for an engine or a session::

        engine = create_engine(url, execution_options=fq.in_schema("My Q"))

    :param schema: its name, as it is, without quotes.
    """
    return {"schema_translate_map": {DEFAULT_SCHEMA: schema}}


def check_name(field: str, value: object) -> str:
    """A name of 1 to 255 characters, as queues, channels and keys have, or :class:`InvalidValue`."""
    if not isinstance(value, str):
        raise InvalidValue(f"{field} must be text, not {value!r}")
    if not 1 <= len(value) <= 255:
        raise InvalidValue(f"{field} must have 1 to 255 characters, not {len(value)}")
    if "\x00" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise InvalidValue(f"{field} holds a character that PostgreSQL can't store: {value!r}")
    return value


def check_number(field: str, value: object, minimum: float, maximum: float) -> float:
    """A number from ``minimum`` to ``maximum`` (so neither NaN nor infinite), or :class:`InvalidValue`."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not minimum <= value <= maximum:
        raise InvalidValue(f"{field} must be a number from {minimum:g} to {maximum:g}, not {value!r}")
    return float(value)


def check_count(field: str, value: object, minimum: int, maximum: int = _MAX_INTEGER) -> int:
    """A whole number from ``minimum`` to ``maximum``, or :class:`InvalidValue`."""
    if not is_whole(value) or not minimum <= value <= maximum:
        raise InvalidValue(f"{field} must be a whole number from {minimum} to {maximum}, not {value!r}")
    return value


def check_flag(field: str, value: object) -> bool:
    """True or False, or :class:`InvalidValue`."""
    if not isinstance(value, bool):
        raise InvalidValue(f"{field} must be True or False, not {value!r}")
    return value


def check_choice(field: str, value: object, *choices: str) -> str:
    """One of ``choices``, or :class:`InvalidValue`."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidValue(f"{field} must be {' or '.join(map(repr, choices))}, not {value!r}")
    return value


def check_moment(field: str, value: object) -> datetime:
    """A datetime with a time zone, or :class:`InvalidValue`."""
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise InvalidValue(
            f"{field} must be a datetime with a time zone, not {value!r}: use datetime.now(timezone.utc)"
        )
    return value


def check_end(field: str, value: object) -> datetime:
    """A moment at which something that may also have no end ends, or :class:`InvalidValue`."""
    moment = check_moment(field, value)
    if not _FIRST_MOMENT <= moment < _LAST_MOMENT:
        raise InvalidValue(
            f"{field} must be in the years 2 to 9998 (UTC), not {moment.isoformat()}: leave it out for no end"
        )
    return moment
