-- Ends leases whose work is done: the messages are gone when the caller's transaction commits.
--
-- Called by workers, best in the transaction of the work itself. Returns for each lease, in the order given,
-- 'completed', 'stale' (the lease ran out and the message is, or was, somebody else's) or 'not_found'.
-- Locks: the messages it deletes, until the end of the transaction. Only another act on the same lease waits for them.
CREATE FUNCTION message_complete(ids bigint[], attempts integer[]) RETURNS TABLE (id bigint, result text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH lease AS MATERIALIZED (
        SELECT * FROM lease_list(ids, attempts)
    ), done AS (
        DELETE FROM message m USING lease l
        WHERE m.id = l.id AND m.attempt = l.attempt AND m.leased_until IS NOT NULL
        RETURNING m.id
    )
    SELECT l.id, CASE WHEN d.id IS NULL THEN lease_refusal(l.id) ELSE 'completed' END
    FROM lease l LEFT JOIN done d ON d.id = l.id
    ORDER BY l.n;
END
$$;

REVOKE EXECUTE ON FUNCTION message_complete FROM PUBLIC;
