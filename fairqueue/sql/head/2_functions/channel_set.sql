-- Sets the policy of a channel, creating its row where there is none.
--
-- Called by operators. Takes effect at the next dequeue (trigger channel_changed).
-- Locks: the row of the channel, until the end of the transaction. The scheduler only reads it.
CREATE FUNCTION channel_set(name text, queue text DEFAULT 'default', weight double precision DEFAULT 1) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
#variable_conflict use_variable
BEGIN
    INSERT INTO channel (queue, name, weight) VALUES (queue, name, weight)
    ON CONFLICT ON CONSTRAINT channel_pkey DO UPDATE SET weight = excluded.weight;
END
$$;

REVOKE EXECUTE ON FUNCTION channel_set FROM PUBLIC;
