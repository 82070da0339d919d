-- A lease that ended without completion, or a user's edit, may put a ready message before the head of its lane; and
-- whatever is changed of one that is planned, its row is another one then. Nor do dequeues know of a lease that a user
-- has shortened, or given. Leasing (leased_until set, another attempt) and heartbeats, which never shorten, don't fire it.
CREATE TRIGGER message_moved
AFTER UPDATE ON message
FOR EACH ROW
WHEN (NEW.leased_until IS NULL OR (NEW.attempt = OLD.attempt
    AND (OLD.leased_until IS NULL OR NEW.leased_until < OLD.leased_until)))
EXECUTE FUNCTION signal_moved();
