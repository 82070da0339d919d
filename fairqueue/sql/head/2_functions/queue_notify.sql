-- Wakes the workers that wait for work in a queue, when the caller's transaction commits. While nobody waits it does
-- nothing.
--
-- Called by the triggers that signal work: signal_enqueued, signal_moved, signal_channel, signal_queue.
-- Locks: for a moment the advisory lock that waiting workers share; it is only tried. If they have it, the commit takes
-- PostgreSQL's lock for notifications, which others that notify in this database wait for.
CREATE FUNCTION queue_notify(queue text) RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_wake CONSTANT bigint := queue_wake(queue);
BEGIN
    IF pg_try_advisory_lock(v_wake) THEN
        PERFORM pg_advisory_unlock(v_wake);
    ELSE
        PERFORM pg_notify('fairqueue_' || to_hex(v_wake), '');
    END IF;
END
$$;

REVOKE EXECUTE ON FUNCTION queue_notify FROM PUBLIC;
