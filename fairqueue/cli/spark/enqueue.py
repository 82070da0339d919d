"""``fairqueue spark enqueue``: files into a queue."""

from __future__ import annotations

import time
from typing import Any

import click

from fairqueue.cli.failures import Invalid
from fairqueue.cli.target import Target, pass_target
from fairqueue.spark.enqueueing import FORMATS
from fairqueue.spark.enqueueing import enqueue as run

from .base import PipelineCommand, Start, checked_options_of, session_options

__all__ = ["enqueue"]


@click.command(cls=PipelineCommand, short_help="Enqueue files: Parquet, JSON, CSV, or a folder.")
@click.argument("path")
@click.option("--channel", metavar="EXPR", required=True, help="The channel: a column, or an expression of Spark SQL.")
@click.option("--queue", metavar="NAME", default="default", show_default=True, help="The queue.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(FORMATS),
    help="Of the files; files: one message a file.  [default: what PATH ends in, else files]",
)
@click.option("--payload", metavar="EXPR", help="The payload.  [default: the whole row, or what is known of the file]")
@click.option(
    "--set",
    "others",
    metavar="COLUMN=EXPR",
    multiple=True,
    help="Another column: key, cost, dequeue_at, delay, priority, queue, max_attempts, backoff, body.",
)
@click.option("--job", metavar="NAME", help="A name for this load: with the same name, nothing is enqueued twice.")
@click.option(
    "--commit",
    type=click.Choice(("atomic", "direct")),
    default="atomic",
    show_default=True,
    help="All or nothing; or each part as soon as it is there, which is faster.",
)
@click.option(
    "--on-conflict",
    type=click.Choice(("ignore", "raise")),
    help="When a key is live: leave the row out, or fail.  [default: ignore; raise with --commit direct]",
)
@click.option("--rejects", metavar="PATH", help="Where rows go that can't be messages.  [default: they are an error]")
@session_options
@pass_target
def enqueue(
    target: Target,
    spark: Start,
    *,
    path: str,
    channel: str,
    queue: str,
    kind: Any,
    payload: str | None,
    others: tuple[str, ...],
    job: str | None,
    commit: str,
    on_conflict: str | None,
    rejects: str | None,
) -> None:
    """Enqueue one message for each row of PATH, or for each file in it.

    Either all of them are enqueued, or none, unless --commit direct is chosen. Rights: pipeline.
    """
    expressions = dict(_assignment(each) for each in others)
    conflict = on_conflict or ("raise" if commit == "direct" else "ignore")
    options = checked_options_of(target) | {"queue": queue, "commit": commit, "on_conflict": conflict}
    if rejects is not None:
        options["rejects"] = rejects
    with spark() as session:
        start = time.monotonic()
        done = run(
            session,
            path,
            channel=channel,
            format=kind,
            payload=payload,
            expressions=expressions,
            options=options,
            job=job,
        )
        took = time.monotonic() - start
    if done.repeated:
        click.echo(f"{done.rows:,} rows: job {job} was done before, nothing was added.")
    else:
        fewer = ""
        if done.messages != done.rows:
            why = "were loaded before" if commit == "direct" else "have keys that are live"
            aside = "" if rejects is None else f", or are in {rejects}"
            fewer = f" {done.messages:,} became messages: the others {why}{aside}."
        click.echo(f"{done.rows:,} rows in {took:.1f} s, {done.rows / took:,.0f} a second.{fewer}")


def _assignment(text: str) -> tuple[str, str]:
    name, separator, expression = text.partition("=")
    if not separator or not expression.strip():
        raise Invalid(f"--set must be COLUMN=EXPR, not {text!r}")
    return name.strip(), expression
