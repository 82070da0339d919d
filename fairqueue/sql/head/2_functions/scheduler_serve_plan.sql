-- Leases up to want planned messages of a queue: those before the lane with the lowest tag.
--
-- Called by scheduler_serve, whose settings hold here, within the turn; r is the state of that, which this writes on.
-- lane_tag and lane_since are that lane's, which may be of a channel that came since, or whose planned messages have been
-- served; null where no lane has anything. Serves nothing where one of the messages isn't as it was. Returns what
-- message_dequeue returns.
-- Locks: the messages that it leases.
CREATE FUNCTION scheduler_serve_plan(
    r rotation, want integer, lane_tag bigint, lane_since bigint,
    clock timestamptz, lease_end timestamptz, worker text
) RETURNS SETOF leased_message
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_lane_tag CONSTANT bigint := $3;
    v_lane_since CONSTANT bigint := $4;
    v_clock CONSTANT timestamptz := $5;
    v_until CONSTANT timestamptz := $6;
    v_worker CONSTANT text := $7;
    v_now CONSTANT bigint := unix_ms($5);
BEGIN
    RETURN QUERY
    WITH next AS MATERIALIZED (
        SELECT e.row, e.id, e.tag, e.since, e.channel
        FROM plan p
        CROSS JOIN LATERAL unnest(p.rows, p.ids, p.tags, p.sinces, p.channels) WITH ORDINALITY
            AS e (row, id, tag, since, channel, nth)
        WHERE p.queue = r.queue AND p.place > r.place - 32 AND p.place <= r.place + want
            AND p.place + e.nth - 1 > r.place AND p.place + e.nth - 1 <= r.place + want
            AND (v_lane_tag IS NULL OR (e.tag, e.since) < (v_lane_tag, v_lane_since))
    -- One that was changed meanwhile may be another channel's now. Locked one by one: a join might begin with all
    -- messages, where there seem to be few.
    ), held AS MATERIALIZED (
        SELECT m.row = n.row AS is_same
        FROM next n
        CROSS JOIN LATERAL (
            SELECT m.ctid AS row FROM message m
            WHERE m.ctid = n.row AND m.id = n.id AND m.queue = r.queue AND m.channel = n.channel
                AND m.leased_until IS NULL AND m.dequeue_at <= v_now
            FOR NO KEY UPDATE SKIP LOCKED) m
    ), served AS MATERIALIZED (
        SELECT count(*)::integer AS messages, max(n.tag) AS vtime,
            count(*) = (SELECT count(*) FROM held h WHERE h.is_same) AND count(*) > 0 AS is_good
        FROM next n
    ), leased AS (
        UPDATE message m
        SET attempt = least(m.attempt, 2147483646) + 1, leased_until = v_until, leased_at = v_clock,
            first_leased_at = coalesce(m.first_leased_at, v_clock), worker = v_worker,
            counted = CASE WHEN r.max_concurrency IS NOT NULL THEN r.turn END
        FROM next n
        WHERE m.ctid = n.row AND (SELECT s.is_good FROM served s)
        RETURNING m.id, m.channel, m.attempt, m.payload, m.body, m.state, m.error, m.dequeue_at, m.cost,
            m.created_at, m.leased_until, m.key, m.forgiven, m.first_leased_at, n.tag, n.since
    ), turned AS (
        UPDATE rotation t
        SET turn = t.turn + 1, era = rotation_era(t.turn + 1), vtime = s.vtime,
            vsince = (SELECT max(n.since) FROM next n WHERE n.tag = s.vtime),
            activations = r.activations, news_from = r.news_from, news_open = r.news_open,
            urgent_from = r.urgent_from, urgent_open = r.urgent_open, due_floor = r.due_floor,
            lease_floor = least(r.lease_floor, v_until), idle_floor = r.idle_floor, swept = r.swept,
            max_concurrency = r.max_concurrency, paused_until = r.paused_until,
            running = CASE WHEN r.max_concurrency IS NULL THEN 0 ELSE r.running + s.messages END,
            counted_from = r.counted_from, clock = r.clock, maintain_at = r.maintain_at,
            place = r.place + s.messages, planned = r.planned, ahead = least(r.ahead + s.messages, plan_most()),
            plan_at = r.plan_at, lane_tag = coalesce(v_lane_tag, 9223372036854775807),
            lane_since = coalesce(v_lane_since, 9223372036854775807)
        FROM served s
        WHERE t.queue = r.queue AND t.era = r.era AND s.is_good
    )
    SELECT d.id, d.channel, d.attempt, d.payload, d.body, d.state, d.error, d.dequeue_at, d.cost,
        d.created_at, d.leased_until, d.key, d.forgiven, d.first_leased_at
    FROM leased d
    ORDER BY d.tag, d.since;
END
$$;
