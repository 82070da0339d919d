-- How many of the messages that a statement has just put into a channel are beyond its max_size; 0 where it has none,
-- or 2147483647, which means none.
--
-- Called by message_arrive. Counted are the ready messages of the channel, scheduled ones included, as this transaction
-- sees them: what others have put in and not yet committed comes on top, so n open transactions that put in k each may
-- overshoot by n * k. No more than max_size + entered index entries are read; under an old snapshot, as many more as have
-- been served of the channel since.
-- Raises SQLSTATE QF001 instead where the channel's overflow is 'reject'.
-- Reads only, and takes no lock.
CREATE FUNCTION channel_surplus(queue text, channel text, entered bigint) RETURNS bigint
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET jit = off
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_channel CONSTANT text := $2;
    v_max_size bigint;
    v_ready bigint;
    v_overflow text;
BEGIN
    -- By the indexes that hold only what is bounded: see message_arrive.
    SELECT c.max_size INTO v_max_size FROM channel c
    WHERE ARRAY[c.queue, c.name] = ARRAY[v_queue, v_channel] AND c.max_size IS NOT NULL;
    IF NOT FOUND THEN
        SELECT q.channel_max_size INTO v_max_size FROM queue q
        WHERE ARRAY[q.name] = ARRAY[v_queue] AND q.channel_max_size IS NOT NULL;
    END IF;
    -- The greatest integer lifts the queue's default for one channel: counting up to it would read the whole backlog.
    IF coalesce(v_max_size, 2147483647) = 2147483647 THEN
        RETURN 0;
    END IF;
    SELECT count(*) INTO v_ready FROM (
        SELECT FROM message m
        WHERE m.queue = v_queue AND m.channel = v_channel AND m.leased_until IS NULL
        LIMIT v_max_size + entered) m;
    IF v_ready <= v_max_size THEN
        RETURN 0;
    END IF;
    v_overflow := coalesce(
        (SELECT c.overflow FROM channel c WHERE c.queue = v_queue AND c.name = v_channel),
        (SELECT q.channel_overflow FROM queue q WHERE q.name = v_queue),
        'reject');
    IF v_overflow = 'reject' THEN
        RAISE EXCEPTION USING
            ERRCODE = 'QF001',
            MESSAGE = format('channel %L of queue %L is full: its max_size is %s', v_channel, v_queue, v_max_size),
            HINT = 'Try again when some of its messages have been served, or raise max_size.';
    END IF;
    RETURN v_ready - v_max_size;
END
$$;
