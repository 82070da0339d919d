-- Whether the planned messages that a dequeue passed over, between two places, are those that others have taken.
--
-- Called by message_dequeue, which has a share in the turn, where it passed over some. Those that others are about to
-- take, or have just taken, count too, where there are others. Else one is gone, or a user holds it, and the plan is no
-- longer right.
-- Locks: the queue's turn, where nobody else has a share.
CREATE FUNCTION scheduler_passed(queue text, turn bigint, after_place bigint, before_place bigint, passed bigint)
RETURNS boolean
-- Each statement sees what is taken as it is now, not as the calling one does.
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
AS $$
BEGIN
    FOR v_look IN 1..2 LOOP
        IF passed = (
            SELECT coalesce(sum(cardinality(k.ids)), 0)
            FROM taken k
            WHERE k.queue = $1 AND k.turn = $2 AND k.place > after_place AND k.place < before_place)
        THEN
            RETURN true;
        END IF;
        -- Whoever has the turn looks once more: others may have committed since.
        EXIT WHEN v_look = 2;
        IF NOT pg_try_advisory_xact_lock(queue_key($1)) THEN
            RETURN true;
        END IF;
    END LOOP;
    RETURN false;
END
$$;
