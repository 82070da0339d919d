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
