-- Moves the virtual time on to the last message that was taken from the plan without the turn.
--
-- Called by scheduler_serve and queue_repair, within the turn, which nobody who takes from the plan has at the same
-- time: all that was taken is committed, or rolled back. What was rolled back, or was not there to be taken, stays
-- planned, at the head of the plan: with the last of the tags that its lane had there, as if what was taken had been
-- served before it. Else a lane whose plan is taken back then would owe nothing for what it got meanwhile.
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
    v_last bigint;
    r record;
BEGIN
    SELECT sum(cardinality(k.ids)), max(k.place) INTO messages, v_last
    FROM taken k WHERE k.queue = v_queue AND k.turn = v_turn;
    IF v_last - v_place > messages THEN
        WITH gone AS (
            DELETE FROM plan p
            WHERE p.queue = v_queue AND p.place > v_place - 32 AND p.place <= v_last
            RETURNING p.*
        -- What was taken is found by sorting: a join would be a loop.
        ), marked AS (
            SELECT e.*, bool_or(e.row IS NULL) OVER (PARTITION BY e.id) AS is_taken
            FROM (
                SELECT e.row, e.id, e.tag, e.since, e.channel, g.place + e.nth - 1 AS place
                FROM gone g
                CROSS JOIN LATERAL unnest(g.rows, g.ids, g.tags, g.sinces, g.channels) WITH ORDINALITY
                    AS e (row, id, tag, since, channel, nth)
                WHERE g.place + e.nth - 1 > v_place
                UNION ALL
                SELECT NULL, x.id, NULL, NULL, NULL, NULL
                FROM taken k CROSS JOIN LATERAL unnest(k.ids) AS x (id)
                WHERE k.queue = v_queue AND k.turn = v_turn) e
        ), planned AS MATERIALIZED (
            SELECT m.* FROM marked m WHERE m.row IS NOT NULL
        ), lanes AS (
            SELECT p.since, p.channel, array_agg(p.tag ORDER BY p.place DESC) AS tags,
                array_agg(p.row ORDER BY p.place DESC) FILTER (WHERE NOT p.is_taken) AS rows,
                array_agg(p.id ORDER BY p.place DESC) FILTER (WHERE NOT p.is_taken) AS ids
            FROM planned p
            GROUP BY p.since, p.channel
        -- They come last, in the places of all.
        ), left_over AS MATERIALIZED (
            SELECT e.row, e.id, l.tags[e.nth] AS tag, l.since, l.channel,
                row_number() OVER (ORDER BY l.tags[e.nth], l.since) AS nth,
                (SELECT max(p.place) FROM planned p) - count(*) OVER () AS before
            FROM lanes l
            CROSS JOIN LATERAL unnest(l.rows, l.ids) WITH ORDINALITY AS e (row, id, nth)
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
            WHERE (p.tag, p.since) < (SELECT l.tag, l.since FROM left_over l WHERE l.nth = 1)
            ORDER BY p.tag DESC, p.since DESC LIMIT 1) p ON true;
    ELSE
        SELECT v_last AS place, p.tags[v_last - p.place + 1] AS tag, p.sinces[v_last - p.place + 1] AS since INTO r
        FROM plan p
        WHERE p.queue = v_queue AND p.place <= v_last AND p.place > v_last - 32
        ORDER BY p.place DESC LIMIT 1;
    END IF;
    DELETE FROM taken k WHERE k.queue = v_queue AND k.turn = v_turn;
    -- Unless somebody has damaged the plan, there is a last one.
    place := coalesce(r.place, v_last);
    vtime := coalesce(r.tag, vtime);
    vsince := coalesce(r.since, vsince);
    UPDATE rotation t
    SET vtime = $3, vsince = $4, place = $5, ahead = least(t.ahead + $6, plan_most())
    WHERE t.queue = v_queue AND t.turn = v_turn;
END
$$;
