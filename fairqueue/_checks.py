"""Checks of what is given: they return it, or raise :class:`InvalidValue`, which names the field and the value."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TypeGuard

from .errors import InvalidValue

__all__ = [
    "TEN_YEARS",
    "UNSTORABLE",
    "YEAR",
    "check_choice",
    "check_count",
    "check_end",
    "check_flag",
    "check_moment",
    "check_name",
    "check_number",
    "check_seconds",
    "is_number",
    "is_whole",
]

#: In seconds, as are the longest delays and leases, and the longest pauses between attempts.
TEN_YEARS = 315_576_000
YEAR = TEN_YEARS // 10

#: What text in PostgreSQL can't hold: a NUL character, and half a surrogate pair.
UNSTORABLE = re.compile("[\x00\ud800-\udfff]")

_MAX_INTEGER = 2**31 - 1
#: What is read back in another time zone than UTC has to be in the years that Python knows.
_FIRST_MOMENT, _LAST_MOMENT = datetime(2, 1, 1, tzinfo=UTC), datetime(9999, 1, 1, tzinfo=UTC)


def check_name(field: str, value: object) -> str:
    """A name of 1 to 255 characters, as queues, channels and keys have, or :class:`InvalidValue`."""
    if not isinstance(value, str):
        raise InvalidValue(f"{field} must be text, not {value!r}")
    if not 1 <= len(value) <= 255:
        raise InvalidValue(f"{field} must have 1 to 255 characters, not {len(value)}")
    if UNSTORABLE.search(value):
        raise InvalidValue(f"{field} holds a character that PostgreSQL can't store: {value!r}")
    return value


def check_number(field: str, value: object, minimum: float, maximum: float) -> float:
    """A number from ``minimum`` to ``maximum`` (so neither NaN nor infinite), or :class:`InvalidValue`."""
    if not is_number(value) or not minimum <= value <= maximum:
        raise InvalidValue(f"{field} must be a number from {minimum:g} to {maximum:g}, not {value!r}")
    return float(value)


def check_count(field: str, value: object, minimum: int, maximum: int = _MAX_INTEGER) -> int:
    """A whole number from ``minimum`` to ``maximum``, or :class:`InvalidValue`."""
    if not is_whole(value) or not minimum <= value <= maximum:
        raise InvalidValue(f"{field} must be a whole number from {minimum} to {maximum}, not {value!r}")
    return value


def check_flag(field: str, value: object) -> bool:
    """True or False, or :class:`InvalidValue`."""
    if not isinstance(value, bool):
        raise InvalidValue(f"{field} must be True or False, not {value!r}")
    return value


def check_choice(field: str, value: object, *choices: str) -> str:
    """One of ``choices``, or :class:`InvalidValue`."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidValue(f"{field} must be {' or '.join(map(repr, choices))}, not {value!r}")
    return value


def check_moment(field: str, value: object) -> datetime:
    """A datetime with a time zone, or :class:`InvalidValue`."""
    if not isinstance(value, datetime) or value.utcoffset() is None:
        raise InvalidValue(
            f"{field} must be a datetime with a time zone, not {value!r}: use datetime.now(timezone.utc)"
        )
    return value


def check_end(field: str, value: object) -> datetime:
    """A moment at which something that may also have no end ends, or :class:`InvalidValue`."""
    moment = check_moment(field, value)
    if not _FIRST_MOMENT <= moment < _LAST_MOMENT:
        raise InvalidValue(
            f"{field} must be in the years 2 to 9998 (UTC), not {moment.isoformat()}: leave it out for no end"
        )
    return moment


def check_seconds(field: str, value: object, minimum: float = 0, maximum: float = TEN_YEARS) -> float:
    """A time span in seconds, or as a timedelta; :class:`InvalidValue` unless it is in ``minimum`` to ``maximum``."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not is_number(seconds) or not minimum <= seconds <= maximum:
        raise InvalidValue(f"{field} must be between {minimum:g} and {maximum} seconds, not {value!r}")
    return float(seconds)


def is_whole(value: object) -> TypeGuard[int]:
    """Whether ``value`` is an int; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether ``value`` is an int or a float; True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)
