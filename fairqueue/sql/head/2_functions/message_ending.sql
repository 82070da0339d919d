-- How messages ended: one row for each of ids, in the order given, that is neither ready nor leased any more.
--
-- Called by who waits for messages. The outcome is that of the last row in history, also where the clock was set back
-- before it; 'dead' also where the queue keeps no history; and null where nothing is known: no history is kept, or no
-- longer, or there never was such a message. Takes no lock.
CREATE FUNCTION message_ending(ids bigint[])
RETURNS TABLE (id bigint, outcome text, attempt integer, error text, finished_at timestamptz)
-- Stable: all statements see the same moment, so no message falls between them.
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_gone bigint[];
BEGIN
    IF ids IS NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = 'ids must be a list of message ids, not null';
    END IF;
    -- By themselves, because who waits asks often, and history has many partitions.
    v_gone := ARRAY(
        SELECT l.id FROM unnest(ids) WITH ORDINALITY AS l (id, n)
        WHERE (SELECT m.id FROM message m WHERE m.id = l.id) IS NULL
        ORDER BY l.n);
    IF v_gone = '{}' THEN
        RETURN;
    END IF;
    RETURN QUERY
    SELECT l.id, coalesce(h.outcome, d.outcome), coalesce(h.attempt, d.attempt), coalesce(h.error, d.error),
        coalesce(h.finished_at, d.died_at)
    FROM unnest(v_gone) WITH ORDINALITY AS l (id, n)
    LEFT JOIN LATERAL (
        SELECT h.outcome, h.attempt, h.error, h.finished_at
        FROM history h
        WHERE h.message_id = l.id
        ORDER BY h.attempt DESC, h.finished_at DESC
        LIMIT 1) h ON true
    LEFT JOIN LATERAL (
        SELECT 'dead' AS outcome, d.attempt, d.error, d.died_at
        FROM dead_message d
        WHERE d.id = l.id AND h.outcome IS NULL) d ON true
    ORDER BY l.n;
END
$$;

REVOKE EXECUTE ON FUNCTION message_ending FROM PUBLIC;
