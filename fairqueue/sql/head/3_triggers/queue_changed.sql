-- A changed policy takes effect at the next dequeue, which then goes through all lanes of the queue, if it is theirs.
CREATE TRIGGER queue_changed
AFTER INSERT OR DELETE OR UPDATE OF name, max_concurrency, paused, resume_at, channel_weight, channel_max_concurrency,
    channel_release_interval_ms, channel_burst
ON queue
FOR EACH ROW EXECUTE FUNCTION signal_queue();
