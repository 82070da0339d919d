-- Sets the policy of a queue, creating its row where there is none. A parameter that is null, as it is when left out,
-- leaves what is there.
--
-- Called by operators. Takes effect at the next dequeue (trigger queue_changed). With paused => true nothing is served
-- until resume_at, or, without that, until paused => false. Limits are lifted by UPDATE queue SET ... = NULL; DELETE
-- brings back all defaults.
-- Locks: the row of the queue, until the end of the transaction. The scheduler only reads it.
CREATE FUNCTION queue_set(
    name text, max_concurrency integer DEFAULT NULL, paused boolean DEFAULT NULL, resume_at timestamptz DEFAULT NULL,
    max_attempts integer DEFAULT NULL, backoff double precision DEFAULT NULL,
    max_backoff double precision DEFAULT NULL, history_days integer DEFAULT NULL,
    channel_weight double precision DEFAULT NULL, channel_max_concurrency integer DEFAULT NULL,
    channel_release_interval_ms bigint DEFAULT NULL, channel_burst integer DEFAULT NULL,
    channel_max_size integer DEFAULT NULL, channel_overflow text DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
#variable_conflict use_variable
BEGIN
    PERFORM check_pause(paused, resume_at);
    -- In two steps, so that a new row has the defaults of the table.
    INSERT INTO queue (name) VALUES (name) ON CONFLICT ON CONSTRAINT queue_pkey DO NOTHING;
    UPDATE queue q
    SET max_concurrency = coalesce(max_concurrency, q.max_concurrency),
        paused = coalesce(paused, q.paused),
        resume_at = CASE WHEN paused IS NULL THEN q.resume_at ELSE resume_at END,
        max_attempts = coalesce(max_attempts, q.max_attempts),
        backoff = coalesce(backoff, q.backoff),
        max_backoff = coalesce(max_backoff, q.max_backoff),
        history_days = coalesce(history_days, q.history_days),
        channel_weight = coalesce(channel_weight, q.channel_weight),
        channel_max_concurrency = coalesce(channel_max_concurrency, q.channel_max_concurrency),
        channel_release_interval_ms = coalesce(channel_release_interval_ms, q.channel_release_interval_ms),
        channel_burst = coalesce(channel_burst, q.channel_burst),
        channel_max_size = coalesce(channel_max_size, q.channel_max_size),
        channel_overflow = coalesce(channel_overflow, q.channel_overflow)
    WHERE q.name = queue_set.name;
END
$$;

REVOKE EXECUTE ON FUNCTION queue_set FROM PUBLIC;
