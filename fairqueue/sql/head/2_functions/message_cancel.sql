-- Takes messages out of the queue for good, whether ready or leased.
--
-- Called by the application. Returns for each id, in the order given, 'cancelled' or 'not_found'. The worker of a
-- leased message learns it at its next heartbeat, at the latest when it completes: the message is 'not_found'.
-- Locks: the messages it deletes, in the order of ids, until the end of the transaction.
CREATE FUNCTION message_cancel(ids bigint[]) RETURNS TABLE (id bigint, result text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    v_done bigint[];
BEGIN
    IF ids IS NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = 'ids must be a list of message ids, not null';
    END IF;
    v_done := message_finish(ids, 'cancelled');

    RETURN QUERY SELECT * FROM lease_results(ids, NULL, v_done, NULL, 'cancelled');
END
$$;

REVOKE EXECUTE ON FUNCTION message_cancel FROM PUBLIC;
