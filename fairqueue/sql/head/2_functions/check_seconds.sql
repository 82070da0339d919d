-- Raises unless a number of seconds is between minimum and ten years (so neither null, NaN nor infinite).
--
-- Called by the functions that take a time span; takes no lock.
CREATE FUNCTION check_seconds(field text, seconds double precision, minimum double precision) RETURNS void
LANGUAGE plpgsql IMMUTABLE
AS $$
BEGIN
    IF seconds IS NULL OR NOT (seconds >= minimum AND seconds <= 315576000) THEN
        RAISE invalid_parameter_value USING
            MESSAGE = format('%s must be between %s and 315576000, not %s', field, minimum,
                coalesce(seconds::text, 'null'));
    END IF;
END
$$;
