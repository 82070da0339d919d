-- Policy of a channel: what an operator sets for one tenant.
--
-- Written by users, read by the scheduler. A row is optional: without one the defaults apply, so a channel
-- costs nothing to have. A change is told to the scheduler by the trigger channel_changed.
CREATE TABLE channel (
    queue       text             NOT NULL DEFAULT 'default',
    name        text             NOT NULL,
    weight      double precision NOT NULL DEFAULT 1,
    created_at  timestamptz      NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT channel_pkey PRIMARY KEY (queue, name),
    CONSTRAINT channel_queue_length CHECK (char_length(queue) BETWEEN 1 AND 255),
    CONSTRAINT channel_name_length CHECK (char_length(name) BETWEEN 1 AND 255),
    -- NaN sorts above every number, so the upper bound refuses it too.
    CONSTRAINT channel_weight_range CHECK (weight >= 0.01 AND weight <= 1000)
);
