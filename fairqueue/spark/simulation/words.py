"""Scenarios and waits in words, for table, sentence and picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from .scenarios import Scenario

__all__ = ["SCHEDULER_WORDS", "Row", "answer", "cell", "fixed", "label", "seconds", "varied"]

Row = Mapping[str, Any]

SCHEDULER_WORDS = {"arrival": "in arrival order", "round_robin": "in rotation", "fair": "with fair queueing"}

_WORDS = {
    "tenants": "{:,} tenants",
    "workers": "{:,} workers",
    "load": "load {:g}",
    "messages": "{:,} messages",
    "service": "{:.3g} s each",
    "service_law": "{} service times",
    "skew": "skew {:g}",
    "upload": "{:,} uploaded",
    "swing": "swing {:g}",
    "cycles": "{:g} days",
    "names": "{:,} names",
    "max_concurrency": "{:,} of a channel at a time",
    "interval_ms": "{:,} ms apart",
    "burst": "bursts of {:,}",
    "seed": "seed {}",
}
#: What only some scenarios have, and when.
_WHERE = {
    "skew": {"zipf", "diurnal"},
    "upload": {"burst"},
    "swing": {"diurnal"},
    "cycles": {"diurnal"},
    "names": {"split"},
}
_NONE = {"max_concurrency": "no max_concurrency", "upload": "a tenth uploaded", "load": "all at once"}


def varied(rows: Sequence[Row]) -> list[str]:
    """The parameters in which these rows differ, but for the scheduler."""
    left_out = {"scheduler"}
    if all(row["arrivals"] is not None for row in rows):
        left_out |= {"tenants", "load", "messages"}  # what the file came to
    names = [each.name for each in fields(Scenario) if each.name not in left_out]
    return [name for name in names if _differ(rows, name)]


def _differ(rows: Sequence[Row], name: str) -> bool:
    return any(row[name] != rows[0][name] for row in rows)


def fixed(rows: Sequence[Row]) -> str:
    """What these rows have in common, and isn't as if it weren't there."""
    row, workloads = rows[0], {row["workload"] for row in rows}
    left_out = {"scheduler", *(each.name for each in fields(Scenario) if _differ(rows, each.name))}
    # A file is known by its name, and mostly has service times of its own.
    left_out |= {"arrivals"} if row["arrivals"] is None else {"workload", "service_law"}
    left_out |= {name for name, where in _WHERE.items() if not where & workloads}
    # Nobody asks for what isn't there: no limit, no rate, equal weights.
    left_out |= {name for name in ("max_concurrency", "weights") if row[name] in (None, [1.0], (1.0,))}
    if not any(row["interval_ms"] for row in rows):
        left_out |= {"interval_ms", "burst"}
    return ", ".join(label(each.name, row[each.name]) for each in fields(Scenario) if each.name not in left_out)


def label(name: str, value: Any) -> str:
    """A parameter and its value."""
    if name == "weights":
        return "weights " + ", ".join(f"{weight:g}" for weight in value)
    if name == "arrivals":
        return Path(value).name
    if value is None:
        return _NONE[name]
    if value == 1 and name in {"tenants", "workers", "names"}:
        return f"1 {name.removesuffix('s')}"
    return _WORDS[name].format(value) if name in _WORDS else str(value)


def cell(name: str, value: Any) -> str:
    """A value by itself."""
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) and name != "seed" else f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(f"{each:g}" for each in value)
    return "-" if value is None else str(value)


def seconds(value: float | None) -> str:
    """Three digits or so."""
    if value is None:
        return "-"
    digits = next((digits for digits, most in enumerate((99.95, 9.995, 0.9995, 0.00995)) if value >= most), 4)
    return f"{value:,.{digits}f}" if value else "0"


def answer(rows: Sequence[Row]) -> str:
    """One sentence on the scenario with the greatest load, the most tenants, and the most workers."""
    largest = max(rows, key=lambda row: (row["load"] or 0, row["tenants"], row["workers"]))
    names = dict.fromkeys(["tenants", "workers", "load", *varied(rows)])
    said = [row for row in rows if all(row[name] == largest[name] for name in names)]
    quiet, noisy = (
        {r["scheduler"]: r["wait_p99"] for r in said if r["group"] == group} for group in ("quiet", "noisy")
    )
    place = ", ".join(label(name, largest[name]) for name in names)
    return (
        f"{place}, for {seconds(largest['span'])} s: quiet tenants' p99 wait is {_each(quiet)};"
        f" that of noisy ones is {_each(noisy)}."
    )


def _each(waits: Mapping[str, float | None]) -> str:
    order = [name for name in reversed(SCHEDULER_WORDS) if name in waits]
    return ", ".join(f"{seconds(waits[name])} s {SCHEDULER_WORDS[name]}" for name in order)
