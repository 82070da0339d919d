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
