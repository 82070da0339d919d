"""``fairqueue spark clean``: what dead loads have left."""

from __future__ import annotations

from datetime import timedelta

import click

from fairqueue.cli.base import Command
from fairqueue.cli.target import Target, pass_target
from fairqueue.cli.types import Duration

from .base import extra, options_of

__all__ = ["clean"]


@click.command(cls=Command, short_help="Drop what loads that died have left.")
@click.option(
    "--older-than",
    metavar="AGE",
    type=Duration(),
    default="1d",
    show_default=True,
    help="Only what is older than that (12h, 7d): give more than any load takes.",
)
@pass_target
def clean(target: Target, *, older_than: timedelta) -> None:
    """Drop the staging tables of loads that died. Each load that succeeds does so, too.

    Rights: pipeline, or operator.
    """
    with extra():
        from fairqueue.spark.engine.loading import clean as run
        from fairqueue.spark.engine.place import Place

    place = Place(**options_of(target))
    with target.session():  # which looks at the schema
        pass
    dropped = run(place, older_than / timedelta(hours=1))
    click.echo(f"{dropped} staging table{'' if dropped == 1 else 's'} dropped.")
