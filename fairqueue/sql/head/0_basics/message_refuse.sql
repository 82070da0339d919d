-- Raises the error of a message that isn't valid: it names the field, the value and the limits.
--
-- Called by message_arrive, message_edit, message_create and message_create_many; takes no lock. The names of
-- constraints in the errors are for programs.
CREATE FUNCTION message_refuse(
    queue text, channel text, key text, payload jsonb, body bytea, cost double precision, max_attempts integer,
    backoff double precision, created_at timestamptz DEFAULT NULL, first_leased_at timestamptz DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_column text;
    v_rule text := 'range';
    v_must text;
BEGIN
    IF char_length(queue) NOT BETWEEN 1 AND 255 THEN
        v_column := 'queue';
        v_rule := 'length';
        v_must := 'have 1 to 255 characters, not ' || char_length(queue);
    ELSIF char_length(channel) NOT BETWEEN 1 AND 255 THEN
        v_column := 'channel';
        v_rule := 'length';
        v_must := 'have 1 to 255 characters, not ' || char_length(channel);
    ELSIF char_length(key) NOT BETWEEN 1 AND 255 THEN
        v_column := 'key';
        v_rule := 'length';
        v_must := 'have 1 to 255 characters, not ' || char_length(key);
    ELSIF pg_column_size(payload) > 67108864 THEN
        v_column := 'payload';
        v_rule := 'size';
        v_must := 'have at most 67108864 bytes, not ' || pg_column_size(payload);
    ELSIF octet_length(body) > 67108864 THEN
        v_column := 'body';
        v_rule := 'size';
        v_must := 'have at most 67108864 bytes, not ' || octet_length(body);
    ELSIF max_attempts < 1 THEN
        v_column := 'max_attempts';
        v_must := 'be 1 or more, not ' || max_attempts;
    ELSIF NOT (backoff >= 0 AND backoff <= 31557600) THEN
        v_column := 'backoff';
        v_must := 'be 0 to 31557600 seconds, not ' || backoff;
    ELSIF NOT (created_at >= '0002-01-01 UTC' AND created_at < '9999-01-01 UTC') THEN
        v_column := 'created_at';
        v_must := 'be in the years 2 to 9998, not ' || created_at;
    ELSIF NOT (first_leased_at >= '0002-01-01 UTC' AND first_leased_at < '9999-01-01 UTC') THEN
        v_column := 'first_leased_at';
        v_must := 'be in the years 2 to 9998, not ' || first_leased_at;
    ELSE
        v_column := 'cost';
        v_must := 'be more than 0 and at most 1000000, not ' || cost;
    END IF;
    RAISE check_violation USING MESSAGE = format('%s must %s', v_column, v_must), TABLE = 'message',
        COLUMN = v_column, CONSTRAINT = format('message_%s_%s', v_column, v_rule);
END
$$;
