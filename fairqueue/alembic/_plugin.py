"""The entry point ``alembic.plugins``: what autogenerate and ``alembic check`` do about fairqueue.

Loaded by Alembic during its own import; see :mod:`fairqueue.alembic.ops` for what that forbids.

===================== ================ ==========================================
wanted (``attach``)   in the database  written into the revision
===================== ================ ==========================================
version n             nothing          ``op.create_fairqueue(n)``
version n             version n        nothing
version n             older, m         ``op.upgrade_fairqueue(m, n)``
version n             newer            an error: this library can't undo that
``manage=False``      anything         nothing: another history owns it
not attached          anything         what Alembic writes by itself
===================== ================ ==========================================
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from alembic.util import DispatchPriority, PriorityDispatchResult
from sqlalchemy import MetaData

from fairqueue import schema as _schema
from fairqueue.errors import InvalidValue
from fairqueue.installation import installations as attached

from .ops import FairqueueOp, move

if TYPE_CHECKING:
    from alembic.autogenerate.api import AutogenContext
    from alembic.operations.ops import UpgradeOps
    from alembic.runtime.plugins import Plugin

__all__ = ["installations", "setup"]


def installations(metadata: MetaData | Sequence[MetaData] | None) -> dict[str, bool]:
    """The schemas attached to the target metadata of an env.py, each with its ``manage``."""
    several = [metadata] if isinstance(metadata, MetaData) else metadata or []
    found: dict[str, bool] = {}
    for each in several:
        for schema, manage in attached(each).items():
            # Where two applications share an env.py, the one that manages the schema counts.
            found[schema] = manage or found.get(schema, False)
    return found


def compare(context: AutogenContext, upgrade_ops: UpgradeOps) -> PriorityDispatchResult:
    """Write what leads from the installed to the wanted version; reads the catalog and takes no lock.

    First of all comparisons, so that the host's tables, which may refer to messages, come after the queue on
    the way up and before it on the way down.
    """
    assert context.connection is not None  # autogenerate always has one
    for schema, manage in installations(context.metadata).items():
        _schema.check_apart(context.connection, schema)
        _check_no_table_of_theirs(context, schema)
        if not manage:
            continue
        found = _schema.installed_version(context.connection, schema)
        if found > _schema.HEAD:
            raise _schema.mismatch(schema, found)
        if found != _schema.HEAD:
            upgrade_ops.ops.append(move(found, _schema.HEAD, schema))
    return PriorityDispatchResult.CONTINUE


def prune(context: AutogenContext, upgrade_ops: UpgradeOps) -> PriorityDispatchResult:
    """Take out whatever else was found to do in our schemas; last of all comparisons.

    With ``include_schemas=True`` Alembic would drop our tables, with our models among the target metadata it
    would create them, and alembic_utils would drop our functions: each sees only the part that it knows.
    """
    ours = installations(context.metadata)
    upgrade_ops.ops[:] = [op for op in upgrade_ops.ops if isinstance(op, FairqueueOp) or _schema_of(op) not in ours]
    return PriorityDispatchResult.CONTINUE


def _check_no_table_of_theirs(context: AutogenContext, schema: str) -> None:
    """Raise :class:`InvalidValue` for a table that would never be created: see :func:`prune`."""
    # Now that Alembic is loaded; and before it looks at the database, where there are types that it learns here.
    from fairqueue.models import Base

    ours = {table.name for table in Base.metadata.tables.values()}
    for table in context.sorted_tables:
        if table.schema == schema and table.name not in ours:
            raise InvalidValue(
                f"table {table.fullname!r} is in the schema that fairqueue is attached to, and would never be created:"
                " autogenerate leaves all in there to fairqueue; give the queue a schema of its own"
            )


def _schema_of(op: Any) -> str | None:
    """The schema of an operation: Alembic's have it themselves, those of others may have it of what they are about, as
    alembic_utils' of their target; and one may be about the schema itself.
    """
    theirs = {} if type(op).__module__.startswith("alembic.") else getattr(op, "__dict__", {})
    for each in (op, *theirs.values()):
        schema = getattr(each, "schema", None)
        schema = getattr(schema, "name", schema)
        if isinstance(schema, str):
            return schema
    return None


def setup(plugin: Plugin) -> None:
    plugin.add_autogenerate_comparator(
        compare, "autogenerate", "fairqueue", qualifier="postgresql", priority=DispatchPriority.FIRST
    )
    plugin.add_autogenerate_comparator(
        prune, "autogenerate", "fairqueue", qualifier="postgresql", priority=DispatchPriority.LAST
    )


class _Module(ModuleType):
    """This module, which until 1.20.1 Alembic iterated over, for the plugin modules in it."""

    def __iter__(self) -> Iterator[ModuleType]:
        yield self


sys.modules[__name__].__class__ = _Module
