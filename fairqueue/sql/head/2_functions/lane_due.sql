-- When a lane may next be served, as lane.due says it: 0, a time, 2^63-1 for "when a signal says so", or null for a
-- lane without a message (head_at null).
--
-- Called by scheduler_serve_heads, scheduler_serve_shares, scheduler_activate and queue_check; takes no lock.
--
-- The rate is the generic cell rate algorithm (ITU-T I.371) with released_at for the theoretical arrival time less
-- one interval, so that a changed interval applies at once. A clock that was set back must not close a lane for
-- long: released_at counts for no more than it could be by the clock as it is.
CREATE FUNCTION lane_due(
    now_ms bigint, head_at bigint, paused_until bigint, max_concurrency integer, running integer,
    release_interval bigint, burst integer, released_at bigint
) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN head_at IS NULL THEN NULL
    WHEN running >= max_concurrency THEN 9223372036854775807
    WHEN greatest(head_at, paused_until) <= now_ms AND (release_interval = 0
        OR released_at + (2 - burst) * release_interval <= now_ms) THEN 0
    ELSE greatest(head_at, paused_until,
        least(released_at, now_ms + (burst - 1) * release_interval) + (2 - burst) * release_interval)
    END;
