"""``fairqueue worker``: runs the workers of an application, in this process or in several."""

from __future__ import annotations

import importlib
import logging
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .base import EXIT_CODES, Command
from .failures import Failed

if TYPE_CHECKING:
    from types import FrameType

    from fairqueue.worker import Worker

__all__ = ["worker"]

_LEVELS = ("debug", "info", "warning", "error")
_LOG_FORMAT = "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"
_EXIT_CODES = EXIT_CODES.partition("  130")[0] + "  3    messages were handed back unfinished"


class _WorkersCommand(Command):
    kind = "worker"


class _Name(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    name = "module:app"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        module, colon, attribute = value.partition(":")
        if not colon or not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
            self.fail(f"must be a module and a Worker in it, such as shop.jobs:app, not {value!r}", param, ctx)
        return str(value)


@click.command(cls=_WorkersCommand, epilog=_EXIT_CODES, short_help="Run workers of an application.")
@click.argument("apps", metavar="MODULE:APP...", type=_Name(), nargs=-1, required=True)
@click.option(
    "--processes",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    help="With more than 1, that many processes do the same, and one that dies is replaced.",
)
@click.option("--log-level", type=click.Choice(_LEVELS), default="info", show_default=True)
@click.option("--child", is_flag=True, hidden=True)
@click.pass_context
def worker(context: click.Context, apps: Sequence[str], processes: int, log_level: str, child: bool) -> None:
    """Run the fairqueue.Worker APP of MODULE until SIGTERM or Ctrl-C; several of them in one event loop.

    Modules are looked for in the current directory first. The first signal stops fetching and lets handlers finish, for
    as long as the Worker's grace says; a second one doesn't wait for them. The database is that of the Worker's own
    engine, not the one of --dsn.
    """
    if processes > 1:
        from .processes import supervise

        # As -m puts the current directory first: a project's click.py or queue.py would be imported in place of ours.
        isolated = [] if sys.path[:1] == [str(Path.cwd())] else ["-P"]
        command = [sys.executable, *isolated, "-m", "fairqueue.cli", "worker", *apps]
        logging.basicConfig(level=log_level.upper(), format=_LOG_FORMAT)
        context.exit(supervise([*command, "--log-level", log_level, "--child"], processes))
    if child:
        from .processes import end_with_parent

        end_with_parent()
    from fairqueue.worker import run

    with _log(log_level):
        workers = _load(apps)
    context.exit(run(*workers))


@contextmanager
def _log(level: str) -> Iterator[None]:
    """Log to stderr: what happens in the block, and from then on, unless the block sets up logging itself."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_LOG_FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[])
    # Not one of root's yet: basicConfig() does nothing where it has any.
    before, logging.lastResort = logging.lastResort, handler
    try:
        yield
    finally:
        logging.lastResort = before
    logging.basicConfig(handlers=[handler])
    # dictConfig() and fileConfig() disable loggers that they don't name, unless told otherwise.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "fairqueue" and isinstance(logger, logging.Logger):
            logger.disabled = False


def _load(names: Sequence[str]) -> list[Worker]:
    here = str(Path.cwd())
    if sys.path[:1] != [here]:
        sys.path.insert(0, here)
    for name in names:
        if names.count(name) > 1:
            raise click.BadParameter("is named more than once", param_hint=name)
    return [_load_one(name) for name in names]


def _load_one(name: str) -> Worker:
    from fairqueue.worker import Worker

    module_name, _, path = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # noqa: BLE001 - of the application's
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{module_name}.".startswith(f"{missing}."):
            raise _not_imported(module_name, error) from None
        raise click.BadParameter(
            f"no module named {missing!r}; start it where the module can be imported from, such as the project's"
            " folder",
            param_hint=name,
        ) from None
    try:
        found = reduce(getattr, path.split("."), module)
    except AttributeError:
        workers = [each for each, value in vars(module).items() if isinstance(value, Worker)]
        there = f"its workers are {', '.join(workers)}" if workers else "it has no fairqueue.Worker"
        raise click.BadParameter(f"{module_name} has no {path!r}; {there}", param_hint=name) from None
    if not isinstance(found, Worker):
        raise click.BadParameter(f"must be a fairqueue.Worker, not {type(found).__name__}", param_hint=name)
    return found


def _not_imported(module_name: str, error: Exception) -> Exception:
    """What to raise instead; what may be the module's mistake is printed first, from the application's own lines on."""
    from sqlalchemy.exc import NoSuchModuleError

    from fairqueue.errors import FairqueueError

    from .errors import explained

    told = isinstance(error, FairqueueError | NoSuchModuleError | ImportError)
    if told and (failure := explained(error, kind=_WorkersCommand.kind)):
        return failure
    rest = error.__traceback__
    while rest is not None and not _is_of_a_module(rest.tb_frame):
        rest = rest.tb_next
    traceback.print_exception(error.with_traceback(rest))
    return Failed(f"{module_name} can't be imported: {type(error).__name__}: {error}")


def _is_of_a_module(frame: FrameType) -> bool:
    """Not ours, nor of the import system."""
    name = str(frame.f_globals.get("__name__", ""))
    return frame.f_code.co_filename != __file__ and name.partition(".")[0] != "importlib"
