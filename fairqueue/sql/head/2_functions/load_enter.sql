-- Makes messages of what staging tables hold: all of it, or nothing. Drops the tables.
--
-- Called by loaders (in Python by fairqueue.spark.engine), once all parts are staged, or by a task for its own part. The
-- i-th table must have the i-th number of rows: one that a crash has emptied is an error. A named load that has been
-- entered before, with this epoch or a later one, isn't entered again; then the result is that of the first time.
-- on_conflict says what becomes of a row whose key a live message of its channel has: 'ignore' leaves it out, and among
-- rows with the same key takes the first; 'raise' fails.
--
-- Inside a channel, messages have the order of their tables, and of the rows in each, where dequeue_at is the same.
--
-- Keys are entered in their order, which keeps two loads with the same ones from waiting for each other in a circle. At
-- first as if none were live, since ON CONFLICT costs each row a quarter more; the first one that is says otherwise, and
-- the sooner, the more there are.
-- Locks: a row of load until the end of the transaction, so the same load waits for itself; keys as in message_create,
-- in the same order as message_create_many; the staging tables, as stage_drop has it.
CREATE FUNCTION load_enter(
    run text, tables text[], counts bigint[], name text DEFAULT NULL, epoch bigint DEFAULT 0,
    on_conflict text DEFAULT 'ignore'
) RETURNS TABLE (rows bigint, entered bigint, repeated boolean)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET work_mem = '128MB'
SET jit = off
-- A scan that begins where another one is would give the rows another order.
SET synchronize_seqscans = off
AS $$
#variable_conflict use_column
DECLARE
    v_ids CONSTANT oid := pg_get_serial_sequence('message', 'id')::regclass;
    v_table text;
    v_found bigint;
    v_keys bigint;
    v_keyed boolean := false;
    v_queue text;
    v_first text;
    v_last text;
    v_several boolean := false;
    v_staged text;
    v_insert text;
    v_constraint text;
    v_detail text;
BEGIN
    IF on_conflict IS NULL OR on_conflict NOT IN ('ignore', 'raise') THEN
        RAISE invalid_parameter_value USING
            MESSAGE = format('on_conflict must be ''ignore'' or ''raise'', not %L', on_conflict);
    END IF;
    rows := 0;
    entered := 0;
    repeated := false;
    IF name IS NOT NULL THEN
        INSERT INTO load AS l (name, epoch) VALUES ($4, $5)
        ON CONFLICT ON CONSTRAINT load_pkey DO UPDATE SET epoch = excluded.epoch
        WHERE l.epoch < excluded.epoch;
        IF NOT FOUND THEN
            SELECT l.rows, l.entered, true INTO rows, entered, repeated FROM load l WHERE l.name = $4;
            PERFORM stage_drop(run);
            RETURN NEXT;
            RETURN;
        END IF;
    END IF;

    FOR i IN 1..cardinality(tables) LOOP
        v_table := (SELECT s.name FROM stage s WHERE s.name = tables[i] AND s.run = $1 AND s.run <> '');
        IF v_table IS NULL THEN
            RAISE undefined_table USING
                MESSAGE = format('there is no staging table %L of run %s: it has been dropped', tables[i], run),
                HINT = 'Load again. Was stage_clean called with an age that a running load reaches?';
        END IF;
        EXECUTE format('SELECT count(*), count(key), min(queue), max(queue) FROM %I.%I',
            current_schema(), v_table)
        INTO v_found, v_keys, v_first, v_last;
        IF v_found IS DISTINCT FROM counts[i] THEN
            RAISE data_corrupted USING
                MESSAGE = format('staging table %s has %s rows, not %s: the server has crashed meanwhile', v_table,
                    v_found, coalesce(counts[i]::text, 'null')),
                HINT = 'Load again. Nothing was entered.';
        END IF;
        rows := rows + v_found;
        v_keyed := v_keyed OR v_keys > 0;
        v_queue := coalesce(v_queue, v_first);
        v_several := v_several OR v_queue <> v_first OR v_first <> v_last;
    END LOOP;

    IF rows > 0 THEN
        SELECT string_agg(format('SELECT nextval(%s) AS id, t.* FROM %I.%I t', v_ids, current_schema(), t),
            ' UNION ALL ' ORDER BY n)
        INTO v_staged
        FROM unnest(tables) WITH ORDINALITY AS u (t, n);
        v_insert := format($sql$
            INSERT INTO message (id, queue, channel, key, payload, body, dequeue_at, cost, max_attempts, backoff,
                created_at)
            OVERRIDING SYSTEM VALUE
            SELECT s.id, s.queue, s.channel, s.key, s.payload, s.body,
                CASE WHEN s.delay IS NULL THEN coalesce(s.dequeue_at, unix_ms($1))
                    ELSE unix_ms($1 + make_interval(secs => s.delay)) END,
                coalesce(s.cost, 1), s.max_attempts, s.backoff, $1
            FROM (%s) s$sql$, v_staged);
        IF v_keyed THEN
            v_insert := v_insert || format(' ORDER BY %s s.channel COLLATE "C", s.key COLLATE "C", s.id',
                CASE WHEN v_several THEN 's.queue COLLATE "C",' END);
        END IF;
        BEGIN
            EXECUTE v_insert USING clock();
            GET DIAGNOSTICS entered = ROW_COUNT;
        EXCEPTION
            WHEN unique_violation THEN
                GET STACKED DIAGNOSTICS v_constraint = CONSTRAINT_NAME, v_detail = PG_EXCEPTION_DETAIL;
                IF v_constraint <> 'message_key' THEN
                    RAISE;
                END IF;
                IF on_conflict = 'raise' THEN
                    RAISE unique_violation USING
                        MESSAGE = 'a key is live in its channel, or twice in what is loaded; nothing was entered',
                        DETAIL = v_detail,
                        HINT = 'on_conflict ''ignore'' leaves such rows out.',
                        SCHEMA = current_schema(), TABLE = 'message', CONSTRAINT = v_constraint;
                END IF;
                EXECUTE v_insert || ' ON CONFLICT (queue, channel, key) WHERE key IS NOT NULL DO NOTHING' USING clock();
                GET DIAGNOSTICS entered = ROW_COUNT;
        END;
    END IF;
    IF name IS NOT NULL THEN
        UPDATE load l SET rows = load_enter.rows, entered = load_enter.entered, entered_at = clock() WHERE l.name = $4;
    END IF;
    PERFORM stage_drop(run);
    RETURN NEXT;
END
$$;

REVOKE EXECUTE ON FUNCTION load_enter FROM PUBLIC;
