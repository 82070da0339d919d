"""That Alembic finds the plugin, in whatever order things are imported, and that fairqueue does without Alembic."""

import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from types import ModuleType, SimpleNamespace

import alembic
from alembic.operations import ops
from sqlalchemy import MetaData

import fairqueue as fq
from fairqueue.alembic import _plugin
from fairqueue.alembic._plugin import installations
from tests.pages import ROOT

#: For each of them, a process that has imported nothing of Alembic and of ours: only what both stand on.
PROGRAM = """
import importlib
import os
import sys

import anyio
import mako.template
import psycopg
import sqlalchemy.dialects.mssql
import sqlalchemy.dialects.mysql
import sqlalchemy.dialects.oracle
import sqlalchemy.dialects.postgresql
import sqlalchemy.dialects.sqlite
import sqlalchemy.ext.asyncio
import sqlalchemy.orm

assert not {{"alembic", "fairqueue"}} & sys.modules.keys()
for first in {firsts}:
    if not (child := os.fork()):
        importlib.import_module(first)
        import alembic
        import alembic.op
        import fairqueue.alembic
        from alembic.runtime.plugins import _all_plugins

        assert "fairqueue" in _all_plugins, "not found by its entry point"
        assert alembic.op.drop_fairqueue
        assert fairqueue.alembic.drop_fairqueue
        break
    assert os.waitpid(child, 0)[1] == 0, first
"""

WITHOUT = """
import sys
import fairqueue

assert "alembic" not in sys.modules
"""

COMPARE = """
import fairqueue
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import MetaData, NullPool, create_engine

metadata = MetaData()
fairqueue.attach(metadata)
options = {{"include_schemas": True, "autogenerate_plugins": ["alembic.autogenerate.*", "fairqueue"]}}
with create_engine({url!r}, poolclass=NullPool).connect() as connection:
    assert not compare_metadata(MigrationContext.configure(connection, opts=options), metadata)
"""


FIRST = [
    "alembic",
    "alembic.command",
    "alembic.op",
    "fairqueue",
    "fairqueue.alembic",
    "fairqueue.alembic._plugin",
]


def output(program: str) -> str:
    """What a fresh interpreter has to complain of."""
    command = [sys.executable, "-W", "error", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def test_import_order() -> None:
    """Alembic imports the plugin while it is half imported itself, and so may we be."""
    assert not output(PROGRAM.format(firsts=FIRST))


def test_the_core_does_without_alembic() -> None:
    """Programs that only enqueue or work don't pay for importing it."""
    assert not output(WITHOUT)


def test_types_of_ours_are_known(database_url: str) -> None:
    """With include_schemas=True Alembic reads our tables; also where the application uses none of our models."""
    assert not output(COMPARE.format(url=database_url))


def test_older_alembic() -> None:
    """Until 1.20.1 it took the entry point for a collection of modules, and failed to import if it was none."""
    (entry_point,) = metadata.entry_points(group="alembic.plugins", name="fairqueue")
    plugin = entry_point.load()
    assert isinstance(plugin, ModuleType)
    assert isinstance(plugin, Iterable)
    assert list(plugin) == [plugin]


def test_whoever_manages_a_schema_counts() -> None:
    """Where an env.py has the models of several applications, which share a queue."""
    ours, theirs = MetaData(), MetaData()
    fq.attach(ours)
    fq.attach(theirs, manage=False)
    assert installations([ours, theirs]) == installations([theirs, ours]) == {"fairqueue": True}
    assert installations([theirs, MetaData()]) == {"fairqueue": False}


def test_this_folder_is_not_alembic() -> None:
    """The project's own alembic/ is no package, so even from here the real one is imported."""
    assert alembic.__version__
    assert not (ROOT / "alembic" / "__init__.py").exists()


def test_the_schema_of_what_others_operate_on() -> None:
    """It may be named by the operation, by what it is about, or be that itself."""
    named = SimpleNamespace(name="fairqueue")
    found = [
        SimpleNamespace(schema="fairqueue"),
        SimpleNamespace(target=SimpleNamespace(schema="fairqueue")),
        SimpleNamespace(function=SimpleNamespace(schema="fairqueue", name="message_dequeue")),
        SimpleNamespace(schema=named),
    ]
    assert {_plugin._schema_of(op) for op in found} == {"fairqueue"}
    none = [SimpleNamespace(function=SimpleNamespace(schema=None, name="vat")), ops.CreateTableOp("invoice", [])]
    assert {_plugin._schema_of(op) for op in none} == {None}
    assert _plugin._schema_of(ops.DropTableOp("message", schema="fairqueue")) == "fairqueue"
