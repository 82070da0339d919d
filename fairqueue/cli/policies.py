"""What ``fairqueue queue`` and ``fairqueue channel`` have in common: a policy that is set, shown, paused, resumed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .failures import Failed, Invalid
from .output import NOTHING, duration, echo, make_table, moment, number
from .target import Target, now
from .types import Duration, Moment

if TYPE_CHECKING:
    from rich.table import Table
    from sqlalchemy import Row, Select

    from fairqueue.models import Channel, Queue

__all__ = [
    "CHANNEL_SETTINGS",
    "Place",
    "Setting",
    "cells",
    "options_of",
    "pause_cell",
    "pause_options",
    "pause_policy",
    "policies",
    "policy_table",
    "resume_policy",
    "set_policy",
]

F = TypeVar("F", bound=Callable[..., Any])

#: What the word "default" on the command line stands for, as None is an option that isn't there.
_DEFAULT: Any = object()


@dataclass(frozen=True)
class Setting:
    """What can be set by an option: a number or a word, the heading of its column, and what it means."""

    kind: type
    heading: str
    help: str


#: By their names in the model, in the order of a table's columns.
CHANNEL_SETTINGS = {
    "weight": Setting(float, "weight", "Its share against the others, 0.01 to 1000."),
    "max_concurrency": Setting(int, "concur.", "How many of its messages may be leased at a time."),
    "release_interval_ms": Setting(int, "every ms", "Milliseconds between two leases; 0: none."),
    "burst": Setting(int, "burst", "How many it may go on with at once after it has waited."),
    "max_size": Setting(int, "size", "How many messages may be ready or waiting in it."),
    "overflow": Setting(str, "overflow", "What becomes of more: reject or drop."),
}


@dataclass(frozen=True)
class Place:
    """What has a policy: a queue, or one of its channels."""

    queue: str
    channel: str | None = None

    def __str__(self) -> str:
        return f"Queue {self.queue}" if self.channel is None else f"Channel {self.channel} of queue {self.queue}"

    @property
    def group(self) -> str:
        return "queue" if self.channel is None else "channel"

    @property
    def model(self) -> type[Queue | Channel]:
        from fairqueue.models import Channel, Queue

        return Queue if self.channel is None else Channel

    @property
    def key(self) -> dict[str, Any]:
        """The key of its policy."""
        return {"name": self.queue} if self.channel is None else {"queue": self.queue, "name": self.channel}

    @property
    def names(self) -> dict[str, str]:
        """What ``pause()`` and ``resume()`` are given of it."""
        return {"queue": self.queue} if self.channel is None else {"queue": self.queue, "channel": self.channel}


class _Value(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """A number or a word, or ``default``. What is in range is for the model to say."""

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.name = {int: "n", float: "number", str: "word"}[kind]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "default":
            return _DEFAULT
        try:
            return self.kind(value)
        except ValueError:
            what = "a whole number" if self.kind is int else "a number"
            self.fail(f"must be {what} or 'default', not {value!r}", param, ctx)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"{self.name.upper()}|default"


def _option(field: str) -> str:
    """The option that sets a field of the model."""
    return f"--{field.replace('_', '-')}"


def options_of(settings: Mapping[str, Setting]) -> Callable[[F], F]:
    """An option for each of ``settings``."""

    def decorate(function: F) -> F:
        for field, setting in reversed([*settings.items()]):
            function = click.option(_option(field), type=_Value(setting.kind), help=setting.help)(function)
        return function

    return decorate


def set_policy(
    target: Target, place: Place, fields: Collection[str], values: Mapping[str, Any], *, if_none: str
) -> None:
    """Set what is given of ``values``, and say which ``fields`` differ from their defaults then, or ``if_none``."""
    given = {field: value for field, value in values.items() if value is not None}
    if not given:
        options = ", ".join(map(_option, fields))
        raise click.UsageError(f"nothing to set: give at least one of {options}", click.get_current_context())
    columns = place.model.__table__.c
    defaults = {field: _default(columns[field]) for field in fields}
    policy = place.model(
        **place.key,
        **{field: defaults[field] if value is _DEFAULT else value for field, value in given.items()},
    )
    with target.session() as session:
        merged = session.merge(policy)
        session.flush()
        said = {field: getattr(merged, field) for field in fields}
        session.commit()
    words = [f"{field} {_plain(value)}" for field, value in said.items() if value != defaults[field]]
    echo(f"{place}: {', '.join(words) or if_none}.")


def _default(column: Any) -> Any:
    """What a row has there of which nothing else is said."""
    default = column.server_default
    return None if default is None else column.type.python_type(str(default.arg))


def _plain(value: Any) -> str:
    # Of 15 digits none is lost, and none is noise.
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def policies(model: type[Queue | Channel], fields: Iterable[str]) -> Select[Any]:
    """All policies there are: their keys, what is set, and their pauses."""
    from sqlalchemy import select

    table = model.__table__
    return select(*table.primary_key, *(table.c[each] for each in (*fields, "paused", "resume_at"))).order_by(
        *table.primary_key
    )


def policy_table(first: str, settings: Mapping[str, Setting], *others: str) -> Table:
    """A table with a column for each of ``settings`` between the first and the others."""
    numbers = tuple(each.heading for each in settings.values() if each.kind is not str)
    headings = (each.heading for each in settings.values())
    return make_table(first, *headings, *others, right=numbers, wide={first: 1})


def cells(row: Row[Any], fields: Iterable[str]) -> list[str]:
    """What the columns of ``fields`` hold."""
    return [_cell(getattr(row, field)) for field in fields]


def _cell(value: Any) -> str:
    if value is None:
        return NOTHING
    return number(value) if isinstance(value, int) else _plain(value)


def pause_cell(row: Row[Any], at: datetime) -> str:
    if not row.paused:
        return ""
    if row.resume_at is None:
        return "yes"
    return f"for {duration(row.resume_at - at)}" if row.resume_at > at else "over"


def pause_options(function: F) -> F:
    """When a pause ends."""
    for_ = click.option("--for", "for_", type=Duration(), help="After how long it goes on by itself: 90s, 10m, 2h, 1d.")
    until = click.option("--until", type=Moment(), help="When it goes on by itself: 2030-01-31T09:00:00+00:00.")
    return until(for_(function))


def pause_policy(target: Target, place: Place, until: datetime | None, for_: timedelta | None) -> None:
    from fairqueue.policies import pause

    if until is not None and for_ is not None:
        raise click.UsageError("only one of --until and --for may be given")
    with target.session() as session:
        at = now(session)
        if for_ is not None:
            until = at + for_
        if until is not None and until <= at:
            problem = f"--until must be a time ahead, not {moment(until)}, as the clock of the queue says {moment(at)}"
            if for_ is not None:
                problem = "--for must be longer than 0"
            raise Invalid(f"{problem}; `{target.command} {place.group} resume` ends a pause")
        session.execute(pause(**place.names, until=until))
        session.commit()
    echo(f"{place} is paused{f' until {moment(until)}' if until else ''}.")


def resume_policy(target: Target, place: Place) -> None:
    from sqlalchemy import select

    from fairqueue.policies import resume

    statement = resume(**place.names)  # before the look at the database: it checks the names
    with target.session() as session:
        if not session.scalar(select(place.model.paused).filter_by(**place.key)):
            raise Failed(f"{place} is not paused")
        session.execute(statement)
        session.commit()
    echo(f"{place} is resumed.")
