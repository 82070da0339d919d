"""Signals that tell workers, and what starts them, to stop."""

from __future__ import annotations

import signal

__all__ = ["stops"]


def stops() -> list[signal.Signals]:
    """SIGTERM, Ctrl-C, and a closed terminal, unless nohup has that ignored, or the program has it mean something."""
    hangup = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL else []
    return [signal.SIGTERM, signal.SIGINT, *hangup]
