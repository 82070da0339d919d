-- Trigger function of queue_changed: tells the scheduler to read the policy of a queue again (signal_policy).
--
-- Locks: none that anybody waits for, but for notifications (queue_notify); it appends rows.
CREATE FUNCTION signal_queue() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
BEGIN
    IF OLD.name = NEW.name THEN
        PERFORM signal_policy(NEW.name, OLD, NEW);
        RETURN NULL;
    END IF;
    -- One that is moved, or renamed, leaves where it was as if it were deleted: what it held back there can be served.
    IF TG_OP <> 'INSERT' THEN
        PERFORM signal_policy(OLD.name, OLD, NULL);
    END IF;
    IF TG_OP <> 'DELETE' THEN
        PERFORM signal_policy(NEW.name, NULL, NEW);
    END IF;
    RETURN NULL;
END
$$;

REVOKE EXECUTE ON FUNCTION signal_queue FROM PUBLIC;
