-- Folds up to max_signals signals into lanes and deletes them: the urgent ones, or the others.
--
-- Called by scheduler_serve, within the turn. horizon and open are rotation's: the signals that no fold has seen are
-- those of transactions from the horizon on and of those that were in progress below it. Reading just these, through
-- the index on the transaction id, a fold never walks over the signals of the past.
-- Locks: the signals it deletes, which nobody else deletes, leases that were held when they were counted and aren't any
-- more, and what scheduler_recount and scheduler_activate lock. It waits for nobody.
--
-- Returns the new horizon, the number of activations so far, the earliest time at which a lane that now waits is due,
-- whether one has a limit whose leases nobody counted (scheduler_activate), how many leases that the queue counted have
-- ended, whether what the queue says of its channels changed, whether what it says of itself did, whether signals may be
-- left, of how many channels those that it folded told, the message that the last of the folded transactions began with:
-- about the first of those that what is left tells of; and the earliest end of those leases that users have set.
CREATE FUNCTION scheduler_fold(
    queue text, is_urgent boolean, turn bigint, vtime bigint, now_ms bigint, max_signals integer, counted_from bigint,
    INOUT horizon xid8, INOUT open xid8[], INOUT activations bigint,
    OUT due_floor bigint, OUT uncounted boolean, OUT ended integer, OUT channels_changed boolean,
    OUT queue_changed boolean, OUT more boolean, OUT told integer, OUT first_id bigint, OUT lease_floor timestamptz
)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_turn CONSTANT bigint := $3;
    v_counted_from CONSTANT bigint := $7;
    v_from CONSTANT xid8 := $8;
    v_open CONSTANT xid8[] := $9;
    v_activations CONSTANT bigint := $10;
    v_xid CONSTANT xid8 := pg_current_xact_id();
    v_doubtful integer;
    v_snapshot pg_snapshot;
    v_folded integer;
    v_late integer;
    v_last xid8;
    v_channels text[];
    v_ats bigint[];
    v_ids bigint[];
    v_ended integer[];
    v_changed boolean[];
    v_running integer[];
    v_leases bigint[];
BEGIN
    -- In doubt since this transaction began: for the next one, or a call that has looked at many would never end.
    WITH gone AS (
        DELETE FROM signal s
        WHERE s.ctid = ANY (ARRAY(
            (SELECT s.row
            FROM unnest(v_open) AS o (xid)
            CROSS JOIN LATERAL (
                SELECT s.ctid AS row
                FROM signal s
                WHERE s.queue = v_queue AND s.urgent = is_urgent AND s.xid = o.xid
                    AND NOT (s.xid = v_xid AND s.message_id IS NOT NULL AND s.dequeue_at IS NULL)
                LIMIT max_signals) s
            -- Who is still under way has told nothing yet, however much it wrote.
            WHERE o.xid < v_from AND pg_visible_in_snapshot(o.xid, pg_current_snapshot())
            LIMIT max_signals)
            UNION ALL
            (SELECT s.ctid
            FROM signal s
            WHERE s.queue = v_queue AND s.urgent = is_urgent AND s.xid >= v_from
                AND NOT (s.xid = v_xid AND s.message_id IS NOT NULL AND s.dequeue_at IS NULL)
            ORDER BY s.xid
            LIMIT max_signals)))
        RETURNING s.channel, s.dequeue_at, s.message_id, s.counted, s.xid, s.xid < v_from AS is_late,
            s.counted IS NOT NULL AND (s.message_id IS NULL OR s.dequeue_at IS NOT NULL OR coalesce((
                SELECT coalesce(m.counted, -1) >= s.counted OR m.leased_until IS NULL
                FROM message m WHERE m.id = s.message_id), true)) AS is_end
    -- A lease that could not be marked when it was counted, and is still there.
    ), again AS (
        INSERT INTO signal (queue, channel, message_id, counted, urgent)
        SELECT v_queue, g.channel, g.message_id, g.counted, true
        FROM gone g
        WHERE g.counted IS NOT NULL AND NOT g.is_end
        RETURNING 1
    ), news AS (
        SELECT g.channel, min(g.dequeue_at) AS at,
            (array_agg(g.message_id ORDER BY g.dequeue_at, g.message_id))[1] AS id,
            array_agg(g.counted) FILTER (WHERE g.is_end) AS ends,
            bool_or(g.message_id IS NULL AND g.counted IS NULL) AS changed
        FROM gone g
        WHERE g.channel IS NOT NULL
        GROUP BY g.channel
    ), news_lists AS (
        SELECT array_agg(n.channel) AS channels, array_agg(n.at) AS ats,
            array_agg(CASE WHEN n.at IS NOT NULL THEN n.id END) AS ids, array_agg(e.ended) AS ended,
            array_agg(n.changed) AS changed
        FROM news n
        CROSS JOIN LATERAL (
            SELECT count(*)::integer AS ended
            FROM unnest(n.ends) AS x
            WHERE x >= (SELECT l.counted_from FROM lane l WHERE l.queue = v_queue AND l.channel = n.channel
                ORDER BY l.tag DESC LIMIT 1)) e
    ), counts AS (
        SELECT count(*) FILTER (WHERE NOT g.is_late) AS folded, count(*) FILTER (WHERE g.is_late) AS late,
            (array_agg(g.xid ORDER BY g.xid DESC))[1] AS last,
            count(*) FILTER (WHERE g.is_end AND g.counted >= v_counted_from) AS ended,
            coalesce(bool_or(g.channel IS NULL AND g.message_id IS NULL AND g.dequeue_at IS NULL), false)
                AS channels_changed,
            coalesce(bool_or(g.channel IS NULL AND g.dequeue_at IS NOT NULL), false) AS queue_changed,
            array_agg(g.message_id) FILTER (WHERE g.channel IS NULL AND g.message_id IS NOT NULL) AS leases,
            -- Of those that began before and enqueued late there may be many, but hardly ever is one of them the last.
            coalesce((array_agg(g.message_id ORDER BY g.xid DESC, g.message_id) FILTER (WHERE NOT g.is_late))[1],
                min(g.message_id)) AS first_id,
            (SELECT count(*) FROM again) AS doubtful
        FROM gone g
    )
    SELECT pg_current_snapshot(), c.folded, c.late, c.last, c.ended, c.channels_changed, c.queue_changed, c.doubtful,
        c.first_id, c.leases, l.channels, l.ats, l.ids, l.ended, l.changed
    INTO v_snapshot, v_folded, v_late, v_last, ended, channels_changed, queue_changed, v_doubtful, first_id, v_leases,
        v_channels, v_ats, v_ids, v_ended, v_changed
    FROM counts c, news_lists l;

    -- What was not visible to the statement above, and what it had no room for, is for the next fold.
    more := v_folded = max_signals OR v_late = max_signals;
    told := coalesce(cardinality(v_channels), 0);
    SELECT u.horizon, u.open INTO horizon, open
    FROM scheduler_under_way(v_snapshot, v_from, v_last, CASE WHEN v_folded = max_signals THEN v_last END) u;
    IF v_late = max_signals THEN
        open := ARRAY(SELECT unnest(open) UNION SELECT unnest(v_open));
        -- Some of these have not been read at all: what they began with may be before all that was.
        first_id := least(first_id, (
            SELECT min(s.message_id)
            FROM unnest(v_open) AS o (xid)
            CROSS JOIN LATERAL (
                SELECT s.message_id FROM signal s
                WHERE s.queue = v_queue AND s.urgent = is_urgent AND s.xid = o.xid LIMIT 1) s
            WHERE pg_visible_in_snapshot(o.xid, pg_current_snapshot())));
    END IF;
    -- Marked, if nobody holds it any more, it will signal its end; otherwise it is to be looked at again.
    IF v_doubtful > 0 THEN
        WITH doubtful AS MATERIALIZED (
            SELECT s.ctid AS row, s.message_id, s.counted
            FROM signal s
            WHERE s.queue = v_queue AND s.urgent AND s.xid = v_xid AND s.message_id IS NOT NULL
                AND s.dequeue_at IS NULL
        ), held AS MATERIALIZED (
            SELECT m.ctid AS row, d.counted, d.signals
            FROM (
                SELECT d.message_id, max(d.counted) AS counted, array_agg(d.row) AS signals
                FROM doubtful d GROUP BY d.message_id) d
            -- Not =: see lease_list.
            JOIN message m ON m.id BETWEEN d.message_id AND d.message_id
            WHERE m.leased_until IS NOT NULL AND coalesce(m.counted, -1) < d.counted
            FOR NO KEY UPDATE OF m SKIP LOCKED
        ), marked AS (
            UPDATE message m SET counted = h.counted FROM held h WHERE m.ctid = h.row RETURNING h.signals
        )
        DELETE FROM signal s
        USING (SELECT unnest(k.signals) AS row FROM marked k) k
        WHERE s.ctid = k.row;
    END IF;
    IF v_leases IS NOT NULL THEN
        SELECT min(m.leased_until) INTO lease_floor
        -- Not =: see lease_list.
        FROM unnest(v_leases) AS l (id) JOIN message m ON m.id BETWEEN l.id AND l.id;
    END IF;
    IF true = ANY (v_changed) THEN
        PERFORM scheduler_unplan(v_queue);
        SELECT r.running INTO v_running
        FROM scheduler_recount(v_queue, v_turn, v_channels, v_changed, false, v_counted_from) r;
    END IF;
    SELECT a.activations, a.due_floor, a.uncounted INTO activations, due_floor, uncounted
    FROM scheduler_activate(v_queue, coalesce(v_counted_from, v_turn), vtime, now_ms, v_channels, v_ats, v_ids,
        v_ended, v_running, false, v_activations) a;
END
$$;
