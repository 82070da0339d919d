-- Schedules some max_messages messages of a queue ahead: finds their order and writes it to plan. Among so many
-- channels that each would come up less than twice, it schedules up to 8 times as many (up to 3072). Where each would
-- come up less than two and a half times then, so that many of them wouldn't twice: only the heads of lanes
-- (scheduler_plan_heads), or nothing.
--
-- Called by scheduler_serve, within the turn, and by scheduler_extend, where much is waiting and little is planned:
-- probing a channel and writing its lane, which is most of what fairness costs, is then done once for several of its
-- messages. Planned is only what needs no second look when its time comes: messages of lanes without limits, and of each
-- all but the last one that is ready, so that the lane stays active.
-- Locks: the lanes that it changes, and the rows of plan that it deletes.
--
-- heads: whether it pays to plan the heads of lanes alone.
-- place is that of the last message that was served, planned that of the last one that was planned: those that this
-- plans follow it. Returns how many they are, and the earliest time at which one of the lanes that now wait is due.
CREATE FUNCTION scheduler_plan(
    queue text, vtime bigint, vsince bigint, now_ms bigint, max_messages integer, place bigint, planned bigint,
    heads boolean, OUT messages integer, OUT due_floor bigint
)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_place CONSTANT bigint := $6;
    v_planned CONSTANT bigint := $7;
    v_tag bigint := $2;
    v_since bigint := $3;
    v_longest CONSTANT integer := greatest(max_messages, least(8 * max_messages, 3072));
    -- With more of them, each would come up less than two and a half times.
    v_most_lanes CONSTANT integer := 2 * v_longest / 5;
BEGIN
    messages := 0;
    due_floor := 9223372036854775807;
    -- No more than that has been served since this was last done.
    DELETE FROM plan p WHERE p.queue = v_queue AND p.place > v_place - 4 * plan_most() AND p.place <= v_place - 32;

    -- What is planned is continued only where all lanes stand behind it: one that came since would never get into it.
    IF v_planned > v_place THEN
        SELECT p.tags[v_planned - p.place + 1], p.sinces[v_planned - p.place + 1] INTO v_tag, v_since
        FROM plan p
        WHERE p.queue = v_queue AND p.place > v_planned - 32 AND p.place <= v_planned
        ORDER BY p.place DESC LIMIT 1;
        -- Not found: it was taken back just now.
        IF NOT FOUND OR EXISTS (
            SELECT FROM lane l
            WHERE l.queue = v_queue AND l.due = 0 AND (l.tag, l.since) > (vtime, vsince)
                AND (l.tag, l.since) < (v_tag, v_since))
        THEN
            RETURN;
        END IF;
    END IF;

    IF EXISTS (
        SELECT FROM lane l
        WHERE l.queue = v_queue AND l.due = 0 AND (l.tag, l.since) > (v_tag, v_since)
        ORDER BY l.tag, l.since
        OFFSET v_most_lanes LIMIT 1)
    THEN
        -- So few that it takes a fiftieth of a second.
        IF heads THEN
            SELECT h.messages, h.due_floor INTO messages, due_floor
            FROM scheduler_plan_heads(v_queue, v_tag, v_since, now_ms, least(max_messages, 1536), v_planned) h;
        END IF;
        RETURN;
    END IF;

    WITH competing AS MATERIALIZED (
        SELECT l.ctid AS lane, l.channel, l.tag, l.since, l.weight, l.head_at, l.head_id, l.gap_at, l.gap_id,
            lane_step(1, l.weight)::double precision AS step,
            l.max_concurrency IS NULL AND l.release_interval = 0 AS is_free
        FROM lane l
        WHERE l.queue = v_queue AND l.due = 0 AND (l.tag, l.since) > (v_tag, v_since)
        ORDER BY l.tag, l.since
        LIMIT v_most_lanes
    ), total AS MATERIALIZED (
        SELECT CASE WHEN 2 * count(*) <= max_messages THEN max_messages ELSE v_longest END AS messages
        FROM competing k
        HAVING bool_and(k.is_free)
    -- How many messages each may get, if all cost 1: as in scheduler_serve_shares.
    ), levels AS (
        SELECT c.*, t.messages, (t.messages - count(*) OVER w + sum((c.tag - v_tag) / c.step) OVER w)
            / sum(1 / c.step) OVER w AS level
        FROM total t CROSS JOIN competing c
        WINDOW w AS (ORDER BY c.tag, c.since ROWS UNBOUNDED PRECEDING)
    ), shares AS (
        SELECT c.*, greatest(1, least(c.messages,
            floor((min(c.level) OVER () - (c.tag - v_tag)) / c.step + 0.000001) + 1))::integer AS share
        FROM levels c
    -- Up to where so many, and some more, are likely to stand: not before the head, to which a large number may be
    -- rounded, nor beyond the present.
    ), reaches AS (
        SELECT s.*, least(now_ms, greatest(s.head_at,
                least(now_ms, s.head_at + s.gap_at * 1.25 * (s.share + 2))::bigint)) AS reach_at,
            CASE WHEN s.gap_at > 0 THEN 9223372036854775807 ELSE greatest(s.head_id,
                least(9e18, s.head_id + s.gap_id * 1.25 * (s.share + 2))::bigint) END AS reach_id
        FROM shares s
    -- The last one of a lane isn't planned: so the lane stays active.
    ), candidates AS MATERIALIZED (
        SELECT s.lane, s.channel, s.since, m.row, m.id, m.attempt, m.dequeue_at, m.nth > s.share AS is_beyond, m.is_last,
            s.tag + m.before AS start, s.tag + m.before - m.previous_step AS previous_start,
            (m.dequeue_at::double precision - s.head_at) / nullif(m.nth - 1, 0) AS gap_at,
            greatest(0, (m.id::double precision - s.head_id) / nullif(m.nth - 1, 0)) AS gap_id
        FROM reaches s
        CROSS JOIN LATERAL (
            SELECT m.row, m.id, m.attempt, m.dequeue_at, row_number() OVER w AS nth, lead(m.id) OVER w IS NULL AS is_last,
                (sum(m.step) OVER w)::bigint - m.step AS before, lag(m.step) OVER w AS previous_step
            FROM (
                SELECT m.row, m.id, m.attempt, m.dequeue_at, lane_step(m.cost, s.weight) AS step
                -- An index scan reads all that is within its bounds on a page, though few are wanted: so there are two,
                -- and the second one is begun only where the first one, which has a bound nearby, finds too little.
                FROM (
                    (SELECT m.ctid AS row, m.id, m.attempt, m.dequeue_at, m.cost
                    FROM message m
                    WHERE m.queue = v_queue AND m.channel = s.channel AND m.leased_until IS NULL
                        AND (m.dequeue_at, m.id) >= (s.head_at, s.head_id)
                        AND (m.dequeue_at, m.id) <= (s.reach_at, s.reach_id)
                    ORDER BY m.dequeue_at, m.id
                    LIMIT s.share + 1)
                    UNION ALL
                    (SELECT m.ctid, m.id, m.attempt, m.dequeue_at, m.cost
                    FROM message m
                    WHERE m.queue = v_queue AND m.channel = s.channel AND m.leased_until IS NULL
                        AND (m.dequeue_at, m.id) >= (s.head_at, s.head_id)
                        AND (m.dequeue_at, m.id) > (s.reach_at, s.reach_id) AND m.dequeue_at <= now_ms
                    ORDER BY m.dequeue_at, m.id
                    LIMIT s.share + 1)) m
                LIMIT s.share + 1) m
            WINDOW w AS (ORDER BY m.dequeue_at, m.id ROWS UNBOUNDED PRECEDING)) m
    -- Up to where a lane may have more than was looked at.
    ), planned AS MATERIALIZED (
        SELECT array_agg(c.row) AS rows, array_agg(c.id) AS ids, array_agg(c.attempt) AS attempts,
            array_agg(c.start) AS tags, array_agg(c.since) AS sinces, array_agg(c.channel) AS channels,
            count(*)::integer AS messages
        FROM (
            SELECT c.row, c.id, c.attempt, c.start, c.since, c.channel
            FROM candidates c
            WHERE NOT c.is_last
                AND c.start < coalesce((SELECT min(k.start) FROM candidates k WHERE k.is_beyond), 9223372036854775807)
            ORDER BY c.start, c.since
            LIMIT (SELECT t.messages FROM total t)) c
    ), last AS MATERIALIZED (
        SELECT p.tags[p.messages] AS start, p.sinces[p.messages] AS since FROM planned p
    -- A lane stands at the first of its messages that isn't planned.
    ), moves AS MATERIALIZED (
        SELECT c.lane, c.start, c.previous_start, c.dequeue_at, c.id, c.gap_at, c.gap_id
        FROM last k CROSS JOIN candidates c
        WHERE (c.previous_start, c.since) <= (k.start, k.since)
            AND (c.is_last OR (c.start, c.since) > (k.start, k.since))
    ), worthwhile AS MATERIALIZED (
        SELECT p.* FROM planned p WHERE p.messages >= 2 * (SELECT count(*) FROM moves)
    ), moved AS (
        UPDATE lane l
        SET tag = v.start, head_at = v.dequeue_at, head_id = v.id, planned = v.previous_start, gap_at = v.gap_at,
            gap_id = v.gap_id
        FROM moves v
        WHERE l.ctid = v.lane AND EXISTS (SELECT FROM worthwhile)
    )
    SELECT scheduler_plan_write(v_queue, v_planned, w.rows, w.ids, w.attempts, w.tags, w.sinces, w.channels) INTO messages
    FROM worthwhile w;
    messages := coalesce(messages, 0);
END
$$;
