-- What a channel's limits count stays in the channel until it is over.
CREATE TRIGGER message_stays
BEFORE UPDATE OF queue, channel ON message
FOR EACH ROW
WHEN (OLD.leased_until IS NOT NULL AND (OLD.queue <> NEW.queue OR OLD.channel <> NEW.channel))
EXECUTE FUNCTION refuse_move();
