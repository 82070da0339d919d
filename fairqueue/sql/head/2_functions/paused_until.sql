-- Until when a channel or queue is paused, in Unix milliseconds: null for not at all, 2^63-1 for until it is resumed.
--
-- Called by the scheduler's functions, signal_policy and queue_check; takes no lock.
CREATE FUNCTION paused_until(paused boolean, resume_at timestamptz) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN paused THEN coalesce(unix_ms(resume_at), 9223372036854775807) END;
