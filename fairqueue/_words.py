"""Values as people read and write them: for the command line, and for what reports show."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

__all__ = ["NOTHING", "duration", "moment", "number", "parse_duration", "printable"]

#: Where there is no value.
NOTHING = "-"

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_DURATION = re.compile(r"\s*([0-9]{1,6})\s*(s|sec|seconds?|m|min|minutes?|h|hours?|d|days?)\s*")


def printable(text: str) -> str:
    """``text`` on one line: what isn't a visible character, such as a terminal's commands, as an escape sequence."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def number(value: int) -> str:
    return f"{value:,}"


def duration(value: timedelta | None) -> str:
    """In the unit that says most, with few digits."""
    if value is None:
        return NOTHING
    seconds = value.total_seconds()
    if seconds < 10:
        return f"{max(seconds, 0):.1f} s"
    for unit, length, most in (("s", 1, 120), ("min", 60, 120), ("h", 3600, 48)):
        if seconds < most * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86_400:,.0f} d"


def moment(value: datetime) -> str:
    """A time as people read it, with its zone."""
    return value.isoformat(sep=" ", timespec="seconds")


def parse_duration(text: str) -> timedelta | None:
    """A time span such as 90s, 10m, ``15 min``, ``1 hour`` or 1d; None: it is none."""
    found = _DURATION.fullmatch(text.lower())
    return timedelta(**{_UNITS[found[2][0]]: int(found[1])}) if found else None
