-- Schedules and leases up to max_messages messages of a queue, in the queue's turn.
--
-- Called by message_dequeue, whose settings hold here, and which has checked the arguments; wrote says whether its
-- caller had written anything before, and missed_places what it missed of the plan, in missed_turn. Returns what that
-- returns.
--
-- Scheduling (Goyal, Vin, Cheng: Start-time Fair Queueing, 1996). Each active channel has a lane with a start tag. The
-- next message comes from the lowest tag, ties from the lane that became ready first; serving it moves the tag on by
-- cost / weight. A channel that becomes active starts at max(its own tag, virtual time). A channel at a limit is not
-- active: its lane is not looked at until its time has come or a signal says that there is room (lane_due).
--
-- Three functions serve, each of them a whole batch, exactly as single dequeues in a row would: what was scheduled
-- ahead, because much is waiting (scheduler_serve_plan); the first messages of as many lanes, in the simple case
-- (scheduler_serve_heads); and all that lanes can have (scheduler_serve_shares). Where there is a plan, its next message
-- and the lane with the lowest tag compete like two lanes.
--
-- Locks: the queue's turn until the end of the transaction, so that one dequeue at a time schedules a queue: its
-- order, and with it every limit, is exact whatever the number of workers. Then the messages that it leases; a message
-- that somebody else holds is passed over.
CREATE FUNCTION scheduler_serve(
    queue text, max_messages integer, lease_seconds double precision, worker text, wrote boolean,
    missed_turn bigint, missed_places bigint[]
) RETURNS SETOF leased_message
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_worker CONSTANT text := $4;
    -- How much news one call takes in before it serves: in proportion to what it serves.
    v_news integer := 64 + 4 * max_messages;
    v_want integer := max_messages;
    v_demand integer := max_messages;
    v_lanes integer := max_messages;
    v_clock timestamptz;
    v_now bigint;
    v_until timestamptz;
    v_got integer;
    v_rest integer;
    v_has_urgent boolean;
    v_has_news boolean;
    v_is_changed boolean;
    v_told integer;
    v_first_id bigint;
    v_rebuild boolean := false;
    v_uncounted boolean := false;
    v_reclaim boolean;
    v_is_left boolean := false;
    v_simple boolean := true;
    v_written boolean := true;
    v_turned boolean := false;
    -- Where there is a plan: its next message, and how often it had to wait for lanes.
    v_bound_tag bigint;
    v_bound_since bigint;
    v_lane_tag bigint;
    v_lane_since bigint;
    v_stretches integer := 0;
    v_rounds integer := 0;
    v_state record;
    r rotation;
BEGIN
    IF NOT scheduler_turn(v_queue, false, wrote) THEN
        RETURN;
    END IF;
    v_clock := clock();
    v_now := unix_ms(v_clock);
    v_until := v_clock + make_interval(secs => lease_seconds);

    SELECT t AS rotation,
        EXISTS (SELECT FROM signal s WHERE s.queue = v_queue AND s.urgent AND s.xid >= t.urgent_from)
            OR (t.urgent_open <> '{}' AND scheduler_told(v_queue, true, t.urgent_open)) AS has_urgent,
        EXISTS (SELECT FROM signal s WHERE s.queue = v_queue AND NOT s.urgent AND s.xid >= t.news_from)
            OR (t.news_open <> '{}' AND scheduler_told(v_queue, false, t.news_open)) AS has_news,
        t.tickets IS NOT NULL AND coalesce(pg_sequence_last_value(t.tickets), -1) <> t.ticket_base AS has_drawn,
        pg_current_snapshot() AS snapshot
    INTO v_state
    FROM rotation t WHERE t.queue = v_queue ORDER BY t.era DESC LIMIT 1;
    IF NOT FOUND THEN
        IF NOT EXISTS (SELECT FROM signal s WHERE s.queue = v_queue LIMIT 1) THEN
            RETURN;
        END IF;
        INSERT INTO rotation AS t
        SELECT v_queue, 0, 0, 0, 0, 0, '0', '{}', '0', '{}', 'infinity', 9223372036854775807, -1, '',
            q.max_concurrency, paused_until(q.paused, q.resume_at), 0, 0, v_now, 0, 0, 0, 0, plan_after(), NULL, NULL
        FROM (SELECT) AS one LEFT JOIN queue q ON q.name = v_queue
        RETURNING t AS rotation, true AS has_urgent, true AS has_news, false AS has_drawn,
            pg_current_snapshot() AS snapshot INTO v_state;
    END IF;
    IF v_state.has_drawn THEN
        IF (v_state.rotation).turn = missed_turn THEN
            INSERT INTO missed (queue, turn, place) SELECT v_queue, missed_turn, k FROM unnest(missed_places) AS k
            ON CONFLICT DO NOTHING;
        END IF;
        r := scheduler_settle(v_queue);
    ELSE
        r := v_state.rotation;
    END IF;
    v_has_urgent := v_state.has_urgent;
    v_has_news := v_state.has_news;
    IF greatest(r.news_from, r.urgent_from) > pg_snapshot_xmax(pg_current_snapshot()) THEN
        -- Restored from a dump of another server, whose transaction ids were ahead.
        r.news_from := '0';
        r.urgent_from := '0';
        v_has_urgent := true;
        v_has_news := true;
    END IF;
    -- Where there is no news, who is under way is looked at now and then, and before the next plan: so nobody looks for
    -- long for who has come to an end, or walks over what somebody writes.
    IF v_state.has_drawn OR r.turn % 64 = 0 THEN
        IF NOT v_has_urgent THEN
            SELECT u.horizon, u.open INTO r.urgent_from, r.urgent_open
            FROM scheduler_under_way(v_state.snapshot, r.urgent_from, NULL, NULL) u;
        END IF;
        IF NOT v_has_news THEN
            SELECT u.horizon, u.open INTO r.news_from, r.news_open
            FROM scheduler_under_way(v_state.snapshot, r.news_from, NULL, NULL) u;
        END IF;
        v_written := false;
    END IF;
    -- What was timed by a clock that was ahead has to be timed anew. Small corrections are nothing to notice.
    v_rebuild := v_now < r.clock - 1000;
    r.clock := CASE WHEN v_rebuild THEN v_now ELSE greatest(r.clock, v_now) END;
    IF r.maintain_at <= v_now OR v_rebuild THEN
        r.maintain_at := CASE WHEN history_maintain() THEN (v_now / 86400000 + 1) * 86400000 ELSE v_now + 600000 END;
        v_written := false;
    END IF;
    v_reclaim := r.lease_floor <= v_clock;

    -- Each round takes in some news, then serves. It is the last one, unless the batch comes out short. Of ever so much
    -- that has to be gone through before anything can be served, a part is left for the next ones: so none takes long,
    -- and what has been gone through stays so, whatever timeout ends one that follows.
    LOOP
        v_rounds := v_rounds + 1;
        IF v_turned THEN
            SELECT t.* INTO r
            FROM rotation t WHERE t.queue = v_queue ORDER BY t.era DESC LIMIT 1;
            v_turned := false;
            v_written := true;
        END IF;
        EXIT WHEN v_is_left;
        IF v_reclaim THEN
            SELECT c.lease_floor, c.held_from, c.more INTO r.lease_floor, r.held_from, v_reclaim
            FROM scheduler_reclaim(v_queue, v_clock, r.lease_floor, v_news) c;
            v_has_urgent := true;
            v_written := false;
        END IF;
        IF v_has_urgent THEN
            SELECT f.horizon, f.open, f.activations, least(f.due_floor, r.due_floor), greatest(r.running - f.ended, 0),
                v_rebuild OR f.channels_changed, f.queue_changed, v_uncounted OR f.uncounted, f.more,
                least(f.lease_floor, r.lease_floor)
            INTO r.urgent_from, r.urgent_open, r.activations, r.due_floor, r.running,
                v_rebuild, v_is_changed, v_uncounted, v_has_urgent, r.lease_floor
            FROM scheduler_fold(v_queue, true, r.turn, r.vtime, v_now, 20000,
                CASE WHEN r.max_concurrency IS NOT NULL THEN r.counted_from END, r.urgent_from,
                r.urgent_open, r.activations) f;
            v_written := false;
            IF v_is_changed AND NOT v_rebuild THEN
                r := scheduler_limit(r, v_now, false);
            END IF;
            IF r.lease_floor <= v_clock AND NOT v_reclaim THEN
                -- A user has ended a lease.
                v_reclaim := true;
                CONTINUE;
            END IF;
        END IF;
        IF v_rebuild THEN
            PERFORM scheduler_unplan(v_queue);
            r := scheduler_limit(r, v_now, true);
            r.rebuilt := '';
            v_rebuild := false;
        END IF;
        IF r.rebuilt IS NOT NULL THEN
            SELECT b.rebuilt, b.activations, least(b.due_floor, r.due_floor), v_uncounted OR b.uncounted
            INTO r.rebuilt, r.activations, r.due_floor, v_uncounted
            FROM scheduler_rebuild(v_queue, r.turn, r.vtime, v_now,
                CASE WHEN r.max_concurrency IS NOT NULL THEN r.counted_from END,
                least(r.lease_floor, r.held_from), 5000, false, r.rebuilt, r.activations) b;
            v_written := false;
            v_is_left := r.rebuilt IS NOT NULL;
            EXIT WHEN v_is_left;
            -- Lanes that are idle now may stand below it.
            r.idle_floor := -1;
            -- Not written by those that serve, as it hardly ever is anything.
            UPDATE rotation t SET rebuilt = NULL WHERE t.queue = v_queue AND t.era = r.era AND t.rebuilt IS NOT NULL;
        END IF;
        IF v_has_news THEN
            SELECT f.horizon, f.open, f.activations, least(f.due_floor, r.due_floor), v_uncounted OR f.uncounted, f.more,
                f.told, f.first_id
            INTO r.news_from, r.news_open, r.activations, r.due_floor, v_uncounted, v_has_news, v_told, v_first_id
            FROM scheduler_fold(v_queue, false, r.turn, r.vtime, v_now, v_news,
                CASE WHEN r.max_concurrency IS NOT NULL THEN r.counted_from END, r.news_from,
                r.news_open, r.activations) f;
            v_written := false;
        END IF;
        -- Signals come in faster than they are folded. Where each is of another channel there aren't so many that what is
        -- behind them waits for long, and a name costs more than a signal: still more names than messages are served, so
        -- until as many messages have been served as there are channels that aren't idle, all have been looked for.
        IF v_has_news THEN
            SELECT w.swept, w.activations, least(w.due_floor, r.due_floor), v_uncounted OR w.uncounted
            INTO r.swept, r.activations, r.due_floor, v_uncounted
            FROM scheduler_sweep(v_queue, r.turn, r.vtime, v_now,
                CASE WHEN v_told > v_news / 2 THEN v_news / 4 ELSE v_news END, v_first_id, r.swept, r.activations) w;
        END IF;
        -- A policy that is known to have changed holds before anything is served: one of which many channels, or many ends
        -- of leases, came first; and a limit that was committed in the middle of this, after the signals were read that
        -- it came with, whose leases are to be counted.
        IF v_uncounted OR v_has_urgent THEN
            v_uncounted := EXISTS (
                    SELECT FROM signal s WHERE s.queue = v_queue AND s.urgent AND s.xid >= r.urgent_from
                        AND s.message_id IS NULL AND s.counted IS NULL)
                OR EXISTS (
                    SELECT FROM unnest(r.urgent_open) AS o (xid)
                    CROSS JOIN LATERAL (
                        SELECT FROM signal s WHERE s.queue = v_queue AND s.urgent AND s.xid = o.xid
                            AND s.message_id IS NULL AND s.counted IS NULL LIMIT 1) s
                    WHERE pg_visible_in_snapshot(o.xid, pg_current_snapshot()));
            IF v_uncounted THEN
                v_is_left := v_rounds >= 5;
                EXIT WHEN v_is_left;
                v_has_urgent := true;
                CONTINUE;
            END IF;
        END IF;
        IF r.tickets IS NOT NULL AND r.max_concurrency IS NOT NULL THEN
            -- It has got a limit: nobody takes without the turn any more.
            SELECT k.tickets INTO r.tickets FROM scheduler_tickets(v_queue, false) k;
            UPDATE rotation t SET tickets = NULL WHERE t.queue = v_queue AND t.era = r.era;
        END IF;
        IF r.due_floor <= v_now THEN
            SELECT w.due_floor, w.activations INTO r.due_floor, r.activations
            FROM scheduler_wake(v_queue, r.vtime, v_now, v_news, r.due_floor, r.activations) w;
            v_written := false;
        END IF;
        IF r.turn % 64 = 0 OR r.vtime > 1000000000000000000 THEN
            SELECT y.vtime, y.idle_floor INTO r.vtime, r.idle_floor
            FROM scheduler_tidy(v_queue, v_now, r.vtime, r.idle_floor) y;
            v_written := false;
        END IF;

        CONTINUE WHEN v_has_urgent AND r.running >= r.max_concurrency;  -- more leases may have ended
        v_want := least(v_want, r.max_concurrency - r.running);
        IF r.paused_until > v_now AND r.paused_until < r.due_floor THEN
            -- Who asks queue_due after the end of the pause, before anybody has been here, has to hear of it.
            r.due_floor := r.paused_until;
            v_written := false;
        END IF;
        EXIT WHEN v_want <= 0 OR r.paused_until > v_now;
        -- While as much is planned as the next ones will want, they take it side by side. A batch that gives its lanes
        -- much at once gains nothing from a plan; nor, of the heads of lanes, does one of more than a few messages, unless
        -- others dequeue at the same time, nothing arrives for which they would need their turns, and each takes an eighth
        -- of it at most (see message_dequeue).
        IF r.ahead >= r.plan_at AND r.ahead >= 4 * v_want AND r.planned - r.place < 8 * v_want THEN
            SELECT p.messages, least(p.due_floor, r.due_floor) INTO v_got, r.due_floor
            FROM scheduler_plan(v_queue, r.vtime, r.vsince, v_now, r.ahead, r.place, r.planned,
                NOT v_has_news AND (max_messages <= 3 OR (max_messages <= 192 AND NOT v_state.has_news
                    AND current_setting('fairqueue_turn.waited', true) = 'yes'))) p;
            r.planned := r.planned + v_got;
            v_written := false;
            -- Where there is a limit of the queue, nobody takes without the turn.
            IF v_got > 0 AND r.tickets IS NULL AND r.max_concurrency IS NULL THEN
                SELECT k.tickets, coalesce(k.ticket_base, 0) INTO r.tickets, r.ticket_base
                FROM scheduler_tickets(v_queue, true) k;
                UPDATE rotation t SET tickets = r.tickets, ticket_base = r.ticket_base
                WHERE t.queue = v_queue AND t.era = r.era;
            END IF;
            IF v_got = 0 THEN
                -- It isn't tried again before the rest of the plan has been served; or as many as have been without one.
                v_rest := CASE WHEN r.planned > r.place THEN least(r.planned - r.place, plan_most())
                    ELSE least(r.ahead, plan_most() / 2) END;
                r.ahead := least(r.ahead, plan_most() - v_rest);
                r.plan_at := r.ahead + v_rest;
            END IF;
        END IF;
        v_bound_tag := 9223372036854775807;
        v_bound_since := 9223372036854775807;
        IF r.planned > r.place THEN
            -- What is planned, up to the lane with the lowest tag: that of a channel that came since, or whose planned
            -- messages have been served.
            SELECT l.tag, l.since INTO v_lane_tag, v_lane_since
            FROM lane l
            WHERE l.queue = v_queue AND l.due = 0 AND (l.tag, l.since) > (r.vtime, r.vsince)
            ORDER BY l.tag, l.since LIMIT 1;
            RETURN QUERY
            SELECT * FROM scheduler_serve_plan(r, v_want, v_lane_tag, v_lane_since, v_clock, v_until, v_worker);

            GET DIAGNOSTICS v_got = ROW_COUNT;
            IF v_got > 0 THEN
                v_want := v_want - v_got;
                v_turned := true;
                EXIT WHEN v_want = 0;
                CONTINUE;
            END IF;
            -- If the lane comes first, it and those after it are served up to the next message of the plan. Otherwise,
            -- and where the two take turns all the time, the plan is of no more use.
            v_stretches := v_stretches + 1;
            SELECT p.tags[r.place - p.place + 2], p.sinces[r.place - p.place + 2] INTO v_bound_tag, v_bound_since
            FROM plan p
            WHERE p.queue = v_queue AND p.place > r.place - 31 AND p.place <= r.place + 1
            ORDER BY p.place DESC LIMIT 1;
            IF NOT FOUND OR v_lane_tag IS NULL OR (v_bound_tag, v_bound_since) < (v_lane_tag, v_lane_since)
                OR v_stretches > 4
            THEN
                PERFORM scheduler_unplan(v_queue);
                v_bound_tag := 9223372036854775807;
                v_bound_since := 9223372036854775807;
                -- Not the same places again: they would be looked for among the dead entries of those that were there.
                r.place := r.planned;
                r.ahead := 0;
                r.plan_at := plan_after();
                v_written := false;
            END IF;
        END IF;
        IF v_simple THEN
            RETURN QUERY
            SELECT * FROM scheduler_serve_heads(r, v_want, v_bound_tag, v_bound_since, v_clock, v_until, v_worker);

            GET DIAGNOSTICS v_got = ROW_COUNT;
            v_simple := v_got > 0;
            IF v_simple THEN
                v_want := v_want - v_got;
                v_turned := true;
                EXIT WHEN v_want = 0;
                CONTINUE;
            END IF;
        END IF;
        IF NOT EXISTS (
            SELECT FROM lane l
            WHERE l.queue = v_queue AND l.due = 0 AND (l.tag, l.since) > (r.vtime, r.vsince) LIMIT 1)
        THEN
            IF NOT (v_has_news OR v_has_urgent OR v_reclaim OR r.due_floor <= v_now) THEN
                -- All has been served: what comes now, of whom ever, begins after it. So lanes of names that are used
                -- once don't stay for ever.
                SELECT l.tag INTO v_lane_tag
                FROM lane l
                WHERE l.queue = v_queue AND l.due IS NULL AND l.tag > r.vtime
                ORDER BY l.tag DESC LIMIT 1;
                IF FOUND THEN
                    r.vtime := v_lane_tag;
                    r.vsince := r.activations;
                    v_written := false;
                END IF;
                EXIT;
            END IF;
            -- Of so much that is left to be told, a whole round of the sweep would have found what is ready, but for a late
            -- one with a low id. It is for the next ones, so that none takes long, and what this one has read stays read.
            v_is_left := (v_news >= 4096 AND v_reclaim) OR (v_news >= 20000 AND v_has_news AND r.swept = ''
                AND NOT (v_has_urgent OR v_reclaim OR r.due_floor <= v_now));
            EXIT WHEN v_is_left;
            v_news := greatest(v_news, least(v_news * 4, 20000));
            CONTINUE;
        END IF;

        RETURN QUERY
        SELECT * FROM scheduler_serve_shares(r, v_want, v_demand, v_lanes, v_bound_tag, v_bound_since,
            v_clock, v_until, v_worker);

        GET DIAGNOSTICS v_got = ROW_COUNT;
        v_want := v_want - v_got;
        v_turned := true;
        EXIT WHEN v_want = 0;
        -- Lanes that turn out to be empty are idle from now on; not those of what is held, which the next one would look
        -- at first again.
        v_is_left := v_got = 0 AND v_rounds >= 12 AND NOT EXISTS (
            SELECT FROM signal s WHERE s.queue = v_queue AND s.urgent AND s.xid = pg_current_xact_id());
        -- Short because it could look no further, because lanes turned out to be empty, or to have only what is held, or
        -- because no more is eligible. Of held ones comes news, for each of these lanes: more than that is read.
        v_demand := least(v_demand * 4, 100000);
        v_lanes := least(v_lanes * 4, 10000);
        v_news := greatest(v_news, least(v_news * 4, 20000));
    END LOOP;

    IF v_want > 0 AND (r.ahead > 0 OR r.tickets IS NOT NULL) THEN
        r.ahead := 0;
        IF r.tickets IS NOT NULL AND r.place >= r.planned THEN
            SELECT k.tickets INTO r.tickets FROM scheduler_tickets(v_queue, false) k;
        END IF;
        r.plan_at := plan_after();
        v_written := false;
    END IF;
    IF v_is_left THEN
        -- Nobody is notified of it: who asks queue_due is told to come at once.
        r.due_floor := 0;
        v_written := false;
    END IF;
    IF NOT (v_written OR v_turned) THEN
        UPDATE rotation t
        SET turn = t.turn + 1, era = rotation_era(t.turn + 1), vtime = r.vtime, vsince = r.vsince,
            activations = r.activations, news_from = r.news_from, news_open = r.news_open,
            urgent_from = r.urgent_from, urgent_open = r.urgent_open,
            lease_floor = r.lease_floor, due_floor = r.due_floor, idle_floor = r.idle_floor, swept = r.swept,
            max_concurrency = r.max_concurrency, paused_until = r.paused_until, running = r.running,
            counted_from = r.counted_from, rebuilt = r.rebuilt, clock = r.clock, maintain_at = r.maintain_at,
            place = r.place, planned = r.planned, ahead = r.ahead, plan_at = r.plan_at,
            lane_tag = NULL, lane_since = NULL, tickets = r.tickets
        WHERE t.queue = v_queue AND t.era = r.era;
    END IF;
END
$$;
