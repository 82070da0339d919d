"""Signals that mean something else for a while. Without click: the processes of the demo have it, too."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

__all__ = ["exit_by", "handled", "ignored"]


@contextmanager
def handled(handler: Callable[[int, Any], object] | signal.Handlers, *signals: signal.Signals) -> Iterator[None]:
    """Have these signals handled so in the block; afterwards as before."""
    before = {each: signal.signal(each, handler) for each in signals}
    try:
        yield
    finally:
        for each, earlier in before.items():
            signal.signal(each, earlier)


def ignored() -> AbstractContextManager[None]:
    """Ignore Ctrl-C, the end of the process and the end of its terminal, also in processes started meanwhile."""
    return handled(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def exit_by(number: int, _: object) -> NoReturn:
    """A handler: end the process with the code that shells give a signal, and leave what is open in order."""
    sys.exit(128 + number)
