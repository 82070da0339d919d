"""Tying an installation of fairqueue to an application's metadata.

::

    class Base(DeclarativeBase): ...

    fairqueue.attach(Base.metadata)

From then on ``Base.metadata.create_all()`` installs the queue before the application's own tables, so that these may
refer to :class:`fairqueue.Message` (with ``ondelete="SET NULL"`` or ``"CASCADE"``, or a message that is referred to can
never end), and ``drop_all()`` removes it after them; ``drop_all(tables=[...])`` only does so if these are all. With
Alembic, ``revision --autogenerate`` writes the one line that installs or upgrades it (see :mod:`fairqueue.alembic`).
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, MetaData, event

from . import schema as _schema
from ._checks import check_flag
from .errors import InvalidValue

__all__ = ["attach", "installations"]

_KEY = "fairqueue"


def attach(metadata: MetaData, schema: str = _schema.DEFAULT_SCHEMA, *, manage: bool = True) -> None:
    """Make ``metadata`` install and remove fairqueue together with its own tables.

    Attaching again changes no more than ``manage``. Several schemas may be attached; see
    :func:`fairqueue.in_schema` for using them.

    :param metadata: the application's, usually ``Base.metadata``.
    :param schema: the PostgreSQL schema for fairqueue's tables and functions, best one of its own.
    :param manage: False where two applications share a queue and the other one's migrations own it: then nothing is
        installed or removed, and autogenerate leaves the schema alone.
    :raises InvalidValue: if one of them can't be, such as a ``manage`` that is text from the environment.
    """
    if not isinstance(metadata, MetaData):
        raise InvalidValue(f"metadata must be a MetaData, not {metadata!r}: give that of your models, Base.metadata")
    _schema.check_schema_name(schema)
    check_flag("manage", manage)
    known: dict[str, bool] = metadata.info.setdefault(_KEY, {})
    first = schema not in known
    known[schema] = manage
    if not first:
        return

    def install(target: MetaData, connection: Connection, **_: Any) -> None:
        if known[schema]:
            _check_no_mock(connection)
            _schema.check_dialect(connection.dialect)
            if any(table.schema is None for table in target.tables.values()):
                _schema.check_apart(connection, schema)
            _schema.install(connection, schema)

    def uninstall(target: MetaData, connection: Connection, **of_event: Any) -> None:
        if known[schema] and _drops_all(target, of_event.get("_ddl_runner")):
            _check_no_mock(connection)
            _schema.uninstall(connection, schema)

    event.listen(metadata, "before_create", install)
    event.listen(metadata, "after_drop", uninstall)


def _check_no_mock(connection: object) -> None:
    if not isinstance(connection, Connection):
        raise InvalidValue(
            f"engine must have a database, not be one of a {type(connection).__name__}: what installs the queue is"
            " fairqueue.schema.install_sql(); say fairqueue.attach(metadata, manage=False) to print your own tables"
        )


def _drops_all(metadata: MetaData, dropper: Any) -> bool:
    """Whether it isn't ``drop_all(tables=[...])`` that leaves some."""
    chosen = getattr(dropper, "tables", None)  # not the event's own tables: those are the ones that were there
    return chosen is None or (bool(chosen) and {*metadata.tables.values()} <= {*chosen})


def installations(metadata: MetaData) -> dict[str, bool]:
    """The schemas attached to ``metadata``, each with its ``manage``."""
    attached: dict[str, bool] = metadata.info.get(_KEY, {})
    return attached
