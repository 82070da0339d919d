-- Whether the planned messages that a dequeue passed over, between two places, are those that others have taken.
--
-- Called by message_dequeue, which has a share in the turn, where it passed over some. Those that others are about to
-- take, or have just taken, count too, where there are others. Else one is gone, or a user holds it, and the plan is no
-- longer right.
-- Locks: the queue's turn, to see whether anybody else has a share. As others would wait for it until the end of the
-- transaction, it is the session's, and given up at once: in one expression, which nothing interrupts.
CREATE FUNCTION scheduler_passed(queue text, turn bigint, after_place bigint, before_place bigint, passed bigint)
RETURNS boolean
-- Sees what is taken as it is now, not as the calling statement does.
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
AS $$
DECLARE
    v_key CONSTANT bigint := queue_key($1);
BEGIN
    IF NOT (pg_try_advisory_lock(v_key) AND pg_advisory_unlock(v_key)) THEN
        RETURN true;
    END IF;
    RETURN passed = (
        SELECT coalesce(sum(cardinality(k.ids)), 0)
        FROM taken k
        WHERE k.queue = $1 AND k.turn = $2 AND k.place > after_place AND k.place < before_place);
END
$$;
