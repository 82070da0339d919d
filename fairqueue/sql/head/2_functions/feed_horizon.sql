-- Up to where history can be read for good: no transaction that is still open will add a row before xid.
--
-- Called by readers that follow the history, together with what tells one server from another: transaction ids of one
-- say nothing on a copy that was restored elsewhere.
-- Locks: none. An open transaction that has written anything, anywhere on the server, holds the horizon back.
CREATE FUNCTION feed_horizon() RETURNS TABLE (xid xid8, server text)
LANGUAGE sql STABLE
SET search_path FROM CURRENT
AS $$
    SELECT pg_snapshot_xmin(pg_current_snapshot()), c.system_identifier::text FROM pg_control_system() c
$$;

REVOKE EXECUTE ON FUNCTION feed_horizon FROM PUBLIC;
