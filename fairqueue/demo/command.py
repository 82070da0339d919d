"""The command ``fairqueue demo``, which ``python -m fairqueue.demo`` is too: its options, and what they have to be."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import click
from click.core import ParameterSource

from fairqueue.cli.base import EXIT_CODES, INTERRUPTED, Command
from fairqueue.cli.failures import Failed
from fairqueue.cli.signals import exit_by, handled
from fairqueue.cli.types import OutputFile

from .load import FEW, find_files, plan, standard_library

__all__ = ["demo"]


def _cores() -> int:
    """Those that this process may use, where the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@click.command(cls=Command, epilog=EXIT_CODES, short_help="See fair queueing at work.")
@click.option(
    "--tenants",
    type=click.IntRange(1, 1_000),
    metavar="N",
    default=15,
    show_default=True,
    help=f"Quiet tenants, {FEW} files each, beside the noisy one.",
)
@click.option(
    "--files",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A folder, of any files.  [default: the .py files of Python's standard library]",
)
@click.option(
    "--workers",
    type=click.IntRange(1, 64),
    metavar="N",
    default=min(max(2, _cores()), 16),
    show_default="one a core, 2 to 16",
    help="Worker processes for each queue.",
)
@click.option(
    "--batch", type=click.IntRange(1, 1_000), metavar="N", default=8, show_default=True, help="Messages a dequeue."
)
@click.option(
    "--picture",
    type=OutputFile(".png"),
    default="fairqueue-demo.png",
    show_default=True,
    help="Where the picture goes.",
)
@click.pass_context
def demo(context: click.Context, *, tenants: int, files: Path | None, workers: int, batch: int, picture: Path) -> None:
    """See fair queueing at work: one noisy tenant uploads a folder of files, then quiet tenants a few each.

    The same load goes through a queue in arrival order and through fairqueue; then a table and a picture show who
    waited. PostgreSQL is an embedded, throw-away one, or the server in FAIRQUEUE_DSN or of --dsn, where the demo uses
    two schemas of its own and drops them at the end.
    """
    root = context.find_root()
    # DATABASE_URL, which the other commands take as well, is the application's own.
    given = root.params["dsn"] if root.get_parameter_source("dsn") is ParameterSource.COMMANDLINE else None
    # They end it as Ctrl-C does: nothing is left behind. SIGHUP is a closed terminal, which nohup has it ignore.
    ends = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is not signal.SIG_IGN]
    context.with_resource(handled(exit_by, *ends))
    try:
        exact = _show(given, tenants, files, workers=workers, batch=batch, picture=picture)
    except KeyboardInterrupt:
        click.echo("Stopped. Nothing is left in the database.", err=True)
        context.exit(INTERRUPTED)
    context.exit(0 if exact else 1)


def _show(dsn: str | None, tenants: int, files: Path | None, *, workers: int, batch: int, picture: Path) -> bool:
    folder = files.absolute() if files else standard_library()
    paths = find_files(folder, suffix="" if files else ".py")
    if not paths:
        raise click.BadParameter(f"no files in {folder}", param_hint="--files")
    load = plan(folder, paths, tenants)
    try:
        # Not before: `fairqueue --help` needs neither a plotting library nor a server.
        from .show import show
    except ModuleNotFoundError as error:
        raise Failed(f"{error.name} is not installed; pip install 'fairqueue[demo]'") from None
    return show(load, dsn=dsn, workers=workers, batch=batch, picture=picture)
