-- The place up to which all that is planned was taken, beyond one for which that is known.
--
-- Called by message_dequeue; takes no lock. Where those who took something went past each other, what each took has to
-- be added up: where that comes to as many as there are places, nothing is missing.
CREATE FUNCTION scheduler_taken_upto(queue text, turn bigint, upto bigint) RETURNS bigint
LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN (
        SELECT coalesce(max(x.place) FILTER (WHERE x.place = $3 + x.messages), $3)
        FROM (
            SELECT k.place, sum(cardinality(k.ids)) OVER (ORDER BY k.place ROWS UNBOUNDED PRECEDING) AS messages
            FROM taken k WHERE k.queue = $1 AND k.turn = $2 AND k.place > $3) x);
END
$$;
