-- Extends leases to lease_seconds from now; never shortens one.
--
-- Called by workers while they work. Returns for each lease, in the order given, 'extended', 'busy' (its completion
-- or another act on it is under way in an open transaction), 'stale' or 'not_found' (completed or cancelled).
-- A lease that ran out is still extended when nobody else has got the message meanwhile.
-- Locks: the messages it updates, briefly. It waits for nobody.
CREATE FUNCTION message_heartbeat(
    ids bigint[], attempts integer[], lease_seconds double precision DEFAULT 30
) RETURNS TABLE (id bigint, result text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
AS $$
#variable_conflict use_column
BEGIN
    PERFORM check_seconds('lease_seconds', lease_seconds, 0.001);
    RETURN QUERY
    WITH lease AS MATERIALIZED (
        SELECT * FROM lease_list(ids, attempts)
    ), held AS MATERIALIZED (
        SELECT m.id
        FROM lease l JOIN message m ON m.id = l.id
        WHERE m.attempt = l.attempt AND m.leased_until IS NOT NULL
        FOR NO KEY UPDATE OF m SKIP LOCKED
    ), done AS (
        UPDATE message m
        SET leased_until = greatest(m.leased_until, clock_timestamp() + make_interval(secs => lease_seconds))
        FROM held h
        WHERE m.id = h.id
        RETURNING m.id
    )
    SELECT l.id, CASE WHEN d.id IS NOT NULL THEN 'extended'
        WHEN EXISTS (SELECT FROM message m WHERE m.id = l.id AND m.attempt = l.attempt AND m.leased_until IS NOT NULL)
            THEN 'busy'
        ELSE lease_refusal(l.id) END
    FROM lease l LEFT JOIN done d ON d.id = l.id
    ORDER BY l.n;
END
$$;

REVOKE EXECUTE ON FUNCTION message_heartbeat FROM PUBLIC;
