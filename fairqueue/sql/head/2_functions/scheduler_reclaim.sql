-- Puts messages whose lease ran out back into their own channels, in their old places.
--
-- Called by message_dequeue, which holds the turn, when a lease may have ended. The attempt stays counted. The
-- trigger message_moved signals the channels, so that each waits for its place in the rotation like any other.
-- Locks: the rows it returns to ready. Rows that somebody else holds are left for a later call: a completion may be
-- on its way in a long transaction, and the fence decides afterwards.
--
-- Returns the lower bound of all lease ends from now on, and whether leases that ran out may be left.
CREATE FUNCTION scheduler_reclaim(
    queue text, clock timestamptz, INOUT lease_floor timestamptz, max_messages integer, OUT more boolean
)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_floor CONSTANT timestamptz := $3;
    v_expired integer;
BEGIN
    WITH expired AS MATERIALIZED (
        SELECT m.ctid AS row
        FROM message m
        WHERE m.queue = v_queue AND m.leased_until >= v_floor AND m.leased_until <= clock
        ORDER BY m.leased_until
        LIMIT max_messages
        FOR NO KEY UPDATE SKIP LOCKED
    )
    UPDATE message m
    SET leased_until = NULL, error = format('the lease of attempt %s ran out', m.attempt)
    FROM expired e
    WHERE m.ctid = e.row;

    GET DIAGNOSTICS v_expired = ROW_COUNT;
    more := v_expired = max_messages;
    lease_floor := coalesce(
        (SELECT m.leased_until FROM message m
         WHERE m.queue = v_queue AND m.leased_until >= v_floor
         ORDER BY m.leased_until LIMIT 1),
        'infinity');
END
$$;
