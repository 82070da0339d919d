"""The group of all commands. Imports nothing heavy: that is for the commands that need it."""

from __future__ import annotations

import click

from fairqueue import __version__
from fairqueue.demo.command import demo

from .base import EXIT_CODES, Group
from .bench import bench
from .channels import channel
from .database import check, grant, migrate
from .messages import dead, message
from .queues import queue
from .spark import spark
from .status import status
from .target import Target
from .worker import worker

__all__ = ["commands", "program"]

#: The commands that work on a :class:`Target`, for the command line of a host.
commands: list[click.Command] = [migrate, status, queue, channel, message, dead, check, grant]


@click.group("fairqueue", cls=Group, epilog=EXIT_CODES)
@click.option(
    "--dsn",
    envvar=["FAIRQUEUE_DSN", "DATABASE_URL"],
    show_envvar=True,
    metavar="URL",
    help="The database: postgresql://user@host/database.",
)
@click.option(
    "--schema",
    envvar="FAIRQUEUE_SCHEMA",
    show_envvar=True,
    default="fairqueue",
    show_default=True,
    help="The schema that fairqueue is installed in.",
)
@click.version_option(__version__, prog_name="fairqueue")
@click.pass_context
def program(context: click.Context, dsn: str | None, schema: str) -> None:
    """A multi-tenant fair message queue inside PostgreSQL."""
    context.obj = Target(dsn, schema)


for command in (demo, worker, spark, bench, *commands):
    program.add_command(command)
