-- Trigger function of channel_paused and queue_paused: a pause that begins doesn't end when an earlier one did.
--
-- The time until which that lasted stays in the row when it was resumed. Whoever then sets paused alone means a new
-- one; with the old time it would be over as it begins. A pause that is over by itself leaves paused as it is, too: then
-- whoever pauses again has to set the time, as channel_set and queue_set do. Takes no lock.
CREATE FUNCTION pause_begin() RETURNS trigger
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    IF NEW.paused AND NOT OLD.paused AND NEW.resume_at = OLD.resume_at AND NEW.resume_at <= clock() THEN
        NEW.resume_at := NULL;
    END IF;
    RETURN NEW;
END
$$;

REVOKE EXECUTE ON FUNCTION pause_begin FROM PUBLIC;
