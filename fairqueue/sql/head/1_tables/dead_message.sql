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
