-- Notes how many rows were loaded by a name that the caller's transaction has claimed.
--
-- Called by the task that called load_claim. Changes nothing that an earlier transaction has noted.
-- Locks: the row of load that load_claim has locked.
CREATE FUNCTION load_count(name text, rows bigint) RETURNS void
LANGUAGE sql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
    UPDATE load l SET rows = $2, entered = $2
    WHERE l.name = $1 AND l.xid = pg_current_xact_id()
$$;

REVOKE EXECUTE ON FUNCTION load_count FROM PUBLIC;
