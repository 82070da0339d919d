-- Policy of a channel: what an operator sets for one tenant. Null: the default of the channel's queue.
--
-- Written by users, read by the scheduler and, for max_size, by enqueueing. A row is optional, so a channel costs
-- nothing to have. A change is told to the scheduler by the trigger channel_changed.
CREATE TABLE channel (
    queue                text COLLATE "C" NOT NULL DEFAULT 'default',
    name                 text COLLATE "C" NOT NULL,
    -- Its share against the other channels of the queue.
    weight               double precision,
    -- How many of its messages may be leased at a time.
    max_concurrency      integer,
    -- Milliseconds between two of its messages being leased; 0: none. A channel that has waited may go on with burst
    -- messages at once.
    release_interval_ms  bigint,
    burst                integer,
    -- How many messages may be ready or scheduled for later in it, and what happens to more: 'reject' or 'drop'.
    max_size             integer,
    overflow             text,
    -- Nothing is served while paused, until resume_at if that is given.
    paused               boolean          NOT NULL DEFAULT false,
    resume_at            timestamptz,
    created_at           timestamptz      NOT NULL DEFAULT clock(),
    CONSTRAINT channel_pkey PRIMARY KEY (queue, name),
    CONSTRAINT channel_queue_length CHECK (char_length(queue) BETWEEN 1 AND 255),
    CONSTRAINT channel_name_length CHECK (char_length(name) BETWEEN 1 AND 255),
    -- NaN sorts above every number, so the upper bound refuses it too.
    CONSTRAINT channel_weight_range CHECK (weight >= 0.01 AND weight <= 1000),
    CONSTRAINT channel_max_concurrency_range CHECK (max_concurrency >= 1),
    CONSTRAINT channel_release_interval_ms_range CHECK (release_interval_ms BETWEEN 0 AND 31557600000),
    CONSTRAINT channel_burst_range CHECK (burst BETWEEN 1 AND 1000000),
    CONSTRAINT channel_max_size_range CHECK (max_size >= 1),
    CONSTRAINT channel_overflow_known CHECK (overflow IN ('reject', 'drop')),
    CONSTRAINT channel_resume_at_finite CHECK (isfinite(resume_at))
-- Enqueues read it, and VACUUM would lock them out to give back space at its end; so likewise of queue.
) WITH (vacuum_truncate = off, toast.vacuum_truncate = off);

-- Only what is bounded: looked up by every enqueue, and so by no index that holds the policies of others.
CREATE UNIQUE INDEX channel_bounded ON channel ((ARRAY[queue, name])) WHERE max_size IS NOT NULL;
