-- Trigger function of queue_changed: tells the scheduler to read the policy of a queue again.
--
-- Locks: none that anybody waits for; it appends rows.
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
    RETURN NULL;
END
$$;

REVOKE EXECUTE ON FUNCTION signal_queue FROM PUBLIC;
