-- Policy of a queue, a namespace of channels that workers subscribe to; and the default policy of its channels.
--
-- Written by users, read by the scheduler. A row is optional: without one the defaults below apply. A change is told
-- to the scheduler by the trigger queue_changed.
CREATE TABLE queue (
    name                         text COLLATE "C" NOT NULL,
    -- How many messages of the queue may be leased at a time; null: any number.
    max_concurrency              integer,
    -- Nothing is served while paused, until resume_at if that is given.
    paused                       boolean          NOT NULL DEFAULT false,
    resume_at                    timestamptz,
    -- After how many failed attempts a message becomes a dead letter, unless it says otherwise itself.
    max_attempts                 integer          NOT NULL DEFAULT 20,
    -- Seconds before the second attempt; doubled for each further one, up to max_backoff.
    backoff                      double precision NOT NULL DEFAULT 1,
    max_backoff                  double precision NOT NULL DEFAULT 3600,
    -- For how many days the outcomes of the queue's messages are kept at least; 0: they are not written.
    history_days                 integer          NOT NULL DEFAULT 30,
    -- What applies to channels whose own row is missing, or has null there.
    channel_weight               double precision NOT NULL DEFAULT 1,
    channel_max_concurrency      integer,
    channel_release_interval_ms  bigint           NOT NULL DEFAULT 0,
    channel_burst                integer          NOT NULL DEFAULT 1,
    channel_max_size             integer,
    channel_overflow             text             NOT NULL DEFAULT 'reject',
    created_at                   timestamptz      NOT NULL DEFAULT clock(),
    CONSTRAINT queue_pkey PRIMARY KEY (name),
    CONSTRAINT queue_name_length CHECK (char_length(name) BETWEEN 1 AND 255),
    CONSTRAINT queue_max_concurrency_range CHECK (max_concurrency >= 1),
    CONSTRAINT queue_max_attempts_range CHECK (max_attempts >= 1),
    CONSTRAINT queue_backoff_range CHECK (backoff >= 0 AND backoff <= 31557600),
    CONSTRAINT queue_max_backoff_range CHECK (max_backoff >= 0 AND max_backoff <= 31557600),
    CONSTRAINT queue_history_days_range CHECK (history_days BETWEEN 0 AND 36500),
    CONSTRAINT queue_channel_weight_range CHECK (channel_weight >= 0.01 AND channel_weight <= 1000),
    CONSTRAINT queue_channel_max_concurrency_range CHECK (channel_max_concurrency >= 1),
    CONSTRAINT queue_channel_release_interval_ms_range CHECK (channel_release_interval_ms BETWEEN 0 AND 31557600000),
    CONSTRAINT queue_channel_burst_range CHECK (channel_burst BETWEEN 1 AND 1000000),
    CONSTRAINT queue_channel_max_size_range CHECK (channel_max_size >= 1),
    CONSTRAINT queue_channel_overflow_known CHECK (channel_overflow IN ('reject', 'drop')),
    CONSTRAINT queue_resume_at_finite CHECK (isfinite(resume_at))
) WITH (vacuum_truncate = off, toast.vacuum_truncate = off);

-- Only those whose channels are bounded: looked up by every enqueue, and so by no index that holds others.
CREATE UNIQUE INDEX queue_bounded ON queue ((ARRAY[name])) WHERE channel_max_size IS NOT NULL;

-- Those that keep no history: looked up by every completion.
CREATE INDEX queue_without_history ON queue (name) WHERE history_days = 0;
