-- One row a finished message, append-only: the source for reports and pipelines.
--
-- The transaction id makes it a change feed: rows become visible in the order of commits, which is not the order of
-- ids, so a reader resumes from a transaction-id horizon and loses no late commit.
CREATE TABLE history (
    message_id   bigint           NOT NULL,
    queue        text             NOT NULL,
    channel      text             NOT NULL,
    outcome      text             NOT NULL,
    attempt      integer          NOT NULL,
    cost         double precision NOT NULL,
    error        text,
    created_at   timestamptz      NOT NULL,
    finished_at  timestamptz      NOT NULL DEFAULT clock_timestamp(),
    xid          xid8             NOT NULL DEFAULT pg_current_xact_id(),
    CONSTRAINT history_pkey PRIMARY KEY (finished_at, message_id)
) PARTITION BY RANGE (finished_at);

CREATE INDEX history_xid ON history (xid);
CREATE INDEX history_channel ON history (queue, channel, finished_at);
