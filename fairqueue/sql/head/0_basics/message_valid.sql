-- Whether what users give of a message can be.
--
-- Called by message_arrive for each new message, by message_edit and by message_create; takes no lock. Not a CHECK
-- constraint: PostgreSQL would read its expression anew for each statement that writes to the table, and call it for
-- each message that is leased, whose content doesn't change.
CREATE FUNCTION message_valid(
    queue text, channel text, key text, payload jsonb, body bytea, cost double precision, max_attempts integer,
    backoff double precision
) RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE
RETURN char_length(queue) BETWEEN 1 AND 255 AND char_length(channel) BETWEEN 1 AND 255
    AND (key IS NULL OR char_length(key) BETWEEN 1 AND 255)
    AND (payload IS NULL OR pg_column_size(payload) <= 67108864)
    AND (body IS NULL OR octet_length(body) <= 67108864)
    -- NaN sorts above every number, so the upper bound refuses it too.
    AND cost > 0 AND cost <= 1000000
    AND (max_attempts IS NULL OR max_attempts >= 1)
    AND (backoff IS NULL OR backoff >= 0 AND backoff <= 31557600);
