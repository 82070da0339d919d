-- Tells the scheduler that the policy of a queue changed, from what it was to what it is: rows of queue, or null for none.
--
-- Called by signal_queue. What is as it was costs nothing: it neither takes back a plan nor looks at all channels. Nor
-- does what holds for the whole queue, a pause or max_concurrency, which is to hold, and to end, at once, however many
-- channels there are: it has a signal of its own.
-- Locks: none that anybody waits for, but for notifications (queue_notify); it appends rows.
CREATE FUNCTION signal_policy(name text, before queue, after queue) RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    -- A queue without a row has the defaults of one.
    IF ROW(coalesce(before.channel_weight, 1), before.channel_max_concurrency,
            coalesce(before.channel_release_interval_ms, 0), coalesce(before.channel_burst, 1))
        IS DISTINCT FROM ROW(coalesce(after.channel_weight, 1), after.channel_max_concurrency,
            coalesce(after.channel_release_interval_ms, 0), coalesce(after.channel_burst, 1))
    THEN
        INSERT INTO signal (queue, urgent) VALUES (name, true);
    ELSIF ROW(before.max_concurrency, paused_until(before.paused, before.resume_at))
        IS DISTINCT FROM ROW(after.max_concurrency, paused_until(after.paused, after.resume_at))
    THEN
        INSERT INTO signal (queue, dequeue_at, urgent) VALUES (name, 0, true);
    ELSE
        RETURN;
    END IF;
    PERFORM queue_notify(name);
END
$$;
