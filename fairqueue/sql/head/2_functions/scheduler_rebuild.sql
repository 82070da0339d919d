-- Derives everything that the scheduler keeps for a queue anew from the rows of message, channel and queue.
--
-- Called by scheduler_serve, within the turn, when what the queue says of its channels changed, when messages or
-- policies were truncated, and when the clock was set back; and by queue_repair, where it is thorough: what is kept may
-- be wrong then, and is not gone by. Otherwise it looks from the heads of lanes and the first lease on, as what comes
-- before are the entries of served messages, which an old snapshot keeps. Tags stay: whom the rotation owes what can't
-- be derived.
-- Locks: the lanes of the queue; its leases, as far as nobody else holds them (scheduler_recount).
--
-- Returns what is to be written to rotation, and whether a lane has a limit whose leases nobody counted, because it was
-- committed meanwhile (scheduler_activate). Takes time in proportion to the number of lanes and leases.
CREATE FUNCTION scheduler_rebuild(
    queue text, turn bigint, vtime bigint, now_ms bigint, thorough boolean, INOUT activations bigint,
    OUT due_floor bigint, OUT max_concurrency integer, OUT paused_until bigint, OUT running integer,
    OUT uncounted boolean
)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_activations CONSTANT bigint := $6;
    v_channels text[];
    v_ats bigint[];
    v_ids bigint[];
    v_running integer[];
    -- No lease ends before that.
    v_first timestamptz := '-infinity';
BEGIN
    IF NOT thorough THEN
        SELECT least(t.lease_floor, t.held_from) INTO v_first
        FROM rotation t WHERE t.queue = v_queue ORDER BY t.era DESC LIMIT 1;
    END IF;
    PERFORM scheduler_unplan(v_queue);
    SELECT q.max_concurrency, paused_until(q.paused, q.resume_at) INTO max_concurrency, paused_until
    FROM queue q WHERE q.name = v_queue;

    WITH RECURSIVE walk AS (
        (SELECT m.channel FROM message m WHERE m.queue = v_queue AND m.leased_until IS NULL AND thorough
         ORDER BY m.channel LIMIT 1)
        UNION ALL
        SELECT (SELECT m.channel FROM message m
                WHERE m.queue = v_queue AND m.leased_until IS NULL AND m.channel > w.channel
                ORDER BY m.channel LIMIT 1)
        FROM walk w WHERE w.channel IS NOT NULL
    ), known AS (
        SELECT w.channel FROM walk w WHERE w.channel IS NOT NULL
        UNION
        SELECT l.channel FROM lane l WHERE l.queue = v_queue
        UNION
        SELECT m.channel FROM message m WHERE m.queue = v_queue AND m.leased_until >= v_first
    )
    SELECT array_agg(k.channel), array_agg(h.dequeue_at), array_agg(h.id)
    INTO v_channels, v_ats, v_ids
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

    SELECT c.running, coalesce(c.total, 0) INTO v_running, running
    FROM scheduler_recount(v_queue, turn, v_channels, array_fill(true, ARRAY[coalesce(cardinality(v_channels), 0)]),
        max_concurrency IS NOT NULL, NULL) c;
    SELECT a.activations, a.due_floor, a.uncounted INTO activations, due_floor, uncounted
    FROM scheduler_activate(v_queue, turn, vtime, now_ms, v_channels, v_ats, v_ids, NULL, v_running, true,
        v_activations) a;
END
$$;
