"""What would end the demo, held off where that would leave things behind."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

__all__ = ["ignored"]


@contextlib.contextmanager
def ignored() -> Iterator[None]:
    """Ignore Ctrl-C, the end of the process and the end of its terminal, also in processes started meanwhile."""
    before = {each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
