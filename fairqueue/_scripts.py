"""SQL as text: names and literals in it, and the files of the package. See :mod:`fairqueue.schema`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from sqlalchemy.dialects.postgresql import dialect as postgresql_dialect

__all__ = ["STEPS", "head", "literal", "quote", "split", "step"]

_SQL = files("fairqueue") / "sql"
STEPS = {1: "0001_initial"}

# What a semicolon may hide in: comments, strings, quoted names and dollar-quoted bodies.
_TOKEN = re.compile(r"--[^\n]*|/\*.*?\*/|'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|(\$\w*\$).*?\1|;", re.DOTALL)


def quote(name: str) -> str:
    """``name`` as an SQL identifier, quoted where it has to be."""
    # In this paramstyle the quoting leaves a percent sign as it is.
    dialect: Any = postgresql_dialect
    quoted: str = dialect(paramstyle="named").identifier_preparer.quote(name)
    return quoted


def literal(value: str) -> str:
    """``value`` as an SQL string."""
    return "'" + value.replace("'", "''") + "'"


def head() -> list[str]:
    """The scripts of all objects as they are now, in the order in which they depend on one another."""
    folders = sorted((_SQL / "head").iterdir(), key=lambda folder: folder.name)
    return [
        file.read_text("utf-8") for folder in folders for file in sorted(folder.iterdir(), key=lambda file: file.name)
    ]


def step(version: int, direction: str) -> str:
    """The script of a frozen step, ``up`` or ``down``."""
    return (_SQL / "steps" / f"{STEPS[version]}.{direction}.sql").read_text("utf-8")


def split(script: str) -> Iterator[str]:
    """The statements of a script, each with the comments before it; asyncpg takes only one at a time."""
    start = 0
    for token in _TOKEN.finditer(script):
        if token.group() == ";":
            yield script[start : token.start()].strip()
            start = token.end()
