-- The released_at of a lane after so many of its messages were leased at this moment.
--
-- Called by scheduler_serve_heads and scheduler_serve_shares; takes no lock. See lane_due for the rate. Without one
-- nothing is kept, so that a lane need not be written for it: a rate counts from when it is set.
CREATE FUNCTION lane_released(now_ms bigint, messages integer, release_interval bigint, released_at bigint)
RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN messages > 0 AND release_interval > 0
    THEN greatest(released_at + release_interval, now_ms) + (messages - 1) * release_interval
    ELSE released_at END;
