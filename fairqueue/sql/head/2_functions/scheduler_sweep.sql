-- Looks for the news of channels that aren't known to be ready, by name, in up to max_channels steps, without signals.
--
-- Called by scheduler_serve, within the turn, when signals arrive faster than they can be folded: a channel's news
-- then need not wait behind the many signals of another. It goes from one lane to the next that isn't idle, backwards by
-- name, as the first entry of each lane is the living one then, and looks for messages of channels between the two. What
-- a lane is ready for, or has to wait with, is known, and none of its messages is looked at, however many there are: only
-- before the first one of a lane that waits for its hour.
-- Of those messages that no folded signal told of, first_id is about the first: so the entries of served messages are
-- passed over within the index, without a look at the table, however many an old snapshot keeps. Where a channel has
-- something, it begins with the first that is ready, which may have come before.
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
-- Sorting all messages would take long where the table seemed to be nearly empty when this was planned.
SET enable_sort = off
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_activations CONSTANT bigint := $8;
    v_from text := $7;
    v_vsince bigint;
    v_channels text[];
    v_ats bigint[];
    v_ids bigint[];
BEGIN
    SELECT t.vsince INTO v_vsince FROM rotation t WHERE t.queue = v_queue ORDER BY t.era DESC LIMIT 1;
    IF v_from = '' THEN
        v_from := (SELECT l.channel FROM lane l WHERE l.queue = v_queue ORDER BY l.channel DESC, l.tag DESC LIMIT 1);
        v_from := coalesce(
            (SELECT m.channel FROM message m
             WHERE m.queue = v_queue AND m.channel > coalesce(v_from, '') AND m.leased_until IS NULL AND m.id >= first_id
             ORDER BY m.channel DESC, m.dequeue_at DESC, m.id DESC LIMIT 1),
            v_from) || 'z';  -- so it comes behind all
    END IF;
    WITH RECURSIVE walk AS (
        SELECT v_from COLLATE "C" AS channel, v_from COLLATE "C" AS stop, NULL::bigint AS before_at,
            NULL::bigint AS before_id, NULL::bigint AS dequeue_at, NULL::bigint AS id
        UNION ALL
        SELECT coalesce(n.channel, k.channel), k.channel, k.before_at, k.before_id, p.dequeue_at, p.id
        FROM walk w
        -- The next lane that isn't idle, or the last of some that are; looked for once, whatever there is before it. And
        -- the place before which something of it would be news.
        LEFT JOIN LATERAL (
            SELECT w.stop AS channel, w.before_at, w.before_id WHERE w.stop < w.channel
            UNION ALL
            (SELECT l.channel, CASE WHEN l.is_idle THEN 9223372036854775807
                     WHEN l.due > 0 AND l.head_at > now_ms AND NOT l.is_planned THEN l.head_at END, l.head_id
             FROM (
                 SELECT l.*, l.due IS NULL AND NOT l.is_planned AS is_idle, row_number() OVER () AS nth
                 FROM (
                     SELECT l.*, (l.planned, l.since) > (vtime, v_vsince) AS is_planned
                     FROM lane l
                     WHERE w.stop = w.channel AND l.queue = v_queue AND l.channel < w.channel
                     ORDER BY l.channel DESC, l.tag DESC LIMIT 64) l) l
             WHERE NOT l.is_idle OR l.nth = 64
             LIMIT 1)
            LIMIT 1) k ON true
        LEFT JOIN LATERAL (
            SELECT m.channel FROM message m
            WHERE m.queue = v_queue AND m.channel < w.channel AND m.channel > coalesce(k.channel, '')
                AND m.leased_until IS NULL AND m.id >= first_id
            ORDER BY m.channel DESC, m.dequeue_at DESC, m.id DESC LIMIT 1) n ON true
        LEFT JOIN LATERAL (
            SELECT m.dequeue_at, m.id FROM message m
            WHERE m.queue = v_queue AND m.channel = coalesce(n.channel, k.channel) AND m.leased_until IS NULL
                AND m.id >= first_id AND (m.dequeue_at, m.id) < (
                    CASE WHEN n.channel IS NULL THEN k.before_at ELSE 9223372036854775807 END,
                    CASE WHEN n.channel IS NULL THEN k.before_id ELSE 0 END)
            ORDER BY m.dequeue_at, m.id LIMIT 1) p ON true
        WHERE w.channel IS NOT NULL
    )
    SELECT array_agg(s.channel) FILTER (WHERE s.id IS NOT NULL),
        array_agg(coalesce(f.dequeue_at, s.dequeue_at)) FILTER (WHERE s.id IS NOT NULL),
        array_agg(coalesce(f.id, s.id)) FILTER (WHERE s.id IS NOT NULL),
        CASE WHEN bool_and(s.channel IS NOT NULL) THEN min(s.channel) ELSE '' END
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
