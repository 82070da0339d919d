-- The leases that a caller names, (ids[i], attempts[i]), in the order of ids; n is the place in the lists.
--
-- Called by message_cancel, message_fail, message_defer and message_heartbeat, into whose statements it is expanded;
-- takes no lock. All of them, and message_complete, touch messages in the order of ids, so that two can't deadlock.
--
-- They look each one up by m.id BETWEEN l.id AND l.id. With =, a plan that was made when the table was nearly empty could
-- read all messages by the primary key and look for each of them here.
CREATE FUNCTION lease_list(ids bigint[], attempts integer[])
RETURNS TABLE (id bigint, attempt integer, n bigint)
LANGUAGE sql IMMUTABLE ROWS 100
AS $$
    SELECT l.id, l.attempt, l.n
    FROM unnest(ids, attempts) WITH ORDINALITY AS l (id, attempt, n)
    WHERE CASE WHEN cardinality(ids) = cardinality(attempts) THEN true ELSE lease_refuse(ids, attempts) END
    ORDER BY l.id;
$$;
