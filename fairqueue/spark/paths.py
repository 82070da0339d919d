"""Paths as Spark takes them: of a file system, or URLs."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["PLACE", "absolute", "literal"]

#: What a URL has before its path.
PLACE = "^[^/:]+:(//[^/]*)?"


def absolute(path: str) -> str:
    """The path where this process is, as the JVM may be in another folder; a URL as it is."""
    return path if re.match(PLACE, path) else str(Path(path).absolute())


def literal(path: str) -> str:
    """The same path where Spark would take wildcards: as it reads, but not as it writes."""
    return re.sub(r"[\\*?{}\[\]]", r"\\\g<0>", path)
