-- Moves the virtual time on to the last message that was taken from the plan without the turn.
--
-- Called by scheduler_serve and queue_repair, within the turn, which nobody who takes from the plan has at the same
-- time: all that was taken is committed, or rolled back. Where one of those that were passed over is left, because it
-- was rolled back, or was not there to be taken, the plan is taken back: it was made as if that one came first.
-- A channel that becomes active then starts where the last message would have, had the same work been done in the order
-- of what was planned and is there.
-- Locks: the rotation of the queue, and the rows of taken that it deletes, which nobody else writes; and as
-- scheduler_unplan.
--
-- Returns the rotation as it is now.
CREATE FUNCTION scheduler_settle(queue text) RETURNS rotation
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_messages integer;
    v_last bigint;
    v_tag bigint;
    v_since bigint;
    v_left_tag bigint;
    v_left_since bigint;
    r rotation;
BEGIN
    SELECT t.* INTO r FROM rotation t WHERE t.queue = v_queue ORDER BY t.era DESC LIMIT 1;
    SELECT sum(cardinality(k.ids)), max(k.place) INTO v_messages, v_last
    FROM taken k WHERE k.queue = v_queue AND k.turn = r.turn;
    SELECT p.tags[v_last - p.place + 1], p.sinces[v_last - p.place + 1] INTO v_tag, v_since
    FROM plan p
    WHERE p.queue = v_queue AND p.place <= v_last AND p.place > v_last - 32
    ORDER BY p.place DESC LIMIT 1;
    IF v_last - r.place = v_messages THEN
        r.place := v_last;
        r.ahead := least(r.ahead + v_messages, plan_most());
    ELSE
        SELECT u.tag, u.since INTO v_tag, v_since FROM scheduler_unplan(v_queue) u;
        r.place := r.planned;
        r.ahead := 0;
        r.plan_at := plan_after();
        -- Lanes of which something was passed over may be behind that; who arrives isn't to be.
        r.arrival_tag := greatest(r.arrival_tag, v_tag);
        SELECT l.tag, l.since - 1 INTO v_left_tag, v_left_since
        FROM lane l
        WHERE l.queue = v_queue AND l.due = 0 AND (l.tag, l.since) > (r.vtime, r.vsince)
            AND (l.tag, l.since) <= (v_tag, v_since)
        ORDER BY l.tag, l.since LIMIT 1;
    END IF;
    -- Unless somebody has damaged the plan, there is a last one.
    r.vtime := coalesce(v_left_tag, v_tag, r.vtime);
    r.vsince := coalesce(v_left_since, v_since, r.vsince);
    DELETE FROM taken k WHERE k.queue = v_queue AND k.turn = r.turn;
    UPDATE rotation t
    SET vtime = r.vtime, vsince = r.vsince, arrival_tag = r.arrival_tag, place = r.place, planned = r.planned,
        ahead = r.ahead, plan_at = r.plan_at, lane_tag = NULL, lane_since = NULL
    WHERE t.queue = v_queue AND t.era = r.era;
    RETURN r;
END
$$;
