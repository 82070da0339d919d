-- Schedules and leases up to want messages of a queue: of each lane as many as its share of them is.
--
-- Called by scheduler_serve, whose settings hold here, within the turn; r is the state of that, which this writes on.
-- Where there is a plan, or each message is the first one of another lane, scheduler_serve knows quicker ways.
--
-- Looks at no more than so many lanes, the first ones, and deals out demand messages to them: more of either than are
-- wanted where the last try came out short, as lanes turned out to be empty or at a limit. Serves nothing from
-- bound_tag and bound_since on, where the next message of the plan stands. Returns what message_dequeue returns.
-- Locks: the messages that it leases, passing over those that somebody else holds; and the lanes that it changes.
CREATE FUNCTION scheduler_serve_shares(
    r rotation, want integer, demand integer, lanes integer, bound_tag bigint, bound_since bigint,
    clock timestamptz, lease_end timestamptz, worker text
) RETURNS SETOF leased_message
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_clock CONSTANT timestamptz := $7;
    v_until CONSTANT timestamptz := $8;
    v_worker CONSTANT text := $9;
    v_now CONSTANT bigint := unix_ms($7);
BEGIN
    RETURN QUERY
    -- The lanes that can have a part in the next want messages: those with the lowest tags.
    WITH competing AS MATERIALIZED (
        SELECT l.ctid AS lane, l.channel, l.tag, l.since, l.weight, l.head_at, l.head_id,
            lane_step(1, l.weight)::double precision AS step, l.max_concurrency IS NOT NULL AS is_counted,
            lane_room(v_now, l.max_concurrency, l.running, l.release_interval, l.burst, l.released_at) AS room
        FROM lane l
        WHERE l.queue = r.queue AND l.due = 0 AND (l.tag, l.since) > (r.vtime, r.vsince)
            AND (l.tag, l.since) < (bound_tag, bound_since)
        ORDER BY l.tag, l.since
        LIMIT lanes
    -- How many messages each may get, if all cost 1: those that start before the tag at which demand messages have
    -- started, which is the lowest level that water poured into the first lanes, one after the other, has. A guess:
    -- what costs make different is caught by the horizon below.
    ), levels AS (
        SELECT c.*, (demand - count(*) OVER w + sum((c.tag - r.vtime) / c.step) OVER w)
            / sum(1 / c.step) OVER w AS level
        FROM competing c
        WINDOW w AS (ORDER BY c.tag, c.since ROWS UNBOUNDED PRECEDING)
    ), shares AS (
        SELECT c.*, greatest(1, least(demand,
                floor((min(c.level) OVER () - (c.tag - r.vtime)) / c.step + 0.000001) + 1))::integer AS share,
            count(*) OVER () = lanes AS cut,
            first_value(c.tag) OVER w AS last_tag, first_value(c.since) OVER w AS last_since
        FROM levels c
        WINDOW w AS (ORDER BY c.tag DESC, c.since DESC)
    -- Their first messages, and one more, which tells where the lane stands afterwards. Those that somebody holds are
    -- passed over: they take no room, and cost nothing.
    ), candidates AS (
        SELECT s.lane, s.since, s.is_counted, s.cut, s.last_tag, s.last_since,
            m.row, m.id, m.dequeue_at, m.step, coalesce(m.is_held, false) AS is_held,
            row_number() OVER lane > least(s.share, s.room + demand - want) AS is_last,
            s.tag + (coalesce(sum(m.step) FILTER (WHERE NOT m.is_held) OVER lane, 0)
                - CASE WHEN m.is_held THEN 0 ELSE m.step END)::bigint AS start,
            coalesce(NOT m.is_held AND m.dequeue_at <= v_now
                AND count(*) FILTER (WHERE NOT m.is_held) OVER lane <= s.room, false) AS ripe
        FROM shares s
        LEFT JOIN LATERAL (
            SELECT m.ctid AS row, m.id, m.dequeue_at, lane_step(m.cost, s.weight) AS step,
                -- Of a row that nobody has ever locked or changed there is nothing to try. Of others xmax doesn't tell:
                -- those who hold it may be several, may not mind this, or may be this transaction.
                m.xmax <> '0' AND NOT EXISTS (
                    SELECT FROM message x WHERE x.ctid = m.ctid FOR NO KEY UPDATE SKIP LOCKED) AS is_held
            FROM message m
            WHERE m.queue = r.queue AND m.channel = s.channel AND m.leased_until IS NULL
                AND (m.dequeue_at, m.id) >= (s.head_at, s.head_id)
            ORDER BY m.dequeue_at, m.id
            -- Where the last try came out short, there may be more that is held than there is room.
            LIMIT least(s.share, s.room + demand - want) + 1) m ON true
        WINDOW lane AS (PARTITION BY s.since ORDER BY m.dequeue_at, m.id ROWS UNBOUNDED PRECEDING)
    ), placed AS (
        SELECT c.*,
            row_number() OVER (PARTITION BY c.ripe OR (c.is_held AND c.is_last) ORDER BY c.start, c.since) AS place
        FROM candidates c
    -- Beyond the last message that was fetched of a lane there may be others that go first; and beyond the last
    -- lane that competes, where there was no room for more, other lanes: some of these here may turn out empty.
    ), horizon AS (
        SELECT p.*, min(p.place) FILTER (WHERE p.is_last AND (p.ripe OR p.is_held)) OVER () AS horizon
        FROM placed p
    ), marked AS MATERIALIZED (
        SELECT h.*, h.ripe AND h.place <= least(want, h.horizon)
            AND (NOT h.cut OR (h.start, h.since) <= (h.last_tag, h.last_since))
            AND (h.start, h.since) < (bound_tag, bound_since) AS taken
        FROM horizon h
    -- Locked one by one, as in scheduler_serve.
    ), held AS MATERIALIZED (
        SELECT m.row, k.place, k.is_counted
        FROM marked k
        CROSS JOIN LATERAL (
            SELECT m.ctid AS row FROM message m
            WHERE m.ctid = k.row AND m.leased_until IS NULL AND m.dequeue_at <= v_now
            FOR NO KEY UPDATE SKIP LOCKED) m
        WHERE k.taken
    ), leased AS (
        UPDATE message m
        SET attempt = least(m.attempt, 2147483646) + 1, leased_until = v_until, leased_at = v_clock,
            first_leased_at = coalesce(m.first_leased_at, v_clock), worker = v_worker,
            counted = CASE WHEN h.is_counted OR r.max_concurrency IS NOT NULL THEN r.turn END
        FROM held h
        WHERE m.ctid = h.row
        RETURNING m.id, m.channel, m.attempt, m.payload, m.body, m.state, m.error, m.dequeue_at, m.cost,
            m.created_at, m.leased_until, m.key, m.forgiven, m.first_leased_at, h.place
    -- A message that was passed over here, because somebody else locked or changed it just now, is news for the next
    -- turn. Its room goes to the next one, when the caller tries again.
    ), passed AS MATERIALIZED (
        SELECT k.lane, m.channel, k.dequeue_at, k.id
        FROM marked k JOIN message m ON m.ctid = k.row
        WHERE k.taken
            AND (SELECT count(*) FROM leased) < (SELECT count(*) FROM marked t WHERE t.taken)
            AND k.place NOT IN (SELECT d.place FROM leased d)  -- hashed; NOT EXISTS would be a join, by loops
    -- Lanes that have nothing left to serve but what is held, while others may go on, stand behind that, or become idle.
    -- It is news for the next turn, too: then they stand before it again.
    ), moves AS MATERIALIZED (
        SELECT m.lane, m.spent, m.served, m.again, m.last_at,
            CASE WHEN NOT m.is_stuck THEN coalesce(m.left_at, m.next_at)
                -- What stands behind thousands that are all held waits as they do, and costs others nothing.
                WHEN demand < 4096 OR m.spent > 0 THEN coalesce(m.free_at, m.next_at)
                ELSE m.free_at END AS head_at,
            CASE WHEN m.is_stuck THEN coalesce(m.free_id, m.next_id) ELSE m.left_id END AS head_id,
            CASE WHEN m.is_stuck THEN m.left_at END AS held_at, m.left_id AS held_id
        FROM (
            SELECT k.lane, coalesce(sum(k.step) FILTER (WHERE k.taken), 0)::bigint AS spent,
                (count(*) FILTER (WHERE k.taken) - min(u.passed))::integer AS served,
                CASE WHEN min(u.passed) > 0 THEN v_now ELSE 0 END AS again,
                bool_or(k.is_held) AND NOT bool_or(k.ripe AND NOT k.taken) AS is_stuck,
                min(k.dequeue_at) FILTER (WHERE NOT k.taken) AS left_at,
                min(k.id) FILTER (WHERE NOT k.taken) AS left_id,
                min(k.dequeue_at) FILTER (WHERE NOT (k.taken OR k.is_held)) AS free_at,
                min(k.id) FILTER (WHERE NOT (k.taken OR k.is_held)) AS free_id,
                max(k.dequeue_at) FILTER (WHERE k.is_last) AS next_at,
                -- Of the last of all numbers there is none behind it.
                least(max(k.id) FILTER (WHERE k.is_last), 9223372036854775806) + 1 AS next_id, max(k.dequeue_at) AS last_at
            FROM marked k CROSS JOIN LATERAL (
                SELECT count(*) AS passed FROM passed p WHERE p.lane = k.lane) u
            GROUP BY k.lane) m
    ), missed AS (
        INSERT INTO signal (queue, channel, dequeue_at, message_id, urgent)
        SELECT r.queue, p.channel, p.dequeue_at, p.id, true
        FROM passed p
        UNION ALL
        SELECT r.queue, (SELECT l.channel FROM lane l WHERE l.ctid = v.lane), v.held_at, v.held_id, true
        FROM moves v
        WHERE v.held_at IS NOT NULL
    ), moved AS (
        UPDATE lane l
        SET tag = l.tag + v.spent,
            -- A limited lane that passed over a message was not looked at beyond its limit, while others went on:
            -- it becomes active anew, at the virtual time.
            due = CASE WHEN v.head_at IS NOT NULL THEN greatest(
                lane_due(v_now, v.head_at, l.paused_until, l.max_concurrency, l.running + v.served,
                    l.release_interval, l.burst, lane_released(v_now, v.served, l.release_interval, l.released_at)),
                CASE WHEN l.max_concurrency IS NOT NULL OR l.release_interval > 0 THEN v.again END) END,
            head_at = coalesce(v.head_at, v.last_at, l.head_at),
            head_id = coalesce(v.head_id, 0),
            running = CASE WHEN l.max_concurrency IS NULL THEN 0 ELSE l.running + v.served END,
            released_at = lane_released(v_now, v.served, l.release_interval, l.released_at)
        FROM moves v
        WHERE l.ctid = v.lane
        RETURNING l.due
    ), last AS (
        SELECT k.start, k.since FROM marked k WHERE k.taken ORDER BY k.place DESC LIMIT 1
    ), turned AS (
        UPDATE rotation t
        SET turn = t.turn + 1, era = rotation_era(t.turn + 1),
            vtime = coalesce((SELECT a.start FROM last a), r.vtime),
            vsince = coalesce((SELECT a.since FROM last a), r.vsince),
            activations = r.activations, news_from = r.news_from, news_open = r.news_open,
            urgent_from = r.urgent_from, urgent_open = r.urgent_open,
            due_floor = least(r.due_floor, (SELECT min(v.due) FROM moved v WHERE v.due > 0)),
            lease_floor = least(r.lease_floor, v_until), idle_floor = r.idle_floor, swept = r.swept,
            max_concurrency = r.max_concurrency, paused_until = r.paused_until,
            running = CASE WHEN r.max_concurrency IS NULL THEN 0
                ELSE r.running + (SELECT count(*) FROM leased)::integer END,
            counted_from = r.counted_from, clock = r.clock, maintain_at = r.maintain_at,
            place = r.place, planned = r.planned,
            ahead = least(r.ahead + (SELECT count(*) FROM leased), plan_most()), plan_at = r.plan_at,
            lane_tag = NULL, lane_since = NULL
        WHERE t.queue = r.queue AND t.era = r.era
    )
    SELECT d.id, d.channel, d.attempt, d.payload, d.body, d.state, d.error, d.dequeue_at, d.cost, d.created_at,
        d.leased_until, d.key, d.forgiven, d.first_leased_at
    FROM leased d
    ORDER BY d.place;
END
$$;
