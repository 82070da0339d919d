"""``fairqueue spark``: the data pipeline. Imports nothing heavy: that is for the commands that need it."""

from __future__ import annotations

import click

from fairqueue.cli.base import EXIT_CODES, Group

from .archive import archive
from .clean import clean
from .enqueue import enqueue
from .report import report
from .simulate import simulate

__all__ = ["spark"]


@click.group("spark", cls=Group, epilog=EXIT_CODES, short_help="The data pipeline: files in, history out, reports.")
def spark() -> None:
    """The data pipeline, on Spark: files into a queue, its history to Parquet, reports, simulations.

    Needs Java, and pip install 'fairqueue[spark]'. Without a --master, Spark runs on this machine.
    """


for command in (enqueue, archive, report, simulate, clean):
    spark.add_command(command)
