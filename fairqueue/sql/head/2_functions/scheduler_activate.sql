-- Brings the lanes of some channels up to date with what is known of these.
--
-- Called by scheduler_fold, scheduler_sweep, scheduler_limit and scheduler_rebuild, within the turn. For each channel:
-- (ats[i], ids[i]) is a place from which on there may be ready messages, or null; ended[i] is how many counted leases
-- have ended; running[i], where it isn't null, is how many there are, counted anew in this turn. The policy is read
-- again each time. With rebuild, the place is that of the first ready message, and null says that there is none.
--
-- A channel that becomes active starts at max(its own tag, vtime, the rotation's arrival_tag): neither a pause nor a new
-- name gains anything. One that has planned messages isn't new: it stands behind these.
-- Locks: the lanes it changes; nobody else writes lanes while the turn is held.
--
-- Returns the number of activations so far, the earliest time at which one of the lanes that now wait is due, and whether
-- a max_concurrency was taken over whose leases nobody counted: the signal that has them counted may have been committed
-- after signals were read.
CREATE FUNCTION scheduler_activate(
    queue text, turn bigint, vtime bigint, now_ms bigint,
    channels text[], ats bigint[], ids bigint[], ended integer[], running integer[], rebuild boolean,
    INOUT activations bigint, OUT due_floor bigint, OUT uncounted boolean
)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_turn CONSTANT bigint := $2;
    v_vtime CONSTANT bigint := $3;
    v_activations CONSTANT bigint := $11;
    v_vsince bigint;
    v_place bigint;
    v_start bigint;
    v_is_planned boolean;
BEGIN
    SELECT t.vsince, t.place, greatest(v_vtime, t.arrival_tag), t.planned > t.place
    INTO v_vsince, v_place, v_start, v_is_planned
    FROM rotation t WHERE t.queue = v_queue ORDER BY t.era DESC LIMIT 1;
    -- Before what is planned of a channel: then the plan is no longer the order. A single message that stands behind that
    -- is news as any: its lane waits for one that is to come later.
    IF v_is_planned THEN
        -- Not one condition of two parts: all of it would be set up each time.
        IF EXISTS (
            SELECT FROM unnest(channels, ats, ids) AS n (channel, at, id)
            CROSS JOIN LATERAL (
                SELECT l.* FROM lane l
                WHERE l.queue = v_queue AND l.channel = n.channel
                ORDER BY l.tag DESC LIMIT 1) l
            CROSS JOIN LATERAL (
                SELECT m.dequeue_at, m.id FROM message m
                WHERE m.queue = v_queue AND m.channel = n.channel AND m.leased_until IS NULL
                    AND (m.dequeue_at, m.id) >= (n.at, n.id) AND (m.dequeue_at, m.id) < (l.head_at, l.head_id)
                ORDER BY m.dequeue_at DESC, m.id DESC LIMIT 1) m
            WHERE (l.planned, l.since) > (v_vtime, v_vsince) AND (n.at, n.id) < (l.head_at, l.head_id)
                -- The place that a signal tells may be nobody's: the least time of some messages, and their least id.
                AND ((m.dequeue_at, m.id) <> (n.at, n.id) OR EXISTS (
                    SELECT FROM plan p
                    WHERE p.queue = v_queue AND p.place > v_place - 32 AND p.ids @> ARRAY[m.id])))
        THEN
            PERFORM scheduler_unplan(v_queue);
        END IF;
    END IF;

    -- OFFSET 0 keeps these steps apart: merged, what one makes would be written out each time that another uses it.
    WITH known AS (
        SELECT n.channel, n.at, n.id, n.ended, n.running AS counted,
            l.row, l.due, l.tag, l.since, l.is_planned, l.head_at, l.head_id, l.running, l.counted_from, l.released_at,
            -- Where something is planned, as it was then: a signal tells of a change, and the plan is taken back first.
            CASE WHEN l.is_planned THEN l.weight ELSE coalesce(c.weight, q.channel_weight, 1) END AS weight,
            CASE WHEN l.is_planned THEN l.max_concurrency
                ELSE coalesce(c.max_concurrency, q.channel_max_concurrency) END AS max_concurrency,
            CASE WHEN l.is_planned THEN l.release_interval
                ELSE coalesce(c.release_interval_ms, q.channel_release_interval_ms, 0) END AS release_interval,
            CASE WHEN l.is_planned THEN l.burst ELSE coalesce(c.burst, q.channel_burst, 1) END AS burst,
            CASE WHEN l.is_planned THEN l.paused_until ELSE paused_until(c.paused, c.resume_at) END AS paused_until,
            l.weight AS old_weight, l.max_concurrency AS old_max_concurrency, l.burst AS old_burst,
            l.release_interval AS old_release_interval, l.paused_until AS old_paused_until
        FROM (SELECT) AS one
        LEFT JOIN queue q ON q.name = v_queue
        CROSS JOIN unnest(channels, ats, ids, ended, running) AS n (channel, at, id, ended, running)
        LEFT JOIN LATERAL (
            SELECT l.ctid AS row, l.due, l.tag, l.since, l.head_at, l.head_id, l.running, l.counted_from, l.released_at,
                l.weight, l.max_concurrency, l.release_interval, l.burst, l.paused_until,
                NOT rebuild AND v_is_planned AND (l.planned, l.since) > (v_vtime, v_vsince) AS is_planned
            FROM lane l
            WHERE l.queue = v_queue AND l.channel = n.channel
            ORDER BY l.tag DESC LIMIT 1) l ON true
        -- One by one, also where the plan was made when there were hardly any: joined, all of the queue might be read.
        LEFT JOIN LATERAL (
            SELECT c.* FROM channel c WHERE c.queue = v_queue AND c.name = n.channel LIMIT 1) c ON true
        OFFSET 0
    ), head AS (
        SELECT k.*, rebuild OR (k.at IS NOT NULL AND (k.due IS NULL OR (k.at, k.id) < (k.head_at, k.head_id))) AS moves,
            CASE WHEN k.max_concurrency IS NULL THEN 0
                ELSE coalesce(k.counted, greatest(k.running - coalesce(k.ended, 0), 0), 0) END AS new_running
        FROM known k
        OFFSET 0
    ), news AS (
        SELECT h.*, CASE WHEN h.moves THEN h.at WHEN h.due IS NOT NULL THEN h.head_at END AS new_at,
            CASE WHEN h.moves AND h.at IS NOT NULL THEN h.id ELSE coalesce(h.head_id, 0) END AS new_id
        FROM head h
        WHERE h.moves OR h.new_running <> h.running OR h.counted IS NOT NULL
            OR h.weight <> h.old_weight OR h.release_interval <> h.old_release_interval OR h.burst <> h.old_burst
            OR (h.row IS NOT NULL AND (h.max_concurrency IS DISTINCT FROM h.old_max_concurrency
                OR h.paused_until IS DISTINCT FROM h.old_paused_until))
    ), timed AS (
        SELECT n.*, lane_due(now_ms, n.new_at, n.paused_until, n.max_concurrency, n.new_running, n.release_interval,
            n.burst, coalesce(n.released_at, 0)) AS new_due
        FROM news n
        WHERE n.row IS NOT NULL OR n.new_at IS NOT NULL OR n.new_running > 0
        OFFSET 0
    ), wanted AS MATERIALIZED (
        SELECT t.row, t.channel, t.due, t.new_due, t.new_at, t.new_id, t.new_running, t.counted, t.weight, t.burst,
            t.max_concurrency, t.old_max_concurrency, t.release_interval, t.paused_until,
            t.new_due IS NOT DISTINCT FROM 0 AND t.due IS DISTINCT FROM 0 AND t.is_planned IS NOT TRUE AS becomes_ready,
            row_number() OVER (ORDER BY t.new_id) AS nth
        FROM timed t
    ), changed AS (
        UPDATE lane l
        SET due = w.new_due,
            tag = CASE WHEN w.becomes_ready THEN greatest(l.tag, v_start) ELSE l.tag END,
            since = CASE WHEN w.becomes_ready THEN v_activations + w.nth ELSE l.since END,
            planned = CASE WHEN rebuild OR w.becomes_ready THEN -1 ELSE l.planned END,
            head_at = coalesce(w.new_at, l.head_at), head_id = w.new_id,
            weight = w.weight, max_concurrency = w.max_concurrency, release_interval = w.release_interval,
            burst = w.burst, paused_until = w.paused_until, running = w.new_running,
            counted_from = CASE WHEN w.counted IS NULL THEN l.counted_from ELSE v_turn END,
            -- Without a rate it is kept as it is, for the next one.
            released_at = CASE WHEN w.release_interval > 0
                THEN least(l.released_at, now_ms + (w.burst - 1) * w.release_interval) ELSE l.released_at END
        FROM wanted w
        WHERE l.ctid = w.row
    ), born AS (
        INSERT INTO lane (queue, channel, due, tag, since, head_at, head_id, weight, max_concurrency, release_interval,
            burst, paused_until, running, counted_from, released_at, planned)
        SELECT v_queue, w.channel, w.new_due, v_start, CASE WHEN w.becomes_ready THEN v_activations + w.nth ELSE 0 END,
            coalesce(w.new_at, 0), w.new_id, w.weight, w.max_concurrency, w.release_interval, w.burst, w.paused_until,
            w.new_running, CASE WHEN w.counted IS NULL THEN 0 ELSE v_turn END, 0, -1
        FROM wanted w
        WHERE w.row IS NULL
    )
    SELECT v_activations + count(*), coalesce(min(w.new_due) FILTER (WHERE w.new_due > 0), 9223372036854775807),
        coalesce(bool_or(w.max_concurrency IS NOT NULL AND w.old_max_concurrency IS NULL AND w.counted IS NULL), false)
    INTO activations, due_floor, uncounted
    FROM wanted w;
END
$$;
