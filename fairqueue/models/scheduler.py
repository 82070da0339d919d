"""The scheduler's own tables: described here so that tools see the whole schema, written by the SQL functions only."""

from sqlalchemy import BigInteger, Boolean, Column, DateTime, Double, Index, Integer, PrimaryKeyConstraint, Table, Text
from sqlalchemy import text as sql
from sqlalchemy.dialects.postgresql import ARRAY, REGCLASS

from .base import TID, XID8, Base

__all__ = ["lane", "missed", "plan", "rotation", "signal", "tickets"]

signal = Table(
    "signal",
    Base.metadata,
    Column("queue", Text, nullable=False),
    Column("channel", Text),
    Column("dequeue_at", BigInteger),
    Column("message_id", BigInteger),
    Column("counted", BigInteger),
    Column("urgent", Boolean, nullable=False),
    Column("xid", XID8, nullable=False, server_default=sql("pg_current_xact_id()")),
    Index("signal_news", "queue", "urgent", "xid"),
)

lane = Table(
    "lane",
    Base.metadata,
    Column("queue", Text, nullable=False),
    Column("channel", Text, nullable=False),
    Column("due", BigInteger),
    Column("tag", BigInteger, nullable=False, autoincrement=False),
    Column("since", BigInteger, nullable=False),
    Column("head_at", BigInteger, nullable=False),
    Column("head_id", BigInteger, nullable=False),
    Column("weight", Double, nullable=False),
    Column("max_concurrency", Integer),
    Column("release_interval", BigInteger, nullable=False),
    Column("burst", Integer, nullable=False),
    Column("paused_until", BigInteger),
    Column("running", Integer, nullable=False),
    Column("counted_from", BigInteger, nullable=False),
    Column("released_at", BigInteger, nullable=False),
    Column("planned", BigInteger, nullable=False),
    Column("gap_at", Double, nullable=False, server_default=sql("0")),
    Column("gap_id", Double, nullable=False, server_default=sql("0")),
    PrimaryKeyConstraint("queue", "channel", "tag", name="lane_pkey"),
    Index("lane_ready", "queue", "tag", "since", postgresql_where=sql("due = 0")),
    Index("lane_waiting", "queue", "due", postgresql_where=sql("due > 0")),
    Index("lane_idle", "queue", "tag", postgresql_where=sql("due IS NULL")),
)

rotation = Table(
    "rotation",
    Base.metadata,
    Column("queue", Text, nullable=False),
    Column("turn", BigInteger, nullable=False),
    Column("era", BigInteger, nullable=False, autoincrement=False),
    Column("vtime", BigInteger, nullable=False),
    Column("vsince", BigInteger, nullable=False),
    Column("activations", BigInteger, nullable=False),
    Column("news_from", XID8, nullable=False),
    Column("news_open", ARRAY(XID8), nullable=False),
    Column("urgent_from", XID8, nullable=False),
    Column("urgent_open", ARRAY(XID8), nullable=False),
    Column("lease_floor", DateTime(timezone=True), nullable=False),
    Column("due_floor", BigInteger, nullable=False),
    Column("idle_floor", BigInteger, nullable=False),
    Column("swept", Text, nullable=False),
    Column("max_concurrency", Integer),
    Column("paused_until", BigInteger),
    Column("running", Integer, nullable=False),
    Column("counted_from", BigInteger, nullable=False),
    Column("clock", BigInteger, nullable=False),
    Column("maintain_at", BigInteger, nullable=False),
    Column("place", BigInteger, nullable=False),
    Column("planned", BigInteger, nullable=False),
    Column("ahead", Integer, nullable=False),
    Column("plan_at", Integer, nullable=False),
    Column("lane_tag", BigInteger),
    Column("lane_since", BigInteger),
    Column("held_from", DateTime(timezone=True), nullable=False, server_default=sql("'infinity'")),
    Column("held_since", DateTime(timezone=True), nullable=False, server_default=sql("'infinity'")),
    Column("held_at", DateTime(timezone=True), nullable=False, server_default=sql("'infinity'")),
    Column("arrival_tag", BigInteger, nullable=False, server_default=sql("0")),
    Column("rebuilt", Text),
    Column("tickets", REGCLASS),
    Column("ticket_base", BigInteger, nullable=False, server_default=sql("0")),
    PrimaryKeyConstraint("queue", "era", name="rotation_pkey"),
)

plan = Table(
    "plan",
    Base.metadata,
    Column("queue", Text, nullable=False),
    Column("place", BigInteger, nullable=False, autoincrement=False),
    Column("rows", ARRAY(TID), nullable=False),
    Column("ids", ARRAY(BigInteger), nullable=False),
    Column("attempts", ARRAY(Integer), nullable=False),
    Column("tags", ARRAY(BigInteger), nullable=False),
    Column("sinces", ARRAY(BigInteger), nullable=False),
    Column("channels", ARRAY(Text), nullable=False),
    PrimaryKeyConstraint("queue", "place", name="plan_pkey"),
)

missed = Table(
    "missed",
    Base.metadata,
    Column("queue", Text, nullable=False),
    Column("turn", BigInteger, nullable=False, autoincrement=False),
    Column("place", BigInteger, nullable=False, autoincrement=False),
    PrimaryKeyConstraint("queue", "turn", "place", name="missed_pkey"),
)

tickets = Table(
    "tickets",
    Base.metadata,
    Column("number", Integer, nullable=False, autoincrement=False),
    Column("queue", Text, nullable=False),
    PrimaryKeyConstraint("number", name="tickets_pkey"),
)
