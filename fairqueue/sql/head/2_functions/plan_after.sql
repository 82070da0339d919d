-- How many messages in a row dequeues must have got, without coming up short, before any are scheduled ahead.
--
-- Called by scheduler_serve, scheduler_settle and queue_repair; takes no lock. With fewer, planning costs more than it
-- saves.
CREATE FUNCTION plan_after() RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN 256;
