"""The columns that Spark sees, as its own DDL, in the order of the tables; and what a report is made of.

Times are timestamps (``timestamp_ltz``, as what a ``timestamp`` is depends on ``spark.sql.timestampType``), but for
``dequeue_at``, which is Unix milliseconds as everywhere in fairqueue. A transaction id (``xid``) is a long.
"""

from __future__ import annotations

__all__ = ["HISTORY", "MESSAGES", "REPORT"]

#: ``table=history``: one row an outcome.
HISTORY = """
    message_id bigint, queue string, channel string, key string, outcome string, attempt int, cost double,
    error string, worker string, dequeue_at bigint, created_at timestamp_ltz, first_leased_at timestamp_ltz,
    leased_at timestamp_ltz, finished_at timestamp_ltz, xid bigint
"""

#: ``table=messages``: one row a live message. ``payload`` is JSON.
MESSAGES = """
    id bigint, queue string, channel string, key string, payload string, body binary, dequeue_at bigint, cost double,
    max_attempts int, backoff double, attempt int, leased_until timestamp_ltz, first_leased_at timestamp_ltz,
    leased_at timestamp_ltz, worker string, state string, error string, created_at timestamp_ltz
"""

#: The folders of a report, each with Parquet.
REPORT = ("channel_windows", "channels", "queue_windows", "queues")
