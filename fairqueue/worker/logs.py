"""The log of workers, ``fairqueue.worker``: what its filters and handlers raise doesn't reach who logs.

They may be the application's, and a worker that ends, or a heart that stops, for a line of its log would be the worse
failure. What they raise is printed to stderr, as :mod:`logging` does with what a handler's ``emit`` raises; both say
nothing where ``logging.raiseExceptions`` is false.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from typing import Any

__all__ = ["log"]


class _Log(logging.LoggerAdapter[logging.Logger]):
    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        try:
            # Beyond this frame: a record names the line that logs.
            super().log(level, msg, *args, **{"stacklevel": 2, **kwargs})
        except Exception:  # noqa: BLE001 - whatever code of the application's raises
            if logging.raiseExceptions:
                with contextlib.suppress(OSError):
                    traceback.print_exc()


log = _Log(logging.getLogger("fairqueue.worker"))
