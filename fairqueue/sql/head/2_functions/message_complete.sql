-- Ends leases whose work is done: the messages are gone when the caller's transaction commits.
--
-- Called by workers, best in the transaction of the work itself. Returns for each lease, in the order given,
-- 'completed', 'stale' (the lease ran out and the message is, or was, somebody else's) or 'not_found'. Writes history,
-- unless the queue's history_days is 0.
-- Locks: the messages it deletes, until the end of the transaction. Only another act on the same lease waits for them.
CREATE FUNCTION message_complete(ids bigint[], attempts integer[]) RETURNS TABLE (id bigint, result text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_done bigint[];
    v_attempts integer[];
BEGIN
    WITH lease AS MATERIALIZED (
        -- As lease_list, but that the lists are compared below: where a call for each message counts, so does that.
        SELECT l.id, l.attempt FROM unnest(ids, attempts) AS l (id, attempt) ORDER BY l.id
    ), done AS (
        DELETE FROM message m USING lease l
        -- No equality in it: with one there could be other joins than a loop over the leases.
        WHERE m.id BETWEEN l.id AND l.id AND m.attempt BETWEEN l.attempt AND l.attempt AND is_leased(m.leased_until)
        RETURNING m.id, m.queue, m.channel, m.key, m.attempt, m.cost, m.worker, m.dequeue_at, m.created_at,
            m.first_leased_at, m.leased_at
    ), written AS (
        INSERT INTO history (message_id, queue, channel, key, outcome, attempt, cost, worker, dequeue_at,
            created_at, first_leased_at, leased_at)
        SELECT d.id, d.queue, d.channel, d.key, 'completed', d.attempt, d.cost, d.worker, d.dequeue_at,
            d.created_at, d.first_leased_at, d.leased_at
        FROM done d
        -- Asked once, not for each message.
        WHERE d.queue <> ALL (ARRAY(SELECT q.name FROM queue q WHERE q.history_days = 0))
    )
    SELECT array_agg(d.id), array_agg(d.attempt) INTO v_done, v_attempts FROM done d;

    IF cardinality(ids) = cardinality(attempts) THEN
        IF cardinality(v_done) = cardinality(ids) THEN
            -- No statement, where a call for each message counts.
            result := 'completed';
            FOREACH id IN ARRAY ids LOOP
                RETURN NEXT;
            END LOOP;
            RETURN;
        END IF;
    ELSE
        PERFORM lease_refuse(ids, attempts);
    END IF;
    RETURN QUERY SELECT * FROM lease_results(ids, attempts, v_done, v_attempts, 'completed');
END
$$;

REVOKE EXECUTE ON FUNCTION message_complete FROM PUBLIC;
