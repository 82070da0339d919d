-- Trigger function of channel_changed: tells the scheduler to read the policy of a channel again.
--
-- Locks: none that anybody waits for; it appends rows.
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
    RETURN NULL;
END
$$;

REVOKE EXECUTE ON FUNCTION signal_channel FROM PUBLIC;
