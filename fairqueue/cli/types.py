"""Types of options that more than one command has: a time, a time span, a file to write."""

from __future__ import annotations

import contextlib
import os
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import click

from fairqueue._words import parse_duration

__all__ = ["Duration", "Moment", "OutputFile"]


class Moment(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """A time in ISO 8601.

    :param zone: of times that name none; without it they have to.
    """

    name = "time"

    def __init__(self, zone: tzinfo | None = None) -> None:
        self.zone = zone

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        with contextlib.suppress(ValueError):
            found = datetime.fromisoformat(value)
            if zone := found.tzinfo or self.zone:
                return found.replace(tzinfo=zone)
        what = "such as 2030-01-31 or" if self.zone else "with its zone, such as"
        return self.fail(f"must be a time {what} 2030-01-31T09:00:00+00:00, not {value!r}", param, ctx)


class Duration(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """A time span as :func:`fairqueue._words.parse_duration` reads it: 90s, 10m, 2h, 1d."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        span = parse_duration(value)
        if span is None:
            what = "a whole number of at most six digits with s, m, h or d behind it, such as 10m"
            self.fail(f"must be {what}, not {value!r}", param, ctx)
        return span


class OutputFile(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """A file that can be written: looked at before the work, not after it."""

    name = "path"

    def __init__(self, suffix: str) -> None:
        self.suffix = suffix

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        if path.suffix.lower() != self.suffix:
            self.fail(f"must end in {self.suffix}, not {value!r}", param, ctx)
        # Not path.exists(), which raises where one may not look.
        there = path if os.access(path, os.F_OK) else path.parent
        if not os.access(there, os.W_OK) or (there is path and path.is_dir()):
            self.fail(f"can't be written: {value!r}", param, ctx)
        return path
