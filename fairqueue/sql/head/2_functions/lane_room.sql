-- How many messages of a lane may be leased at this moment.
--
-- Called by scheduler_serve_heads and scheduler_serve_shares; takes no lock. See lane_due for the rate.
CREATE FUNCTION lane_room(
    now_ms bigint, max_concurrency integer, running integer, release_interval bigint, burst integer, released_at bigint
) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN greatest(0, least(10000, max_concurrency - running, CASE WHEN release_interval > 0 THEN
    (now_ms + burst * release_interval
        - greatest(least(released_at, now_ms + (burst - 1) * release_interval) + release_interval, now_ms))
    / release_interval END));
