-- Enqueues one message and returns its id. For other languages than Python; INSERT INTO message does the same.
--
-- Called by producers, within their own transaction. At most one of delay_seconds (from now, by the database clock),
-- dequeue_at (Unix time in milliseconds) and priority (0, as it comes, or more; higher goes first inside the channel)
-- may be given: a message can't be urgent and for later.
-- No two live messages of a channel have the same key. on_conflict says what becomes of a second one:
--   raise    unique_violation
--   ignore   the one that is there, ready or leased, stays as it is; its id is returned
--   replace  a ready one takes on what is given here; a leased one loses its key and goes its way (see message_enter)
-- Locks: without a key, none that anybody waits for (see the trigger message_enqueued). With a key it waits for
-- transactions that have enqueued the same key, or changed or completed its message, and are still open.
CREATE FUNCTION message_create(
    channel text, payload jsonb DEFAULT NULL, queue text DEFAULT 'default',
    delay_seconds double precision DEFAULT NULL, dequeue_at bigint DEFAULT NULL, priority bigint DEFAULT NULL,
    cost double precision DEFAULT 1, body bytea DEFAULT NULL, key text DEFAULT NULL, on_conflict text DEFAULT 'raise',
    max_attempts integer DEFAULT NULL, backoff double precision DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
#variable_conflict use_variable
DECLARE
    v_id bigint;
BEGIN
    IF num_nonnulls(delay_seconds, dequeue_at, nullif(priority, 0)) > 1 THEN
        RAISE invalid_parameter_value USING
            MESSAGE = 'only one of delay_seconds, dequeue_at and priority may be given',
            HINT = 'A priority is a dequeue_at in the past: a message can''t be urgent and for later.';
    ELSIF priority < 0 THEN
        RAISE invalid_parameter_value USING MESSAGE = format('priority must be 0 or more, not %s', priority);
    ELSIF on_conflict <> 'raise' OR on_conflict IS NULL THEN
        PERFORM check_on_conflict(on_conflict);
        IF key IS NULL THEN
            RAISE invalid_parameter_value USING
                MESSAGE = format('on_conflict is %L, but there is no key', on_conflict),
                HINT = 'Only messages with a key can be in conflict.';
        END IF;
    END IF;
    IF delay_seconds IS NOT NULL THEN
        PERFORM check_seconds('delay_seconds', delay_seconds, 0);
        dequeue_at := unix_ms(clock() + make_interval(secs => delay_seconds));
    ELSIF priority IS NOT NULL AND dequeue_at IS NULL THEN
        -- One of 0 is a time, too: what is replaced gives up the place that another one gave it.
        dequeue_at := CASE WHEN priority > 0 THEN -priority ELSE unix_ms(clock()) END;
    END IF;
    IF NOT message_valid(queue, channel, key, payload, body, cost, max_attempts, backoff) THEN
        -- The trigger would say so too, but for names that are too long for an index: there the index is first.
        PERFORM message_refuse(queue, channel, key, payload, body, cost, max_attempts, backoff);
    END IF;
    IF on_conflict = 'raise' THEN
        INSERT INTO message AS m (queue, channel, key, payload, body, dequeue_at, cost, max_attempts, backoff)
        VALUES (queue, channel, key, payload, body, coalesce(dequeue_at, unix_ms(clock())), cost, max_attempts,
            backoff)
        RETURNING m.id INTO v_id;
        RETURN v_id;
    END IF;
    RETURN message_enter(NULL, unix_ms(clock()), queue, channel, key, payload, body, dequeue_at, cost, max_attempts,
        backoff, on_conflict = 'replace');
END
$$;

REVOKE EXECUTE ON FUNCTION message_create FROM PUBLIC;
