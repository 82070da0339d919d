-- Takes back what is left of the plan: the lanes stand again where their next planned messages were.
--
-- Called by scheduler_serve, within the turn, when what was planned is no longer what should come next, because a
-- message is gone, changed or held by somebody; by scheduler_activate, when a message came before planned ones of its
-- channel; and by scheduler_fold, scheduler_rebuild and scheduler_tidy before they change what was planned by. Nothing
-- is lost by it but the work: each lane owes what it owed before.
-- Locks: the lanes that it changes.
CREATE FUNCTION scheduler_unplan(queue text) RETURNS void
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
    v_place bigint;
BEGIN
    SELECT r.place INTO v_place
    FROM rotation r WHERE r.queue = v_queue ORDER BY r.turn DESC LIMIT 1;

    WITH gone AS (
        DELETE FROM plan p
        WHERE p.queue = v_queue AND p.place > v_place - 32
        RETURNING p.*
    ), planned AS MATERIALIZED (
        SELECT e.channel, min(e.tag) AS tag, min(m.dequeue_at) AS head_at,
            (array_agg(m.id ORDER BY m.dequeue_at, m.id) FILTER (WHERE m.id IS NOT NULL))[1] AS head_id
        FROM gone g
        CROSS JOIN LATERAL unnest(g.ids, g.tags, g.channels) WITH ORDINALITY AS e (id, tag, channel, nth)
        -- By its id alone, so that no index but that one can be used for it.
        LEFT JOIN LATERAL (SELECT m.* FROM message m WHERE m.id = e.id OFFSET 0) m
            ON m.queue = v_queue AND m.channel = e.channel AND m.leased_until IS NULL
        WHERE g.place + e.nth - 1 > v_place
        GROUP BY e.channel
    )
    UPDATE lane l
    SET tag = p.tag, planned = -1, head_at = least(p.head_at, l.head_at),
        head_id = CASE WHEN (p.head_at, p.head_id) < (l.head_at, l.head_id) THEN p.head_id ELSE l.head_id END
    FROM planned p
    CROSS JOIN LATERAL (
        SELECT k.ctid AS row FROM lane k
        WHERE k.queue = v_queue AND k.channel = p.channel
        ORDER BY k.tag DESC LIMIT 1) k
    WHERE l.ctid = k.row;
END
$$;
