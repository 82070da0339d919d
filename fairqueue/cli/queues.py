"""``fairqueue queue``: policies of queues, what they say for all their channels, and their pauses."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import click

from .base import Group
from .output import as_json, echo_json, make_console, printable
from .policies import (
    CHANNEL_SETTINGS,
    Place,
    Setting,
    cells,
    options_of,
    pause_cell,
    pause_options,
    pause_policy,
    policies,
    policy_table,
    resume_policy,
    set_policy,
)
from .target import Target, now, pass_target

__all__ = ["queue"]

_OWN = {
    "max_concurrency": CHANNEL_SETTINGS["max_concurrency"],
    "max_attempts": Setting(int, "attempts", "After how many failed attempts a message is a dead letter."),
    "backoff": Setting(float, "backoff s", "Seconds before the second attempt, doubled for each further one."),
    "max_backoff": Setting(float, "most s", "The most seconds between two attempts."),
    "history_days": Setting(int, "days", "For how many days outcomes are kept at least; 0: none are written."),
}
_FOR_CHANNELS = {
    f"channel_{field}": Setting(setting.kind, setting.heading, f"The {field} of channels that have none of their own.")
    for field, setting in CHANNEL_SETTINGS.items()
}
_ALL = _OWN | _FOR_CHANNELS


@click.group(cls=Group)
def queue() -> None:
    """Policies of queues, and pauses. They hold for all workers from their next dequeue on."""


@queue.command("set")
@click.argument("name")
@options_of(_ALL)
@pass_target
def set_(target: Target, /, name: str, **values: Any) -> None:
    """Set the policy of queue NAME. What isn't named stays as it is.

    The word "default" leads back to what applies to a queue without a policy; of a limit, to none. Rights: operator.
    """
    set_policy(target, Place(name), _ALL, values, if_none="all settings at their defaults")


@queue.command("list")
@as_json
@pass_target
def list_(target: Target, as_json: bool) -> None:
    """The queues that have a policy of their own, and what it is.

    Below it, what they say for all their channels. Where there is a -, there is no limit. Rights: observer.
    """
    from fairqueue.models import Queue

    with target.session() as session:
        at = now(session)
        found = session.execute(policies(Queue, _ALL)).all()
    if as_json:
        echo_json({"queues": [dict(row._mapping) for row in found]})
        return
    console = make_console()
    if not found:
        console.print("No queue has a policy of its own.")
        return
    own, for_channels = policy_table("queue", _OWN, "pause"), policy_table("channels of", _FOR_CHANNELS)
    for row in found:
        own.add_row(printable(row.name), *cells(row, _OWN), pause_cell(row, at))
        for_channels.add_row(printable(row.name), *cells(row, _FOR_CHANNELS))
    console.print(own)
    console.print()
    console.print(for_channels)


@queue.command("pause")
@click.argument("name")
@pause_options
@pass_target
def pause(target: Target, name: str, until: datetime | None, for_: timedelta | None) -> None:
    """Serve nothing more of queue NAME until it is resumed.

    What is leased goes on, and messages can be enqueued as ever. Rights: operator.
    """
    pause_policy(target, Place(name), until, for_)


@queue.command("resume")
@click.argument("name")
@pass_target
def resume(target: Target, name: str) -> None:
    """End the pause of queue NAME. Channels that are paused by themselves stay so.

    Exit code 1 if it isn't paused: its name may be misspelt. Rights: operator.
    """
    resume_policy(target, Place(name))
