-- Takes back one queue_listen: this session needs no notification for now. It goes on to LISTEN, so that asking again
-- is cheap; it hears what others have asked for.
--
-- Called by workers that have been woken. False: there was no queue_listen to take back.
-- Locks: releases the advisory lock of the session that queue_listen took.
CREATE FUNCTION queue_unlisten(queue text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET client_min_messages = error
AS $$
BEGIN
    RETURN pg_advisory_unlock_shared(queue_wake(queue));
END
$$;

REVOKE EXECUTE ON FUNCTION queue_unlisten FROM PUBLIC;
