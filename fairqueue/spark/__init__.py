"""The data pipeline: in exactly once, out exactly once, and what the tenants got. Needs ``fairqueue[spark]``."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .archiving import archive
    from .engine.reading import snapshot
    from .enqueueing import enqueue
    from .reporting import report
    from .session import local_session
    from .simulation import simulate
    from .source import FairQueueDataSource

# Names are loaded when they are first used: the engine needs no PySpark.
_HOMES = {
    "FairQueueDataSource": "source",
    "archive": "archiving",
    "enqueue": "enqueueing",
    "local_session": "session",
    "report": "reporting",
    "simulate": "simulation",
    "snapshot": "engine.reading",
}

__all__ = ["FairQueueDataSource", "archive", "enqueue", "local_session", "report", "simulate", "snapshot"]


if not TYPE_CHECKING:  # a name that isn't there is an error to type checkers, too

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
            return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
