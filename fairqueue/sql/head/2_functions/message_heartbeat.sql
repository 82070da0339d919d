-- Extends leases to lease_seconds from now; never shortens one.
--
-- Called by workers while they work. Returns for each lease, in the order given, 'extended', 'busy' (its completion
-- or another act on it is under way in an open transaction), 'stale' or 'not_found' (completed or cancelled).
-- A lease that ran out is still extended when nobody has taken the message back.
-- Locks: the messages it updates, until the end of the transaction. It waits for nobody.
CREATE FUNCTION message_heartbeat(
    ids bigint[], attempts integer[], lease_seconds double precision DEFAULT 30
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
    -- Places in the lists, as a message may be there by two attempts, of which one is over.
    v_known bigint[];
    v_done bigint[];
    v_attempts integer[];
BEGIN
    PERFORM check_seconds('lease_seconds', lease_seconds, 0.001);
    WITH lease AS MATERIALIZED (
        SELECT * FROM lease_list(ids, attempts)
    ), known AS MATERIALIZED (
        SELECT l.n
        FROM lease l JOIN message m ON m.id BETWEEN l.id AND l.id
        WHERE m.attempt BETWEEN l.attempt AND l.attempt AND is_leased(m.leased_until)
    ), held AS MATERIALIZED (
        SELECT m.id
        FROM lease l JOIN message m ON m.id BETWEEN l.id AND l.id
        WHERE m.attempt BETWEEN l.attempt AND l.attempt AND is_leased(m.leased_until)
        FOR NO KEY UPDATE OF m SKIP LOCKED
    ), done AS (
        UPDATE message m
        SET leased_until = greatest(m.leased_until, clock() + make_interval(secs => lease_seconds))
        FROM held h
        WHERE m.id BETWEEN h.id AND h.id
        RETURNING m.id, m.attempt
    )
    SELECT (SELECT array_agg(k.n) FROM known k), array_agg(d.id), array_agg(d.attempt)
    INTO v_known, v_done, v_attempts
    FROM done d;

    RETURN QUERY
    SELECT r.id, CASE WHEN r.result = 'stale' AND r.n = ANY (v_known) THEN 'busy' ELSE r.result END
    FROM lease_results(ids, attempts, v_done, v_attempts, 'extended') WITH ORDINALITY AS r (id, result, n);
END
$$;

REVOKE EXECUTE ON FUNCTION message_heartbeat FROM PUBLIC;
