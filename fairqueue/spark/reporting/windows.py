"""Windows of time: as long as they are told to be, one after another since 1970 in UTC.

::

    >>> parse_window("15 min").total_seconds()
    900.0
    >>> parse_window("1d")
    datetime.timedelta(days=1)

Inside the report a time is a number of microseconds, and a window is its number since 1970.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from fairqueue._checks import check_moment
from fairqueue._words import parse_duration
from fairqueue.errors import InvalidValue
from fairqueue.schedule import EPOCH

# PySpark is imported where it is needed: a command looks at its arguments first.
if TYPE_CHECKING:
    from pyspark.sql import Column

__all__ = ["Period", "check_order", "microseconds", "moment", "parse_window"]

_MICROSECOND = timedelta(microseconds=1)


def parse_window(text: str | timedelta) -> timedelta:
    """A length such as ``"1 hour"``, ``"15 min"``, ``"30s"`` or ``"1d"``.

    :raises InvalidValue: if it is none, or not between one second and 366 days.
    """
    length = parse_duration(text) if isinstance(text, str) else text
    if not isinstance(length, timedelta) or not timedelta(seconds=1) <= length <= timedelta(days=366):
        raise InvalidValue(f"window must be a length of time such as '1 min', '1 hour' or '1 day', not {text!r}")
    return length


def microseconds(length: timedelta) -> int:
    return length // _MICROSECOND


def moment(field: str, value: datetime | None) -> int | None:
    """Microseconds since 1970 of a time that has a zone."""
    if value is None:
        return None
    return (check_moment(field, value) - EPOCH) // _MICROSECOND


def check_order(since: datetime | None, until: datetime | None) -> None:
    """:raises InvalidValue: if they are in the wrong order, or have no zone."""
    start, end = moment("since", since), moment("until", until)
    if start is not None and end is not None and start >= end:
        raise InvalidValue(f"until must be after since, not {until} after {since}")


@dataclass(frozen=True, slots=True)
class Period:
    """The time that is reported on, from ``start`` up to and without ``end``, in windows; all in microseconds."""

    start: int
    end: int
    length: int

    @property
    def first(self) -> int:
        """Its first window."""
        return self.start // self.length

    @property
    def last(self) -> int:
        """Its last window, which may end early."""
        return (self.end - 1) // self.length

    def has(self, at: Column) -> Column:
        return (at >= self.start) & (at < self.end)

    def window(self, at: Column) -> Column:
        """The window of a time; what was before the period is in the one before its first."""
        from pyspark.sql import functions as sf

        return sf.when(at < self.start, self.first - 1).otherwise(sf.floor(at / self.length))

    def begins(self, window: Column) -> Column:
        from pyspark.sql import functions as sf

        return sf.greatest(window.cast("long") * self.length, sf.lit(self.start))

    def ends(self, window: Column) -> Column:
        from pyspark.sql import functions as sf

        return sf.least((window.cast("long") + 1) * self.length, sf.lit(self.end))

    def time(self, at: int) -> datetime:
        return EPOCH + at * _MICROSECOND
