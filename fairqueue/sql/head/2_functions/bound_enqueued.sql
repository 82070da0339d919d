-- Trigger function of message_bounded: keeps channels with a max_size from taking in more, once a statement.
--
-- With overflow 'reject' the statement fails (see channel_surplus). With 'drop' those of its messages that come last are
-- taken out again, which their history says. A message that has been leased before is one put back from the dead: it is
-- never refused, as those that fail or are deferred aren't.
-- Locks: none. Whether a channel is bounded is looked up in two indexes that hold only what is, so that enqueueing
-- elsewhere reads nothing that others write, and adds no dependency that could fail a serializable transaction. They
-- are on arrays so that no other index could be taken for them.
CREATE FUNCTION bound_enqueued() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET enable_seqscan = off
AS $$
DECLARE
    v_full record;
BEGIN
    -- Scalar subqueries, as EXISTS might be answered by hashing all that is bounded.
    IF NOT EXISTS (
        SELECT FROM (SELECT DISTINCT n.queue, n.channel FROM new_messages n) e
        WHERE coalesce(
            (SELECT true FROM channel c
             WHERE ARRAY[c.queue, c.name] = ARRAY[e.queue, e.channel] AND c.max_size IS NOT NULL),
            (SELECT true FROM queue q WHERE ARRAY[q.name] = ARRAY[e.queue] AND q.channel_max_size IS NOT NULL),
            false))
    THEN
        RETURN NULL;
    END IF;
    FOR v_full IN
        SELECT e.queue, e.channel, channel_surplus(e.queue, e.channel, e.entered) AS surplus
        FROM (
            SELECT n.queue, n.channel, count(*) AS entered FROM new_messages n
            WHERE n.attempt = 0
            GROUP BY n.queue, n.channel) e
    LOOP
        CONTINUE WHEN v_full.surplus = 0;
        PERFORM message_finish(array_agg(l.id), 'dropped', 'the channel was full')
        FROM (
            SELECT n.id FROM new_messages n
            WHERE n.queue = v_full.queue AND n.channel = v_full.channel AND n.attempt = 0
            ORDER BY n.dequeue_at DESC, n.id DESC
            LIMIT v_full.surplus) l;
    END LOOP;
    RETURN NULL;
END
$$;

REVOKE EXECUTE ON FUNCTION bound_enqueued FROM PUBLIC;
