"""The data pipeline: in exactly once, out exactly once, and what the tenants got. Needs ``fairqueue[spark]``."""

from typing import TYPE_CHECKING

from fairqueue._lazy import lazily

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
    "archiving": ["archive"],
    "engine.reading": ["snapshot"],
    "enqueueing": ["enqueue"],
    "reporting": ["report"],
    "session": ["local_session"],
    "simulation": ["simulate"],
    "source": ["FairQueueDataSource"],
}

__all__ = ["FairQueueDataSource", "archive", "enqueue", "local_session", "report", "simulate", "snapshot"]


if not TYPE_CHECKING:  # a name that isn't there is an error to type checkers, too
    __getattr__, __dir__ = lazily(__name__, _HOMES)
