-- Takes messages out of the queue for good, whether ready or leased.
--
-- Called by the application, with ids alone. Returns for each id, in the order given, 'cancelled' or 'not_found'. The
-- worker of a leased message learns it at its next heartbeat, at the latest when it completes: it is 'not_found'.
-- Called by workers with attempts too, for leases of their own that nobody needs any more; then 'stale' is another
-- result, as that of message_complete. The error is kept in history.
-- Locks: the messages it deletes, in the order of ids, until the end of the transaction.
CREATE FUNCTION message_cancel(
    ids bigint[], attempts integer[] DEFAULT NULL, error text DEFAULT NULL
) RETURNS TABLE (id bigint, result text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_error CONSTANT text := $3;
    v_done bigint[];
    v_attempts integer[];
BEGIN
    IF ids IS NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = 'ids must be a list of message ids, not null';
    END IF;
    IF attempts IS NULL THEN
        v_done := message_finish(ids, 'cancelled', v_error);
    ELSE
        WITH lease AS MATERIALIZED (
            SELECT DISTINCT l.id, l.attempt FROM lease_list(ids, attempts) l ORDER BY l.id
        ), held AS MATERIALIZED (
            SELECT m.id, m.attempt
            FROM lease l JOIN message m ON m.id BETWEEN l.id AND l.id
            WHERE m.attempt BETWEEN l.attempt AND l.attempt AND is_leased(m.leased_until)
            FOR UPDATE OF m
        )
        SELECT array_agg(h.id), array_agg(h.attempt) INTO v_done, v_attempts FROM held h;
        PERFORM message_finish(v_done, 'cancelled', v_error);
    END IF;

    RETURN QUERY SELECT * FROM lease_results(ids, attempts, v_done, v_attempts, 'cancelled');
END
$$;

REVOKE EXECUTE ON FUNCTION message_cancel FROM PUBLIC;
