-- Schedules and leases up to want messages of a queue, in the simple case: the first ones of as many lanes.
--
-- Called by scheduler_serve, whose settings hold here, within the turn; r is the state of that, which this writes on.
-- They go in the order of the lanes, as long as no lane would come again before the last of them, and none from bound_tag
-- and bound_since on, where the next message of the plan stands. Where that is less than half of what is wanted, or a
-- message is held by somebody, this serves nothing: scheduler_serve_shares does then, which takes twice as long. Returns
-- what message_dequeue returns.
-- Locks: the messages that it leases, and their lanes; and lanes before them that have none.
CREATE FUNCTION scheduler_serve_heads(
    r rotation, want integer, bound_tag bigint, bound_since bigint,
    clock timestamptz, lease_end timestamptz, worker text
) RETURNS SETOF leased_message
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_clock CONSTANT timestamptz := $5;
    v_until CONSTANT timestamptz := $6;
    v_worker CONSTANT text := $7;
    v_now CONSTANT bigint := unix_ms($5);
BEGIN
    RETURN QUERY
    WITH seen AS (
        SELECT c.lane, c.tag, c.since, c.is_counted, m.row, m.id, m.dequeue_at, m.next_at, m.next_id,
            c.tag + lane_step(m.cost, c.weight) AS next_tag,
            coalesce(m.dequeue_at <= v_now AND c.room > 0, false) AS ripe
        FROM (
            SELECT l.ctid AS lane, l.channel, l.tag, l.since, l.weight, l.head_at, l.head_id,
                l.max_concurrency IS NOT NULL AS is_counted,
                lane_room(v_now, l.max_concurrency, l.running, l.release_interval, l.burst, l.released_at)
                    AS room
            FROM lane l
            WHERE l.queue = r.queue AND l.due = 0 AND (l.tag, l.since) > (r.vtime, r.vsince)
                AND (l.tag, l.since) < (bound_tag, bound_since)
            ORDER BY l.tag, l.since
            LIMIT want) c
        LEFT JOIN LATERAL (
            SELECT m.row, m.id, m.dequeue_at, m.cost, lead(m.dequeue_at) OVER w AS next_at,
                lead(m.id) OVER w AS next_id
            FROM (
                SELECT m.ctid AS row, m.id, m.dequeue_at, m.cost
                FROM message m
                WHERE m.queue = r.queue AND m.channel = c.channel AND m.leased_until IS NULL
                    AND (m.dequeue_at, m.id) >= (c.head_at, c.head_id)
                ORDER BY m.dequeue_at, m.id
                LIMIT 2) m
            WINDOW w AS (ORDER BY m.dequeue_at, m.id)
            ORDER BY m.dequeue_at, m.id
            LIMIT 1) m ON true
        -- Kept apart: merged, what this makes would be written out each time that it is used below.
        OFFSET 0
    ), first AS MATERIALIZED (
        SELECT s.*, s.ripe AND s.tag < min(s.next_tag) FILTER (WHERE s.ripe) OVER () AS taken
        FROM seen s
    ), held AS MATERIALIZED (
        SELECT m.row = f.row AS is_same
        FROM first f
        CROSS JOIN LATERAL (
            SELECT m.ctid AS row FROM message m
            WHERE m.ctid = f.row AND m.leased_until IS NULL AND m.dequeue_at <= v_now
            FOR NO KEY UPDATE SKIP LOCKED) m
        WHERE f.taken
    ), served AS MATERIALIZED (
        SELECT count(*)::integer AS messages, max(f.tag) AS vtime,
            count(*) = (SELECT count(*) FROM held h WHERE h.is_same) AND count(*) * 2 >= want AS is_simple
        FROM first f
        WHERE f.taken
    ), leased AS (
        UPDATE message m
        SET attempt = least(m.attempt, 2147483646) + 1, leased_until = v_until, leased_at = v_clock,
            first_leased_at = coalesce(m.first_leased_at, v_clock), worker = v_worker,
            counted = CASE WHEN f.is_counted OR r.max_concurrency IS NOT NULL THEN r.turn END
        FROM first f
        WHERE m.ctid = f.row AND f.taken AND (SELECT s.is_simple FROM served s)
        RETURNING m.id, m.channel, m.attempt, m.payload, m.body, m.state, m.error, m.dequeue_at, m.cost,
            m.created_at, m.leased_until, m.key, m.forgiven, m.first_leased_at, f.tag, f.since
    ), moved AS (
        UPDATE lane l
        SET tag = CASE WHEN f.taken THEN f.next_tag ELSE l.tag END,
            due = lane_due(v_now, CASE WHEN f.taken THEN f.next_at ELSE f.dequeue_at END, l.paused_until,
                l.max_concurrency, l.running + f.taken::integer, l.release_interval, l.burst,
                lane_released(v_now, f.taken::integer, l.release_interval, l.released_at)),
            head_at = coalesce(CASE WHEN f.taken THEN f.next_at END, f.dequeue_at, l.head_at),
            head_id = coalesce(CASE WHEN f.taken THEN f.next_id ELSE f.id END, 0),
            running = CASE WHEN l.max_concurrency IS NULL THEN 0 ELSE l.running + f.taken::integer END,
            released_at = lane_released(v_now, f.taken::integer, l.release_interval, l.released_at)
        FROM first f
        WHERE l.ctid = f.lane AND (f.taken OR NOT f.ripe) AND (SELECT s.is_simple FROM served s)
        RETURNING l.due
    ), turned AS (
        UPDATE rotation t
        SET turn = t.turn + 1, era = rotation_era(t.turn + 1), vtime = s.vtime,
            vsince = (SELECT max(f.since) FROM first f WHERE f.taken AND f.tag = s.vtime),
            activations = r.activations, news_from = r.news_from, news_open = r.news_open,
            urgent_from = r.urgent_from, urgent_open = r.urgent_open,
            due_floor = least(r.due_floor, (SELECT min(v.due) FROM moved v WHERE v.due > 0)),
            lease_floor = least(r.lease_floor, v_until), idle_floor = r.idle_floor, swept = r.swept,
            max_concurrency = r.max_concurrency, paused_until = r.paused_until,
            running = CASE WHEN r.max_concurrency IS NULL THEN 0 ELSE r.running + s.messages END,
            counted_from = r.counted_from, clock = r.clock, maintain_at = r.maintain_at,
            place = r.place, planned = r.planned, ahead = least(r.ahead + s.messages, plan_most()),
            plan_at = r.plan_at, lane_tag = NULL, lane_since = NULL
        FROM served s
        WHERE t.queue = r.queue AND t.era = r.era AND s.is_simple
    )
    SELECT d.id, d.channel, d.attempt, d.payload, d.body, d.state, d.error, d.dequeue_at, d.cost,
        d.created_at, d.leased_until, d.key, d.forgiven, d.first_leased_at
    FROM leased d
    ORDER BY d.tag, d.since;
END
$$;
