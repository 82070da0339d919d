"""``fairqueue spark simulate``: how long tenants would wait, by simulations side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fairqueue.cli.base import Command
from fairqueue.cli.output import echo, make_console, make_table, number, printable
from fairqueue.cli.types import OutputFile

from .base import Start, extra, session_options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from fairqueue.spark.simulation import Scenario

__all__ = ["simulate"]

#: Fewer than that say little about one in a hundred.
_ENOUGH = 1_000


class _Values(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """One value, or several with commas between.

    :param varied: each only once, as each is simulated.
    """

    def __init__(self, kind: Callable[[str], Any], what: str, *, varied: bool = True) -> None:
        self.kind, self.what, self.varied, self.name = kind, what, varied, "values"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[Any]:
        found: list[Any] = []
        for part in str(value).split(","):
            try:
                found.append(self.kind(part.strip()))
            except ValueError:
                self.fail(f"must be {self.what}, or several with commas between, not {part!r}", param, ctx)
        return list(dict.fromkeys(found)) if self.varied else found


def _count_or_none(text: str) -> int | None:
    return None if text == "none" else int(text)


_counts = _Values(int, "a whole number")
_numbers = _Values(float, "a number")
_words = _Values(str, "a word")


@click.command(cls=Command, short_help="How long tenants would wait.")
@click.option("--tenants", type=_counts, default="1000", show_default=True, help="How many there are.")
@click.option("--workers", type=_counts, default="10", show_default=True, help="Messages served at a time.")
@click.option("--load", type=_numbers, default="0.9,1.1", show_default=True, help="Offered, of what workers can do.")
@click.option(
    "--scheduler",
    type=_words,
    default="arrival,round_robin,fair",
    show_default=True,
    help="arrival (order), round_robin, or fair (as fairqueue does).",
)
@click.option(
    "--workload",
    type=_words,
    help="zipf: tenants of all sizes; burst: one uploads much at once; diurnal: zipf by day and night; split: one"
    " under many names.  [default: zipf]",
)
@click.option("--messages", type=_counts, default="100000", show_default=True, help="All in all.")
@click.option("--service", type=_numbers, default="1", show_default=True, help="Seconds a message, on average.")
@click.option(
    "--service-law", type=_words, default="exponential", show_default=True, help="exponential, constant or lognormal."
)
@click.option("--skew", type=_numbers, default="1", show_default=True, help="zipf, diurnal: tenant k sends k^-skew.")
@click.option("--upload", type=_counts, help="burst: messages at once.  [default: a tenth]")
@click.option(
    "--swing", type=_numbers, default="0.8", show_default=True, help="diurnal: how far from the mean, 0 to 1."
)
@click.option(
    "--cycles", type=_numbers, default="2", show_default=True, help="diurnal: days from first to last message."
)
@click.option("--names", type=_counts, default="10", show_default=True, help="split: names of the noisy tenant.")
@click.option(
    "--weights",
    type=_Values(float, "a number", varied=False),
    default="1",
    show_default=True,
    help="Of the tenants, the noisiest first; the last is that of all others. Never varied.",
)
@click.option(
    "--max-concurrency",
    type=_Values(_count_or_none, "a whole number or none"),
    default="none",
    show_default=True,
    help="Messages of a channel served at a time.",
)
@click.option(
    "--interval-ms", type=_counts, default="0", show_default=True, help="Milliseconds between two of a channel."
)
@click.option("--burst", type=_counts, default="1", show_default=True, help="How many may go at once after a pause.")
@click.option(
    "--arrivals",
    metavar="FILE",
    help="Messages from a CSV or Parquet file with the columns at (seconds), channel and, if wanted, cost and"
    " service_seconds; instead of --workload, --tenants, --load and --messages.",
)
@click.option("--seed", type=_counts, default="1", show_default=True, help="Of all that chance decides.")
@click.option(
    "--picture",
    type=OutputFile(".png"),
    default="fairqueue-simulation.png",
    show_default=True,
    help="Where the picture goes.",
)
@click.option("--out", type=OutputFile(".parquet"), help="A Parquet file for all figures.")
@session_options
def simulate(
    *, spark: Start, picture: Path, out: Path | None, weights: list[float], arrivals: str | None, **values: Any
) -> None:
    """Simulate a queue of many tenants: how long would the quiet ones wait?

    Every option that takes VALUES takes several with commas between; all combinations are simulated, each in a Spark
    task of its own, with the same messages for each scheduler. Quiet is the half of the tenants that sends least, noisy
    the one in a hundred that sends most. The time that a database takes, batches and leases are left out.
    """
    with extra():
        from fairqueue.spark.simulation import Scenario, grid
        from fairqueue.spark.simulation.arrivals import read_arrivals
        from fairqueue.spark.simulation.picture import draw
        from fairqueue.spark.simulation.words import answer
    given = {name: value for name, value in values.items() if value is not None}
    if arrivals is not None:
        given.setdefault("workload", ["file"])
        for name in ("tenants", "load", "messages"):  # are those of the file
            del given[name]
        read_arrivals(arrivals)
    # In the order of a table's columns, whatever the order on the command line; the schedulers side by side.
    ordered = {field.name: given[field.name] for field in fields(Scenario) if field.name in given}
    ordered["scheduler"] = ordered.pop("scheduler")
    rows = _simulated(spark, grid(**ordered, weights=tuple(weights), arrivals=arrivals), out)
    _print(rows)
    draw(picture, rows)
    echo(answer(rows))
    fewest = min(row["group_messages"] for row in rows if row["group"] == "quiet")
    if fewest < _ENOUGH:
        echo(f"Quiet tenants sent as few as {number(fewest)} messages: a p99 to rely on takes {number(_ENOUGH)}.")
    echo(f"The picture is {picture}{f', all figures are in {out}' if out else ''}.")


def _simulated(spark: Start, scenarios: Sequence[Scenario], out: Path | None) -> list[dict[str, Any]]:
    """The rows in the order of the scenarios."""
    from fairqueue.spark.simulation import GROUPS, simulate

    with spark() as session, _progress(session, scenarios):
        table = simulate(session, scenarios).toArrow().sort_by("scenario")
    if out is not None:
        from pyarrow import parquet

        parquet.write_table(table, out)
    rows: list[dict[str, Any]] = table.to_pylist()
    return sorted(rows, key=lambda row: (row["scenario"], GROUPS.index(row["group"])))


@contextmanager
def _progress(session: SparkSession, scenarios: Sequence[Scenario]) -> Iterator[None]:
    """How many are done, as Spark counts its tasks. By Spark Connect it doesn't say; then only that they run."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    context: Any = getattr(session, "sparkContext", None)
    console = Console(stderr=True)
    messages = sum(scenario.messages for scenario in scenarios if scenario.arrivals is None)
    said = f" of {number(messages)} messages all in all" if messages else ""
    console.print(f"{number(len(scenarios))} simulation{'s' if len(scenarios) > 1 else ''}{said}:")
    over = threading.Event()
    with Progress(
        TextColumn("simulated"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    ) as bar:
        task = bar.add_task("", total=len(scenarios) if context else None)

        def watch() -> None:
            tracker = context.statusTracker()
            while not over.wait(0.3):
                stages = map(tracker.getStageInfo, tracker.getActiveStageIds())
                done = sum(stage.numCompletedTasks for stage in stages if stage is not None)
                bar.update(task, completed=max(done, int(bar.tasks[0].completed)))

        watcher = threading.Thread(target=watch if context else over.wait, daemon=True)
        watcher.start()
        try:
            yield
            bar.update(task, total=len(scenarios), completed=len(scenarios))
        finally:
            over.set()
            watcher.join()


def _print(rows: Sequence[dict[str, Any]]) -> None:
    from fairqueue.spark.simulation import GROUPS
    from fairqueue.spark.simulation.words import cell, fixed, seconds, varied

    names = varied(rows)
    headings = [name.replace("_", " ") for name in names]
    figures = ("p50", "p95", "p99", "noisy", "all", "place")
    table = make_table(*headings, "scheduler", *figures, right=(*headings, *figures), wide={})
    before: list[str] = []
    for first in range(0, len(rows), len(GROUPS)):
        quiet, noisy, all_ = rows[first : first + len(GROUPS)]
        place = [printable(cell(name, quiet[name])) for name in names]
        waits = [quiet["wait_p50"], quiet["wait_p95"], quiet["wait_p99"], noisy["wait_p99"], all_["wait_p99"]]
        table.add_row(
            *([""] * len(place) if place == before else place),
            quiet["scheduler"],
            *map(seconds, waits),
            cell("first_place", quiet["first_place"]),
        )
        before = place
    console = make_console()
    console.print(printable(fixed(rows)), soft_wrap=True)
    console.print(table)
    echo("p50, p95, p99: of the waits of quiet tenants, in seconds; noisy, all: p99 of those of noisy tenants, of all.")
    echo("place: how many others were served while a quiet tenant waited for its first service, at worst.")
