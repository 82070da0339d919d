"""The declarative models: what applications write, beside their own.

They live in a registry of their own, so a host's base class, naming conventions and mixins don't touch them, and a
host's models may still refer to them::

    import fairqueue as fq

    class Invoice(Base):
        __tablename__ = "invoice"
        id: Mapped[int] = mapped_column(primary_key=True)
        message_id: Mapped[int | None] = mapped_column(ForeignKey(fq.Message.id, ondelete="SET NULL"), index=True)
        message: Mapped[fq.Message | None] = relationship(fq.Message)

    session.add(fq.Message(channel="acme", payload={"invoice": 7}))
    session.merge(fq.Channel(name="globex", weight=2, max_concurrency=5))

Adding many messages in one flush takes one INSERT a thousand, because :class:`Message` gives all of them the same set
of attributes. Two things break a batch up: a ``delay``, which the database has to add up, and mixing scheduled
messages with others. :func:`fairqueue.enqueue_many` takes any mixture in one statement.

``insert(fq.Message)`` and ``bulk_insert_mappings()`` take columns, so ``dequeue_at`` alone says when: SQLAlchemy leaves
out a ``delay``, ``at`` or ``priority`` there without a word, and the message is due at once.

The tables are called ``fairqueue.<name>``. For an installation in another schema run the statements with
:func:`in_schema`.

Limitations: a foreign key to a message is followed whenever one is completed, or becomes a dead letter, so its column
needs an index; and a trigger that this fires on the host's table runs with the queue's ``search_path``, so its function
has to have one of its own (``ALTER FUNCTION ... SET search_path``). Alembic's autogenerate finds such a key changed,
again and again, where the queue is in another schema than ``fairqueue``. A message is read by its worker as a
:class:`fairqueue.LeasedMessage`, a value, not as one of these entities: an entity that is refreshed after its lease ran
out would show, and let you complete, another worker's lease.
"""

from .base import XID8, Base, in_schema
from .loading import dropped, feed, load, stage
from .messages import Message, TypedMessage
from .outcomes import DeadMessage, History
from .policies import Channel, Queue
from .scheduler import lane, missed, plan, rotation, signal, tickets

__all__ = [
    "XID8",
    "Base",
    "Channel",
    "DeadMessage",
    "History",
    "Message",
    "Queue",
    "TypedMessage",
    "dropped",
    "feed",
    "in_schema",
    "lane",
    "load",
    "missed",
    "plan",
    "rotation",
    "signal",
    "stage",
    "tickets",
]
