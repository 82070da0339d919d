-- Trigger function of message_moved: a signal for a message that became ready, or whose place changed.
--
-- Locks: none that anybody waits for; it appends a row.
CREATE FUNCTION signal_moved() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
BEGIN
    INSERT INTO signal (queue, channel, dequeue_at, message_id)
    VALUES (NEW.queue, NEW.channel, NEW.dequeue_at, NEW.id);
    RETURN NULL;
END
$$;

REVOKE EXECUTE ON FUNCTION signal_moved FROM PUBLIC;
