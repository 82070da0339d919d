-- Derives up to max_lanes lanes of a queue anew from the rows of message, channel and queue: the next ones by name.
--
-- Called by scheduler_serve, within the turn, when what the queue says of its channels changed, when messages or
-- policies were truncated, and when the clock was set back: a part in each turn, so that none takes long, and nothing is
-- served before all have been. And by queue_repair, for all at once and thorough: what is kept may be wrong then, and is
-- not gone by. Otherwise it looks from the heads of lanes on, as what comes before are the entries of served messages,
-- which an old snapshot keeps. Tags stay: whom the rotation owes what can't be derived. What was planned
-- has been taken back before (scheduler_unplan), and what holds for the whole queue read again (scheduler_limit).
-- Locks: the lanes; their leases, as far as nobody else holds them (scheduler_recount).
--
-- Where the queue counts its leases, counted_from says since when, else it is null; no lease ends before lease_floor.
-- Returns the last channel it looked at, null after the last one of all, the number of activations so far, the earliest
-- time at which one of the lanes that now wait is due, and whether a lane has a limit whose leases nobody counted, because
-- it was committed meanwhile (scheduler_activate). Takes time in proportion to max_lanes, and to the number of leases.
CREATE FUNCTION scheduler_rebuild(
    queue text, turn bigint, vtime bigint, now_ms bigint, counted_from bigint, lease_floor timestamptz, max_lanes integer,
    thorough boolean, INOUT rebuilt text, INOUT activations bigint, OUT due_floor bigint, OUT uncounted boolean
)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_counted_from CONSTANT bigint := $5;
    v_rebuilt CONSTANT text := $9;
    v_activations CONSTANT bigint := $10;
    v_channels text[];
    v_ats bigint[];
    v_ids bigint[];
    v_running integer[];
BEGIN
    WITH RECURSIVE walk AS (
        (SELECT m.channel FROM message m WHERE m.queue = v_queue AND m.leased_until IS NULL AND thorough
         ORDER BY m.channel LIMIT 1)
        UNION ALL
        SELECT (SELECT m.channel FROM message m
                WHERE m.queue = v_queue AND m.leased_until IS NULL AND m.channel > w.channel
                ORDER BY m.channel LIMIT 1)
        FROM walk w WHERE w.channel IS NOT NULL
    ), part AS MATERIALIZED (
        SELECT l.channel FROM lane l
        WHERE l.queue = v_queue AND l.channel > v_rebuilt
        ORDER BY l.channel LIMIT max_lanes
    ), last AS MATERIALIZED (
        SELECT CASE WHEN count(*) = max_lanes THEN max(p.channel) END AS channel FROM part p
    ), known AS (
        SELECT w.channel FROM walk w WHERE w.channel IS NOT NULL
        UNION
        SELECT p.channel FROM part p
        UNION
        SELECT m.channel FROM message m
        WHERE m.queue = v_queue AND m.leased_until >= lease_floor AND m.channel > v_rebuilt
            AND (m.channel > (SELECT t.channel FROM last t)) IS NOT TRUE
    )
    SELECT array_agg(k.channel), array_agg(h.dequeue_at), array_agg(h.id), (SELECT t.channel FROM last t)
    INTO v_channels, v_ats, v_ids, rebuilt
    FROM known k
    LEFT JOIN LATERAL (
        SELECT l.due, l.head_at, l.head_id FROM lane l
        WHERE l.queue = v_queue AND l.channel = k.channel
        ORDER BY l.tag DESC LIMIT 1) l ON true
    LEFT JOIN LATERAL (
        (SELECT m.dequeue_at, m.id FROM message m
         WHERE m.queue = v_queue AND m.channel = k.channel AND m.leased_until IS NULL
            AND (m.dequeue_at, m.id) >= (l.head_at, l.head_id) AND l.due IS NOT NULL AND NOT thorough
         ORDER BY m.dequeue_at, m.id LIMIT 1)
        UNION ALL
        -- Nothing is there where something was: all were truncated, and new ones may have begun before it.
        (SELECT m.dequeue_at, m.id FROM message m
         WHERE m.queue = v_queue AND m.channel = k.channel AND m.leased_until IS NULL
            AND (thorough OR l.due IS NOT NULL)
         ORDER BY m.dequeue_at, m.id LIMIT 1)
        LIMIT 1) h ON true;

    SELECT c.running INTO v_running
    FROM scheduler_recount(v_queue, turn, v_channels, array_fill(true, ARRAY[coalesce(cardinality(v_channels), 0)]),
        false, v_counted_from) c;
    SELECT a.activations, a.due_floor, a.uncounted INTO activations, due_floor, uncounted
    FROM scheduler_activate(v_queue, coalesce(v_counted_from, turn), vtime, now_ms, v_channels, v_ats, v_ids, NULL,
        v_running, true, v_activations) a;
END
$$;
