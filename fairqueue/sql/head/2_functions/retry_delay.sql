-- How many seconds a message waits before its next attempt, after so many that failed.
--
-- Called by message_fail and scheduler_reclaim; takes no lock. The backoff, of the message or else of its queue, doubles
-- with each failure, up to the queue's max_backoff, and is shortened at random by up to a half: what failed together
-- doesn't come back together. 2^60 seconds are beyond every max_backoff already, and no overflow.
CREATE FUNCTION retry_delay(
    failures bigint, backoff double precision, queue_backoff double precision, max_backoff double precision
) RETURNS double precision
LANGUAGE sql VOLATILE
RETURN (0.5 + random() / 2) * least(coalesce(max_backoff, 3600),
    coalesce(backoff, queue_backoff, 1) * power(2, least(greatest(failures - 1, 0), 60)));
