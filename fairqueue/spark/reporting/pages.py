"""A report as one page of HTML, with its pictures in it: it needs nothing from anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape

from fairqueue._words import duration, moment, number, printable

from . import pictures
from .summaries import QueueSummary, Row, Summary
from .words import percentiles_are, period_of, seconds, weights_are

__all__ = ["page"]

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 56rem; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.25rem; margin-top: 2.5rem; } h3 { font-size: 1rem; margin-bottom: .3rem; }
p, figcaption { max-width: 42rem; } .note, figcaption { opacity: .75; font-size: .88rem; }
figure { margin: 1rem 0 1.8rem; } figure svg { width: 100%; height: auto; max-width: 44rem; display: block; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; max-width: 16rem; overflow: hidden; text-overflow: ellipsis; }
.noisy { color: #d9772b; }
"""

_Columns = dict[str, Callable[[Row], str]]
_CHANNEL: _Columns = {
    "channel": lambda row: printable(row["channel"]),
    "enqueued": lambda row: number(row["enqueued"]),
    "served": lambda row: number(row["served"]),
    "dead": lambda row: number(row["dead"]),
    "waiting": lambda row: number(row["backlog"]),
    "waits p50": lambda row: seconds(row["wait_p50"]),
    "p95": lambda row: seconds(row["wait_p95"]),
    "p99": lambda row: seconds(row["wait_p99"]),
    "max": lambda row: seconds(row["wait_max"]),
    "of n": lambda row: number(row["wait_n"] or 0),
    "work p95": lambda row: seconds(row["service_p95"]),
    "share": lambda row: _percent(row["share"]),
    "entitled": lambda row: _percent(row["entitled_share"]),
    "starved": lambda row: seconds(row["starved"]),
    "noisy in": lambda row: f"{number(row['noisy_windows'])} windows" if row["noisy_windows"] else "",
}


def page(found: Summary) -> str:
    """The page, as text."""
    report = found.report
    more = found.queue_count - len(found.queues)
    intro = (
        f"{period_of(report)}, in windows of {duration(report.window)}, from {number(report.rows)} messages."
        f" {percentiles_are(report)} {weights_are(report)}"
    )
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>What the channels got</title><style>{_STYLE}</style></head><body>",
        f"<h1>What the channels got</h1><p>{escape(intro)}</p>",
        *(_queue(queue) for queue in found.queues),
    ]
    if not found.queues:
        parts.append("<p>Nothing happened in this time.</p>")
    if more > 0:
        parts.append(f"<p>{number(more)} more queues are in the Parquet.</p>")
    return "\n".join([*parts, _WORDS, "</body></html>"])


_WORDS = """<h2>Words</h2><p class="note"><b>Wait</b>: from when a message came, or was due, to its first lease; in
the window of the lease. <b>Work</b>: its last lease, up to its end. <b>Starved</b>: the longest time in which a channel
had a message waiting and none of its was started. <b>Share</b>: of the cost of what was started in the queue.
<b>Entitled</b>: what max-min fairness gives by weight to a channel that asks for what it had and what it was left
waiting for; limits of its own are not allowed for. <b>Jain's index</b>: of started over entitled; 1 is fair.
<b>Noisy</b>: over 10&nbsp;% of the messages in flight at a window's end and at least 30, or over 10&nbsp;% of the time
worked in it. A p99 of fewer than a thousand messages says little: look at n.</p>"""


def _queue(queue: QueueSummary) -> str:
    total = queue.total
    outcomes = ("served", "dead", "cancelled", "dropped")
    counts = ", ".join(f"{number(total[name])} {name}" for name in outcomes if total[name] or name == "served")
    told = (
        f"{number(total['channels'])} channels, {number(total['noisy_channels'])} of them noisy at times."
        f" {number(total['enqueued'])} messages enqueued: {counts}; {number(total['backlog'])} waiting at the end."
        f" Waits: p50 {seconds(total['wait_p50'])}, p95 {seconds(total['wait_p95'])}, p99 {seconds(total['wait_p99'])},"
        f" longest {seconds(total['wait_max'])} (n = {number(total['wait_n'] or 0)}).{_fair(total)}"
    )
    parts = [
        f"<h2>Queue {escape(printable(total['queue']))}</h2><p>{escape(told)}</p>",
        _figure("Fairness over time", pictures.fairness(queue), _FLOOR),
        _figure("Waits of a noisy and a quiet channel", pictures.waits(queue), "In windows with a start."),
        _figure("Waits by size of the channel", pictures.ranks(queue), "Fair: who has little waits no longer."),
        _figure("Share and entitlement", pictures.shares(queue), "Of the channels that had most."),
        _table("Channels that had most", queue.largest),
        _table("Channels that were longest left waiting", queue.starved),
    ]
    return "\n".join(part for part in parts if part)


_FLOOR = (
    "Circles on the floor under a line at the top: some channel waited at the end of the window and had had nothing in"
    " it, be it for a second. Who was left waiting for long is in the table below."
)


def _fair(total: Row) -> str:
    if total["jain_median"] is None:
        return ""
    at = moment(total["jain_worst_window"])
    return (
        f" Jain's index: {total['jain_median']:.3f} in the median window, {total['jain_worst']:.3f} in the worst, {at}."
    )


def _figure(title: str, picture: str | None, caption: str) -> str:
    if picture is None:
        return ""
    return f"<figure><h3>{title}</h3>{picture}<figcaption>{caption}</figcaption></figure>"


def _table(title: str, rows: Iterable[Row]) -> str:
    lines = [
        f"<tr{' class=noisy' if row['noisy_windows'] else ''}>"
        + "".join(f"<td>{escape(cell(row))}</td>" for cell in _CHANNEL.values())
        + "</tr>"
        for row in rows
    ]
    if not lines:
        return ""
    head = "".join(f"<th>{name}</th>" for name in _CHANNEL)
    return f'<h3>{title}</h3><div class="wide"><table><tr>{head}</tr>{"".join(lines)}</table></div>'


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"
