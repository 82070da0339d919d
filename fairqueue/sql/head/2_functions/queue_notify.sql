-- Wakes the workers that wait for work in a queue, when the caller's transaction commits. While nobody waits it does
-- nothing, and is true.
--
-- Called by the triggers that signal work: message_arrive, signal_moved, signal_channel, signal_policy,
-- signal_truncated.
-- Locks: for a moment the advisory lock that waiting workers share; it is only tried. If they have it, the commit takes
-- PostgreSQL's lock for notifications, which others that notify in this database wait for.
CREATE FUNCTION queue_notify(queue text) RETURNS boolean
LANGUAGE sql VOLATILE
RETURN CASE
    WHEN pg_try_advisory_lock(queue_wake(queue)) THEN pg_advisory_unlock(queue_wake(queue))
    -- Somebody else is at this very place: then nobody shares it.
    WHEN NOT pg_try_advisory_lock_shared(queue_wake(queue)) THEN true
    -- Or was, just now.
    WHEN pg_advisory_unlock_shared(queue_wake(queue)) AND pg_try_advisory_lock(queue_wake(queue))
    THEN pg_advisory_unlock(queue_wake(queue))
    ELSE pg_notify('fairqueue_' || to_hex(queue_wake(queue)), '') IS NULL
    END;

REVOKE EXECUTE ON FUNCTION queue_notify FROM PUBLIC;
