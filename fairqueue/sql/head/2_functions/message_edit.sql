-- Trigger function of message_edited: refuses what can't be, and that a leased message goes to another channel, as what
-- a channel's limits count stays in the channel until it is over.
--
-- Takes no lock.
CREATE FUNCTION message_edit() RETURNS trigger
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    -- All of it: by now the row has it compressed, and what is new is measured as it is given.
    v_payload CONSTANT jsonb := NEW.payload #> '{}';
BEGIN
    IF OLD.leased_until IS NOT NULL AND (OLD.queue <> NEW.queue OR OLD.channel <> NEW.channel) THEN
        RAISE object_in_use USING
            MESSAGE = format('message %s is leased until %s and can''t be moved to channel %L of queue %L',
                OLD.id, OLD.leased_until, NEW.channel, NEW.queue),
            HINT = 'Wait until its lease has ended, or cancel it and enqueue it there.';
    END IF;
    IF NOT message_valid(NEW.queue, NEW.channel, NEW.key, v_payload, NEW.body, NEW.cost, NEW.max_attempts,
        NEW.backoff, NEW.created_at)
    THEN
        PERFORM message_refuse(NEW.queue, NEW.channel, NEW.key, v_payload, NEW.body, NEW.cost, NEW.max_attempts,
            NEW.backoff, NEW.created_at);
    END IF;
    RETURN NULL;
END
$$;
