-- Raises unless on_conflict is one of those that there are.
--
-- Called by message_create and message_create_many; takes no lock.
CREATE FUNCTION check_on_conflict(on_conflict text) RETURNS void
LANGUAGE plpgsql IMMUTABLE
AS $$
BEGIN
    IF on_conflict IS NULL OR on_conflict NOT IN ('raise', 'ignore', 'replace') THEN
        RAISE invalid_parameter_value USING
            MESSAGE = format('on_conflict must be raise, ignore or replace, not %s', coalesce(on_conflict, 'null'));
    END IF;
END
$$;
