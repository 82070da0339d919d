"""The command ``fairqueue bench``: what ``python -m benchmarks`` does, where that is."""

from __future__ import annotations

import click

from .base import Command
from .failures import Failed

__all__ = ["bench"]


@click.command(
    cls=Command,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True},
    short_help="Measure fairness and speed, in a checkout of the repository.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def bench(context: click.Context, arguments: tuple[str, ...]) -> None:
    """Measure fairness and speed beside other queues, as `make bench` does.

    Needs a checkout of the repository, and pip install 'fairqueue[benchmarks]': there --help names the options.
    """
    try:
        from benchmarks.__main__ import main
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        told = f"{package} is not installed; pip install 'fairqueue[benchmarks]'"
        if package == "benchmarks":
            told = "the benchmarks are not in the package: `make bench`, in a checkout of its repository"
        if not {"-h", "--help"} & {*arguments}:
            raise Failed(told) from error
        click.echo(f"{context.get_help()}\n\nHere, {told}.")
        return
    main(arguments, prog_name="fairqueue bench")
