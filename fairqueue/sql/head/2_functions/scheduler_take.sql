-- Leases the next messages of the plan, side by side with others who do the same.
--
-- Called by message_dequeue, which has no turn yet, where there is a plan. It takes part in a turn that many can have at
-- the same time: of message_dequeue's turn, it has what excludes that one, not each other. So whoever has the turn alone
-- knows all that was leased, and nothing that the scheduler goes by changes meanwhile. Each takes the first of the planned
-- messages that nobody else has, or is about to take, and writes down which (taken); scheduler_settle moves on what the
-- scheduler keeps. So dequeues of a long backlog wait for each other once in 64 times, not each time, though they go in
-- the same order.
--
-- Locks: a share in the queue's turn, and the messages that it leases, until the end of the transaction.
--
-- Returns nothing, and then has locked nothing, unless all that is wanted is at the head of the plan, and nothing else is
-- to be done: no news, no lease that ran out, no lane that is due or comes first, no message of the plan that is gone or
-- somebody else's.
CREATE FUNCTION scheduler_take(
    queue text, max_messages integer, lease_seconds double precision, worker text, wrote boolean
)
RETURNS TABLE (
    id bigint, channel text, attempt integer, payload jsonb, body bytea, state jsonb, error text,
    dequeue_at bigint, cost double precision, created_at timestamptz, leased_until timestamptz,
    key text, forgiven integer, first_leased_at timestamptz
)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_worker CONSTANT text := $4;
    v_clock timestamptz;
    v_now bigint;
    v_until timestamptz;
    v_reach integer;
    v_waited boolean;
    r record;
BEGIN
    FOR v_try IN 1..3 LOOP
        v_clock := clock();
        v_now := unix_ms(v_clock);
        v_until := v_clock + make_interval(secs => lease_seconds);
        SELECT t.turn, t.planned, l.tag AS lane_tag, l.since AS lane_since, k.batches, k.messages,
            -- Up to there all were taken.
            CASE WHEN t.place + k.messages >= k.last THEN t.place + k.messages ELSE (
                SELECT coalesce(max(x.place) FILTER (WHERE x.place = t.place + x.messages), t.place)
                FROM (
                    SELECT k.place, sum(cardinality(k.ids)) OVER (ORDER BY k.place) AS messages
                    FROM taken k WHERE k.queue = v_queue AND k.turn = t.turn) x) END AS place
        INTO r
        FROM (SELECT x.* FROM rotation x WHERE x.queue = v_queue ORDER BY x.turn DESC LIMIT 1) t
        LEFT JOIN LATERAL (
            SELECT l.tag, l.since FROM lane l
            WHERE l.queue = v_queue AND l.due = 0 AND (l.tag, l.since) > (t.vtime, t.vsince)
            ORDER BY l.tag, l.since LIMIT 1) l ON true
        CROSS JOIN LATERAL (
            SELECT count(*) AS batches, coalesce(sum(cardinality(k.ids)), 0)::integer AS messages,
                coalesce(max(k.place), 0) AS last
            FROM taken k WHERE k.queue = v_queue AND k.turn = t.turn) k
        WHERE t.planned > t.place
            AND t.max_concurrency IS NULL AND (t.paused_until <= v_now) IS NOT FALSE
            AND t.lease_floor > v_clock AND t.lease_floor <= v_until
            AND t.due_floor > v_now AND t.maintain_at > v_now AND t.clock - 1000 <= v_now
            AND greatest(t.news_from, t.urgent_from) <= pg_snapshot_xmax(pg_current_snapshot())
            AND NOT EXISTS (SELECT FROM signal s WHERE s.queue = v_queue AND s.urgent AND s.xid >= t.urgent_from)
            AND NOT EXISTS (SELECT FROM signal s WHERE s.queue = v_queue AND NOT s.urgent AND s.xid >= t.news_from)
            AND NOT EXISTS (SELECT FROM signal s WHERE s.queue = v_queue AND s.urgent AND s.xid = ANY (t.urgent_open))
            AND NOT EXISTS (SELECT FROM signal s WHERE s.queue = v_queue AND NOT s.urgent AND s.xid = ANY (t.news_open));
        -- Near the end of the plan, what others are about to take leaves too little.
        EXIT WHEN NOT FOUND OR r.planned < r.place + 8 * max_messages OR r.batches >= 64;
        v_reach := r.messages + 32 * max_messages + 32;
        v_waited := false;
        BEGIN
            IF pg_try_advisory_xact_lock_shared(queue_key(v_queue)) THEN
                RETURN QUERY
                WITH next AS (
                    SELECT e.row, e.id, p.place + e.nth - 1 AS place
                    FROM plan p
                    CROSS JOIN LATERAL unnest(p.rows, p.ids, p.tags, p.sinces) WITH ORDINALITY
                        AS e (row, id, tag, since, nth)
                    WHERE p.queue = v_queue AND p.place > r.place - 32 AND p.place <= r.place + v_reach
                        AND p.place + e.nth - 1 > r.place
                        AND (r.lane_tag IS NULL OR (e.tag, e.since) < (r.lane_tag, r.lane_since))
                    ORDER BY p.place, e.nth
                ), held AS MATERIALIZED (
                    SELECT n.id, n.place, m.ctid AS row
                    FROM next n
                    JOIN message m ON m.ctid = n.row
                    WHERE m.id = n.id AND m.leased_until IS NULL AND m.dequeue_at <= v_now
                    LIMIT max_messages
                    FOR NO KEY UPDATE OF m SKIP LOCKED
                ), batch AS MATERIALIZED (
                    SELECT array_agg(h.id) AS ids, max(h.place) AS place, count(*) AS messages FROM held h
                -- Those before the last one that were passed over are those that others have taken; or are about to take,
                -- where there are others. Else one is gone, or a user holds it, and the plan is no longer right.
                ), verdict AS MATERIALIZED (
                    SELECT b.ids, b.place, b.messages = max_messages
                        AND EXISTS (SELECT FROM rotation t WHERE t.queue = v_queue AND t.turn = r.turn)
                        AND (b.place - r.place - max_messages = coalesce((
                                SELECT sum(cardinality(k.ids)) FROM taken k
                                WHERE k.queue = v_queue AND k.turn = r.turn AND k.place > r.place AND k.place < b.place), 0)
                            OR NOT scheduler_alone(v_queue)) AS is_good
                    FROM batch b
                ), leased AS (
                    UPDATE message m
                    SET attempt = least(m.attempt, 2147483646) + 1, leased_until = v_until, leased_at = v_clock,
                        first_leased_at = coalesce(m.first_leased_at, v_clock), worker = v_worker, counted = NULL
                    FROM held h
                    WHERE m.ctid = h.row AND (SELECT v.is_good FROM verdict v)
                    RETURNING m.id, m.channel, m.attempt, m.payload, m.body, m.state, m.error, m.dequeue_at, m.cost,
                        m.created_at, m.leased_until, m.key, m.forgiven, m.first_leased_at, h.place
                ), noted AS (
                    INSERT INTO taken (queue, turn, place, ids)
                    SELECT v_queue, r.turn, v.place, v.ids FROM verdict v WHERE v.is_good
                )
                SELECT d.id, d.channel, d.attempt, d.payload, d.body, d.state, d.error, d.dequeue_at, d.cost,
                    d.created_at, d.leased_until, d.key, d.forgiven, d.first_leased_at
                FROM leased d
                ORDER BY d.place;
                IF FOUND THEN
                    RETURN;
                END IF;
            ELSE
                -- Until somebody's turn is over. Then all may be different.
                v_waited := scheduler_turn(v_queue, true, wrote);
            END IF;
            RAISE SQLSTATE 'FQ000';
        EXCEPTION WHEN SQLSTATE 'FQ000' THEN
            EXIT WHEN NOT v_waited
                AND EXISTS (SELECT FROM rotation t WHERE t.queue = v_queue AND t.turn = r.turn);
        END;
    END LOOP;
END
$$;
