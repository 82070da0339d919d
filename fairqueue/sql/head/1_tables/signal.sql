-- News for the scheduler. What a row says depends on what it has:
--   dequeue_at and message_id   the channel may have something ready from that place on
--   counted                     a lease of the channel that was counted in that turn has ended
--   message_id and counted      ended, or will: message_id was held by somebody else when leases were counted
--   message_id                  its lease ends before the scheduler would look: a user has set leased_until
--   none of these               the policy of the channel changed; without a channel, that of all by their queue
--   dequeue_at, no channel      only what holds for the whole queue changed, its pause or its max_concurrency
--
-- Written by the triggers, append-only, in the writer's own transaction, so that enqueueing waits for nobody; and by
-- dequeues, for what is to be looked at again (scheduler_fold, scheduler_recount, scheduler_serve_shares).
-- Dequeues fold signals into lanes and delete them (scheduler_fold). The transaction id, not the order of arrival,
-- is what a fold resumes from: ids are given at insert but rows are seen at commit.
CREATE TABLE signal (
    queue       text COLLATE "C" NOT NULL,
    channel     text COLLATE "C",
    dequeue_at  bigint,
    message_id  bigint,
    counted     bigint,
    -- All but new messages: a flood of those must hide neither a new limit, nor the end of a lease, nor what comes back.
    urgent      boolean          NOT NULL,
    xid         xid8             NOT NULL DEFAULT pg_current_xact_id()
) WITH (autovacuum_vacuum_scale_factor = 0.05, vacuum_truncate = off, toast.vacuum_truncate = off);

-- It has no key: without this, a publication FOR ALL TABLES would have the server refuse a dequeue's DELETE.
ALTER TABLE signal REPLICA IDENTITY FULL;

CREATE INDEX signal_news ON signal (queue, urgent, xid);
