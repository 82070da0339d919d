-- Whether nobody but the caller has a part in the turn of a queue. If so, the turn is the caller's alone.
--
-- Called by scheduler_take, which has a part in it, and gives it up again where this is true.
-- Locks: the turn of the queue, if it is free. It waits for nobody.
CREATE FUNCTION scheduler_alone(queue text) RETURNS boolean
LANGUAGE sql
SET search_path FROM CURRENT
AS $$
    SELECT pg_try_advisory_xact_lock(queue_key(queue));
$$;
