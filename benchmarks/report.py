"""Results: JSON as they were measured, a page in Markdown, pictures."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

from .records import Record
from .systems import SYSTEMS, System

__all__ = ["PAGE", "load", "page", "save", "write"]

PAGE = "README.md"
#: Columns of systems that a table has at most.
_WIDE = 8
#: What is said of each scenario, not of the machine.
_PASSING = ("time", "revision", "load before", "durable commit")
_WHOSE_GOALS = """\
Goals are set for some of the cases: in Dequeueing and Draining for 1,000 channels, in Growth for fairqueue as it is
used, in Peers for every batch beside the peers that try to be fair (≥ 3), and for each other Python package's best
batch (≥ 1). What the others come to is in the tables, and isn't always as good. No goal covers CPU, or channel-row,
LonnyMQ's queue, which is fair too and faster where messages are taken one at a time. Dequeueing's goals are for a
backlog that stands, with nobody enqueueing.
"""
_NOT_MEASURED = """\
What was not measured are cases of the scenario, or single systems in one, that failed, whichever of its goals they
have; its notes say why.
"""
_INTRODUCTION = """\
How fair and how fast fairqueue is, beside other queues in PostgreSQL. To measure it on your machine:

```console
$ make bench         # six minutes: few cases, small ones; SCENARIOS="fairness spark" runs only these
$ make bench-full    # the sizes that the goals name, and all scenarios: four and a half hours
```

The first leaves out Draining, Sizes, Flood, Imports and Spark, unless they are named, and the workers of Peers. Both
write such a page, its pictures, and the figures of all repetitions (JSON): the first into `build/benchmarks/`, the
second into `docs/benchmarks/`; `OUT=` names another folder.

What can be compared is a ratio: the median of at least five pairs, measured by turns in the same run. Figures without a
ratio may be of fewer runs: one for the other systems in Fairness and for Spark's report, three for the places in Peers.
Scenarios were measured at different times and revisions, and not all on the same machine, as the line at the end of
each says: don't compare absolute figures of two scenarios. Server, consumers and producers share the machine.
synchronous_commit is on, but where a scenario says otherwise."""


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
    try:
        fresh.write_text(text, "utf-8")
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)  # it is there if the disk is full


def number(value: float | None) -> str:
    """Three digits that count, or all of a larger whole number."""
    if value is None or math.isnan(value):
        return "none"
    if value == 0:
        return "0"
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def page(
    results: Mapping[str, dict[str, Any]], modules: Mapping[str, ModuleType], systems: Mapping[str, System]
) -> str:
    """The report."""
    parts = ["# Benchmarks", _INTRODUCTION]
    records = {name: [Record(**values) for values in result["records"]] for name, result in results.items()}
    titles = {name: (inspect.getdoc(modules[name]) or name).partition("\n") for name in results}
    if goals := _goals(records, results, {name: title for name, (title, _, _) in titles.items()}):
        parts += ["## Goals", goals, _WHOSE_GOALS]
        if any(map(_failed, results.values())):
            parts.append(_NOT_MEASURED)
    taking_part = {record.system for found in records.values() for record in found}
    parts += [
        "## The systems",
        "\n".join(
            f"* {f'[{name}]({system.url})' if system.url else f'**{name}**'}: {system.about}"
            for name, system in systems.items()
            if name in taking_part
        ),
    ]
    parts += ["## The machine", *_machines(results)]
    for name, result in results.items():
        title, _, text = titles[name]
        parts += [f"## {title}", text.strip()]
        parts += [f"![{title}]({picture})" for picture in result.get("pictures", [])]
        parts.append("\n".join(f"* {note}" for note in result["notes"]))
        for chosen in _alike(records[name]):
            parts += _table(chosen)
        parts.append(_how(name, result))
    return "\n\n".join(part for part in parts if part) + "\n"


def _goals(
    records: Mapping[str, Sequence[Record]], results: Mapping[str, Mapping[str, Any]], titles: Mapping[str, str]
) -> str:
    """A row for each goal and bound; its cases are in the tables of the scenario."""
    rows = []
    for name, found in records.items():
        scenario, size = f"[{titles[name].partition(':')[0]}](#{_anchor(titles[name])})", results[name]["size"]
        missed = f"{failed} not measured" if (failed := _failed(results[name])) else ""
        goals: dict[tuple[str, str], dict[str, list[Record]]] = {}
        for record in found:
            if record.wanted:
                bounds = goals.setdefault((record.system, record.figure), {})
                bounds.setdefault(record.wanted, []).append(record)
        for (system, figure), bounds in goals.items():
            for wanted, cases in bounds.items():
                references = list(dict.fromkeys(record.reference for record in cases if record.reference))
                over = f" / {references[0] if len(references) == 1 else 'reference'}" if references else ""
                measured = _range([value for value in map(_measured, cases) if value is not None])
                reached = sum(bool(record.reached) for record in cases)
                count = f"{reached} of {len(cases)}" + (f", {missed}" if missed else "")
                marked = f"**{count}**" if missed or reached < len(cases) else count
                rows.append([scenario, f"{figure}: {system}{over}", wanted, measured, size, marked])
        if missed and not goals:
            rows.append([scenario, "", "", "none", size, f"**{missed}**"])
    return _markdown(["", "goal", "wanted", "measured", "run", "cases that reach it"], rows, left=2) if rows else ""


def _anchor(title: str) -> str:
    """As GitHub makes it of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _measured(record: Record) -> float | None:
    """What is held against the goal."""
    return record.value if record.reference is None else record.ratio


def _failed(result: Mapping[str, Any]) -> int:
    """How many of its cases could not be measured; earlier results don't say, and had none."""
    return int(result.get("failed", 0))


def _range(values: Sequence[float]) -> str:
    ends = [number(end) for end in (min(values), max(values))] if values else ["none"]
    return " to ".join(dict.fromkeys(ends))


def _alike(records: Sequence[Record]) -> Iterable[list[Record]]:
    """The records of each table: figures of the same cases, systems and references share one."""
    tables: dict[tuple[Any, ...], list[Record]] = {}
    for figure in dict.fromkeys(record.figure for record in records):
        chosen = [record for record in records if record.figure == figure]
        # What was varied differs from case to case.
        for keys in dict.fromkeys(tuple(record.case) for record in chosen):
            found = [record for record in chosen if tuple(record.case) == keys]
            cases = frozenset(tuple(record.case.items()) for record in found)
            marks = frozenset((record.system, record.reference) for record in found)
            tables.setdefault((keys, cases, marks), []).extend(found)
    return tables.values()


def _table(records: Sequence[Record]) -> list[str]:
    """What all have in common, and a row for each case: of many systems the ratios, of one or two the values too."""
    figures = list(dict.fromkeys(map(_figure, records)))
    keys = list(records[0].case)
    varied = [key for key in keys if len({record.case[key] for record in records}) > 1]
    order = list(SYSTEMS)
    records = sorted(records, key=lambda record: order.index(record.system) if record.system in order else len(order))
    references = list(dict.fromkeys(record.reference for record in records if record.ratio is not None))
    both = len({record.system for record in records}) <= 2 and len(references) <= 1

    def case(record: Record) -> tuple[str, ...]:
        figure = [_figure(record)] if len(figures) > 1 else []
        return *figure, *(_case_value(record.case[key]) for key in varied)

    # Numbers by size, texts as they were met.
    texts = list(dict.fromkeys(value for record in records for value in record.case.values()))
    met = sorted(
        records,
        key=lambda record: [
            value if isinstance(value := record.case[key], int) else texts.index(value) for key in varied
        ],
    )
    rows: dict[tuple[str, ...], dict[str, str]] = {
        case(record): {} for figure in figures for record in met if _figure(record) == figure
    }
    columns: dict[str, bool] = {}
    for record in records:
        for column, cell, is_ratio in _cells(record, both, several=len(references) > 1):
            columns[column] = both and is_ratio
            assert column not in rows[case(record)], f"measured twice: {record.figure}, {record.system}, {record.case}"
            rows[case(record)][column] = cell
    shown = sorted(columns, key=lambda column: columns[column])  # values before ratios
    body = [[*where, *(cells.get(column, "") for column in shown)] for where, cells in rows.items()]
    named = ["" for _ in figures[1:2]]
    if references and not both:
        own = f", {records[0].unit}" if len(figures) == 1 else ", absolute"
        shown = [column + own if column in references and len(references) == 1 else column for column in shown]
    table = _markdown([*named, *varied, *shown], body, left=len(named))
    if len(shown) > _WIDE and not references:
        table = _by_system(records, figures, varied)
    return [_heading(records, figures, varied, [] if both else references), table]


def _by_system(records: Sequence[Record], figures: Sequence[str], varied: Sequence[str]) -> str:
    """A row for each system and case, where that would be too many columns."""
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for record in records:
        where = (record.system, *(_case_value(record.case[key]) for key in varied))
        rows.setdefault(where, {})[_figure(record)] = _cells(record, both=False, several=False)[0][1]
    body = [[*where, *(cells.get(figure, "") for figure in figures)] for where, cells in rows.items()]
    return _markdown(["", *varied, *figures], body, left=1)


def _figure(record: Record) -> str:
    return record.figure if record.unit in record.figure.split() else f"{record.figure}, {record.unit}"


def _heading(records: Sequence[Record], figures: Sequence[str], varied: Sequence[str], over: Sequence[Any]) -> str:
    """What the table is of, over what, what its rows have in common, and how steady it is."""
    first = records[0]
    parts = []
    if len(figures) == 1:
        figure = first.figure if over else figures[0]
        parts.append(f"**{figure[0].upper()}{figure[1:]}**")
    if len(over) > 1:
        parts.append(f"{first.system} over each")
    elif over:
        parts.append(f"over {over[0]}")
    parts += [f"{key} {_case_value(value)}" for key, value in first.case.items() if key not in varied]
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}.{_spread(records)}" if text else _spread(records).strip()


def _cells(record: Record, both: bool, several: bool) -> list[tuple[str, str, bool]]:
    """Column, text, whether it is a ratio: of a ratio, the ratio, and if there is room the value too."""
    mark = "{}" if record.reached is not False else "**{}**"
    if record.reference is None:
        return [(record.system, mark.format(number(record.value)), False)]
    shown = mark.format(number(record.ratio))
    if both:
        return [(record.system, number(record.value), False), (f"{record.system} / {record.reference}", shown, True)]
    return [(str(record.reference) if several else record.system, shown, True)]


def _spread(records: Sequence[Record]) -> str:
    """How far single pairs are off."""
    off = [
        max(record.high / record.ratio - 1, 1 - record.low / record.ratio)
        for record in records
        if record.ratio and record.high and record.low is not None and (record.pairs or 0) > 1
    ]
    runs = [
        f"{record.system} {_range(record.values)}"
        for record in records
        if record.wanted and record.reference is None and len(set(record.values)) > 1
    ]
    if runs:
        return f" Single runs: {', '.join(runs)}."
    if not off:
        return ""
    most = f"{max(off):.0%} off" if max(off) <= 1 else f"{1 + max(off):.0f} times it"
    return f" The pair farthest from the median: {median(off):.0%} off in a typical row, {most} in the worst."


def _case_value(value: int | str) -> str:
    return f"{value:,}" if isinstance(value, int) else value


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]], left: int) -> str:
    lines = [
        "| " + " | ".join(header) + " |",
        "|" + "|".join("---" if place < left else "---:" for place in range(len(header))) + "|",
    ]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def _how(name: str, result: Mapping[str, Any]) -> str:
    surroundings = result["environment"]
    return (
        f"*{result['size'].capitalize()} run, {surroundings['time']}, {result['seconds']:,.0f} s, revision"
        f" {surroundings['revision']}, {surroundings['processor']}, load {surroundings['load before']} before,"
        f" a durable commit {surroundings['durable commit']}. [All figures]({name}.json)*"
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
