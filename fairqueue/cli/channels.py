"""``fairqueue channel``: policies of channels, and pauses of channels and queues."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import click

from .base import Group
from .failures import Failed, Invalid
from .output import NOTHING, as_json, duration, echo, echo_json, make_console, make_table, moment, number, printable
from .target import Target, now, pass_target
from .types import Duration, Moment

__all__ = ["channel"]

_POLICIES = ("weight", "max_concurrency", "release_interval_ms", "burst", "max_size", "overflow")


class _Setting(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """A number or a word, or ``default``, which is None. What is in range is for the model to say."""

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.name = {int: "n", float: "number", str: "word"}[kind]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "default":
            return None
        try:
            return self.kind(value)
        except ValueError:
            what = "a whole number" if self.kind is int else "a number"
            self.fail(f"must be {what} or 'default', not {value!r}", param, ctx)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"{self.name.upper()}|default"


_queue = click.option("--queue", default="default", show_default=True, help="The queue that the channel is in.")
_name = click.argument("name", required=False)
_all_channels = click.option("--all-channels", is_flag=True, help="The queue as a whole, instead of one channel.")


@click.group(cls=Group)
def channel() -> None:
    """Policies of channels, and pauses. They hold for all workers from their next dequeue on."""


@channel.command("set")
@click.argument("name")
@_queue
@click.option("--weight", type=_Setting(float), help="Its share against the others, 0.01 to 1000.")
@click.option("--max-concurrency", type=_Setting(int), help="How many of its messages may be leased at a time.")
@click.option("--release-interval-ms", type=_Setting(int), help="Milliseconds between two leases; 0: none.")
@click.option("--burst", type=_Setting(int), help="How many it may go on with at once after it has waited.")
@click.option("--max-size", type=_Setting(int), help="How many messages may stand ready in it.")
@click.option("--overflow", type=_Setting(str), help="What becomes of more: reject or drop.")
@pass_target
@click.pass_context
def set_(context: click.Context, target: Target, /, name: str, queue: str, **settings: Any) -> None:
    """Set the policy of channel NAME. What isn't named stays as it is.

    The word "default" leads back to what the queue says for all its channels. Rights: operator.
    """
    from click.core import ParameterSource

    from fairqueue.models import Channel

    given = {
        field: value
        for field, value in settings.items()
        if context.get_parameter_source(field) is not ParameterSource.DEFAULT
    }
    if not given:
        options = ", ".join(f"--{field.replace('_', '-')}" for field in _POLICIES)
        raise click.UsageError(f"nothing to set: give at least one of {options}", context)
    policy = Channel(name, queue, **given)
    with target.session() as session:
        merged = session.merge(policy)
        session.flush()
        said = {field: getattr(merged, field) for field in _POLICIES}
        session.commit()
    words = [
        f"{field} {value:g}" if isinstance(value, float) else f"{field} {value}"
        for field, value in said.items()
        if value is not None
    ]
    echo(f"Channel {name} of queue {queue}: {', '.join(words) or 'as the queue has it'}.")


@channel.command("list")
@click.option("--queue", help="Of this queue only.")
@as_json
@pass_target
def list_(target: Target, queue: str | None, as_json: bool) -> None:
    """The channels that have a policy of their own, and what it is.

    Where there is a -, the default of the channel's queue applies. Rights: observer.
    """
    from sqlalchemy import select

    from fairqueue._checks import check_name
    from fairqueue.models import Channel

    if queue is not None:
        check_name("queue", queue)
    fields = ("queue", "name", *_POLICIES, "paused", "resume_at")
    statement = select(*(getattr(Channel, field) for field in fields)).order_by(Channel.queue, Channel.name)
    with target.session() as session:
        at = now(session)
        found = session.execute(statement if queue is None else statement.where(Channel.queue == queue)).all()
    if as_json:
        echo_json({"channels": [dict(row._mapping) for row in found]})
        return
    console = make_console()
    if not found:
        console.print("No channel has a policy of its own.")
    for name in dict.fromkeys(row.queue for row in found):
        numbers = ("weight", "concur.", "every ms", "burst", "size")
        table = make_table("channel", *numbers, "overflow", "pause", right=numbers, wide={"channel": 1})
        for row in found:
            if row.queue == name:
                values = (row.max_concurrency, row.release_interval_ms, row.burst, row.max_size)
                weight = NOTHING if row.weight is None else f"{row.weight:g}"
                limits = (NOTHING if value is None else number(value) for value in values)
                pause = "yes" if row.paused and row.resume_at is None else ""
                if row.paused and row.resume_at is not None:
                    pause = f"for {duration(row.resume_at - at)}" if row.resume_at > at else "over"
                table.add_row(printable(row.name), weight, *limits, row.overflow or NOTHING, pause)
        console.print(f"queue {printable(name)}")
        console.print(table)


@channel.command("pause", short_help="Serve nothing more of a channel or queue.")
@_name
@_queue
@_all_channels
@click.option("--until", type=Moment(), help="When it goes on by itself: 2030-01-31T09:00:00+00:00.")
@click.option("--for", "for_", type=Duration(), help="After how long it goes on by itself: 90s, 10m, 2h, 1d.")
@pass_target
def pause(
    target: Target,
    *,
    name: str | None,
    queue: str,
    all_channels: bool,
    until: datetime | None,
    for_: timedelta | None,
) -> None:
    """Serve nothing more of channel NAME, or of a queue, until it is resumed.

    What is leased goes on, and messages can be enqueued as ever. Rights: operator.
    """
    from fairqueue.policies import pause

    _check_place(name, all_channels)
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
            raise Invalid(f"{problem}; `{target.command} channel resume` ends a pause")
        session.execute(pause(queue=queue, channel=name, until=until))
        session.commit()
    echo(f"{_place(name, queue)} is paused{f' until {moment(until)}' if until else ''}.")


@channel.command("resume")
@_name
@_queue
@_all_channels
@pass_target
def resume(target: Target, name: str | None, queue: str, all_channels: bool) -> None:
    """End the pause of channel NAME, or of a queue.

    Channels that are paused by themselves stay so when their queue is resumed. Exit code 1 if it isn't paused: its name
    may be misspelt. Rights: operator.
    """
    from sqlalchemy import select

    from fairqueue.models import Channel, Queue
    from fairqueue.policies import resume

    _check_place(name, all_channels)
    statement = resume(queue=queue, channel=name)
    paused = select(Queue.paused).where(Queue.name == queue)
    if name is not None:
        paused = select(Channel.paused).where(Channel.queue == queue, Channel.name == name)
    with target.session() as session:
        if not session.scalar(paused):
            raise Failed(f"{_place(name, queue)} is not paused")
        session.execute(statement)
        session.commit()
    echo(f"{_place(name, queue)} is resumed.")


def _check_place(name: str | None, all_channels: bool) -> None:
    if (name is None) != all_channels:
        problem = "which channel? " if name is None else f"only one of {name!r} and --all-channels may be given: "
        raise click.UsageError(f"{problem}give its NAME, or --all-channels for the queue as a whole")


def _place(name: str | None, queue: str) -> str:
    return f"Queue {queue}" if name is None else f"Channel {name} of queue {queue}"
