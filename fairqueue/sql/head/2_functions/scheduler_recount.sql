-- Counts the leases of some channels, and marks them as counted in this turn: each will signal its end.
--
-- Called by scheduler_fold for channels whose policy changed, by scheduler_limit for those that count their leases, and
-- by scheduler_rebuild for all, within the turn. Leases taken without a limit aren't counted one by one; this is what
-- catches up when a limit is set, and what replaces a number that is in doubt. A lease that somebody else holds, so
-- that it can't be marked, counts too: a signal has it looked at again (see signal) until it is over.
-- Locks: the leases it marks, until the end of the transaction. It waits for nobody.
--
-- Returns for each channel the number of its leases, null where it has no max_concurrency or none is wanted; and with
-- whole_queue the number of all leases, which are marked then.
CREATE FUNCTION scheduler_recount(
    queue text, turn bigint, channels text[], wanted boolean[], whole_queue boolean, counted_from bigint,
    OUT running integer[], OUT total integer
)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_turn CONSTANT bigint := $2;
    v_counted_from CONSTANT bigint := $6;
BEGIN
    -- What an earlier count in this turn was in doubt about is counted anew, too.
    DELETE FROM signal s
    WHERE s.queue = v_queue AND s.urgent AND s.xid = pg_current_xact_id() AND s.counted = v_turn
        AND s.message_id IS NOT NULL AND s.dequeue_at IS NULL
        AND v_counted_from IS NULL AND (whole_queue OR s.channel IN (
            SELECT n.channel FROM unnest(channels, wanted) AS n (channel, wanted) WHERE n.wanted));
    WITH named AS MATERIALIZED (
        SELECT n.channel
        FROM (SELECT) AS one
        LEFT JOIN queue q ON q.name = v_queue
        CROSS JOIN unnest(channels, wanted) AS n (channel, wanted)
        LEFT JOIN LATERAL (
            SELECT c.max_concurrency FROM channel c WHERE c.queue = v_queue AND c.name = n.channel LIMIT 1) c ON true
        WHERE n.wanted AND coalesce(c.max_concurrency, q.channel_max_concurrency) IS NOT NULL
    ), leases AS MATERIALIZED (
        SELECT m.ctid AS row, m.id, m.channel
        FROM message m
        WHERE (whole_queue OR (v_counted_from IS NULL AND (SELECT count(*) FROM named) > 0))
            AND m.queue = v_queue AND m.leased_until IS NOT NULL
            AND (whole_queue OR m.channel IN (SELECT n.channel FROM named n))
    -- Locked one by one, as in scheduler_serve_plan.
    ), held AS MATERIALIZED (
        SELECT m.row
        FROM leases l
        CROSS JOIN LATERAL (
            SELECT m.ctid AS row FROM message m
            WHERE m.ctid = l.row AND m.leased_until IS NOT NULL
            FOR NO KEY UPDATE SKIP LOCKED) m
    ), marked AS (
        UPDATE message m SET counted = v_turn FROM held h WHERE m.ctid = h.row RETURNING m.id, m.channel
    ), doubtful AS (
        SELECT l.id, l.channel FROM leases l
        EXCEPT
        SELECT k.id, k.channel FROM marked k
    ), watched AS (
        INSERT INTO signal (queue, channel, message_id, counted, urgent)
        SELECT v_queue, d.channel, d.id, v_turn, true
        FROM doubtful d
    -- Without a join, whose plan could not be right for one channel and for all. IS TRUE keeps IN from becoming one.
    ), counts AS (
        SELECT max(x.nth) AS nth, bool_or(x.is_wanted) AS is_wanted, count(*) FILTER (WHERE x.is_lease) AS leases
        FROM (
            SELECT a.channel, a.nth, false AS is_wanted, false AS is_lease
            FROM unnest(channels) WITH ORDINALITY AS a (channel, nth)
            UNION ALL
            SELECT n.channel, NULL, true, false FROM named n
            UNION ALL
            SELECT l.channel, NULL, false, true FROM leases l
            UNION ALL
            SELECT m.channel, NULL, false, true FROM message m
            WHERE v_counted_from IS NOT NULL AND (SELECT count(*) FROM named) > 0
                AND m.queue = v_queue AND m.leased_until IS NOT NULL
                AND m.counted >= v_counted_from AND (m.channel IN (SELECT n.channel FROM named n)) IS TRUE
            UNION ALL
            SELECT s.channel, NULL, false, true FROM signal s
            WHERE v_counted_from IS NOT NULL AND s.queue = v_queue AND s.urgent
                AND s.counted >= v_counted_from AND (s.channel IN (SELECT n.channel FROM named n)) IS TRUE) x
        GROUP BY x.channel
    )
    SELECT array_agg(CASE WHEN c.is_wanted THEN c.leases END ORDER BY c.nth) FILTER (WHERE c.nth IS NOT NULL),
        CASE WHEN whole_queue THEN (SELECT count(*) FROM leases)::integer END
    INTO running, total
    FROM counts c;
END
$$;
