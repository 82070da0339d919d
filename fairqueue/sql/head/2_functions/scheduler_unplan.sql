-- Takes back what is left of the plan: the lanes stand again where their next planned messages were.
--
-- Called by scheduler_serve, within the turn, when what was planned is no longer what should come next, because a
-- message is gone, changed or held by somebody; by scheduler_settle, when others were taken past such a one; by
-- scheduler_activate, when a message came before planned ones of its channel; and by scheduler_fold, scheduler_rebuild
-- and scheduler_tidy before they change what was planned by. Nothing is lost by it but the work: each lane owes what it
-- owed before, and what was taken of it.
-- Locks: the lanes that it changes.
--
-- Where n messages were taken since the place of the rotation, returns where the n-th starts of those that were taken or
-- are still to be had: what would have been served, had nobody given anything back.
CREATE FUNCTION scheduler_unplan(queue text, OUT tag bigint, OUT since bigint)
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
    v_turn bigint;
    v_place bigint;
BEGIN
    SELECT r.turn, r.place INTO v_turn, v_place
    FROM rotation r WHERE r.queue = v_queue ORDER BY r.turn DESC LIMIT 1;

    WITH gone AS (
        DELETE FROM plan p
        WHERE p.queue = v_queue AND p.place > v_place - 32
        RETURNING p.*
    -- What was taken is found by sorting: a join would be a loop.
    ), marked AS (
        SELECT e.*, bool_or(e.place IS NULL) OVER (PARTITION BY e.id) AS is_taken
        FROM (
            SELECT e.id, e.tag, e.since, e.channel, g.place + e.nth - 1 AS place
            FROM gone g
            CROSS JOIN LATERAL unnest(g.ids, g.tags, g.sinces, g.channels) WITH ORDINALITY
                AS e (id, tag, since, channel, nth)
            WHERE g.place + e.nth - 1 > v_place
            UNION ALL
            SELECT x.id, NULL, NULL, NULL, NULL
            FROM taken k CROSS JOIN LATERAL unnest(k.ids) AS x (id)
            WHERE k.queue = v_queue AND k.turn = v_turn) e
    -- Where the next planned message of its channel starts, one ends.
    ), planned AS MATERIALIZED (
        SELECT p.*, lead(p.tag) OVER (PARTITION BY p.channel ORDER BY p.place) AS end_tag, m.id AS left_id, m.dequeue_at
        FROM marked p
        -- By its id alone, so that no index but that one can be used for it.
        LEFT JOIN LATERAL (SELECT m.* FROM message m WHERE m.id = p.id AND NOT p.is_taken OFFSET 0) m
            ON m.queue = v_queue AND m.channel = p.channel AND m.leased_until IS NULL
        WHERE p.place IS NOT NULL
    ), lanes AS MATERIALIZED (
        SELECT p.channel, min(p.tag) + coalesce(sum(p.end_tag - p.tag) FILTER (WHERE p.is_taken), 0)::bigint AS tag,
            max(p.tag) FILTER (WHERE p.is_taken AND p.end_tag IS NULL) AS last_tag,
            min(p.dequeue_at) AS head_at,
            (array_agg(p.left_id ORDER BY p.dequeue_at, p.left_id) FILTER (WHERE p.left_id IS NOT NULL))[1] AS head_id
        FROM planned p
        GROUP BY p.channel
        HAVING NOT bool_and(p.is_taken)
    ), moved AS (
        UPDATE lane l
        SET tag = p.tag + coalesce(l.tag - p.last_tag, 0), planned = -1, head_at = least(p.head_at, l.head_at),
            head_id = CASE WHEN (p.head_at, p.head_id) < (l.head_at, l.head_id) THEN p.head_id ELSE l.head_id END
        FROM lanes p
        CROSS JOIN LATERAL (
            SELECT k.ctid AS row FROM lane k
            WHERE k.queue = v_queue AND k.channel = p.channel
            ORDER BY k.tag DESC LIMIT 1) k
        WHERE l.ctid = k.row
    )
    SELECT p.tag, p.since INTO tag, since
    FROM (
        SELECT p.tag, p.since, row_number() OVER (ORDER BY p.place) AS nth
        FROM planned p
        WHERE p.is_taken OR p.left_id IS NOT NULL) p
    WHERE p.nth = (SELECT count(*) FROM planned k WHERE k.is_taken);
END
$$;
