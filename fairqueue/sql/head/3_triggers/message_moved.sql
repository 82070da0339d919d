-- A lease that ended without completion, or a user's edit, may put a ready message before the head of its lane; and
-- whatever is changed of one that is planned, its row is another one then. Nor do dequeues know of a lease that a user
-- has shortened, or given. Leasing (leased_until, another attempt, and when) doesn't fire it. Each statement reads the
-- condition anew, so it is short: heartbeats are left to the function.
CREATE TRIGGER message_moved
AFTER UPDATE ON message
FOR EACH ROW
WHEN (NEW.leased_until IS NULL OR NEW.attempt = OLD.attempt OR NEW.leased_at IS NOT DISTINCT FROM OLD.leased_at)
EXECUTE FUNCTION signal_moved();
