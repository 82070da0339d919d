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
