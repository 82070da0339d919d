-- A channel with a max_size takes in no more. By its name it comes before message_enqueued: the signal of a message
-- that is dropped finds nothing, and does no harm.
CREATE TRIGGER message_bounded
AFTER INSERT ON message
REFERENCING NEW TABLE AS new_messages
FOR EACH STATEMENT EXECUTE FUNCTION bound_enqueued();
