"""What became of messages: dead letters, which can be put back, and the history of all outcomes."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, DateTime, Double, Index, Integer, PrimaryKeyConstraint, Text, text
from sqlalchemy.orm import Mapped, mapped_column

from fairqueue.payloads import BytesPayload, JSONPayload

from .base import NOW, XID8, Base

__all__ = ["DeadMessage", "History"]


class DeadMessage(Base):
    """A message that used up its attempts, with its last error. :func:`fairqueue.redrive` puts it back.

    Deleting the row forgets it for good.
    """

    __tablename__ = "dead_message"
    __table_args__ = (
        PrimaryKeyConstraint("id", name="dead_message_pkey"),
        Index("dead_message_channel", "queue", "channel", "id"),
    )

    id: Mapped[int] = mapped_column(BigInteger, autoincrement=False)
    queue: Mapped[str] = mapped_column(Text)
    channel: Mapped[str] = mapped_column(Text)
    key: Mapped[str | None] = mapped_column(Text)
    payload: Mapped[Any | None] = mapped_column(JSONPayload)
    body: Mapped[bytes | None] = mapped_column(BytesPayload)
    cost: Mapped[float] = mapped_column(Double)
    max_attempts: Mapped[int | None] = mapped_column(Integer)
    backoff: Mapped[float | None] = mapped_column(Double)
    attempt: Mapped[int] = mapped_column(Integer)
    worker: Mapped[str | None] = mapped_column(Text)
    state: Mapped[Any | None] = mapped_column(JSONPayload("state"))
    error: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    first_leased_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    died_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)


class History(Base):
    """One row an outcome: ``"completed"``, ``"dead"``, ``"cancelled"`` or ``"dropped"``. Read-only.

    Kept by day (UTC) for the longest ``history_days`` of all queues, by default 30; a message that was put back from
    the dead has one for each time it ended. To follow it as it grows, go by ``xid``, not by time: rows become visible
    in the order of commits.
    """

    __tablename__ = "history"
    __table_args__ = (
        PrimaryKeyConstraint("message_id", "finished_at", name="history_pkey"),
        Index("history_xid", "xid", "message_id"),
        Index("history_finished", "finished_at", postgresql_using="brin", postgresql_with={"autosummarize": "on"}),
        {"postgresql_partition_by": "RANGE (finished_at)"},
    )

    message_id: Mapped[int] = mapped_column(BigInteger)
    queue: Mapped[str] = mapped_column(Text)
    channel: Mapped[str] = mapped_column(Text)
    key: Mapped[str | None] = mapped_column(Text)
    outcome: Mapped[str] = mapped_column(Text)
    attempt: Mapped[int] = mapped_column(Integer)
    cost: Mapped[float] = mapped_column(Double)
    error: Mapped[str | None] = mapped_column(Text)
    worker: Mapped[str | None] = mapped_column(Text)
    dequeue_at: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    first_leased_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    leased_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    finished_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=NOW)
    xid: Mapped[int] = mapped_column(XID8, server_default=text("pg_current_xact_id()"))
