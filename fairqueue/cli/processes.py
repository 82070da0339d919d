"""Several processes that do the same: started, replaced when they die, stopped together.

They are started anew, not forked, so nothing that one opens is another's. Each is in a session of its own: Ctrl-C is
for the parent, which hands it on. The parent holds the other end of each one's stdin; so when it is gone, however it
went, they learn it, and stop as if told to.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue

from fairqueue._backoff import backoff
from fairqueue._signals import stops

from .signals import handled

__all__ = ["end_with_parent", "supervise"]

log = logging.getLogger("fairqueue.cli")

_USAGE = 2
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
#: One that has lived for so many seconds had no trouble to start.
_SETTLED = 60.0


def supervise(command: Sequence[str], processes: int) -> int:
    """Keep so many processes of ``command`` running until it is to stop; returns the worst of their last codes.

    However one ends, it is replaced: with 0, too, as when somebody has told it alone to stop. Only where the command
    line is wrong (2) from the first no other one is started.
    """
    slots = [_Slot(command) for _ in range(processes)]

    def stop(number: int, _: object) -> None:
        for slot in slots:
            slot.stop(again=number != signal.SIGHUP)  # of which a closed terminal sends two by itself

    with handled(stop, *stops()):
        for slot in slots:
            slot.thread.start()
        for slot in slots:
            slot.thread.join()
    return max(slot.code for slot in slots)


class _Slot:
    """The place of one process, and of those that replace it."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = command
        self.code = 0
        self.thread = threading.Thread(target=self._run)
        self._stopping = False
        # Ends a pause. Not an Event: a second signal, which may come in the middle of a set(), would wait for its lock.
        self._stopped: SimpleQueue[None] = SimpleQueue()
        # Of the process: between the decision to start one and the moment when it can be told to stop. Reentrant as
        # a signal may come at any time, also while one is being handled.
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None

    def stop(self, *, again: bool = True) -> None:
        """Tell it to stop, and start no other; if ``again``, also a second time: not to wait for its handlers."""
        if self._stopping and not again:
            return
        self._stopping = True
        self._stopped.put(None)
        with self._lock:
            if self._process is not None:
                self._process.terminate()

    def _run(self) -> None:
        troubles, has_settled = 0, False
        while True:
            began = time.monotonic()
            try:
                process = self._start()
            except OSError as error:  # there may be room for it later
                self.code = 1
                what = f"could not be started: {error}"
            else:
                if process is None:
                    return
                code = process.wait()
                assert process.stdin is not None
                process.stdin.close()
                # Killed by our signal before it could heed it: it had nothing in hand.
                stopped = self._stopping and code == -signal.SIGTERM
                self.code = 0 if stopped else code if code >= 0 else 128 - code
                if self._stopping:
                    return
                what = f"{process.pid} {_words(code)}"
            settled = time.monotonic() - began > _SETTLED
            troubles = 0 if settled else troubles + 1
            has_settled = has_settled or settled
            # One that has worked will do so again: its module is just being replaced, say.
            if self.code == _USAGE and not has_settled:
                log.warning("worker process %s: the command line is wrong, so no other one is started", what)
                return
            pause = _pause(troubles)
            log.warning("worker process %s; another one in %.1f s", what, pause)
            with suppress(Empty):
                self._stopped.get(timeout=pause)

    def _start(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._stopping:
                return None
            self._process = subprocess.Popen(self.command, stdin=subprocess.PIPE, start_new_session=True)
            return self._process


def _pause(troubles: int) -> float:
    return backoff(troubles, _FIRST_PAUSE, _LONGEST_PAUSE)


def _words(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # most real-time signals have no name
        return f"was killed by signal {-code}"


def end_with_parent() -> None:
    """In a process of :func:`supervise`: stop when the parent is gone."""
    pipe = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # so that nobody else reads it, nor inherits it
    os.close(nothing)

    def watch() -> None:
        while os.read(pipe, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
