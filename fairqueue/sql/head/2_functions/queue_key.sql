-- The keys of a queue's advisory locks, of this schema's queue of that name alone: part 0 is its turn, part 1 is for
-- who waits for the turn while others wait for a share in it, part 2 for who plans while others have shares. Those from
-- 101 on are for who gets tickets, whatever the queue.
--
-- Called by scheduler_turn, scheduler_tickets and message_dequeue. Takes no lock itself.
CREATE FUNCTION queue_key(queue text, part integer DEFAULT 0) RETURNS bigint
LANGUAGE sql STABLE PARALLEL SAFE
RETURN hashtextextended(queue, hashtextextended(current_schema(), 720720 + part));
