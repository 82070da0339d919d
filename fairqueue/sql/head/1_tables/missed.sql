-- Places of the plan for which a dequeue without the turn had a ticket, and found that the message is gone, or held by a
-- user: one row a place, until the next turn. All other places for which there were tickets, and where no message is
-- left, count as served.
--
-- Written by message_dequeue and, where that needs the turn after all, by scheduler_serve: append-only. Deleted by
-- scheduler_settle and queue_repair, within the turn.
CREATE TABLE missed (
    queue  text COLLATE "C" NOT NULL,
    -- That of the rotation at the time. What is of an earlier one is never looked at again.
    turn   bigint           NOT NULL,
    place  bigint           NOT NULL,
    CONSTRAINT missed_pkey PRIMARY KEY (queue, turn, place)
) WITH (autovacuum_vacuum_scale_factor = 0.05, vacuum_truncate = off, toast.vacuum_truncate = off);
