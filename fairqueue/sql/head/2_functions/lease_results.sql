-- What happened to each message of a call, in the order given: done_result for those in done, else why not.
--
-- Called by the functions that end or extend leases, at their end; takes no lock. 'dead': done, and a dead letter now.
-- 'stale': the message is there, but the lease is over. 'not_found': there is no such message any more. Attempts are
-- null where they don't matter.
CREATE FUNCTION lease_results(
    ids bigint[], attempts integer[], done bigint[], done_attempts integer[], done_result text,
    dead bigint[] DEFAULT NULL
) RETURNS TABLE (id bigint, result text)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
-- Some callers switch hash joins off, and their settings hold in here too.
SET enable_hashjoin = on
SET enable_nestloop = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    -- A scalar subquery, as EXISTS might be answered by hashing the whole table.
    SELECT l.id, CASE WHEN d.id IS NOT NULL AND x.id IS NOT NULL THEN 'dead' WHEN d.id IS NOT NULL THEN done_result
        ELSE coalesce((SELECT 'stale' FROM message m WHERE m.id = l.id), 'not_found') END
    FROM unnest(ids, attempts) WITH ORDINALITY AS l (id, attempt, n)
    LEFT JOIN unnest(done, done_attempts) AS d (id, attempt)
        ON d.id = l.id AND coalesce(d.attempt, 0) = coalesce(l.attempt, 0)
    LEFT JOIN unnest(dead) AS x (id) ON x.id = l.id
    ORDER BY l.n;
END
$$;
