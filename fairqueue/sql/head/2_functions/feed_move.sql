-- Notes that a feed has read all rows of history before (xid, message_id). Never goes back.
--
-- Called by readers that follow the history, when what they read is safe elsewhere. From the first call on, history
-- keeps what the feed hasn't read, however old it is: call feed_forget for one that isn't read any more.
-- Locks: the row of the feed.
CREATE FUNCTION feed_move(name text, xid xid8, message_id bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
BEGIN
    IF name IS NULL OR char_length(name) NOT BETWEEN 1 AND 255 THEN
        RAISE invalid_parameter_value USING
            MESSAGE = format('name of a feed must have 1 to 255 characters, not %s', coalesce(char_length(name), 0));
    END IF;
    INSERT INTO feed AS f (name, xid, message_id) VALUES ($1, $2, $3)
    ON CONFLICT ON CONSTRAINT feed_pkey DO UPDATE
    SET xid = excluded.xid, message_id = excluded.message_id, moved_at = excluded.moved_at
    WHERE (f.xid, f.message_id) < (excluded.xid, excluded.message_id);
END
$$;

REVOKE EXECUTE ON FUNCTION feed_move FROM PUBLIC;
