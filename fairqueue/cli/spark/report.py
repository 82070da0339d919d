"""``fairqueue spark report``: what every tenant got, from history or its archive."""

from __future__ import annotations

import contextlib
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fairqueue.cli.base import Command
from fairqueue.cli.failures import Failed
from fairqueue.cli.output import echo, make_console, make_table, number, printable
from fairqueue.cli.target import Target, pass_target
from fairqueue.cli.types import Moment

from .base import Start, options_of, session_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from rich.console import Console

    from fairqueue.spark.reporting import QueueSummary, Report, Summary

__all__ = ["report"]

_PAGE = "index.html"


@click.command(cls=Command, short_help="What every channel got, as Parquet, page and table.")
@click.option(
    "--archive", metavar="PATH", help="History from its archive.  [default: from the database, and live messages]"
)
@click.option("--queue", help="Only this queue.  [default: all]")
@click.option("--window", default="1h", show_default=True, help="How long each is: 30s, 1m, 1h, 1d; aligned to UTC.")
@click.option("--since", type=Moment(UTC), help="ISO 8601, UTC.  [default: the first message]")
@click.option("--until", type=Moment(UTC), help="ISO 8601, UTC; not part of it.  [default: now]")
@click.option("--out", default="report", show_default=True, metavar="DIR", help="Where the Parquet and the page go.")
@click.option(
    "--top", type=click.IntRange(1, 1000), default=10, show_default=True, help="Channels of each queue to show."
)
@session_options
@pass_target
def report(
    target: Target,
    *,
    spark: Start,
    archive: str | None,
    queue: str | None,
    window: str,
    since: datetime | None,
    until: datetime | None,
    out: str,
    top: int,
) -> None:
    """What every channel got: how many of its messages, how long they waited, and whether that was fair.

    Writes Parquet tables by channel and by queue, over all and by window, and the page index.html with pictures into
    DIR, which takes the place of an older report. Weights come from the database; with --archive, if one is named.
    Rights: observer.
    """
    from fairqueue.spark.reporting.windows import check_order, parse_window

    length = parse_window(window)
    check_order(since, until)
    folder = _writable(out)
    weights = _weights(target) if archive is None or target.place is not None else None
    # Before Spark starts, whose processes find a password in its environment.
    options = {} if archive else options_of(target)
    with spark() as session, contextlib.ExitStack() as held:
        from fairqueue.spark import snapshot
        from fairqueue.spark.reporting import page, summary
        from fairqueue.spark.reporting import report as compute

        if archive:
            history, live = _archived(session, archive, since), None
        else:
            # Or what ends between the two reads would be in neither.
            options["snapshot"] = held.enter_context(snapshot(**options))
            history, live = _from_database(session, options, since)
        schema = "queue string, channel string, weight double"
        console = make_console()
        with console.status("Computing the report"):
            found = compute(
                history,
                folder,
                live=live,
                weights=None if weights is None else session.createDataFrame(weights, schema),
                queue=queue,
                window=length,
                since=since,
                until=until,
            )
            shown = summary(found, top)
            (folder / _PAGE).write_text(page(shown), encoding="utf-8")
    _print(console, shown)
    _say_where(found, folder)


def _writable(out: str) -> Path:
    """A folder that is there, or can be made: looked at before the work, not after it."""
    from fairqueue.spark.schemas import REPORT

    folder = Path(out).absolute()
    # Not each.exists(), which raises where one may not look.
    there = next(each for each in (folder, *folder.parents) if os.access(each, os.F_OK))
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise Failed(f"--out: {out!r} can't be written: {there} is no folder that you may write to")
    page = folder / _PAGE
    # One of them is left of a report that was killed while it replaced another.
    if page.exists() and not any((folder / name / "_SUCCESS").exists() for name in REPORT):
        raise Failed(f"--out: {out!r} has a page that is of no report: name another folder, or remove {page}")
    return folder


def _from_database(
    session: SparkSession, options: dict[str, str], since: datetime | None
) -> tuple[DataFrame, DataFrame]:
    """History and live messages."""
    source = {name: session.read.format("fairqueue").options(**options) for name in ("history", "messages")}
    if since is not None:
        source["history"].option("since", since.isoformat())
    history, live = (reader.option("table", name).load() for name, reader in source.items())
    return history, live


def _archived(session: SparkSession, path: str, since: datetime | None) -> DataFrame:
    from pyspark.errors import AnalysisException
    from pyspark.sql import functions as sf

    from fairqueue.spark.schemas import HISTORY

    try:
        columns = session.read.parquet(path).columns
    except AnalysisException as error:
        raise Failed(f"--archive: {path!r} has no Parquet that can be read: {error.getCondition()}") from None
    if "day" not in columns:
        return session.read.parquet(path)
    # Told, not guessed: a queue by the name of 007 is none of the number 7.
    history = session.read.schema(f"{HISTORY}, day date").parquet(path)
    return history if since is None else history.where(sf.col("day") >= sf.lit(since.astimezone(UTC).date()))


def _weights(target: Target) -> list[tuple[str, str | None, float]]:
    """Of the channels that have one of their own, and of the others of a queue."""
    from sqlalchemy import select

    from fairqueue.models import Channel, Queue

    with target.session() as session:
        own = session.execute(select(Channel.queue, Channel.name, Channel.weight).where(Channel.weight.is_not(None)))
        default = session.execute(select(Queue.name, Queue.channel_weight).where(Queue.channel_weight != 1))
        return [*((row[0], row[1], float(row[2] or 1)) for row in own), *((row[0], None, row[1]) for row in default)]


def _print(console: Console, found: Summary) -> None:
    from fairqueue.spark.reporting.words import seconds

    if not found.queues:
        console.print("Nothing happened in this time.")
    for queue in found.queues:
        total = queue.total
        jain = ""
        if total["jain_median"] is not None:
            jain = f"; Jain's index {total['jain_median']:.3f} in the median window, {total['jain_worst']:.3f} at worst"
        console.print(
            f"queue {printable(total['queue'])}: {number(total['channels'])} channels, {number(total['enqueued'])}"
            f" enqueued, {number(total['served'])} served, {number(total['dead'])} dead, {number(total['backlog'])}"
            f" waiting; wait p95 {seconds(total['wait_p95'])}{jain}"
        )
        _table(console, queue)
        console.print()


def _table(console: Console, queue: QueueSummary) -> None:
    from fairqueue.spark.reporting.words import seconds

    numbers = ("started", "dead", "wait p95", "p99", "had/due, %", "starved")
    table = make_table("channel", *numbers, "", right=numbers, wide={"channel": 1})
    for title, rows in (("had most", queue.largest), ("longest left waiting", queue.starved)):
        table.add_row(title, style="dim")
        for row in rows:
            shares = (row["share"], row["entitled_share"])
            table.add_row(
                printable(row["channel"]),
                number(row["started"]),
                number(row["dead"]),
                seconds(row["wait_p95"]),
                seconds(row["wait_p99"]),
                "/".join("-" if share is None else f"{100 * share:.2g}" for share in shares),
                seconds(row["starved"]),
                "noisy" if row["noisy_windows"] else "",
            )
    console.print(table)


def _say_where(found: Report, folder: Path) -> None:
    from fairqueue.spark.reporting.words import percentiles_are, period_of, weights_are

    echo(f"{period_of(found)}, {number(found.rows)} messages.")
    echo(f"{percentiles_are(found)} {weights_are(found)}")
    echo(f"Page: {folder / _PAGE}")
    echo(f"Parquet: {folder}/channels, channel_windows, queues, queue_windows")
