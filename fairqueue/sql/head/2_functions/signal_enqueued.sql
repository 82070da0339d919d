-- Trigger function of message_enqueued: one signal for each channel of an INSERT, however many rows it has, and a
-- notification for each queue, if workers wait for one.
--
-- Locks: none that anybody waits for, but for notifications (queue_notify). It appends rows and reads no shared table,
-- so it adds no dependency that could fail a serializable transaction.
CREATE FUNCTION signal_enqueued() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
BEGIN
    INSERT INTO signal (queue, channel, dequeue_at, message_id, urgent)
    SELECT n.queue, n.channel, min(n.dequeue_at), min(n.id), false
    FROM new_messages n
    GROUP BY n.queue, n.channel;
    PERFORM queue_notify(q.queue) FROM (SELECT DISTINCT n.queue FROM new_messages n) q;
    RETURN NULL;
END
$$;

REVOKE EXECUTE ON FUNCTION signal_enqueued FROM PUBLIC;
