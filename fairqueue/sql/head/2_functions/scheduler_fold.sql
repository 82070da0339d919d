-- Folds up to max_signals signals into lanes and deletes them.
--
-- Called by message_dequeue, within the turn. news_from and news_open are rotation's: the signals that no fold has
-- seen are those of transactions from news_from on and of those that were in progress below it. Reading just these,
-- through the index on the transaction id, a fold never walks over the signals of the past.
-- Locks: the signals it deletes, which nobody else deletes, and the lanes that scheduler_activate changes.
--
-- Returns the new horizon, the number of activations so far, the earliest time at which a lane that now waits is due,
-- and whether signals may be left.
CREATE FUNCTION scheduler_fold(
    queue text, vtime bigint, now_ms bigint, max_signals integer,
    INOUT news_from xid8, INOUT news_open xid8[], INOUT activations bigint, OUT due_floor bigint, OUT more boolean
)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_from CONSTANT xid8 := $5;
    v_open CONSTANT xid8[] := $6;
    v_activations CONSTANT bigint := $7;
    v_snapshot pg_snapshot;
    v_folded integer;
    v_late integer;
    v_last xid8;
    v_channels text[];
    v_ats bigint[];
    v_ids bigint[];
BEGIN
    WITH late AS MATERIALIZED (
        SELECT s.ctid AS row, s.channel, s.dequeue_at, s.message_id, s.xid, true AS is_late
        FROM signal s
        WHERE s.queue = v_queue AND s.xid = ANY (v_open) AND s.xid < v_from
        LIMIT max_signals
    ), fresh AS MATERIALIZED (
        SELECT s.ctid AS row, s.channel, s.dequeue_at, s.message_id, s.xid, false AS is_late
        FROM signal s
        WHERE s.queue = v_queue AND s.xid >= v_from
        ORDER BY s.xid
        LIMIT max_signals
    ), batch AS MATERIALIZED (
        SELECT * FROM late UNION ALL SELECT * FROM fresh
    ), gone AS (
        DELETE FROM signal s USING batch b WHERE s.ctid = b.row
    ), news AS (
        SELECT b.channel, min(b.dequeue_at) AS at,
            (array_agg(b.message_id ORDER BY b.dequeue_at, b.message_id))[1] AS id
        FROM batch b
        GROUP BY b.channel
    ), news_lists AS (
        SELECT array_agg(n.channel) AS channels, array_agg(n.at) AS ats, array_agg(n.id) AS ids FROM news n
    ), counts AS (
        SELECT count(*) FILTER (WHERE NOT b.is_late) AS folded, count(*) FILTER (WHERE b.is_late) AS late,
            (array_agg(b.xid ORDER BY b.xid DESC))[1] AS last
        FROM batch b
    )
    SELECT pg_current_snapshot(), c.folded, c.late, c.last, l.channels, l.ats, l.ids
    INTO v_snapshot, v_folded, v_late, v_last, v_channels, v_ats, v_ids
    FROM counts c, news_lists l;

    -- What was not visible to the statement above, and what it had no room for, is for the next fold. Its own
    -- transaction is always among these: it may go on to enqueue before it commits.
    more := v_folded = max_signals OR v_late = max_signals;
    news_from := CASE WHEN v_folded = max_signals THEN v_last ELSE pg_snapshot_xmax(v_snapshot) END;
    news_open := ARRAY(
        SELECT x FROM pg_snapshot_xip(v_snapshot) AS x WHERE x < news_from
        UNION
        SELECT pg_current_xact_id()
        UNION
        SELECT x FROM unnest(v_open) AS x WHERE v_late = max_signals);
    SELECT a.activations, a.due_floor INTO activations, due_floor
    FROM scheduler_activate(v_queue, vtime, now_ms, v_channels, v_ats, v_ids, v_activations) a;
END
$$;
