"""LonnyMQ's chapter on tenants: one row a channel with its head and the time of its next turn, one message a call.

With the limits of that chapter (unused here), and leases as its chapter on durability has them. Its qualified column
names and a missing column are put right; nothing else is changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg.pq import TransactionStatus

from .base import Fill, SQLSystem
from .fifo import TO_EPOCH


class ChannelRow(SQLSystem):
    name = "channel-row"
    about = "LonnyMQ's round robin: a row a channel, head pointer, next_dequeue_at, one message a call"
    fair = True
    batches = False

    tables = (
        TO_EPOCH
        + """
        CREATE TABLE channel (
            id bigserial PRIMARY KEY,
            name text NOT NULL,
            max_concurrency integer NOT NULL DEFAULT 2147483647,
            release_interval_ms integer NOT NULL DEFAULT 0,
            current_concurrency integer NOT NULL DEFAULT 0,
            head_message_id bigint,
            head_message_dequeue_at bigint,
            last_dequeue_at bigint NOT NULL DEFAULT 0,
            next_dequeue_at bigint
        );
        CREATE UNIQUE INDEX channel_name_ix ON channel (name);
        CREATE INDEX channel_dequeue_ix ON channel (next_dequeue_at, id)
            WHERE head_message_id IS NOT NULL AND current_concurrency < max_concurrency;
        CREATE TABLE message (
            id bigserial PRIMARY KEY,
            channel_id bigint NOT NULL,
            content jsonb NOT NULL,
            dequeue_at bigint NOT NULL,
            num_attempts integer NOT NULL DEFAULT 0,
            unlock_at bigint
        );
        CREATE INDEX message_dequeue_ix ON message (channel_id, dequeue_at, id) WHERE unlock_at IS NULL;
        CREATE INDEX message_locked_dequeue_ix ON message (unlock_at) WHERE unlock_at IS NOT NULL;

        CREATE FUNCTION message_create(p_channel text, p_content jsonb) RETURNS void AS $$
        DECLARE
            v_dequeue_at bigint := to_epoch(now());
            v_id bigint;
            v_channel record;
        BEGIN
            SELECT c.* FROM channel c WHERE c.name = p_channel FOR UPDATE INTO v_channel;
            IF v_channel.id IS NULL THEN
                RAISE EXCEPTION 'channel does not exist';
            END IF;
            INSERT INTO message (channel_id, content, dequeue_at) VALUES (v_channel.id, p_content, v_dequeue_at)
            RETURNING id INTO v_id;
            IF v_channel.head_message_id IS NULL OR v_dequeue_at < v_channel.head_message_dequeue_at THEN
                UPDATE channel SET head_message_id = v_id, head_message_dequeue_at = v_dequeue_at,
                    next_dequeue_at = greatest(v_dequeue_at,
                        v_channel.last_dequeue_at + v_channel.release_interval_ms)
                WHERE id = v_channel.id;
            END IF;
        END
        $$ LANGUAGE plpgsql;

        CREATE FUNCTION message_dequeue(p_lock_ms bigint)
        RETURNS TABLE (id bigint, attempt integer, channel text, content jsonb) AS $$
        #variable_conflict use_column
        DECLARE
            v_now bigint := to_epoch(now());
            v_channel record;
            v_next record;
            v_id bigint;
        BEGIN
            -- A lock that ran out goes first.
            SELECT m.id FROM message m WHERE m.unlock_at <= v_now
            ORDER BY m.unlock_at LIMIT 1 FOR UPDATE SKIP LOCKED INTO v_id;
            IF v_id IS NOT NULL THEN
                RETURN QUERY UPDATE message m SET unlock_at = v_now + p_lock_ms, num_attempts = m.num_attempts + 1
                FROM channel c WHERE m.id = v_id AND c.id = m.channel_id
                RETURNING m.id, m.num_attempts, c.name, m.content;
                RETURN;
            END IF;

            SELECT c.* FROM channel c
            WHERE c.head_message_id IS NOT NULL AND c.next_dequeue_at <= v_now
                AND c.current_concurrency < c.max_concurrency
            ORDER BY c.next_dequeue_at, c.id LIMIT 1 FOR UPDATE SKIP LOCKED INTO v_channel;
            IF v_channel.id IS NULL THEN
                RETURN;
            END IF;
            RETURN QUERY UPDATE message m SET unlock_at = v_now + p_lock_ms, num_attempts = m.num_attempts + 1
            WHERE m.id = v_channel.head_message_id
            RETURNING m.id, m.num_attempts, v_channel.name, m.content;
            IF NOT FOUND THEN
                RAISE EXCEPTION 'head message does not exist';
            END IF;
            SELECT m.id, m.dequeue_at FROM message m WHERE m.channel_id = v_channel.id AND m.unlock_at IS NULL
            ORDER BY m.dequeue_at, m.id LIMIT 1 INTO v_next;
            UPDATE channel c SET current_concurrency = c.current_concurrency + 1,
                head_message_id = v_next.id, head_message_dequeue_at = v_next.dequeue_at, last_dequeue_at = v_now,
                next_dequeue_at = CASE WHEN v_next.id IS NOT NULL
                    THEN greatest(v_next.dequeue_at, v_now + v_channel.release_interval_ms) END
            WHERE c.id = v_channel.id;
        END
        $$ LANGUAGE plpgsql;

        CREATE FUNCTION message_complete(p_id bigint, p_num_attempts integer) RETURNS SETOF bigint AS $$
        DECLARE
            v_message record;
        BEGIN
            SELECT m.* FROM message m WHERE m.id = p_id FOR UPDATE INTO v_message;
            IF v_message.id IS NULL OR v_message.unlock_at IS NULL OR v_message.num_attempts <> p_num_attempts THEN
                RETURN;
            END IF;
            UPDATE channel c SET current_concurrency = c.current_concurrency - 1 WHERE c.id = v_message.channel_id;
            DELETE FROM message m WHERE m.id = p_id;
            RETURN NEXT p_id;
        END
        $$ LANGUAGE plpgsql;
    """
    )
    enqueue_sql = "SELECT message_create(%(channel)s, %(payload)s::jsonb)"
    fill_sql = """
        WITH made AS (
            INSERT INTO message (channel_id, content, dequeue_at)
            SELECT c.id, %(payload)s::jsonb, to_epoch(now()) + %(delay_ms)s
            FROM generate_series(%(start)s::bigint, %(start)s::bigint + %(messages)s - 1) i
            JOIN channel c ON c.name = %(prefix)s || i %% %(channels)s
            RETURNING id, channel_id, dequeue_at
        ), head AS (
            SELECT DISTINCT ON (channel_id) * FROM made ORDER BY channel_id, id
        )
        UPDATE channel c SET head_message_id = h.id, head_message_dequeue_at = h.dequeue_at,
            next_dequeue_at = greatest(h.dequeue_at, c.last_dequeue_at + c.release_interval_ms)
        FROM head h
        WHERE h.channel_id = c.id
            AND (c.head_message_id IS NULL OR h.dequeue_at < c.head_message_dequeue_at)
    """
    dequeue_sql = (
        "SELECT id, attempt, channel, content{at} FROM message_dequeue((%(lease)s::double precision * 1000)::bigint)"
    )
    complete_sql = "SELECT * FROM message_complete(%(id)s::bigint, %(attempt)s::integer)"
    backlog_sql = "SELECT count(*) FROM message"

    def __init__(self) -> None:
        #: The channels that a connection knows to be there: its publisher makes them once, not with each message.
        self._known: WeakKeyDictionary[psycopg.Connection[Any], set[str]] = WeakKeyDictionary()

    def enqueue(self, connection: psycopg.Connection[Any], rows: Sequence[tuple[str, str]]) -> None:
        self._create(connection, (channel for channel, _ in rows))
        super().enqueue(connection, rows)

    def fill(self, connection: psycopg.Connection[Any], fill: Fill) -> None:
        self._create(connection, (f"{fill.prefix}{i}" for i in range(min(fill.channels, fill.numbers.stop))))
        super().fill(connection, fill)

    def _create(self, connection: psycopg.Connection[Any], names: Iterable[str]) -> None:
        """Its channels have to be there beforehand. Not looked for and locked where they are: others may hold them."""
        known = self._known.setdefault(connection, set())
        missing = list(dict.fromkeys(name for name in names if name not in known))
        if not missing:
            return
        # What a transaction of the caller makes may yet be rolled back.
        stays = connection.info.transaction_status == TransactionStatus.IDLE
        connection.execute("INSERT INTO channel (name) SELECT unnest(%s::text[]) ON CONFLICT DO NOTHING", (missing,))
        if stays:
            known.update(missing)
