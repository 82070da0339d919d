-- Trigger function of message_stays: a leased message can't go to another channel, whose limits did not count it.
--
-- Takes no lock.
CREATE FUNCTION refuse_move() RETURNS trigger
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    RAISE object_in_use USING
        MESSAGE = format('message %s is leased until %s and can''t be moved to channel %L of queue %L',
            OLD.id, OLD.leased_until, NEW.channel, NEW.queue),
        HINT = 'Wait until its lease has ended, or cancel it and enqueue it there.';
END
$$;
