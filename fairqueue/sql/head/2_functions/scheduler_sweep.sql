-- Looks at the next max_channels channels, by name, that have ready messages, and makes sure their lanes know.
--
-- Called by scheduler_serve, within the turn, when signals arrive faster than they can be folded: a channel's news
-- then need not wait behind the many signals of another. And now and then, thoroughly, to find what no signal told of:
-- what stands before the head of a lane, too. Two or three index probes a channel, however many messages it has. It goes
-- backwards: the first entries of a channel are those of served messages, which an old snapshot keeps; its last one is
-- living. From the head of its lane on, so are the others.
-- Locks: the lanes that scheduler_activate changes.
--
-- Returns the last channel looked at ('' when the round is complete), the number of activations so far, the earliest
-- time at which a lane that now waits is due, and whether one has a limit whose leases nobody counted
-- (scheduler_activate).
CREATE FUNCTION scheduler_sweep(
    queue text, turn bigint, vtime bigint, now_ms bigint, max_channels integer, thorough boolean,
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
    v_swept CONSTANT text := $7;
    v_activations CONSTANT bigint := $8;
    v_channels text[];
    v_ats bigint[];
    v_ids bigint[];
BEGIN
    WITH RECURSIVE walk AS (
        (SELECT m.channel FROM message m
         WHERE m.queue = v_queue AND m.leased_until IS NULL AND v_swept = ''
         ORDER BY m.channel DESC, m.dequeue_at DESC, m.id DESC LIMIT 1)
        UNION ALL
        (SELECT m.channel FROM message m
         WHERE m.queue = v_queue AND m.leased_until IS NULL AND m.channel < v_swept
         ORDER BY m.channel DESC, m.dequeue_at DESC, m.id DESC LIMIT 1)
        UNION ALL
        SELECT n.channel
        FROM walk w CROSS JOIN LATERAL (
            SELECT m.channel FROM message m
            WHERE m.queue = v_queue AND m.leased_until IS NULL AND m.channel < w.channel
            ORDER BY m.channel DESC, m.dequeue_at DESC, m.id DESC LIMIT 1) n
    ), step AS (
        SELECT f.channel, f.dequeue_at, f.id, coalesce(l.planned, -1) AS planned
        FROM (SELECT * FROM walk LIMIT max_channels) w
        LEFT JOIN LATERAL (
            SELECT l.planned, l.head_at, l.head_id FROM lane l
            WHERE l.queue = v_queue AND l.channel = w.channel
            ORDER BY l.tag DESC LIMIT 1) l ON true
        CROSS JOIN LATERAL (
            (SELECT m.channel, m.dequeue_at, m.id FROM message m
             WHERE m.queue = v_queue AND m.channel = w.channel AND m.leased_until IS NULL
                AND (m.dequeue_at, m.id) >= (l.head_at, l.head_id) AND NOT thorough
             ORDER BY m.dequeue_at, m.id LIMIT 1)
            UNION ALL
            (SELECT m.channel, m.dequeue_at, m.id FROM message m
             WHERE m.queue = v_queue AND m.channel = w.channel AND m.leased_until IS NULL
             ORDER BY m.dequeue_at, m.id LIMIT 1)
            LIMIT 1) f
    )
    -- What is planned stands before its lane, as it should.
    SELECT array_agg(s.channel) FILTER (WHERE s.is_free), array_agg(s.dequeue_at) FILTER (WHERE s.is_free),
        array_agg(s.id) FILTER (WHERE s.is_free), CASE WHEN count(*) = max_channels THEN min(s.channel) ELSE '' END
    INTO v_channels, v_ats, v_ids, swept
    FROM (SELECT s.*, s.planned < vtime AS is_free FROM step s) s;

    SELECT a.activations, a.due_floor, a.uncounted INTO activations, due_floor, uncounted
    FROM scheduler_activate(v_queue, turn, vtime, now_ms, v_channels, v_ats, v_ids, NULL, NULL, false, v_activations) a;
END
$$;
