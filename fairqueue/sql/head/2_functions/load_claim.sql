-- Notes that the caller's transaction loads something by this name. Returns null, or, where it has been loaded before, how
-- many rows that were: then there is nothing to do.
--
-- Called by a task that copies its part straight into message, before it does so; load_count follows in the same
-- transaction.
-- Locks: a row of load until the end of the transaction, so two tasks with the same part come one after the other.
CREATE FUNCTION load_claim(name text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
BEGIN
    INSERT INTO load (name, epoch) VALUES ($1, 0) ON CONFLICT ON CONSTRAINT load_pkey DO NOTHING;
    IF FOUND THEN
        RETURN NULL;
    END IF;
    RETURN (SELECT l.rows FROM load l WHERE l.name = $1);
END
$$;

REVOKE EXECUTE ON FUNCTION load_claim FROM PUBLIC;
