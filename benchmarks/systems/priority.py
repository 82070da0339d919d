"""LonnyMQ's chapter on priority: a column, and four ways to index it. Leases are added as its later chapter has them.

All messages here have the same priority, but for those that are put in the way: enqueued for later and urgent.
"""

from __future__ import annotations

from .fifo import FIFO, TO_EPOCH, dequeues

_TABLE = """
    CREATE TABLE message (
        id bigserial PRIMARY KEY,
        channel text NOT NULL,
        content jsonb NOT NULL,
        dequeue_at bigint NOT NULL,
        priority integer NOT NULL,
        is_ready boolean NOT NULL DEFAULT false,
        num_attempts integer NOT NULL DEFAULT 0,
        unlock_at bigint
    );
    CREATE INDEX message_locked_dequeue_ix ON message (unlock_at) WHERE unlock_at IS NOT NULL;
"""


def _tables(indexes: str, ready: str = "m.dequeue_at <= v_now", mark: str = "") -> str:
    return TO_EPOCH + _TABLE + indexes + dequeues("m.priority, m.dequeue_at, m.id", ready, mark)


class Priority(FIFO):
    name = "priority"
    about = "LonnyMQ's priority column, its best index: (priority, dequeue_at, id)"

    tables = _tables("CREATE INDEX message_dequeue_ix ON message (priority, dequeue_at, id) WHERE unlock_at IS NULL;")
    enqueue_sql = """
        INSERT INTO message (channel, content, dequeue_at, priority)
        VALUES (%(channel)s, %(payload)s::jsonb, to_epoch(now()), 0)
    """
    # What is for later is urgent, and of many priorities: the case that the chapter warns of.
    fill_sql = """
        INSERT INTO message (channel, content, dequeue_at, priority)
        SELECT %(prefix)s || i %% %(channels)s, %(payload)s::jsonb, to_epoch(now()) + %(delay_ms)s,
            CASE WHEN %(delay_ms)s > 0 THEN -1 - i %% %(channels)s ELSE 0 END
        FROM generate_series(%(start)s::bigint, %(start)s::bigint + %(messages)s - 1) i
    """


class PriorityTwoIndexes(Priority):
    name = "priority-two-indexes"
    about = "LonnyMQ's priority column with separate indexes on dequeue_at and on (priority, dequeue_at, id)"

    tables = _tables(
        "CREATE INDEX message_dequeue_at_ix ON message (dequeue_at) WHERE unlock_at IS NULL;"
        "CREATE INDEX message_priority_ix ON message (priority, dequeue_at, id) WHERE unlock_at IS NULL;"
    )


class PriorityAfterTime(Priority):
    name = "priority-after-time"
    about = "LonnyMQ's priority column with the index (dequeue_at, priority, id)"

    tables = _tables("CREATE INDEX message_dequeue_ix ON message (dequeue_at, priority, id) WHERE unlock_at IS NULL;")


class Marked(Priority):
    name = "marked"
    about = "LonnyMQ's explicit marking: is_ready, here set by each dequeue for what has become ready since"

    tables = _tables(
        "CREATE INDEX message_mark_ix ON message (dequeue_at) WHERE NOT is_ready;"
        "CREATE INDEX message_dequeue_ix ON message (priority, dequeue_at, id) WHERE is_ready AND unlock_at IS NULL;",
        ready="m.is_ready",
        mark="""UPDATE message m SET is_ready = true WHERE m.id IN (
                SELECT n.id FROM message n WHERE NOT n.is_ready AND n.dequeue_at <= v_now
                ORDER BY n.dequeue_at LIMIT 1000 FOR UPDATE SKIP LOCKED);""",
    )
