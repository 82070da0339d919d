"""Processes of their own that are spoken to by a pipe, and end when that is closed because a run is over or was killed.

Their main function takes the pipe first, sends True once it has started, and answers what it is sent; by a str, if it
is an error. `answer` is most of that.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

#: Children of ours would share our connections. These are those of a process that has imported what they need, once.
_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["benchmarks.consumers", "benchmarks.workers"])
#: Seconds in which an answer has to come; nothing that is measured takes as long.
_PATIENCE = 300.0


class ProcessFailed(Exception):
    """A process met an error, is gone, or doesn't answer."""


def answer(pipe: Connection, act: Callable[[Any], Any], whose: Callable[[Any], str]) -> None:
    """Answer each order by what `act` makes of it, until the pipe is closed. Of an error, say whose it is."""
    with contextlib.suppress(EOFError, ConnectionError, KeyboardInterrupt):
        pipe.send(True)
        while True:
            order = pipe.recv()
            try:
                pipe.send(act(order))
            except Exception as error:  # noqa: BLE001  # of any package
                pipe.send(f"{whose(order)}: {type(error).__name__}: {error}")


class Child:
    """One process. It is there at once; the first `receive` waits until it has started."""

    def __init__(self, main: Callable[..., None], *args: Any) -> None:
        self._pipe, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=main, args=(theirs, *args), daemon=True)
        # Inherited: Ctrl-C is for us, and we end it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()

    def send(self, order: Any) -> None:
        try:
            self._pipe.send(order)
        except (BrokenPipeError, ConnectionError) as error:
            raise self._gone() from error

    def receive(self) -> Any:
        try:
            if not self._pipe.poll(_PATIENCE):
                raise ProcessFailed(f"{self._process.name} has not answered for {_PATIENCE:g} s")
            answer = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise self._gone() from error
        if isinstance(answer, str):
            raise ProcessFailed(answer)
        return answer

    def close(self) -> None:
        """Say that it is over."""
        self._pipe.close()

    def end(self) -> None:
        """Wait a second for it to end, then kill it: its transaction is rolled back."""
        self.close()
        self._process.join(1)
        self._process.kill()
        self._process.join()

    def _gone(self) -> ProcessFailed:
        self._process.join(60)  # who has closed the pipe is about to end, however busy the machine
        return ProcessFailed(f"{self._process.name} is gone, exit code {self._process.exitcode}")
