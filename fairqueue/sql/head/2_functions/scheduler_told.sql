-- Whether one of the transactions that were under way when signals of a kind were last read has told something since.
--
-- Called by message_dequeue and scheduler_serve, into whose snapshot it looks; takes no lock. Who still is under way has
-- told nothing yet, however much it wrote. Each is looked for by itself: what lies between them has been read.
CREATE FUNCTION scheduler_told(queue text, is_urgent boolean, open xid8[]) RETURNS boolean
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN EXISTS (
        SELECT FROM unnest(open) AS o (xid)
        CROSS JOIN LATERAL (
            SELECT FROM signal s WHERE s.queue = $1 AND s.urgent = is_urgent AND s.xid = o.xid LIMIT 1) s
        WHERE pg_visible_in_snapshot(o.xid, pg_current_snapshot()));
END
$$;
