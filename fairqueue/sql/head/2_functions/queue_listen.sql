-- Asks for a notification when the queue gets something to do; returns the name of the channel that it comes through.
--
-- Called by workers that are about to wait, in a session of their own; then they commit, dequeue once more, as something
-- may have come in between, and wait. Undone by queue_unlisten or the end of the session; once for each call. A
-- rollback undoes the LISTEN but not the lock, so call it in autocommit; after a rollback call queue_unlisten once for
-- each call that was undone.
-- Locks: a shared advisory lock of the session, for which nobody waits. It says to queue_notify that somebody listens:
-- while all workers are busy, enqueueing notifies nobody, and costs nobody the lock on the whole database that
-- PostgreSQL takes when a transaction commits that has notified.
CREATE FUNCTION queue_listen(queue text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
DECLARE
    v_wake CONSTANT bigint := queue_wake(queue);
    v_channel CONSTANT text := 'fairqueue_' || to_hex(v_wake);
BEGIN
    IF queue IS NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = 'queue must be a name, not null';
    END IF;
    EXECUTE format('LISTEN %I', v_channel);
    PERFORM pg_advisory_lock_shared(v_wake);
    RETURN v_channel;
END
$$;

REVOKE EXECUTE ON FUNCTION queue_listen FROM PUBLIC;
