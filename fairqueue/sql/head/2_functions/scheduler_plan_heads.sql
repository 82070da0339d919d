-- Schedules up to max_messages messages of a queue ahead, one of each channel: the heads of as many lanes.
--
-- Called by scheduler_plan, where so many channels take turns that none would come up twice. No lane is visited less
-- often for it; but dequeues then take what is planned side by side, where each would have scheduled its own in a turn.
-- Planned is only what needs no second look when its time comes: messages of lanes without limits. A lane that has no
-- more becomes idle, though its last message is still to be served: if something comes for it until then, it stands
-- where it would have stood (scheduler_activate, scheduler_wake).
-- Locks: the lanes that it changes.
--
-- It plans behind tag and since; planned is the place of what stands there. Returns how many it has planned, which are
-- none where they would be few, and the earliest time at which one of the lanes that now wait is due.
CREATE FUNCTION scheduler_plan_heads(
    queue text, tag bigint, since bigint, now_ms bigint, max_messages integer, planned bigint,
    OUT messages integer, OUT due_floor bigint
)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_tag CONSTANT bigint := $2;
    v_since CONSTANT bigint := $3;
    v_planned CONSTANT bigint := $6;
BEGIN
    WITH competing AS MATERIALIZED (
        SELECT l.ctid AS lane, l.channel, l.tag, l.since, l.weight, l.head_at, l.head_id,
            l.max_concurrency IS NULL AND l.release_interval = 0 AS is_free
        FROM lane l
        WHERE l.queue = v_queue AND l.due = 0 AND (l.tag, l.since) > (v_tag, v_since)
        ORDER BY l.tag, l.since
        LIMIT max_messages
    ), seen AS MATERIALIZED (
        SELECT c.lane, c.channel, c.tag, c.since, m.row, m.dequeue_at, m.id, m.attempt, m.next_at, m.next_id,
            c.tag + lane_step(m.cost, c.weight) AS next_tag, coalesce(m.dequeue_at <= now_ms, false) AS is_ripe
        FROM competing c
        LEFT JOIN LATERAL (
            SELECT m.row, m.dequeue_at, m.id, m.attempt, m.cost, lead(m.dequeue_at) OVER w AS next_at,
                lead(m.id) OVER w AS next_id
            FROM (
                SELECT m.ctid AS row, m.dequeue_at, m.id, m.attempt, m.cost
                FROM message m
                WHERE m.queue = v_queue AND m.channel = c.channel AND m.leased_until IS NULL
                    AND (m.dequeue_at, m.id) >= (c.head_at, c.head_id)
                ORDER BY m.dequeue_at, m.id
                LIMIT 2) m
            WINDOW w AS (ORDER BY m.dequeue_at, m.id)
            ORDER BY m.dequeue_at, m.id
            LIMIT 1) m ON true
        WHERE (SELECT bool_and(k.is_free) FROM competing k)
    -- As long as none would come again before the last of them. Lanes without one become idle, or wait.
    ), heads AS MATERIALIZED (
        SELECT s.*
        FROM seen s
        LEFT JOIN (
            SELECT k.next_tag, k.since FROM seen k
            WHERE k.is_ripe AND k.next_at <= now_ms
            ORDER BY k.next_tag, k.since LIMIT 1) again ON true
        WHERE (s.tag, s.since) < (again.next_tag, again.since) IS NOT FALSE
        ORDER BY s.tag, s.since
    ), planned AS MATERIALIZED (
        SELECT array_agg(h.row) AS rows, array_agg(h.id) AS ids, array_agg(h.attempt) AS attempts,
            array_agg(h.tag) AS tags, array_agg(h.since) AS sinces, array_agg(h.channel) AS channels
        FROM heads h
        WHERE h.is_ripe
        HAVING count(*) * 2 >= max_messages
    ), moved AS (
        UPDATE lane l
        SET tag = CASE WHEN h.is_ripe THEN h.next_tag ELSE l.tag END,
            due = CASE WHEN NOT h.is_ripe THEN h.dequeue_at WHEN h.next_at <= now_ms THEN 0 ELSE h.next_at END,
            head_at = coalesce(CASE WHEN h.is_ripe THEN h.next_at END, h.dequeue_at, l.head_at),
            -- Behind what is planned: of the last of all numbers there is none behind it.
            head_id = CASE WHEN h.is_ripe THEN coalesce(h.next_id, least(h.id, 9223372036854775806) + 1)
                ELSE coalesce(h.id, l.head_id) END,
            planned = CASE WHEN h.is_ripe THEN h.tag ELSE l.planned END
        FROM heads h
        WHERE l.ctid = h.lane AND EXISTS (SELECT FROM planned)
        RETURNING l.due
    )
    SELECT coalesce((
            SELECT scheduler_plan_write(v_queue, v_planned, p.rows, p.ids, p.attempts, p.tags, p.sinces, p.channels)
            FROM planned p), 0),
        coalesce(min(v.due) FILTER (WHERE v.due > 0), 9223372036854775807)
    INTO messages, due_floor
    FROM moved v;
END
$$;
