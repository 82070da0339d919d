-- Enqueues any number of messages, of which some have keys; the i-th is made of the i-th elements of the lists.
--
-- Called by producers (in Python by enqueue_many). Returns the place in the lists and the id of each. on_conflict is
-- that of message_create, except that the id of what is ignored is null. Where several have the same key they come one
-- after the other: of those to be ignored the first one counts, of those to replace each other the last one.
-- Locks: see message_create. Keys are entered in their order, what is then to be replaced is locked in the order of ids,
-- as completions lock it: so two calls don't deadlock, unless a key that was live at first is free by then, and somebody
-- else enters it at that time. Ids and times are given in the order of the lists.
CREATE FUNCTION message_create_many(
    queues text[], channels text[], keys text[], payloads jsonb[], bodies bytea[], dequeue_ats bigint[],
    delays double precision[], costs double precision[], max_attempts integer[], backoffs double precision[],
    on_conflict text DEFAULT 'raise'
) RETURNS TABLE (place bigint, id bigint)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_sequence CONSTANT regclass := pg_get_serial_sequence('message', 'id');
    v_row record;
    -- In the order of the lists.
    v_ids bigint[];
    v_nows bigint[];
    v_dequeue_ats bigint[];
    v_entered boolean[];
BEGIN
    PERFORM check_on_conflict(on_conflict);
    IF EXISTS (
        SELECT FROM unnest(ARRAY[cardinality($2), cardinality($3), cardinality($4), cardinality($5), cardinality($6),
            cardinality($7), cardinality($8), cardinality($9), cardinality($10)]) AS l (length)
        WHERE l.length <> cardinality($1))
    THEN
        RAISE invalid_parameter_value USING MESSAGE = format(
            'all lists must be null or have as many elements as queues, %s', cardinality($1));
    ELSIF EXISTS (SELECT FROM unnest($6, $7) AS w (dequeue_at, delay) WHERE num_nonnulls(w.dequeue_at, w.delay) = 2) THEN
        RAISE invalid_parameter_value USING MESSAGE = 'only one of dequeue_ats and delays may be given for a message';
    END IF;
    -- The trigger would say so too, but the index that can't hold so long a name is first.
    PERFORM message_refuse(n.queue, n.channel, n.key, NULL, NULL, NULL, NULL, NULL)
    FROM unnest($1, $2, $3) AS n (queue, channel, key)
    WHERE greatest(char_length(n.queue), char_length(n.channel), char_length(n.key)) > 255
    LIMIT 1;
    PERFORM check_seconds('delays', w.delay, 0) FROM unnest($7) AS w (delay) WHERE w.delay IS NOT NULL;
    WITH given AS MATERIALIZED (
        SELECT nextval(v_sequence) AS id, unix_ms(clock()) AS now_ms, r.queue, r.channel, r.key, r.payload, r.body,
            r.cost, r.max_attempts, r.backoff, r.place,
            CASE WHEN r.delay IS NULL THEN r.dequeue_at
                ELSE unix_ms(clock() + make_interval(secs => r.delay)) END AS dequeue_at
        FROM unnest($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) WITH ORDINALITY AS r (
            queue, channel, key, payload, body, dequeue_at, delay, cost, max_attempts, backoff, place)
    ), ordered AS MATERIALIZED (
        SELECT g.* FROM given g ORDER BY g.queue COLLATE "C", g.channel COLLATE "C", g.key COLLATE "C", g.place
    ), entered AS (
        INSERT INTO message AS m (id, queue, channel, key, payload, body, dequeue_at, cost, max_attempts, backoff)
        OVERRIDING SYSTEM VALUE
        SELECT o.id, o.queue, o.channel, o.key, o.payload, o.body, coalesce(o.dequeue_at, o.now_ms), o.cost,
            o.max_attempts, o.backoff
        FROM ordered o
        ON CONFLICT (queue, channel, key) WHERE key IS NOT NULL DO NOTHING
        RETURNING m.id
    )
    -- IN, as a join might compare each with all: how many there are isn't known when it is planned.
    SELECT array_agg(g.id ORDER BY g.place), array_agg(g.now_ms ORDER BY g.place),
        array_agg(g.dequeue_at ORDER BY g.place), array_agg(g.id IN (SELECT e.id FROM entered e) ORDER BY g.place)
    INTO v_ids, v_nows, v_dequeue_ats, v_entered
    FROM given g;

    IF on_conflict = 'replace' THEN
        PERFORM FROM (
            SELECT f.id FROM unnest($1, $2, $3, v_entered) AS r (queue, channel, key, is_entered)
            CROSS JOIN LATERAL (
                SELECT m.id FROM message m
                WHERE m.queue = r.queue AND m.channel = r.channel AND m.key = r.key LIMIT 1) f
            WHERE NOT r.is_entered
            ORDER BY f.id) f
        CROSS JOIN LATERAL (SELECT FROM message m WHERE m.id = f.id FOR NO KEY UPDATE) m;
    END IF;
    FOR v_row IN
        SELECT r.* FROM unnest($1, $2, $3, $4, $5, $8, $9, $10, v_ids, v_nows, v_dequeue_ats, v_entered)
            WITH ORDINALITY AS r (queue, channel, key, payload, body, cost, max_attempts, backoff, id, now_ms,
                dequeue_at, is_entered, place)
        WHERE NOT r.is_entered
        ORDER BY r.queue COLLATE "C", r.channel COLLATE "C", r.key COLLATE "C", r.place
    LOOP
        IF on_conflict = 'raise' THEN
            RAISE unique_violation USING
                MESSAGE = format('channel %L of queue %L has a live message with key %L', v_row.channel, v_row.queue,
                    v_row.key),
                DETAIL = format('Given in place %s of the lists.', v_row.place),
                HINT = 'on_conflict => ''ignore'' leaves that one as it is, ''replace'' gives it new contents.',
                SCHEMA = current_schema(), TABLE = 'message', CONSTRAINT = 'message_key';
        END IF;
        v_ids[v_row.place] := CASE WHEN on_conflict = 'replace' THEN message_enter(
            v_row.id, v_row.now_ms, v_row.queue, v_row.channel, v_row.key, v_row.payload, v_row.body,
            v_row.dequeue_at, v_row.cost, v_row.max_attempts, v_row.backoff, true) END;
    END LOOP;
    RETURN QUERY SELECT r.place, r.id FROM unnest(v_ids) WITH ORDINALITY AS r (id, place);
END
$$;

REVOKE EXECUTE ON FUNCTION message_create_many FROM PUBLIC;
