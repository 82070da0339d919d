-- By how much serving one message moves the start tag of its lane: cost / weight in units of virtual time.
--
-- Called by scheduler_serve_heads, scheduler_serve_shares, scheduler_plan, scheduler_plan_heads and scheduler_tidy;
-- takes no lock. A whole number, so that adding up a batch gives exactly what adding one by one gives. 720720 is
-- divisible by 1 to 16: with such weights no share is ever rounded.
CREATE FUNCTION lane_step(cost double precision, weight double precision) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN greatest(1, round(cost * 720720 / weight))::bigint;
