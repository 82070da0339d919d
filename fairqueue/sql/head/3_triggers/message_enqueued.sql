-- Enqueueing, once a statement, so that bulk inserts and COPY cost one signal a channel.
CREATE TRIGGER message_enqueued
AFTER INSERT ON message
REFERENCING NEW TABLE AS new_messages
FOR EACH STATEMENT EXECUTE FUNCTION message_arrive();
