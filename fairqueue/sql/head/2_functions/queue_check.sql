-- What the scheduler keeps, compared with the rows that it was derived from: one row a difference, none when all is well.
--
-- Called by operators, on a live queue as well: it is one statement, so it sees one moment, and whatever dequeues and
-- users do, they do in transactions that keep both sides equal, counting the signals that are still to be folded.
-- Takes no lock. Reads everything that the scheduler keeps of the queue, and its leases; without a queue, of all.
CREATE FUNCTION queue_check(name text DEFAULT NULL)
RETURNS TABLE (queue text, channel text, problem text, expected text, found text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET jit = off
-- Joins by queue and channel, not each channel with each other one, however few the planner takes them for; and channels
-- one after the other by their index.
SET plan_cache_mode = force_custom_plan
SET enable_bitmapscan = off
SET enable_mergejoin = off
SET enable_nestloop = off
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_now CONSTANT bigint := unix_ms(clock());
BEGIN
    RETURN QUERY
    WITH RECURSIVE rotations AS MATERIALIZED (
        SELECT r.*, coalesce(pg_sequence_last_value(r.tickets) - r.ticket_base, 0) AS drawn
        FROM rotation r WHERE v_queue IS NULL OR r.queue = v_queue
    ), signals AS MATERIALIZED (
        SELECT s.*, s.message_id IS NULL AND s.counted IS NULL AS is_policy
        FROM signal s WHERE v_queue IS NULL OR s.queue = v_queue
    ), news AS MATERIALIZED (
        SELECT s.queue, s.channel, bool_or(s.is_policy) AS policy, bool_or(s.urgent) AS urgent
        FROM signals s
        GROUP BY s.queue, s.channel
    ), lanes AS MATERIALIZED (
        SELECT l.*, t.at, lane_due(t.at, l.head_at, l.paused_until, l.max_concurrency, l.running, l.release_interval, l.burst,
            l.released_at) AS new_due,
            q.queue IS NOT NULL OR coalesce(n.policy, false) OR t.is_behind AS has_policy_news,
            q.queue IS NOT NULL OR coalesce(n.urgent, false) OR t.is_behind AS has_urgent_news
        FROM lane l
        LEFT JOIN news n ON n.queue = l.queue AND n.channel = l.channel
        LEFT JOIN news q ON q.queue = l.queue AND q.channel IS NULL
        LEFT JOIN (
            SELECT r.queue, max(r.clock) AS clock, max(r.rebuilt) AS rebuilt FROM rotations r GROUP BY r.queue) r
            ON r.queue = l.queue
        -- A clock that was set back is for the next dequeue to see to; lanes that are still to be derived anew, too.
        CROSS JOIN LATERAL (
            SELECT greatest(v_now, r.clock) AS at, coalesce(l.channel > r.rebuilt, false) AS is_behind) t
        WHERE v_queue IS NULL OR l.queue = v_queue
    ), planned AS MATERIALIZED (
        SELECT r.queue, p.*
        FROM (SELECT DISTINCT r.queue FROM rotations r) r CROSS JOIN LATERAL scheduler_planned(r.queue) p
    ), leases AS MATERIALIZED (
        SELECT m.id, m.queue, m.channel, m.leased_until, m.attempt, m.counted
        FROM message m WHERE m.leased_until IS NOT NULL AND (v_queue IS NULL OR m.queue = v_queue)
    -- A place for each channel that has ready messages: the first of them.
    ), walk AS (
        (SELECT m.queue, m.channel, m.dequeue_at, m.id FROM message m
         WHERE m.leased_until IS NULL AND (v_queue IS NULL OR m.queue = v_queue)
         ORDER BY m.queue, m.channel, m.dequeue_at, m.id LIMIT 1)
        UNION ALL
        SELECT n.* FROM walk w CROSS JOIN LATERAL (
            SELECT m.queue, m.channel, m.dequeue_at, m.id FROM message m
            WHERE m.leased_until IS NULL AND (m.queue, m.channel) > (w.queue, w.channel)
            ORDER BY m.queue, m.channel, m.dequeue_at, m.id LIMIT 1) n
        -- Outside: with it as one of its conditions, a scan of the index would begin with the queue each time.
        WHERE v_queue IS NULL OR n.queue = v_queue
    -- And what is behind the planned messages of a lane that is idle.
    ), firsts AS (
        SELECT w.* FROM walk w
        UNION ALL
        SELECT l.queue, l.channel, m.dequeue_at, m.id
        FROM lanes l
        CROSS JOIN LATERAL (
            SELECT m.dequeue_at, m.id FROM message m
            WHERE m.queue = l.queue AND m.channel = l.channel AND m.leased_until IS NULL
                AND (m.dequeue_at, m.id) >= (l.head_at, l.head_id)
            ORDER BY m.dequeue_at, m.id LIMIT 1) m
        WHERE l.due IS NULL
            AND EXISTS (SELECT FROM planned p WHERE p.queue = l.queue AND p.channel = l.channel AND NOT p.is_taken)
    )
    SELECT w.queue, w.channel, 'a ready message that no lane and no signal leads to',
        format('message %s, due at %s', w.id, w.dequeue_at),
        (SELECT format('the lane starts at %s, message %s', l.head_at, l.head_id) FROM lanes l
         WHERE l.queue = w.queue AND l.channel = w.channel AND l.due IS NOT NULL LIMIT 1)
    FROM firsts w
    WHERE NOT EXISTS (
            SELECT FROM lanes l WHERE l.queue = w.queue AND l.channel = w.channel AND l.due IS NOT NULL
                AND (l.head_at, l.head_id) <= (w.dequeue_at, w.id))
        AND NOT EXISTS (SELECT FROM planned p WHERE p.queue = w.queue AND p.left_id = w.id)
        AND NOT EXISTS (SELECT FROM rotations r WHERE r.queue = w.queue AND w.channel > r.rebuilt)
        -- Two questions: as one, with OR, each channel would be compared with each signal.
        AND NOT EXISTS (SELECT FROM signals s WHERE s.queue = w.queue AND s.channel IS NULL)
        AND NOT EXISTS (
            SELECT FROM signals s WHERE s.queue = w.queue AND s.channel = w.channel
                AND (s.dequeue_at, s.message_id) <= (w.dequeue_at, w.id))
    UNION ALL
    SELECT p.queue, p.channel, 'a planned message that its lane is not behind', format('(%s, %s)', p.tag, p.since),
        (SELECT format('(%s, %s)', l.tag, l.since) FROM lanes l WHERE l.queue = p.queue AND l.channel = p.channel LIMIT 1)
    FROM planned p
    WHERE NOT EXISTS (
        SELECT FROM lanes l WHERE l.queue = p.queue AND l.channel = p.channel AND l.since = p.since
            AND l.tag > p.tag AND l.planned >= p.tag)
    UNION ALL
    SELECT l.queue, l.channel, 'a lane behind a planned message that is not there', format('(%s, %s)', l.planned, l.since),
        NULL
    FROM lanes l JOIN rotations r ON r.queue = l.queue
    WHERE l.planned >= 0 AND (l.planned, l.since) > (r.vtime, r.vsince)
        AND NOT EXISTS (
            SELECT FROM planned p WHERE p.queue = l.queue AND p.channel = l.channel AND p.tag = l.planned)
    UNION ALL
    SELECT p.queue, p.channel, 'a planned message beyond the end of the plan', format('at most %s', r.planned),
        p.place::text
    FROM planned p JOIN rotations r ON r.queue = p.queue
    WHERE p.place > r.planned
    UNION ALL
    SELECT p.queue, p.channel, 'a planned message that the rotation has passed',
        format('beyond (%s, %s)', r.vtime, r.vsince), format('(%s, %s)', p.tag, p.since)
    FROM planned p JOIN rotations r ON r.queue = p.queue
    WHERE (p.tag, p.since) <= (r.vtime, r.vsince)
    UNION ALL
    SELECT k.queue, NULL, 'a planned message that was missed', format('in turn %s', r.turn), format('in turn %s', k.turn)
    FROM missed k LEFT JOIN rotations r ON r.queue = k.queue
    WHERE (v_queue IS NULL OR k.queue = v_queue) AND k.turn IS DISTINCT FROM r.turn
    UNION ALL
    SELECT r.queue, NULL, 'tickets drawn', 'at least 0', r.drawn::text
    FROM rotations r
    WHERE r.drawn < 0
    UNION ALL
    SELECT coalesce(r.queue, k.queue), NULL, 'tickets of the queue', r.tickets::text, 'tickets_' || k.number
    FROM rotations r
    FULL JOIN (SELECT k.* FROM tickets k WHERE v_queue IS NULL OR k.queue = v_queue) k ON k.queue = r.queue
    WHERE r.tickets IS DISTINCT FROM to_regclass('tickets_' || k.number)
    UNION ALL
    SELECT s.queue, s.channel, 'a signal that no dequeue will read',
        format('from %s on, or one of %s', CASE WHEN s.urgent THEN r.urgent_from ELSE r.news_from END,
            CASE WHEN s.urgent THEN r.urgent_open ELSE r.news_open END), s.xid::text
    FROM signals s JOIN rotations r ON r.queue = s.queue
    WHERE CASE WHEN s.urgent THEN s.xid < r.urgent_from AND s.xid <> ALL (r.urgent_open)
        ELSE s.xid < r.news_from AND s.xid <> ALL (r.news_open) END
    UNION ALL
    SELECT l.queue, l.channel, 'leases that count toward max_concurrency', coalesce(n.leases, 0)::text, l.running::text
    FROM lanes l
    LEFT JOIN (
        SELECT l.queue, l.channel, count(*) AS leases
        FROM lanes l
        JOIN (SELECT e.queue, e.channel, e.counted FROM leases e
              UNION ALL SELECT s.queue, s.channel, s.counted FROM signals s) e
            ON e.queue = l.queue AND e.channel = l.channel AND e.counted >= l.counted_from
        GROUP BY l.queue, l.channel) n ON n.queue = l.queue AND n.channel = l.channel
    WHERE l.max_concurrency IS NOT NULL AND NOT l.has_policy_news AND coalesce(n.leases, 0) <> l.running
    UNION ALL
    SELECT e.queue, e.channel, 'counted leases of a channel without a lane', '0', count(*)::text
    FROM leases e
    LEFT JOIN channel c ON c.queue = e.queue AND c.name = e.channel
    LEFT JOIN queue q ON q.name = e.queue
    WHERE e.counted IS NOT NULL AND coalesce(c.max_concurrency, q.channel_max_concurrency) IS NOT NULL
        AND NOT EXISTS (SELECT FROM lanes l WHERE l.queue = e.queue AND l.channel = e.channel)
        AND NOT EXISTS (SELECT FROM rotations r WHERE r.queue = e.queue AND e.channel > r.rebuilt)
        AND NOT EXISTS (SELECT FROM news n
            WHERE n.queue = e.queue AND n.policy AND coalesce(n.channel, e.channel) = e.channel)
    GROUP BY e.queue, e.channel
    UNION ALL
    SELECT r.queue, NULL, 'leases that count toward max_concurrency', coalesce(n.leases, 0)::text, r.running::text
    FROM rotations r
    LEFT JOIN (
        SELECT r.queue, count(*) AS leases
        FROM rotations r
        JOIN (SELECT e.queue, e.counted FROM leases e UNION ALL SELECT s.queue, s.counted FROM signals s) e
            ON e.queue = r.queue AND e.counted >= r.counted_from
        GROUP BY r.queue) n ON n.queue = r.queue
    WHERE r.max_concurrency IS NOT NULL AND coalesce(n.leases, 0) <> r.running
        AND NOT EXISTS (SELECT FROM signals s WHERE s.queue = r.queue AND s.channel IS NULL AND s.is_policy)
    UNION ALL
    SELECT l.queue, l.channel, 'policy (weight, max_concurrency, release_interval, burst, paused_until)',
        p.policy::text, (l.weight, l.max_concurrency, l.release_interval, l.burst, l.paused_until)::text
    FROM lanes l
    LEFT JOIN channel c ON c.queue = l.queue AND c.name = l.channel
    LEFT JOIN queue q ON q.name = l.queue
    CROSS JOIN LATERAL (
        SELECT (coalesce(c.weight, q.channel_weight, 1::double precision),
            coalesce(c.max_concurrency, q.channel_max_concurrency),
            coalesce(c.release_interval_ms, q.channel_release_interval_ms, 0::bigint),
            coalesce(c.burst, q.channel_burst, 1), paused_until(c.paused, c.resume_at)) AS policy) p
    WHERE NOT l.has_policy_news
        AND p.policy IS DISTINCT FROM (l.weight, l.max_concurrency, l.release_interval, l.burst, l.paused_until)
    UNION ALL
    SELECT r.queue, NULL, 'policy (max_concurrency, paused_until)',
        (q.max_concurrency, paused_until(q.paused, q.resume_at))::text, (r.max_concurrency, r.paused_until)::text
    FROM rotations r LEFT JOIN queue q ON q.name = r.queue
    WHERE (q.max_concurrency, paused_until(q.paused, q.resume_at))
            IS DISTINCT FROM (r.max_concurrency, r.paused_until)
        AND NOT EXISTS (SELECT FROM signals s WHERE s.queue = r.queue AND s.channel IS NULL AND s.is_policy)
    UNION ALL
    SELECT l.queue, l.channel, 'a lane that waits for too long',
        l.new_due::text, l.due::text
    FROM lanes l
    WHERE l.due > greatest(l.new_due, l.at) AND NOT l.has_urgent_news
    UNION ALL
    SELECT l.queue, l.channel, 'a ready lane that has to wait', l.new_due::text, l.due::text
    FROM lanes l
    WHERE l.due = 0 AND l.new_due <> 0 AND NOT l.has_urgent_news
    UNION ALL
    SELECT l.queue, l.channel, 'a release that is still to come',
        format('at most %s', l.at + (l.burst - 1) * l.release_interval), l.released_at::text
    FROM lanes l
    WHERE l.release_interval > 0 AND l.released_at > l.at + (l.burst - 1) * l.release_interval AND NOT l.has_policy_news
    UNION ALL
    -- Restored from a dump of another server: once this one had come so far, all until then would be overlooked.
    SELECT r.queue, NULL, 'transactions that this server has not come to',
        format('at most %s', pg_snapshot_xmax(pg_current_snapshot())), greatest(r.news_from, r.urgent_from)::text
    FROM rotations r
    WHERE greatest(r.news_from, r.urgent_from) > pg_snapshot_xmax(pg_current_snapshot())
    UNION ALL
    SELECT l.queue, l.channel, 'a count that is still to begin', format('at most %s', r.turn), l.counted_from::text
    FROM (SELECT l.queue, l.channel, l.counted_from FROM lanes l
          UNION ALL SELECT r.queue, NULL, r.counted_from FROM rotations r) l
    JOIN rotations r ON r.queue = l.queue
    WHERE l.counted_from > r.turn
    UNION ALL
    SELECT l.queue, l.channel, 'a ready lane that the rotation has passed',
        format('beyond (%s, %s)', r.vtime, r.vsince), format('(%s, %s)', l.tag, l.since)
    FROM lanes l JOIN rotations r ON r.queue = l.queue
    WHERE l.due = 0 AND (l.tag, l.since) <= (r.vtime, r.vsince)
    UNION ALL
    SELECT r.queue, NULL, 'a start of arrivals beyond all lanes', format('at most %s', k.tag), r.arrival_tag::text
    FROM rotations r
    LEFT JOIN (SELECT l.queue, max(l.tag) AS tag FROM lanes l GROUP BY l.queue) l ON l.queue = r.queue
    CROSS JOIN LATERAL (SELECT greatest(0, r.vtime, l.tag) AS tag) k
    WHERE r.arrival_tag > r.vtime AND r.arrival_tag > k.tag
    UNION ALL
    SELECT l.queue, l.channel, 'a ready lane before the first one', format('from (%s, %s) on', r.lane_tag, r.lane_since),
        format('(%s, %s)', l.tag, l.since)
    FROM lanes l JOIN rotations r ON r.queue = l.queue
    WHERE l.due = 0 AND (l.tag, l.since) < (r.lane_tag, r.lane_since)
    UNION ALL
    SELECT l.queue, min(l.channel), 'lanes with one activation', '1', format('%s lanes with %s', count(*), l.since)
    FROM lanes l
    WHERE l.due = 0
    GROUP BY l.queue, l.since HAVING count(*) > 1
    UNION ALL
    SELECT l.queue, l.channel, 'an activation that is still to come', format('at most %s', r.activations), l.since::text
    FROM lanes l JOIN rotations r ON r.queue = l.queue
    WHERE l.since > r.activations
    UNION ALL
    SELECT l.queue, l.channel, 'lanes of a channel', '1', count(*)::text
    FROM lanes l
    GROUP BY l.queue, l.channel HAVING count(*) > 1
    UNION ALL
    SELECT r.queue, NULL, 'rotations of a queue', '1', count(*)::text
    FROM rotations r
    GROUP BY r.queue HAVING count(*) > 1
    UNION ALL
    SELECT r.queue, NULL, 'the era of a turn', rotation_era(r.turn)::text, r.era::text
    FROM rotations r
    WHERE r.era <> rotation_era(r.turn)
    UNION ALL
    SELECT DISTINCT l.queue, NULL, 'rotations of a queue', '1', '0'
    FROM lanes l
    WHERE NOT EXISTS (SELECT FROM rotations r WHERE r.queue = l.queue)
    UNION ALL
    SELECT e.queue, e.channel, 'a lease below lease_floor', format('from %s on', r.lease_floor),
        format('message %s until %s', e.id, e.leased_until)
    FROM leases e LEFT JOIN rotations r ON r.queue = e.queue
    WHERE (r.queue IS NULL OR e.leased_until < least(r.lease_floor, r.held_from)
            OR (e.leased_until < r.lease_floor AND r.lease_floor > r.held_at))
        AND NOT EXISTS (SELECT FROM signals s WHERE s.queue = e.queue AND s.channel IS NULL AND s.message_id = e.id)
    UNION ALL
    SELECT l.queue, l.channel, 'a lane below due_floor', format('from %s on', r.due_floor), l.due::text
    FROM lanes l JOIN rotations r ON r.queue = l.queue
    WHERE l.due <> 0 AND l.due < r.due_floor;
END
$$;

REVOKE EXECUTE ON FUNCTION queue_check FROM PUBLIC;
