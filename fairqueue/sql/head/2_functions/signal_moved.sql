-- Trigger function of message_moved: a signal for a message that became ready, or was changed while it was; with it the
-- end of its lease, if that was counted; and a notification, if workers wait for one. Of one that is leased now, only
-- when, and if that isn't later than it was: dequeues have to know the earliest end of a lease. One that a user has given
-- isn't counted: a mark that is left of an earlier one, whose end was told, is taken off.
--
-- Locks: none that anybody waits for, but for notifications (queue_notify); it appends a row.
CREATE FUNCTION signal_moved() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
DECLARE
    v_counted CONSTANT bigint := CASE WHEN OLD.leased_until IS NOT NULL THEN OLD.counted END;
BEGIN
    IF NEW.leased_until IS NOT NULL THEN
        IF OLD.leased_until IS NULL OR NEW.leased_until < OLD.leased_until THEN
            INSERT INTO signal (queue, message_id, urgent) VALUES (NEW.queue, NEW.id, true);
        END IF;
        IF OLD.leased_until IS NULL AND NEW.counted = OLD.counted THEN
            UPDATE message m SET counted = NULL WHERE m.id = NEW.id;
        END IF;
        RETURN NULL;
    END IF;
    -- A mere edit is no more urgent than an arrival: it only matters to what is planned, and may come in floods.
    INSERT INTO signal (queue, channel, dequeue_at, message_id, counted, urgent)
    VALUES (NEW.queue, NEW.channel, NEW.dequeue_at, NEW.id, v_counted, OLD.leased_until IS NOT NULL
        OR (OLD.queue, OLD.channel, OLD.dequeue_at) IS DISTINCT FROM (NEW.queue, NEW.channel, NEW.dequeue_at));
    IF NEW.dequeue_at <= unix_ms(clock()) THEN
        PERFORM queue_notify(NEW.queue);
    END IF;
    RETURN NULL;
END
$$;

REVOKE EXECUTE ON FUNCTION signal_moved FROM PUBLIC;
