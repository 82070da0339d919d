-- The end of an earlier pause is not that of a new one.
CREATE TRIGGER channel_paused
BEFORE UPDATE OF paused ON channel
FOR EACH ROW EXECUTE FUNCTION pause_begin();
