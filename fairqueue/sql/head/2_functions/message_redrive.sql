-- Puts dead letters back into their channels, with all their attempts before them.
--
-- Called by operators: with ids for some, with a queue and a channel for those of a channel, with a queue for all of
-- it. A message keeps its id, its state, its last error, and its attempt, which is the fence: whoever still works on an
-- old lease of it stays 'stale'. Returns for each, in the order given or of ids, 'redriven', 'not_found', or
-- 'duplicate', where it stays dead because a live message of its channel has its key.
-- Locks: the dead letters, in the order of ids, until the end of the transaction; one that another call is putting back
-- is waited for and then 'not_found'. As any enqueue of keys, which are entered in their order, it waits for an open one
-- of the same.
CREATE FUNCTION message_redrive(ids bigint[] DEFAULT NULL, queue text DEFAULT NULL, channel text DEFAULT NULL)
RETURNS TABLE (id bigint, result text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_ids bigint[] := $1;
    v_queue CONSTANT text := $2;
    v_channel CONSTANT text := $3;
    v_now CONSTANT bigint := unix_ms(clock());
    v_found bigint[];
    v_done bigint[];
BEGIN
    IF num_nonnulls(v_ids, v_queue) <> 1 THEN
        RAISE invalid_parameter_value USING
            MESSAGE = format('one of ids and queue must be given, not %s',
                CASE WHEN v_queue IS NULL THEN 'none' ELSE 'both' END),
            HINT = 'All dead letters of a queue: message_redrive(queue => ''default'').';
    ELSIF v_channel IS NOT NULL AND v_queue IS NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = format('channel %L must be given with its queue', v_channel);
    END IF;
    IF v_channel IS NOT NULL THEN
        v_ids := ARRAY(SELECT d.id FROM dead_message d
            WHERE d.queue = v_queue AND d.channel = v_channel ORDER BY d.id);
    ELSIF v_queue IS NOT NULL THEN
        v_ids := ARRAY(SELECT d.id FROM dead_message d WHERE d.queue = v_queue ORDER BY d.id);
    END IF;

    WITH named AS MATERIALIZED (
        SELECT DISTINCT l.id FROM unnest(v_ids) AS l (id) ORDER BY l.id
    ), dead AS MATERIALIZED (
        SELECT d.* FROM named n CROSS JOIN LATERAL (
            SELECT d.* FROM dead_message d WHERE d.id = n.id FOR UPDATE) d
    ), live AS (
        INSERT INTO message (id, queue, channel, key, payload, body, dequeue_at, cost, max_attempts, backoff, attempt,
            forgiven, first_leased_at, worker, state, error, created_at)
        OVERRIDING SYSTEM VALUE
        SELECT d.id, d.queue, d.channel, d.key, d.payload, d.body, v_now, d.cost, d.max_attempts, d.backoff,
            d.attempt, d.attempt, d.first_leased_at, d.worker, d.state, d.error, d.created_at
        FROM dead d
        ORDER BY d.queue, d.channel, d.key, d.id
        ON CONFLICT DO NOTHING
        RETURNING message.id
    ), gone AS (
        -- Not =: see lease_list.
        DELETE FROM dead_message d USING live v WHERE d.id BETWEEN v.id AND v.id
    )
    SELECT array_agg(d.id), array_agg(v.id) FILTER (WHERE v.id IS NOT NULL) INTO v_found, v_done
    FROM dead d LEFT JOIN live v ON v.id = d.id;

    RETURN QUERY
    SELECT l.id, CASE WHEN v.id IS NOT NULL THEN 'redriven' WHEN f.id IS NOT NULL THEN 'duplicate'
        ELSE 'not_found' END
    FROM unnest(v_ids) WITH ORDINALITY AS l (id, n)
    LEFT JOIN unnest(v_found) AS f (id) ON f.id = l.id
    LEFT JOIN unnest(v_done) AS v (id) ON v.id = l.id
    ORDER BY l.n;
END
$$;

REVOKE EXECUTE ON FUNCTION message_redrive FROM PUBLIC;
