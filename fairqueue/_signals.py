"""Signals that tell workers, and what starts them, to stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["given_back", "stops"]


def stops() -> list[signal.Signals]:
    """SIGTERM, Ctrl-C, and a closed terminal, unless nohup has that ignored, or the program has it mean something."""
    hangup = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL else []
    return [signal.SIGTERM, signal.SIGINT, *hangup]


@contextmanager
def given_back() -> Iterator[None]:
    """After the block they mean to the program what they did before: an event loop leaves what they do by default."""
    before = {number: signal.getsignal(number) for number in stops()}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # it isn't Python's
                signal.signal(number, handler)
