"""fairqueue in your own Alembic history.

Adoption takes one line beside the models and one argument in env.py::

    # models.py
    import fairqueue

    fairqueue.attach(Base.metadata)

    # env.py, in each call of context.configure()
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        autogenerate_plugins=["alembic.autogenerate.*", "fairqueue"],
    )

From then on ``alembic revision --autogenerate`` writes what the queue needs, beside what your tables need::

    def upgrade() -> None:
        op.create_fairqueue(1)
        op.create_table("invoice", ...)


    def downgrade() -> None:
        op.drop_table("invoice")
        op.drop_fairqueue(1)

``alembic upgrade head``, ``alembic check``, ``alembic downgrade`` and ``--sql`` work as they always do, on
psycopg and asyncpg. Your tables may have foreign keys to ``fairqueue.message``, with ``ondelete="SET NULL"`` or
``"CASCADE"``: without either, a message that is referred to can't end. On a queue that is in use let such a key be a
revision of its own, as its lock stops everybody who enqueues or dequeues; begin it with
``op.execute("SET LOCAL lock_timeout = '2s'")``. Keep the queue's schema off the ``search_path`` of the role that
autogenerates: PostgreSQL leaves out the names of schemas there, and Alembic would take the key for another one.

**A new release of the library** never changes your database by itself. If it brings a new version of the
tables and functions, ``alembic check`` reports ``('upgrade_fairqueue', 1, 2, 'fairqueue')`` and the next
``alembic revision --autogenerate`` writes ``op.upgrade_fairqueue(1, 2)``. The steps are frozen: an old
revision goes on doing what it did, whatever release runs it.

**Another schema**, or several: ``fairqueue.attach(Base.metadata, schema="My Q")`` is written as
``op.create_fairqueue(1, schema='My Q')``. The schema has to be fairqueue's alone: autogenerate leaves everything
in it to fairqueue, and refuses a table of yours there, which would never be created. A foreign key to a message
there has to name that schema, by a table that stands for it and is in no metadata of yours::

    messages = Table("message", MetaData(), Column("id", BigInteger, primary_key=True), schema="My Q")


    class Invoice(Base):
        __tablename__ = "invoice"
        id: Mapped[int] = mapped_column(primary_key=True)
        message_id: Mapped[int | None] = mapped_column(ForeignKey(messages.c.id, ondelete="SET NULL"))

With ``ForeignKey(fairqueue.Message.id)`` the revision names ``fairqueue.message``. That runs where the engine of
env.py has ``execution_options=fairqueue.in_schema("My Q")``, but neither with ``--sql``, nor does ``alembic check``
ever find the key that it looks for.

**Two applications on one database**: let one history own the queue, and attach it in the other one with
``manage=False``. That one writes nothing and proposes nothing for it.

**A history that runs once for each tenant**, each with a schema and a version table of its own: the queue is for all of
them. Give it a history of its own, which runs once (another ``version_locations``), and attach it with
``manage=False`` in that of the tenants. Else the first of them installs it, and whichever is taken down to ``base``
drops it, with the messages of all.

**Without the plugin** autogenerate leaves the queue out: write the operations by hand, and if env.py says
``include_schemas=True``, keep it from dropping the queue's tables with :func:`include_name`.

**Types.** Alembic describes ``op`` to type checkers in a fixed list, so they don't know
``op.create_fairqueue``. The functions of this module are the same operations, with types::

    from fairqueue.alembic import create_fairqueue


    def upgrade() -> None:
        create_fairqueue(1)

**Removing it**: write ``op.drop_fairqueue(1)`` by hand in the revision that takes the call of ``attach``
away. Autogenerate can't know that you mean it; the messages go too.

Limitations: PostgreSQL only, and on other databases nothing is compared. A revision run with ``--sql`` can't
look at the database, so it isn't refused, as it would be online, where another version is installed than it
starts from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Before anything of ours: it loads the whole of Alembic, which in turn loads our plugin, so that whoever
# imports this package first doesn't have Alembic start from the middle of it.
from alembic import op
from sqlalchemy import MetaData

from fairqueue.schema import DEFAULT_SCHEMA

from ._plugin import installations
from .ops import CreateFairqueueOp, DowngradeFairqueueOp, DropFairqueueOp, UpgradeFairqueueOp

__all__ = ["create_fairqueue", "downgrade_fairqueue", "drop_fairqueue", "include_name", "upgrade_fairqueue"]


def create_fairqueue(version: int, *, schema: str = DEFAULT_SCHEMA) -> None:
    """``op.create_fairqueue``: install the queue, where it is not installed yet.

    :param version: which; a revision goes on installing this one for ever.
    :param schema: where; created if there is none.
    :raises SchemaVersionError: if this library doesn't have the version, or another one is installed.
    :raises InvalidValue: if ``schema`` can't be a name.
    """
    op.invoke(CreateFairqueueOp(version, schema))


def upgrade_fairqueue(start: int, end: int, *, schema: str = DEFAULT_SCHEMA) -> None:
    """``op.upgrade_fairqueue``: take an installed queue to a newer version, with its messages.

    :param start: the version that is installed.
    :param end: the newer one; where that is there already, nothing is done.
    :param schema: where it is installed.
    :raises SchemaVersionError: if this library doesn't have the versions, or another one is installed.
    :raises InvalidValue: if ``end`` is older, or ``schema`` can't be a name.
    """
    op.invoke(UpgradeFairqueueOp(start, end, schema))


def downgrade_fairqueue(start: int, end: int, *, schema: str = DEFAULT_SCHEMA) -> None:
    """``op.downgrade_fairqueue``: take an installed queue back to an older version, with its messages.

    :param start: the version that is installed.
    :param end: the older one; where that is there already, nothing is done.
    :param schema: where it is installed.
    :raises SchemaVersionError: if this library doesn't have the versions, or another one is installed.
    :raises InvalidValue: if ``end`` is newer, or ``schema`` can't be a name.
    """
    op.invoke(DowngradeFairqueueOp(start, end, schema))


def drop_fairqueue(version: int, *, schema: str = DEFAULT_SCHEMA) -> None:
    """``op.drop_fairqueue``: remove the queue and its messages.

    :param version: the one that is installed; where none is, nothing is done.
    :param schema: where it is installed.
    :raises SchemaVersionError: if this library doesn't have the version, or another one is installed.
    :raises InvalidValue: if ``schema`` can't be a name.
    """
    op.invoke(DropFairqueueOp(version, schema))


def include_name(
    metadata: MetaData | Sequence[MetaData],
) -> Callable[[str | None, str, Mapping[str, Any]], bool]:
    """A filter for an env.py that doesn't name the plugin, but says ``include_schemas=True``.

    It keeps autogenerate away from the schemas that ``metadata`` has fairqueue attached in::

        context.configure(
            connection=connection,
            target_metadata=Base.metadata,
            include_schemas=True,
            include_name=include_name(Base.metadata),
        )

    :param metadata: as ``target_metadata`` is: one, or several.
    """

    def include(name: str | None, type_: str, parents: Mapping[str, Any]) -> bool:
        schema = name if type_ == "schema" else parents.get("schema_name")
        return schema not in installations(metadata)

    return include
