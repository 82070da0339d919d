-- Whether what users give of a message can be.
--
-- Called by message_arrive for each new message, by message_edit and by message_create; takes no lock. Not a CHECK
-- constraint: PostgreSQL would read its expression anew for each statement that writes to the table, and call it for
-- each message that is leased, whose content doesn't change.
CREATE FUNCTION message_valid(
    queue text, channel text, key text, payload jsonb, body bytea, cost double precision, max_attempts integer,
    backoff double precision, created_at timestamptz DEFAULT NULL, first_leased_at timestamptz DEFAULT NULL
) RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE
RETURN char_length(queue) BETWEEN 1 AND 255 AND char_length(channel) BETWEEN 1 AND 255
    AND (key IS NULL OR char_length(key) BETWEEN 1 AND 255)
    AND (payload IS NULL OR pg_column_size(payload) <= 67108864)
    AND (body IS NULL OR octet_length(body) <= 67108864)
    -- NaN sorts above every number, so the upper bound refuses it too.
    AND cost > 0 AND cost <= 1000000
    AND (max_attempts IS NULL OR max_attempts >= 1)
    AND (backoff IS NULL OR backoff >= 0 AND backoff <= 31557600)
    -- In any time zone, what Python can read: a batch that it can't is leased, and of no use to who leased it.
    AND (created_at IS NULL OR created_at >= '0002-01-01 UTC' AND created_at < '9999-01-01 UTC')
    AND (first_leased_at IS NULL OR first_leased_at >= '0002-01-01 UTC' AND first_leased_at < '9999-01-01 UTC');
