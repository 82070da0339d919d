-- Looks for the news of channels that aren't ready, by name, in up to max_channels steps, without their signals.
--
-- Called by scheduler_serve, within the turn, when signals arrive faster than they can be folded: a channel's news
-- then need not wait behind the many signals of another. It goes from one ready lane to the next and looks for messages
-- between the two. Of those that no folded signal told of, first_id is about the first: so the entries of served
-- messages are passed over within the index, without a look at the table, however many an old snapshot keeps. So are
-- those of dead versions of lanes, which are behind the virtual time. Where a channel has something, it begins with the
-- first that is ready, which may have come before.
-- Locks: the lanes that scheduler_activate changes.
--
-- Returns the last channel looked at ('' when the round is complete), the number of activations so far, the earliest
-- time at which a lane that now waits is due, and whether one has a limit whose leases nobody counted
-- (scheduler_activate).
CREATE FUNCTION scheduler_sweep(
    queue text, turn bigint, vtime bigint, now_ms bigint, max_channels integer, first_id bigint,
    INOUT swept text, INOUT activations bigint, OUT due_floor bigint, OUT uncounted boolean
)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
-- Sorting all messages would take long where the table seemed to be nearly empty when this was planned.
SET enable_sort = off
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_swept CONSTANT text := $7;
    v_activations CONSTANT bigint := $8;
    v_vsince bigint;
    v_channels text[];
    v_ats bigint[];
    v_ids bigint[];
BEGIN
    SELECT t.vsince INTO v_vsince FROM rotation t WHERE t.queue = v_queue ORDER BY t.era DESC LIMIT 1;
    WITH RECURSIVE walk AS (
        SELECT v_swept AS channel, v_swept AS ready, NULL::bigint AS dequeue_at, NULL::bigint AS id
        UNION ALL
        SELECT coalesce(n.channel, k.channel), k.channel, n.dequeue_at, n.id
        FROM walk w
        -- The next lane that is ready, or has planned messages, which is looked for once, whatever there is before it.
        LEFT JOIN LATERAL (
            SELECT w.ready AS channel WHERE w.ready > w.channel
            UNION ALL
            -- Not written so that an index of ready lanes only would do: that isn't by name, and is read whole each time.
            (SELECT l.channel FROM lane l
             WHERE w.ready = w.channel AND l.queue = v_queue AND l.channel > w.channel AND l.tag >= vtime
                AND (coalesce(l.due, -1) = 0 OR (l.planned, l.since) > (vtime, v_vsince))
             ORDER BY l.channel, l.tag LIMIT 1)
            LIMIT 1) k ON true
        LEFT JOIN LATERAL (
            (SELECT m.channel, m.dequeue_at, m.id FROM message m
             WHERE m.queue = v_queue AND m.channel > w.channel AND m.channel < k.channel AND m.leased_until IS NULL
                AND m.id >= first_id
             ORDER BY m.channel, m.dequeue_at, m.id LIMIT 1)
            UNION ALL
            (SELECT m.channel, m.dequeue_at, m.id FROM message m
             WHERE m.queue = v_queue AND m.channel > w.channel AND k.channel IS NULL AND m.leased_until IS NULL
                AND m.id >= first_id
             ORDER BY m.channel, m.dequeue_at, m.id LIMIT 1)
            LIMIT 1) n ON true
        WHERE w.channel IS NOT NULL
    )
    SELECT array_agg(s.channel) FILTER (WHERE s.id IS NOT NULL),
        array_agg(coalesce(f.dequeue_at, s.dequeue_at)) FILTER (WHERE s.id IS NOT NULL),
        array_agg(coalesce(f.id, s.id)) FILTER (WHERE s.id IS NOT NULL),
        CASE WHEN bool_and(s.channel IS NOT NULL) THEN max(s.channel) ELSE '' END
    INTO v_channels, v_ats, v_ids, swept
    FROM (SELECT * FROM walk LIMIT max_channels + 1) s
    -- What stands before it may not be known either: ids are not in the order of transactions.
    LEFT JOIN LATERAL (
        SELECT l.head_at, l.head_id FROM lane l
        WHERE s.id IS NOT NULL AND l.queue = v_queue AND l.channel = s.channel
        ORDER BY l.tag DESC LIMIT 1) l ON true
    LEFT JOIN LATERAL (
        SELECT m.dequeue_at, m.id FROM message m
        WHERE s.id IS NOT NULL AND m.queue = v_queue AND m.channel = s.channel AND m.leased_until IS NULL
            AND (m.dequeue_at, m.id) >= (coalesce(l.head_at, -9223372036854775808), coalesce(l.head_id, 0))
            AND (m.dequeue_at, m.id) < (s.dequeue_at, s.id)
        ORDER BY m.dequeue_at, m.id LIMIT 1) f ON true;

    SELECT a.activations, a.due_floor, a.uncounted INTO activations, due_floor, uncounted
    FROM scheduler_activate(v_queue, turn, vtime, now_ms, v_channels, v_ats, v_ids, NULL, NULL, false, v_activations) a;
END
$$;
