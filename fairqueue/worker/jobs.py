"""What a run of a worker keeps: messages at hand, and what its tasks wait for."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio

from fairqueue.leases import LeasedMessage

from .handlers import Handled

__all__ = ["Job", "Signal"]


class Job:
    """A message that we have leased."""

    def __init__(self, message: LeasedMessage[Any], extended: float) -> None:
        self.message = message
        #: When its lease was given or extended, or a little before; by :func:`time.monotonic`.
        self.extended = extended
        #: When it began to stand by.
        self.since = extended
        #: The task of an async handler. A thread can't be stopped.
        self.task: asyncio.Task[Handled] | None = None
        #: What becomes of it is known; maybe not yet to the database.
        self.decided = False
        #: The handler has returned, and its session commits what it wrote: whether that is in time shows there.
        self.settling = False
        #: It is we who cancelled the task.
        self.given_up = False

    def settle(self) -> None:
        self.settling = True

    def give_up(self) -> None:
        if self.task is not None:
            self.given_up = True
            self.task.cancel()

    def __str__(self) -> str:
        return f"message {self.message.id} of channel {self.message.channel!r}, attempt {self.message.attempt}"


class Signal:
    """An event that can be waited for again and again, by one task."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self, seconds: float = float("inf")) -> bool:
        """Whether it came within that time; also if it came before."""
        with anyio.move_on_after(seconds):
            await self._event.wait()
        came = self._event.is_set()
        self._event = anyio.Event()
        return came
