-- Step 1: everything. Frozen: a released step is never changed.

-- Policy of a channel: what an operator sets for one tenant.
--
-- Written by users, read by the scheduler. A row is optional: without one the defaults apply, so a channel
-- costs nothing to have. A change is told to the scheduler by the trigger channel_changed.
CREATE TABLE channel (
    queue       text             NOT NULL DEFAULT 'default',
    name        text             NOT NULL,
    weight      double precision NOT NULL DEFAULT 1,
    created_at  timestamptz      NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT channel_pkey PRIMARY KEY (queue, name),
    CONSTRAINT channel_queue_length CHECK (char_length(queue) BETWEEN 1 AND 255),
    CONSTRAINT channel_name_length CHECK (char_length(name) BETWEEN 1 AND 255),
    -- NaN sorts above every number, so the upper bound refuses it too.
    CONSTRAINT channel_weight_range CHECK (weight >= 0.01 AND weight <= 1000)
);

-- One row a finished message, append-only: the source for reports and pipelines.
--
-- The transaction id makes it a change feed: rows become visible in the order of commits, which is not the order of
-- ids, so a reader resumes from a transaction-id horizon and loses no late commit.
CREATE TABLE history (
    message_id   bigint           NOT NULL,
    queue        text             NOT NULL,
    channel      text             NOT NULL,
    outcome      text             NOT NULL,
    attempt      integer          NOT NULL,
    cost         double precision NOT NULL,
    error        text,
    created_at   timestamptz      NOT NULL,
    finished_at  timestamptz      NOT NULL DEFAULT clock_timestamp(),
    xid          xid8             NOT NULL DEFAULT pg_current_xact_id(),
    CONSTRAINT history_pkey PRIMARY KEY (finished_at, message_id)
) PARTITION BY RANGE (finished_at);

CREATE INDEX history_xid ON history (xid);
CREATE INDEX history_channel ON history (queue, channel, finished_at);

-- The scheduler's view of a channel: one narrow row for each channel that is, or lately was, active.
--
-- Written by dequeues alone, one at a time for each queue (see message_dequeue), so its rows are never contended.
--   ready    has a message that may be served now: competes by (tag, since)
--   waiting  its first message is for later: wakes at due
--   idle     has no message; kept for its tag until the virtual time has passed it, so that a pause gains nothing
CREATE TABLE lane (
    queue    text             NOT NULL,
    channel  text             NOT NULL,
    state    text             NOT NULL,
    -- Start tag of the next message in units of virtual time (see lane_step). Only ever grows.
    tag      bigint           NOT NULL,
    -- The number of the activation that made the lane ready: equal tags go in this order. Only ever grows.
    since    bigint           NOT NULL,
    weight   double precision NOT NULL,
    -- No ready message stands before this place: scans start here, beyond the dead index entries of served ones.
    head_at  bigint           NOT NULL,
    head_id  bigint           NOT NULL,
    due      bigint,
    -- One row a channel. The tag is part of the key because it grows: read backwards, the first entry is the
    -- living one, however many dead versions an old snapshot keeps behind it.
    CONSTRAINT lane_pkey PRIMARY KEY (queue, channel, tag)
) WITH (autovacuum_vacuum_scale_factor = 0.05);

CREATE INDEX lane_ready ON lane (queue, tag, since) WHERE state = 'ready';
CREATE INDEX lane_waiting ON lane (queue, due) WHERE state = 'waiting';
CREATE INDEX lane_idle ON lane (queue, tag) WHERE state = 'idle';

-- One row a live message: ready, or leased to a worker. A finished message has no row here.
--
-- Users insert, dequeues lease (UPDATE), completions delete. A message is ready when leased_until is null; it is
-- served in the order (dequeue_at, id) of its channel and never before the database clock reaches dequeue_at.
CREATE TABLE message (
    id            bigint           GENERATED ALWAYS AS IDENTITY,
    queue         text             NOT NULL DEFAULT 'default',
    channel       text             NOT NULL,
    payload       jsonb,
    body          bytea,
    -- Unix time in milliseconds. Historic, zero or negative: priority inside the channel.
    dequeue_at    bigint           NOT NULL DEFAULT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint,
    -- How much of the channel's share this message uses up, in units that the application chooses.
    cost          double precision NOT NULL DEFAULT 1,
    -- How often it has been leased. With the id it is the fence: a lease is (id, attempt).
    attempt       integer          NOT NULL DEFAULT 0,
    leased_until  timestamptz,
    -- What a deferral saved for the next attempt, and what the last failure said.
    state         jsonb,
    error         text,
    created_at    timestamptz      NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT message_pkey PRIMARY KEY (id),
    CONSTRAINT message_queue_length CHECK (char_length(queue) BETWEEN 1 AND 255),
    CONSTRAINT message_channel_length CHECK (char_length(channel) BETWEEN 1 AND 255),
    CONSTRAINT message_cost_range CHECK (cost > 0 AND cost <= 1000000),
    CONSTRAINT message_payload_size CHECK (pg_column_size(payload) <= 67108864),
    CONSTRAINT message_body_size CHECK (octet_length(body) <= 67108864)
);

-- A channel's ready messages in their order: what a dequeue probes, from the lane's head on.
CREATE INDEX message_ready ON message (queue, channel, dequeue_at, id) WHERE leased_until IS NULL;

-- Leases by their end: what a dequeue looks at to find those that ran out.
CREATE INDEX message_leased ON message (queue, leased_until) WHERE leased_until IS NOT NULL;

-- Policy of a queue: a namespace of channels that workers subscribe to.
--
-- Written by users; a row is optional. Nothing on the way of a message reads it yet.
CREATE TABLE queue (
    name        text        NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT queue_pkey PRIMARY KEY (name),
    CONSTRAINT queue_name_length CHECK (char_length(name) BETWEEN 1 AND 255)
);

-- Where the rotation of a queue stands: one row a queue, written by dequeues alone.
--
-- Besides the virtual time it holds the lower bounds from which every index scan of a dequeue starts, so that none
-- walks over entries that are dead but, because of an old snapshot, not yet removable. The row itself is updated by
-- every dequeue that does something; being keyed by a number that grows, it is read as the last entry of its index
-- and costs the same however many dead versions lie before it.
CREATE TABLE rotation (
    queue        text        NOT NULL,
    turn         bigint      NOT NULL,
    -- Start tag of the message served last: where a channel that becomes active starts. Only ever grows.
    vtime        bigint      NOT NULL,
    -- The lane of that message: every ready lane comes after (vtime, vsince).
    vsince       bigint      NOT NULL,
    -- How many lanes have become ready so far: the number that the next one gets, less 1.
    activations  bigint      NOT NULL,
    -- Signals of transactions from news_from on, and of those in news_open, have not been folded yet.
    news_from    xid8        NOT NULL,
    news_open    xid8[]      NOT NULL,
    -- No lease ends, and no waiting lane is due, before these.
    lease_floor  timestamptz NOT NULL,
    due_floor    bigint      NOT NULL,
    -- Idle lanes below this tag have been removed.
    idle_floor   bigint      NOT NULL,
    -- The last channel that scheduler_sweep looked at ('' at the start of a round).
    swept        text        NOT NULL,
    CONSTRAINT rotation_pkey PRIMARY KEY (queue, turn)
) WITH (autovacuum_vacuum_scale_factor = 0.05);

-- News for the scheduler: "channel c may have something ready from (dequeue_at, message_id) on", or, with both null,
-- "the policy of channel c changed".
--
-- Written by the triggers, append-only, in the writer's own transaction, so that enqueueing waits for nobody.
-- Dequeues fold signals into lanes and delete them (scheduler_fold). The transaction id, not the order of arrival,
-- is what a fold resumes from: ids are given at insert but rows are seen at commit.
CREATE TABLE signal (
    queue       text   NOT NULL,
    channel     text   NOT NULL,
    dequeue_at  bigint,
    message_id  bigint,
    xid         xid8   NOT NULL DEFAULT pg_current_xact_id()
) WITH (autovacuum_vacuum_scale_factor = 0.05);

CREATE INDEX signal_news ON signal (queue, xid);

-- Sets the policy of a channel, creating its row where there is none.
--
-- Called by operators. Takes effect at the next dequeue (trigger channel_changed).
-- Locks: the row of the channel, until the end of the transaction. The scheduler only reads it.
CREATE FUNCTION channel_set(name text, queue text DEFAULT 'default', weight double precision DEFAULT 1) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
#variable_conflict use_variable
BEGIN
    INSERT INTO channel (queue, name, weight) VALUES (queue, name, weight)
    ON CONFLICT ON CONSTRAINT channel_pkey DO UPDATE SET weight = excluded.weight;
END
$$;

REVOKE EXECUTE ON FUNCTION channel_set FROM PUBLIC;

-- Raises unless a number of seconds is between minimum and ten years (so neither null, NaN nor infinite).
--
-- Called by the functions that take a time span; takes no lock.
CREATE FUNCTION check_seconds(field text, seconds double precision, minimum double precision) RETURNS void
LANGUAGE plpgsql IMMUTABLE
AS $$
BEGIN
    IF seconds IS NULL OR NOT (seconds >= minimum AND seconds <= 315576000) THEN
        RAISE invalid_parameter_value USING
            MESSAGE = format('%s must be between %s and 315576000, not %s', field, minimum,
                coalesce(seconds::text, 'null'));
    END IF;
END
$$;

-- Whether a message is leased, from its leased_until.
--
-- Called by the functions that end or extend leases, which find messages by id; takes no lock. Not IS NOT NULL: the
-- planner would take that for an invitation to read the whole index of leases instead.
CREATE FUNCTION is_leased(leased_until timestamptz) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN coalesce(leased_until, '-infinity') > '-infinity';

-- By how much serving one message moves the start tag of its lane: cost / weight in units of virtual time.
--
-- Called by message_dequeue; takes no lock. A whole number, so that adding up a batch gives exactly what adding one
-- by one gives. 720720 is divisible by 1 to 16: with such weights no share is ever rounded.
CREATE FUNCTION lane_step(cost double precision, weight double precision) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN greatest(1, round(cost * 720720 / weight))::bigint;

-- The leases that a caller names, (ids[i], attempts[i]), in the order of ids; n is the place in the lists.
--
-- Called by message_complete, message_fail, message_defer and message_heartbeat; takes no lock. All of them touch
-- messages in the order of ids, so that two of them can't deadlock.
CREATE FUNCTION lease_list(ids bigint[], attempts integer[])
RETURNS TABLE (id bigint, attempt integer, n bigint)
LANGUAGE plpgsql IMMUTABLE ROWS 100
AS $$
#variable_conflict use_column
BEGIN
    IF ids IS NULL OR attempts IS NULL OR cardinality(ids) <> cardinality(attempts) THEN
        RAISE invalid_parameter_value USING
            MESSAGE = format('ids and attempts must have the same length, not %s and %s',
                coalesce(cardinality(ids)::text, 'null'), coalesce(cardinality(attempts)::text, 'null'));
    END IF;
    RETURN QUERY
    SELECT * FROM unnest(ids, attempts) WITH ORDINALITY AS l (id, attempt, n) ORDER BY l.id;
END
$$;

-- What happened to each message of a call, in the order given: done_result for those in done, else why not.
--
-- Called by the functions that end or extend leases, at their end; takes no lock. 'stale': the message is there, but
-- the lease is over. 'not_found': there is no such message any more. Attempts are null where they don't matter.
CREATE FUNCTION lease_results(
    ids bigint[], attempts integer[], done bigint[], done_attempts integer[], done_result text
) RETURNS TABLE (id bigint, result text)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
-- The callers switch hash joins off, and their settings hold in here too.
SET enable_hashjoin = on
SET enable_nestloop = off
AS $$
#variable_conflict use_column
BEGIN
    IF cardinality(done) = cardinality(ids) THEN
        RETURN QUERY SELECT l.id, done_result FROM unnest(ids) AS l (id);
        RETURN;
    END IF;
    RETURN QUERY
    -- A scalar subquery, as EXISTS might be answered by hashing the whole table.
    SELECT l.id, CASE WHEN d.id IS NOT NULL THEN done_result
        ELSE coalesce((SELECT 'stale' FROM message m WHERE m.id = l.id), 'not_found') END
    FROM unnest(ids, attempts) WITH ORDINALITY AS l (id, attempt, n)
    LEFT JOIN unnest(done, done_attempts) AS d (id, attempt)
        ON d.id = l.id AND coalesce(d.attempt, 0) = coalesce(l.attempt, 0)
    ORDER BY l.n;
END
$$;

-- Takes messages out of the queue for good, whether ready or leased.
--
-- Called by the application. Returns for each id, in the order given, 'cancelled' or 'not_found'. The worker of a
-- leased message learns it at its next heartbeat, at the latest when it completes: the message is 'not_found'.
-- Locks: the messages it deletes, in the order of ids, until the end of the transaction.
CREATE FUNCTION message_cancel(ids bigint[]) RETURNS TABLE (id bigint, result text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_done bigint[];
BEGIN
    IF ids IS NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = 'ids must be a list of message ids, not null';
    END IF;
    WITH named AS MATERIALIZED (
        SELECT l.id FROM unnest(ids) AS l (id) ORDER BY l.id
    ), done AS (
        DELETE FROM message m USING named l WHERE m.id = l.id RETURNING m.id
    )
    SELECT array_agg(d.id) INTO v_done FROM done d;

    RETURN QUERY SELECT * FROM lease_results(ids, NULL, v_done, NULL, 'cancelled');
END
$$;

REVOKE EXECUTE ON FUNCTION message_cancel FROM PUBLIC;

-- Ends leases whose work is done: the messages are gone when the caller's transaction commits.
--
-- Called by workers, best in the transaction of the work itself. Returns for each lease, in the order given,
-- 'completed', 'stale' (the lease ran out and the message is, or was, somebody else's) or 'not_found'.
-- Locks: the messages it deletes, until the end of the transaction. Only another act on the same lease waits for them.
CREATE FUNCTION message_complete(ids bigint[], attempts integer[]) RETURNS TABLE (id bigint, result text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_done bigint[];
    v_attempts integer[];
BEGIN
    WITH lease AS MATERIALIZED (
        SELECT * FROM lease_list(ids, attempts)
    ), done AS (
        DELETE FROM message m USING lease l
        WHERE m.id = l.id AND m.attempt = l.attempt AND is_leased(m.leased_until)
        RETURNING m.id, m.attempt
    )
    SELECT array_agg(d.id), array_agg(d.attempt) INTO v_done, v_attempts FROM done d;

    RETURN QUERY SELECT * FROM lease_results(ids, attempts, v_done, v_attempts, 'completed');
END
$$;

REVOKE EXECUTE ON FUNCTION message_complete FROM PUBLIC;

-- Enqueues one message and returns its id. For other languages than Python; INSERT INTO message does the same.
--
-- Called by producers, within their own transaction. At most one of delay_seconds (from now, by the database clock),
-- dequeue_at (Unix time in milliseconds) and priority (0 or more; higher goes first inside the channel) may be given:
-- a message can't be urgent and for later.
-- Locks: none that anybody waits for (see the trigger message_enqueued).
CREATE FUNCTION message_create(
    channel text, payload jsonb DEFAULT NULL, queue text DEFAULT 'default',
    delay_seconds double precision DEFAULT NULL, dequeue_at bigint DEFAULT NULL, priority bigint DEFAULT NULL,
    cost double precision DEFAULT 1, body bytea DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
#variable_conflict use_variable
DECLARE
    v_id bigint;
BEGIN
    IF num_nonnulls(delay_seconds, dequeue_at, priority) > 1 THEN
        RAISE invalid_parameter_value USING
            MESSAGE = 'only one of delay_seconds, dequeue_at and priority may be given',
            HINT = 'A priority is a dequeue_at in the past: a message can''t be urgent and for later.';
    ELSIF priority < 0 THEN
        RAISE invalid_parameter_value USING MESSAGE = format('priority must be 0 or more, not %s', priority);
    END IF;
    IF delay_seconds IS NOT NULL THEN
        PERFORM check_seconds('delay_seconds', delay_seconds, 0);
        dequeue_at := unix_ms(clock_timestamp() + make_interval(secs => delay_seconds));
    ELSIF priority > 0 THEN
        dequeue_at := -priority;
    END IF;
    INSERT INTO message AS m (queue, channel, payload, body, dequeue_at, cost)
    VALUES (queue, channel, payload, body, coalesce(dequeue_at, unix_ms(clock_timestamp())), cost)
    RETURNING m.id INTO v_id;
    RETURN v_id;
END
$$;

REVOKE EXECUTE ON FUNCTION message_create FROM PUBLIC;

-- Ends leases whose work is to go on later: the messages go back into their channels with a saved state.
--
-- Called by workers. states[i] is what the next attempt of ids[i] will find in message.state; without states the
-- saved ones stay. Returns for each lease, in the order given, 'deferred', 'stale' or 'not_found'.
-- Locks: the messages it updates, until the end of the transaction. The trigger message_moved signals the channels.
CREATE FUNCTION message_defer(
    ids bigint[], attempts integer[], delay_seconds double precision DEFAULT 0, states jsonb[] DEFAULT NULL
) RETURNS TABLE (id bigint, result text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_done bigint[];
    v_attempts integer[];
BEGIN
    PERFORM check_seconds('delay_seconds', delay_seconds, 0);
    IF cardinality(states) <> cardinality(ids) THEN
        RAISE invalid_parameter_value USING
            MESSAGE = format('ids and states must have the same length, not %s and %s',
                cardinality(ids), cardinality(states));
    END IF;
    WITH lease AS MATERIALIZED (
        SELECT * FROM lease_list(ids, attempts)
    ), done AS (
        UPDATE message m
        SET leased_until = NULL, dequeue_at = unix_ms(clock_timestamp() + make_interval(secs => delay_seconds)),
            state = CASE WHEN states IS NULL THEN m.state ELSE states[l.n] END
        FROM lease l
        WHERE m.id = l.id AND m.attempt = l.attempt AND is_leased(m.leased_until)
        RETURNING m.id, m.attempt
    )
    SELECT array_agg(d.id), array_agg(d.attempt) INTO v_done, v_attempts FROM done d;

    RETURN QUERY SELECT * FROM lease_results(ids, attempts, v_done, v_attempts, 'deferred');
END
$$;

REVOKE EXECUTE ON FUNCTION message_defer FROM PUBLIC;

-- Leases up to max_messages messages of a queue for lease_seconds, in the order of start-time fair queueing.
--
-- Called by workers, in a READ COMMITTED transaction that commits at once. Returns the messages in the order in which
-- they were scheduled; fewer than asked for only when fewer are eligible.
--
-- Scheduling (Goyal, Vin, Cheng: Start-time Fair Queueing, 1996). Each active channel has a lane with a start tag.
-- The next message comes from the lowest tag, ties from the lane that became ready first; serving it moves the
-- tag on by cost / weight. A channel that becomes active starts at max(its own tag, virtual time). One statement
-- below schedules a whole batch, exactly as single dequeues in a row would.
--
-- Locks: the queue's turn until the end of the transaction, so that one dequeue at a time schedules a queue: its order,
-- and with it every limit, is exact whatever the number of workers. Then the messages that it leases; a message that
-- somebody else holds is passed over. Enqueues and completions take none of these locks and never wait for them.
CREATE FUNCTION message_dequeue(
    queue text DEFAULT 'default', max_messages integer DEFAULT 1, lease_seconds double precision DEFAULT 30
) RETURNS TABLE (
    id bigint, channel text, attempt integer, payload jsonb, body bytea, state jsonb, error text,
    dequeue_at bigint, cost double precision, created_at timestamptz, leased_until timestamptz
)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
-- One plan a session, found without statistics: planning anew took most of a call. Every access is by an index.
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
    -- How much news one call takes in before it serves: in proportion to what it serves.
    v_news integer := 64 + 4 * max_messages;
    v_want integer := max_messages;
    v_demand integer := max_messages;
    v_lanes integer := max_messages;
    v_clock timestamptz;
    v_now bigint;
    v_until timestamptz;
    v_got integer;
    v_fold boolean := true;
    v_reclaim boolean;
    v_written boolean := true;
    r rotation%ROWTYPE;
BEGIN
    IF v_queue IS NULL OR char_length(v_queue) NOT BETWEEN 1 AND 255 THEN
        RAISE invalid_parameter_value USING MESSAGE = format('queue must have 1 to 255 characters, not %s',
            coalesce(char_length(v_queue)::text, 'null'));
    ELSIF max_messages IS NULL OR max_messages NOT BETWEEN 1 AND 10000 THEN
        RAISE invalid_parameter_value USING MESSAGE = format('max_messages must be 1 to 10000, not %s',
            coalesce(max_messages::text, 'null'));
    END IF;
    PERFORM check_seconds('lease_seconds', lease_seconds, 0.001);
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE active_sql_transaction USING
            MESSAGE = format('message_dequeue needs READ COMMITTED, this transaction is %s',
                upper(current_setting('transaction_isolation'))),
            HINT = 'Dequeue in a short transaction of its own.';
    END IF;

    IF NOT scheduler_turn(v_queue) THEN
        RETURN;
    END IF;
    v_clock := clock_timestamp();
    v_now := unix_ms(v_clock);
    v_until := v_clock + make_interval(secs => lease_seconds);

    SELECT t.* INTO r FROM rotation t WHERE t.queue = v_queue ORDER BY t.turn DESC LIMIT 1;
    IF NOT FOUND THEN
        IF NOT EXISTS (SELECT FROM signal s WHERE s.queue = v_queue LIMIT 1) THEN
            RETURN;
        END IF;
        INSERT INTO rotation AS t
        VALUES (v_queue, 0, 0, 0, 0, '0', '{}', 'infinity', 9223372036854775807, -1, '')
        RETURNING t.* INTO r;
    ELSIF r.news_from > pg_snapshot_xmax(pg_current_snapshot()) THEN
        -- Restored from a dump of another server, whose transaction ids were ahead.
        r.news_from := '0';
    END IF;
    v_reclaim := r.lease_floor <= v_clock;

    -- Each round takes in some news, then serves. It is the last one, unless the batch comes out short.
    LOOP
        IF v_reclaim THEN
            SELECT c.lease_floor, c.more INTO r.lease_floor, v_reclaim
            FROM scheduler_reclaim(v_queue, v_clock, r.lease_floor, v_news) c;
            v_fold := true;
            v_written := false;
        END IF;
        IF v_fold AND (EXISTS (SELECT FROM signal s WHERE s.queue = v_queue AND s.xid >= r.news_from LIMIT 1)
            OR EXISTS (SELECT FROM signal s WHERE s.queue = v_queue AND s.xid = ANY (r.news_open) LIMIT 1))
        THEN
            SELECT f.news_from, f.news_open, f.activations, least(f.due_floor, r.due_floor), f.more
            INTO r.news_from, r.news_open, r.activations, r.due_floor, v_fold
            FROM scheduler_fold(v_queue, r.vtime, v_now, v_news, r.news_from, r.news_open, r.activations) f;
            v_written := false;
        ELSE
            v_fold := false;
        END IF;
        -- Signals come in faster than they are folded, or, now and then, to find what no signal told of.
        IF v_fold OR r.turn % 64 = 32 THEN
            SELECT w.swept, w.activations, least(w.due_floor, r.due_floor) INTO r.swept, r.activations, r.due_floor
            FROM scheduler_sweep(v_queue, r.vtime, v_now, v_news, r.swept, r.activations) w;
            v_written := false;
        END IF;
        IF r.due_floor <= v_now THEN
            SELECT w.due_floor, w.activations INTO r.due_floor, r.activations
            FROM scheduler_wake(v_queue, r.vtime, v_now, v_news, r.due_floor, r.activations) w;
            v_written := false;
        END IF;
        IF r.turn % 64 = 0 OR r.vtime > 1000000000000000000 THEN
            SELECT y.vtime, y.idle_floor INTO r.vtime, r.idle_floor
            FROM scheduler_tidy(v_queue, r.vtime, r.idle_floor) y;
            v_written := false;
        END IF;

        IF NOT EXISTS (
            SELECT FROM lane l
            WHERE l.queue = v_queue AND l.state = 'ready' AND (l.tag, l.since) > (r.vtime, r.vsince) LIMIT 1)
        THEN
            EXIT WHEN NOT (v_fold OR v_reclaim OR r.due_floor <= v_now);
            v_news := least(v_news * 4, 20000);
            CONTINUE;
        END IF;

        RETURN QUERY
        -- The lanes that can have a part in the next v_want messages: those with the lowest tags.
        WITH competing AS MATERIALIZED (
            SELECT l.ctid AS lane, l.channel, l.tag, l.since, l.weight, l.head_at, l.head_id,
                lane_step(1, l.weight)::double precision AS step
            FROM lane l
            WHERE l.queue = v_queue AND l.state = 'ready' AND (l.tag, l.since) > (r.vtime, r.vsince)
            ORDER BY l.tag, l.since
            LIMIT v_lanes
        -- How many messages each may get, if all cost 1: those that start before the tag at which v_demand messages
        -- have started, which is the lowest level that water poured into the first lanes, one after the other, has.
        -- A guess: what costs make different is caught by the horizon below.
        ), levels AS (
            SELECT c.*, (v_demand - count(*) OVER w + sum((c.tag - r.vtime) / c.step) OVER w)
                / sum(1 / c.step) OVER w AS level
            FROM competing c
            WINDOW w AS (ORDER BY c.tag, c.since ROWS UNBOUNDED PRECEDING)
        ), shares AS (
            SELECT c.*, greatest(1, least(v_demand,
                    floor((min(c.level) OVER () - (c.tag - r.vtime)) / c.step + 0.000001) + 1))::integer AS share,
                count(*) OVER () = v_lanes AS cut,
                first_value(c.tag) OVER w AS last_tag, first_value(c.since) OVER w AS last_since
            FROM levels c
            WINDOW w AS (ORDER BY c.tag DESC, c.since DESC)
        -- Their first messages, and one more, which tells where the lane stands afterwards.
        ), candidates AS (
            SELECT s.lane, s.since, s.share, s.cut, s.last_tag, s.last_since, m.row, m.id, m.dequeue_at, m.step,
                row_number() OVER lane AS nth, s.tag + (sum(m.step) OVER lane - m.step)::bigint AS start, coalesce(m.dequeue_at <= v_now, false) AS ripe
            FROM shares s
            LEFT JOIN LATERAL (
                SELECT m.ctid AS row, m.id, m.dequeue_at, lane_step(m.cost, s.weight) AS step
                FROM message m
                WHERE m.queue = v_queue AND m.channel = s.channel AND m.leased_until IS NULL
                    AND (m.dequeue_at, m.id) >= (s.head_at, s.head_id)
                ORDER BY m.dequeue_at, m.id
                LIMIT s.share + 1) m ON true
            WINDOW lane AS (PARTITION BY s.since ORDER BY m.dequeue_at, m.id ROWS UNBOUNDED PRECEDING)
        ), placed AS (
            SELECT c.*, row_number() OVER (PARTITION BY c.ripe ORDER BY c.start, c.since) AS place
            FROM candidates c
        -- Beyond the last message that was fetched of a lane there may be others that go first; and beyond the last
        -- lane that competes, where there was no room for more, other lanes: some of these here may turn out empty.
        ), horizon AS (
            SELECT p.*, min(p.place) FILTER (WHERE p.ripe AND p.nth > p.share) OVER () AS horizon
            FROM placed p
        ), marked AS MATERIALIZED (
            SELECT h.*, h.ripe AND h.place <= least(v_want, h.horizon)
                AND (NOT h.cut OR (h.start, h.since) <= (h.last_tag, h.last_since)) AS taken
            FROM horizon h
        ), held AS MATERIALIZED (
            SELECT m.ctid AS row, k.place
            FROM marked k
            JOIN message m ON m.ctid = k.row
            WHERE k.taken AND m.leased_until IS NULL AND m.dequeue_at <= v_now
            FOR NO KEY UPDATE OF m SKIP LOCKED
        ), leased AS (
            UPDATE message m
            SET attempt = least(m.attempt, 2147483646) + 1, leased_until = v_until
            FROM held h
            WHERE m.ctid = h.row
            RETURNING m.*, h.place
        -- A message that was passed over, because somebody else held or just changed it, is news for the next turn.
        ), missed AS (
            INSERT INTO signal (queue, channel, dequeue_at, message_id)
            SELECT v_queue, m.channel, k.dequeue_at, k.id
            FROM marked k JOIN message m ON m.ctid = k.row
            WHERE k.taken
                AND (SELECT count(*) FROM leased) < (SELECT count(*) FROM marked t WHERE t.taken)
                AND NOT EXISTS (SELECT FROM leased d WHERE d.place = k.place)
        ), moves AS MATERIALIZED (
            SELECT k.lane, coalesce(sum(k.step) FILTER (WHERE k.taken), 0)::bigint AS spent,
                count(k.id) > k.share AS cut_off, max(k.dequeue_at) FILTER (WHERE k.taken) AS last_at,
                min(k.dequeue_at) FILTER (WHERE NOT k.taken) AS next_at, min(k.id) FILTER (WHERE NOT k.taken) AS next_id
            FROM marked k
            GROUP BY k.lane, k.share
        ), moved AS (
            UPDATE lane l
            SET tag = l.tag + v.spent,
                state = CASE WHEN v.next_at <= v_now THEN 'ready' WHEN v.next_at IS NOT NULL THEN 'waiting'
                    WHEN v.cut_off THEN 'ready' ELSE 'idle' END,
                due = CASE WHEN v.next_at > v_now THEN v.next_at END,
                head_at = coalesce(v.next_at, v.last_at, l.head_at),
                head_id = coalesce(v.next_id, 0)
            FROM moves v
            WHERE l.ctid = v.lane
        ), last AS (
            SELECT k.start, k.since FROM marked k WHERE k.taken ORDER BY k.place DESC LIMIT 1
        ), turned AS (
            UPDATE rotation t
            SET turn = t.turn + 1,
                vtime = coalesce((SELECT a.start FROM last a), r.vtime),
                vsince = coalesce((SELECT a.since FROM last a), r.vsince),
                activations = r.activations, news_from = r.news_from, news_open = r.news_open,
                due_floor = least(r.due_floor, (SELECT min(v.next_at) FROM moves v WHERE v.next_at > v_now)),
                lease_floor = least(r.lease_floor, v_until), idle_floor = r.idle_floor, swept = r.swept
            WHERE t.queue = v_queue AND t.turn = r.turn
        )
        SELECT d.id, d.channel, d.attempt, d.payload, d.body, d.state, d.error, d.dequeue_at, d.cost, d.created_at,
            d.leased_until
        FROM leased d
        ORDER BY d.place;

        GET DIAGNOSTICS v_got = ROW_COUNT;
        v_written := true;
        v_want := v_want - v_got;
        EXIT WHEN v_want = 0;
        -- Short because of the horizon, because lanes turned out to be empty, or because no more is eligible.
        v_demand := least(v_demand * 4, 100000);
        v_lanes := least(v_lanes * 4, 10000);
        SELECT t.* INTO r FROM rotation t WHERE t.queue = v_queue ORDER BY t.turn DESC LIMIT 1;
    END LOOP;

    IF NOT v_written THEN
        UPDATE rotation t
        SET turn = t.turn + 1, vtime = r.vtime, activations = r.activations, news_from = r.news_from,
            news_open = r.news_open, lease_floor = r.lease_floor, due_floor = r.due_floor, idle_floor = r.idle_floor,
            swept = r.swept
        WHERE t.queue = v_queue AND t.turn = r.turn;
    END IF;
END
$$;

REVOKE EXECUTE ON FUNCTION message_dequeue FROM PUBLIC;

-- Ends leases whose work failed: the messages go back into their channels, to be tried again after delay_seconds.
--
-- Called by workers. Returns for each lease, in the order given, 'failed', 'stale' or 'not_found'. The error is kept
-- with the message. With no delay a message keeps its place in the channel.
-- Locks: the messages it updates, until the end of the transaction. The trigger message_moved signals the channels.
CREATE FUNCTION message_fail(
    ids bigint[], attempts integer[], error text DEFAULT NULL, delay_seconds double precision DEFAULT 0
) RETURNS TABLE (id bigint, result text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_error CONSTANT text := $3;
    v_done bigint[];
    v_attempts integer[];
BEGIN
    PERFORM check_seconds('delay_seconds', delay_seconds, 0);
    WITH lease AS MATERIALIZED (
        SELECT * FROM lease_list(ids, attempts)
    ), done AS (
        UPDATE message m
        SET leased_until = NULL, error = v_error, dequeue_at = CASE WHEN delay_seconds = 0 THEN m.dequeue_at
            ELSE unix_ms(clock_timestamp() + make_interval(secs => delay_seconds)) END
        FROM lease l
        WHERE m.id = l.id AND m.attempt = l.attempt AND is_leased(m.leased_until)
        RETURNING m.id, m.attempt
    )
    SELECT array_agg(d.id), array_agg(d.attempt) INTO v_done, v_attempts FROM done d;

    RETURN QUERY SELECT * FROM lease_results(ids, attempts, v_done, v_attempts, 'failed');
END
$$;

REVOKE EXECUTE ON FUNCTION message_fail FROM PUBLIC;

-- Extends leases to lease_seconds from now; never shortens one.
--
-- Called by workers while they work. Returns for each lease, in the order given, 'extended', 'busy' (its completion
-- or another act on it is under way in an open transaction), 'stale' or 'not_found' (completed or cancelled).
-- A lease that ran out is still extended when nobody has taken the message back.
-- Locks: the messages it updates, until the end of the transaction. It waits for nobody.
CREATE FUNCTION message_heartbeat(
    ids bigint[], attempts integer[], lease_seconds double precision DEFAULT 30
) RETURNS TABLE (id bigint, result text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_known bigint[];
    v_done bigint[];
    v_attempts integer[];
BEGIN
    PERFORM check_seconds('lease_seconds', lease_seconds, 0.001);
    WITH lease AS MATERIALIZED (
        SELECT * FROM lease_list(ids, attempts)
    ), known AS MATERIALIZED (
        SELECT m.id
        FROM lease l JOIN message m ON m.id = l.id
        WHERE m.attempt = l.attempt AND is_leased(m.leased_until)
    ), held AS MATERIALIZED (
        SELECT m.id
        FROM lease l JOIN message m ON m.id = l.id
        WHERE m.attempt = l.attempt AND is_leased(m.leased_until)
        FOR NO KEY UPDATE OF m SKIP LOCKED
    ), done AS (
        UPDATE message m
        SET leased_until = greatest(m.leased_until, clock_timestamp() + make_interval(secs => lease_seconds))
        FROM held h
        WHERE m.id = h.id
        RETURNING m.id, m.attempt
    )
    SELECT (SELECT array_agg(k.id) FROM known k), array_agg(d.id), array_agg(d.attempt)
    INTO v_known, v_done, v_attempts
    FROM done d;

    RETURN QUERY
    SELECT r.id, CASE WHEN r.result = 'stale' AND r.id = ANY (v_known) THEN 'busy' ELSE r.result END
    FROM lease_results(ids, attempts, v_done, v_attempts, 'extended') r;
END
$$;

REVOKE EXECUTE ON FUNCTION message_heartbeat FROM PUBLIC;

-- Tells the lanes of some channels that there may be ready messages from (ats[i], ids[i]) on.
--
-- Called by scheduler_fold and scheduler_sweep, within the turn. A channel that becomes active starts at
-- max(its own tag, vtime): neither a pause nor a new name gains anything. A place of null only re-reads the policy.
-- Locks: the lanes it changes; nobody else writes lanes while the turn is held.
--
-- Returns the number of activations so far, and the earliest time at which one of the lanes that now wait is due.
CREATE FUNCTION scheduler_activate(
    queue text, vtime bigint, now_ms bigint, channels text[], ats bigint[], ids bigint[],
    INOUT activations bigint, OUT due_floor bigint
)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_vtime CONSTANT bigint := $2;
    v_activations CONSTANT bigint := $7;
BEGIN
    WITH known AS (
        SELECT n.channel, n.at, n.id, coalesce(c.weight, 1) AS weight, l.row, l.tag, l.since, l.state,
            l.head_at, l.head_id, coalesce(l.state, 'idle') = 'idle' AS was_idle, l.weight AS old_weight
        FROM unnest(channels, ats, ids) AS n (channel, at, id)
        LEFT JOIN LATERAL (
            SELECT l.ctid AS row, l.* FROM lane l
            WHERE l.queue = v_queue AND l.channel = n.channel
            ORDER BY l.tag DESC LIMIT 1) l ON true
        LEFT JOIN channel c ON c.queue = v_queue AND c.name = n.channel
    ), head AS (
        SELECT k.*, CASE
                WHEN k.at IS NULL THEN false
                WHEN k.was_idle THEN true
                ELSE (k.at, k.id) < (k.head_at, k.head_id) END AS is_head
        FROM known k
    ), wanted AS MATERIALIZED (
        SELECT h.row, h.channel, h.weight,
            CASE WHEN h.was_idle AND NOT h.is_head THEN 'idle'
                WHEN h.at <= now_ms AND h.is_head THEN 'ready'
                WHEN h.is_head AND h.state IS DISTINCT FROM 'ready' THEN 'waiting'
                ELSE h.state END AS state,
            CASE WHEN h.at <= now_ms AND h.is_head AND h.state IS DISTINCT FROM 'ready'
                THEN greatest(h.tag, v_vtime) ELSE coalesce(h.tag, v_vtime) END AS tag,
            CASE WHEN h.at <= now_ms AND h.is_head AND h.state IS DISTINCT FROM 'ready'
                THEN v_activations + row_number() OVER (ORDER BY h.id) ELSE coalesce(h.since, 0) END AS since,
            CASE WHEN h.is_head THEN h.at ELSE h.head_at END AS head_at,
            CASE WHEN h.is_head THEN h.id ELSE h.head_id END AS head_id
        FROM head h
        WHERE h.is_head OR h.weight <> h.old_weight
    ), changed AS (
        UPDATE lane l
        SET state = w.state, tag = w.tag, since = w.since, weight = w.weight, head_at = w.head_at,
            head_id = w.head_id, due = CASE WHEN w.state = 'waiting' THEN w.head_at END
        FROM wanted w
        WHERE l.ctid = w.row
    ), born AS (
        INSERT INTO lane (queue, channel, state, tag, since, weight, head_at, head_id, due)
        SELECT v_queue, w.channel, w.state, w.tag, w.since, w.weight, w.head_at, w.head_id,
            CASE WHEN w.state = 'waiting' THEN w.head_at END
        FROM wanted w
        WHERE w.row IS NULL
    )
    SELECT v_activations + count(*), coalesce(min(w.head_at) FILTER (WHERE w.state = 'waiting'), 9223372036854775807)
    INTO activations, due_floor
    FROM wanted w;
END
$$;

-- Folds up to max_signals signals into lanes and deletes them.
--
-- Called by message_dequeue, within the turn. news_from and news_open are rotation's: the signals that no fold has
-- seen are those of transactions from news_from on and of those that were in progress below it. Reading just these,
-- through the index on the transaction id, a fold never walks over the signals of the past.
-- Locks: the signals it deletes, which nobody else deletes, and the lanes that scheduler_activate changes.
--
-- Returns the new horizon, the number of activations so far, the earliest time at which a lane that now waits is due,
-- and whether signals may be left.
CREATE FUNCTION scheduler_fold(
    queue text, vtime bigint, now_ms bigint, max_signals integer,
    INOUT news_from xid8, INOUT news_open xid8[], INOUT activations bigint, OUT due_floor bigint, OUT more boolean
)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_from CONSTANT xid8 := $5;
    v_open CONSTANT xid8[] := $6;
    v_activations CONSTANT bigint := $7;
    v_snapshot pg_snapshot;
    v_folded integer;
    v_late integer;
    v_last xid8;
    v_channels text[];
    v_ats bigint[];
    v_ids bigint[];
BEGIN
    WITH late AS MATERIALIZED (
        SELECT s.ctid AS row, s.channel, s.dequeue_at, s.message_id, s.xid, true AS is_late
        FROM signal s
        WHERE s.queue = v_queue AND s.xid = ANY (v_open) AND s.xid < v_from
        LIMIT max_signals
    ), fresh AS MATERIALIZED (
        SELECT s.ctid AS row, s.channel, s.dequeue_at, s.message_id, s.xid, false AS is_late
        FROM signal s
        WHERE s.queue = v_queue AND s.xid >= v_from
        ORDER BY s.xid
        LIMIT max_signals
    ), batch AS MATERIALIZED (
        SELECT * FROM late UNION ALL SELECT * FROM fresh
    ), gone AS (
        DELETE FROM signal s USING batch b WHERE s.ctid = b.row
    ), news AS (
        SELECT b.channel, min(b.dequeue_at) AS at,
            (array_agg(b.message_id ORDER BY b.dequeue_at, b.message_id))[1] AS id
        FROM batch b
        GROUP BY b.channel
    ), news_lists AS (
        SELECT array_agg(n.channel) AS channels, array_agg(n.at) AS ats, array_agg(n.id) AS ids FROM news n
    ), counts AS (
        SELECT count(*) FILTER (WHERE NOT b.is_late) AS folded, count(*) FILTER (WHERE b.is_late) AS late,
            (array_agg(b.xid ORDER BY b.xid DESC))[1] AS last
        FROM batch b
    )
    SELECT pg_current_snapshot(), c.folded, c.late, c.last, l.channels, l.ats, l.ids
    INTO v_snapshot, v_folded, v_late, v_last, v_channels, v_ats, v_ids
    FROM counts c, news_lists l;

    -- What was not visible to the statement above, and what it had no room for, is for the next fold. Its own
    -- transaction is always among these: it may go on to enqueue before it commits.
    more := v_folded = max_signals OR v_late = max_signals;
    news_from := CASE WHEN v_folded = max_signals THEN v_last ELSE pg_snapshot_xmax(v_snapshot) END;
    news_open := ARRAY(
        SELECT x FROM pg_snapshot_xip(v_snapshot) AS x WHERE x < news_from
        UNION
        SELECT pg_current_xact_id()
        UNION
        SELECT x FROM unnest(v_open) AS x WHERE v_late = max_signals);
    SELECT a.activations, a.due_floor INTO activations, due_floor
    FROM scheduler_activate(v_queue, vtime, now_ms, v_channels, v_ats, v_ids, v_activations) a;
END
$$;

-- Puts messages whose lease ran out back into their own channels, in their old places.
--
-- Called by message_dequeue, which holds the turn, when a lease may have ended. The attempt stays counted. The
-- trigger message_moved signals the channels, so that each waits for its place in the rotation like any other.
-- Locks: the rows it returns to ready. Rows that somebody else holds are left for a later call: a completion may be
-- on its way in a long transaction, and the fence decides afterwards.
--
-- Returns the lower bound of all lease ends from now on, and whether leases that ran out may be left.
CREATE FUNCTION scheduler_reclaim(
    queue text, clock timestamptz, INOUT lease_floor timestamptz, max_messages integer, OUT more boolean
)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_floor CONSTANT timestamptz := $3;
    v_expired integer;
BEGIN
    WITH expired AS MATERIALIZED (
        SELECT m.ctid AS row
        FROM message m
        WHERE m.queue = v_queue AND m.leased_until >= v_floor AND m.leased_until <= clock
        ORDER BY m.leased_until
        LIMIT max_messages
        FOR NO KEY UPDATE SKIP LOCKED
    )
    UPDATE message m
    SET leased_until = NULL, error = format('the lease of attempt %s ran out', m.attempt)
    FROM expired e
    WHERE m.ctid = e.row;

    GET DIAGNOSTICS v_expired = ROW_COUNT;
    more := v_expired = max_messages;
    lease_floor := coalesce(
        (SELECT m.leased_until FROM message m
         WHERE m.queue = v_queue AND m.leased_until >= v_floor
         ORDER BY m.leased_until LIMIT 1),
        'infinity');
END
$$;

-- Looks at the next max_channels channels, by name, that have ready messages, and makes sure their lanes know.
--
-- Called by message_dequeue, within the turn, when signals arrive faster than they can be folded: a channel's news
-- then need not wait behind the many signals of another. One index probe a channel, however many messages it has.
-- Locks: the lanes that scheduler_activate changes.
--
-- Returns the last channel looked at ('' when the round is complete), the number of activations so far, and the
-- earliest time at which a lane that now waits is due.
CREATE FUNCTION scheduler_sweep(
    queue text, vtime bigint, now_ms bigint, max_channels integer,
    INOUT swept text, INOUT activations bigint, OUT due_floor bigint
)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_swept CONSTANT text := $5;
    v_activations CONSTANT bigint := $6;
    v_channels text[];
    v_ats bigint[];
    v_ids bigint[];
BEGIN
    WITH RECURSIVE walk AS (
        (SELECT m.channel, m.dequeue_at, m.id FROM message m
         WHERE m.queue = v_queue AND m.leased_until IS NULL AND m.channel > v_swept
         ORDER BY m.channel, m.dequeue_at, m.id LIMIT 1)
        UNION ALL
        SELECT n.channel, n.dequeue_at, n.id
        FROM walk w CROSS JOIN LATERAL (
            SELECT m.channel, m.dequeue_at, m.id FROM message m
            WHERE m.queue = v_queue AND m.leased_until IS NULL AND m.channel > w.channel
            ORDER BY m.channel, m.dequeue_at, m.id LIMIT 1) n
    ), step AS (
        SELECT * FROM walk LIMIT max_channels
    )
    SELECT array_agg(s.channel), array_agg(s.dequeue_at), array_agg(s.id),
        CASE WHEN count(*) = max_channels THEN max(s.channel) ELSE '' END
    INTO v_channels, v_ats, v_ids, swept
    FROM step s;

    SELECT a.activations, a.due_floor INTO activations, due_floor
    FROM scheduler_activate(v_queue, vtime, now_ms, v_channels, v_ats, v_ids, v_activations) a;
END
$$;

-- Removes lanes that have been idle so long that forgetting them changes nothing, and keeps tags small.
--
-- Called by message_dequeue now and then, within the turn. An idle lane behind the virtual time would start at the
-- virtual time anyway. Tags start again from zero long before they reach the end of bigint.
-- Locks: the lanes it removes or rewrites.
--
-- Returns the virtual time and the tag below which no idle lane is left.
CREATE FUNCTION scheduler_tidy(queue text, INOUT vtime bigint, INOUT idle_floor bigint)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_floor CONSTANT bigint := $3;
    -- A lane that is used often is kept: only those 64 messages (of cost and weight 1) behind are removed.
    v_keep CONSTANT bigint := $2 - 64 * lane_step(1, 1);
    v_last bigint;
    v_removed integer;
BEGIN
    IF v_keep > v_floor THEN
        WITH old AS MATERIALIZED (
            SELECT l.ctid AS row FROM lane l
            WHERE l.queue = v_queue AND l.state = 'idle' AND l.tag >= v_floor AND l.tag < v_keep
            ORDER BY l.tag
            LIMIT 10000
        ), removed AS (
            DELETE FROM lane l USING old o WHERE l.ctid = o.row RETURNING l.tag
        )
        SELECT count(*), max(r.tag) INTO v_removed, v_last FROM removed r;
        idle_floor := CASE WHEN v_removed < 10000 THEN v_keep ELSE v_last END;
    END IF;
    IF vtime > 1000000000000000000 THEN
        UPDATE lane l SET tag = greatest(l.tag - $2, 0) WHERE l.queue = v_queue;
        vtime := 0;
        idle_floor := -1;
    END IF;
END
$$;

-- Waits for the caller's turn to dequeue from a queue and keeps it until the end of the transaction.
--
-- Called by message_dequeue. True: the turn is the caller's. False: somebody else has it and waiting could deadlock,
-- because this transaction holds the turn of another queue, or has written something and so may hold other locks.
-- Locks: one transaction-level advisory lock a queue. Nothing else in fairqueue takes it.
--
-- Raises lock_not_available after 10 s: a transaction that dequeues has to commit at once.
CREATE FUNCTION scheduler_turn(queue text) RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_key CONSTANT bigint := hashtextextended(current_schema() || '.' || queue, 720720);
BEGIN
    IF pg_try_advisory_xact_lock(v_key) THEN
        PERFORM set_config('fairqueue_turn.held', 'yes', true);
        RETURN true;
    ELSIF pg_current_xact_id_if_assigned() IS NOT NULL OR current_setting('fairqueue_turn.held', true) = 'yes' THEN
        RETURN false;
    END IF;
    DECLARE
        v_timeout CONSTANT text := current_setting('lock_timeout');
    BEGIN
        PERFORM set_config('lock_timeout', '10s', true);
        PERFORM pg_advisory_xact_lock(v_key);
        PERFORM set_config('lock_timeout', v_timeout, true);
        PERFORM set_config('fairqueue_turn.held', 'yes', true);
        RETURN true;
    EXCEPTION WHEN lock_not_available THEN
        RAISE lock_not_available USING
            MESSAGE = format('queue %L has been held by another dequeue for 10 s', queue),
            DETAIL = format('Held by the server process with pid %s.', (
                SELECT string_agg(l.pid::text, ', ') FROM pg_locks l
                WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
                    AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
                    AND (l.classid::bigint << 32) | l.objid::bigint = v_key)),
            HINT = 'Commit the transaction of a dequeue at once: the lease, not the transaction, keeps the messages.';
    END;
END
$$;

-- Makes ready up to max_lanes lanes whose time has come.
--
-- Called by message_dequeue, within the turn, when a lane may be due. Like every channel that becomes active, a lane
-- starts at max(its own tag, vtime).
-- Locks: the lanes it changes.
--
-- Returns the lower bound of the times at which the lanes that still wait are due, and the number of activations so far.
CREATE FUNCTION scheduler_wake(
    queue text, vtime bigint, now_ms bigint, max_lanes integer, INOUT due_floor bigint, INOUT activations bigint
)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_vtime CONSTANT bigint := $2;
    v_floor CONSTANT bigint := $5;
    v_activations CONSTANT bigint := $6;
    v_woken integer;
BEGIN
    WITH due AS MATERIALIZED (
        SELECT l.ctid AS row, l.due, l.head_id FROM lane l
        WHERE l.queue = v_queue AND l.state = 'waiting' AND l.due >= v_floor AND l.due <= now_ms
        ORDER BY l.due
        LIMIT max_lanes
    ), numbered AS MATERIALIZED (
        SELECT d.row, v_activations + row_number() OVER (ORDER BY d.due, d.head_id) AS since FROM due d
    )
    UPDATE lane l SET state = 'ready', tag = greatest(l.tag, v_vtime), since = n.since, due = NULL
    FROM numbered n
    WHERE l.ctid = n.row;

    GET DIAGNOSTICS v_woken = ROW_COUNT;
    activations := v_activations + v_woken;
    due_floor := coalesce(
        (SELECT l.due FROM lane l
         WHERE l.queue = v_queue AND l.state = 'waiting' AND l.due >= v_floor
         ORDER BY l.due LIMIT 1),
        9223372036854775807);
END
$$;

-- The version of this installation: which numbered step it stands at. Called by anyone; takes no lock.
CREATE FUNCTION schema_version() RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN 1;

-- Trigger function of channel_changed: tells the scheduler to read the policy of a channel again.
--
-- Locks: none that anybody waits for; it appends rows.
CREATE FUNCTION signal_channel() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
BEGIN
    IF TG_OP <> 'INSERT' THEN
        INSERT INTO signal (queue, channel) VALUES (OLD.queue, OLD.name);
    END IF;
    IF TG_OP <> 'DELETE' THEN
        INSERT INTO signal (queue, channel) VALUES (NEW.queue, NEW.name);
    END IF;
    RETURN NULL;
END
$$;

REVOKE EXECUTE ON FUNCTION signal_channel FROM PUBLIC;

-- Trigger function of message_enqueued: one signal for each channel of an INSERT, however many rows it has.
--
-- Locks: none that anybody waits for. It appends rows and reads no shared table, so it adds no dependency that could
-- fail a serializable transaction.
CREATE FUNCTION signal_enqueued() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
BEGIN
    INSERT INTO signal (queue, channel, dequeue_at, message_id)
    SELECT n.queue, n.channel, min(n.dequeue_at), min(n.id)
    FROM new_messages n
    GROUP BY n.queue, n.channel;
    RETURN NULL;
END
$$;

REVOKE EXECUTE ON FUNCTION signal_enqueued FROM PUBLIC;

-- Trigger function of message_moved: a signal for a message that became ready, or whose place changed.
--
-- Locks: none that anybody waits for; it appends a row.
CREATE FUNCTION signal_moved() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
BEGIN
    INSERT INTO signal (queue, channel, dequeue_at, message_id)
    VALUES (NEW.queue, NEW.channel, NEW.dequeue_at, NEW.id);
    RETURN NULL;
END
$$;

REVOKE EXECUTE ON FUNCTION signal_moved FROM PUBLIC;

-- A point in time as Unix time in whole milliseconds, rounded down: the unit of message.dequeue_at.
--
-- Called by the functions here and by statements of the client library; takes no lock.
CREATE FUNCTION unix_ms(at timestamptz) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN floor(extract(epoch FROM at) * 1000)::bigint;

-- A changed policy takes effect at the next dequeue.
CREATE TRIGGER channel_changed
AFTER INSERT OR DELETE OR UPDATE OF queue, name, weight ON channel
FOR EACH ROW EXECUTE FUNCTION signal_channel();

-- Enqueueing signals the channels: once a statement, so that bulk inserts and COPY cost one signal a channel.
CREATE TRIGGER message_enqueued
AFTER INSERT ON message
REFERENCING NEW TABLE AS new_messages
FOR EACH STATEMENT EXECUTE FUNCTION signal_enqueued();

-- A lease that ended without completion, or a user's edit, may put a ready message before the head of its lane.
-- Leasing itself (leased_until set) does not fire it.
CREATE TRIGGER message_moved
AFTER UPDATE OF queue, channel, dequeue_at, leased_until ON message
FOR EACH ROW
WHEN (NEW.leased_until IS NULL AND (OLD.leased_until IS NOT NULL OR OLD.queue <> NEW.queue
    OR OLD.channel <> NEW.channel OR OLD.dequeue_at <> NEW.dequeue_at))
EXECUTE FUNCTION signal_moved();
