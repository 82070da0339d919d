-- The key of the advisory lock that is the turn of a queue: of this schema, so that several have turns of their own.
--
-- Called by scheduler_turn, scheduler_take and scheduler_alone. Takes no lock itself.
CREATE FUNCTION queue_key(queue text) RETURNS bigint
LANGUAGE sql STABLE PARALLEL SAFE
RETURN hashtextextended(current_schema() || '.' || queue, 720720);
