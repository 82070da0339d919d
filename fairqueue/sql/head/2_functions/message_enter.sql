-- Enqueues a message with a key unless one is live already, and returns the id of the live one.
--
-- Called by message_create and message_create_many. With replaces false a live message stays as it is. With
-- replaces true a ready one takes on the new contents and starts anew: no error, no saved state, all its attempts; it
-- keeps its id, and its place in the channel unless dequeue_at says another (so a message that is replaced again and
-- again is served in its turn), but is not put off any longer. A leased one loses its key and goes its way, and the
-- new message is inserted beside it: what is running may have read the old contents, so nothing is lost.
-- A new message gets new_id where one is given, and is due from now_ms on unless dequeue_at says another time.
-- Locks: see message_create. Whoever enters several keys in one statement does it in the order of keys.
CREATE FUNCTION message_enter(
    new_id bigint, now_ms bigint, queue text, channel text, key text, payload jsonb, body bytea, dequeue_at bigint,
    cost double precision, max_attempts integer, backoff double precision, replaces boolean
) RETURNS bigint
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $3;
    v_channel CONSTANT text := $4;
    v_key CONSTANT text := $5;
    v_id bigint;
    v_leased boolean;
BEGIN
    new_id := coalesce(new_id, nextval(pg_get_serial_sequence('message', 'id')));
    -- Each round sees what was committed before it. A higher isolation level raises serialization_failure instead
    -- where that is what its snapshot doesn't have.
    LOOP
        IF replaces THEN
            SELECT m.id, is_leased(m.leased_until) INTO v_id, v_leased
            FROM message m
            WHERE m.queue = v_queue AND m.channel = v_channel AND m.key = v_key
            FOR NO KEY UPDATE;
            IF v_leased THEN
                UPDATE message m SET key = NULL WHERE m.id = v_id;
            ELSIF FOUND THEN
                UPDATE message m
                SET payload = $6, body = $7, dequeue_at = coalesce($8, least(m.dequeue_at, now_ms)), cost = $9,
                    max_attempts = $10, backoff = $11, forgiven = m.attempt, state = NULL, error = NULL
                WHERE m.id = v_id;
                RETURN v_id;
            END IF;
        END IF;
        INSERT INTO message AS m (id, queue, channel, key, payload, body, dequeue_at, cost, max_attempts, backoff)
        OVERRIDING SYSTEM VALUE
        VALUES (new_id, v_queue, v_channel, v_key, $6, $7, coalesce($8, now_ms), $9, $10, $11)
        ON CONFLICT (queue, channel, key) WHERE key IS NOT NULL DO NOTHING
        RETURNING m.id INTO v_id;
        IF FOUND THEN
            RETURN v_id;
        ELSIF NOT replaces THEN
            SELECT m.id INTO v_id FROM message m
            WHERE m.queue = v_queue AND m.channel = v_channel AND m.key = v_key;
            IF FOUND THEN
                RETURN v_id;
            END IF;
        END IF;
    END LOOP;
END
$$;
