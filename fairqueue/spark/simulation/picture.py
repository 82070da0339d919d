"""How long quiet tenants wait, as a picture: a line for each scheduler and percentile, along what the grid varies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import log10
from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from fairqueue.errors import InvalidValue

from .results import PERCENTILES
from .words import Row, fixed, label, seconds, varied

__all__ = ["draw"]

_NAMES = {"arrival": "arrival order", "round_robin": "round robin", "fair": "fair"}
#: Okabe and Ito's, which the colour-blind can tell apart.
_COLOURS = {"arrival": "#d55e00", "round_robin": "#009e73", "fair": "#0072b2"}
_GREY = "#555555"
_STYLES = dict(zip(PERCENTILES, (":", "--", "-"), strict=True))
#: Who waits for less than this part of a service time is drawn as if it were that: 0 has no logarithm.
_LEAST = 0.01
#: More panels than that can't be read.
_PANELS = 24
#: So many in a line, where nothing says otherwise.
_ACROSS = 3
#: Points from one label to the next, and of the y axis.
_LABEL, _HEIGHT = 11, 170


def draw(path: Path, rows: Iterable[Row]) -> None:
    """Draw the waits of quiet tenants.

    The number that is varied most is the x axis, the next parameter goes across, all others go down. Where no number
    is varied there is a bar for each scheduler.

    :param path: where the PNG file goes.
    :param rows: those of :func:`~fairqueue.spark.simulation.run` or :func:`~fairqueue.spark.simulation.simulate`.
    :raises InvalidValue: if no quiet tenant has sent anything.
    """
    quiet = [row for row in rows if row["group"] == "quiet" and row["wait_p99"] is not None]
    if not quiet:
        raise InvalidValue("rows must have waits of quiet tenants, but these sent nothing: take more messages")
    names = varied(quiet)
    numbers = [name for name in names if all(isinstance(row[name], int | float) for row in quiet)]
    x = max(numbers, key=lambda name: len(_values(quiet, [name])), default=None)
    least = _LEAST * min(row["service"] for row in quiet)
    shown = [
        {**row, **{f"drawn_p{percentile}": max(row[f"wait_p{percentile}"], least) for percentile in PERCENTILES}}
        for row in quiet
    ]
    waits = [row[f"drawn_p{percentile}"] for row in shown for percentile in PERCENTILES]
    bounds = min(waits) / 1.6, max(*waits, 20 * min(waits)) * 1.6
    places, across = _places(quiet, [name for name in names if name != x])
    lines = -(-len(places) // across)
    width, height = max(9.0, 0.8 + 4.4 * across), 1.1 + (3.3 if x else 1.7) * lines
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("How long the quiet half of the tenants waits", fontsize=15, fontweight="bold")
    panels = figure.subplots(lines, across, sharex=True, sharey=True, squeeze=False).flatten().tolist()
    for axes in panels[len(places) :]:
        axes.remove()
    for place, axes in zip(places, panels, strict=False):
        chosen = [row for row in shown if all(row[name] == value for name, value in place.items())]
        axes.set_title(", ".join(label(*item) for item in place.items()), fontsize=11, color=_GREY)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.tick_params(labelbottom=True)
        if x:
            _lines(axes, chosen, x, bounds)
        else:
            _bars(axes, chosen, bounds)
    explained = "up to p50 dotted, up to p95 dashed, up to p99 solid"
    if x:
        explained = "p50 dotted, p95 dashed, p99 solid"
        figure.supylabel("seconds of waiting", fontsize=10, color=_GREY)
    if least in waits:
        explained += f"; less than {least:.2g} s drawn as that"
    said = f"Seconds from a message's arrival until it is served: {explained}.", fixed(quiet)
    figure.supxlabel("\n".join(fill(line, int(13 * width)) for line in said), fontsize=9.5, color=_GREY)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _places(rows: Sequence[Row], names: Sequence[str]) -> tuple[list[dict[str, Any]], int]:
    """What each panel is about, line by line, and how many there are in a line."""
    columns, lines = _values(rows, names[:1]), _values(rows, names[1:])
    places = [column | line for line in lines for column in columns]
    across = len(columns) if len(lines) > 1 or len(columns) <= _ACROSS else _ACROSS - (len(columns) == _ACROSS + 1)
    return places[: max(1, _PANELS // across) * across], across


def _values(rows: Sequence[Row], names: Sequence[str]) -> list[dict[str, Any]]:
    """All combinations of the values of these parameters that there are."""
    found: list[dict[str, Any]] = []
    for row in rows:
        values = {name: row[name] for name in names}
        if values not in found:
            found.append(values)
    return found


def _lines(axes: Axes, rows: Sequence[Row], x: str, bounds: tuple[float, float]) -> None:
    ends = []
    for scheduler, colour in _COLOURS.items():
        points = sorted((row for row in rows if row["scheduler"] == scheduler), key=lambda row: row[x])
        for percentile in PERCENTILES if points else ():
            at, waits = [row[x] for row in points], [row[f"drawn_p{percentile}"] for row in points]
            last = percentile == PERCENTILES[-1]
            axes.plot(
                at, waits, _STYLES[percentile], color=colour, linewidth=2.4 if last else 1.4, marker="o" if last else ""
            )
            name = (
                f"{_NAMES[scheduler]}, p{percentile}: {seconds(points[-1]['wait_p99'])} s" if last else f"p{percentile}"
            )
            ends.append((waits[-1], name, colour, last))
    values = sorted({row[x] for row in rows})
    if values[0] > 0 and values[-1] >= 8 * values[0]:
        axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(values))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_xlabel({"load": "load, 1: all that the workers can do", "service": "mean service, s"}.get(x, x))
    axes.grid(axis="y", alpha=0.3)
    axes.set_ylim(*bounds)
    _logarithmic(axes, axes.yaxis)
    _label(axes, ends, bounds)


def _label(axes: Axes, ends: Sequence[tuple[float, str, str, bool]], bounds: tuple[float, float]) -> None:
    """Names at the ends of lines: those in bold always, however near; the others where there is room."""
    points = _HEIGHT / log10(bounds[1] / bounds[0])
    taken: list[float] = []
    for wait, name, colour, bold in sorted(ends, key=lambda end: (not end[3], end[0])):
        place = at = log10(wait / bounds[0]) * points
        if bold and taken:
            at = max(place, taken[-1] + _LABEL)
        elif any(abs(place - other) < _LABEL for other in taken):
            continue
        taken.append(at)
        axes.annotate(
            name,
            (1, wait),
            (8, at - place),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            color=colour,
            fontsize=9,
            fontweight="bold" if bold else "normal",
            va="center",
        )


def _bars(axes: Axes, rows: Sequence[Row], bounds: tuple[float, float]) -> None:
    schedulers = [name for name in _COLOURS if any(row["scheduler"] == name for row in rows)]
    for row in rows:
        place, colour = schedulers.index(row["scheduler"]), _COLOURS[row["scheduler"]]
        waits = [row[f"drawn_p{percentile}"] for percentile in PERCENTILES]
        for (begin, end), percentile in zip(zip([bounds[0], *waits], waits, strict=False), PERCENTILES, strict=True):
            axes.plot([begin, end], [place, place], _STYLES[percentile], color=colour, linewidth=2.4)
        axes.plot(waits, [place] * len(waits), "o", color=colour)
        axes.annotate(
            f"p99: {seconds(row['wait_p99'])} s",
            (waits[-1], place),
            (0, 8),
            textcoords="offset points",
            color=colour,
            ha="center",
        )
    axes.set_yticks(range(len(schedulers)), [_NAMES[name] for name in schedulers])
    axes.set_ylim(len(schedulers) - 0.5, -0.7)
    axes.set_xlim(bounds[0], 2 * bounds[1])
    axes.grid(axis="x", alpha=0.3)
    _logarithmic(axes, axes.xaxis)


def _logarithmic(axes: Axes, axis: Axis) -> None:
    (axes.set_yscale if axis is axes.yaxis else axes.set_xscale)("log")
    axis.set_major_locator(LogLocator(10))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
