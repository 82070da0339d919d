-- However a message that counts toward a limit leaves the queue, completed, cancelled or deleted: there is room again. The
-- condition is read anew by each statement, so it is short; the function knows the rest.
CREATE TRIGGER message_freed
AFTER DELETE ON message
FOR EACH ROW
WHEN (OLD.counted IS NOT NULL)
EXECUTE FUNCTION signal_freed();
