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

* :mod:`fairqueue.models`: ``Message``, ``Channel``, ``Queue``, ``DeadMessage``, ``History``
* :mod:`fairqueue.producing`: ``enqueue``, ``enqueue_many``, ``enqueue_copy``, ``enqueue_unique``
* :mod:`fairqueue.worker`: ``Worker``, which does this for you, and ``Retry``, ``Defer``, ``Cancel``, ``DeadLetter``
* :mod:`fairqueue.consuming`: ``dequeue``, ``complete``, ``fail``, ``defer``, ``heartbeat``, ``cancel``, ``redrive``
* :mod:`fairqueue.checking`: ``check``; :mod:`fairqueue.status`: what stands in queues and channels
* :mod:`fairqueue.waiting`: ``wait_for``, ``ending``
* :mod:`fairqueue.installation`, :mod:`fairqueue.schema`, :mod:`fairqueue.alembic`: into the database and out again
* :mod:`fairqueue.policies`: ``pause``, ``resume``
* :mod:`fairqueue.roles`: who may do what in the database
* :mod:`fairqueue.payloads`: typed payloads
* :mod:`fairqueue.cli`, :mod:`fairqueue.flask`, :mod:`fairqueue.fastapi`, :mod:`fairqueue.testing`: for the command
  line, the web, and your tests
* :mod:`fairqueue.spark`: the data pipeline
* :mod:`fairqueue.embedded`, :mod:`fairqueue.demo`: a PostgreSQL for development and tests, and the demo
* ``fairqueue/sql/head``: the queue itself, in plpgsql

Names are loaded when they are first used: Alembic imports this package in every program that uses Alembic, for the
sake of its plugin.
"""

from typing import TYPE_CHECKING

from ._lazy import lazily

if TYPE_CHECKING:
    from .checking import Difference, check
    from .consuming import LeasedMessage, Outcome, cancel, complete, defer, dequeue, fail, heartbeat, redrive
    from .errors import (
        ChannelFull,
        DuplicateKey,
        FairqueueError,
        InvalidValue,
        SchemaVersionError,
        WaitTimeout,
        translate_errors,
    )
    from .installation import attach
    from .models import Channel, DeadMessage, History, Message, Queue, TypedMessage, in_schema
    from .policies import pause, resume
    from .producing import MessageRow, enqueue, enqueue_copy, enqueue_many, enqueue_unique
    from .schema import verify
    from .waiting import Ending, ending, wait_for
    from .worker import Cancel, DeadLetter, Defer, Retry, Worker

__version__ = "0.1.0"

_HOMES = {
    "checking": ("Difference", "check"),
    "consuming": ("LeasedMessage", "Outcome", "cancel", "complete", "defer", "dequeue", "fail", "heartbeat", "redrive"),
    "errors": (
        *("ChannelFull", "DuplicateKey", "FairqueueError", "InvalidValue", "SchemaVersionError", "WaitTimeout"),
        "translate_errors",
    ),
    "installation": ("attach",),
    "models": ("Channel", "DeadMessage", "History", "Message", "Queue", "TypedMessage", "in_schema"),
    "policies": ("pause", "resume"),
    "producing": ("MessageRow", "enqueue", "enqueue_copy", "enqueue_many", "enqueue_unique"),
    "schema": ("verify",),
    "waiting": ("Ending", "ending", "wait_for"),
    "worker": ("Cancel", "DeadLetter", "Defer", "Retry", "Worker"),
}

__all__ = [
    "Cancel",
    "Channel",
    "ChannelFull",
    "DeadLetter",
    "DeadMessage",
    "Defer",
    "Difference",
    "DuplicateKey",
    "Ending",
    "FairqueueError",
    "History",
    "InvalidValue",
    "LeasedMessage",
    "Message",
    "MessageRow",
    "Outcome",
    "Queue",
    "Retry",
    "SchemaVersionError",
    "TypedMessage",
    "WaitTimeout",
    "Worker",
    "attach",
    "cancel",
    "check",
    "complete",
    "defer",
    "dequeue",
    "ending",
    "enqueue",
    "enqueue_copy",
    "enqueue_many",
    "enqueue_unique",
    "fail",
    "heartbeat",
    "in_schema",
    "pause",
    "redrive",
    "resume",
    "translate_errors",
    "verify",
    "wait_for",
]


if not TYPE_CHECKING:  # a name that isn't there is an error to type checkers, too
    __getattr__, __dir__ = lazily(__name__, _HOMES)
