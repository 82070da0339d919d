-- However a message that counts toward a limit leaves the queue, completed, cancelled or deleted: there is room again.
CREATE TRIGGER message_freed
AFTER DELETE ON message
FOR EACH ROW
WHEN (OLD.counted IS NOT NULL AND OLD.leased_until IS NOT NULL)
EXECUTE FUNCTION signal_freed();
