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
* :mod:`fairqueue.enqueue`: ``enqueue``, ``enqueue_many``, ``enqueue_copy``
* :mod:`fairqueue.leases`: ``dequeue``, ``complete``, ``fail``, ``defer``, ``heartbeat``, ``cancel``
* :mod:`fairqueue.attach`, :mod:`fairqueue.schema`, :mod:`fairqueue.alembic`: into the database and out again
* :mod:`fairqueue.payloads`: typed payloads
* ``fairqueue/sql/head``: the queue itself, in plpgsql
"""

from .attach import attach
from .enqueue import MessageRow, enqueue, enqueue_copy, enqueue_many
from .errors import FairqueueError, InvalidValue, SchemaVersionError
from .leases import LeasedMessage, Outcome, cancel, complete, defer, dequeue, fail, heartbeat
from .models import Channel, History, Message, Queue, TypedMessage, in_schema
from .schema import verify

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

__version__ = "0.1.0"
