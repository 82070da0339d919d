-- Moves the virtual time on to the last message that was taken from the plan without the turn.
--
-- Called by scheduler_serve and queue_repair, within the turn, which nobody who takes from the plan has at the same
-- time: all that was taken is committed, or rolled back. What was rolled back, or was not there to be taken, stays
-- planned, at the head of the plan.
-- Locks: the rotation of the queue, and the rows of taken and plan that it deletes, which nobody else writes.
--
-- Returns the new virtual time and place, and how many messages were taken.
CREATE FUNCTION scheduler_settle(
    queue text, turn bigint, INOUT vtime bigint, INOUT vsince bigint, INOUT place bigint, OUT messages integer
)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_turn CONSTANT bigint := $2;
    v_place CONSTANT bigint := $5;
    v_ids bigint[];
    v_last bigint;
    r record;
BEGIN
    WITH gone AS (
        DELETE FROM taken k WHERE k.queue = v_queue AND k.turn = v_turn
        RETURNING k.*
    )
    SELECT count(*), array_agg(x), max(g.place) INTO messages, v_ids, v_last
    FROM gone g CROSS JOIN unnest(g.ids) AS x;
    IF v_last - v_place > messages THEN
        -- Those that are left come last, in the places of all.
        WITH gone AS (
            DELETE FROM plan p
            WHERE p.queue = v_queue AND p.place > v_place - 32 AND p.place <= v_last
            RETURNING p.*
        ), planned AS MATERIALIZED (
            SELECT e.row, e.id, e.tag, e.since, e.channel, g.place + e.nth - 1 AS place, e.id <> ALL (v_ids) AS is_left
            FROM gone g
            CROSS JOIN LATERAL unnest(g.rows, g.ids, g.tags, g.sinces, g.channels) WITH ORDINALITY
                AS e (row, id, tag, since, channel, nth)
            WHERE g.place + e.nth - 1 > v_place
        ), left_over AS (
            SELECT p.*, row_number() OVER (ORDER BY p.place) AS nth,
                (SELECT max(k.place) FROM planned k) - count(*) OVER () AS before
            FROM planned p
            WHERE p.is_left
        ), written AS (
            INSERT INTO plan (queue, place, rows, ids, tags, sinces, channels)
            SELECT v_queue, min(l.before + l.nth),
                array_agg(l.row ORDER BY l.nth), array_agg(l.id ORDER BY l.nth), array_agg(l.tag ORDER BY l.nth),
                array_agg(l.since ORDER BY l.nth), array_agg(l.channel ORDER BY l.nth)
            FROM left_over l
            GROUP BY (l.nth - 1) / 32
        )
        SELECT (SELECT min(l.before) FROM left_over l) AS place, p.tag, p.since
        INTO r
        FROM (SELECT) AS one
        LEFT JOIN LATERAL (
            SELECT p.tag, p.since FROM planned p
            WHERE p.place < (SELECT min(l.place) FROM left_over l)
            ORDER BY p.place DESC LIMIT 1) p ON true;
    ELSE
        SELECT v_last AS place, p.tags[v_last - p.place + 1] AS tag, p.sinces[v_last - p.place + 1] AS since INTO r
        FROM plan p
        WHERE p.queue = v_queue AND p.place <= v_last AND p.place > v_last - 32
        ORDER BY p.place DESC LIMIT 1;
    END IF;
    -- Unless somebody has damaged the plan, there is a last one.
    place := coalesce(r.place, v_last);
    vtime := coalesce(r.tag, vtime);
    vsince := coalesce(r.since, vsince);
    UPDATE rotation t
    SET vtime = $3, vsince = $4, place = $5, ahead = least(t.ahead + $6, plan_most())
    WHERE t.queue = v_queue AND t.turn = v_turn;
END
$$;
