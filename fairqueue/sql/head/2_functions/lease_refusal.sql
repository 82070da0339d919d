-- Why an act on a lease was refused: 'stale' (the message is there, the lease is over) or 'not_found'.
--
-- Called by the functions that end or extend leases, for the messages they did not touch; takes no lock.
CREATE FUNCTION lease_refusal(id bigint) RETURNS text
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN CASE WHEN EXISTS (SELECT FROM message m WHERE m.id = $1) THEN 'stale' ELSE 'not_found' END;
END
$$;
