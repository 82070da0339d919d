-- Says what is wrong with a list of leases.
--
-- Called by lease_list and message_complete; takes no lock. Returns nothing: it raises.
CREATE FUNCTION lease_refuse(ids bigint[], attempts integer[]) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE
AS $$
BEGIN
    RAISE invalid_parameter_value USING
        MESSAGE = format('ids and attempts must have the same length, not %s and %s',
            coalesce(cardinality(ids)::text, 'null'), coalesce(cardinality(attempts)::text, 'null'));
END
$$;
