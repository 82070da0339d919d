"""Two published queues in the order of arrival. Leases and fences are added where the text has none."""

from __future__ import annotations

from .base import SQLSystem

#: Milliseconds as LonnyMQ's later chapters have them; its first draft counted the seconds twice.
TO_EPOCH = """
    CREATE FUNCTION to_epoch(p_timestamp timestamptz) RETURNS bigint AS $$
    BEGIN
        RETURN floor(extract(epoch FROM p_timestamp) * 1000)::bigint;
    END
    $$ LANGUAGE plpgsql;
"""


_DEQUEUE = """
    CREATE FUNCTION message_dequeue(p_lock_ms bigint) RETURNS SETOF message AS $$
    DECLARE
        v_now bigint := to_epoch(now());
        v_id bigint;
    BEGIN
        SELECT m.id FROM message m WHERE m.unlock_at <= v_now
        ORDER BY m.unlock_at LIMIT 1 FOR UPDATE SKIP LOCKED INTO v_id;
        IF v_id IS NULL THEN
            {mark}
            SELECT m.id FROM message m WHERE {ready} AND m.unlock_at IS NULL
            ORDER BY {order} LIMIT 1 FOR UPDATE SKIP LOCKED INTO v_id;
        END IF;
        RETURN QUERY UPDATE message m SET unlock_at = v_now + p_lock_ms, num_attempts = m.num_attempts + 1
        WHERE m.id = v_id RETURNING m.*;
    END
    $$ LANGUAGE plpgsql;
"""


def dequeues(order: str, ready: str = "m.dequeue_at <= v_now", mark: str = "") -> str:
    """The function that serves what is first in this order, of what is ready; what ran out goes before."""
    return _DEQUEUE.replace("{order}", order).replace("{ready}", ready).replace("{mark}", mark)


class FIFO(SQLSystem):
    name = "fifo"
    about = "LonnyMQ's first queue: (dequeue_at, id), SKIP LOCKED, one message a call; leases as in its later chapter"
    batches = False

    tables = (
        TO_EPOCH
        + """
        CREATE TABLE message (
            id bigserial PRIMARY KEY,
            channel text NOT NULL,
            content jsonb NOT NULL,
            dequeue_at bigint NOT NULL,
            num_attempts integer NOT NULL DEFAULT 0,
            unlock_at bigint
        );
        CREATE INDEX message_dequeue_ix ON message (dequeue_at, id) WHERE unlock_at IS NULL;
        CREATE INDEX message_locked_dequeue_ix ON message (unlock_at) WHERE unlock_at IS NOT NULL;

        CREATE FUNCTION message_create(p_channel text, p_content jsonb) RETURNS void AS $$
        BEGIN
            INSERT INTO message (channel, content, dequeue_at) VALUES (p_channel, p_content, to_epoch(now()));
        END
        $$ LANGUAGE plpgsql;
    """
        + dequeues("m.dequeue_at, m.id")
    )
    enqueue_sql = "SELECT message_create(%(channel)s, %(payload)s::jsonb)"
    fill_sql = """
        INSERT INTO message (channel, content, dequeue_at)
        SELECT %(prefix)s || i %% %(channels)s, %(payload)s::jsonb, to_epoch(now()) + %(delay_ms)s
        FROM generate_series(%(start)s::bigint, %(start)s::bigint + %(messages)s - 1) i
    """
    dequeue_sql = (
        "SELECT id, num_attempts, channel, content{at}"
        " FROM message_dequeue((%(lease)s::double precision * 1000)::bigint)"
    )
    complete_sql = "DELETE FROM message WHERE id = %(id)s AND num_attempts = %(attempt)s RETURNING id"
    backlog_sql = "SELECT count(*) FROM message"


class StalledWorkers(SQLSystem):
    name = "stalled-workers"
    about = "'Queues in Postgres' (pkgsite): started_at, stalled workers by time, one message a call"
    batches = False
    schedules = False

    # The fence is added; the lease is the variant with leased_until.
    tables = """
        CREATE TABLE queue_tasks (
            id bigserial PRIMARY KEY,
            task_name text UNIQUE NOT NULL DEFAULT gen_random_uuid()::text,
            channel text NOT NULL,
            payload jsonb NOT NULL,
            created_at timestamptz NOT NULL DEFAULT now(),
            started_at timestamptz,
            leased_until timestamptz,
            attempt integer NOT NULL DEFAULT 0
        );
        CREATE INDEX idx_queue_tasks_started_created ON queue_tasks (started_at, created_at);
    """
    enqueue_sql = """
        INSERT INTO queue_tasks (channel, payload, created_at)
        VALUES (%(channel)s, %(payload)s::jsonb, clock_timestamp()) ON CONFLICT (task_name) DO NOTHING
    """
    fill_sql = """
        INSERT INTO queue_tasks (channel, payload, created_at)
        SELECT %(prefix)s || i %% %(channels)s, %(payload)s::jsonb, clock_timestamp()
        FROM generate_series(%(start)s::bigint, %(start)s::bigint + %(messages)s - 1) i
        WHERE %(delay_ms)s = 0
    """
    dequeue_sql = """
        WITH next_task AS (
            SELECT id FROM queue_tasks
            WHERE started_at IS NULL OR leased_until < now()
            ORDER BY created_at ASC
            LIMIT 1
            FOR UPDATE SKIP LOCKED
        )
        UPDATE queue_tasks
        SET started_at = now(), leased_until = now() + make_interval(secs => %(lease)s::double precision),
            attempt = attempt + 1
        WHERE id = (SELECT id FROM next_task)
        RETURNING id, attempt, channel, payload{at}
    """
    complete_sql = "DELETE FROM queue_tasks WHERE id = %(id)s AND attempt = %(attempt)s RETURNING id"
    backlog_sql = "SELECT count(*) FROM queue_tasks"
