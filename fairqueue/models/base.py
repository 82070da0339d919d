"""What all models have in common: the base class, the schema, and PostgreSQL's own types."""

from __future__ import annotations

from typing import Any, NoReturn

from sqlalchemy import BindParameter, ColumnElement, Dialect, MetaData, Text, cast, event, text
from sqlalchemy.dialects.postgresql.base import ischema_names
from sqlalchemy.orm import DeclarativeBase
from sqlalchemy.types import UserDefinedType

from fairqueue.errors import FairqueueError
from fairqueue.schema import DEFAULT_SCHEMA, check_schema_name

__all__ = ["NOW", "TID", "XID8", "Base", "in_schema"]

#: The time of the database, as PostgreSQL prints the default, so that comparing defaults finds no difference.
NOW = text(f"{DEFAULT_SCHEMA}.clock()")


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

    They are a ``schema_translate_map``: another one that is set later, as for the schema of a tenant, takes its place,
    and has to have this entry, too.

    :param schema: its name, as it is, without quotes.
    :raises InvalidValue: if no schema can have that name.
    """
    check_schema_name(schema)
    return {"schema_translate_map": {DEFAULT_SCHEMA: schema}}
