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
