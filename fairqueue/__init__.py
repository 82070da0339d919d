"""A multi-tenant fair message queue inside the PostgreSQL that your application already has.

::

    import fairqueue as fq

    fq.attach(Base.metadata)                                    # create_all() and Alembic install it

    session.add(fq.Message(channel="acme", payload={"doc": 1}))  # enqueues when the session commits
    session.commit()

    batch = session.scalars(fq.dequeue(limit=10, lease=30)).all()
    session.commit()
    session.execute(fq.complete(batch))
    session.commit()

One customer's 10,000 messages don't keep another customer's one message waiting: each channel is a queue of its own,
and the channels take turns. Parts:

* :mod:`fairqueue.models`: ``Message``, ``Channel``, ``Queue``, ``History``
* :mod:`fairqueue.producing`: ``enqueue``, ``enqueue_many``, ``enqueue_copy``
* :mod:`fairqueue.consuming`: ``dequeue``, ``complete``, ``fail``, ``defer``, ``heartbeat``, ``cancel``
* :mod:`fairqueue.installation`, :mod:`fairqueue.schema`, :mod:`fairqueue.alembic`: into the database and out again
* :mod:`fairqueue.payloads`: typed payloads
* ``fairqueue/sql/head``: the queue itself, in plpgsql

Names are loaded when they are first used: Alembic imports this package in every program that uses Alembic, for the
sake of its plugin.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .consuming import LeasedMessage, Outcome, cancel, complete, defer, dequeue, fail, heartbeat
    from .errors import FairqueueError, InvalidValue, SchemaVersionError
    from .installation import attach
    from .models import Channel, History, Message, Queue, TypedMessage, in_schema
    from .producing import MessageRow, enqueue, enqueue_copy, enqueue_many
    from .schema import verify

__version__ = "0.1.0"

_HOMES = {
    "consuming": ("LeasedMessage", "Outcome", "cancel", "complete", "defer", "dequeue", "fail", "heartbeat"),
    "errors": ("FairqueueError", "InvalidValue", "SchemaVersionError"),
    "installation": ("attach",),
    "models": ("Channel", "History", "Message", "Queue", "TypedMessage", "in_schema"),
    "producing": ("MessageRow", "enqueue", "enqueue_copy", "enqueue_many"),
    "schema": ("verify",),
}

__all__ = [
    "Channel",
    "FairqueueError",
    "History",
    "InvalidValue",
    "LeasedMessage",
    "Message",
    "MessageRow",
    "Outcome",
    "Queue",
    "SchemaVersionError",
    "TypedMessage",
    "attach",
    "cancel",
    "complete",
    "defer",
    "dequeue",
    "enqueue",
    "enqueue_copy",
    "enqueue_many",
    "fail",
    "heartbeat",
    "in_schema",
    "verify",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
