-- Step 1: everything. Frozen: a released step is never changed.

-- The time by which everything here goes: that of the database server, as it is now, not as a transaction began.
--
-- Called by the functions here, by column defaults, and by statements of the client library; takes no lock. That there
-- is one function for it lets a test move the time of a queue, by replacing it.
CREATE FUNCTION clock() RETURNS timestamptz
LANGUAGE sql VOLATILE PARALLEL SAFE
RETURN clock_timestamp();

-- Says what is wrong with a list of leases.
--
-- Called by lease_list and message_complete; takes no lock. Returns nothing: it raises.
CREATE FUNCTION lease_refuse(ids bigint[], attempts integer[]) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE
AS $$
BEGIN
    RAISE invalid_parameter_value USING
        MESSAGE = format('ids and attempts must have the same length, not %s and %s',
            coalesce(cardinality(ids)::text, 'null'), coalesce(cardinality(attempts)::text, 'null'));
END
$$;

-- Raises the error of a message that isn't valid: it names the field, the value and the limits.
--
-- Called by message_arrive, message_edit, message_create and message_create_many; takes no lock. The names of
-- constraints in the errors are for programs.
CREATE FUNCTION message_refuse(
    queue text, channel text, key text, payload jsonb, body bytea, cost double precision, max_attempts integer,
    backoff double precision, created_at timestamptz DEFAULT NULL, first_leased_at timestamptz DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_column text;
    v_rule text := 'range';
    v_must text;
BEGIN
    IF char_length(queue) NOT BETWEEN 1 AND 255 THEN
        v_column := 'queue';
        v_rule := 'length';
        v_must := 'have 1 to 255 characters, not ' || char_length(queue);
    ELSIF char_length(channel) NOT BETWEEN 1 AND 255 THEN
        v_column := 'channel';
        v_rule := 'length';
        v_must := 'have 1 to 255 characters, not ' || char_length(channel);
    ELSIF char_length(key) NOT BETWEEN 1 AND 255 THEN
        v_column := 'key';
        v_rule := 'length';
        v_must := 'have 1 to 255 characters, not ' || char_length(key);
    ELSIF pg_column_size(payload) > 67108864 THEN
        v_column := 'payload';
        v_rule := 'size';
        v_must := 'have at most 67108864 bytes, not ' || pg_column_size(payload);
    ELSIF octet_length(body) > 67108864 THEN
        v_column := 'body';
        v_rule := 'size';
        v_must := 'have at most 67108864 bytes, not ' || octet_length(body);
    ELSIF max_attempts < 1 THEN
        v_column := 'max_attempts';
        v_must := 'be 1 or more, not ' || max_attempts;
    ELSIF NOT (backoff >= 0 AND backoff <= 31557600) THEN
        v_column := 'backoff';
        v_must := 'be 0 to 31557600 seconds, not ' || backoff;
    ELSIF NOT (created_at >= '0002-01-01 UTC' AND created_at < '9999-01-01 UTC') THEN
        v_column := 'created_at';
        v_must := 'be in the years 2 to 9998, not ' || created_at;
    ELSIF NOT (first_leased_at >= '0002-01-01 UTC' AND first_leased_at < '9999-01-01 UTC') THEN
        v_column := 'first_leased_at';
        v_must := 'be in the years 2 to 9998, not ' || first_leased_at;
    ELSE
        v_column := 'cost';
        v_must := 'be more than 0 and at most 1000000, not ' || cost;
    END IF;
    RAISE check_violation USING MESSAGE = format('%s must %s', v_column, v_must), TABLE = 'message',
        COLUMN = v_column, CONSTRAINT = format('message_%s_%s', v_column, v_rule);
END
$$;

-- Whether what users give of a message can be.
--
-- Called by message_arrive for each new message, by message_edit and by message_create; takes no lock. Not a CHECK
-- constraint: PostgreSQL would read its expression anew for each statement that writes to the table, and call it for
-- each message that is leased, whose content doesn't change.
CREATE FUNCTION message_valid(
    queue text, channel text, key text, payload jsonb, body bytea, cost double precision, max_attempts integer,
    backoff double precision, created_at timestamptz DEFAULT NULL, first_leased_at timestamptz DEFAULT NULL
) RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE
RETURN char_length(queue) BETWEEN 1 AND 255 AND char_length(channel) BETWEEN 1 AND 255
    AND (key IS NULL OR char_length(key) BETWEEN 1 AND 255)
    AND (payload IS NULL OR pg_column_size(payload) <= 67108864)
    AND (body IS NULL OR octet_length(body) <= 67108864)
    -- NaN sorts above every number, so the upper bound refuses it too.
    AND cost > 0 AND cost <= 1000000
    AND (max_attempts IS NULL OR max_attempts >= 1)
    AND (backoff IS NULL OR backoff >= 0 AND backoff <= 31557600)
    -- In any time zone, what Python can read: a batch that it can't is leased, and of no use to who leased it.
    AND (created_at IS NULL OR created_at >= '0002-01-01 UTC' AND created_at < '9999-01-01 UTC')
    AND (first_leased_at IS NULL OR first_leased_at >= '0002-01-01 UTC' AND first_leased_at < '9999-01-01 UTC');

-- The advisory lock of those who wait for work in a queue; to_hex of it is in the name of their notification channel.
--
-- Called by queue_listen, queue_unlisten and queue_notify, whose search_path says which schema it is about. It takes no
-- lock itself. The number is none of those of queue_key, whose locks are others'.
CREATE FUNCTION queue_wake(queue text) RETURNS bigint
LANGUAGE sql STABLE PARALLEL SAFE
RETURN hashtextextended(queue, hashtextextended(current_schema(), 720730));

-- Takes from all but its owner what they may do with a table that was just made.
--
-- Called by history_add and stage_create. Of the owner's ALTER DEFAULT PRIVILEGES, which are meant for the application's
-- tables: by them whoever may use the schema could read what is here, and change it.
-- Locks: takes no lock that anybody waits for, as nobody else sees the table yet.
CREATE FUNCTION table_close(relation regclass) RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_role text;
BEGIN
    FOR v_role IN
        SELECT DISTINCT CASE WHEN a.grantee = 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END
        FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) a
        WHERE c.oid = relation AND a.grantee <> c.relowner
    LOOP
        EXECUTE format('REVOKE ALL ON TABLE %s FROM %s', relation, v_role);
    END LOOP;
END
$$;

REVOKE EXECUTE ON FUNCTION table_close FROM PUBLIC;

-- A point in time as Unix time in whole milliseconds, rounded down: the unit of message.dequeue_at.
--
-- Called by the functions here and by statements of the client library; takes no lock. By way of UTC, as extract from a
-- timestamptz is not immutable, and PostgreSQL would call this function instead of reading its expression in.
CREATE FUNCTION unix_ms(at timestamptz) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN floor(extract(epoch FROM at AT TIME ZONE 'UTC') * 1000)::bigint;

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

-- Dead letters: messages that used up their attempts, with all that is needed to look into them and to put them back.
--
-- Written by message_fail and by dequeues that find a lease run out; message_redrive puts messages back. Users may
-- delete rows.
CREATE TABLE dead_message (
    id               bigint           NOT NULL,
    queue            text COLLATE "C" NOT NULL,
    channel          text COLLATE "C" NOT NULL,
    key              text COLLATE "C",
    payload          jsonb,
    body             bytea,
    cost             double precision NOT NULL,
    max_attempts     integer,
    backoff          double precision,
    attempt          integer          NOT NULL,
    worker           text,
    state            jsonb,
    -- What the last failure said.
    error            text,
    created_at       timestamptz      NOT NULL,
    first_leased_at  timestamptz,
    died_at          timestamptz      NOT NULL DEFAULT clock(),
    CONSTRAINT dead_message_pkey PRIMARY KEY (id)
) WITH (vacuum_truncate = off, toast.vacuum_truncate = off);

CREATE INDEX dead_message_channel ON dead_message (queue, channel, id);

-- What history no longer has: of each lot of rows that was dropped, the last one in the order in which readers follow.
--
-- Written by history_drop and history_release. By it a reader without a feed of its own learns that it came too late.
CREATE TABLE dropped (
    id               bigint           GENERATED ALWAYS AS IDENTITY,
    xid              xid8             NOT NULL,
    message_id       bigint           NOT NULL,
    dropped_at       timestamptz      NOT NULL DEFAULT clock(),
    CONSTRAINT dropped_pkey PRIMARY KEY (id)
);

-- How far readers have followed the history, so that nothing is dropped that one of them hasn't read.
--
-- Written by feed_move and feed_forget. A feed has read all rows of history before (xid, message_id).
CREATE TABLE feed (
    name             text COLLATE "C" NOT NULL,
    xid              xid8             NOT NULL,
    message_id       bigint           NOT NULL,
    moved_at         timestamptz      NOT NULL DEFAULT clock(),
    CONSTRAINT feed_pkey PRIMARY KEY (name)
);

-- One row an outcome, append-only: the source for reports and pipelines.
--
-- Written by message_complete and message_finish, unless the queue's history_days is 0. Partitions are days in UTC,
-- made and dropped by history_maintain; history_default takes what no other has room for, so that a completion never
-- fails for want of a partition.
--
-- The transaction id makes it a change feed: rows become visible in the order of commits, which is not the order of
-- ids, so a reader resumes from a transaction-id horizon and loses no late commit.
CREATE TABLE history (
    message_id       bigint           NOT NULL,
    queue            text COLLATE "C" NOT NULL,
    channel          text COLLATE "C" NOT NULL,
    key              text COLLATE "C",
    -- 'completed', 'dead', 'cancelled', or 'dropped' where the channel was full.
    outcome          text             NOT NULL,
    attempt          integer          NOT NULL,
    cost             double precision NOT NULL,
    error            text,
    worker           text,
    dequeue_at       bigint           NOT NULL,
    created_at       timestamptz      NOT NULL,
    first_leased_at  timestamptz,
    leased_at        timestamptz,
    finished_at      timestamptz      NOT NULL DEFAULT clock(),
    xid              xid8             NOT NULL DEFAULT pg_current_xact_id(),
    CONSTRAINT history_pkey PRIMARY KEY (message_id, finished_at)
) PARTITION BY RANGE (finished_at);

-- For readers that follow it.
CREATE INDEX history_xid ON history (xid, message_id);

-- Small, and enough to find the outcomes of an hour among those of a day: they lie in the order of time.
CREATE INDEX history_finished ON history USING brin (finished_at) WITH (autosummarize = on);

-- The outcomes of days that have no partition of their own, so that a completion never fails for want of one.
--
-- Normally empty: history_maintain makes the partitions ahead.
CREATE TABLE history_default PARTITION OF history DEFAULT
    WITH (vacuum_truncate = off, toast.vacuum_truncate = off);

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

-- What a dequeue returns of each message that it leased: the message as it is then.
--
-- Returned by message_dequeue, scheduler_serve and the functions that this serves by. A type, and not a table of each
-- function's own, as PostgreSQL would read the columns of that anew for each call.
CREATE TYPE leased_message AS (
    id               bigint,
    channel          text,
    attempt          integer,
    payload          jsonb,
    body             bytea,
    state            jsonb,
    error            text,
    dequeue_at       bigint,
    cost             double precision,
    created_at       timestamptz,
    leased_until     timestamptz,
    key              text,
    forgiven         integer,
    first_leased_at  timestamptz
);

-- What was loaded in bulk, so that loading the same again adds nothing: one row a load that has a name.
--
-- Written by load_enter, in the transaction that enters the messages, by load_claim and load_count; deleted by
-- stage_clean. A job, or a part of one, is loaded once: its epoch is 0. A stream is loaded batch by batch, and its
-- epoch is the number of the last one, which only grows.
CREATE TABLE load (
    name             text COLLATE "C" NOT NULL,
    epoch            bigint           NOT NULL,
    -- Of the last epoch: the rows given, and those that became messages, if only to be dropped again where their channel
    -- was full; the others had keys that were live.
    rows             bigint           NOT NULL DEFAULT 0,
    entered          bigint           NOT NULL DEFAULT 0,
    entered_at       timestamptz      NOT NULL DEFAULT clock(),
    -- Of the transaction that claimed it (load_claim).
    xid              xid8             NOT NULL DEFAULT pg_current_xact_id(),
    CONSTRAINT load_pkey PRIMARY KEY (name)
);

-- One row a live message: ready, or leased to a worker. A finished message has no row here.
--
-- Users insert, dequeues lease (UPDATE), completions delete. A message is ready when leased_until is null; it is
-- served in the order (dequeue_at, id) of its channel and never before the database clock reaches dequeue_at.
CREATE TABLE message (
    id               bigint           GENERATED ALWAYS AS IDENTITY,
    -- Names are compared by their bytes, in all tables: so no change of a locale's order damages an index.
    queue            text COLLATE "C" NOT NULL DEFAULT 'default',
    channel          text COLLATE "C" NOT NULL,
    -- No two live messages of a channel have the same.
    key              text COLLATE "C",
    payload          jsonb,
    body             bytea,
    -- Unix time in milliseconds. Historic, zero or negative: priority inside the channel.
    dequeue_at       bigint           NOT NULL DEFAULT unix_ms(clock()),
    -- How much of the channel's share this message uses up, in units that the application chooses.
    cost             double precision NOT NULL DEFAULT 1,
    -- What differs from the policy of the queue: failed attempts before it is dead, seconds before the second one.
    max_attempts     integer,
    backoff          double precision,
    -- How often it has been leased. With the id it is the fence: a lease is (id, attempt).
    attempt          integer          NOT NULL DEFAULT 0,
    -- How many of those don't count against max_attempts: deferrals, and attempts before it was put back from the dead.
    forgiven         integer          NOT NULL DEFAULT 0,
    leased_until     timestamptz,
    first_leased_at  timestamptz,
    leased_at        timestamptz,
    -- Who leased it last, if that worker has a name.
    worker           text,
    -- The turn in which its lease was counted toward a max_concurrency; null: there was none.
    counted          bigint,
    -- What a deferral saved for the next attempt, and what the last failure said.
    state            jsonb,
    error            text,
    created_at       timestamptz      NOT NULL DEFAULT clock(),
    -- What the columns may hold is checked by message_valid.
    CONSTRAINT message_pkey PRIMARY KEY (id)
-- To give back space at its end, VACUUM would lock the table against everybody; so likewise of what dequeues and
-- completions write.
) WITH (vacuum_truncate = off, toast.vacuum_truncate = off);

-- A channel's ready messages in their order: what a dequeue probes, from the lane's head on.
CREATE INDEX message_ready ON message (queue, channel, dequeue_at, id) WHERE leased_until IS NULL;

-- Leases by their end: what a dequeue looks at to find those that ran out.
CREATE INDEX message_leased ON message (queue, leased_until) WHERE leased_until IS NOT NULL;

CREATE UNIQUE INDEX message_key ON message (queue, channel, key) WHERE key IS NOT NULL;

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

-- Where the rotation of a queue stands: one row a queue, written by dequeues alone.
--
-- Besides the virtual time it holds the lower bounds from which every index scan of a dequeue starts, so that none
-- walks over entries that are dead but, because of an old snapshot, not yet removable. The row itself is updated by
-- every dequeue that has the turn and does something, and by who plans on without it. Its key holds a number that
-- grows, so that it is read as the last entry of its index, however many dead versions lie before it; but only every 64
-- turns, as versions between which the key doesn't change stand in one page and need no entry of their own.
CREATE TABLE rotation (
    queue            text COLLATE "C" NOT NULL,
    turn             bigint           NOT NULL,
    -- Always rotation_era(turn). Not a generated column: as part of the key, that keeps PostgreSQL 18 from updating a
    -- table that is published.
    era              bigint           NOT NULL,
    -- Start tag of the message served last, but for what was taken from plan since: where a channel that becomes active
    -- starts.
    vtime            bigint           NOT NULL,
    -- The lane of that message: every ready lane comes after (vtime, vsince).
    vsince           bigint           NOT NULL,
    -- How many lanes have become ready so far: the number that the next one gets, less 1.
    activations      bigint           NOT NULL,
    -- Signals of transactions from news_from on, and of those in news_open, have not been folded yet; likewise the
    -- urgent ones.
    news_from        xid8             NOT NULL,
    news_open        xid8[]           NOT NULL,
    urgent_from      xid8             NOT NULL,
    urgent_open      xid8[]           NOT NULL,
    -- No lease ends, and no waiting lane is due, before these; but for leases that ran out while somebody held them. A
    -- due_floor of 0 has the next dequeue come at once, as the last one left something to go through (queue_due).
    lease_floor      timestamptz      NOT NULL,
    due_floor        bigint           NOT NULL,
    -- Idle lanes below this tag have been removed.
    idle_floor       bigint           NOT NULL,
    -- The last channel that scheduler_sweep looked at ('' at the start of a round).
    swept            text COLLATE "C" NOT NULL,
    -- The policy of the queue and what it counts, as in lane.
    max_concurrency  integer,
    paused_until     bigint,
    running          integer          NOT NULL,
    counted_from     bigint           NOT NULL,
    -- The time of this turn, in Unix milliseconds, to notice a clock that was set back.
    clock            bigint           NOT NULL,
    -- When history_maintain is to be called next, in Unix milliseconds.
    maintain_at      bigint           NOT NULL,
    -- How many messages were served, or taken back, of all that was ever planned, and how many were planned: the places
    -- in plan between the two are those to come.
    place            bigint           NOT NULL,
    planned          bigint           NOT NULL,
    -- How many messages were served since a dequeue came up short or a plan had to be taken back, and at how many the
    -- next ones are planned: as many again.
    ahead            integer          NOT NULL,
    plan_at          integer          NOT NULL,
    -- The ready lane that comes first: what is planned before it can be taken without the turn. Null: who wants to know
    -- has to look.
    lane_tag         bigint,
    lane_since       bigint,
    -- The first lease that ran out while somebody held it, since when there is such a one, and when to look again: not each
    -- time, as it may stay so for long, with more and more dead entries behind it. 'infinity': there is none.
    held_from        timestamptz      NOT NULL DEFAULT 'infinity',
    held_since       timestamptz      NOT NULL DEFAULT 'infinity',
    held_at          timestamptz      NOT NULL DEFAULT 'infinity',
    -- While lanes stand behind others, because of planned messages that weren't there to be taken: up to where all would
    -- have been served for the same work. A channel that becomes active starts there, if that is beyond vtime.
    arrival_tag      bigint           NOT NULL DEFAULT 0,
    -- While lanes are derived anew (scheduler_rebuild): the last one that has been, '' before the first.
    rebuilt          text COLLATE "C",
    -- From the plan on until a dequeue comes up short or the queue gets a limit, if there was one to be had: the
    -- sequence of which tickets for the places of the plan are drawn, and the last ticket that was drawn when what was
    -- taken of it was settled last. So the next one is for the place behind place.
    tickets          regclass,
    ticket_base      bigint           NOT NULL DEFAULT 0,
    CONSTRAINT rotation_pkey PRIMARY KEY (queue, era)
) WITH (
    autovacuum_vacuum_scale_factor = 0.05,
    vacuum_truncate = off,
    toast.vacuum_truncate = off,
    -- Room for versions to come beside each row.
    fillfactor = 50
);

-- News for the scheduler. What a row says depends on what it has:
--   dequeue_at and message_id   the channel may have something ready from that place on
--   counted                     a lease of the channel that was counted in that turn has ended
--   message_id and counted      ended, or will: message_id was held by somebody else when leases were counted
--   message_id                  its lease ends before the scheduler would look: a user has set leased_until
--   none of these               the policy of the channel changed; without a channel, that of all by their queue
--   dequeue_at, no channel      only what holds for the whole queue changed, its pause or its max_concurrency
--
-- Written by the triggers, append-only, in the writer's own transaction, so that enqueueing waits for nobody; and by
-- dequeues, for what is to be looked at again (scheduler_fold, scheduler_recount, scheduler_serve_shares).
-- Dequeues fold signals into lanes and delete them (scheduler_fold). The transaction id, not the order of arrival,
-- is what a fold resumes from: ids are given at insert but rows are seen at commit.
CREATE TABLE signal (
    queue       text COLLATE "C" NOT NULL,
    channel     text COLLATE "C",
    dequeue_at  bigint,
    message_id  bigint,
    counted     bigint,
    -- All but new messages: a flood of those must hide neither a new limit, nor the end of a lease, nor what comes back.
    urgent      boolean          NOT NULL,
    xid         xid8             NOT NULL DEFAULT pg_current_xact_id()
) WITH (autovacuum_vacuum_scale_factor = 0.05, vacuum_truncate = off, toast.vacuum_truncate = off);

-- It has no key: without this, a publication FOR ALL TABLES would have the server refuse a dequeue's DELETE.
ALTER TABLE signal REPLICA IDENTITY FULL;

CREATE INDEX signal_news ON signal (queue, urgent, xid);

-- The staging tables that there are: one row each, for a part of a load that hasn't been entered yet.
--
-- Written by stage_create and stage_drop; deleted by stage_clean, with the tables. Only what has a row here is entered,
-- or dropped.
CREATE TABLE stage (
    -- That of the table.
    name             text COLLATE "C" NOT NULL,
    -- Which attempt to load something it belongs to; empty: none, and it is to be dropped.
    run              text COLLATE "C" NOT NULL,
    created_at       timestamptz      NOT NULL DEFAULT clock(),
    CONSTRAINT stage_pkey PRIMARY KEY (name)
);

CREATE INDEX stage_run ON stage (run);

-- Which queue has the tickets of which sequence, of tickets_1 to tickets_64.
--
-- Written by scheduler_tickets, within the turn of the queue that gets or returns them. A number of a sequence is given
-- out once, whatever becomes of the transaction, so those who draw one (message_dequeue) neither wait for each other
-- nor get the same. Queues that have a max_concurrency, and with more queues that have a plan than sequences the
-- others, are served in their turns alone.
CREATE TABLE tickets (
    number  integer          NOT NULL,
    queue   text COLLATE "C" NOT NULL,
    CONSTRAINT tickets_pkey PRIMARY KEY (number)
) WITH (vacuum_truncate = off, toast.vacuum_truncate = off);

DO $$
BEGIN
    FOR n IN 1..64 LOOP
        EXECUTE format('CREATE SEQUENCE %I', 'tickets_' || n);
    END LOOP;
END
$$;

-- Sets the policy of a channel, creating its row where there is none. A parameter that is null, as it is when left
-- out, leaves what is there.
--
-- Called by operators. Takes effect at the next dequeue (trigger channel_changed). With paused => true nothing is
-- served until resume_at, or, without that, until paused => false. Back to the default of the queue leads
-- UPDATE channel SET ... = NULL, or DELETE.
-- Locks: the row of the channel, until the end of the transaction. The scheduler only reads it.
CREATE FUNCTION channel_set(
    name text, queue text DEFAULT 'default', weight double precision DEFAULT NULL,
    max_concurrency integer DEFAULT NULL, release_interval_ms bigint DEFAULT NULL, burst integer DEFAULT NULL,
    max_size integer DEFAULT NULL, overflow text DEFAULT NULL, paused boolean DEFAULT NULL,
    resume_at timestamptz DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
#variable_conflict use_variable
BEGIN
    PERFORM check_pause(paused, resume_at);
    INSERT INTO channel AS c (
        queue, name, weight, max_concurrency, release_interval_ms, burst, max_size, overflow, paused, resume_at)
    VALUES (
        queue, name, weight, max_concurrency, release_interval_ms, burst, max_size, overflow,
        coalesce(paused, false), resume_at)
    ON CONFLICT ON CONSTRAINT channel_pkey DO UPDATE
    SET weight = coalesce(weight, c.weight),
        max_concurrency = coalesce(max_concurrency, c.max_concurrency),
        release_interval_ms = coalesce(release_interval_ms, c.release_interval_ms),
        burst = coalesce(burst, c.burst),
        max_size = coalesce(max_size, c.max_size),
        overflow = coalesce(overflow, c.overflow),
        paused = coalesce(paused, c.paused),
        resume_at = CASE WHEN paused IS NULL THEN c.resume_at ELSE resume_at END;
END
$$;

REVOKE EXECUTE ON FUNCTION channel_set FROM PUBLIC;

-- How many of the messages that a statement has just put into a channel are beyond its max_size; 0 where it has none,
-- or 2147483647, which means none.
--
-- Called by message_arrive. Counted are the ready messages of the channel, scheduled ones included, as this transaction
-- sees them: what others have put in and not yet committed comes on top, so n open transactions that put in k each may
-- overshoot by n * k. No more than max_size + entered index entries are read; under an old snapshot, as many more as have
-- been served of the channel since.
-- Raises SQLSTATE QF001 instead where the channel's overflow is 'reject'.
-- Reads only, and takes no lock.
CREATE FUNCTION channel_surplus(queue text, channel text, entered bigint) RETURNS bigint
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_channel CONSTANT text := $2;
    v_max_size bigint;
    v_ready bigint;
    v_overflow text;
BEGIN
    -- By the indexes that hold only what is bounded: see message_arrive.
    SELECT c.max_size INTO v_max_size FROM channel c
    WHERE ARRAY[c.queue, c.name] = ARRAY[v_queue, v_channel] AND c.max_size IS NOT NULL;
    IF NOT FOUND THEN
        SELECT q.channel_max_size INTO v_max_size FROM queue q
        WHERE ARRAY[q.name] = ARRAY[v_queue] AND q.channel_max_size IS NOT NULL;
    END IF;
    -- The greatest integer lifts the queue's default for one channel: counting up to it would read the whole backlog.
    IF coalesce(v_max_size, 2147483647) = 2147483647 THEN
        RETURN 0;
    END IF;
    SELECT count(*) INTO v_ready FROM (
        SELECT FROM message m
        WHERE m.queue = v_queue AND m.channel = v_channel AND m.leased_until IS NULL
        LIMIT v_max_size + entered) m;
    IF v_ready <= v_max_size THEN
        RETURN 0;
    END IF;
    v_overflow := coalesce(
        (SELECT c.overflow FROM channel c WHERE c.queue = v_queue AND c.name = v_channel),
        (SELECT q.channel_overflow FROM queue q WHERE q.name = v_queue),
        'reject');
    IF v_overflow = 'reject' THEN
        RAISE EXCEPTION USING
            ERRCODE = 'QF001',
            MESSAGE = format('channel %L of queue %L is full: its max_size is %s', v_channel, v_queue, v_max_size),
            HINT = 'Try again when some of its messages have been served, or raise max_size.';
    END IF;
    RETURN v_ready - v_max_size;
END
$$;

-- Raises unless on_conflict is one of those that there are.
--
-- Called by message_create and message_create_many; takes no lock.
CREATE FUNCTION check_on_conflict(on_conflict text) RETURNS void
LANGUAGE plpgsql IMMUTABLE
AS $$
BEGIN
    IF on_conflict IS NULL OR on_conflict NOT IN ('raise', 'ignore', 'replace') THEN
        RAISE invalid_parameter_value USING
            MESSAGE = format('on_conflict must be raise, ignore or replace, not %s', coalesce(on_conflict, 'null'));
    END IF;
END
$$;

-- Raises unless a time to resume comes with a pause.
--
-- Called by channel_set and queue_set; takes no lock.
CREATE FUNCTION check_pause(paused boolean, resume_at timestamptz) RETURNS void
LANGUAGE plpgsql IMMUTABLE
AS $$
BEGIN
    IF resume_at IS NOT NULL AND paused IS NOT TRUE THEN
        RAISE invalid_parameter_value USING
            MESSAGE = format('resume_at is %s, but paused is %s', resume_at, coalesce(paused::text, 'null')),
            HINT = 'resume_at says until when a pause lasts: give paused => true with it.';
    END IF;
END
$$;

-- Raises unless a number of seconds is between minimum and ten years (so neither null, NaN nor infinite).
--
-- Called by the functions that take a time span; takes no lock.
CREATE FUNCTION check_seconds(field text, seconds double precision, minimum double precision) RETURNS void
LANGUAGE plpgsql IMMUTABLE
AS $$
BEGIN
    IF seconds IS NULL OR NOT (seconds >= minimum AND seconds <= 315576000) THEN
        RAISE invalid_parameter_value USING
            MESSAGE = format('%s must be between %s and 315576000, not %s', field, minimum,
                coalesce(seconds::text, 'null'));
    END IF;
END
$$;

-- Says what is wrong with the arguments of a dequeue, or with its transaction.
--
-- Called by message_dequeue; takes no lock. Returns nothing: it raises.
CREATE FUNCTION dequeue_refuse(queue text, max_messages integer, lease_seconds double precision, worker text) RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    IF queue IS NULL OR char_length(queue) NOT BETWEEN 1 AND 255 THEN
        RAISE invalid_parameter_value USING MESSAGE = format('queue must have 1 to 255 characters, not %s',
            coalesce(char_length(queue)::text, 'null'));
    ELSIF max_messages IS NULL OR max_messages NOT BETWEEN 1 AND 10000 THEN
        RAISE invalid_parameter_value USING MESSAGE = format('max_messages must be 1 to 10000, not %s',
            coalesce(max_messages::text, 'null'));
    ELSIF char_length(worker) > 255 THEN
        RAISE invalid_parameter_value USING MESSAGE = format('worker must have at most 255 characters, not %s',
            char_length(worker));
    END IF;
    PERFORM check_seconds('lease_seconds', lease_seconds, 0.001);
    RAISE active_sql_transaction USING
        MESSAGE = format('message_dequeue needs READ COMMITTED, this transaction is %s',
            upper(current_setting('transaction_isolation'))),
        HINT = 'Dequeue in a short transaction of its own.';
END
$$;

-- Forgets a feed that isn't read any more: history no longer keeps anything for it. Returns whether there was one.
--
-- Called by operators.
-- Locks: the row of the feed.
CREATE FUNCTION feed_forget(name text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
BEGIN
    DELETE FROM feed f WHERE f.name = $1;
    RETURN FOUND;
END
$$;

REVOKE EXECUTE ON FUNCTION feed_forget FROM PUBLIC;

-- Up to where history can be read for good: no transaction that is still open will add a row before xid.
--
-- Called by readers that follow the history, together with what tells this installation from others, by server, database
-- and schema: what has been read of one says nothing of another, nor of a copy that was restored elsewhere.
-- Locks: none. An open transaction that has written anything, anywhere on the server, holds the horizon back.
CREATE FUNCTION feed_horizon() RETURNS TABLE (xid xid8, server text)
LANGUAGE sql STABLE
SET search_path FROM CURRENT
AS $$
    SELECT pg_snapshot_xmin(pg_current_snapshot()), format('%s/%s/%s', c.system_identifier, d.oid, n.oid)
    FROM pg_control_system() c
    JOIN pg_database d ON d.datname = current_database()
    JOIN pg_namespace n ON n.nspname = current_schema()
$$;

REVOKE EXECUTE ON FUNCTION feed_horizon FROM PUBLIC;

-- Notes that a feed has read all rows of history before (xid, message_id). Never goes back.
--
-- Called by readers that follow the history, when what they read is safe elsewhere. From the first call on, history
-- keeps what the feed hasn't read, however old it is: call feed_forget for one that isn't read any more.
-- Locks: the row of the feed.
CREATE FUNCTION feed_move(name text, xid xid8, message_id bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
BEGIN
    IF name IS NULL OR char_length(name) NOT BETWEEN 1 AND 255 THEN
        RAISE invalid_parameter_value USING
            MESSAGE = format('name of a feed must have 1 to 255 characters, not %s', coalesce(char_length(name), 0));
    END IF;
    INSERT INTO feed AS f (name, xid, message_id) VALUES ($1, $2, $3)
    ON CONFLICT ON CONSTRAINT feed_pkey DO UPDATE
    SET xid = excluded.xid, message_id = excluded.message_id, moved_at = excluded.moved_at
    WHERE (f.xid, f.message_id) < (excluded.xid, excluded.message_id);
END
$$;

REVOKE EXECUTE ON FUNCTION feed_move FROM PUBLIC;

-- Makes the partition of history for one day in UTC, if it is missing, with what history_default has of that day.
--
-- Called by history_maintain. A table of its own that is then attached: unlike CREATE TABLE ... PARTITION OF, this lets
-- completions to other partitions go on. A day of which history_default has more than 10,000 rows stays there, as
-- moving them would take long.
-- Locks: history, against another call; for a day that has begun also against completions, whose rows may just be on
-- their way to history_default; and history_default, against everybody. All until the end of the transaction.
--
-- Who may read history may read it by its partitions, as the pipeline does, and nobody else. They belong to the owner of
-- the queue, who drops them in time, whoever calls this.
CREATE FUNCTION history_add(day date, begun boolean) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
DECLARE
    v_name CONSTANT text := to_char(day, '"history_"YYYY_MM_DD');
    v_path CONSTANT text := format('%I.%I', current_schema(), v_name);
    v_from CONSTANT text := to_char(day, 'YYYY-MM-DD"T00:00:00Z"');
    v_to CONSTANT text := to_char(day + 1, 'YYYY-MM-DD"T00:00:00Z"');
    v_grant text;
BEGIN
    IF to_regclass(v_path) IS NOT NULL THEN
        RETURN;
    END IF;
    IF begun THEN
        LOCK TABLE ONLY history IN SHARE ROW EXCLUSIVE MODE;
    ELSE
        LOCK TABLE ONLY history IN SHARE UPDATE EXCLUSIVE MODE;
    END IF;
    LOCK TABLE history_default IN ACCESS EXCLUSIVE MODE;
    IF to_regclass(v_path) IS NOT NULL THEN
        RETURN;  -- somebody else has made it meanwhile
    END IF;
    IF (SELECT count(*) > 10000 FROM (
        SELECT FROM history_default h
        WHERE h.finished_at >= v_from::timestamptz AND h.finished_at < v_to::timestamptz
        LIMIT 10001) AS few)
    THEN
        RETURN;
    END IF;
    EXECUTE format('CREATE TABLE %s (LIKE history INCLUDING ALL)'
        ' WITH (vacuum_truncate = off, toast.vacuum_truncate = off)', v_path);
    PERFORM table_close(v_path::regclass);
    FOR v_grant IN
        SELECT format('GRANT %s ON TABLE %s TO %s', a.privilege_type, v_path,
            CASE WHEN a.grantee = 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END)
        FROM pg_class c CROSS JOIN aclexplode(c.relacl) a
        WHERE c.oid = 'history'::regclass AND a.grantee <> c.relowner
    LOOP
        EXECUTE v_grant;
    END LOOP;
    EXECUTE format('WITH moved AS (DELETE FROM history_default WHERE finished_at >= %L AND finished_at < %L RETURNING *)'
        ' INSERT INTO %s SELECT * FROM moved', v_from, v_to, v_path);
    EXECUTE format('ALTER TABLE history ATTACH PARTITION %s FOR VALUES FROM (%L) TO (%L)', v_path, v_from, v_to);
END
$$;

REVOKE EXECUTE ON FUNCTION history_add FROM PUBLIC;

-- How many rows the history of a day has, in UTC, and a checksum of them that doesn't depend on their order.
--
-- Called by history_release, and by whoever compares an archive with the history. The checksum is the sum over the rows
-- of the first 60 bits of md5 of their columns: numbers, times (microseconds since 2000-01-01; none is the least number)
-- and the lengths of the texts (none is -1) in 8 bytes each, big-endian, then the texts in UTF-8. In Python the same is
-- fairqueue.spark.engine.digests.
-- Locks: none.
CREATE FUNCTION history_digest(day date) RETURNS TABLE (rows bigint, checksum numeric)
LANGUAGE sql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
    SELECT count(*), coalesce(sum(('x' || left(md5(
            int8send(h.message_id) || int8send(h.attempt) || float8send(h.cost) || int8send(h.dequeue_at)
            || timestamptz_send(h.created_at) || timestamptz_send(coalesce(h.first_leased_at, '-infinity'))
            || timestamptz_send(coalesce(h.leased_at, '-infinity')) || timestamptz_send(h.finished_at)
            || xid8send(h.xid)
            || int8send(octet_length(t.queue)) || int8send(octet_length(t.channel))
            || int8send(coalesce(octet_length(t.key), -1)) || int8send(octet_length(t.outcome))
            || int8send(coalesce(octet_length(t.error), -1)) || int8send(coalesce(octet_length(t.worker), -1))
            || t.queue || t.channel || coalesce(t.key, '') || t.outcome || coalesce(t.error, '')
            || coalesce(t.worker, '')), 15))::bit(60)::bigint), 0)
    FROM history h
    CROSS JOIN LATERAL (SELECT convert_to(h.queue, 'UTF8') AS queue, convert_to(h.channel, 'UTF8') AS channel,
        convert_to(h.key, 'UTF8') AS key, convert_to(h.outcome, 'UTF8') AS outcome,
        convert_to(h.error, 'UTF8') AS error, convert_to(h.worker, 'UTF8') AS worker) t
    WHERE h.finished_at >= day::timestamp AT TIME ZONE 'UTC' AND h.finished_at < (day + 1)::timestamp AT TIME ZONE 'UTC'
$$;

REVOKE EXECUTE ON FUNCTION history_digest FROM PUBLIC;

-- Drops the partitions of history for days before oldest, in UTC.
--
-- Called by history_maintain. What a feed hasn't read stays, and with it its whole day; one that can't be dropped, as an
-- object of somebody's depends on it, is a warning. At most 50 in one call, as a transaction can hold only so many locks,
-- and of what lies in history_default at most 10,000 rows. Returns whether that was all.
-- Locks: history, against everybody, where there is a partition to drop, until the end of the transaction.
CREATE FUNCTION history_drop(oldest date) RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_name text;
    v_look text;
    v_unread boolean;
    v_tries integer := 0;
    v_done boolean := true;
    v_rows integer;
BEGIN
    FOR v_name IN
        SELECT c.relname
        FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'history'::regclass AND c.relname ~ '^history_\d{4}_\d\d_\d\d$'
            AND c.relname < to_char(oldest, '"history_"YYYY_MM_DD') COLLATE "C"
        ORDER BY c.relname
    LOOP
        v_look := format('SELECT EXISTS (
            SELECT FROM feed f
            CROSS JOIN LATERAL (SELECT FROM %I h WHERE (h.xid, h.message_id) >= (f.xid, f.message_id) LIMIT 1) u)',
            v_name);
        EXECUTE v_look INTO v_unread;
        CONTINUE WHEN v_unread;
        v_tries := v_tries + 1;
        IF v_tries > 50 THEN
            RETURN false;
        END IF;
        BEGIN
            -- Once nobody is writing outcomes, or detaching what they keep: what they did meanwhile is seen now.
            LOCK TABLE ONLY history IN ACCESS EXCLUSIVE MODE;
            CONTINUE WHEN NOT EXISTS (
                SELECT FROM pg_inherits i
                WHERE i.inhparent = 'history'::regclass
                    AND i.inhrelid = to_regclass(format('%I.%I', current_schema(), v_name)));
            EXECUTE v_look INTO v_unread;
            CONTINUE WHEN v_unread;
            EXECUTE format('INSERT INTO dropped (xid, message_id) SELECT h.xid, h.message_id FROM %I h'
                ' ORDER BY h.xid DESC, h.message_id DESC LIMIT 1', v_name);
            EXECUTE format('DROP TABLE %I.%I', current_schema(), v_name);
        EXCEPTION
            WHEN lock_not_available OR deadlock_detected THEN
                RETURN false;  -- not to wait for the next one as well
            WHEN OTHERS THEN
                RAISE WARNING 'history_maintain: %', SQLERRM;
                v_done := false;
        END;
    END LOOP;
    WITH gone AS (
        DELETE FROM history_default h
        WHERE h.ctid = ANY (ARRAY(
            SELECT o.ctid FROM history_default o
            WHERE o.finished_at < oldest::timestamp AT TIME ZONE 'UTC'
                AND NOT EXISTS (SELECT FROM feed f WHERE (o.xid, o.message_id) >= (f.xid, f.message_id))
            LIMIT 10000))
        RETURNING h.xid, h.message_id
    ), noted AS (
        INSERT INTO dropped (xid, message_id)
        SELECT g.xid, g.message_id FROM gone g ORDER BY g.xid DESC, g.message_id DESC LIMIT 1
    )
    SELECT count(*) INTO v_rows FROM gone;
    RETURN v_done AND v_rows < 10000;
END
$$;

REVOKE EXECUTE ON FUNCTION history_drop FROM PUBLIC;

-- Keeps the partitions of history, one a day in UTC: makes those of today and the next 7 days, drops old ones.
--
-- Called by scheduler_serve about once a day, by users as often as they like, and by the installation. Old is what
-- lies before the longest history_days of all queues. Those that have no row, or 0, count as 30: a queue is known by
-- its row, or by having been dequeued. Nothing is dropped in REPEATABLE READ and SERIALIZABLE, whose snapshot may be
-- older than a feed that hasn't read it.
-- Returns true when all is done; false when it is to be tried again, because somebody holds a lock: a report, a dump,
-- an open completion. It waits for none longer than 100 ms. Whatever else goes wrong is a warning and false, so that
-- no dequeue fails of it: without a partition, outcomes go to history_default.
-- Locks: those of history_add and history_drop, so none when there is nothing to do. Commit at once.
CREATE FUNCTION history_maintain() RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET lock_timeout = '100ms'
-- A dequeue's settings would have it read all of history_default by an index, should much be there.
SET enable_seqscan = on
SET enable_bitmapscan = on
AS $$
DECLARE
    v_today CONSTANT date := (clock() AT TIME ZONE 'UTC')::date;
    v_oldest CONSTANT date := v_today - (
        SELECT coalesce(max(coalesce(nullif(q.history_days, 0), 30)), 30)
        FROM (SELECT t.queue FROM rotation t UNION SELECT q.name FROM queue q) AS known (name)
        LEFT JOIN queue q ON q.name = known.name);
    v_done boolean := true;
BEGIN
    -- Each part by itself, so that one which has to wait doesn't undo the other.
    FOR part IN 1..2 LOOP
        BEGIN
            IF part = 1 THEN
                -- Today first: a completion has locked history, and needs history_default if today has no partition.
                FOR n IN 0..7 LOOP
                    PERFORM history_add(v_today + n, n = 0);
                END LOOP;
            ELSIF current_setting('transaction_isolation') IN ('read committed', 'read uncommitted') THEN
                v_done := history_drop(v_oldest) AND v_done;
            ELSE
                v_done := false;
            END IF;
        EXCEPTION
            WHEN lock_not_available OR deadlock_detected THEN
                v_done := false;
            WHEN OTHERS THEN
                RAISE WARNING 'history_maintain: %', SQLERRM;
                v_done := false;
        END;
    END LOOP;
    RETURN v_done;
END
$$;

REVOKE EXECUTE ON FUNCTION history_maintain FROM PUBLIC;

-- An installation begins with the days that it needs.
SELECT history_maintain();

-- Drops the history of a day that is over, in UTC, if it is just what the caller has elsewhere: so many rows with this
-- checksum, as history_digest has it. Otherwise it raises, and all stays.
--
-- Called by archives. What another feed hasn't read stays. It waits for no lock longer than 100 ms. In READ COMMITTED
-- only: the rows are counted after they are locked.
-- Locks: the day's partition, against writers, while the rows are counted; then history, against everybody. A day
-- without a partition is deleted from history_default, which is locked against writers. A table that was detached from
-- history stays, as somebody keeps it.
CREATE FUNCTION history_release(day date, rows bigint, checksum numeric) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET lock_timeout = '100ms'
AS $$
DECLARE
    v_from CONSTANT timestamptz := day::timestamp AT TIME ZONE 'UTC';
    v_until CONSTANT timestamptz := (day + 1)::timestamp AT TIME ZONE 'UTC';
    v_name text := to_char(day, '"history_"YYYY_MM_DD');
    v_feed text;
    v_found record;
BEGIN
    IF day IS NULL OR rows IS NULL OR checksum IS NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = 'day, rows and checksum must not be null';
    END IF;
    IF v_until > clock() THEN
        RAISE invalid_parameter_value USING MESSAGE = format('day must be over: %s is not', day);
    END IF;
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE invalid_transaction_state USING MESSAGE = 'history_release needs READ COMMITTED';
    END IF;
    -- As long as it is held, no partition can be detached.
    LOCK TABLE ONLY history IN ACCESS SHARE MODE;
    IF NOT EXISTS (
        SELECT FROM pg_inherits i
        WHERE i.inhparent = 'history'::regclass
            AND i.inhrelid = to_regclass(format('%I.%I', current_schema(), v_name)))
    THEN
        v_name := 'history_default';
    END IF;
    -- With an open completion of that day this waits, as long as it may.
    EXECUTE format('LOCK TABLE %I.%I IN SHARE MODE', current_schema(), v_name);
    SELECT f.name INTO v_feed
    FROM feed f
    CROSS JOIN LATERAL (
        SELECT FROM history h
        WHERE (h.xid, h.message_id) >= (f.xid, f.message_id) AND h.finished_at >= v_from AND h.finished_at < v_until
        LIMIT 1) u
    LIMIT 1;
    IF FOUND THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = format('the feed %s has not read all of %s', v_feed, day);
    END IF;
    SELECT d.rows, d.checksum INTO v_found FROM history_digest(day) d;
    IF (v_found.rows, v_found.checksum) IS DISTINCT FROM (rows, checksum) THEN
        RAISE data_corrupted USING MESSAGE = format(
            '%s has %s rows with checksum %s, not %s with %s', day, v_found.rows, v_found.checksum, rows, checksum);
    END IF;
    INSERT INTO dropped (xid, message_id)
    SELECT h.xid, h.message_id FROM history h
    WHERE h.finished_at >= v_from AND h.finished_at < v_until
    ORDER BY h.xid DESC, h.message_id DESC
    LIMIT 1;
    IF v_name = 'history_default' THEN
        DELETE FROM history_default h WHERE h.finished_at >= v_from AND h.finished_at < v_until;
    ELSE
        EXECUTE format('DROP TABLE %I.%I', current_schema(), v_name);
    END IF;
END
$$;

REVOKE EXECUTE ON FUNCTION history_release FROM PUBLIC;

-- Whether a message is leased, from its leased_until.
--
-- Called by functions that find messages by id, most of them to end or extend a lease; takes no lock. Not IS NOT NULL:
-- the planner would take that for an invitation to read the whole index of leases instead.
CREATE FUNCTION is_leased(leased_until timestamptz) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN coalesce(leased_until, '-infinity') > '-infinity';

-- When a lane may next be served, as lane.due says it: 0, a time, 2^63-1 for "when a signal says so", or null for a
-- lane without a message (head_at null).
--
-- Called by scheduler_serve_heads, scheduler_serve_shares, scheduler_activate and queue_check; takes no lock.
--
-- The rate is the generic cell rate algorithm (ITU-T I.371) with released_at for the theoretical arrival time less
-- one interval, so that a changed interval applies at once. A clock that was set back must not close a lane for
-- long: released_at counts for no more than it could be by the clock as it is.
CREATE FUNCTION lane_due(
    now_ms bigint, head_at bigint, paused_until bigint, max_concurrency integer, running integer,
    release_interval bigint, burst integer, released_at bigint
) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE
    WHEN head_at IS NULL THEN NULL
    WHEN running >= max_concurrency THEN 9223372036854775807
    WHEN greatest(head_at, paused_until) <= now_ms AND (release_interval = 0
        OR released_at + (2 - burst) * release_interval <= now_ms) THEN 0
    ELSE greatest(head_at, paused_until,
        least(released_at, now_ms + (burst - 1) * release_interval) + (2 - burst) * release_interval)
    END;

-- The released_at of a lane after so many of its messages were leased at this moment.
--
-- Called by scheduler_serve_heads and scheduler_serve_shares; takes no lock. See lane_due for the rate. Without one
-- nothing is kept, so that a lane need not be written for it: a rate counts from when it is set.
CREATE FUNCTION lane_released(now_ms bigint, messages integer, release_interval bigint, released_at bigint)
RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN messages > 0 AND release_interval > 0
    THEN greatest(released_at + release_interval, now_ms) + (messages - 1) * release_interval
    ELSE released_at END;

-- How many messages of a lane may be leased at this moment.
--
-- Called by scheduler_serve_heads and scheduler_serve_shares; takes no lock. See lane_due for the rate.
CREATE FUNCTION lane_room(
    now_ms bigint, max_concurrency integer, running integer, release_interval bigint, burst integer, released_at bigint
) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN greatest(0, least(10000, max_concurrency - running, CASE WHEN release_interval > 0 THEN
    (now_ms + burst * release_interval
        - greatest(least(released_at, now_ms + (burst - 1) * release_interval) + release_interval, now_ms))
    / release_interval END));

-- By how much serving one message moves the start tag of its lane: cost / weight in units of virtual time.
--
-- Called by scheduler_serve_heads, scheduler_serve_shares, scheduler_plan, scheduler_plan_heads and scheduler_tidy;
-- takes no lock. A whole number, so that adding up a batch gives exactly what adding one by one gives. 720720 is
-- divisible by 1 to 16: with such weights no share is ever rounded.
CREATE FUNCTION lane_step(cost double precision, weight double precision) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN greatest(1, round(cost * 720720 / weight))::bigint;

-- The leases that a caller names, (ids[i], attempts[i]), in the order of ids; n is the place in the lists.
--
-- Called by message_cancel, message_fail, message_defer and message_heartbeat, into whose statements it is expanded;
-- takes no lock. All of them, and message_complete, touch messages in the order of ids, so that two can't deadlock.
--
-- They look each one up by m.id BETWEEN l.id AND l.id. With =, a plan that was made when the table was nearly empty could
-- read all messages by the primary key and look for each of them here.
CREATE FUNCTION lease_list(ids bigint[], attempts integer[])
RETURNS TABLE (id bigint, attempt integer, n bigint)
LANGUAGE sql IMMUTABLE ROWS 100
AS $$
    SELECT l.id, l.attempt, l.n
    FROM unnest(ids, attempts) WITH ORDINALITY AS l (id, attempt, n)
    WHERE CASE WHEN cardinality(ids) = cardinality(attempts) THEN true ELSE lease_refuse(ids, attempts) END
    ORDER BY l.id;
$$;

-- What happened to each message of a call, in the order given: done_result for those in done, else why not.
--
-- Called by the functions that end or extend leases, at their end; takes no lock. 'dead': done, and a dead letter now.
-- 'stale': the message is there, but the lease is over. 'not_found': there is no such message any more. Attempts are
-- null where they don't matter.
CREATE FUNCTION lease_results(
    ids bigint[], attempts integer[], done bigint[], done_attempts integer[], done_result text,
    dead bigint[] DEFAULT NULL
) RETURNS TABLE (id bigint, result text)
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
-- Some callers switch hash joins off, and their settings hold in here too.
SET enable_hashjoin = on
SET enable_nestloop = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    -- A scalar subquery, as EXISTS might be answered by hashing the whole table.
    SELECT l.id, CASE WHEN d.id IS NOT NULL AND x.id IS NOT NULL THEN 'dead' WHEN d.id IS NOT NULL THEN done_result
        ELSE coalesce((SELECT 'stale' FROM message m WHERE m.id = l.id), 'not_found') END
    FROM unnest(ids, attempts) WITH ORDINALITY AS l (id, attempt, n)
    LEFT JOIN unnest(done, done_attempts) AS d (id, attempt)
        ON d.id = l.id AND coalesce(d.attempt, 0) = coalesce(l.attempt, 0)
    LEFT JOIN unnest(dead) AS x (id) ON x.id = l.id
    ORDER BY l.n;
END
$$;

-- Notes that the caller's transaction loads something by this name. Returns null, or, where it has been loaded before, how
-- many rows that were: then there is nothing to do.
--
-- Called by a task that copies its part straight into message, before it does so; load_count follows in the same
-- transaction.
-- Locks: a row of load until the end of the transaction, so two tasks with the same part come one after the other.
CREATE FUNCTION load_claim(name text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
BEGIN
    INSERT INTO load (name, epoch) VALUES ($1, 0) ON CONFLICT ON CONSTRAINT load_pkey DO NOTHING;
    IF FOUND THEN
        RETURN NULL;
    END IF;
    RETURN (SELECT l.rows FROM load l WHERE l.name = $1);
END
$$;

REVOKE EXECUTE ON FUNCTION load_claim FROM PUBLIC;

-- Notes how many rows were loaded by a name that the caller's transaction has claimed.
--
-- Called by the task that called load_claim. Changes nothing that an earlier transaction has noted.
-- Locks: the row of load that load_claim has locked.
CREATE FUNCTION load_count(name text, rows bigint) RETURNS void
LANGUAGE sql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
    UPDATE load l SET rows = $2, entered = $2
    WHERE l.name = $1 AND l.xid = pg_current_xact_id()
$$;

REVOKE EXECUTE ON FUNCTION load_count FROM PUBLIC;

-- Makes messages of what staging tables hold: all of it, or nothing. Drops the tables.
--
-- Called by loaders (in Python by fairqueue.spark.engine), once all parts are staged, or by a task for its own part. The
-- i-th table must have the i-th number of rows: one that a crash has emptied is an error. A named load that has been
-- entered before, with this epoch or a later one, isn't entered again; then the result is that of the first time.
-- on_conflict says what becomes of a row whose key a live message of its channel has: 'ignore' leaves it out, and among
-- rows with the same key takes the first; 'raise' fails.
--
-- Inside a channel, messages have the order of their tables, and of the rows in each, where dequeue_at is the same.
--
-- Keys are entered in their order, which keeps two loads with the same ones from waiting for each other in a circle. At
-- first as if none were live, since ON CONFLICT costs each row a quarter more; the first one that is says otherwise, and
-- the sooner, the more there are.
-- Locks: a row of load until the end of the transaction, so the same load waits for itself; keys as in message_create,
-- in the same order as message_create_many; the staging tables, as stage_drop has it.
CREATE FUNCTION load_enter(
    run text, tables text[], counts bigint[], name text DEFAULT NULL, epoch bigint DEFAULT 0,
    on_conflict text DEFAULT 'ignore'
) RETURNS TABLE (rows bigint, entered bigint, repeated boolean)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET work_mem = '128MB'
SET jit = off
-- A scan that begins where another one is would give the rows another order.
SET synchronize_seqscans = off
AS $$
#variable_conflict use_column
DECLARE
    v_ids CONSTANT oid := pg_get_serial_sequence('message', 'id')::regclass;
    v_table text;
    v_found bigint;
    v_keys bigint;
    v_keyed boolean := false;
    v_queue text;
    v_first text;
    v_last text;
    v_several boolean := false;
    v_staged text;
    v_insert text;
    v_constraint text;
    v_detail text;
BEGIN
    IF on_conflict IS NULL OR on_conflict NOT IN ('ignore', 'raise') THEN
        RAISE invalid_parameter_value USING
            MESSAGE = format('on_conflict must be ''ignore'' or ''raise'', not %L', on_conflict);
    END IF;
    rows := 0;
    entered := 0;
    repeated := false;
    IF name IS NOT NULL THEN
        INSERT INTO load AS l (name, epoch) VALUES ($4, $5)
        ON CONFLICT ON CONSTRAINT load_pkey DO UPDATE SET epoch = excluded.epoch
        WHERE l.epoch < excluded.epoch;
        IF NOT FOUND THEN
            SELECT l.rows, l.entered, true INTO rows, entered, repeated FROM load l WHERE l.name = $4;
            PERFORM stage_drop(run);
            RETURN NEXT;
            RETURN;
        END IF;
    END IF;

    FOR i IN 1..cardinality(tables) LOOP
        v_table := (SELECT s.name FROM stage s WHERE s.name = tables[i] AND s.run = $1 AND s.run <> '');
        IF v_table IS NULL THEN
            RAISE undefined_table USING
                MESSAGE = format('there is no staging table %L of run %s: it has been dropped', tables[i], run),
                HINT = 'Load again. Was stage_clean called with an age that a running load reaches?';
        END IF;
        EXECUTE format('SELECT count(*), count(key), min(queue), max(queue) FROM %I.%I',
            current_schema(), v_table)
        INTO v_found, v_keys, v_first, v_last;
        IF v_found IS DISTINCT FROM counts[i] THEN
            RAISE data_corrupted USING
                MESSAGE = format('staging table %s has %s rows, not %s: the server has crashed meanwhile', v_table,
                    v_found, coalesce(counts[i]::text, 'null')),
                HINT = 'Load again. Nothing was entered.';
        END IF;
        rows := rows + v_found;
        v_keyed := v_keyed OR v_keys > 0;
        v_queue := coalesce(v_queue, v_first);
        v_several := v_several OR v_queue <> v_first OR v_first <> v_last;
    END LOOP;

    IF rows > 0 THEN
        SELECT string_agg(format('SELECT nextval(%s) AS id, t.* FROM %I.%I t', v_ids, current_schema(), t),
            ' UNION ALL ' ORDER BY n)
        INTO v_staged
        FROM unnest(tables) WITH ORDINALITY AS u (t, n);
        v_insert := format($sql$
            INSERT INTO message (id, queue, channel, key, payload, body, dequeue_at, cost, max_attempts, backoff,
                created_at)
            OVERRIDING SYSTEM VALUE
            SELECT s.id, s.queue, s.channel, s.key, s.payload, s.body,
                CASE WHEN s.delay IS NULL THEN coalesce(s.dequeue_at, unix_ms($1))
                    ELSE unix_ms($1 + make_interval(secs => s.delay)) END,
                coalesce(s.cost, 1), s.max_attempts, s.backoff, $1
            FROM (%s) s$sql$, v_staged);
        IF v_keyed THEN
            v_insert := v_insert || format(' ORDER BY %s s.channel COLLATE "C", s.key COLLATE "C", s.id',
                CASE WHEN v_several THEN 's.queue COLLATE "C",' END);
        END IF;
        BEGIN
            EXECUTE v_insert USING clock();
            GET DIAGNOSTICS entered = ROW_COUNT;
        EXCEPTION
            WHEN unique_violation THEN
                GET STACKED DIAGNOSTICS v_constraint = CONSTRAINT_NAME, v_detail = PG_EXCEPTION_DETAIL;
                IF v_constraint <> 'message_key' THEN
                    RAISE;
                END IF;
                IF on_conflict = 'raise' THEN
                    RAISE unique_violation USING
                        MESSAGE = 'a key is live in its channel, or twice in what is loaded; nothing was entered',
                        DETAIL = v_detail,
                        HINT = 'on_conflict ''ignore'' leaves such rows out.',
                        SCHEMA = current_schema(), TABLE = 'message', CONSTRAINT = v_constraint;
                END IF;
                EXECUTE v_insert || ' ON CONFLICT (queue, channel, key) WHERE key IS NOT NULL DO NOTHING' USING clock();
                GET DIAGNOSTICS entered = ROW_COUNT;
        END;
    END IF;
    IF name IS NOT NULL THEN
        UPDATE load l SET rows = load_enter.rows, entered = load_enter.entered, entered_at = clock() WHERE l.name = $4;
    END IF;
    PERFORM stage_drop(run);
    RETURN NEXT;
END
$$;

REVOKE EXECUTE ON FUNCTION load_enter FROM PUBLIC;

-- Trigger function of message_enqueued: what an INSERT into message entails, however many rows it has.
--
-- The statement fails if one of them isn't valid. One signal for each channel, for the scheduler; one notification for
-- each queue that workers wait for; and a channel with a max_size takes in no more: with overflow 'reject' the statement
-- fails (see channel_surplus), with 'drop' those of its messages that come last are taken out again, which their history
-- says. A message that has been leased before is one put back from the dead: it is never refused, as those that fail or
-- are deferred aren't.
--
-- Locks: none that anybody waits for, but for notifications (queue_notify); with overflow 'drop' also history, as a
-- completion does. It appends rows. Whether a channel is
-- bounded is looked up in two indexes that hold only what is, so that enqueueing elsewhere reads nothing that others
-- write, and adds no dependency that could fail a serializable transaction. They are on arrays so that no other index
-- could be taken for them.
CREATE FUNCTION message_arrive() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET enable_seqscan = off
AS $$
DECLARE
    v_queue text;
    v_last_queue text;
    v_queues text[];
    v_channel text;
    v_last_channel text;
    v_dequeue_at bigint;
    v_id bigint;
    v_urgent boolean;
    v_leased boolean;
    v_valid boolean;
    v_bounded boolean;
    v_idle boolean;
    v_full record;
BEGIN
    SELECT min(n.queue), max(n.queue), min(n.channel), max(n.channel), min(n.dequeue_at), min(n.id),
        bool_or(n.attempt > 0), bool_or(n.leased_until IS NOT NULL),
        bool_and(message_valid(n.queue, n.channel, n.key, n.payload, n.body, n.cost, n.max_attempts, n.backoff,
            n.created_at, n.first_leased_at))
    INTO v_queue, v_last_queue, v_channel, v_last_channel, v_dequeue_at, v_id, v_urgent, v_leased, v_valid
    FROM new_messages n;
    IF NOT v_valid THEN
        PERFORM message_refuse(n.queue, n.channel, n.key, n.payload, n.body, n.cost, n.max_attempts, n.backoff,
            n.created_at, n.first_leased_at)
        FROM new_messages n
        WHERE NOT message_valid(n.queue, n.channel, n.key, n.payload, n.body, n.cost, n.max_attempts, n.backoff,
            n.created_at, n.first_leased_at)
        LIMIT 1;
    END IF;

    IF v_queue = v_last_queue AND v_channel = v_last_channel THEN
        -- The same as below for a single channel, in half the time.
        INSERT INTO signal (queue, channel, dequeue_at, message_id, urgent)
        VALUES (v_queue, v_channel, v_dequeue_at, v_id, v_urgent)
        RETURNING coalesce(
            (SELECT true FROM channel c
             WHERE ARRAY[c.queue, c.name] = ARRAY[v_queue, v_channel] AND c.max_size IS NOT NULL),
            (SELECT true FROM queue q WHERE ARRAY[q.name] = ARRAY[v_queue] AND q.channel_max_size IS NOT NULL),
            false) INTO v_bounded;
        v_idle := queue_notify(v_queue);  -- assigned, as PERFORM would run a query for it
    ELSE
        WITH entered AS MATERIALIZED (
            SELECT n.queue, n.channel, min(n.dequeue_at) AS dequeue_at, min(n.id) AS id,
                bool_or(n.attempt > 0) AS urgent
            FROM new_messages n
            GROUP BY n.queue, n.channel
        ), told AS (
            INSERT INTO signal (queue, channel, dequeue_at, message_id, urgent)
            SELECT e.queue, e.channel, e.dequeue_at, e.id, e.urgent FROM entered e
        )
        -- Scalar subqueries, as EXISTS might be answered by hashing all that is bounded.
        SELECT array_agg(DISTINCT e.queue), bool_or(coalesce(
            (SELECT true FROM channel c
             WHERE ARRAY[c.queue, c.name] = ARRAY[e.queue, e.channel] AND c.max_size IS NOT NULL),
            (SELECT true FROM queue q WHERE ARRAY[q.name] = ARRAY[e.queue] AND q.channel_max_size IS NOT NULL),
            false)) INTO v_queues, v_bounded
        FROM entered e;
        PERFORM queue_notify(q.name) FROM unnest(v_queues) AS q (name);
    END IF;
    IF v_leased THEN
        -- Copied from elsewhere: when it ends is news to the scheduler, and nobody has counted it here.
        INSERT INTO signal (queue, message_id, urgent)
        SELECT n.queue, n.id, true FROM new_messages n WHERE n.leased_until IS NOT NULL;
        UPDATE message m SET counted = NULL
        WHERE m.id = ANY (ARRAY(
            SELECT n.id FROM new_messages n WHERE n.leased_until IS NOT NULL AND n.counted IS NOT NULL));
    END IF;
    IF v_bounded THEN
        FOR v_full IN
            SELECT e.ids, channel_surplus(e.queue, e.channel, e.entered) AS surplus
            FROM (
                SELECT n.queue, n.channel, count(*) AS entered,
                    array_agg(n.id ORDER BY n.dequeue_at DESC, n.id DESC) AS ids
                FROM new_messages n
                WHERE n.attempt = 0
                GROUP BY n.queue, n.channel) e
        LOOP
            IF v_full.surplus > 0 THEN
                PERFORM message_finish(v_full.ids[:v_full.surplus], 'dropped', 'the channel was full');
            END IF;
        END LOOP;
    END IF;
    RETURN NULL;
END
$$;

REVOKE EXECUTE ON FUNCTION message_arrive FROM PUBLIC;

-- Takes messages out of the queue for good, whether ready or leased.
--
-- Called by the application, with ids alone. Returns for each id, in the order given, 'cancelled' or 'not_found'. The
-- worker of a leased message learns it at its next heartbeat, at the latest when it completes: it is 'not_found'.
-- Called by workers with attempts too, for leases of their own that nobody needs any more; then 'stale' is another
-- result, as that of message_complete. The error is kept in history.
-- Locks: the messages it deletes, in the order of ids, until the end of the transaction.
CREATE FUNCTION message_cancel(
    ids bigint[], attempts integer[] DEFAULT NULL, error text DEFAULT NULL
) RETURNS TABLE (id bigint, result text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_error CONSTANT text := $3;
    v_done bigint[];
    v_attempts integer[];
BEGIN
    IF ids IS NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = 'ids must be a list of message ids, not null';
    END IF;
    IF attempts IS NULL THEN
        v_done := message_finish(ids, 'cancelled', v_error);
    ELSE
        WITH lease AS MATERIALIZED (
            SELECT DISTINCT l.id, l.attempt FROM lease_list(ids, attempts) l ORDER BY l.id
        ), held AS MATERIALIZED (
            SELECT m.id, m.attempt
            FROM lease l JOIN message m ON m.id BETWEEN l.id AND l.id
            WHERE m.attempt BETWEEN l.attempt AND l.attempt AND is_leased(m.leased_until)
            FOR UPDATE OF m
        )
        SELECT array_agg(h.id), array_agg(h.attempt) INTO v_done, v_attempts FROM held h;
        PERFORM message_finish(v_done, 'cancelled', v_error);
    END IF;

    RETURN QUERY SELECT * FROM lease_results(ids, attempts, v_done, v_attempts, 'cancelled');
END
$$;

REVOKE EXECUTE ON FUNCTION message_cancel FROM PUBLIC;

-- Ends leases whose work is done: the messages are gone when the caller's transaction commits.
--
-- Called by workers, best in the transaction of the work itself. Returns for each lease, in the order given,
-- 'completed', 'stale' (the lease ran out and the message is, or was, somebody else's) or 'not_found'. Writes history,
-- unless the queue's history_days is 0.
-- Locks: the messages it deletes, until the end of the transaction. Only another act on the same lease waits for them.
CREATE FUNCTION message_complete(ids bigint[], attempts integer[]) RETURNS TABLE (id bigint, result text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_done bigint[];
    v_attempts integer[];
BEGIN
    WITH lease AS MATERIALIZED (
        -- As lease_list, but that the lists are compared below: where a call for each message counts, so does that.
        SELECT l.id, l.attempt FROM unnest(ids, attempts) AS l (id, attempt) ORDER BY l.id
    ), done AS (
        DELETE FROM message m USING lease l
        -- No equality in it: with one there could be other joins than a loop over the leases.
        WHERE m.id BETWEEN l.id AND l.id AND m.attempt BETWEEN l.attempt AND l.attempt AND is_leased(m.leased_until)
        RETURNING m.id, m.queue, m.channel, m.key, m.attempt, m.cost, m.worker, m.dequeue_at, m.created_at,
            m.first_leased_at, m.leased_at
    ), written AS (
        INSERT INTO history (message_id, queue, channel, key, outcome, attempt, cost, worker, dequeue_at,
            created_at, first_leased_at, leased_at)
        SELECT d.id, d.queue, d.channel, d.key, 'completed', d.attempt, d.cost, d.worker, d.dequeue_at,
            d.created_at, d.first_leased_at, d.leased_at
        FROM done d
        -- Asked once, not for each message.
        WHERE d.queue <> ALL (ARRAY(SELECT q.name FROM queue q WHERE q.history_days = 0))
    )
    SELECT array_agg(d.id), array_agg(d.attempt) INTO v_done, v_attempts FROM done d;

    IF cardinality(ids) = cardinality(attempts) THEN
        IF cardinality(v_done) = cardinality(ids) THEN
            -- No statement, where a call for each message counts.
            result := 'completed';
            FOREACH id IN ARRAY ids LOOP
                RETURN NEXT;
            END LOOP;
            RETURN;
        END IF;
    ELSE
        PERFORM lease_refuse(ids, attempts);
    END IF;
    RETURN QUERY SELECT * FROM lease_results(ids, attempts, v_done, v_attempts, 'completed');
END
$$;

REVOKE EXECUTE ON FUNCTION message_complete FROM PUBLIC;

-- Enqueues one message and returns its id. For other languages than Python; INSERT INTO message does the same.
--
-- Called by producers, within their own transaction. At most one of delay_seconds (from now, by the database clock),
-- dequeue_at (Unix time in milliseconds) and priority (0, as it comes, or more; higher goes first inside the channel)
-- may be given: a message can't be urgent and for later.
-- No two live messages of a channel have the same key. on_conflict says what becomes of a second one:
--   raise    unique_violation
--   ignore   the one that is there, ready or leased, stays as it is; its id is returned
--   replace  a ready one takes on what is given here; a leased one loses its key and goes its way (see message_enter)
-- Locks: without a key, none that anybody waits for (see the trigger message_enqueued). With a key it waits for
-- transactions that have enqueued the same key, or changed or completed its message, and are still open.
CREATE FUNCTION message_create(
    channel text, payload jsonb DEFAULT NULL, queue text DEFAULT 'default',
    delay_seconds double precision DEFAULT NULL, dequeue_at bigint DEFAULT NULL, priority bigint DEFAULT NULL,
    cost double precision DEFAULT 1, body bytea DEFAULT NULL, key text DEFAULT NULL, on_conflict text DEFAULT 'raise',
    max_attempts integer DEFAULT NULL, backoff double precision DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
#variable_conflict use_variable
DECLARE
    v_id bigint;
BEGIN
    IF num_nonnulls(delay_seconds, dequeue_at, nullif(priority, 0)) > 1 THEN
        RAISE invalid_parameter_value USING
            MESSAGE = 'only one of delay_seconds, dequeue_at and priority may be given',
            HINT = 'A priority is a dequeue_at in the past: a message can''t be urgent and for later.';
    ELSIF priority < 0 THEN
        RAISE invalid_parameter_value USING MESSAGE = format('priority must be 0 or more, not %s', priority);
    ELSIF on_conflict <> 'raise' OR on_conflict IS NULL THEN
        PERFORM check_on_conflict(on_conflict);
        IF key IS NULL THEN
            RAISE invalid_parameter_value USING
                MESSAGE = format('on_conflict is %L, but there is no key', on_conflict),
                HINT = 'Only messages with a key can be in conflict.';
        END IF;
    END IF;
    IF delay_seconds IS NOT NULL THEN
        PERFORM check_seconds('delay_seconds', delay_seconds, 0);
        dequeue_at := unix_ms(clock() + make_interval(secs => delay_seconds));
    ELSIF priority IS NOT NULL AND dequeue_at IS NULL THEN
        -- One of 0 is a time, too: what is replaced gives up the place that another one gave it.
        dequeue_at := CASE WHEN priority > 0 THEN -priority ELSE unix_ms(clock()) END;
    END IF;
    IF NOT message_valid(queue, channel, key, payload, body, cost, max_attempts, backoff) THEN
        -- The trigger would say so too, but for names that are too long for an index: there the index is first.
        PERFORM message_refuse(queue, channel, key, payload, body, cost, max_attempts, backoff);
    END IF;
    IF on_conflict = 'raise' THEN
        INSERT INTO message AS m (queue, channel, key, payload, body, dequeue_at, cost, max_attempts, backoff)
        VALUES (queue, channel, key, payload, body, coalesce(dequeue_at, unix_ms(clock())), cost, max_attempts,
            backoff)
        RETURNING m.id INTO v_id;
        RETURN v_id;
    END IF;
    RETURN message_enter(NULL, unix_ms(clock()), queue, channel, key, payload, body, dequeue_at, cost, max_attempts,
        backoff, on_conflict = 'replace');
END
$$;

REVOKE EXECUTE ON FUNCTION message_create FROM PUBLIC;

-- Enqueues any number of messages, of which some have keys; the i-th is made of the i-th elements of the lists.
--
-- Called by producers (in Python by enqueue_many). Returns the place in the lists and the id of each. on_conflict is
-- that of message_create, except that the id of what is ignored is null. Where several have the same key they come one
-- after the other: of those to be ignored the first one counts, of those to replace each other the last one.
-- Locks: see message_create. Keys are entered in their order, what is then to be replaced is locked in the order of ids,
-- as completions lock it: so two calls don't deadlock, unless a key that was live at first is free by then, and somebody
-- else enters it at that time. Ids and times are given in the order of the lists.
CREATE FUNCTION message_create_many(
    queues text[], channels text[], keys text[], payloads jsonb[], bodies bytea[], dequeue_ats bigint[],
    delays double precision[], costs double precision[], max_attempts integer[], backoffs double precision[],
    on_conflict text DEFAULT 'raise'
) RETURNS TABLE (place bigint, id bigint)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_sequence CONSTANT regclass := pg_get_serial_sequence('message', 'id');
    v_row record;
    -- In the order of the lists.
    v_ids bigint[];
    v_nows bigint[];
    v_dequeue_ats bigint[];
    v_entered boolean[];
BEGIN
    PERFORM check_on_conflict(on_conflict);
    IF EXISTS (
        SELECT FROM unnest(ARRAY[cardinality($2), cardinality($3), cardinality($4), cardinality($5), cardinality($6),
            cardinality($7), cardinality($8), cardinality($9), cardinality($10)]) AS l (length)
        WHERE l.length <> cardinality($1))
    THEN
        RAISE invalid_parameter_value USING MESSAGE = format(
            'all lists must be null or have as many elements as queues, %s', cardinality($1));
    ELSIF EXISTS (SELECT FROM unnest($6, $7) AS w (dequeue_at, delay) WHERE num_nonnulls(w.dequeue_at, w.delay) = 2) THEN
        RAISE invalid_parameter_value USING MESSAGE = 'only one of dequeue_ats and delays may be given for a message';
    END IF;
    -- The trigger would say so too, but the index that can't hold so long a name is first.
    PERFORM message_refuse(n.queue, n.channel, n.key, NULL, NULL, NULL, NULL, NULL)
    FROM unnest($1, $2, $3) AS n (queue, channel, key)
    WHERE greatest(char_length(n.queue), char_length(n.channel), char_length(n.key)) > 255
    LIMIT 1;
    PERFORM check_seconds('delays', w.delay, 0) FROM unnest($7) AS w (delay) WHERE w.delay IS NOT NULL;
    WITH given AS MATERIALIZED (
        SELECT nextval(v_sequence) AS id, unix_ms(clock()) AS now_ms, r.queue, r.channel, r.key, r.payload, r.body,
            r.cost, r.max_attempts, r.backoff, r.place,
            CASE WHEN r.delay IS NULL THEN r.dequeue_at
                ELSE unix_ms(clock() + make_interval(secs => r.delay)) END AS dequeue_at
        FROM unnest($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) WITH ORDINALITY AS r (
            queue, channel, key, payload, body, dequeue_at, delay, cost, max_attempts, backoff, place)
    ), ordered AS MATERIALIZED (
        SELECT g.* FROM given g ORDER BY g.queue COLLATE "C", g.channel COLLATE "C", g.key COLLATE "C", g.place
    ), entered AS (
        INSERT INTO message AS m (id, queue, channel, key, payload, body, dequeue_at, cost, max_attempts, backoff)
        OVERRIDING SYSTEM VALUE
        SELECT o.id, o.queue, o.channel, o.key, o.payload, o.body, coalesce(o.dequeue_at, o.now_ms), o.cost,
            o.max_attempts, o.backoff
        FROM ordered o
        ON CONFLICT (queue, channel, key) WHERE key IS NOT NULL DO NOTHING
        RETURNING m.id
    )
    -- IN, as a join might compare each with all: how many there are isn't known when it is planned.
    SELECT array_agg(g.id ORDER BY g.place), array_agg(g.now_ms ORDER BY g.place),
        array_agg(g.dequeue_at ORDER BY g.place), array_agg(g.id IN (SELECT e.id FROM entered e) ORDER BY g.place)
    INTO v_ids, v_nows, v_dequeue_ats, v_entered
    FROM given g;

    IF on_conflict = 'replace' THEN
        PERFORM FROM (
            SELECT f.id FROM unnest($1, $2, $3, v_entered) AS r (queue, channel, key, is_entered)
            CROSS JOIN LATERAL (
                SELECT m.id FROM message m
                WHERE m.queue = r.queue AND m.channel = r.channel AND m.key = r.key LIMIT 1) f
            WHERE NOT r.is_entered
            ORDER BY f.id) f
        CROSS JOIN LATERAL (SELECT FROM message m WHERE m.id = f.id FOR NO KEY UPDATE) m;
    END IF;
    FOR v_row IN
        SELECT r.* FROM unnest($1, $2, $3, $4, $5, $8, $9, $10, v_ids, v_nows, v_dequeue_ats, v_entered)
            WITH ORDINALITY AS r (queue, channel, key, payload, body, cost, max_attempts, backoff, id, now_ms,
                dequeue_at, is_entered, place)
        WHERE NOT r.is_entered
        ORDER BY r.queue COLLATE "C", r.channel COLLATE "C", r.key COLLATE "C", r.place
    LOOP
        IF on_conflict = 'raise' THEN
            RAISE unique_violation USING
                MESSAGE = format('channel %L of queue %L has a live message with key %L', v_row.channel, v_row.queue,
                    v_row.key),
                DETAIL = format('Given in place %s of the lists.', v_row.place),
                HINT = 'on_conflict => ''ignore'' leaves that one as it is, ''replace'' gives it new contents.',
                SCHEMA = current_schema(), TABLE = 'message', CONSTRAINT = 'message_key';
        END IF;
        v_ids[v_row.place] := CASE WHEN on_conflict = 'replace' THEN message_enter(
            v_row.id, v_row.now_ms, v_row.queue, v_row.channel, v_row.key, v_row.payload, v_row.body,
            v_row.dequeue_at, v_row.cost, v_row.max_attempts, v_row.backoff, true) END;
    END LOOP;
    RETURN QUERY SELECT r.place, r.id FROM unnest(v_ids) WITH ORDINALITY AS r (id, place);
END
$$;

REVOKE EXECUTE ON FUNCTION message_create_many FROM PUBLIC;

-- Ends leases whose work is to go on later: the messages go back into their channels with a saved state.
--
-- Called by workers. states[i] is what the next attempt of ids[i] will find in message.state; without states the
-- saved ones stay. With no delay (0) a message keeps its place in the channel: it was not the worker's turn after all,
-- as when the worker has to stop. With delay_seconds null it goes behind what is ready in the channel by now. Returns
-- for each lease, in the order given, 'deferred', 'stale' or 'not_found'. A deferral is no failure: it uses up none of
-- the message's attempts.
-- Locks: the messages it updates, until the end of the transaction. The trigger message_moved signals the channels.
CREATE FUNCTION message_defer(
    ids bigint[], attempts integer[], delay_seconds double precision DEFAULT NULL, states jsonb[] DEFAULT NULL
) RETURNS TABLE (id bigint, result text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_done bigint[];
    v_attempts integer[];
BEGIN
    IF delay_seconds IS NOT NULL THEN
        PERFORM check_seconds('delay_seconds', delay_seconds, 0);
    END IF;
    IF cardinality(states) <> cardinality(ids) THEN
        RAISE invalid_parameter_value USING
            MESSAGE = format('ids and states must have the same length, not %s and %s',
                cardinality(ids), cardinality(states));
    END IF;
    WITH lease AS MATERIALIZED (
        SELECT * FROM lease_list(ids, attempts)
    ), done AS (
        UPDATE message m
        SET leased_until = NULL, counted = NULL,
            dequeue_at = CASE WHEN delay_seconds = 0 THEN m.dequeue_at
                ELSE unix_ms(clock() + make_interval(secs => coalesce(delay_seconds, 0))) END,
            state = CASE WHEN states IS NULL THEN m.state ELSE states[l.n] END,
            forgiven = least(m.forgiven, 2147483646) + 1
        FROM lease l
        WHERE m.id BETWEEN l.id AND l.id AND m.attempt BETWEEN l.attempt AND l.attempt AND is_leased(m.leased_until)
        RETURNING m.id, m.attempt
    )
    SELECT array_agg(d.id), array_agg(d.attempt) INTO v_done, v_attempts FROM done d;

    RETURN QUERY SELECT * FROM lease_results(ids, attempts, v_done, v_attempts, 'deferred');
END
$$;

REVOKE EXECUTE ON FUNCTION message_defer FROM PUBLIC;

-- Leases up to max_messages messages of a queue for lease_seconds, in the order of start-time fair queueing.
--
-- Called by workers, in a READ COMMITTED transaction that commits at once. Returns the messages in the order in which
-- they were scheduled; fewer than asked for only when fewer are eligible, or when thousands of channels, leases or
-- policies had to be gone through first: the next one goes on. worker is the caller's name, for those who look into the
-- tables.
--
-- Where nothing is to be done but to serve what is planned, this does it, side by side with other dequeues: each draws
-- tickets (tickets), whose numbers are places of the plan, and takes what is planned there; scheduler_settle, in the next
-- turn, moves on what the scheduler keeps. So dequeues of a long backlog wait for each other once in half a plan, or once
-- a second, not each time, though they go in the same order. What a dequeue that was rolled back had drawn is found then.
-- One of them plans on, meanwhile, before the plan is used up (scheduler_extend). All else is scheduler_serve's. The queue
-- from whose plan a session took last time is in its setting fairqueue_turn.planned: a guess, and a wrong one costs only
-- time.
--
-- Locks: a share in the queue's turn, and the messages that it leases, until the end of the transaction. A share and
-- the turn exclude each other, shares don't: whoever has the turn knows all that was leased, and while one has a
-- share, nothing changes that the scheduler goes by, but behind the end of the plan. Whoever plans on: as
-- scheduler_extend. If it doesn't take what is planned: as scheduler_serve. Enqueues and completions take none of these
-- locks and never wait for them.
CREATE FUNCTION message_dequeue(
    queue text DEFAULT 'default', max_messages integer DEFAULT 1, lease_seconds double precision DEFAULT 30,
    worker text DEFAULT NULL
) RETURNS SETOF leased_message
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
-- One plan a session, found without statistics: planning anew took most of a call. Every access is by an index. These
-- hold in what it calls, too.
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_queue ALIAS FOR $1;
    v_worker ALIAS FOR $4;
    -- Before anything is locked here.
    v_wrote CONSTANT boolean := pg_current_xact_id_if_assigned() IS NOT NULL;
    -- Whether this session took from the queue's plan last time.
    v_took CONSTANT boolean := current_setting('fairqueue_turn.planned', true) IS NOT DISTINCT FROM $1;
    v_turn bigint;
    v_lane_tag bigint;
    v_lane_since bigint;
    v_is_calm boolean;
    v_extend boolean;
    v_clock timestamptz;
    v_now bigint;
    v_until timestamptz;
    v_tickets regclass;
    -- The place of a ticket is its number and this.
    v_before bigint;
    v_missing integer;
    v_places bigint[];
    v_is_served boolean;
    v_first bigint;
    v_last bigint;
    v_found tid[];
    v_rows tid[];
    -- Places whose message wasn't there, in v_turn.
    v_missed bigint[];
    v_noted integer;
BEGIN
    -- Where a call for each message counts, so does each condition.
    IF (char_length(v_queue) BETWEEN 1 AND 255 AND max_messages BETWEEN 1 AND 10000
        AND (char_length(v_worker) > 255) IS NOT TRUE AND lease_seconds BETWEEN 0.001 AND 315576000
        AND current_setting('transaction_isolation') IN ('read committed', 'read uncommitted')) IS NOT TRUE
    THEN
        PERFORM dequeue_refuse(v_queue, max_messages, lease_seconds, v_worker);
    END IF;

    <<tries>>
    FOR v_try IN 1..2 LOOP
        -- Who took from the plan last time comes for more. Others look first whether anything is planned: where each turn
        -- is needed, shares would only be in the way.
        IF NOT v_took THEN
            EXIT tries WHEN (
                SELECT t.planned > t.place AND t.lane_tag IS NOT NULL AND t.tickets IS NOT NULL
                FROM rotation t WHERE t.queue = v_queue ORDER BY t.era DESC LIMIT 1) IS NOT TRUE;
        END IF;
        BEGIN
            IF NOT pg_try_advisory_xact_lock_shared(queue_key(v_queue)) THEN
                -- Waits while somebody has the turn, or waits for it.
                EXIT tries WHEN NOT scheduler_turn(v_queue, true, v_wrote);
            END IF;
            v_missed := NULL;
            v_clock := clock();
            v_now := unix_ms(v_clock);
            v_until := v_clock + make_interval(secs => lease_seconds);
            -- Calm: nothing is to be done but to serve what is planned. No limit, no lease that ran out, no lane that
            -- is due, and no news, of either kind; a pause leaves no lane_tag. Near the end of the plan, what others
            -- are about to take leaves too little. And once a second somebody has to look for what was not taken after
            -- all.
            SELECT t.turn, t.place - t.ticket_base, t.tickets, t.lane_tag, t.lane_since,
                t.planned - t.place <= t.ahead AND t.ahead >= t.plan_at,
                t.drawn >= 0 AND 2 * t.drawn <= t.planned - t.place
                    AND t.drawn + 8 * max_messages <= t.planned - t.place AND t.lane_tag IS NOT NULL
                    AND t.max_concurrency IS NULL AND t.lease_floor > v_clock AND t.lease_floor <= v_until
                    AND t.due_floor > v_now AND t.maintain_at > v_now AND t.clock BETWEEN v_now - 1000 AND v_now + 1000
                    AND greatest(t.news_from, t.urgent_from) <= pg_snapshot_xmax(pg_current_snapshot())
                    AND NOT EXISTS (
                        SELECT FROM signal s WHERE s.queue = v_queue AND NOT s.urgent AND s.xid >= t.news_from)
                    AND NOT EXISTS (
                        SELECT FROM signal s WHERE s.queue = v_queue AND s.urgent AND s.xid >= t.urgent_from)
                    AND (t.news_open = '{}' OR NOT scheduler_told(v_queue, false, t.news_open))
                    AND (t.urgent_open = '{}' OR NOT scheduler_told(v_queue, true, t.urgent_open))
            INTO v_turn, v_before, v_tickets, v_lane_tag, v_lane_since, v_extend, v_is_calm
            -- As a subquery, so that of the row only these are taken apart.
            FROM (
                SELECT t.turn, t.place, t.planned, t.lane_tag, t.lane_since, t.ahead, t.plan_at, t.max_concurrency,
                    t.lease_floor, t.due_floor, t.maintain_at, t.clock, t.news_from, t.urgent_from,
                    t.news_open, t.urgent_open, t.tickets, t.ticket_base,
                    pg_sequence_last_value(t.tickets) - t.ticket_base AS drawn
                FROM rotation t WHERE t.queue = v_queue ORDER BY t.era DESC LIMIT 1) t;
            IF v_is_calm THEN
                v_rows := '{}';
                FOR v_draw IN 1..36 LOOP
                    -- Each gets other numbers, whatever becomes of its transaction.
                    v_missing := max_messages - cardinality(v_rows);
                    v_first := v_before + nextval(v_tickets);
                    v_last := v_first;
                    IF v_missing > 1 THEN
                        v_places := v_first || ARRAY(
                            SELECT v_before + nextval(v_tickets) FROM generate_series(2, v_missing));
                        v_last := v_places[v_missing];
                    END IF;
                    -- What is planned there. What others have done since that look makes no difference: while there are
                    -- shares, what is planned before the end stays as it is. Locked one by one: a join might begin with
                    -- all messages, where there seem to be few. Another row: the version is locked that a user has just
                    -- made of it.
                    IF max_messages = 1 THEN
                        -- In one statement: it is there, or nothing is leased that would have to be given back. What it
                        -- sets and returns is what the one below does.
                        RETURN QUERY
                        UPDATE message m
                        SET attempt = least(m.attempt, 2147483646) + 1, leased_until = v_until, leased_at = v_clock,
                            first_leased_at = coalesce(m.first_leased_at, v_clock), worker = v_worker, counted = NULL
                        FROM (
                            SELECT p.rows[e.nth] AS row, p.ids[e.nth] AS id, p.channels[e.nth] AS channel
                            FROM plan p CROSS JOIN LATERAL (SELECT (v_first - p.place + 1)::integer AS nth) e
                            WHERE p.queue = v_queue AND p.place > v_first - 32 AND p.place <= v_first
                                AND (p.tags[e.nth], p.sinces[e.nth]) < (v_lane_tag, v_lane_since)) n
                        CROSS JOIN LATERAL (
                            SELECT h.ctid AS row FROM message h
                            WHERE h.ctid = n.row AND h.id = n.id AND h.queue = v_queue AND h.channel = n.channel
                                AND h.leased_until IS NULL AND h.dequeue_at <= v_now
                            FOR NO KEY UPDATE SKIP LOCKED) h
                        WHERE m.ctid = n.row AND h.row = n.row
                        RETURNING m.id, m.channel, m.attempt, m.payload, m.body, m.state, m.error, m.dequeue_at, m.cost,
                            m.created_at, m.leased_until, m.key, m.forgiven, m.first_leased_at;

                        v_is_served := FOUND;
                    ELSE
                        SELECT array_agg(m.row) FILTER (WHERE m.row = n.row) INTO v_found
                        FROM (
                            SELECT p.rows[e.nth] AS row, p.ids[e.nth] AS id, p.channels[e.nth] AS channel,
                                p.tags[e.nth] AS tag, p.sinces[e.nth] AS since
                            FROM (
                                SELECT p.place, p.rows, p.ids, p.channels, p.tags, p.sinces FROM plan p
                                WHERE p.queue = v_queue AND p.place > v_first - 32 AND p.place <= v_last
                                ORDER BY p.place) p
                            CROSS JOIN LATERAL generate_series(
                                greatest(1, v_first - p.place + 1)::integer,
                                least(cardinality(p.ids), v_last - p.place + 1)::integer) AS e (nth)
                            WHERE v_last - v_first < v_missing OR p.place + e.nth - 1 = ANY (v_places)) n
                        CROSS JOIN LATERAL (
                            SELECT m.ctid AS row FROM message m
                            WHERE m.ctid = n.row AND m.id = n.id AND m.queue = v_queue AND m.channel = n.channel
                                AND m.leased_until IS NULL AND m.dequeue_at <= v_now
                            FOR NO KEY UPDATE SKIP LOCKED) m
                        WHERE (n.tag, n.since) < (v_lane_tag, v_lane_since);

                        v_rows := v_rows || v_found;
                        v_is_served := cardinality(v_rows) = max_messages;
                    END IF;
                    EXIT WHEN v_is_served;
                    -- Some are gone, a user holds or has just changed them, or a lane comes first. Whoever is alone can do
                    -- it as it should be done, in the turn. Else others have taken what comes next, and go on to do so.
                    v_noted := coalesce(cardinality(v_missed), 0);
                    v_missed := v_missed || ARRAY(
                        SELECT p.place + e.nth - 1
                        FROM plan p
                        CROSS JOIN LATERAL unnest(p.rows, p.tags, p.sinces) WITH ORDINALITY AS e (row, tag, since, nth)
                        WHERE p.queue = v_queue AND p.place > v_first - 32 AND p.place <= v_last
                            AND p.place + e.nth - 1 BETWEEN v_first AND v_last
                            AND (v_last - v_first < v_missing OR p.place + e.nth - 1 = ANY (v_places))
                            AND (e.row = ANY (v_found)) IS NOT TRUE
                            AND (e.tag, e.since) < (v_lane_tag, v_lane_since));
                    v_noted := cardinality(v_missed) - v_noted;
                    EXIT WHEN v_noted + coalesce(cardinality(v_found), 0) < v_missing
                        OR (pg_try_advisory_lock(queue_key(v_queue)) AND pg_advisory_unlock(queue_key(v_queue)));
                END LOOP;
                IF v_is_served THEN
                    IF max_messages > 1 THEN
                        RETURN QUERY
                        -- The one join that is left switched on is a loop, here over rows: in the order of places.
                        UPDATE message m
                        SET attempt = least(m.attempt, 2147483646) + 1, leased_until = v_until, leased_at = v_clock,
                            first_leased_at = coalesce(m.first_leased_at, v_clock), worker = v_worker, counted = NULL
                        FROM unnest(v_rows) AS h (row)
                        WHERE m.ctid = h.row
                        RETURNING m.id, m.channel, m.attempt, m.payload, m.body, m.state, m.error, m.dequeue_at, m.cost,
                            m.created_at, m.leased_until, m.key, m.forgiven, m.first_leased_at;
                    END IF;
                    IF v_missed IS NOT NULL THEN
                        INSERT INTO missed (queue, turn, place) SELECT v_queue, v_turn, k FROM unnest(v_missed) AS k
                        ON CONFLICT DO NOTHING;
                    END IF;
                    IF NOT v_took THEN
                        PERFORM set_config('fairqueue_turn.planned', v_queue, false);
                    END IF;
                    IF v_extend THEN
                        IF pg_try_advisory_xact_lock(queue_key(v_queue, 2)) THEN
                            PERFORM scheduler_extend(v_queue, v_now);
                        END IF;
                    END IF;
                    RETURN;
                END IF;
            END IF;
            -- Who has a share alone can have the turn without giving up the share, for which others may be waiting.
            EXIT WHEN pg_try_advisory_xact_lock(queue_key(v_queue));
            RAISE SQLSTATE 'FQ000';
        EXCEPTION WHEN SQLSTATE 'FQ000' THEN
            -- Nothing is locked any more. One of them waits for the turn, and the others behind it for shares, as the
            -- plan may then serve them side by side again. Not one that can't wait, and may be open for long.
            EXIT WHEN v_wrote OR pg_try_advisory_xact_lock(queue_key(v_queue, 1));
        END;
    END LOOP;
    IF v_took THEN
        PERFORM set_config('fairqueue_turn.planned', '', false);
    END IF;
    RETURN QUERY SELECT * FROM scheduler_serve(v_queue, max_messages, lease_seconds, v_worker, v_wrote, v_turn, v_missed);
END
$$;

REVOKE EXECUTE ON FUNCTION message_dequeue FROM PUBLIC;

-- Trigger function of message_edited: refuses what can't be, and that a leased message goes to another channel, as what
-- a channel's limits count stays in the channel until it is over.
--
-- Takes no lock.
CREATE FUNCTION message_edit() RETURNS trigger
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    -- All of it: by now the row has it compressed, and what is new is measured as it is given.
    v_payload CONSTANT jsonb := NEW.payload #> '{}';
BEGIN
    IF OLD.leased_until IS NOT NULL AND (OLD.queue <> NEW.queue OR OLD.channel <> NEW.channel) THEN
        RAISE object_in_use USING
            MESSAGE = format('message %s is leased until %s and can''t be moved to channel %L of queue %L',
                OLD.id, OLD.leased_until, NEW.channel, NEW.queue),
            HINT = 'Wait until its lease has ended, or cancel it and enqueue it there.';
    END IF;
    IF NOT message_valid(NEW.queue, NEW.channel, NEW.key, v_payload, NEW.body, NEW.cost, NEW.max_attempts,
        NEW.backoff, NEW.created_at)
    THEN
        PERFORM message_refuse(NEW.queue, NEW.channel, NEW.key, v_payload, NEW.body, NEW.cost, NEW.max_attempts,
            NEW.backoff, NEW.created_at);
    END IF;
    RETURN NULL;
END
$$;

-- How messages ended: one row for each of ids, in the order given, that is neither ready nor leased any more.
--
-- Called by who waits for messages. The outcome is that of the last row in history, also where the clock was set back
-- before it; 'dead' also where the queue keeps no history; and null where nothing is known: no history is kept, or no
-- longer, or there never was such a message. Takes no lock.
CREATE FUNCTION message_ending(ids bigint[])
RETURNS TABLE (id bigint, outcome text, attempt integer, error text, finished_at timestamptz)
-- Stable: all statements see the same moment, so no message falls between them.
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_gone bigint[];
BEGIN
    IF ids IS NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = 'ids must be a list of message ids, not null';
    END IF;
    -- By themselves, because who waits asks often, and history has many partitions.
    v_gone := ARRAY(
        SELECT l.id FROM unnest(ids) WITH ORDINALITY AS l (id, n)
        WHERE (SELECT m.id FROM message m WHERE m.id = l.id) IS NULL
        ORDER BY l.n);
    IF v_gone = '{}' THEN
        RETURN;
    END IF;
    RETURN QUERY
    SELECT l.id, coalesce(h.outcome, d.outcome), coalesce(h.attempt, d.attempt), coalesce(h.error, d.error),
        coalesce(h.finished_at, d.died_at)
    FROM unnest(v_gone) WITH ORDINALITY AS l (id, n)
    LEFT JOIN LATERAL (
        SELECT h.outcome, h.attempt, h.error, h.finished_at
        FROM history h
        WHERE h.message_id = l.id
        ORDER BY h.attempt DESC, h.finished_at DESC
        LIMIT 1) h ON true
    LEFT JOIN LATERAL (
        SELECT 'dead' AS outcome, d.attempt, d.error, d.died_at
        FROM dead_message d
        WHERE d.id = l.id AND h.outcome IS NULL) d ON true
    ORDER BY l.n;
END
$$;

REVOKE EXECUTE ON FUNCTION message_ending FROM PUBLIC;

-- Enqueues a message with a key unless one is live already, and returns the id of the live one.
--
-- Called by message_create and message_create_many. With replaces false a live message stays as it is. With
-- replaces true a ready one takes on the new contents and starts anew: no error, no saved state, all its attempts; it
-- keeps its id, and its place in the channel unless dequeue_at says another (so a message that is replaced again and
-- again is served in its turn), but is not put off any longer. A leased one loses its key and goes its way, and the
-- new message is inserted beside it: what is running may have read the old contents, so nothing is lost.
-- A new message gets new_id where one is given, and is due from now_ms on unless dequeue_at says another time.
-- Locks: see message_create. Whoever enters several keys in one statement does it in the order of keys.
CREATE FUNCTION message_enter(
    new_id bigint, now_ms bigint, queue text, channel text, key text, payload jsonb, body bytea, dequeue_at bigint,
    cost double precision, max_attempts integer, backoff double precision, replaces boolean
) RETURNS bigint
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $3;
    v_channel CONSTANT text := $4;
    v_key CONSTANT text := $5;
    v_id bigint;
    v_leased boolean;
BEGIN
    new_id := coalesce(new_id, nextval(pg_get_serial_sequence('message', 'id')));
    -- Each round sees what was committed before it. A higher isolation level raises serialization_failure instead
    -- where that is what its snapshot doesn't have.
    LOOP
        IF replaces THEN
            SELECT m.id, is_leased(m.leased_until) INTO v_id, v_leased
            FROM message m
            WHERE m.queue = v_queue AND m.channel = v_channel AND m.key = v_key
            FOR NO KEY UPDATE;
            IF v_leased THEN
                UPDATE message m SET key = NULL WHERE m.id = v_id;
            ELSIF FOUND THEN
                UPDATE message m
                SET payload = $6, body = $7, dequeue_at = coalesce($8, least(m.dequeue_at, now_ms)), cost = $9,
                    max_attempts = $10, backoff = $11, forgiven = m.attempt, state = NULL, error = NULL
                WHERE m.id = v_id;
                RETURN v_id;
            END IF;
        END IF;
        INSERT INTO message AS m (id, queue, channel, key, payload, body, dequeue_at, cost, max_attempts, backoff)
        OVERRIDING SYSTEM VALUE
        VALUES (new_id, v_queue, v_channel, v_key, $6, $7, coalesce($8, now_ms), $9, $10, $11)
        ON CONFLICT (queue, channel, key) WHERE key IS NOT NULL DO NOTHING
        RETURNING m.id INTO v_id;
        IF FOUND THEN
            RETURN v_id;
        ELSIF NOT replaces THEN
            SELECT m.id INTO v_id FROM message m
            WHERE m.queue = v_queue AND m.channel = v_channel AND m.key = v_key;
            IF FOUND THEN
                RETURN v_id;
            END IF;
        END IF;
    END LOOP;
END
$$;

-- Ends leases whose work failed: the messages go back into their channels to be tried again, or are dead.
--
-- Called by workers. Returns for each lease, in the order given, 'failed', 'dead', 'stale' or 'not_found'. The error is
-- kept with the message. Dead is what has used up its attempts, or is not to be tried again (retry => false): it goes
-- to dead_message. Without delay_seconds the delay is exponential, backoff * 2^(failures - 1) and at most the queue's
-- max_backoff, times a random factor of 0.5 to 1 that keeps messages which failed together from coming back together
-- ("equal jitter": Brooker, Exponential Backoff And Jitter, AWS Architecture Blog 2015). With no delay a message keeps
-- its place in the channel.
-- Locks: the messages, in the order of ids, until the end of the transaction. The triggers signal the channels.
CREATE FUNCTION message_fail(
    ids bigint[], attempts integer[], error text DEFAULT NULL, delay_seconds double precision DEFAULT NULL,
    retry boolean DEFAULT true
) RETURNS TABLE (id bigint, result text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_error CONSTANT text := $3;
    v_done bigint[];
    v_attempts integer[];
    v_dead bigint[];
BEGIN
    IF delay_seconds IS NOT NULL THEN
        PERFORM check_seconds('delay_seconds', delay_seconds, 0);
    END IF;
    IF retry IS NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = 'retry must be true or false, not null';
    END IF;
    WITH lease AS MATERIALIZED (
        SELECT DISTINCT l.id, l.attempt FROM lease_list(ids, attempts) l ORDER BY l.id
    ), held AS MATERIALIZED (
        SELECT m.id, m.attempt, m.queue, m.backoff, m.max_attempts, m.attempt::bigint - m.forgiven AS failures
        FROM lease l JOIN message m ON m.id BETWEEN l.id AND l.id
        WHERE m.attempt = l.attempt AND is_leased(m.leased_until)
        FOR UPDATE OF m
    ), policy AS MATERIALIZED (
        SELECT h.id, h.attempt, NOT retry OR h.failures >= coalesce(h.max_attempts, q.max_attempts, 20) AS is_dead,
            coalesce(delay_seconds, retry_delay(h.failures, h.backoff, q.backoff, q.max_backoff)) AS delay
        FROM held h LEFT JOIN queue q ON q.name = h.queue
    ), retried AS (
        UPDATE message m
        SET leased_until = NULL, counted = NULL, error = v_error, dequeue_at = CASE WHEN p.delay = 0 THEN m.dequeue_at
            ELSE unix_ms(clock() + make_interval(secs => p.delay)) END
        FROM policy p
        WHERE m.id BETWEEN p.id AND p.id AND NOT p.is_dead
    )
    SELECT array_agg(p.id), array_agg(p.attempt), array_agg(p.id) FILTER (WHERE p.is_dead)
    INTO v_done, v_attempts, v_dead
    FROM policy p;

    IF v_dead IS NOT NULL THEN
        PERFORM message_finish(v_dead, 'dead', v_error);
    END IF;
    RETURN QUERY SELECT * FROM lease_results(ids, attempts, v_done, v_attempts, 'failed', v_dead);
END
$$;

REVOKE EXECUTE ON FUNCTION message_fail FROM PUBLIC;

-- Takes messages out of the queue for good, other than by completion, and writes what became of them.
--
-- Called by message_cancel ('cancelled'), by message_fail and scheduler_bury ('dead'), and by message_arrive, when a
-- message has no room in its channel ('dropped'). Where an error is given, it stands instead of the messages' own. Dead
-- messages go to dead_message. What was dropped is always written to history, the rest unless the queue's history_days
-- is 0.
-- Locks: the messages it deletes, in the order of ids, until the end of the transaction.
--
-- Returns the ids of the messages that it deleted.
CREATE FUNCTION message_finish(ids bigint[], outcome text, error text DEFAULT NULL) RETURNS bigint[]
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_outcome CONSTANT text := $2;
    v_error CONSTANT text := $3;
    v_gone bigint[];
BEGIN
    WITH named AS MATERIALIZED (
        SELECT l.id FROM unnest(ids) AS l (id) ORDER BY l.id
    ), gone AS (
        -- Not =: see lease_list.
        DELETE FROM message m USING named l WHERE m.id BETWEEN l.id AND l.id
        RETURNING m.*, coalesce(v_error, m.error) AS last_error
    ), buried AS (
        INSERT INTO dead_message (id, queue, channel, key, payload, body, cost, max_attempts, backoff, attempt, worker,
            state, error, created_at, first_leased_at)
        SELECT g.id, g.queue, g.channel, g.key, g.payload, g.body, g.cost, g.max_attempts, g.backoff, g.attempt,
            g.worker, g.state, g.last_error, g.created_at, g.first_leased_at
        FROM gone g
        WHERE v_outcome = 'dead'
        -- Only where somebody has chosen an id that was taken: the dead letter that is there stays, and nothing stops.
        ON CONFLICT ON CONSTRAINT dead_message_pkey DO NOTHING
    ), written AS (
        INSERT INTO history (message_id, queue, channel, key, outcome, attempt, cost, error, worker, dequeue_at,
            created_at, first_leased_at, leased_at)
        SELECT g.id, g.queue, g.channel, g.key, v_outcome, g.attempt, g.cost, g.last_error, g.worker, g.dequeue_at,
            g.created_at, g.first_leased_at, g.leased_at
        FROM gone g
        WHERE v_outcome = 'dropped'
            OR g.queue <> ALL (ARRAY(SELECT q.name FROM queue q WHERE q.history_days = 0))
    )
    SELECT array_agg(g.id) INTO v_gone FROM gone g;

    RETURN coalesce(v_gone, '{}');
END
$$;

REVOKE EXECUTE ON FUNCTION message_finish FROM PUBLIC;

-- Extends leases to lease_seconds from now; never shortens one.
--
-- Called by workers while they work. Returns for each lease, in the order given, 'extended', 'busy' (its completion
-- or another act on it is under way in an open transaction), 'stale' or 'not_found' (completed or cancelled).
-- A lease that ran out is still extended when nobody has taken the message back.
-- Locks: the messages it updates, until the end of the transaction. It waits for nobody.
CREATE FUNCTION message_heartbeat(
    ids bigint[], attempts integer[], lease_seconds double precision DEFAULT 30
) RETURNS TABLE (id bigint, result text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    -- Places in the lists, as a message may be there by two attempts, of which one is over.
    v_known bigint[];
    v_done bigint[];
    v_attempts integer[];
BEGIN
    PERFORM check_seconds('lease_seconds', lease_seconds, 0.001);
    WITH lease AS MATERIALIZED (
        SELECT * FROM lease_list(ids, attempts)
    ), known AS MATERIALIZED (
        SELECT l.n
        FROM lease l JOIN message m ON m.id BETWEEN l.id AND l.id
        WHERE m.attempt BETWEEN l.attempt AND l.attempt AND is_leased(m.leased_until)
    ), held AS MATERIALIZED (
        SELECT m.id
        FROM lease l JOIN message m ON m.id BETWEEN l.id AND l.id
        WHERE m.attempt BETWEEN l.attempt AND l.attempt AND is_leased(m.leased_until)
        FOR NO KEY UPDATE OF m SKIP LOCKED
    ), done AS (
        UPDATE message m
        SET leased_until = greatest(m.leased_until, clock() + make_interval(secs => lease_seconds))
        FROM held h
        WHERE m.id BETWEEN h.id AND h.id
        RETURNING m.id, m.attempt
    )
    SELECT (SELECT array_agg(k.n) FROM known k), array_agg(d.id), array_agg(d.attempt)
    INTO v_known, v_done, v_attempts
    FROM done d;

    RETURN QUERY
    SELECT r.id, CASE WHEN r.result = 'stale' AND r.n = ANY (v_known) THEN 'busy' ELSE r.result END
    FROM lease_results(ids, attempts, v_done, v_attempts, 'extended') WITH ORDINALITY AS r (id, result, n);
END
$$;

REVOKE EXECUTE ON FUNCTION message_heartbeat FROM PUBLIC;

-- Puts dead letters back into their channels, with all their attempts before them.
--
-- Called by operators: with ids for some, with a queue and a channel for those of a channel, with a queue for all of
-- it. A message keeps its id, its state, its last error, and its attempt, which is the fence: whoever still works on an
-- old lease of it stays 'stale'. Returns for each, in the order given or of ids, 'redriven', 'not_found', or
-- 'duplicate', where it stays dead because a live message of its channel has its key.
-- Locks: the dead letters, in the order of ids, until the end of the transaction; one that another call is putting back
-- is waited for and then 'not_found'. As any enqueue of keys, which are entered in their order, it waits for an open one
-- of the same.
CREATE FUNCTION message_redrive(ids bigint[] DEFAULT NULL, queue text DEFAULT NULL, channel text DEFAULT NULL)
RETURNS TABLE (id bigint, result text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_ids bigint[] := $1;
    v_queue CONSTANT text := $2;
    v_channel CONSTANT text := $3;
    v_now CONSTANT bigint := unix_ms(clock());
    v_found bigint[];
    v_done bigint[];
BEGIN
    IF num_nonnulls(v_ids, v_queue) <> 1 THEN
        RAISE invalid_parameter_value USING
            MESSAGE = format('one of ids and queue must be given, not %s',
                CASE WHEN v_queue IS NULL THEN 'none' ELSE 'both' END),
            HINT = 'All dead letters of a queue: message_redrive(queue => ''default'').';
    ELSIF v_channel IS NOT NULL AND v_queue IS NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = format('channel %L must be given with its queue', v_channel);
    END IF;
    IF v_channel IS NOT NULL THEN
        v_ids := ARRAY(SELECT d.id FROM dead_message d
            WHERE d.queue = v_queue AND d.channel = v_channel ORDER BY d.id);
    ELSIF v_queue IS NOT NULL THEN
        v_ids := ARRAY(SELECT d.id FROM dead_message d WHERE d.queue = v_queue ORDER BY d.id);
    END IF;

    WITH named AS MATERIALIZED (
        SELECT DISTINCT l.id FROM unnest(v_ids) AS l (id) ORDER BY l.id
    ), dead AS MATERIALIZED (
        SELECT d.* FROM named n CROSS JOIN LATERAL (
            SELECT d.* FROM dead_message d WHERE d.id = n.id FOR UPDATE) d
    ), live AS (
        INSERT INTO message (id, queue, channel, key, payload, body, dequeue_at, cost, max_attempts, backoff, attempt,
            forgiven, first_leased_at, worker, state, error, created_at)
        OVERRIDING SYSTEM VALUE
        SELECT d.id, d.queue, d.channel, d.key, d.payload, d.body, v_now, d.cost, d.max_attempts, d.backoff,
            d.attempt, d.attempt, d.first_leased_at, d.worker, d.state, d.error, d.created_at
        FROM dead d
        ORDER BY d.queue, d.channel, d.key, d.id
        ON CONFLICT DO NOTHING
        RETURNING message.id
    ), gone AS (
        -- Not =: see lease_list.
        DELETE FROM dead_message d USING live v WHERE d.id BETWEEN v.id AND v.id
    )
    SELECT array_agg(d.id), array_agg(v.id) FILTER (WHERE v.id IS NOT NULL) INTO v_found, v_done
    FROM dead d LEFT JOIN live v ON v.id = d.id;

    RETURN QUERY
    SELECT l.id, CASE WHEN v.id IS NOT NULL THEN 'redriven' WHEN f.id IS NOT NULL THEN 'duplicate'
        ELSE 'not_found' END
    FROM unnest(v_ids) WITH ORDINALITY AS l (id, n)
    LEFT JOIN unnest(v_found) AS f (id) ON f.id = l.id
    LEFT JOIN unnest(v_done) AS v (id) ON v.id = l.id
    ORDER BY l.n;
END
$$;

REVOKE EXECUTE ON FUNCTION message_redrive FROM PUBLIC;

-- Trigger function of channel_paused and queue_paused: a pause doesn't end when an earlier one would have.
--
-- Whoever sets paused alone means a new one. So the time until which one lasts goes with it when it is ended, and one
-- that has passed when another begins. A pause that is over by itself leaves both as they are: then whoever pauses
-- again has to set the time, as channel_set and queue_set do. Takes no lock.
CREATE FUNCTION pause_begin() RETURNS trigger
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    IF NEW.paused <> OLD.paused AND NEW.resume_at = OLD.resume_at AND (OLD.paused OR NEW.resume_at <= clock()) THEN
        NEW.resume_at := NULL;
    END IF;
    RETURN NEW;
END
$$;

REVOKE EXECUTE ON FUNCTION pause_begin FROM PUBLIC;

-- Until when a channel or queue is paused, in Unix milliseconds: null for not at all, 2^63-1 for until it is resumed.
--
-- Called by the scheduler's functions, signal_policy and queue_check; takes no lock.
CREATE FUNCTION paused_until(paused boolean, resume_at timestamptz) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN paused THEN coalesce(unix_ms(resume_at), 9223372036854775807) END;

-- How many messages in a row dequeues must have got, without coming up short, before any are scheduled ahead.
--
-- Called by scheduler_serve, scheduler_settle and queue_repair; takes no lock. With fewer, planning costs more than it
-- saves.
CREATE FUNCTION plan_after() RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN 256;

-- How many messages are scheduled ahead at once, at most; and no more than have been served in a row.
--
-- Called by scheduler_serve and the functions that this serves by, scheduler_settle, scheduler_extend and
-- scheduler_plan. The more, the less probing its channels costs a message, but the longer a dequeue takes that plans:
-- for these, a thirtieth of a second. Takes no lock.
CREATE FUNCTION plan_most() RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN 8192;

-- What the scheduler keeps, compared with the rows that it was derived from: one row a difference, none when all is well.
--
-- Called by operators, on a live queue as well: it is one statement, so it sees one moment, and whatever dequeues and
-- users do, they do in transactions that keep both sides equal, counting the signals that are still to be folded.
-- Takes no lock. Reads everything that the scheduler keeps of the queue, and its leases; without a queue, of all.
CREATE FUNCTION queue_check(name text DEFAULT NULL)
RETURNS TABLE (queue text, channel text, problem text, expected text, found text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET jit = off
-- Joins by queue and channel, not each channel with each other one, however few the planner takes them for; and channels
-- one after the other by their index.
SET plan_cache_mode = force_custom_plan
SET enable_bitmapscan = off
SET enable_mergejoin = off
SET enable_nestloop = off
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_now CONSTANT bigint := unix_ms(clock());
BEGIN
    RETURN QUERY
    WITH RECURSIVE rotations AS MATERIALIZED (
        SELECT r.*, coalesce(pg_sequence_last_value(r.tickets) - r.ticket_base, 0) AS drawn
        FROM rotation r WHERE v_queue IS NULL OR r.queue = v_queue
    ), signals AS MATERIALIZED (
        SELECT s.*, s.message_id IS NULL AND s.counted IS NULL AS is_policy
        FROM signal s WHERE v_queue IS NULL OR s.queue = v_queue
    ), news AS MATERIALIZED (
        SELECT s.queue, s.channel, bool_or(s.is_policy) AS policy, bool_or(s.urgent) AS urgent
        FROM signals s
        GROUP BY s.queue, s.channel
    ), lanes AS MATERIALIZED (
        SELECT l.*, t.at, lane_due(t.at, l.head_at, l.paused_until, l.max_concurrency, l.running, l.release_interval, l.burst,
            l.released_at) AS new_due,
            q.queue IS NOT NULL OR coalesce(n.policy, false) OR t.is_behind AS has_policy_news,
            q.queue IS NOT NULL OR coalesce(n.urgent, false) OR t.is_behind AS has_urgent_news
        FROM lane l
        LEFT JOIN news n ON n.queue = l.queue AND n.channel = l.channel
        LEFT JOIN news q ON q.queue = l.queue AND q.channel IS NULL
        LEFT JOIN (
            SELECT r.queue, max(r.clock) AS clock, max(r.rebuilt) AS rebuilt FROM rotations r GROUP BY r.queue) r
            ON r.queue = l.queue
        -- A clock that was set back is for the next dequeue to see to; lanes that are still to be derived anew, too.
        CROSS JOIN LATERAL (
            SELECT greatest(v_now, r.clock) AS at, coalesce(l.channel > r.rebuilt, false) AS is_behind) t
        WHERE v_queue IS NULL OR l.queue = v_queue
    ), planned AS MATERIALIZED (
        SELECT r.queue, p.*
        FROM (SELECT DISTINCT r.queue FROM rotations r) r CROSS JOIN LATERAL scheduler_planned(r.queue) p
    ), leases AS MATERIALIZED (
        SELECT m.id, m.queue, m.channel, m.leased_until, m.attempt, m.counted
        FROM message m WHERE m.leased_until IS NOT NULL AND (v_queue IS NULL OR m.queue = v_queue)
    -- A place for each channel that has ready messages: the first of them.
    ), walk AS (
        (SELECT m.queue, m.channel, m.dequeue_at, m.id FROM message m
         WHERE m.leased_until IS NULL AND (v_queue IS NULL OR m.queue = v_queue)
         ORDER BY m.queue, m.channel, m.dequeue_at, m.id LIMIT 1)
        UNION ALL
        SELECT n.* FROM walk w CROSS JOIN LATERAL (
            SELECT m.queue, m.channel, m.dequeue_at, m.id FROM message m
            WHERE m.leased_until IS NULL AND (m.queue, m.channel) > (w.queue, w.channel)
            ORDER BY m.queue, m.channel, m.dequeue_at, m.id LIMIT 1) n
        -- Outside: with it as one of its conditions, a scan of the index would begin with the queue each time.
        WHERE v_queue IS NULL OR n.queue = v_queue
    -- And what is behind the planned messages of a lane that is idle.
    ), firsts AS (
        SELECT w.* FROM walk w
        UNION ALL
        SELECT l.queue, l.channel, m.dequeue_at, m.id
        FROM lanes l
        CROSS JOIN LATERAL (
            SELECT m.dequeue_at, m.id FROM message m
            WHERE m.queue = l.queue AND m.channel = l.channel AND m.leased_until IS NULL
                AND (m.dequeue_at, m.id) >= (l.head_at, l.head_id)
            ORDER BY m.dequeue_at, m.id LIMIT 1) m
        WHERE l.due IS NULL
            AND EXISTS (SELECT FROM planned p WHERE p.queue = l.queue AND p.channel = l.channel AND NOT p.is_taken)
    )
    SELECT w.queue, w.channel, 'a ready message that no lane and no signal leads to',
        format('message %s, due at %s', w.id, w.dequeue_at),
        (SELECT format('the lane starts at %s, message %s', l.head_at, l.head_id) FROM lanes l
         WHERE l.queue = w.queue AND l.channel = w.channel AND l.due IS NOT NULL LIMIT 1)
    FROM firsts w
    WHERE NOT EXISTS (
            SELECT FROM lanes l WHERE l.queue = w.queue AND l.channel = w.channel AND l.due IS NOT NULL
                AND (l.head_at, l.head_id) <= (w.dequeue_at, w.id))
        AND NOT EXISTS (SELECT FROM planned p WHERE p.queue = w.queue AND p.left_id = w.id)
        AND NOT EXISTS (SELECT FROM rotations r WHERE r.queue = w.queue AND w.channel > r.rebuilt)
        -- Two questions: as one, with OR, each channel would be compared with each signal.
        AND NOT EXISTS (SELECT FROM signals s WHERE s.queue = w.queue AND s.channel IS NULL)
        AND NOT EXISTS (
            SELECT FROM signals s WHERE s.queue = w.queue AND s.channel = w.channel
                AND (s.dequeue_at, s.message_id) <= (w.dequeue_at, w.id))
    UNION ALL
    SELECT p.queue, p.channel, 'a planned message that its lane is not behind', format('(%s, %s)', p.tag, p.since),
        (SELECT format('(%s, %s)', l.tag, l.since) FROM lanes l WHERE l.queue = p.queue AND l.channel = p.channel LIMIT 1)
    FROM planned p
    WHERE NOT EXISTS (
        SELECT FROM lanes l WHERE l.queue = p.queue AND l.channel = p.channel AND l.since = p.since
            AND l.tag > p.tag AND l.planned >= p.tag)
    UNION ALL
    SELECT l.queue, l.channel, 'a lane behind a planned message that is not there', format('(%s, %s)', l.planned, l.since),
        NULL
    FROM lanes l JOIN rotations r ON r.queue = l.queue
    WHERE l.planned >= 0 AND (l.planned, l.since) > (r.vtime, r.vsince)
        AND NOT EXISTS (
            SELECT FROM planned p WHERE p.queue = l.queue AND p.channel = l.channel AND p.tag = l.planned)
    UNION ALL
    SELECT p.queue, p.channel, 'a planned message beyond the end of the plan', format('at most %s', r.planned),
        p.place::text
    FROM planned p JOIN rotations r ON r.queue = p.queue
    WHERE p.place > r.planned
    UNION ALL
    SELECT p.queue, p.channel, 'a planned message that the rotation has passed',
        format('beyond (%s, %s)', r.vtime, r.vsince), format('(%s, %s)', p.tag, p.since)
    FROM planned p JOIN rotations r ON r.queue = p.queue
    WHERE (p.tag, p.since) <= (r.vtime, r.vsince)
    UNION ALL
    SELECT k.queue, NULL, 'a planned message that was missed', format('in turn %s', r.turn), format('in turn %s', k.turn)
    FROM missed k LEFT JOIN rotations r ON r.queue = k.queue
    WHERE (v_queue IS NULL OR k.queue = v_queue) AND k.turn IS DISTINCT FROM r.turn
    UNION ALL
    SELECT r.queue, NULL, 'tickets drawn', 'at least 0', r.drawn::text
    FROM rotations r
    WHERE r.drawn < 0
    UNION ALL
    SELECT coalesce(r.queue, k.queue), NULL, 'tickets of the queue', r.tickets::text, 'tickets_' || k.number
    FROM rotations r
    FULL JOIN (SELECT k.* FROM tickets k WHERE v_queue IS NULL OR k.queue = v_queue) k ON k.queue = r.queue
    WHERE r.tickets IS DISTINCT FROM to_regclass('tickets_' || k.number)
    UNION ALL
    SELECT s.queue, s.channel, 'a signal that no dequeue will read',
        format('from %s on, or one of %s', CASE WHEN s.urgent THEN r.urgent_from ELSE r.news_from END,
            CASE WHEN s.urgent THEN r.urgent_open ELSE r.news_open END), s.xid::text
    FROM signals s JOIN rotations r ON r.queue = s.queue
    WHERE CASE WHEN s.urgent THEN s.xid < r.urgent_from AND s.xid <> ALL (r.urgent_open)
        ELSE s.xid < r.news_from AND s.xid <> ALL (r.news_open) END
    UNION ALL
    SELECT l.queue, l.channel, 'leases that count toward max_concurrency', coalesce(n.leases, 0)::text, l.running::text
    FROM lanes l
    LEFT JOIN (
        SELECT l.queue, l.channel, count(*) AS leases
        FROM lanes l
        JOIN (SELECT e.queue, e.channel, e.counted FROM leases e
              UNION ALL SELECT s.queue, s.channel, s.counted FROM signals s) e
            ON e.queue = l.queue AND e.channel = l.channel AND e.counted >= l.counted_from
        GROUP BY l.queue, l.channel) n ON n.queue = l.queue AND n.channel = l.channel
    WHERE l.max_concurrency IS NOT NULL AND NOT l.has_policy_news AND coalesce(n.leases, 0) <> l.running
    UNION ALL
    SELECT e.queue, e.channel, 'counted leases of a channel without a lane', '0', count(*)::text
    FROM leases e
    LEFT JOIN channel c ON c.queue = e.queue AND c.name = e.channel
    LEFT JOIN queue q ON q.name = e.queue
    WHERE e.counted IS NOT NULL AND coalesce(c.max_concurrency, q.channel_max_concurrency) IS NOT NULL
        AND NOT EXISTS (SELECT FROM lanes l WHERE l.queue = e.queue AND l.channel = e.channel)
        AND NOT EXISTS (SELECT FROM rotations r WHERE r.queue = e.queue AND e.channel > r.rebuilt)
        AND NOT EXISTS (SELECT FROM news n
            WHERE n.queue = e.queue AND n.policy AND coalesce(n.channel, e.channel) = e.channel)
    GROUP BY e.queue, e.channel
    UNION ALL
    SELECT r.queue, NULL, 'leases that count toward max_concurrency', coalesce(n.leases, 0)::text, r.running::text
    FROM rotations r
    LEFT JOIN (
        SELECT r.queue, count(*) AS leases
        FROM rotations r
        JOIN (SELECT e.queue, e.counted FROM leases e UNION ALL SELECT s.queue, s.counted FROM signals s) e
            ON e.queue = r.queue AND e.counted >= r.counted_from
        GROUP BY r.queue) n ON n.queue = r.queue
    WHERE r.max_concurrency IS NOT NULL AND coalesce(n.leases, 0) <> r.running
        AND NOT EXISTS (SELECT FROM signals s WHERE s.queue = r.queue AND s.channel IS NULL AND s.is_policy)
    UNION ALL
    SELECT l.queue, l.channel, 'policy (weight, max_concurrency, release_interval, burst, paused_until)',
        p.policy::text, (l.weight, l.max_concurrency, l.release_interval, l.burst, l.paused_until)::text
    FROM lanes l
    LEFT JOIN channel c ON c.queue = l.queue AND c.name = l.channel
    LEFT JOIN queue q ON q.name = l.queue
    CROSS JOIN LATERAL (
        SELECT (coalesce(c.weight, q.channel_weight, 1::double precision),
            coalesce(c.max_concurrency, q.channel_max_concurrency),
            coalesce(c.release_interval_ms, q.channel_release_interval_ms, 0::bigint),
            coalesce(c.burst, q.channel_burst, 1), paused_until(c.paused, c.resume_at)) AS policy) p
    WHERE NOT l.has_policy_news
        AND p.policy IS DISTINCT FROM (l.weight, l.max_concurrency, l.release_interval, l.burst, l.paused_until)
    UNION ALL
    SELECT r.queue, NULL, 'policy (max_concurrency, paused_until)',
        (q.max_concurrency, paused_until(q.paused, q.resume_at))::text, (r.max_concurrency, r.paused_until)::text
    FROM rotations r LEFT JOIN queue q ON q.name = r.queue
    WHERE (q.max_concurrency, paused_until(q.paused, q.resume_at))
            IS DISTINCT FROM (r.max_concurrency, r.paused_until)
        AND NOT EXISTS (SELECT FROM signals s WHERE s.queue = r.queue AND s.channel IS NULL AND s.is_policy)
    UNION ALL
    SELECT l.queue, l.channel, 'a lane that waits for too long',
        l.new_due::text, l.due::text
    FROM lanes l
    WHERE l.due > greatest(l.new_due, l.at) AND NOT l.has_urgent_news
    UNION ALL
    SELECT l.queue, l.channel, 'a ready lane that has to wait', l.new_due::text, l.due::text
    FROM lanes l
    WHERE l.due = 0 AND l.new_due <> 0 AND NOT l.has_urgent_news
    UNION ALL
    SELECT l.queue, l.channel, 'a release that is still to come',
        format('at most %s', l.at + (l.burst - 1) * l.release_interval), l.released_at::text
    FROM lanes l
    WHERE l.release_interval > 0 AND l.released_at > l.at + (l.burst - 1) * l.release_interval AND NOT l.has_policy_news
    UNION ALL
    -- Restored from a dump of another server: once this one had come so far, all until then would be overlooked.
    SELECT r.queue, NULL, 'transactions that this server has not come to',
        format('at most %s', pg_snapshot_xmax(pg_current_snapshot())), greatest(r.news_from, r.urgent_from)::text
    FROM rotations r
    WHERE greatest(r.news_from, r.urgent_from) > pg_snapshot_xmax(pg_current_snapshot())
    UNION ALL
    SELECT l.queue, l.channel, 'a count that is still to begin', format('at most %s', r.turn), l.counted_from::text
    FROM (SELECT l.queue, l.channel, l.counted_from FROM lanes l
          UNION ALL SELECT r.queue, NULL, r.counted_from FROM rotations r) l
    JOIN rotations r ON r.queue = l.queue
    WHERE l.counted_from > r.turn
    UNION ALL
    SELECT l.queue, l.channel, 'a ready lane that the rotation has passed',
        format('beyond (%s, %s)', r.vtime, r.vsince), format('(%s, %s)', l.tag, l.since)
    FROM lanes l JOIN rotations r ON r.queue = l.queue
    WHERE l.due = 0 AND (l.tag, l.since) <= (r.vtime, r.vsince)
    UNION ALL
    SELECT r.queue, NULL, 'a start of arrivals beyond all lanes', format('at most %s', k.tag), r.arrival_tag::text
    FROM rotations r
    LEFT JOIN (SELECT l.queue, max(l.tag) AS tag FROM lanes l GROUP BY l.queue) l ON l.queue = r.queue
    CROSS JOIN LATERAL (SELECT greatest(0, r.vtime, l.tag) AS tag) k
    WHERE r.arrival_tag > r.vtime AND r.arrival_tag > k.tag
    UNION ALL
    SELECT l.queue, l.channel, 'a ready lane before the first one', format('from (%s, %s) on', r.lane_tag, r.lane_since),
        format('(%s, %s)', l.tag, l.since)
    FROM lanes l JOIN rotations r ON r.queue = l.queue
    WHERE l.due = 0 AND (l.tag, l.since) < (r.lane_tag, r.lane_since)
    UNION ALL
    SELECT l.queue, min(l.channel), 'lanes with one activation', '1', format('%s lanes with %s', count(*), l.since)
    FROM lanes l
    WHERE l.due = 0
    GROUP BY l.queue, l.since HAVING count(*) > 1
    UNION ALL
    SELECT l.queue, l.channel, 'an activation that is still to come', format('at most %s', r.activations), l.since::text
    FROM lanes l JOIN rotations r ON r.queue = l.queue
    WHERE l.since > r.activations
    UNION ALL
    SELECT l.queue, l.channel, 'lanes of a channel', '1', count(*)::text
    FROM lanes l
    GROUP BY l.queue, l.channel HAVING count(*) > 1
    UNION ALL
    SELECT r.queue, NULL, 'rotations of a queue', '1', count(*)::text
    FROM rotations r
    GROUP BY r.queue HAVING count(*) > 1
    UNION ALL
    SELECT r.queue, NULL, 'the era of a turn', rotation_era(r.turn)::text, r.era::text
    FROM rotations r
    WHERE r.era <> rotation_era(r.turn)
    UNION ALL
    SELECT DISTINCT l.queue, NULL, 'rotations of a queue', '1', '0'
    FROM lanes l
    WHERE NOT EXISTS (SELECT FROM rotations r WHERE r.queue = l.queue)
    UNION ALL
    SELECT e.queue, e.channel, 'a lease below lease_floor', format('from %s on', r.lease_floor),
        format('message %s until %s', e.id, e.leased_until)
    FROM leases e LEFT JOIN rotations r ON r.queue = e.queue
    WHERE (r.queue IS NULL OR e.leased_until < least(r.lease_floor, r.held_from)
            OR (e.leased_until < r.lease_floor AND r.lease_floor > r.held_at))
        AND NOT EXISTS (SELECT FROM signals s WHERE s.queue = e.queue AND s.channel IS NULL AND s.message_id = e.id)
    UNION ALL
    SELECT l.queue, l.channel, 'a lane below due_floor', format('from %s on', r.due_floor), l.due::text
    FROM lanes l JOIN rotations r ON r.queue = l.queue
    WHERE l.due <> 0 AND l.due < r.due_floor;
END
$$;

REVOKE EXECUTE ON FUNCTION queue_check FROM PUBLIC;

-- In how many seconds something of a queue may be served of which nobody is notified: that a message was scheduled for,
-- or has to wait until after a failure, that the rate of a channel lets out, or that a pause ends for. Null: nothing
-- that is known of.
--
-- Called by workers that have found nothing more to serve, before they wait. An estimate, never too late for what the
-- last dequeue knew of: 0 where that time has come, and less where that dequeue has left something to go through
-- (due_floor 0). Reads only, and takes no lock.
CREATE FUNCTION queue_due(queue text DEFAULT 'default') RETURNS double precision
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path FROM CURRENT
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_now CONSTANT bigint := unix_ms(clock());
BEGIN
    RETURN (
        SELECT CASE WHEN t.due_floor = 0 THEN -1
            WHEN greatest(t.due_floor, t.paused_until) < 9223372036854775807
            THEN (greatest(v_now, t.due_floor, t.paused_until) - v_now) / 1000.0 END
        FROM rotation t WHERE t.queue = v_queue ORDER BY t.era DESC LIMIT 1);
END
$$;

REVOKE EXECUTE ON FUNCTION queue_due FROM PUBLIC;

-- The keys of a queue's advisory locks, of this schema's queue of that name alone: part 0 is its turn, part 1 is for
-- who waits for the turn while others wait for a share in it, part 2 for who plans while others have shares. Those from
-- 101 on are for who gets tickets, whatever the queue.
--
-- Called by scheduler_turn, scheduler_tickets and message_dequeue. Takes no lock itself.
CREATE FUNCTION queue_key(queue text, part integer DEFAULT 0) RETURNS bigint
LANGUAGE sql STABLE PARALLEL SAFE
RETURN hashtextextended(queue, hashtextextended(current_schema(), 720720 + part));

-- Asks for a notification when the queue gets something to do; returns the name of the channel that it comes through.
--
-- Called by workers that are about to wait, in a session of their own; then they commit, dequeue once more, as something
-- may have come in between, and wait. Undone by queue_unlisten or the end of the session; once for each call. A
-- rollback undoes the LISTEN but not the lock, so call it in autocommit; after a rollback call queue_unlisten once for
-- each call that was undone.
-- Locks: a shared advisory lock of the session, for which nobody waits. It says to queue_notify that somebody listens:
-- while all workers are busy, enqueueing notifies nobody, and costs nobody the lock on the whole database that
-- PostgreSQL takes when a transaction commits that has notified.
CREATE FUNCTION queue_listen(queue text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
DECLARE
    v_wake CONSTANT bigint := queue_wake(queue);
    v_channel CONSTANT text := 'fairqueue_' || to_hex(v_wake);
BEGIN
    IF queue IS NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = 'queue must be a name, not null';
    END IF;
    EXECUTE format('LISTEN %I', v_channel);
    PERFORM pg_advisory_lock_shared(v_wake);
    RETURN v_channel;
END
$$;

REVOKE EXECUTE ON FUNCTION queue_listen FROM PUBLIC;

-- Wakes the workers that wait for work in a queue, when the caller's transaction commits. While nobody waits it does
-- nothing, and is true.
--
-- Called by the triggers that signal work: message_arrive, signal_moved, signal_channel, signal_policy,
-- signal_truncated.
-- Locks: for a moment the advisory lock that waiting workers share; it is only tried. If they have it, the commit takes
-- PostgreSQL's lock for notifications, which others that notify in this database wait for.
CREATE FUNCTION queue_notify(queue text) RETURNS boolean
LANGUAGE sql VOLATILE
RETURN CASE
    WHEN pg_try_advisory_lock(queue_wake(queue)) THEN pg_advisory_unlock(queue_wake(queue))
    -- Somebody else is at this very place: then nobody shares it.
    WHEN NOT pg_try_advisory_lock_shared(queue_wake(queue)) THEN true
    -- Or was, just now.
    WHEN pg_advisory_unlock_shared(queue_wake(queue)) AND pg_try_advisory_lock(queue_wake(queue))
    THEN pg_advisory_unlock(queue_wake(queue))
    ELSE pg_notify('fairqueue_' || to_hex(queue_wake(queue)), '') IS NULL
    END;

REVOKE EXECUTE ON FUNCTION queue_notify FROM PUBLIC;

-- Derives everything that the scheduler keeps of a queue anew, whatever it was: afterwards queue_check finds nothing.
--
-- Called by operators, in a READ COMMITTED transaction that commits at once; safe on a live queue. Nothing is lost but,
-- where the lanes themselves were damaged, whom the rotation owes. Of a queue that nobody has ever used nothing is made.
-- Locks: the turn of the queue, until the end of the transaction; then as scheduler_limit and scheduler_rebuild.
CREATE FUNCTION queue_repair(name text DEFAULT 'default') RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
-- Those of message_dequeue, by which what both call is planned.
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_now bigint;
    v_lanes integer;
    r rotation%ROWTYPE;
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE active_sql_transaction USING
            MESSAGE = format('queue_repair needs READ COMMITTED, this transaction is %s',
                upper(current_setting('transaction_isolation'))),
            HINT = 'Repair in a short transaction of its own.';
    END IF;
    IF NOT scheduler_turn(v_queue) THEN
        RAISE lock_not_available USING
            MESSAGE = format('queue %L is being dequeued from', v_queue),
            HINT = 'Repair in a transaction of its own, which has written nothing before; then it waits for its turn.';
    END IF;
    -- Only now: others may have had their turns meanwhile, by a later clock.
    v_now := unix_ms(clock());
    SELECT t.* INTO r FROM rotation t WHERE t.queue = v_queue ORDER BY t.era DESC LIMIT 1;
    IF NOT FOUND THEN
        IF NOT EXISTS (SELECT FROM message m WHERE m.queue = v_queue AND m.leased_until IS NULL)
            AND NOT EXISTS (SELECT FROM message m WHERE m.queue = v_queue AND m.leased_until IS NOT NULL)
            AND NOT EXISTS (SELECT FROM lane l WHERE l.queue = v_queue)
            AND NOT EXISTS (SELECT FROM signal s WHERE s.queue = v_queue)
            AND NOT EXISTS (SELECT FROM missed k WHERE k.queue = v_queue)
            AND NOT EXISTS (SELECT FROM plan p WHERE p.queue = v_queue)
            AND NOT EXISTS (SELECT FROM tickets k WHERE k.queue = v_queue)
        THEN
            RETURN;
        END IF;
        INSERT INTO rotation AS t
        SELECT v_queue, 0, 0, coalesce(min(l.tag) FILTER (WHERE l.due = 0), max(l.tag), 0), 0, 0, '0', '{}', '0', '{}',
            'infinity', 9223372036854775807, -1, '', NULL, NULL, 0, 0, v_now, 0, 0, 0, 0, plan_after(), NULL, NULL
        FROM lane l WHERE l.queue = v_queue
        RETURNING t.* INTO r;
    END IF;
    IF pg_sequence_last_value(r.tickets) <> r.ticket_base THEN
        r := scheduler_settle(v_queue);
    END IF;
    DELETE FROM missed k WHERE k.queue = v_queue;
    -- Beyond every turn that is named anywhere, so that nothing that was counted before counts.
    r.turn := greatest((SELECT max(t.turn) FROM rotation t WHERE t.queue = v_queue),
        1 + (SELECT max(l.counted_from) FROM lane l WHERE l.queue = v_queue),
        1 + (SELECT max(m.counted) FROM message m WHERE m.queue = v_queue AND m.leased_until IS NOT NULL),
        1 + (SELECT max(s.counted) FROM signal s WHERE s.queue = v_queue));
    DELETE FROM rotation t WHERE t.queue = v_queue AND t.era < r.era;
    DELETE FROM lane l USING lane k
    WHERE l.queue = v_queue AND k.queue = v_queue AND k.channel = l.channel AND (k.tag, k.ctid) > (l.tag, l.ctid);
    SELECT greatest(r.activations, r.vsince, max(l.since)) INTO r.activations FROM lane l WHERE l.queue = v_queue;

    PERFORM scheduler_tickets(v_queue, false);
    -- That nobody starts beyond all others, wherever the lanes are now.
    PERFORM scheduler_unplan(v_queue);
    UPDATE rotation t
    SET arrival_tag = least(t.arrival_tag,
        greatest(0, r.vtime, (SELECT max(l.tag) FROM lane l WHERE l.queue = v_queue)))
    WHERE t.queue = v_queue;
    -- All ready lanes get new numbers, in the order of the old ones, and come after what was served.
    UPDATE lane l SET since = r.activations + n.nth, tag = greatest(l.tag, r.vtime)
    FROM (
        SELECT l.ctid AS row, row_number() OVER (ORDER BY l.since, l.head_id) AS nth
        FROM lane l WHERE l.queue = v_queue AND l.due = 0) n
    WHERE l.ctid = n.row;

    GET DIAGNOSTICS v_lanes = ROW_COUNT;
    r.activations := r.activations + v_lanes;
    r := scheduler_limit(r, v_now, true);
    SELECT b.activations, b.due_floor INTO r.activations, r.due_floor
    FROM scheduler_rebuild(v_queue, r.turn, r.vtime, v_now,
        CASE WHEN r.max_concurrency IS NOT NULL THEN r.counted_from END, '-infinity', NULL, true, '', r.activations) b;
    UPDATE rotation t
    SET turn = r.turn + 1, era = rotation_era(r.turn + 1), activations = r.activations, due_floor = r.due_floor,
        lease_floor = coalesce((SELECT min(m.leased_until) FROM message m WHERE m.queue = v_queue), 'infinity'),
        max_concurrency = r.max_concurrency, paused_until = r.paused_until,
        running = r.running, counted_from = r.turn, rebuilt = NULL, clock = v_now, idle_floor = -1, swept = '',
        place = greatest(t.place, t.planned), planned = greatest(t.place, t.planned), ahead = 0,
        plan_at = plan_after(), lane_tag = NULL, lane_since = NULL, tickets = NULL,
        -- All signals are to be read again, whatever they say.
        news_from = '0', news_open = '{}', urgent_from = '0', urgent_open = '{}'
    WHERE t.queue = v_queue;
END
$$;

REVOKE EXECUTE ON FUNCTION queue_repair FROM PUBLIC;

-- Sets the policy of a queue, creating its row where there is none. A parameter that is null, as it is when left out,
-- leaves what is there.
--
-- Called by operators. Takes effect at the next dequeue (trigger queue_changed). With paused => true nothing is served
-- until resume_at, or, without that, until paused => false. Limits are lifted by UPDATE queue SET ... = NULL; DELETE
-- brings back all defaults.
-- Locks: the row of the queue, until the end of the transaction. The scheduler only reads it.
CREATE FUNCTION queue_set(
    name text, max_concurrency integer DEFAULT NULL, paused boolean DEFAULT NULL, resume_at timestamptz DEFAULT NULL,
    max_attempts integer DEFAULT NULL, backoff double precision DEFAULT NULL,
    max_backoff double precision DEFAULT NULL, history_days integer DEFAULT NULL,
    channel_weight double precision DEFAULT NULL, channel_max_concurrency integer DEFAULT NULL,
    channel_release_interval_ms bigint DEFAULT NULL, channel_burst integer DEFAULT NULL,
    channel_max_size integer DEFAULT NULL, channel_overflow text DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
#variable_conflict use_variable
BEGIN
    PERFORM check_pause(paused, resume_at);
    -- In two steps, so that a new row has the defaults of the table.
    INSERT INTO queue (name) VALUES (name) ON CONFLICT ON CONSTRAINT queue_pkey DO NOTHING;
    UPDATE queue q
    SET max_concurrency = coalesce(max_concurrency, q.max_concurrency),
        paused = coalesce(paused, q.paused),
        resume_at = CASE WHEN paused IS NULL THEN q.resume_at ELSE resume_at END,
        max_attempts = coalesce(max_attempts, q.max_attempts),
        backoff = coalesce(backoff, q.backoff),
        max_backoff = coalesce(max_backoff, q.max_backoff),
        history_days = coalesce(history_days, q.history_days),
        channel_weight = coalesce(channel_weight, q.channel_weight),
        channel_max_concurrency = coalesce(channel_max_concurrency, q.channel_max_concurrency),
        channel_release_interval_ms = coalesce(channel_release_interval_ms, q.channel_release_interval_ms),
        channel_burst = coalesce(channel_burst, q.channel_burst),
        channel_max_size = coalesce(channel_max_size, q.channel_max_size),
        channel_overflow = coalesce(channel_overflow, q.channel_overflow)
    WHERE q.name = queue_set.name;
END
$$;

REVOKE EXECUTE ON FUNCTION queue_set FROM PUBLIC;

-- Takes back one queue_listen: this session needs no notification for now. It goes on to LISTEN, so that asking again
-- is cheap; it hears what others have asked for.
--
-- Called by workers that have been woken. False: there was no queue_listen to take back.
-- Locks: releases the advisory lock of the session that queue_listen took.
CREATE FUNCTION queue_unlisten(queue text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET client_min_messages = error
AS $$
BEGIN
    RETURN pg_advisory_unlock_shared(queue_wake(queue));
END
$$;

REVOKE EXECUTE ON FUNCTION queue_unlisten FROM PUBLIC;

-- How many seconds a message waits before its next attempt, after so many that failed.
--
-- Called by message_fail and scheduler_reclaim; takes no lock. The backoff, of the message or else of its queue, doubles
-- with each failure, up to the queue's max_backoff, and is shortened at random by up to a half: what failed together
-- doesn't come back together. 2^60 seconds are beyond every max_backoff already, and no overflow.
CREATE FUNCTION retry_delay(
    failures bigint, backoff double precision, queue_backoff double precision, max_backoff double precision
) RETURNS double precision
LANGUAGE sql VOLATILE
RETURN (0.5 + random() / 2) * least(coalesce(max_backoff, 3600),
    coalesce(backoff, queue_backoff, 1) * power(2, least(greatest(failures - 1, 0), 60)));

-- The part of a rotation's key that grows: 64 turns have the same.
--
-- Called by scheduler_serve, the functions that this serves by, and queue_repair, which write turn, and by queue_check,
-- into whose statements it is expanded; takes no lock. The more turns have the same, the fewer entries the index has;
-- but under an old snapshot so many dead versions may have to be looked through.
CREATE FUNCTION rotation_era(turn bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN turn / 64;

-- Brings the lanes of some channels up to date with what is known of these.
--
-- Called by scheduler_fold, scheduler_sweep, scheduler_limit and scheduler_rebuild, within the turn. For each channel:
-- (ats[i], ids[i]) is a place from which on there may be ready messages, or null; ended[i] is how many counted leases
-- have ended; running[i], where it isn't null, is how many there are, counted anew in this turn. The policy is read
-- again each time. With rebuild, the place is that of the first ready message, and null says that there is none.
--
-- A channel that becomes active starts at max(its own tag, vtime, the rotation's arrival_tag): neither a pause nor a new
-- name gains anything. One that has planned messages isn't new: it stands behind these.
-- Locks: the lanes it changes; nobody else writes lanes while the turn is held.
--
-- Returns the number of activations so far, the earliest time at which one of the lanes that now wait is due, and whether
-- a max_concurrency was taken over whose leases nobody counted: the signal that has them counted may have been committed
-- after signals were read.
CREATE FUNCTION scheduler_activate(
    queue text, turn bigint, vtime bigint, now_ms bigint,
    channels text[], ats bigint[], ids bigint[], ended integer[], running integer[], rebuild boolean,
    INOUT activations bigint, OUT due_floor bigint, OUT uncounted boolean
)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_turn CONSTANT bigint := $2;
    v_vtime CONSTANT bigint := $3;
    v_activations CONSTANT bigint := $11;
    v_vsince bigint;
    v_place bigint;
    v_start bigint;
    v_is_planned boolean;
BEGIN
    SELECT t.vsince, t.place, greatest(v_vtime, t.arrival_tag), t.planned > t.place
    INTO v_vsince, v_place, v_start, v_is_planned
    FROM rotation t WHERE t.queue = v_queue ORDER BY t.era DESC LIMIT 1;
    -- Before what is planned of a channel: then the plan is no longer the order. A single message that stands behind that
    -- is news as any: its lane waits for one that is to come later.
    IF v_is_planned THEN
        -- Not one condition of two parts: all of it would be set up each time.
        IF EXISTS (
            SELECT FROM unnest(channels, ats, ids) AS n (channel, at, id)
            CROSS JOIN LATERAL (
                SELECT l.* FROM lane l
                WHERE l.queue = v_queue AND l.channel = n.channel
                ORDER BY l.tag DESC LIMIT 1) l
            CROSS JOIN LATERAL (
                SELECT m.dequeue_at, m.id FROM message m
                WHERE m.queue = v_queue AND m.channel = n.channel AND m.leased_until IS NULL
                    AND (m.dequeue_at, m.id) >= (n.at, n.id) AND (m.dequeue_at, m.id) < (l.head_at, l.head_id)
                ORDER BY m.dequeue_at DESC, m.id DESC LIMIT 1) m
            WHERE (l.planned, l.since) > (v_vtime, v_vsince) AND (n.at, n.id) < (l.head_at, l.head_id)
                -- The place that a signal tells may be nobody's: the least time of some messages, and their least id.
                AND ((m.dequeue_at, m.id) <> (n.at, n.id) OR EXISTS (
                    SELECT FROM plan p
                    WHERE p.queue = v_queue AND p.place > v_place - 32 AND p.ids @> ARRAY[m.id])))
        THEN
            PERFORM scheduler_unplan(v_queue);
        END IF;
    END IF;

    -- OFFSET 0 keeps these steps apart: merged, what one makes would be written out each time that another uses it.
    WITH known AS (
        SELECT n.channel, n.at, n.id, n.ended, n.running AS counted,
            l.row, l.due, l.tag, l.since, l.is_planned, l.head_at, l.head_id, l.running, l.counted_from, l.released_at,
            -- Where something is planned, as it was then: a signal tells of a change, and the plan is taken back first.
            CASE WHEN l.is_planned THEN l.weight ELSE coalesce(c.weight, q.channel_weight, 1) END AS weight,
            CASE WHEN l.is_planned THEN l.max_concurrency
                ELSE coalesce(c.max_concurrency, q.channel_max_concurrency) END AS max_concurrency,
            CASE WHEN l.is_planned THEN l.release_interval
                ELSE coalesce(c.release_interval_ms, q.channel_release_interval_ms, 0) END AS release_interval,
            CASE WHEN l.is_planned THEN l.burst ELSE coalesce(c.burst, q.channel_burst, 1) END AS burst,
            CASE WHEN l.is_planned THEN l.paused_until ELSE paused_until(c.paused, c.resume_at) END AS paused_until,
            l.weight AS old_weight, l.max_concurrency AS old_max_concurrency, l.burst AS old_burst,
            l.release_interval AS old_release_interval, l.paused_until AS old_paused_until
        FROM (SELECT) AS one
        LEFT JOIN queue q ON q.name = v_queue
        CROSS JOIN unnest(channels, ats, ids, ended, running) AS n (channel, at, id, ended, running)
        LEFT JOIN LATERAL (
            SELECT l.ctid AS row, l.due, l.tag, l.since, l.head_at, l.head_id, l.running, l.counted_from, l.released_at,
                l.weight, l.max_concurrency, l.release_interval, l.burst, l.paused_until,
                NOT rebuild AND v_is_planned AND (l.planned, l.since) > (v_vtime, v_vsince) AS is_planned
            FROM lane l
            WHERE l.queue = v_queue AND l.channel = n.channel
            ORDER BY l.tag DESC LIMIT 1) l ON true
        -- One by one, also where the plan was made when there were hardly any: joined, all of the queue might be read.
        LEFT JOIN LATERAL (
            SELECT c.* FROM channel c WHERE c.queue = v_queue AND c.name = n.channel LIMIT 1) c ON true
        OFFSET 0
    ), head AS (
        SELECT k.*, rebuild OR (k.at IS NOT NULL AND (k.due IS NULL OR (k.at, k.id) < (k.head_at, k.head_id))) AS moves,
            CASE WHEN k.max_concurrency IS NULL THEN 0
                ELSE coalesce(k.counted, greatest(k.running - coalesce(k.ended, 0), 0), 0) END AS new_running
        FROM known k
        OFFSET 0
    ), news AS (
        SELECT h.*, CASE WHEN h.moves THEN h.at WHEN h.due IS NOT NULL THEN h.head_at END AS new_at,
            CASE WHEN h.moves AND h.at IS NOT NULL THEN h.id ELSE coalesce(h.head_id, 0) END AS new_id
        FROM head h
        WHERE h.moves OR h.new_running <> h.running OR h.counted IS NOT NULL
            OR h.weight <> h.old_weight OR h.release_interval <> h.old_release_interval OR h.burst <> h.old_burst
            OR (h.row IS NOT NULL AND (h.max_concurrency IS DISTINCT FROM h.old_max_concurrency
                OR h.paused_until IS DISTINCT FROM h.old_paused_until))
    ), timed AS (
        SELECT n.*, lane_due(now_ms, n.new_at, n.paused_until, n.max_concurrency, n.new_running, n.release_interval,
            n.burst, coalesce(n.released_at, 0)) AS new_due
        FROM news n
        WHERE n.row IS NOT NULL OR n.new_at IS NOT NULL OR n.new_running > 0
        OFFSET 0
    ), wanted AS MATERIALIZED (
        SELECT t.row, t.channel, t.due, t.new_due, t.new_at, t.new_id, t.new_running, t.counted, t.weight, t.burst,
            t.max_concurrency, t.old_max_concurrency, t.release_interval, t.paused_until,
            t.new_due IS NOT DISTINCT FROM 0 AND t.due IS DISTINCT FROM 0 AND t.is_planned IS NOT TRUE AS becomes_ready,
            row_number() OVER (ORDER BY t.new_id) AS nth
        FROM timed t
    ), changed AS (
        UPDATE lane l
        SET due = w.new_due,
            tag = CASE WHEN w.becomes_ready THEN greatest(l.tag, v_start) ELSE l.tag END,
            since = CASE WHEN w.becomes_ready THEN v_activations + w.nth ELSE l.since END,
            planned = CASE WHEN rebuild OR w.becomes_ready THEN -1 ELSE l.planned END,
            head_at = coalesce(w.new_at, l.head_at), head_id = w.new_id,
            weight = w.weight, max_concurrency = w.max_concurrency, release_interval = w.release_interval,
            burst = w.burst, paused_until = w.paused_until, running = w.new_running,
            counted_from = CASE WHEN w.counted IS NULL THEN l.counted_from ELSE v_turn END,
            -- Without a rate it is kept as it is, for the next one.
            released_at = CASE WHEN w.release_interval > 0
                THEN least(l.released_at, now_ms + (w.burst - 1) * w.release_interval) ELSE l.released_at END
        FROM wanted w
        WHERE l.ctid = w.row
    ), born AS (
        INSERT INTO lane (queue, channel, due, tag, since, head_at, head_id, weight, max_concurrency, release_interval,
            burst, paused_until, running, counted_from, released_at, planned)
        SELECT v_queue, w.channel, w.new_due, v_start, CASE WHEN w.becomes_ready THEN v_activations + w.nth ELSE 0 END,
            coalesce(w.new_at, 0), w.new_id, w.weight, w.max_concurrency, w.release_interval, w.burst, w.paused_until,
            w.new_running, CASE WHEN w.counted IS NULL THEN 0 ELSE v_turn END, 0, -1
        FROM wanted w
        WHERE w.row IS NULL
    )
    SELECT v_activations + count(*), coalesce(min(w.new_due) FILTER (WHERE w.new_due > 0), 9223372036854775807),
        coalesce(bool_or(w.max_concurrency IS NOT NULL AND w.old_max_concurrency IS NULL AND w.counted IS NULL), false)
    INTO activations, due_floor, uncounted
    FROM wanted w;
END
$$;

-- Makes dead letters of messages whose last lease ran out; of all of them, or, where one can't be, of none.
--
-- Called by scheduler_reclaim, which has locked them. Returns null, or why it can't be done: a foreign key of the
-- application's may forbid it, or make it wait. No query of the queue's may fail by that, nor wait for long.
-- Locks: as message_finish.
CREATE FUNCTION scheduler_bury(ids bigint[]) RETURNS text
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET lock_timeout = '100ms'
AS $$
DECLARE
    v_error CONSTANT text := 'the lease of the last attempt ran out';
BEGIN
    -- Once to see it fail, and undone: what is deferred, also of tables to which a foreign key leads on, would undo the
    -- whole dequeue at the commit, and each one after it.
    BEGIN
        PERFORM message_finish(ids, 'dead', v_error);
        SET CONSTRAINTS ALL IMMEDIATE;
        RAISE SQLSTATE 'FQ000';
    EXCEPTION WHEN SQLSTATE 'FQ000' THEN
        NULL;
    END;
    PERFORM message_finish(ids, 'dead', v_error);
    RETURN NULL;
EXCEPTION WHEN others THEN
    RETURN SQLERRM;
END
$$;

-- Plans on behind what is planned, before that is used up: as many messages as were served in a row.
--
-- Called by message_dequeue, which has a share in the turn and part 2 of the queue's key: while it plans, others take
-- what was planned before. All that it plans comes after that, so the order is the same as if it came later, and who
-- began before its commit needn't know. The share keeps lanes and rotation as they are; the key, that two plan the same.
-- Locks: the lanes that it changes, and the rotation of the queue, which nobody else writes.
CREATE FUNCTION scheduler_extend(queue text, now_ms bigint) RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_messages integer;
    v_due_floor bigint;
    r record;
BEGIN
    -- As it is now: somebody else may just have done it, or found that there is nothing to plan.
    SELECT t.* INTO r FROM rotation t WHERE t.queue = v_queue ORDER BY t.era DESC LIMIT 1;
    IF r.planned - r.place > r.ahead OR r.ahead < r.plan_at THEN
        RETURN;
    END IF;
    SELECT p.messages, least(p.due_floor, r.due_floor) INTO v_messages, v_due_floor
    FROM scheduler_plan(v_queue, r.vtime, r.vsince, now_ms, 2 * r.ahead - (r.planned - r.place)::integer, r.place,
        r.planned, true) p;
    -- As in scheduler_serve: where it came to nothing, it is not tried again at once.
    IF v_messages = 0 THEN
        r.ahead := least(r.ahead, plan_most() / 2);
        r.plan_at := 2 * r.ahead;
    END IF;
    UPDATE rotation t
    SET lane_tag = coalesce(l.tag, 9223372036854775807), lane_since = coalesce(l.since, 9223372036854775807),
        planned = r.planned + v_messages, due_floor = v_due_floor, ahead = r.ahead, plan_at = r.plan_at
    FROM (SELECT) AS one
    LEFT JOIN LATERAL (
        SELECT l.tag, l.since FROM lane l
        WHERE l.queue = v_queue AND l.due = 0 AND (l.tag, l.since) > (r.vtime, r.vsince)
        ORDER BY l.tag, l.since LIMIT 1) l ON true
    WHERE t.queue = v_queue AND t.era = r.era;
END
$$;

-- Folds up to max_signals signals into lanes and deletes them: the urgent ones, or the others.
--
-- Called by scheduler_serve, within the turn. horizon and open are rotation's: the signals that no fold has seen are
-- those of transactions from the horizon on and of those that were in progress below it. Reading just these, through
-- the index on the transaction id, a fold never walks over the signals of the past.
-- Locks: the signals it deletes, which nobody else deletes, leases that were held when they were counted and aren't any
-- more, and what scheduler_recount and scheduler_activate lock. It waits for nobody.
--
-- Returns the new horizon, the number of activations so far, the earliest time at which a lane that now waits is due,
-- whether one has a limit whose leases nobody counted (scheduler_activate), how many leases that the queue counted have
-- ended, whether what the queue says of its channels changed, whether what it says of itself did, whether signals may be
-- left, of how many channels those that it folded told, the message that the last of the folded transactions began with:
-- about the first of those that what is left tells of; and the earliest end of those leases that users have set.
CREATE FUNCTION scheduler_fold(
    queue text, is_urgent boolean, turn bigint, vtime bigint, now_ms bigint, max_signals integer, counted_from bigint,
    INOUT horizon xid8, INOUT open xid8[], INOUT activations bigint,
    OUT due_floor bigint, OUT uncounted boolean, OUT ended integer, OUT channels_changed boolean,
    OUT queue_changed boolean, OUT more boolean, OUT told integer, OUT first_id bigint, OUT lease_floor timestamptz
)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_turn CONSTANT bigint := $3;
    v_counted_from CONSTANT bigint := $7;
    v_from CONSTANT xid8 := $8;
    v_open CONSTANT xid8[] := $9;
    v_activations CONSTANT bigint := $10;
    v_xid CONSTANT xid8 := pg_current_xact_id();
    v_doubtful integer;
    v_snapshot pg_snapshot;
    v_folded integer;
    v_late integer;
    v_last xid8;
    v_channels text[];
    v_ats bigint[];
    v_ids bigint[];
    v_ended integer[];
    v_changed boolean[];
    v_running integer[];
    v_leases bigint[];
BEGIN
    -- In doubt since this transaction began: for the next one, or a call that has looked at many would never end.
    WITH gone AS (
        DELETE FROM signal s
        WHERE s.ctid = ANY (ARRAY(
            (SELECT s.row
            FROM unnest(v_open) AS o (xid)
            CROSS JOIN LATERAL (
                SELECT s.ctid AS row
                FROM signal s
                WHERE s.queue = v_queue AND s.urgent = is_urgent AND s.xid = o.xid
                    AND NOT (s.xid = v_xid AND s.message_id IS NOT NULL AND s.dequeue_at IS NULL)
                LIMIT max_signals) s
            -- Who is still under way has told nothing yet, however much it wrote.
            WHERE o.xid < v_from AND pg_visible_in_snapshot(o.xid, pg_current_snapshot())
            LIMIT max_signals)
            UNION ALL
            (SELECT s.ctid
            FROM signal s
            WHERE s.queue = v_queue AND s.urgent = is_urgent AND s.xid >= v_from
                AND NOT (s.xid = v_xid AND s.message_id IS NOT NULL AND s.dequeue_at IS NULL)
            ORDER BY s.xid
            LIMIT max_signals)))
        RETURNING s.channel, s.dequeue_at, s.message_id, s.counted, s.xid, s.xid < v_from AS is_late,
            s.counted IS NOT NULL AND (s.message_id IS NULL OR s.dequeue_at IS NOT NULL OR coalesce((
                SELECT coalesce(m.counted, -1) >= s.counted OR m.leased_until IS NULL
                FROM message m WHERE m.id = s.message_id), true)) AS is_end
    -- A lease that could not be marked when it was counted, and is still there.
    ), again AS (
        INSERT INTO signal (queue, channel, message_id, counted, urgent)
        SELECT v_queue, g.channel, g.message_id, g.counted, true
        FROM gone g
        WHERE g.counted IS NOT NULL AND NOT g.is_end
        RETURNING 1
    ), news AS (
        SELECT g.channel, min(g.dequeue_at) AS at,
            (array_agg(g.message_id ORDER BY g.dequeue_at, g.message_id))[1] AS id,
            array_agg(g.counted) FILTER (WHERE g.is_end) AS ends,
            bool_or(g.message_id IS NULL AND g.counted IS NULL) AS changed
        FROM gone g
        WHERE g.channel IS NOT NULL
        GROUP BY g.channel
    ), news_lists AS (
        SELECT array_agg(n.channel) AS channels, array_agg(n.at) AS ats,
            array_agg(CASE WHEN n.at IS NOT NULL THEN n.id END) AS ids, array_agg(e.ended) AS ended,
            array_agg(n.changed) AS changed
        FROM news n
        CROSS JOIN LATERAL (
            SELECT count(*)::integer AS ended
            FROM unnest(n.ends) AS x
            WHERE x >= (SELECT l.counted_from FROM lane l WHERE l.queue = v_queue AND l.channel = n.channel
                ORDER BY l.tag DESC LIMIT 1)) e
    ), counts AS (
        SELECT count(*) FILTER (WHERE NOT g.is_late) AS folded, count(*) FILTER (WHERE g.is_late) AS late,
            (array_agg(g.xid ORDER BY g.xid DESC))[1] AS last,
            count(*) FILTER (WHERE g.is_end AND g.counted >= v_counted_from) AS ended,
            coalesce(bool_or(g.channel IS NULL AND g.message_id IS NULL AND g.dequeue_at IS NULL), false)
                AS channels_changed,
            coalesce(bool_or(g.channel IS NULL AND g.dequeue_at IS NOT NULL), false) AS queue_changed,
            array_agg(g.message_id) FILTER (WHERE g.channel IS NULL AND g.message_id IS NOT NULL) AS leases,
            -- Of those that began before and enqueued late there may be many, but hardly ever is one of them the last.
            coalesce((array_agg(g.message_id ORDER BY g.xid DESC, g.message_id) FILTER (WHERE NOT g.is_late))[1],
                min(g.message_id)) AS first_id,
            (SELECT count(*) FROM again) AS doubtful
        FROM gone g
    )
    SELECT pg_current_snapshot(), c.folded, c.late, c.last, c.ended, c.channels_changed, c.queue_changed, c.doubtful,
        c.first_id, c.leases, l.channels, l.ats, l.ids, l.ended, l.changed
    INTO v_snapshot, v_folded, v_late, v_last, ended, channels_changed, queue_changed, v_doubtful, first_id, v_leases,
        v_channels, v_ats, v_ids, v_ended, v_changed
    FROM counts c, news_lists l;

    -- What was not visible to the statement above, and what it had no room for, is for the next fold.
    more := v_folded = max_signals OR v_late = max_signals;
    told := coalesce(cardinality(v_channels), 0);
    SELECT u.horizon, u.open INTO horizon, open
    FROM scheduler_under_way(v_snapshot, v_from, v_last, CASE WHEN v_folded = max_signals THEN v_last END) u;
    IF v_late = max_signals THEN
        open := ARRAY(SELECT unnest(open) UNION SELECT unnest(v_open));
        -- Some of these have not been read at all: what they began with may be before all that was.
        first_id := least(first_id, (
            SELECT min(s.message_id)
            FROM unnest(v_open) AS o (xid)
            CROSS JOIN LATERAL (
                SELECT s.message_id FROM signal s
                WHERE s.queue = v_queue AND s.urgent = is_urgent AND s.xid = o.xid LIMIT 1) s
            WHERE pg_visible_in_snapshot(o.xid, pg_current_snapshot())));
    END IF;
    -- Marked, if nobody holds it any more, it will signal its end; otherwise it is to be looked at again.
    IF v_doubtful > 0 THEN
        WITH doubtful AS MATERIALIZED (
            SELECT s.ctid AS row, s.message_id, s.counted
            FROM signal s
            WHERE s.queue = v_queue AND s.urgent AND s.xid = v_xid AND s.message_id IS NOT NULL
                AND s.dequeue_at IS NULL
        ), held AS MATERIALIZED (
            SELECT m.ctid AS row, d.counted, d.signals
            FROM (
                SELECT d.message_id, max(d.counted) AS counted, array_agg(d.row) AS signals
                FROM doubtful d GROUP BY d.message_id) d
            -- Not =: see lease_list.
            JOIN message m ON m.id BETWEEN d.message_id AND d.message_id
            WHERE m.leased_until IS NOT NULL AND coalesce(m.counted, -1) < d.counted
            FOR NO KEY UPDATE OF m SKIP LOCKED
        ), marked AS (
            UPDATE message m SET counted = h.counted FROM held h WHERE m.ctid = h.row RETURNING h.signals
        )
        DELETE FROM signal s
        USING (SELECT unnest(k.signals) AS row FROM marked k) k
        WHERE s.ctid = k.row;
    END IF;
    IF v_leases IS NOT NULL THEN
        SELECT min(m.leased_until) INTO lease_floor
        -- Not =: see lease_list.
        FROM unnest(v_leases) AS l (id) JOIN message m ON m.id BETWEEN l.id AND l.id;
    END IF;
    IF true = ANY (v_changed) THEN
        PERFORM scheduler_unplan(v_queue);
        SELECT r.running INTO v_running
        FROM scheduler_recount(v_queue, v_turn, v_channels, v_changed, false, v_counted_from) r;
    END IF;
    SELECT a.activations, a.due_floor, a.uncounted INTO activations, due_floor, uncounted
    FROM scheduler_activate(v_queue, coalesce(v_counted_from, v_turn), vtime, now_ms, v_channels, v_ats, v_ids,
        v_ended, v_running, false, v_activations) a;
END
$$;

-- The state of a queue with what holds for the whole of it, its pause and its max_concurrency, read again.
--
-- Called by scheduler_serve, within the turn, when these changed, and before lanes are derived anew; and by queue_repair.
-- Where there was no max_concurrency, or what was counted is not to be gone by, all leases are counted, and marked as
-- counted in this turn; and with them those of lanes that count theirs, which go by the same marks, unless all lanes are
-- to come anew; also of lanes that have counted none, as leases that users gave aren't. No other lane is touched, and the
-- plan stays. From one max_concurrency to another the count goes on.
-- Locks: as scheduler_recount; and the lanes that count leases.
CREATE FUNCTION scheduler_limit(r rotation, now_ms bigint, anew boolean) RETURNS rotation
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_is_counted CONSTANT boolean := r.max_concurrency IS NOT NULL AND NOT anew;
    v_channels text[];
    v_running integer[];
BEGIN
    SELECT q.max_concurrency, paused_until(q.paused, q.resume_at) INTO r.max_concurrency, r.paused_until
    FROM queue q WHERE q.name = r.queue;
    IF r.max_concurrency IS NULL THEN
        r.running := 0;
    ELSIF NOT v_is_counted THEN
        v_channels := ARRAY(
            SELECT l.channel FROM lane l
            WHERE l.queue = r.queue AND NOT anew AND (l.running > 0 OR (l.max_concurrency IS NOT NULL AND l.channel IN (
                SELECT m.channel FROM message m WHERE m.queue = r.queue AND m.leased_until IS NOT NULL))));
        r.counted_from := r.turn;
        SELECT c.running, c.total INTO v_running, r.running
        FROM scheduler_recount(
            r.queue, r.turn, v_channels, array_fill(true, ARRAY[cardinality(v_channels)]), true, NULL) c;
        SELECT a.activations, least(a.due_floor, r.due_floor) INTO r.activations, r.due_floor
        FROM scheduler_activate(
            r.queue, r.turn, r.vtime, now_ms, v_channels, NULL, NULL, NULL, v_running, false, r.activations) a;
    END IF;
    RETURN r;
END
$$;

-- Schedules some max_messages messages of a queue ahead: finds their order and writes it to plan. Among so many
-- channels that each would come up less than twice, it schedules up to 8 times as many (up to 3072). Where each would
-- come up less than two and a half times then, so that many of them wouldn't twice: only the heads of lanes
-- (scheduler_plan_heads), or nothing.
--
-- Called by scheduler_serve, within the turn, and by scheduler_extend, where much is waiting and little is planned:
-- probing a channel and writing its lane, which is most of what fairness costs, is then done once for several of its
-- messages. Planned is only what needs no second look when its time comes: messages of lanes without limits, and of each
-- all but the last one that is ready, so that the lane stays active.
-- Locks: the lanes that it changes, and the rows of plan that it deletes.
--
-- heads: whether it pays to plan the heads of lanes alone.
-- place is that of the last message that was served, planned that of the last one that was planned: those that this
-- plans follow it. Returns how many they are, and the earliest time at which one of the lanes that now wait is due.
CREATE FUNCTION scheduler_plan(
    queue text, vtime bigint, vsince bigint, now_ms bigint, max_messages integer, place bigint, planned bigint,
    heads boolean, OUT messages integer, OUT due_floor bigint
)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_place CONSTANT bigint := $6;
    v_planned CONSTANT bigint := $7;
    v_tag bigint := $2;
    v_since bigint := $3;
    v_longest CONSTANT integer := greatest(max_messages, least(8 * max_messages, 3072));
    -- With more of them, each would come up less than two and a half times.
    v_most_lanes CONSTANT integer := 2 * v_longest / 5;
BEGIN
    messages := 0;
    due_floor := 9223372036854775807;
    -- No more than that has been served since this was last done.
    DELETE FROM plan p WHERE p.queue = v_queue AND p.place > v_place - 4 * plan_most() AND p.place <= v_place - 32;

    -- What is planned is continued only where all lanes stand behind it: one that came since would never get into it.
    IF v_planned > v_place THEN
        SELECT p.tags[v_planned - p.place + 1], p.sinces[v_planned - p.place + 1] INTO v_tag, v_since
        FROM plan p
        WHERE p.queue = v_queue AND p.place > v_planned - 32 AND p.place <= v_planned
        ORDER BY p.place DESC LIMIT 1;
        -- Not found: it was taken back just now.
        IF NOT FOUND OR EXISTS (
            SELECT FROM lane l
            WHERE l.queue = v_queue AND l.due = 0 AND (l.tag, l.since) > (vtime, vsince)
                AND (l.tag, l.since) < (v_tag, v_since))
        THEN
            RETURN;
        END IF;
    END IF;

    IF EXISTS (
        SELECT FROM lane l
        WHERE l.queue = v_queue AND l.due = 0 AND (l.tag, l.since) > (v_tag, v_since)
        ORDER BY l.tag, l.since
        OFFSET v_most_lanes LIMIT 1)
    THEN
        -- So few that it takes a fiftieth of a second.
        IF heads THEN
            SELECT h.messages, h.due_floor INTO messages, due_floor
            FROM scheduler_plan_heads(v_queue, v_tag, v_since, now_ms, least(max_messages, 1536), v_planned) h;
        END IF;
        RETURN;
    END IF;

    WITH competing AS MATERIALIZED (
        SELECT l.ctid AS lane, l.channel, l.tag, l.since, l.weight, l.head_at, l.head_id, l.gap_at, l.gap_id,
            lane_step(1, l.weight)::double precision AS step,
            l.max_concurrency IS NULL AND l.release_interval = 0 AS is_free
        FROM lane l
        WHERE l.queue = v_queue AND l.due = 0 AND (l.tag, l.since) > (v_tag, v_since)
        ORDER BY l.tag, l.since
        LIMIT v_most_lanes
    ), total AS MATERIALIZED (
        SELECT CASE WHEN 2 * count(*) <= max_messages THEN max_messages ELSE v_longest END AS messages
        FROM competing k
        HAVING bool_and(k.is_free)
    -- How many messages each may get, if all cost 1: as in scheduler_serve_shares.
    ), levels AS (
        SELECT c.*, t.messages, (t.messages - count(*) OVER w + sum((c.tag - v_tag) / c.step) OVER w)
            / sum(1 / c.step) OVER w AS level
        FROM total t CROSS JOIN competing c
        WINDOW w AS (ORDER BY c.tag, c.since ROWS UNBOUNDED PRECEDING)
    ), shares AS (
        SELECT c.*, greatest(1, least(c.messages,
            floor((min(c.level) OVER () - (c.tag - v_tag)) / c.step + 0.000001) + 1))::integer AS share
        FROM levels c
    -- Up to where so many, and some more, are likely to stand: not before the head, to which a large number may be
    -- rounded, nor beyond the present.
    ), reaches AS (
        SELECT s.*, least(now_ms, greatest(s.head_at,
                least(now_ms, s.head_at + s.gap_at * 1.25 * (s.share + 2))::bigint)) AS reach_at,
            CASE WHEN s.gap_at > 0 THEN 9223372036854775807 ELSE greatest(s.head_id,
                least(9e18, s.head_id + s.gap_id * 1.25 * (s.share + 2))::bigint) END AS reach_id
        FROM shares s
    -- The last one of a lane isn't planned: so the lane stays active.
    ), candidates AS MATERIALIZED (
        SELECT s.lane, s.channel, s.since, m.row, m.id, m.attempt, m.dequeue_at, m.nth > s.share AS is_beyond, m.is_last,
            s.tag + m.before AS start, s.tag + m.before - m.previous_step AS previous_start,
            (m.dequeue_at::double precision - s.head_at) / nullif(m.nth - 1, 0) AS gap_at,
            greatest(0, (m.id::double precision - s.head_id) / nullif(m.nth - 1, 0)) AS gap_id
        FROM reaches s
        CROSS JOIN LATERAL (
            SELECT m.row, m.id, m.attempt, m.dequeue_at, row_number() OVER w AS nth, lead(m.id) OVER w IS NULL AS is_last,
                (sum(m.step) OVER w)::bigint - m.step AS before, lag(m.step) OVER w AS previous_step
            FROM (
                SELECT m.row, m.id, m.attempt, m.dequeue_at, lane_step(m.cost, s.weight) AS step
                -- An index scan reads all that is within its bounds on a page, though few are wanted: so there are two,
                -- and the second one is begun only where the first one, which has a bound nearby, finds too little.
                FROM (
                    (SELECT m.ctid AS row, m.id, m.attempt, m.dequeue_at, m.cost
                    FROM message m
                    WHERE m.queue = v_queue AND m.channel = s.channel AND m.leased_until IS NULL
                        AND (m.dequeue_at, m.id) >= (s.head_at, s.head_id)
                        AND (m.dequeue_at, m.id) <= (s.reach_at, s.reach_id)
                    ORDER BY m.dequeue_at, m.id
                    LIMIT s.share + 1)
                    UNION ALL
                    (SELECT m.ctid, m.id, m.attempt, m.dequeue_at, m.cost
                    FROM message m
                    WHERE m.queue = v_queue AND m.channel = s.channel AND m.leased_until IS NULL
                        AND (m.dequeue_at, m.id) >= (s.head_at, s.head_id)
                        AND (m.dequeue_at, m.id) > (s.reach_at, s.reach_id) AND m.dequeue_at <= now_ms
                    ORDER BY m.dequeue_at, m.id
                    LIMIT s.share + 1)) m
                LIMIT s.share + 1) m
            WINDOW w AS (ORDER BY m.dequeue_at, m.id ROWS UNBOUNDED PRECEDING)) m
    -- Up to where a lane may have more than was looked at.
    ), planned AS MATERIALIZED (
        SELECT array_agg(c.row) AS rows, array_agg(c.id) AS ids, array_agg(c.attempt) AS attempts,
            array_agg(c.start) AS tags, array_agg(c.since) AS sinces, array_agg(c.channel) AS channels,
            count(*)::integer AS messages
        FROM (
            SELECT c.row, c.id, c.attempt, c.start, c.since, c.channel
            FROM candidates c
            WHERE NOT c.is_last
                AND c.start < coalesce((SELECT min(k.start) FROM candidates k WHERE k.is_beyond), 9223372036854775807)
            ORDER BY c.start, c.since
            LIMIT (SELECT t.messages FROM total t)) c
    ), last AS MATERIALIZED (
        SELECT p.tags[p.messages] AS start, p.sinces[p.messages] AS since FROM planned p
    -- A lane stands at the first of its messages that isn't planned.
    ), moves AS MATERIALIZED (
        SELECT c.lane, c.start, c.previous_start, c.dequeue_at, c.id, c.gap_at, c.gap_id
        FROM last k CROSS JOIN candidates c
        WHERE (c.previous_start, c.since) <= (k.start, k.since)
            AND (c.is_last OR (c.start, c.since) > (k.start, k.since))
    ), worthwhile AS MATERIALIZED (
        SELECT p.* FROM planned p WHERE p.messages >= 2 * (SELECT count(*) FROM moves)
    ), moved AS (
        UPDATE lane l
        SET tag = v.start, head_at = v.dequeue_at, head_id = v.id, planned = v.previous_start, gap_at = v.gap_at,
            gap_id = v.gap_id
        FROM moves v
        WHERE l.ctid = v.lane AND EXISTS (SELECT FROM worthwhile)
    )
    SELECT scheduler_plan_write(v_queue, v_planned, w.rows, w.ids, w.attempts, w.tags, w.sinces, w.channels) INTO messages
    FROM worthwhile w;
    messages := coalesce(messages, 0);
END
$$;

-- Schedules up to max_messages messages of a queue ahead, one of each channel: the heads of as many lanes.
--
-- Called by scheduler_plan, where so many channels take turns that none would come up twice. No lane is visited less
-- often for it; but dequeues then take what is planned side by side, where each would have scheduled its own in a turn.
-- Planned is only what needs no second look when its time comes: messages of lanes without limits. A lane that has no
-- more becomes idle, though its last message is still to be served: if something comes for it until then, it stands
-- where it would have stood (scheduler_activate, scheduler_wake).
-- Locks: the lanes that it changes.
--
-- It plans behind tag and since; planned is the place of what stands there. Returns how many it has planned, which are
-- none where they would be few, and the earliest time at which one of the lanes that now wait is due.
CREATE FUNCTION scheduler_plan_heads(
    queue text, tag bigint, since bigint, now_ms bigint, max_messages integer, planned bigint,
    OUT messages integer, OUT due_floor bigint
)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_tag CONSTANT bigint := $2;
    v_since CONSTANT bigint := $3;
    v_planned CONSTANT bigint := $6;
BEGIN
    WITH competing AS MATERIALIZED (
        SELECT l.ctid AS lane, l.channel, l.tag, l.since, l.weight, l.head_at, l.head_id,
            l.max_concurrency IS NULL AND l.release_interval = 0 AS is_free
        FROM lane l
        WHERE l.queue = v_queue AND l.due = 0 AND (l.tag, l.since) > (v_tag, v_since)
        ORDER BY l.tag, l.since
        LIMIT max_messages
    ), seen AS MATERIALIZED (
        SELECT c.lane, c.channel, c.tag, c.since, m.row, m.dequeue_at, m.id, m.attempt, m.next_at, m.next_id,
            c.tag + lane_step(m.cost, c.weight) AS next_tag, coalesce(m.dequeue_at <= now_ms, false) AS is_ripe
        FROM competing c
        LEFT JOIN LATERAL (
            SELECT m.row, m.dequeue_at, m.id, m.attempt, m.cost, lead(m.dequeue_at) OVER w AS next_at,
                lead(m.id) OVER w AS next_id
            FROM (
                SELECT m.ctid AS row, m.dequeue_at, m.id, m.attempt, m.cost
                FROM message m
                WHERE m.queue = v_queue AND m.channel = c.channel AND m.leased_until IS NULL
                    AND (m.dequeue_at, m.id) >= (c.head_at, c.head_id)
                ORDER BY m.dequeue_at, m.id
                LIMIT 2) m
            WINDOW w AS (ORDER BY m.dequeue_at, m.id)
            ORDER BY m.dequeue_at, m.id
            LIMIT 1) m ON true
        WHERE (SELECT bool_and(k.is_free) FROM competing k)
    -- As long as none would come again before the last of them. Lanes without one become idle, or wait.
    ), heads AS MATERIALIZED (
        SELECT s.*
        FROM seen s
        LEFT JOIN (
            SELECT k.next_tag, k.since FROM seen k
            WHERE k.is_ripe AND k.next_at <= now_ms
            ORDER BY k.next_tag, k.since LIMIT 1) again ON true
        WHERE (s.tag, s.since) < (again.next_tag, again.since) IS NOT FALSE
        ORDER BY s.tag, s.since
    ), planned AS MATERIALIZED (
        SELECT array_agg(h.row) AS rows, array_agg(h.id) AS ids, array_agg(h.attempt) AS attempts,
            array_agg(h.tag) AS tags, array_agg(h.since) AS sinces, array_agg(h.channel) AS channels
        FROM heads h
        WHERE h.is_ripe
        HAVING count(*) * 2 >= max_messages
    ), moved AS (
        UPDATE lane l
        SET tag = CASE WHEN h.is_ripe THEN h.next_tag ELSE l.tag END,
            due = CASE WHEN NOT h.is_ripe THEN h.dequeue_at WHEN h.next_at <= now_ms THEN 0 ELSE h.next_at END,
            head_at = coalesce(CASE WHEN h.is_ripe THEN h.next_at END, h.dequeue_at, l.head_at),
            -- Behind what is planned: of the last of all numbers there is none behind it.
            head_id = CASE WHEN h.is_ripe THEN coalesce(h.next_id, least(h.id, 9223372036854775806) + 1)
                ELSE coalesce(h.id, l.head_id) END,
            planned = CASE WHEN h.is_ripe THEN h.tag ELSE l.planned END
        FROM heads h
        WHERE l.ctid = h.lane AND EXISTS (SELECT FROM planned)
        RETURNING l.due
    )
    SELECT coalesce((
            SELECT scheduler_plan_write(v_queue, v_planned, p.rows, p.ids, p.attempts, p.tags, p.sinces, p.channels)
            FROM planned p), 0),
        coalesce(min(v.due) FILTER (WHERE v.due > 0), 9223372036854775807)
    INTO messages, due_floor
    FROM moved v;
END
$$;

-- Writes the order of some messages of a queue to plan, behind the place planned; returns how many they are.
--
-- Called by scheduler_plan and scheduler_plan_heads, within the turn or with a share in it. The arrays are those of plan,
-- of any length. In SQL, as plpgsql would take them apart when it is given them, and put them together for each row.
-- Locks: nothing that anybody else writes.
CREATE FUNCTION scheduler_plan_write(
    queue text, planned bigint, rows tid[], ids bigint[], attempts integer[], tags bigint[], sinces bigint[],
    channels text[]
) RETURNS integer
LANGUAGE sql
SET search_path FROM CURRENT
AS $$
    WITH written AS (
        INSERT INTO plan (queue, place, rows, ids, attempts, tags, sinces, channels)
        -- Small enough that reading one costs little where a single message is wanted.
        SELECT $1, $2 + n, $3[n:n + 31], $4[n:n + 31], $5[n:n + 31], $6[n:n + 31], $7[n:n + 31],
            k.channels[n - k.before:n - k.before + 31]
        -- To cut something out of many names, all before it are read: so it is cut out of some.
        FROM (
            SELECT k.before, $8[k.before + 1:k.before + 512] AS channels
            FROM generate_series(0, cardinality($8) - 1, 512) AS k (before)
            OFFSET 0) k
        CROSS JOIN generate_series(k.before + 1, k.before + cardinality(k.channels), 32) AS n
        RETURNING cardinality(ids) AS messages
    )
    SELECT coalesce(sum(w.messages), 0)::integer FROM written w
$$;

-- What is planned of a queue behind the place of its rotation, up to the place last (null: all), and what became of it.
--
-- Called by scheduler_settle, scheduler_unplan and queue_check; takes no lock. Left is a message that is ready and was
-- leased no more often than when it was planned: what was taken and has failed since is ready again, but isn't left. It
-- is found by its id, not by its row, which may be another one: the table was rewritten, or restored. Taken is, of what
-- dequeues without the turn had tickets for, what is neither left nor was missed by them. Stable: it sees what the
-- statement sees that calls it, though that deletes what is planned.
CREATE FUNCTION scheduler_planned(queue text, last bigint DEFAULT NULL)
RETURNS TABLE (
    place bigint, channel text, tag bigint, since bigint, id bigint, left_id bigint, left_at bigint, is_taken boolean
)
LANGUAGE sql STABLE
SET search_path FROM CURRENT
AS $$
    SELECT e.place, e.channel, e.tag, e.since, e.id, m.id, m.dequeue_at,
        -- Nobody takes what comes after a lane.
        m.id IS NULL AND e.place <= r.drawn
            AND coalesce((e.tag, e.since) < (r.lane_tag, r.lane_since), false)
            -- OFFSET: else all of it might be read and hashed, dead entries among it.
            AND NOT EXISTS (
                SELECT FROM missed k WHERE k.queue = r.queue AND k.turn = r.turn AND k.place = e.place OFFSET 0)
    FROM (
        SELECT r.*, r.place + coalesce(pg_sequence_last_value(r.tickets) - r.ticket_base, 0) AS drawn
        FROM rotation r WHERE r.queue = $1 ORDER BY r.era DESC LIMIT 1) r
    CROSS JOIN LATERAL (
        SELECT e.*, p.place + e.nth - 1 AS place
        FROM plan p
        CROSS JOIN LATERAL unnest(p.ids, p.attempts, p.tags, p.sinces, p.channels) WITH ORDINALITY
            AS e (id, attempt, tag, since, channel, nth)
        -- Not that of r: there is nothing to join by but a loop, whatever the caller's settings.
        WHERE p.queue = $1 AND p.place > r.place - 32 AND p.place <= coalesce($2, 9223372036854775807)) e
    -- By its id alone, so that no index but that one can be used for it.
    LEFT JOIN LATERAL (SELECT m.* FROM message m WHERE m.id = e.id OFFSET 0) m
        ON m.queue = $1 AND m.channel = e.channel AND m.leased_until IS NULL AND m.attempt <= e.attempt
    WHERE e.place > r.place AND e.place <= coalesce($2, 9223372036854775807)
$$;

-- Derives up to max_lanes lanes of a queue anew from the rows of message, channel and queue: the next ones by name.
--
-- Called by scheduler_serve, within the turn, when what the queue says of its channels changed, when messages or
-- policies were truncated, and when the clock was set back: a part in each turn, so that none takes long, and nothing is
-- served before all have been. And by queue_repair, for all at once and thorough: what is kept may be wrong then, and is
-- not gone by. Otherwise it looks from the heads of lanes on, as what comes before are the entries of served messages,
-- which an old snapshot keeps. Tags stay: whom the rotation owes what can't be derived. What was planned
-- has been taken back before (scheduler_unplan), and what holds for the whole queue read again (scheduler_limit).
-- Locks: the lanes; their leases, as far as nobody else holds them (scheduler_recount).
--
-- Where the queue counts its leases, counted_from says since when, else it is null; no lease ends before lease_floor.
-- Returns the last channel it looked at, null after the last one of all, the number of activations so far, the earliest
-- time at which one of the lanes that now wait is due, and whether a lane has a limit whose leases nobody counted, because
-- it was committed meanwhile (scheduler_activate). Takes time in proportion to max_lanes, and to the number of leases.
CREATE FUNCTION scheduler_rebuild(
    queue text, turn bigint, vtime bigint, now_ms bigint, counted_from bigint, lease_floor timestamptz, max_lanes integer,
    thorough boolean, INOUT rebuilt text, INOUT activations bigint, OUT due_floor bigint, OUT uncounted boolean
)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_counted_from CONSTANT bigint := $5;
    v_rebuilt CONSTANT text := $9;
    v_activations CONSTANT bigint := $10;
    v_channels text[];
    v_ats bigint[];
    v_ids bigint[];
    v_running integer[];
BEGIN
    WITH RECURSIVE walk AS (
        (SELECT m.channel FROM message m WHERE m.queue = v_queue AND m.leased_until IS NULL AND thorough
         ORDER BY m.channel LIMIT 1)
        UNION ALL
        SELECT (SELECT m.channel FROM message m
                WHERE m.queue = v_queue AND m.leased_until IS NULL AND m.channel > w.channel
                ORDER BY m.channel LIMIT 1)
        FROM walk w WHERE w.channel IS NOT NULL
    ), part AS MATERIALIZED (
        SELECT l.channel FROM lane l
        WHERE l.queue = v_queue AND l.channel > v_rebuilt
        ORDER BY l.channel LIMIT max_lanes
    ), last AS MATERIALIZED (
        SELECT CASE WHEN count(*) = max_lanes THEN max(p.channel) END AS channel FROM part p
    ), known AS (
        SELECT w.channel FROM walk w WHERE w.channel IS NOT NULL
        UNION
        SELECT p.channel FROM part p
        UNION
        SELECT m.channel FROM message m
        WHERE m.queue = v_queue AND m.leased_until >= lease_floor AND m.channel > v_rebuilt
            AND (m.channel > (SELECT t.channel FROM last t)) IS NOT TRUE
    )
    SELECT array_agg(k.channel), array_agg(h.dequeue_at), array_agg(h.id), (SELECT t.channel FROM last t)
    INTO v_channels, v_ats, v_ids, rebuilt
    FROM known k
    LEFT JOIN LATERAL (
        SELECT l.due, l.head_at, l.head_id FROM lane l
        WHERE l.queue = v_queue AND l.channel = k.channel
        ORDER BY l.tag DESC LIMIT 1) l ON true
    LEFT JOIN LATERAL (
        (SELECT m.dequeue_at, m.id FROM message m
         WHERE m.queue = v_queue AND m.channel = k.channel AND m.leased_until IS NULL
            AND (m.dequeue_at, m.id) >= (l.head_at, l.head_id) AND l.due IS NOT NULL AND NOT thorough
         ORDER BY m.dequeue_at, m.id LIMIT 1)
        UNION ALL
        -- Nothing is there where something was: all were truncated, and new ones may have begun before it.
        (SELECT m.dequeue_at, m.id FROM message m
         WHERE m.queue = v_queue AND m.channel = k.channel AND m.leased_until IS NULL
            AND (thorough OR l.due IS NOT NULL)
         ORDER BY m.dequeue_at, m.id LIMIT 1)
        LIMIT 1) h ON true;

    SELECT c.running INTO v_running
    FROM scheduler_recount(v_queue, turn, v_channels, array_fill(true, ARRAY[coalesce(cardinality(v_channels), 0)]),
        false, v_counted_from) c;
    SELECT a.activations, a.due_floor, a.uncounted INTO activations, due_floor, uncounted
    FROM scheduler_activate(v_queue, coalesce(v_counted_from, turn), vtime, now_ms, v_channels, v_ats, v_ids, NULL,
        v_running, true, v_activations) a;
END
$$;

-- Puts messages whose lease ran out back into their own channels.
--
-- Called by scheduler_serve, which holds the turn, when a lease may have ended. The attempt stays counted: a message
-- that has no more of them becomes a dead letter. After its first failure it has its old place; after others it waits
-- as one that failed does, so that a message which kills its worker gets away from those that were leased with it. So
-- does one that should be a dead letter, but can't be one. The trigger message_moved signals the channels, so that each
-- waits for its place in the rotation like any other.
-- Locks: the rows it returns to ready or takes out, and the rotation of the queue, which nobody else writes. Rows that
-- somebody else holds are left for a later call: a completion may be on its way in a long transaction, and the fence
-- decides afterwards. The longer one has been held, the later that call is, by a sixteenth of that time, 10 minutes at
-- most.
--
-- Returns when the next lease ends, or is to be looked at again; the first one before that which ran out while somebody
-- held it; and whether leases that ran out may be left.
CREATE FUNCTION scheduler_reclaim(
    queue text, clock timestamptz, INOUT lease_floor timestamptz, max_messages integer,
    OUT held_from timestamptz, OUT more boolean
)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_from timestamptz := $3;
    v_expired integer;
    v_dead bigint[];
    v_back_at bigint[];
    v_id bigint;
    v_dequeue_at bigint;
    v_error text;
    v_end timestamptz;
    v_again boolean;
    v_left timestamptz;
    q queue;
    r record;
BEGIN
    SELECT q.* INTO q FROM queue q WHERE q.name = v_queue;
    SELECT t.era, t.held_from, t.held_since, t.held_at INTO r
    FROM rotation t WHERE t.queue = v_queue ORDER BY t.era DESC LIMIT 1;
    v_again := r.held_at <= clock;
    IF v_again THEN
        v_from := least(v_from, r.held_from);
        r.held_from := 'infinity';
        r.held_at := 'infinity';
    END IF;
    WITH locked AS MATERIALIZED (
        SELECT m.ctid AS row, m.id, m.dequeue_at, m.backoff, m.attempt::bigint - m.forgiven AS failures,
            m.attempt::bigint - m.forgiven >= coalesce(m.max_attempts, q.max_attempts, 20) AS is_dead
        FROM message m
        WHERE m.queue = v_queue AND m.leased_until >= v_from AND m.leased_until <= clock
        ORDER BY m.leased_until
        LIMIT max_messages
        FOR UPDATE SKIP LOCKED
    ), delayed AS MATERIALIZED (
        SELECT l.*, CASE WHEN l.failures < 2 AND NOT l.is_dead THEN 0
            ELSE retry_delay(l.failures, l.backoff, q.backoff, q.max_backoff) END AS delay
        FROM locked l
    ), expired AS MATERIALIZED (
        SELECT d.row, d.id, d.is_dead, CASE WHEN d.delay = 0 THEN d.dequeue_at
            ELSE unix_ms(clock + make_interval(secs => d.delay)) END AS back_at
        FROM delayed d
    ), back AS (
        UPDATE message m
        SET leased_until = NULL, counted = NULL, error = format('the lease of attempt %s ran out', m.attempt),
            dequeue_at = e.back_at
        FROM expired e
        WHERE m.ctid = e.row AND NOT e.is_dead
    )
    SELECT count(*), array_agg(e.id) FILTER (WHERE e.is_dead), array_agg(e.back_at) FILTER (WHERE e.is_dead)
    INTO v_expired, v_dead, v_back_at
    FROM expired e;

    -- One that can't be a dead letter must not keep the others from it; nor, where it waits, the queue for long. It is
    -- put back, and tried again when its next lease has run out.
    IF v_dead IS NOT NULL AND scheduler_bury(v_dead) IS NOT NULL THEN
        v_end := clock_timestamp() + interval '1 second';
        FOR v_id, v_dequeue_at IN SELECT b.id, b.back_at FROM unnest(v_dead, v_back_at) AS b (id, back_at) LOOP
            EXIT WHEN clock_timestamp() > v_end;
            v_error := scheduler_bury(ARRAY[v_id]);
            UPDATE message m
            SET leased_until = NULL, counted = NULL, dequeue_at = v_dequeue_at,
                error = format('the lease of attempt %s ran out; no dead letter: %s', m.attempt, v_error)
            WHERE v_error IS NOT NULL AND m.id = v_id;
        END LOOP;
    END IF;
    more := v_expired = max_messages AND (v_end IS NULL OR clock_timestamp() <= v_end);
    v_left := (
        SELECT m.leased_until FROM message m
        WHERE m.queue = v_queue AND m.leased_until >= v_from
        ORDER BY m.leased_until LIMIT 1);
    IF more THEN
        lease_floor := least(v_left, r.held_at);
        held_from := r.held_from;
        RETURN;
    ELSIF v_left <= clock THEN
        r.held_from := least(r.held_from, v_left);
        r.held_since := greatest(least(r.held_since, clock), r.held_from);
        r.held_at := least(r.held_at, clock
            + least(greatest(interval '10 ms', (clock - r.held_since) / 16), interval '10 minutes'));
        v_left := (
            SELECT m.leased_until FROM message m
            WHERE m.queue = v_queue AND m.leased_until > clock
            ORDER BY m.leased_until LIMIT 1);
    ELSIF v_again THEN
        r.held_since := 'infinity';
    END IF;
    UPDATE rotation t
    SET held_from = r.held_from, held_since = r.held_since, held_at = r.held_at
    WHERE t.queue = v_queue AND t.era = r.era
        AND (t.held_from, t.held_since, t.held_at) <> (r.held_from, r.held_since, r.held_at);
    lease_floor := least(v_left, r.held_at);
    held_from := r.held_from;
END
$$;

-- Counts the leases of some channels, and marks them as counted in this turn: each will signal its end.
--
-- Called by scheduler_fold for channels whose policy changed, by scheduler_limit for those that count their leases, and
-- by scheduler_rebuild for all, within the turn. Leases taken without a limit aren't counted one by one; this is what
-- catches up when a limit is set, and what replaces a number that is in doubt. A lease that somebody else holds, so
-- that it can't be marked, counts too: a signal has it looked at again (see signal) until it is over.
-- Locks: the leases it marks, until the end of the transaction. It waits for nobody.
--
-- Returns for each channel the number of its leases, null where it has no max_concurrency or none is wanted; and with
-- whole_queue the number of all leases, which are marked then.
CREATE FUNCTION scheduler_recount(
    queue text, turn bigint, channels text[], wanted boolean[], whole_queue boolean, counted_from bigint,
    OUT running integer[], OUT total integer
)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_turn CONSTANT bigint := $2;
    v_counted_from CONSTANT bigint := $6;
BEGIN
    -- What an earlier count in this turn was in doubt about is counted anew, too.
    DELETE FROM signal s
    WHERE s.queue = v_queue AND s.urgent AND s.xid = pg_current_xact_id() AND s.counted = v_turn
        AND s.message_id IS NOT NULL AND s.dequeue_at IS NULL
        AND v_counted_from IS NULL AND (whole_queue OR s.channel IN (
            SELECT n.channel FROM unnest(channels, wanted) AS n (channel, wanted) WHERE n.wanted));
    WITH named AS MATERIALIZED (
        SELECT n.channel
        FROM (SELECT) AS one
        LEFT JOIN queue q ON q.name = v_queue
        CROSS JOIN unnest(channels, wanted) AS n (channel, wanted)
        LEFT JOIN LATERAL (
            SELECT c.max_concurrency FROM channel c WHERE c.queue = v_queue AND c.name = n.channel LIMIT 1) c ON true
        WHERE n.wanted AND coalesce(c.max_concurrency, q.channel_max_concurrency) IS NOT NULL
    ), leases AS MATERIALIZED (
        SELECT m.ctid AS row, m.id, m.channel
        FROM message m
        WHERE (whole_queue OR (v_counted_from IS NULL AND (SELECT count(*) FROM named) > 0))
            AND m.queue = v_queue AND m.leased_until IS NOT NULL
            AND (whole_queue OR m.channel IN (SELECT n.channel FROM named n))
    -- Locked one by one, as in scheduler_serve_plan.
    ), held AS MATERIALIZED (
        SELECT m.row
        FROM leases l
        CROSS JOIN LATERAL (
            SELECT m.ctid AS row FROM message m
            WHERE m.ctid = l.row AND m.leased_until IS NOT NULL
            FOR NO KEY UPDATE SKIP LOCKED) m
    ), marked AS (
        UPDATE message m SET counted = v_turn FROM held h WHERE m.ctid = h.row RETURNING m.id, m.channel
    ), doubtful AS (
        SELECT l.id, l.channel FROM leases l
        EXCEPT
        SELECT k.id, k.channel FROM marked k
    ), watched AS (
        INSERT INTO signal (queue, channel, message_id, counted, urgent)
        SELECT v_queue, d.channel, d.id, v_turn, true
        FROM doubtful d
    -- Without a join, whose plan could not be right for one channel and for all. IS TRUE keeps IN from becoming one.
    ), counts AS (
        SELECT max(x.nth) AS nth, bool_or(x.is_wanted) AS is_wanted, count(*) FILTER (WHERE x.is_lease) AS leases
        FROM (
            SELECT a.channel, a.nth, false AS is_wanted, false AS is_lease
            FROM unnest(channels) WITH ORDINALITY AS a (channel, nth)
            UNION ALL
            SELECT n.channel, NULL, true, false FROM named n
            UNION ALL
            SELECT l.channel, NULL, false, true FROM leases l
            UNION ALL
            SELECT m.channel, NULL, false, true FROM message m
            WHERE v_counted_from IS NOT NULL AND (SELECT count(*) FROM named) > 0
                AND m.queue = v_queue AND m.leased_until IS NOT NULL
                AND m.counted >= v_counted_from AND (m.channel IN (SELECT n.channel FROM named n)) IS TRUE
            UNION ALL
            SELECT s.channel, NULL, false, true FROM signal s
            WHERE v_counted_from IS NOT NULL AND s.queue = v_queue AND s.urgent
                AND s.counted >= v_counted_from AND (s.channel IN (SELECT n.channel FROM named n)) IS TRUE) x
        GROUP BY x.channel
    )
    SELECT array_agg(CASE WHEN c.is_wanted THEN c.leases END ORDER BY c.nth) FILTER (WHERE c.nth IS NOT NULL),
        CASE WHEN whole_queue THEN (SELECT count(*) FROM leases)::integer END
    INTO running, total
    FROM counts c;
END
$$;

-- Schedules and leases up to max_messages messages of a queue, in the queue's turn.
--
-- Called by message_dequeue, whose settings hold here, and which has checked the arguments; wrote says whether its
-- caller had written anything before, and missed_places what it missed of the plan, in missed_turn. Returns what that
-- returns.
--
-- Scheduling (Goyal, Vin, Cheng: Start-time Fair Queueing, 1996). Each active channel has a lane with a start tag. The
-- next message comes from the lowest tag, ties from the lane that became ready first; serving it moves the tag on by
-- cost / weight. A channel that becomes active starts at max(its own tag, virtual time). A channel at a limit is not
-- active: its lane is not looked at until its time has come or a signal says that there is room (lane_due).
--
-- Three functions serve, each of them a whole batch, exactly as single dequeues in a row would: what was scheduled
-- ahead, because much is waiting (scheduler_serve_plan); the first messages of as many lanes, in the simple case
-- (scheduler_serve_heads); and all that lanes can have (scheduler_serve_shares). Where there is a plan, its next message
-- and the lane with the lowest tag compete like two lanes.
--
-- Locks: the queue's turn until the end of the transaction, so that one dequeue at a time schedules a queue: its
-- order, and with it every limit, is exact whatever the number of workers. Then the messages that it leases; a message
-- that somebody else holds is passed over.
CREATE FUNCTION scheduler_serve(
    queue text, max_messages integer, lease_seconds double precision, worker text, wrote boolean,
    missed_turn bigint, missed_places bigint[]
) RETURNS SETOF leased_message
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_worker CONSTANT text := $4;
    -- How much news one call takes in before it serves: in proportion to what it serves.
    v_news integer := 64 + 4 * max_messages;
    v_want integer := max_messages;
    v_demand integer := max_messages;
    v_lanes integer := max_messages;
    v_clock timestamptz;
    v_now bigint;
    v_until timestamptz;
    v_got integer;
    v_rest integer;
    v_has_urgent boolean;
    v_has_news boolean;
    v_is_changed boolean;
    v_told integer;
    v_first_id bigint;
    v_rebuild boolean := false;
    v_uncounted boolean := false;
    v_reclaim boolean;
    v_is_left boolean := false;
    v_simple boolean := true;
    v_written boolean := true;
    v_turned boolean := false;
    -- Where there is a plan: its next message, and how often it had to wait for lanes.
    v_bound_tag bigint;
    v_bound_since bigint;
    v_lane_tag bigint;
    v_lane_since bigint;
    v_stretches integer := 0;
    v_rounds integer := 0;
    v_state record;
    r rotation;
BEGIN
    IF NOT scheduler_turn(v_queue, false, wrote) THEN
        RETURN;
    END IF;
    v_clock := clock();
    v_now := unix_ms(v_clock);
    v_until := v_clock + make_interval(secs => lease_seconds);

    SELECT t AS rotation,
        EXISTS (SELECT FROM signal s WHERE s.queue = v_queue AND s.urgent AND s.xid >= t.urgent_from)
            OR (t.urgent_open <> '{}' AND scheduler_told(v_queue, true, t.urgent_open)) AS has_urgent,
        EXISTS (SELECT FROM signal s WHERE s.queue = v_queue AND NOT s.urgent AND s.xid >= t.news_from)
            OR (t.news_open <> '{}' AND scheduler_told(v_queue, false, t.news_open)) AS has_news,
        t.tickets IS NOT NULL AND coalesce(pg_sequence_last_value(t.tickets), -1) <> t.ticket_base AS has_drawn,
        pg_current_snapshot() AS snapshot
    INTO v_state
    FROM rotation t WHERE t.queue = v_queue ORDER BY t.era DESC LIMIT 1;
    IF NOT FOUND THEN
        IF NOT EXISTS (SELECT FROM signal s WHERE s.queue = v_queue LIMIT 1) THEN
            RETURN;
        END IF;
        INSERT INTO rotation AS t
        SELECT v_queue, 0, 0, 0, 0, 0, '0', '{}', '0', '{}', 'infinity', 9223372036854775807, -1, '',
            q.max_concurrency, paused_until(q.paused, q.resume_at), 0, 0, v_now, 0, 0, 0, 0, plan_after(), NULL, NULL
        FROM (SELECT) AS one LEFT JOIN queue q ON q.name = v_queue
        RETURNING t AS rotation, true AS has_urgent, true AS has_news, false AS has_drawn,
            pg_current_snapshot() AS snapshot INTO v_state;
    END IF;
    IF v_state.has_drawn THEN
        IF (v_state.rotation).turn = missed_turn THEN
            INSERT INTO missed (queue, turn, place) SELECT v_queue, missed_turn, k FROM unnest(missed_places) AS k
            ON CONFLICT DO NOTHING;
        END IF;
        r := scheduler_settle(v_queue);
    ELSE
        r := v_state.rotation;
    END IF;
    v_has_urgent := v_state.has_urgent;
    v_has_news := v_state.has_news;
    IF greatest(r.news_from, r.urgent_from) > pg_snapshot_xmax(pg_current_snapshot()) THEN
        -- Restored from a dump of another server, whose transaction ids were ahead.
        r.news_from := '0';
        r.urgent_from := '0';
        v_has_urgent := true;
        v_has_news := true;
    END IF;
    -- Where there is no news, who is under way is looked at now and then, and before the next plan: so nobody looks for
    -- long for who has come to an end, or walks over what somebody writes.
    IF v_state.has_drawn OR r.turn % 64 = 0 THEN
        IF NOT v_has_urgent THEN
            SELECT u.horizon, u.open INTO r.urgent_from, r.urgent_open
            FROM scheduler_under_way(v_state.snapshot, r.urgent_from, NULL, NULL) u;
        END IF;
        IF NOT v_has_news THEN
            SELECT u.horizon, u.open INTO r.news_from, r.news_open
            FROM scheduler_under_way(v_state.snapshot, r.news_from, NULL, NULL) u;
        END IF;
        v_written := false;
    END IF;
    -- What was timed by a clock that was ahead has to be timed anew. Small corrections are nothing to notice.
    v_rebuild := v_now < r.clock - 1000;
    r.clock := CASE WHEN v_rebuild THEN v_now ELSE greatest(r.clock, v_now) END;
    IF r.maintain_at <= v_now OR v_rebuild THEN
        r.maintain_at := CASE WHEN history_maintain() THEN (v_now / 86400000 + 1) * 86400000 ELSE v_now + 600000 END;
        v_written := false;
    END IF;
    v_reclaim := r.lease_floor <= v_clock;

    -- Each round takes in some news, then serves. It is the last one, unless the batch comes out short. Of ever so much
    -- that has to be gone through before anything can be served, a part is left for the next ones: so none takes long,
    -- and what has been gone through stays so, whatever timeout ends one that follows.
    LOOP
        v_rounds := v_rounds + 1;
        IF v_turned THEN
            SELECT t.* INTO r
            FROM rotation t WHERE t.queue = v_queue ORDER BY t.era DESC LIMIT 1;
            v_turned := false;
            v_written := true;
        END IF;
        EXIT WHEN v_is_left;
        IF v_reclaim THEN
            SELECT c.lease_floor, c.held_from, c.more INTO r.lease_floor, r.held_from, v_reclaim
            FROM scheduler_reclaim(v_queue, v_clock, r.lease_floor, v_news) c;
            v_has_urgent := true;
            v_written := false;
        END IF;
        IF v_has_urgent THEN
            SELECT f.horizon, f.open, f.activations, least(f.due_floor, r.due_floor), greatest(r.running - f.ended, 0),
                v_rebuild OR f.channels_changed, f.queue_changed, v_uncounted OR f.uncounted, f.more,
                least(f.lease_floor, r.lease_floor)
            INTO r.urgent_from, r.urgent_open, r.activations, r.due_floor, r.running,
                v_rebuild, v_is_changed, v_uncounted, v_has_urgent, r.lease_floor
            FROM scheduler_fold(v_queue, true, r.turn, r.vtime, v_now, 20000,
                CASE WHEN r.max_concurrency IS NOT NULL THEN r.counted_from END, r.urgent_from,
                r.urgent_open, r.activations) f;
            v_written := false;
            IF v_is_changed AND NOT v_rebuild THEN
                r := scheduler_limit(r, v_now, false);
            END IF;
            IF r.lease_floor <= v_clock AND NOT v_reclaim THEN
                -- A user has ended a lease.
                v_reclaim := true;
                CONTINUE;
            END IF;
        END IF;
        IF v_rebuild THEN
            PERFORM scheduler_unplan(v_queue);
            r := scheduler_limit(r, v_now, true);
            r.rebuilt := '';
            v_rebuild := false;
        END IF;
        IF r.rebuilt IS NOT NULL THEN
            SELECT b.rebuilt, b.activations, least(b.due_floor, r.due_floor), v_uncounted OR b.uncounted
            INTO r.rebuilt, r.activations, r.due_floor, v_uncounted
            FROM scheduler_rebuild(v_queue, r.turn, r.vtime, v_now,
                CASE WHEN r.max_concurrency IS NOT NULL THEN r.counted_from END,
                least(r.lease_floor, r.held_from), 5000, false, r.rebuilt, r.activations) b;
            v_written := false;
            v_is_left := r.rebuilt IS NOT NULL;
            EXIT WHEN v_is_left;
            -- Lanes that are idle now may stand below it.
            r.idle_floor := -1;
            -- Not written by those that serve, as it hardly ever is anything.
            UPDATE rotation t SET rebuilt = NULL WHERE t.queue = v_queue AND t.era = r.era AND t.rebuilt IS NOT NULL;
        END IF;
        IF v_has_news THEN
            SELECT f.horizon, f.open, f.activations, least(f.due_floor, r.due_floor), v_uncounted OR f.uncounted, f.more,
                f.told, f.first_id
            INTO r.news_from, r.news_open, r.activations, r.due_floor, v_uncounted, v_has_news, v_told, v_first_id
            FROM scheduler_fold(v_queue, false, r.turn, r.vtime, v_now, v_news,
                CASE WHEN r.max_concurrency IS NOT NULL THEN r.counted_from END, r.news_from,
                r.news_open, r.activations) f;
            v_written := false;
        END IF;
        -- Signals come in faster than they are folded. Where each is of another channel there aren't so many that what is
        -- behind them waits for long, and a name costs more than a signal: still more names than messages are served, so
        -- until as many messages have been served as there are channels that aren't idle, all have been looked for.
        IF v_has_news THEN
            SELECT w.swept, w.activations, least(w.due_floor, r.due_floor), v_uncounted OR w.uncounted
            INTO r.swept, r.activations, r.due_floor, v_uncounted
            FROM scheduler_sweep(v_queue, r.turn, r.vtime, v_now,
                CASE WHEN v_told > v_news / 2 THEN v_news / 4 ELSE v_news END, v_first_id, r.swept, r.activations) w;
        END IF;
        -- A policy that is known to have changed holds before anything is served: one of which many channels, or many ends
        -- of leases, came first; and a limit that was committed in the middle of this, after the signals were read that
        -- it came with, whose leases are to be counted.
        IF v_uncounted OR v_has_urgent THEN
            v_uncounted := EXISTS (
                    SELECT FROM signal s WHERE s.queue = v_queue AND s.urgent AND s.xid >= r.urgent_from
                        AND s.message_id IS NULL AND s.counted IS NULL)
                OR EXISTS (
                    SELECT FROM unnest(r.urgent_open) AS o (xid)
                    CROSS JOIN LATERAL (
                        SELECT FROM signal s WHERE s.queue = v_queue AND s.urgent AND s.xid = o.xid
                            AND s.message_id IS NULL AND s.counted IS NULL LIMIT 1) s
                    WHERE pg_visible_in_snapshot(o.xid, pg_current_snapshot()));
            IF v_uncounted THEN
                v_is_left := v_rounds >= 5;
                EXIT WHEN v_is_left;
                v_has_urgent := true;
                CONTINUE;
            END IF;
        END IF;
        IF r.tickets IS NOT NULL AND r.max_concurrency IS NOT NULL THEN
            -- It has got a limit: nobody takes without the turn any more.
            SELECT k.tickets INTO r.tickets FROM scheduler_tickets(v_queue, false) k;
            UPDATE rotation t SET tickets = NULL WHERE t.queue = v_queue AND t.era = r.era;
        END IF;
        IF r.due_floor <= v_now THEN
            SELECT w.due_floor, w.activations INTO r.due_floor, r.activations
            FROM scheduler_wake(v_queue, r.vtime, v_now, v_news, r.due_floor, r.activations) w;
            v_written := false;
        END IF;
        IF r.turn % 64 = 0 OR r.vtime > 1000000000000000000 THEN
            SELECT y.vtime, y.idle_floor INTO r.vtime, r.idle_floor
            FROM scheduler_tidy(v_queue, v_now, r.vtime, r.idle_floor) y;
            v_written := false;
        END IF;

        CONTINUE WHEN v_has_urgent AND r.running >= r.max_concurrency;  -- more leases may have ended
        v_want := least(v_want, r.max_concurrency - r.running);
        IF r.paused_until > v_now AND r.paused_until < r.due_floor THEN
            -- Who asks queue_due after the end of the pause, before anybody has been here, has to hear of it.
            r.due_floor := r.paused_until;
            v_written := false;
        END IF;
        EXIT WHEN v_want <= 0 OR r.paused_until > v_now;
        -- While as much is planned as the next ones will want, they take it side by side. A batch that gives its lanes
        -- much at once gains nothing from a plan; nor, of the heads of lanes, does one of more than a few messages, unless
        -- others dequeue at the same time, nothing arrives for which they would need their turns, and each takes an eighth
        -- of it at most (see message_dequeue).
        IF r.ahead >= r.plan_at AND r.ahead >= 4 * v_want AND r.planned - r.place < 8 * v_want THEN
            SELECT p.messages, least(p.due_floor, r.due_floor) INTO v_got, r.due_floor
            FROM scheduler_plan(v_queue, r.vtime, r.vsince, v_now, r.ahead, r.place, r.planned,
                NOT v_has_news AND (max_messages <= 3 OR (max_messages <= 192 AND NOT v_state.has_news
                    AND current_setting('fairqueue_turn.waited', true) = 'yes'))) p;
            r.planned := r.planned + v_got;
            v_written := false;
            -- Where there is a limit of the queue, nobody takes without the turn.
            IF v_got > 0 AND r.tickets IS NULL AND r.max_concurrency IS NULL THEN
                SELECT k.tickets, coalesce(k.ticket_base, 0) INTO r.tickets, r.ticket_base
                FROM scheduler_tickets(v_queue, true) k;
                UPDATE rotation t SET tickets = r.tickets, ticket_base = r.ticket_base
                WHERE t.queue = v_queue AND t.era = r.era;
            END IF;
            IF v_got = 0 THEN
                -- It isn't tried again before the rest of the plan has been served; or as many as have been without one.
                v_rest := CASE WHEN r.planned > r.place THEN least(r.planned - r.place, plan_most())
                    ELSE least(r.ahead, plan_most() / 2) END;
                r.ahead := least(r.ahead, plan_most() - v_rest);
                r.plan_at := r.ahead + v_rest;
            END IF;
        END IF;
        v_bound_tag := 9223372036854775807;
        v_bound_since := 9223372036854775807;
        IF r.planned > r.place THEN
            -- What is planned, up to the lane with the lowest tag: that of a channel that came since, or whose planned
            -- messages have been served.
            SELECT l.tag, l.since INTO v_lane_tag, v_lane_since
            FROM lane l
            WHERE l.queue = v_queue AND l.due = 0 AND (l.tag, l.since) > (r.vtime, r.vsince)
            ORDER BY l.tag, l.since LIMIT 1;
            RETURN QUERY
            SELECT * FROM scheduler_serve_plan(r, v_want, v_lane_tag, v_lane_since, v_clock, v_until, v_worker);

            GET DIAGNOSTICS v_got = ROW_COUNT;
            IF v_got > 0 THEN
                v_want := v_want - v_got;
                v_turned := true;
                EXIT WHEN v_want = 0;
                CONTINUE;
            END IF;
            -- If the lane comes first, it and those after it are served up to the next message of the plan. Otherwise,
            -- and where the two take turns all the time, the plan is of no more use.
            v_stretches := v_stretches + 1;
            SELECT p.tags[r.place - p.place + 2], p.sinces[r.place - p.place + 2] INTO v_bound_tag, v_bound_since
            FROM plan p
            WHERE p.queue = v_queue AND p.place > r.place - 31 AND p.place <= r.place + 1
            ORDER BY p.place DESC LIMIT 1;
            IF NOT FOUND OR v_lane_tag IS NULL OR (v_bound_tag, v_bound_since) < (v_lane_tag, v_lane_since)
                OR v_stretches > 4
            THEN
                PERFORM scheduler_unplan(v_queue);
                v_bound_tag := 9223372036854775807;
                v_bound_since := 9223372036854775807;
                -- Not the same places again: they would be looked for among the dead entries of those that were there.
                r.place := r.planned;
                r.ahead := 0;
                r.plan_at := plan_after();
                v_written := false;
            END IF;
        END IF;
        IF v_simple THEN
            RETURN QUERY
            SELECT * FROM scheduler_serve_heads(r, v_want, v_bound_tag, v_bound_since, v_clock, v_until, v_worker);

            GET DIAGNOSTICS v_got = ROW_COUNT;
            v_simple := v_got > 0;
            IF v_simple THEN
                v_want := v_want - v_got;
                v_turned := true;
                EXIT WHEN v_want = 0;
                CONTINUE;
            END IF;
        END IF;
        IF NOT EXISTS (
            SELECT FROM lane l
            WHERE l.queue = v_queue AND l.due = 0 AND (l.tag, l.since) > (r.vtime, r.vsince) LIMIT 1)
        THEN
            IF NOT (v_has_news OR v_has_urgent OR v_reclaim OR r.due_floor <= v_now) THEN
                -- All has been served: what comes now, of whom ever, begins after it. So lanes of names that are used
                -- once don't stay for ever.
                SELECT l.tag INTO v_lane_tag
                FROM lane l
                WHERE l.queue = v_queue AND l.due IS NULL AND l.tag > r.vtime
                ORDER BY l.tag DESC LIMIT 1;
                IF FOUND THEN
                    r.vtime := v_lane_tag;
                    r.vsince := r.activations;
                    v_written := false;
                END IF;
                EXIT;
            END IF;
            -- Of so much that is left to be told, a whole round of the sweep would have found what is ready, but for a late
            -- one with a low id. It is for the next ones, so that none takes long, and what this one has read stays read.
            v_is_left := (v_news >= 4096 AND v_reclaim) OR (v_news >= 20000 AND v_has_news AND r.swept = ''
                AND NOT (v_has_urgent OR v_reclaim OR r.due_floor <= v_now));
            EXIT WHEN v_is_left;
            v_news := greatest(v_news, least(v_news * 4, 20000));
            CONTINUE;
        END IF;

        RETURN QUERY
        SELECT * FROM scheduler_serve_shares(r, v_want, v_demand, v_lanes, v_bound_tag, v_bound_since,
            v_clock, v_until, v_worker);

        GET DIAGNOSTICS v_got = ROW_COUNT;
        v_want := v_want - v_got;
        v_turned := true;
        EXIT WHEN v_want = 0;
        -- Lanes that turn out to be empty are idle from now on; not those of what is held, which the next one would look
        -- at first again.
        v_is_left := v_got = 0 AND v_rounds >= 12 AND NOT EXISTS (
            SELECT FROM signal s WHERE s.queue = v_queue AND s.urgent AND s.xid = pg_current_xact_id());
        -- Short because it could look no further, because lanes turned out to be empty, or to have only what is held, or
        -- because no more is eligible. Of held ones comes news, for each of these lanes: more than that is read.
        v_demand := least(v_demand * 4, 100000);
        v_lanes := least(v_lanes * 4, 10000);
        v_news := greatest(v_news, least(v_news * 4, 20000));
    END LOOP;

    IF v_want > 0 AND (r.ahead > 0 OR r.tickets IS NOT NULL) THEN
        r.ahead := 0;
        IF r.tickets IS NOT NULL AND r.place >= r.planned THEN
            SELECT k.tickets INTO r.tickets FROM scheduler_tickets(v_queue, false) k;
        END IF;
        r.plan_at := plan_after();
        v_written := false;
    END IF;
    IF v_is_left THEN
        -- Nobody is notified of it: who asks queue_due is told to come at once.
        r.due_floor := 0;
        v_written := false;
    END IF;
    IF NOT (v_written OR v_turned) THEN
        UPDATE rotation t
        SET turn = t.turn + 1, era = rotation_era(t.turn + 1), vtime = r.vtime, vsince = r.vsince,
            activations = r.activations, news_from = r.news_from, news_open = r.news_open,
            urgent_from = r.urgent_from, urgent_open = r.urgent_open,
            lease_floor = r.lease_floor, due_floor = r.due_floor, idle_floor = r.idle_floor, swept = r.swept,
            max_concurrency = r.max_concurrency, paused_until = r.paused_until, running = r.running,
            counted_from = r.counted_from, rebuilt = r.rebuilt, clock = r.clock, maintain_at = r.maintain_at,
            place = r.place, planned = r.planned, ahead = r.ahead, plan_at = r.plan_at,
            lane_tag = NULL, lane_since = NULL, tickets = r.tickets
        WHERE t.queue = v_queue AND t.era = r.era;
    END IF;
END
$$;

-- Schedules and leases up to want messages of a queue, in the simple case: the first ones of as many lanes.
--
-- Called by scheduler_serve, whose settings hold here, within the turn; r is the state of that, which this writes on.
-- They go in the order of the lanes, as long as no lane would come again before the last of them, and none from bound_tag
-- and bound_since on, where the next message of the plan stands. Where that is less than half of what is wanted, or a
-- message is held by somebody, this serves nothing: scheduler_serve_shares does then, which takes twice as long. Returns
-- what message_dequeue returns.
-- Locks: the messages that it leases, and their lanes; and lanes before them that have none.
CREATE FUNCTION scheduler_serve_heads(
    r rotation, want integer, bound_tag bigint, bound_since bigint,
    clock timestamptz, lease_end timestamptz, worker text
) RETURNS SETOF leased_message
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_clock CONSTANT timestamptz := $5;
    v_until CONSTANT timestamptz := $6;
    v_worker CONSTANT text := $7;
    v_now CONSTANT bigint := unix_ms($5);
BEGIN
    RETURN QUERY
    WITH seen AS (
        SELECT c.lane, c.tag, c.since, c.is_counted, m.row, m.id, m.dequeue_at, m.next_at, m.next_id,
            c.tag + lane_step(m.cost, c.weight) AS next_tag,
            coalesce(m.dequeue_at <= v_now AND c.room > 0, false) AS ripe
        FROM (
            SELECT l.ctid AS lane, l.channel, l.tag, l.since, l.weight, l.head_at, l.head_id,
                l.max_concurrency IS NOT NULL AS is_counted,
                lane_room(v_now, l.max_concurrency, l.running, l.release_interval, l.burst, l.released_at)
                    AS room
            FROM lane l
            WHERE l.queue = r.queue AND l.due = 0 AND (l.tag, l.since) > (r.vtime, r.vsince)
                AND (l.tag, l.since) < (bound_tag, bound_since)
            ORDER BY l.tag, l.since
            LIMIT want) c
        LEFT JOIN LATERAL (
            SELECT m.row, m.id, m.dequeue_at, m.cost, lead(m.dequeue_at) OVER w AS next_at,
                lead(m.id) OVER w AS next_id
            FROM (
                SELECT m.ctid AS row, m.id, m.dequeue_at, m.cost
                FROM message m
                WHERE m.queue = r.queue AND m.channel = c.channel AND m.leased_until IS NULL
                    AND (m.dequeue_at, m.id) >= (c.head_at, c.head_id)
                ORDER BY m.dequeue_at, m.id
                LIMIT 2) m
            WINDOW w AS (ORDER BY m.dequeue_at, m.id)
            ORDER BY m.dequeue_at, m.id
            LIMIT 1) m ON true
        -- Kept apart: merged, what this makes would be written out each time that it is used below.
        OFFSET 0
    ), first AS MATERIALIZED (
        SELECT s.*, s.ripe AND s.tag < min(s.next_tag) FILTER (WHERE s.ripe) OVER () AS taken
        FROM seen s
    ), held AS MATERIALIZED (
        SELECT m.row = f.row AS is_same
        FROM first f
        CROSS JOIN LATERAL (
            SELECT m.ctid AS row FROM message m
            WHERE m.ctid = f.row AND m.leased_until IS NULL AND m.dequeue_at <= v_now
            FOR NO KEY UPDATE SKIP LOCKED) m
        WHERE f.taken
    ), served AS MATERIALIZED (
        SELECT count(*)::integer AS messages, max(f.tag) AS vtime,
            count(*) = (SELECT count(*) FROM held h WHERE h.is_same) AND count(*) * 2 >= want AS is_simple
        FROM first f
        WHERE f.taken
    ), leased AS (
        UPDATE message m
        SET attempt = least(m.attempt, 2147483646) + 1, leased_until = v_until, leased_at = v_clock,
            first_leased_at = coalesce(m.first_leased_at, v_clock), worker = v_worker,
            counted = CASE WHEN f.is_counted OR r.max_concurrency IS NOT NULL THEN r.turn END
        FROM first f
        WHERE m.ctid = f.row AND f.taken AND (SELECT s.is_simple FROM served s)
        RETURNING m.id, m.channel, m.attempt, m.payload, m.body, m.state, m.error, m.dequeue_at, m.cost,
            m.created_at, m.leased_until, m.key, m.forgiven, m.first_leased_at, f.tag, f.since
    ), moved AS (
        UPDATE lane l
        SET tag = CASE WHEN f.taken THEN f.next_tag ELSE l.tag END,
            due = lane_due(v_now, CASE WHEN f.taken THEN f.next_at ELSE f.dequeue_at END, l.paused_until,
                l.max_concurrency, l.running + f.taken::integer, l.release_interval, l.burst,
                lane_released(v_now, f.taken::integer, l.release_interval, l.released_at)),
            head_at = coalesce(CASE WHEN f.taken THEN f.next_at END, f.dequeue_at, l.head_at),
            head_id = coalesce(CASE WHEN f.taken THEN f.next_id ELSE f.id END, 0),
            running = CASE WHEN l.max_concurrency IS NULL THEN 0 ELSE l.running + f.taken::integer END,
            released_at = lane_released(v_now, f.taken::integer, l.release_interval, l.released_at)
        FROM first f
        WHERE l.ctid = f.lane AND (f.taken OR NOT f.ripe) AND (SELECT s.is_simple FROM served s)
        RETURNING l.due
    ), turned AS (
        UPDATE rotation t
        SET turn = t.turn + 1, era = rotation_era(t.turn + 1), vtime = s.vtime,
            vsince = (SELECT max(f.since) FROM first f WHERE f.taken AND f.tag = s.vtime),
            activations = r.activations, news_from = r.news_from, news_open = r.news_open,
            urgent_from = r.urgent_from, urgent_open = r.urgent_open,
            due_floor = least(r.due_floor, (SELECT min(v.due) FROM moved v WHERE v.due > 0)),
            lease_floor = least(r.lease_floor, v_until), idle_floor = r.idle_floor, swept = r.swept,
            max_concurrency = r.max_concurrency, paused_until = r.paused_until,
            running = CASE WHEN r.max_concurrency IS NULL THEN 0 ELSE r.running + s.messages END,
            counted_from = r.counted_from, clock = r.clock, maintain_at = r.maintain_at,
            place = r.place, planned = r.planned, ahead = least(r.ahead + s.messages, plan_most()),
            plan_at = r.plan_at, lane_tag = NULL, lane_since = NULL
        FROM served s
        WHERE t.queue = r.queue AND t.era = r.era AND s.is_simple
    )
    SELECT d.id, d.channel, d.attempt, d.payload, d.body, d.state, d.error, d.dequeue_at, d.cost,
        d.created_at, d.leased_until, d.key, d.forgiven, d.first_leased_at
    FROM leased d
    ORDER BY d.tag, d.since;
END
$$;

-- Leases up to want planned messages of a queue: those before the lane with the lowest tag.
--
-- Called by scheduler_serve, whose settings hold here, within the turn; r is the state of that, which this writes on.
-- lane_tag and lane_since are that lane's, which may be of a channel that came since, or whose planned messages have been
-- served; null where no lane has anything. Serves nothing where one of the messages isn't as it was. Returns what
-- message_dequeue returns.
-- Locks: the messages that it leases.
CREATE FUNCTION scheduler_serve_plan(
    r rotation, want integer, lane_tag bigint, lane_since bigint,
    clock timestamptz, lease_end timestamptz, worker text
) RETURNS SETOF leased_message
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_lane_tag CONSTANT bigint := $3;
    v_lane_since CONSTANT bigint := $4;
    v_clock CONSTANT timestamptz := $5;
    v_until CONSTANT timestamptz := $6;
    v_worker CONSTANT text := $7;
    v_now CONSTANT bigint := unix_ms($5);
BEGIN
    RETURN QUERY
    WITH next AS MATERIALIZED (
        SELECT e.row, e.id, e.tag, e.since, e.channel
        FROM plan p
        CROSS JOIN LATERAL unnest(p.rows, p.ids, p.tags, p.sinces, p.channels) WITH ORDINALITY
            AS e (row, id, tag, since, channel, nth)
        WHERE p.queue = r.queue AND p.place > r.place - 32 AND p.place <= r.place + want
            AND p.place + e.nth - 1 > r.place AND p.place + e.nth - 1 <= r.place + want
            AND (v_lane_tag IS NULL OR (e.tag, e.since) < (v_lane_tag, v_lane_since))
    -- One that was changed meanwhile may be another channel's now. Locked one by one: a join might begin with all
    -- messages, where there seem to be few.
    ), held AS MATERIALIZED (
        SELECT m.row = n.row AS is_same
        FROM next n
        CROSS JOIN LATERAL (
            SELECT m.ctid AS row FROM message m
            WHERE m.ctid = n.row AND m.id = n.id AND m.queue = r.queue AND m.channel = n.channel
                AND m.leased_until IS NULL AND m.dequeue_at <= v_now
            FOR NO KEY UPDATE SKIP LOCKED) m
    ), served AS MATERIALIZED (
        SELECT count(*)::integer AS messages, max(n.tag) AS vtime,
            count(*) = (SELECT count(*) FROM held h WHERE h.is_same) AND count(*) > 0 AS is_good
        FROM next n
    ), leased AS (
        UPDATE message m
        SET attempt = least(m.attempt, 2147483646) + 1, leased_until = v_until, leased_at = v_clock,
            first_leased_at = coalesce(m.first_leased_at, v_clock), worker = v_worker,
            counted = CASE WHEN r.max_concurrency IS NOT NULL THEN r.turn END
        FROM next n
        WHERE m.ctid = n.row AND (SELECT s.is_good FROM served s)
        RETURNING m.id, m.channel, m.attempt, m.payload, m.body, m.state, m.error, m.dequeue_at, m.cost,
            m.created_at, m.leased_until, m.key, m.forgiven, m.first_leased_at, n.tag, n.since
    ), turned AS (
        UPDATE rotation t
        SET turn = t.turn + 1, era = rotation_era(t.turn + 1), vtime = s.vtime,
            vsince = (SELECT max(n.since) FROM next n WHERE n.tag = s.vtime),
            activations = r.activations, news_from = r.news_from, news_open = r.news_open,
            urgent_from = r.urgent_from, urgent_open = r.urgent_open, due_floor = r.due_floor,
            lease_floor = least(r.lease_floor, v_until), idle_floor = r.idle_floor, swept = r.swept,
            max_concurrency = r.max_concurrency, paused_until = r.paused_until,
            running = CASE WHEN r.max_concurrency IS NULL THEN 0 ELSE r.running + s.messages END,
            counted_from = r.counted_from, clock = r.clock, maintain_at = r.maintain_at,
            place = r.place + s.messages, planned = r.planned, ahead = least(r.ahead + s.messages, plan_most()),
            plan_at = r.plan_at, lane_tag = coalesce(v_lane_tag, 9223372036854775807),
            lane_since = coalesce(v_lane_since, 9223372036854775807)
        FROM served s
        WHERE t.queue = r.queue AND t.era = r.era AND s.is_good
    )
    SELECT d.id, d.channel, d.attempt, d.payload, d.body, d.state, d.error, d.dequeue_at, d.cost,
        d.created_at, d.leased_until, d.key, d.forgiven, d.first_leased_at
    FROM leased d
    ORDER BY d.tag, d.since;
END
$$;

-- Schedules and leases up to want messages of a queue: of each lane as many as its share of them is.
--
-- Called by scheduler_serve, whose settings hold here, within the turn; r is the state of that, which this writes on.
-- Where there is a plan, or each message is the first one of another lane, scheduler_serve knows quicker ways.
--
-- Looks at no more than so many lanes, the first ones, and deals out demand messages to them: more of either than are
-- wanted where the last try came out short, as lanes turned out to be empty or at a limit. Serves nothing from
-- bound_tag and bound_since on, where the next message of the plan stands. Returns what message_dequeue returns.
-- Locks: the messages that it leases, passing over those that somebody else holds; and the lanes that it changes.
CREATE FUNCTION scheduler_serve_shares(
    r rotation, want integer, demand integer, lanes integer, bound_tag bigint, bound_since bigint,
    clock timestamptz, lease_end timestamptz, worker text
) RETURNS SETOF leased_message
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_clock CONSTANT timestamptz := $7;
    v_until CONSTANT timestamptz := $8;
    v_worker CONSTANT text := $9;
    v_now CONSTANT bigint := unix_ms($7);
BEGIN
    RETURN QUERY
    -- The lanes that can have a part in the next want messages: those with the lowest tags.
    WITH competing AS MATERIALIZED (
        SELECT l.ctid AS lane, l.channel, l.tag, l.since, l.weight, l.head_at, l.head_id,
            lane_step(1, l.weight)::double precision AS step, l.max_concurrency IS NOT NULL AS is_counted,
            lane_room(v_now, l.max_concurrency, l.running, l.release_interval, l.burst, l.released_at) AS room
        FROM lane l
        WHERE l.queue = r.queue AND l.due = 0 AND (l.tag, l.since) > (r.vtime, r.vsince)
            AND (l.tag, l.since) < (bound_tag, bound_since)
        ORDER BY l.tag, l.since
        LIMIT lanes
    -- How many messages each may get, if all cost 1: those that start before the tag at which demand messages have
    -- started, which is the lowest level that water poured into the first lanes, one after the other, has. A guess:
    -- what costs make different is caught by the horizon below.
    ), levels AS (
        SELECT c.*, (demand - count(*) OVER w + sum((c.tag - r.vtime) / c.step) OVER w)
            / sum(1 / c.step) OVER w AS level
        FROM competing c
        WINDOW w AS (ORDER BY c.tag, c.since ROWS UNBOUNDED PRECEDING)
    ), shares AS (
        SELECT c.*, greatest(1, least(demand,
                floor((min(c.level) OVER () - (c.tag - r.vtime)) / c.step + 0.000001) + 1))::integer AS share,
            count(*) OVER () = lanes AS cut,
            first_value(c.tag) OVER w AS last_tag, first_value(c.since) OVER w AS last_since
        FROM levels c
        WINDOW w AS (ORDER BY c.tag DESC, c.since DESC)
    -- Their first messages, and one more, which tells where the lane stands afterwards. Those that somebody holds are
    -- passed over: they take no room, and cost nothing.
    ), candidates AS (
        SELECT s.lane, s.since, s.is_counted, s.cut, s.last_tag, s.last_since,
            m.row, m.id, m.dequeue_at, m.step, coalesce(m.is_held, false) AS is_held,
            row_number() OVER lane > least(s.share, s.room + demand - want) AS is_last,
            s.tag + (coalesce(sum(m.step) FILTER (WHERE NOT m.is_held) OVER lane, 0)
                - CASE WHEN m.is_held THEN 0 ELSE m.step END)::bigint AS start,
            coalesce(NOT m.is_held AND m.dequeue_at <= v_now
                AND count(*) FILTER (WHERE NOT m.is_held) OVER lane <= s.room, false) AS ripe
        FROM shares s
        LEFT JOIN LATERAL (
            SELECT m.ctid AS row, m.id, m.dequeue_at, lane_step(m.cost, s.weight) AS step,
                -- Of a row that nobody has ever locked or changed there is nothing to try. Of others xmax doesn't tell:
                -- those who hold it may be several, may not mind this, or may be this transaction.
                m.xmax <> '0' AND NOT EXISTS (
                    SELECT FROM message x WHERE x.ctid = m.ctid FOR NO KEY UPDATE SKIP LOCKED) AS is_held
            FROM message m
            WHERE m.queue = r.queue AND m.channel = s.channel AND m.leased_until IS NULL
                AND (m.dequeue_at, m.id) >= (s.head_at, s.head_id)
            ORDER BY m.dequeue_at, m.id
            -- Where the last try came out short, there may be more that is held than there is room.
            LIMIT least(s.share, s.room + demand - want) + 1) m ON true
        WINDOW lane AS (PARTITION BY s.since ORDER BY m.dequeue_at, m.id ROWS UNBOUNDED PRECEDING)
    ), placed AS (
        SELECT c.*,
            row_number() OVER (PARTITION BY c.ripe OR (c.is_held AND c.is_last) ORDER BY c.start, c.since) AS place
        FROM candidates c
    -- Beyond the last message that was fetched of a lane there may be others that go first; and beyond the last
    -- lane that competes, where there was no room for more, other lanes: some of these here may turn out empty.
    ), horizon AS (
        SELECT p.*, min(p.place) FILTER (WHERE p.is_last AND (p.ripe OR p.is_held)) OVER () AS horizon
        FROM placed p
    ), marked AS MATERIALIZED (
        SELECT h.*, h.ripe AND h.place <= least(want, h.horizon)
            AND (NOT h.cut OR (h.start, h.since) <= (h.last_tag, h.last_since))
            AND (h.start, h.since) < (bound_tag, bound_since) AS taken
        FROM horizon h
    -- Locked one by one, as in scheduler_serve.
    ), held AS MATERIALIZED (
        SELECT m.row, k.place, k.is_counted
        FROM marked k
        CROSS JOIN LATERAL (
            SELECT m.ctid AS row FROM message m
            WHERE m.ctid = k.row AND m.leased_until IS NULL AND m.dequeue_at <= v_now
            FOR NO KEY UPDATE SKIP LOCKED) m
        WHERE k.taken
    ), leased AS (
        UPDATE message m
        SET attempt = least(m.attempt, 2147483646) + 1, leased_until = v_until, leased_at = v_clock,
            first_leased_at = coalesce(m.first_leased_at, v_clock), worker = v_worker,
            counted = CASE WHEN h.is_counted OR r.max_concurrency IS NOT NULL THEN r.turn END
        FROM held h
        WHERE m.ctid = h.row
        RETURNING m.id, m.channel, m.attempt, m.payload, m.body, m.state, m.error, m.dequeue_at, m.cost,
            m.created_at, m.leased_until, m.key, m.forgiven, m.first_leased_at, h.place
    -- A message that was passed over here, because somebody else locked or changed it just now, is news for the next
    -- turn. Its room goes to the next one, when the caller tries again.
    ), passed AS MATERIALIZED (
        SELECT k.lane, m.channel, k.dequeue_at, k.id
        FROM marked k JOIN message m ON m.ctid = k.row
        WHERE k.taken
            AND (SELECT count(*) FROM leased) < (SELECT count(*) FROM marked t WHERE t.taken)
            AND k.place NOT IN (SELECT d.place FROM leased d)  -- hashed; NOT EXISTS would be a join, by loops
    -- Lanes that have nothing left to serve but what is held, while others may go on, stand behind that, or become idle.
    -- It is news for the next turn, too: then they stand before it again.
    ), moves AS MATERIALIZED (
        SELECT m.lane, m.spent, m.served, m.again, m.last_at,
            CASE WHEN NOT m.is_stuck THEN coalesce(m.left_at, m.next_at)
                -- What stands behind thousands that are all held waits as they do, and costs others nothing.
                WHEN demand < 4096 OR m.spent > 0 THEN coalesce(m.free_at, m.next_at)
                ELSE m.free_at END AS head_at,
            CASE WHEN m.is_stuck THEN coalesce(m.free_id, m.next_id) ELSE m.left_id END AS head_id,
            CASE WHEN m.is_stuck THEN m.left_at END AS held_at, m.left_id AS held_id
        FROM (
            SELECT k.lane, coalesce(sum(k.step) FILTER (WHERE k.taken), 0)::bigint AS spent,
                (count(*) FILTER (WHERE k.taken) - min(u.passed))::integer AS served,
                CASE WHEN min(u.passed) > 0 THEN v_now ELSE 0 END AS again,
                bool_or(k.is_held) AND NOT bool_or(k.ripe AND NOT k.taken) AS is_stuck,
                min(k.dequeue_at) FILTER (WHERE NOT k.taken) AS left_at,
                min(k.id) FILTER (WHERE NOT k.taken) AS left_id,
                min(k.dequeue_at) FILTER (WHERE NOT (k.taken OR k.is_held)) AS free_at,
                min(k.id) FILTER (WHERE NOT (k.taken OR k.is_held)) AS free_id,
                max(k.dequeue_at) FILTER (WHERE k.is_last) AS next_at,
                -- Of the last of all numbers there is none behind it.
                least(max(k.id) FILTER (WHERE k.is_last), 9223372036854775806) + 1 AS next_id, max(k.dequeue_at) AS last_at
            FROM marked k CROSS JOIN LATERAL (
                SELECT count(*) AS passed FROM passed p WHERE p.lane = k.lane) u
            GROUP BY k.lane) m
    ), missed AS (
        INSERT INTO signal (queue, channel, dequeue_at, message_id, urgent)
        SELECT r.queue, p.channel, p.dequeue_at, p.id, true
        FROM passed p
        UNION ALL
        SELECT r.queue, (SELECT l.channel FROM lane l WHERE l.ctid = v.lane), v.held_at, v.held_id, true
        FROM moves v
        WHERE v.held_at IS NOT NULL
    ), moved AS (
        UPDATE lane l
        SET tag = l.tag + v.spent,
            -- A limited lane that passed over a message was not looked at beyond its limit, while others went on:
            -- it becomes active anew, at the virtual time.
            due = CASE WHEN v.head_at IS NOT NULL THEN greatest(
                lane_due(v_now, v.head_at, l.paused_until, l.max_concurrency, l.running + v.served,
                    l.release_interval, l.burst, lane_released(v_now, v.served, l.release_interval, l.released_at)),
                CASE WHEN l.max_concurrency IS NOT NULL OR l.release_interval > 0 THEN v.again END) END,
            head_at = coalesce(v.head_at, v.last_at, l.head_at),
            head_id = coalesce(v.head_id, 0),
            running = CASE WHEN l.max_concurrency IS NULL THEN 0 ELSE l.running + v.served END,
            released_at = lane_released(v_now, v.served, l.release_interval, l.released_at)
        FROM moves v
        WHERE l.ctid = v.lane
        RETURNING l.due
    ), last AS (
        SELECT k.start, k.since FROM marked k WHERE k.taken ORDER BY k.place DESC LIMIT 1
    ), turned AS (
        UPDATE rotation t
        SET turn = t.turn + 1, era = rotation_era(t.turn + 1),
            vtime = coalesce((SELECT a.start FROM last a), r.vtime),
            vsince = coalesce((SELECT a.since FROM last a), r.vsince),
            activations = r.activations, news_from = r.news_from, news_open = r.news_open,
            urgent_from = r.urgent_from, urgent_open = r.urgent_open,
            due_floor = least(r.due_floor, (SELECT min(v.due) FROM moved v WHERE v.due > 0)),
            lease_floor = least(r.lease_floor, v_until), idle_floor = r.idle_floor, swept = r.swept,
            max_concurrency = r.max_concurrency, paused_until = r.paused_until,
            running = CASE WHEN r.max_concurrency IS NULL THEN 0
                ELSE r.running + (SELECT count(*) FROM leased)::integer END,
            counted_from = r.counted_from, clock = r.clock, maintain_at = r.maintain_at,
            place = r.place, planned = r.planned,
            ahead = least(r.ahead + (SELECT count(*) FROM leased), plan_most()), plan_at = r.plan_at,
            lane_tag = NULL, lane_since = NULL
        WHERE t.queue = r.queue AND t.era = r.era
    )
    SELECT d.id, d.channel, d.attempt, d.payload, d.body, d.state, d.error, d.dequeue_at, d.cost, d.created_at,
        d.leased_until, d.key, d.forgiven, d.first_leased_at
    FROM leased d
    ORDER BY d.place;
END
$$;

-- Moves the virtual time on to the last message that was taken from the plan without the turn.
--
-- Called by scheduler_serve and queue_repair, within the turn, which nobody who takes from the plan has at the same
-- time: all that was taken is committed, or rolled back. Where one comes before it that was drawn and is left, because
-- whoever had drawn it rolled back, or that wasn't there to be taken, the plan is taken back: it was made as if that one
-- came first. What was drawn last, and is left, is still to come.
-- A channel that becomes active then starts where the last message would have, had the same work been done in the order
-- of what was planned and is there.
-- Locks: the rotation of the queue, and the rows of missed that it deletes, which nobody else writes; and as
-- scheduler_unplan.
--
-- Returns the rotation as it is now.
CREATE FUNCTION scheduler_settle(queue text) RETURNS rotation
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_ticket bigint;
    v_drawn bigint;
    v_ids bigint[];
    v_last bigint;
    v_gap bigint;
    v_tag bigint;
    v_since bigint;
    v_left_tag bigint;
    v_left_since bigint;
    r rotation;
BEGIN
    SELECT t.* INTO r FROM rotation t WHERE t.queue = v_queue ORDER BY t.era DESC LIMIT 1;
    -- None was drawn of it: rotation was copied here without its sequences, as by logical replication.
    v_ticket := coalesce(pg_sequence_last_value(r.tickets), nextval(r.tickets), r.ticket_base);
    v_drawn := r.place + v_ticket - r.ticket_base;
    -- Nobody takes what comes after a lane.
    SELECT array_agg(e.id), max(e.place) INTO v_ids, v_last
    FROM plan p
    CROSS JOIN LATERAL (
        SELECT e.id, p.place + e.nth - 1 AS place
        FROM unnest(p.ids, p.tags, p.sinces) WITH ORDINALITY AS e (id, tag, since, nth)
        WHERE (e.tag, e.since) < (r.lane_tag, r.lane_since)) e
    WHERE p.queue = v_queue AND p.place > r.place - 32 AND p.place <= v_drawn
        AND e.place > r.place AND e.place <= v_drawn;
    -- All at once, as hardly ever one is left; and by the id alone, so that no index but that one can be used for it.
    IF EXISTS (SELECT FROM missed k WHERE k.queue = v_queue AND k.turn = r.turn) OR EXISTS (
        SELECT FROM (SELECT m.* FROM message m WHERE m.id = ANY (v_ids) OFFSET 0) m
        WHERE m.queue = v_queue AND m.leased_until IS NULL)
    THEN
        SELECT max(p.place) FILTER (WHERE p.is_taken), min(p.place) FILTER (WHERE NOT p.is_taken) INTO v_last, v_gap
        FROM scheduler_planned(v_queue, v_last) p;
    END IF;
    IF v_last IS NOT NULL THEN
        IF v_gap < v_last THEN
            SELECT u.tag, u.since INTO v_tag, v_since FROM scheduler_unplan(v_queue) u;
            r.place := r.planned;
            r.ahead := 0;
            r.plan_at := plan_after();
            -- Lanes of which something was passed over may be behind that; who arrives isn't to be.
            r.arrival_tag := greatest(r.arrival_tag, v_tag);
            SELECT l.tag, l.since - 1 INTO v_left_tag, v_left_since
            FROM lane l
            WHERE l.queue = v_queue AND l.due = 0 AND (l.tag, l.since) > (r.vtime, r.vsince)
                AND (l.tag, l.since) <= (v_tag, v_since)
            ORDER BY l.tag, l.since LIMIT 1;
        ELSE
            SELECT p.tags[v_last - p.place + 1], p.sinces[v_last - p.place + 1] INTO v_tag, v_since
            FROM plan p
            WHERE p.queue = v_queue AND p.place <= v_last AND p.place > v_last - 32
            ORDER BY p.place DESC LIMIT 1;
            r.ahead := least(r.ahead + (v_last - r.place)::integer, plan_most());
            r.place := v_last;
        END IF;
        -- Unless somebody has damaged the plan, there is a last one.
        r.vtime := coalesce(v_left_tag, v_tag, r.vtime);
        r.vsince := coalesce(v_left_since, v_since, r.vsince);
    END IF;
    r.ticket_base := v_ticket;
    DELETE FROM missed k WHERE k.queue = v_queue AND k.turn = r.turn;
    UPDATE rotation t
    SET vtime = r.vtime, vsince = r.vsince, arrival_tag = r.arrival_tag, place = r.place, planned = r.planned,
        ahead = r.ahead, plan_at = r.plan_at, lane_tag = NULL, lane_since = NULL, ticket_base = r.ticket_base
    WHERE t.queue = v_queue AND t.era = r.era;
    RETURN r;
END
$$;

-- Looks for the news of channels that aren't known to be ready, by name, in up to max_channels steps, without signals.
--
-- Called by scheduler_serve, within the turn, when signals arrive faster than they can be folded: a channel's news
-- then need not wait behind the many signals of another. It goes from one lane to the next that isn't idle, backwards by
-- name, as the first entry of each lane is the living one then, and looks for messages of channels between the two. What
-- a lane is ready for, or has to wait with, is known, and none of its messages is looked at, however many there are: only
-- before the first one of a lane that waits for its hour.
-- Of those messages that no folded signal told of, first_id is about the first: so the entries of served messages are
-- passed over within the index, without a look at the table, however many an old snapshot keeps. Where a channel has
-- something, it begins with the first that is ready, which may have come before.
-- Locks: the lanes that scheduler_activate changes.
--
-- Returns the last channel looked at ('' when the round is complete), the number of activations so far, the earliest
-- time at which a lane that now waits is due, and whether one has a limit whose leases nobody counted
-- (scheduler_activate).
CREATE FUNCTION scheduler_sweep(
    queue text, turn bigint, vtime bigint, now_ms bigint, max_channels integer, first_id bigint,
    INOUT swept text, INOUT activations bigint, OUT due_floor bigint, OUT uncounted boolean
)
LANGUAGE plpgsql
SET search_path FROM CURRENT
-- Sorting all messages would take long where the table seemed to be nearly empty when this was planned.
SET enable_sort = off
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_activations CONSTANT bigint := $8;
    v_from text := $7;
    v_vsince bigint;
    v_channels text[];
    v_ats bigint[];
    v_ids bigint[];
BEGIN
    SELECT t.vsince INTO v_vsince FROM rotation t WHERE t.queue = v_queue ORDER BY t.era DESC LIMIT 1;
    IF v_from = '' THEN
        v_from := (SELECT l.channel FROM lane l WHERE l.queue = v_queue ORDER BY l.channel DESC, l.tag DESC LIMIT 1);
        v_from := coalesce(
            (SELECT m.channel FROM message m
             WHERE m.queue = v_queue AND m.channel > coalesce(v_from, '') AND m.leased_until IS NULL AND m.id >= first_id
             ORDER BY m.channel DESC, m.dequeue_at DESC, m.id DESC LIMIT 1),
            v_from) || 'z';  -- so it comes behind all
    END IF;
    WITH RECURSIVE walk AS (
        SELECT v_from COLLATE "C" AS channel, v_from COLLATE "C" AS stop, NULL::bigint AS before_at,
            NULL::bigint AS before_id, NULL::bigint AS dequeue_at, NULL::bigint AS id
        UNION ALL
        SELECT coalesce(n.channel, k.channel), k.channel, k.before_at, k.before_id, p.dequeue_at, p.id
        FROM walk w
        -- The next lane that isn't idle, or the last of some that are; looked for once, whatever there is before it. And
        -- the place before which something of it would be news.
        LEFT JOIN LATERAL (
            SELECT w.stop AS channel, w.before_at, w.before_id WHERE w.stop < w.channel
            UNION ALL
            (SELECT l.channel, CASE WHEN l.is_idle THEN 9223372036854775807
                     WHEN l.due > 0 AND l.head_at > now_ms AND NOT l.is_planned THEN l.head_at END, l.head_id
             FROM (
                 SELECT l.*, l.due IS NULL AND NOT l.is_planned AS is_idle, row_number() OVER () AS nth
                 FROM (
                     SELECT l.*, (l.planned, l.since) > (vtime, v_vsince) AS is_planned
                     FROM lane l
                     WHERE w.stop = w.channel AND l.queue = v_queue AND l.channel < w.channel
                     ORDER BY l.channel DESC, l.tag DESC LIMIT 64) l) l
             WHERE NOT l.is_idle OR l.nth = 64
             LIMIT 1)
            LIMIT 1) k ON true
        LEFT JOIN LATERAL (
            SELECT m.channel FROM message m
            WHERE m.queue = v_queue AND m.channel < w.channel AND m.channel > coalesce(k.channel, '')
                AND m.leased_until IS NULL AND m.id >= first_id
            ORDER BY m.channel DESC, m.dequeue_at DESC, m.id DESC LIMIT 1) n ON true
        LEFT JOIN LATERAL (
            SELECT m.dequeue_at, m.id FROM message m
            WHERE m.queue = v_queue AND m.channel = coalesce(n.channel, k.channel) AND m.leased_until IS NULL
                AND m.id >= first_id AND (m.dequeue_at, m.id) < (
                    CASE WHEN n.channel IS NULL THEN k.before_at ELSE 9223372036854775807 END,
                    CASE WHEN n.channel IS NULL THEN k.before_id ELSE 0 END)
            ORDER BY m.dequeue_at, m.id LIMIT 1) p ON true
        WHERE w.channel IS NOT NULL
    )
    SELECT array_agg(s.channel) FILTER (WHERE s.id IS NOT NULL),
        array_agg(coalesce(f.dequeue_at, s.dequeue_at)) FILTER (WHERE s.id IS NOT NULL),
        array_agg(coalesce(f.id, s.id)) FILTER (WHERE s.id IS NOT NULL),
        CASE WHEN bool_and(s.channel IS NOT NULL) THEN min(s.channel) ELSE '' END
    INTO v_channels, v_ats, v_ids, swept
    FROM (SELECT * FROM walk LIMIT max_channels + 1) s
    -- What stands before it may not be known either: ids are not in the order of transactions.
    LEFT JOIN LATERAL (
        SELECT l.head_at, l.head_id FROM lane l
        WHERE s.id IS NOT NULL AND l.queue = v_queue AND l.channel = s.channel
        ORDER BY l.tag DESC LIMIT 1) l ON true
    LEFT JOIN LATERAL (
        SELECT m.dequeue_at, m.id FROM message m
        WHERE s.id IS NOT NULL AND m.queue = v_queue AND m.channel = s.channel AND m.leased_until IS NULL
            AND (m.dequeue_at, m.id) >= (coalesce(l.head_at, -9223372036854775808), coalesce(l.head_id, 0))
            AND (m.dequeue_at, m.id) < (s.dequeue_at, s.id)
        ORDER BY m.dequeue_at, m.id LIMIT 1) f ON true;

    SELECT a.activations, a.due_floor, a.uncounted INTO activations, due_floor, uncounted
    FROM scheduler_activate(v_queue, turn, vtime, now_ms, v_channels, v_ats, v_ids, NULL, NULL, false, v_activations) a;
END
$$;

-- Gives a queue the tickets of a sequence that no other queue has, or takes them back.
--
-- Called by scheduler_serve and queue_repair, within the turn of the queue. Returns the sequence and the last ticket that
-- was drawn, or null where all are given out, or somebody else is getting those that are left, or they are taken back.
-- Locks: an advisory lock for the number of the sequence, until the end of the transaction, and the row of tickets. It
-- waits for nobody.
CREATE FUNCTION scheduler_tickets(queue text, wanted boolean, OUT tickets regclass, OUT ticket_base bigint)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_number integer;
BEGIN
    DELETE FROM tickets k WHERE k.queue = v_queue;
    IF NOT wanted THEN
        RETURN;
    END IF;
    FOR v_number IN
        SELECT n.number FROM generate_series(1, 64) AS n (number)
        WHERE NOT EXISTS (SELECT FROM tickets k WHERE k.number = n.number)
        ORDER BY n.number
    LOOP
        IF pg_try_advisory_xact_lock(queue_key('tickets', 100 + v_number)) THEN
            -- Unless another queue has got it since that look. Who has not committed that has the lock.
            INSERT INTO tickets (number, queue) VALUES (v_number, v_queue) ON CONFLICT DO NOTHING
            RETURNING to_regclass('tickets_' || v_number) INTO tickets;
            EXIT WHEN tickets IS NOT NULL;
        END IF;
    END LOOP;
    ticket_base := nextval(tickets);
END
$$;

-- Removes lanes that have been idle so long that forgetting them changes nothing; and keeps tags small.
--
-- Called by scheduler_serve now and then, within the turn. An idle lane behind the virtual time would start at the
-- virtual time anyway; one whose limits still count something is looked at again later. Tags start again from zero
-- long before they reach the end of bigint.
-- Locks: the lanes it removes or rewrites, and the rotation of the queue.
--
-- Returns the virtual time and the tag below which no idle lane is left.
CREATE FUNCTION scheduler_tidy(queue text, now_ms bigint, INOUT vtime bigint, INOUT idle_floor bigint)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_vtime CONSTANT bigint := $3;
    v_floor CONSTANT bigint := $4;
    -- A lane that is used often is kept: only those 64 messages (of cost and weight 1) behind are removed.
    v_keep CONSTANT bigint := $3 - 64 * lane_step(1, 1);
    v_last bigint;
    v_all boolean;
BEGIN
    IF v_keep > v_floor THEN
        WITH old AS MATERIALIZED (
            SELECT l.* FROM (
                SELECT l.*, count(*) FILTER (WHERE NOT l.is_done) OVER (ORDER BY l.tag ROWS UNBOUNDED PRECEDING) AS kept
                FROM (
                    -- One whose rate is gone may get it back: it is known for a day when it was last released.
                    SELECT l.ctid AS row, l.tag, l.running = 0
                        AND l.released_at + coalesce(nullif(l.release_interval, 0), 86400000) <= now_ms AS is_done
                    FROM lane l
                    WHERE l.queue = v_queue AND l.due IS NULL AND l.tag >= v_floor AND l.tag < v_keep
                    ORDER BY l.tag
                    LIMIT 10000) l) l
            -- Few at a time that have to be rewritten, as they come round again.
            WHERE l.kept <= 256
        ), removed AS (
            DELETE FROM lane l USING old o WHERE l.ctid = o.row AND o.is_done
        ), kept AS (
            UPDATE lane l SET tag = v_vtime FROM old o WHERE l.ctid = o.row AND NOT o.is_done
        )
        SELECT count(*) < 10000 AND count(*) FILTER (WHERE NOT o.is_done) < 256, max(o.tag) INTO v_all, v_last FROM old o;
        idle_floor := CASE WHEN v_all THEN v_keep ELSE v_last END;
    END IF;
    IF vtime > 1000000000000000000 THEN
        PERFORM scheduler_unplan(v_queue);
        UPDATE lane l SET tag = greatest(l.tag - v_vtime, 0), planned = -1 WHERE l.queue = v_queue;
        UPDATE rotation t SET arrival_tag = greatest(t.arrival_tag - v_vtime, 0) WHERE t.queue = v_queue;
        vtime := 0;
        idle_floor := -1;
    END IF;
END
$$;

-- Whether one of the transactions that were under way when signals of a kind were last read has told something since.
--
-- Called by message_dequeue and scheduler_serve, into whose snapshot it looks; takes no lock. Who still is under way has
-- told nothing yet, however much it wrote. Each is looked for by itself: what lies between them has been read.
CREATE FUNCTION scheduler_told(queue text, is_urgent boolean, open xid8[]) RETURNS boolean
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN EXISTS (
        SELECT FROM unnest(open) AS o (xid)
        CROSS JOIN LATERAL (
            SELECT FROM signal s WHERE s.queue = $1 AND s.urgent = is_urgent AND s.xid = o.xid LIMIT 1) s
        WHERE pg_visible_in_snapshot(o.xid, pg_current_snapshot()));
END
$$;

-- Waits for the caller's turn to dequeue from a queue and keeps it until the end of the transaction; or, shared, for a
-- part in a turn that many have at the same time.
--
-- Called by scheduler_serve and queue_repair, and shared by message_dequeue. True: the turn is the caller's, and
-- whether it had to wait is to be read in fairqueue_turn.waited. False: somebody else has it and waiting could deadlock,
-- because this transaction holds the turn of another queue, or wrote something before it came to dequeue, and so may
-- hold other locks.
-- Locks: one transaction-level advisory lock a queue. Besides this, message_dequeue takes it.
--
-- Raises lock_not_available after 10 s: a transaction that dequeues has to commit at once.
CREATE FUNCTION scheduler_turn(
    queue text, shared boolean DEFAULT false, wrote boolean DEFAULT pg_current_xact_id_if_assigned() IS NOT NULL
) RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_key CONSTANT bigint := queue_key(queue);
    v_held text;
BEGIN
    IF (shared AND pg_try_advisory_xact_lock_shared(v_key)) OR (NOT shared AND pg_try_advisory_xact_lock(v_key)) THEN
        v_held := set_config('fairqueue_turn.held', 'yes', true);  -- assigned, as PERFORM would run a query for it
        RETURN true;
    ELSIF wrote OR current_setting('fairqueue_turn.held', true) = 'yes' THEN
        RETURN false;
    END IF;
    DECLARE
        v_timeout CONSTANT text := current_setting('lock_timeout');
    BEGIN
        PERFORM set_config('lock_timeout', '10s', true);
        IF shared THEN
            PERFORM pg_advisory_xact_lock_shared(v_key);
        ELSE
            PERFORM pg_advisory_xact_lock(v_key);
        END IF;
        PERFORM set_config('lock_timeout', v_timeout, true);
        PERFORM set_config('fairqueue_turn.held', 'yes', true);
        PERFORM set_config('fairqueue_turn.waited', 'yes', true);
        RETURN true;
    EXCEPTION WHEN lock_not_available THEN
        RAISE lock_not_available USING
            MESSAGE = format('queue %L has been held by another dequeue for 10 s', queue),
            DETAIL = format('Held by %s.', (
                SELECT string_agg(coalesce('the server process with pid ' || l.pid,
                    'a prepared transaction (pg_prepared_xacts)'), ', ')
                FROM pg_locks l
                WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
                    AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
                    AND (l.classid::bigint << 32) | l.objid::bigint = v_key)),
            HINT = 'Commit the transaction of a dequeue at once: the lease, not the transaction, keeps the messages.';
    END;
END
$$;

-- Where the next look for signals of a kind begins, and whom it looks for below that, once all that a snapshot sees of
-- them has been read.
--
-- Called by scheduler_fold, and by scheduler_serve where there was nothing to read; takes no lock. since is the horizon
-- so far, told the last transaction whose signals were read, if any, and most the end of what was read, if more is left.
--
-- Never beyond what the snapshot tells of: who began after it isn't on the list. The horizon goes no farther than to the
-- first one under way that began after all that have told something, so that only those are on the list that began
-- before, and what was read lies behind it. Who is still under way where the horizon stood before goes on the list, too,
-- as looks from the horizon on would walk over all that such a one writes. The caller is always among those under way:
-- it may go on to enqueue before it commits.
CREATE FUNCTION scheduler_under_way(
    snapshot pg_snapshot, since xid8, told xid8, most xid8, OUT horizon xid8, OUT open xid8[]
)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    SELECT least(most, pg_snapshot_xmax(snapshot),
            (array_agg(u.xid ORDER BY u.xid) FILTER (WHERE u.xid > since AND (u.xid > told) IS NOT FALSE))[1]),
        array_agg(u.xid)
    INTO horizon, open
    FROM (SELECT pg_snapshot_xip(snapshot) AS xid UNION SELECT pg_current_xact_id()) u;
    open := ARRAY(SELECT x FROM unnest(open) AS x WHERE x < horizon);
END
$$;

-- Takes back what is left of the plan: the lanes stand again where their next planned messages were.
--
-- Called by scheduler_serve, within the turn, when what was planned is no longer what should come next, because a
-- message is gone, changed or held by somebody, and before lanes are derived anew; by scheduler_settle, when others were
-- taken past such a one; by scheduler_activate, when a message came before planned ones of its channel; by scheduler_fold
-- and scheduler_tidy, before they change what was planned by; and by queue_repair. Nothing is lost by it but the work:
-- each lane owes what it owed before, and what was taken of it.
-- Locks: the lanes that it changes, and the rows of plan that it deletes.
--
-- Where something was taken since the place of the rotation, returns where the last message would have started, had the
-- same work been done in the order of those planned ones that were taken or are still to be had. At least one lane stands
-- there, or beyond.
CREATE FUNCTION scheduler_unplan(queue text, OUT tag bigint, OUT since bigint)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_now CONSTANT bigint := unix_ms(clock());
    v_place bigint;
    v_has_drawn boolean;
BEGIN
    SELECT r.place, coalesce(pg_sequence_last_value(r.tickets) > r.ticket_base, false) INTO v_place, v_has_drawn
    FROM rotation r WHERE r.queue = v_queue ORDER BY r.era DESC LIMIT 1;

    WITH gone AS (
        DELETE FROM plan p
        WHERE p.queue = v_queue AND p.place > v_place - 32
    -- As it was before that: the function is stable.
    ), planned AS MATERIALIZED (
        SELECT p.channel, p.tag, p.since, p.place, p.left_id, p.left_at, p.is_taken FROM scheduler_planned(v_queue) p
    -- The steps are found by sorting: a join would be a loop. A message's step is up to where the next one of its channel
    -- starts; that of the last one, up to its lane.
    ), steps AS MATERIALIZED (
        SELECT e.*, lead(e.tag) OVER (PARTITION BY e.channel ORDER BY e.place) - e.tag AS step,
            min(e.tag) OVER lane AS first_tag, max(e.weight) OVER lane AS lane_weight
        FROM (
            SELECT p.*, NULL::tid AS row, NULL::double precision AS weight FROM planned p
            UNION ALL
            SELECT c.channel, l.tag, NULL, 9223372036854775807, NULL, NULL, NULL, l.row, l.weight
            FROM (SELECT DISTINCT p.channel FROM planned p) c
            CROSS JOIN LATERAL (
                SELECT l.ctid AS row, l.tag, l.weight FROM lane l
                WHERE l.queue = v_queue AND l.channel = c.channel
                ORDER BY l.tag DESC LIMIT 1) l) e
        WINDOW lane AS (PARTITION BY e.channel)
    ), moves AS MATERIALIZED (
        SELECT (array_agg(s.row) FILTER (WHERE s.row IS NOT NULL))[1] AS row,
            -- Where something is left, it stands where it stood, even if that is gone: there, it was ready.
            CASE WHEN bool_or(NOT s.is_taken) THEN v_now END AS ready_at,
            (min(s.first_tag) + coalesce(sum(s.step) FILTER (WHERE s.is_taken), 0))::bigint AS tag,
            min(s.left_at) AS head_at,
            (array_agg(s.left_id ORDER BY s.left_at, s.left_id) FILTER (WHERE s.left_id IS NOT NULL))[1] AS head_id
        FROM steps s
        GROUP BY s.channel
    ), moved AS (
        UPDATE lane l
        SET tag = v.tag, planned = -1, due = CASE WHEN v.ready_at IS NOT NULL THEN 0 ELSE l.due END,
            head_at = least(v.head_at, l.head_at, v.ready_at),
            head_id = CASE WHEN v.ready_at < least(v.head_at, l.head_at) THEN 0
                WHEN (v.head_at, v.head_id) < (l.head_at, l.head_id) THEN v.head_id ELSE l.head_id END
        FROM moves v
        WHERE l.ctid = v.row
    -- Without what is gone, what comes after it in its channel starts earlier.
    ), ordered AS (
        SELECT s.since, s.is_taken, s.step * s.lane_weight::numeric AS work,
            (s.first_tag - s.step
                + sum(s.step) OVER (PARTITION BY s.channel ORDER BY s.place ROWS UNBOUNDED PRECEDING))::bigint AS start
        FROM steps s
        WHERE v_has_drawn AND (s.is_taken OR s.left_at <= v_now)
    )
    SELECT o.start, o.since INTO tag, since
    FROM (
        SELECT o.start, o.since, sum(o.work) FILTER (WHERE o.is_taken) OVER () AS work_taken,
            sum(o.work) OVER (ORDER BY o.start, o.since ROWS UNBOUNDED PRECEDING) - o.work AS work_before
        FROM ordered o) o
    WHERE o.work_before < o.work_taken
    ORDER BY o.start DESC, o.since DESC LIMIT 1;
END
$$;

-- Makes ready up to max_lanes lanes whose time has come.
--
-- Called by scheduler_serve, within the turn, when a lane may be due. Like every channel that becomes active, a lane
-- starts at max(its own tag, vtime, the rotation's arrival_tag); unless it has planned messages, behind which it stands.
-- Locks: the lanes it changes.
--
-- Returns the lower bound of the times at which the lanes that still wait are due, and the number of activations so
-- far.
CREATE FUNCTION scheduler_wake(
    queue text, vtime bigint, now_ms bigint, max_lanes integer, INOUT due_floor bigint, INOUT activations bigint
)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_vtime CONSTANT bigint := $2;
    v_floor CONSTANT bigint := $5;
    v_activations CONSTANT bigint := $6;
    v_vsince bigint;
    v_start bigint;
    v_is_planned boolean;
    v_woken integer;
BEGIN
    SELECT t.vsince, greatest(v_vtime, t.arrival_tag), t.planned > t.place INTO v_vsince, v_start, v_is_planned
    FROM rotation t WHERE t.queue = v_queue ORDER BY t.era DESC LIMIT 1;
    WITH due AS MATERIALIZED (
        SELECT l.ctid AS row, l.due, l.head_id,
            v_is_planned AND (l.planned, l.since) > (v_vtime, v_vsince) AS is_planned
        FROM lane l
        WHERE l.queue = v_queue AND l.due > 0 AND l.due >= v_floor AND l.due <= now_ms
        ORDER BY l.due
        LIMIT max_lanes
    ), numbered AS MATERIALIZED (
        SELECT d.row, d.is_planned, v_activations + row_number() OVER (ORDER BY d.due, d.head_id) AS since FROM due d
    )
    UPDATE lane l SET due = 0, tag = CASE WHEN n.is_planned THEN l.tag ELSE greatest(l.tag, v_start) END,
        since = CASE WHEN n.is_planned THEN l.since ELSE n.since END,
        planned = CASE WHEN n.is_planned THEN l.planned ELSE -1 END
    FROM numbered n
    WHERE l.ctid = n.row;

    GET DIAGNOSTICS v_woken = ROW_COUNT;
    activations := v_activations + v_woken;
    due_floor := coalesce(
        (SELECT l.due FROM lane l
         WHERE l.queue = v_queue AND l.due > 0 AND l.due >= v_floor
         ORDER BY l.due LIMIT 1),
        9223372036854775807);
END
$$;

-- The oldest version whose release works with this installation too, so that its programs may go on, and be started
-- again, until they are replaced. Called by anyone; takes no lock.
CREATE FUNCTION schema_serves() RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN 1;

-- The version of this installation: which numbered step it stands at. Called by anyone; takes no lock.
CREATE FUNCTION schema_version() RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN 1;

-- Trigger function of channel_changed: tells the scheduler to read the policy of a channel again.
--
-- Locks: none that anybody waits for, but for notifications (queue_notify); it appends rows.
CREATE FUNCTION signal_channel() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
BEGIN
    -- What is written again as it was costs nothing: it neither takes back a plan nor looks at all channels.
    IF TG_OP = 'UPDATE' AND ROW(OLD.queue, OLD.name, OLD.weight, OLD.max_concurrency, OLD.release_interval_ms, OLD.burst,
            OLD.paused, OLD.resume_at)
        IS NOT DISTINCT FROM ROW(NEW.queue, NEW.name, NEW.weight, NEW.max_concurrency, NEW.release_interval_ms, NEW.burst,
            NEW.paused, NEW.resume_at)
    THEN
        RETURN NULL;
    END IF;
    -- One that is moved, or renamed, leaves where it was as if it were deleted: what it held back there can be served.
    IF TG_OP <> 'INSERT' THEN
        INSERT INTO signal (queue, channel, urgent) VALUES (OLD.queue, OLD.name, true);
        PERFORM queue_notify(OLD.queue);
    END IF;
    IF TG_OP <> 'DELETE' THEN
        INSERT INTO signal (queue, channel, urgent) VALUES (NEW.queue, NEW.name, true);
        PERFORM queue_notify(NEW.queue);
    END IF;
    RETURN NULL;
END
$$;

REVOKE EXECUTE ON FUNCTION signal_channel FROM PUBLIC;

-- Trigger function of message_freed: tells the scheduler that a counted lease ended with its message. One that a user has
-- ended before was told then.
--
-- Locks: none that anybody waits for; it appends a row.
CREATE FUNCTION signal_freed() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
BEGIN
    IF OLD.leased_until IS NOT NULL THEN
        INSERT INTO signal (queue, channel, counted, urgent) VALUES (OLD.queue, OLD.channel, OLD.counted, true);
    END IF;
    RETURN NULL;
END
$$;

REVOKE EXECUTE ON FUNCTION signal_freed FROM PUBLIC;

-- Trigger function of message_moved: a signal for a message that became ready, or was changed while it was; with it the
-- end of its lease, if that was counted; and a notification, if workers wait for one. Of one that is leased now, only
-- when, and if that isn't later than it was: dequeues have to know the earliest end of a lease. One that a user has given
-- isn't counted: a mark that is left of an earlier one, whose end was told, is taken off.
--
-- Locks: none that anybody waits for, but for notifications (queue_notify); it appends a row.
CREATE FUNCTION signal_moved() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
DECLARE
    v_counted CONSTANT bigint := CASE WHEN OLD.leased_until IS NOT NULL THEN OLD.counted END;
BEGIN
    IF NEW.leased_until IS NOT NULL THEN
        IF OLD.leased_until IS NULL OR NEW.leased_until < OLD.leased_until THEN
            INSERT INTO signal (queue, message_id, urgent) VALUES (NEW.queue, NEW.id, true);
        END IF;
        IF OLD.leased_until IS NULL AND NEW.counted = OLD.counted THEN
            UPDATE message m SET counted = NULL WHERE m.id = NEW.id;
        END IF;
        RETURN NULL;
    END IF;
    -- A mere edit is no more urgent than an arrival: it only matters to what is planned, and may come in floods.
    INSERT INTO signal (queue, channel, dequeue_at, message_id, counted, urgent)
    VALUES (NEW.queue, NEW.channel, NEW.dequeue_at, NEW.id, v_counted, OLD.leased_until IS NOT NULL
        OR (OLD.queue, OLD.channel, OLD.dequeue_at) IS DISTINCT FROM (NEW.queue, NEW.channel, NEW.dequeue_at));
    IF NEW.dequeue_at <= unix_ms(clock()) THEN
        PERFORM queue_notify(NEW.queue);
    END IF;
    RETURN NULL;
END
$$;

REVOKE EXECUTE ON FUNCTION signal_moved FROM PUBLIC;

-- Tells the scheduler that the policy of a queue changed, from what it was to what it is: rows of queue, or null for none.
--
-- Called by signal_queue. What is as it was costs nothing: it neither takes back a plan nor looks at all channels. Nor
-- does what holds for the whole queue, a pause or max_concurrency, which is to hold, and to end, at once, however many
-- channels there are: it has a signal of its own.
-- Locks: none that anybody waits for, but for notifications (queue_notify); it appends rows.
CREATE FUNCTION signal_policy(name text, before queue, after queue) RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    -- A queue without a row has the defaults of one.
    IF ROW(coalesce(before.channel_weight, 1), before.channel_max_concurrency,
            coalesce(before.channel_release_interval_ms, 0), coalesce(before.channel_burst, 1))
        IS DISTINCT FROM ROW(coalesce(after.channel_weight, 1), after.channel_max_concurrency,
            coalesce(after.channel_release_interval_ms, 0), coalesce(after.channel_burst, 1))
    THEN
        INSERT INTO signal (queue, urgent) VALUES (name, true);
    ELSIF ROW(before.max_concurrency, paused_until(before.paused, before.resume_at))
        IS DISTINCT FROM ROW(after.max_concurrency, paused_until(after.paused, after.resume_at))
    THEN
        INSERT INTO signal (queue, dequeue_at, urgent) VALUES (name, 0, true);
    ELSE
        RETURN;
    END IF;
    PERFORM queue_notify(name);
END
$$;

-- Trigger function of queue_changed: tells the scheduler to read the policy of a queue again (signal_policy).
--
-- Locks: none that anybody waits for, but for notifications (queue_notify); it appends rows.
CREATE FUNCTION signal_queue() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
BEGIN
    IF OLD.name = NEW.name THEN
        PERFORM signal_policy(NEW.name, OLD, NEW);
        RETURN NULL;
    END IF;
    -- One that is moved, or renamed, leaves where it was as if it were deleted: what it held back there can be served.
    IF TG_OP <> 'INSERT' THEN
        PERFORM signal_policy(OLD.name, OLD, NULL);
    END IF;
    IF TG_OP <> 'DELETE' THEN
        PERFORM signal_policy(NEW.name, NULL, NEW);
    END IF;
    RETURN NULL;
END
$$;

REVOKE EXECUTE ON FUNCTION signal_queue FROM PUBLIC;

-- Trigger function of message_truncated, channel_truncated and queue_truncated: whatever the scheduler counts of messages
-- has to be counted anew, and whatever it knows of policies to be read again.
--
-- Locks: none that anybody waits for, but for notifications (queue_notify); it appends rows.
CREATE FUNCTION signal_truncated() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
BEGIN
    INSERT INTO signal (queue, urgent) SELECT r.queue, true FROM rotation r;
    PERFORM queue_notify(r.queue) FROM rotation r;
    RETURN NULL;
END
$$;

REVOKE EXECUTE ON FUNCTION signal_truncated FROM PUBLIC;

-- Drops what loads have left: staging tables that were given up, those of runs that have made none since so long ago,
-- and the names of nameless jobs.
--
-- Called by stage_drop, by loaders when they have finished, and by operators as often as they like. Returns how many
-- tables it dropped: at most 500 in one call, as a transaction can hold only so many locks; call it until it returns 0.
-- Choose an age that no running load reaches; one whose tables are gone fails, and enters nothing. Jobs without a name
-- keep one of their own, or one a part, for as long, so that a task which runs twice enters its part once, and that they
-- can be told how many messages they have made.
-- Locks: these tables, against everybody, until the end of the transaction. A table that is in use is left for later.
CREATE FUNCTION stage_clean(older_than interval DEFAULT '1 day') RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET lock_timeout = '10ms'
AS $$
DECLARE
    v_stage stage;
    v_dropped integer := 0;
BEGIN
    IF older_than IS NULL OR older_than < interval '0' THEN
        RAISE invalid_parameter_value USING
            MESSAGE = format('older_than must not be negative, not %s', coalesce(older_than::text, 'null'));
    END IF;
    DELETE FROM load l
    WHERE l.ctid = ANY (ARRAY(
        SELECT o.ctid FROM load o WHERE o.name LIKE 'run/%' AND o.entered_at < clock() - older_than
        FOR UPDATE SKIP LOCKED));
    FOR v_stage IN
        SELECT s.* FROM stage s
        WHERE s.run = ''
            OR NOT EXISTS (SELECT FROM stage o WHERE o.run = s.run AND o.created_at > clock() - older_than)
        LIMIT 500 FOR UPDATE SKIP LOCKED
    LOOP
        BEGIN
            EXECUTE format('DROP TABLE IF EXISTS %I.%I', current_schema(), v_stage.name);
            DELETE FROM stage s WHERE s.name = v_stage.name;
            v_dropped := v_dropped + 1;
        EXCEPTION
            WHEN lock_not_available THEN
                NULL;
        END;
    END LOOP;
    RETURN v_dropped;
END
$$;

REVOKE EXECUTE ON FUNCTION stage_clean FROM PUBLIC;

-- Makes a staging table for one part of a load, returns its name, and lets the caller COPY into it.
--
-- Called by loaders (in Python by fairqueue.spark.engine). run is what all parts of one attempt to load something have
-- in common: 32 hexadecimal digits. No two calls get the same table, so attempts at the same part don't meet. It is
-- unlogged: after a crash it is empty, which load_enter notices.
-- Locks: none that anybody waits for.
CREATE FUNCTION stage_create(run text, part integer) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
DECLARE
    v_name CONSTANT text := format('stage_%s_%s_%s', run, part, substr(md5(random()::text || clock_timestamp()), 1, 8));
    -- Who calls: this function runs as its owner, and what SET ROLE chose is not the session_user.
    v_caller CONSTANT text := coalesce(nullif(current_setting('role'), 'none'), session_user);
BEGIN
    IF run IS NULL OR run !~ '^[0-9a-f]{32}$' OR part IS NULL OR part < 0 THEN
        RAISE invalid_parameter_value USING
            MESSAGE = format('run must be 32 hexadecimal digits and part not negative, not %L and %s', run, part);
    END IF;
    EXECUTE format('CREATE UNLOGGED TABLE %I (
        queue text NOT NULL, channel text NOT NULL, key text, payload jsonb, body bytea, dequeue_at bigint,
        delay double precision, cost double precision, max_attempts integer, backoff double precision)
        WITH (autovacuum_enabled = off)', v_name);
    PERFORM table_close(format('%I', v_name)::regclass);
    EXECUTE format('GRANT INSERT ON %I TO %I', v_name, v_caller);
    INSERT INTO stage (name, run) VALUES (v_name, $1);
    RETURN v_name;
END
$$;

REVOKE EXECUTE ON FUNCTION stage_create FROM PUBLIC;

-- Gives up the staging tables of a run, and returns how many there were. They can't be entered any more, and are dropped,
-- now or, where somebody reads one as pg_dump does, by a later stage_clean.
--
-- Called by load_enter, and by loaders that give up. What has been entered stays.
-- Locks: see stage_clean. A task that still fills a table isn't waited for; its table is left to stage_clean.
CREATE FUNCTION stage_drop(run text) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
DECLARE
    v_given_up integer;
BEGIN
    UPDATE stage s SET run = '' WHERE s.run = $1;
    GET DIAGNOSTICS v_given_up = ROW_COUNT;
    IF v_given_up > 0 THEN
        PERFORM stage_clean('1000 years');
    END IF;
    RETURN v_given_up;
END
$$;

REVOKE EXECUTE ON FUNCTION stage_drop FROM PUBLIC;

-- A changed policy takes effect at the next dequeue.
CREATE TRIGGER channel_changed
AFTER INSERT OR DELETE OR UPDATE OF queue, name, weight, max_concurrency, release_interval_ms, burst, paused, resume_at
ON channel
FOR EACH ROW EXECUTE FUNCTION signal_channel();

-- The end of an earlier pause is not that of a new one.
CREATE TRIGGER channel_paused
BEFORE UPDATE OF paused ON channel
FOR EACH ROW EXECUTE FUNCTION pause_begin();

-- TRUNCATE takes policies away without a word to the other triggers.
CREATE TRIGGER channel_truncated
AFTER TRUNCATE ON channel
FOR EACH STATEMENT EXECUTE FUNCTION signal_truncated();

-- What users change of a message has to be as valid as what they enqueue. Leasing touches none of these columns.
CREATE TRIGGER message_edited
AFTER UPDATE OF queue, channel, key, payload, body, cost, max_attempts, backoff, created_at ON message
FOR EACH ROW EXECUTE FUNCTION message_edit();

-- Enqueueing, once a statement, so that bulk inserts and COPY cost one signal a channel.
CREATE TRIGGER message_enqueued
AFTER INSERT ON message
REFERENCING NEW TABLE AS new_messages
FOR EACH STATEMENT EXECUTE FUNCTION message_arrive();

-- However a message that counts toward a limit leaves the queue, completed, cancelled or deleted: there is room again. The
-- condition is read anew by each statement, so it is short; the function knows the rest.
CREATE TRIGGER message_freed
AFTER DELETE ON message
FOR EACH ROW
WHEN (OLD.counted IS NOT NULL)
EXECUTE FUNCTION signal_freed();

-- A lease that ended without completion, or a user's edit, may put a ready message before the head of its lane; and
-- whatever is changed of one that is planned, its row is another one then. Nor do dequeues know of a lease that a user
-- has shortened, or given. Leasing (leased_until, another attempt, and when) doesn't fire it. Each statement reads the
-- condition anew, so it is short: heartbeats are left to the function.
CREATE TRIGGER message_moved
AFTER UPDATE ON message
FOR EACH ROW
WHEN (NEW.leased_until IS NULL OR NEW.attempt = OLD.attempt OR NEW.leased_at IS NOT DISTINCT FROM OLD.leased_at)
EXECUTE FUNCTION signal_moved();

-- TRUNCATE takes leases away without a word to the other triggers.
CREATE TRIGGER message_truncated
AFTER TRUNCATE ON message
FOR EACH STATEMENT EXECUTE FUNCTION signal_truncated();

-- A changed policy takes effect at the next dequeue, which then goes through all lanes of the queue, if it is theirs.
CREATE TRIGGER queue_changed
AFTER INSERT OR DELETE OR UPDATE OF name, max_concurrency, paused, resume_at, channel_weight, channel_max_concurrency,
    channel_release_interval_ms, channel_burst
ON queue
FOR EACH ROW EXECUTE FUNCTION signal_queue();

-- The end of an earlier pause is not that of a new one.
CREATE TRIGGER queue_paused
BEFORE UPDATE OF paused ON queue
FOR EACH ROW EXECUTE FUNCTION pause_begin();

-- TRUNCATE takes policies away without a word to the other triggers.
CREATE TRIGGER queue_truncated
AFTER TRUNCATE ON queue
FOR EACH STATEMENT EXECUTE FUNCTION signal_truncated();
