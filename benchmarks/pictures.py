"""Pictures of the figures: bars of ratios, lines of what goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from .records import Record
from .systems import LIMIT, OURS, SYSTEMS

__all__ = ["draw"]

_OURS, _LIMIT, _GREY = "#1f5fa8", "#c8690a", "#555555"
_OTHERS = ("#8a8a8a", "#5b8c5a", "#a0527a", "#7a6ab0", "#b0a03a", "#4aa0a0", "#9c6b4f", "#c08080", "#6f8fb0")
#: A system has its colour in all pictures.
_COLOURS = {OURS: _OURS, LIMIT: _LIMIT} | dict(
    zip((name for name in SYSTEMS if name not in (OURS, LIMIT)), _OTHERS * 5, strict=False)
)


def draw(folder: Path, name: str, records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Draw what there is to draw of a scenario; the names of the files."""
    found = [Record.from_dict(values) for values in records]
    if name not in _PICTURES or not found:
        return []
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    if not _PICTURES[name](figure, found):
        return []
    path = folder / f"{name}.png"
    # Nothing of the machine, nor of the time, so that the same figures are the same file.
    _legend(figure)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return [path.name]


def _fairness(figure: Figure, records: Sequence[Record]) -> bool:
    left, right = figure.subplots(1, 2)
    places = [r for r in records if r.figure == "worst first-service place"]
    _bars(left, places, lambda r: r.value)
    _title(left, "Noisy tenant first: messages served before\nthe last quiet tenant's first one")
    left.set_yscale("symlog", linthresh=10)
    left.yaxis.set_major_formatter(FuncFormatter(_plain))
    jain = [r for r in records if r.figure == "Jain index, mean of windows"]
    _bars(right, jain, lambda r: r.value)
    _title(right, "Zipf tenants: Jain index of service,\nmean of windows (1: all get what they are entitled to)")
    right.set_ylim(0, 1.05)
    return bool(places and jain)


def _ratios(title: str, figures: str, wanted: Sequence[float] = ()) -> Callable[[Figure, Sequence[Record]], bool]:
    def picture(figure: Figure, records: Sequence[Record]) -> bool:
        axes = figure.subplots()
        chosen = [r for r in records if r.figure == figures and r.ratio is not None and r.system != r.reference]
        _bars(axes, chosen, lambda r: r.ratio or 0.0)
        axes.axhline(1, color=_LIMIT, linewidth=1)
        for bound in wanted:
            axes.axhline(bound, color=_GREY, linewidth=1, linestyle=":")
        _title(axes, title)
        return bool(chosen)

    return picture


def _growth(figure: Figure, records: Sequence[Record]) -> bool:
    axes = figure.subplots()
    chosen = [r for r in records if r.ratio is not None and r.case.get("batch") == 1]
    _bars(axes, chosen, lambda r: r.ratio or 0.0)
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.5)
    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which(FuncFormatter(_plain))
    axes.axhline(1, color=_GREY, linewidth=1)
    _title(axes, "Time of a dequeue of one message, over that in a small database (1: size doesn't matter)")
    return bool(chosen)


def _old_snapshot(figure: Figure, records: Sequence[Record]) -> bool:
    axes = figure.subplots()
    tenths = [r for r in records if r.figure == "rate of a tenth"]
    lines: dict[tuple[str, int | str], list[float]] = {}
    for record in tenths:
        lines.setdefault((record.system, record.case["batch"]), []).append(record.value)
    styles = dict(zip(dict.fromkeys(batch for _, batch in lines), ("-", "--", ":", "-."), strict=False))
    for (system, batch), rates in lines.items():
        shares = [100 * rate / rates[0] for rate in rates]
        label = f"{system}, batch {batch}"
        axes.plot(range(1, len(rates) + 1), shares, styles[batch], marker="o", color=_COLOURS[system], label=label)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tenth of the messages")
    axes.set_ylabel("rate, % of the first tenth")
    _title(axes, "While an old snapshot stays open")
    return bool(tenths)


def _open_enqueuers(figure: Figure, records: Sequence[Record]) -> bool:
    chosen = list(dict.fromkeys(record.figure for record in records))
    panels = figure.subplots(1, len(chosen), squeeze=False)[0]
    for axes, name in zip(panels, chosen, strict=True):
        _bars(axes, [r for r in records if r.figure == name], lambda r: r.value, labels=False)
        _title(axes, name)
    return True


def _bars(axes: Axes, records: Sequence[Record], height: Callable[[Record], float], *, labels: bool = True) -> None:
    """A group for each case, a bar for each system."""
    varied = [
        key
        for key in dict.fromkeys(key for r in records for key in r.case)
        if len({r.case.get(key) for r in records}) > 1
    ]
    cases = list(dict.fromkeys(tuple(_short(key, r.case.get(key)) for key in varied) for r in records))
    systems = [name for name in SYSTEMS if any(r.system == name for r in records)]
    width = 0.8 / max(1, len(systems))
    for number, system in enumerate(systems):
        bars = [
            (cases.index(tuple(_short(key, r.case.get(key)) for key in varied)), height(r))
            for r in records
            if r.system == system
        ]
        places = [place - 0.4 + (number + 0.5) * width for place, _ in bars]
        axes.bar(places, [value for _, value in bars], width * 0.9, color=_COLOURS[system], label=system)
    names = ["\n".join(part for part in case if part) for case in cases]
    axes.set_xticks(range(len(cases)), names if labels else [""] * len(cases), fontsize=7 if len(cases) > 8 else 9)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _short(key: str, value: int | str | None) -> str:
    if value is None:
        return ""
    return f"{key} {value:,}" if isinstance(value, int) else str(value)


def _legend(figure: Figure) -> None:
    """One for all panels, below them."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6, frameon=False, fontsize=8)


def _plain(value: float, place: int | None = None) -> str:
    """1, 2 and 5 times a power of ten; the other ticks of a logarithmic axis have no number."""
    digits = f"{value:e}"[0]
    return f"{value:,g}" if value == 0 or digits in "125" else ""


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, fontsize=11, color=_GREY)


_PICTURES: dict[str, Callable[[Figure, Sequence[Record]], bool]] = {
    "fairness": _fairness,
    "enqueueing": _ratios("Enqueueing over the same INSERT into a bare table", "messages enqueued", (0.5, 0.8)),
    "dequeueing": _ratios(
        "Dequeue and complete, over the queue that isn't fair (1)", "messages dequeued and completed", (0.6, 0.7)
    ),
    "growth": _growth,
    "old-snapshot": _old_snapshot,
    "open-enqueuers": _open_enqueuers,
    "cost": _ratios("CPU of the server for a message, over the queue that isn't fair (1)", "CPU of the server"),
}
