"""The four operations: what they are, what they do, how autogenerate writes them into a revision.

Each moves one schema from a version to another by the frozen steps of :mod:`fairqueue.schema`. They differ
only in how they are written down, so that a revision reads as what it does.

Alembic loads this module while it is itself half loaded, because the plugin needs it. What is imported here
from Alembic, and from where, is therefore restricted: ``alembic.autogenerate`` has no ``renderers`` yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from alembic.autogenerate.render import renderers
from alembic.operations import MigrateOperation, Operations

from fairqueue import schema as schemas
from fairqueue.errors import InvalidValue, SchemaVersionError
from fairqueue.schema import DEFAULT_SCHEMA, check_whole, downgrade_sql, installed_version, lock, run, upgrade_sql

if TYPE_CHECKING:
    from alembic.autogenerate.api import AutogenContext

__all__ = [
    "CreateFairqueueOp",
    "DowngradeFairqueueOp",
    "DropFairqueueOp",
    "FairqueueOp",
    "UpgradeFairqueueOp",
    "move",
]


class FairqueueOp(MigrateOperation):
    """The base of the four: takes ``schema`` from version ``start`` to ``end``; 0 is nothing installed."""

    directive: ClassVar[str]

    def __init__(self, start: int, end: int, schema: str = DEFAULT_SCHEMA) -> None:
        self.start = start
        self.end = end
        self.schema = schema

    def __str__(self) -> str:
        arguments = [str(version) for version in self.versions]
        if self.schema != DEFAULT_SCHEMA:
            arguments.append(f"schema={self.schema!r}")
        return f"{self.directive}({', '.join(arguments)})"

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions as the directive takes them: 0 is never written."""
        return tuple(version for version in (self.start, self.end) if version)

    def reverse(self) -> FairqueueOp:
        return move(self.end, self.start, self.schema)

    def to_diff_tuple(self) -> tuple[Any, ...]:
        return (self.directive, *self.versions, self.schema)

    def statements(self) -> list[str]:
        """Plain statements; :class:`SchemaVersionError` for a version that this library doesn't have."""
        right = move(self.start, self.end, self.schema)
        if type(right) is not type(self):
            raise InvalidValue(f"op.{self} goes the other way: write op.{right}")
        steps = upgrade_sql if self.start < self.end else downgrade_sql
        return steps(self.schema, self.start, self.end)


@Operations.register_operation("create_fairqueue")
class CreateFairqueueOp(FairqueueOp):
    directive = "create_fairqueue"

    def __init__(self, version: int, schema: str = DEFAULT_SCHEMA) -> None:
        super().__init__(0, version, schema)

    @classmethod
    def create_fairqueue(cls, operations: Operations, version: int, *, schema: str = DEFAULT_SCHEMA) -> None:
        """Install the queue: its tables, functions, triggers and indexes.

        ::

            from alembic import op

            op.create_fairqueue(1)
            op.create_fairqueue(1, schema="My Q")

        Where ``create_all()``, the command line or another history has put this version already, or a later one that
        the library knows, this does nothing.

        :param version: the version to install. A revision goes on installing this one for ever.
        :param schema: the schema to install into, created if there is none. It should hold nothing else.
        """
        operations.invoke(cls(version, schema))


@Operations.register_operation("upgrade_fairqueue")
class UpgradeFairqueueOp(FairqueueOp):
    directive = "upgrade_fairqueue"

    @classmethod
    def upgrade_fairqueue(cls, operations: Operations, start: int, end: int, *, schema: str = DEFAULT_SCHEMA) -> None:
        """Take an installed queue from version ``start`` to the newer ``end``, with its messages.

        ::

            op.upgrade_fairqueue(1, 2)
        """
        operations.invoke(cls(start, end, schema))


@Operations.register_operation("downgrade_fairqueue")
class DowngradeFairqueueOp(FairqueueOp):
    directive = "downgrade_fairqueue"

    @classmethod
    def downgrade_fairqueue(cls, operations: Operations, start: int, end: int, *, schema: str = DEFAULT_SCHEMA) -> None:
        """Take an installed queue from version ``start`` back to the older ``end``, with its messages.

        ::

            op.downgrade_fairqueue(2, 1)
        """
        operations.invoke(cls(start, end, schema))


@Operations.register_operation("drop_fairqueue")
class DropFairqueueOp(FairqueueOp):
    directive = "drop_fairqueue"

    def __init__(self, version: int, schema: str = DEFAULT_SCHEMA) -> None:
        super().__init__(version, 0, schema)

    @classmethod
    def drop_fairqueue(cls, operations: Operations, version: int, *, schema: str = DEFAULT_SCHEMA) -> None:
        """Remove the queue **and its messages**; the schema too, if it was made for it and is empty now.

        ::

            op.drop_fairqueue(1)

        :param version: the version that is installed.
        """
        operations.invoke(cls(version, schema))


def move(start: int, end: int, schema: str) -> FairqueueOp:
    """The operation that leads from one version to another."""
    if start == 0:
        return CreateFairqueueOp(end, schema)
    if end == 0:
        return DropFairqueueOp(start, schema)
    return (UpgradeFairqueueOp if start < end else DowngradeFairqueueOp)(start, end, schema)


@Operations.implementation_for(FairqueueOp)
def _run(operations: Operations, op: FairqueueOp) -> None:
    statements = op.statements()
    context = operations.get_context()
    if context.as_sql:
        # As they are: a compiler would double the percent signs, unless env.py sets another paramstyle.
        for statement in statements:
            context.impl.static_output(statement + context.impl.command_terminator)
    elif not _already_there(operations, op):
        for statement in statements:
            run(operations.get_bind(), statement)


def _already_there(operations: Operations, op: FairqueueOp) -> bool:
    """Whether there is nothing left to do; an error if the database stands where ``op`` can't start from."""
    connection = operations.get_bind()
    lock(connection, op.schema)
    found = installed_version(connection, op.schema)
    if op.start < op.end:
        check_whole(connection, op.schema)
        if op.end <= found <= schemas.HEAD:
            return True  # another history, or create_all(), has gone as far, or farther
    if found not in {op.start, op.end}:
        holds = f"version {found} of fairqueue" if found else "no fairqueue"
        raise SchemaVersionError(
            f"op.{op} can't run: schema {op.schema!r} holds {holds}; to get to version {op.end} from there,"
            f" write op.{move(found, op.end, op.schema)}"
        )
    return found == op.end


@renderers.dispatch_for(FairqueueOp)
def _render(context: AutogenContext, op: FairqueueOp) -> str:
    return f"{context.opts['alembic_module_prefix'] or ''}{op}"
