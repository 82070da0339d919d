-- News for the scheduler: "channel c may have something ready from (dequeue_at, message_id) on", or, with both null,
-- "the policy of channel c changed".
--
-- Written by the triggers, append-only, in the writer's own transaction, so that enqueueing waits for nobody.
-- Dequeues fold signals into lanes and delete them (scheduler_fold). The transaction id, not the order of arrival,
-- is what a fold resumes from: ids are given at insert but rows are seen at commit.
CREATE TABLE signal (
    queue       text   NOT NULL,
    channel     text   NOT NULL,
    dequeue_at  bigint,
    message_id  bigint,
    xid         xid8   NOT NULL DEFAULT pg_current_xact_id()
) WITH (autovacuum_vacuum_scale_factor = 0.05);

CREATE INDEX signal_news ON signal (queue, xid);
