-- A lease that ended without completion, or a user's edit, may put a ready message before the head of its lane.
-- Leasing itself (leased_until set) does not fire it.
CREATE TRIGGER message_moved
AFTER UPDATE OF queue, channel, dequeue_at, leased_until ON message
FOR EACH ROW
WHEN (NEW.leased_until IS NULL AND (OLD.leased_until IS NOT NULL OR OLD.queue <> NEW.queue
    OR OLD.channel <> NEW.channel OR OLD.dequeue_at <> NEW.dequeue_at))
EXECUTE FUNCTION signal_moved();
