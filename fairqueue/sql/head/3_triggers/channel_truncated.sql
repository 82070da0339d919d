-- TRUNCATE takes policies away without a word to the other triggers.
CREATE TRIGGER channel_truncated
AFTER TRUNCATE ON channel
FOR EACH STATEMENT EXECUTE FUNCTION signal_truncated();
