-- The end of an earlier pause is not that of a new one.
CREATE TRIGGER queue_paused
BEFORE UPDATE OF paused ON queue
FOR EACH ROW EXECUTE FUNCTION pause_begin();
