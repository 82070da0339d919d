"""Hatchet's block numbers (2024): ids given at write time such that their order is a round robin. Leases are added."""

from __future__ import annotations

from .base import SQLSystem
from .partition_by import BACKLOG, COMPLETE, TASKS


class Blocks(SQLSystem):
    name = "blocks"
    about = "Hatchet's block numbers (same post): id = group + 2^20 * block, so that the order of ids is a round robin"
    fair = True
    schedules = False

    tables = (
        """
        CREATE TABLE task_groups (
            id bigserial PRIMARY KEY,
            group_key text,
            block_addr bigint,
            CONSTRAINT unique_group_key UNIQUE (group_key)
        );
        CREATE TABLE task_addr_ptrs (
            max_assigned_block_addr bigint NOT NULL,
            onerow_id bool PRIMARY KEY DEFAULT true,
            CONSTRAINT onerow_uni CHECK (onerow_id)
        );
        INSERT INTO task_addr_ptrs VALUES (0);
    """
        + TASKS.replace("{id}", "bigint")
        + """
        ALTER TABLE tasks ADD CONSTRAINT fk_tasks_group_key FOREIGN KEY (group_key) REFERENCES task_groups (group_key);

        -- PopTasks and UpdateTaskPtrs, which have to be in one transaction.
        CREATE FUNCTION pop_tasks(p_limit integer, p_lease double precision) RETURNS SETOF tasks AS $$
        BEGIN
            UPDATE tasks SET status = 'QUEUED' WHERE status = 'RUNNING' AND leased_until < now();
            RETURN QUERY
            WITH eligible_tasks AS (
                SELECT t.id FROM tasks t WHERE t.status = 'QUEUED' ORDER BY t.id ASC LIMIT p_limit
                FOR UPDATE SKIP LOCKED
            ), popped AS (
                UPDATE tasks SET status = 'RUNNING', attempt = tasks.attempt + 1,
                    leased_until = now() + make_interval(secs => p_lease)
                FROM eligible_tasks
                WHERE tasks.id = eligible_tasks.id
                RETURNING tasks.*
            )
            SELECT * FROM popped p ORDER BY p.id;
            WITH max_assigned_id AS (
                SELECT id FROM tasks WHERE status != 'QUEUED' ORDER BY id DESC LIMIT 1
            )
            UPDATE task_addr_ptrs
            SET max_assigned_block_addr = coalesce(
                floor((SELECT id FROM max_assigned_id)::decimal / 1024 / 1024),
                coalesce((SELECT max(block_addr) FROM task_groups), 0))
            FROM max_assigned_id;
        END
        $$ LANGUAGE plpgsql;
    """
    )
    enqueue_sql = """
        WITH group_key_task AS (
            INSERT INTO task_groups (id, group_key, block_addr)
            VALUES (coalesce((SELECT max(id) FROM task_groups), -1) + 1, %(channel)s::text,
                (SELECT max_assigned_block_addr FROM task_addr_ptrs))
            ON CONFLICT (group_key) DO UPDATE SET
                group_key = EXCLUDED.group_key,
                block_addr = greatest(task_groups.block_addr + 1, (SELECT max_assigned_block_addr FROM task_addr_ptrs))
            RETURNING id, group_key, block_addr
        )
        INSERT INTO tasks (id, created_at, status, args, group_key)
        VALUES ((SELECT id FROM group_key_task) + 1024 * 1024 * (SELECT block_addr FROM group_key_task),
            now(), 'QUEUED', %(payload)s::jsonb, %(channel)s::text)
    """
    # The same for many at once: numbers of new groups, then blocks of each group's messages, then their last ones.
    fill_sql = """
        WITH wanted AS (
            SELECT %(prefix)s || i %% %(channels)s AS group_key, i
            FROM generate_series(%(start)s::bigint, %(start)s::bigint + %(messages)s - 1) i
            WHERE %(delay_ms)s = 0
        ), groups AS (
            SELECT group_key, count(*) AS n, min(i) AS first FROM wanted GROUP BY group_key
        ), pointer AS (
            SELECT max_assigned_block_addr AS p FROM task_addr_ptrs
        ), numbered AS (
            SELECT s.group_key, s.n, coalesce(g.id, (SELECT coalesce(max(id), -1) FROM task_groups)
                    + row_number() OVER (PARTITION BY g.id IS NULL ORDER BY s.first)) AS id,
                greatest(g.block_addr + 1, p) AS block
            FROM groups s LEFT JOIN task_groups g USING (group_key) CROSS JOIN pointer
        ), written AS (
            INSERT INTO task_groups (id, group_key, block_addr)
            SELECT id, group_key, block + n - 1 FROM numbered
            ON CONFLICT (group_key) DO UPDATE SET block_addr = EXCLUDED.block_addr
        )
        INSERT INTO tasks (id, status, args, group_key)
        SELECT m.id + 1048576 * (m.block + row_number() OVER (PARTITION BY w.group_key ORDER BY w.i) - 1),
            'QUEUED', %(payload)s::jsonb, w.group_key
        FROM wanted w JOIN numbered m USING (group_key)
    """
    dequeue_sql = "SELECT id, attempt, group_key, args{at} FROM pop_tasks(%(n)s::integer, %(lease)s::double precision)"
    complete_sql = COMPLETE
    backlog_sql = BACKLOG
