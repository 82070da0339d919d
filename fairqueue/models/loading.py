"""The tables of bulk loads and feeds: here so that tools see the whole schema; only SQL functions write them."""

from sqlalchemy import BigInteger, Column, DateTime, Identity, Index, PrimaryKeyConstraint, Table, Text
from sqlalchemy import text as sql

from .base import NOW, XID8, Base

__all__ = ["dropped", "feed", "load", "stage"]

load = Table(
    "load",
    Base.metadata,
    Column("name", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("rows", BigInteger, nullable=False, server_default=sql("0")),
    Column("entered", BigInteger, nullable=False, server_default=sql("0")),
    Column("entered_at", DateTime(timezone=True), nullable=False, server_default=NOW),
    Column("xid", XID8, nullable=False, server_default=sql("pg_current_xact_id()")),
    PrimaryKeyConstraint("name", name="load_pkey"),
)

stage = Table(
    "stage",
    Base.metadata,
    Column("name", Text, nullable=False),
    Column("run", Text, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=NOW),
    PrimaryKeyConstraint("name", name="stage_pkey"),
    Index("stage_run", "run"),
)

feed = Table(
    "feed",
    Base.metadata,
    Column("name", Text, nullable=False),
    Column("xid", XID8, nullable=False),
    Column("message_id", BigInteger, nullable=False),
    Column("moved_at", DateTime(timezone=True), nullable=False, server_default=NOW),
    PrimaryKeyConstraint("name", name="feed_pkey"),
)

dropped = Table(
    "dropped",
    Base.metadata,
    Column("id", BigInteger, Identity(always=True), nullable=False),
    Column("xid", XID8, nullable=False),
    Column("message_id", BigInteger, nullable=False),
    Column("dropped_at", DateTime(timezone=True), nullable=False, server_default=NOW),
    PrimaryKeyConstraint("id", name="dropped_pkey"),
)
