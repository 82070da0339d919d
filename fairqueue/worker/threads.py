"""Threads for plain functions, called from an event loop.

Not asyncio's or anyio's own: those keep the program from ending until every call has returned, and a handler may hang
for ever. These are daemon threads, as many as are needed at a time, used again while they are idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from .logs import log

__all__ = ["Threads"]

T = TypeVar("T")
_Call = tuple[contextvars.Context, Callable[[], Any], "asyncio.Future[Any]"]


class Threads:
    """Daemon threads of one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._threads = 0
        #: How many of them have nothing to do; less than 0: how many calls wait.
        self._free = 0
        self._is_short = False

    async def run(self, function: Callable[[], T]) -> T:
        """The function's result. If the caller is cancelled, the function goes on by itself."""
        future: asyncio.Future[T] = self._loop.create_future()
        if self._free > 0 or not self._start():
            self._free -= 1
        context = contextvars.copy_context()
        if sniffio := sys.modules.get("sniffio"):
            # There is no event loop in the thread: whoever wants one there, such as anyio.run(), must not think so.
            context.run(sniffio.current_async_library_cvar.set, None)
        self._calls.put((context, function, future))
        return await future

    def _start(self) -> bool:
        """Another thread; False if the system has no more: then the call waits for one of those that there are."""
        thread = threading.Thread(target=self._work, name=f"fairqueue-{self._threads + 1}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if self._threads == 0:
                raise
            if not self._is_short:
                self._is_short = True
                log.warning("%s, so handlers and statements wait for one of %d threads", error, self._threads)
            return False
        self._threads += 1
        return True

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call the function in the event loop, from whatever thread; not if the loop has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """Let idle threads go, now, and the others when they have finished."""
        for _ in range(self._threads):
            self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            context, function, future = call
            try:
                done = (future.set_result, context.run(function))
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is the caller's
                done = (future.set_exception, error)
            self.call_soon(partial(self._hand_over, future, *done))
            del call, context, function, future, done

    def _hand_over(self, future: asyncio.Future[Any], setter: Callable[[Any], None], result: Any) -> None:
        self._free += 1
        if not future.cancelled():
            setter(result)
