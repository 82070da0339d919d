"""The limit: what a queue in one table can do that isn't fair, with leases, fences and history as ours has them.

One column says both from when on a message may be served and when its lease ends, so there is one index, and what ran
out is found where what is next is found.

Its statements are planned once, as those of our functions are: with the number of messages in the text, as for a
parameter PostgreSQL assumes a tenth of the table, and would plan anew for each call. Its connections have the settings
of our message_dequeue, for every access to be by an index: of a small table that was never analyzed, PostgreSQL may
otherwise choose to read and hash all of it at each call, and keep to that as the table grows.
"""

from __future__ import annotations

from typing import Any

import psycopg

from .base import SQLSystem

_SETTINGS = {
    "plan_cache_mode": "force_generic_plan",
    "jit": "off",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
}


class Limit(SQLSystem):
    name = "limit"
    about = "one table, FOR UPDATE SKIP LOCKED, no fairness; leases and history as fairqueue has them"

    tables = """
        CREATE TABLE message (
            id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            queue text NOT NULL DEFAULT 'default',
            channel text NOT NULL,
            payload jsonb,
            dequeue_at bigint NOT NULL DEFAULT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint,
            visible_at timestamptz NOT NULL DEFAULT clock_timestamp(),
            cost double precision NOT NULL DEFAULT 1,
            attempt integer NOT NULL DEFAULT 0,
            first_leased_at timestamptz,
            leased_at timestamptz,
            created_at timestamptz NOT NULL DEFAULT clock_timestamp()
        );
        CREATE INDEX message_visible ON message (queue, visible_at, id);
        CREATE TABLE history (
            message_id bigint NOT NULL,
            queue text NOT NULL,
            channel text NOT NULL,
            outcome text NOT NULL,
            attempt integer NOT NULL,
            cost double precision NOT NULL,
            dequeue_at bigint NOT NULL,
            created_at timestamptz NOT NULL,
            first_leased_at timestamptz,
            leased_at timestamptz,
            finished_at timestamptz NOT NULL DEFAULT clock_timestamp(),
            xid xid8 NOT NULL DEFAULT pg_current_xact_id(),
            PRIMARY KEY (message_id, finished_at)
        );
        CREATE INDEX history_xid ON history (xid);
        CREATE INDEX history_finished ON history USING brin (finished_at) WITH (autosummarize = on);
    """
    enqueue_sql = "INSERT INTO message (channel, payload) VALUES (%(channel)s, %(payload)s::jsonb)"
    fill_sql = """
        INSERT INTO message (channel, payload, visible_at)
        SELECT %(prefix)s || i %% %(channels)s, %(payload)s::jsonb,
            clock_timestamp() + make_interval(secs => %(delay_ms)s / 1000.0)
        FROM generate_series(%(start)s::bigint, %(start)s::bigint + %(messages)s - 1) i
    """
    dequeue_sql = """
        WITH next AS MATERIALIZED (
            SELECT id FROM message
            WHERE queue = 'default' AND visible_at <= now()
            ORDER BY visible_at, id
            LIMIT {n}
            FOR UPDATE SKIP LOCKED
        )
        UPDATE message m
        SET attempt = m.attempt + 1, visible_at = now() + make_interval(secs => %(lease)s::double precision),
            leased_at = now(), first_leased_at = coalesce(m.first_leased_at, now())
        FROM next
        WHERE m.id = next.id
        RETURNING m.id, m.attempt, m.channel, m.payload{at}
    """
    complete_sql = """
        WITH done AS (
            DELETE FROM message m USING unnest(%(ids)s::bigint[], %(attempts)s::integer[]) AS l (id, attempt)
            WHERE m.id = l.id AND m.attempt = l.attempt
            RETURNING m.*
        ), written AS (
            INSERT INTO history (message_id, queue, channel, outcome, attempt, cost, dequeue_at, created_at,
                first_leased_at, leased_at)
            SELECT id, queue, channel, 'completed', attempt, cost, dequeue_at, created_at, first_leased_at, leased_at
            FROM done
        )
        SELECT id FROM done
    """
    backlog_sql = "SELECT count(*) FROM message"

    def connect(self, dsn: str) -> psycopg.Connection[Any]:
        connection = super().connect(dsn)
        for name, value in _SETTINGS.items():
            connection.execute("SELECT set_config(%s, %s, false)", (name, value))
        return connection
