"""Hatchet's first attempt (2024): row_number() OVER (PARTITION BY group) at each read. Leases are added."""

from __future__ import annotations

from .base import SQLSystem

TASKS = """
    CREATE TYPE task_status AS ENUM ('QUEUED', 'RUNNING', 'SUCCEEDED', 'FAILED', 'CANCELLED');
    CREATE TABLE tasks (
        id {id} PRIMARY KEY,
        created_at timestamp NOT NULL DEFAULT now(),
        status task_status NOT NULL,
        args jsonb,
        group_key text,
        attempt integer NOT NULL DEFAULT 0,
        leased_until timestamptz
    );
    CREATE INDEX tasks_leased ON tasks (leased_until) WHERE status = 'RUNNING';
"""
#: Finished tasks stay: they are the history, as published.
COMPLETE = """
    UPDATE tasks t SET status = 'SUCCEEDED'
    FROM unnest(%(ids)s::bigint[], %(attempts)s::integer[]) AS l (id, attempt)
    WHERE t.id = l.id AND t.attempt = l.attempt AND t.status = 'RUNNING'
    RETURNING t.id
"""
BACKLOG = "SELECT count(*) FROM tasks WHERE status IN ('QUEUED', 'RUNNING')"


class PartitionBy(SQLSystem):
    name = "partition-by"
    about = (
        "Hatchet's first attempt ('An unfair advantage: multi-tenant queues in Postgres', 2024):"
        " row_number() OVER (PARTITION BY group_key) at each read, then SKIP LOCKED; leases added"
    )
    fair = True
    schedules = False

    tables = TASKS.replace("{id}", "bigserial") + (
        """
        CREATE FUNCTION pop_tasks(p_limit integer, p_lease double precision) RETURNS SETOF tasks AS $$
        BEGIN
            UPDATE tasks SET status = 'QUEUED' WHERE status = 'RUNNING' AND leased_until < now();
            RETURN QUERY
            WITH ordered_tasks AS (
                SELECT t.id, row_number() OVER (PARTITION BY t.group_key ORDER BY t.id ASC) AS rn
                FROM tasks t
                WHERE t.status = 'QUEUED'
                ORDER BY rn, t.id ASC
                LIMIT p_limit
            ), eligible_tasks AS (
                SELECT t1.id, o.rn FROM tasks t1 JOIN ordered_tasks o ON o.id = t1.id FOR UPDATE OF t1 SKIP LOCKED
            ), popped AS (
                UPDATE tasks SET status = 'RUNNING', attempt = tasks.attempt + 1,
                    leased_until = now() + make_interval(secs => p_lease)
                FROM eligible_tasks
                WHERE tasks.id = eligible_tasks.id AND tasks.status = 'QUEUED'
                RETURNING tasks.*, eligible_tasks.rn
            )
            SELECT p.id, p.created_at, p.status, p.args, p.group_key, p.attempt, p.leased_until
            FROM popped p ORDER BY p.rn, p.id;
        END
        $$ LANGUAGE plpgsql;
    """
    )
    enqueue_sql = "INSERT INTO tasks (status, args, group_key) VALUES ('QUEUED', %(payload)s::jsonb, %(channel)s)"
    fill_sql = """
        INSERT INTO tasks (status, args, group_key)
        SELECT 'QUEUED', %(payload)s::jsonb, %(prefix)s || i %% %(channels)s
        FROM generate_series(%(start)s::bigint, %(start)s::bigint + %(messages)s - 1) i
        WHERE %(delay_ms)s = 0
    """
    dequeue_sql = "SELECT id, attempt, group_key, args{at} FROM pop_tasks(%(n)s::integer, %(lease)s::double precision)"
    complete_sql = COMPLETE
    backlog_sql = BACKLOG
