-- The leases that a caller names, (ids[i], attempts[i]), in the order of ids; n is the place in the lists.
--
-- Called by message_complete, message_fail, message_defer and message_heartbeat; takes no lock. All of them touch
-- messages in the order of ids, so that two of them can't deadlock.
CREATE FUNCTION lease_list(ids bigint[], attempts integer[])
RETURNS TABLE (id bigint, attempt integer, n bigint)
LANGUAGE plpgsql IMMUTABLE ROWS 100
AS $$
#variable_conflict use_column
BEGIN
    IF ids IS NULL OR attempts IS NULL OR cardinality(ids) <> cardinality(attempts) THEN
        RAISE invalid_parameter_value USING
            MESSAGE = format('ids and attempts must have the same length, not %s and %s',
                coalesce(cardinality(ids)::text, 'null'), coalesce(cardinality(attempts)::text, 'null'));
    END IF;
    RETURN QUERY
    SELECT * FROM unnest(ids, attempts) WITH ORDINALITY AS l (id, attempt, n) ORDER BY l.id;
END
$$;
