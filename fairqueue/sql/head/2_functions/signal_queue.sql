-- Trigger function of queue_changed: tells the scheduler to read the policy of a queue again.
--
-- Locks: none that anybody waits for, but for notifications (queue_notify); it appends rows.
CREATE FUNCTION signal_queue() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
BEGIN
    -- What is written again as it was costs nothing: it neither takes back a plan nor looks at all channels.
    IF TG_OP = 'UPDATE' AND ROW(OLD.name, OLD.max_concurrency, OLD.paused, OLD.resume_at, OLD.channel_weight,
            OLD.channel_max_concurrency, OLD.channel_release_interval_ms, OLD.channel_burst)
        IS NOT DISTINCT FROM ROW(NEW.name, NEW.max_concurrency, NEW.paused, NEW.resume_at, NEW.channel_weight,
            NEW.channel_max_concurrency, NEW.channel_release_interval_ms, NEW.channel_burst)
    THEN
        RETURN NULL;
    END IF;
    -- One that is moved, or renamed, leaves where it was as if it were deleted: what it held back there can be served.
    IF TG_OP <> 'INSERT' THEN
        INSERT INTO signal (queue, urgent) VALUES (OLD.name, true);
        PERFORM queue_notify(OLD.name);
    END IF;
    IF TG_OP <> 'DELETE' THEN
        INSERT INTO signal (queue, urgent) VALUES (NEW.name, true);
        PERFORM queue_notify(NEW.name);
    END IF;
    RETURN NULL;
END
$$;

REVOKE EXECUTE ON FUNCTION signal_queue FROM PUBLIC;
