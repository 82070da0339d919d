"""``fairqueue spark clean``: what dead loads have left."""

from __future__ import annotations

import click

from fairqueue.cli.base import Command
from fairqueue.cli.target import Target, pass_target

from .base import extra, options_of

__all__ = ["clean"]


@click.command(cls=Command, short_help="Drop what loads that died have left.")
@click.option(
    "--hours",
    type=click.FloatRange(min=0),
    default=24,
    show_default=True,
    help="Only what is older; no load that still runs may be.",
)
@pass_target
def clean(target: Target, *, hours: float) -> None:
    """Drop the staging tables of loads that died. Each load that succeeds does so, too. Rights: operator."""
    with extra():
        from fairqueue.spark.engine.loading import clean as run
        from fairqueue.spark.engine.place import Place

    dropped = run(Place(**options_of(target)), hours)
    click.echo(f"{dropped} staging table{'' if dropped == 1 else 's'} dropped.")
