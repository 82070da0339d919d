-- In how many seconds something of a queue may be served of which nobody is notified: that a message was scheduled for,
-- or has to wait until after a failure, that the rate of a channel lets out, or that a pause ends for. Null: nothing
-- that is known of.
--
-- Called by workers that have found nothing more to serve, before they wait. An estimate, never too late for what the
-- last dequeue knew of: 0 where that time has come, and less where that dequeue has left something to go through
-- (due_floor 0). Reads only, and takes no lock.
CREATE FUNCTION queue_due(queue text DEFAULT 'default') RETURNS double precision
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path FROM CURRENT
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_now CONSTANT bigint := unix_ms(clock());
BEGIN
    RETURN (
        SELECT CASE WHEN t.due_floor = 0 THEN -1
            WHEN greatest(t.due_floor, t.paused_until) < 9223372036854775807
            THEN (greatest(v_now, t.due_floor, t.paused_until) - v_now) / 1000.0 END
        FROM rotation t WHERE t.queue = v_queue ORDER BY t.era DESC LIMIT 1);
END
$$;

REVOKE EXECUTE ON FUNCTION queue_due FROM PUBLIC;
