"""``fairqueue spark archive``: the history to Parquet."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

import click

from fairqueue.cli.output import echo
from fairqueue.cli.target import Target, pass_target
from fairqueue.cli.types import Duration

from .base import PipelineCommand, Start, checked_options_of, session_options

if TYPE_CHECKING:
    from fairqueue.spark.engine.archives import Archived

__all__ = ["archive"]


@click.command(cls=PipelineCommand, short_help="Write the history to Parquet, by day and queue.")
@click.argument("path")
@click.option(
    "--release-before",
    metavar="AGE",
    type=Duration(),
    help="Drop days in the database that ended so long ago (12h, 7d), if the files have the same.  [default: none]",
)
@click.option(
    "--feed",
    metavar="NAME",
    default="archive",
    show_default=True,
    help="By which the database knows what is archived; each archive has its own.",
)
@click.option(
    "--max-rows", type=click.IntRange(min=1), default=1_000_000, show_default=True, help="In a batch: memory, and time."
)
@session_options
@pass_target
def archive(
    target: Target, spark: Start, *, path: str, release_before: timedelta | None, feed: str, max_rows: int
) -> None:
    """Write what the history has since the last time to Parquet files in PATH, each row once.

    What is interrupted, at whatever moment, is finished by the next run. PATH is a folder, or a URL such as
    s3://bucket/history, with files at day=2026-11-21/queue=default. Until it is archived, no history is dropped; for
    an archive that is given up, an operator calls feed_forget(NAME). Rights: pipeline.
    """
    options = checked_options_of(target)
    start = time.monotonic()

    def progress(done: Archived) -> None:
        rate = done.rows / (time.monotonic() - start)
        released = f", {len(done.released)} days dropped" if done.released else ""
        click.echo(f"{done.rows:,} rows, {rate:,.0f} a second{released} ...", err=True)

    with spark() as session:
        from fairqueue.spark.archiving import archive as run

        start = time.monotonic()
        done = run(
            session,
            path,
            url=options["url"],
            schema=options["schema"],
            feed=feed,
            max_rows=max_rows,
            release_before=release_before,
            progress=progress,
        )
        took = time.monotonic() - start
    for day, reason in done.kept.items():
        click.echo(f"{day} stays in the database for now: {reason}.", err=True)
    released = f" {len(done.released)} days are dropped in the database." if done.released else ""
    echo(f"{done.rows:,} rows archived in {took:.1f} s, {done.rows / took:,.0f} a second.{released}")
