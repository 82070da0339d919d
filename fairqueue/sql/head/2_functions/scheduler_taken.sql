-- How many messages were taken from the plan between two places, as it is now, not as the calling statement sees it.
--
-- Called by message_dequeue; takes no lock.
CREATE FUNCTION scheduler_taken(queue text, turn bigint, after_place bigint, before_place bigint) RETURNS bigint
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN (
        SELECT coalesce(sum(cardinality(k.ids)), 0)
        FROM taken k
        WHERE k.queue = $1 AND k.turn = $2 AND k.place > $3 AND k.place < $4);
END
$$;
