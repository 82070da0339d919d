-- Trigger function of message_enqueued: what an INSERT into message entails, however many rows it has.
--
-- The statement fails if one of them isn't valid. One signal for each channel, for the scheduler; one notification for
-- each queue that workers wait for; and a channel with a max_size takes in no more: with overflow 'reject' the statement
-- fails (see channel_surplus), with 'drop' those of its messages that come last are taken out again, which their history
-- says. A message that has been leased before is one put back from the dead: it is never refused, as those that fail or
-- are deferred aren't.
--
-- Locks: none that anybody waits for, but for notifications (queue_notify); with overflow 'drop' also history, as a
-- completion does. It appends rows. Whether a channel is
-- bounded is looked up in two indexes that hold only what is, so that enqueueing elsewhere reads nothing that others
-- write, and adds no dependency that could fail a serializable transaction. They are on arrays so that no other index
-- could be taken for them.
CREATE FUNCTION message_arrive() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET enable_seqscan = off
AS $$
DECLARE
    v_queue text;
    v_last_queue text;
    v_queues text[];
    v_channel text;
    v_last_channel text;
    v_dequeue_at bigint;
    v_id bigint;
    v_urgent boolean;
    v_leased boolean;
    v_valid boolean;
    v_bounded boolean;
    v_idle boolean;
    v_full record;
BEGIN
    SELECT min(n.queue), max(n.queue), min(n.channel), max(n.channel), min(n.dequeue_at), min(n.id),
        bool_or(n.attempt > 0), bool_or(n.leased_until IS NOT NULL),
        bool_and(message_valid(n.queue, n.channel, n.key, n.payload, n.body, n.cost, n.max_attempts, n.backoff,
            n.created_at, n.first_leased_at))
    INTO v_queue, v_last_queue, v_channel, v_last_channel, v_dequeue_at, v_id, v_urgent, v_leased, v_valid
    FROM new_messages n;
    IF NOT v_valid THEN
        PERFORM message_refuse(n.queue, n.channel, n.key, n.payload, n.body, n.cost, n.max_attempts, n.backoff,
            n.created_at, n.first_leased_at)
        FROM new_messages n
        WHERE NOT message_valid(n.queue, n.channel, n.key, n.payload, n.body, n.cost, n.max_attempts, n.backoff,
            n.created_at, n.first_leased_at)
        LIMIT 1;
    END IF;

    IF v_queue = v_last_queue AND v_channel = v_last_channel THEN
        -- The same as below for a single channel, in half the time.
        INSERT INTO signal (queue, channel, dequeue_at, message_id, urgent)
        VALUES (v_queue, v_channel, v_dequeue_at, v_id, v_urgent)
        RETURNING coalesce(
            (SELECT true FROM channel c
             WHERE ARRAY[c.queue, c.name] = ARRAY[v_queue, v_channel] AND c.max_size IS NOT NULL),
            (SELECT true FROM queue q WHERE ARRAY[q.name] = ARRAY[v_queue] AND q.channel_max_size IS NOT NULL),
            false) INTO v_bounded;
        v_idle := queue_notify(v_queue);  -- assigned, as PERFORM would run a query for it
    ELSE
        WITH entered AS MATERIALIZED (
            SELECT n.queue, n.channel, min(n.dequeue_at) AS dequeue_at, min(n.id) AS id,
                bool_or(n.attempt > 0) AS urgent
            FROM new_messages n
            GROUP BY n.queue, n.channel
        ), told AS (
            INSERT INTO signal (queue, channel, dequeue_at, message_id, urgent)
            SELECT e.queue, e.channel, e.dequeue_at, e.id, e.urgent FROM entered e
        )
        -- Scalar subqueries, as EXISTS might be answered by hashing all that is bounded.
        SELECT array_agg(DISTINCT e.queue), bool_or(coalesce(
            (SELECT true FROM channel c
             WHERE ARRAY[c.queue, c.name] = ARRAY[e.queue, e.channel] AND c.max_size IS NOT NULL),
            (SELECT true FROM queue q WHERE ARRAY[q.name] = ARRAY[e.queue] AND q.channel_max_size IS NOT NULL),
            false)) INTO v_queues, v_bounded
        FROM entered e;
        PERFORM queue_notify(q.name) FROM unnest(v_queues) AS q (name);
    END IF;
    IF v_leased THEN
        -- Copied from elsewhere: when it ends is news to the scheduler, and nobody has counted it here.
        INSERT INTO signal (queue, message_id, urgent)
        SELECT n.queue, n.id, true FROM new_messages n WHERE n.leased_until IS NOT NULL;
        UPDATE message m SET counted = NULL
        WHERE m.id = ANY (ARRAY(
            SELECT n.id FROM new_messages n WHERE n.leased_until IS NOT NULL AND n.counted IS NOT NULL));
    END IF;
    IF v_bounded THEN
        FOR v_full IN
            SELECT e.ids, channel_surplus(e.queue, e.channel, e.entered) AS surplus
            FROM (
                SELECT n.queue, n.channel, count(*) AS entered,
                    array_agg(n.id ORDER BY n.dequeue_at DESC, n.id DESC) AS ids
                FROM new_messages n
                WHERE n.attempt = 0
                GROUP BY n.queue, n.channel) e
        LOOP
            IF v_full.surplus > 0 THEN
                PERFORM message_finish(v_full.ids[:v_full.surplus], 'dropped', 'the channel was full');
            END IF;
        END LOOP;
    END IF;
    RETURN NULL;
END
$$;

REVOKE EXECUTE ON FUNCTION message_arrive FROM PUBLIC;
