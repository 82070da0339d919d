-- One row a live message: ready, or leased to a worker. A finished message has no row here.
--
-- Users insert, dequeues lease (UPDATE), completions delete. A message is ready when leased_until is null; it is
-- served in the order (dequeue_at, id) of its channel and never before the database clock reaches dequeue_at.
CREATE TABLE message (
    id            bigint           GENERATED ALWAYS AS IDENTITY,
    queue         text             NOT NULL DEFAULT 'default',
    channel       text             NOT NULL,
    payload       jsonb,
    body          bytea,
    -- Unix time in milliseconds. Historic, zero or negative: priority inside the channel.
    dequeue_at    bigint           NOT NULL DEFAULT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint,
    -- How much of the channel's share this message uses up, in units that the application chooses.
    cost          double precision NOT NULL DEFAULT 1,
    -- How often it has been leased. With the id it is the fence: a lease is (id, attempt).
    attempt       integer          NOT NULL DEFAULT 0,
    leased_until  timestamptz,
    -- What a deferral saved for the next attempt, and what the last failure said.
    state         jsonb,
    error         text,
    created_at    timestamptz      NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT message_pkey PRIMARY KEY (id),
    CONSTRAINT message_queue_length CHECK (char_length(queue) BETWEEN 1 AND 255),
    CONSTRAINT message_channel_length CHECK (char_length(channel) BETWEEN 1 AND 255),
    CONSTRAINT message_cost_range CHECK (cost > 0 AND cost <= 1000000),
    CONSTRAINT message_payload_size CHECK (pg_column_size(payload) <= 67108864),
    CONSTRAINT message_body_size CHECK (octet_length(body) <= 67108864)
);

-- A channel's ready messages in their order: what a dequeue probes, from the lane's head on.
CREATE INDEX message_ready ON message (queue, channel, dequeue_at, id) WHERE leased_until IS NULL;

-- Leases by their end: what a dequeue looks at to find those that ran out.
CREATE INDEX message_leased ON message (queue, leased_until) WHERE leased_until IS NOT NULL;
