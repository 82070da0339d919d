-- The scheduler's view of a channel: one narrow row for each channel that is, or lately was, active.
--
-- Written by dequeues alone, one at a time for each queue (see message_dequeue), so its rows are never contended.
--   ready    has a message that may be served now: competes by (tag, since)
--   waiting  its first message is for later: wakes at due
--   idle     has no message; kept for its tag until the virtual time has passed it, so that a pause gains nothing
CREATE TABLE lane (
    queue    text             NOT NULL,
    channel  text             NOT NULL,
    state    text             NOT NULL,
    -- Start tag of the next message in units of virtual time (see lane_step). Only ever grows.
    tag      bigint           NOT NULL,
    -- The number of the activation that made the lane ready: equal tags go in this order. Only ever grows.
    since    bigint           NOT NULL,
    weight   double precision NOT NULL,
    -- No ready message stands before this place: scans start here, beyond the dead index entries of served ones.
    head_at  bigint           NOT NULL,
    head_id  bigint           NOT NULL,
    due      bigint,
    -- One row a channel. The tag is part of the key because it grows: read backwards, the first entry is the
    -- living one, however many dead versions an old snapshot keeps behind it.
    CONSTRAINT lane_pkey PRIMARY KEY (queue, channel, tag)
) WITH (autovacuum_vacuum_scale_factor = 0.05);

CREATE INDEX lane_ready ON lane (queue, tag, since) WHERE state = 'ready';
CREATE INDEX lane_waiting ON lane (queue, due) WHERE state = 'waiting';
CREATE INDEX lane_idle ON lane (queue, tag) WHERE state = 'idle';
