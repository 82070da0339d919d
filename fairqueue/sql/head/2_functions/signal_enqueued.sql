-- Trigger function of message_enqueued: one signal for each channel of an INSERT, however many rows it has.
--
-- Locks: none that anybody waits for. It appends rows and reads no shared table, so it adds no dependency that could
-- fail a serializable transaction.
CREATE FUNCTION signal_enqueued() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
BEGIN
    INSERT INTO signal (queue, channel, dequeue_at, message_id, urgent)
    SELECT n.queue, n.channel, min(n.dequeue_at), min(n.id), false
    FROM new_messages n
    GROUP BY n.queue, n.channel;
    RETURN NULL;
END
$$;

REVOKE EXECUTE ON FUNCTION signal_enqueued FROM PUBLIC;
