-- Takes messages out of the queue for good, other than by completion, and writes what became of them.
--
-- Called by message_cancel ('cancelled'), by message_fail and scheduler_bury ('dead'), and by message_arrive, when a
-- message has no room in its channel ('dropped'). Where an error is given, it stands instead of the messages' own. Dead
-- messages go to dead_message. What was dropped is always written to history, the rest unless the queue's history_days
-- is 0.
-- Locks: the messages it deletes, in the order of ids, until the end of the transaction.
--
-- Returns the ids of the messages that it deleted.
CREATE FUNCTION message_finish(ids bigint[], outcome text, error text DEFAULT NULL) RETURNS bigint[]
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_outcome CONSTANT text := $2;
    v_error CONSTANT text := $3;
    v_gone bigint[];
BEGIN
    WITH named AS MATERIALIZED (
        SELECT l.id FROM unnest(ids) AS l (id) ORDER BY l.id
    ), gone AS (
        -- Not =: see lease_list.
        DELETE FROM message m USING named l WHERE m.id BETWEEN l.id AND l.id
        RETURNING m.*, coalesce(v_error, m.error) AS last_error
    ), buried AS (
        INSERT INTO dead_message (id, queue, channel, key, payload, body, cost, max_attempts, backoff, attempt, worker,
            state, error, created_at, first_leased_at)
        SELECT g.id, g.queue, g.channel, g.key, g.payload, g.body, g.cost, g.max_attempts, g.backoff, g.attempt,
            g.worker, g.state, g.last_error, g.created_at, g.first_leased_at
        FROM gone g
        WHERE v_outcome = 'dead'
        -- Only where somebody has chosen an id that was taken: the dead letter that is there stays, and nothing stops.
        ON CONFLICT ON CONSTRAINT dead_message_pkey DO NOTHING
    ), written AS (
        INSERT INTO history (message_id, queue, channel, key, outcome, attempt, cost, error, worker, dequeue_at,
            created_at, first_leased_at, leased_at)
        SELECT g.id, g.queue, g.channel, g.key, v_outcome, g.attempt, g.cost, g.last_error, g.worker, g.dequeue_at,
            g.created_at, g.first_leased_at, g.leased_at
        FROM gone g
        WHERE v_outcome = 'dropped'
            OR g.queue <> ALL (ARRAY(SELECT q.name FROM queue q WHERE q.history_days = 0))
    )
    SELECT array_agg(g.id) INTO v_gone FROM gone g;

    RETURN coalesce(v_gone, '{}');
END
$$;

REVOKE EXECUTE ON FUNCTION message_finish FROM PUBLIC;
