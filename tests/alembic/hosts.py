"""Applications that have fairqueue in their own Alembic history, as their authors would write them."""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psycopg
from alembic import command
from alembic.config import Config
from alembic.script import Script
from sqlalchemy import make_url

from tests.catalog import snapshot

INI = """\
[alembic]
script_location = %(here)s
path_separator = newline
"""

ENV = """\
import asyncio

import sqlalchemy as sa
from alembic import context
from sqlalchemy.ext.asyncio import create_async_engine

import fairqueue

metadata = sa.MetaData()
{models}

url = sa.make_url(context.config.get_main_option("sqlalchemy.url"))
settings = dict(target_metadata=metadata, autogenerate_plugins=["alembic.autogenerate.*", "fairqueue"])
options = {{}}
{settings}


def run(connection: sa.Connection) -> None:
    context.configure(connection=connection, **settings)
    with context.begin_transaction():
        context.run_migrations()


def run_online() -> None:
    engine = sa.create_engine(url, poolclass=sa.NullPool, execution_options=options)
    with engine.connect() as connection:
        run(connection)


async def run_async() -> None:
    engine = create_async_engine(url, poolclass=sa.NullPool, execution_options=options)
    async with engine.connect() as connection:
        await connection.run_sync(run)


def run_offline() -> None:
    settings.setdefault("dialect_opts", {{"paramstyle": "named"}})
    context.configure(url=url, literal_binds=True, **settings)
    with context.begin_transaction():
        context.run_migrations()


if context.is_offline_mode():
    run_offline()
elif {asynchronous}:
    asyncio.run(run_async())
else:
    run_online()
"""

MAKO = '''\
"""${message}"""

from alembic import op
import sqlalchemy as sa
${imports if imports else ""}

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}


def upgrade():
    ${upgrades if upgrades else "pass"}


def downgrade():
    ${downgrades if downgrades else "pass"}
'''

ATTACHED = "fairqueue.attach(metadata)\n"

#: A table that needs the queue to be there first.
INVOICE = """\
invoice = sa.Table(
    "invoice",
    metadata,
    sa.Column("id", sa.BigInteger, primary_key=True),
    sa.Column("message_id", sa.ForeignKey(fairqueue.Message.id)),
)
"""


@dataclass(frozen=True)
class Revision:
    """What autogenerate wrote: the calls of ``op``, without the arguments of those that are not fairqueue's."""

    upgrade: list[str]
    downgrade: list[str]


class Host:
    """A project folder with an alembic.ini, an env.py and revisions, and the commands that its author would run.

    :param models: what the application says beside ``metadata = sa.MetaData()``.
    :param settings: what its env.py says about ``settings``, the arguments of ``context.configure()``, and
        ``options``, the execution options of its engine.
    :param driver: psycopg, psycopg_async or asyncpg.
    """

    def __init__(
        self, folder: Path, url: str, models: str = ATTACHED, settings: str = "", driver: str = "psycopg"
    ) -> None:
        self.folder = folder
        (folder / "versions").mkdir(parents=True)
        (folder / "alembic.ini").write_text(INI)
        (folder / "script.py.mako").write_text(MAKO)
        self.output = io.StringIO()
        self.config = Config(str(folder / "alembic.ini"), stdout=self.output, output_buffer=self.output)
        full_url = make_url(url).set(drivername=f"postgresql+{driver}").render_as_string(hide_password=False)
        self.config.set_main_option("sqlalchemy.url", full_url.replace("%", "%%"))
        self.become(models, settings, asynchronous=driver != "psycopg")

    def become(self, models: str = ATTACHED, settings: str = "", *, asynchronous: bool = False) -> None:
        """Another release of the same application."""
        env = ENV.format(models=models, settings=settings, asynchronous=asynchronous)
        (self.folder / "env.py").write_text(env)

    def autogenerate(self) -> Revision:
        script = command.revision(self.config, "by autogenerate", autogenerate=True)
        assert isinstance(script, Script)
        upgrade, downgrade = Path(script.path).read_text().split("def downgrade():")
        return Revision(calls(upgrade), calls(downgrade))

    def write(self, upgrade: str, downgrade: str, message: str = "by hand") -> None:
        """A revision written by hand."""
        script = command.revision(self.config, message)
        assert isinstance(script, Script)
        path = Path(script.path)
        text = path.read_text()
        for function, body in {"upgrade": upgrade, "downgrade": downgrade}.items():
            text = text.replace(f"def {function}():\n    pass", f"def {function}():\n    {body}")
        path.write_text(text)

    def upgrade(self, revision: str = "head") -> None:
        command.upgrade(self.config, revision)

    def downgrade(self, revision: str = "base") -> None:
        command.downgrade(self.config, revision)

    def check(self) -> None:
        command.check(self.config)

    def upgrade_script(self, revision: str = "head") -> str:
        """What ``alembic upgrade --sql`` prints."""
        return self._printed(lambda: command.upgrade(self.config, revision, sql=True))

    def downgrade_script(self, revisions: str) -> str:
        return self._printed(lambda: command.downgrade(self.config, revisions, sql=True))

    def _printed(self, run: Callable[[], None]) -> str:
        self.output.seek(0)
        self.output.truncate()
        run()
        return self.output.getvalue()


def calls(source: str) -> list[str]:
    """The calls of ``op`` in the text of a revision."""
    return re.findall(r"\bop\.(\w+_fairqueue\(.*\)|\w+)", source)


def catalog(connection: psycopg.Connection) -> list[str]:
    """What is in a database, but for the version table, which Alembic never removes."""
    lines = snapshot(connection)
    connection.rollback()
    return [line for line in lines if "alembic_version" not in line]
