-- TRUNCATE takes leases away without a word to the other triggers.
CREATE TRIGGER message_truncated
AFTER TRUNCATE ON message
FOR EACH STATEMENT EXECUTE FUNCTION signal_truncated();
