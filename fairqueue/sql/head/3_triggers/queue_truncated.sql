-- TRUNCATE takes policies away without a word to the other triggers.
CREATE TRIGGER queue_truncated
AFTER TRUNCATE ON queue
FOR EACH STATEMENT EXECUTE FUNCTION signal_truncated();
