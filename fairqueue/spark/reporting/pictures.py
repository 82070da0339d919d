"""The pictures of a report, as SVG that takes its colour of text from the page around it."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from datetime import datetime
from typing import Any, cast

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogFormatter

from fairqueue._words import number, printable

from .summaries import QueueSummary
from .words import seconds

__all__ = ["fairness", "ranks", "shares", "waits"]

#: Both can be read on white and on black.
_NOISY, _QUIET = "#d9772b", "#3b82c4"
#: Stands for the colour of the page's text.
_TEXT = "#010203"
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fairqueue",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": _TEXT,
    "axes.labelcolor": _TEXT,
    "axes.edgecolor": _TEXT,
    "xtick.color": _TEXT,
    "ytick.color": _TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.2,
    "grid.color": _TEXT,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "text.parse_math": False,  # a channel's name may have dollars in it
    "timezone": "UTC",
}
_NAME = 28  # characters of a name that there is room for


def waits(queue: QueueSummary) -> str | None:
    """Waits by window of the channel that had most and of a quiet one."""
    drawn = [
        (rows, colour, what)
        for rows, colour, what in ((queue.noisiest, _NOISY, "most"), (queue.quietest, _QUIET, "little"))
        if any(row["wait_max"] is not None for row in rows)
    ]
    if not drawn:
        return None

    def draw(figure: Figure) -> None:
        panels: list[Axes] = list(figure.subplots(len(drawn), 1, sharex=True, sharey=True, squeeze=False)[:, 0])
        for axes, (rows, colour, what) in zip(panels, drawn, strict=True):
            told = [row for row in rows if row["wait_max"] is not None]
            times = [row["window"] for row in told]
            axes.set_title(f"{_short(told[0]['channel'])} (had {what})", loc="left", fontsize=10, color=colour)
            for quantile, style in (("p50", ":"), ("p95", "-"), ("p99", "--")):
                values = [max(row[f"wait_{quantile}"], _LEAST) for row in told]
                axes.plot(times, values, style, color=colour, marker=".", markersize=4, linewidth=1.2, label=quantile)
            axes.set_yscale("log")
            _label(axes.yaxis, seconds)
            _dates(axes)
        figure.legend(*panels[0].get_legend_handles_labels(), ncols=3, loc="outside lower center")

    return _svg(draw, 1.9 * len(drawn))


def ranks(queue: QueueSummary) -> str | None:
    """p95 of the waits, by how much a channel had."""
    rows = queue.ranks
    if len(rows) < 2:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        places = [row["rank"] for row in rows]
        low, middle, high = ([max(row[name], _LEAST) for row in rows] for name in ("low", "middle", "high"))
        axes.fill_between(places, low, high, color=_QUIET, alpha=0.25, linewidth=0, label="from least to most")
        axes.plot(places, middle, color=_QUIET, marker=".", label="median of channels of this size")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("rank of the channel by size (1: had most)")
        _label(axes.xaxis, lambda value: number(round(value)))
        _label(axes.yaxis, seconds)
        axes.set_ylabel("p95 of waits")
        axes.legend(loc="best")

    return _svg(draw, 2.8)


def shares(queue: QueueSummary) -> str | None:
    """What the largest channels had, and what they were entitled to."""
    rows = [row for row in queue.largest if row["share"] is not None][:12]
    if not rows:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        places = range(len(rows))
        axes.barh(places, [100 * row["share"] for row in rows], color=_NOISY, alpha=0.6, height=0.6, label="had")
        entitled = [100 * (row["entitled_share"] or 0) for row in rows]
        axes.plot(entitled, places, "|", color=_TEXT, markersize=13, markeredgewidth=2, label="entitled to")
        axes.set_yticks(places, [_short(row["channel"]) for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("% of the cost of what was started")
        axes.legend(loc="lower right")

    return _svg(draw, 0.9 + 0.28 * len(rows))


def fairness(queue: QueueSummary) -> str | None:
    """Jain's index, and the channel that had least of its share, by window."""
    rows = [row for row in queue.windows if row["jain"] is not None]
    if not rows:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        fine, coarse = ([row for row in rows if row["coarse"] is flag] for flag in (False, True))
        axes.plot(
            [r["window"] for r in fine], [r["jain"] for r in fine], color=_QUIET, marker=".", label="Jain's index"
        )
        _dots(axes, [(r["window"], r["jain"]) for r in coarse], _QUIET, "the same, shares of less than a message")
        lows = [row["low_ratio"] for row in rows]
        axes.plot(
            [r["window"] for r in rows], lows, color=_NOISY, label="nine in ten channels: started / entitled, at least"
        )
        _dots(axes, [(r["window"], r["worst_ratio"]) for r in rows], _NOISY, "worst channel: the same")
        axes.set_ylim(-0.04, 1.04)
        _dates(axes)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=1)

    return _svg(draw, 3.0)


_LEAST = 0.001  # seconds: what a logarithmic scale begins with


class _Between(LogFormatter):
    """Labels between powers of ten, where matplotlib would have some: where there are few powers."""

    def __init__(self, text: Callable[[float], str]) -> None:
        super().__init__()
        self._text = text

    def __call__(self, x: float, pos: int | None = None) -> str:
        return self._text(x) if super().__call__(x, pos) else ""


def _label(axis: Axis, text: Callable[[float], str]) -> None:
    """Of an axis with a logarithmic scale. Matplotlib's own labels are mathematics, which is switched off."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axis.set_minor_formatter(_Between(text))


def _dots(axes: Axes, points: list[tuple[datetime, float]], colour: str, label: str) -> None:
    if points:
        axes.plot(*zip(*points, strict=True), "o", color=colour, markersize=3.5, fillstyle="none", label=label)


def _dates(axes: Axes) -> None:
    # Matplotlib has no types for them.
    locator = cast(Any, AutoDateLocator)(maxticks=7)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(cast(Any, ConciseDateFormatter)(locator))


def _short(name: str) -> str:
    text = printable(name)
    return text if len(text) <= _NAME else text[: _NAME - 1] + "…"


def _svg(draw: Any, height: float) -> str:
    with mpl.rc_context(_SETTINGS), warnings.catch_warnings():
        # Names may have letters that the font lacks: the browser has others.
        warnings.simplefilter("ignore")
        figure = Figure(figsize=(6, height), layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        file = io.StringIO()
        figure.savefig(
            file, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    picture = file.getvalue()
    picture = picture[picture.index("<svg") :].replace(_TEXT, "currentColor")
    return re.sub(r'(<svg[^>]*?) width="[^"]*"| height="[^"]*pt"', r"\1", picture, count=2)
