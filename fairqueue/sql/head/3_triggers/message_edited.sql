-- What users change of a message has to be as valid as what they enqueue. Leasing touches none of these columns.
CREATE TRIGGER message_edited
AFTER UPDATE OF queue, channel, key, payload, body, cost, max_attempts, backoff, created_at ON message
FOR EACH ROW EXECUTE FUNCTION message_edit();
