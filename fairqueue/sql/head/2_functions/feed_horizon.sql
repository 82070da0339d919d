-- Up to where history can be read for good: no transaction that is still open will add a row before xid.
--
-- Called by readers that follow the history, together with what tells this installation from others, by server, database
-- and schema: what has been read of one says nothing of another, nor of a copy that was restored elsewhere.
-- Locks: none. An open transaction that has written anything, anywhere on the server, holds the horizon back.
CREATE FUNCTION feed_horizon() RETURNS TABLE (xid xid8, server text)
LANGUAGE sql STABLE
SET search_path FROM CURRENT
AS $$
    SELECT pg_snapshot_xmin(pg_current_snapshot()), format('%s/%s/%s', c.system_identifier, d.oid, n.oid)
    FROM pg_control_system() c
    JOIN pg_database d ON d.datname = current_database()
    JOIN pg_namespace n ON n.nspname = current_schema()
$$;

REVOKE EXECUTE ON FUNCTION feed_horizon FROM PUBLIC;
