-- Sets the policy of a channel, creating its row where there is none. A parameter that is null, as it is when left
-- out, leaves what is there.
--
-- Called by operators. Takes effect at the next dequeue (trigger channel_changed). With paused => true nothing is
-- served until resume_at, or, without that, until paused => false. Back to the default of the queue leads
-- UPDATE channel SET ... = NULL, or DELETE.
-- Locks: the row of the channel, until the end of the transaction. The scheduler only reads it.
CREATE FUNCTION channel_set(
    name text, queue text DEFAULT 'default', weight double precision DEFAULT NULL,
    max_concurrency integer DEFAULT NULL, release_interval_ms bigint DEFAULT NULL, burst integer DEFAULT NULL,
    max_size integer DEFAULT NULL, overflow text DEFAULT NULL, paused boolean DEFAULT NULL,
    resume_at timestamptz DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
#variable_conflict use_variable
BEGIN
    PERFORM check_pause(paused, resume_at);
    INSERT INTO channel AS c (
        queue, name, weight, max_concurrency, release_interval_ms, burst, max_size, overflow, paused, resume_at)
    VALUES (
        queue, name, weight, max_concurrency, release_interval_ms, burst, max_size, overflow,
        coalesce(paused, false), resume_at)
    ON CONFLICT ON CONSTRAINT channel_pkey DO UPDATE
    SET weight = coalesce(weight, c.weight),
        max_concurrency = coalesce(max_concurrency, c.max_concurrency),
        release_interval_ms = coalesce(release_interval_ms, c.release_interval_ms),
        burst = coalesce(burst, c.burst),
        max_size = coalesce(max_size, c.max_size),
        overflow = coalesce(overflow, c.overflow),
        paused = coalesce(paused, c.paused),
        resume_at = CASE WHEN paused IS NULL THEN c.resume_at ELSE resume_at END;
END
$$;

REVOKE EXECUTE ON FUNCTION channel_set FROM PUBLIC;
