-- Trigger function of channel_paused and queue_paused: a pause doesn't end when an earlier one would have.
--
-- Whoever sets paused alone means a new one. So the time until which one lasts goes with it when it is ended, and one
-- that has passed when another begins. A pause that is over by itself leaves both as they are: then whoever pauses
-- again has to set the time, as channel_set and queue_set do. Takes no lock.
CREATE FUNCTION pause_begin() RETURNS trigger
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    IF NEW.paused <> OLD.paused AND NEW.resume_at = OLD.resume_at AND (OLD.paused OR NEW.resume_at <= clock()) THEN
        NEW.resume_at := NULL;
    END IF;
    RETURN NEW;
END
$$;

REVOKE EXECUTE ON FUNCTION pause_begin FROM PUBLIC;
