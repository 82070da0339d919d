"""Progress while it runs: bars on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import os
import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from .load import Load
from .queues import QUEUES
from .run import Done

_EVERY = 5.0  # seconds between two lines


class Display:
    """Two bars a queue, for the noisy tenant and for the quiet ones; each stops its own clock when it is full."""

    def __init__(self, console: Console, load: Load) -> None:
        self._console = console
        self._totals = load.noisy_files, load.quiet_files
        self._begun = self._told = time.monotonic()
        self._live = console.is_terminal and not console.is_dumb_terminal and not os.environ.get("CI")
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:>6,.0f} of {task.total:,.0f} served", justify="right"),
            TextColumn("{task.fields[seconds]:>7}", justify="right"),
            console=console,
            expand=True,
            disable=not self._live,
        )
        self._tasks: dict[str, list[TaskID]] = {}
        quiet = len(load.quiet)
        for name, queue in QUEUES.items():
            first = f"[bold]{queue.label:<13}[/]  [yellow]noisy tenant[/]"
            second = f"{'':<13}  [blue]{quiet:,} quiet tenant{'s' if quiet > 1 else ''}[/]"
            self._tasks[name] = [
                self._bars.add_task(text, total=total, seconds="")
                for text, total in zip((first, second), self._totals, strict=True)
            ]

    def __enter__(self) -> Self:
        self._bars.start()
        if not self._live:
            self._console.print("Files done so far:")
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def show(self, done: Done) -> None:
        """The next figures: how many files are done."""
        now = time.monotonic()
        if not any(map(sum, done.values())):
            # The clock starts with the uploads, not with the processes that wait for them.
            self._begun = self._told = now
        seconds = f"{now - self._begun:.1f} s"
        tasks = {task.id: task for task in self._bars.tasks}
        for name, counts in done.items():
            for task, count in zip(self._tasks[name], counts, strict=True):
                if not tasks[task].finished:
                    self._bars.update(task, completed=count, seconds=seconds)
        complete = all(counts == self._totals for counts in done.values())
        if not self._live and (complete or now - self._told >= _EVERY):
            self._told = now
            self._console.print(f"{seconds:>7}  {_line(done)}", soft_wrap=True)


def _line(done: Done) -> str:
    """Short enough for 80 columns."""
    return ";  ".join(
        f"{QUEUES[name].label}: {noisy:,} noisy, {quiet:,} quiet" for name, (noisy, quiet) in done.items()
    )
