-- Ends leases whose work failed: the messages go back into their channels, to be tried again after delay_seconds.
--
-- Called by workers. Returns for each lease, in the order given, 'failed', 'stale' or 'not_found'. The error is kept
-- with the message. With no delay a message keeps its place in the channel.
-- Locks: the messages it updates, until the end of the transaction. The trigger message_moved signals the channels.
CREATE FUNCTION message_fail(
    ids bigint[], attempts integer[], error text DEFAULT NULL, delay_seconds double precision DEFAULT 0
) RETURNS TABLE (id bigint, result text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_error CONSTANT text := $3;
    v_done bigint[];
    v_attempts integer[];
BEGIN
    PERFORM check_seconds('delay_seconds', delay_seconds, 0);
    WITH lease AS MATERIALIZED (
        SELECT * FROM lease_list(ids, attempts)
    ), done AS (
        UPDATE message m
        SET leased_until = NULL, error = v_error, dequeue_at = CASE WHEN delay_seconds = 0 THEN m.dequeue_at
            ELSE unix_ms(clock_timestamp() + make_interval(secs => delay_seconds)) END
        FROM lease l
        WHERE m.id = l.id AND m.attempt = l.attempt AND is_leased(m.leased_until)
        RETURNING m.id, m.attempt
    )
    SELECT array_agg(d.id), array_agg(d.attempt) INTO v_done, v_attempts FROM done d;

    RETURN QUERY SELECT * FROM lease_results(ids, attempts, v_done, v_attempts, 'failed');
END
$$;

REVOKE EXECUTE ON FUNCTION message_fail FROM PUBLIC;
