-- Raises unless a time to resume comes with a pause.
--
-- Called by channel_set and queue_set; takes no lock.
CREATE FUNCTION check_pause(paused boolean, resume_at timestamptz) RETURNS void
LANGUAGE plpgsql IMMUTABLE
AS $$
BEGIN
    IF resume_at IS NOT NULL AND paused IS NOT TRUE THEN
        RAISE invalid_parameter_value USING
            MESSAGE = format('resume_at is %s, but paused is %s', resume_at, coalesce(paused::text, 'null')),
            HINT = 'resume_at says until when a pause lasts: give paused => true with it.';
    END IF;
END
$$;
