-- The state of a queue with what holds for the whole of it, its pause and its max_concurrency, read again.
--
-- Called by scheduler_serve, within the turn, when these changed, and before lanes are derived anew; and by queue_repair.
-- Where there was no max_concurrency, or what was counted is not to be gone by, all leases are counted, and marked as
-- counted in this turn; and with them those of lanes that count theirs, which go by the same marks, unless all lanes are
-- to come anew; also of lanes that have counted none, as leases that users gave aren't. No other lane is touched, and the
-- plan stays. From one max_concurrency to another the count goes on.
-- Locks: as scheduler_recount; and the lanes that count leases.
CREATE FUNCTION scheduler_limit(r rotation, now_ms bigint, anew boolean) RETURNS rotation
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_is_counted CONSTANT boolean := r.max_concurrency IS NOT NULL AND NOT anew;
    v_channels text[];
    v_running integer[];
BEGIN
    SELECT q.max_concurrency, paused_until(q.paused, q.resume_at) INTO r.max_concurrency, r.paused_until
    FROM queue q WHERE q.name = r.queue;
    IF r.max_concurrency IS NULL THEN
        r.running := 0;
    ELSIF NOT v_is_counted THEN
        v_channels := ARRAY(
            SELECT l.channel FROM lane l
            WHERE l.queue = r.queue AND NOT anew AND (l.running > 0 OR (l.max_concurrency IS NOT NULL AND l.channel IN (
                SELECT m.channel FROM message m WHERE m.queue = r.queue AND m.leased_until IS NOT NULL))));
        r.counted_from := r.turn;
        SELECT c.running, c.total INTO v_running, r.running
        FROM scheduler_recount(
            r.queue, r.turn, v_channels, array_fill(true, ARRAY[cardinality(v_channels)]), true, NULL) c;
        SELECT a.activations, least(a.due_floor, r.due_floor) INTO r.activations, r.due_floor
        FROM scheduler_activate(
            r.queue, r.turn, r.vtime, now_ms, v_channels, NULL, NULL, NULL, v_running, false, r.activations) a;
    END IF;
    RETURN r;
END
$$;
