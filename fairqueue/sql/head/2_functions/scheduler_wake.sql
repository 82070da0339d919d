-- Makes ready up to max_lanes lanes whose time has come.
--
-- Called by scheduler_serve, within the turn, when a lane may be due. Like every channel that becomes active, a lane
-- starts at max(its own tag, vtime, the rotation's arrival_tag); unless it has planned messages, behind which it stands.
-- Locks: the lanes it changes.
--
-- Returns the lower bound of the times at which the lanes that still wait are due, and the number of activations so
-- far.
CREATE FUNCTION scheduler_wake(
    queue text, vtime bigint, now_ms bigint, max_lanes integer, INOUT due_floor bigint, INOUT activations bigint
)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_vtime CONSTANT bigint := $2;
    v_floor CONSTANT bigint := $5;
    v_activations CONSTANT bigint := $6;
    v_vsince bigint;
    v_start bigint;
    v_is_planned boolean;
    v_woken integer;
BEGIN
    SELECT t.vsince, greatest(v_vtime, t.arrival_tag), t.planned > t.place INTO v_vsince, v_start, v_is_planned
    FROM rotation t WHERE t.queue = v_queue ORDER BY t.era DESC LIMIT 1;
    WITH due AS MATERIALIZED (
        SELECT l.ctid AS row, l.due, l.head_id,
            v_is_planned AND (l.planned, l.since) > (v_vtime, v_vsince) AS is_planned
        FROM lane l
        WHERE l.queue = v_queue AND l.due > 0 AND l.due >= v_floor AND l.due <= now_ms
        ORDER BY l.due
        LIMIT max_lanes
    ), numbered AS MATERIALIZED (
        SELECT d.row, d.is_planned, v_activations + row_number() OVER (ORDER BY d.due, d.head_id) AS since FROM due d
    )
    UPDATE lane l SET due = 0, tag = CASE WHEN n.is_planned THEN l.tag ELSE greatest(l.tag, v_start) END,
        since = CASE WHEN n.is_planned THEN l.since ELSE n.since END,
        planned = CASE WHEN n.is_planned THEN l.planned ELSE -1 END
    FROM numbered n
    WHERE l.ctid = n.row;

    GET DIAGNOSTICS v_woken = ROW_COUNT;
    activations := v_activations + v_woken;
    due_floor := coalesce(
        (SELECT l.due FROM lane l
         WHERE l.queue = v_queue AND l.due > 0 AND l.due >= v_floor
         ORDER BY l.due LIMIT 1),
        9223372036854775807);
END
$$;
