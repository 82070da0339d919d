"""What commands print: tables for people, one JSON document for programs, nothing that a terminal would obey."""

from __future__ import annotations

import json
import math
from datetime import datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import click

from fairqueue._words import NOTHING, duration, moment, number, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = [
    "NOTHING",
    "as_json",
    "duration",
    "echo",
    "echo_json",
    "make_console",
    "make_table",
    "moment",
    "number",
    "plain",
    "printable",
]

as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead.")


def echo(text: str) -> None:
    """A line of text that may hold what users have written."""
    click.echo(printable(text))


def echo_json(document: Any) -> None:
    """``document`` on stdout; times in ISO 8601, durations in seconds. ASCII, so safe on a terminal as well."""
    try:
        text = json.dumps(document, default=plain, indent=2, allow_nan=False)
    except RecursionError:  # of payloads that are nested deeply: without an indent Python goes deeper
        text = json.dumps(document, default=plain)
    except ValueError:
        text = json.dumps(_finite(document), default=plain, indent=2)
    click.echo(text)


def _finite(value: Any) -> Any:
    """With text for numbers that are beyond a float, as PostgreSQL's JSON has them and Python's hasn't."""
    match value:
        case dict():
            return {key: _finite(each) for key, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
        case float() if not math.isfinite(value):
            return str(value)
    return value


def plain(value: object) -> Any:
    """What the module json has no words for, as it has; also what the json_deserializer of a host's engine makes."""
    match value:
        case datetime():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case bytes() | memoryview():
            return bytes(value).hex()
        case Decimal():
            return float(value) if math.isfinite(float(value)) else str(value)
    return str(value)


def make_console() -> Console:
    """A console on stdout that takes text for text: users' names hold no markup, no emoji, nothing to highlight."""
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False)


def make_table(*columns: str, right: tuple[str, ...], wide: dict[str, int], longest: int | None = None) -> Table:
    """A table without lines.

    :param right: columns of numbers, never cut.
    :param wide: columns that share the width that is left in these parts, and are cut where it isn't enough.
    :param longest: where the other columns of text are cut.
    """
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", expand=True)
    for name in columns:
        table.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=True,
            overflow="ellipsis",
            ratio=wide.get(name),
            max_width=None if name in wide or name in right else longest,
        )
    return table
