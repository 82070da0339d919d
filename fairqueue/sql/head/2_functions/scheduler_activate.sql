-- Tells the lanes of some channels that there may be ready messages from (ats[i], ids[i]) on.
--
-- Called by scheduler_fold and scheduler_sweep, within the turn. A channel that becomes active starts at
-- max(its own tag, vtime): neither a pause nor a new name gains anything. A place of null only re-reads the policy.
-- Locks: the lanes it changes; nobody else writes lanes while the turn is held.
--
-- Returns the number of activations so far, and the earliest time at which one of the lanes that now wait is due.
CREATE FUNCTION scheduler_activate(
    queue text, vtime bigint, now_ms bigint, channels text[], ats bigint[], ids bigint[],
    INOUT activations bigint, OUT due_floor bigint
)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_vtime CONSTANT bigint := $2;
    v_activations CONSTANT bigint := $7;
BEGIN
    WITH known AS (
        SELECT n.channel, n.at, n.id, coalesce(c.weight, 1) AS weight, l.row, l.tag, l.since, l.state,
            l.head_at, l.head_id, coalesce(l.state, 'idle') = 'idle' AS was_idle, l.weight AS old_weight
        FROM unnest(channels, ats, ids) AS n (channel, at, id)
        LEFT JOIN LATERAL (
            SELECT l.ctid AS row, l.* FROM lane l
            WHERE l.queue = v_queue AND l.channel = n.channel
            ORDER BY l.tag DESC LIMIT 1) l ON true
        LEFT JOIN channel c ON c.queue = v_queue AND c.name = n.channel
    ), head AS (
        SELECT k.*, CASE
                WHEN k.at IS NULL THEN false
                WHEN k.was_idle THEN true
                ELSE (k.at, k.id) < (k.head_at, k.head_id) END AS is_head
        FROM known k
    ), wanted AS MATERIALIZED (
        SELECT h.row, h.channel, h.weight,
            CASE WHEN h.was_idle AND NOT h.is_head THEN 'idle'
                WHEN h.at <= now_ms AND h.is_head THEN 'ready'
                WHEN h.is_head AND h.state IS DISTINCT FROM 'ready' THEN 'waiting'
                ELSE h.state END AS state,
            CASE WHEN h.at <= now_ms AND h.is_head AND h.state IS DISTINCT FROM 'ready'
                THEN greatest(h.tag, v_vtime) ELSE coalesce(h.tag, v_vtime) END AS tag,
            CASE WHEN h.at <= now_ms AND h.is_head AND h.state IS DISTINCT FROM 'ready'
                THEN v_activations + row_number() OVER (ORDER BY h.id) ELSE coalesce(h.since, 0) END AS since,
            CASE WHEN h.is_head THEN h.at ELSE h.head_at END AS head_at,
            CASE WHEN h.is_head THEN h.id ELSE h.head_id END AS head_id
        FROM head h
        WHERE h.is_head OR h.weight <> h.old_weight
    ), changed AS (
        UPDATE lane l
        SET state = w.state, tag = w.tag, since = w.since, weight = w.weight, head_at = w.head_at,
            head_id = w.head_id, due = CASE WHEN w.state = 'waiting' THEN w.head_at END
        FROM wanted w
        WHERE l.ctid = w.row
    ), born AS (
        INSERT INTO lane (queue, channel, state, tag, since, weight, head_at, head_id, due)
        SELECT v_queue, w.channel, w.state, w.tag, w.since, w.weight, w.head_at, w.head_id,
            CASE WHEN w.state = 'waiting' THEN w.head_at END
        FROM wanted w
        WHERE w.row IS NULL
    )
    SELECT v_activations + count(*), coalesce(min(w.head_at) FILTER (WHERE w.state = 'waiting'), 9223372036854775807)
    INTO activations, due_floor
    FROM wanted w;
END
$$;
