-- Trigger function of message_freed: tells the scheduler that a counted lease ended with its message. One that a user has
-- ended before was told then.
--
-- Locks: none that anybody waits for; it appends a row.
CREATE FUNCTION signal_freed() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
BEGIN
    IF OLD.leased_until IS NOT NULL THEN
        INSERT INTO signal (queue, channel, counted, urgent) VALUES (OLD.queue, OLD.channel, OLD.counted, true);
    END IF;
    RETURN NULL;
END
$$;

REVOKE EXECUTE ON FUNCTION signal_freed FROM PUBLIC;
