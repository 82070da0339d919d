-- A lease that ended without completion, or a user's edit, may put a ready message before the head of its lane; and
-- whatever is changed of one that is planned, its row is another one then. Leasing (leased_until set) does not fire it.
CREATE TRIGGER message_moved
AFTER UPDATE ON message
FOR EACH ROW
WHEN (NEW.leased_until IS NULL)
EXECUTE FUNCTION signal_moved();
