-- Policy of a queue: a namespace of channels that workers subscribe to.
--
-- Written by users; a row is optional. Nothing on the way of a message reads it yet.
CREATE TABLE queue (
    name        text        NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT queue_pkey PRIMARY KEY (name),
    CONSTRAINT queue_name_length CHECK (char_length(name) BETWEEN 1 AND 255)
);
