-- Ends leases whose work failed: the messages go back into their channels to be tried again, or are dead.
--
-- Called by workers. Returns for each lease, in the order given, 'failed', 'dead', 'stale' or 'not_found'. The error is
-- kept with the message. Dead is what has used up its attempts, or is not to be tried again (retry => false): it goes
-- to dead_message. Without delay_seconds the delay is exponential, backoff * 2^(failures - 1) and at most the queue's
-- max_backoff, times a random factor of 0.5 to 1 that keeps messages which failed together from coming back together
-- ("equal jitter": Brooker, Exponential Backoff And Jitter, AWS Architecture Blog 2015). With no delay a message keeps
-- its place in the channel.
-- Locks: the messages, in the order of ids, until the end of the transaction. The triggers signal the channels.
CREATE FUNCTION message_fail(
    ids bigint[], attempts integer[], error text DEFAULT NULL, delay_seconds double precision DEFAULT NULL,
    retry boolean DEFAULT true
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
    v_dead bigint[];
BEGIN
    IF delay_seconds IS NOT NULL THEN
        PERFORM check_seconds('delay_seconds', delay_seconds, 0);
    END IF;
    IF retry IS NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = 'retry must be true or false, not null';
    END IF;
    WITH lease AS MATERIALIZED (
        SELECT DISTINCT l.id, l.attempt FROM lease_list(ids, attempts) l ORDER BY l.id
    ), held AS MATERIALIZED (
        SELECT m.id, m.attempt, m.queue, m.backoff, m.max_attempts, m.attempt::bigint - m.forgiven AS failures
        FROM lease l JOIN message m ON m.id BETWEEN l.id AND l.id
        WHERE m.attempt = l.attempt AND is_leased(m.leased_until)
        FOR UPDATE OF m
    ), policy AS MATERIALIZED (
        SELECT h.id, h.attempt, NOT retry OR h.failures >= coalesce(h.max_attempts, q.max_attempts, 20) AS is_dead,
            coalesce(delay_seconds, retry_delay(h.failures, h.backoff, q.backoff, q.max_backoff)) AS delay
        FROM held h LEFT JOIN queue q ON q.name = h.queue
    ), retried AS (
        UPDATE message m
        SET leased_until = NULL, counted = NULL, error = v_error, dequeue_at = CASE WHEN p.delay = 0 THEN m.dequeue_at
            ELSE unix_ms(clock() + make_interval(secs => p.delay)) END
        FROM policy p
        WHERE m.id BETWEEN p.id AND p.id AND NOT p.is_dead
    )
    SELECT array_agg(p.id), array_agg(p.attempt), array_agg(p.id) FILTER (WHERE p.is_dead)
    INTO v_done, v_attempts, v_dead
    FROM policy p;

    IF v_dead IS NOT NULL THEN
        PERFORM message_finish(v_dead, 'dead', v_error);
    END IF;
    RETURN QUERY SELECT * FROM lease_results(ids, attempts, v_done, v_attempts, 'failed', v_dead);
END
$$;

REVOKE EXECUTE ON FUNCTION message_fail FROM PUBLIC;
