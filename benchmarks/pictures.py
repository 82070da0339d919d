"""Pictures of the figures: bars of ratios, lines of what goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from .records import Record
from .systems import LIMIT, OURS, SYSTEMS

__all__ = ["draw"]

#: Okabe and Ito's, which the colour-blind can tell apart; a system has its colour in all pictures.
_OURS, _LIMIT, _GREY = "#0072b2", "#d55e00", "#444444"
_OTHERS = ("#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#999999", "#f0e442")
#: The bars of the next six have stripes.
_STRIPES = ("", "///", "...", "xxx")
_FIRST = ("channel-row", "partition-by", "blocks")
_NAMES = [*_FIRST, *(name for name in SYSTEMS if name not in (OURS, LIMIT, *_FIRST))]
_COLOURS = {OURS: _OURS, LIMIT: _LIMIT} | {name: _OTHERS[number % len(_OTHERS)] for number, name in enumerate(_NAMES)}
_HATCHES = {name: _STRIPES[number // len(_OTHERS) % len(_STRIPES)] for number, name in enumerate(_NAMES)}

_DEQUEUES = {1: "A dequeue of one message", 100: "A dequeue of 100 messages"}

Height = Callable[[Record], float]


def draw(folder: Path, name: str, records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Draw what there is to draw of a scenario; the names of the files."""
    found = [Record(**values) for values in records]
    if name not in _PICTURES or not found:
        return []
    # 800 points wide: in a page of 800 pixels, letters are as large as they say.
    figure = Figure(figsize=(800 / 72, 330 / 72), layout="constrained")
    FigureCanvasAgg(figure)
    if not _PICTURES[name](figure, found):
        return []
    path = folder / f"{name}.png"
    _legend(figure)
    # Nothing of the machine, nor of the time, so that the same figures are the same file.
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return [path.name]


def _fairness(figure: Figure, records: Sequence[Record]) -> bool:
    # One above the other: so many cases side by side have no room for their names.
    figure.set_figheight(2 * figure.get_figheight())
    upper, lower = figure.subplots(2)
    places = [r for r in records if r.figure == "worst first-service place"]
    _bars(upper, places, _value)
    _title(upper, "One noisy tenant, 19 quiet ones", "messages served before the last\nquiet tenant's first one")
    _logarithmic(upper, 5)
    jain = [r for r in records if r.figure == "Jain index, worst window"]
    _bars(lower, jain, _value)
    _title(lower, "Tenants of many sizes (Zipf)", "Jain index of service, worst window\n(1: all get their share)")
    lower.set_ylim(0, 1.05)
    return bool(places and jain)


def _enqueueing(figure: Figure, records: Sequence[Record]) -> bool:
    axes = figure.subplots()
    chosen = [r for r in _of_first_payload(records) if r.case["synchronous_commit"] == "off"]
    _bars(axes, chosen, _ratio)
    _one(axes)
    _title(axes, "synchronous_commit off", "rate, over the same INSERT\ninto a bare table")
    return bool(chosen)


def _spark(figure: Figure, records: Sequence[Record]) -> bool:
    axes = figure.subplots()
    found = [r for r in records if r.reference == "binary COPY"]
    _bars(axes, found, _ratio)
    _one(axes)
    _title(axes, "By Spark, in and out", "rate, over that of binary COPY")
    return bool(found)


def _dequeueing(figure: Figure, records: Sequence[Record]) -> bool:
    axes = figure.subplots()
    chosen = [
        r
        for r in _of_first_payload(records)
        if r.figure == "messages dequeued and completed" and (r.ratio is not None or r.system == LIMIT)
    ]
    usual = {"consumers": 4, "channels": 1_000, "synchronous_commit": "on"}
    chosen = [r for r in chosen if all(r.case[key] == value for key, value in usual.items())]
    chosen.sort(key=lambda r: r.case["batch"])
    _bars(axes, chosen, _over_limit)
    _logarithmic(axes, 0.005)
    _one(axes)
    _title(axes, "4 consumers, 1,000 channels", f"rate of dequeue and complete,\nover {LIMIT}")
    return bool(chosen)


def _draining(figure: Figure, records: Sequence[Record]) -> bool:
    axes = figure.subplots()
    _bars(axes, [r for r in records if r.ratio is not None or r.system == LIMIT], _over_limit)
    _one(axes)
    _title(axes, "A backlog from its first message to its last", f"rate of dequeue and complete,\nover {LIMIT}")
    return bool(records)


def _growth(figure: Figure, records: Sequence[Record]) -> bool:
    figure.set_figheight(2 * figure.get_figheight())
    for axes, (batch, title) in zip(figure.subplots(len(_DEQUEUES)), _DEQUEUES.items(), strict=True):
        _bars(axes, [r for r in records if r.ratio is not None and r.case.get("batch") == batch], _ratio)
        _logarithmic(axes, 0.5)
        _one(axes)
        _title(axes, title, "time, over that in a small database\n(1: size doesn't matter)")
    return any(r.ratio is not None for r in records)


def _sizes(figure: Figure, records: Sequence[Record]) -> bool:
    numbers = sorted({r.case["channels"] for r in records})
    for axes, (batch, title) in zip(figure.subplots(1, len(_DEQUEUES)), _DEQUEUES.items(), strict=True):
        for channels, colour, marker in zip(numbers, (_OURS, *_OTHERS), "os^Dv*", strict=False):
            cells = [r for r in records if r.case["channels"] == channels and r.case["batch"] == batch]
            line = {r.case["messages"]: _ratio(r) for r in cells}
            axes.plot(list(line), list(line.values()), color=colour, marker=marker, label=f"{channels:,} channels")
        axes.set_xscale("log")
        axes.set_xlabel("backlog, messages")
        axes.set_ylim(bottom=0)
        _one(axes)
        _frame(axes)
        _title(axes, title, "time, over that in a small database\n(1: size doesn't matter)")
    return bool(records)


def _old_snapshot(figure: Figure, records: Sequence[Record]) -> bool:
    axes = figure.subplots()
    tenths = [r for r in records if r.figure == "rate of a tenth"]
    lines: dict[tuple[str, int | str], list[Record]] = {}
    for record in tenths:
        lines.setdefault((record.system, record.case["batch"]), []).append(record)
    styles = dict(zip(dict.fromkeys(batch for _, batch in lines), ("-", "--", ":", "-."), strict=False))
    for (system, batch), found in lines.items():
        # As the table has it: the median of each run's own share.
        shares = [
            100 * median(rate / first for rate, first in zip(r.values, found[0].values, strict=True)) for r in found
        ]
        label = f"{system}, batch {batch}"
        axes.plot(range(1, len(shares) + 1), shares, styles[batch], marker="o", color=_COLOURS[system], label=label)
    axes.set_ylim(bottom=0)
    axes.set_xticks(range(1, 11), [f"{number * 10} %" for number in range(1, 11)])
    axes.set_xlabel("messages that have passed since the snapshot was taken")
    _frame(axes)
    _title(axes, "", "rate, % of the first tenth's")
    return bool(tenths)


def _open_enqueuers(figure: Figure, records: Sequence[Record]) -> bool:
    figures = {
        "share of eligible messages served meanwhile": "served of what is eligible",
        "statements that waited for a lock": "statements that waited for a lock",
        "deadlocks": "deadlocks",
    }
    for axes, (name, title) in zip(figure.subplots(1, len(figures)), figures.items(), strict=True):
        chosen = [r for r in records if r.figure == name]
        _bars(axes, chosen, _value)
        axes.set_ylim(0, max([1.05, *(1.05 * r.value for r in chosen)]))
        if name != "share of eligible messages served meanwhile":
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        _title(axes, title, "")
    return any(r.figure in figures for r in records)


def _latency(figure: Figure, records: Sequence[Record]) -> bool:
    axes = figure.subplots()
    chosen = [r for r in records if r.figure == "from commit to start"]
    loads = list(dict.fromkeys(r.case["load"] for r in chosen))
    systems = dict.fromkeys(r.system for r in chosen)
    for place, (system, colour) in enumerate(zip(systems, (_OURS, _LIMIT), strict=False)):
        markers = {"p50": ("o", True), "p95": ("s", False), "p99": ("^", False), "longest": ("D", False)}
        for part, (marker, filled) in markers.items():
            if not (points := [r for r in chosen if r.system == system and r.case["of"] == part]):
                continue
            where = [loads.index(r.case["load"]) + place * 0.2 - 0.1 for r in points]
            fill = colour if filled else "white"
            label = f"{'notifications' if system == OURS else system}, {part}"
            values = [r.value for r in points]
            axes.plot(where, values, marker, color=colour, markerfacecolor=fill, markersize=9, label=label)
    axes.set_xticks(range(len(loads)), [str(load) if load == "idle" else f"load {load}" for load in loads])
    _logarithmic(axes, 1)
    _frame(axes)
    _title(axes, "", "ms from commit to start")
    return bool(chosen)


def _cost(figure: Figure, records: Sequence[Record]) -> bool:
    panels = {"CPU of the server": "CPU of the server", "WAL": "WAL", "rows updated or deleted": "dead rows"}
    for axes, (name, title) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        chosen = [r for r in _of_first_payload(records) if r.figure == name]
        _bars(axes, chosen, _over_limit)
        if max(map(_ratio, chosen), default=0) > 10:  # else one of them hides the others
            _logarithmic(axes, 0.5)
        _one(axes)
        _title(axes, title, f"of a message, over {LIMIT}")
    return any(r.figure in panels for r in records)


def _peers(figure: Figure, records: Sequence[Record]) -> bool:
    # Of each, the case with the fewest and that with the most.
    panels: list[tuple[str, str | None, str]] = [
        ("worst first-service place", None, "messages served before the last\nquiet tenant's first one"),
        ("messages fetched and completed", "tenants", "messages a second, completed\nin the best batch, {:,} tenants"),
        ("messages worked on", "at a time", "messages a second,\nby a worker, {} at a time"),
    ]
    # Some may have no record, where only some of the systems were chosen.
    panels = [panel for panel in panels if any(r.figure == panel[0] for r in records)]
    if not panels:
        return False
    figure.set_figheight(2 * figure.get_figheight())
    grid = figure.subplots(2, len(panels), squeeze=False)
    for axes, (_, key, _) in zip(grid[1], panels, strict=True):
        if not key:
            axes.set_axis_off()
    shown = [
        (grid[row, column], name, key, title, choose)
        for row, choose in enumerate((min, max))
        for column, (name, key, title) in enumerate(panels)
        if row == 0 or key
    ]
    for axes, name, key, title, choose in shown:
        chosen = [r for r in records if r.figure == name]
        number = choose(r.case[key] for r in chosen) if key else 0
        best: dict[str, Record] = {}
        for record in (r for r in chosen if not key or r.case[key] == number):
            if record.system not in best or record.value > best[record.system].value:
                best[record.system] = record
        systems = list(reversed(best))
        colours = [_OURS if system.startswith(OURS) else _LIMIT if system == LIMIT else "#999999" for system in systems]
        axes.barh(systems, [best[system].value for system in systems], 0.7, color=colours)
        for place, system in enumerate(systems):
            axes.annotate(f" {best[system].value:,.0f}", (best[system].value, place), va="center", fontsize=9)
        _frame(axes)
        axes.grid(visible=False)
        axes.margins(x=0.2)
        axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.set_xlabel(title.format(number), fontsize=10, color=_GREY)
    return True


def _value(record: Record) -> float:
    return record.value


def _ratio(record: Record) -> float:
    return record.ratio or 0.0


def _over_limit(record: Record) -> float:
    return 1.0 if record.system == LIMIT else _ratio(record)


def _of_first_payload(records: Sequence[Record]) -> list[Record]:
    return [r for r in records if r.case.get("payload") == records[0].case.get("payload")]


def _bars(axes: Axes, records: Sequence[Record], height: Height) -> None:
    """A group for each case, a bar for each system, and a mark where its goal is."""
    varied = [
        key
        for key in dict.fromkeys(key for r in records for key in r.case)
        if len({r.case.get(key) for r in records}) > 1
    ]
    cases = list(dict.fromkeys(tuple(_short(key, r.case.get(key)) for key in varied) for r in records))
    systems = [name for name in SYSTEMS if any(r.system == name for r in records)]
    for number, case in enumerate(cases):
        bars = [r for r in records if tuple(_short(key, r.case.get(key)) for key in varied) == case]
        bars.sort(key=lambda r: systems.index(r.system))
        # As wide as if all were there, and in the middle, where some are not.
        width = 0.84 / max(2, len(systems))
        for place, record in enumerate(bars):
            at = number + (place - (len(bars) - 1) / 2) * width
            colour, hatch = _COLOURS[record.system], _HATCHES.get(record.system, "")
            axes.bar(at, height(record), width * 0.9, color=colour, hatch=hatch, edgecolor="white", label=record.system)
            if record.wanted:
                bound = float(record.wanted.split()[1])
                axes.hlines(bound, at - width / 2, at + width / 2, color="black", linewidth=2, label="goal")
    # Long ones would run into each other.
    names = ["\n".join(fill(part, 15, break_long_words=False) for part in case if part) for case in cases]
    axes.set_xticks(range(len(cases)) if varied else [], names if varied else [])
    _frame(axes)
    if len(cases) > 6:
        axes.tick_params(axis="x", labelsize=8.5)


def _frame(axes: Axes) -> None:
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=10)


def _one(axes: Axes) -> None:
    axes.axhline(1, color=_GREY, linewidth=1)


def _logarithmic(axes: Axes, bottom: float) -> None:
    axes.set_yscale("log")
    low = [bottom, *(bar.get_height() * 0.7 for bar in axes.patches if bar.get_height() > 0)]  # type: ignore[attr-defined]
    axes.set_ylim(bottom=min(low))
    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which(FuncFormatter(_plain))


def _short(key: str, value: int | str | None) -> str:
    if value is None:
        return ""
    if key == "batch" or not isinstance(value, int):
        return f"{key} {value}" if key == "batch" else str(value)
    return f"{value:,} {key}"


def _legend(figure: Figure) -> None:
    """One for all panels, below them."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if not handles:
        return
    names = sorted(handles, key=lambda name: name == "goal")
    columns = 7 if len(names) <= 7 else 4
    figure.legend(
        [handles[name] for name in names], names, loc="outside lower center", ncols=columns, frameon=False, fontsize=10
    )


def _plain(value: float, place: int | None = None) -> str:
    """1, 2 and 5 times a power of ten; the other ticks of a logarithmic axis have no number."""
    digits = f"{value:e}"[0]
    return f"{value:,g}" if value == 0 or digits in "125" else ""


def _title(axes: Axes, text: str, what: str) -> None:
    axes.set_title(text, fontsize=11, color=_GREY)
    axes.set_ylabel(what, fontsize=10, color=_GREY)


_PICTURES: dict[str, Callable[[Figure, Sequence[Record]], bool]] = {
    "fairness": _fairness,
    "enqueueing": _enqueueing,
    "dequeueing": _dequeueing,
    "draining": _draining,
    "growth": _growth,
    "sizes": _sizes,
    "old-snapshot": _old_snapshot,
    "open-enqueuers": _open_enqueuers,
    "latency": _latency,
    "cost": _cost,
    "peers": _peers,
    "spark": _spark,
}
