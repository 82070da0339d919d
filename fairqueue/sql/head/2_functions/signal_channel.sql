-- Trigger function of channel_changed: tells the scheduler to read the policy of a channel again.
--
-- Locks: none that anybody waits for, but for notifications (queue_notify); it appends rows.
CREATE FUNCTION signal_channel() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
BEGIN
    IF TG_OP <> 'INSERT' THEN
        INSERT INTO signal (queue, channel, urgent) VALUES (OLD.queue, OLD.name, true);
    END IF;
    IF TG_OP <> 'DELETE' THEN
        INSERT INTO signal (queue, channel, urgent) VALUES (NEW.queue, NEW.name, true);
    END IF;
    PERFORM queue_notify(CASE TG_OP WHEN 'DELETE' THEN OLD.queue ELSE NEW.queue END);
    RETURN NULL;
END
$$;

REVOKE EXECUTE ON FUNCTION signal_channel FROM PUBLIC;
