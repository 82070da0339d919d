-- Puts messages whose lease ran out back into their own channels, in their old places.
--
-- Called by scheduler_serve, which holds the turn, when a lease may have ended. The attempt stays counted: a message
-- that has no more of them becomes a dead letter. The trigger message_moved signals the channels, so that each waits
-- for its place in the rotation like any other.
-- Locks: the rows it returns to ready or takes out. Rows that somebody else holds are left for a later call: a
-- completion may be on its way in a long transaction, and the fence decides afterwards.
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
    v_max_attempts CONSTANT integer := coalesce((SELECT q.max_attempts FROM queue q WHERE q.name = $1), 20);
    v_expired integer;
    v_dead bigint[];
    v_id bigint;
    v_error text;
    v_end timestamptz;
BEGIN
    WITH expired AS MATERIALIZED (
        SELECT m.ctid AS row, m.id,
            m.attempt::bigint - m.forgiven >= coalesce(m.max_attempts, v_max_attempts) AS is_dead
        FROM message m
        WHERE m.queue = v_queue AND m.leased_until >= v_floor AND m.leased_until <= clock
        ORDER BY m.leased_until
        LIMIT max_messages
        FOR UPDATE SKIP LOCKED
    ), back AS (
        UPDATE message m
        SET leased_until = NULL, error = format('the lease of attempt %s ran out', m.attempt)
        FROM expired e
        WHERE m.ctid = e.row AND NOT e.is_dead
    )
    SELECT count(*), array_agg(e.id) FILTER (WHERE e.is_dead) INTO v_expired, v_dead FROM expired e;

    -- One that can't be a dead letter must not keep the others from it; nor, where it waits, the queue for long. It is
    -- put back, and tried again when its next lease has run out.
    IF v_dead IS NOT NULL AND scheduler_bury(v_dead) IS NOT NULL THEN
        v_end := clock_timestamp() + interval '1 second';
        FOREACH v_id IN ARRAY v_dead LOOP
            EXIT WHEN clock_timestamp() > v_end;
            v_error := scheduler_bury(ARRAY[v_id]);
            UPDATE message m
            SET leased_until = NULL,
                error = format('the lease of attempt %s ran out; no dead letter: %s', m.attempt, v_error)
            WHERE v_error IS NOT NULL AND m.id = v_id;
        END LOOP;
    END IF;
    more := v_expired = max_messages;
    lease_floor := coalesce(
        (SELECT m.leased_until FROM message m
         WHERE m.queue = v_queue AND m.leased_until >= v_floor
         ORDER BY m.leased_until LIMIT 1),
        'infinity');
END
$$;
