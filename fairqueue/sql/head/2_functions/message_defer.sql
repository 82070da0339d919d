-- Ends leases whose work is to go on later: the messages go back into their channels with a saved state.
--
-- Called by workers. states[i] is what the next attempt of ids[i] will find in message.state; without states the
-- saved ones stay. With no delay (0) a message keeps its place in the channel: it was not the worker's turn after all,
-- as when the worker has to stop. With delay_seconds null it goes behind what is ready in the channel by now. Returns
-- for each lease, in the order given, 'deferred', 'stale' or 'not_found'. A deferral is no failure: it uses up none of
-- the message's attempts.
-- Locks: the messages it updates, until the end of the transaction. The trigger message_moved signals the channels.
CREATE FUNCTION message_defer(
    ids bigint[], attempts integer[], delay_seconds double precision DEFAULT NULL, states jsonb[] DEFAULT NULL
) RETURNS TABLE (id bigint, result text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_done bigint[];
    v_attempts integer[];
BEGIN
    IF delay_seconds IS NOT NULL THEN
        PERFORM check_seconds('delay_seconds', delay_seconds, 0);
    END IF;
    IF cardinality(states) <> cardinality(ids) THEN
        RAISE invalid_parameter_value USING
            MESSAGE = format('ids and states must have the same length, not %s and %s',
                cardinality(ids), cardinality(states));
    END IF;
    WITH lease AS MATERIALIZED (
        SELECT * FROM lease_list(ids, attempts)
    ), done AS (
        UPDATE message m
        SET leased_until = NULL, counted = NULL,
            dequeue_at = CASE WHEN delay_seconds = 0 THEN m.dequeue_at
                ELSE unix_ms(clock() + make_interval(secs => coalesce(delay_seconds, 0))) END,
            state = CASE WHEN states IS NULL THEN m.state ELSE states[l.n] END,
            forgiven = least(m.forgiven, 2147483646) + 1
        FROM lease l
        WHERE m.id BETWEEN l.id AND l.id AND m.attempt BETWEEN l.attempt AND l.attempt AND is_leased(m.leased_until)
        RETURNING m.id, m.attempt
    )
    SELECT array_agg(d.id), array_agg(d.attempt) INTO v_done, v_attempts FROM done d;

    RETURN QUERY SELECT * FROM lease_results(ids, attempts, v_done, v_attempts, 'deferred');
END
$$;

REVOKE EXECUTE ON FUNCTION message_defer FROM PUBLIC;
