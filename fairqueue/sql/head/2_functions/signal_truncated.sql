-- Trigger function of message_truncated, channel_truncated and queue_truncated: whatever the scheduler counts of messages
-- has to be counted anew, and whatever it knows of policies to be read again.
--
-- Locks: none that anybody waits for, but for notifications (queue_notify); it appends rows.
CREATE FUNCTION signal_truncated() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
BEGIN
    INSERT INTO signal (queue, urgent) SELECT r.queue, true FROM rotation r;
    PERFORM queue_notify(r.queue) FROM rotation r;
    RETURN NULL;
END
$$;

REVOKE EXECUTE ON FUNCTION signal_truncated FROM PUBLIC;
