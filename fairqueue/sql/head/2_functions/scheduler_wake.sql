-- Makes ready up to max_lanes lanes whose time has come.
--
-- Called by message_dequeue, within the turn, when a lane may be due. Like every channel that becomes active, a lane
-- starts at max(its own tag, vtime).
-- Locks: the lanes it changes.
--
-- Returns the lower bound of the times at which the lanes that still wait are due.
CREATE FUNCTION scheduler_wake(queue text, vtime bigint, now_ms bigint, due_floor bigint, max_lanes integer)
RETURNS bigint
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_vtime CONSTANT bigint := $2;
    v_floor CONSTANT bigint := $4;
BEGIN
    WITH due AS MATERIALIZED (
        SELECT l.ctid AS row FROM lane l
        WHERE l.queue = v_queue AND l.state = 'waiting' AND l.due >= v_floor AND l.due <= now_ms
        ORDER BY l.due
        LIMIT max_lanes
    )
    UPDATE lane l SET state = 'ready', tag = greatest(l.tag, v_vtime), due = NULL
    FROM due d
    WHERE l.ctid = d.row;

    RETURN coalesce(
        (SELECT l.due FROM lane l
         WHERE l.queue = v_queue AND l.state = 'waiting' AND l.due >= v_floor
         ORDER BY l.due LIMIT 1),
        9223372036854775807);
END
$$;
