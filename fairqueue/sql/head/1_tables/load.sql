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
