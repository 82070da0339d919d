-- Leases up to max_messages messages of a queue for lease_seconds, in the order of start-time fair queueing.
--
-- Called by workers, in a READ COMMITTED transaction that commits at once. Returns the messages in the order in which
-- they were scheduled; fewer than asked for only when fewer are eligible, or when thousands of channels, leases or
-- policies had to be gone through first: the next one goes on. worker is the caller's name, for those who look into the
-- tables.
--
-- Where nothing is to be done but to serve what is planned, this does it, side by side with other dequeues: each draws
-- tickets (tickets), whose numbers are places of the plan, and takes what is planned there; scheduler_settle, in the next
-- turn, moves on what the scheduler keeps. So dequeues of a long backlog wait for each other once in half a plan, or once
-- a second, not each time, though they go in the same order. What a dequeue that was rolled back had drawn is found then.
-- One of them plans on, meanwhile, before the plan is used up (scheduler_extend). All else is scheduler_serve's. The queue
-- from whose plan a session took last time is in its setting fairqueue_turn.planned: a guess, and a wrong one costs only
-- time.
--
-- Locks: a share in the queue's turn, and the messages that it leases, until the end of the transaction. A share and
-- the turn exclude each other, shares don't: whoever has the turn knows all that was leased, and while one has a
-- share, nothing changes that the scheduler goes by, but behind the end of the plan. Whoever plans on: as
-- scheduler_extend. If it doesn't take what is planned: as scheduler_serve. Enqueues and completions take none of these
-- locks and never wait for them.
CREATE FUNCTION message_dequeue(
    queue text DEFAULT 'default', max_messages integer DEFAULT 1, lease_seconds double precision DEFAULT 30,
    worker text DEFAULT NULL
) RETURNS SETOF leased_message
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
-- One plan a session, found without statistics: planning anew took most of a call. Every access is by an index. These
-- hold in what it calls, too.
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_queue ALIAS FOR $1;
    v_worker ALIAS FOR $4;
    -- Before anything is locked here.
    v_wrote CONSTANT boolean := pg_current_xact_id_if_assigned() IS NOT NULL;
    -- Whether this session took from the queue's plan last time.
    v_took CONSTANT boolean := current_setting('fairqueue_turn.planned', true) IS NOT DISTINCT FROM $1;
    v_turn bigint;
    v_lane_tag bigint;
    v_lane_since bigint;
    v_is_calm boolean;
    v_extend boolean;
    v_clock timestamptz;
    v_now bigint;
    v_until timestamptz;
    v_tickets regclass;
    -- The place of a ticket is its number and this.
    v_before bigint;
    v_missing integer;
    v_places bigint[];
    v_is_served boolean;
    v_first bigint;
    v_last bigint;
    v_found tid[];
    v_rows tid[];
    -- Places whose message wasn't there, in v_turn.
    v_missed bigint[];
    v_noted integer;
BEGIN
    -- Where a call for each message counts, so does each condition.
    IF (char_length(v_queue) BETWEEN 1 AND 255 AND max_messages BETWEEN 1 AND 10000
        AND (char_length(v_worker) > 255) IS NOT TRUE AND lease_seconds BETWEEN 0.001 AND 315576000
        AND current_setting('transaction_isolation') IN ('read committed', 'read uncommitted')) IS NOT TRUE
    THEN
        PERFORM dequeue_refuse(v_queue, max_messages, lease_seconds, v_worker);
    END IF;

    <<tries>>
    FOR v_try IN 1..2 LOOP
        -- Who took from the plan last time comes for more. Others look first whether anything is planned: where each turn
        -- is needed, shares would only be in the way.
        IF NOT v_took THEN
            EXIT tries WHEN (
                SELECT t.planned > t.place AND t.lane_tag IS NOT NULL AND t.tickets IS NOT NULL
                FROM rotation t WHERE t.queue = v_queue ORDER BY t.era DESC LIMIT 1) IS NOT TRUE;
        END IF;
        BEGIN
            IF NOT pg_try_advisory_xact_lock_shared(queue_key(v_queue)) THEN
                -- Waits while somebody has the turn, or waits for it.
                EXIT tries WHEN NOT scheduler_turn(v_queue, true, v_wrote);
            END IF;
            v_missed := NULL;
            v_clock := clock();
            v_now := unix_ms(v_clock);
            v_until := v_clock + make_interval(secs => lease_seconds);
            -- Calm: nothing is to be done but to serve what is planned. No limit, no lease that ran out, no lane that
            -- is due, and no news, of either kind; a pause leaves no lane_tag. Near the end of the plan, what others
            -- are about to take leaves too little. And once a second somebody has to look for what was not taken after
            -- all.
            SELECT t.turn, t.place - t.ticket_base, t.tickets, t.lane_tag, t.lane_since,
                t.planned - t.place <= t.ahead AND t.ahead >= t.plan_at,
                t.drawn >= 0 AND 2 * t.drawn <= t.planned - t.place
                    AND t.drawn + 8 * max_messages <= t.planned - t.place AND t.lane_tag IS NOT NULL
                    AND t.max_concurrency IS NULL AND t.lease_floor > v_clock AND t.lease_floor <= v_until
                    AND t.due_floor > v_now AND t.maintain_at > v_now AND t.clock BETWEEN v_now - 1000 AND v_now + 1000
                    AND greatest(t.news_from, t.urgent_from) <= pg_snapshot_xmax(pg_current_snapshot())
                    AND NOT EXISTS (
                        SELECT FROM signal s WHERE s.queue = v_queue AND NOT s.urgent AND s.xid >= t.news_from)
                    AND NOT EXISTS (
                        SELECT FROM signal s WHERE s.queue = v_queue AND s.urgent AND s.xid >= t.urgent_from)
                    AND (t.news_open = '{}' OR NOT scheduler_told(v_queue, false, t.news_open))
                    AND (t.urgent_open = '{}' OR NOT scheduler_told(v_queue, true, t.urgent_open))
            INTO v_turn, v_before, v_tickets, v_lane_tag, v_lane_since, v_extend, v_is_calm
            -- As a subquery, so that of the row only these are taken apart.
            FROM (
                SELECT t.turn, t.place, t.planned, t.lane_tag, t.lane_since, t.ahead, t.plan_at, t.max_concurrency,
                    t.lease_floor, t.due_floor, t.maintain_at, t.clock, t.news_from, t.urgent_from,
                    t.news_open, t.urgent_open, t.tickets, t.ticket_base,
                    pg_sequence_last_value(t.tickets) - t.ticket_base AS drawn
                FROM rotation t WHERE t.queue = v_queue ORDER BY t.era DESC LIMIT 1) t;
            IF v_is_calm THEN
                v_rows := '{}';
                FOR v_draw IN 1..36 LOOP
                    -- Each gets other numbers, whatever becomes of its transaction.
                    v_missing := max_messages - cardinality(v_rows);
                    v_first := v_before + nextval(v_tickets);
                    v_last := v_first;
                    IF v_missing > 1 THEN
                        v_places := v_first || ARRAY(
                            SELECT v_before + nextval(v_tickets) FROM generate_series(2, v_missing));
                        v_last := v_places[v_missing];
                    END IF;
                    -- What is planned there. What others have done since that look makes no difference: while there are
                    -- shares, what is planned before the end stays as it is. Locked one by one: a join might begin with
                    -- all messages, where there seem to be few. Another row: the version is locked that a user has just
                    -- made of it.
                    IF max_messages = 1 THEN
                        -- In one statement: it is there, or nothing is leased that would have to be given back. What it
                        -- sets and returns is what the one below does.
                        RETURN QUERY
                        UPDATE message m
                        SET attempt = least(m.attempt, 2147483646) + 1, leased_until = v_until, leased_at = v_clock,
                            first_leased_at = coalesce(m.first_leased_at, v_clock), worker = v_worker, counted = NULL
                        FROM (
                            SELECT p.rows[e.nth] AS row, p.ids[e.nth] AS id, p.channels[e.nth] AS channel
                            FROM plan p CROSS JOIN LATERAL (SELECT (v_first - p.place + 1)::integer AS nth) e
                            WHERE p.queue = v_queue AND p.place > v_first - 32 AND p.place <= v_first
                                AND (p.tags[e.nth], p.sinces[e.nth]) < (v_lane_tag, v_lane_since)) n
                        CROSS JOIN LATERAL (
                            SELECT h.ctid AS row FROM message h
                            WHERE h.ctid = n.row AND h.id = n.id AND h.queue = v_queue AND h.channel = n.channel
                                AND h.leased_until IS NULL AND h.dequeue_at <= v_now
                            FOR NO KEY UPDATE SKIP LOCKED) h
                        WHERE m.ctid = n.row AND h.row = n.row
                        RETURNING m.id, m.channel, m.attempt, m.payload, m.body, m.state, m.error, m.dequeue_at, m.cost,
                            m.created_at, m.leased_until, m.key, m.forgiven, m.first_leased_at;

                        v_is_served := FOUND;
                    ELSE
                        SELECT array_agg(m.row) FILTER (WHERE m.row = n.row) INTO v_found
                        FROM (
                            SELECT p.rows[e.nth] AS row, p.ids[e.nth] AS id, p.channels[e.nth] AS channel,
                                p.tags[e.nth] AS tag, p.sinces[e.nth] AS since
                            FROM (
                                SELECT p.place, p.rows, p.ids, p.channels, p.tags, p.sinces FROM plan p
                                WHERE p.queue = v_queue AND p.place > v_first - 32 AND p.place <= v_last
                                ORDER BY p.place) p
                            CROSS JOIN LATERAL generate_series(
                                greatest(1, v_first - p.place + 1)::integer,
                                least(cardinality(p.ids), v_last - p.place + 1)::integer) AS e (nth)
                            WHERE v_last - v_first < v_missing OR p.place + e.nth - 1 = ANY (v_places)) n
                        CROSS JOIN LATERAL (
                            SELECT m.ctid AS row FROM message m
                            WHERE m.ctid = n.row AND m.id = n.id AND m.queue = v_queue AND m.channel = n.channel
                                AND m.leased_until IS NULL AND m.dequeue_at <= v_now
                            FOR NO KEY UPDATE SKIP LOCKED) m
                        WHERE (n.tag, n.since) < (v_lane_tag, v_lane_since);

                        v_rows := v_rows || v_found;
                        v_is_served := cardinality(v_rows) = max_messages;
                    END IF;
                    EXIT WHEN v_is_served;
                    -- Some are gone, a user holds or has just changed them, or a lane comes first. Whoever is alone can do
                    -- it as it should be done, in the turn. Else others have taken what comes next, and go on to do so.
                    v_noted := coalesce(cardinality(v_missed), 0);
                    v_missed := v_missed || ARRAY(
                        SELECT p.place + e.nth - 1
                        FROM plan p
                        CROSS JOIN LATERAL unnest(p.rows, p.tags, p.sinces) WITH ORDINALITY AS e (row, tag, since, nth)
                        WHERE p.queue = v_queue AND p.place > v_first - 32 AND p.place <= v_last
                            AND p.place + e.nth - 1 BETWEEN v_first AND v_last
                            AND (v_last - v_first < v_missing OR p.place + e.nth - 1 = ANY (v_places))
                            AND (e.row = ANY (v_found)) IS NOT TRUE
                            AND (e.tag, e.since) < (v_lane_tag, v_lane_since));
                    v_noted := cardinality(v_missed) - v_noted;
                    EXIT WHEN v_noted + coalesce(cardinality(v_found), 0) < v_missing
                        OR (pg_try_advisory_lock(queue_key(v_queue)) AND pg_advisory_unlock(queue_key(v_queue)));
                END LOOP;
                IF v_is_served THEN
                    IF max_messages > 1 THEN
                        RETURN QUERY
                        -- The one join that is left switched on is a loop, here over rows: in the order of places.
                        UPDATE message m
                        SET attempt = least(m.attempt, 2147483646) + 1, leased_until = v_until, leased_at = v_clock,
                            first_leased_at = coalesce(m.first_leased_at, v_clock), worker = v_worker, counted = NULL
                        FROM unnest(v_rows) AS h (row)
                        WHERE m.ctid = h.row
                        RETURNING m.id, m.channel, m.attempt, m.payload, m.body, m.state, m.error, m.dequeue_at, m.cost,
                            m.created_at, m.leased_until, m.key, m.forgiven, m.first_leased_at;
                    END IF;
                    IF v_missed IS NOT NULL THEN
                        INSERT INTO missed (queue, turn, place) SELECT v_queue, v_turn, k FROM unnest(v_missed) AS k
                        ON CONFLICT DO NOTHING;
                    END IF;
                    IF NOT v_took THEN
                        PERFORM set_config('fairqueue_turn.planned', v_queue, false);
                    END IF;
                    IF v_extend THEN
                        IF pg_try_advisory_xact_lock(queue_key(v_queue, 2)) THEN
                            PERFORM scheduler_extend(v_queue, v_now);
                        END IF;
                    END IF;
                    RETURN;
                END IF;
            END IF;
            -- Who has a share alone can have the turn without giving up the share, for which others may be waiting.
            EXIT WHEN pg_try_advisory_xact_lock(queue_key(v_queue));
            RAISE SQLSTATE 'FQ000';
        EXCEPTION WHEN SQLSTATE 'FQ000' THEN
            -- Nothing is locked any more. One of them waits for the turn, and the others behind it for shares, as the
            -- plan may then serve them side by side again. Not one that can't wait, and may be open for long.
            EXIT WHEN v_wrote OR pg_try_advisory_xact_lock(queue_key(v_queue, 1));
        END;
    END LOOP;
    IF v_took THEN
        PERFORM set_config('fairqueue_turn.planned', '', false);
    END IF;
    RETURN QUERY SELECT * FROM scheduler_serve(v_queue, max_messages, lease_seconds, v_worker, v_wrote, v_turn, v_missed);
END
$$;

REVOKE EXECUTE ON FUNCTION message_dequeue FROM PUBLIC;
