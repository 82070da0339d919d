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
