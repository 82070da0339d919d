-- A changed policy takes effect at the next dequeue.
CREATE TRIGGER channel_changed
AFTER INSERT OR DELETE OR UPDATE OF queue, name, weight, max_concurrency, release_interval_ms, burst, paused, resume_at
ON channel
FOR EACH ROW EXECUTE FUNCTION signal_channel();
