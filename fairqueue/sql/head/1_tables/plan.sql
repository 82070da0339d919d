-- What comes next, where much is waiting: the order of a queue's next messages, scheduled ahead.
--
-- Written by dequeues alone, one at a time for each queue: by scheduler_plan_write, scheduler_unplan, and
-- scheduler_plan, which deletes what was served. Read by these, by scheduler_planned, scheduler_settle,
-- scheduler_activate, scheduler_serve and scheduler_serve_plan, and by message_dequeue, side by side. A row is a
-- stretch of the order, as arrays: its n-th message stands at rows[n], has ids[n] and the attempt attempts[n], starts
-- at the tag tags[n] and belongs to activation sinces[n] of the lane of channels[n], which itself stands behind all of
-- its planned messages. What isn't beyond the place of the rotation has been served.
CREATE TABLE plan (
    queue     text COLLATE "C" NOT NULL,
    -- That of its first message: what was ever planned is numbered. A row has 32 messages at most.
    place     bigint           NOT NULL,
    rows      tid[]            NOT NULL,
    ids       bigint[]         NOT NULL,
    attempts  integer[]        NOT NULL,
    tags      bigint[]         NOT NULL,
    sinces    bigint[]         NOT NULL,
    channels  text[]           NOT NULL,
    -- Read from the place of the rotation on, so no dequeue walks over the entries of what was served.
    CONSTRAINT plan_pkey PRIMARY KEY (queue, place)
) WITH (
    autovacuum_vacuum_scale_factor = 0.05,
    vacuum_truncate = off,
    toast.vacuum_truncate = off,
    -- Else those of long names are compressed, and a dequeue would decompress the whole row for each of its messages.
    toast_tuple_target = 8160
);
