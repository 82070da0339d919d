"""``fairqueue channel``: policies of channels, and their pauses."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import click

from .base import Group
from .output import as_json, echo_json, make_console, printable
from .policies import (
    CHANNEL_SETTINGS,
    Place,
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

__all__ = ["channel"]

_queue = click.option("--queue", default="default", show_default=True, help="The queue that the channel is in.")


@click.group(cls=Group)
def channel() -> None:
    """Policies of channels, and pauses. They hold for all workers from their next dequeue on."""


@channel.command("set")
@click.argument("name")
@_queue
@options_of(CHANNEL_SETTINGS)
@pass_target
def set_(target: Target, /, name: str, queue: str, **values: Any) -> None:
    """Set the policy of channel NAME. What isn't named stays as it is.

    The word "default" leads back to what the queue says for all its channels. Rights: operator.
    """
    set_policy(target, Place(queue, name), CHANNEL_SETTINGS, values, if_none="as the queue has it")


@channel.command("list")
@click.option("--queue", help="Of this queue only.")
@as_json
@pass_target
def list_(target: Target, queue: str | None, as_json: bool) -> None:
    """The channels that have a policy of their own, and what it is.

    Where there is a -, the default of the channel's queue applies. Rights: observer.
    """
    from fairqueue._checks import check_name
    from fairqueue.models import Channel

    if queue is not None:
        check_name("queue", queue)
    statement = policies(Channel, CHANNEL_SETTINGS)
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
        table = policy_table("channel", CHANNEL_SETTINGS, "pause")
        for row in found:
            if row.queue == name:
                table.add_row(printable(row.name), *cells(row, CHANNEL_SETTINGS), pause_cell(row, at))
        console.print(f"queue {printable(name)}")
        console.print(table)


@channel.command("pause")
@click.argument("name")
@_queue
@pause_options
@pass_target
def pause(target: Target, name: str, queue: str, until: datetime | None, for_: timedelta | None) -> None:
    """Serve nothing more of channel NAME until it is resumed.

    What is leased goes on, and messages can be enqueued as ever. Rights: operator.
    """
    pause_policy(target, Place(queue, name), until, for_)


@channel.command("resume")
@click.argument("name")
@_queue
@pass_target
def resume(target: Target, name: str, queue: str) -> None:
    """End the pause of channel NAME. That of its queue goes on.

    Exit code 1 if it isn't paused: its name may be misspelt. Rights: operator.
    """
    resume_policy(target, Place(queue, name))
