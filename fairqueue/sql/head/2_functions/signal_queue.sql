-- Trigger function of queue_changed: tells the scheduler to read the policy of a queue again.
--
-- Locks: none that anybody waits for, but for notifications (queue_notify); it appends rows.
CREATE FUNCTION signal_queue() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
BEGIN
    IF TG_OP <> 'INSERT' THEN
        INSERT INTO signal (queue, urgent) VALUES (OLD.name, true);
    END IF;
    IF TG_OP <> 'DELETE' THEN
        INSERT INTO signal (queue, urgent) VALUES (NEW.name, true);
    END IF;
    PERFORM queue_notify(CASE TG_OP WHEN 'DELETE' THEN OLD.name ELSE NEW.name END);
    RETURN NULL;
END
$$;

REVOKE EXECUTE ON FUNCTION signal_queue FROM PUBLIC;
