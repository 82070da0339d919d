-- Looks at the next max_channels channels, by name, that have ready messages, and makes sure their lanes know.
--
-- Called by scheduler_serve, within the turn, when signals arrive faster than they can be folded: a channel's news
-- then need not wait behind the many signals of another. One index probe a channel, however many messages it has.
-- Locks: the lanes that scheduler_activate changes.
--
-- Returns the last channel looked at ('' when the round is complete), the number of activations so far, the earliest
-- time at which a lane that now waits is due, and whether one has a limit whose leases nobody counted
-- (scheduler_activate).
CREATE FUNCTION scheduler_sweep(
    queue text, turn bigint, vtime bigint, now_ms bigint, max_channels integer,
    INOUT swept text, INOUT activations bigint, OUT due_floor bigint, OUT uncounted boolean
)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_swept CONSTANT text := $6;
    v_activations CONSTANT bigint := $7;
    v_channels text[];
    v_ats bigint[];
    v_ids bigint[];
BEGIN
    WITH RECURSIVE walk AS (
        (SELECT m.channel, m.dequeue_at, m.id FROM message m
         WHERE m.queue = v_queue AND m.leased_until IS NULL AND m.channel > v_swept
         ORDER BY m.channel, m.dequeue_at, m.id LIMIT 1)
        UNION ALL
        SELECT n.channel, n.dequeue_at, n.id
        FROM walk w CROSS JOIN LATERAL (
            SELECT m.channel, m.dequeue_at, m.id FROM message m
            WHERE m.queue = v_queue AND m.leased_until IS NULL AND m.channel > w.channel
            ORDER BY m.channel, m.dequeue_at, m.id LIMIT 1) n
    ), step AS (
        SELECT * FROM walk LIMIT max_channels
    )
    -- What is planned stands before its lane, as it should.
    SELECT array_agg(s.channel) FILTER (WHERE s.is_free), array_agg(s.dequeue_at) FILTER (WHERE s.is_free),
        array_agg(s.id) FILTER (WHERE s.is_free), CASE WHEN count(*) = max_channels THEN max(s.channel) ELSE '' END
    INTO v_channels, v_ats, v_ids, swept
    FROM (
        SELECT s.*, coalesce((
            SELECT l.planned FROM lane l WHERE l.queue = v_queue AND l.channel = s.channel
            ORDER BY l.tag DESC LIMIT 1), -1) < vtime AS is_free
        FROM step s) s;

    SELECT a.activations, a.due_floor, a.uncounted INTO activations, due_floor, uncounted
    FROM scheduler_activate(v_queue, turn, vtime, now_ms, v_channels, v_ats, v_ids, NULL, NULL, false, v_activations) a;
END
$$;
