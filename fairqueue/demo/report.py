"""The figures in words: a table, a sentence, the proof."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .figures import Count, Figures, Quiet, Tenant
from .queues import QUEUES

#: With more quiet tenants than that, the table shows the first few of them and then all together.
_ROWS = 20
_FIRST_ROWS = 10

_LEGEND = (
    "Each cell: arrival order → fairqueue. Seconds are counted from a file's upload to its result, places over the"
    " files of all tenants from the moment of this tenant's upload."
)


def print_report(console: Console, arrival: Figures, fair: Figures) -> None:
    console.print(_table(arrival, fair))
    console.print(_LEGEND, style="dim")
    console.print()
    console.print(summary(arrival, fair), style="bold")
    if len(fair.noisy.waits) < 2 * sum(len(tenant.waits) for tenant in fair.quiet.tenants):
        console.print("There was hardly a queue to jump: choose a larger folder, or fewer quiet tenants.")
    console.print()
    console.print(work_done(fair))
    console.print()
    exact = arrival.count.exact and fair.count.exact
    console.print(
        f"{'Every' if exact else 'NOT every'} file has exactly one result, counted in SQL:",
        style="bold green" if exact else "bold red",
    )
    for name, figures in zip(QUEUES, (arrival, fair), strict=True):
        console.print(f"  {QUEUES[name].label:<13}  {proof(figures.count)}", soft_wrap=True)


def summary(arrival: Figures, fair: Figures) -> str:
    before, after = arrival.quiet, fair.quiet
    many = len(after.tenants) > 1
    who = f"The {len(after.tenants):,} quiet tenants" if many else "The quiet tenant"
    typical = ", in the median" if many else ""
    return (
        f"{who} had {'their' if many else 'its'} first result after {seconds(after.first)} s instead of"
        f" {seconds(before.first)} s{typical}, at place {after.place:,.0f} instead of {before.place:,.0f};"
        f" the worst wait was {seconds(after.worst)} s instead of {seconds(before.worst)} s."
        f" The noisy tenant had its last of {len(fair.noisy.waits):,} results after {seconds(fair.noisy.worst)} s"
        f" instead of {seconds(arrival.noisy.worst)} s."
    )


def work_done(figures: Figures) -> str:
    totals = figures.totals
    odd = [(totals.broken, "unparsable"), (totals.unreadable, "unreadable")]
    return (
        f"The work of each: {figures.count.results:,} files, {totals.size / 1e6:,.1f} MB hashed and compressed,"
        f" {totals.nodes:,} syntax nodes and {totals.functions:,} functions counted"
        f"{''.join(f'; {number:,} {what}' for number, what in odd if number)}."
    )


def proof(count: Count) -> str:
    return (
        f"{count.uploads:,} uploads, {count.results:,} results; {count.lost:,} lost, {count.twice:,} twice,"
        f" {count.left:,} left"
    )


def _table(arrival: Figures, fair: Figures) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("\nTenant", no_wrap=True)
    table.add_column("\nFiles", justify="right", no_wrap=True)
    for heading in ("First served\nat place", "First result\nafter, s", "Median wait,\ns", "Worst wait,\ns"):
        table.add_column(heading, justify="center", no_wrap=True)
    pairs = list(zip(arrival.tenants, fair.tenants, strict=True))
    shown = pairs if len(pairs) <= 1 + _ROWS else pairs[: 1 + _FIRST_ROWS]
    for number, (before, after) in enumerate(shown):
        style = "yellow" if number == 0 else ""
        table.add_row(after.name, f"{len(after.waits):,}", *_cells(before, after), style=style)
    if len(shown) < len(pairs):
        table.add_row(f"… {len(pairs) - len(shown):,} more", style="dim")
    if len(pairs) > 2:
        table.add_section()
        files = sum(len(tenant.waits) for tenant in fair.quiet.tenants)
        table.add_row("all quiet", f"{files:,}", *_cells(arrival.quiet, fair.quiet), style="bold")
    return table


def _cells(before: Tenant | Quiet, after: Tenant | Quiet) -> list[str]:
    return [
        f"{before.place:>5,.0f} → {after.place:<5,.0f}",
        *(
            f"{seconds(a):>4} → {seconds(b):<4}"
            for a, b in ((before.first, after.first), (before.median, after.median), (before.worst, after.worst))
        ),
    ]


def seconds(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"
