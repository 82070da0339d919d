-- How many rows the history of a day has, in UTC, and a checksum of them that doesn't depend on their order.
--
-- Called by history_release, and by whoever compares an archive with the history. The checksum is the sum over the rows
-- of the first 60 bits of md5 of their columns: numbers, times (microseconds since 2000-01-01; none is the least number)
-- and the lengths of the texts (none is -1) in 8 bytes each, big-endian, then the texts in UTF-8. In Python the same is
-- fairqueue.spark.engine.digests.
-- Locks: none.
CREATE FUNCTION history_digest(day date) RETURNS TABLE (rows bigint, checksum numeric)
LANGUAGE sql STABLE PARALLEL SAFE
SET search_path FROM CURRENT
AS $$
    SELECT count(*), coalesce(sum(('x' || left(md5(
            int8send(h.message_id) || int8send(h.attempt) || float8send(h.cost) || int8send(h.dequeue_at)
            || timestamptz_send(h.created_at) || timestamptz_send(coalesce(h.first_leased_at, '-infinity'))
            || timestamptz_send(coalesce(h.leased_at, '-infinity')) || timestamptz_send(h.finished_at)
            || xid8send(h.xid)
            || int8send(octet_length(t.queue)) || int8send(octet_length(t.channel))
            || int8send(coalesce(octet_length(t.key), -1)) || int8send(octet_length(t.outcome))
            || int8send(coalesce(octet_length(t.error), -1)) || int8send(coalesce(octet_length(t.worker), -1))
            || t.queue || t.channel || coalesce(t.key, '') || t.outcome || coalesce(t.error, '')
            || coalesce(t.worker, '')), 15))::bit(60)::bigint), 0)
    FROM history h
    CROSS JOIN LATERAL (SELECT convert_to(h.queue, 'UTF8') AS queue, convert_to(h.channel, 'UTF8') AS channel,
        convert_to(h.key, 'UTF8') AS key, convert_to(h.outcome, 'UTF8') AS outcome,
        convert_to(h.error, 'UTF8') AS error, convert_to(h.worker, 'UTF8') AS worker) t
    WHERE h.finished_at >= day::timestamp AT TIME ZONE 'UTC' AND h.finished_at < (day + 1)::timestamp AT TIME ZONE 'UTC'
$$;

REVOKE EXECUTE ON FUNCTION history_digest FROM PUBLIC;
