-- What dequeues took from plan without having the turn: one row a batch, until the next turn.
--
-- Written by message_dequeue, append-only, in the transaction that leases the messages, so that one that is rolled back
-- leaves nothing; deleted by scheduler_settle and queue_repair, within the turn.
CREATE TABLE taken (
    queue  text COLLATE "C" NOT NULL,
    -- That of the rotation at the time. What is of an earlier one is never looked at again.
    turn   bigint           NOT NULL,
    -- The place in plan of the last of its messages.
    place  bigint           NOT NULL,
    -- A place up to which all are taken, as far as this one knew.
    upto   bigint           NOT NULL,
    ids    bigint[]         NOT NULL,
    CONSTRAINT taken_pkey PRIMARY KEY (queue, turn, place)
) WITH (autovacuum_vacuum_scale_factor = 0.05, vacuum_truncate = off, toast.vacuum_truncate = off);
