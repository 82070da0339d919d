-- The advisory lock of those who wait for work in a queue; to_hex of it is in the name of their notification channel.
--
-- Called by queue_listen, queue_unlisten and queue_notify, whose search_path says which schema it is about. It takes no
-- lock itself. The number is none of those of queue_key, whose locks are others'.
CREATE FUNCTION queue_wake(queue text) RETURNS bigint
LANGUAGE sql STABLE PARALLEL SAFE
RETURN hashtextextended(queue, hashtextextended(current_schema(), 720730));
