"""What the commands of Spark have in common: where it runs, and what they need."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import update_wrapper
from typing import TYPE_CHECKING, Any

import click

from fairqueue.cli.base import Command
from fairqueue.cli.failures import Failed, Invalid
from fairqueue.cli.target import Target

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["PipelineCommand", "Start", "checked_options_of", "extra", "options_of", "session_options"]

#: What a callback gets as ``spark``: ``with spark() as session: ...``
Start = Callable[[], "AbstractContextManager[SparkSession]"]


class PipelineCommand(Command):
    """One for a role of the kind ``pipeline``."""

    kind = "pipeline"


@contextmanager
def extra() -> Iterator[None]:
    """Around imports: says which package is missing, and where it comes from."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise Failed(f"{error.name} is not installed; pip install 'fairqueue[spark]'") from None


def options_of(target: Target) -> dict[str, str]:
    """The options of the data source for the database of a command.

    Its password goes into the environment of this process, and so of a local Spark that is started later; executors
    elsewhere need their own.
    """
    from fairqueue._url import libpq, parsed

    if not isinstance(target.place, str):
        raise Invalid("no database is named; use --dsn, FAIRQUEUE_DSN or DATABASE_URL")
    url = parsed(target.place)
    if password := url.query.get("password", url.password):  # the order that libpq has
        os.environ["PGPASSWORD"] = str(password)
    # To set(), None is no value.
    url = url._replace(password=None).difference_update_query(["password"])
    return {"url": libpq(url), "schema": target.schema}


def checked_options_of(target: Target) -> dict[str, str]:
    """The same, of a database that is there, with a schema that this program works with.

    For before Spark starts: that takes its time, and its processes find a password in its environment.
    """
    with extra():
        import pyspark  # noqa: F401 (whoever lacks it needs no database yet)
    options = options_of(target)
    with target.session():
        pass
    return options


def session_options(callback: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --master and --memory; the callback gets ``spark``, which starts a session when it is called."""

    def command(*args: Any, master: str, memory: str, **values: Any) -> Any:
        def start() -> AbstractContextManager[SparkSession]:
            with extra():
                import pyspark  # noqa: F401 (which local_session imports when it is entered)

                from fairqueue.spark import local_session
            # An error is one line, ours; this one says it in JSON, too.
            logging.getLogger("SQLQueryContextLogger").disabled = True
            # The bar says how many tasks of a stage are done.
            settings = {"spark.log.level": "OFF", "spark.ui.showConsoleProgress": str(sys.stderr.isatty()).lower()}
            return local_session(master, memory=memory, settings=settings)

        try:
            return callback(*args, spark=start, **values)
        except Exception as error:
            if not type(error).__module__.startswith(("pyspark.", "py4j.")):
                raise  # the command explains it
            raise _explained(error) from error

    # Before the options are added: it takes over those that the callback has already.
    wrapped = update_wrapper(command, callback)
    for option in (
        click.option("--memory", default="2g", show_default=True, help="Of Spark's driver."),
        click.option(
            "--master",
            envvar="FAIRQUEUE_SPARK_MASTER",
            show_envvar=True,
            default="local[*]",
            show_default=True,
            help="Where Spark runs.",
        ),
    ):
        wrapped = option(wrapped)
    return wrapped


def _explained(error: Exception) -> Failed:
    """An error of Spark in one line: what this package said in a task, or else what Spark says first."""
    ours = re.findall(r"^(?:fairqueue\.\S+): (.*)$", str(error), re.MULTILINE)
    if ours:
        return Failed(ours[-1] + _way_out(ours[-1]))
    # Of Java: what went wrong and why, each once, however often a stage has been tried again.
    of_csv = r"(?<=IllegalArgumentException: ).*CSV header.*?(?=:?$)|^Expected: .* but found: .*"
    named = dict.fromkeys(re.findall(rf"\[[A-Z][A-Z_.]+\] .*|{of_csv}", str(error), re.MULTILINE))
    if named:
        return Failed(" ".join(named))
    return Failed(next((line for line in str(error).splitlines() if line.strip()), type(error).__name__))


def _way_out(said: str) -> str:
    """For a right that was missing in a task, of which no more than the words have come."""
    from fairqueue.cli.errors import way_to_right

    command = click.get_current_context().command
    if said.startswith("permission denied for ") and isinstance(command, Command) and command.kind:
        return f"; {way_to_right(command.kind)}"
    return ""
