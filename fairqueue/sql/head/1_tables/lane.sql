-- The scheduler's view of a channel: one narrow row for each channel that is, or lately was, active.
--
-- Written by dequeues alone, one at a time for each queue (see scheduler_serve), so its rows are never contended.
-- Where a lane stands is said by due:
--   0        ready: has a message that may be served now, and competes by (tag, since)
--   a time   waiting, in Unix milliseconds: for the hour of its message, its next release, or the end of a pause
--   2^63-1   blocked: at its max_concurrency, or paused for good; a signal brings it back
--   null     idle: has no message but those in plan; kept for its tag until the virtual time has passed it, so that a
--            pause gains nothing, and for its limits while they still count something
CREATE TABLE lane (
    queue            text COLLATE "C" NOT NULL,
    channel          text COLLATE "C" NOT NULL,
    due              bigint,
    -- Start tag of the next message that isn't planned, in units of virtual time (see lane_step).
    tag              bigint           NOT NULL,
    -- The number of the activation that made the lane ready: equal tags go in this order. Only ever grows.
    since            bigint           NOT NULL,
    -- No ready message stands before this place: scans start here, beyond the dead index entries of served ones.
    head_at          bigint           NOT NULL,
    head_id          bigint           NOT NULL,
    -- The policy of the channel, as it was when there last was news of it. Unix milliseconds where it is a time.
    weight           double precision NOT NULL,
    max_concurrency  integer,
    release_interval bigint           NOT NULL,
    burst            integer          NOT NULL,
    paused_until     bigint,
    -- With a max_concurrency: how many of its messages are leased, of those leases that were counted in the turn
    -- counted_from or later.
    running          integer          NOT NULL,
    counted_from     bigint           NOT NULL,
    -- When its last message was released, in Unix milliseconds; one interval later for each that went ahead of its
    -- time as part of a burst.
    released_at      bigint           NOT NULL,
    -- The start tag of the last of its messages in plan; none is there unless (planned, since) is beyond the virtual time.
    planned          bigint           NOT NULL,
    -- How far apart its messages stood when some were planned, on average: in time and, which counts where all had the
    -- same time, in ids. A guess, by which scheduler_plan reads no more of them than it needs.
    gap_at           double precision NOT NULL DEFAULT 0,
    gap_id           double precision NOT NULL DEFAULT 0,
    -- One row a channel. The tag is part of the key because it grows, but where a plan is taken back: read backwards,
    -- the first entry is the living one, however many dead versions an old snapshot keeps behind it.
    CONSTRAINT lane_pkey PRIMARY KEY (queue, channel, tag)
) WITH (autovacuum_vacuum_scale_factor = 0.05, vacuum_truncate = off, toast.vacuum_truncate = off);

CREATE INDEX lane_ready ON lane (queue, tag, since) WHERE due = 0;
CREATE INDEX lane_waiting ON lane (queue, due) WHERE due > 0;
CREATE INDEX lane_idle ON lane (queue, tag) WHERE due IS NULL;
