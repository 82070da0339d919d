"""``fairqueue status``: what stands in the queues, once or over and over."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Self

import click
from click.exceptions import Exit

from .base import Command, ended
from .failures import Failed
from .output import as_json, duration, echo_json, make_console, make_table, moment, number, printable
from .signals import exit_by, handled
from .target import Target, check_known, pass_target

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

    from fairqueue.status import ChannelStatus, QueueStatus, Sort, Status

__all__ = ["status"]

# In seconds.
_EVERY = 2.0
_SHORTEST, _LONGEST = 0.1, 86_400
#: Where the height of the terminal doesn't say.
_CHANNELS = 20
#: What each queue takes besides its channels: a title, the heads of the columns, its sum, the rest, an empty line.
_AROUND = 5
#: A look that took long is followed by a pause so many times as long.
_PAUSE = 5


class _Seconds(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """What may stand behind --watch, where a queue is easily put."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            seconds = float(value)
        except ValueError:
            self.fail(f"must be a number of seconds, not {value!r}; name the queue before it", param, ctx)
        if not _SHORTEST <= seconds <= _LONGEST:  # nan isn't either
            self.fail(f"must be from {_SHORTEST} to {_LONGEST} seconds, not {value}", param, ctx)
        return seconds


@click.command(cls=Command, short_help="What stands in queues and channels.")
@click.argument("queue", required=False)
@click.option(
    "--watch",
    type=_Seconds(),
    is_flag=False,
    flag_value=_EVERY,
    metavar="[SECONDS]",
    help="Look again every 2 seconds, or as many as are given, until Ctrl-C. A look that takes long is followed by a"
    " pause of 5 times as long.",
)
@click.option("--limit", type=click.IntRange(min=0), help="How many channels of each queue.  [default: what fits]")
@click.option(
    "--sort",
    type=click.Choice(["ready", "oldest"]),
    default="ready",
    show_default=True,
    help="Which channels come first: those with most ready messages, or those where one has waited longest.",
)
@as_json
@pass_target
def status(
    target: Target, queue: str | None, *, watch: float | None, limit: int | None, sort: Sort, as_json: bool
) -> None:
    """What stands in all queues, or in QUEUE, and in their channels.

    \b
    ready    messages that may be served now, but for limits and pauses
    waiting  messages whose time has not come
    running  messages that are leased / how many may be
    oldest   for how long the oldest ready message has been there and due
    done/h   messages that were completed in the last hour
    dead     dead letters

    Exit code 1 if nothing is known of QUEUE. Rights: observer.
    """
    if watch is None:
        _once(target, queue, limit, sort, as_json=as_json)
    elif as_json:
        raise click.UsageError("--json prints one document: leave --watch out")
    else:
        _watch(target, queue, limit, sort, watch)


def _once(target: Target, queue: str | None, limit: int | None, sort: Sort, *, as_json: bool) -> None:
    console = make_console()
    fits = max(console.height - _AROUND, 1) if console.is_terminal else _CHANNELS
    found = _look(target, queue, fits if limit is None and not as_json else limit, sort)
    if queue is not None and not found.queues[0].channel_count:
        with target.session() as session:
            check_known(session, queue)
    if as_json:
        echo_json(_document(found))
        return
    if not found.queues:
        console.print("No queue has anything in it.")
    for place, each in enumerate(found.queues):
        if place:
            console.print()
        console.print(_render(each, found.at))


def _look(target: Target, queue: str | None, limit: int | None, sort: Sort) -> Status:
    from fairqueue.status import status

    with target.session() as session:
        return status(session, queue, limit=limit, sort=sort)


def _document(found: Status) -> dict[str, Any]:
    document = asdict(found)
    for queue in document["queues"]:
        for each in (queue, *queue["channels"]):
            each["oldest_seconds"] = each.pop("oldest")
    return document


def _watch(target: Target, queue: str | None, limit: int | None, sort: Sort, seconds: float) -> None:
    from rich.live import Live

    console = make_console()
    live = Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop")
    screen = live if _has_screen(console) else None
    try:
        # SIGTERM, so that the terminal is left as it was.
        with handled(exit_by, signal.SIGTERM), target.engine() as engine:
            steady = replace(target, place=engine)
            _repeat(lambda most: _look(steady, queue, most, sort), limit, seconds, console, screen)
    except KeyboardInterrupt:
        pass  # the way to end it
    except Exception as error:
        if not isinstance(ended(error), Exit):  # a driver has raised its error in place of that
            raise


def _has_screen(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal  # where a Live shows nothing


def _repeat(
    look: Callable[[int], Status], limit: int | None, seconds: float, console: Console, screen: Live | None
) -> None:
    from .errors import explained

    def look_now() -> Status:
        return look(console.height if limit is None else limit)

    began, problem = time.monotonic(), None
    found = look_now()  # what is wrong from the start ends it
    with screen or _Paper(console) as display:
        while True:
            pause = max(seconds, _PAUSE * (time.monotonic() - began))
            display.update(_page(found, console, limit, pause, problem), refresh=True)
            time.sleep(pause)
            began, problem = time.monotonic(), None
            try:
                found = look_now()
            except Exception as error:
                if ended(error) is not None:
                    raise
                problem = error if isinstance(error, Failed) else explained(error)
                if problem is None:
                    raise


class _Paper:
    """Where there is no terminal, or one that only goes forward: one table below the other."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, page: RenderableType, *, refresh: bool) -> None:
        self._console.print(page)
        self._console.file.flush()


def _page(found: Status, console: Console, limit: int | None, pause: float, problem: Failed | None) -> RenderableType:
    """All that fits on the screen: the queues, each with as many channels as there is room for."""
    from rich.console import Group
    from rich.text import Text

    head = f"{moment(found.at)}  every {pause:.3g} s, Ctrl-C ends"
    lines: list[RenderableType] = [Text(head, style="dim", no_wrap=True, overflow="ellipsis")]
    if problem is not None:
        lines.append(Text(printable(f"fairqueue: {problem.message}"), style="bold red"))
    room = console.height - len(lines) - (1 if problem else 0)  # such a line may take two
    shown = found.queues
    if _has_screen(console):
        shown = shown[: max(room // (_AROUND + 1), 1)]
    left_out = len(found.queues) - len(shown)
    if left_out:
        room -= 2
    for queue in shown:
        fits = max(room // len(shown) - _AROUND, 1) if limit is None and _has_screen(console) else None
        lines += [Text(), _render(queue, found.at, fits)]
    if left_out:
        lines += [Text(), Text(f"… and {number(left_out)} more queues: name one to see it")]
    if not found.queues:
        lines.append(Text("No queue has anything in it."))
    return Group(*lines)


def _render(queue: QueueStatus, at: datetime, most: int | None = None) -> RenderableType:
    """A queue and ``most`` of its channels; None: all that are there."""
    from rich.console import Group
    from rich.text import Text

    channels = queue.channels[:most]
    notes = [_notes(channel, at) for channel in channels]
    columns = ("channel", "ready", "waiting", "running", "oldest", "done/h", "dead")
    table = make_table(
        *columns,
        *(["limits"] if any(notes) else []),
        right=columns[1:],
        wide={"channel": 3, "limits": 2},
    )
    table.add_row(
        f"{number(queue.channel_count)} channel{'s' if queue.channel_count != 1 else ''}",
        *_figures(queue),
        style="bold",
    )
    for channel, note in zip(channels, notes, strict=True):
        table.add_row(printable(channel.name), *_figures(channel), *([note] if any(notes) else []))
    title = Text.assemble(("queue ", "dim"), (printable(queue.name), "bold"), no_wrap=True, overflow="ellipsis")
    if queue.paused:
        title.append(f"  {_pause(queue, at)}", "yellow")
    more = _more(queue, channels)
    return Group(title, table, *([Text(more, style="dim")] if more else []))


def _figures(each: QueueStatus | ChannelStatus) -> list[str]:
    running = number(each.running)
    if each.max_concurrency is not None:
        running += f"/{number(each.max_concurrency)}"
    return [
        number(each.ready),
        number(each.waiting),
        running,
        duration(each.oldest),
        number(each.served),
        number(each.dead),
    ]


def _notes(channel: ChannelStatus, at: datetime) -> str:
    notes = [_pause(channel, at)] if channel.paused else []
    if channel.release_interval_ms:
        notes.append(f"1 in {number(channel.release_interval_ms)} ms")
    if channel.max_size is not None:
        notes.append(f"size {number(channel.max_size)}")
    return ", ".join(notes)


def _pause(each: QueueStatus | ChannelStatus, at: datetime) -> str:
    return "paused" if each.resume_at is None else f"paused {duration(each.resume_at - at)}"


def _more(queue: QueueStatus, channels: list[ChannelStatus]) -> str:
    left = queue.channel_count - len(channels)
    if not left:
        return ""
    ready = queue.ready - sum(channel.ready for channel in channels)
    return f"… and {number(left)} more channel{'s' if left > 1 else ''}: {number(ready)} ready"
