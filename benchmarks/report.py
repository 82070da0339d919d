"""Results: JSON as they were measured, a page in Markdown, pictures."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from .records import Record
from .systems import SYSTEMS

__all__ = ["load", "page", "save"]

PAGE = "README.md"
#: What is said of each scenario, not of the machine.
_PASSING = ("time", "revision", "load before", "durable commit")
_INTRODUCTION = """\
Made by `make bench` or `make bench-full`; edits are overwritten. Every ratio is against a reference that was measured
in the same run, by turns: its median, and in brackets the lowest and the highest of the pairs."""


def save(folder: Path, name: str, result: Mapping[str, Any]) -> None:
    """Write one scenario's result, all of it or nothing."""
    write(folder / f"{name}.json", json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def load(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The results that are there, of this run and of earlier ones."""
    return {
        name: json.loads((folder / f"{name}.json").read_text("utf-8"))
        for name in names
        if (folder / f"{name}.json").exists()
    }


def write(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text, "utf-8")
    fresh.replace(path)


def page(results: Mapping[str, dict[str, Any]], modules: Mapping[str, ModuleType], abouts: Mapping[str, str]) -> str:
    """The report."""
    parts = [
        "# Benchmarks",
        _INTRODUCTION,
    ]
    if wanted := _wanted(results):
        parts += ["## What is wanted", wanted]
    for name, result in results.items():
        title, _, text = (inspect.getdoc(modules[name]) or name).partition("\n")
        parts += [f"## {title}", text.strip(), _how(result)]
        parts.append("\n".join(f"* {note}" for note in result["notes"]))
        records = [Record.from_dict(values) for values in result["records"]]
        parts += [f"![{picture}]({picture})" for picture in result.get("pictures", [])]
        for figure in dict.fromkeys(record.figure for record in records):
            chosen = [record for record in records if record.figure == figure]
            parts.append(f"### {figure[0].upper()}{figure[1:]}, {chosen[0].unit}")
            # What was varied differs from case to case.
            parts += [
                _table([record for record in chosen if tuple(record.case) == keys])
                for keys in dict.fromkeys(tuple(record.case) for record in chosen)
            ]
    parts += ["## The systems", "\n".join(f"* **{name}**: {about}" for name, about in abouts.items())]
    parts += ["## The machine", *_machines(results)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _wanted(results: Mapping[str, dict[str, Any]]) -> str:
    """What has a goal, in one table."""
    rows = []
    for name, result in results.items():
        for record in (Record.from_dict(values) for values in result["records"]):
            if record.wanted:
                shown = number(record.value if record.ratio is None and record.reference is None else record.ratio)
                over = f", over {record.reference}" if record.reference else ""
                what = f"{record.figure}{over}"
                case = ", ".join(f"{key} {value}" for key, value in record.case.items())
                reached = "yes" if record.reached else "**no**"
                rows.append([name, record.system, what, case, shown, record.wanted, reached])
    header = ["scenario", "system", "figure", "case", "measured", "wanted", "reached"]
    return _markdown(header, rows, left=4) if rows else ""


def _table(records: Sequence[Record]) -> str:
    """A row for each case, a column for each system, or for each reference of one system."""
    keys = list(records[0].case)
    order = list(SYSTEMS)
    known = sorted(records, key=lambda record: order.index(record.system) if record.system in order else len(order))
    columns = list(dict.fromkeys(_column(record) for record in known))
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for record in records:
        case = tuple(_case_value(record.case[key]) for key in keys)
        rows.setdefault(case, {})[_column(record)] = _cell(record)
    body = [[*case, *(cells.get(column, "") for column in columns)] for case, cells in rows.items()]
    return _markdown([*keys, *columns], body, left=0)


def _column(record: Record) -> str:
    return f"{record.system} / {record.reference}" if _foreign(record) else record.system


def _foreign(record: Record) -> bool:
    """A figure of one system over several others."""
    return record.figure.startswith("the same")


def _case_value(value: int | str) -> str:
    return f"{value:,}" if isinstance(value, int) else value


def _cell(record: Record) -> str:
    if record.reference is None:
        return number(record.value)
    if record.ratio is None:
        return f"{number(record.value)} (no ratio: the reference did nothing)"
    spread = f" [{number(record.low)}, {number(record.high)}]" if record.pairs and record.pairs > 1 else ""
    return f"{number(record.value)} ({number(record.ratio)}{spread})"


def number(value: float | None) -> str:
    """Three digits that count, or all of a larger whole number."""
    if value is None or math.isnan(value):
        return "none"
    if value == 0:
        return "0"
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]], left: int) -> str:
    lines = [
        "| " + " | ".join(header) + " |",
        "|" + "|".join("---" if place < left else "---:" for place in range(len(header))) + "|",
    ]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def _how(result: Mapping[str, Any]) -> str:
    return (
        f"*Size: {result['size']}. {result['environment']['time']}, {result['seconds']:,.0f} s, revision"
        f" {result['environment']['revision']}, load {result['environment']['load before']} before, a durable commit of"
        f" one row {result['environment']['durable commit']}.*"
    )


def _machines(results: Mapping[str, dict[str, Any]]) -> list[str]:
    """One table, unless scenarios were measured in several places."""
    tables: dict[str, list[str]] = {}
    for name, result in results.items():
        steady = [[key, value] for key, value in result["environment"].items() if key not in _PASSING]
        tables.setdefault(_markdown(["", ""], steady, left=2), []).append(name)
    if len(tables) == 1:
        return list(tables)
    return [f"{', '.join(names)}:\n\n{table}" for table, names in tables.items()]
