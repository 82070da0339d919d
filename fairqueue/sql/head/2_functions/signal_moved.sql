-- Trigger function of message_moved: a signal for a message that became ready, or whose place changed; with it the end
-- of its lease, if that was counted.
--
-- Locks: none that anybody waits for; it appends a row.
CREATE FUNCTION signal_moved() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
DECLARE
    v_counted CONSTANT bigint := CASE WHEN OLD.leased_until IS NOT NULL THEN OLD.counted END;
BEGIN
    INSERT INTO signal (queue, channel, dequeue_at, message_id, counted, urgent)
    VALUES (NEW.queue, NEW.channel, NEW.dequeue_at, NEW.id, v_counted, v_counted IS NOT NULL);
    RETURN NULL;
END
$$;

REVOKE EXECUTE ON FUNCTION signal_moved FROM PUBLIC;
