-- Trigger function of channel_changed: tells the scheduler to read the policy of a channel again.
--
-- Locks: none that anybody waits for, but for notifications (queue_notify); it appends rows.
CREATE FUNCTION signal_channel() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
BEGIN
    -- What is written again as it was costs nothing: it neither takes back a plan nor looks at all channels.
    IF TG_OP = 'UPDATE' AND ROW(OLD.queue, OLD.name, OLD.weight, OLD.max_concurrency, OLD.release_interval_ms, OLD.burst,
            OLD.paused, OLD.resume_at)
        IS NOT DISTINCT FROM ROW(NEW.queue, NEW.name, NEW.weight, NEW.max_concurrency, NEW.release_interval_ms, NEW.burst,
            NEW.paused, NEW.resume_at)
    THEN
        RETURN NULL;
    END IF;
    -- One that is moved, or renamed, leaves where it was as if it were deleted: what it held back there can be served.
    IF TG_OP <> 'INSERT' THEN
        INSERT INTO signal (queue, channel, urgent) VALUES (OLD.queue, OLD.name, true);
        PERFORM queue_notify(OLD.queue);
    END IF;
    IF TG_OP <> 'DELETE' THEN
        INSERT INTO signal (queue, channel, urgent) VALUES (NEW.queue, NEW.name, true);
        PERFORM queue_notify(NEW.queue);
    END IF;
    RETURN NULL;
END
$$;

REVOKE EXECUTE ON FUNCTION signal_channel FROM PUBLIC;
