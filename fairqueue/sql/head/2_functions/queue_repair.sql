-- Derives everything that the scheduler keeps of a queue anew, whatever it was: afterwards queue_check finds nothing.
--
-- Called by operators, in a READ COMMITTED transaction that commits at once; safe on a live queue. Nothing is lost but,
-- where the lanes themselves were damaged, whom the rotation owes. Of a queue that nobody has ever used nothing is made.
-- Locks: the turn of the queue, until the end of the transaction; then as scheduler_limit and scheduler_rebuild.
CREATE FUNCTION queue_repair(name text DEFAULT 'default') RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
-- Those of message_dequeue, by which what both call is planned.
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_now bigint;
    v_lanes integer;
    r rotation%ROWTYPE;
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE active_sql_transaction USING
            MESSAGE = format('queue_repair needs READ COMMITTED, this transaction is %s',
                upper(current_setting('transaction_isolation'))),
            HINT = 'Repair in a short transaction of its own.';
    END IF;
    IF NOT scheduler_turn(v_queue) THEN
        RAISE lock_not_available USING
            MESSAGE = format('queue %L is being dequeued from', v_queue),
            HINT = 'Repair in a transaction of its own, which has written nothing before; then it waits for its turn.';
    END IF;
    -- Only now: others may have had their turns meanwhile, by a later clock.
    v_now := unix_ms(clock());
    SELECT t.* INTO r FROM rotation t WHERE t.queue = v_queue ORDER BY t.era DESC LIMIT 1;
    IF NOT FOUND THEN
        IF NOT EXISTS (SELECT FROM message m WHERE m.queue = v_queue AND m.leased_until IS NULL)
            AND NOT EXISTS (SELECT FROM message m WHERE m.queue = v_queue AND m.leased_until IS NOT NULL)
            AND NOT EXISTS (SELECT FROM lane l WHERE l.queue = v_queue)
            AND NOT EXISTS (SELECT FROM signal s WHERE s.queue = v_queue)
            AND NOT EXISTS (SELECT FROM missed k WHERE k.queue = v_queue)
            AND NOT EXISTS (SELECT FROM plan p WHERE p.queue = v_queue)
            AND NOT EXISTS (SELECT FROM tickets k WHERE k.queue = v_queue)
        THEN
            RETURN;
        END IF;
        INSERT INTO rotation AS t
        SELECT v_queue, 0, 0, coalesce(min(l.tag) FILTER (WHERE l.due = 0), max(l.tag), 0), 0, 0, '0', '{}', '0', '{}',
            'infinity', 9223372036854775807, -1, '', NULL, NULL, 0, 0, v_now, 0, 0, 0, 0, plan_after(), NULL, NULL
        FROM lane l WHERE l.queue = v_queue
        RETURNING t.* INTO r;
    END IF;
    IF pg_sequence_last_value(r.tickets) <> r.ticket_base THEN
        r := scheduler_settle(v_queue);
    END IF;
    DELETE FROM missed k WHERE k.queue = v_queue;
    -- Beyond every turn that is named anywhere, so that nothing that was counted before counts.
    r.turn := greatest((SELECT max(t.turn) FROM rotation t WHERE t.queue = v_queue),
        1 + (SELECT max(l.counted_from) FROM lane l WHERE l.queue = v_queue),
        1 + (SELECT max(m.counted) FROM message m WHERE m.queue = v_queue AND m.leased_until IS NOT NULL),
        1 + (SELECT max(s.counted) FROM signal s WHERE s.queue = v_queue));
    DELETE FROM rotation t WHERE t.queue = v_queue AND t.era < r.era;
    DELETE FROM lane l USING lane k
    WHERE l.queue = v_queue AND k.queue = v_queue AND k.channel = l.channel AND (k.tag, k.ctid) > (l.tag, l.ctid);
    SELECT greatest(r.activations, r.vsince, max(l.since)) INTO r.activations FROM lane l WHERE l.queue = v_queue;

    PERFORM scheduler_tickets(v_queue, false);
    -- That nobody starts beyond all others, wherever the lanes are now.
    PERFORM scheduler_unplan(v_queue);
    UPDATE rotation t
    SET arrival_tag = least(t.arrival_tag,
        greatest(0, r.vtime, (SELECT max(l.tag) FROM lane l WHERE l.queue = v_queue)))
    WHERE t.queue = v_queue;
    -- All ready lanes get new numbers, in the order of the old ones, and come after what was served.
    UPDATE lane l SET since = r.activations + n.nth, tag = greatest(l.tag, r.vtime)
    FROM (
        SELECT l.ctid AS row, row_number() OVER (ORDER BY l.since, l.head_id) AS nth
        FROM lane l WHERE l.queue = v_queue AND l.due = 0) n
    WHERE l.ctid = n.row;

    GET DIAGNOSTICS v_lanes = ROW_COUNT;
    r.activations := r.activations + v_lanes;
    r := scheduler_limit(r, v_now, true);
    SELECT b.activations, b.due_floor INTO r.activations, r.due_floor
    FROM scheduler_rebuild(v_queue, r.turn, r.vtime, v_now,
        CASE WHEN r.max_concurrency IS NOT NULL THEN r.counted_from END, '-infinity', NULL, true, '', r.activations) b;
    UPDATE rotation t
    SET turn = r.turn + 1, era = rotation_era(r.turn + 1), activations = r.activations, due_floor = r.due_floor,
        lease_floor = coalesce((SELECT min(m.leased_until) FROM message m WHERE m.queue = v_queue), 'infinity'),
        max_concurrency = r.max_concurrency, paused_until = r.paused_until,
        running = r.running, counted_from = r.turn, rebuilt = NULL, clock = v_now, idle_floor = -1, swept = '',
        place = greatest(t.place, t.planned), planned = greatest(t.place, t.planned), ahead = 0,
        plan_at = plan_after(), lane_tag = NULL, lane_since = NULL, tickets = NULL,
        -- All signals are to be read again, whatever they say.
        news_from = '0', news_open = '{}', urgent_from = '0', urgent_open = '{}'
    WHERE t.queue = v_queue;
END
$$;

REVOKE EXECUTE ON FUNCTION queue_repair FROM PUBLIC;
